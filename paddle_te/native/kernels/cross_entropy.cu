// Cross-entropy of logits that lie in 16 bits, in float32 arithmetic, without a float32 copy of them.
//
// The first kernel reads the logits once, a block a row: the running maximum and sum of Milakov and Gimelshein (2018,
// arXiv:1805.02867). From what it leaves the second one has the losses; ranks that share the vocabulary meet in between
// (Megatron-LM, Shoeybi et al., 2019). The third reads the logits again for their gradient: 6 bytes a logit in all.
//
// Compiled at run time by NVRTC. Every parameter is 8 bytes (see shim/launch.h).
#include "types.cuh"

constexpr float kLog2E = 1.4426950408889634f, kLowest = -3.4028234e38f;

struct Softmax {  // of some logits: the greatest, and the sum of exp(logit - greatest)
  float max = kLowest, sum = 0;

  __device__ static float exponential(float x) { return exp2f(x * kLog2E); }
  __device__ void raise(float other) {
    if (other > max) sum *= exponential(max - other), max = other;
  }
  template <int size>
  __device__ void add(const float (&x)[size]) {
    float greatest = x[0];
    for (int i = 1; i < size; i++) greatest = fmaxf(greatest, x[i]);
    raise(greatest);
    for (int i = 0; i < size; i++) sum += exponential(x[i] - max);
  }
};

template <class T>
__device__ Softmax of_thread(const T* row, long long columns) {
  constexpr int size = Vector<T>::size;
  Softmax softmax;
  if (columns % size == 0) {
    for (long long i = threadIdx.x * size; i < columns; i += blockDim.x * size) {
      const Vector<T> vector = *reinterpret_cast<const Vector<T>*>(row + i);
      float x[size];
      for (int j = 0; j < size; j++) x[j] = to_float(vector.x[j]);
      softmax.add(x);
    }
  } else {  // rows are not aligned
    for (long long i = threadIdx.x; i < columns; i += blockDim.x) {
      const float x[1] = {to_float(row[i])};
      softmax.add(x);
    }
  }
  return softmax;
}

// stats [3, rows]: greatest logit, sum of exp(logit - greatest), the label's logit (0 where another rank has it).
// blockDim.x is a power of two.
template <class T>
__device__ void cross_entropy_stats(const T* logits, const long long* labels, float* stats, long long rows,
                                    long long columns, long long first) {
  extern __shared__ float shared[];
  float *maxima = shared, *sums = shared + blockDim.x;
  const long long row = blockIdx.x, at = labels[row] - first;
  const T* x = logits + row * columns;
  const Softmax mine = of_thread(x, columns);
  maxima[threadIdx.x] = mine.max;
  sums[threadIdx.x] = mine.sum;
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      Softmax both{maxima[threadIdx.x], sums[threadIdx.x]};
      const float other = maxima[threadIdx.x + half];
      both.raise(other);
      both.sum += sums[threadIdx.x + half] * Softmax::exponential(other - both.max);
      maxima[threadIdx.x] = both.max;
      sums[threadIdx.x] = both.sum;
    }
  }
  if (threadIdx.x == 0) {
    stats[row] = maxima[0];
    stats[rows + row] = sums[0];
    stats[2 * rows + row] = at >= 0 && at < columns ? to_float(x[at]) : 0.f;
  }
}

// loss [rows]: 0 for labels that are ignored, NaN for those outside of the vocabulary, which 0 would hide.
extern "C" __global__ void cross_entropy_loss(const long long* labels, const float* stats, float* loss, long long rows,
                                              long long vocabulary, long long ignored) {
  const long long row = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const long long label = labels[row];
  const float max = stats[row], sum = stats[rows + row], picked = stats[2 * rows + row];
  loss[row] = label == ignored ? 0.f : label >= 0 && label < vocabulary ? logf(sum) - (picked - max) : nanf("");
}

// gradient, which may be the logits: of the sum of dloss [rows] times the losses. 0 in rows that are ignored, NaN in
// those whose loss is.
template <class T>
__device__ void cross_entropy_gradient(const T* logits, T* gradient, const long long* labels, const float* stats,
                                       const float* dloss, long long rows, long long columns, long long first,
                                       long long vocabulary, long long ignored) {
  constexpr int size = Vector<T>::size;
  const long long row = blockIdx.x, label = labels[row], at = label - first;
  const bool word = label >= 0 && label < vocabulary, none = label == ignored;
  const float max = stats[row], scale = word ? dloss[row] : nanf(""), factor = scale / stats[rows + row];
  const T* x = logits + row * columns;
  T* dx = gradient + row * columns;
  auto of = [&](float logit, long long i) {
    return none ? 0.f : Softmax::exponential(logit - max) * factor - (i == at ? scale : 0.f);
  };
  if (columns % size == 0) {
    for (long long i = threadIdx.x * size; i < columns; i += blockDim.x * size) {
      Vector<T> vector = *reinterpret_cast<const Vector<T>*>(x + i);
      for (int j = 0; j < size; j++) from_float(of(to_float(vector.x[j]), i + j), vector.x[j]);
      *reinterpret_cast<Vector<T>*>(dx + i) = vector;
    }
  } else {
    for (long long i = threadIdx.x; i < columns; i += blockDim.x) from_float(of(to_float(x[i]), i), dx[i]);
  }
}

#define CROSS_ENTROPY(T)                                                                                             \
  extern "C" __global__ void __launch_bounds__(512) cross_entropy_stats_##T(                                         \
      const T* logits, const long long* labels, float* stats, long long rows, long long columns, long long first) {  \
    cross_entropy_stats(logits, labels, stats, rows, columns, first);                                                \
  }                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(512) cross_entropy_gradient_##T(                                      \
      const T* logits, T* gradient, const long long* labels, const float* stats, const float* dloss, long long rows, \
      long long columns, long long first, long long vocabulary, long long ignored) {                                 \
    cross_entropy_gradient(logits, gradient, labels, stats, dloss, rows, columns, first, vocabulary, ignored);       \
  }
CROSS_ENTROPY(bfloat16)
CROSS_ENTROPY(float16)
CROSS_ENTROPY(float)
