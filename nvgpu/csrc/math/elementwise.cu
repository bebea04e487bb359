// Elementwise operations with broadcasting: one loop, and the table in ops.def.
#include "indexing.h"
#include "launch.h"
#include "math.h"

namespace nvgpu::math {
namespace {

// ---- what the expressions of ops.def are made of

template <typename C>
NVGPU_FN C Sigmoid(C x) {
  return C(1) / (C(1) + std::exp(-x));
}
template <typename C>
NVGPU_FN C SiluSlope(C x) {
  const C s = Sigmoid(x);
  return s * (C(1) + x * (C(1) - s));
}
template <typename C>
NVGPU_FN C Gelu(C x) {
  return x * C(0.5) * (C(1) + std::erf(x * C(0.70710678118654752440)));
}
template <typename C>
NVGPU_FN C GeluSlope(C x) {
  const C density = std::exp(C(-0.5) * x * x) * C(0.39894228040143267794);
  return C(0.5) * (C(1) + std::erf(x * C(0.70710678118654752440))) + x * density;
}
template <typename C>
NVGPU_FN C GeluTanh(C x) {
  return C(0.5) * x * (C(1) + std::tanh(C(0.79788456080286535588) * (x + C(0.044715) * x * x * x)));
}
template <typename C>
NVGPU_FN C GeluTanhSlope(C x) {
  const C root = C(0.79788456080286535588);
  const C t = std::tanh(root * (x + C(0.044715) * x * x * x));
  return C(0.5) * (C(1) + t) + C(0.5) * x * (C(1) - t * t) * root * (C(1) + C(3 * 0.044715) * x * x);
}
template <typename C>
NVGPU_FN C Power(C x, C p) {  // squares are too frequent for pow()
  return p == C(2) ? x * x : (p == C(1) ? x : std::pow(x, p));
}
NVGPU_FN inline int64_t Quotient(int64_t a, int64_t b) { return b == 0 ? 0 : a / b; }
NVGPU_FN inline float Quotient(float a, float b) { return a / b; }
NVGPU_FN inline double Quotient(double a, double b) { return a / b; }
NVGPU_FN inline int64_t FloorQuotient(int64_t a, int64_t b) {
  return b == 0 ? 0 : a / b - (a % b != 0 && (a < 0) != (b < 0));
}
NVGPU_FN inline float FloorQuotient(float a, float b) { return std::floor(a / b); }
NVGPU_FN inline double FloorQuotient(double a, double b) { return std::floor(a / b); }
NVGPU_FN inline int64_t Remainder(int64_t a, int64_t b) { return b == 0 ? 0 : a - FloorQuotient(a, b) * b; }
template <typename C>
NVGPU_FN C Remainder(C a, C b) {  // of the sign of b, as Python's
  const C rest = std::fmod(a, b);
  return rest != C(0) && (rest < C(0)) != (b < C(0)) ? rest + b : rest;
}

// ---- the operations

struct Same {
  template <typename T>
  using Result = T;
};
struct Bool {
  template <typename T>
  using Result = bool;
};

template <Op op>
struct Formula;
#define NVGPU_OP(name, inputs, types, result, expression)                                                           \
  template <>                                                                                                       \
  struct Formula<Op::name> {                                                                                        \
    template <typename C>                                                                                           \
    NVGPU_FN static C Value([[maybe_unused]] C a, [[maybe_unused]] C b, [[maybe_unused]] C c, [[maybe_unused]] C p, \
                            [[maybe_unused]] C q) {                                                                 \
      return static_cast<C>(expression);                                                                            \
    }                                                                                                               \
  };
#include "ops.def"
#undef NVGPU_OP

template <Op op, int K, typename In, typename Out>
struct ElementwiseLoop : Inputs<In, K> {
  Out* out;
  Indexer<K> indexer;
  Compute<In> p, q;
  // not of integers: 64-bit divisions of many elements would be a lot of code
  static constexpr int kWidth = std::is_integral_v<In> ? 1 : kPack<In, Out>;

