// Elementwise kernels and their gradients: a name, an operation of math/ops.def, and Paddle's declaration.
#include "common.h"
#include "paddle/phi/kernels/abs_grad_kernel.h"
#include "paddle/phi/kernels/abs_kernel.h"
#include "paddle/phi/kernels/activation_grad_kernel.h"
#include "paddle/phi/kernels/activation_kernel.h"
#include "paddle/phi/kernels/add_n_kernel.h"
#include "paddle/phi/kernels/bitwise_kernel.h"
#include "paddle/phi/kernels/clip_grad_kernel.h"
#include "paddle/phi/kernels/clip_kernel.h"
#include "paddle/phi/kernels/compare_kernel.h"
#include "paddle/phi/kernels/elementwise_add_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_add_kernel.h"
#include "paddle/phi/kernels/elementwise_divide_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_divide_kernel.h"
#include "paddle/phi/kernels/elementwise_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_kernel.h"
#include "paddle/phi/kernels/elementwise_multiply_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_multiply_kernel.h"
#include "paddle/phi/kernels/elementwise_subtract_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_subtract_kernel.h"
#include "paddle/phi/kernels/erf_kernel.h"
#include "paddle/phi/kernels/gelu_grad_kernel.h"
#include "paddle/phi/kernels/gelu_kernel.h"
#include "paddle/phi/kernels/isfinite_kernel.h"
#include "paddle/phi/kernels/logical_kernel.h"
#include "paddle/phi/kernels/scale_kernel.h"
#include "paddle/phi/kernels/sign_kernel.h"

// swiglu's headers define the kernels with the names that they call, so only the declarations.
namespace phi {
template <typename T, typename Context>
void SwiGLUKernel(const Context&, const DenseTensor&, const paddle::optional<DenseTensor>&, DenseTensor*);
template <typename T, typename Context>
void SwiGLUGradKernel(const Context&, const DenseTensor&, const paddle::optional<DenseTensor>&, const DenseTensor&,
                      DenseTensor*, DenseTensor*);
}  // namespace phi

