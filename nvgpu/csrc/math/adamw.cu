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
//
// An element costs a GPU little more time in the memory than in its arithmetic. So codes are computed as whole float32
// numbers, by products, sums and a few exchanges of bytes: conversions and exact square roots run at an eighth of that
// speed or less.

// Numbers whose last bits can be replaced by those of a whole number, which they then exceed by it. A kernel gets them
// as an argument: an instruction that exchanges bytes takes one constant, which says which bytes.
struct Carriers {
  uint32_t whole = 0x4b000000, fraction = 0x43000000;  // 2^23, and 2^7 for fractions of 2^16

  // Byte n of the word, less `zero`.
  NVGPU_FN float Byte(uint32_t word, int n, float zero = 0) const {
#ifdef __CUDA_ARCH__
    const uint32_t bits = __byte_perm(word, whole, 0x7650 + n);
#else
    const uint32_t bits = whole | (word >> 8 * n & 0xffu);
#endif
    return BitCast<float>(bits) - (0x1p23f + zero);
  }
  // Bytes n and n + 1 of the word, n even, as a fraction of 2^16.
  NVGPU_FN float Fraction(uint32_t word, int n) const {
#ifdef __CUDA_ARCH__
    const uint32_t bits = __byte_perm(word, fraction, 0x7610 + n * 0x11);
#else
    const uint32_t bits = fraction | (word >> 8 * n & 0xffffu);
#endif
    return BitCast<float>(bits) - 0x1p7f;
  }
};
// The last byte of a whole number between -128 and 255, in two's complement.
NVGPU_FN inline uint32_t LastByte(float whole) { return BitCast<uint32_t>(whole + 0x1.8p23f) & 0xffu; }

// What a code stands for is unit * FourthPower(code).
NVGPU_FN inline float FourthPower(float code) {
  const float square = Product(code, code);
  return Product(square, square);
}

// The greatest whole number whose fourth power is at most x, for 0 <= x <= FourthPower(255).
NVGPU_FN inline float WholeFourthRoot(float x) {
  // At least the root, by less than 1: the error is below 2^-22.
  constexpr float more = 1 + 0x1p-20f;
#ifdef __CUDA_ARCH__
  float root;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(root));
  const float whole = __fmaf_rz(root, more, 0x1p23f) - 0x1p23f;
#else
  const float whole = std::floor(std::sqrt(std::sqrt(x)) * more);
#endif
  return x < FourthPower(whole) ? whole - 1 : whole;
}

// The larger of |x| and y; a NaN is larger than all.
NVGPU_FN inline float LargerMagnitude(float x, float y) {
#ifdef __CUDA_ARCH__
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(std::fabs(x)), "f"(y));
  return larger;
#else
  return Larger()(std::fabs(x), y);
#endif
}

// 1 / x, for normal numbers of which it is one.
NVGPU_FN inline float Reciprocal(float x) {
#ifdef __CUDA_ARCH__
  float about;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(about) : "f"(x));
  return __fmaf_rn(about, -__fmaf_rn(x, about, -1.0f), about);  // as the division does it, without its other cases
#else
  return 1 / x;
#endif
}

// How a block's magnitudes become codes from 0 to `levels`.
template <int levels>
struct Scale {
  float unit, inverse, most;  // most: that a magnitude has in units; 0 where none has a code but 0

  // largest: the bits of the largest magnitude. No unit that is not a normal number, but a NaN stays one.
  NVGPU_FN explicit Scale(uint32_t largest) : unit(BitCast<float>(largest) / FourthPower(levels)) {
    if (unit < 0x1p-126f) unit = 0;
    const bool normal = unit > 0 && unit < BitCast<float>(0x7f800000u);
    inverse = normal ? Reciprocal(unit) : 0;
    most = normal ? FourthPower(levels) : 0;
  }
  // One of the two codes between which a magnitude lies, the greater with the probability that makes the expected value
  // exact. noise: a random fraction.
  NVGPU_FN float Encode(float magnitude, float noise) const {
    const float in_units = std::fmin(Product(magnitude, inverse), most);  // not a NaN
    const float code = WholeFourthRoot(in_units), below = FourthPower(code), step = FourthPower(code + 1) - below;
    return in_units - below > Product(noise, step) ? code + 1 : code;
  }
};

