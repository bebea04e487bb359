// Softmax and cross-entropy, also over a vocabulary that is spread over ranks.
#include "common.h"
#include "paddle/phi/core/distributed/xccl_comm_context.h"
#include "paddle/phi/kernels/c_softmax_with_cross_entropy_grad_kernel.h"
#include "paddle/phi/kernels/cross_entropy_grad_kernel.h"
#include "paddle/phi/kernels/cross_entropy_kernel.h"
#include "paddle/phi/kernels/fused_softmax_mask_upper_triangle_kernel.h"
#include "paddle/phi/kernels/log_softmax_grad_kernel.h"
#include "paddle/phi/kernels/log_softmax_kernel.h"
#include "paddle/phi/kernels/softmax_grad_kernel.h"
#include "paddle/phi/kernels/softmax_kernel.h"

// Paddle declares this one in no header; libphi.so has it for the CPU with these parameters.
namespace phi {
template <typename T, typename Context>
void CSoftmaxWithCrossEntropyKernel(const Context&, const DenseTensor&, const DenseTensor&, int64_t, int, int,
                                    DenseTensor*, DenseTensor*);
}  // namespace phi

namespace nvgpu {
namespace {

// Rows that end with the axis.
struct Rows {
  int64_t count, columns;
};
Rows RowsOf(const Tensor& x, int axis, const char* what) {
  const int64_t rank = x.dims().size();
  if (rank == 0) return {1, 1};
  PADDLE_ENFORCE_EQ(AxisOf(axis, rank), rank - 1,
                    common::errors::Unimplemented("%s on nvgpu works along the last axis only", what));
  const int64_t columns = x.dims()[rank - 1];
  return {columns == 0 ? 0 : x.numel() / columns, columns};
}

template <bool log>
void Softmax(const Context& context, const Tensor& x, int axis, Tensor* out) {
  const Rows rows = RowsOf(x, axis, "softmax");
  void* to = context.Alloc(out, x.dtype());
  math::Softmax(StreamOf(context), TypeOf(x), log, to, x.data(), rows.count, rows.columns);
}
template <bool log>
void SoftmaxGrad(const Context& context, const Tensor& out, const Tensor& out_grad, int axis, Tensor* x_grad) {
  const Rows rows = RowsOf(out, axis, "softmax");
  void* to = context.Alloc(x_grad, out.dtype());
  math::SoftmaxGrad(StreamOf(context), TypeOf(out), log, to, out.data(), out_grad.data(), rows.count, rows.columns);
}

// Of scores [b, heads, s, s] under a causal mask.
void CausalSoftmax(const Context& context, const Tensor& x, Tensor* out) {
  const Rows rows = RowsOf(x, -1, "fused_softmax_mask_upper_triangle");
  PADDLE_ENFORCE_EQ(x.dims().size() > 1 && x.dims()[x.dims().size() - 2] == rows.columns, true,
                    common::errors::InvalidArgument("fused_softmax_mask_upper_triangle of [%s]", x.dims()));
  void* to = context.Alloc(out, x.dtype());
  math::CausalSoftmax(StreamOf(context), TypeOf(x), to, x.data(), rows.count, rows.columns);
}
void CausalSoftmaxGrad(const Context& context, const Tensor& out, const Tensor& out_grad, Tensor* x_grad) {
  SoftmaxGrad<false>(context, out, out_grad, -1, x_grad);
}

void CheckHardLabels(bool soft_label, bool use_softmax) {
  PADDLE_ENFORCE_EQ(!soft_label && use_softmax, true,
                    common::errors::Unimplemented("cross-entropy on nvgpu takes class numbers as labels, and logits"));
}

void CrossEntropy(const Context& context, const Tensor& logits, const Tensor& label, bool soft_label, bool use_softmax,
                  bool, int ignore_index, int axis, Tensor* softmax, Tensor* loss) {
  CheckHardLabels(soft_label, use_softmax);
  const Rows rows = RowsOf(logits, axis, "cross-entropy");
  void* to_softmax = context.Alloc(softmax, logits.dtype());
  void* to_loss = context.Alloc(loss, logits.dtype());
  math::CrossEntropy(StreamOf(context), TypeOf(logits), to_softmax, to_loss, logits.data(), label.data(), TypeOf(label),
                     ignore_index, rows.count, rows.columns);
}
void CrossEntropyGrad(const Context& context, const Tensor& label, const Tensor& softmax, const Tensor& loss_grad,
                      bool soft_label, bool use_softmax, bool, int ignore_index, int axis, Tensor* logits_grad) {
  CheckHardLabels(soft_label, use_softmax);
  const Rows rows = RowsOf(softmax, axis, "cross-entropy");
  void* to = context.Alloc(logits_grad, softmax.dtype());
  math::CrossEntropyGrad(StreamOf(context), TypeOf(softmax), to, softmax.data(), label.data(), TypeOf(label),
                         loss_grad.data(), ignore_index, 0, rows.count, rows.columns, rows.columns);
}

// Megatron's vocabulary-parallel cross-entropy (arXiv 1909.08053): two numbers a row travel, not the logits.
void ParallelCrossEntropy(const Context& context, const Tensor& logits, const Tensor& label, int64_t ignore_index,
                          int rank, int ranks, Tensor* softmax, Tensor* loss) {
  const auto* group = reinterpret_cast<phi::distributed::XCCLCommContext*>(context.GetCommContext());
  PADDLE_ENFORCE_NOT_NULL(group, common::errors::Unavailable("c_softmax_with_cross_entropy has no communicator"));
  auto* comm = reinterpret_cast<runtime::Communicator*>(group->GetXcclComm());
  const Rows rows = RowsOf(logits, -1, "cross-entropy");
  const Stream stream = StreamOf(context);
  const Type type = TypeOf(logits), label_type = TypeOf(label);
  const int64_t first = rank * rows.columns;
  // [largest | sum | picked]: the last two are added over the ranks together
  Tensor numbers = Temporary(context, DataType::FLOAT32, {3, rows.count});
  float *largest = numbers.data<float>(), *sum = largest + rows.count, *picked = sum + rows.count;
  math::RowMax(stream, type, largest, logits.data(), rows.count, rows.columns);
  runtime::AllReduce(comm, largest, largest, rows.count, Type::kFloat, runtime::Reduction::kMax, stream);
  math::RowSumExp(stream, type, sum, picked, logits.data(), largest, label.data(), label_type, first, rows.count,
                  rows.columns, ranks * rows.columns);
  runtime::AllReduce(comm, sum, sum, 2 * rows.count, Type::kFloat, runtime::Reduction::kSum, stream);
  const Tensor from = logits;
  void* to_softmax = context.Alloc(softmax, from.dtype());
  void* to_loss = context.Alloc(loss, from.dtype());
  math::FinishCrossEntropy(stream, type, to_softmax, to_loss, from.data(), largest, sum, picked, label.data(),
                           label_type, ignore_index, rows.count, rows.columns);
}
void ParallelCrossEntropyGrad(const Context& context, const Tensor& softmax, const Tensor& label,
                              const Tensor& loss_grad, int64_t ignore_index, int rank, int ranks, Tensor* logits_grad) {
  const Rows rows = RowsOf(softmax, -1, "cross-entropy");
  void* to = context.Alloc(logits_grad, softmax.dtype());
  math::CrossEntropyGrad(StreamOf(context), TypeOf(softmax), to, softmax.data(), label.data(), TypeOf(label),
                         loss_grad.data(), ignore_index, rank * rows.columns, rows.count, rows.columns,
                         ranks * rows.columns);
}

}  // namespace

void RegisterLosses() {
  NVGPU_KERNEL(fused_softmax_mask_upper_triangle, CausalSoftmax, FusedSoftmaxMaskFuseUpperTriangleKernel, kFloats);
  NVGPU_KERNEL(fused_softmax_mask_upper_triangle_grad, CausalSoftmaxGrad, FusedSoftmaxMaskFuseUpperTriangleGradKernel,
               kFloats);
  NVGPU_KERNEL(softmax, Softmax<false>, SoftmaxKernel, kFloats);
  NVGPU_KERNEL(softmax_grad, SoftmaxGrad<false>, SoftmaxGradKernel, kFloats);
  NVGPU_KERNEL(log_softmax, Softmax<true>, LogSoftmaxKernel, kFloats);
  NVGPU_KERNEL(log_softmax_grad, SoftmaxGrad<true>, LogSoftmaxGradKernel, kFloats);
  NVGPU_KERNEL(cross_entropy_with_softmax, CrossEntropy, CrossEntropyWithSoftmaxKernel, kFloats);
  NVGPU_KERNEL(cross_entropy_with_softmax_grad, CrossEntropyGrad, CrossEntropyWithSoftmaxGradKernel, kFloats);
  NVGPU_KERNEL(c_softmax_with_cross_entropy, ParallelCrossEntropy, CSoftmaxWithCrossEntropyKernel, kFloats);
  NVGPU_KERNEL(c_softmax_with_cross_entropy_grad, ParallelCrossEntropyGrad, CSoftmaxWithCrossEntropyGradKernel,
               kFloats);
}

}  // namespace nvgpu
