// Collectives of the CUDA runtime: NCCL, opened at the first use. The few functions and constants of its stable C
// interface that are needed are written down here, so that building needs no nccl.h.
#include <cstring>
#include <stdexcept>
#include <string>

#include "libraries.h"
#include "runtime.h"

namespace nvgpu::runtime {
namespace {

using Comm = void*;

struct Nccl {
  int (*get_unique_id)(CommunicatorId*);
  int (*comm_init_rank)(Comm*, int, CommunicatorId, int);
  int (*comm_destroy)(Comm);
  int (*all_reduce)(const void*, void*, size_t, int, int, Comm, Stream);
  int (*reduce)(const void*, void*, size_t, int, int, int, Comm, Stream);
  int (*reduce_scatter)(const void*, void*, size_t, int, int, Comm, Stream);
  int (*broadcast)(const void*, void*, size_t, int, int, Comm, Stream);
  int (*all_gather)(const void*, void*, size_t, int, Comm, Stream);
  int (*send)(const void*, size_t, int, int, Comm, Stream);
  int (*recv)(void*, size_t, int, int, Comm, Stream);
  int (*group_start)();
  int (*group_end)();
  const char* (*error_string)(int);
  const char* (*last_error)(Comm);

  Nccl() {
    void* library = OpenLibrary("libnccl.so.2");
    Find(library, "ncclGetUniqueId", &get_unique_id);
    Find(library, "ncclCommInitRank", &comm_init_rank);
    Find(library, "ncclCommDestroy", &comm_destroy);
    Find(library, "ncclAllReduce", &all_reduce);
    Find(library, "ncclReduce", &reduce);
    Find(library, "ncclReduceScatter", &reduce_scatter);
    Find(library, "ncclBroadcast", &broadcast);
    Find(library, "ncclAllGather", &all_gather);
    Find(library, "ncclSend", &send);
    Find(library, "ncclRecv", &recv);
    Find(library, "ncclGroupStart", &group_start);
    Find(library, "ncclGroupEnd", &group_end);
    Find(library, "ncclGetErrorString", &error_string);
    Find(library, "ncclGetLastError", &last_error);
  }
};

const Nccl& Library() {
  static const auto* nccl = new Nccl;
  return *nccl;
}

void Check(int code, const char* what) {
  if (code == 0) return;
  throw std::runtime_error(std::string(what) + ": " + Library().error_string(code) + ": " +
                           Library().last_error(nullptr));
}

constexpr int kBytes = 0;  // ncclInt8

int NcclType(Type type) {
  switch (type) {
    case Type::kInt8: return 0;
    case Type::kBool:
    case Type::kUint8: return 1;
    case Type::kInt32: return 2;
    case Type::kInt64: return 4;
    case Type::kHalf: return 6;
    case Type::kFloat: return 7;
    case Type::kDouble: return 8;
    case Type::kBfloat16: return 9;
    default: throw std::invalid_argument("NCCL does not reduce this element type");
  }
}
int NcclOp(Reduction reduction) {
  switch (reduction) {
    case Reduction::kProduct: return 1;
    case Reduction::kMax: return 2;
    case Reduction::kMin: return 3;
    case Reduction::kAverage: return 4;
    default: return 0;
  }
}
Comm Of(Communicator* comm) { return comm; }

}  // namespace

CommunicatorId NewCommunicatorId() {
  CommunicatorId id;
  Check(Library().get_unique_id(&id), "ncclGetUniqueId");
  return id;
}
Communicator* CreateCommunicator(const CommunicatorId& id, int rank, int size) {
  Comm comm = nullptr;
  Check(Library().comm_init_rank(&comm, size, id, rank), "ncclCommInitRank");
  return static_cast<Communicator*>(comm);
}
void DestroyCommunicator(Communicator* comm) { Check(Library().comm_destroy(Of(comm)), "ncclCommDestroy"); }

void AllReduce(Communicator* comm, const void* in, void* out, size_t count, Type type, Reduction reduction,
               Stream stream) {
  Check(Library().all_reduce(in, out, count, NcclType(type), NcclOp(reduction), Of(comm), stream), "ncclAllReduce");
}
void Reduce(Communicator* comm, const void* in, void* out, size_t count, Type type, Reduction reduction, int root,
            Stream stream) {
  Check(Library().reduce(in, out, count, NcclType(type), NcclOp(reduction), root, Of(comm), stream), "ncclReduce");
}
void ReduceScatter(Communicator* comm, const void* in, void* out, size_t count, Type type, Reduction reduction,
                   Stream stream) {
  Check(Library().reduce_scatter(in, out, count, NcclType(type), NcclOp(reduction), Of(comm), stream),
        "ncclReduceScatter");
}
void Broadcast(Communicator* comm, void* data, size_t bytes, int root, Stream stream) {
  Check(Library().broadcast(data, data, bytes, kBytes, root, Of(comm), stream), "ncclBroadcast");
}
void AllGather(Communicator* comm, const void* in, void* out, size_t bytes, Stream stream) {
  Check(Library().all_gather(in, out, bytes, kBytes, Of(comm), stream), "ncclAllGather");
}
void Send(Communicator* comm, const void* data, size_t bytes, int peer, Stream stream) {
  Check(Library().send(data, bytes, kBytes, peer, Of(comm), stream), "ncclSend");
}
void Receive(Communicator* comm, void* data, size_t bytes, int peer, Stream stream) {
  Check(Library().recv(data, bytes, kBytes, peer, Of(comm), stream), "ncclRecv");
}
void GroupStart() { Check(Library().group_start(), "ncclGroupStart"); }
void GroupEnd() { Check(Library().group_end(), "ncclGroupEnd"); }

}  // namespace nvgpu::runtime
