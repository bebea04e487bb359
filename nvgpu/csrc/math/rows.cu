// Softmax, and cross-entropy built on it: one team of threads a row.
#include <limits>

#include "launch.h"
#include "math.h"

namespace nvgpu::math {
namespace {

template <typename T>
using C = Compute<T>;

template <typename T>
NVGPU_DEVICE C<T> MaxOf(const Team& team, const T* row, int64_t columns) {
  const auto add = [](C<T>& max, const auto& values) {
    for (T value : values) max = Larger()(max, static_cast<C<T>>(value));
  };
  return team.Reduce(columns, Inputs<T, 1>{row}, -C<T>(INFINITY), add, Larger());
}
template <typename T>
NVGPU_DEVICE C<T> SumExp(const Team& team, const T* row, int64_t columns, C<T> max) {
  const auto add = [max](Sum<T>& sum, const auto& values) {
    for (T value : values) sum += std::exp(static_cast<C<T>>(value) - max);
  };
  return static_cast<C<T>>(team.Reduce(columns, Inputs<T, 1>{row}, Sum<T>(0), add, Plus()));
}

// The largest of some numbers, and the sum of exp(number - largest), in one pass (Milakov & Gimelshein, arXiv
// 1805.02867).
template <typename T>
struct MaxAndSum {
  C<T> max = -C<T>(INFINITY);
  Sum<T> sum = 0;

  // The sum with another maximum. Nothing but -inf adds up to 0, not NaN.
  NVGPU_FN Sum<T> For(C<T> larger) const { return max == larger ? sum : sum * std::exp(max - larger); }

