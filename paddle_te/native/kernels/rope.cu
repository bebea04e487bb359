// Rotary position embedding (rotation.cuh) on q, k, v that lie in one packed buffer or in three, at the speed of
// memory.
//
// Without angles q and k are moved as v is. TE's own kernel on packed q, k, v wants Megatron's interleaved order and
// reaches a third of memory bandwidth.
//
// Compiled at run time by NVRTC, with INTERLEAVED as 0 or 1. Every parameter is 8 bytes (see shim/launch.h).

#include "rotation.cuh"

// One block a token; blockDim.x is a multiple of d / (2 Vector::size), so that each thread keeps its place in the head
// and with it its cosines. Input and output may be the same memory: each element is read and written by one thread.
template <class T, bool interleaved>
__device__ void rope(const T* q_in, const T* k_in, const T* v_in, long long q_in_stride, long long k_in_stride,
                     long long v_in_stride, T* q_out, T* k_out, T* v_out, long long q_out_stride,
                     long long k_out_stride, long long v_out_stride, const float* angles, long long s, int q_heads,
                     int kv_heads, Widths widths, float sign) {
  extern __shared__ float cosines[];
  const int d = widths.d;
  float* sines = cosines + d / 2;
  constexpr int size = Vector<T>::size;
  const long long token = blockIdx.x;
  const int chunks = d / 2 / size, heads = q_heads + kv_heads, step = blockDim.x / chunks;
  const int place = threadIdx.x % chunks * size;
  const Places<interleaved, size> at(place, widths);
  q_in += token * q_in_stride, k_in += token * k_in_stride, v_in += token * v_in_stride;
  q_out += token * q_out_stride, k_out += token * k_out_stride, v_out += token * v_out_stride;

  take_angles(angles ? angles + token % s * widths.turned : angles, widths, sign, cosines, sines);
  __syncthreads();
  float c[size], z[size];
  for (int i = 0; i < size; i++) c[i] = cosines[place + i], z[i] = sines[place + i];

  for (int head = threadIdx.x / chunks; head < heads; head += step) {
    const T* x = head < q_heads ? q_in + head * d : k_in + (head - q_heads) * d;
    T* y = head < q_heads ? q_out + head * d : k_out + (head - q_heads) * d;
    Vector<T> first = *reinterpret_cast<const Vector<T>*>(x + at.low);
    Vector<T> second = *reinterpret_cast<const Vector<T>*>(x + at.high);
    float low[size], high[size];
    to_floats(first, low), to_floats(second, high);
    turn<interleaved>(low, high, c, z);
    from_floats(low, first), from_floats(high, second);
    *reinterpret_cast<Vector<T>*>(y + at.low) = first;
    *reinterpret_cast<Vector<T>*>(y + at.high) = second;
  }
  if (v_in != v_out)
    for (int i = threadIdx.x * size; i < kv_heads * d; i += blockDim.x * size)
      *reinterpret_cast<Vector<T>*>(v_out + i) = *reinterpret_cast<const Vector<T>*>(v_in + i);
}

// 6 blocks an SM: 40 registers, 48 KiB of loads in flight.
#define ROPE(T)                                                                                                        \
  extern "C" __global__ void __launch_bounds__(256, 6)                                                                 \
      rope_##T(const T* q_in, const T* k_in, const T* v_in, long long q_in_stride, long long k_in_stride,              \
               long long v_in_stride, T* q_out, T* k_out, T* v_out, long long q_out_stride, long long k_out_stride,    \
               long long v_out_stride, const float* angles, long long s, long long q_heads, long long kv_heads,        \
               long long widths, long long factor, long long backward) {                                               \
    rope<T, INTERLEAVED>(q_in, k_in, v_in, q_in_stride, k_in_stride, v_in_stride, q_out, k_out, v_out, q_out_stride,   \
                         k_out_stride, v_out_stride, angles, s, static_cast<int>(q_heads), static_cast<int>(kv_heads), \
                         Widths(widths, factor), backward ? -1.f : 1.f);                                               \
  }
ROPE(bfloat16)
ROPE(float16)
ROPE(float)
