// Softmax, and cross-entropy built on it: one team of threads a row.
#include "launch.h"
#include "math.h"

namespace nvgpu::math {
namespace {

template <typename C, typename T>
NVGPU_DEVICE C MaxOf(const Team& team, const T* row, int64_t columns) {
  return team.Reduce(columns, -C(INFINITY), [&](int64_t i) { return static_cast<C>(row[i]); }, Larger());
}
template <typename C, typename T>
NVGPU_DEVICE C SumExp(const Team& team, const T* row, int64_t columns, C max) {
  return static_cast<C>(team.Reduce(
      columns, Sum<T>(0), [&](int64_t i) { return static_cast<Sum<T>>(std::exp(static_cast<C>(row[i]) - max)); },
      Plus()));
}

template <typename T>
struct SoftmaxRow {
  T* out;
  const T* in;
  int64_t columns;
  bool log;
  NVGPU_DEVICE void operator()(const Team& team, int64_t r) const {
    using C = Compute<T>;
    const T* row = in + r * columns;
    T* to = out + r * columns;
    const C max = MaxOf<C>(team, row, columns), sum = SumExp<C>(team, row, columns, max), log_sum = std::log(sum);
    team.ForEach(columns, [&](int64_t i) {
      const C shifted = static_cast<C>(row[i]) - max;
      to[i] = Convert<T>(log ? shifted - log_sum : std::exp(shifted) / sum);
    });
  }
};

template <typename T>
struct SoftmaxGradRow {
  T* in_grad;
  const T *out, *out_grad;
  int64_t columns;
  bool log;
  NVGPU_DEVICE void operator()(const Team& team, int64_t r) const {
    using C = Compute<T>;
    const T *y = out + r * columns, *dy = out_grad + r * columns;
    T* dx = in_grad + r * columns;
    const C sum = static_cast<C>(team.Reduce(
        columns, Sum<T>(0),
        [&](int64_t i) {
          const C g = static_cast<C>(dy[i]);
          return static_cast<Sum<T>>(log ? g : g * static_cast<C>(y[i]));
        },
        Plus()));
    team.ForEach(columns, [&](int64_t i) {
      const C g = static_cast<C>(dy[i]), value = static_cast<C>(y[i]);
      dx[i] = Convert<T>(log ? g - std::exp(value) * sum : (g - sum) * value);
    });
  }
};

template <typename T, typename Index>
struct CrossEntropyRow {
  T *softmax, *loss;
  const T* logits;
  const Index* labels;
  int64_t ignored, columns;
  NVGPU_DEVICE void operator()(const Team& team, int64_t r) const {
    using C = Compute<T>;
    const T* row = logits + r * columns;
    T* to = softmax + r * columns;
    const C max = MaxOf<C>(team, row, columns), sum = SumExp<C>(team, row, columns, max);
    const int64_t label = labels[r];
    const bool counts = label != ignored && label >= 0 && label < columns;
    team.Once([&] {
      if (!counts) loss[r] = Convert<T>(C(0));
    });
    team.ForEach(columns, [&](int64_t i) {  // softmax may be written over the logits
      const C shifted = static_cast<C>(row[i]) - max;
      if (counts && i == label) loss[r] = Convert<T>(std::log(sum) - shifted);
      to[i] = Convert<T>(std::exp(shifted) / sum);
    });
  }
};

template <typename T, typename Index>
struct CrossEntropyGradRow {
  T* logits_grad;
  const T *softmax, *loss_grad;
  const Index* labels;
  int64_t ignored, first, columns;
  NVGPU_DEVICE void operator()(const Team& team, int64_t r) const {
    using C = Compute<T>;
    const int64_t label = labels[r];
    const C scale = label == ignored ? C(0) : static_cast<C>(loss_grad[r]);
    const T* from = softmax + r * columns;
    T* to = logits_grad + r * columns;
    const int64_t at = label - first;
    team.ForEach(columns, [&](int64_t i) {
      to[i] = Convert<T>((static_cast<C>(from[i]) - (i == at ? C(1) : C(0))) * scale);
    });
  }
};

template <typename T>
struct RowMaxRow {
  float* largest;
  const T* logits;
  int64_t columns;
  NVGPU_DEVICE void operator()(const Team& team, int64_t r) const {
    const float max = MaxOf<float>(team, logits + r * columns, columns);
    team.Once([&] { largest[r] = max; });
  }
};

template <typename T, typename Index>
struct RowSumExpRow {
  float *sum, *picked;
  const T* logits;
  const float* largest;
  const Index* labels;
  int64_t first, columns;
  NVGPU_DEVICE void operator()(const Team& team, int64_t r) const {
    const T* row = logits + r * columns;
    const float max = largest[r], total = SumExp<float>(team, row, columns, max);
    const int64_t at = labels[r] - first;
    team.Once([&] {
      sum[r] = total;
      picked[r] = at >= 0 && at < columns ? static_cast<float>(row[at]) - max : 0.0f;
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
    const T* row = logits + r * columns;
    T* to = softmax + r * columns;
    const float max = largest[r], total = sum[r];
    team.Once([&] { loss[r] = Convert<T>(labels[r] == ignored ? 0.0f : std::log(total) - picked[r]); });
    team.ForEach(columns, [&](int64_t i) { to[i] = Convert<T>(std::exp(static_cast<float>(row[i]) - max) / total); });
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
    ForEachRow(stream, rows,
               CrossEntropyRow<T, Index>{To<T>(softmax), To<T>(loss), From<T>(logits), From<Index>(labels), ignored,
                                         columns});
  });
}

void CrossEntropyGrad(Stream stream, Type type, void* logits_grad, const void* softmax, const void* labels,
                      Type label_type, const void* loss_grad, int64_t ignored, int64_t first, int64_t rows,
                      int64_t columns) {
  For(type, label_type, [&](auto t, auto index) {
    using T = decltype(t);
    using Index = decltype(index);
    ForEachRow(stream, rows,
               CrossEntropyGradRow<T, Index>{To<T>(logits_grad), From<T>(softmax), From<T>(loss_grad),
                                             From<Index>(labels), ignored, first, columns});
  });
}

void RowMax(Stream stream, Type type, float* largest, const void* logits, int64_t rows, int64_t columns) {
  For(type, [&](auto t) {
    using T = decltype(t);
    ForEachRow(stream, rows, RowMaxRow<T>{largest, From<T>(logits), columns});
  });
}

void RowSumExp(Stream stream, Type type, float* sum, float* picked, const void* logits, const float* largest,
               const void* labels, Type label_type, int64_t first, int64_t rows, int64_t columns) {
  For(type, label_type, [&](auto t, auto index) {
    using T = decltype(t);
    using Index = decltype(index);
    ForEachRow(stream, rows,
               RowSumExpRow<T, Index>{sum, picked, From<T>(logits), largest, From<Index>(labels), first, columns});
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
