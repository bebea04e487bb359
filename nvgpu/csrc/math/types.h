// float16 and bfloat16, for both compilers, and the type that each element type is computed in.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../dtype.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define NVGPU_FN __host__ __device__
#define NVGPU_DEVICE __device__
#define NVGPU_UNROLL _Pragma("unroll")
#else
#define NVGPU_FN
#define NVGPU_DEVICE
#define NVGPU_UNROLL
#endif

namespace nvgpu::math {

template <typename To, typename From>
NVGPU_FN inline To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

struct bfloat16 {
  uint16_t bits;
  bfloat16() = default;
  NVGPU_FN explicit bfloat16(float value) : bits(FromFloat(value)) {}
  NVGPU_FN operator float() const { return BitCast<float>(static_cast<uint32_t>(bits) << 16); }

 private:
#ifdef __CUDA_ARCH__
  __device__ static uint16_t FromFloat(float value) { return __bfloat16_as_ushort(__float2bfloat16_rn(value)); }
#else
  static uint16_t FromFloat(float value) {  // to the nearest, ties to even
    const uint32_t wide = BitCast<uint32_t>(value);
    if ((wide & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // a NaN
    return static_cast<uint16_t>((wide + 0x7fffu + (wide >> 16 & 1)) >> 16);
  }
#endif
};

struct half {
  uint16_t bits;
  half() = default;
  NVGPU_FN explicit half(float value) : bits(FromFloat(value)) {}
  NVGPU_FN operator float() const { return ToFloat(bits); }

 private:
#ifdef __CUDA_ARCH__
  __device__ static uint16_t FromFloat(float value) { return __half_as_ushort(__float2half_rn(value)); }
  __device__ static float ToFloat(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
#else
  static uint16_t FromFloat(float value) {
    const uint32_t wide = BitCast<uint32_t>(value), sign = wide >> 16 & 0x8000u, size = wide & 0x7fffffffu;
    if (size > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (size >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to 65536 or more
    if (size < 0x38800000u) {  // below 2^-14: a multiple of 2^-24, to which adding 0.5 rounds
      const float shifted = BitCast<float>(size) + 0.5f;
      return static_cast<uint16_t>(sign | (BitCast<uint32_t>(shifted) - 0x3f000000u));
    }
    return static_cast<uint16_t>(sign | ((size - 0x38000000u + 0xfffu + (size >> 13 & 1)) >> 13));
  }
  static float ToFloat(uint16_t bits) {
    const uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 0x1fu, mantissa = bits & 0x3ffu;
    if (exponent == 0) return BitCast<float>(BitCast<uint32_t>(mantissa * 0x1p-24f) | sign);
    return BitCast<float>(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13);
  }
#endif
};

// float32 for the short floats, as Paddle's GPU kernels have it; int64 for every integer and bool.
template <typename T>
using Compute =
    std::conditional_t<std::is_same_v<T, double>, double, std::conditional_t<std::is_integral_v<T>, int64_t, float>>;

template <typename To, typename From>
NVGPU_FN inline To Convert(From from) {
  if constexpr (std::is_same_v<To, bool>) {
    return from != From(0);
  } else if constexpr (std::is_same_v<To, half> || std::is_same_v<To, bfloat16>) {
    return To(static_cast<float>(from));
  } else {
    return static_cast<To>(from);
  }
}

template <typename T>
struct TypeOf;
#define NVGPU_TYPE_OF(T, type)                \
  template <>                                 \
  struct TypeOf<T> {                          \
    static constexpr Type value = Type::type; \
  };
NVGPU_TYPE_OF(bool, kBool)
NVGPU_TYPE_OF(uint8_t, kUint8)
NVGPU_TYPE_OF(int8_t, kInt8)
NVGPU_TYPE_OF(int16_t, kInt16)
NVGPU_TYPE_OF(int32_t, kInt32)
NVGPU_TYPE_OF(int64_t, kInt64)
NVGPU_TYPE_OF(half, kHalf)
NVGPU_TYPE_OF(bfloat16, kBfloat16)
NVGPU_TYPE_OF(float, kFloat)
NVGPU_TYPE_OF(double, kDouble)
#undef NVGPU_TYPE_OF

// Calls function(T()) with the C++ type of `type`; each family returns false where it has no such type.
template <typename Function, typename... T>
bool Match(Type type, Function function) {
  return ((type == TypeOf<T>::value && (function(T()), true)) || ...);
}
template <typename Function>
bool ForFloats(Type type, Function function) {
  return Match<Function, float, bfloat16, half, double>(type, function);
}
template <typename Function>
bool ForNumbers(Type type, Function function) {
  return ForFloats(type, function) || Match<Function, int64_t, int32_t>(type, function);
}
template <typename Function>
bool ForIntegers(Type type, Function function) {
  return Match<Function, int64_t, int32_t, bool, uint8_t, int8_t, int16_t>(type, function);
}
template <typename Function>
bool ForAll(Type type, Function function) {
  return ForNumbers(type, function) || Match<Function, bool, uint8_t, int8_t, int16_t>(type, function);
}

}  // namespace nvgpu::math
