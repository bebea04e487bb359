// From tokens to the rows of their experts and back: see native/experts.py.
//
// Nothing depends on the order in which threads run: rows are counted, not drawn from a counter.
//
// Compiled at run time by NVRTC. Every parameter is 8 bytes (see shim/launch.h).

#include "types.cuh"

constexpr int kMostThreads = 256, kMostExperts = 1024;

// The tokens of a block's warps, `each` after one another for a warp, in steps of kSteps * 32.
constexpr int kSteps = 16;
constexpr unsigned kAllLanes = 0xffffffff;
struct Tokens {
  long long begin, end, each;
  __device__ Tokens(long long tokens) : end(tokens), each((tokens + blockDim.x - 1) / blockDim.x * 32) {
    begin = threadIdx.x / 32 * each;
  }
  // The token of this lane in a step behind an offset; a warp's own ones are before the next one's.
  __device__ long long at(long long offset, int step) const { return begin + offset + 32 * step + threadIdx.x % 32; }
  __device__ bool has(long long offset, int step) const { return offset + 32 * step < each && at(offset, step) < end; }
};

// masks: a bit for each lane, whether its token of the step has the expert. All threads of a block call it.
__device__ void find_chosen(const unsigned char* map, const Tokens& of, long long offset, long long experts,
                            long long expert, unsigned (&masks)[kSteps]) {
  unsigned char bytes[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; i++) bytes[i] = of.has(offset, i) ? map[of.at(offset, i) * experts + expert] : 0;
#pragma unroll
  for (int i = 0; i < kSteps; i++) masks[i] = __ballot_sync(kAllLanes, bytes[i]);
}

// How many tokens have the expert; `before`: of the warps before this one.
__device__ int count_chosen(const unsigned char* map, const Tokens& of, long long experts, long long expert,
                            int& before) {
  __shared__ int of_warps[32];
  int mine = 0, total = 0;
  for (long long offset = 0; offset < of.each; offset += kSteps * 32) {
    unsigned masks[kSteps];
    find_chosen(map, of, offset, experts, expert, masks);
    for (int i = 0; i < kSteps; i++) mine += __popc(masks[i]);
  }
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = mine;
  __syncthreads();
  before = 0;
  for (int i = 0; i < blockDim.x / 32; i++) {
    if (i == threadIdx.x / 32) before = total;
    total += of_warps[i];
  }
  return total;
}

// A block counts an expert's rows.
extern "C" __global__ void __launch_bounds__(1024)
    experts_count(const unsigned char* map, long long* counts, long long tokens, long long experts,
                  long long multiple) {
  int before;
  const long long rows = count_chosen(map, Tokens(tokens), experts, blockIdx.x, before);
  if (threadIdx.x == 0) counts[blockIdx.x] = (rows + multiple - 1) / multiple * multiple;
}

// A block places an expert's rows, the last one also what is behind all of them.
extern "C" __global__ void __launch_bounds__(1024)
    experts_place(const unsigned char* map, const float* probs, const long long* counts, long long* offsets, int* place,
                  int* token_of, float* prob_of, long long tokens, long long experts, long long rows,
                  long long columns0, long long columns1, long long columns2) {
  const long long expert = blockIdx.x, columns[3] = {columns0, columns1, columns2};
  long long first = 0;
  for (long long i = 0; i < expert; i++) first += counts[i];
  const long long behind = first + counts[expert];
  if (threadIdx.x < 3) {
    long long* of_width = offsets + threadIdx.x * (experts + 1);
    of_width[expert] = first * columns[threadIdx.x];
    if (expert + 1 == experts) of_width[experts] = behind * columns[threadIdx.x];
  }
  const Tokens of(tokens);
  int before;
  const int used = count_chosen(map, of, experts, expert, before);
  const unsigned lane = threadIdx.x % 32;
  int row = static_cast<int>(first) + before;
  for (long long offset = 0; offset < of.each; offset += kSteps * 32) {
    unsigned masks[kSteps];
    float found[kSteps];
    find_chosen(map, of, offset, experts, expert, masks);
#pragma unroll
    for (int i = 0; i < kSteps; i++)  // all, before any is stored
      found[i] = masks[i] >> lane & 1 ? probs[of.at(offset, i) * experts + expert] : 0;
#pragma unroll
    for (int i = 0; i < kSteps; i++) {
      const long long token = of.at(offset, i);
      const int to = row + __popc(masks[i] & ((1u << lane) - 1));
      row += __popc(masks[i]);
      if (!(masks[i] >> lane & 1)) continue;
      place[token * experts + expert] = to;
      token_of[to] = static_cast<int>(token);
      prob_of[to] = found[i];
    }
  }
  const long long last = expert + 1 == experts ? rows : behind;
  for (long long empty = first + used + threadIdx.x; empty < last; empty += blockDim.x) {
    token_of[empty] = static_cast<int>(tokens);
    prob_of[empty] = 0;
  }
}

