// Kernels that move elements: copies, strides, concatenation, selection, constants.
#include "common.h"
#include "paddle/phi/kernels/arange_kernel.h"
#include "paddle/phi/kernels/assign_kernel.h"
#include "paddle/phi/kernels/c_identity_kernel.h"
#include "paddle/phi/kernels/cast_kernel.h"
#include "paddle/phi/kernels/concat_grad_kernel.h"
#include "paddle/phi/kernels/concat_kernel.h"
#include "paddle/phi/kernels/contiguous_kernel.h"
#include "paddle/phi/kernels/expand_as_kernel.h"
#include "paddle/phi/kernels/expand_grad_kernel.h"
#include "paddle/phi/kernels/expand_kernel.h"
#include "paddle/phi/kernels/fill_kernel.h"
#include "paddle/phi/kernels/full_kernel.h"
#include "paddle/phi/kernels/gather_kernel.h"
#include "paddle/phi/kernels/index_elementwise_get_kernel.h"
#include "paddle/phi/kernels/index_select_kernel.h"
#include "paddle/phi/kernels/masked_fill_kernel.h"
#include "paddle/phi/kernels/one_hot_kernel.h"
#include "paddle/phi/kernels/set_value_kernel.h"
#include "paddle/phi/kernels/split_kernel.h"
#include "paddle/phi/kernels/stack_grad_kernel.h"
#include "paddle/phi/kernels/stack_kernel.h"
#include "paddle/phi/kernels/strided_copy_kernel.h"
#include "paddle/phi/kernels/tile_grad_kernel.h"
#include "paddle/phi/kernels/tile_kernel.h"
#include "paddle/phi/kernels/transpose_kernel.h"
#include "paddle/phi/kernels/tril_triu_grad_kernel.h"
#include "paddle/phi/kernels/tril_triu_kernel.h"
#include "paddle/phi/kernels/where_grad_kernel.h"
#include "paddle/phi/kernels/where_kernel.h"

