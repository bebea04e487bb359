// 1 / rms(x) of each row of a matrix, and the amax of its RMSNorm, without the norm itself. It can also copy x, for the
// GEMM that adds to it as the residual.
//
// The numbers are added in the order in which Transformer Engine's kernel for this hidden size adds them
// (rmsnorm_fwd_tuned_kernel and Stats in TE 2.20's common/normalization and common/utils.cuh): the results are equal to
// the bit. That kernel takes the squares of distances from the mean, of each warp's part of a row, and joins the parts
// (Chan, Golub and LeVeque, 1983).
//
// Compiled at run time by NVRTC. Every parameter is 8 bytes (see shim/launch.h). native/rmsnorm.py defines NAME,
// the kernel's; HIDDEN, numbers in a row; WARPS, 1 or 4, that share a row; and ELEMENT, their type.

#include "types.cuh"

constexpr int kWarpsOfBlock = 4;

__device__ float sum_of_warp(float x) {
  for (int lanes = 1; lanes < 32; lanes *= 2) x += __shfl_xor_sync(0xffffffff, x, lanes);
  return x;
}

struct Moments {  // of some numbers: their mean, and the sum of the squares of their distances from it
  float mean, squares;
  // Of these and as many others, n each. That is a power of 2: TE multiplies by it where nothing is rounded.
  __device__ Moments with(const Moments& other, float n) const {
    const float delta = mean - other.mean;
    return {(mean + other.mean) * 0.5f, fmaf(delta * delta, n * 0.5f, squares + other.squares)};
  }
};

// Stores a vector that nobody reads soon: x shall stay in the cache, where the norm reads it next.
template <class T>
__device__ void store_streaming(const Vector<T>& vector, T* to) {
  __stcs(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4&>(vector));
}

// rsigma: float32 [rows]. amax: 0, or raised to the greatest magnitude of the norm, rounded to T. gamma: [HIDDEN], read
// for the amax alone; 1 + gamma with zero_centered. copy: 0, or the numbers of x are written there.
template <class T>
__device__ void statistics(const T* x, const T* gamma, float* rsigma, float* amax, T* copy, long long rows,
                           float epsilon, bool zero_centered) {
  constexpr int size = Vector<T>::size, step = 32 * WARPS * size, vectors = HIDDEN / step;
  constexpr int numbers = vectors * size;  // of a thread
  __shared__ Moments of_warps[kWarpsOfBlock];
  __shared__ unsigned greatest[kWarpsOfBlock];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const long long given = static_cast<long long>(blockIdx.x) * (kWarpsOfBlock / WARPS) + warp / WARPS;
  const long long row = given < rows ? given : rows - 1;
  const int column = (warp % WARPS * 32 + lane) * size;
  Vector<T> in[vectors];
  for (int i = 0; i < vectors; i++) in[i] = *reinterpret_cast<const Vector<T>*>(x + row * HIDDEN + column + i * step);
  if (copy && given < rows)
    for (int i = 0; i < vectors; i++) store_streaming(in[i], copy + row * HIDDEN + column + i * step);

  float sum = 0, squares = 0;
#pragma unroll
  for (int i = 0; i < vectors; i++)
#pragma unroll
    for (int j = 0; j < size; j++) sum += to_float(in[i].x[j]);
  const float mean = sum_of_warp(sum) * (1.f / (32 * numbers));
#pragma unroll
  for (int i = 0; i < vectors; i++)
#pragma unroll
    for (int j = 0; j < size; j++) {
      const float distance = to_float(in[i].x[j]) - mean;
      squares = fmaf(distance, distance, squares);
    }
  Moments of_row{mean, sum_of_warp(squares)};
  if constexpr (WARPS == 4) {
    if (lane == 0) of_warps[warp] = of_row;
    __syncthreads();
    constexpr float n = 32 * numbers;
    of_row = of_warps[0].with(of_warps[2], n).with(of_warps[1].with(of_warps[3], n), 2 * n);
  }
  const float r = rsqrtf(fmaf(of_row.mean, of_row.mean, of_row.squares * (1.f / HIDDEN)) + epsilon);
  if (given < rows && warp % WARPS == 0 && lane == 0) rsigma[row] = r;
  if (!amax) return;

  float max = 0;
#pragma unroll
  for (int i = 0; i < vectors; i++) {
    const Vector<T> factors = *reinterpret_cast<const Vector<T>*>(gamma + column + i * step);
#pragma unroll
    for (int j = 0; j < size; j++) {
      const float factor = to_float(factors.x[j]) + (zero_centered ? 1.f : 0.f), normed = r * to_float(in[i].x[j]);
      T y;
      from_float(factor * normed, y);
      max = fmaxf(fabsf(to_float(y)), max);
    }
  }
  const unsigned of_warp = __reduce_max_sync(0xffffffff, __float_as_uint(max));  // floats >= 0 are ordered as ints
  if (lane == 0) greatest[warp] = of_warp;
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned of_block = 0;
    for (int i = 0; i < kWarpsOfBlock; i++) of_block = greatest[i] > of_block ? greatest[i] : of_block;
    atomicMax(reinterpret_cast<int*>(amax), static_cast<int>(of_block));
  }
}

// epsilon: the bits of a float.
extern "C" __global__ void __launch_bounds__(32 * kWarpsOfBlock)
    NAME(const ELEMENT* x, const ELEMENT* gamma, float* rsigma, float* amax, ELEMENT* copy, long long rows,
         long long epsilon, long long zero_centered) {
  statistics(x, gamma, rsigma, amax, copy, rows, __uint_as_float(static_cast<unsigned>(epsilon)), zero_centered != 0);
}
