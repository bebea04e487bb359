// Embeddings and the optimizer.
#include <functional>

#include "common.h"
#include "paddle/phi/api/ext/op_meta_info.h"
#include "paddle/phi/backends/context_pool.h"
#include "paddle/phi/kernels/adamw_kernel.h"
#include "paddle/phi/kernels/c_embedding_grad_kernel.h"
#include "paddle/phi/kernels/c_embedding_kernel.h"
#include "paddle/phi/kernels/embedding_grad_kernel.h"
#include "paddle/phi/kernels/embedding_kernel.h"
#include "several.h"

namespace nvgpu {
namespace {

void Lookup(const Context& context, const Tensor& index, const Tensor& weight, int64_t first, int64_t padding,
            Tensor* out) {
  void* to = context.Alloc(out, weight.dtype());
  math::Gather(StreamOf(context), WidthOf(weight), to, weight.data(), index.data(), TypeOf(index), 1, weight.dims()[0],
               index.numel(), weight.dims()[1], first, padding);
}
math::EmbeddingIndex IndexOf(const Tensor& index, const Tensor& weight, int64_t first, int64_t padding) {
  return {index.data(), TypeOf(index), index.numel(), weight.dims()[0], weight.dims()[1], first, padding};
}
void LookupGrad(const Context& context, const Tensor& index, const Tensor& weight, const Tensor& out_grad,
                int64_t first, int64_t padding, Tensor* weight_grad) {
  weight_grad->Resize(weight.dims());
  void* to = context.Alloc(weight_grad, out_grad.dtype());
  Tensor workspace = Temporary(context, DataType::INT32, {2 * index.numel()});
  math::EmbeddingGrad(StreamOf(context), TypeOf(out_grad), to, out_grad.data(), IndexOf(index, weight, first, padding),
                      workspace.data<int32_t>());
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

// A weight with its state, updated in place; nullptr where there is none.
struct Weight {
  Tensor *param, *moment1, *moment2, *moment2_max, *master;
};
struct AdamWSettings {
  double beta1, beta2, epsilon;
  float rate_ratio, decay;
  uint32_t noise_key = 0, noise_first = 0;  // of the moments' stochastic rounding
};

int64_t WidthOfRows(const Tensor& tensor) {
  return tensor.dims().size() == 0 ? 1 : tensor.dims()[tensor.dims().size() - 1];
}

// Whether both moments have the size that 8 bits by blocks take, and nothing else is there that they exclude.
bool InBlocks(const Weight& weight) {
  const int64_t width = WidthOfRows(*weight.param);
  const int64_t size = width == 0 ? 0 : weight.param->numel() / width * math::MomentRowBytes(width);
  return weight.moment2_max == nullptr && weight.moment1->numel() == size && weight.moment2->numel() == size;
}

void CheckTypes(const Weight& weight, const Tensor& learning_rate) {
  const DataType type = weight.param->dtype(), moments = weight.moment1->dtype();
  const DataType wide = type == DataType::FLOAT64 ? DataType::FLOAT64 : DataType::FLOAT32;
  const DataType master = weight.master == nullptr ? wide : weight.master->dtype();
  const bool rounded =
      wide == DataType::FLOAT32 && (moments == DataType::BFLOAT16 || (moments == DataType::INT8 && InBlocks(weight)));
  const bool remainder = master == DataType::INT16 && type == DataType::BFLOAT16;
  const bool alike =
      weight.moment2->dtype() == moments && (weight.moment2_max == nullptr || weight.moment2_max->dtype() == moments);
  PADDLE_ENFORCE_EQ((moments == wide || rounded) && alike && (master == wide || remainder) &&
                        learning_rate.dtype() == DataType::FLOAT32,
                    true,
                    common::errors::Unimplemented(
                        "adamw on nvgpu keeps %s moments and master weights of %s weights, or bfloat16 moments, or "
                        "int8 moments in blocks (without amsgrad), or int16 remainders of bfloat16 weights, and "
                        "float32 learning rates; got %s moments, %s master "
                        "weights and a %s learning rate",
                        wide, type, moments, master, learning_rate.dtype()));
}

// grad_factor: float32 [1], what the gradient is multiplied by as it is read; nullptr for 1. Powers of beta are read
// only.
math::AdamW StepOf(const Weight& weight, const Tensor& grad, const Tensor* grad_factor, const Tensor& learning_rate,
                   const Tensor& beta1_power, const Tensor& beta2_power, const AdamWSettings& settings) {
  CheckTypes(weight, learning_rate);
  math::AdamW step;
  step.param = weight.param->data();
  step.grad = grad.data();
  step.type = TypeOf(*weight.param);
  step.grad_type = TypeOf(grad);
  step.moment_type = TypeOf(*weight.moment1);
  step.master_type = weight.master == nullptr ? Type::kNone : TypeOf(*weight.master);
  step.moment1 = weight.moment1->data();
  step.moment2 = weight.moment2->data();
  step.moment2_max = weight.moment2_max == nullptr ? nullptr : weight.moment2_max->data();
  step.master = weight.master == nullptr ? nullptr : weight.master->data();
  step.grad_factor = grad_factor == nullptr ? nullptr : grad_factor->data<float>();
  step.learning_rate = learning_rate.data();
  step.beta1_power = OnHost(beta1_power) ? nullptr : beta1_power.data<float>();
  step.beta2_power = OnHost(beta2_power) ? nullptr : beta2_power.data<float>();
  step.beta1_power_value = OnHost(beta1_power) ? *beta1_power.data<float>() : 0;
  step.beta2_power_value = OnHost(beta2_power) ? *beta2_power.data<float>() : 0;
  step.beta1 = settings.beta1;
  step.beta2 = settings.beta2;
  step.epsilon = settings.epsilon;
  step.decay = settings.decay;
  step.rate_ratio = settings.rate_ratio;
  step.noise_key = settings.noise_key;
  step.noise_first = settings.noise_first;
  step.count = weight.param->numel();
  step.width = WidthOfRows(*weight.param);
  return step;
}

// Paddle's own operation.
void AdamW(const Context& context, const Tensor& param, const Tensor& grad, const Tensor& learning_rate,
           const Tensor& moment1, const Tensor& moment2, const paddle::optional<Tensor>& moment2_max,
           const Tensor& beta1_power, const Tensor& beta2_power, const paddle::optional<Tensor>& master_param,
           const paddle::optional<Tensor>& skip_update, const phi::Scalar& beta1, const phi::Scalar& beta2,
           const phi::Scalar& epsilon, float rate_ratio, float decay, bool with_decay, bool, int64_t,
           bool multi_precision, bool use_global_beta_power, bool amsgrad, Tensor* param_out, Tensor* moment1_out,
           Tensor* moment2_out, Tensor* moment2_max_out, Tensor* beta1_power_out, Tensor* beta2_power_out,
           Tensor* master_param_out) {
  const bool with_master = multi_precision && master_param;
  Copy(context, param, param_out);  // no copies where Paddle updates in place, as it does
  Copy(context, moment1, moment1_out);
  Copy(context, moment2, moment2_out);
  if (amsgrad) Copy(context, *moment2_max, moment2_max_out);
  if (with_master) Copy(context, *master_param, master_param_out);
  const bool skip = skip_update && IsTrue(context, *skip_update);
  const AdamWSettings settings = {beta1.to<double>(), beta2.to<double>(), epsilon.to<double>(), rate_ratio,
                                  with_decay ? decay : 0};
  if (!skip) {
    const Weight weight = {param_out, moment1_out, moment2_out, amsgrad ? moment2_max_out : nullptr,
                           with_master ? master_param_out : nullptr};
    math::RunAdamW(StreamOf(context),
                   {StepOf(weight, grad, nullptr, learning_rate, beta1_power, beta2_power, settings)});
  }
  if (use_global_beta_power) return;
  Advance(context, beta1_power, skip ? 1 : settings.beta1, beta1_power_out);
  Advance(context, beta2_power, skip ? 1 : settings.beta2, beta2_power_out);
}

// ---- Operators of the plug-in's own, for many weights in one call

// What this thread has deferred, in the order of the calls.
thread_local bool deferring = false;
thread_local std::vector<std::function<void()>> deferred;

template <typename T>
void CheckCount(const char* what, const T& values, size_t count) {
  PADDLE_ENFORCE_EQ(
      values.size(), count,
      common::errors::InvalidArgument("nvgpu_multi_tensor_adamw: %d weights, but %d %s", count, values.size(), what));
}

void MultiTensorAdamW(const Several& params, const Several& grads, const paddle::optional<paddle::Tensor>& factor,
                      const paddle::Tensor& learning_rate, const Several& moments1, const Several& moments2,
                      const paddle::optional<Several>& moments2_max, const Several& beta1_powers,
                      const Several& beta2_powers, const paddle::optional<Several>& master_params, double beta1,
                      double beta2, double epsilon, const std::vector<float>& rate_ratios,
                      const std::vector<float>& decays, int64_t noise_key, const std::vector<int64_t>& noise_firsts) {
  const size_t count = params.size();
  if (count == 0) return;
  CheckCount("gradients", grads, count);
  CheckCount("first moments", moments1, count);
  CheckCount("second moments", moments2, count);
  if (moments2_max) CheckCount("greatest second moments", *moments2_max, count);
  CheckCount("powers of beta1", beta1_powers, count);
  CheckCount("powers of beta2", beta2_powers, count);
  if (master_params) CheckCount("master weights", *master_params, count);
  CheckCount("ratios of the rate", rate_ratios, count);
  CheckCount("decays", decays, count);
  CheckCount("first elements", noise_firsts, count);
  const Context& context = ContextOf(params[0]);
  std::vector<math::AdamW> steps;
  steps.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const Weight weight = {DenseOf(params[i]), DenseOf(moments1[i]), DenseOf(moments2[i]), DenseOf(moments2_max, i),
                           DenseOf(master_params, i)};
    for (const Tensor* tensor :
         {DenseOf(grads[i]), weight.moment1, weight.moment2, weight.moment2_max, weight.master}) {
      PADDLE_ENFORCE_EQ(tensor == nullptr || tensor->place() == params[0].place(), true,
                        common::errors::InvalidArgument("nvgpu: %s, its gradient and its state must all lie on %s",
                                                        params[i].name(), params[0].place()));
    }
    const AdamWSettings settings = {beta1,
                                    beta2,
                                    epsilon,
                                    rate_ratios[i],
                                    decays[i],
                                    static_cast<uint32_t>(noise_key),
                                    static_cast<uint32_t>(noise_firsts[i])};
    steps.push_back(StepOf(weight, *DenseOf(grads[i]), DenseOf(factor), *DenseOf(learning_rate),
                           *DenseOf(beta1_powers[i]), *DenseOf(beta2_powers[i]), settings));
  }
  auto run = [&context, steps = std::move(steps), beta1_powers, beta2_powers, beta1, beta2] {
    math::RunAdamW(StreamOf(context), steps);
    for (size_t i = 0; i < steps.size(); ++i) {
      Advance(context, *DenseOf(beta1_powers[i]), beta1, DenseOf(beta1_powers[i]));
      Advance(context, *DenseOf(beta2_powers[i]), beta2, DenseOf(beta2_powers[i]));
    }
  };
  deferring ? deferred.push_back(std::move(run)) : run();
}

Several MultiTensorSquaredNorms(const Several& tensors) {
  const Context& context = ContextOf(tensors[0]);
  const DataType type = tensors[0].dtype();
  std::vector<const void*> in;
  std::vector<int64_t> counts;
  for (const paddle::Tensor& tensor : tensors) {
    PADDLE_ENFORCE_EQ(tensor.dtype(), type,
                      common::errors::InvalidArgument("nvgpu_multi_tensor_squared_l2_norm: tensors of one type"));
    in.push_back(DenseOf(tensor)->data());
    counts.push_back(tensor.numel());
  }
  auto out = std::make_shared<Tensor>(Temporary(context, type, {int64_t(tensors.size())}));
  Tensor workspace = Temporary(context, DataType::UINT8, {math::SumsOfSquaresWorkspace(counts)});
  math::SumsOfSquares(StreamOf(context), TypeOf(type), out->data(), in, counts, workspace.data());
  return {paddle::Tensor(out)};
}
std::vector<std::vector<int64_t>> ShapeOfNorms(const std::vector<std::vector<int64_t>>& shapes) {
  return {{int64_t(shapes.size())}};
}
std::vector<DataType> TypeOfNorms(const std::vector<DataType>& types) { return {types[0]}; }

void AddEmbeddingGrad(const paddle::Tensor& main_grad, const paddle::Tensor& index, const paddle::Tensor& out_grad,
                      int64_t first, int64_t padding) {
  const Context& context = ContextOf(main_grad);
  const Tensor &rows = *DenseOf(main_grad), &grad = *DenseOf(out_grad);
  const bool fits = main_grad.dtype() == DataType::FLOAT32 && out_grad.dtype() != DataType::FLOAT64 &&
                    rows.dims().size() == 2 && grad.numel() == DenseOf(index)->numel() * rows.dims()[1];
  PADDLE_ENFORCE_EQ(
      fits, true,
      common::errors::InvalidArgument("nvgpu_embedding_wgrad_accumulation: a float32 gradient [vocabulary, width] "
                                      "and one of at most 32 bits [tokens, width], not %s and %s",
                                      rows.dims(), grad.dims()));
  Tensor workspace = Temporary(context, DataType::INT32, {2 * index.numel()});
  math::AddEmbeddingGrad(StreamOf(context), TypeOf(grad), static_cast<float*>(DenseOf(main_grad)->data()), grad.data(),
                         IndexOf(*DenseOf(index), rows, first, padding), workspace.data<int32_t>());
}

// Not moved to the device: the powers of beta and the flag to skip.
void PowersStay(const phi::KernelKey&, phi::Kernel* kernel) {
  for (int input : {6, 7, 9}) kernel->InputAt(input).SetBackend(phi::Backend::ALL_BACKEND);
  for (int output : {4, 5}) kernel->OutputAt(output).SetBackend(phi::Backend::UNDEFINED);
}

}  // namespace

void StartDeferring() {
  deferred.clear();
  deferring = true;
}
void EndDeferring() { deferring = false; }
void RunDeferred() {
  for (const auto& run : std::exchange(deferred, {})) run();
}

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

// Operators of Paddle's for paddle_te, which calls them by their names.
//
// AdamW of many weights, which share a learning rate (float32 [1]), betas, and what only this operator has: a factor of
// the gradient (float32 [1] on the device), so that clipping needs no pass of its own; bfloat16 moments, or int8
// moments in blocks, for whose rounding noise_key and noise_firsts are (32 bits each); remainders of master weights.
// decays: 0 for a weight that does not decay. It changes its inputs, which is not declared: Paddle refuses operators of
// plug-ins that change a weight in place, even where no gradient is asked for.
PD_BUILD_OP(nvgpu_multi_tensor_adamw)
    .Inputs({paddle::Vec("Params"), paddle::Vec("Grads"), paddle::Optional("Factor"), "LearningRate",
             paddle::Vec("Moments1"), paddle::Vec("Moments2"), paddle::Optional(paddle::Vec("Moments2Max")),
             paddle::Vec("Beta1Pows"), paddle::Vec("Beta2Pows"), paddle::Optional(paddle::Vec("MasterParams"))})
    .Outputs({})
    .Attrs({"beta1: double", "beta2: double", "epsilon: double", "rate_ratios: std::vector<float>",
            "decays: std::vector<float>", "noise_key: int64_t", "noise_firsts: std::vector<int64_t>"})
    .SetKernelFn(PD_KERNEL(nvgpu::MultiTensorAdamW));

// Paddle's squared_l2_norm of many tensors of one type: [count] of that type.
PD_BUILD_OP(nvgpu_multi_tensor_squared_l2_norm)
    .Inputs({paddle::Vec("Tensors")})
    .Outputs({"Norms"})
    .SetKernelFn(PD_KERNEL(nvgpu::MultiTensorSquaredNorms))
    .SetInferShapeFn(PD_INFER_SHAPE(nvgpu::ShapeOfNorms))
    .SetInferDtypeFn(PD_INFER_DTYPE(nvgpu::TypeOfNorms));

// What the embedding's gradient adds to a main gradient [vocabulary, width], float32, in place. first: the vocabulary's
// number of its first row; padding: the number of a token that has no gradient, -1 for none.
PD_BUILD_OP(nvgpu_embedding_wgrad_accumulation)
    .Inputs({"MainGrad", "Index", "OutGrad"})
    .Outputs({})
    .Attrs({"first: int64_t", "padding: int64_t"})
    .SetKernelFn(PD_KERNEL(nvgpu::AddEmbeddingGrad));
