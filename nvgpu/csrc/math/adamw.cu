// AdamW's step, with each way in which its state is kept.
#include <array>
#include <map>

#include "master_weight.h"
#include "math.h"

namespace nvgpu::math {
namespace {

using Steps = std::vector<AdamW>;

// 32 random bits of a number: the hash "lowbias32" of Chris Wellons (nullprogram.com, "Prospecting for Hash
// Functions").
NVGPU_FN inline uint32_t Mix(uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}

// Up with the probability that makes the expected value exact. noise: 16 random bits, as many as bfloat16 drops.
NVGPU_FN inline bfloat16 RoundStochastically(float value, uint32_t noise) {
  bfloat16 result;
  result.bits = static_cast<uint16_t>((BitsOf(value) + noise) >> 16);
  return result;
}

template <typename S, typename M>
NVGPU_FN inline S StoreMoment(M value, uint32_t noise) {
  if constexpr (std::is_same_v<S, bfloat16>) {
    return RoundStochastically(value, noise);
  } else {
    return value;
  }
}

// What a step is told beside its tensors; pointers on the device.
template <typename M>
struct AdamWScalars {
  const float *grad_factor, *learning_rate, *beta1_power, *beta2_power;
  float beta1_power_value, beta2_power_value;
  M beta1, beta2, epsilon, decay, rate_ratio;
  uint32_t noise_key, noise_first;

  AdamWScalars() = default;
  explicit AdamWScalars(const AdamW& step)
      : grad_factor(step.grad_factor),
        learning_rate(static_cast<const float*>(step.learning_rate)),
        beta1_power(step.beta1_power),
        beta2_power(step.beta2_power),
        beta1_power_value(step.beta1_power_value),
        beta2_power_value(step.beta2_power_value),
        beta1(static_cast<M>(step.beta1)),
        beta2(static_cast<M>(step.beta2)),
        epsilon(static_cast<M>(step.epsilon)),
        decay(static_cast<M>(step.decay)),
        rate_ratio(static_cast<M>(step.rate_ratio)),
        noise_key(step.noise_key),
        noise_first(step.noise_first) {}

  // 32 random bits for the element i.
  NVGPU_FN uint32_t Noise(int64_t i) const { return Mix((noise_first + static_cast<uint32_t>(i)) ^ noise_key); }
};

// The arithmetic of a step for one element at a time: gradients are G, the rest M.
template <typename G, typename M>
struct AdamWRule {
  M beta1, beta2, kept, scale, scaled_rate, scaled_epsilon;
  Compute<G> factor;

  NVGPU_FN explicit AdamWRule(const AdamWScalars<M>& of) : beta1(of.beta1), beta2(of.beta2) {
    const M rate = static_cast<M>(*of.learning_rate) * of.rate_ratio;
    const M power1 = static_cast<M>(of.beta1_power != nullptr ? *of.beta1_power : of.beta1_power_value);
    const M power2 = static_cast<M>(of.beta2_power != nullptr ? *of.beta2_power : of.beta2_power_value);
    factor = of.grad_factor != nullptr ? Compute<G>(Convert<G>(*of.grad_factor)) : Compute<G>(1);
    kept = M(1) - Product(rate, of.decay);
    scale = std::sqrt(M(1) - power2);
    scaled_rate = rate / (M(1) - power1);
    scaled_epsilon = Product(of.epsilon, scale);
  }
  NVGPU_FN void Advance(G grad, M* m1, M* m2) const {
    const G clipped = Convert<G>(static_cast<Compute<G>>(grad) * factor);
    const M g = static_cast<M>(static_cast<Compute<G>>(clipped));
    *m1 = Product(beta1, *m1) + Product(M(1) - beta1, g);
    *m2 = Product(beta2, *m2) + Product((M(1) - beta2) * g, g);
  }
  // The new weight; root: of the second moment.
  NVGPU_FN M Weight(M p, M m1, M root) const {
    return Product(p, kept) - scaled_rate * m1 * scale / (root + scaled_epsilon);
  }
};

// Weights of type T, gradients G, arithmetic in M; moments are kept as S, master weights as W. amsgrad: there are
// greatest second moments.
template <typename T, typename G, typename M, typename S, typename W, bool amsgrad>
struct AdamWLoop {
  Weights<T, W> weights;
  const G* grad;
  S *moment1, *moment2, *moment2_max;
  AdamWScalars<M> settings;
  static constexpr int kWidth = kPack<T, G, S, W>;
  static constexpr bool kRounds = !std::is_same_v<S, M>;

  bool Dense() const { return weights.Dense() && Aligned(grad, moment1, moment2, moment2_max); }

