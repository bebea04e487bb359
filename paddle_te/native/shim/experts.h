// Mixtures of experts: the router, the activation times a probability, and GEMMs of experts whose numbers of rows lie
// on the device.
#pragma once

#include "calls.h"

// A handle of TE's for matrices of several experts that lie one behind the other, for the length of a C++ scope.
class GroupedHandle {
 public:
  // counts, offsets: of the matrices' rows, and where each begins, in numbers; 0 where all are alike. scale_inv: one
  // for each expert, both copies'; with block scaling each copy's are the tensor's, one expert's behind the other's.
  GroupedHandle(const Tensor& tensor, size_t experts, uintptr_t counts, uintptr_t offsets, uintptr_t scale_inv)
      : handle_(nvte_create_grouped_tensor(tensor.scaling_mode, experts, {{tensor.rows(), tensor.cols()}, 2})) {
    const NVTEShape flat = {{tensor.numel()}, 1};
    const size_t rows = offsets ? tensor.rows() : tensor.rows() / experts, parts = offsets ? 1 : experts;
    const bool in_blocks = tensor.scaling_mode != kPerTensorScaling;
    auto set_factors = [&](int param, uintptr_t own, size_t of_rows, size_t of_cols) {
      const NVTEShape shape = scale_inv_shape(tensor.scaling_mode, of_rows, of_cols);
      const size_t count = in_blocks ? parts * shape.data[0] * shape.data[1] : experts;
      const uintptr_t factors = in_blocks ? own : scale_inv;
      if (factors) set(param, {to_pointer(factors), kFloat32, {{count}, 1}});
    };
    if (tensor.data.data_ptr) {
      set(kRowwiseData, {tensor.data.data_ptr, tensor.data.dtype, flat});
      set_factors(kRowwiseScaleInv, tensor.scale_inv, rows, tensor.cols());
    }
    if (tensor.columnwise) {
      set(kColumnwiseData, {to_pointer(tensor.columnwise), tensor.data.dtype, flat});
      set_factors(kColumnwiseScaleInv, tensor.columnwise_scale_inv, tensor.cols(), rows);
    }
    if (!offsets) return;
    set(kFirstDims, {to_pointer(counts), kInt64, {{experts}, 1}});
    set(kOffsets, {to_pointer(offsets), kInt64, {{experts + 1}, 1}});
  }
  ~GroupedHandle() { nvte_destroy_grouped_tensor(handle_); }
  GroupedHandle(const GroupedHandle&) = delete;
  GroupedHandle& operator=(const GroupedHandle&) = delete;
  operator NVTEGroupedTensor() const { return handle_; }

 private:
  static void* to_pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }
  void set(int param, const NVTEBasicTensor& value) {
    nvte_set_grouped_tensor_param(handle_, param, &value, sizeof value);
  }

  NVTEGroupedTensor handle_;
};

static NVTEConfig grouped_config(bool split_accumulator, const Stream& stream) {
  static std::map<std::pair<bool, int>, NVTEConfig> configs;  // for the process's life
  NVTEConfig& config = configs[{split_accumulator, stream.gemm_sms}];
  if (!config) {
    config = nvte_create_grouped_matmul_config();
    const uint8_t split = split_accumulator;
    nvte_set_grouped_matmul_config_attribute(config, kGroupedSplitAccumulator, &split, sizeof split);
    const int32_t sms = stream.gemm_sms;
    if (sms < stream.sm_count) nvte_set_grouped_matmul_config_attribute(config, kGroupedSMCount, &sms, sizeof sms);
  }
  return config;
}

static void check_grouped_gemm(const char* name, Named named, const Tensor& a, const Tensor& b, const Tensor& d,
                               bool transa, bool transb, size_t experts, bool ragged_a, bool ragged_d) {
  auto rows = [&](const Tensor& tensor, bool ragged) { return ragged ? tensor.rows() : tensor.rows() / experts; };
  const bool divides = experts && (ragged_a || a.rows() % experts == 0) && (ragged_d || d.rows() % experts == 0);
  if (divides) {
    const size_t a_rows = rows(a, ragged_a), m = transa ? a_rows : a.cols(), k = transa ? a.cols() : a_rows;
    const size_t n = transb ? b.cols() : b.rows(), kb = transb ? b.rows() : b.cols();
    if (k == kb && rows(d, ragged_d) == n && d.cols() == m) return;
  }
  raise(describe(std::string(name) + ": shapes do not fit " + std::to_string(experts) +
                     " experts (transa=" + (transa ? "1" : "0") + ", transb=" + (transb ? "1" : "0") + ")",
                 named));
}

