// RMSNorm: a team of threads a row; the scale's gradient as sums over stretches of rows, then over these.
#include "launch.h"
#include "math.h"

namespace nvgpu::math {
namespace {

template <typename T>
using C = Compute<T>;

template <typename T>
struct RmsNormRow {
  T* out;
  C<T>* rstd;
  const T *in, *scale;
  double epsilon;
  int64_t columns;
  NVGPU_DEVICE void operator()(const Team& team, int64_t r) const {
    const T* row = in + r * columns;
    const auto add = [](Sum<T>& sum, const auto& values) {
      for (T value : values) sum += static_cast<Sum<T>>(static_cast<C<T>>(value)) * static_cast<C<T>>(value);
    };
    const Sum<T> squares = team.Reduce(columns, Inputs<T, 1>{row}, Sum<T>(0), add, Plus());
    const C<T> root = C<T>(1) / std::sqrt(static_cast<C<T>>(squares / columns + Sum<T>(epsilon)));
    team.Once([&] { rstd[r] = root; });
    team.Map(columns, out + r * columns, Inputs<T, 2>{row, scale}, [root](int64_t, T value, T factor) {
      return Convert<T>(static_cast<C<T>>(value) * root * static_cast<C<T>>(factor));
    });
  }
};

// With g = out_grad * scale and y = in * rstd: in_grad = rstd * (g - y * mean(g * y)).
template <typename T>
struct RmsNormGradRow {
  T* in_grad;
  const T *in, *scale, *out_grad;
  const C<T>* rstd;
  int64_t columns;
  NVGPU_DEVICE void operator()(const Team& team, int64_t r) const {
    const Inputs<T, 3> rows{in + r * columns, scale, out_grad + r * columns};
    const auto add = [](Sum<T>& sum, const auto& values, const auto& factors, const auto& grads) {
      for (size_t n = 0; n < sizeof(values) / sizeof(T); ++n) {
        sum += static_cast<C<T>>(values[n]) * static_cast<C<T>>(factors[n]) * static_cast<C<T>>(grads[n]);
      }
    };
    const C<T> sum = static_cast<C<T>>(team.Reduce(columns, rows, Sum<T>(0), add, Plus()));
    const C<T> root = rstd[r], slope = sum * root * root / static_cast<C<T>>(columns);
    team.Map(columns, in_grad + r * columns, rows, [=](int64_t, T value, T factor, T grad) {
      return Convert<T>(root *
                        (static_cast<C<T>>(grad) * static_cast<C<T>>(factor) - static_cast<C<T>>(value) * slope));
    });
  }
};

// Stretches of rows, so many that few columns fill a GPU too.
int64_t Stretches(int64_t rows, int64_t columns) {
  const int64_t wanted = columns == 0 ? 1 : kParallel * 256 / columns;
  return std::max<int64_t>(1, std::min(wanted, rows / 16));
}

// Neighbouring threads have neighbouring columns.
template <typename T>
struct ScaleGradStretch {
  Sum<T>* sums;
  const T *in, *out_grad;
  const C<T>* rstd;
  int64_t rows, columns, length;
  NVGPU_FN void operator()(int64_t i) const {
    const int64_t column = i % columns, first = i / columns * length;
    const int64_t end = first + length < rows ? first + length : rows;
    Sum<T> sum = 0;
    for (int64_t r = first; r < end; ++r) {
      const int64_t at = r * columns + column;
      sum += static_cast<C<T>>(in[at]) * rstd[r] * static_cast<C<T>>(out_grad[at]);
    }
    sums[i] = sum;
  }
};
template <typename T>
struct ScaleGradFinish {
  T* scale_grad;
  const Sum<T>* sums;
  int64_t columns, stretches;
  NVGPU_FN void operator()(int64_t column) const {
    Sum<T> sum = 0;
    for (int64_t n = 0; n < stretches; ++n) sum += sums[n * columns + column];
    scale_grad[column] = Convert<T>(static_cast<C<T>>(sum));
  }
};

template <typename Function>
void For(Type type, Function function) {
  if (!ForFloats(type, function)) throw std::invalid_argument("nvgpu: RMSNorm has no code for this element type");
}

}  // namespace

void RmsNorm(Stream stream, Type type, void* out, void* rstd, const void* in, const void* scale, double epsilon,
             int64_t rows, int64_t columns) {
  For(type, [&](auto t) {
    using T = decltype(t);
    ForEachRow(stream, rows,
               RmsNormRow<T>{static_cast<T*>(out), static_cast<C<T>*>(rstd), static_cast<const T*>(in),
                             static_cast<const T*>(scale), epsilon, columns});
  });
}

void RmsNormGrad(Stream stream, Type type, void* in_grad, const void* in, const void* scale, const void* rstd,
                 const void* out_grad, int64_t rows, int64_t columns) {
  For(type, [&](auto t) {
    using T = decltype(t);
    ForEachRow(stream, rows,
               RmsNormGradRow<T>{static_cast<T*>(in_grad), static_cast<const T*>(in), static_cast<const T*>(scale),
                                 static_cast<const T*>(out_grad), static_cast<const C<T>*>(rstd), columns});
  });
}

size_t RmsNormScaleGradWorkspace(int64_t rows, int64_t columns) {
  return sizeof(double) * Stretches(rows, columns) * columns;
}

void RmsNormScaleGrad(Stream stream, Type type, void* scale_grad, const void* in, const void* rstd,
                      const void* out_grad, int64_t rows, int64_t columns, void* workspace) {
  const int64_t stretches = Stretches(rows, columns), length = (rows + stretches - 1) / stretches;
  For(type, [&](auto t) {
    using T = decltype(t);
    auto* sums = static_cast<Sum<T>*>(workspace);
    ForEach(stream, stretches * columns,
            ScaleGradStretch<T>{sums, static_cast<const T*>(in), static_cast<const T*>(out_grad),
                                static_cast<const C<T>*>(rstd), rows, columns, length});
    ForEach(stream, columns, ScaleGradFinish<T>{static_cast<T*>(scale_grad), sums, columns, stretches});
  });
}

}  // namespace nvgpu::math
