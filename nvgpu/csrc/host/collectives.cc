#include "host/collectives.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "host/errors.h"
#include "math/types.h"

namespace nvgpu::host {
namespace {

using runtime::Reduction;

template <typename T, typename Sum, typename Combine>
void Fold(char* out, char* const* parts, int ranks, size_t count, Combine combine, bool average) {
  for (size_t i = 0; i < count; ++i) {
    Sum sum = static_cast<Sum>(reinterpret_cast<const T*>(parts[0])[i]);
    for (int r = 1; r < ranks; ++r) sum = combine(sum, static_cast<Sum>(reinterpret_cast<const T*>(parts[r])[i]));
    if (average) sum = sum / static_cast<Sum>(ranks);
    reinterpret_cast<T*>(out)[i] = static_cast<T>(sum);
  }
}

template <typename T, typename Sum>
void FoldAs(char* out, char* const* parts, int ranks, size_t count, Reduction reduction) {
  switch (reduction) {
    case Reduction::kMax:
      return Fold<T, Sum>(out, parts, ranks, count, [](Sum a, Sum b) { return a > b ? a : b; }, false);
    case Reduction::kMin:
      return Fold<T, Sum>(out, parts, ranks, count, [](Sum a, Sum b) { return a < b ? a : b; }, false);
    case Reduction::kProduct: return Fold<T, Sum>(out, parts, ranks, count, [](Sum a, Sum b) { return a * b; }, false);
    default:
      return Fold<T, Sum>(
          out, parts, ranks, count, [](Sum a, Sum b) { return a + b; }, reduction == Reduction::kAverage);
  }
}

// In the order of the ranks, so that every rank gets the same bits; 16-bit floats are added in float32.
void FoldRanks(char* out, char* const* parts, int ranks, size_t count, Type type, Reduction reduction) {
  switch (type) {
    case Type::kBool:
    case Type::kUint8: return FoldAs<uint8_t, uint8_t>(out, parts, ranks, count, reduction);
    case Type::kInt8: return FoldAs<int8_t, int8_t>(out, parts, ranks, count, reduction);
    case Type::kInt16: return FoldAs<int16_t, int16_t>(out, parts, ranks, count, reduction);
    case Type::kInt32: return FoldAs<int32_t, int32_t>(out, parts, ranks, count, reduction);
    case Type::kInt64: return FoldAs<int64_t, int64_t>(out, parts, ranks, count, reduction);
    case Type::kHalf: return FoldAs<math::half, float>(out, parts, ranks, count, reduction);
    case Type::kBfloat16: return FoldAs<math::bfloat16, float>(out, parts, ranks, count, reduction);
    case Type::kFloat: return FoldAs<float, float>(out, parts, ranks, count, reduction);
    case Type::kDouble: return FoldAs<double, double>(out, parts, ranks, count, reduction);
    case Type::kNone: Fail("this element type cannot be reduced");
  }
}

// One step of a collective: everyone who has something writes it to its slot; after the barrier all may read all slots.
template <typename Write, typename Read>
void Step(Segment& segment, const char* what, Write write, Read read) {
  segment.NextTurn();
  write(segment.SlotOf(segment.rank));
  segment.Barrier(what);
  std::vector<char*> slots(segment.size);
  for (int r = 0; r < segment.size; ++r) slots[r] = segment.SlotOf(r);
  read(slots.data());
}

}  // namespace

void Reduce(Segment& segment, const char* in, char* out, size_t count, Type type, Reduction reduction, int root) {
  const size_t piece = kSlotBytes / SizeOf(type), width = SizeOf(type);
  for (size_t at = 0; at < count; at += piece) {
    const size_t n = std::min(piece, count - at);
    Step(
        segment, "all-reduce", [&](char* mine) { std::memcpy(mine, in + at * width, n * width); },
        [&](char** slots) {
          if (root >= 0 && root != segment.rank) return;
          FoldRanks(out + at * width, slots, segment.size, n, type, reduction);
        });
  }
}

void ReduceScatter(Segment& segment, const char* in, char* out, size_t count, Type type, Reduction reduction) {
  const size_t width = SizeOf(type), piece = kSlotBytes / width / segment.size;
  for (size_t at = 0; at < count; at += piece) {
    const size_t n = std::min(piece, count - at);
    Step(
        segment, "reduce-scatter",
        [&](char* mine) {
          for (int r = 0; r < segment.size; ++r) {
            std::memcpy(mine + r * n * width, in + (r * count + at) * width, n * width);
          }
        },
        [&](char** slots) {
          for (int r = 0; r < segment.size; ++r) slots[r] += segment.rank * n * width;
          FoldRanks(out + at * width, slots, segment.size, n, type, reduction);
        });
  }
}

void Broadcast(Segment& segment, char* data, size_t bytes, int root) {
  for (size_t at = 0; at < bytes; at += kSlotBytes) {
    const size_t n = std::min(kSlotBytes, bytes - at);
    Step(
        segment, "broadcast",
        [&](char* mine) {
          if (segment.rank == root) std::memcpy(mine, data + at, n);
        },
        [&](char** slots) {
          if (segment.rank != root) std::memcpy(data + at, slots[root], n);
        });
  }
}

void AllGather(Segment& segment, const char* in, char* out, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kSlotBytes) {
    const size_t n = std::min(kSlotBytes, bytes - at);
    Step(
        segment, "all-gather", [&](char* mine) { std::memcpy(mine, in + at, n); },
        [&](char** slots) {
          for (int r = 0; r < segment.size; ++r) std::memcpy(out + r * bytes + at, slots[r], n);
        });
  }
}

}  // namespace nvgpu::host
