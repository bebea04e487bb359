// How a loop runs: as a kernel under nvcc, as a plain loop under g++. Loops are written once, as functors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "../runtime.h"
#include "types.h"

#ifdef __CUDACC__
#include <cuda_runtime.h>
#endif

namespace nvgpu::math {

#ifdef __CUDACC__

constexpr int kThreads = 256;

inline void CheckLaunch() {
  const cudaError_t code = cudaGetLastError();
  if (code != cudaSuccess) throw std::runtime_error(std::string("nvgpu: kernel launch: ") + cudaGetErrorString(code));
}

template <typename Function>
__global__ void __launch_bounds__(kThreads) EachKernel(int64_t count, Function function) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) function(i);
}

// function(i) for every i < count.
template <typename Function>
void ForEach(Stream stream, int64_t count, Function function) {
  if (count == 0) return;
  const int64_t blocks = std::min<int64_t>((count + kThreads - 1) / kThreads, 1 << 20);
  EachKernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(count, function);
  CheckLaunch();
}

// The threads that work on one row together.
struct Team {
  // function(i) for every i < count, spread over the threads.
  template <typename Function>
  __device__ void ForEach(int64_t count, Function function) const {
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x) function(i);
  }
  template <typename Function>
  __device__ void Once(Function function) const {
    if (threadIdx.x == 0) function();
  }
  // combine over value(i), known to every thread afterwards.
  template <typename T, typename Value, typename Combine>
  __device__ T Reduce(int64_t count, T identity, Value value, Combine combine) const {
    __shared__ alignas(16) unsigned char storage[sizeof(T) * 32];
    T* shared = reinterpret_cast<T*>(storage);
    T result = identity;
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x) result = combine(result, value(i));
    for (int offset = 16; offset > 0; offset /= 2) result = combine(result, Shuffle(result, offset));
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = result;
    __syncthreads();
    result = shared[0];
    for (int warp = 1; warp < kThreads / 32; ++warp) result = combine(result, shared[warp]);
    __syncthreads();
    return result;
  }

 private:
  template <typename T>
  __device__ static T Shuffle(T value, int offset) {
    if constexpr (sizeof(T) <= 8 && std::is_arithmetic_v<T>) {
      return __shfl_xor_sync(0xffffffffu, value, offset);
    } else {
      static_assert(sizeof(T) % 4 == 0);
      T other;
      for (size_t word = 0; word < sizeof(T) / 4; ++word) {
        reinterpret_cast<uint32_t*>(&other)[word] =
            __shfl_xor_sync(0xffffffffu, reinterpret_cast<uint32_t*>(&value)[word], offset);
      }
      return other;
    }
  }
};

template <typename Function>
__global__ void __launch_bounds__(kThreads) RowKernel(int64_t rows, Function function) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) function(Team(), row);
}

// function(team, row) for every row.
template <typename Function>
void ForEachRow(Stream stream, int64_t rows, Function function) {
  if (rows == 0) return;
  RowKernel<<<std::min<int64_t>(rows, 1 << 20), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(rows, function);
  CheckLaunch();
}

// What sums of float32 are kept in.
template <typename T>
using Sum = Compute<T>;
constexpr int64_t kParallel = 132 * 8;  // teams that fill a large GPU

#else

template <typename Function>
void ForEach(Stream stream, int64_t count, Function function) {
  runtime::Synchronize(stream);
  for (int64_t i = 0; i < count; ++i) function(i);
}

struct Team {
  template <typename Function>
  void ForEach(int64_t count, Function function) const {
    for (int64_t i = 0; i < count; ++i) function(i);
  }
  template <typename Function>
  void Once(Function function) const {
    function();
  }
  template <typename T, typename Value, typename Combine>
  T Reduce(int64_t count, T identity, Value value, Combine combine) const {
    T result = identity;
    for (int64_t i = 0; i < count; ++i) result = combine(result, value(i));
    return result;
  }
};

template <typename Function>
void ForEachRow(Stream stream, int64_t rows, Function function) {
  runtime::Synchronize(stream);
  for (int64_t row = 0; row < rows; ++row) function(Team(), row);
}

// One loop adds thousands of numbers in a row, which float32 would round too often.
template <typename T>
using Sum = std::conditional_t<std::is_same_v<Compute<T>, float>, double, Compute<T>>;
constexpr int64_t kParallel = 1;

#endif

struct Plus {
  template <typename T>
  NVGPU_FN T operator()(T a, T b) const {
    return a + b;
  }
};
struct Larger {
  template <typename T>
  NVGPU_FN T operator()(T a, T b) const {
    return a > b || a != a ? a : b;  // a NaN wins
  }
};
struct Smaller {
  template <typename T>
  NVGPU_FN T operator()(T a, T b) const {
    return a < b || a != a ? a : b;
  }
};

}  // namespace nvgpu::math
