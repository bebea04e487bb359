// RMSNorm of each head of q and k and their rotary position embedding in one pass, on q, k, v that lie in one packed
// buffer or in three: what Qwen3, OLMo-2's per-head kin and Gemma 3 have between projection and attention.
//
//   y = rope(x · r · w),  r = 1 / sqrt(mean(x²) + epsilon) over a head's d numbers (Zhang and Sennrich, 2019), with one
//   w
// for all heads of q and one for those of k, which may be stored as w - 1; rope as in rotation.cuh. All of it is in
// float32 and rounded once. Backward computes r again from x, the projection's output.
//
// Compiled at run time by NVRTC, with INTERLEAVED as 0 or 1. Every parameter is 8 bytes (see shim/launch.h). A head is
// a row of `lanes` threads, a power of 2 up to 32, of which those below d / (2 Vector::size) hold two vectors each.

#include "rotation.cuh"

constexpr unsigned kAllLanes = 0xffffffff;

// The sum over the threads of a head. All threads of the block call it.
__device__ float sum_of_head(float x, int lanes) {
  for (int lane = 1; lane < lanes; lane *= 2) x += __shfl_xor_sync(kAllLanes, x, lane);
  return x;
}

// The norm's epsilon, and what is added to its weights, 1 or 0: two numbers of 32 bits in one parameter.
struct Norm {
  float epsilon, added;
  __device__ explicit Norm(long long both)
      : epsilon(__uint_as_float(static_cast<unsigned>(both))), added(static_cast<float>(both >> 32)) {}
};

// Two vectors of a head, as rotation.cuh has them.
template <class T>
struct Pair {
  using At = Places<INTERLEAVED, Vector<T>::size>;
  Vector<T> low, high;
  __device__ static Pair at(const T* head, const At& at) {
    return {*reinterpret_cast<const Vector<T>*>(head + at.low), *reinterpret_cast<const Vector<T>*>(head + at.high)};
  }
  __device__ void store(T* head, const At& at) const {
    *reinterpret_cast<Vector<T>*>(head + at.low) = low;
    *reinterpret_cast<Vector<T>*>(head + at.high) = high;
  }
};

// q, k and v of all tokens: where each begins, and the elements from a token to the next.
template <class T>
struct Heads {
  T *q, *k, *v;
  long long q_stride, k_stride, v_stride;
  __device__ T* head(long long token, int head, int q_heads, int d) const {
    return head < q_heads ? q + token * q_stride + head * d : k + token * k_stride + (head - q_heads) * d;
  }
};

template <class T>
__device__ void copy_v(const Heads<const T>& from, const Heads<T>& to, long long token, int numbers) {
  const T* in = from.v + token * from.v_stride;
  T* out = to.v + token * to.v_stride;
  if (in == out) return;
  for (int i = threadIdx.x * Vector<T>::size; i < numbers; i += blockDim.x * Vector<T>::size)
    *reinterpret_cast<Vector<T>*>(out + i) = *reinterpret_cast<const Vector<T>*>(in + i);
}

// One block a token. angles: float32 [s, turned], row t % s for token t; 0 for no rotation.
template <class T>
__device__ void forward(const Heads<const T>& in, const Heads<T>& out, const T* q_weight, const T* k_weight,
                        const float* angles, long long s, int q_heads, int kv_heads, Widths widths, int lanes,
                        Norm norm) {
  extern __shared__ float shared[];
  constexpr int size = Vector<T>::size;
  const int d = widths.d;
  float *cosines = shared, *sines = shared + d / 2;
  const long long token = blockIdx.x;
  const int lane = threadIdx.x % lanes, place = lane * size, heads = q_heads + kv_heads, step = blockDim.x / lanes;
  const bool holds = place < d / 2;
  const typename Pair<T>::At at(place, widths);
  take_angles(angles ? angles + token % s * widths.turned : angles, widths, 1, cosines, sines);
  __syncthreads();

  for (int first = 0; first < heads; first += step) {  // all threads as often, as they add up together
    const int head = first + threadIdx.x / lanes;
    const bool works = holds && head < heads;
    Pair<T> x = {};
    if (works) x = Pair<T>::at(in.head(token, head, q_heads, d), at);
    float low[size], high[size], squares = 0;
    to_floats(x.low, low), to_floats(x.high, high);
    for (int i = 0; i < size; i++) squares += low[i] * low[i] + high[i] * high[i];
    const float r = rsqrtf(sum_of_head(squares, lanes) / d + norm.epsilon);
    if (!works) continue;
    const Pair<T> w = Pair<T>::at(head < q_heads ? q_weight : k_weight, at);
    for (int i = 0; i < size; i++) {
      low[i] *= r * (to_float(w.low.x[i]) + norm.added);
      high[i] *= r * (to_float(w.high.x[i]) + norm.added);
    }
    turn<INTERLEAVED>(low, high, cosines + place, sines + place);
    from_floats(low, x.low), from_floats(high, x.high);
    x.store(out.head(token, head, q_heads, d), at);
  }
  copy_v(in, out, token, kv_heads * d);
}

