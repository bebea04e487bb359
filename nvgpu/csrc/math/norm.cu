// RMSNorm: a team of threads a row. For the gradients a team goes through a stretch of rows and keeps the sums for the
// scale's gradient near; the teams' sums are added up afterwards.
#include "launch.h"
#include "math.h"

namespace nvgpu::math {
namespace {

template <typename T>
using C = Compute<T>;

constexpr int64_t kGroups = 16;  // into which stretches' sums are added, and then these: both fill a GPU

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

// As many stretches of rows as teams run at once.
int64_t Stretches(int64_t rows, int64_t columns) {
  return std::min<int64_t>(rows, kParallel * (kThreads / ThreadsFor(columns)));
}

// With g = out_grad * scale and y = in * rstd: in_grad = rstd * (g - y * mean(g * y)), for a stretch of rows, and into
// `sums` the sum of out_grad * y over these.
template <typename T>
struct RmsNormGradStretch {
  T* in_grad;
  Sum<T>* sums;
  const T *in, *scale, *out_grad;
  const C<T>* rstd;
  int64_t rows, columns, length;

  // What is done with a row's elements once the sum over the row is known.
  struct RowLoop : Inputs<T, 3> {
    T* in_grad;
    Sum<T>* sums;
    C<T> root, slope;
    static constexpr int kWidth = kPack<T>;

    NVGPU_FN bool Dense() const { return Inputs<T, 3>::Dense() && Aligned(in_grad, sums); }
    template <int N, typename Loaded>
    NVGPU_FN void Store(int64_t i, const Loaded& loaded) const {
      Pack<T, N> grads;
      Pack<Sum<T>, N> added = LoadPack<N>(sums + i);
      for (int n = 0; n < N; ++n) {
        const C<T> value = static_cast<C<T>>(loaded.in[0].at[n]), grad = static_cast<C<T>>(loaded.in[2].at[n]);
        added.at[n] += value * root * grad;
        grads.at[n] = Convert<T>(root * (grad * static_cast<C<T>>(loaded.in[1].at[n]) - value * slope));
      }
      StorePack(sums + i, added);
      if (in_grad != nullptr) StorePack(in_grad + i, grads);
    }
  };
  NVGPU_DEVICE void Row(const Team& team, int64_t r, Sum<T>* to) const {
    const Inputs<T, 3> row{in + r * columns, scale, out_grad + r * columns};
    const auto add = [](Sum<T>& sum, const auto& values, const auto& factors, const auto& grads) {
      for (size_t n = 0; n < sizeof(values) / sizeof(T); ++n) {
        sum += static_cast<C<T>>(values[n]) * static_cast<C<T>>(factors[n]) * static_cast<C<T>>(grads[n]);
      }
    };
    const C<T> root = rstd[r];  // before the reduction, which waits for the row anyway
    const C<T> sum = static_cast<C<T>>(team.Reduce(columns, row, Sum<T>(0), add, Plus()));
    const C<T> slope = sum * root * root / static_cast<C<T>>(columns);
    team.Run(columns, RowLoop{row, in_grad == nullptr ? nullptr : in_grad + r * columns, to, root, slope});
  }
  NVGPU_DEVICE void operator()(const Team& team, int64_t stretch) const {
    Sum<T>* to = sums + stretch * columns;
    const int64_t first = stretch * length, end = first + length < rows ? first + length : rows;
    team.WithScratch(to, [=](Sum<T>* near) {
      team.ForEach(columns, [=](int64_t i) { near[i] = 0; });
      for (int64_t r = first; r < end; ++r) Row(team, r, near);  // whose reduction waits for all threads
      team.Wait();
      if (near != to) team.ForEach(columns, [=](int64_t i) { to[i] = near[i]; });
    });
  }
};

// out[i / columns][i % columns]: the sum of that column over `length` rows. Neighbouring threads have neighbouring
// columns.
template <typename T, typename Out>
struct AddRows {
  Out* out;
  const Sum<T>* in;
  int64_t rows, columns, length;
  NVGPU_FN void operator()(int64_t i) const {
    const int64_t column = i % columns, first = i / columns * length;
    const int64_t end = first + length < rows ? first + length : rows;
    Sum<T> sum = 0;
    for (int64_t r = first; r < end; ++r) sum += in[r * columns + column];
    out[i] = Convert<Out>(sum);
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
                             static_cast<const T*>(scale), epsilon, columns},
               ThreadsFor(columns));
  });
}

size_t RmsNormGradWorkspace(int64_t rows, int64_t columns) {
  return sizeof(double) * (Stretches(rows, columns) + kGroups) * columns;
}

void RmsNormGrad(Stream stream, Type type, void* in_grad, void* scale_grad, const void* in, const void* scale,
                 const void* rstd, const void* out_grad, int64_t rows, int64_t columns, void* workspace) {
  const int64_t most = Stretches(rows, columns), length = rows == 0 ? 0 : (rows + most - 1) / most;
  const int64_t stretches = rows == 0 ? 0 : (rows + length - 1) / length;
  const int64_t grouped = (stretches + kGroups - 1) / kGroups;
  For(type, [&](auto t) {
    using T = decltype(t);
    auto *sums = static_cast<Sum<T>*>(workspace), *groups = sums + stretches * columns;
    const RmsNormGradStretch<T> stretch{static_cast<T*>(in_grad),
                                        sums,
                                        static_cast<const T*>(in),
                                        static_cast<const T*>(scale),
                                        static_cast<const T*>(out_grad),
                                        static_cast<const C<T>*>(rstd),
                                        rows,
                                        columns,
                                        length};
    ForEachStretch(stream, stretches, stretch, ThreadsFor(columns), sizeof(Sum<T>) * columns);
    if (scale_grad == nullptr) return;
    ForEach(stream, kGroups * columns, AddRows<T, Sum<T>>{groups, sums, stretches, columns, grouped});
    ForEach(stream, columns, AddRows<T, T>{static_cast<T*>(scale_grad), groups, kGroups, columns, kGroups});
  });
}

}  // namespace nvgpu::math
