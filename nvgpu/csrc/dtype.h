// The element types that the plug-in computes with.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nvgpu {

enum class Type : int8_t {
  kNone,  // moved as bytes, never computed with
  kBool,
  kUint8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kHalf,
  kBfloat16,
  kFloat,
  kDouble,
};

constexpr size_t SizeOf(Type type) {
  switch (type) {
    case Type::kInt16:
    case Type::kHalf:
    case Type::kBfloat16: return 2;
    case Type::kInt32:
    case Type::kFloat: return 4;
    case Type::kInt64:
    case Type::kDouble: return 8;
    default: return 1;
  }
}

}  // namespace nvgpu
