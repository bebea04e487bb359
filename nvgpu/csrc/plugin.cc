// Fills in Paddle's table of a CustomDevice's functions with those of runtime.h.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "kernels/common.h"
#include "kernels/sort.h"
#include "libraries.h"
#include "paddle/phi/api/profiler/trace_event.h"
#include "paddle/phi/backends/context_pool.h"
#include "paddle/phi/backends/device_ext.h"
#include "profiler.h"
#include "runtime.h"
#include "trace.h"

namespace nvgpu {
namespace {

// What a function throws becomes a status; Paddle raises its own error, which names no cause, so the cause is printed.
template <typename Function>
C_Status Guard(Function function) {
  try {
    function();
    return C_SUCCESS;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "[nvgpu] %s\n", error.what());
    return C_ERROR;
  }
}

// Selects a device for one call and puts the caller's device back.
class DeviceGuard {
 public:
  explicit DeviceGuard(C_Device device) : previous_(runtime::CurrentDevice()), changed_(previous_ != device->id) {
    if (changed_) runtime::SetDevice(device->id);
  }
  ~DeviceGuard() {
    if (!changed_) return;
    try {
      runtime::SetDevice(previous_);
    } catch (const std::exception&) {  // as the process exits the driver may be gone
    }
  }

 private:
  int previous_;
  bool changed_;
};
template <typename Function>
C_Status On(C_Device device, Function function) {
  return Guard([&] {
    DeviceGuard guard(device);
    function();
  });
}

// ---- devices

C_Status Nothing() { return C_SUCCESS; }
C_Status NothingFor(const C_Device) { return C_SUCCESS; }
C_Status SetDevice(const C_Device device) {
  return Guard([&] { runtime::SetDevice(device->id); });
}
C_Status GetDevice(const C_Device device) {
  return Guard([&] { device->id = runtime::CurrentDevice(); });
}
C_Status SynchronizeDevice(const C_Device device) {
  return On(device, [&] { runtime::SynchronizeDevice(device->id); });
}
C_Status GetDeviceCount(size_t* count) {
  *count = runtime::DeviceCount();
  return C_SUCCESS;
}
C_Status GetDeviceList(size_t* devices) {
  for (int i = 0; i < runtime::DeviceCount(); ++i) devices[i] = i;
  return C_SUCCESS;
}
template <auto member, typename Value>
C_Status Property(const C_Device device, Value* value) {
  return Guard([&] { *value = runtime::GetProperties(device->id).*member; });
}
C_Status Yes(const C_Device, bool* supported) {
  *supported = true;
  return C_SUCCESS;
}
C_Status No(const C_Device, bool* supported) {
  *supported = false;
  return C_SUCCESS;
}

// ---- streams and events

C_Status CreateStream(const C_Device device, C_Stream* stream) {
  return On(device, [&] { *stream = static_cast<C_Stream>(runtime::CreateStream()); });
}
C_Status DestroyStream(const C_Device device, C_Stream stream) {
  return On(device, [&] { runtime::DestroyStream(stream); });
}
C_Status QueryStream(const C_Device device, C_Stream stream) {
  bool done = false;
  const C_Status status = On(device, [&] { done = runtime::StreamIsDone(stream); });
  return status == C_SUCCESS && !done ? C_FAILED : status;
}
C_Status SynchronizeStream(const C_Device device, C_Stream stream) {
  return On(device, [&] { runtime::Synchronize(stream); });
}

struct Callback {
  C_Device_st device;
  C_Stream stream;
  C_Callback function;
  void* data;
};
void RunCallback(void* data) {
  auto* callback = static_cast<Callback*>(data);
  C_Status status = C_SUCCESS;
  callback->function(&callback->device, callback->stream, callback->data, &status);
  delete callback;
}
C_Status AddCallback(const C_Device device, C_Stream stream, C_Callback function, void* data) {
  return On(device, [&] { runtime::AddCallback(stream, RunCallback, new Callback{*device, stream, function, data}); });
}

C_Status CreateEvent(const C_Device device, C_Event* event) {
  return On(device, [&] { *event = static_cast<C_Event>(runtime::CreateEvent()); });
}
C_Status DestroyEvent(const C_Device device, C_Event event) {
  return On(device, [&] { runtime::DestroyEvent(event); });
}
C_Status RecordEvent(const C_Device device, C_Stream stream, C_Event event) {
  return On(device, [&] { runtime::Record(event, stream); });
}
C_Status QueryEvent(const C_Device device, C_Event event) {
  bool done = false;
  const C_Status status = On(device, [&] { done = runtime::EventIsDone(event); });
  return status == C_SUCCESS && !done ? C_FAILED : status;
}
C_Status SynchronizeEvent(const C_Device device, C_Event event) {
  return On(device, [&] { runtime::SynchronizeEvent(event); });
}
C_Status StreamWaitEvent(const C_Device device, C_Stream stream, C_Event event) {
  return On(device, [&] { runtime::WaitEvent(stream, event); });
}

// ---- memory

C_Status Allocate(const C_Device device, void** pointer, size_t size) {
  TraceAllocation(size);
  // A nullptr that is no error has Paddle free its cache and try again, then say how much is missing.
  return On(device, [&] { *pointer = runtime::Allocate(size); });
}
C_Status Free(const C_Device device, void* pointer, size_t) {
  return On(device, [&] { runtime::Free(pointer); });
}
C_Status AllocateHost(const C_Device device, void** pointer, size_t size) {
  return On(device, [&] { *pointer = runtime::AllocateHost(size); });
}
C_Status FreeHost(const C_Device device, void* pointer, size_t) {
  return On(device, [&] { runtime::FreeHost(pointer); });
}
// The stream of the device's operations: what Paddle moves without naming a stream comes after the operations that
// it launched before, which may still read or write the same memory. CUDA's default stream would wait for none of them.
Stream OperationsStream(const C_Device device) {
  if (!phi::DeviceContextPool::IsInitialized()) return nullptr;
  const phi::CustomPlace place(kDeviceType, device->id);
  return StreamOf(*static_cast<const Context*>(phi::DeviceContextPool::Instance().Get(place)));
}
// Runs `function` on that stream, and waits for it.
template <typename Function>
C_Status OnAndWait(const C_Device device, Function function) {
  return On(device, [&] {
    const Stream stream = OperationsStream(device);
    function(stream);
    runtime::Synchronize(stream);
  });
}
C_Status Set(const C_Device device, void* pointer, unsigned char value, size_t size) {
  return OnAndWait(device, [&](Stream stream) { runtime::Fill(pointer, value, size, stream); });
}
template <runtime::CopyKind kind>
C_Status CopyAsync(const C_Device device, C_Stream stream, void* to, const void* from, size_t size) {
  TraceCopy(kind, size);
  return On(device, [&] { runtime::Copy(to, from, size, kind, stream); });
}
template <runtime::CopyKind kind>
C_Status Copy(const C_Device device, void* to, const void* from, size_t size) {
  TraceCopy(kind, size);
  return OnAndWait(device, [&](Stream stream) { runtime::Copy(to, from, size, kind, stream); });
}
C_Status CopyPeerAsync(const C_Device to_device, const C_Device from_device, C_Stream stream, void* to,
                       const void* from, size_t size) {
  return On(from_device, [&] { runtime::CopyPeer(to, to_device->id, from, from_device->id, size, stream); });
}
C_Status CopyPeer(const C_Device to_device, const C_Device from_device, void* to, const void* from, size_t size) {
  return OnAndWait(from_device,
                   [&](Stream stream) { runtime::CopyPeer(to, to_device->id, from, from_device->id, size, stream); });
}
C_Status MemoryStats(const C_Device device, size_t* total, size_t* free) {
  return On(device, [&] { runtime::MemoryStats(total, free); });
}
C_Status MinChunkSize(const C_Device, size_t* size) {
  *size = 256;  // what both runtimes align to
  return C_SUCCESS;
}

// ---- collectives

Type TypeOf(C_DataType type) {
  switch (type) {
    case BOOL: return Type::kBool;
    case UINT8: return Type::kUint8;
    case INT8: return Type::kInt8;
    case INT16: return Type::kInt16;
    case INT32: return Type::kInt32;
    case INT64: return Type::kInt64;
    case FLOAT16: return Type::kHalf;
    case BFLOAT16: return Type::kBfloat16;
    case FLOAT32: return Type::kFloat;
    case FLOAT64: return Type::kDouble;
    default: throw std::invalid_argument("collectives do not know this element type");
  }
}
size_t BytesOf(size_t count, C_DataType type) {
  switch (type) {
    case UINT16: return count * 2;
    case UINT32: return count * 4;
    case UINT64:
    case COMPLEX64: return count * 8;
    case COMPLEX128: return count * 16;
    default: return count * SizeOf(TypeOf(type));
  }
}
// How often this thread has asked for averages, which Paddle does not ask of custom devices: then its sums are some.
thread_local int averages = 0;

runtime::Reduction ReductionOf(C_CCLReduceOp op) {
  switch (op) {
    case AVG: return runtime::Reduction::kAverage;
    case MAX: return runtime::Reduction::kMax;
    case MIN: return runtime::Reduction::kMin;
    case PRODUCT: return runtime::Reduction::kProduct;
    default: return averages > 0 ? runtime::Reduction::kAverage : runtime::Reduction::kSum;
  }
}
runtime::Communicator* CommOf(C_CCLComm comm) { return reinterpret_cast<runtime::Communicator*>(comm); }

C_Status CommName(C_CCLComm comm, char* name) {
  std::snprintf(name, 64, "%p", static_cast<void*>(comm));
  return C_SUCCESS;
}
C_Status UniqueIdSize(size_t* size) {
  *size = sizeof(runtime::CommunicatorId);
  return C_SUCCESS;
}
C_Status UniqueId(C_CCLRootId* id) {
  return Guard([&] {
    const auto made = runtime::NewCommunicatorId();
    std::memcpy(id->data, &made, sizeof(made));
  });
}
C_Status CommInitRank(size_t ranks, C_CCLRootId* id, size_t rank, C_CCLComm* comm) {
  return Guard([&] {
    runtime::CommunicatorId received;
    std::memcpy(&received, id->data, sizeof(received));
    *comm = reinterpret_cast<C_CCLComm>(runtime::CreateCommunicator(received, rank, ranks));
  });
}
C_Status DestroyComm(C_CCLComm comm) {
  return Guard([&] { runtime::DestroyCommunicator(CommOf(comm)); });
}
C_Status AllReduce(void* in, void* out, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm comm,
                   C_Stream stream) {
  return Guard([&] { runtime::AllReduce(CommOf(comm), in, out, count, TypeOf(type), ReductionOf(op), stream); });
}
C_Status Reduce(void* in, void* out, size_t count, C_DataType type, C_CCLReduceOp op, size_t root, C_CCLComm comm,
                C_Stream stream) {
  return Guard([&] { runtime::Reduce(CommOf(comm), in, out, count, TypeOf(type), ReductionOf(op), root, stream); });
}
C_Status ReduceScatter(void* in, void* out, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm comm,
                       C_Stream stream) {
  return Guard([&] { runtime::ReduceScatter(CommOf(comm), in, out, count, TypeOf(type), ReductionOf(op), stream); });
}
C_Status Broadcast(void* data, size_t count, C_DataType type, size_t root, C_CCLComm comm, C_Stream stream) {
  return Guard([&] { runtime::Broadcast(CommOf(comm), data, BytesOf(count, type), root, stream); });
}
C_Status AllGather(void* in, void* out, size_t count, C_DataType type, C_CCLComm comm, C_Stream stream) {
  return Guard([&] { runtime::AllGather(CommOf(comm), in, out, BytesOf(count, type), stream); });
}
C_Status Send(void* data, size_t count, C_DataType type, size_t peer, C_CCLComm comm, C_Stream stream) {
  return Guard([&] { runtime::Send(CommOf(comm), data, BytesOf(count, type), peer, stream); });
}
C_Status Receive(void* data, size_t count, C_DataType type, size_t peer, C_CCLComm comm, C_Stream stream) {
  return Guard([&] { runtime::Receive(CommOf(comm), data, BytesOf(count, type), peer, stream); });
}
C_Status GroupStart() {
  return Guard([] { runtime::GroupStart(); });
}
C_Status GroupEnd() {
  return Guard([] { runtime::GroupEnd(); });
}
C_Status AllToAll(const void** in, const size_t* in_count, const C_DataType* in_type, void** out,
                  const size_t* out_count, const C_DataType* out_type, size_t, size_t ranks, C_CCLComm comm,
                  C_Stream stream) {
  return Guard([&] {
    runtime::GroupStart();
    for (size_t i = 0; i < ranks; ++i) {
      if (in_count[i] > 0) runtime::Send(CommOf(comm), in[i], BytesOf(in_count[i], in_type[i]), i, stream);
      if (out_count[i] > 0) runtime::Receive(CommOf(comm), out[i], BytesOf(out_count[i], out_type[i]), i, stream);
    }
    runtime::GroupEnd();
  });
}

// ---- profiler: Paddle calls these without a check for null when its profiler runs

std::vector<profiler::Activity> traced;

// Paddle's, in a library that Python has loaded for itself alone.
using AddEvent = void (*)(C_Profiler, void*);
AddEvent PaddlesFunction(const char* name) {
  void* library = dlopen((PaddleLibs() + "../base/libpaddle.so").c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) throw std::runtime_error("nvgpu: libpaddle.so is not where Paddle's other libraries are");
  AddEvent function = nullptr;
  Find(library, name, &function);
  return function;
}

phi::DeviceTraceEvent DeviceEvent(const profiler::Activity& activity) {
  using Kind = profiler::Activity::Kind;
  auto event = [&](phi::TracerEventType type, const auto& info) {
    return phi::DeviceTraceEvent(activity.name, type, activity.start, activity.end, activity.device, activity.context,
                                 activity.stream, activity.correlation, info);
  };
  if (activity.kind == Kind::kCopy) {
    phi::MemcpyEventInfo info{};
    info.num_bytes = activity.bytes;
    std::snprintf(info.copy_kind, sizeof info.copy_kind, "%s", activity.name.c_str());
    return event(phi::TracerEventType::Memcpy, info);
  }
  if (activity.kind == Kind::kFill) {
    phi::MemsetEventInfo info{};
    info.num_bytes = activity.bytes;
    return event(phi::TracerEventType::Memset, info);
  }
  phi::KernelEventInfo info{};
  std::tie(info.grid_x, info.grid_y, info.grid_z) = std::tuple_cat(activity.grid);
  std::tie(info.block_x, info.block_y, info.block_z) = std::tuple_cat(activity.block);
  info.registers_per_thread = activity.registers_per_thread;
  info.static_shared_memory = activity.static_shared_memory;
  info.dynamic_shared_memory = activity.dynamic_shared_memory;
  info.local_memory_per_thread = activity.local_memory_per_thread;
  return event(phi::TracerEventType::Kernel, info);
}

C_Status ProfilerInitialize(C_Profiler, void**) { return C_SUCCESS; }
C_Status ProfilerNothing(C_Profiler, void*) { return C_SUCCESS; }
C_Status ProfilerStart(C_Profiler, void*) {
  return Guard([] { profiler::Start(); });
}
C_Status ProfilerStop(C_Profiler, void*) {
  return Guard([] { traced = profiler::Stop(); });
}
// Paddle wants what began after its own start only.
C_Status ProfilerCollect(C_Profiler paddles, uint64_t start, void*) {
  return Guard([&] {
    const AddEvent add_call = PaddlesFunction("profiler_add_runtime_trace_event");
    const AddEvent add = PaddlesFunction("profiler_add_device_trace_event");
    for (const profiler::Activity& activity : traced) {
      if (activity.start < start) continue;
      if (activity.kind == profiler::Activity::Kind::kCall) {
        phi::RuntimeTraceEvent event(activity.name, activity.start, activity.end, activity.process, activity.thread,
                                     activity.correlation, 0);
        add_call(paddles, &event);
      } else {
        phi::DeviceTraceEvent event = DeviceEvent(activity);
        add(paddles, &event);
      }
    }
    traced.clear();
  });
}

void FillTable(C_DeviceInterface* table) {
  using runtime::CopyKind;
  using runtime::Properties;
  std::memset(static_cast<void*>(table), 0, sizeof(*table));
  table->size = sizeof(*table);

  table->initialize = Nothing;
  table->finalize = Nothing;
  table->init_device = SetDevice;
  table->deinit_device = NothingFor;
  table->set_device = SetDevice;
  table->get_device = GetDevice;
  table->synchronize_device = SynchronizeDevice;
  table->get_device_count = GetDeviceCount;
  table->get_device_list = GetDeviceList;
  table->get_compute_capability = Property<&Properties::compute_capability>;
  table->get_multi_process = Property<&Properties::multiprocessors>;
  table->get_max_threads_per_mp = Property<&Properties::threads_per_multiprocessor>;
  table->get_max_threads_per_block = Property<&Properties::threads_per_block>;
  table->get_max_grid_dim_size = Property<&Properties::grid>;
  table->get_runtime_version = Property<&Properties::runtime_version>;
  table->get_driver_version = Property<&Properties::driver_version>;
  table->is_float16_supported = Yes;
  table->is_bfloat16_supported = Yes;
  table->is_dnn_supported = No;

  table->create_stream = CreateStream;
  table->destroy_stream = DestroyStream;
  table->query_stream = QueryStream;
  table->synchronize_stream = SynchronizeStream;
  table->stream_add_callback = AddCallback;
  table->create_event = CreateEvent;
  table->record_event = RecordEvent;
  table->destroy_event = DestroyEvent;
  table->query_event = QueryEvent;
  table->synchronize_event = SynchronizeEvent;
  table->stream_wait_event = StreamWaitEvent;

  table->device_memory_allocate = Allocate;
  table->device_memory_deallocate = Free;
  table->device_memory_set = Set;
  table->host_memory_allocate = AllocateHost;
  table->host_memory_deallocate = FreeHost;
  table->memory_copy_h2d = Copy<CopyKind::kHostToDevice>;
  table->memory_copy_d2h = Copy<CopyKind::kDeviceToHost>;
  table->memory_copy_d2d = Copy<CopyKind::kDeviceToDevice>;
  table->memory_copy_p2p = CopyPeer;
  table->async_memory_copy_h2d = CopyAsync<CopyKind::kHostToDevice>;
  table->async_memory_copy_d2h = CopyAsync<CopyKind::kDeviceToHost>;
  table->async_memory_copy_d2d = CopyAsync<CopyKind::kDeviceToDevice>;
  table->async_memory_copy_p2p = CopyPeerAsync;
  table->device_memory_stats = MemoryStats;
  table->device_min_chunk_size = MinChunkSize;

  table->xccl_get_comm_name = CommName;
  table->xccl_get_unique_id_size = UniqueIdSize;
  table->xccl_get_unique_id = UniqueId;
  table->xccl_comm_init_rank = CommInitRank;
  table->xccl_destroy_comm = DestroyComm;
  table->xccl_all_reduce = AllReduce;
  table->xccl_reduce = Reduce;
  table->xccl_reduce_scatter = ReduceScatter;
  table->xccl_broadcast = Broadcast;
  table->xccl_all_gather = AllGather;
  table->xccl_all_to_all = AllToAll;
  table->xccl_send = Send;
  table->xccl_recv = Receive;
  table->xccl_group_start = GroupStart;
  table->xccl_group_end = GroupEnd;

  table->profiler_initialize = ProfilerInitialize;
  table->profiler_finalize = ProfilerNothing;
  table->profiler_prepare_tracing = ProfilerNothing;
  table->profiler_start_tracing = ProfilerStart;
  table->profiler_stop_tracing = ProfilerStop;
  table->profiler_collect_trace_data = ProfilerCollect;
}

}  // namespace
}  // namespace nvgpu

