// The CUDA runtime: streams are cudaStream_t, events cudaEvent_t, device addresses plain CUDA pointers. See
// communicator.cc for the collectives.
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "runtime.h"

namespace nvgpu::runtime {
namespace {

void Check(cudaError_t code, const char* call) {
  if (code != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(code));
}
#define CHECK(call) Check((call), #call)

cudaStream_t Cuda(Stream stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t AsEvent(Event event) { return static_cast<cudaEvent_t>(event); }

size_t Attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

bool IsPinned(const void* host) {
  cudaPointerAttributes attributes;
  return cudaPointerGetAttributes(&attributes, host) == cudaSuccess && attributes.type == cudaMemoryTypeHost;
}

// cudaErrorNotReady is an answer, not a failure.
bool IsDone(cudaError_t code, const char* call) {
  if (code == cudaErrorNotReady) return false;
  Check(code, call);
  return true;
}

}  // namespace

const char* Name() { return "cuda"; }

int DeviceCount() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}
void SetDevice(int device) { CHECK(cudaSetDevice(device)); }
int CurrentDevice() {
  int device = 0;
  CHECK(cudaGetDevice(&device));
  return device;
}
void SynchronizeDevice(int) { CHECK(cudaDeviceSynchronize()); }

Properties GetProperties(int device) {
  Properties properties;
  properties.compute_capability =
      10 * Attribute(cudaDevAttrComputeCapabilityMajor, device) + Attribute(cudaDevAttrComputeCapabilityMinor, device);
  properties.multiprocessors = Attribute(cudaDevAttrMultiProcessorCount, device);
  properties.threads_per_multiprocessor = Attribute(cudaDevAttrMaxThreadsPerMultiProcessor, device);
  properties.threads_per_block = Attribute(cudaDevAttrMaxThreadsPerBlock, device);
  const cudaDeviceAttr axes[] = {cudaDevAttrMaxGridDimX, cudaDevAttrMaxGridDimY, cudaDevAttrMaxGridDimZ};
  for (int i = 0; i < 3; ++i) properties.grid[i] = static_cast<unsigned>(Attribute(axes[i], device));
  int version = 0;
  CHECK(cudaRuntimeGetVersion(&version));
  properties.runtime_version = version;
  CHECK(cudaDriverGetVersion(&version));
  properties.driver_version = version;
  return properties;
}

// Paddle caches device memory above this, so that a training step in its stride calls neither.
void* Allocate(size_t bytes) {
  void* pointer = nullptr;
  const cudaError_t code = cudaMalloc(&pointer, bytes);
  if (code == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // it would be found by the next check of a kernel's launch
    return nullptr;
  }
  Check(code, "cudaMalloc");
  return pointer;
}
// What is given back as the process exits comes when the driver may be gone: no checks.
void Free(void* pointer) { cudaFree(pointer); }
void* AllocateHost(size_t bytes) {
  void* pointer = nullptr;
  CHECK(cudaMallocHost(&pointer, bytes));
  return pointer;
}
void FreeHost(void* pointer) { cudaFreeHost(pointer); }
void MemoryStats(size_t* total, size_t* free) { CHECK(cudaMemGetInfo(free, total)); }

void Copy(void* to, const void* from, size_t bytes, CopyKind kind, Stream stream) {
  if (bytes == 0) return;
  const cudaMemcpyKind kinds[] = {cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice};
  CHECK(cudaMemcpyAsync(to, from, bytes, kinds[static_cast<int>(kind)], Cuda(stream)));
  // CUDA has read pageable memory by now; pinned memory it reads later.
  if (kind == CopyKind::kDeviceToHost || (kind == CopyKind::kHostToDevice && IsPinned(from))) {
    CHECK(cudaStreamSynchronize(Cuda(stream)));
  }
}
void CopyPeer(void* to, int to_device, const void* from, int from_device, size_t bytes, Stream stream) {
  CHECK(cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, Cuda(stream)));
}
void Fill(void* pointer, unsigned char value, size_t bytes, Stream stream) {
  if (bytes > 0) CHECK(cudaMemsetAsync(pointer, value, bytes, Cuda(stream)));
}

// Not ordered with CUDA's default stream: what another library launches there does not hold these up.
Stream CreateStream() {
  cudaStream_t stream = nullptr;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}
void DestroyStream(Stream stream) { cudaStreamDestroy(Cuda(stream)); }
bool StreamIsDone(Stream stream) { return IsDone(cudaStreamQuery(Cuda(stream)), "cudaStreamQuery"); }
void Synchronize(Stream stream) { CHECK(cudaStreamSynchronize(Cuda(stream))); }
void AddCallback(Stream stream, void (*function)(void*), void* data) {
  CHECK(cudaLaunchHostFunc(Cuda(stream), function, data));
}

Event CreateEvent() {
  cudaEvent_t event = nullptr;
  CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
}
void DestroyEvent(Event event) { cudaEventDestroy(AsEvent(event)); }
void Record(Event event, Stream stream) { CHECK(cudaEventRecord(AsEvent(event), Cuda(stream))); }
bool EventIsDone(Event event) { return IsDone(cudaEventQuery(AsEvent(event)), "cudaEventQuery"); }
void SynchronizeEvent(Event event) { CHECK(cudaEventSynchronize(AsEvent(event))); }
void WaitEvent(Stream stream, Event event) { CHECK(cudaStreamWaitEvent(Cuda(stream), AsEvent(event), 0)); }

}  // namespace nvgpu::runtime
