// The embedding's gradient and the optimizer's step.
#include "launch.h"
#include "math.h"

namespace nvgpu::math {
namespace {

// Equal indices form chains in the order of their places: next[i] is the next place of index[i], -1 at the end; a chain
// starts where first[i] is set, which excludes what is to have no gradient.
template <typename Index>
struct ChainRow {
  const Index* index;
  int32_t *next, *first;
  int64_t count, size, begin, padding;

  struct Near {
    int32_t later, earlier;  // the nearest equal one behind, whether there is one before
  };
  struct Nearest {
    NVGPU_FN Near operator()(const Near& a, const Near& b) const {
      return {a.later < b.later ? a.later : b.later, a.earlier | b.earlier};
    }
  };
  NVGPU_DEVICE void operator()(const Team& team, int64_t i) const {
    const int64_t wanted = index[i], row = wanted - begin;
    const auto compare = [&](int64_t j) {
      const bool equal = index[j] == wanted;
      return Near{equal && j > i ? static_cast<int32_t>(j) : INT32_MAX, equal && j < i};
    };
    const Near near = team.Reduce(count, Near{INT32_MAX, 0}, compare, Nearest());
    team.Once([&] {
      next[i] = near.later < INT32_MAX ? near.later : -1;
      first[i] = !near.earlier && row >= 0 && row < size && (padding < 0 || wanted != padding);
    });
  }
};

// A team adds up one chain for one stretch of columns: the same sum in every run, and no atomics.
template <typename T, typename Index>
struct EmbeddingGradTeam {
  T* weight_grad;
  const T* out_grad;
  const Index* index;
  const int32_t *next, *first;
  int64_t width, stretch, stretches, begin;

  NVGPU_DEVICE void operator()(const Team& team, int64_t work) const {
    const int64_t i = work / stretches, start = work % stretches * stretch;
    if (!first[i]) return;
    const int64_t row = index[i] - begin, columns = width - start < stretch ? width - start : stretch;
    team.ForEach(columns, [&](int64_t column) {
      Sum<T> sum = 0;
      for (int64_t j = i; j >= 0; j = next[j]) {
        sum += static_cast<Sum<T>>(static_cast<Compute<T>>(out_grad[j * width + start + column]));
      }
      weight_grad[row * width + start + column] = Convert<T>(static_cast<Compute<T>>(sum));
    });
  }
};

// Rounded by itself. nvcc would join a product with the sum that follows, and the last bits would not be the host's.
template <typename M>
NVGPU_FN inline M Product(M a, M b) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<M, float>) return __fmul_rn(a, b);
  if constexpr (std::is_same_v<M, double>) return __dmul_rn(a, b);
#endif
  return a * b;
}

// 32 random bits of a number: the hash "lowbias32" of Chris Wellons (nullprogram.com, "Prospecting for Hash
// Functions").
NVGPU_FN inline uint32_t Mix(uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}

// Of a NaN those of the one that stays a NaN in its upper half.
NVGPU_FN inline uint32_t BitsOf(float value) { return value == value ? BitCast<uint32_t>(value) : 0x7fc00000u; }

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
    param->bits = static_cast<uint16_t>((bits - static_cast<uint32_t>(int32_t(*master))) >> 16);
  } else {
    *master = value;
    *param = Convert<T>(static_cast<Compute<T>>(value));
  }
}

// Weights of type T, gradients G, arithmetic in M; moments are kept as S, master weights as W.
template <typename T, typename G, typename M, typename S, typename W>
struct AdamWLoop {
  T* param;
  const G* grad;
  S *moment1, *moment2, *moment2_max;
  W* master;
  const float *grad_factor, *learning_rate, *beta1_power, *beta2_power;
  float beta1_power_value, beta2_power_value;
  M beta1, beta2, epsilon, decay, rate_ratio;
  uint32_t noise_key, noise_first;
  static constexpr int kWidth = kPack<T, G, S, W>;
  static constexpr bool kRounds = !std::is_same_v<S, M>;

  bool Dense() const { return Aligned(param, grad, moment1, moment2, moment2_max, master); }

