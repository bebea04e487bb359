// CUPTI as far as the nvgpu plug-in uses it, with records of its own: a kernel, a copy and a memset, started by calls
// of the thread that ends the recording, a call that started nothing, and a kernel that has not ended. They lie in a
// pause when the recording ends, for Paddle drops calls that begin in one of its own events and end outside. Fields are
// written at the offsets that CUDA 13's headers give (test_profiler.py compares them where the
// headers are).
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <set>
#include <utility>

using Request = void (*)(uint8_t**, size_t*, size_t*);
using Complete = void (*)(void*, uint32_t, uint8_t*, size_t, size_t);

static Request request;
static Complete complete;
static std::set<int> enabled;
static int thread_ids = 0;
static size_t next = 0;
static uint64_t quiet = 0;  // when the pause was

// Ahead of the system's clock by a day.
static uint64_t now() {
  timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  return uint64_t(time.tv_sec + 86400) * 1000000000 + time.tv_nsec;
}

struct Buffer {
  uint8_t* data;
  size_t used = 0;
  template <typename T>
  void put(size_t offset, T value) {
    std::memcpy(data + used + offset, &value, sizeof value);
  }
  void begin(int kind, size_t size) {
    std::memset(data + used, 0, size);
    put(0, kind);
  }
};
static const size_t kSizes[] = {64, 64, 168, 64, 64, 64, 168, 64};  // of the records that flush writes

#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT int cuptiActivityRegisterCallbacks(Request r, Complete c) { return request = r, complete = c, 0; }
EXPORT int cuptiActivityEnable(int kind) { return enabled.insert(kind), 0; }
EXPORT int cuptiActivityDisable(int kind) {
  if (quiet == 0) {
    quiet = now() + 1000000;
    usleep(3000);
  }
  return enabled.erase(kind), 0;
}
EXPORT int cuptiSetThreadIdType(int type) { return thread_ids = type, 0; }
EXPORT int cuptiGetTimestamp(uint64_t* time) { return *time = now(), 0; }
EXPORT int cuptiGetResultString(int, const char** text) { return *text = "CUPTI_ERROR_OF_THE_FAKE", 0; }
EXPORT int cuptiActivityGetNumDroppedRecords(void*, uint32_t, size_t* count) { return *count = 0, 0; }
EXPORT int cuptiGetCallbackName(int domain, uint32_t function, const char** name) {
  *name = domain == 2 && function == 211 ? "cudaLaunchKernel_v7000" : domain == 1 ? "cuLaunchKernel" : "other";
  return 0;
}
EXPORT int cuptiActivityGetNextRecord(uint8_t* buffer, size_t valid, int** record) {
  size_t at = *record ? reinterpret_cast<uint8_t*>(*record) - buffer + kSizes[next - 1] : (next = 0);
  if (at >= valid) return 12;
  *record = reinterpret_cast<int*>(buffer + at);
  next++;
  return 0;
}

static void call(Buffer& b, int kind, uint32_t function, uint64_t start, uint32_t correlation, size_t size) {
  b.begin(kind, size);
  b.put(4, function), b.put(8, start), b.put(16, start + 2000), b.put(24, uint32_t(getpid()));
  b.put(28, uint32_t(thread_ids == 1 ? syscall(SYS_gettid) : 1)), b.put(32, correlation);
}
static void kernel(Buffer& b, uint64_t start, uint64_t end, uint32_t correlation, size_t size) {
  static const char* name = "_Z5scalePfi";
  b.begin(10, size);
  b.put(6, uint16_t(40)), b.put(16, start), b.put(24, end), b.put(40, 0u), b.put(44, 1u), b.put(48, 13u);
  b.put(52, 5), b.put(56, 6), b.put(60, 7), b.put(64, 128), b.put(68, 2), b.put(72, 1);
  b.put(76, 1024), b.put(80, 2048), b.put(84, 16u), b.put(92, correlation), b.put(104, name);
}
static void memory(Buffer& b, int kind, uint8_t detail, uint64_t bytes, uint64_t start, uint32_t correlation,
                   size_t size) {
  b.begin(kind, size);
  b.put(4, detail), b.put(8, bytes), b.put(16, start), b.put(24, start + 500), b.put(40, 13u), b.put(44, correlation);
}

EXPORT int cuptiActivityFlushAll(uint32_t forced) {
  if (!enabled.empty() || forced != 1) return 1;  // what is still recorded would be missing
  uint8_t* data = nullptr;
  size_t size = 0, most = 1;
  request(&data, &size, &most);
  Buffer b{data};
  const uint64_t start = std::exchange(quiet, 0);
  auto write = [&](int i, auto&& make) { make(kSizes[i]), b.used += kSizes[i]; };
  write(0, [&](size_t s) { call(b, 5, 211, start, 7, s); });
  write(1, [&](size_t s) { call(b, 5, 3, start + 10000, 8, s); });  // starts nothing
  write(2, [&](size_t s) { kernel(b, start + 5000, start + 12000, 7, s); });
  write(3, [&](size_t s) { call(b, 4, 307, start + 20000, 9, s); });
  write(4, [&](size_t s) { memory(b, 1, 8, 4096, start + 25000, 9, s); });
  write(5, [&](size_t s) { memory(b, 2, 0, 512, start + 26000, 7, s); });
  write(6, [&](size_t s) { kernel(b, start + 27000, 0, 9, s); });  // has not ended
  complete(nullptr, 0, data, size, b.used);
  return 0;
}