// Adds up what the threads of the block have of a weight's gradient: total [d].
template <int size>
__device__ void sum_of_block(const float (&low)[size], const float (&high)[size], float* sums, float* total, int d,
                             int lanes, const Places<INTERLEAVED, size>& at) {
  const int row = threadIdx.x / lanes, rows = blockDim.x / lanes;
  __syncthreads();
  if (threadIdx.x % lanes * size < d / 2)
    for (int i = 0; i < size; i++) sums[row * d + at.low + i] = low[i], sums[row * d + at.high + i] = high[i];
  __syncthreads();
  for (int column = threadIdx.x; column < d; column += blockDim.x) {
    float sum = 0;
    for (int i = 0; i < rows; i++) sum += sums[i * d + column];
    total[column] = sum;
  }
}

// dx from dy, which is of the rotated heads, and from x. Each of `blocks` blocks takes every blocks-th token, and
// writes its part of the weights' gradients to partials [blocks, 2, d], float32; 0 for none. dy may be dx.
template <class T>
__device__ void backward(const Heads<const T>& dy, const Heads<const T>& x, const Heads<T>& dx, const T* q_weight,
                         const T* k_weight, float* partials, const float* angles, long long s, long long tokens,
                         long long blocks, int q_heads, int kv_heads, Widths widths, int lanes, Norm norm) {
  extern __shared__ float shared[];
  constexpr int size = Vector<T>::size;
  const int d = widths.d;
  float *cosines = shared, *sines = shared + d / 2;
  const int lane = threadIdx.x % lanes, place = lane * size, heads = q_heads + kv_heads, step = blockDim.x / lanes;
  const bool holds = place < d / 2;
  const typename Pair<T>::At at(place, widths);
  float q_low[size] = {}, q_high[size] = {}, k_low[size] = {}, k_high[size] = {};

  for (long long token = blockIdx.x; token < tokens; token += blocks) {
    __syncthreads();
    take_angles(angles ? angles + token % s * widths.turned : angles, widths, -1, cosines, sines);
    __syncthreads();
    for (int first = 0; first < heads; first += step) {
      const int head = first + threadIdx.x / lanes;
      const bool works = holds && head < heads, of_q = head < q_heads;
      Pair<T> in = {}, g = {}, w = {};
      if (works) {
        in = Pair<T>::at(x.head(token, head, q_heads, d), at);
        g = Pair<T>::at(dy.head(token, head, q_heads, d), at);
        w = Pair<T>::at(of_q ? q_weight : k_weight, at);
      }
      float low[size], high[size], squares = 0, product = 0;  // dy, rotated back
      to_floats(g.low, low), to_floats(g.high, high);
      if (holds) turn<INTERLEAVED>(low, high, cosines + place, sines + place);
      for (int i = 0; i < size; i++) {
        const float x_low = to_float(in.low.x[i]), x_high = to_float(in.high.x[i]);
        squares += x_low * x_low + x_high * x_high;
        product += (to_float(w.low.x[i]) + norm.added) * low[i] * x_low;
        product += (to_float(w.high.x[i]) + norm.added) * high[i] * x_high;
      }
      const float r = rsqrtf(sum_of_head(squares, lanes) / d + norm.epsilon);
      const float mean = sum_of_head(product, lanes) / d * r * r;
      if (!works) continue;
      for (int i = 0; i < size; i++) {
        const float x_low = to_float(in.low.x[i]), x_high = to_float(in.high.x[i]);
        const float w_low = low[i] * x_low * r, w_high = high[i] * x_high * r;
        q_low[i] += of_q ? w_low : 0, q_high[i] += of_q ? w_high : 0;  // arrays that are chosen lie in memory
        k_low[i] += of_q ? 0 : w_low, k_high[i] += of_q ? 0 : w_high;
        from_float(r * ((to_float(w.low.x[i]) + norm.added) * low[i] - x_low * mean), in.low.x[i]);
        from_float(r * ((to_float(w.high.x[i]) + norm.added) * high[i] - x_high * mean), in.high.x[i]);
      }
      in.store(dx.head(token, head, q_heads, d), at);
    }
    copy_v(dy, dx, token, kv_heads * d);
  }
  if (!partials) return;
  float* total = partials + static_cast<long long>(blockIdx.x) * 2 * d;
  sum_of_block(q_low, q_high, shared, total, d, lanes, at);
  sum_of_block(k_low, k_high, shared, total + d, d, lanes, at);
}

