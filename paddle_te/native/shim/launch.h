// Memory, and kernels of our own.
#pragma once

#include "calls.h"

static void memcpy_async(const Tensor& destination, const Tensor& source, Stream& stream) {
  if (source.bytes() != destination.bytes())
    raise(describe("cudaMemcpyAsync: sizes differ", {{"destination", &destination}, {"source", &source}}));
  check_cuda("cudaMemcpyAsync", cudaMemcpyAsync(destination.data.data_ptr, source.data.data_ptr, source.bytes(),
                                                kDefaultKind, stream.handle));
}

static void memset_async(uintptr_t destination, int value, size_t bytes, Stream& stream) {
  check_cuda("cudaMemsetAsync", cudaMemsetAsync(reinterpret_cast<void*>(destination), value, bytes, stream.handle));
}

// Launches a kernel of native/kernels, whose parameters are 8 bytes each.
static void launch(uintptr_t kernel, unsigned grid, unsigned block, unsigned shared_bytes, Stream& stream,
                   const KernelArguments& arguments) {
  void* pointers[KernelArguments::kMost];
  for (size_t i = 0; i < arguments.count; i++) pointers[i] = const_cast<int64_t*>(&arguments.values[i]);
  int code = cuLaunchKernel(reinterpret_cast<void*>(kernel), grid, 1, 1, block, 1, 1, shared_bytes, stream.handle,
                            pointers, nullptr);
  if (code) {
    const char* text = nullptr;
    cuGetErrorString(code, &text);
    raise(std::string("cuLaunchKernel failed: ") + (text ? text : "unknown error"));
  }
}