  template <int N>
  NVGPU_FN void Add(const T (&values)[N]) {
    C<T> larger = max;
    for (T value : values) larger = Larger()(larger, static_cast<C<T>>(value));
    sum = For(larger);
    max = larger;
    const C<T> base = max == -C<T>(INFINITY) ? C<T>(0) : max;
    for (T value : values) sum += std::exp(static_cast<C<T>>(value) - base);
  }
  NVGPU_FN static MaxAndSum Join(const MaxAndSum& a, const MaxAndSum& b) {
    MaxAndSum both;
    both.max = Larger()(a.max, b.max);
    both.sum = a.For(both.max) + b.For(both.max);
    return both;
  }
};
template <typename T>
NVGPU_DEVICE MaxAndSum<T> MaxAndSumOf(const Team& team, const T* row, int64_t columns) {
  return team.Reduce(
      columns, Inputs<T, 1>{row}, MaxAndSum<T>(), [](MaxAndSum<T>& state, const auto& values) { state.Add(values); },
      [](const MaxAndSum<T>& a, const MaxAndSum<T>& b) { return MaxAndSum<T>::Join(a, b); });
}

template <typename T>
struct SoftmaxRow {
  T* out;
  const T* in;
  int64_t columns;
  bool log;
  NVGPU_DEVICE void operator()(const Team& team, int64_t r) const { Compute(team, r, columns); }
  // Of the first `count` elements of a row.
  NVGPU_DEVICE void Compute(const Team& team, int64_t r, int64_t count) const {
    const T* row = in + r * columns;
    const auto [max, wide_sum] = MaxAndSumOf(team, row, count);
    const C<T> sum = static_cast<C<T>>(wide_sum), log_sum = std::log(sum);
    team.Map(count, out + r * columns, Inputs<T, 1>{row}, [=, log = log, max = max](int64_t, T value) {
      const C<T> shifted = static_cast<C<T>>(value) - max;
      return Convert<T>(log ? shifted - log_sum : std::exp(shifted) / sum);
    });
  }
};

template <typename T>
struct CausalSoftmaxRow {
  T* out;
  const T* in;
  int64_t size;
  NVGPU_DEVICE void operator()(const Team& team, int64_t r) const {
    const int64_t seen = r % size + 1;
    SoftmaxRow<T>{out, in, size, false}.Compute(team, r, seen);
    T* hidden = out + r * size + seen;
    team.ForEach(size - seen, [=](int64_t i) { hidden[i] = Convert<T>(C<T>(0)); });
  }
};

template <typename T>
struct SoftmaxGradRow {
  T* in_grad;
  const T *out, *out_grad;
  int64_t columns;
  bool log;
  NVGPU_DEVICE void operator()(const Team& team, int64_t r) const {
    const Inputs<T, 2> rows{out + r * columns, out_grad + r * columns};
    const auto add = [log = log](Sum<T>& sum, const auto& values, const auto& grads) {
      for (size_t n = 0; n < sizeof(values) / sizeof(T); ++n) {
        const C<T> g = static_cast<C<T>>(grads[n]);
        sum += log ? g : g * static_cast<C<T>>(values[n]);
      }
    };
    const C<T> sum = static_cast<C<T>>(team.Reduce(columns, rows, Sum<T>(0), add, Plus()));
    team.Map(columns, in_grad + r * columns, rows, [=, log = log](int64_t, T y, T dy) {
      const C<T> g = static_cast<C<T>>(dy), value = static_cast<C<T>>(y);
      return Convert<T>(log ? g - std::exp(value) * sum : (g - sum) * value);
    });
  }
};

// Loss and gradient of a row whose label is neither a class nor ignored: 0 would look like a perfect score,
// and reading what lies there like a number. Paddle's own kernels end the program.
template <typename T>
constexpr T kNotAClass = std::numeric_limits<T>::quiet_NaN();

template <typename T, typename Index>
struct CrossEntropyRow {
  T *softmax, *loss;
  const T* logits;
  const Index* labels;
  int64_t ignored, columns;
  NVGPU_DEVICE void operator()(const Team& team, int64_t r) const {
    const T* row = logits + r * columns;
    const int64_t label = labels[r];
    const bool is_class = label >= 0 && label < columns;
    // now: softmax may be written over logits
    const C<T> picked = is_class ? static_cast<C<T>>(row[label]) : kNotAClass<C<T>>;
    const auto [max, wide_sum] = MaxAndSumOf(team, row, columns);
    const C<T> sum = static_cast<C<T>>(wide_sum);
    team.Once([&, max = max] { loss[r] = Convert<T>(label == ignored ? C<T>(0) : std::log(sum) - (picked - max)); });
    team.Map(columns, softmax + r * columns, Inputs<T, 1>{row},
             [sum, max = max](int64_t, T value) { return Convert<T>(std::exp(static_cast<C<T>>(value) - max) / sum); });
  }
};

template <typename T, typename Index>
struct CrossEntropyGradRow {
  T* logits_grad;
  const T *softmax, *loss_grad;
  const Index* labels;
  int64_t ignored, first, columns, classes;
  NVGPU_DEVICE void operator()(const Team& team, int64_t r) const {
    const int64_t label = labels[r], at = label - first;
    const bool is_class = label >= 0 && label < classes;
    const C<T> weight = is_class ? static_cast<C<T>>(loss_grad[r]) : kNotAClass<C<T>>;
    const C<T> scale = label == ignored ? C<T>(0) : weight;
    team.Map(columns, logits_grad + r * columns, Inputs<T, 1>{softmax + r * columns}, [=](int64_t i, T value) {
      return Convert<T>((static_cast<C<T>>(value) - (i == at ? C<T>(1) : C<T>(0))) * scale);
    });
  }
};

template <typename T>
struct RowMaxRow {
  float* largest;
  const T* logits;
  int64_t columns;
  NVGPU_DEVICE void operator()(const Team& team, int64_t r) const {
    const float max = static_cast<float>(MaxOf(team, logits + r * columns, columns));
    team.Once([&] { largest[r] = max; });
  }
};

template <typename T, typename Index>
struct RowSumExpRow {
  float *sum, *picked;
  const T* logits;
  const float* largest;
  const Index* labels;
  int64_t first, columns, classes;
  NVGPU_DEVICE void operator()(const Team& team, int64_t r) const {
    const T* row = logits + r * columns;
    const float max = largest[r], total = static_cast<float>(SumExp<T>(team, row, columns, max));
    const int64_t label = labels[r], at = label - first;
    team.Once([&] {
      sum[r] = total;
      const float elsewhere = label >= 0 && label < classes ? 0.0f : kNotAClass<float>;
      picked[r] = at >= 0 && at < columns ? static_cast<float>(row[at]) - max : elsewhere;
    });
  }
};

template <typename T, typename Index>
struct FinishRow {
  T *softmax, *loss;
  const T* logits;
  const float *largest, *sum, *picked;
  const Index* labels;
  int64_t ignored, columns;
  NVGPU_DEVICE void operator()(const Team& team, int64_t r) const {
    const float max = largest[r], total = sum[r];
    team.Once([&] { loss[r] = Convert<T>(labels[r] == ignored ? 0.0f : std::log(total) - picked[r]); });
    team.Map(columns, softmax + r * columns, Inputs<T, 1>{logits + r * columns},
             [=](int64_t, T value) { return Convert<T>(std::exp(static_cast<float>(value) - max) / total); });
  }
};

template <typename Function>
void For(Type type, Function function) {
  if (!ForFloats(type, function)) throw std::invalid_argument("nvgpu: softmax has no code for this element type");
}
template <typename Function>
void For(Type type, Type label_type, Function function) {
  For(type, [&](auto t) {
    auto run = [&](auto index) { function(t, index); };
    if (!Match<decltype(run), int64_t, int32_t>(label_type, run)) {
      throw std::invalid_argument("nvgpu: labels must be int32 or int64");
    }
  });
}
template <typename T>
T* To(void* pointer) {
  return static_cast<T*>(pointer);
}
template <typename T>
const T* From(const void* pointer) {
  return static_cast<const T*>(pointer);
}

}  // namespace

void Softmax(Stream stream, Type type, bool log, void* out, const void* in, int64_t rows, int64_t columns) {
  For(type, [&](auto t) {
    using T = decltype(t);
    ForEachRow(stream, rows, SoftmaxRow<T>{To<T>(out), From<T>(in), columns, log});
  });
}

void CausalSoftmax(Stream stream, Type type, void* out, const void* in, int64_t rows, int64_t size) {
  For(type, [&](auto t) {
    using T = decltype(t);
    ForEachRow(stream, rows, CausalSoftmaxRow<T>{To<T>(out), From<T>(in), size});
  });
}

void SoftmaxGrad(Stream stream, Type type, bool log, void* in_grad, const void* out, const void* out_grad, int64_t rows,
                 int64_t columns) {
  For(type, [&](auto t) {
    using T = decltype(t);
    ForEachRow(stream, rows, SoftmaxGradRow<T>{To<T>(in_grad), From<T>(out), From<T>(out_grad), columns, log});
  });
}

void CrossEntropy(Stream stream, Type type, void* softmax, void* loss, const void* logits, const void* labels,
                  Type label_type, int64_t ignored, int64_t rows, int64_t columns) {
  For(type, label_type, [&](auto t, auto index) {
    using T = decltype(t);
    using Index = decltype(index);
    ForEachRow(
        stream, rows,
        CrossEntropyRow<T, Index>{To<T>(softmax), To<T>(loss), From<T>(logits), From<Index>(labels), ignored, columns});
  });
}

void CrossEntropyGrad(Stream stream, Type type, void* logits_grad, const void* softmax, const void* labels,
                      Type label_type, const void* loss_grad, int64_t ignored, int64_t first, int64_t rows,
                      int64_t columns, int64_t classes) {
  For(type, label_type, [&](auto t, auto index) {
    using T = decltype(t);
    using Index = decltype(index);
    ForEachRow(stream, rows,
               CrossEntropyGradRow<T, Index>{To<T>(logits_grad), From<T>(softmax), From<T>(loss_grad),
                                             From<Index>(labels), ignored, first, columns, classes});
  });
}

void RowMax(Stream stream, Type type, float* largest, const void* logits, int64_t rows, int64_t columns) {
  For(type, [&](auto t) {
    using T = decltype(t);
    ForEachRow(stream, rows, RowMaxRow<T>{largest, From<T>(logits), columns});
  });
}

void RowSumExp(Stream stream, Type type, float* sum, float* picked, const void* logits, const float* largest,
               const void* labels, Type label_type, int64_t first, int64_t rows, int64_t columns, int64_t classes) {
  For(type, label_type, [&](auto t, auto index) {
    using T = decltype(t);
    using Index = decltype(index);
    ForEachRow(
        stream, rows,
        RowSumExpRow<T, Index>{sum, picked, From<T>(logits), largest, From<Index>(labels), first, columns, classes});
  });
}

void FinishCrossEntropy(Stream stream, Type type, void* softmax, void* loss, const void* logits, const float* largest,
                        const float* sum, const float* picked, const void* labels, Type label_type, int64_t ignored,
                        int64_t rows, int64_t columns) {
  For(type, label_type, [&](auto t, auto index) {
    using T = decltype(t);
    using Index = decltype(index);
    ForEachRow(stream, rows,
               FinishRow<T, Index>{To<T>(softmax), To<T>(loss), From<T>(logits), largest, sum, picked,
                                   From<Index>(labels), ignored, columns});
  });
}

}  // namespace nvgpu::math
