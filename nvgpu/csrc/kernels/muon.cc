// Muon's two passes over many weights, as operators of Paddle's for paddle_te.
#include "several.h"

namespace nvgpu {
namespace {

void CheckAlike(const char* what, const paddle::Tensor& weight, const paddle::Tensor& tensor) {
  const bool alike = tensor.place() == weight.place() && tensor.numel() == weight.numel();
  PADDLE_ENFORCE_EQ(
      alike, true,
      common::errors::InvalidArgument("nvgpu: the %s of %s has %d elements on %s, and not %d on %s", what,
                                      weight.name(), tensor.numel(), tensor.place(), weight.numel(), weight.place()));
}

void MuonMomenta(const Several& grads, const paddle::optional<paddle::Tensor>& factor, const Several& momenta,
                 const Several& updates, double beta) {
  const Tensor* grad_factor = DenseOf(factor);
  std::vector<math::MuonMomentum> weights;
  for (size_t i = 0; i < momenta.size(); ++i) {
    CheckAlike("gradient", momenta[i], grads.at(i));
    CheckAlike("update", momenta[i], updates.at(i));
    Tensor &grad = *DenseOf(grads[i]), &momentum = *DenseOf(momenta[i]), &update = *DenseOf(updates[i]);
    weights.push_back({grad.data(), momentum.data(), update.data(), TypeOf(grad), TypeOf(momentum), TypeOf(update),
                       grad_factor == nullptr ? nullptr : grad_factor->data<float>(), static_cast<float>(beta),
                       momentum.numel()});
  }
  if (!weights.empty()) math::RunMuonMomentum(StreamOf(ContextOf(momenta[0])), weights);
}

void MuonSteps(const Several& params, const Several& updates, const paddle::Tensor& learning_rate,
               const paddle::optional<Several>& masters, const std::vector<float>& decays) {
  std::vector<math::MuonStep> steps;
  for (size_t i = 0; i < params.size(); ++i) {
    CheckAlike("update", params[i], updates.at(i));
    if (masters) CheckAlike("master weight", params[i], masters->at(i));
    Tensor &param = *DenseOf(params[i]), &update = *DenseOf(updates[i]), *master = DenseOf(masters, i);
    steps.push_back({param.data(), master == nullptr ? nullptr : master->data(), update.data(), TypeOf(param),
                     master == nullptr ? Type::kNone : TypeOf(*master), TypeOf(update),
                     DenseOf(learning_rate)->data<float>(), decays.at(i), param.numel()});
  }
  if (!steps.empty()) math::RunMuonSteps(StreamOf(ContextOf(params[0])), steps);
}

}  // namespace
}  // namespace nvgpu

// Both change inputs, which is not declared: see nvgpu_multi_tensor_adamw.
//
// For each weight momentum = beta * momentum + factor * grad and update = factor * grad + beta * momentum. Factor:
// float32 [1] on the device.
PD_BUILD_OP(nvgpu_multi_tensor_muon_momentum)
    .Inputs({paddle::Vec("Grads"), paddle::Optional("Factor"), paddle::Vec("Momenta"), paddle::Vec("Updates")})
    .Outputs({})
    .Attrs({"beta: double"})
    .SetKernelFn(PD_KERNEL(nvgpu::MuonMomenta));

// For each weight param = param * (1 - rate * decay) - rate * update. LearningRate: float32 [1] on the device.
PD_BUILD_OP(nvgpu_multi_tensor_muon)
    .Inputs({paddle::Vec("Params"), paddle::Vec("Updates"), "LearningRate",
             paddle::Optional(paddle::Vec("MasterParams"))})
    .Outputs({})
    .Attrs({"decays: std::vector<float>"})
    .SetKernelFn(PD_KERNEL(nvgpu::MuonSteps));