// One block; what `experts_place` writes for rows that somebody else has placed.
extern "C" __global__ void experts_offsets(const long long* counts, long long* first, long long* second,
                                           long long experts, long long columns0, long long columns1) {
  for (long long expert = threadIdx.x; expert <= experts; expert += blockDim.x) {
    long long rows = 0;
    for (long long i = 0; i < expert; i++) rows += counts[i];
    first[expert] = rows * columns0;
    second[expert] = rows * columns1;
  }
}

// A block copies a row.
template <class T>
__device__ void gather(const T* x, const int* token_of, T* y, long long tokens, long long columns) {
  const long long row = blockIdx.x, token = token_of[row];
  const auto* from = reinterpret_cast<const Vector<T>*>(x + token * columns);
  auto* to = reinterpret_cast<Vector<T>*>(y + row * columns);
  for (long long i = threadIdx.x; i < columns / Vector<T>::size; i += blockDim.x)
    to[i] = token < tokens ? from[i] : Vector<T>{};
}

// A block sums a token's rows, in the order of their experts.
template <class T>
__device__ void combine(const T* rows, const unsigned char* map, const int* place, const T* residual, T* out,
                        long long experts, long long columns) {
  __shared__ int of_token[kMostExperts];
  __shared__ int count;
  const long long token = blockIdx.x;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  for (long long expert = threadIdx.x; expert < experts; expert += blockDim.x) {
    if (!map[token * experts + expert]) continue;
    int number = 0;
    for (long long i = 0; i < expert; i++) number += map[token * experts + i] != 0;
    of_token[number] = place[token * experts + expert];
    atomicMax(&count, number + 1);
  }
  __syncthreads();
  constexpr int size = Vector<T>::size;
  for (long long i = threadIdx.x; i < columns / size; i += blockDim.x) {
    float sum[size] = {};
    if (residual) {
      const auto values = reinterpret_cast<const Vector<T>*>(residual + token * columns)[i];
      for (int k = 0; k < size; k++) sum[k] = to_float(values.x[k]);
    }
    for (int j = 0; j < count; j++) {
      const auto values = reinterpret_cast<const Vector<T>*>(rows + of_token[j] * columns)[i];
      for (int k = 0; k < size; k++) sum[k] += to_float(values.x[k]);
    }
    Vector<T> rounded;
    for (int k = 0; k < size; k++) from_float(sum[k], rounded.x[k]);
    reinterpret_cast<Vector<T>*>(out + token * columns)[i] = rounded;
  }
}

extern "C" __global__ void experts_probs(const float* of_rows, const unsigned char* map, const int* place,
                                         float* dprobs, long long numbers) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < numbers) dprobs[i] = map[i] ? of_rows[place[i]] : 0;
}

// `blocks` blocks zero what an expert has, if it has no rows.
extern "C" __global__ void experts_zero_empty(uint4* gradients, const long long* counts, long long blocks,
                                              long long size) {
  const long long expert = blockIdx.x / blocks, vectors = size / 16;
  if (counts[expert]) return;
  for (long long i = blockIdx.x % blocks * blockDim.x + threadIdx.x; i < vectors; i += blocks * blockDim.x)
    gradients[expert * vectors + i] = uint4{0, 0, 0, 0};
}

