// Sorting, and what reads or writes where an index along an axis says.
#pragma once

#include "common.h"

namespace nvgpu {

void RegisterSorts();
// In via_cpu.cc: where the index has other sizes than x beside the axis.
void TakeAlongAxisGradViaCpu(const Context& context, const Tensor& x, const Tensor& index, const Tensor& out_grad,
                             int axis, Tensor* x_grad);

}  // namespace nvgpu
