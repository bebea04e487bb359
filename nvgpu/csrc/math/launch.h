// How a loop runs: as a kernel under nvcc, as a plain loop under g++. Loops are written once, as functors.
//
// Loops that the memory's speed bounds move packs, 16 bytes an instruction, and several of them before the first is
// used. Such a loop is a functor with two members: Load<N>(i) reads what the elements i to i + N - 1 need, Store<N>(i,
// loaded) computes and writes. N is the loop's pack, or 1 for the elements that fill none.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../runtime.h"
#include "types.h"

#ifdef __CUDACC__
#include <cuda_runtime.h>
#endif

namespace nvgpu::math {

template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};
// The elements of a pack where these types go together: 16 bytes of the widest.
template <typename... T>
constexpr int kPack = 16 / std::max({sizeof(T)...});

template <int N, typename T>
NVGPU_FN Pack<T, N> LoadPack(const T* from) {
  return *reinterpret_cast<const Pack<T, N>*>(from);
}
template <int N, typename T>
NVGPU_FN void StorePack(T* to, const Pack<T, N>& pack) {
#ifdef __CUDA_ARCH__  // nvcc stores some packs in pieces
  if constexpr (sizeof(pack) == 16) *reinterpret_cast<uint4*>(to) = BitCast<uint4>(pack);
  if constexpr (sizeof(pack) == 8) *reinterpret_cast<uint2*>(to) = BitCast<uint2>(pack);
  if constexpr (sizeof(pack) != 16 && sizeof(pack) != 8) *reinterpret_cast<Pack<T, N>*>(to) = pack;
#else
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
#endif
}
template <typename... T>
NVGPU_FN bool Aligned(const T*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) | ...) & 15) == 0;
}

// K arrays of one type that are read together.
template <typename T, int K>
struct Inputs {
  const T* in[K];

  template <int N>
  struct Loaded {
    Pack<T, N> in[K];
  };
  template <int N>
  NVGPU_FN Loaded<N> Load(int64_t i) const {
    Loaded<N> loaded;
    for (int k = 0; k < K; ++k) loaded.in[k] = LoadPack<N>(in[k] + i);
    return loaded;
  }
  NVGPU_FN bool Dense() const {
    bool dense = true;
    for (int k = 0; k < K; ++k) dense = dense && Aligned(in[k]);
    return dense;
  }
};

// out[i] = function(i, in[0][i], in[1][i]...)
template <typename Out, typename In, int K, typename Function>
struct MapLoop : Inputs<In, K> {
  Out* out;
  Function function;
  static constexpr int kWidth = kPack<Out, In>;

  NVGPU_FN MapLoop(Out* out, Inputs<In, K> in, Function function) : Inputs<In, K>(in), out(out), function(function) {}
  NVGPU_FN bool Dense() const { return Inputs<In, K>::Dense() && Aligned(out); }
  template <int N, typename Loaded>
  NVGPU_FN void Store(int64_t i, const Loaded& loaded) const {
    Pack<Out, N> result;
    for (int n = 0; n < N; ++n) {
      if constexpr (K == 1) result.at[n] = function(i + n, loaded.in[0].at[n]);
      if constexpr (K == 2) result.at[n] = function(i + n, loaded.in[0].at[n], loaded.in[1].at[n]);
      if constexpr (K == 3) {
        result.at[n] = function(i + n, loaded.in[0].at[n], loaded.in[1].at[n], loaded.in[2].at[n]);
      }
    }
    StorePack(out + i, result);
  }
};

// add(sum, values of in[0], values of in[1]...), for a pack's values at once.
template <typename S, typename In, int K, typename Add>
struct AddLoop : Inputs<In, K> {
  S* sum;
  Add add;
  static constexpr int kWidth = kPack<In>;

  NVGPU_FN AddLoop(S* sum, Inputs<In, K> in, Add add) : Inputs<In, K>(in), sum(sum), add(add) {}
  template <int N, typename Loaded>
  NVGPU_FN void Store(int64_t, const Loaded& loaded) const {
    if constexpr (K == 1) add(*sum, loaded.in[0].at);
    if constexpr (K == 2) add(*sum, loaded.in[0].at, loaded.in[1].at);
    if constexpr (K == 3) add(*sum, loaded.in[0].at, loaded.in[1].at, loaded.in[2].at);
  }
};

