// What the optimizers' steps share: products rounded by themselves, and master weights of which only half is kept.
#pragma once

#include <cstdint>
#include <type_traits>

#include "types.h"

namespace nvgpu::math {

// Rounded by itself. nvcc would join a product with the sum that follows, and the last bits would not be the host's.
template <typename M>
NVGPU_FN inline M Product(M a, M b) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<M, float>) return __fmul_rn(a, b);
  if constexpr (std::is_same_v<M, double>) return __dmul_rn(a, b);
#endif
  return a * b;
}

// Of a NaN those of the one that stays a NaN in its upper half.
NVGPU_FN inline uint32_t BitsOf(float value) { return value == value ? BitCast<uint32_t>(value) : 0x7fc00000u; }

// A master weight, and the weight that goes with it: the nearest (of a remainder: ties away from zero).
template <typename M, typename T, typename W>
NVGPU_FN inline M JoinMaster(T param, W master) {
  if constexpr (std::is_same_v<W, int16_t>) {
    return BitCast<float>((static_cast<uint32_t>(param.bits) << 16) + static_cast<uint32_t>(int32_t(master)));
  } else {
    return master;
  }
}
template <typename M, typename T, typename W>
NVGPU_FN inline void SplitMaster(M value, T* param, W* master) {
  if constexpr (std::is_same_v<W, int16_t>) {
    const uint32_t bits = BitsOf(value);
    *master = static_cast<int16_t>(bits & 0xffffu);
    param->bits = static_cast<uint16_t>((bits + 0x8000u) >> 16);
  } else {
    *master = value;
    *param = Convert<T>(static_cast<Compute<T>>(value));
  }
}

}  // namespace nvgpu::math
