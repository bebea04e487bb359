#include "common.h"

#include "paddle/phi/backends/context_pool.h"

namespace nvgpu {

const phi::CPUContext& CpuContext() {
  return *static_cast<phi::CPUContext*>(phi::DeviceContextPool::Instance().Get(phi::CPUPlace()));
}

Dims DenseStrides(const Dims& dims) {
  Dims strides(dims.size());
  int64_t stride = 1;
  for (size_t axis = dims.size(); axis-- > 0;) {
    strides[axis] = stride;
    stride *= dims[axis];
  }
  return strides;
}

int64_t CountOf(const Dims& dims) {
  int64_t count = 1;
  for (int64_t dim : dims) count *= dim;
  return count;
}

int64_t AxisOf(int64_t axis, int64_t rank) {
  const int64_t found = axis < 0 ? axis + rank : axis;
  PADDLE_ENFORCE_EQ(found >= 0 && (found < rank || rank == 0), true,
                    common::errors::InvalidArgument("axis %d of a tensor of %d axes", axis, rank));
  return found;
}

math::Input Broadcast(const Tensor& tensor, const Dims& dims) {
  const Dims own = DimsOf(tensor), dense = DenseStrides(own);
  Dims strides(dims.size(), 0);
  const int64_t skipped = static_cast<int64_t>(dims.size()) - static_cast<int64_t>(own.size());
  for (int64_t axis = 0; axis < static_cast<int64_t>(own.size()); ++axis) {
    if (own[axis] == 1) continue;
    PADDLE_ENFORCE_EQ(
        axis + skipped >= 0 && own[axis] == dims[axis + skipped], true,
        common::errors::InvalidArgument("[%s] does not broadcast to [%s]", tensor.dims(), common::make_ddim(dims)));
    strides[axis + skipped] = dense[axis];
  }
  return {tensor.data(), strides};
}

math::Number NumberOf(const phi::Scalar& scalar) {
  math::Number number;
  number.real = scalar.to<double>();
  const bool is_float = scalar.dtype() == DataType::FLOAT32 || scalar.dtype() == DataType::FLOAT64 ||
                        scalar.dtype() == DataType::FLOAT16 || scalar.dtype() == DataType::BFLOAT16;
  if (!is_float) {
    number.integer = scalar.to<int64_t>();
  } else if (number.real >= 9.2233720368547758e18) {  // clip's bounds: beyond every integer
    number.integer = INT64_MAX;
  } else if (number.real <= -9.2233720368547758e18) {
    number.integer = INT64_MIN;
  } else {
    number.integer = static_cast<int64_t>(number.real);
  }
  return number;
}

Tensor Temporary(const Context& context, DataType type, const Dims& dims) {
  Tensor tensor;
  tensor.Resize(common::make_ddim(dims));
  context.Alloc(&tensor, type);
  return tensor;
}

void Copy(const Context& context, const Tensor& from, Tensor* to) {
  void* data = context.Alloc(to, from.dtype());
  if (from.numel() == 0 || data == from.data()) return;
  runtime::Copy(data, from.data(), from.numel() * WidthOf(from), runtime::CopyKind::kDeviceToDevice, StreamOf(context));
}

void SumTo(const Context& context, const Tensor& wide, const Dims& dims, Dims kept, Tensor* small) {
  kept.insert(kept.begin(), dims.size() - kept.size(), 1);
  std::vector<bool> reduced(dims.size());
  for (size_t axis = 0; axis < dims.size(); ++axis) reduced[axis] = kept[axis] != dims[axis];
  Tensor workspace = Temporary(context, DataType::UINT8, {int64_t(math::ReduceWorkspace(dims, reduced))});
  const bool same = small->dtype() == wide.dtype();
  Tensor sum = same ? *small : Temporary(context, wide.dtype(), DimsOf(*small));
  math::Reduce(StreamOf(context), math::Reduction::kSum, TypeOf(wide), sum.data(), wide.data(), dims, reduced,
               workspace.data());
  if (!same) math::Cast(StreamOf(context), sum.data(), TypeOf(sum), small->data(), TypeOf(*small), small->numel());
}

void SumTo(const Context& context, const Tensor& wide, Tensor* small) {
  SumTo(context, wide, DimsOf(wide), DimsOf(*small), small);
}

}  // namespace nvgpu
