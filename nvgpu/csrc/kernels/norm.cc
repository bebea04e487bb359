// RMSNorm, as PaddleFormers calls it: an operator that PyPI's CPU wheel has, but no kernel for it.
#include "common.h"
#include "paddle/phi/api/include/api.h"

// Paddle declares these in no header. The operator's functions, which pass their arguments on to the kernels, are
// compared below: one in api.h, the other by its name in libphi.so, without which the plug-in would not load.
namespace phi {
template <typename T, typename Context>
void FusedRmsNormExtKernel(const Context&, const DenseTensor&, const DenseTensor&, float, DenseTensor*, DenseTensor*);
template <typename T, typename Context>
void FusedRmsNormExtGradKernel(const Context&, const DenseTensor&, const DenseTensor&, const DenseTensor&,
                               const DenseTensor&, float, DenseTensor*, DenseTensor*);
}  // namespace phi
namespace paddle::experimental {
void fused_rms_norm_ext_grad(const Tensor& x, const Tensor& scale, const Tensor& invvar, const Tensor& y_grad,
                             float epsilon, Tensor* x_grad, Tensor* scale_grad);
}  // namespace paddle::experimental

namespace nvgpu {
namespace {

using Both = paddle::optional<std::tuple<paddle::Tensor*, paddle::Tensor*>>;
static_assert(std::is_same_v<decltype(&paddle::experimental::fused_rms_norm_ext),
                             std::tuple<paddle::Tensor, paddle::Tensor> (*)(const paddle::Tensor&,
                                                                            const paddle::Tensor&, float, Both)>);
[[maybe_unused]] void (*const volatile kGradIsThere)(const paddle::Tensor&, const paddle::Tensor&,
                                                     const paddle::Tensor&, const paddle::Tensor&, float,
                                                     paddle::Tensor*,
                                                     paddle::Tensor*) = &paddle::experimental::fused_rms_norm_ext_grad;

int64_t ColumnsOf(const Tensor& x, const Tensor& scale) {
  const int64_t rank = x.dims().size();
  PADDLE_ENFORCE_EQ(rank > 0 && scale.numel() == x.dims()[rank - 1] && scale.dtype() == x.dtype(), true,
                    common::errors::Unimplemented("fused_rms_norm_ext on nvgpu takes a scale of the last axis's size "
                                                  "and of the input's type; got %s [%s] for %s [%s]",
                                                  scale.dtype(), scale.dims(), x.dtype(), x.dims()));
  return scale.numel();
}
int64_t RowsOf(const Tensor& x, int64_t columns) { return columns == 0 ? 0 : x.numel() / columns; }

void RmsNorm(const Context& context, const Tensor& x, const Tensor& scale, float epsilon, Tensor* y, Tensor* invvar) {
  const int64_t columns = ColumnsOf(x, scale);
  Dims rows = DimsOf(x);
  rows.pop_back();
  invvar->Resize(common::make_ddim(rows));
  void* to = context.Alloc(y, x.dtype());
  void* rstd = context.Alloc(invvar, x.dtype() == DataType::FLOAT64 ? DataType::FLOAT64 : DataType::FLOAT32);
  math::RmsNorm(StreamOf(context), TypeOf(x), to, rstd, x.data(), scale.data(), epsilon, RowsOf(x, columns), columns);
}

void RmsNormGrad(const Context& context, const Tensor& x, const Tensor& scale, const Tensor& invvar,
                 const Tensor& y_grad, float, Tensor* x_grad, Tensor* scale_grad) {
  const int64_t columns = ColumnsOf(x, scale), rows = RowsOf(x, columns);
  void* x_to = x_grad == nullptr ? nullptr : context.Alloc(x_grad, x.dtype());
  void* scale_to = scale_grad == nullptr ? nullptr : context.Alloc(scale_grad, scale.dtype());
  Tensor workspace = Temporary(context, DataType::UINT8, {int64_t(math::RmsNormGradWorkspace(rows, columns))});
  math::RmsNormGrad(StreamOf(context), TypeOf(x), x_to, scale_to, x.data(), scale.data(), invvar.data(), y_grad.data(),
                    rows, columns, workspace.data());
}

}  // namespace

void RegisterNorms() {
  NVGPU_KERNEL(fused_rms_norm_ext, RmsNorm, FusedRmsNormExtKernel, kFloats);
  NVGPU_KERNEL(fused_rms_norm_ext_grad, RmsNormGrad, FusedRmsNormExtGradKernel, kFloats);
}

}  // namespace nvgpu
