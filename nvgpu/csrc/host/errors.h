// How the host runtime says what is wrong, and how long it waits.
#pragma once

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace nvgpu::host {

using Clock = std::chrono::steady_clock;

[[noreturn]] inline void Fail(const std::string& what) { throw std::runtime_error("nvgpu (host): " + what); }
[[noreturn]] inline void FailErrno(const std::string& what) { Fail(what + ": " + std::strerror(errno)); }

// After which a collective gives up on peers that live but do not answer.
inline Clock::duration Timeout() {
  const char* seconds = std::getenv("NVGPU_TIMEOUT");
  return std::chrono::seconds(seconds == nullptr ? 600 : std::atoi(seconds));
}

}  // namespace nvgpu::host
