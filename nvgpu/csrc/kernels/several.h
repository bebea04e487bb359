// What the plug-in's own operators share, which take many weights in one call.
#pragma once

#include <vector>

#include "common.h"
#include "paddle/phi/api/ext/op_meta_info.h"
#include "paddle/phi/backends/context_pool.h"

namespace nvgpu {

using Several = std::vector<paddle::Tensor>;

inline Tensor* DenseOf(const paddle::Tensor& tensor) {
  auto* dense = dynamic_cast<Tensor*>(tensor.impl().get());
  PADDLE_ENFORCE_NOT_NULL(dense, common::errors::InvalidArgument("nvgpu: %s is not a dense tensor", tensor.name()));
  return dense;
}
inline Tensor* DenseOf(const paddle::optional<paddle::Tensor>& tensor) { return tensor ? DenseOf(*tensor) : nullptr; }
inline Tensor* DenseOf(const paddle::optional<Several>& tensors, size_t i) {
  return tensors ? DenseOf((*tensors)[i]) : nullptr;
}
inline const Context& ContextOf(const paddle::Tensor& tensor) {
  return *static_cast<Context*>(phi::DeviceContextPool::Instance().Get(tensor.place()));
}

}  // namespace nvgpu
