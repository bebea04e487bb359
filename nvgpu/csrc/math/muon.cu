// Muon's passes over a weight before and after its update is made orthogonal.
#include <array>
#include <map>

#include "master_weight.h"
#include "math.h"

namespace nvgpu::math {
namespace {

// Gradients G, momentum kept as S, updates U; the update is made of the momentum as it was before rounding.
template <typename G, typename S, typename U>
struct MomentumLoop {
  const G* grad;
  S* momentum;
  U* update;
  const float* grad_factor;
  float beta;
  static constexpr int kWidth = kPack<G, S, U>;

  bool Dense() const { return Aligned(grad, momentum, update); }
  template <int N>
  struct Loaded {
    Pack<G, N> grad;
    Pack<S, N> momentum;
  };
  template <int N>
  NVGPU_FN Loaded<N> Load(int64_t i) const {
    return {LoadPack<N>(grad + i), LoadPack<N>(momentum + i)};
  }
  template <int N>
  NVGPU_FN void Store(int64_t i, Loaded<N> loaded) const {
    const float factor = grad_factor != nullptr ? static_cast<float>(Convert<G>(*grad_factor)) : 1.0f;
    Pack<U, N> updates;
    for (int n = 0; n < N; ++n) {
      const float g = static_cast<float>(Convert<G>(Product(static_cast<float>(loaded.grad.at[n]), factor)));
      const float m = Product(beta, static_cast<float>(loaded.momentum.at[n])) + g;
      loaded.momentum.at[n] = Convert<S>(m);
      updates.at[n] = Convert<U>(Product(beta, m) + g);
    }
    StorePack(momentum + i, loaded.momentum);
    StorePack(update + i, updates);
  }
  NVGPU_FN MomentumLoop Prepare() const { return *this; }
};

// Weights T, with master weights W or none, updates U.
template <typename T, typename W, typename U>
struct StepLoop {
  Weights<T, W> weights;
  const U* update;
  const float* learning_rate;
  float decay;
  static constexpr int kWidth = kPack<T, W, U>;

  bool Dense() const { return weights.Dense() && Aligned(update); }
  template <int N>
  struct Loaded {
    typename Weights<T, W>::template Loaded<N> weight;
    Pack<U, N> update;
  };
  template <int N>
  NVGPU_FN Loaded<N> Load(int64_t i) const {
    return {weights.template Load<N>(i), LoadPack<N>(update + i)};
  }
  template <int N>
  NVGPU_FN void Store(int64_t i, Loaded<N> loaded) const {
    const float rate = *learning_rate, kept = 1.0f - Product(rate, decay);
    for (int n = 0; n < N; ++n) {
      const float p = weights.template Value<float>(loaded.weight, n);
      weights.Set(Product(p, kept) - Product(rate, static_cast<float>(loaded.update.at[n])), n, &loaded.weight);
    }
    weights.Store(i, loaded.weight);
  }
  NVGPU_FN StepLoop Prepare() const { return *this; }
};

template <typename Function>
void ForUpdates(Type type, Function function) {
  if (!Match<Function, float, bfloat16>(type, function)) {
    throw std::invalid_argument("nvgpu: muon has no code for this type of momentum or update");
  }
}
template <typename Function>
void ForWeights(Type type, Function function) {
  if (!Match<Function, float, bfloat16, half>(type, function)) {
    throw std::invalid_argument("nvgpu: muon has no code for this type of weight or gradient");
  }
}

template <typename G, typename S, typename U>
void RunMomenta(Stream stream, const std::vector<MuonMomentum>& weights) {
  using Loop = MomentumLoop<G, S, U>;
  std::vector<Part<Loop>> parts;
  for (const MuonMomentum& of : weights) {
    const Loop loop{static_cast<const G*>(of.grad), static_cast<S*>(of.momentum), static_cast<U*>(of.update),
                    of.grad_factor, of.beta};
    parts.push_back({loop, of.count, loop.Dense()});
  }
  ForEachPack(stream, parts);
}

template <typename T, typename W, typename U>
void RunSteps(Stream stream, const std::vector<MuonStep>& steps) {
  using Loop = StepLoop<T, W, U>;
  std::vector<Part<Loop>> parts;
  for (const MuonStep& of : steps) {
    const Loop loop{{static_cast<T*>(of.param), static_cast<W*>(of.master)},
                    static_cast<const U*>(of.update),
                    of.learning_rate,
                    of.decay};
    parts.push_back({loop, of.count, loop.Dense()});
  }
  ForEachPack(stream, parts);
}

template <typename T, typename U>
void RunStepsAs(Stream stream, const std::vector<MuonStep>& steps) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    if (steps.front().master_type == Type::kInt16) return RunSteps<T, int16_t, U>(stream, steps);
  }
  RunSteps<T, float, U>(stream, steps);
}

}  // namespace

void RunMuonMomentum(Stream stream, const std::vector<MuonMomentum>& weights) {
  std::map<std::array<Type, 3>, std::vector<MuonMomentum>> alike;
  for (const MuonMomentum& of : weights) alike[{of.grad_type, of.momentum_type, of.update_type}].push_back(of);
  for (const auto& [types, same] : alike) {
    ForWeights(types[0], [&, &types = types, &same = same](auto g) {
      ForUpdates(types[1], [&](auto s) {
        ForUpdates(types[2], [&](auto u) { RunMomenta<decltype(g), decltype(s), decltype(u)>(stream, same); });
      });
    });
  }
}

void RunMuonSteps(Stream stream, const std::vector<MuonStep>& steps) {
  std::map<std::array<Type, 3>, std::vector<MuonStep>> alike;
  for (const MuonStep& of : steps) alike[{of.type, of.master_type, of.update_type}].push_back(of);
  for (const auto& [types, same] : alike) {
    ForWeights(types[0], [&, &types = types, &same = same](auto t) {
      ForUpdates(types[2], [&](auto u) { RunStepsAs<decltype(t), decltype(u)>(stream, same); });
    });
  }
}

}  // namespace nvgpu::math
