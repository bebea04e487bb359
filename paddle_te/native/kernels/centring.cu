// Attention in fp8 reads keys and values less their means over a sequence's tokens, and adds the values' to its output:
// see `Attention.quantizers` in ops/heads.py.
//
// The means are of normed and rotated keys (qk_norm.cu, rope.cu), rounded to their type, and of values, summed in
// float32, always in the same order: of each chunk of a sequence's tokens, then of its chunks.
//
// Compiled at run time by NVRTC, with INTERLEAVED, NORM and OVER_ALL (see centring.cuh). Every parameter is 8 bytes
// (see shim/launch.h). Threads share heads as in qk_norm.cu.

#include "centring.cuh"

constexpr int kChunk = 32;    // tokens
constexpr int kColumns = 32;  // of a block of `means`

// Which of k and v a block of `sums` adds up: heads from `head` on, and tokens from `begin` to `end` of `chunk`, one of
// `chunks` of all sequences.
struct Share {
  int heads, at_once, head;
  long long begin, end, chunk;
  __device__ Share(int kv_heads, int lanes, long long sequence) {
    const int rows = blockDim.x / lanes;  // of threads, a head each
    heads = kv_heads < rows ? kv_heads : rows;
    at_once = rows / heads;  // tokens
    const int groups = (kv_heads + heads - 1) / heads;
    const long long in_sequence = (sequence + kChunk - 1) / kChunk;
    head = blockIdx.x % groups * heads;
    chunk = blockIdx.x / groups;
    const long long first = chunk / in_sequence * sequence, start = chunk % in_sequence * kChunk;
    begin = first + start;
    end = first + (start + kChunk < sequence ? start + kChunk : sequence);
  }
};

// Writes the sums of what the threads have to out, so many `numbers`. to_low, to_high: the place in shared memory
// [at_once, heads, d] of what this thread has, if it does.
template <int size>
__device__ void add_up(const float (&low)[size], const float (&high)[size], int to_low, int to_high, bool has,
                       float* shared, const Share& share, int numbers, int d, float* out) {
  __syncthreads();  // the memory has been used
  if (has)
    for (int i = 0; i < size; i++) shared[to_low + i] = low[i], shared[to_high + i] = high[i];
  __syncthreads();
  for (int i = threadIdx.x; i < numbers; i += blockDim.x) {
    float sum = 0;
    for (int token = 0; token < share.at_once; token++) sum += shared[token * share.heads * d + i];
    out[i] = sum;
  }
}

// Adds up a chunk of k, normed and rotated, and of v, into partials [chunks, 2, kv heads, d]. One block for a chunk and
// as many heads as it has threads for. angles: float32 [s, turned], row t % s for token t; 0 for no rotation.
template <class T>
__device__ void sums(const T* k, const T* v, long long stride, const T* k_weight, const float* angles, long long s,
                     long long sequence, Counts counts, Widths widths, int lanes, Norm norm, float* partials) {
  extern __shared__ float shared[];
  constexpr int size = Vector<T>::size;
  const Share share(counts.kv, lanes, sequence);
  const int d = widths.d, place = threadIdx.x % lanes * size, row = threadIdx.x / lanes;
  const int ahead = row / share.heads, head = row % share.heads;  // this thread's token and head of the block's
  const bool holds = place < d / 2 && ahead < share.at_once && share.head + head < counts.kv;
  const typename Pair<T>::At at(place, widths);
  const float *cosines = shared + ahead * d + place, *sines = cosines + d / 2;
  const long long to_head = static_cast<long long>(share.head + head) * d;
  float k_low[size] = {}, k_high[size] = {}, v_low[size] = {}, v_high[size] = {};

  for (long long first = share.begin; first < share.end; first += share.at_once) {  // all threads as often
    const long long token = first + ahead;
    const bool works = holds && token < share.end;
    Pair<T> of_k = {}, of_v = {};
    if (works)
      of_k = Pair<T>::at(k + token * stride + to_head, at), of_v = Pair<T>::at(v + token * stride + to_head, at);
    __syncthreads();  // the last angles have been read
    for (int i = threadIdx.x; i < share.at_once * d / 2; i += blockDim.x) {
      const int of_token = i / (d / 2), pair = i % (d / 2);
      const float* row_of_angles = angles ? angles + (first + of_token) % s * widths.turned : angles;
      float* to = shared + of_token * d + pair;
      take_angle(row_of_angles, pair, widths, 1, to[0], to[d / 2]);
    }
    __syncthreads();
    norm_and_turn(of_k, k_weight, works, at, d, lanes, norm, cosines, sines);
    for (int i = 0; i < size; i++) {  // a thread that does not work has zeros
      k_low[i] += to_float(of_k.low.x[i]), k_high[i] += to_float(of_k.high.x[i]);
      v_low[i] += to_float(of_v.low.x[i]), v_high[i] += to_float(of_v.high.x[i]);
    }
  }
  const int left = counts.kv - share.head, numbers = (left < share.heads ? left : share.heads) * d;
  const int start = (ahead * share.heads + head) * d;
  float* out = partials + share.chunk * 2 * counts.kv * d + share.head * d;
  add_up(k_low, k_high, start + at.low, start + at.high, holds, shared, share, numbers, d, out);
  out += counts.kv * d;
  add_up(v_low, v_high, start + at.low, start + at.high, holds, shared, share, numbers, d, out);
}

