// Matrix products: shapes become calls of math::RunGemm.
#include "common.h"
#include "paddle/phi/kernels/bmm_grad_kernel.h"
#include "paddle/phi/kernels/bmm_kernel.h"
#include "paddle/phi/kernels/matmul_grad_kernel.h"
#include "paddle/phi/kernels/matmul_kernel.h"

// linear_v2's gradient header defines the kernel, so only the declarations.
namespace phi {
template <typename T, typename Context>
void LinearV2Kernel(const Context&, const DenseTensor&, const DenseTensor&, const DenseTensor&, const bool,
                    DenseTensor*);
template <typename T, typename Context>
void LinearV2GradKernel(const Context&, const DenseTensor&, const DenseTensor&, const DenseTensor&, const DenseTensor&,
                        const bool, DenseTensor*, DenseTensor*, DenseTensor*);
}  // namespace phi

namespace nvgpu {
namespace {

// A tensor as a stack of matrices; a vector is a row on the left and a column on the right.
struct Matrices {
  const void* data;
  Dims batch;
  int64_t rows, columns;  // as stored
  bool transposed;

  int64_t Rows() const { return transposed ? columns : rows; }
  int64_t Columns() const { return transposed ? rows : columns; }
};

Matrices View(const Tensor& tensor, bool transposed, bool left) {
  Dims dims = DimsOf(tensor);
  if (dims.size() == 1) return {tensor.data(), {}, left ? 1 : dims[0], left ? dims[0] : 1, false};
  const int64_t columns = dims.back(), rows = dims[dims.size() - 2];
  dims.resize(dims.size() - 2);
  return {tensor.data(), dims, rows, columns, transposed};
}

Dims BroadcastDims(const Dims& a, const Dims& b) {
  Dims out(std::max(a.size(), b.size()), 1);
  for (size_t i = 0; i < out.size(); ++i) {
    if (i < a.size()) out[out.size() - 1 - i] = a[a.size() - 1 - i];
    if (i < b.size() && b[b.size() - 1 - i] != 1) out[out.size() - 1 - i] = b[b.size() - 1 - i];
  }
  return out;
}

// The offset, in matrices, of entry `i` of the broadcast batch in an operand's own batch.
int64_t OwnIndex(int64_t i, const Dims& out, const Dims& own) {
  int64_t index = 0, stride = 1;
  for (size_t axis = 0; axis < own.size(); ++axis) {
    const int64_t at = i % out[out.size() - 1 - axis], dim = own[own.size() - 1 - axis];
    i /= out[out.size() - 1 - axis];
    if (dim != 1) index += at * stride;
    stride *= dim;
  }
  return index;
}

void Multiply(const Context& context, Type type, Matrices a, const Matrices& b, void* c) {
  PADDLE_ENFORCE_EQ(a.Columns(), b.Rows(),
                    common::errors::InvalidArgument("matmul of [.., %d, %d] and [.., %d, %d]", a.Rows(), a.Columns(),
                                                    b.Rows(), b.Columns()));
  if (CountOf(b.batch) == 1 && !a.transposed) {  // one matrix on the right: one tall product
    a.rows *= CountOf(a.batch);
    a.batch.clear();
  }
  const Dims batch = BroadcastDims(a.batch, b.batch);
  math::Gemm gemm{a.data, b.data, c, a.transposed, b.transposed, a.Rows(), b.Columns(), a.Columns()};
  const int64_t count = CountOf(batch), size_a = a.rows * a.columns, size_b = b.rows * b.columns;
  gemm.stride_c = gemm.m * gemm.n;
  if (gemm.m == 0 || gemm.n == 0 || count == 0) return;
  const size_t width = SizeOf(type);
  if (gemm.k == 0) return runtime::Fill(c, 0, count * gemm.stride_c * width, StreamOf(context));
  const bool plain_a = a.batch == batch || CountOf(a.batch) == 1, plain_b = b.batch == batch || CountOf(b.batch) == 1;
  if (plain_a && plain_b) {
    gemm.batch = count;
    gemm.stride_a = CountOf(a.batch) == 1 ? 0 : size_a;
    gemm.stride_b = CountOf(b.batch) == 1 ? 0 : size_b;
    return math::RunGemm(StreamOf(context), type, gemm);
  }
  for (int64_t i = 0; i < count; ++i) {
    gemm.a = static_cast<const char*>(a.data) + OwnIndex(i, batch, a.batch) * size_a * width;
    gemm.b = static_cast<const char*>(b.data) + OwnIndex(i, batch, b.batch) * size_b * width;
    gemm.c = static_cast<char*>(c) + i * gemm.stride_c * width;
    math::RunGemm(StreamOf(context), type, gemm);
  }
}

void Matmul(const Context& context, const Tensor& x, const Tensor& y, bool transpose_x, bool transpose_y, Tensor* out) {
  const Matrices a = View(x, transpose_x, true), b = View(y, transpose_y, false);
  Dims dims = BroadcastDims(a.batch, b.batch);  // Paddle's InferMeta takes x's alone
  if (x.dims().size() > 1) dims.push_back(a.Rows());
  if (y.dims().size() > 1) dims.push_back(b.Columns());
  out->Resize(common::make_ddim(dims));
  Multiply(context, TypeOf(x), a, b, context.Alloc(out, x.dtype()));
}

// One operand's gradient, a product of the other and the output's; summed over a batch that the operand did not have.
void OperandGrad(const Context& context, const Tensor& operand, const Matrices& a, const Matrices& b, Tensor* grad) {
  grad->Resize(operand.dims());
  void* to = context.Alloc(grad, operand.dtype());
  const Type type = TypeOf(operand);
  const Dims own = View(operand, false, true).batch, batch = BroadcastDims(a.batch, b.batch);
  if (CountOf(own) == CountOf(batch)) return Multiply(context, type, a, b, to);
  if (CountOf(own) == 1 && a.transposed && !b.transposed && a.batch == b.batch) {
    // The usual weight: the sum over the batch is a longer inner axis.
    Matrices tall_a = a, tall_b = b;
    tall_a.rows *= CountOf(a.batch);
    tall_b.rows *= CountOf(b.batch);
    tall_a.batch.clear();
    tall_b.batch.clear();
    return Multiply(context, type, tall_a, tall_b, to);
  }
  Dims wide_dims = batch, small_dims = own;
  wide_dims.insert(wide_dims.end(), {a.Rows(), b.Columns()});
  small_dims.insert(small_dims.end(), {a.Rows(), b.Columns()});
  Tensor wide = Temporary(context, operand.dtype(), wide_dims), small = *grad;
  Multiply(context, type, a, b, wide.data());
  small.Resize(common::make_ddim(small_dims));
  SumTo(context, wide, &small);
}

// The output's gradient with the axes that a vector operand took from it.
Matrices GradView(const Tensor& x, const Tensor& y, const Tensor& out_grad) {
  Dims dims = DimsOf(out_grad);
  if (x.dims().size() == 1) dims.insert(dims.end() - (y.dims().size() > 1 ? 1 : 0), 1);
  if (y.dims().size() == 1) dims.push_back(1);
  const int64_t columns = dims.back(), rows = dims[dims.size() - 2];
  dims.resize(dims.size() - 2);
  return {out_grad.data(), dims, rows, columns, false};
}

Matrices Transposed(Matrices matrices) {
  matrices.transposed = !matrices.transposed;
  return matrices;
}

void MatmulGrad(const Context& context, const Tensor& x, const Tensor& y, const Tensor& out_grad, bool transpose_x,
                bool transpose_y, Tensor* x_grad, Tensor* y_grad) {
  const Matrices a = View(x, transpose_x, true), b = View(y, transpose_y, false), grad = GradView(x, y, out_grad);
  if (x_grad != nullptr) {
    if (a.transposed) {
      OperandGrad(context, x, b, Transposed(grad), x_grad);
    } else {
      OperandGrad(context, x, grad, Transposed(b), x_grad);
    }
  }
  if (y_grad != nullptr) {
    if (b.transposed) {
      OperandGrad(context, y, Transposed(grad), a, y_grad);
    } else {
      OperandGrad(context, y, Transposed(a), grad, y_grad);
    }
  }
}

void Bmm(const Context& context, const Tensor& x, const Tensor& y, Tensor* out) {
  Matmul(context, x, y, false, false, out);
}
void BmmGrad(const Context& context, const Tensor& x, const Tensor& y, const Tensor& out_grad, Tensor* x_grad,
             Tensor* y_grad) {
  MatmulGrad(context, x, y, out_grad, false, false, x_grad, y_grad);
}

void Linear(const Context& context, const Tensor& x, const Tensor& weight, const Tensor& bias, bool transposed,
            Tensor* out) {
  Matmul(context, x, weight, false, transposed, out);
  const Dims dims = DimsOf(*out);
  math::Elementwise(StreamOf(context), math::Op::kAdd, TypeOf(x), out->data(), dims,
                    {Broadcast(*out, dims), Broadcast(bias, dims)});
}
void LinearGrad(const Context& context, const Tensor& x, const Tensor& weight, const Tensor& bias,
                const Tensor& out_grad, bool transposed, Tensor* x_grad, Tensor* weight_grad, Tensor* bias_grad) {
  MatmulGrad(context, x, weight, out_grad, false, transposed, x_grad, weight_grad);
  if (bias_grad == nullptr) return;
  bias_grad->Resize(bias.dims());
  context.Alloc(bias_grad, out_grad.dtype());
  SumTo(context, out_grad, bias_grad);
}

}  // namespace

void RegisterProducts() {
  NVGPU_KERNEL(matmul, Matmul, MatmulKernel, kFloats);
  NVGPU_KERNEL(matmul_grad, MatmulGrad, MatmulGradKernel, kFloats);
  NVGPU_KERNEL(bmm, Bmm, BmmKernel, kFloats);
  NVGPU_KERNEL(bmm_grad, BmmGrad, BmmGradKernel, kFloats);
  NVGPU_KERNEL(linear_v2, Linear, LinearV2Kernel, kFloats);
  NVGPU_KERNEL(linear_v2_grad, LinearGrad, LinearV2GradKernel, kFloats);
}

}  // namespace nvgpu
