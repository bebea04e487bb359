// A CUDA stream with its scratch memory.
#pragma once

#include <cstdlib>
#include <functional>
#include <string>
#include <utility>

#include "tensors.h"

// The SMs that kernels use when TE's variable `margin` leaves some of them to other streams' kernels, such as NCCL's.
static int sms_without(const char* margin, int sm_count) {
  const char* text = std::getenv(margin);
  if (!text || !*text) return sm_count;
  char* end = nullptr;
  const long sms = std::strtol(text, &end, 10);
  if (*end || sms < 0 || sms >= sm_count)
    throw py::value_error(std::string(margin) + "=" + text + ": it must be an integer from 0 to " +
                          std::to_string(sm_count - 1) + ", the SMs that are left to other kernels");
  return sm_count - static_cast<int>(sms);
}

constexpr int kDefaultKind = 4;  // cudaMemcpyDefault: the direction follows from the addresses

// A CUDA stream of the current device with the scratch memory its kernels share (they run one after another).
class Stream {
 public:
  // allocate(bytes) returns an object with data_ptr(), which keeps the memory alive.
  Stream(uintptr_t handle, py::function allocate)
      : handle(reinterpret_cast<cudaStream_t>(handle)), allocate_(std::move(allocate)) {
    check_bound();
    int device = 0;
    check_cuda("cudaGetDevice", cudaGetDevice(&device));
    auto get = [&](int* value, DeviceAttribute attribute) {
      check_cuda("cudaDeviceGetAttribute", cudaDeviceGetAttribute(value, attribute, device));
    };
    get(&sm_count, kMultiProcessorCount);
    get(&major, kComputeCapabilityMajor);
    get(&minor, kComputeCapabilityMinor);
    gemm_sms = sms_without("NVTE_EXT_MARGIN_SM", sm_count);
    norm_fwd_sms = sms_without("NVTE_FWD_LAYERNORM_SM_MARGIN", sm_count);
    norm_bwd_sms = sms_without("NVTE_BWD_LAYERNORM_SM_MARGIN", sm_count);
  }

  void* workspace(size_t bytes) {
    if (bytes > size_) {
      // Kernels in flight may use the old memory, and not every allocator knows streams.
      if (size_) check_cuda("cudaStreamSynchronize", cudaStreamSynchronize(handle));
      size_ = 0;
      memory_ = py::none();
      memory_ = allocate_(bytes);
      pointer_ = memory_.attr("data_ptr")().cast<uintptr_t>();
      if (pointer_ % 256) throw py::value_error("the workspace must be 256-byte aligned");
      size_ = bytes;
    }
    return reinterpret_cast<void*>(pointer_);
  }
  size_t workspace_size() const { return size_; }
  // Memory for one call, an object with data_ptr(); the allocator may hand it to later work of this stream at once.
  py::object temporary(size_t bytes) { return allocate_(bytes); }

  const cudaStream_t handle;
  int sm_count = 0, major = 0, minor = 0;
  int gemm_sms = 0, norm_fwd_sms = 0, norm_bwd_sms = 0;  // of sm_count, those that these kernels use

 private:
  py::function allocate_;
  py::object memory_ = py::none();
  uintptr_t pointer_ = 0;
  size_t size_ = 0;
};