  // Every input lies as the output does, or is one element for all.
  bool Dense() const {
    bool dense = indexer.rank <= 1 && Aligned(out);
    for (int k = 0; k < K && indexer.rank == 1; ++k) {
      const int64_t stride = indexer.strides[k][0];
      dense = dense && (stride == 0 || (stride == 1 && Aligned(this->in[k])));
    }
    return dense;
  }
  template <int N>
  NVGPU_FN typename Inputs<In, K>::template Loaded<N> Load(int64_t i) const {
    typename Inputs<In, K>::template Loaded<N> loaded;
    if constexpr (N == 1) {
      int64_t at[K];
      indexer.At(i, at);
      for (int k = 0; k < K; ++k) loaded.in[k].at[0] = this->in[k][at[k]];
    } else {
      for (int k = 0; k < K; ++k) {
        if (indexer.strides[k][0] != 0) {
          loaded.in[k] = LoadPack<N>(this->in[k] + i);
        } else {
          const In one = this->in[k][0];
          for (int n = 0; n < N; ++n) loaded.in[k].at[n] = one;
        }
      }
    }
    return loaded;
  }
  template <int N, typename Loaded>
  NVGPU_FN void Store(int64_t i, const Loaded& loaded) const {
    using C = Compute<In>;
    Pack<Out, N> result;
    for (int n = 0; n < N; ++n) {
      C values[3] = {};
      for (int k = 0; k < K; ++k) values[k] = static_cast<C>(loaded.in[k].at[n]);
      result.at[n] = Convert<Out>(Formula<op>::Value(values[0], values[1], values[2], p, q));
    }
    StorePack(out + i, result);
  }
};

template <typename C>
C As(Number number) {
  if constexpr (std::is_integral_v<C>) {
    return number.integer;
  } else {
    return static_cast<C>(number.real);
  }
}

template <Op op, int K, typename In, typename Out>
void Run(Stream stream, void* out, const Dims& dims, const std::vector<Input>& inputs, Number p, Number q) {
  Inputs<In, K> in;
  std::array<Dims, K> strides;
  for (int k = 0; k < K; ++k) {
    in.in[k] = static_cast<const In*>(inputs[k].data);
    strides[k] = inputs[k].strides;
  }
  const ElementwiseLoop<op, K, In, Out> loop{in, static_cast<Out*>(out), Indexer<K>(dims, strides), As<Compute<In>>(p),
                                             As<Compute<In>>(q)};
  ForEachPack(stream, loop.indexer.count, loop.Dense(), loop);
}

}  // namespace

void Elementwise(Stream stream, Op op, Type type, void* out, const Dims& dims, const std::vector<Input>& inputs,
                 Number p, Number q) {
  bool found = false;
  switch (op) {
#define NVGPU_OP(name, count, types, result, expression)                           \
  case Op::name:                                                                   \
    found = types(type, [&](auto t) {                                              \
      using T = decltype(t);                                                       \
      Run<Op::name, count, T, result::Result<T>>(stream, out, dims, inputs, p, q); \
    });                                                                            \
    break;
#include "ops.def"
#undef NVGPU_OP
  }
  if (!found) NoCode("an elementwise operation");
}

void ElementwiseWide(Stream stream, Op op, Type type, void* out, const Dims& dims, const std::vector<Input>& inputs) {
  auto run = [&](auto t) {
    using T = decltype(t);
    using C = Compute<T>;
    switch (op) {
#define NVGPU_WIDE(name, count) \
  case Op::name: return Run<Op::name, count, T, C>(stream, out, dims, inputs, {}, {});
      NVGPU_WIDE(kMultiply, 2)
      NVGPU_WIDE(kDivide, 2)
      NVGPU_WIDE(kDivideGradY, 3)
      NVGPU_WIDE(kMaximumGradX, 3)
      NVGPU_WIDE(kMaximumGradY, 3)
      NVGPU_WIDE(kMinimumGradX, 3)
      NVGPU_WIDE(kMinimumGradY, 3)
#undef NVGPU_WIDE
      default: NoCode("a gradient that is summed");
    }
  };
  if (!Match<decltype(run), half, bfloat16>(type, run)) NoCode("a gradient that is summed");
}

namespace {
template <typename From, typename To>
struct CastTo {
  NVGPU_FN To operator()(int64_t, From value) const {
    if constexpr (std::is_same_v<To, bool>) {
      return Convert<bool>(value);
    } else {
      return Convert<To>(static_cast<Compute<From>>(value));
    }
  }
};
}  // namespace

void Cast(Stream stream, const void* in, Type from, void* out, Type to, int64_t count) {
  auto run = [&](auto f) {
    using From = decltype(f);
    auto run_to = [&](auto t) {
      using To = decltype(t);
      const MapLoop<To, From, 1, CastTo<From, To>> loop(static_cast<To*>(out), {static_cast<const From*>(in)}, {});
      ForEachPack(stream, count, loop.Dense(), loop);
    };
    if (!ForAll(to, run_to)) NoCode("cast");
  };
  if (!ForAll(from, run)) NoCode("cast");
}

}  // namespace nvgpu::math
