// Attention under Paddle's names of FlashAttention and FlashMask, operators that PyPI's CPU wheel has no kernels for.
#include "common.h"
#include "paddle/phi/kernels/flash_attn_grad_kernel.h"
#include "paddle/phi/kernels/flash_attn_kernel.h"

// Paddle declares this one in no header. The operator's function, which passes its arguments on to the kernel, is there
// by this name in libphi.so, without which the plug-in would not load.
namespace phi {
template <typename T, typename Context>
void FlashMaskGradKernel(const Context&, const DenseTensor&, const DenseTensor&, const DenseTensor&, const DenseTensor&,
                         const DenseTensor&, const DenseTensor&, const DenseTensor&, const DenseTensor&, float, bool,
                         DenseTensor*, DenseTensor*, DenseTensor*);
}  // namespace phi
namespace paddle::experimental {
void flashmask_attention_grad(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& startend_row_indices,
                              const Tensor& out, const Tensor& softmax_lse, const Tensor& seed_offset,
                              const Tensor& out_grad, float dropout, bool causal, Tensor* q_grad, Tensor* k_grad,
                              Tensor* v_grad);
}  // namespace paddle::experimental

namespace nvgpu {
namespace {

[[maybe_unused]] void (*const volatile kGradIsThere)(const paddle::Tensor&, const paddle::Tensor&,
                                                     const paddle::Tensor&, const paddle::Tensor&,
                                                     const paddle::Tensor&, const paddle::Tensor&,
                                                     const paddle::Tensor&, const paddle::Tensor&, float, bool,
                                                     paddle::Tensor*, paddle::Tensor*,
                                                     paddle::Tensor*) = &paddle::experimental::flashmask_attention_grad;

using Optional = paddle::optional<Tensor>;
const Types kAttended = {DataType::FLOAT32, DataType::FLOAT16, DataType::BFLOAT16};

void CheckPlain(const Optional& mask, float dropout, bool is_test, bool return_softmax) {
  PADDLE_ENFORCE_EQ(!mask && (dropout == 0 || is_test) && !return_softmax, true,
                    common::errors::Unimplemented("flash attention on nvgpu has neither dropout nor a dense mask, and "
                                                  "returns no probabilities"));
}

math::Attention AttentionOf(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, const Tensor* bound) {
  PADDLE_ENFORCE_EQ(q.dims().size() == 4 && k.dims().size() == 4 && v.dims().size() == 4 &&
                        q.dims()[0] == k.dims()[0] && k.dims()[0] == v.dims()[0] && k.dims()[1] == v.dims()[1] &&
                        k.dims()[2] == v.dims()[2] && q.dims()[3] == k.dims()[3] && q.dims()[2] % k.dims()[2] == 0,
                    true,
                    common::errors::InvalidArgument("attention of q [%s], k [%s] and v [%s], which must be [batch, "
                                                    "sequence, heads, size]",
                                                    q.dims(), k.dims(), v.dims()));
  math::Attention attention{
      q.data(),    k.data(),    v.data(), TypeOf(q), q.dims()[0], q.dims()[1], k.dims()[1], q.dims()[2], k.dims()[2],
      q.dims()[3], v.dims()[3], causal,   0};
  attention.scale = 1 / std::sqrt(static_cast<float>(q.dims()[3]));
  if (bound == nullptr) return attention;
  const int64_t rank = bound->dims().size(), heads = rank == 4 ? bound->dims()[1] : 0;
  const int64_t bounds = rank == 4 ? bound->dims()[3] : 0;
  PADDLE_ENFORCE_EQ(
      rank == 4 && bound->dtype() == DataType::INT32 && bound->dims()[0] == k.dims()[0] &&
          bound->dims()[2] == k.dims()[1] && (heads == 1 || heads == attention.kv_heads || heads == attention.heads) &&
          (bounds == 2 || bounds == (causal ? 1 : 4)),
      true, common::errors::InvalidArgument("startend_row_indices [%s] for k [%s]", bound->dims(), k.dims()));
  attention.bound = bound->data<int32_t>();
  attention.bounds = bounds;
  attention.bound_heads = heads;
  return attention;
}

void Run(const Context& context, const math::Attention& attention, const Tensor& q, Tensor* out, Tensor* lse,
         Tensor* seed_offset) {
  out->Resize(common::make_ddim({attention.batch, attention.queries, attention.heads, attention.v_width}));
  lse->Resize(common::make_ddim({attention.batch, attention.heads, attention.queries}));
  void* to = context.Alloc(out, q.dtype());
  auto* to_lse = static_cast<float*>(context.Alloc(lse, DataType::FLOAT32));
  if (seed_offset != nullptr) {  // of a dropout that is not there; the gradient asks for the tensor
    seed_offset->Resize({2});
    runtime::Fill(context.Alloc(seed_offset, DataType::INT64), 0, 2 * sizeof(int64_t), StreamOf(context));
  }
  if (q.numel() == 0) return;
  Tensor workspace = Temporary(context, DataType::UINT8, {int64_t(math::AttentionWorkspace(attention))});
  math::RunAttention(StreamOf(context), attention, to, to_lse, workspace.data());
}
void RunGrad(const Context& context, const math::Attention& attention, const Tensor& q, const Tensor& lse,
             const Tensor& out_grad, Tensor* q_grad, Tensor* k_grad, Tensor* v_grad) {
  const auto to = [&](Tensor* grad) { return grad == nullptr ? nullptr : context.Alloc(grad, q.dtype()); };
  void *to_q = to(q_grad), *to_k = to(k_grad), *to_v = to(v_grad);
  if (q.numel() == 0) return;
  Tensor workspace = Temporary(context, DataType::UINT8, {int64_t(math::AttentionGradWorkspace(attention))});
  math::RunAttentionGrad(StreamOf(context), attention, lse.data<float>(), out_grad.data(), to_q, to_k, to_v,
                         workspace.data());
}

void FlashAttention(const Context& context, const Tensor& q, const Tensor& k, const Tensor& v, const Optional&,
                    const Optional& mask, float dropout, bool causal, bool return_softmax, bool is_test,
                    const std::string&, Tensor* out, Tensor*, Tensor* lse, Tensor* seed_offset) {
  CheckPlain(mask, dropout, is_test, return_softmax);
  Run(context, AttentionOf(q, k, v, causal, nullptr), q, out, lse, seed_offset);
}
void FlashAttentionGrad(const Context& context, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor&,
                        const Tensor& lse, const Tensor&, const Optional&, const Tensor& out_grad, float, bool causal,
                        Tensor* q_grad, Tensor* k_grad, Tensor* v_grad) {
  RunGrad(context, AttentionOf(q, k, v, causal, nullptr), q, lse, out_grad, q_grad, k_grad, v_grad);
}
void FlashMask(const Context& context, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bound,
               const Optional&, float dropout, bool causal, bool return_softmax, bool is_test, const std::string&,
               Tensor* out, Tensor*, Tensor* lse, Tensor* seed_offset) {
  CheckPlain({}, dropout, is_test, return_softmax);
  Run(context, AttentionOf(q, k, v, causal, &bound), q, out, lse, seed_offset);
}
void FlashMaskGrad(const Context& context, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bound,
                   const Tensor&, const Tensor& lse, const Tensor&, const Tensor& out_grad, float, bool causal,
                   Tensor* q_grad, Tensor* k_grad, Tensor* v_grad) {
  RunGrad(context, AttentionOf(q, k, v, causal, &bound), q, lse, out_grad, q_grad, k_grad, v_grad);
}

}  // namespace

void RegisterAttention() {
  NVGPU_KERNEL(flash_attn, FlashAttention, FlashAttnKernel, kAttended);
  NVGPU_KERNEL(flash_attn_grad, FlashAttentionGrad, FlashAttnGradKernel, kAttended);
  NVGPU_KERNEL(flashmask_attention, FlashMask, FlashMaskKernel, kAttended);
  NVGPU_KERNEL(flashmask_attention_grad, FlashMaskGrad, FlashMaskGradKernel, kAttended);
}

}  // namespace nvgpu