// One of several loops that run together: what ForEachPack, ForEachRow and ForEachWarp take for a loop of its own.
// dense: ForEachPack's alone.
template <typename Function>
struct Part {
  Function function;
  int64_t count;
  bool dense = false;
};

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

// How many packs a thread loads before it uses the first.
template <int N, typename Function, size_t bytes = sizeof(decltype(std::declval<Function>().template Load<N>(0)))>
constexpr int kAhead = bytes > 48 ? 1 : (bytes > 16 ? 2 : 4);

// The packs first, first + threads and so on, `ahead` in all. Loading without conditions keeps packs in whole
// registers.
template <int ahead, typename Function>
__device__ void RunAhead(int64_t first, int threads, const Function& function) {
  constexpr int N = Function::kWidth;
  decltype(function.template Load<N>(0)) loaded[ahead];
#pragma unroll
  for (int k = 0; k < ahead; ++k) loaded[k] = function.template Load<N>((first + k * threads) * N);
#pragma unroll
  for (int k = 0; k < ahead; ++k) function.template Store<N>((first + k * threads) * N, loaded[k]);
}
// What is left of a loop's packs, fewer than twice `ahead` for each thread.
template <int ahead, typename Function>
__device__ void RunRest(int64_t first, int64_t packs, int threads, const Function& function) {
  if (first + (ahead - 1) * threads < packs) {
    RunAhead<ahead>(first, threads, function);
    first += ahead * threads;
  }
  if constexpr (ahead > 1) RunRest<ahead / 2>(first, packs, threads, function);
}
// What `block` of `blocks`, each of so many threads, does of a loop over `count` elements; not `dense`: one by one.
template <typename Function>
__device__ void RunPacks(int64_t block, int64_t blocks, int64_t count, bool dense, const Function& function,
                         int threads = kThreads) {
  constexpr int N = Function::kWidth, ahead = kAhead<N, Function>;
  const int64_t packs = N > 1 && dense ? count / N : 0;
  int64_t first = block * ahead * threads + threadIdx.x;
  for (; first + (ahead - 1) * threads < packs; first += blocks * ahead * threads) {
    RunAhead<ahead>(first, threads, function);
  }
  if constexpr (ahead > 1) RunRest<ahead / 2>(first, packs, threads, function);
  for (int64_t i = packs * N + block * threads + threadIdx.x; i < count; i += blocks * threads) {
    function.template Store<1>(i, function.template Load<1>(i));
  }
}

template <typename Function>
__global__ void __launch_bounds__(kThreads) PackKernel(int64_t count, bool dense, Function function) {
  RunPacks(blockIdx.x, gridDim.x, count, dense, function);
}

// The loop over `count` elements. dense: all that Load and Store touch lies in a row and is Aligned.
template <typename Function>
void ForEachPack(Stream stream, int64_t count, bool dense, Function function) {
  if (count == 0) return;
  constexpr int N = Function::kWidth;
  const int64_t turn = kThreads * (N > 1 && dense ? N * kAhead<N, Function> : 1);
  const int64_t blocks = std::min<int64_t>((count + turn - 1) / turn, 1 << 20);
  PackKernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(count, dense, function);
  CheckLaunch();
}

// Parts of one launch: as many as fit into 4 KB of a kernel's arguments, as in apex's multi_tensor_apply. A part's
// blocks of threads lie behind those of the parts before.
template <typename Function>
struct Parts {
  static constexpr int kMost = 4000 / (sizeof(Part<Function>) + sizeof(int64_t));
  static_assert(kMost > 0);
  Part<Function> parts[kMost];
  int64_t ends[kMost];
  int size;

  // The part of this block. block, blocks: this one's number in it, and of how many.
  __device__ const Part<Function>& Find(int64_t* block, int64_t* blocks) const {
    int n = 0;
    while (ends[n] <= blockIdx.x) ++n;
    const int64_t first = n == 0 ? 0 : ends[n - 1];
    *block = blockIdx.x - first;
    *blocks = ends[n] - first;
    return parts[n];
  }
};

