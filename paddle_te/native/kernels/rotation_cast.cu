// Norms and rotation of q and k, as in qk_norm.cu and rope.cu, and the cast of q, k and v to fp8 under one scale, in
// one pass: what attention in fp8 reads.
//
// The numbers are rounded to the inputs' type before they are measured and cast, as if they had been stored. amax is
// raised to the greatest magnitude before scaling.
//
// Compiled at run time by NVRTC, with INTERLEAVED and NORM, whether there are norms, as 0 or 1, and OVER_ALL as 0.
// Every parameter is 8 bytes (see shim/launch.h). Threads share heads as in qk_norm.cu.

#include "heads.cuh"

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
                                int lanes, Norm norm, const float* scale, float* amax, float* scale_inv) {
  extern __shared__ float shared[];
  constexpr int size = Vector<T>::size;
  const int d = widths.d;
  float *cosines = shared, *sines = shared + d / 2;
  const long long token = blockIdx.x;
  const int lane = threadIdx.x % lanes, place = lane * size, heads = counts.all(), step = blockDim.x / lanes;
  const bool holds = place < d / 2;
  const typename Pair<T>::At at(place, widths);
  const float factor = *scale;
  float greatest = 0;
  take_angles(angles ? angles + token % s * widths.turned : angles, widths, 1, cosines, sines);
  __syncthreads();

  for (int first = 0; first < heads; first += step) {  // all threads as often, as they add up together
    const int head = first + threadIdx.x / lanes;
    const bool works = holds && head < heads;
    Pair<T> x = {};
    if (works) x = Pair<T>::at(in.head(token, head, counts.q, d), at);
    float low[size], high[size];
    to_floats(x.low, low), to_floats(x.high, high);
    if (NORM) {
      float squares = 0;
      for (int i = 0; i < size; i++) squares += low[i] * low[i] + high[i] * high[i];
      const float r = rsqrtf(sum_of_head(squares, lanes) / d + norm.epsilon);
      if (works) {
        const Pair<T> w = Pair<T>::at(weights_of(q_weight, k_weight, head, counts, d), at);
        for (int i = 0; i < size; i++) {
          low[i] *= r * (to_float(w.low.x[i]) + norm.added);
          high[i] *= r * (to_float(w.high.x[i]) + norm.added);
        }
      }
    }
    if (!works) continue;
    turn<INTERLEAVED>(low, high, cosines + place, sines + place);
    from_floats(low, x.low), from_floats(high, x.high);
    unsigned char* y = out.head(token, head, counts.q, d);
    greatest = cast(x.low, y + at.low, factor, greatest);
    greatest = cast(x.high, y + at.high, factor, greatest);
  }
  const T* v = in.v + token * in.v_stride;
  for (int i = threadIdx.x * size; i < counts.kv * d; i += blockDim.x * size)
    greatest = cast(*reinterpret_cast<const Vector<T>*>(v + i), out.v + token * out.v_stride + i, factor, greatest);

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
  extern "C" __global__ void __launch_bounds__(256) rotation_cast_##T(                                                \
      const T* q_in, const T* k_in, const T* v_in, long long stride, unsigned char* q_out, unsigned char* k_out,      \
      unsigned char* v_out, long long q_stride, long long k_stride, long long v_stride, const T* q_weight,            \
      const T* k_weight, const float* angles, long long s, long long heads, long long widths, long long factor,       \
      long long norm, const float* scale, float* amax, float* scale_inv) {                                            \
    rotate_and_cast<T>({q_in, k_in, v_in, stride, stride, stride},                                                    \
                       {q_out, k_out, v_out, q_stride, k_stride, v_stride}, q_weight, k_weight, angles, s,            \
                       Counts(heads), Widths(widths, factor), lanes_of_head<T>(static_cast<int>(widths)), Norm(norm), \
                       scale, amax, scale_inv);                                                                       \
  }
ROTATION_CAST(bfloat16)
ROTATION_CAST(float16)
ROTATION_CAST(float)
