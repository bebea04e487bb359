// Heads of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), with the rotation (rotation.cuh).
//
// A head of the queries and keys has `plain` numbers and, behind them, `turned` ones, which are rotated; one of the
// values has `value`. q holds whole heads of the queries, kv for each head the plain numbers of its key and its value,
// and position the rotated numbers of the key, which all heads share. Forward writes q, k and v as attention reads
// them; backward brings their gradients back.
//
// Compiled at run time by NVRTC, with INTERLEAVED as 0 or 1. Every parameter is 8 bytes (see shim/launch.h).

#include "rotation.cuh"

struct Sizes {
  int heads, plain, turned, value;
  float factor;
  __device__ Sizes(long long heads, long long both, long long value, long long factor)
      : heads(static_cast<int>(heads)),
        plain(static_cast<int>(both)),
        turned(static_cast<int>(both >> 32)),
        value(static_cast<int>(value)),
        factor(__uint_as_float(static_cast<unsigned>(factor))) {}
  __device__ Widths widths() const { return Widths(turned, factor); }
  __device__ int key() const { return plain + turned; }
  __device__ int both() const { return plain + value; }
};

// Copies `count` numbers of each head, from_step and to_step apart.
template <class T>
__device__ void copy_heads(const T* from, int from_step, T* to, int to_step, int count, int heads) {
  constexpr int size = Vector<T>::size;
  const int vectors = count / size;
  for (int i = threadIdx.x; i < heads * vectors; i += blockDim.x) {
    const int head = i / vectors, place = i % vectors * size;
    *reinterpret_cast<Vector<T>*>(to + head * to_step + place) =
        *reinterpret_cast<const Vector<T>*>(from + head * from_step + place);
  }
}

// Turns the rotated numbers of each head; from_step 0: all heads get those of one.
template <class T>
__device__ void turn_heads(const T* from, int from_step, T* to, int to_step, int heads, Widths widths,
                           const float* cosines, const float* sines) {
  constexpr int size = Vector<T>::size;
  const int chunks = widths.d / 2 / size;
  for (int i = threadIdx.x; i < heads * chunks; i += blockDim.x) {
    const int head = i / chunks, place = i % chunks * size;
    const Places<INTERLEAVED, size> at(place, widths);
    const T* x = from + head * from_step;
    T* y = to + head * to_step;
    Vector<T> first = *reinterpret_cast<const Vector<T>*>(x + at.low);
    Vector<T> second = *reinterpret_cast<const Vector<T>*>(x + at.high);
    float low[size], high[size];
    to_floats(first, low), to_floats(second, high);
    turn<INTERLEAVED>(low, high, cosines + place, sines + place);
    from_floats(low, first), from_floats(high, second);
    *reinterpret_cast<Vector<T>*>(y + at.low) = first;
    *reinterpret_cast<Vector<T>*>(y + at.high) = second;
  }
}

// One block a token. Shared memory: cosines and sines [turned / 2] each.
template <class T>
__device__ void forward(const T* q, const T* kv, const T* position, T* q_out, T* k_out, T* v_out, const float* angles,
                        long long s, Sizes sizes) {
  extern __shared__ float cosines[];
  float* sines = cosines + sizes.turned / 2;
  const long long token = blockIdx.x;
  const int heads = sizes.heads, key = sizes.key(), both = sizes.both();
  q += token * heads * key, q_out += token * heads * key, k_out += token * heads * key;
  kv += token * heads * both, v_out += token * heads * sizes.value, position += token * sizes.turned;
  take_angles(angles + token % s * sizes.turned, sizes.widths(), 1.f, cosines, sines);
  __syncthreads();
  copy_heads(q, key, q_out, key, sizes.plain, heads);
  copy_heads(kv, both, k_out, key, sizes.plain, heads);
  copy_heads(kv + sizes.plain, both, v_out, sizes.value, sizes.value, heads);
  turn_heads(q + sizes.plain, key, q_out + sizes.plain, key, heads, sizes.widths(), cosines, sines);
  turn_heads(position, 0, k_out + sizes.plain, key, heads, sizes.widths(), cosines, sines);
}

// The gradient of a token's position is the sum of its heads', in float32. Shared memory: besides forward's a number
// for each thread, of which there are a multiple of `turned`.
template <class T>
__device__ void backward(const T* dq, const T* dk, const T* dv, T* dq_out, T* dkv, T* dposition, const float* angles,
                         long long s, Sizes sizes) {
  extern __shared__ float cosines[];
  constexpr int size = Vector<T>::size;
  const int heads = sizes.heads, key = sizes.key(), both = sizes.both(), turned = sizes.turned;
  float *sines = cosines + turned / 2, *sums = cosines + turned;
  const long long token = blockIdx.x;
  dq += token * heads * key, dq_out += token * heads * key, dk += token * heads * key;
  dkv += token * heads * both, dv += token * heads * sizes.value, dposition += token * turned;
  take_angles(angles + token % s * turned, sizes.widths(), -1.f, cosines, sines);
  const int column = threadIdx.x % turned, rows = blockDim.x / turned;
  float sum = 0;
  for (int head = threadIdx.x / turned; head < heads; head += rows)
    sum += to_float(dk[head * key + sizes.plain + column]);
  sums[threadIdx.x] = sum;
  __syncthreads();
  copy_heads(dq, key, dq_out, key, sizes.plain, heads);
  copy_heads(dk, key, dkv, both, sizes.plain, heads);
  copy_heads(dv, sizes.value, dkv + sizes.plain, both, sizes.value, heads);
  turn_heads(dq + sizes.plain, key, dq_out + sizes.plain, key, heads, sizes.widths(), cosines, sines);
  const int place = threadIdx.x * size;
  if (place >= turned / 2) return;
  const Places<INTERLEAVED, size> at(place, sizes.widths());
  float low[size] = {}, high[size] = {};
  for (int row = 0; row < rows; row++)
    for (int i = 0; i < size; i++)
      low[i] += sums[row * turned + at.low + i], high[i] += sums[row * turned + at.high + i];
  turn<INTERLEAVED>(low, high, cosines + place, sines + place);
  Vector<T> first, second;
  from_floats(low, first), from_floats(high, second);
  *reinterpret_cast<Vector<T>*>(dposition + at.low) = first;
  *reinterpret_cast<Vector<T>*>(dposition + at.high) = second;
}

#define LATENT(T)                                                                                                      \
  extern "C" __global__ void __launch_bounds__(256) latent_forward_##T(                                                \
      const T* q, const T* kv, const T* position, T* q_out, T* k_out, T* v_out, const float* angles, long long s,      \
      long long heads, long long widths, long long value, long long factor) {                                          \
    forward(q, kv, position, q_out, k_out, v_out, angles, s, Sizes(heads, widths, value, factor));                     \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256)                                                                    \
      latent_backward_##T(const T* dq, const T* dk, const T* dv, T* dq_out, T* dkv, T* dposition, const float* angles, \
                          long long s, long long heads, long long widths, long long value, long long factor) {         \
    backward(dq, dk, dv, dq_out, dkv, dposition, angles, s, Sizes(heads, widths, value, factor));                      \
  }
LATENT(bfloat16)
LATENT(float16)
LATENT(float)
