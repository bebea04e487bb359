#include "sort.h"

#include <algorithm>

#include "../math/sort.h"
#include "paddle/phi/kernels/argsort_grad_kernel.h"
#include "paddle/phi/kernels/argsort_kernel.h"
#include "paddle/phi/kernels/cum_grad_kernel.h"
#include "paddle/phi/kernels/cum_kernel.h"
#include "paddle/phi/kernels/gather_grad_kernel.h"
#include "paddle/phi/kernels/index_select_grad_kernel.h"
#include "paddle/phi/kernels/put_along_axis_kernel.h"
#include "paddle/phi/kernels/scatter_grad_kernel.h"
#include "paddle/phi/kernels/scatter_kernel.h"
#include "paddle/phi/kernels/take_along_axis_grad_kernel.h"
#include "paddle/phi/kernels/take_along_axis_kernel.h"
#include "paddle/phi/kernels/top_k_grad_kernel.h"
#include "paddle/phi/kernels/top_k_kernel.h"

namespace nvgpu {
namespace {

using math::Axis;

Axis AxisAt(const Dims& dims, int64_t axis) {
  Axis result{1, 1, 1};
  if (dims.empty()) return result;
  axis = AxisOf(axis, dims.size());
  for (int64_t i = 0; i < axis; ++i) result.outer *= dims[i];
  result.size = dims[axis];
  for (size_t i = axis + 1; i < dims.size(); ++i) result.inner *= dims[i];
  return result;
}

int64_t* Data(Tensor& tensor) { return static_cast<int64_t*>(tensor.data()); }

// The order of each row of an axis.
Tensor Order(const Context& context, const void* in, Type type, const Axis& axis, bool descending) {
  Tensor order = Temporary(context, DataType::INT64, {axis.Count()});
  Tensor workspace = Temporary(context, DataType::INT64, {axis.Count()});
  math::ArgSort(StreamOf(context), type, descending, Data(order), in, axis, Data(workspace));
  return order;
}

void Sorted(const Context& context, const Tensor& x, int64_t axis_number, bool descending, int64_t count, Tensor* out,
            Tensor* indices) {
  const Tensor from = x;  // `out` may be x
  void* to = context.Alloc(out, from.dtype());
  auto* places = static_cast<int64_t*>(context.Alloc(indices, DataType::INT64));
  if (out->numel() == 0) return;
  const Axis axis = AxisAt(DimsOf(from), axis_number);
  Tensor order = Order(context, from.data(), TypeOf(from), axis, descending);
  math::TakeOrdered(StreamOf(context), WidthOf(from), to, places, from.data(), Data(order), axis, count);
}

void Topk(const Context& context, const Tensor& x, const phi::Scalar& k, int axis, bool largest, bool, Tensor* out,
          Tensor* indices) {
  Dims dims = DimsOf(x);
  if (dims.empty()) return Sorted(context, x, 0, largest, 1, out, indices);
  const int64_t count = k.to<int64_t>();
  dims[AxisOf(axis, dims.size())] = count;
  out->Resize(common::make_ddim(dims));
  indices->Resize(common::make_ddim(dims));
  Sorted(context, x, axis, largest, count, out, indices);
}

void Argsort(const Context& context, const Tensor& x, int axis, bool descending, bool, Tensor* out, Tensor* indices) {
  Sorted(context, x, axis, descending, AxisAt(DimsOf(x), axis).size, out, indices);
}

Tensor As(const Context& context, const Tensor& from, DataType type) {
  if (from.dtype() == type) return from;
  Tensor to = Temporary(context, type, DimsOf(from));
  math::Cast(StreamOf(context), from.data(), TypeOf(from), to.data(), TypeOf(to), from.numel());
  return to;
}

Tensor AsInt64(const Context& context, const Tensor& index) { return As(context, index, DataType::INT64); }

// out = zeros, and the sums of what an index along an axis takes there. axis: of `from`; size: of out's.
void SumInto(const Context& context, const Tensor& from, const Tensor& index, const Axis& axis, bool is_shared,
             int64_t axis_of_out, Tensor* out) {
  void* to = context.Alloc(out, from.dtype());
  runtime::Fill(to, 0, out->numel() * WidthOf(from), StreamOf(context));
  if (from.numel() == 0) return;
  const Tensor places = AsInt64(context, index);
  Tensor order =
      Order(context, places.data(), Type::kInt64, is_shared ? Axis{1, axis.size, 1} : axis, /*descending=*/false);
  math::SumByIndex(StreamOf(context), TypeOf(from), to, from.data(), static_cast<const int64_t*>(places.data()),
                   Data(order), axis, AxisAt(DimsOf(*out), axis_of_out).size, is_shared);
}

void TopkGrad(const Context& context, const Tensor&, const Tensor& indices, const Tensor& out_grad, const phi::Scalar&,
              int axis, bool, bool, Tensor* x_grad) {
  SumInto(context, out_grad, indices, AxisAt(DimsOf(out_grad), axis), false, axis, x_grad);
}

void ArgsortGrad(const Context& context, const Tensor& indices, const Tensor&, const Tensor& out_grad, int axis, bool,
                 bool, Tensor* x_grad) {
  SumInto(context, out_grad, indices, AxisAt(DimsOf(out_grad), axis), false, axis, x_grad);
}

void IndexSelectGrad(const Context& context, const Tensor& x, const Tensor& index, const Tensor& out_grad, int axis,
                     Tensor* x_grad) {
  x_grad->Resize(x.dims());
  SumInto(context, out_grad, index, AxisAt(DimsOf(out_grad), axis), true, axis, x_grad);
}

void GatherGrad(const Context& context, const Tensor& x, const Tensor& index, const Tensor& out_grad,
                const phi::Scalar& axis_number, Tensor* x_grad) {
  x_grad->Resize(x.dims());
  Axis axis = AxisAt(DimsOf(x), axis_number.to<int64_t>());
  axis.size = index.numel();
  SumInto(context, out_grad, index, axis, true, axis_number.to<int64_t>(), x_grad);
}

void TakeAlongAxis(const Context& context, const Tensor& x, const Tensor& index, int axis_number, Tensor* out) {
  const Dims dims = DimsOf(index);
  out->Resize(index.dims());
  void* to = context.Alloc(out, x.dtype());
  if (out->numel() == 0) return;
  const int64_t axis = AxisOf(axis_number, dims.size());
  Dims strides = DenseStrides(DimsOf(x));
  const int64_t stride = strides[axis];
  strides[axis] = 0;
  const Tensor places = AsInt64(context, index);
  math::TakeAdvanced(StreamOf(context), WidthOf(x), to, dims, {x.data(), strides},
                     {{places.data(), x.dims()[axis], stride}}, DenseStrides(dims));
}

void TakeAlongAxisGrad(const Context& context, const Tensor& x, const Tensor& index, const Tensor& out_grad,
                       int axis_number, Tensor* x_grad) {
  Dims expected = DimsOf(x), dims = DimsOf(index);
  const int64_t axis = AxisOf(axis_number, dims.size());
  expected[axis] = dims[axis];
  if (expected != dims) return TakeAlongAxisGradViaCpu(context, x, index, out_grad, axis_number, x_grad);
  x_grad->Resize(x.dims());
  SumInto(context, out_grad, index, AxisAt(dims, axis), false, axis, x_grad);
}

void PutAlongAxis(const Context& context, const Tensor& x, const Tensor& index, const Tensor& value, int axis_number,
                  const std::string& reduce, bool include_self, Tensor* out) {
  Dims expected = DimsOf(x), dims = DimsOf(index);
  const int64_t axis = AxisOf(axis_number, dims.size());
  expected[axis] = dims[axis];
  if (reduce != "assign" || expected != dims || value.dims() != index.dims())
    return PutAlongAxisViaCpu(context, x, index, value, axis_number, reduce, include_self, out);
  const Tensor from = x;
  out->Resize(from.dims());
  context.Alloc(out, from.dtype());
  if (!out->IsSharedWith(from)) Copy(context, from, out);
  if (index.numel() == 0) return;
  const Tensor places = AsInt64(context, index);
  const Tensor values = As(context, value, from.dtype());  // put_along_axis_ gives a number as float32
  const Axis of_index = AxisAt(dims, axis);
  Tensor order = Order(context, places.data(), Type::kInt64, of_index, /*descending=*/false);
  math::AssignByIndex(StreamOf(context), TypeOf(values), out->data(), values.data(),
                      static_cast<const int64_t*>(places.data()), Data(order), of_index, from.dims()[axis], false);
}

// Writes updates [index.numel(), ...] to rows of `out`: the last one for a row, or their sum.
void WriteRows(const Context& context, const Tensor& index, const Tensor& updates, bool sums, Tensor* out) {
  const int64_t rows = out->dims().size() == 0 ? 1 : out->dims()[0];
  if (updates.numel() == 0 || rows == 0) return;
  const Axis axis{1, index.numel(), out->numel() / rows};
  const Tensor places = AsInt64(context, index);
  Tensor order = Order(context, places.data(), Type::kInt64, {1, axis.size, 1}, false);
  const auto write = sums ? &math::SumByIndex : &math::AssignByIndex;
  write(StreamOf(context), TypeOf(updates), out->data(), updates.data(), static_cast<const int64_t*>(places.data()),
        Data(order), axis, rows, true);
}

// Rows of x are replaced: by the last of the updates for them, or by all of these updates' sum.
void Scatter(const Context& context, const Tensor& x, const Tensor& index, const Tensor& updates, bool overwrite,
             Tensor* out) {
  const Tensor from = x;
  context.Alloc(out, from.dtype());
  if (!out->IsSharedWith(from)) Copy(context, from, out);
  WriteRows(context, index, updates, !overwrite, out);
}

void ScatterGrad(const Context& context, const Tensor& index, const Tensor& updates, const Tensor& out_grad, bool,
                 Tensor* x_grad, Tensor* updates_grad) {
  const Tensor from = out_grad;
  if (updates_grad != nullptr) {
    updates_grad->Resize(updates.dims());
    void* to = context.Alloc(updates_grad, from.dtype());
    const int64_t rows = from.dims()[0];
    if (updates_grad->numel() > 0)
      math::Gather(StreamOf(context), WidthOf(from), to, from.data(), index.data(), TypeOf(index), 1, rows,
                   index.numel(), from.numel() / rows);
  }
  if (x_grad == nullptr) return;
  x_grad->Resize(from.dims());
  context.Alloc(x_grad, from.dtype());
  Copy(context, from, x_grad);
  Tensor zeros = Temporary(context, from.dtype(), DimsOf(updates));
  runtime::Fill(zeros.data(), 0, zeros.numel() * WidthOf(zeros), StreamOf(context));
  WriteRows(context, index, zeros, false, x_grad);
}

void Summed(const Context& context, const Tensor& x, const Axis& axis, bool exclusive, bool reverse, Tensor* out) {
  const Tensor from = x;
  void* to = context.Alloc(out, from.dtype());
  if (out->numel() == 0) return;
  Tensor workspace = Temporary(context, DataType::FLOAT64, {2 * axis.Count()});
  math::CumSum(StreamOf(context), TypeOf(from), to, from.data(), axis, exclusive, reverse, workspace.data());
}

Axis AxisOfSum(const Tensor& x, const phi::Scalar& axis, bool flatten) {
  return flatten ? Axis{1, x.numel(), 1} : AxisAt(DimsOf(x), axis.to<int64_t>());
}

void Cumsum(const Context& context, const Tensor& x, const phi::Scalar& axis, bool flatten, bool exclusive,
            bool reverse, Tensor* out) {
  Summed(context, x, AxisOfSum(x, axis, flatten), exclusive, reverse, out);
}

void CumsumGrad(const Context& context, const Tensor& x, const Tensor& out_grad, const phi::Scalar& axis, bool flatten,
                bool exclusive, bool reverse, Tensor* x_grad) {
  x_grad->Resize(x.dims());
  Summed(context, out_grad, AxisOfSum(x, axis, flatten), exclusive, !reverse, x_grad);
}

void SecondIsInt64(const phi::KernelKey&, phi::Kernel* kernel) { kernel->OutputAt(1).SetDataType(DataType::INT64); }
void FirstVaries(const phi::KernelKey&, phi::Kernel* kernel) { kernel->InputAt(0).SetDataType(DataType::UNDEFINED); }
void SecondVaries(const phi::KernelKey&, phi::Kernel* kernel) { kernel->InputAt(1).SetDataType(DataType::UNDEFINED); }

}  // namespace

void RegisterSorts() {
  NVGPU_KERNEL(topk, Topk, TopkKernel, kNumbers, SecondIsInt64);
  NVGPU_KERNEL(topk_grad, TopkGrad, TopkGradKernel, kNumbers, SecondVaries);
  NVGPU_KERNEL(argsort, Argsort, ArgsortKernel, kNumbers, SecondIsInt64);
  NVGPU_KERNEL(argsort_grad, ArgsortGrad, ArgsortGradKernel, kFloats, FirstVaries);
  NVGPU_KERNEL(cumsum, Cumsum, CumsumKernel, kNumbers);
  NVGPU_KERNEL(cumsum_grad, CumsumGrad, CumsumGradKernel, kNumbers);
  NVGPU_KERNEL(gather_grad, GatherGrad, GatherGradKernel, kNumbers, SecondVaries);
  NVGPU_KERNEL(index_select_grad, IndexSelectGrad, IndexSelectGradKernel, kNumbers, SecondVaries);
  NVGPU_KERNEL(put_along_axis, PutAlongAxis, PutAlongAxisKernel, kNumbers, SecondVaries);
  NVGPU_KERNEL(scatter, Scatter, ScatterKernel, kNumbers, SecondVaries);
  NVGPU_KERNEL(scatter_grad, ScatterGrad, ScatterGradKernel, kFloats, FirstVaries);
  NVGPU_KERNEL(take_along_axis, TakeAlongAxis, TakeAlongAxisKernel, kComputable, SecondVaries);
  NVGPU_KERNEL(take_along_axis_grad, TakeAlongAxisGrad, TakeAlongAxisGradKernel, kNumbers, SecondVaries);
}

}  // namespace nvgpu
