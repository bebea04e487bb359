// Norms and rotation of q and k, as in qk_norm.cu and rope.cu, means subtracted from k and v, as in centring.cu, and
// the cast of q, k and v to fp8 under one scale, in one pass: what attention in fp8 reads.
//
// The numbers are rounded to the inputs' type before a mean is subtracted, and again before they are measured and cast,
// as if they had been stored. amax is raised to the greatest magnitude before scaling.
//
// Compiled at run time by NVRTC, with INTERLEAVED, NORM and OVER_ALL (see centring.cuh). Every parameter is 8 bytes
// (see shim/launch.h). Threads share heads as in qk_norm.cu.

#include "centring.cuh"

// Casts a vector, and returns the greatest of `greatest` and its magnitudes.
template <class T>
__device__ float cast(const Vector<T>& from, unsigned char* to, float scale, float greatest) {
  constexpr int size = Vector<T>::size;
  struct alignas(size) Bytes {
    unsigned short pairs[size / 2];
  } bytes;
  for (int i = 0; i < size; i += 2) {
    const float low = to_float(from.x[i]), high = to_float(from.x[i + 1]);
    greatest = fmaxf(fabsf(high), fmaxf(fabsf(low), greatest));
    bytes.pairs[i / 2] = e4m3::pack(low * scale, high * scale);
  }
  *reinterpret_cast<Bytes*>(to) = bytes;
  return greatest;
}

// One block a token. q_weight, k_weight: read with NORM.
template <class T>
__device__ void rotate_and_cast(const Heads<const T>& in, const Heads<unsigned char>& out, const T* q_weight,
                                const T* k_weight, const float* angles, long long s, Counts counts, Widths widths,
                                int lanes, Norm norm, Means means, const float* scale, float* amax, float* scale_inv) {
  extern __shared__ float shared[];
  constexpr int size = Vector<T>::size;
  const int d = widths.d, numbers = counts.kv * d;
  float *cosines = shared, *sines = shared + d / 2;
  const long long token = blockIdx.x;
  const int lane = threadIdx.x % lanes, place = lane * size, heads = counts.all(), step = blockDim.x / lanes;
  const bool holds = place < d / 2;
  const typename Pair<T>::At at(place, widths);
  const float factor = *scale;
  float greatest = 0;
  take_angles(angles ? angles + token % s * widths.turned : angles, widths, 1, cosines, sines);
  __syncthreads();

  const float* of_k = means.of_k(token, numbers);
  for (int first = 0; first < heads; first += step) {  // all threads as often, as they add up together
    const int head = first + threadIdx.x / lanes;
    const bool works = holds && head < heads;
    Pair<T> x = {};
    if (works) x = Pair<T>::at(in.head(token, head, counts.q, d), at);
    const T* weights = weights_of(q_weight, k_weight, head, counts, d);
    norm_and_turn(x, weights, works, at, d, lanes, norm, cosines + place, sines + place);
    if (!works) continue;
    if (head >= counts.q) {
      const float* mean = of_k + (head - counts.q) * d;
      subtract(x.low, mean + at.low), subtract(x.high, mean + at.high);
    }
    unsigned char* y = out.head(token, head, counts.q, d);
    greatest = cast(x.low, y + at.low, factor, greatest);
    greatest = cast(x.high, y + at.high, factor, greatest);
  }
  const T* v = in.v + token * in.v_stride;
  const float* of_v = means.of_v(token, numbers);
  for (int i = threadIdx.x * size; i < numbers; i += blockDim.x * size) {
    Vector<T> x = *reinterpret_cast<const Vector<T>*>(v + i);
    subtract(x, of_v + i);
    greatest = cast(x, out.v + token * out.v_stride + i, factor, greatest);
  }

  __shared__ unsigned of_warps[32];
  const unsigned of_warp = __reduce_max_sync(kAllLanes, __float_as_uint(greatest));  // floats >= 0 are ordered as ints
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = of_warp;
  __syncthreads();
  if (threadIdx.x) return;
  unsigned of_block = 0;
  for (int i = 0; i < blockDim.x / 32; i++) of_block = of_warps[i] > of_block ? of_warps[i] : of_block;
  atomicMax(reinterpret_cast<int*>(amax), static_cast<int>(of_block));
  if (token == 0) *scale_inv = 1.f / factor;
}

#define ROTATION_CAST(T)                                                                                              \
  extern "C" __global__ void __launch_bounds__(256)                                                                   \
      rotation_cast_##T(const T* q_in, const T* k_in, const T* v_in, long long q_in_stride, long long kv_in_stride,   \
                        unsigned char* q_out, unsigned char* k_out, unsigned char* v_out, long long q_stride,         \
                        long long kv_stride, const T* q_weight, const T* k_weight, const float* angles, long long s,  \
                        long long heads, long long widths, long long factor, long long norm, const float* means,      \
                        long long sequence, const float* scale, float* amax, float* scale_inv) {                      \
    rotate_and_cast<T>({q_in, k_in, v_in, q_in_stride, kv_in_stride, kv_in_stride},                                   \
                       {q_out, k_out, v_out, q_stride, kv_stride, kv_stride}, q_weight, k_weight, angles, s,          \
                       Counts(heads), Widths(widths, factor), lanes_of_head<T>(static_cast<int>(widths)), Norm(norm), \
                       {means, sequence}, scale, amax, scale_inv);                                                    \
  }
ROTATION_CAST(bfloat16)
ROTATION_CAST(float16)
ROTATION_CAST(float)
