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
#define NVGPU_OP(name, inputs, types, result, expression)                                              \
  template <>                                                                                          \
  struct Formula<Op::name> {                                                                           \
    template <typename C>                                                                              \
    NVGPU_FN static C Value([[maybe_unused]] C a, [[maybe_unused]] C b, [[maybe_unused]] C c,          \
                            [[maybe_unused]] C p, [[maybe_unused]] C q) {                              \
      return static_cast<C>(expression);                                                               \
    }                                                                                                  \
  };
#include "ops.def"
#undef NVGPU_OP

template <Op op, int N, typename In, typename Out>
struct ElementwiseLoop {
  Out* out;
  const In* in[N];
  Indexer<N> indexer;
  Compute<In> p, q;

  NVGPU_FN void operator()(int64_t i) const {
    using C = Compute<In>;
    int64_t at[N];
    indexer.At(i, at);
    C values[3] = {};
    for (int n = 0; n < N; ++n) values[n] = static_cast<C>(in[n][at[n]]);
    out[i] = Convert<Out>(Formula<op>::Value(values[0], values[1], values[2], p, q));
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

template <Op op, int N, typename In, typename Out>
void Run(Stream stream, void* out, const Dims& dims, const std::vector<Input>& inputs, Number p, Number q) {
  ElementwiseLoop<op, N, In, Out> loop{static_cast<Out*>(out), {}, {}, As<Compute<In>>(p), As<Compute<In>>(q)};
  std::array<Dims, N> strides;
  for (int n = 0; n < N; ++n) {
    loop.in[n] = static_cast<const In*>(inputs[n].data);
    strides[n] = inputs[n].strides;
  }
  loop.indexer = Indexer<N>(dims, strides);
  ForEach(stream, loop.indexer.count, loop);
}

}  // namespace

void Elementwise(Stream stream, Op op, Type type, void* out, const Dims& dims, const std::vector<Input>& inputs,
                 Number p, Number q) {
  bool found = false;
  switch (op) {
#define NVGPU_OP(name, count, types, result, expression)                                            \
  case Op::name:                                                                                    \
    found = types(type, [&](auto t) {                                                               \
      using T = decltype(t);                                                                        \
      Run<Op::name, count, T, result::Result<T>>(stream, out, dims, inputs, p, q);                  \
    });                                                                                             \
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
  case Op::name:                \
    return Run<Op::name, count, T, C>(stream, out, dims, inputs, {}, {});
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
struct CastLoop {
  const From* in;
  To* out;
  NVGPU_FN void operator()(int64_t i) const {
    if constexpr (std::is_same_v<To, bool>) {
      out[i] = Convert<bool>(in[i]);
    } else {
      out[i] = Convert<To>(static_cast<Compute<From>>(in[i]));
    }
  }
};
}  // namespace

void Cast(Stream stream, const void* in, Type from, void* out, Type to, int64_t count) {
  auto run = [&](auto f) {
    using From = decltype(f);
    auto run_to = [&](auto t) {
      using To = decltype(t);
      ForEach(stream, count, CastLoop<From, To>{static_cast<const From*>(in), static_cast<To*>(out)});
    };
    if (!ForAll(to, run_to)) NoCode("cast");
  };
  if (!ForAll(from, run)) NoCode("cast");
}

}  // namespace nvgpu::math
