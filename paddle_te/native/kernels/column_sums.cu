// The sum of a matrix's rows: the gradient of a bias whose GEMM is in fp8 with block scaling, for which TE's casts have
// no sum in passing.
//
// Compiled at run time by NVRTC. Every parameter is 8 bytes (see shim/launch.h).

#include "types.cuh"

constexpr int kVectors = 4;  // of a row that a block reads: 64 bytes

// out[c] = x[0, c] + ... + x[rows - 1, c] for the columns of this block's vectors, summed in float32. Each thread sums
// one vector of every few rows, and what the threads have is added in shared memory. cols is a multiple of
// Vector::size.
template <class T>
__device__ void column_sums(const T* x, T* out, long long rows, long long cols) {
  extern __shared__ float sums[];
  constexpr int size = Vector<T>::size, width = kVectors * size;
  const int vector = threadIdx.x % kVectors, first = threadIdx.x / kVectors, step = blockDim.x / kVectors;
  const long long start = static_cast<long long>(blockIdx.x) * width, column = start + vector * size;
  float sum[size] = {};
  if (column < cols) {
#pragma unroll 4
    for (long long row = first; row < rows; row += step) {
      const Vector<T> values = *reinterpret_cast<const Vector<T>*>(x + row * cols + column);
      for (int j = 0; j < size; j++) sum[j] += to_float(values.x[j]);
    }
  }
  for (int j = 0; j < size; j++) sums[first * width + vector * size + j] = sum[j];
  __syncthreads();
  if (threadIdx.x < width && start + threadIdx.x < cols) {
    float total = 0;
    for (int i = 0; i < step; i++) total += sums[i * width + threadIdx.x];
    from_float(total, out[start + threadIdx.x]);
  }
}

#define COLUMN_SUMS(T)                                                                             \
  extern "C" __global__ void column_sums_##T(const T* x, T* out, long long rows, long long cols) { \
    column_sums(x, out, rows, cols);                                                               \
  }
COLUMN_SUMS(bfloat16)
COLUMN_SUMS(float16)
COLUMN_SUMS(float)
