// What a device did and who asked for it, as NVIDIA's CUPTI records it, for Paddle's profiler.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace nvgpu::profiler {

struct Activity {
  enum class Kind { kKernel, kCopy, kFill, kCall } kind;  // a call started one of the others
  std::string name;
  uint64_t start, end;                  // ns since the epoch
  uint32_t correlation;                 // the same for a call and what it started
  uint32_t process, thread;             // of a call
  uint32_t device, context, stream;     // of the others
  uint64_t bytes;                       // copied or filled
  std::array<uint32_t, 3> grid, block;  // of a kernel, and:
  uint32_t registers_per_thread, static_shared_memory, dynamic_shared_memory, local_memory_per_thread;
};

// Throws std::runtime_error where CUPTI is missing or refuses. The host runtime records nothing.
void Start();
// Waits for the current device. What was recorded since `Start`, in no order, without calls that started nothing.
std::vector<Activity> Stop();

}  // namespace nvgpu::profiler
