// RMSNorm of each head of q and k and their rotary position embedding in one pass, on q, k, v that lie in one packed
// buffer or in three: what Qwen3, OLMo-2's per-head kin and Gemma 3 have between projection and attention.
//
//   y = rope(x · r · w),  r = 1 / sqrt(mean(x²) + epsilon) over a head's d numbers (Zhang and Sennrich, 2019)
//
// with one w for all heads of q and one for those of k, which may be stored as w - 1; rope as in rotation.cuh. All of
// it is in float32 and rounded once. Backward computes r again from x, the projection's output.
//
// Or, with OVER_ALL, over all heads of q together and over all of k (OLMo-2), with a weight for each of their numbers.
// Then `sums` adds up what heads, and ranks that share them, have of the means, before forward and before backward.
//
// Compiled at run time by NVRTC, with INTERLEAVED and OVER_ALL as 0 or 1. Every parameter is 8 bytes (see
// shim/launch.h). A head is a row of `lanes` threads, a power of 2 up to 32, of which those below d / (2 Vector::size)
// hold two vectors each.

#include "heads.cuh"

// The mean of what a token's heads have of a sum, of q or of k; sums: of all heads. Without OVER_ALL that of one head,
// whose threads all call it.
__device__ float mean_of(float of_thread, const float* sums, int head, Counts counts, int d, int lanes, Norm norm) {
  if (!OVER_ALL) return sum_of_head(of_thread, lanes) / d;
  const bool of_q = head < counts.q;
  return sums[of_q ? 0 : 1] / (static_cast<float>(of_q ? counts.q : counts.kv) * d * norm.ranks);
}

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
                        const float* sums, const float* angles, long long s, Counts counts, Widths widths, int lanes,
                        Norm norm) {
  extern __shared__ float shared[];
  constexpr int size = Vector<T>::size;
  const int d = widths.d;
  float *cosines = shared, *sines = shared + d / 2;
  const long long token = blockIdx.x;
  const int lane = threadIdx.x % lanes, place = lane * size, heads = counts.all(), step = blockDim.x / lanes;
  const bool holds = place < d / 2;
  const typename Pair<T>::At at(place, widths);
  take_angles(angles ? angles + token % s * widths.turned : angles, widths, 1, cosines, sines);
  __syncthreads();

  for (int first = 0; first < heads; first += step) {  // all threads as often, as they add up together
    const int head = first + threadIdx.x / lanes;
    const bool works = holds && head < heads;
    Pair<T> x = {};
    if (works) x = Pair<T>::at(in.head(token, head, counts.q, d), at);
    float low[size], high[size], squares = 0;
    to_floats(x.low, low), to_floats(x.high, high);
    for (int i = 0; i < size; i++) squares += low[i] * low[i] + high[i] * high[i];
    const float r = rsqrtf(mean_of(squares, sums + 4 * token, head, counts, d, lanes, norm) + norm.epsilon);
    if (!works) continue;
    const Pair<T> w = Pair<T>::at(weights_of(q_weight, k_weight, head, counts, d), at);
    for (int i = 0; i < size; i++) {
      low[i] *= r * (to_float(w.low.x[i]) + norm.added);
      high[i] *= r * (to_float(w.high.x[i]) + norm.added);
    }
    turn<INTERLEAVED>(low, high, cosines + place, sines + place);
    from_floats(low, x.low), from_floats(high, x.high);
    x.store(out.head(token, head, counts.q, d), at);
  }
  copy_v(in, out, token, counts.kv * d);
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

// dx from dy, which is of the rotated heads, and from x. Each block takes every gridDim.x-th token, and writes its part
// of the weights' gradients to partials [blocks, 2, d], float32; 0 for none. dy may be dx.
template <class T>
__device__ void backward(const Heads<const T>& dy, const Heads<const T>& x, const Heads<T>& dx, const T* q_weight,
                         const T* k_weight, const float* sums, float* partials, const float* angles, long long s,
                         long long tokens, Counts counts, Widths widths, int lanes, Norm norm) {
  extern __shared__ float shared[];
  constexpr int size = Vector<T>::size;
  const int d = widths.d;
  float *cosines = shared, *sines = shared + d / 2;
  const int lane = threadIdx.x % lanes, place = lane * size, heads = counts.all(), step = blockDim.x / lanes;
  const bool holds = place < d / 2;
  const typename Pair<T>::At at(place, widths);
  float q_low[size] = {}, q_high[size] = {}, k_low[size] = {}, k_high[size] = {};
  float* of_heads = shared + d;  // with OVER_ALL the same, of each head
  if (OVER_ALL && partials)
    for (int i = threadIdx.x; i < heads * d; i += blockDim.x) of_heads[i] = 0;

  for (long long token = blockIdx.x; token < tokens; token += gridDim.x) {
    __syncthreads();
    take_angles(angles ? angles + token % s * widths.turned : angles, widths, -1, cosines, sines);
    __syncthreads();
    for (int first = 0; first < heads; first += step) {
      const int head = first + threadIdx.x / lanes;
      const bool works = holds && head < heads, of_q = head < counts.q;
      Pair<T> in = {}, g = {}, w = {};
      if (works) {
        in = Pair<T>::at(x.head(token, head, counts.q, d), at);
        g = Pair<T>::at(dy.head(token, head, counts.q, d), at);
        w = Pair<T>::at(weights_of(q_weight, k_weight, head, counts, d), at);
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
      const float* of_token = sums + 4 * token;
      const float r = rsqrtf(mean_of(squares, of_token, head, counts, d, lanes, norm) + norm.epsilon);
      const float mean = mean_of(product, of_token + 2, head, counts, d, lanes, norm) * r * r;
      if (!works) continue;
      for (int i = 0; i < size; i++) {
        const float x_low = to_float(in.low.x[i]), x_high = to_float(in.high.x[i]);
        const float w_low = low[i] * x_low * r, w_high = high[i] * x_high * r;
        if (OVER_ALL) {
          if (partials) of_heads[head * d + at.low + i] += w_low, of_heads[head * d + at.high + i] += w_high;
        } else {
          q_low[i] += of_q ? w_low : 0, q_high[i] += of_q ? w_high : 0;  // arrays that are chosen lie in memory
          k_low[i] += of_q ? 0 : w_low, k_high[i] += of_q ? 0 : w_high;
        }
        from_float(r * ((to_float(w.low.x[i]) + norm.added) * low[i] - x_low * mean), in.low.x[i]);
        from_float(r * ((to_float(w.high.x[i]) + norm.added) * high[i] - x_high * mean), in.high.x[i]);
      }
      in.store(dx.head(token, head, counts.q, d), at);
    }
    copy_v(dy, dx, token, counts.kv * d);
  }
  if (!partials) return;
  if (OVER_ALL) {
    __syncthreads();
    float* total = partials + static_cast<long long>(blockIdx.x) * heads * d;
    for (int i = threadIdx.x; i < heads * d; i += blockDim.x) total[i] = of_heads[i];
    return;
  }
  float* total = partials + static_cast<long long>(blockIdx.x) * 2 * d;
  sum_of_block(q_low, q_high, shared, total, d, lanes, at);
  sum_of_block(k_low, k_high, shared, total + d, d, lanes, at);
}

// What the heads of a token have of four sums, float32 [tokens, 4]: the squares of q's numbers and of k's, and with dy,
// 0 for none, the products of x with w · dy, rotated back, of q and of k. One block a token.
template <class T>
__device__ void add_up(const Heads<const T>& dy, const Heads<const T>& x, const T* q_weight, const T* k_weight,
                       float* sums, const float* angles, long long s, Counts counts, Widths widths, int lanes,
                       Norm norm) {
  extern __shared__ float shared[];
  constexpr int size = Vector<T>::size;
  const int d = widths.d, lane = threadIdx.x % lanes, place = lane * size, warps = blockDim.x / 32;
  float *cosines = shared, *sines = shared + d / 2, *of_warps = shared + d;
  const long long token = blockIdx.x;
  const typename Pair<T>::At at(place, widths);
  take_angles(angles ? angles + token % s * widths.turned : angles, widths, -1, cosines, sines);
  __syncthreads();

  float squares[2] = {}, products[2] = {};
  for (int head = threadIdx.x / lanes; head < counts.all() && place < d / 2; head += blockDim.x / lanes) {
    const Pair<T> in = Pair<T>::at(x.head(token, head, counts.q, d), at);
    float low[size], high[size], square = 0, product = 0;
    to_floats(in.low, low), to_floats(in.high, high);
    for (int i = 0; i < size; i++) square += low[i] * low[i] + high[i] * high[i];
    if (dy.q) {
      const Pair<T> g = Pair<T>::at(dy.head(token, head, counts.q, d), at);
      const Pair<T> w = Pair<T>::at(weights_of(q_weight, k_weight, head, counts, d), at);
      float g_low[size], g_high[size];
      to_floats(g.low, g_low), to_floats(g.high, g_high);
      turn<INTERLEAVED>(g_low, g_high, cosines + place, sines + place);
      for (int i = 0; i < size; i++) {
        product += (to_float(w.low.x[i]) + norm.added) * g_low[i] * low[i];
        product += (to_float(w.high.x[i]) + norm.added) * g_high[i] * high[i];
      }
    }
    const bool of_q = head < counts.q;
    squares[0] += of_q ? square : 0, squares[1] += of_q ? 0 : square;
    products[0] += of_q ? product : 0, products[1] += of_q ? 0 : product;
  }
  const float of_thread[4] = {squares[0], squares[1], products[0], products[1]};
  for (int i = 0; i < 4; i++) {
    const float sum = sum_of_head(of_thread[i], 32);
    if (threadIdx.x % 32 == 0) of_warps[i * warps + threadIdx.x / 32] = sum;
  }
  __syncthreads();
  if (threadIdx.x >= 4) return;
  float sum = 0;
  for (int i = 0; i < warps; i++) sum += of_warps[threadIdx.x * warps + i];
  sums[4 * token + threadIdx.x] = sum;
}

constexpr int kColumns = 32;  // of the partial sums that a block of `weights` adds up

// The gradients of both weights, [q_size] and [k_size], from the blocks' partials [blocks, q_size + k_size].
template <class T>
__device__ void weights(const float* partials, T* dq_weight, T* dk_weight, long long blocks, int q_size, int k_size) {
  extern __shared__ float shared[];
  const int column = blockIdx.x * kColumns + threadIdx.x % kColumns, rows = blockDim.x / kColumns;
  const int columns = q_size + k_size;
  float sum = 0;
  if (column < columns)
    for (long long row = threadIdx.x / kColumns; row < blocks; row += rows) sum += partials[row * columns + column];
  shared[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x >= kColumns || column >= columns) return;
  float total = 0;
  for (int i = 0; i < rows; i++) total += shared[i * kColumns + threadIdx.x];
  from_float(total, column < q_size ? dq_weight[column] : dk_weight[column - q_size]);
}

#define QK_NORM(T)                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256) qk_norm_forward_##T(                                              \
      const T* q_in, const T* k_in, const T* v_in, long long q_in_stride, long long k_in_stride,                      \
      long long v_in_stride, T* q_out, T* k_out, T* v_out, long long q_out_stride, long long k_out_stride,            \
      long long v_out_stride, const T* q_weight, const T* k_weight, const float* sums, const float* angles,           \
      long long s, long long heads, long long widths, long long factor, long long norm) {                             \
    forward<T>({q_in, k_in, v_in, q_in_stride, k_in_stride, v_in_stride},                                             \
               {q_out, k_out, v_out, q_out_stride, k_out_stride, v_out_stride}, q_weight, k_weight, sums, angles, s,  \
               Counts(heads), Widths(widths, factor), lanes_of_head<T>(static_cast<int>(widths)), Norm(norm));        \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(256) qk_norm_backward_##T(                                             \
      const T* dq, const T* dk, const T* dv, long long dq_stride, long long dk_stride, long long dv_stride,           \
      const T* q, const T* k, long long stride, T* dq_out, T* dk_out, T* dv_out, long long out_stride,                \
      const T* q_weight, const T* k_weight, const float* sums, float* partials, const float* angles, long long s,     \
      long long tokens, long long heads, long long widths, long long factor, long long norm) {                        \
    backward<T>({dq, dk, dv, dq_stride, dk_stride, dv_stride}, {q, k, nullptr, stride, stride, 0},                    \
                {dq_out, dk_out, dv_out, out_stride, out_stride, out_stride}, q_weight, k_weight, sums, partials,     \
                angles, s, tokens, Counts(heads), Widths(widths, factor), lanes_of_head<T>(static_cast<int>(widths)), \
                Norm(norm));                                                                                          \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(256)                                                                   \
      qk_norm_sums_##T(const T* dq, const T* dk, long long dq_stride, long long dk_stride, const T* q, const T* k,    \
                       long long stride, const T* q_weight, const T* k_weight, float* sums, const float* angles,      \
                       long long s, long long heads, long long widths, long long factor, long long norm) {            \
    add_up<T>({dq, dk, nullptr, dq_stride, dk_stride, 0}, {q, k, nullptr, stride, stride, 0}, q_weight, k_weight,     \
              sums, angles, s, Counts(heads), Widths(widths, factor), lanes_of_head<T>(static_cast<int>(widths)),     \
              Norm(norm));                                                                                            \
  }                                                                                                                   \
  extern "C" __global__ void qk_norm_weights_##T(const float* partials, T* dq_weight, T* dk_weight, long long blocks, \
                                                 long long q_size, long long k_size) {                                \
    weights(partials, dq_weight, dk_weight, blocks, static_cast<int>(q_size), static_cast<int>(k_size));              \
  }
QK_NORM(bfloat16)
QK_NORM(float16)
QK_NORM(float)
