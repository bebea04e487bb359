// What the optimizers' steps share: products rounded by themselves, and master weights of which only half is kept.
#pragma once

#include <cstdint>
#include <type_traits>

#include "launch.h"
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

// Weights T with master weights W, or nullptr, as a loop over packs reads and writes them: a weight of which there is a
// master weight is not read.
template <typename T, typename W>
struct Weights {
  T* param;
  W* master;
  static constexpr bool kRemainder = std::is_same_v<W, int16_t>;

  NVGPU_FN bool HasMaster() const { return kRemainder || master != nullptr; }
  NVGPU_FN bool Dense() const { return Aligned(param, master); }

  template <int N>
  struct Loaded {
    Pack<T, N> param;
    Pack<W, N> master;
  };
  template <int N>
  NVGPU_FN Loaded<N> Load(int64_t i) const {
    Loaded<N> loaded;
    if (HasMaster()) loaded.master = LoadPack<N>(master + i);
    if (kRemainder || !HasMaster()) loaded.param = LoadPack<N>(param + i);
    return loaded;
  }
  template <int N>
  NVGPU_FN void Store(int64_t i, const Loaded<N>& loaded) const {
    if (HasMaster()) StorePack(master + i, loaded.master);
    StorePack(param + i, loaded.param);
  }
  // The weight at a pack's place n, in M, and its successor.
  template <typename M, int N>
  NVGPU_FN M Value(const Loaded<N>& loaded, int n) const {
    return HasMaster() ? JoinMaster<M>(loaded.param.at[n], loaded.master.at[n])
                       : static_cast<M>(static_cast<Compute<T>>(loaded.param.at[n]));
  }
  template <typename M, int N>
  NVGPU_FN static void Set(M next, int n, Loaded<N>* loaded) {
    SplitMaster(next, &loaded->param.at[n], &loaded->master.at[n]);
  }
};

}  // namespace nvgpu::math