  struct Nothing {};
  template <int N>
  struct Loaded {
    Pack<S, N> moment1, moment2;
    std::conditional_t<amsgrad, Pack<S, N>, Nothing> moment2_max;
    Pack<G, N> grad;
    typename Weights<T, W>::template Loaded<N> weight;
  };
  template <int N>
  NVGPU_FN Loaded<N> Load(int64_t i) const {
    Loaded<N> loaded;
    loaded.grad = LoadPack<N>(grad + i);
    loaded.moment1 = LoadPack<N>(moment1 + i);
    loaded.moment2 = LoadPack<N>(moment2 + i);
    if constexpr (amsgrad) loaded.moment2_max = LoadPack<N>(moment2_max + i);
    loaded.weight = weights.template Load<N>(i);
    return loaded;
  }
  // What a thread does with all its packs: what it computes from the settings, it computes once.
  struct Prepared;
  NVGPU_FN Prepared Prepare() const { return {*this, AdamWRule<G, M>(settings)}; }
};

template <typename T, typename G, typename M, typename S, typename W, bool amsgrad>
struct AdamWLoop<T, G, M, S, W, amsgrad>::Prepared {
  AdamWLoop of;
  AdamWRule<G, M> rule;
  static constexpr int kWidth = AdamWLoop::kWidth;

  template <int N>
  NVGPU_FN auto Load(int64_t i) const {
    return of.template Load<N>(i);
  }
  template <int N>
  NVGPU_FN void Store(int64_t i, Loaded<N> loaded) const {
    for (int n = 0; n < N; ++n) {
      const M p = of.weights.template Value<M>(loaded.weight, n);
      M m1 = static_cast<M>(loaded.moment1.at[n]), m2 = static_cast<M>(loaded.moment2.at[n]);
      rule.Advance(loaded.grad.at[n], &m1, &m2);
      M largest = m2;
      const uint32_t noise = kRounds ? of.settings.Noise(i + n) : 0;
      loaded.moment1.at[n] = StoreMoment<S>(m1, noise & 0xffffu);
      loaded.moment2.at[n] = StoreMoment<S>(m2, noise >> 16);
      if constexpr (amsgrad) {
        if (loaded.moment2_max.at[n] > m2) largest = loaded.moment2_max.at[n];
        loaded.moment2_max.at[n] = StoreMoment<S>(largest, noise >> 16);
      }
      of.weights.Set(rule.Weight(p, m1, std::sqrt(largest)), n, &loaded.weight);
    }
    StorePack(of.moment1 + i, loaded.moment1);
    StorePack(of.moment2 + i, loaded.moment2);
    if constexpr (amsgrad) StorePack(of.moment2_max + i, loaded.moment2_max);
    of.weights.Store(i, loaded.weight);
  }
};

// ---- Moments in 8 bits, see kMomentBlock in math.h

// What a code stands for is unit * FourthPower(code).
NVGPU_FN inline float FourthPower(int code) {
  const float square = static_cast<float>(code * code);
  return Product(square, square);
}

// The unit of a block whose largest magnitude has these bits: 0 where the unit would be no normal number.
template <int levels>
NVGPU_FN inline float UnitOf(uint32_t largest) {
  const float unit = BitCast<float>(largest) / FourthPower(levels);
  return unit < 0x1p-126f ? 0 : unit;  // a NaN stays one
}
NVGPU_FN inline float InverseOf(float unit) { return unit > 0 && unit < BitCast<float>(0x7f800000u) ? 1 / unit : 0; }

// One of the two codes between which a magnitude lies, the greater with the probability that makes the expected value
// exact. noise: 16 random bits.
template <int levels>
NVGPU_FN inline int Encode(float magnitude, float inverse, uint32_t noise) {
  const float in_units = Product(magnitude, inverse);
  if (!(in_units > 0)) return 0;  // a NaN too
  const float root = std::sqrt(std::sqrt(in_units));
  const int code = root < levels ? static_cast<int>(root) : levels;
  const float below = FourthPower(code), step = FourthPower(code + 1) - below;
  const bool up = code < levels && (in_units - below) * 65536.0f > Product(static_cast<float>(noise), step);
  return code + up;
}

// A warp makes the step of a block: kMomentBlock elements of a row of `width`, fewer at its end. A lane has 4 elements
// after one another (kPart), kParts times.
template <typename T, typename G, typename W>
struct AdamWBlocks {
  T* param;
  const G* grad;
  uint8_t *moment1, *moment2;
  W* master;
  AdamWScalars<float> settings;
  int64_t width, blocks, bytes;  // of a row: elements, blocks, and bytes of a moment
  bool dense;                    // whole parts may be read and written at once
  static constexpr int kPart = 4, kParts = kMomentBlock / (32 * kPart), kSigned = 127, kUnsigned = 255;