  template <int N>
  struct Loaded {
    Pack<S, N> moment1, moment2, moment2_max;
    Pack<W, N> master;
    Pack<G, N> grad;
    Pack<T, N> param;
  };
  template <int N>
  NVGPU_FN Loaded<N> Load(int64_t i) const {
    Loaded<N> loaded;
    loaded.grad = LoadPack<N>(grad + i);
    loaded.moment1 = LoadPack<N>(moment1 + i);
    loaded.moment2 = LoadPack<N>(moment2 + i);
    if (moment2_max != nullptr) loaded.moment2_max = LoadPack<N>(moment2_max + i);
    if (master != nullptr) loaded.master = LoadPack<N>(master + i);
    if (master == nullptr || std::is_same_v<W, int16_t>) loaded.param = LoadPack<N>(param + i);
    return loaded;
  }
  template <int N>
  NVGPU_FN void Store(int64_t i, Loaded<N> loaded) const {
    const M rate = static_cast<M>(*learning_rate) * rate_ratio;
    const M power1 = static_cast<M>(beta1_power != nullptr ? *beta1_power : beta1_power_value);
    const M power2 = static_cast<M>(beta2_power != nullptr ? *beta2_power : beta2_power_value);
    const Compute<G> factor = grad_factor != nullptr ? Compute<G>(Convert<G>(*grad_factor)) : Compute<G>(1);
    const M scale = std::sqrt(M(1) - power2), scaled_rate = rate / (M(1) - power1);
    for (int n = 0; n < N; ++n) {
      const G clipped = Convert<G>(static_cast<Compute<G>>(loaded.grad.at[n]) * factor);
      const M g = static_cast<M>(static_cast<Compute<G>>(clipped));
      M p = master != nullptr ? JoinMaster<M>(loaded.param.at[n], loaded.master.at[n])
                              : static_cast<M>(static_cast<Compute<T>>(loaded.param.at[n]));
      p = Product(p, M(1) - Product(rate, decay));
      const M m1 = Product(beta1, static_cast<M>(loaded.moment1.at[n])) + Product(M(1) - beta1, g);
      const M m2 = Product(beta2, static_cast<M>(loaded.moment2.at[n])) + Product((M(1) - beta2) * g, g);
      M largest = m2;
      if (moment2_max != nullptr && loaded.moment2_max.at[n] > m2) largest = loaded.moment2_max.at[n];
      p -= scaled_rate * m1 * scale / (std::sqrt(largest) + Product(epsilon, scale));
      const uint32_t noise = kRounds ? Mix((noise_first + static_cast<uint32_t>(i + n)) ^ noise_key) : 0;
      loaded.moment1.at[n] = StoreMoment<S>(m1, noise & 0xffffu);
      loaded.moment2.at[n] = StoreMoment<S>(m2, noise >> 16);
      loaded.moment2_max.at[n] = StoreMoment<S>(largest, noise >> 16);
      SplitMaster(p, &loaded.param.at[n], &loaded.master.at[n]);
    }
    StorePack(moment1 + i, loaded.moment1);
    StorePack(moment2 + i, loaded.moment2);
    if (moment2_max != nullptr) StorePack(moment2_max + i, loaded.moment2_max);
    if (master != nullptr) StorePack(master + i, loaded.master);
    StorePack(param + i, loaded.param);
  }
};

template <typename T, typename G, typename M, typename S, typename W>
void RunStored(Stream stream, const AdamW& step) {
  const AdamWLoop<T, G, M, S, W> loop{static_cast<T*>(step.param),
                                      static_cast<const G*>(step.grad),
                                      static_cast<S*>(step.moment1),
                                      static_cast<S*>(step.moment2),
                                      static_cast<S*>(step.moment2_max),
                                      static_cast<W*>(step.master),
                                      step.grad_factor,
                                      static_cast<const float*>(step.learning_rate),
                                      step.beta1_power,
                                      step.beta2_power,
                                      step.beta1_power_value,
                                      step.beta2_power_value,
                                      static_cast<M>(step.beta1),
                                      static_cast<M>(step.beta2),
                                      static_cast<M>(step.epsilon),
                                      static_cast<M>(step.decay),
                                      static_cast<M>(step.rate_ratio),
                                      step.noise_key,
                                      step.noise_first};
  ForEachPack(stream, step.count, loop.Dense(), loop);
}

template <typename T, typename G, typename S>
void RunWithMoments(Stream stream, const AdamW& step) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    if (step.master_type == Type::kInt16) return RunStored<T, G, float, S, int16_t>(stream, step);
  }
  RunStored<T, G, float, S, float>(stream, step);
}

template <typename T, typename G>
void RunAs(Stream stream, const AdamW& step) {
  if (step.moment_type == Type::kBfloat16) return RunWithMoments<T, G, bfloat16>(stream, step);
  RunWithMoments<T, G, float>(stream, step);
}

}  // namespace

void EmbeddingGrad(Stream stream, Type type, void* weight_grad, const void* out_grad, const void* index,
                   Type index_type, int64_t count, int64_t size, int64_t width, int64_t first, int64_t padding,
                   int32_t* workspace) {
  runtime::Fill(weight_grad, 0, size * width * SizeOf(type), stream);
  if (width == 0) return;
  const int64_t stretch = 1024, stretches = (width + stretch - 1) / stretch;
  int32_t *next = workspace, *starts = workspace + count;
  auto run_index = [&](auto j) {
    using Index = decltype(j);
    const auto* indices = static_cast<const Index*>(index);
    ForEachRow(stream, count, ChainRow<Index>{indices, next, starts, count, size, first, padding});
    auto run = [&](auto t) {
      using T = decltype(t);
      ForEachRow(stream, count * stretches,
                 EmbeddingGradTeam<T, Index>{static_cast<T*>(weight_grad), static_cast<const T*>(out_grad), indices,
                                             next, starts, width, stretch, stretches, first});
    };
    if (!ForFloats(type, run)) throw std::invalid_argument("nvgpu: embedding_grad has no code for this element type");
  };
  if (!Match<decltype(run_index), int64_t, int32_t>(index_type, run_index)) {
    throw std::invalid_argument("nvgpu: an embedding's index must be int32 or int64");
  }
}

void RunAdamW(Stream stream, const AdamW& step) {
  auto run = [&](auto t) {
    using T = decltype(t);
    if constexpr (std::is_same_v<T, double>) {
      return RunStored<double, double, double, double, double>(stream, step);
    } else if (step.grad_type == Type::kFloat) {
      return RunAs<T, float>(stream, step);
    } else {
      return RunAs<T, T>(stream, step);
    }
  };
  if (!ForFloats(step.type, run)) throw std::invalid_argument("nvgpu: adamw has no code for this element type");
}

}  // namespace nvgpu::math