namespace nvgpu {
namespace {

using math::Input;
using math::Number;
using math::Op;

// ---- one tensor and its gradient

void Apply(const Context& context, Op op, const std::vector<const Tensor*>& inputs, DataType type, Tensor* out,
           Number p = {}, Number q = {}) {
  const Dims dims = DimsOf(*out);
  void* to = context.Alloc(out, type);
  if (out->numel() == 0) return;
  std::vector<Input> views;
  for (const Tensor* input : inputs) views.push_back(Broadcast(*input, dims));
  math::Elementwise(StreamOf(context), op, TypeOf(*inputs[0]), to, dims, views, p, q);
}

template <Op op>
void Unary(const Context& context, const Tensor& x, Tensor* out) {
  Apply(context, op, {&x}, x.dtype(), out);
}
template <Op op>
void Test(const Context& context, const Tensor& x, Tensor* out) {
  Apply(context, op, {&x}, DataType::BOOL, out);
}
// From the input or the output, whichever the operation needs, and the output's gradient.
template <Op op>
void UnaryGrad(const Context& context, const Tensor& known, const Tensor& out_grad, Tensor* x_grad) {
  Apply(context, op, {&known, &out_grad}, out_grad.dtype(), x_grad);
}
void SiluGrad(const Context& context, const Tensor& x, const Tensor&, const Tensor& out_grad, Tensor* x_grad) {
  UnaryGrad<Op::kSiluGrad>(context, x, out_grad, x_grad);
}

void Gelu(const Context& context, const Tensor& x, bool approximate, Tensor* out) {
  Apply(context, approximate ? Op::kGeluTanh : Op::kGelu, {&x}, x.dtype(), out);
}
void GeluGrad(const Context& context, const Tensor& x, const Tensor& out_grad, bool approximate, Tensor* x_grad) {
  Apply(context, approximate ? Op::kGeluTanhGrad : Op::kGeluGrad, {&x, &out_grad}, x.dtype(), x_grad);
}
void Scale(const Context& context, const Tensor& x, const phi::Scalar& scale, const phi::Scalar& bias,
           bool bias_after_scale, Tensor* out) {
  const Number factor = NumberOf(scale);
  Number addend = NumberOf(bias);
  if (!bias_after_scale) addend = {addend.real * factor.real, addend.integer * factor.integer};
  Apply(context, Op::kScale, {&x}, x.dtype(), out, factor, addend);
}
void DivScale(const Context& context, const Tensor& x, const phi::Scalar& divisor, Tensor* out) {
  Apply(context, Op::kDivideBy, {&x}, x.dtype(), out, NumberOf(divisor));
}
void Pow(const Context& context, const Tensor& x, const phi::Scalar& factor, Tensor* out) {
  Apply(context, Op::kPow, {&x}, x.dtype(), out, NumberOf(factor));
}
void PowGrad(const Context& context, const Tensor& x, const Tensor& out_grad, const phi::Scalar& factor,
             Tensor* x_grad) {
  Apply(context, Op::kPowGrad, {&x, &out_grad}, x.dtype(), x_grad, NumberOf(factor));
}
void Clip(const Context& context, const Tensor& x, const phi::Scalar& min, const phi::Scalar& max, Tensor* out) {
  Apply(context, Op::kClip, {&x}, x.dtype(), out, NumberOf(min), NumberOf(max));
}
void ClipGrad(const Context& context, const Tensor& x, const Tensor& out_grad, const phi::Scalar& min,
              const phi::Scalar& max, Tensor* x_grad) {
  Apply(context, Op::kClipGrad, {&x, &out_grad}, x.dtype(), x_grad, NumberOf(min), NumberOf(max));
}

// ---- two tensors

template <Op op>
void Binary(const Context& context, const Tensor& x, const Tensor& y, Tensor* out) {
  Apply(context, op, {&x, &y}, x.dtype(), out);
}
// Autograd may add a short float to a float32 main gradient.
void Add(const Context& context, const Tensor& x, const Tensor& y, Tensor* out) {
  if (x.dtype() == y.dtype()) return Binary<Op::kAdd>(context, x, y, out);
  Tensor same = Temporary(context, x.dtype(), DimsOf(y));
  math::Cast(StreamOf(context), y.data(), TypeOf(y), same.data(), TypeOf(same), y.numel());
  Binary<Op::kAdd>(context, x, same, out);
}
template <Op op>
void Compare(const Context& context, const Tensor& x, const Tensor& y, Tensor* out) {
  // In place, the operands' memory becomes the result's, of another type.
  const Tensor left = x, right = y;
  if (out->has_allocation() && x.dtype() != DataType::BOOL) out->clear();
  Apply(context, op, {&left, &right}, DataType::BOOL, out);
}

// The gradient of one operand: op(inputs) over the output's dims, summed over the axes that were broadcast.
void OperandGrad(const Context& context, Op op, const std::vector<const Tensor*>& inputs, const Dims& dims,
                 const Tensor& operand, Tensor* grad) {
  if (grad == nullptr) return;
  grad->Resize(operand.dims());
  const DataType type = inputs[0]->dtype();
  if (DimsOf(operand) == dims) return Apply(context, op, inputs, type, grad);
  context.Alloc(grad, type);
  if (CountOf(dims) == 0) {
    runtime::Fill(grad->data(), 0, grad->numel() * WidthOf(*grad), StreamOf(context));
    return;
  }
  const bool is_short = type == DataType::FLOAT16 || type == DataType::BFLOAT16;
  Tensor wide = Temporary(context, is_short ? DataType::FLOAT32 : type, dims);
  std::vector<Input> views;
  for (const Tensor* input : inputs) views.push_back(Broadcast(*input, dims));
  if (is_short) {
    math::ElementwiseWide(StreamOf(context), op, TypeOf(type), wide.data(), dims, views);
  } else {
    math::Elementwise(StreamOf(context), op, TypeOf(type), wide.data(), dims, views);
  }
  SumTo(context, wide, grad);
}

// The gradient is the output's, or its opposite.
void SameGrad(const Context& context, const Tensor& out_grad, const Tensor& operand, double sign, Tensor* grad) {
  if (grad == nullptr) return;
  grad->Resize(operand.dims());
  if (operand.dims() == out_grad.dims()) {
    if (sign > 0) return Copy(context, out_grad, grad);
    return Apply(context, Op::kScale, {&out_grad}, out_grad.dtype(), grad, {-1, -1}, {});
  }
  context.Alloc(grad, out_grad.dtype());
  SumTo(context, out_grad, grad);
  if (sign < 0) Apply(context, Op::kScale, {grad}, grad->dtype(), grad, {-1, -1}, {});
}
void AddGrad(const Context& context, const Tensor& x, const Tensor& y, const Tensor& out_grad, int, Tensor* x_grad,
             Tensor* y_grad) {
  const Tensor grad = out_grad;  // x_grad may be written over it
  SameGrad(context, grad, y, 1, y_grad);
  SameGrad(context, grad, x, 1, x_grad);
}
void SubtractGrad(const Context& context, const Tensor& x, const Tensor& y, const Tensor& out_grad, int, Tensor* x_grad,
                  Tensor* y_grad) {
  const Tensor grad = out_grad;
  SameGrad(context, grad, y, -1, y_grad);
  SameGrad(context, grad, x, 1, x_grad);
}
void MultiplyGrad(const Context& context, const Tensor& x, const Tensor& y, const Tensor& out_grad, int, Tensor* x_grad,
                  Tensor* y_grad) {
  const Dims dims = DimsOf(out_grad);
  OperandGrad(context, Op::kMultiply, {&out_grad, &x}, dims, y, y_grad);
  OperandGrad(context, Op::kMultiply, {&out_grad, &y}, dims, x, x_grad);
}
void DivideGrad(const Context& context, const Tensor& x, const Tensor& y, const Tensor& out, const Tensor& out_grad,
                int, Tensor* x_grad, Tensor* y_grad) {
  const Dims dims = DimsOf(out_grad);
  OperandGrad(context, Op::kDivideGradY, {&out_grad, &out, &y}, dims, y, y_grad);
  OperandGrad(context, Op::kDivide, {&out_grad, &y}, dims, x, x_grad);
}
template <Op op_x, Op op_y>
void ExtremeGrad(const Context& context, const Tensor& x, const Tensor& y, const Tensor& out_grad, Tensor* x_grad,
                 Tensor* y_grad) {
  const Dims dims = DimsOf(out_grad);
  OperandGrad(context, op_y, {&x, &y, &out_grad}, dims, y, y_grad);
  OperandGrad(context, op_x, {&x, &y, &out_grad}, dims, x, x_grad);
}

void BitwiseNot(const Context& context, const Tensor& x, Tensor* out) {
  Apply(context, x.dtype() == DataType::BOOL ? Op::kLogicalNot : Op::kBitwiseNot, {&x}, x.dtype(), out);
}

void AddN(const Context& context, const std::vector<const phi::TensorBase*>& x, Tensor* out) {
  const auto& first = *static_cast<const Tensor*>(x[0]);
  if (x.size() == 1) return Copy(context, first, out);
  Binary<Op::kAdd>(context, first, *static_cast<const Tensor*>(x[1]), out);
  for (size_t i = 2; i < x.size(); ++i) Binary<Op::kAdd>(context, *out, *static_cast<const Tensor*>(x[i]), out);
}

// ---- swiglu(x, y) = silu(x) * y; without y, the halves of x's last axis

// The first and the second half of the last axis.
std::pair<Input, Input> Halves(const Tensor& tensor) {
  const Dims strides = DenseStrides(DimsOf(tensor));
  const auto* data = static_cast<const char*>(tensor.data());
  return {{data, strides}, {data + tensor.dims()[tensor.dims().size() - 1] / 2 * WidthOf(tensor), strides}};
}

void Swiglu(const Context& context, const Tensor& x, const paddle::optional<Tensor>& y, Tensor* out) {
  if (y) return Binary<Op::kSwiglu>(context, x, *y, out);
  void* to = context.Alloc(out, x.dtype());
  const auto [left, right] = Halves(x);
  math::Elementwise(StreamOf(context), Op::kSwiglu, TypeOf(x), to, DimsOf(*out), {left, right});
}

void SwigluGrad(const Context& context, const Tensor& x, const paddle::optional<Tensor>& y, const Tensor& out_grad,
                Tensor* x_grad, Tensor* y_grad) {
  if (y) {
    if (x_grad != nullptr) Apply(context, Op::kSwigluGradX, {&x, &*y, &out_grad}, x.dtype(), x_grad);
    if (y_grad != nullptr) Apply(context, Op::kSwigluGradY, {&x, &*y, &out_grad}, x.dtype(), y_grad);
    return;
  }
  if (x_grad == nullptr) return;
  context.Alloc(x_grad, x.dtype());
  const Dims dims = DimsOf(out_grad), dense = DenseStrides(dims);
  const auto [left, right] = Halves(x);
  const auto [to_left, to_right] = Halves(*x_grad);
  Tensor half = Temporary(context, x.dtype(), dims);
  for (const auto& [op, to] : {std::pair{Op::kSwigluGradX, to_left}, std::pair{Op::kSwigluGradY, to_right}}) {
    math::Elementwise(StreamOf(context), op, TypeOf(x), half.data(), dims, {left, right, {out_grad.data(), dense}});
    math::StridedCopy(StreamOf(context), WidthOf(x), const_cast<void*>(to.data), to.strides, half.data(), dense, dims);
  }
}

}  // namespace

void RegisterElementwise() {
#define NVGPU_UNARY(name, op, declaration, types) NVGPU_KERNEL(name, Unary<Op::op>, declaration, types)
  NVGPU_UNARY(abs, kAbs, AbsKernel, kNumbers);
  NVGPU_UNARY(square, kSquare, SquareKernel, kNumbers);
  NVGPU_UNARY(sign, kSign, SignKernel, kNumbers);
  NVGPU_UNARY(relu, kRelu, ReluKernel, kNumbers);
  NVGPU_UNARY(sqrt, kSqrt, SqrtKernel, kFloats);
  NVGPU_UNARY(rsqrt, kRsqrt, RsqrtKernel, kFloats);
  NVGPU_UNARY(reciprocal, kReciprocal, ReciprocalKernel, kFloats);
  NVGPU_UNARY(exp, kExp, ExpKernel, kFloats);
  NVGPU_UNARY(log, kLog, LogKernel, kFloats);
  NVGPU_UNARY(log2, kLog2, Log2Kernel, kFloats);
  NVGPU_UNARY(sin, kSin, SinKernel, kFloats);
  NVGPU_UNARY(cos, kCos, CosKernel, kFloats);
  NVGPU_UNARY(tanh, kTanh, TanhKernel, kFloats);
  NVGPU_UNARY(erf, kErf, ErfKernel, kFloats);
  NVGPU_UNARY(floor, kFloor, FloorKernel, kFloats);
  NVGPU_UNARY(ceil, kCeil, CeilKernel, kFloats);
  NVGPU_UNARY(sigmoid, kSigmoid, SigmoidKernel, kFloats);
  NVGPU_UNARY(silu, kSilu, SiluKernel, kFloats);
#undef NVGPU_UNARY
  NVGPU_KERNEL(gelu, Gelu, GeluKernel, kFloats);
  NVGPU_KERNEL(scale, Scale, ScaleKernel, kComputable);
  NVGPU_KERNEL(div_scale, DivScale, DivScaleKernel, kFloats);
  NVGPU_KERNEL(pow, Pow, PowKernel, kFloats);
  NVGPU_KERNEL(clip, Clip, ClipKernel, kNumbers);
  NVGPU_KERNEL(isfinite, Test<Op::kIsFinite>, IsfiniteKernel, kNumbers, OutputIs<DataType::BOOL>);
  NVGPU_KERNEL(isnan, Test<Op::kIsNan>, IsnanKernel, kNumbers, OutputIs<DataType::BOOL>);
  NVGPU_KERNEL(isinf, Test<Op::kIsInf>, IsinfKernel, kNumbers, OutputIs<DataType::BOOL>);
  NVGPU_KERNEL(logical_not, Test<Op::kLogicalNot>, LogicalNotKernel, kComputable, OutputIs<DataType::BOOL>);

#define NVGPU_UNARY_GRAD(name, op, declaration) NVGPU_KERNEL(name, UnaryGrad<Op::op>, declaration, kFloats)
  NVGPU_UNARY_GRAD(abs_grad, kAbsGrad, AbsGradKernel);
  NVGPU_UNARY_GRAD(square_grad, kSquareGrad, SquareGradKernel);
  NVGPU_UNARY_GRAD(relu_grad, kReluGrad, ReluGradKernel);
  NVGPU_UNARY_GRAD(sqrt_grad, kSqrtGrad, SqrtGradKernel);
  NVGPU_UNARY_GRAD(rsqrt_grad, kRsqrtGrad, RsqrtGradKernel);
  NVGPU_UNARY_GRAD(reciprocal_grad, kReciprocalGrad, ReciprocalGradKernel);
  NVGPU_UNARY_GRAD(exp_grad, kExpGrad, ExpGradKernel);
  NVGPU_UNARY_GRAD(log_grad, kLogGrad, LogGradKernel);
  NVGPU_UNARY_GRAD(sin_grad, kSinGrad, SinGradKernel);
  NVGPU_UNARY_GRAD(cos_grad, kCosGrad, CosGradKernel);
  NVGPU_UNARY_GRAD(tanh_grad, kTanhGrad, TanhGradKernel);
  NVGPU_UNARY_GRAD(sigmoid_grad, kSigmoidGrad, SigmoidGradKernel);
#undef NVGPU_UNARY_GRAD
  NVGPU_KERNEL(silu_grad, SiluGrad, SiluGradKernel, kFloats);
  NVGPU_KERNEL(gelu_grad, GeluGrad, GeluGradKernel, kFloats);
  NVGPU_KERNEL(pow_grad, PowGrad, PowGradKernel, kFloats);
  NVGPU_KERNEL(clip_grad, ClipGrad, ClipGradKernel, kFloats);

  NVGPU_KERNEL(add, Add, AddKernel, kComputable);
  NVGPU_KERNEL(subtract, Binary<Op::kSubtract>, SubtractKernel, kComputable);
  NVGPU_KERNEL(multiply, Binary<Op::kMultiply>, MultiplyKernel, kComputable);
  NVGPU_KERNEL(divide, Binary<Op::kDivide>, DivideKernel, kNumbers);
  NVGPU_KERNEL(maximum, Binary<Op::kMaximum>, MaximumKernel, kNumbers);
  NVGPU_KERNEL(minimum, Binary<Op::kMinimum>, MinimumKernel, kNumbers);
  NVGPU_KERNEL(remainder, Binary<Op::kRemainder>, RemainderKernel, kNumbers);
  NVGPU_KERNEL(floor_divide, Binary<Op::kFloorDivide>, FloorDivideKernel, kNumbers);
  NVGPU_KERNEL(elementwise_pow, Binary<Op::kElementwisePow>, ElementwisePowKernel, kFloats);
  NVGPU_KERNEL(add_n, AddN, AddNKernel, kNumbers);

#define NVGPU_COMPARE(name, op, declaration) \
  NVGPU_KERNEL(name, Compare<Op::op>, declaration, kComputable, OutputIs<DataType::BOOL>)
  NVGPU_COMPARE(equal, kEqual, EqualKernel);
  NVGPU_COMPARE(not_equal, kNotEqual, NotEqualKernel);
  NVGPU_COMPARE(less_than, kLess, LessThanKernel);
  NVGPU_COMPARE(less_equal, kLessEqual, LessEqualKernel);
  NVGPU_COMPARE(greater_than, kGreater, GreaterThanKernel);
  NVGPU_COMPARE(greater_equal, kGreaterEqual, GreaterEqualKernel);
  NVGPU_COMPARE(logical_and, kLogicalAnd, LogicalAndKernel);
  NVGPU_COMPARE(logical_or, kLogicalOr, LogicalOrKernel);
  NVGPU_COMPARE(logical_xor, kLogicalXor, LogicalXorKernel);
#undef NVGPU_COMPARE

  NVGPU_KERNEL(bitwise_and, Binary<Op::kBitwiseAnd>, BitwiseAndKernel, kIntegers);
  NVGPU_KERNEL(bitwise_or, Binary<Op::kBitwiseOr>, BitwiseOrKernel, kIntegers);
  NVGPU_KERNEL(bitwise_xor, Binary<Op::kBitwiseXor>, BitwiseXorKernel, kIntegers);
  NVGPU_KERNEL(bitwise_not, BitwiseNot, BitwiseNotKernel, kIntegers);

  NVGPU_KERNEL(add_grad, AddGrad, AddGradKernel, kNumbers);
  NVGPU_KERNEL(subtract_grad, SubtractGrad, SubtractGradKernel, kNumbers);
  NVGPU_KERNEL(multiply_grad, MultiplyGrad, MultiplyGradKernel, kFloats);
  NVGPU_KERNEL(divide_grad, DivideGrad, DivideGradKernel, kFloats);
  constexpr auto maximum_grad = &ExtremeGrad<Op::kMaximumGradX, Op::kMaximumGradY>;
  constexpr auto minimum_grad = &ExtremeGrad<Op::kMinimumGradX, Op::kMinimumGradY>;
  NVGPU_KERNEL(maximum_grad, *maximum_grad, MaximumGradKernel, kFloats);
  NVGPU_KERNEL(minimum_grad, *minimum_grad, MinimumGradKernel, kFloats);

  NVGPU_KERNEL(swiglu, Swiglu, SwiGLUKernel, kFloats);
  NVGPU_KERNEL(swiglu_grad, SwigluGrad, SwiGLUGradKernel, kFloats);
}

}  // namespace nvgpu
