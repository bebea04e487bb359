// NVGPU_TRACE=1: every copy between host and device, every allocation that Paddle's cache could not serve, and every
// kernel that runs on the CPU instead of the device is printed. NVGPU_TRACE=<bytes> leaves smaller ones out.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "runtime.h"

namespace nvgpu {

inline size_t TraceFrom() {  // in bytes, 0: not at all
  static const size_t bytes = [] {
    const char* value = std::getenv("NVGPU_TRACE");
    return value == nullptr ? size_t(0) : size_t(std::atoll(value));
  }();
  return bytes;
}

inline void TraceCopy(runtime::CopyKind kind, size_t bytes) {
  if (TraceFrom() == 0 || bytes < TraceFrom() || kind == runtime::CopyKind::kDeviceToDevice) return;
  std::fprintf(stderr, "[nvgpu] copy %s host: %zu bytes\n", kind == runtime::CopyKind::kHostToDevice ? "from" : "to",
               bytes);
}

inline void TraceAllocation(size_t bytes) {
  if (TraceFrom() > 0 && bytes >= TraceFrom()) std::fprintf(stderr, "[nvgpu] allocate %zu bytes\n", bytes);
}

inline void TraceKernel(const char* name) {
  if (TraceFrom() > 0) std::fprintf(stderr, "[nvgpu] on the CPU: %s\n", name);
}

}  // namespace nvgpu