// A warp makes the step of a block: kMomentBlock elements of a row of `width`, fewer at its end. A lane has 4 elements
// after one another (kPart), kParts times.
template <typename T, typename G, typename W, bool has_master>
struct AdamWBlocks {
  T* param;
  const G* grad;
  uint8_t *moment1, *moment2;
  W* master;
  AdamWScalars<float> settings;
  int64_t width, bytes;  // of a row: elements, and bytes of a moment
  uint32_t blocks;       // of a row
  bool dense;            // whole parts may be read and written at once
  Carriers carriers;
  static constexpr int kPart = 4, kParts = kMomentBlock / (32 * kPart), kSigned = 127, kUnsigned = 255;
  using Rule = AdamWRule<G, float>;

  struct Lane {
    float m1[kParts][kPart], root[kParts][kPart];
    uint32_t largest[2];
  };
  struct Place {
    int64_t element, byte;  // of the block's beginning, in the weight and in a moment
    int count;
    bool whole;  // every lane has all its elements, which may be read and written at once
  };
  NVGPU_FN Rule Prepare() const { return Rule(settings); }
  NVGPU_FN Place PlaceOf(uint32_t block) const {
    const uint32_t row = block / blocks, in_row = block - row * blocks;
    const int64_t first = in_row * kMomentBlock, left = width - first;
    const int count = static_cast<int>(left < kMomentBlock ? left : kMomentBlock);
    return {row * width + first, row * bytes + first + in_row * 4, count, dense && count == kMomentBlock};
  }
  NVGPU_FN static uint32_t* WordOf(uint8_t* moment, int64_t byte) { return reinterpret_cast<uint32_t*>(moment + byte); }

  // What a lane reads of a part, zeros where the block has ended.
  struct Loaded {
    Pack<G, kPart> grad;
    Pack<T, kPart> param;
    Pack<W, kPart> master;
    uint32_t codes1, codes2;
  };
  template <bool whole, typename E>
  NVGPU_FN static void LoadElements(Pack<E, kPart>* part, const E* from, int count) {
    if constexpr (whole) {
      *part = LoadPack<kPart>(from);
    } else {
      for (int n = 0; n < kPart; ++n) part->at[n] = n < count ? from[n] : E{};
    }
  }
  template <bool whole, typename E>
  NVGPU_FN static void StoreElements(E* to, const Pack<E, kPart>& part, int count) {
    if constexpr (whole) {
      StorePack(to, part);
    } else {
      for (int n = 0; n < kPart && n < count; ++n) to[n] = part.at[n];
    }
  }
  template <bool whole>
  NVGPU_FN Loaded Load(const Place& place, int first) const {
    const int64_t i = place.element + first, byte = place.byte + 4 + first;
    const int count = place.count - first;
    Loaded part = {};
    LoadElements<whole>(&part.grad, grad + i, count);
    if (whole || count > 0) {
      part.codes1 = *WordOf(moment1, byte);
      part.codes2 = *WordOf(moment2, byte);
    }
    if constexpr (has_master) LoadElements<whole>(&part.master, master + i, count);
    if constexpr (!has_master || std::is_same_v<W, int16_t>) LoadElements<whole>(&part.param, param + i, count);
    return part;
  }
  // Updates one element's weight. m1, root: of the second moment, in and out.
  NVGPU_FN void Advance(const Rule& rule, G grad, T* p, W* wide, float* m1, float* root) const {
    float m2 = Product(*root, *root);
    rule.Advance(grad, m1, &m2);
    *root = std::sqrt(m2);
    const float old = has_master ? JoinMaster<float>(*p, *wide) : static_cast<float>(static_cast<Compute<T>>(*p));
    SplitMaster(rule.Weight(old, *m1, *root), p, wide);
  }