// A weight's matrices are alike, those of tokens have the rows that `counts` says: A's are ragged with transb, D's
// without, and B's always. factors: what products and C are multiplied by, each at the beginning of 16 bytes.
static void grouped_gemm(const Tensor& a, const Tensor& b, const Tensor& d, bool transa, bool transb, size_t experts,
                         uintptr_t counts, uintptr_t offsets_a, uintptr_t offsets_b, uintptr_t offsets_d,
                         uintptr_t factors, Stream& stream, bool accumulate, bool split_accumulator,
                         uintptr_t scale_inv_a, uintptr_t scale_inv_b, const Tensor* c) {
  const char* name = "nvte_grouped_gemm";
  Named named = {{"A", &a}, {"B", &b}, {"D", &d}, {"C", c}};
  check_grouped_gemm(name, named, a, b, d, transa, transb, experts, transb, !transb);
  if (c) check_grouped_gemm(name, named, a, b, *c, transa, transb, experts, transb, !transb);
  call(name, named, [&] {
    const size_t setup = (nvte_get_grouped_gemm_setup_workspace_size(experts) + 255) / 256 * 256;
    auto* memory = static_cast<char*>(stream.workspace(setup + kGemmWorkspace));
    Handle of_setup, of_cublas, one, of_beta;
    of_setup.set(kRowwiseData, {memory, kByte, {{setup}, 1}});
    of_cublas.set(kRowwiseData, {memory + setup, kByte, {{kGemmWorkspace}, 1}});
    one.set_scalar(kRowwiseData, factors);
    of_beta.set_scalar(kRowwiseData, factors + 16);
    const GroupedHandle A(a, experts, counts, transb ? offsets_a : 0, scale_inv_a);
    const GroupedHandle B(b, experts, counts, offsets_b, scale_inv_b);
    const GroupedHandle D(d, experts, counts, transb ? 0 : offsets_d, 0);
    const GroupedHandle C(c ? *c : d, experts, counts, transb ? 0 : offsets_d, 0);
    nvte_grouped_gemm(A, transa, B, transb, c || accumulate ? NVTEGroupedTensor(C) : nullptr, D, one, of_beta, of_setup,
                      of_cublas, grouped_config(split_accumulator, stream), stream.handle);
  });
}

// counts, offsets: 0 for a weight's matrices, which are alike.
static void quantize_grouped_blocks(const Tensor& input, const Tensor& output, size_t experts, uintptr_t counts,
                                    uintptr_t offsets, bool force_pow_2_scales, float amax_epsilon, Stream& stream) {
  call("nvte_group_quantize", {{"input", &input}, {"output", &output}}, [&] {
    const GroupedHandle from(input, experts, counts, offsets, 0), to(output, experts, counts, offsets, 0);
    nvte_group_quantize(from, to, quantization_config(force_pow_2_scales, amax_epsilon), stream.handle);
  });
}

static void scaled_swiglu(const Tensor& input, const Tensor& scales, const Tensor& output, Stream& stream) {
  call("nvte_scaled_swiglu", {{"input", &input}, {"scales", &scales}, {"output", &output}},
       [&] { nvte_scaled_swiglu(input.handle, scales.handle, output.handle, 0, stream.handle); });
}

static void scaled_dswiglu(const Tensor& grad, const Tensor& input, const Tensor& scales, const Tensor& output,
                           const Tensor& dscales, Stream& stream) {
  Named named = {{"grad", &grad}, {"input", &input}, {"scales", &scales}, {"output", &output}, {"dscales", &dscales}};
  call("nvte_scaled_dswiglu", named, [&] {
    nvte_scaled_dswiglu(grad.handle, input.handle, scales.handle, output.handle, dscales.handle, 0, stream.handle);
  });
}

static void scaled_clamped_swiglu(const Tensor& input, const Tensor& scales, const Tensor& output, float limit,
                                  float alpha, float offset, Stream& stream) {
  call("nvte_scaled_clamped_swiglu", {{"input", &input}, {"scales", &scales}, {"output", &output}}, [&] {
    nvte_scaled_clamped_swiglu(input.handle, scales.handle, output.handle, limit, alpha, offset, 0, stream.handle);
  });
}

static void scaled_clamped_dswiglu(const Tensor& grad, const Tensor& input, const Tensor& scales, const Tensor& output,
                                   const Tensor& dscales, float limit, float alpha, float offset, Stream& stream) {
  Named named = {{"grad", &grad}, {"input", &input}, {"scales", &scales}, {"output", &output}, {"dscales", &dscales}};
  call("nvte_scaled_clamped_dswiglu", named, [&] {
    nvte_scaled_clamped_dswiglu(grad.handle, input.handle, scales.handle, output.handle, dscales.handle, limit, alpha,
                                offset, 0, stream.handle);
  });
}

// num_groups, group_topk: -1 for no groups. sigmoid: the score function, else softmax.
static void topk_forward(const Tensor& logits, const Tensor* expert_bias, const Tensor& probs,
                         const Tensor& routing_map, const Tensor& scores, int topk, bool pre_softmax, int num_groups,
                         int group_topk, float scaling_factor, bool sigmoid, Stream& stream) {
  Named named = {{"logits", &logits}, {"expert_bias", expert_bias}, {"probs", &probs}, {"routing_map", &routing_map}};
  call("nvte_fused_topk_with_score_function_forward", named, [&] {
    nvte_fused_topk_with_score_function_forward(
        logits.handle, logits.rows(), logits.cols(), topk, pre_softmax, num_groups, group_topk, scaling_factor,
        !sigmoid, or_empty(expert_bias).handle, probs.handle, routing_map.handle, scores.handle, stream.handle);
  });
}

static void topk_backward(const Tensor& routing_map, const Tensor& scores, const Tensor& dprobs, const Tensor& dlogits,
                          int topk, bool pre_softmax, float scaling_factor, bool sigmoid, Stream& stream) {
  Named named = {{"routing_map", &routing_map}, {"scores", &scores}, {"dprobs", &dprobs}, {"dlogits", &dlogits}};
  call("nvte_fused_topk_with_score_function_backward", named, [&] {
    nvte_fused_topk_with_score_function_backward(routing_map.handle, scores.handle, dprobs.handle, dprobs.rows(),
                                                 dprobs.cols(), topk, pre_softmax, scaling_factor, !sigmoid,
                                                 dlogits.handle, stream.handle);
  });
}
