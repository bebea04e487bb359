// What becomes of numbers that are cast to fp8, counted in a record of fp8/statistics.py: integers of 64 bits, so that
// their sums do not depend on the order of blocks.
#pragma once

#include "types.cuh"

using Counter = unsigned long long;
enum Field { kNonzero, kUnderflows, kSaturated, kError, kAmax, kScale, kScaleInv, kFields };  // sums, then maxima

constexpr float kErrorUnit = 1 << 24;  // of kError, the sum of the numbers' relative errors
constexpr float kFloatMax = 3.4028234663852886e38f;
constexpr float kTolerance = 1.000001f;  // an amax times its own scale may be as much beyond the greatest number

// Of what a thread sees. amax, scale and scale_inv: the greatest, of scales that multiply a number other than 0: a
// tensor of zeros has the scale 1 under current scaling.
struct Counts {
  unsigned nonzero = 0, underflows = 0, saturated = 0;
  float error = 0, amax = 0, scale = 0, scale_inv = 0;

  // x became `rounded`, a number of Float8, after it was multiplied with a scale to `scaled`.
  template <class Float8>
  __device__ void see(float x, float scaled, float rounded) {
    amax = fmaxf(fabsf(x), amax);
    if (x == 0 || !(fabsf(x) <= kFloatMax)) return;
    const float size = fminf(fabsf(scaled), kFloatMax);
    nonzero++;
    underflows += rounded == 0;
    saturated += size > Float8::kGreatest * kTolerance;
    error += size > 0 ? fabsf(size - fabsf(rounded)) / size : 1.f;
  }

  // All threads of a block add theirs to the record.
  __device__ void add_to(Counter* record) const {
    __shared__ Counter of_block[kFields];
    if (threadIdx.x < kFields) of_block[threadIdx.x] = 0;
    __syncthreads();
    float errors = error;
    for (int lanes = 16; lanes; lanes /= 2) errors += __shfl_xor_sync(0xffffffff, errors, lanes);
    const Counter values[kFields] = {__reduce_add_sync(0xffffffff, nonzero),
                                     __reduce_add_sync(0xffffffff, underflows),
                                     __reduce_add_sync(0xffffffff, saturated),
                                     static_cast<Counter>(errors * kErrorUnit),
                                     __reduce_max_sync(0xffffffff, __float_as_uint(amax)),  // ordered as ints
                                     __reduce_max_sync(0xffffffff, __float_as_uint(scale)),
                                     __reduce_max_sync(0xffffffff, __float_as_uint(scale_inv))};
    if (threadIdx.x % 32 == 0)
      for (int i = 0; i < kFields; i++) add(of_block + i, values[i], i);
    __syncthreads();
    if (threadIdx.x == 0)
      for (int i = 0; i < kFields; i++) add(record + i, of_block[i], i);
  }

  __device__ static void add(Counter* to, Counter value, int field) {
    if (field < kAmax)
      atomicAdd(to, value);
    else
      atomicMax(to, value);
  }
};
