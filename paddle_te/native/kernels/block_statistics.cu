// Statistics of a matrix that Transformer Engine casts with block scaling: its numbers are read and cast once more, and
// what becomes of them is counted.
//
// Compiled at run time by NVRTC. Every parameter is 8 bytes (see shim/launch.h). native/statistics.py defines NAME, the
// kernel's, ELEMENT, FLOAT8, and SQUARE, whether a block is 128 x 128 numbers or 1 x 128.

#include "statistics.cuh"

constexpr int kBlock = 128, kWarps = 8, kRows = kBlock / kWarps, kNumbers = kBlock / 32;  // of a thread

struct alignas(kNumbers * sizeof(ELEMENT)) Numbers {
  ELEMENT x[kNumbers];
};

// As compute_scale_from_amax in TE's common/recipe/recipe_common.cuh.
__device__ float scale_of(float amax, float greatest, bool power_2) {
  const float scale = fminf(FLOAT8::kGreatest / amax, greatest);
  return power_2 ? __uint_as_float(__float_as_uint(scale) & 0xff800000) : scale;
}

// One block of threads for each 128 x 128 numbers of x [rows, columns]. begins: 0, or begins[experts] / columns rows
// count. epsilon, greatest: the bits of the least amax and of the greatest number of ELEMENT, in float32.
extern "C" __global__ void __launch_bounds__(32 * kWarps)
    NAME(const ELEMENT* x, const long long* begins, Counter* record, long long rows, long long columns,
         long long experts, long long power_2, long long epsilon, long long greatest) {
  const long long across = columns / kBlock, first = blockIdx.x / across * kBlock + threadIdx.x / 32;
  const long long column = blockIdx.x % across * kBlock + threadIdx.x % 32 * kNumbers;
  const long long used = begins ? begins[experts] / columns : rows;
  Numbers numbers[kRows] = {};
  unsigned amaxes[kRows];  // floats >= 0 are ordered as ints
#pragma unroll
  for (int i = 0; i < kRows; i++) {
    const long long row = first + i * kWarps;
    if (row < used) numbers[i] = *reinterpret_cast<const Numbers*>(x + row * columns + column);
    float amax = 0;
    for (int j = 0; j < kNumbers; j++) amax = fmaxf(fabsf(to_float(numbers[i].x[j])), amax);
    amaxes[i] = __reduce_max_sync(0xffffffff, __float_as_uint(amax));
  }
#if SQUARE
  __shared__ unsigned of_warps[kWarps];
  unsigned most = 0;
  for (int i = 0; i < kRows; i++) most = amaxes[i] > most ? amaxes[i] : most;
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = most;
  __syncthreads();
  for (int i = 0; i < kWarps; i++) most = of_warps[i] > most ? of_warps[i] : most;
  for (int i = 0; i < kRows; i++) amaxes[i] = most;
#endif
  Counts counts;
#pragma unroll
  for (int i = 0; i < kRows; i++) {
    const float amax = fmaxf(__uint_as_float(amaxes[i]), __uint_as_float(static_cast<unsigned>(epsilon)));
    const bool usable = amax > 0 && amax <= kFloatMax;
    const float scale = usable ? scale_of(amax, __uint_as_float(static_cast<unsigned>(greatest)), power_2) : 1.f;
    if (usable) counts.scale = fmaxf(scale, counts.scale), counts.scale_inv = fmaxf(1.f / scale, counts.scale_inv);
#pragma unroll
    for (int j = 0; j < kNumbers; j += 2) {
      const float low = to_float(numbers[i].x[j]), high = to_float(numbers[i].x[j + 1]);
      float rounded[2];
      FLOAT8::unpack(FLOAT8::pack(low * scale, high * scale), rounded[0], rounded[1]);
      counts.see<FLOAT8>(low, low * scale, rounded[0]);
      counts.see<FLOAT8>(high, high * scale, rounded[1]);
    }
  }
  counts.add_to(record);
}
