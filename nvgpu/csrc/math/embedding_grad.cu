// The embedding's gradient.
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

// A team adds up one chain for one stretch of columns: the same sum in every run, and no atomics. adds: to what the
// gradient, Out, holds.
template <typename T, typename Out, typename Index>
struct EmbeddingGradTeam {
  Out* weight_grad;
  const T* out_grad;
  const Index* index;
  const int32_t *next, *first;
  int64_t width, stretch, stretches, begin;
  bool adds;

  NVGPU_DEVICE void operator()(const Team& team, int64_t work) const {
    const int64_t i = work / stretches, start = work % stretches * stretch;
    if (!first[i]) return;
    const int64_t row = index[i] - begin, columns = width - start < stretch ? width - start : stretch;
    team.ForEach(columns, [&](int64_t column) {
      Out* to = weight_grad + row * width + start + column;
      Sum<T> sum = 0;
      for (int64_t j = i; j >= 0; j = next[j]) {
        sum += static_cast<Sum<T>>(static_cast<Compute<T>>(out_grad[j * width + start + column]));
      }
      if (adds) sum += static_cast<Sum<T>>(static_cast<Compute<Out>>(*to));
      *to = Convert<Out>(static_cast<Compute<Out>>(sum));
    });
  }
};

// Out: float for what is added to, else T.
template <bool adds>
void Run(Stream stream, Type type, void* weight_grad, const void* out_grad, const EmbeddingIndex& index,
         int32_t* workspace) {
  if (index.width == 0) return;
  const int64_t stretch = 1024, stretches = (index.width + stretch - 1) / stretch;
  int32_t *next = workspace, *starts = workspace + index.count;
  auto run_index = [&](auto j) {
    using Index = decltype(j);
    const auto* indices = static_cast<const Index*>(index.index);
    ForEachRow(stream, index.count,
               ChainRow<Index>{indices, next, starts, index.count, index.size, index.first, index.padding});
    auto run = [&](auto t) {
      using T = decltype(t);
      using Out = std::conditional_t<adds && !std::is_same_v<T, double>, float, T>;
      ForEachRow(
          stream, index.count * stretches,
          EmbeddingGradTeam<T, Out, Index>{static_cast<Out*>(weight_grad), static_cast<const T*>(out_grad), indices,
                                           next, starts, index.width, stretch, stretches, index.first, adds});
    };
    if (!ForFloats(type, run)) throw std::invalid_argument("nvgpu: embedding_grad has no code for this element type");
  };
  if (!Match<decltype(run_index), int64_t, int32_t>(index.type, run_index)) {
    throw std::invalid_argument("nvgpu: an embedding's index must be int32 or int64");
  }
}

}  // namespace

void EmbeddingGrad(Stream stream, Type type, void* weight_grad, const void* out_grad, const EmbeddingIndex& index,
                   int32_t* workspace) {
  runtime::Fill(weight_grad, 0, index.size * index.width * SizeOf(type), stream);
  Run<false>(stream, type, weight_grad, out_grad, index, workspace);
}

void AddEmbeddingGrad(Stream stream, Type type, float* main_grad, const void* out_grad, const EmbeddingIndex& index,
                      int32_t* workspace) {
  Run<true>(stream, type, main_grad, out_grad, index, workspace);
}

}  // namespace nvgpu::math
