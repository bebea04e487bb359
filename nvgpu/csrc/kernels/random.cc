// Random numbers from the device's own generator, so that paddle.seed, the RNG states that tensor parallelism keeps per
// rank, and recompute's saved states have the effect they have on a GPU.
#include "common.h"
#include "paddle/phi/core/generator.h"
#include "paddle/phi/kernels/dropout_grad_kernel.h"
#include "paddle/phi/kernels/dropout_kernel.h"
#include "paddle/phi/kernels/gaussian_kernel.h"
#include "paddle/phi/kernels/uniform_inplace_kernel.h"
#include "paddle/phi/kernels/uniform_kernel.h"

namespace nvgpu {
namespace {

math::RandomState NextState(const Context& context, int seed) {
  if (seed != 0) return {static_cast<uint64_t>(seed), 0};
  const auto [current, offset] = context.GetGenerator()->IncrementOffset(1);
  return {current, offset};
}

void Uniform(const Context& context, const phi::IntArray& shape, DataType type, const phi::Scalar& low,
             const phi::Scalar& high, int seed, Tensor* out) {
  out->Resize(common::make_ddim(shape.GetData()));
  void* to = context.Alloc(out, type == DataType::UNDEFINED ? out->dtype() : type);
  math::Uniform(StreamOf(context), TypeOf(*out), to, low.to<double>(), high.to<double>(), NextState(context, seed),
                out->numel());
}

void UniformInplace(const Context& context, const Tensor& x, float low, float high, int seed, int diagonals, int, float,
                    Tensor* out) {
  PADDLE_ENFORCE_EQ(diagonals, 0, common::errors::Unimplemented("uniform_ with a diagonal"));
  void* to = context.Alloc(out, x.dtype());
  math::Uniform(StreamOf(context), TypeOf(x), to, low, high, NextState(context, seed), x.numel());
}

void Gaussian(const Context& context, const phi::IntArray& shape, float mean, float deviation, int seed, DataType type,
              Tensor* out) {
  out->Resize(common::make_ddim(shape.GetData()));
  void* to = context.Alloc(out, type == DataType::UNDEFINED ? out->dtype() : type);
  math::Normal(StreamOf(context), TypeOf(*out), to, mean, deviation, NextState(context, seed), out->numel());
}

void GaussianInplace(const Context& context, const Tensor& x, float mean, float deviation, int seed, Tensor* out) {
  void* to = context.Alloc(out, x.dtype());
  math::Normal(StreamOf(context), TypeOf(x), to, mean, deviation, NextState(context, seed), x.numel());
}

// What the kept elements are multiplied by.
double ScaleOf(const std::string& mode, double p) { return mode == "upscale_in_train" && p < 1 ? 1 / (1 - p) : 1; }
void Rescale(const Context& context, const Tensor& x, double factor, Tensor* out) {
  void* to = context.Alloc(out, x.dtype());
  const Dims dims = DimsOf(x);
  math::Elementwise(StreamOf(context), math::Op::kScale, TypeOf(x), to, dims, {Broadcast(x, dims)}, {factor, 0}, {});
}

void Dropout(const Context& context, const Tensor& x, const paddle::optional<Tensor>& seed_tensor,
             const phi::Scalar& probability, bool is_test, const std::string& mode, int seed, bool fix_seed,
             Tensor* out, Tensor* mask) {
  PADDLE_ENFORCE_EQ(static_cast<bool>(seed_tensor), false,
                    common::errors::Unimplemented("dropout on nvgpu takes no tensor of a seed"));
  const double p = probability.to<double>();
  if (is_test) return Rescale(context, x, mode == "upscale_in_train" ? 1 : 1 - p, out);
  void* to = context.Alloc(out, x.dtype());
  auto* to_mask = mask == nullptr ? nullptr : context.template Alloc<uint8_t>(mask);
  math::Dropout(StreamOf(context), TypeOf(x), to, to_mask, x.data(), p, ScaleOf(mode, p),
                NextState(context, fix_seed ? seed : 0), x.numel());
}

void DropoutGrad(const Context& context, const Tensor& mask, const Tensor& out_grad, const phi::Scalar& probability,
                 bool is_test, const std::string& mode, Tensor* x_grad) {
  const double p = probability.to<double>();
  if (is_test) return Rescale(context, out_grad, mode == "upscale_in_train" ? 1 : 1 - p, x_grad);
  void* to = context.Alloc(x_grad, out_grad.dtype());
  math::MaskedScale(StreamOf(context), TypeOf(out_grad), to, mask.data<uint8_t>(), out_grad.data(), ScaleOf(mode, p),
                    out_grad.numel());
}

}  // namespace

void RegisterRandom() {
  const auto mask_is_bytes = [](const phi::KernelKey&, phi::Kernel* kernel) {
    kernel->OutputAt(1).SetDataType(DataType::UINT8);
  };
  NVGPU_KERNEL(uniform, Uniform, UniformKernel, kFloats);
  NVGPU_KERNEL(uniform_inplace, UniformInplace, UniformInplaceKernel, kFloats);
  NVGPU_KERNEL(gaussian, Gaussian, GaussianKernel, kFloats);
  NVGPU_KERNEL(gaussian_inplace, GaussianInplace, GaussianInplaceKernel, kFloats);
  NVGPU_KERNEL(dropout, Dropout, DropoutRawKernel, kFloats, mask_is_bytes);
  NVGPU_KERNEL(dropout_grad, DropoutGrad, DropoutGradRawKernel, kFloats);
}

}  // namespace nvgpu