// kernel<<<blocks of a launch>>>(Parts) for all parts. blocks_of(part): for 1 <= count. The grid has at most 2**31 - 1.
template <typename Function, typename Kernel, typename BlocksOf>
void Launch(Stream stream, const std::vector<Part<Function>>& parts, Kernel kernel, BlocksOf blocks_of) {
  for (size_t next = 0; next < parts.size();) {
    Parts<Function> launched;
    launched.size = 0;
    int64_t blocks = 0;
    for (; next < parts.size() && launched.size < launched.kMost; ++next) {
      if (parts[next].count == 0) continue;
      blocks += std::min<int64_t>(blocks_of(parts[next]), 1 << 20);
      launched.parts[launched.size] = parts[next];
      launched.ends[launched.size++] = blocks;
    }
    if (blocks == 0) continue;
    kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(launched);
    CheckLaunch();
  }
}

template <typename Function>
__global__ void __launch_bounds__(kThreads) PackPartsKernel(const __grid_constant__ Parts<Function> parts) {
  int64_t block, blocks;
  const Part<Function>& part = parts.Find(&block, &blocks);
  RunPacks(block, blocks, part.count, part.dense, part.function.Prepare());
}

constexpr int kTurns = 4;  // of a thread or warp that prepares first

// The loops over their counts of elements, together. A loop's Prepare() is what a thread makes once of it, for all
// packs that are its share, kTurns times as many as it loads ahead: the functor with Load and Store.
template <typename Function>
void ForEachPack(Stream stream, const std::vector<Part<Function>>& parts) {
  Launch(stream, parts, PackPartsKernel<Function>, [](const Part<Function>& part) {
    constexpr int N = Function::kWidth;
    const int64_t turn = kThreads * (N > 1 && part.dense ? N * kAhead<N, Function> : 1) * kTurns;
    return (part.count + turn - 1) / turn;
  });
}

extern __shared__ __align__(16) unsigned char scratch[];

// The threads that work on one row together.
struct Team {
  bool has_scratch = false;

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
    T result = identity;
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x) result = combine(result, value(i));
    return Share(result, combine);
  }
  // The same over arrays: each thread adds packs to an identity, see AddLoop.
  template <typename S, typename In, int K, typename Add, typename Combine>
  __device__ S Reduce(int64_t count, Inputs<In, K> in, S identity, Add add, Combine combine) const {
    S sum = identity;
    Run(count, AddLoop<S, In, K, Add>(&sum, in, add));
    return Share(sum, combine);
  }
  // See MapLoop; `out` may be one of `in`.
  template <typename Out, typename In, int K, typename Function>
  __device__ void Map(int64_t count, Out* out, Inputs<In, K> in, Function function) const {
    Run(count, MapLoop<Out, In, K, Function>(out, in, function));
  }
  // A loop over packs whose Dense() says if all that it touches is Aligned.
  template <typename Loop>
  __device__ void Run(int64_t count, const Loop& loop) const {
    RunPacks(0, 1, count, loop.Dense(), loop, blockDim.x);
  }
  // function(memory near the team); function(otherwise) where a row does not fit into it.
  template <typename T, typename Function>
  __device__ void WithScratch(T* otherwise, Function function) const {
    has_scratch ? function(reinterpret_cast<T*>(scratch)) : function(otherwise);
  }
  // Until all threads are here, and what they wrote can be read.
  __device__ void Wait() const { __syncthreads(); }

 private:
  // combine over the threads' results.
  template <typename T, typename Combine>
  __device__ static T Share(T result, Combine combine) {
    __shared__ alignas(16) unsigned char storage[sizeof(T) * 32];
    T* shared = reinterpret_cast<T*>(storage);
    for (int offset = 16; offset > 0; offset /= 2) result = combine(result, Shuffle(result, offset));
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = result;
    __syncthreads();
    result = shared[0];
    for (int warp = 1; warp < static_cast<int>(blockDim.x) / 32; ++warp) result = combine(result, shared[warp]);
    __syncthreads();
    return result;
  }
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

