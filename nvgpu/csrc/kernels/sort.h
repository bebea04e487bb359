// Sorting, and what reads or writes where an index along an axis says.
#pragma once

#include <string>

#include "common.h"

namespace nvgpu {

void RegisterSorts();
// In via_cpu.cc: where the index has other sizes than x beside the axis.
void TakeAlongAxisGradViaCpu(const Context& context, const Tensor& x, const Tensor& index, const Tensor& out_grad,
                             int axis, Tensor* x_grad);
// In via_cpu.cc: such an index, and what is reduced instead of assigned.
void PutAlongAxisViaCpu(const Context& context, const Tensor& x, const Tensor& index, const Tensor& value, int axis,
                        const std::string& reduce, bool include_self, Tensor* out);

}  // namespace nvgpu