// For what Paddle does not ask of custom devices, between a start and an end of the same thread. 0 is success.
// paddle_te.upstream.pipeline_transfers: sends and receives progress together.
extern "C" __attribute__((visibility("default"))) int nvgpu_group_start() { return nvgpu::GroupStart(); }
extern "C" __attribute__((visibility("default"))) int nvgpu_group_end() { return nvgpu::GroupEnd(); }
// paddle_te.upstream.averages: reductions that are asked for sums give the sum divided by the number of ranks.
extern "C" __attribute__((visibility("default"))) int nvgpu_average_start() { return ++nvgpu::averages, 0; }
extern "C" __attribute__((visibility("default"))) int nvgpu_average_end() { return --nvgpu::averages, 0; }
// paddle_te.optimizer.multi_tensor: arguments of an update of many weights cost the host more than its launches do.
extern "C" __attribute__((visibility("default"))) int nvgpu_defer_start() { return nvgpu::StartDeferring(), 0; }
extern "C" __attribute__((visibility("default"))) int nvgpu_defer_end() { return nvgpu::EndDeferring(), 0; }
extern "C" __attribute__((visibility("default"))) int nvgpu_run_deferred() { return nvgpu::Guard(nvgpu::RunDeferred); }

// Called by loader.cc.
extern "C" __attribute__((visibility("default"))) void NvgpuInitPlugin(CustomRuntimeParams* params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  params->device_type = const_cast<char*>(nvgpu::kDeviceType);
  params->sub_device_type = const_cast<char*>(nvgpu::runtime::Name());
  nvgpu::FillTable(params->interface);
  nvgpu::RegisterMoves();
  nvgpu::RegisterElementwise();
  nvgpu::RegisterReductions();
  nvgpu::RegisterProducts();
  nvgpu::RegisterLosses();
  nvgpu::RegisterNorms();
  nvgpu::RegisterAttention();
  nvgpu::RegisterTraining();
  nvgpu::RegisterRandom();
  nvgpu::RegisterSorts();
  nvgpu::RegisterViaCpu();
}