// The expert that has the number `at` of the experts' rows, or `experts` behind them.
__device__ long long expert_at(const long long* begins, long long experts, long long at) {
  long long low = 0, high = experts;
  while (low < high) {
    const long long middle = (low + high) / 2;
    if (begins[middle + 1] <= at)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// A block adds an expert's bias to a row, times the row's probability if there is one.
template <class T>
__device__ void add_bias(T* y, const long long* begins, const T* bias, const float* prob_of, long long experts,
                         long long columns) {
  const long long row = blockIdx.x, expert = expert_at(begins, experts, row * columns);
  if (expert == experts) return;
  const float prob = prob_of ? prob_of[row] : 1.f;
  constexpr int size = Vector<T>::size;
  auto* to = reinterpret_cast<Vector<T>*>(y + row * columns);
  const auto* from = reinterpret_cast<const Vector<T>*>(bias + expert * columns);
  for (long long i = threadIdx.x; i < columns / size; i += blockDim.x) {
    Vector<T> values = to[i], added = from[i];
    for (int k = 0; k < size; k++) from_float(to_float(values.x[k]) + prob * to_float(added.x[k]), values.x[k]);
    to[i] = values;
  }
}

// A block sums an expert's rows over kLanes vectors of columns: blockDim.x / kLanes threads go through the rows of one.
// token_of: of each row its token, `tokens` for padding; null where x has the rows themselves.
constexpr int kLanes = 32;
template <class T>
__device__ void sum_rows(const T* x, const int* token_of, const long long* begins, const float* prob_of, T* sums,
                         long long tokens, long long columns) {
  constexpr int size = Vector<T>::size;
  __shared__ float shares[kMostThreads * size];
  const long long vectors = columns / size, blocks = (vectors + kLanes - 1) / kLanes, expert = blockIdx.x / blocks;
  const long long vector = blockIdx.x % blocks * kLanes + threadIdx.x % kLanes, end = begins[expert + 1] / columns;
  float sum[size] = {};
  for (long long row = begins[expert] / columns + threadIdx.x / kLanes; row < end; row += blockDim.x / kLanes) {
    const long long from = token_of ? token_of[row] : row;
    if (vector >= vectors || (token_of && from >= tokens)) continue;
    const auto values = reinterpret_cast<const Vector<T>*>(x + from * columns)[vector];
    const float prob = prob_of ? prob_of[row] : 1.f;
    for (int k = 0; k < size; k++) sum[k] += prob * to_float(values.x[k]);
  }
  for (int k = 0; k < size; k++) shares[threadIdx.x * size + k] = sum[k];
  __syncthreads();
  if (threadIdx.x >= kLanes || vector >= vectors) return;
  Vector<T> rounded;
  for (int k = 0; k < size; k++) {
    float total = 0;
    for (int thread = threadIdx.x; thread < blockDim.x; thread += kLanes) total += shares[thread * size + k];
    from_float(total, rounded.x[k]);
  }
  reinterpret_cast<Vector<T>*>(sums + expert * columns)[vector] = rounded;
}

// A block adds to of_rows a row's product with its expert's bias.
template <class T>
__device__ void add_bias_products(const T* x, const int* token_of, const long long* begins, const T* bias,
                                  float* of_rows, long long tokens, long long experts, long long columns) {
  __shared__ float shares[kMostThreads];
  constexpr int size = Vector<T>::size;
  const long long row = blockIdx.x, expert = expert_at(begins, experts, row * columns);
  const long long from = expert == experts ? tokens : token_of ? token_of[row] : row;
  float product = 0;
  if (from < tokens) {
    const auto* values = reinterpret_cast<const Vector<T>*>(x + from * columns);
    const auto* factors = reinterpret_cast<const Vector<T>*>(bias + expert * columns);
    for (long long i = threadIdx.x; i < columns / size; i += blockDim.x)
      for (int k = 0; k < size; k++) product += to_float(values[i].x[k]) * to_float(factors[i].x[k]);
  }
  shares[threadIdx.x] = product;
  __syncthreads();
  if (threadIdx.x || from >= tokens) return;
  float total = 0;
  for (int i = 0; i < blockDim.x; i++) total += shares[i];
  of_rows[row] += total;
}

// A warp adds up a row's numbers [rows, columns], in the same order in every run.
extern "C" __global__ void experts_row_sums(const float* numbers, float* sums, long long rows, long long columns) {
  const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x, row = thread / 32;
  float sum = 0;
  if (row < rows)
    for (long long i = thread % 32; i < columns; i += 32) sum += numbers[row * columns + i];
  for (int lanes = 1; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
  if (row < rows && thread % 32 == 0) sums[row] = sum;
}

// GELU in its tanh form (Hendrycks and Gimpel, 2016), and in `derivative` its derivative.
__device__ float gelu(float x, float& derivative) {
  constexpr float kScale = 0.7978845608f, kCube = 0.044715f;  // the root of 2 / pi
  const float tanh = tanhf(kScale * (x + kCube * x * x * x));
  derivative = 0.5f * (1 + tanh) + 0.5f * x * (1 - tanh * tanh) * kScale * (1 + 3 * kCube * x * x);
  return 0.5f * x * (1 + tanh);
}

// A block computes GELU of a row times the row's probability. Rows without one, padding, become zeros.
template <class T>
__device__ void scaled_gelu(const T* x, const float* prob_of, T* y, long long columns) {
  constexpr int size = Vector<T>::size;
  const long long row = blockIdx.x;
  const float prob = prob_of[row];
  float derivative;
  for (long long i = threadIdx.x; i < columns / size; i += blockDim.x) {
    const auto values = reinterpret_cast<const Vector<T>*>(x + row * columns)[i];
    Vector<T> rounded;
    for (int k = 0; k < size; k++) from_float(prob ? prob * gelu(to_float(values.x[k]), derivative) : 0, rounded.x[k]);
    reinterpret_cast<Vector<T>*>(y + row * columns)[i] = rounded;
  }
}

// Its gradients from dy: dx of a row, and dprob, the sum of dy · GELU.
template <class T>
__device__ void scaled_dgelu(const T* dy, const T* x, const float* prob_of, T* dx, float* dprob, long long columns) {
  __shared__ float shares[kMostThreads];
  constexpr int size = Vector<T>::size;
  const long long row = blockIdx.x;
  const float prob = prob_of[row];
  float product = 0, derivative;
  for (long long i = threadIdx.x; i < columns / size; i += blockDim.x) {
    const auto values = reinterpret_cast<const Vector<T>*>(x + row * columns)[i];
    const auto grads = reinterpret_cast<const Vector<T>*>(dy + row * columns)[i];
    Vector<T> rounded;
    for (int k = 0; k < size; k++) {
      const float grad = to_float(grads.x[k]);
      product += grad * gelu(to_float(values.x[k]), derivative);
      from_float(prob ? prob * grad * derivative : 0, rounded.x[k]);
    }
    reinterpret_cast<Vector<T>*>(dx + row * columns)[i] = rounded;
  }
  shares[threadIdx.x] = product;
  __syncthreads();
  if (threadIdx.x) return;
  float total = 0;
  for (int i = 0; i < blockDim.x; i++) total += shares[i];
  dprob[row] = total;
}

#define EXPERTS(T)                                                                                                    \
  extern "C" __global__ void experts_gather_##T(const T* x, const int* token_of, T* y, long long tokens,              \
                                                long long columns) {                                                  \
    gather(x, token_of, y, tokens, columns);                                                                          \
  }                                                                                                                   \
  extern "C" __global__ void experts_combine_##T(const T* rows, const unsigned char* map, const int* place,           \
                                                 const T* residual, T* out, long long experts, long long columns) {   \
    combine(rows, map, place, residual, out, experts, columns);                                                       \
  }                                                                                                                   \
  extern "C" __global__ void experts_add_bias_##T(T* y, const long long* begins, const T* bias, const float* prob_of, \
                                                  long long experts, long long columns) {                             \
    add_bias(y, begins, bias, prob_of, experts, columns);                                                             \
  }                                                                                                                   \
  extern "C" __global__ void experts_sum_rows_##T(const T* x, const int* token_of, const long long* begins,           \
                                                  const float* prob_of, T* sums, long long tokens,                    \
                                                  long long columns) {                                                \
    sum_rows(x, token_of, begins, prob_of, sums, tokens, columns);                                                    \
  }                                                                                                                   \
  extern "C" __global__ void experts_add_bias_products_##T(const T* x, const int* token_of, const long long* begins,  \
                                                           const T* bias, float* of_rows, long long tokens,           \
                                                           long long experts, long long columns) {                    \
    add_bias_products(x, token_of, begins, bias, of_rows, tokens, experts, columns);                                  \
  }                                                                                                                   \
  extern "C" __global__ void experts_scaled_gelu_##T(const T* x, const float* prob_of, T* y, long long columns) {     \
    scaled_gelu(x, prob_of, y, columns);                                                                              \
  }                                                                                                                   \
  extern "C" __global__ void experts_scaled_dgelu_##T(const T* dy, const T* x, const float* prob_of, T* dx,           \
                                                      float* dprob, long long columns) {                              \
    scaled_dgelu(dy, x, prob_of, dx, dprob, columns);                                                                 \
  }
EXPERTS(bfloat16)
EXPERTS(float16)
EXPERTS(float)