namespace nvgpu {
namespace {

// ---- strides

void Contiguous(const Context& context, const Tensor& input, Tensor* out) {
  phi::DenseTensorMeta meta = input.meta();
  meta.strides = meta.calc_strides(meta.dims);
  meta.offset = 0;
  out->set_meta(meta);
  void* to = context.Alloc(out, input.dtype());
  if (input.numel() == 0) return;
  math::StridedCopy(StreamOf(context), WidthOf(input), to, common::vectorize(out->strides()), input.data(),
                    common::vectorize(input.strides()), DimsOf(input));
}

void StridedCopy(const Context& context, const Tensor& input, const std::vector<int64_t>& dims,
                 const std::vector<int64_t>& strides, int64_t offset, Tensor* out) {
  phi::DenseTensorMeta meta = input.meta();
  meta.dims = common::make_ddim(dims);
  meta.strides = common::make_ddim(strides);
  meta.offset = offset;
  out->set_meta(meta);
  PADDLE_ENFORCE_EQ(input.dims(), out->dims(),
                    common::errors::InvalidArgument("strided_copy from [%s] to [%s]", input.dims(), out->dims()));
  if (input.numel() == 0) return;
  math::StridedCopy(StreamOf(context), WidthOf(input), out->data(), strides, input.data(),
                    common::vectorize(input.strides()), dims);
}

void Transpose(const Context& context, const Tensor& x, const std::vector<int>& axes, Tensor* out) {
  const Dims dims = DimsOf(x), dense = DenseStrides(dims);
  Dims new_dims, strides;
  for (int axis : axes) {
    new_dims.push_back(dims[AxisOf(axis, dims.size())]);
    strides.push_back(dense[AxisOf(axis, dims.size())]);
  }
  out->Resize(common::make_ddim(new_dims));
  void* to = context.Alloc(out, x.dtype());
  if (x.numel() == 0) return;
  math::StridedCopy(StreamOf(context), WidthOf(x), to, DenseStrides(new_dims), x.data(), strides, new_dims);
}

// ---- constants

template <typename T>
void Put(const phi::Scalar& value, void* element) {
  const T converted = value.to<T>();
  std::memcpy(element, &converted, sizeof(T));
}

// The bytes of one element of the type.
void PutElement(const phi::Scalar& value, DataType type, void* element) {
  switch (type) {
    case DataType::BOOL: return Put<bool>(value, element);
    case DataType::UINT8: return Put<uint8_t>(value, element);
    case DataType::INT8: return Put<int8_t>(value, element);
    case DataType::INT16: return Put<int16_t>(value, element);
    case DataType::INT32: return Put<int32_t>(value, element);
    case DataType::INT64: return Put<int64_t>(value, element);
    case DataType::FLOAT16: return Put<phi::float16>(value, element);
    case DataType::BFLOAT16: return Put<phi::bfloat16>(value, element);
    case DataType::FLOAT32: return Put<float>(value, element);
    case DataType::FLOAT64: return Put<double>(value, element);
    case DataType::FLOAT8_E4M3FN: return Put<phi::float8_e4m3fn>(value, element);
    case DataType::FLOAT8_E5M2: return Put<phi::float8_e5m2>(value, element);
    case DataType::COMPLEX64: return Put<phi::complex64>(value, element);
    case DataType::COMPLEX128: return Put<phi::complex128>(value, element);
    default: PADDLE_THROW(common::errors::Unimplemented("a constant of type %s", type));
  }
}

void FillWith(const Context& context, const phi::Scalar& value, DataType type, Tensor* out) {
  void* to = context.Alloc(out, type);
  if (out->numel() == 0) return;
  unsigned char element[16] = {};
  PutElement(value, type, element);
  math::FillWith(StreamOf(context), phi::SizeOf(type), to, element, out->numel());
}

void Full(const Context& context, const phi::IntArray& shape, const phi::Scalar& value, DataType type, Tensor* out) {
  out->Resize(common::make_ddim(shape.GetData()));
  FillWith(context, value, type == DataType::UNDEFINED ? out->dtype() : type, out);
}

void FullLike(const Context& context, const Tensor& x, const phi::Scalar& value, DataType type, Tensor* out) {
  FillWith(context, value, type == DataType::UNDEFINED ? x.dtype() : type, out);
}

void Fill(const Context& context, const Tensor& x, const phi::Scalar& value, Tensor* out) {
  FillWith(context, value, x.dtype(), out);
}

void Arange(const Context& context, const phi::Scalar& start, const phi::Scalar&, const phi::Scalar& step,
            Tensor* out) {
  void* to = context.Alloc(out, out->dtype());  // its length is known: InferMeta saw the end
  math::Arange(StreamOf(context), TypeOf(*out), to, NumberOf(start), NumberOf(step), out->numel());
}

phi::Scalar OnHost(const Context& context, const Tensor& x) {
  if (x.place().GetType() == phi::AllocationType::CPU) return phi::Scalar(x);
  Tensor host;
  host.Resize(x.dims());
  context.HostAlloc(&host, x.dtype());
  runtime::Copy(host.data(), x.data(), WidthOf(x), runtime::CopyKind::kDeviceToHost, StreamOf(context));
  return phi::Scalar(host);
}
void ArangeTensor(const Context& context, const Tensor& start, const Tensor& end, const Tensor& step, Tensor* out) {
  const math::Number first = NumberOf(OnHost(context, start)), last = NumberOf(OnHost(context, end)),
                     stride = NumberOf(OnHost(context, step));
  const bool is_float = TypeOf(*out) >= Type::kHalf;
  const double count = is_float ? std::ceil((last.real - first.real) / stride.real)
                                : std::ceil(double(last.integer - first.integer) / double(stride.integer));
  out->Resize({std::max<int64_t>(0, static_cast<int64_t>(count))});
  void* to = context.Alloc(out, out->dtype());
  math::Arange(StreamOf(context), TypeOf(*out), to, first, stride, out->numel());
}
// The bounds may stay on the host.
void BoundsAnywhere(const phi::KernelKey&, phi::Kernel* kernel) {
  for (int input : {0, 1, 2}) kernel->InputAt(input).SetBackend(phi::Backend::ALL_BACKEND);
}

void OneHot(const Context& context, const Tensor& x, const phi::Scalar& classes, Tensor* out) {
  Dims dims = DimsOf(x);
  dims.push_back(classes.to<int64_t>());
  out->Resize(common::make_ddim(dims));
  auto* to = context.template Alloc<float>(out);
  math::OneHot(StreamOf(context), to, x.data(), TypeOf(x), x.numel(), dims.back());
}

// ---- copies of whole tensors

void Assign(const Context& context, const Tensor& x, Tensor* out) {
  out->Resize(x.dims());
  Copy(context, x, out);
}

void CIdentity(const Context& context, const Tensor& x, int, bool, bool, Tensor* out) { Assign(context, x, out); }

void Cast(const Context& context, const Tensor& x, DataType type, Tensor* out) {
  const Tensor from = x;  // in place, `out` shares x's memory and may give it up here
  if (from.dtype() == type) return Assign(context, from, out);
  out->Resize(from.dims());
  if (out->has_allocation() && out->Holder() == from.Holder()) out->clear();
  void* to = context.Alloc(out, type);
  math::Cast(StreamOf(context), from.data(), TypeOf(from), to, TypeOf(type), from.numel());
}

// ---- pieces along an axis

// Copies between `part` and its place in `whole`, which is `start` along the axis.
void CopyPiece(const Context& context, const Tensor& part, const Tensor& whole, int64_t axis, int64_t start,
               bool to_whole) {
  if (part.numel() == 0) return;
  const Dims dims = DimsOf(part), inside = DenseStrides(DimsOf(whole)), dense = DenseStrides(dims);
  const size_t width = WidthOf(part);
  auto* in_whole = static_cast<char*>(const_cast<void*>(whole.data())) + start * inside[axis] * width;
  void* in_part = const_cast<void*>(part.data());
  if (to_whole) {
    math::StridedCopy(StreamOf(context), width, in_whole, inside, in_part, dense, dims);
  } else {
    math::StridedCopy(StreamOf(context), width, in_part, dense, in_whole, inside, dims);
  }
}

void Concat(const Context& context, const std::vector<const Tensor*>& x, const phi::Scalar& axis_scalar, Tensor* out) {
  const int64_t axis = AxisOf(axis_scalar.to<int64_t>(), x[0]->dims().size());
  Dims dims = DimsOf(*x[0]);
  dims[axis] = 0;
  for (const Tensor* part : x) dims[axis] += part->dims()[axis];
  out->Resize(common::make_ddim(dims));
  context.Alloc(out, x[0]->dtype());
  int64_t start = 0;
  for (const Tensor* part : x) {
    CopyPiece(context, *part, *out, axis, start, true);
    start += part->dims()[axis];
  }
}

void SplitInto(const Context& context, const Tensor& x, int64_t axis, const std::vector<Tensor*>& parts) {
  int64_t start = 0;
  for (Tensor* part : parts) {
    if (part->numel() > 0) {
      context.Alloc(part, x.dtype());
      CopyPiece(context, *part, x, axis, start, false);
    }
    start += part->dims()[axis];
  }
}

void ConcatGrad(const Context& context, const std::vector<const Tensor*>& x, const Tensor& out_grad,
                const phi::Scalar& axis_scalar, std::vector<Tensor*> x_grad) {
  const int64_t axis = AxisOf(axis_scalar.to<int64_t>(), out_grad.dims().size());
  int64_t start = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    if (x_grad[i] != nullptr) {
      x_grad[i]->Resize(x[i]->dims());
      context.Alloc(x_grad[i], out_grad.dtype());
      CopyPiece(context, *x_grad[i], out_grad, axis, start, false);
    }
    start += x[i]->dims()[axis];
  }
}

void Split(const Context& context, const Tensor& x, const phi::IntArray&, const phi::Scalar& axis,
           std::vector<Tensor*> outs) {
  SplitInto(context, x, AxisOf(axis.to<int64_t>(), x.dims().size()), outs);
}

void SplitWithNum(const Context& context, const Tensor& x, int, const phi::Scalar& axis, std::vector<Tensor*> outs) {
  SplitInto(context, x, AxisOf(axis.to<int64_t>(), x.dims().size()), outs);
}

// A tensor as a piece of one with an axis more.
Tensor Unsqueezed(const Tensor& tensor, int64_t axis) {
  Tensor view = tensor;
  Dims dims = DimsOf(tensor);
  dims.insert(dims.begin() + axis, 1);
  view.Resize(common::make_ddim(dims));
  return view;
}

void Stack(const Context& context, const std::vector<const Tensor*>& x, int axis, Tensor* out) {
  const int64_t at = AxisOf(axis, x[0]->dims().size() + 1);
  Dims dims = DimsOf(*x[0]);
  dims.insert(dims.begin() + at, x.size());
  out->Resize(common::make_ddim(dims));
  context.Alloc(out, x[0]->dtype());
  for (size_t i = 0; i < x.size(); ++i) CopyPiece(context, Unsqueezed(*x[i], at), *out, at, i, true);
}

void StackGrad(const Context& context, const Tensor& out_grad, int axis, std::vector<Tensor*> x_grad) {
  const int64_t at = AxisOf(axis, out_grad.dims().size());
  Dims dims = DimsOf(out_grad);
  dims.erase(dims.begin() + at);
  for (size_t i = 0; i < x_grad.size(); ++i) {
    if (x_grad[i] == nullptr) continue;
    x_grad[i]->Resize(common::make_ddim(dims));
    context.Alloc(x_grad[i], out_grad.dtype());
    CopyPiece(context, Unsqueezed(*x_grad[i], at), out_grad, at, i, false);
  }
}

// ---- broadcasting

void BroadcastTo(const Context& context, const Tensor& x, Tensor* out) {
  const Dims dims = DimsOf(*out);
  void* to = context.Alloc(out, x.dtype());
  if (out->numel() == 0) return;
  math::StridedCopy(StreamOf(context), WidthOf(x), to, DenseStrides(dims), x.data(), Broadcast(x, dims).strides, dims);
}

void Expand(const Context& context, const Tensor& x, const phi::IntArray& shape, Tensor* out) {
  Dims dims = shape.GetData(), own = DimsOf(x);
  const int64_t skipped = static_cast<int64_t>(dims.size()) - static_cast<int64_t>(own.size());
  for (size_t axis = 0; axis < dims.size(); ++axis) {
    if (dims[axis] < 0) dims[axis] = own[axis - skipped];  // -1 keeps the axis
  }
  out->Resize(common::make_ddim(dims));
  BroadcastTo(context, x, out);
}

void ExpandGrad(const Context& context, const Tensor& x, const Tensor& out_grad, const phi::IntArray&, Tensor* x_grad) {
  x_grad->Resize(x.dims());
  context.Alloc(x_grad, out_grad.dtype());
  SumTo(context, out_grad, x_grad);
}

void ExpandAs(const Context& context, const Tensor& x, const paddle::optional<Tensor>&,
              const std::vector<int64_t>& target_shape, Tensor* out) {
  Expand(context, x, phi::IntArray(target_shape), out);
}

// A tile is a broadcast over an axis of repeats before each axis.
struct TileLayout {
  Dims dims, pairs, strides;  // of the result; of it with an axis of repeats before each axis; of x over the pairs
};
TileLayout LayoutOf(const Tensor& x, Dims repeats) {
  Dims own = DimsOf(x);
  while (repeats.size() < own.size()) repeats.insert(repeats.begin(), 1);
  while (own.size() < repeats.size()) own.insert(own.begin(), 1);
  const Dims dense = DenseStrides(own);
  TileLayout layout;
  for (size_t axis = 0; axis < own.size(); ++axis) {
    layout.dims.push_back(own[axis] * repeats[axis]);
    layout.pairs.insert(layout.pairs.end(), {repeats[axis], own[axis]});
    layout.strides.insert(layout.strides.end(), {0, dense[axis]});
  }
  return layout;
}
void Tile(const Context& context, const Tensor& x, const phi::IntArray& repeats, Tensor* out) {
  const TileLayout layout = LayoutOf(x, repeats.GetData());
  out->Resize(common::make_ddim(layout.dims));
  void* to = context.Alloc(out, x.dtype());
  if (out->numel() == 0) return;
  math::StridedCopy(StreamOf(context), WidthOf(x), to, DenseStrides(layout.pairs), x.data(), layout.strides,
                    layout.pairs);
}
void TileGrad(const Context& context, const Tensor& x, const Tensor& out_grad, const phi::IntArray& repeats,
              Tensor* x_grad) {
  const TileLayout layout = LayoutOf(x, repeats.GetData());
  Dims own;
  for (size_t axis = 0; axis < layout.pairs.size(); axis += 2) own.insert(own.end(), {1, layout.pairs[axis + 1]});
  x_grad->Resize(x.dims());
  context.Alloc(x_grad, x.dtype());
  SumTo(context, out_grad, layout.pairs, own, x_grad);
}

// ---- x[starts:ends:steps] = value

struct Slice {
  Dims dims, strides;  // of the elements to set, strides in x
  int64_t offset = 0;
};
Slice SliceOf(const Tensor& x, const Dims& starts, const Dims& ends, const Dims& steps, const Dims& axes) {
  Slice slice{DimsOf(x), DenseStrides(DimsOf(x))};
  for (size_t i = 0; i < axes.size(); ++i) {
    const int64_t axis = AxisOf(axes[i], x.dims().size()), size = x.dims()[axis], step = steps[i];
    const int64_t lowest = step > 0 ? 0 : -1, highest = step > 0 ? size : size - 1;
    const auto clamp = [&](int64_t at) { return std::min(std::max(at < 0 ? at + size : at, lowest), highest); };
    const int64_t first = clamp(starts[i]), last = clamp(ends[i]);
    slice.dims[axis] = std::max<int64_t>(0, (last - first + step - (step > 0 ? 1 : -1)) / step);
    slice.offset += first * slice.strides[axis];
    slice.strides[axis] *= step;
  }
  return slice;
}

// The value broadcasts to the slice's dims without `decreased` (indexed by a number) and with axes of one at `added`.
void SetTensorValue(const Context& context, const Tensor& x, const Tensor& value, const phi::IntArray& starts,
                    const phi::IntArray& ends, const phi::IntArray& steps, const std::vector<int64_t>& axes,
                    const std::vector<int64_t>& decreased, const std::vector<int64_t>& added, Tensor* out) {
  const Slice slice = SliceOf(x, starts.GetData(), ends.GetData(), steps.GetData(), axes);
  Copy(context, x, out);
  if (CountOf(slice.dims) == 0) return;
  Tensor converted = value;
  if (value.dtype() != x.dtype()) {
    converted = Temporary(context, x.dtype(), DimsOf(value));
    math::Cast(StreamOf(context), value.data(), TypeOf(value), converted.data(), TypeOf(x), value.numel());
  }
  std::vector<bool> dropped(slice.dims.size(), false);
  for (int64_t axis : decreased) dropped[AxisOf(axis, dropped.size())] = true;
  Dims seen;
  for (size_t axis = 0; axis < slice.dims.size(); ++axis) {
    if (!dropped[axis]) seen.push_back(slice.dims[axis]);
  }
  for (int64_t axis : added) seen.insert(seen.begin() + std::min<size_t>(axis, seen.size()), 1);
  while (converted.dims().size() > static_cast<int>(seen.size()) && converted.dims()[0] == 1) {
    converted.Resize(common::slice_ddim(converted.dims(), 1, converted.dims().size()));
  }
  Dims strides = Broadcast(converted, seen).strides;
  for (size_t i = added.size(); i-- > 0;)
    strides.erase(strides.begin() + std::min<size_t>(added[i], strides.size() - 1));
  for (size_t axis = 0; axis < dropped.size(); ++axis) {
    if (dropped[axis]) strides.insert(strides.begin() + axis, 0);
  }
  auto* to = static_cast<char*>(out->data()) + slice.offset * WidthOf(x);
  math::StridedCopy(StreamOf(context), WidthOf(x), to, slice.strides, converted.data(), strides, slice.dims);
}

void SetValue(const Context& context, const Tensor& x, const phi::IntArray& starts, const phi::IntArray& ends,
              const phi::IntArray& steps, const std::vector<int64_t>& axes, const std::vector<int64_t>& decreased,
              const std::vector<int64_t>& added, const std::vector<int64_t>& shape,
              const std::vector<phi::Scalar>& values, Tensor* out) {
  Tensor value = Temporary(context, x.dtype(), values.size() == 1 ? Dims{1} : Dims(shape));
  if (values.size() == 1) {
    FillWith(context, values[0], x.dtype(), &value);
  } else {
    std::vector<char> elements(values.size() * WidthOf(x));
    for (size_t i = 0; i < values.size(); ++i) PutElement(values[i], x.dtype(), &elements[i * WidthOf(x)]);
    runtime::Copy(value.data(), elements.data(), elements.size(), runtime::CopyKind::kHostToDevice, StreamOf(context));
  }
  SetTensorValue(context, x, value, starts, ends, steps, axes, decreased, added, out);
}

// ---- selection

void Where(const Context& context, const Tensor& condition, const Tensor& x, const Tensor& y, Tensor* out) {
  const Dims dims = DimsOf(*out);
  void* to = context.Alloc(out, x.dtype());
  if (out->numel() == 0) return;
  math::Where(StreamOf(context), WidthOf(x), to, dims, Broadcast(condition, dims), Broadcast(x, dims),
              Broadcast(y, dims));
}

void WhereGrad(const Context& context, const Tensor& condition, const Tensor& x, const Tensor& y,
               const Tensor& out_grad, Tensor* x_grad, Tensor* y_grad) {
  const Dims dims = DimsOf(out_grad);
  Tensor zero = Temporary(context, out_grad.dtype(), {1});
  runtime::Fill(zero.data(), 0, WidthOf(zero), StreamOf(context));
  const math::Input grad{out_grad.data(), DenseStrides(dims)}, nothing{zero.data(), Dims(dims.size(), 0)};
  const auto one_side = [&](const Tensor& side, Tensor* side_grad, const math::Input& first,
                            const math::Input& second) {
    if (side_grad == nullptr) return;
    side_grad->Resize(side.dims());
    context.Alloc(side_grad, out_grad.dtype());
    const bool same = side.dims() == out_grad.dims();
    Tensor wide = same ? *side_grad : Temporary(context, out_grad.dtype(), dims);
    math::Where(StreamOf(context), WidthOf(wide), wide.data(), dims, Broadcast(condition, dims), first, second);
    if (!same) SumTo(context, wide, side_grad);
  };
  one_side(x, x_grad, grad, nothing);
  one_side(y, y_grad, nothing, grad);
}

template <bool lower>
void Triangle(const Context& context, const Tensor& x, int diagonal, Tensor* out) {
  void* to = context.Alloc(out, x.dtype());
  if (x.numel() == 0) return;
  const Dims dims = DimsOf(x);
  const int64_t columns = dims.back(), rows = dims[dims.size() - 2];
  math::Triangle(StreamOf(context), WidthOf(x), to, x.data(), x.numel() / rows / columns, rows, columns, diagonal,
                 lower);
}

void GatherAlong(const Context& context, const Tensor& x, const Tensor& index, int64_t axis, Tensor* out) {
  void* to = context.Alloc(out, x.dtype());
  if (out->numel() == 0) return;
  const Dims dims = DimsOf(x);
  int64_t outer = 1, inner = 1;
  for (int64_t i = 0; i < axis; ++i) outer *= dims[i];
  for (size_t i = axis + 1; i < dims.size(); ++i) inner *= dims[i];
  math::Gather(StreamOf(context), WidthOf(x), to, x.data(), index.data(), TypeOf(index), outer, dims[axis],
               index.numel(), inner);
}

void GatherKernel(const Context& context, const Tensor& x, const Tensor& index, const phi::Scalar& axis, Tensor* out) {
  GatherAlong(context, x, index, AxisOf(axis.to<int64_t>(), x.dims().size()), out);
}

void IndexSelect(const Context& context, const Tensor& x, const Tensor& index, int axis, Tensor* out) {
  GatherAlong(context, x, index, AxisOf(axis, x.dims().size()), out);
}

// Paddle hands over the strides in which x and the indices are to be read; the index tensors share one shape.
// index_dims: [the indexed axes' sizes, -1, that shape, -1, ...]; index_strides and the offset are in bytes.
void AdvancedGet(const Context& context, const Tensor& x, const std::vector<const Tensor*>& index,
                 const std::vector<int64_t>& input_dims, const std::vector<int64_t>& input_strides,
                 const std::vector<int64_t>& index_dims, const std::vector<int64_t>& index_strides,
                 const int64_t slice_offset, const bool, const bool, Tensor* out) {
  if (out->dims().size() > 0) out->Resize(common::make_ddim(input_dims));
  void* to = context.Alloc(out, x.dtype());
  if (out->numel() == 0) return;
  if (x.numel() == 0) return runtime::Fill(to, 0, out->numel() * WidthOf(x), StreamOf(context));
  const int64_t width = WidthOf(x);
  std::vector<math::AdvancedIndex> indices;
  size_t at = 0;
  for (; at < index_dims.size() && index_dims[at] != -1; ++at) {
    indices.push_back({index[at]->data(), index_dims[at], index_strides[at] / width});
  }
  Dims shape;
  for (++at; at < index_dims.size() && index_dims[at] != -1; ++at) shape.push_back(index_dims[at]);
  const Dims dense = DenseStrides(shape);
  Dims strides(input_dims.size(), 0);
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    if (shape[axis] != 1) strides[input_dims.size() - shape.size() + axis] = dense[axis];
  }
  const math::Input in{static_cast<const char*>(x.data()) + slice_offset, input_strides};
  math::TakeAdvanced(StreamOf(context), width, to, input_dims, in, indices, strides);
}

