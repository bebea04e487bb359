// CUPTI's activity interface. Its declarations are repeated here (CUDA 13's cupti_activity.h), so that a build needs no
// CUPTI; a process loads it when it profiles.
#include "profiler.h"

#include <cxxabi.h>

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>

#include "libraries.h"
#include "runtime.h"

namespace nvgpu::profiler {
namespace {

enum Kind : int32_t { kMemcpy = 1, kMemset = 2, kDriver = 4, kRuntime = 5, kConcurrentKernel = 10 };
constexpr Kind kKinds[] = {kMemcpy, kMemset, kDriver, kRuntime, kConcurrentKernel};
constexpr int kSuccess = 0, kSystemThreadIds = 1, kForced = 1;
enum Domain { kDriverApi = 1, kRuntimeApi = 2 };

struct KernelRecord {  // the beginning of CUpti_ActivityKernel10
  Kind kind;
  uint8_t cache, shared_memory;
  uint16_t registers_per_thread;
  uint32_t partitioned[2];
  uint64_t start, end, completed;
  uint32_t device, context, stream;
  int32_t grid[3], block[3], static_shared_memory, dynamic_shared_memory;
  uint32_t local_memory_per_thread, local_memory_total, correlation;
  int64_t grid_id;
  const char* name;
};
struct MemoryRecord {  // of CUpti_ActivityMemcpy6 (detail: kinds of copy and memory) and CUpti_ActivityMemset4 (value)
  Kind kind;
  uint8_t detail[4];
  uint64_t bytes, start, end;
  uint32_t device, context, stream, correlation;
};
struct CallRecord {  // CUpti_ActivityAPI
  Kind kind;
  uint32_t function;
  uint64_t start, end;
  uint32_t process, thread, correlation, result;
};
static_assert(offsetof(KernelRecord, start) == 16 && offsetof(KernelRecord, correlation) == 92);
static_assert(offsetof(KernelRecord, name) == 104);
static_assert(offsetof(MemoryRecord, start) == 16 && offsetof(MemoryRecord, correlation) == 44);
static_assert(offsetof(CallRecord, start) == 8 && offsetof(CallRecord, correlation) == 32);

using RequestBuffer = void (*)(uint8_t**, size_t*, size_t*);
using CompleteBuffer = void (*)(void*, uint32_t, uint8_t*, size_t, size_t);

struct Cupti {
  int (*ActivityRegisterCallbacks)(RequestBuffer, CompleteBuffer);
  int (*ActivityEnable)(Kind);
  int (*ActivityDisable)(Kind);
  int (*ActivityFlushAll)(uint32_t);
  int (*ActivityGetNextRecord)(uint8_t*, size_t, Kind**);
  int (*ActivityGetNumDroppedRecords)(void*, uint32_t, size_t*);
  int (*SetThreadIdType)(int);
  int (*GetTimestamp)(uint64_t*);
  int (*GetCallbackName)(int, uint32_t, const char**);
  int (*GetResultString)(int, const char**);
};

// The host runtime has nothing to record: it takes what the process has, a test's, and needs none.
void* Library() {
  const char* name = "libcupti.so.13";
  if (std::strcmp(runtime::Name(), "host") == 0) return dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
  try {
    return OpenLibrary(name);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(std::string(error.what()) +
                             "; profiling needs CUPTI: pip install 'nvidia-cuda-cupti>=13,<14'");
  }
}

const Cupti* Load() {
  static const Cupti* loaded = []() -> const Cupti* {
    void* library = Library();
    if (library == nullptr) return nullptr;
    auto* cupti = new Cupti;
#define FIND(name) Find(library, "cupti" #name, &cupti->name)
    FIND(ActivityRegisterCallbacks);
    FIND(ActivityEnable);
    FIND(ActivityDisable);
    FIND(ActivityFlushAll);
    FIND(ActivityGetNextRecord);
    FIND(ActivityGetNumDroppedRecords);
    FIND(SetThreadIdType);
    FIND(GetTimestamp);
    FIND(GetCallbackName);
    FIND(GetResultString);
#undef FIND
    return cupti;
  }();
  return loaded;
}

#define CHECK(cupti, function, ...) Check(cupti, cupti->function(__VA_ARGS__), "cupti" #function)
void Check(const Cupti* cupti, int result, const char* function) {
  if (result == kSuccess) return;
  const char* text = "unknown";
  cupti->GetResultString(result, &text);
  throw std::runtime_error("nvgpu: " + std::string(function) + ": " + text + " (" + std::to_string(result) + ")");
}

std::mutex mutex;  // CUPTI completes buffers in a thread of its own
std::vector<Activity> activities;
size_t dropped = 0;
int64_t clock_offset = 0;  // ns from CUPTI's clock to the system's

const char* CopyName(uint8_t kind) {
  switch (kind) {
    case 1: return "MEMCPY_HtoD";
    case 2: return "MEMCPY_DtoH";
    case 8: return "MEMCPY_DtoD";
    case 10: return "MEMCPY_PtoP";
    default: return "MEMCPY";
  }
}

Activity OnDevice(Activity::Kind kind, const char* name, const MemoryRecord& record) {
  Activity activity{kind, name, record.start, record.end, record.correlation};
  activity.device = record.device, activity.context = record.context, activity.stream = record.stream;
  activity.bytes = record.bytes;
  return activity;
}

Activity Of(const KernelRecord& record) {
  Activity activity{Activity::Kind::kKernel, record.name, record.start, record.end, record.correlation};
  activity.device = record.device, activity.context = record.context, activity.stream = record.stream;
  for (int i = 0; i < 3; ++i) activity.grid[i] = record.grid[i], activity.block[i] = record.block[i];
  activity.registers_per_thread = record.registers_per_thread;
  activity.static_shared_memory = record.static_shared_memory;
  activity.dynamic_shared_memory = record.dynamic_shared_memory;
  activity.local_memory_per_thread = record.local_memory_per_thread;
  return activity;
}

Activity Of(const CallRecord& record) {
  const char* name = nullptr;
  Load()->GetCallbackName(record.kind == kDriver ? kDriverApi : kRuntimeApi, record.function, &name);
  Activity activity{Activity::Kind::kCall, name ? name : "CUDA", record.start, record.end, record.correlation};
  activity.process = record.process, activity.thread = record.thread;
  return activity;
}

void Add(const Kind* record) {
  const auto* memory = reinterpret_cast<const MemoryRecord*>(record);
  switch (*record) {
    case kConcurrentKernel: activities.push_back(Of(*reinterpret_cast<const KernelRecord*>(record))); break;
    case kMemcpy: activities.push_back(OnDevice(Activity::Kind::kCopy, CopyName(memory->detail[0]), *memory)); break;
    case kMemset: activities.push_back(OnDevice(Activity::Kind::kFill, "MEMSET", *memory)); break;
    case kDriver:
    case kRuntime: activities.push_back(Of(*reinterpret_cast<const CallRecord*>(record))); break;
  }
}

void Request(uint8_t** buffer, size_t* size, size_t* most_records) {
  *size = 4 << 20;
  *buffer = static_cast<uint8_t*>(std::malloc(*size));
  *most_records = 0;  // as many as it holds
}

void Complete(void* context, uint32_t stream, uint8_t* buffer, size_t, size_t valid) {
  std::lock_guard<std::mutex> lock(mutex);
  Kind* record = nullptr;
  while (Load()->ActivityGetNextRecord(buffer, valid, &record) == kSuccess) Add(record);
  std::free(buffer);
  size_t count = 0;
  if (Load()->ActivityGetNumDroppedRecords(context, stream, &count) == kSuccess) dropped += count;
}

int64_t SystemNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// From CUPTI's clock to the system's, by the quickest of some readings: Paddle drops a call that
// begins in an operator's event and ends outside.
int64_t ClockOffset(const Cupti* cupti) {
  int64_t offset = 0, quickest = INT64_MAX;
  for (int i = 0; i < 10; ++i) {
    uint64_t now = 0;
    const int64_t before = SystemNs();
    CHECK(cupti, GetTimestamp, &now);
    const int64_t took = SystemNs() - before;
    if (took < quickest) quickest = took, offset = before + took / 2 - static_cast<int64_t>(now);
  }
  return offset;
}

std::string Demangled(const std::string& name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  const std::string demangled = status == 0 ? text : name;
  std::free(text);
  return demangled;
}

}  // namespace

void Start() {
  const Cupti* cupti = Load();
  if (cupti == nullptr) return;
  {
    std::lock_guard<std::mutex> lock(mutex);
    activities.clear();
    dropped = 0;
  }
  CHECK(cupti, SetThreadIdType, kSystemThreadIds);  // Paddle's events have the system's as well
  CHECK(cupti, ActivityRegisterCallbacks, Request, Complete);
  clock_offset = ClockOffset(cupti);
  for (Kind kind : kKinds) CHECK(cupti, ActivityEnable, kind);
}

std::vector<Activity> Stop() {
  const Cupti* cupti = Load();
  if (cupti == nullptr) return {};
  runtime::SynchronizeDevice(runtime::CurrentDevice());
  for (Kind kind : kKinds) CHECK(cupti, ActivityDisable, kind);
  CHECK(cupti, ActivityFlushAll, kForced);
  std::lock_guard<std::mutex> lock(mutex);
  if (dropped > 0) std::fprintf(stderr, "[nvgpu] CUPTI dropped %zu records: the profile has holes\n", dropped);

  std::set<uint32_t> started;
  for (const Activity& activity : activities) {
    if (activity.kind != Activity::Kind::kCall) started.insert(activity.correlation);
  }
  std::map<std::string, std::string> names;
  std::vector<Activity> found;
  for (Activity& activity : activities) {
    const bool is_call = activity.kind == Activity::Kind::kCall;
    if (activity.end == 0 || (is_call && started.count(activity.correlation) == 0)) continue;
    if (activity.kind == Activity::Kind::kKernel) {
      std::string& name = names[activity.name];
      if (name.empty()) name = Demangled(activity.name);
      activity.name = name;
    }
    activity.start += clock_offset, activity.end += clock_offset;
    found.push_back(std::move(activity));
  }
  activities.clear();
  return found;
}

}  // namespace nvgpu::profiler