// means [sequences, columns] of partials [sequences, chunks, columns]. A block has kColumns of a sequence's columns, a
// multiple of which there are. Each thread adds up one of every few chunks.
extern "C" __global__ void centring_means(const float* partials, float* means, long long chunks, long long sequence,
                                          long long columns) {
  extern __shared__ float sums_of_threads[];
  const int step = blockDim.x / kColumns, first = threadIdx.x / kColumns;
  const long long blocks = columns / kColumns, of_sequence = blockIdx.x / blocks;
  const long long column = blockIdx.x % blocks * kColumns + threadIdx.x % kColumns;
  float sum = 0;
  for (long long chunk = first; chunk < chunks; chunk += step)
    sum += partials[(of_sequence * chunks + chunk) * columns + column];
  sums_of_threads[threadIdx.x] = sum;
  __syncthreads();
  if (first) return;
  for (int i = 1; i < step; i++) sum += sums_of_threads[i * kColumns + threadIdx.x];
  means[of_sequence * columns + column] = sum / sequence;
}

// Subtracts the means from k and v [tokens, numbers], `stride` from token to token, in place. One block a token.
template <class T>
__device__ void subtract_from_token(T* k, T* v, long long stride, Means means, int numbers) {
  constexpr int size = Vector<T>::size;
  const long long token = blockIdx.x;
  for (int i = threadIdx.x * size; i < numbers; i += blockDim.x * size) {
    subtract(*reinterpret_cast<Vector<T>*>(k + token * stride + i), means.of_k(token, numbers) + i);
    subtract(*reinterpret_cast<Vector<T>*>(v + token * stride + i), means.of_v(token, numbers) + i);
  }
}

// out = x scale_inv + the mean of a head's values, for x [tokens, heads, d] in e4m3. One block a token.
template <class T>
__device__ void dequantize_token(const unsigned char* x, float scale_inv, Means means, T* out, Counts counts, int d) {
  constexpr int size = Vector<T>::size;
  struct alignas(size) Bytes {
    unsigned short pairs[size / 2];
  };
  const long long token = blockIdx.x, width = counts.q * d;
  const int queries = counts.q / counts.kv;  // that a head of values has
  const float* of_v = means.of_v(token, counts.kv * d);
  for (int i = threadIdx.x * size; i < width; i += blockDim.x * size) {
    const Bytes bytes = *reinterpret_cast<const Bytes*>(x + token * width + i);
    const float* mean = of_v + i / d / queries * d + i % d;
    Vector<T> y;
    for (int j = 0; j < size; j += 2) {
      float low, high;
      e4m3::unpack(bytes.pairs[j / 2], low, high);
      from_float(low * scale_inv + mean[j], y.x[j]), from_float(high * scale_inv + mean[j + 1], y.x[j + 1]);
    }
    *reinterpret_cast<Vector<T>*>(out + token * width + i) = y;
  }
}

#define CENTRING(T)                                                                                                   \
  extern "C" __global__ void __launch_bounds__(256, 2) centring_sums_##T(                                             \
      const T* k, const T* v, long long stride, const T* k_weight, const float* angles, long long s,                  \
      long long sequence, long long heads, long long widths, long long factor, long long norm, float* partials) {     \
    sums<T>(k, v, stride, k_weight, angles, s, sequence, Counts(heads), Widths(widths, factor),                       \
            lanes_of_head<T>(static_cast<int>(widths)), Norm(norm), partials);                                        \
  }                                                                                                                   \
  extern "C" __global__ void centring_subtract_##T(T* k, T* v, long long stride, const float* means,                  \
                                                   long long sequence, long long numbers) {                           \
    subtract_from_token(k, v, stride, {means, sequence}, static_cast<int>(numbers));                                  \
  }                                                                                                                   \
  extern "C" __global__ void centring_dequantize_##T(const unsigned char* x, const float* scale_inv,                  \
                                                     const float* means, T* out, long long sequence, long long heads, \
                                                     long long d) {                                                   \
    dequantize_token(x, *scale_inv, {means, sequence}, out, Counts(heads), static_cast<int>(d));                      \
  }
CENTRING(bfloat16)
CENTRING(float16)
CENTRING(float)