  struct Lane {
    float m1[kParts][kPart], root[kParts][kPart];
    uint32_t largest[2];
  };
  struct Place {
    int64_t element, byte;  // of the block's beginning, in the weight and in a moment
    int count;
  };
  NVGPU_FN Place PlaceOf(int64_t block) const {
    const int64_t row = block / blocks, first = block % blocks * kMomentBlock;
    const int64_t left = width - first;
    return {row * width + first, row * bytes + first + block % blocks * 4,
            static_cast<int>(left < kMomentBlock ? left : kMomentBlock)};
  }
  NVGPU_FN static uint32_t* WordOf(uint8_t* moment, int64_t byte) { return reinterpret_cast<uint32_t*>(moment + byte); }

  template <typename E>
  NVGPU_FN void LoadPart(Pack<E, kPart>* part, const E* from, int count) const {
    if (dense && count == kPart) {
      *part = LoadPack<kPart>(from);
    } else {
      for (int n = 0; n < kPart; ++n) part->at[n] = n < count ? from[n] : E{};
    }
  }
  template <typename E>
  NVGPU_FN void StorePart(E* to, const Pack<E, kPart>& part, int count) const {
    if (dense && count == kPart) return StorePack(to, part);
    for (int n = 0; n < kPart && n < count; ++n) to[n] = part.at[n];
  }