// So many that each has about two packs of a row of 16-bit numbers.
inline int ThreadsFor(int64_t columns) {
  int threads = kThreads;
  while (threads > 32 && threads * 8 >= columns) threads /= 2;
  return threads;
}

template <typename Function>
__global__ void __launch_bounds__(kThreads) RowKernel(int64_t rows, Function function) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) function(Team(), row);
}
// The same with scratch memory or without; kParallel teams at once.
template <typename Function>
__global__ void __launch_bounds__(kThreads, 4) StretchKernel(int64_t stretches, Function function, bool has_scratch) {
  for (int64_t n = blockIdx.x; n < stretches; n += gridDim.x) function(Team{has_scratch}, n);
}

// function(team, row) for every row. threads: of a team, at most kThreads.
template <typename Function>
void ForEachRow(Stream stream, int64_t rows, Function function, int threads = kThreads) {
  if (rows == 0) return;
  const auto blocks = std::min<int64_t>(rows, 1 << 20);
  RowKernel<<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(rows, function);
  CheckLaunch();
}

constexpr size_t kMostScratch = (48 << 10) - 1024;  // every GPU has 48 KiB unasked, of which Team's sums take some

// function(team, n) for every n < stretches. bytes: of scratch memory that a team would use.
template <typename Function>
void ForEachStretch(Stream stream, int64_t stretches, Function function, int threads, size_t bytes) {
  if (stretches == 0) return;
  if (bytes > kMostScratch) bytes = 0;
  const auto blocks = std::min<int64_t>(stretches, 1 << 20);
  StretchKernel<<<blocks, threads, bytes, static_cast<cudaStream_t>(stream)>>>(stretches, function, bytes > 0);
  CheckLaunch();
}

template <typename Function>
__global__ void __launch_bounds__(kThreads) RowPartsKernel(const __grid_constant__ Parts<Function> parts) {
  int64_t block, blocks;
  const Part<Function>& part = parts.Find(&block, &blocks);
  for (int64_t row = block; row < part.count; row += blocks) part.function(Team(), row);
}

// function(team, row) for the rows of each, together.
template <typename Function>
void ForEachRow(Stream stream, const std::vector<Part<Function>>& parts) {
  Launch(stream, parts, RowPartsKernel<Function>, [](const Part<Function>& part) { return part.count; });
}

template <bool whole, typename Function, typename Prepared, typename Place>
__device__ void RunWarp(const Function& function, const Prepared& prepared, const Place& place) {
  const int lane = threadIdx.x % 32;
  auto state = function.template Begin<whole>(prepared, place, lane);
  for (uint32_t& largest : state.largest) largest = __reduce_max_sync(0xffffffffu, largest);
  function.template End<whole>(place, lane, state);
}

template <typename Function>
__global__ void __launch_bounds__(kThreads, 4) WarpPartsKernel(const __grid_constant__ Parts<Function> parts) {
  int64_t block, blocks;
  const Part<Function>& part = parts.Find(&block, &blocks);
  const Function& function = part.function;
  const auto prepared = function.Prepare();
  for (int64_t i = block * (kThreads / 32) + threadIdx.x / 32; i < part.count; i += blocks * (kThreads / 32)) {
    const auto place = function.PlaceOf(static_cast<uint32_t>(i));
    place.whole ? RunWarp<true>(function, prepared, place) : RunWarp<false>(function, prepared, place);
  }
}

// For every i < count of each part, at most 2^32, a warp calls place = function.PlaceOf(i), then
//   state = function.Begin<place.whole>(function.Prepare(), place, lane); function.End<place.whole>(place, lane, state)
// with the greatest of all lanes' numbers in the array state.largest. A warp does kTurns of them, and prepares once.
template <typename Function>
void ForEachWarp(Stream stream, const std::vector<Part<Function>>& parts) {
  constexpr int turn = kThreads / 32 * kTurns;
  Launch(stream, parts, WarpPartsKernel<Function>,
         [](const Part<Function>& part) { return (part.count + turn - 1) / turn; });
}

