// Copies between device and host, beside other work.
#pragma once

#include <memory>

#include "streams.h"

// Pinned memory of the host, without which copies wait for the host.
class HostMemory {
 public:
  explicit HostMemory(size_t bytes) : bytes(bytes) {
    check_bound();
    check_cuda("cudaMallocHost", cudaMallocHost(&pointer_, bytes));
  }
  ~HostMemory() { cudaFreeHost(pointer_); }
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;
  uintptr_t data_ptr() const { return reinterpret_cast<uintptr_t>(pointer_); }

  const size_t bytes;

 private:
  void* pointer_ = nullptr;
};

// What a stream had been given when it was made.
class Event {
 public:
  explicit Event(cudaStream_t stream) {
    constexpr unsigned kDisableTiming = 2;
    check_cuda("cudaEventCreateWithFlags", cudaEventCreateWithFlags(&event_, kDisableTiming));
    check_cuda("cudaEventRecord", cudaEventRecord(event_, stream));
  }
  ~Event() { cudaEventDestroy(event_); }  // CUDA lets it go when it is over
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void hold_stream(cudaStream_t stream) const {
    check_cuda("cudaStreamWaitEvent", cudaStreamWaitEvent(stream, event_, 0));
  }
  void hold(const Stream& stream) const { hold_stream(stream.handle); }
  void wait() const { check_cuda("cudaEventSynchronize", cudaEventSynchronize(event_)); }

 private:
  cudaEvent_t event_ = nullptr;
};

// A stream of its own, for copies alone. It is never destroyed: CUDA may be gone when the process's objects are.
class CopyStream {
 public:
  CopyStream() {
    check_bound();
    constexpr unsigned kNonBlocking = 1;
    check_cuda("cudaStreamCreateWithFlags", cudaStreamCreateWithFlags(&stream_, kNonBlocking));
  }
  void follow(const Stream& stream) { Event(stream.handle).hold_stream(stream_); }
  void follow_event(const Event& event) { event.hold_stream(stream_); }
  void copy(uintptr_t to, uintptr_t from, size_t bytes) {
    check_cuda("cudaMemcpyAsync", cudaMemcpyAsync(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from),
                                                  bytes, kDefaultKind, stream_));
  }
  std::unique_ptr<Event> mark() const { return std::make_unique<Event>(stream_); }

 private:
  cudaStream_t stream_ = nullptr;
};