  // Updates the weight and gives the new moments.
  template <bool whole>
  NVGPU_FN Lane Begin(const Rule& rule, const Place& place, int lane) const {
    const float unit1 = BitCast<float>(*WordOf(moment1, place.byte));
    const float unit2 = BitCast<float>(*WordOf(moment2, place.byte));
    Loaded parts[kParts];
    NVGPU_UNROLL
    for (int k = 0; k < kParts; ++k) parts[k] = Load<whole>(place, (k * 32 + lane) * kPart);  // all, before any is used
    Lane state = {};
    float largest1 = 0, largest2 = 0;
    NVGPU_UNROLL
    for (int k = 0; k < kParts; ++k) {
      Loaded& part = parts[k];
      const int first = (k * 32 + lane) * kPart, count = place.count - first;
      const uint32_t shifted = part.codes1 ^ 0x80808080u;  // so that they begin at 0
      NVGPU_UNROLL
      for (int n = 0; n < kPart; ++n) {
        if (!whole && n >= count) continue;
        const float code = carriers.Byte(shifted, n, 128);
        float m1 = std::copysign(Product(unit1, FourthPower(code)), code);
        float root = Product(unit2, FourthPower(carriers.Byte(part.codes2, n)));
        Advance(rule, part.grad.at[n], &part.param.at[n], &part.master.at[n], &m1, &root);
        state.m1[k][n] = m1;
        state.root[k][n] = root;
        largest1 = LargerMagnitude(m1, largest1);
        largest2 = LargerMagnitude(root, largest2);
      }
      if constexpr (has_master) StoreElements<whole>(master + place.element + first, part.master, count);
      StoreElements<whole>(param + place.element + first, part.param, count);
    }
    state.largest[0] = BitsOf(largest1);
    state.largest[1] = BitsOf(largest2);
    return state;
  }
  // Stores the moments. largest: of all lanes.
  template <bool whole>
  NVGPU_FN void End(const Place& place, int lane, const Lane& state) const {
    const Scale<kSigned> scale1(state.largest[0]);
    const Scale<kUnsigned> scale2(state.largest[1]);
    if (lane == 0) {
      *WordOf(moment1, place.byte) = BitCast<uint32_t>(scale1.unit);
      *WordOf(moment2, place.byte) = BitCast<uint32_t>(scale2.unit);
    }
    NVGPU_UNROLL
    for (int k = 0; k < kParts; ++k) {
      const int first = (k * 32 + lane) * kPart;
      if (!whole && first >= place.count) continue;
      uint32_t codes1 = 0, codes2 = 0;
      NVGPU_UNROLL
      for (int n = 0; n < kPart; ++n) {
        const uint32_t noise = settings.Noise(place.element + first + n);
        const float m1 = state.m1[k][n], root = state.root[k][n];
        const float least = root > 0 ? 1 : 0;  // a root of 0 would make the next step too large
        const float code1 = std::copysign(scale1.Encode(std::fabs(m1), carriers.Fraction(noise, 0)), m1);
        const float code2 = std::fmax(scale2.Encode(root, carriers.Fraction(noise, 2)), least);
        codes1 |= LastByte(code1) << 8 * n;
        codes2 |= LastByte(code2) << 8 * n;
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

template <typename T, typename G, typename W, bool has_master>
void RunBlocks(Stream stream, const Steps& steps) {
  using Blocks = AdamWBlocks<T, G, W, has_master>;
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
                  MomentRowBytes(step.width),
                  static_cast<uint32_t>((step.width + kMomentBlock - 1) / kMomentBlock),
                  false};
    blocks.dense = step.width % blocks.kPart == 0 && Aligned(blocks.param, blocks.grad, blocks.master);
    parts.push_back({blocks, step.count / step.width * blocks.blocks});
  }
  ForEachWarp(stream, parts);
}

template <typename T, typename G, typename W>
void RunWithMaster(Stream stream, const Steps& steps) {
  const Type moments = steps.front().moment_type;
  if (moments == Type::kInt8) {
    const bool has_master = steps.front().master != nullptr;
    return has_master ? RunBlocks<T, G, W, true>(stream, steps) : RunBlocks<T, G, W, false>(stream, steps);
  }
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