// What sums of float32 are kept in.
template <typename T>
using Sum = Compute<T>;
constexpr int64_t kParallel = 132 * 4;  // teams that fill a large GPU's memory channels, and run all at once

#else

template <typename Function>
void ForEach(Stream stream, int64_t count, Function function) {
  runtime::Synchronize(stream);
  for (int64_t i = 0; i < count; ++i) function(i);
}

template <typename Function>
void RunPacks(int64_t count, bool dense, const Function& function) {
  constexpr int N = Function::kWidth;
  const int64_t packed = dense ? count / N * N : 0;
  for (int64_t i = 0; i < packed; i += N) function.template Store<N>(i, function.template Load<N>(i));
  for (int64_t i = packed; i < count; ++i) function.template Store<1>(i, function.template Load<1>(i));
}
template <typename Function>
void ForEachPack(Stream stream, int64_t count, bool dense, Function function) {
  runtime::Synchronize(stream);
  RunPacks(count, dense, function);
}
template <typename Function>
void ForEachPack(Stream stream, const std::vector<Part<Function>>& parts) {
  runtime::Synchronize(stream);
  for (const auto& part : parts) RunPacks(part.count, part.dense, part.function.Prepare());
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
  template <typename S, typename In, int K, typename Add, typename Combine>
  S Reduce(int64_t count, Inputs<In, K> in, S identity, Add add, Combine) const {
    S sum = identity;
    Run(count, AddLoop<S, In, K, Add>(&sum, in, add));
    return sum;
  }
  template <typename Out, typename In, int K, typename Function>
  void Map(int64_t count, Out* out, Inputs<In, K> in, Function function) const {
    Run(count, MapLoop<Out, In, K, Function>(out, in, function));
  }
  template <typename Loop>
  void Run(int64_t count, const Loop& loop) const {
    RunPacks(count, loop.Dense(), loop);
  }
  template <typename T, typename Function>
  void WithScratch(T* otherwise, Function function) const {
    function(otherwise);
  }
  void Wait() const {}
};

constexpr int kThreads = 1;
inline int ThreadsFor(int64_t) { return kThreads; }

template <typename Function>
void ForEachRow(Stream stream, int64_t rows, Function function, int = kThreads) {
  runtime::Synchronize(stream);
  for (int64_t row = 0; row < rows; ++row) function(Team(), row);
}
template <typename Function>
void ForEachStretch(Stream stream, int64_t stretches, Function function, int, size_t) {
  ForEachRow(stream, stretches, function);
}
template <typename Function>
void ForEachRow(Stream stream, const std::vector<Part<Function>>& parts) {
  for (const auto& part : parts) ForEachRow(stream, part.count, part.function);
}

template <bool whole, typename Function, typename Prepared, typename Place>
void RunWarp(const Function& function, const Prepared& prepared, const Place& place) {
  constexpr int lanes = 32;
  decltype(function.template Begin<whole>(prepared, place, 0)) states[lanes];
  for (int lane = 0; lane < lanes; ++lane) states[lane] = function.template Begin<whole>(prepared, place, lane);
  for (size_t k = 0; k < std::size(states[0].largest); ++k) {
    uint32_t largest = 0;
    for (const auto& state : states) largest = std::max(largest, state.largest[k]);
    for (auto& state : states) state.largest[k] = largest;
  }
  for (int lane = 0; lane < lanes; ++lane) function.template End<whole>(place, lane, states[lane]);
}
template <typename Function>
void ForEachWarp(Stream stream, const std::vector<Part<Function>>& parts) {
  runtime::Synchronize(stream);
  for (const auto& [function, count, dense] : parts) {
    const auto prepared = function.Prepare();
    for (int64_t i = 0; i < count; ++i) {
      const auto place = function.PlaceOf(static_cast<uint32_t>(i));
      place.whole ? RunWarp<true>(function, prepared, place) : RunWarp<false>(function, prepared, place);
    }
  }
}

// One loop adds thousands of numbers in a row, which float32 would round too often.
template <typename T>
using Sum = std::conditional_t<std::is_same_v<Compute<T>, float>, double, Compute<T>>;
constexpr int64_t kParallel = 4;  // so that the combining of teams' results is tested here too

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
