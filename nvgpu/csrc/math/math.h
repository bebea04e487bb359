// The device code of the plug-in, as the Paddle-facing kernels see it: raw pointers, no Paddle types.
//
// The .cu files behind it are compiled by nvcc for the CUDA runtime and, as plain C++, by g++ for the host runtime.
// Tensors are dense and row-major unless strides are given; strides and offsets count elements. Everything is put on
// `stream` and returns at once. A function that gets a type it has no code for throws std::invalid_argument.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../runtime.h"

namespace nvgpu::math {

constexpr int kMaxRank = 9;
using Dims = std::vector<int64_t>;

// ---- elementwise.cu

enum class Op : int {
#define NVGPU_OP(name, inputs, types, result, expression) name,
#include "ops.def"
#undef NVGPU_OP
};

// A parameter of an operation, for integer tensors and for the others.
struct Number {
  double real = 0;
  int64_t integer = 0;
};
struct Input {
  const void* data;
  Dims strides;  // over the output's dims, 0 where it is broadcast
};

// out = op(inputs; p, q), computed in float32 (float64, int64 for tensors of that kind). The inputs have the type
// `type`; the output has it too, or is bool, as ops.def says.
void Elementwise(Stream stream, Op op, Type type, void* out, const Dims& dims, const std::vector<Input>& inputs,
                 Number p = {}, Number q = {});
// For gradients of two operands that are summed next: short floats in, float32 out.
void ElementwiseWide(Stream stream, Op op, Type type, void* out, const Dims& dims, const std::vector<Input>& inputs);
void Cast(Stream stream, const void* in, Type from, void* out, Type to, int64_t count);

// ---- move.cu: what only moves elements of 1, 2, 4, 8 or 16 bytes

void StridedCopy(Stream stream, size_t width, void* to, const Dims& to_strides, const void* from,
                 const Dims& from_strides, const Dims& dims);
void FillWith(Stream stream, size_t width, void* to, const void* element, int64_t count);
// out = condition ? x : y
void Where(Stream stream, size_t width, void* out, const Dims& dims, const Input& condition, const Input& x,
           const Input& y);
// Keeps what is on or below (lower) or on or above the diagonal of each [rows, columns], 0 elsewhere.
void Triangle(Stream stream, size_t width, void* out, const void* in, int64_t batch, int64_t rows, int64_t columns,
              int64_t diagonal, bool lower);
// out[i, j, k] = in[i, index[j], k], for in [outer, size, inner]; rows of zeros where the index is outside [0, size) or
// equals `padding`. index: int32 or int64.
void Gather(Stream stream, size_t width, void* out, const void* in, const void* index, Type index_type, int64_t outer,
            int64_t size, int64_t count, int64_t inner, int64_t first = 0, int64_t padding = -1);
// out[i] = in[where it is over dims, plus each index's value times its stride], as NumPy's advanced indexing; a
// negative index counts from `size`. Every index has the strides `index_strides` over dims.
struct AdvancedIndex {
  const void* values;  // int64
  int64_t size, stride;
};
void TakeAdvanced(Stream stream, size_t width, void* out, const Dims& dims, const Input& in,
                  const std::vector<AdvancedIndex>& indices, const Dims& index_strides);
void OneHot(Stream stream, float* out, const void* index, Type index_type, int64_t count, int64_t classes);
void Arange(Stream stream, Type type, void* out, Number start, Number step, int64_t count);

// ---- reduce.cu

enum class Reduction { kSum, kMean, kMax, kMin, kProduct, kAll, kAny, kSumOfSquares };

// Reduces the axes of `in` marked in `reduced`; sums in float32 (float64, int64) whatever the tensor's type.
// kSumOfSquares writes float32 for short floats. Workspace: ReduceWorkspace() bytes.
size_t ReduceWorkspace(const Dims& dims, const std::vector<bool>& reduced);
void Reduce(Stream stream, Reduction reduction, Type type, void* out, const void* in, const Dims& dims,
            const std::vector<bool>& reduced, void* workspace);
// out[n]: the sum of the squares of in[n], of counts[n] elements, rounded to their type; all arrays in few launches. A
// sum's bits are those of kSumOfSquares. Workspace: SumsOfSquaresWorkspace() bytes.
int64_t SumsOfSquaresWorkspace(const std::vector<int64_t>& counts);
void SumsOfSquares(Stream stream, Type type, void* out, const std::vector<const void*>& in,
                   const std::vector<int64_t>& counts, void* workspace);
// The first index of the largest (smallest) element of each row, as int64 or int32.
void ArgExtreme(Stream stream, bool largest, Type type, void* out, Type out_type, const void* in, int64_t outer,
                int64_t size, int64_t inner);

// ---- rows.cu: softmax and what is built on it, for [rows, columns]

void Softmax(Stream stream, Type type, bool log, void* out, const void* in, int64_t rows, int64_t columns);
void SoftmaxGrad(Stream stream, Type type, bool log, void* in_grad, const void* out, const void* out_grad, int64_t rows,
                 int64_t columns);
// The softmax of a row's first elements up to the diagonal, of [rows, size, size], and zeros behind it; its gradient is
// SoftmaxGrad.
void CausalSoftmax(Stream stream, Type type, void* out, const void* in, int64_t rows, int64_t size);
// -log softmax(logits)[label], 0 where the label is `ignored`; NaN, as the gradient, where it is no class either.
void CrossEntropy(Stream stream, Type type, void* softmax, void* loss, const void* logits, const void* labels,
                  Type label_type, int64_t ignored, int64_t rows, int64_t columns);
// (softmax - onehot(label - first)) * loss_grad; for a slice, of `columns` of the `classes`, that begins at `first`.
void CrossEntropyGrad(Stream stream, Type type, void* logits_grad, const void* softmax, const void* labels,
                      Type label_type, const void* loss_grad, int64_t ignored, int64_t first, int64_t rows,
                      int64_t columns, int64_t classes);
// The three steps of the cross-entropy over classes that are spread over ranks, in float32 between them: the largest
// logit; then the sum of exp(logit - largest) and the label's logit - largest; then softmax and loss.
void RowMax(Stream stream, Type type, float* largest, const void* logits, int64_t rows, int64_t columns);
void RowSumExp(Stream stream, Type type, float* sum, float* picked, const void* logits, const float* largest,
               const void* labels, Type label_type, int64_t first, int64_t rows, int64_t columns, int64_t classes);
void FinishCrossEntropy(Stream stream, Type type, void* softmax, void* loss, const void* logits, const float* largest,
                        const float* sum, const float* picked, const void* labels, Type label_type, int64_t ignored,
                        int64_t rows, int64_t columns);

// ---- norm.cu: RMSNorm (Zhang & Sennrich, arXiv 1910.07467) of [rows, columns]

// out = in * rstd * scale, with rstd = 1 / sqrt(mean of in's squares in the row + epsilon), one float32 a row (float64
// for kDouble), which is written too.
void RmsNorm(Stream stream, Type type, void* out, void* rstd, const void* in, const void* scale, double epsilon,
             int64_t rows, int64_t columns);
// Both gradients; null: not wanted. scale_grad: sums over the rows, in parts that are added in order. Workspace:
// RmsNormGradWorkspace() bytes.
size_t RmsNormGradWorkspace(int64_t rows, int64_t columns);
void RmsNormGrad(Stream stream, Type type, void* in_grad, void* scale_grad, const void* in, const void* scale,
                 const void* rstd, const void* out_grad, int64_t rows, int64_t columns, void* workspace);

// ---- attention.cu

// softmax(scale * q k^T) v for each head, of q [batch, queries, heads, width], k [batch, keys, kv_heads, width] and v
// [batch, keys, kv_heads, v_width]. kFloat, kHalf, kBfloat16; scores and sums are float32.
//
// causal: the last query sees all keys, each one before it one key less. FlashMask's bounds (Wang et al., arXiv
// 2410.01359), int32 [batch, bound_heads, keys, bounds]: of a key the first query that it is hidden from (causal,
// bounds 1), that and the first that sees it again (causal, 2); that it is hidden from, and the first of all that sees
// it (2); or both intervals of queries that it is hidden from (4). bounds 0: none. A query that sees no key has zeros.
struct Attention {
  const void *q, *k, *v;
  Type type;
  int64_t batch, queries, keys, heads, kv_heads, width, v_width;
  bool causal;
  float scale;
  const int32_t* bound = nullptr;
  int64_t bounds = 0, bound_heads = 1;
};
// Scores of a stretch of queries at a time lie in the workspace: at most 256 MiB of float32 on a GPU, or one query's.
size_t AttentionWorkspace(const Attention& attention);
// lse: float32 [batch, heads, queries], the logarithm of the sum of exp(score) over the keys that a query sees.
void RunAttention(Stream stream, const Attention& attention, void* out, float* lse, void* workspace);
size_t AttentionGradWorkspace(const Attention& attention);
void RunAttentionGrad(Stream stream, const Attention& attention, const float* lse, const void* out_grad, void* q_grad,
                      void* k_grad, void* v_grad, void* workspace);

// ---- embedding_grad.cu, adamw.cu

// An embedding's lookup: `count` indices of rows of `width` elements, of which those from `first` to first + size - 1
// are here. padding: an index whose row has no gradient; -1: none. type: of the indices, kInt32 or kInt64.
struct EmbeddingIndex {
  const void* index;
  Type type;
  int64_t count, size, width, first, padding;
};
// weight_grad[v] = sum of out_grad[i] over the i with index[i] == v + first, in the order of i; [size, width].
// workspace: 2 * count numbers.
void EmbeddingGrad(Stream stream, Type type, void* weight_grad, const void* out_grad, const EmbeddingIndex& index,
                   int32_t* workspace);
// main_grad[v] += the same sum, in float32, which has not been rounded to out_grad's `type`, one of at most 4 bytes.
void AddEmbeddingGrad(Stream stream, Type type, float* main_grad, const void* out_grad, const EmbeddingIndex& index,
                      int32_t* workspace);

// One step of AdamW (Loshchilov & Hutter, arXiv 1711.05101), as Paddle's: decay first, epsilon scaled by the bias
// correction. The gradient times the factor, both rounded to the gradient's type as in a product of tensors, is what
// the step takes for the gradient.
//
// Moments are float32 (float64 beside float64 weights), or bfloat16, rounded stochastically with random numbers that
// follow from noise_key and noise_first + i alone. Master weights have the moments' wide type, or are kInt16 beside
// bfloat16 weights: what the weight lacks of the float32 master weight, whose bits are (weight's << 16) + remainder, as
// with store_param_remainders of Transformer Engine's FusedAdam.
//
// Moments of kInt8 (float32 arithmetic, no moment2_max) lie in blocks of kMomentBlock elements of a row, fewer at the
// row's end: 4 bytes of a float32 unit, then a byte an element, then zeros up to a multiple of 4 bytes. The first
// moment is unit * code^4 with the sign of code, an int8; the second moment's square root is unit * code^4, code a
// uint8. Codes are rounded with the same random numbers, so that the expected values of what a code stands for are
// exact.
constexpr int64_t kMomentBlock = 256;
constexpr int64_t MomentRowBytes(int64_t width) {
  return (width + 3) / 4 * 4 + (width + kMomentBlock - 1) / kMomentBlock * 4;
}
struct AdamW {
  void* param;
  const void* grad;
  Type type, grad_type, moment_type, master_type;
  void *moment1, *moment2, *moment2_max, *master;  // updated in place; null: moment2_max without amsgrad, no master
  const float* grad_factor;                        // on the device; null: 1
  const void* learning_rate;                       // one float32 on the device
  const float *beta1_power, *beta2_power;          // on the device, or null: then the values below
  float beta1_power_value, beta2_power_value;
  double beta1, beta2, epsilon, decay, rate_ratio;
  uint32_t noise_key, noise_first;
  int64_t count, width;  // of elements, and of those of a row, into which blocks divide it
};
// Those of the same types together, dozens in a launch, each with the bits of a launch of its own.
void RunAdamW(Stream stream, const std::vector<AdamW>& steps);

// ---- muon.cu

// Momentum of a weight's gradients: momentum = beta * momentum + grad, and Nesterov's update = grad + beta * momentum.
struct MuonMomentum {
  const void* grad;
  void *momentum, *update;  // written; momentum is read, too
  Type grad_type, momentum_type, update_type;
  const float* grad_factor;  // on the device, what the gradient is multiplied by; null: 1
  float beta;
  int64_t count;
};
void RunMuonMomentum(Stream stream, const std::vector<MuonMomentum>& weights);

// param = param * (1 - rate * decay) - rate * update.
struct MuonStep {
  void *param, *master;  // updated in place; master: null where there is none
  const void* update;
  Type type, master_type, update_type;
  const float* learning_rate;  // on the device
  float decay;
  int64_t count;
};
void RunMuonSteps(Stream stream, const std::vector<MuonStep>& steps);

// ---- random.cu: Philox 4x32-10 (Salmon et al., SC 2011), one counter an element: the same numbers in both runtimes

struct RandomState {
  uint64_t seed, offset;  // one offset a call
};
void Uniform(Stream stream, Type type, void* out, double low, double high, RandomState state, int64_t count);
void Normal(Stream stream, Type type, void* out, double mean, double deviation, RandomState state, int64_t count);
// mask = 1 where a uniform number is at least p, and out = mask ? x * scale : 0.
void Dropout(Stream stream, Type type, void* out, uint8_t* mask, const void* x, double p, double scale,
             RandomState state, int64_t count);
void MaskedScale(Stream stream, Type type, void* out, const uint8_t* mask, const void* x, double scale, int64_t count);

// ---- cuda/gemm.cc, host/gemm.cc

// C = op(A) op(B) of row-major matrices, [m, k] x [k, n], accumulated in float32 (float64); `batch` of them at the
// given strides. kFloat, kDouble, kHalf, kBfloat16. row_*: elements from a stored row to the next, 0 where rows lie one
// after another. wide_c: C is float32 beside 16-bit A and B. adds: to what C holds, which then is float32 or float64.
struct Gemm {
  const void *a, *b;
  void* c;
  bool transpose_a, transpose_b;
  int64_t m, n, k;
  int64_t batch = 1, stride_a = 0, stride_b = 0, stride_c = 0;
  int64_t row_a = 0, row_b = 0, row_c = 0;
  bool wide_c = false, adds = false;

  int64_t RowA() const { return row_a > 0 ? row_a : (transpose_a ? m : k); }
  int64_t RowB() const { return row_b > 0 ? row_b : (transpose_b ? k : n); }
  int64_t RowC() const { return row_c > 0 ? row_c : n; }
};
void RunGemm(Stream stream, Type type, const Gemm& gemm);

}  // namespace nvgpu::math