constexpr int kColumns = 32;  // of the partial sums that a block of `weights` adds up

// The gradients of both weights, [d] each, from the blocks' partials [blocks, 2, d].
template <class T>
__device__ void weights(const float* partials, T* dq_weight, T* dk_weight, long long blocks, int d) {
  extern __shared__ float shared[];
  const int column = blockIdx.x * kColumns + threadIdx.x % kColumns, rows = blockDim.x / kColumns;
  float sum = 0;
  if (column < 2 * d)
    for (long long row = threadIdx.x / kColumns; row < blocks; row += rows) sum += partials[row * 2 * d + column];
  shared[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x >= kColumns || column >= 2 * d) return;
  float total = 0;
  for (int i = 0; i < rows; i++) total += shared[i * kColumns + threadIdx.x];
  from_float(total, column < d ? dq_weight[column] : dk_weight[column - d]);
}

// Threads of a head.
template <class T>
__device__ int lanes_of_head(long long d) {
  int lanes = 1;
  while (lanes * 2 * Vector<T>::size < d) lanes *= 2;
  return lanes;
}

#define QK_NORM(T)                                                                                                     \
  extern "C" __global__ void __launch_bounds__(256) qk_norm_forward_##T(                                               \
      const T* q_in, const T* k_in, const T* v_in, long long q_in_stride, long long k_in_stride,                       \
      long long v_in_stride, T* q_out, T* k_out, T* v_out, long long q_out_stride, long long k_out_stride,             \
      long long v_out_stride, const T* q_weight, const T* k_weight, const float* angles, long long s,                  \
      long long q_heads, long long kv_heads, long long widths, long long norm) {                                       \
    forward<T>({q_in, k_in, v_in, q_in_stride, k_in_stride, v_in_stride},                                              \
               {q_out, k_out, v_out, q_out_stride, k_out_stride, v_out_stride}, q_weight, k_weight, angles, s,         \
               static_cast<int>(q_heads), static_cast<int>(kv_heads), Widths(widths),                                  \
               lanes_of_head<T>(Widths(widths).d), Norm(norm));                                                        \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256) qk_norm_backward_##T(                                              \
      const T* dq, const T* dk, const T* dv, long long dq_stride, long long dk_stride, long long dv_stride,            \
      const T* q, const T* k, long long stride, T* dq_out, T* dk_out, T* dv_out, long long out_stride,                 \
      const T* q_weight, const T* k_weight, float* partials, const float* angles, long long s, long long tokens,       \
      long long blocks, long long q_heads, long long kv_heads, long long widths, long long norm) {                     \
    backward<T>({dq, dk, dv, dq_stride, dk_stride, dv_stride}, {q, k, nullptr, stride, stride, 0},                     \
                {dq_out, dk_out, dv_out, out_stride, out_stride, out_stride}, q_weight, k_weight, partials, angles, s, \
                tokens, blocks, static_cast<int>(q_heads), static_cast<int>(kv_heads), Widths(widths),                 \
                lanes_of_head<T>(Widths(widths).d), Norm(norm));                                                       \
  }                                                                                                                    \
  extern "C" __global__ void qk_norm_weights_##T(const float* partials, T* dq_weight, T* dk_weight, long long blocks,  \
                                                 long long d) {                                                        \
    weights(partials, dq_weight, dk_weight, blocks, static_cast<int>(d));                                              \
  }
QK_NORM(bfloat16)
QK_NORM(float16)
QK_NORM(float)