void MaskedFill(const Context& context, const Tensor& x, const Tensor& mask, const Tensor& value, Tensor* out) {
  Where(context, mask, value, x, out);
}

// The index keeps the type it has, whatever the kernel's.
void IndexVaries(const phi::KernelKey&, phi::Kernel* kernel) { kernel->InputAt(1).SetDataType(DataType::UNDEFINED); }

}  // namespace

void RegisterMoves() {
  NVGPU_KERNEL(contiguous, Contiguous, ContiguousKernel, kMovable);
  NVGPU_KERNEL(strided_copy, StridedCopy, StridedCopyKernel, kMovable);
  NVGPU_KERNEL(transpose, Transpose, TransposeKernel, kMovable);
  NVGPU_KERNEL(full, Full, FullKernel, kMovable);
  NVGPU_KERNEL(full_like, FullLike, FullLikeKernel, kMovable, OutputVaries);
  NVGPU_KERNEL(fill, Fill, FillKernel, kMovable);
  NVGPU_KERNEL(arange, Arange, ArangeKernel, kNumbers);
  NVGPU_KERNEL(arange_tensor, ArangeTensor, ArangeTensorKernel, kNumbers, BoundsAnywhere);
  NVGPU_KERNEL(one_hot, OneHot, OneHotKernel, kIndices, OutputIs<DataType::FLOAT32>);
  static_assert(std::is_same_v<decltype(&Assign), decltype(&phi::AssignKernel<phi::CustomContext>)>);
  Register<&Assign>("assign", kMovable);
  NVGPU_KERNEL(c_identity, CIdentity, CIdentityKernel, kMovable);
  NVGPU_KERNEL(cast, Cast, CastKernel, kComputable, OutputVaries);
  NVGPU_KERNEL(concat, Concat, ConcatKernel, kMovable);
  NVGPU_KERNEL(concat_grad, ConcatGrad, ConcatGradKernel, kMovable);
  NVGPU_KERNEL(split, Split, SplitKernel, kMovable);
  NVGPU_KERNEL(split_with_num, SplitWithNum, SplitWithNumKernel, kMovable);
  NVGPU_KERNEL(stack, Stack, StackKernel, kMovable);
  NVGPU_KERNEL(stack_grad, StackGrad, StackGradKernel, kMovable);
  NVGPU_KERNEL(expand, Expand, ExpandKernel, kMovable);
  NVGPU_KERNEL(expand_grad, ExpandGrad, ExpandGradKernel, kNumbers);
  NVGPU_KERNEL(expand_as, ExpandAs, ExpandAsKernel, kMovable);
  NVGPU_KERNEL(tile, Tile, TileKernel, kMovable);
  NVGPU_KERNEL(tile_grad, TileGrad, TileGradKernel, kNumbers);
  NVGPU_KERNEL(set_value, SetValue, SetValueKernel, kMovable);
  NVGPU_KERNEL(set_value_with_tensor, SetTensorValue, SetTensorValueKernel, kMovable);
  NVGPU_KERNEL(where, Where, WhereKernel, kMovable);
  NVGPU_KERNEL(where_grad, WhereGrad, WhereGradKernel, kNumbers);
  NVGPU_KERNEL(tril, Triangle<true>, TrilKernel, kMovable);
  NVGPU_KERNEL(triu, Triangle<false>, TriuKernel, kMovable);
  NVGPU_KERNEL(tril_grad, Triangle<true>, TrilGradKernel, kMovable);
  NVGPU_KERNEL(triu_grad, Triangle<false>, TriuGradKernel, kMovable);
  NVGPU_KERNEL(gather, GatherKernel, GatherKernel, kMovable, IndexVaries);
  NVGPU_KERNEL(index_elementwise_get, AdvancedGet, IndexElementwiseGetKernel, kMovable, IndexVaries);
  NVGPU_KERNEL(masked_fill, MaskedFill, MaskedFillKernel, kMovable);
  NVGPU_KERNEL(index_select, IndexSelect, IndexSelectKernel, kMovable, IndexVaries);
}

}  // namespace nvgpu