  // Updates the weight and gives the new moments.
  NVGPU_FN Lane Begin(int64_t block, int lane) const {
    const Place place = PlaceOf(block);
    const float unit1 = BitCast<float>(*WordOf(moment1, place.byte));
    const float unit2 = BitCast<float>(*WordOf(moment2, place.byte));
    Pack<G, kPart> grads[kParts];
    Pack<T, kPart> params[kParts];
    Pack<W, kPart> masters[kParts];
    uint32_t codes1[kParts], codes2[kParts];
    Lane state = {};
    for (int k = 0; k < kParts; ++k) {  // all that is read, before any of it is used
      const int first = (k * 32 + lane) * kPart, count = place.count - first;
      if (count <= 0) continue;
      const int64_t i = place.element + first;
      LoadPart(&grads[k], grad + i, count < kPart ? count : kPart);
      codes1[k] = *WordOf(moment1, place.byte + 4 + first);
      codes2[k] = *WordOf(moment2, place.byte + 4 + first);
      if (master != nullptr) LoadPart(&masters[k], master + i, count < kPart ? count : kPart);
      if (master == nullptr || std::is_same_v<W, int16_t>)
        LoadPart(&params[k], param + i, count < kPart ? count : kPart);
    }
    const AdamWRule<G, float> rule(settings);
    for (int k = 0; k < kParts; ++k) {
      const int first = (k * 32 + lane) * kPart, count = place.count - first < kPart ? place.count - first : kPart;
      if (count <= 0) continue;
      for (int n = 0; n < kPart && n < count; ++n) {
        const int signed_code = static_cast<int8_t>(codes1[k] >> 8 * n & 0xffu);
        const float size = Product(unit1, FourthPower(signed_code));
        const float old_root = Product(unit2, FourthPower(codes2[k] >> 8 * n & 0xffu));
        float m1 = signed_code < 0 ? -size : size, m2 = Product(old_root, old_root);
        rule.Advance(grads[k].at[n], &m1, &m2);
        const float p = master != nullptr ? JoinMaster<float>(params[k].at[n], masters[k].at[n])
                                          : static_cast<float>(static_cast<Compute<T>>(params[k].at[n]));
        const float root = std::sqrt(m2);
        SplitMaster(rule.Weight(p, m1, root), &params[k].at[n], &masters[k].at[n]);
        state.m1[k][n] = m1;
        state.root[k][n] = root;
        const uint32_t bits1 = BitsOf(m1) & 0x7fffffffu, bits2 = BitsOf(root) & 0x7fffffffu;
        if (bits1 > state.largest[0]) state.largest[0] = bits1;
        if (bits2 > state.largest[1]) state.largest[1] = bits2;
      }
      if (master != nullptr) StorePart(master + place.element + first, masters[k], count);
      StorePart(param + place.element + first, params[k], count);
    }
    return state;
  }
  // Stores the moments. largest: of all lanes.
  NVGPU_FN void End(int64_t block, int lane, const Lane& state) const {
    const Place place = PlaceOf(block);
    const float unit1 = UnitOf<kSigned>(state.largest[0]), unit2 = UnitOf<kUnsigned>(state.largest[1]);
    const float inverse1 = InverseOf(unit1), inverse2 = InverseOf(unit2);
    if (lane == 0) {
      *WordOf(moment1, place.byte) = BitCast<uint32_t>(unit1);
      *WordOf(moment2, place.byte) = BitCast<uint32_t>(unit2);
    }
    for (int k = 0; k < kParts; ++k) {
      const int first = (k * 32 + lane) * kPart;
      if (first >= place.count) continue;
      uint32_t codes1 = 0, codes2 = 0;
      for (int n = 0; n < kPart && first + n < place.count; ++n) {
        const uint32_t noise = settings.Noise(place.element + first + n);
        const float m1 = state.m1[k][n], root = state.root[k][n];
        const int size = Encode<kSigned>(m1 < 0 ? -m1 : m1, inverse1, noise & 0xffffu);
        int code2 = Encode<kUnsigned>(root, inverse2, noise >> 16);
        if (code2 == 0 && root > 0) code2 = 1;  // a root of 0 would make the next step too large
        codes1 |= (static_cast<uint32_t>(m1 < 0 ? -size : size) & 0xffu) << 8 * n;
        codes2 |= static_cast<uint32_t>(code2) << 8 * n;
      }
      *WordOf(moment1, place.byte + 4 + first) = codes1;
      *WordOf(moment2, place.byte + 4 + first) = codes2;
    }
  }
};

template <typename T, typename G, typename M, typename S, typename W, bool amsgrad>
void RunLoop(Stream stream, const Steps& steps) {
  using Loop = AdamWLoop<T, G, M, S, W, amsgrad>;
  std::vector<Part<Loop>> parts;
  for (const AdamW& step : steps) {
    const Loop loop{{static_cast<T*>(step.param), static_cast<W*>(step.master)},
                    static_cast<const G*>(step.grad),
                    static_cast<S*>(step.moment1),
                    static_cast<S*>(step.moment2),
                    static_cast<S*>(step.moment2_max),
                    AdamWScalars<M>(step)};
    parts.push_back({loop, step.count, loop.Dense()});
  }
  ForEachPack(stream, parts);
}

template <typename T, typename G, typename M, typename S, typename W>
void RunStored(Stream stream, const Steps& steps) {
  if (steps.front().moment2_max != nullptr) return RunLoop<T, G, M, S, W, true>(stream, steps);
  RunLoop<T, G, M, S, W, false>(stream, steps);
}

template <typename T, typename G, typename W>
void RunBlocks(Stream stream, const Steps& steps) {
  using Blocks = AdamWBlocks<T, G, W>;
  std::vector<Part<Blocks>> parts;
  for (const AdamW& step : steps) {
    if (step.count == 0) continue;
    Blocks blocks{static_cast<T*>(step.param),
                  static_cast<const G*>(step.grad),
                  static_cast<uint8_t*>(step.moment1),
                  static_cast<uint8_t*>(step.moment2),
                  static_cast<W*>(step.master),
                  AdamWScalars<float>(step),
                  step.width,
                  (step.width + kMomentBlock - 1) / kMomentBlock,
                  MomentRowBytes(step.width),
                  false};
    blocks.dense = step.width % blocks.kPart == 0 && Aligned(blocks.param, blocks.grad, blocks.master);
    parts.push_back({blocks, step.count / step.width * blocks.blocks});
  }
  ForEachWarp(stream, parts);
}

template <typename T, typename G, typename W>
void RunWithMaster(Stream stream, const Steps& steps) {
  const Type moments = steps.front().moment_type;
  if (moments == Type::kInt8) return RunBlocks<T, G, W>(stream, steps);
  if (moments == Type::kBfloat16) return RunStored<T, G, float, bfloat16, W>(stream, steps);
  RunStored<T, G, float, float, W>(stream, steps);
}

template <typename T, typename G>
void RunAs(Stream stream, const Steps& steps) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    if (steps.front().master_type == Type::kInt16) return RunWithMaster<T, G, int16_t>(stream, steps);
  }
  RunWithMaster<T, G, float>(stream, steps);
}

// steps: all of the same types.
void RunAlike(Stream stream, const Steps& steps) {
  auto run = [&](auto t) {
    using T = decltype(t);
    if constexpr (std::is_same_v<T, double>) {
      return RunStored<double, double, double, double, double>(stream, steps);
    } else if (steps.front().grad_type == Type::kFloat) {
      return RunAs<T, float>(stream, steps);
    } else {
      return RunAs<T, T>(stream, steps);
    }
  };
  if (!ForFloats(steps.front().type, run)) {
    throw std::invalid_argument("nvgpu: adamw has no code for this element type");
  }
}

}  // namespace

void RunAdamW(Stream stream, const Steps& steps) {
  std::map<std::array<Type, 4>, Steps> alike;
  for (const AdamW& step : steps) {
    alike[{step.type, step.grad_type, step.moment_type, step.master_type}].push_back(step);
  }
  for (const auto& [types, of_types] : alike) RunAlike(stream, of_types);
}

}  // namespace nvgpu::math
