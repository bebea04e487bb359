// What the plug-in asks of a device. cuda/ answers with the CUDA runtime and NCCL, host/ with plain memory and shared
// memory between processes; everything above this header is the same for both.
//
// Failures are std::runtime_error; plugin.cc turns them into the status codes that Paddle expects.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "dtype.h"

namespace nvgpu {

using Stream = void*;  // a cudaStream_t, or the host runtime's stream
using Event = void*;

namespace runtime {

const char* Name();  // "cuda" or "host"

// ---- devices
int DeviceCount();  // 0 where there is none, so that `import paddle` still works
void SetDevice(int device);
int CurrentDevice();
void SynchronizeDevice(int device);

struct Properties {
  size_t compute_capability;  // 90 for Hopper
  size_t multiprocessors;
  size_t threads_per_multiprocessor;
  size_t threads_per_block;
  std::array<unsigned int, 3> grid;
  size_t runtime_version;
  size_t driver_version;
};
Properties GetProperties(int device);

// ---- memory
void* Allocate(size_t bytes);  // on the current device; nullptr when it is full
void Free(void* pointer);
void* AllocateHost(size_t bytes);
void FreeHost(void* pointer);
void MemoryStats(size_t* total, size_t* free);

enum class CopyKind { kHostToDevice, kDeviceToHost, kDeviceToDevice };
// In order with the stream. A copy from or to the host has left, or reached, the host's buffer when this returns:
// Paddle frees and reads such buffers at once.
void Copy(void* to, const void* from, size_t bytes, CopyKind kind, Stream stream);
void CopyPeer(void* to, int to_device, const void* from, int from_device, size_t bytes, Stream stream);
void Fill(void* pointer, unsigned char value, size_t bytes, Stream stream);

// ---- streams and events
Stream CreateStream();
void DestroyStream(Stream stream);
bool StreamIsDone(Stream stream);
void Synchronize(Stream stream);
void AddCallback(Stream stream, void (*function)(void*), void* data);

Event CreateEvent();
void DestroyEvent(Event event);
void Record(Event event, Stream stream);
bool EventIsDone(Event event);
void SynchronizeEvent(Event event);
void WaitEvent(Stream stream, Event event);

// ---- collectives, in the order in which a process calls them
enum class Reduction { kSum, kAverage, kMax, kMin, kProduct };

struct CommunicatorId {
  char bytes[128];  // ncclUniqueId's size
};
struct Communicator;

CommunicatorId NewCommunicatorId();
Communicator* CreateCommunicator(const CommunicatorId& id, int rank, int size);
void DestroyCommunicator(Communicator* comm);

// Counts are in elements of `type`, of one rank's share in all-gather and reduce-scatter.
void AllReduce(Communicator* comm, const void* in, void* out, size_t count, Type type, Reduction reduction,
               Stream stream);
void Reduce(Communicator* comm, const void* in, void* out, size_t count, Type type, Reduction reduction, int root,
            Stream stream);
void ReduceScatter(Communicator* comm, const void* in, void* out, size_t count, Type type, Reduction reduction,
                   Stream stream);
// What only moves data takes bytes, so that every type is possible.
void Broadcast(Communicator* comm, void* data, size_t bytes, int root, Stream stream);
void AllGather(Communicator* comm, const void* in, void* out, size_t bytes, Stream stream);
void Send(Communicator* comm, const void* data, size_t bytes, int peer, Stream stream);
void Receive(Communicator* comm, void* data, size_t bytes, int peer, Stream stream);
// Sends and receives between the two progress together, so that their order does not matter.
void GroupStart();
void GroupEnd();

}  // namespace runtime
}  // namespace nvgpu
