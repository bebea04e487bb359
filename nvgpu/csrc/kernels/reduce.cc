// Reductions and their gradients.
#include "common.h"
#include "paddle/phi/kernels/arg_min_max_kernel.h"
#include "paddle/phi/kernels/mean_all_grad_kernel.h"
#include "paddle/phi/kernels/mean_all_kernel.h"
#include "paddle/phi/kernels/prod_kernel.h"
#include "paddle/phi/kernels/reduce_all_kernel.h"
#include "paddle/phi/kernels/reduce_any_kernel.h"
#include "paddle/phi/kernels/reduce_max_grad_kernel.h"
#include "paddle/phi/kernels/reduce_max_kernel.h"
#include "paddle/phi/kernels/reduce_mean_grad_kernel.h"
#include "paddle/phi/kernels/reduce_mean_kernel.h"
#include "paddle/phi/kernels/reduce_min_grad_kernel.h"
#include "paddle/phi/kernels/reduce_min_kernel.h"
#include "paddle/phi/kernels/reduce_sum_grad_kernel.h"
#include "paddle/phi/kernels/reduce_sum_kernel.h"
#include "paddle/phi/kernels/squared_l2_norm_kernel.h"

namespace nvgpu {
namespace {

using math::Reduction;

// No axes: all of them.
std::vector<bool> Marks(const Tensor& x, const std::vector<int64_t>& axes, bool all = false) {
  const int64_t rank = x.dims().size();
  std::vector<bool> marks(rank, all || axes.empty());
  for (int64_t axis : axes) {
    if (rank > 0) marks[AxisOf(axis, rank)] = true;
  }
  return marks;
}

Dims DimsAfter(const Tensor& x, const std::vector<bool>& reduced, bool keep_dim) {
  Dims dims;
  for (size_t axis = 0; axis < reduced.size(); ++axis) {
    if (!reduced[axis]) {
      dims.push_back(x.dims()[axis]);
    } else if (keep_dim) {
      dims.push_back(1);
    }
  }
  return dims;
}

// `out` gets `type`, which is what the reduction makes of x's.
void Run(const Context& context, Reduction reduction, const Tensor& x, const std::vector<bool>& reduced, bool keep_dim,
         DataType type, Tensor* out) {
  const Tensor from = x;
  out->Resize(common::make_ddim(DimsAfter(from, reduced, keep_dim)));
  void* to = context.Alloc(out, type);
  if (out->numel() == 0) return;
  Tensor workspace = Temporary(context, DataType::UINT8, {int64_t(math::ReduceWorkspace(DimsOf(from), reduced))});
  math::Reduce(StreamOf(context), reduction, TypeOf(from), to, from.data(), DimsOf(from), reduced, workspace.data());
}

Tensor As(const Context& context, const Tensor& x, DataType type) {
  if (x.dtype() == type) return x;
  Tensor converted = Temporary(context, type, DimsOf(x));
  math::Cast(StreamOf(context), x.data(), TypeOf(x), converted.data(), TypeOf(type), x.numel());
  return converted;
}

void Sum(const Context& context, const Tensor& x, const phi::IntArray& axes, DataType type, bool keep_dim,
         Tensor* out) {
  const auto marks = Marks(x, axes.GetData());
  if (type == DataType::UNDEFINED) {  // integers are summed in int64, as NumPy does
    const bool is_float = TypeOf(x) >= Type::kHalf;
    type = is_float ? x.dtype() : DataType::INT64;
  }
  Run(context, Reduction::kSum, As(context, x, type), marks, keep_dim, type, out);
}

template <Reduction reduction>
void Reduce(const Context& context, const Tensor& x, const phi::IntArray& axes, bool keep_dim, Tensor* out) {
  Run(context, reduction, x, Marks(x, axes.GetData()), keep_dim, x.dtype(), out);
}
template <Reduction reduction>
void Test(const Context& context, const Tensor& x, const std::vector<int64_t>& axes, bool keep_dim, Tensor* out) {
  Run(context, reduction, x, Marks(x, axes), keep_dim, DataType::BOOL, out);
}
void Product(const Context& context, const Tensor& x, const phi::IntArray& axes, bool keep_dim, bool all, Tensor* out) {
  Run(context, Reduction::kProduct, x, Marks(x, axes.GetData(), all), keep_dim, x.dtype(), out);
}
void MeanAll(const Context& context, const Tensor& x, Tensor* out) {
  Run(context, Reduction::kMean, x, Marks(x, {}), false, x.dtype(), out);
}
// float32 between, whatever Paddle wants in the end.
void SquaredNorm(const Context& context, const Tensor& x, Tensor* out) {
  const DataType type = out->dtype() == DataType::UNDEFINED ? x.dtype() : out->dtype();
  Tensor sum;
  Run(context, Reduction::kSumOfSquares, x, Marks(x, {}), false,
      x.dtype() == DataType::FLOAT64 ? DataType::FLOAT64 : DataType::FLOAT32, &sum);
  const Dims dims = DimsOf(*out);
  *out = As(context, sum, type);
  out->Resize(common::make_ddim(dims));
}

// Every element that was summed has the sum's gradient, times `factor`.
void Spread(const Context& context, const Tensor& x, const Tensor& out_grad, const std::vector<bool>& reduced,
            double factor, Tensor* x_grad) {
  Tensor grad = As(context, out_grad, x.dtype());
  grad.Resize(common::make_ddim(DimsAfter(x, reduced, true)));
  x_grad->Resize(x.dims());
  void* to = context.Alloc(x_grad, x.dtype());
  if (x.numel() == 0) return;
  const Dims dims = DimsOf(x);
  math::Elementwise(StreamOf(context), math::Op::kScale, TypeOf(x), to, dims, {Broadcast(grad, dims)},
                    {factor, static_cast<int64_t>(factor)});
}

void SumGrad(const Context& context, const Tensor& x, const Tensor& out_grad, const phi::IntArray& axes, bool, bool all,
             Tensor* x_grad) {
  Spread(context, x, out_grad, Marks(x, axes.GetData(), all), 1, x_grad);
}
void MeanGrad(const Context& context, const Tensor& x, const Tensor& out_grad, const phi::IntArray& axes, bool,
              bool all, Tensor* x_grad) {
  const auto reduced = Marks(x, axes.GetData(), all);
  Spread(context, x, out_grad, reduced, static_cast<double>(CountOf(DimsAfter(x, reduced, true))) / x.numel(), x_grad);
}
void MeanAllGrad(const Context& context, const Tensor& x, const Tensor& out_grad, Tensor* x_grad) {
  Spread(context, x, out_grad, Marks(x, {}), 1.0 / x.numel(), x_grad);
}

// The elements that equal the extreme share its gradient.
void ExtremeGrad(const Context& context, const Tensor& x, const Tensor& out, const Tensor& out_grad,
                 const phi::IntArray& axes, bool, bool all, Tensor* x_grad) {
  const auto reduced = Marks(x, axes.GetData(), all);
  const Dims dims = DimsOf(x), kept = DimsAfter(x, reduced, true);
  Tensor extreme = out, grad = out_grad;
  extreme.Resize(common::make_ddim(kept));
  grad.Resize(common::make_ddim(kept));
  x_grad->Resize(x.dims());
  void* to = context.Alloc(x_grad, x.dtype());
  if (x.numel() == 0) return;
  const DataType wide = x.dtype() == DataType::FLOAT64 ? DataType::FLOAT64 : DataType::FLOAT32;
  Tensor equal = Temporary(context, DataType::BOOL, dims), share = Temporary(context, x.dtype(), kept), count;
  math::Elementwise(StreamOf(context), math::Op::kEqual, TypeOf(x), equal.data(), dims,
                    {Broadcast(x, dims), Broadcast(extreme, dims)});
  Run(context, Reduction::kSum, As(context, equal, wide), reduced, true, wide, &count);
  count = As(context, count, x.dtype());
  math::Elementwise(StreamOf(context), math::Op::kDivide, TypeOf(x), share.data(), kept,
                    {Broadcast(grad, kept), Broadcast(count, kept)});
  math::Elementwise(StreamOf(context), math::Op::kEqualGrad, TypeOf(x), to, dims,
                    {Broadcast(x, dims), Broadcast(extreme, dims), Broadcast(share, dims)});
}

template <bool largest>
void ArgExtreme(const Context& context, const Tensor& x, const phi::Scalar& axis, bool keep_dims, bool flatten,
                DataType type, Tensor* out) {
  const DataType index = type == DataType::INT32 ? DataType::INT32 : DataType::INT64;
  void* to = context.Alloc(out, index);
  int64_t outer = 1, size = x.numel(), inner = 1;
  if (!flatten && x.dims().size() > 0) {
    const int64_t at = AxisOf(axis.to<int64_t>(), x.dims().size());
    size = x.dims()[at];
    for (int64_t i = 0; i < at; ++i) outer *= x.dims()[i];
    for (int64_t i = at + 1; i < x.dims().size(); ++i) inner *= x.dims()[i];
  }
  math::ArgExtreme(StreamOf(context), largest, TypeOf(x), to, TypeOf(index), x.data(), outer, size, inner);
}

}  // namespace

void RegisterReductions() {
  NVGPU_KERNEL(sum, Sum, SumKernel, kComputable, OutputVaries);
  NVGPU_KERNEL(mean, Reduce<Reduction::kMean>, MeanKernel, kFloats);
  NVGPU_KERNEL(max, Reduce<Reduction::kMax>, MaxKernel, kNumbers);
  NVGPU_KERNEL(min, Reduce<Reduction::kMin>, MinKernel, kNumbers);
  NVGPU_KERNEL(all, Test<Reduction::kAll>, AllKernel, kComputable, OutputIs<DataType::BOOL>);
  NVGPU_KERNEL(any, Test<Reduction::kAny>, AnyKernel, kComputable, OutputIs<DataType::BOOL>);
  NVGPU_KERNEL(prod, Product, ProdKernel, kNumbers);
  NVGPU_KERNEL(mean_all, MeanAll, MeanAllKernel, kFloats);
  NVGPU_KERNEL(squared_l2_norm, SquaredNorm, SquaredL2NormKernel, kFloats);
  NVGPU_KERNEL(sum_grad, SumGrad, ReduceSumGradKernel, kComputable, OutputVaries);
  NVGPU_KERNEL(mean_grad, MeanGrad, ReduceMeanGradKernel, kFloats);
  NVGPU_KERNEL(mean_all_grad, MeanAllGrad, MeanAllGradKernel, kFloats);
  NVGPU_KERNEL(max_grad, ExtremeGrad, ReduceMaxGradKernel, kFloats);
  NVGPU_KERNEL(min_grad, ExtremeGrad, ReduceMinGradKernel, kFloats);
  NVGPU_KERNEL(argmax, ArgExtreme<true>, ArgMaxKernel, kNumbers, OutputVaries);
  NVGPU_KERNEL(argmin, ArgExtreme<false>, ArgMinKernel, kNumbers, OutputVaries);
}

}  // namespace nvgpu
