// The factors A and B of several low-rank products as two matrices, and the gradients of these as theirs.
//
// Up to three parts have an A [inputs, r] and a B [r, size]. Side by side their A are [inputs, width], with columns of
// zeros up to width. Their B, times a factor, are [width, outputs]: each has rows of its own and, from its start on, as
// many columns as its size; all else is zeros. So x · A · B of all parts takes two products, and nobody else multiplies
// with the factor.
//
// Compiled at run time by NVRTC, with RUN: how many numbers beside each other a thread moves. It divides r, outputs and
// the starts and sizes of all parts, so that a run lies in one part or in none. Addresses are multiples of its bytes.
// Every parameter is 8 bytes (see shim/launch.h): the factor is a float's bits.

#include "types.cuh"

template <class T>
struct Part {
  T* a;  // null for a part that is not there, and for a gradient that is not wanted
  T* b;
  long long start, size;
};

template <class T>
struct Parts {
  Part<T> first, second, third;

  __device__ Part<T> at(unsigned number) const {
    if (number == 0) return first;
    if (number == 1) return second;
    return number == 2 ? third : Part<T>{};
  }
};

struct Sizes {
  unsigned inputs, outputs, r, width;  // whose products have 32 bits, of which a division takes the least time
};

template <class T>
struct alignas(RUN * sizeof(T)) Run {
  T x[RUN];
};

// A thread's run: where it lies in a or b, or null behind them; and in a part's A or B, or null outside of all.
template <class T>
struct Places {
  Run<T>*whole, *of_part;
  bool in_b;
};

template <class T>
__device__ Run<T>* run(T* at) {
  return reinterpret_cast<Run<T>*>(at);
}

template <class T>
__device__ Places<T> places(const Parts<T>& parts, T* a, T* b, const Sizes& sizes) {
  const unsigned i = (blockIdx.x * blockDim.x + threadIdx.x) * RUN, numbers = sizes.inputs * sizes.width;
  if (i < numbers) {
    const unsigned row = i / sizes.width, column = i % sizes.width;
    const Part<T> part = parts.at(column / sizes.r);
    return {run(a + i), part.a ? run(part.a + row * sizes.r + column % sizes.r) : nullptr, false};
  }
  const unsigned j = i - numbers, row = j / sizes.outputs;
  if (row >= sizes.width) return {nullptr, nullptr, true};
  const Part<T> part = parts.at(row / sizes.r);
  const long long column = static_cast<long long>(j % sizes.outputs) - part.start;
  const bool there = part.b && column >= 0 && column < part.size;
  return {run(b + j), there ? run(part.b + row % sizes.r * part.size + column) : nullptr, true};
}

template <class T>
__device__ Run<T> times(float factor, Run<T> numbers) {
#pragma unroll
  for (int k = 0; k < RUN; k++) from_float(factor * to_float(numbers.x[k]), numbers.x[k]);
  return numbers;
}

template <class T>
__device__ void pack(const Parts<T>& parts, T* a, T* b, const Sizes& sizes, float factor) {
  const Places<T> at = places(parts, a, b, sizes);
  if (!at.whole) return;
  if (at.of_part)
    *at.whole = at.in_b ? times(factor, *at.of_part) : *at.of_part;
  else
    *at.whole = {};
}

// Backward: a and b are the gradients.
template <class T>
__device__ void unpack(const Parts<T>& parts, T* a, T* b, const Sizes& sizes, float factor) {
  const Places<T> at = places(parts, a, b, sizes);
  if (at.of_part) *at.of_part = at.in_b ? times(factor, *at.whole) : *at.whole;
}

#define LOW_RANK_PARAMETERS(T)                                                                                         \
  T *a0, T *a1, T *a2, T *b0, T *b1, T *b2, long long start0, long long start1, long long start2, long long size0,     \
      long long size1, long long size2, T *a, T *b, long long inputs, long long outputs, long long r, long long width, \
      long long factor
#define LOW_RANK_ARGUMENTS                                                                      \
  {{a0, b0, start0, size0}, {a1, b1, start1, size1}, {a2, b2, start2, size2}}, a, b,            \
      {static_cast<unsigned>(inputs), static_cast<unsigned>(outputs), static_cast<unsigned>(r), \
       static_cast<unsigned>(width)},                                                           \
      __uint_as_float(static_cast<unsigned>(factor))
#define LOW_RANK(T)                                                                            \
  extern "C" __global__ void pack_##T(LOW_RANK_PARAMETERS(T)) { pack<T>(LOW_RANK_ARGUMENTS); } \
  extern "C" __global__ void unpack_##T(LOW_RANK_PARAMETERS(T)) { unpack<T>(LOW_RANK_ARGUMENTS); }
LOW_RANK(bfloat16)
LOW_RANK(float16)
LOW_RANK(float)
