// The host runtime: device memory is plain memory, and a "device" only a number. See stream.h for its streams and
// communicator.cc for its collectives.
#include <malloc.h>
#include <sys/sysinfo.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <set>

#include "host/stream.h"
#include "runtime.h"

namespace nvgpu {
namespace host {

namespace {
// Every stream there is, for SynchronizeDevice. Never destroyed: Paddle still calls in while the process exits.
struct Registry {
  std::mutex mutex;
  std::set<HostStream*> streams;
  HostStream null_stream;
};
Registry& AllStreams() {
  static auto* registry = new Registry;
  return *registry;
}
struct HostEvent {
  std::mutex mutex;
  Tokens tokens;
  Tokens Get() {
    std::lock_guard<std::mutex> lock(mutex);
    return tokens;
  }
};
HostEvent& EventOf(void* event) { return *static_cast<HostEvent*>(event); }
thread_local int current_device = 0;

std::atomic<size_t> used_memory{0};  // of all devices together
// What a process may take of them: NVGPU_HOST_MEMORY, in bytes, as it is at the moment. Unless told, all there is.
size_t MemoryLimit() {
  const char* bytes = std::getenv("NVGPU_HOST_MEMORY");
  return bytes == nullptr ? SIZE_MAX : std::strtoull(bytes, nullptr, 10);
}
}  // namespace

HostStream& Of(void* stream) {
  return stream == nullptr ? AllStreams().null_stream : *static_cast<HostStream*>(stream);
}
}  // namespace host

namespace runtime {
using namespace host;

const char* Name() { return "host"; }

// As many as a process may ask for: NVGPU_HOST_DEVICES, 8 unless told.
int DeviceCount() {
  const char* count = std::getenv("NVGPU_HOST_DEVICES");
  return count == nullptr ? 8 : std::atoi(count);
}
void SetDevice(int device) { current_device = device; }
int CurrentDevice() { return current_device; }
void SynchronizeDevice(int) {
  Tokens tokens = AllStreams().null_stream.Pending();
  {
    std::lock_guard<std::mutex> lock(AllStreams().mutex);
    for (HostStream* stream : AllStreams().streams) {
      for (auto& token : stream->Pending()) tokens.push_back(token);
    }
  }
  WaitOrThrow(tokens);
}
Properties GetProperties(int) { return {0, 1, 1, 1, {1, 1, 1}, 0, 0}; }

void* Allocate(size_t bytes) {
  void* pointer = AllocateHost(bytes);
  used_memory += malloc_usable_size(pointer);
  if (used_memory <= MemoryLimit()) return pointer;
  Free(pointer);
  return nullptr;
}
void Free(void* pointer) {
  used_memory -= malloc_usable_size(pointer);
  std::free(pointer);
}
void* AllocateHost(size_t bytes) { return std::aligned_alloc(256, (bytes + 255) / 256 * 256); }
void FreeHost(void* pointer) { std::free(pointer); }
void MemoryStats(size_t* total, size_t* free) {
  struct sysinfo info;
  sysinfo(&info);
  const size_t limit = MemoryLimit(), used = used_memory;
  *total = std::min<size_t>(info.totalram * info.mem_unit, limit);
  *free = std::min<size_t>((info.freeram + info.bufferram) * info.mem_unit, limit - std::min(limit, used));
}
void Copy(void* to, const void* from, size_t bytes, CopyKind, Stream stream) {
  Of(stream).Drain();
  std::memmove(to, from, bytes);
}
void CopyPeer(void* to, int, const void* from, int, size_t bytes, Stream stream) {
  Copy(to, from, bytes, CopyKind::kDeviceToDevice, stream);
}
void Fill(void* pointer, unsigned char value, size_t bytes, Stream stream) {
  Of(stream).Drain();
  std::memset(pointer, value, bytes);
}

Stream CreateStream() {
  auto* stream = new HostStream;
  std::lock_guard<std::mutex> lock(AllStreams().mutex);
  AllStreams().streams.insert(stream);
  return stream;
}
void DestroyStream(Stream stream) {
  std::lock_guard<std::mutex> lock(AllStreams().mutex);
  if (AllStreams().streams.erase(static_cast<HostStream*>(stream)) > 0) delete static_cast<HostStream*>(stream);
}
bool StreamIsDone(Stream stream) { return AllDone(Of(stream).Pending()); }
void Synchronize(Stream stream) { Of(stream).Drain(); }
void AddCallback(Stream stream, void (*function)(void*), void* data) {
  Of(stream).Drain();
  function(data);
}

Event CreateEvent() { return new HostEvent; }
void DestroyEvent(Event event) { delete static_cast<HostEvent*>(event); }
void Record(Event event, Stream stream) {
  Tokens tokens = Of(stream).Pending();
  std::lock_guard<std::mutex> lock(EventOf(event).mutex);
  EventOf(event).tokens = std::move(tokens);
}
bool EventIsDone(Event event) { return AllDone(EventOf(event).Get()); }
void SynchronizeEvent(Event event) { WaitOrThrow(EventOf(event).Get()); }
void WaitEvent(Stream stream, Event event) { Of(stream).Add(EventOf(event).Get()); }

}  // namespace runtime
}  // namespace nvgpu
