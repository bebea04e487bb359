// Embeddings and the optimizer.
#include "common.h"
#include "paddle/phi/kernels/adamw_kernel.h"
#include "paddle/phi/kernels/c_embedding_grad_kernel.h"
#include "paddle/phi/kernels/c_embedding_kernel.h"
#include "paddle/phi/kernels/embedding_grad_kernel.h"
#include "paddle/phi/kernels/embedding_kernel.h"

namespace nvgpu {
namespace {

void Lookup(const Context& context, const Tensor& index, const Tensor& weight, int64_t first, int64_t padding,
            Tensor* out) {
  void* to = context.Alloc(out, weight.dtype());
  math::Gather(StreamOf(context), WidthOf(weight), to, weight.data(), index.data(), TypeOf(index), 1, weight.dims()[0],
               index.numel(), weight.dims()[1], first, padding);
}
void LookupGrad(const Context& context, const Tensor& index, const Tensor& weight, const Tensor& out_grad,
                int64_t first, int64_t padding, Tensor* weight_grad) {
  weight_grad->Resize(weight.dims());
  void* to = context.Alloc(weight_grad, out_grad.dtype());
  Tensor workspace = Temporary(context, DataType::INT32, {2 * index.numel()});
  math::EmbeddingGrad(StreamOf(context), TypeOf(out_grad), to, out_grad.data(), index.data(), TypeOf(index),
                      index.numel(), weight.dims()[0], weight.dims()[1], first, padding, workspace.data<int32_t>());
}

void Embedding(const Context& context, const Tensor& index, const Tensor& weight, int64_t padding, Tensor* out) {
  Lookup(context, index, weight, 0, padding, out);
}
void EmbeddingGrad(const Context& context, const Tensor& index, const Tensor& weight, const Tensor& out_grad,
                   int64_t padding, Tensor* weight_grad) {
  LookupGrad(context, index, weight, out_grad, 0, padding, weight_grad);
}
// A slice of the vocabulary: what lies outside of it gives zeros, and the sum over the ranks is the embedding.
void ParallelEmbedding(const Context& context, const Tensor& weight, const Tensor& index, int64_t first, int64_t,
                       Tensor* out) {
  Lookup(context, index, weight, first, -1, out);
}
void ParallelEmbeddingGrad(const Context& context, const Tensor& weight, const Tensor& index, const Tensor& out_grad,
                           int64_t first, Tensor* weight_grad) {
  LookupGrad(context, index, weight, out_grad, first, -1, weight_grad);
}

// ---- AdamW

bool OnHost(const Tensor& tensor) { return tensor.place().GetType() == phi::AllocationType::CPU; }

// Paddle keeps these on the host, and a checkpoint may bring them to the device: updated where they are.
void Advance(const Context& context, const Tensor& power, double beta, Tensor* out) {
  out->Resize(power.dims());
  if (OnHost(power)) {
    const float value = *power.data<float>();
    *CpuContext().Alloc<float>(out) = static_cast<float>(beta) * value;
  } else {
    context.Alloc(out, power.dtype());
    math::Elementwise(StreamOf(context), math::Op::kScale, TypeOf(power), out->data(), DimsOf(power),
                      {Broadcast(power, DimsOf(power))}, {beta, 0}, {});
  }
}

bool IsTrue(const Context& context, const Tensor& flag) {
  if (OnHost(flag)) return *flag.data<bool>();
  bool value;
  runtime::Copy(&value, flag.data(), sizeof(value), runtime::CopyKind::kDeviceToHost, StreamOf(context));
  return value;
}

void AdamW(const Context& context, const Tensor& param, const Tensor& grad, const Tensor& learning_rate,
           const Tensor& moment1, const Tensor& moment2, const paddle::optional<Tensor>& moment2_max,
           const Tensor& beta1_power, const Tensor& beta2_power, const paddle::optional<Tensor>& master_param,
           const paddle::optional<Tensor>& skip_update, const phi::Scalar& beta1, const phi::Scalar& beta2,
           const phi::Scalar& epsilon, float rate_ratio, float decay, bool with_decay, bool, int64_t,
           bool multi_precision, bool use_global_beta_power, bool amsgrad, Tensor* param_out, Tensor* moment1_out,
           Tensor* moment2_out, Tensor* moment2_max_out, Tensor* beta1_power_out, Tensor* beta2_power_out,
           Tensor* master_param_out) {
  const bool with_master = multi_precision && master_param;
  // A float32 in place of the flag is what the gradient is to be multiplied by, so that clipping needs no pass of its
  // own: paddle_te.training.optimizer passes it. Paddle's own operation has no input for it.
  const bool grad_factor = skip_update && skip_update->dtype() == DataType::FLOAT32;
  Copy(context, param, param_out);  // no copies where Paddle updates in place, as it does
  Copy(context, moment1, moment1_out);
  Copy(context, moment2, moment2_out);
  if (amsgrad) Copy(context, *moment2_max, moment2_max_out);
  if (with_master) Copy(context, *master_param, master_param_out);
  if (skip_update && !grad_factor && IsTrue(context, *skip_update)) {
    if (use_global_beta_power) return;
    Advance(context, beta1_power, 1, beta1_power_out);
    Advance(context, beta2_power, 1, beta2_power_out);
    return;
  }
  const DataType moments = moment1.dtype();
  PADDLE_ENFORCE_EQ(moments == (param.dtype() == DataType::FLOAT64 ? DataType::FLOAT64 : DataType::FLOAT32) &&
                        learning_rate.dtype() == DataType::FLOAT32,
                    true,
                    common::errors::Unimplemented("adamw on nvgpu keeps float32 moments and learning rates, got %s "
                                                  "moments and a %s learning rate",
                                                  moments, learning_rate.dtype()));
  math::AdamW step;
  step.param = param_out->data();
  step.grad = grad.data();
  step.type = TypeOf(param);
  step.grad_type = TypeOf(grad);
  step.moment1 = moment1_out->data();
  step.moment2 = moment2_out->data();
  step.moment2_max = amsgrad ? moment2_max_out->data() : nullptr;
  step.master = with_master ? master_param_out->data() : nullptr;
  step.grad_factor = grad_factor ? skip_update->data<float>() : nullptr;
  step.learning_rate = learning_rate.data();
  step.beta1_power = OnHost(beta1_power) ? nullptr : beta1_power.data<float>();
  step.beta2_power = OnHost(beta2_power) ? nullptr : beta2_power.data<float>();
  step.beta1_power_value = OnHost(beta1_power) ? *beta1_power.data<float>() : 0;
  step.beta2_power_value = OnHost(beta2_power) ? *beta2_power.data<float>() : 0;
  step.beta1 = beta1.to<double>();
  step.beta2 = beta2.to<double>();
  step.epsilon = epsilon.to<double>();
  step.decay = with_decay ? decay : 0;
  step.rate_ratio = rate_ratio;
  step.count = param.numel();
  math::RunAdamW(StreamOf(context), step);
  if (use_global_beta_power) return;
  Advance(context, beta1_power, step.beta1, beta1_power_out);
  Advance(context, beta2_power, step.beta2, beta2_power_out);
}

// Not moved to the device: the powers of beta and the flag to skip.
void PowersStay(const phi::KernelKey&, phi::Kernel* kernel) {
  for (int input : {6, 7, 9}) kernel->InputAt(input).SetBackend(phi::Backend::ALL_BACKEND);
  for (int output : {4, 5}) kernel->OutputAt(output).SetBackend(phi::Backend::UNDEFINED);
}

}  // namespace

void RegisterTraining() {
  const auto index_varies = [](const phi::KernelKey&, phi::Kernel* kernel) {
    kernel->InputAt(0).SetDataType(DataType::UNDEFINED);
  };
  NVGPU_KERNEL(embedding, Embedding, EmbeddingKernel, kFloats, index_varies);
  NVGPU_KERNEL(embedding_grad, EmbeddingGrad, EmbeddingGradKernel, kFloats, index_varies);
  NVGPU_KERNEL(c_embedding, ParallelEmbedding, CEmbeddingKernel, kFloats);
  NVGPU_KERNEL(c_embedding_grad, ParallelEmbeddingGrad, CEmbeddingGradKernel, kFloats);
  NVGPU_KERNEL(adamw, AdamW, AdamwDenseKernel, kFloats, PowersStay);
}

}  // namespace nvgpu
