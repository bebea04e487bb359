// Loops that move elements without looking at them.
#include "indexing.h"
#include "launch.h"
#include "math.h"

namespace nvgpu::math {
namespace {

struct alignas(16) Wide {
  uint64_t words[2];
};

template <typename Function>
void ForWidth(size_t width, Function function) {
  switch (width) {
    case 1: return function(uint8_t());
    case 2: return function(uint16_t());
    case 4: return function(uint32_t());
    case 8: return function(uint64_t());
    case 16: return function(Wide());
    default: NoCode("a move");
  }
}

template <typename T>
struct StridedCopyLoop {
  T* to;
  const T* from;
  Indexer<2> indexer;
  NVGPU_FN void operator()(int64_t i) const {
    int64_t at[2];
    indexer.At(i, at);
    to[at[0]] = from[at[1]];
  }
};

template <typename T>
struct FillLoop {
  T* to;
  T value;
  static constexpr int kWidth = kPack<T>;
  struct Nothing {};
  template <int N>
  NVGPU_FN Nothing Load(int64_t) const {
    return {};
  }
  template <int N>
  NVGPU_FN void Store(int64_t i, Nothing) const {
    Pack<T, N> pack;
    for (int n = 0; n < N; ++n) pack.at[n] = value;
    StorePack(to + i, pack);
  }
};

template <typename T>
struct WhereLoop {
  T* out;
  const bool* condition;
  const T *x, *y;
  Indexer<3> indexer;
  NVGPU_FN void operator()(int64_t i) const {
    int64_t at[3];
    indexer.At(i, at);
    out[i] = condition[at[0]] ? x[at[1]] : y[at[2]];
  }
};

template <typename T>
struct TriangleLoop {
  T* out;
  const T* in;
  int64_t rows, columns, diagonal;
  bool lower;
  NVGPU_FN void operator()(int64_t i) const {
    const int64_t column = i % columns, row = i / columns % rows;
    const bool keep = lower ? column - row <= diagonal : column - row >= diagonal;
    out[i] = keep ? in[i] : T();
  }
};

template <typename T, typename Index>
struct GatherLoop {
  T* out;
  const T* in;
  const Index* index;
  int64_t size, count, inner, first, padding;
  NVGPU_FN void operator()(int64_t i) const {
    const int64_t row = i / inner, k = i - row * inner, outer = row / count;
    const int64_t wanted = index[row - outer * count], j = wanted - first;
    const bool inside = j >= 0 && j < size && (padding < 0 || wanted != padding);
    out[i] = inside ? in[(outer * size + j) * inner + k] : T();
  }
};

constexpr int kMaxIndices = 8;

template <typename T>
struct TakeAdvancedLoop {
  T* out;
  const T* in;
  Indexer<2> indexer;
  AdvancedIndex indices[kMaxIndices];
  int count;
  NVGPU_FN void operator()(int64_t i) const {
    int64_t at[2];
    indexer.At(i, at);
    int64_t from = at[0];
    for (int n = 0; n < count; ++n) {
      const int64_t index = static_cast<const int64_t*>(indices[n].values)[at[1]];
      from += (index < 0 ? index + indices[n].size : index) * indices[n].stride;
    }
    out[i] = in[from];
  }
};

template <typename Index>
struct OneHotLoop {
  float* out;
  const Index* index;
  int64_t classes;
  NVGPU_FN void operator()(int64_t i) const { out[i] = index[i / classes] == i % classes ? 1.0f : 0.0f; }
};

template <typename T>
struct ArangeLoop {
  T* out;
  Compute<T> start, step;
  NVGPU_FN void operator()(int64_t i) const { out[i] = Convert<T>(start + static_cast<Compute<T>>(i) * step); }
};

template <typename Function>
void ForIndex(Type type, Function function) {
  if (!Match<Function, int64_t, int32_t>(type, function)) NoCode("an index");
}

}  // namespace

void StridedCopy(Stream stream, size_t width, void* to, const Dims& to_strides, const void* from,
                 const Dims& from_strides, const Dims& dims) {
  Indexer<2> indexer(dims, {to_strides, from_strides});
  // Elements in a row are moved several at a time, up to 16 bytes.
  const uintptr_t places = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
  for (size_t wide = sizeof(Wide); wide > width; wide /= 2) {
    if (places % wide == 0 && indexer.Group(wide / width)) width = wide;
  }
  ForWidth(width, [&](auto t) {
    using T = decltype(t);
    ForEach(stream, indexer.count, StridedCopyLoop<T>{static_cast<T*>(to), static_cast<const T*>(from), indexer});
  });
}

void FillWith(Stream stream, size_t width, void* to, const void* element, int64_t count) {
  ForWidth(width, [&](auto value) {
    using T = decltype(value);
    memcpy(&value, element, sizeof(T));
    ForEachPack(stream, count, Aligned(static_cast<T*>(to)), FillLoop<T>{static_cast<T*>(to), value});
  });
}

void Where(Stream stream, size_t width, void* out, const Dims& dims, const Input& condition, const Input& x,
           const Input& y) {
  ForWidth(width, [&](auto t) {
    using T = decltype(t);
    WhereLoop<T> loop{static_cast<T*>(out), static_cast<const bool*>(condition.data), static_cast<const T*>(x.data),
                      static_cast<const T*>(y.data), Indexer<3>(dims, {condition.strides, x.strides, y.strides})};
    ForEach(stream, loop.indexer.count, loop);
  });
}

void Triangle(Stream stream, size_t width, void* out, const void* in, int64_t batch, int64_t rows, int64_t columns,
              int64_t diagonal, bool lower) {
  ForWidth(width, [&](auto t) {
    using T = decltype(t);
    ForEach(stream, batch * rows * columns,
            TriangleLoop<T>{static_cast<T*>(out), static_cast<const T*>(in), rows, columns, diagonal, lower});
  });
}

void Gather(Stream stream, size_t width, void* out, const void* in, const void* index, Type index_type, int64_t outer,
            int64_t size, int64_t count, int64_t inner, int64_t first, int64_t padding) {
  if (const int64_t per_wide = sizeof(Wide) / width; inner % per_wide == 0 && Aligned(out, in)) {
    inner /= per_wide;  // rows of wide elements
    width = sizeof(Wide);
  }
  ForWidth(width, [&](auto t) {
    using T = decltype(t);
    ForIndex(index_type, [&](auto j) {
      using Index = decltype(j);
      ForEach(stream, outer * count * inner,
              GatherLoop<T, Index>{static_cast<T*>(out), static_cast<const T*>(in), static_cast<const Index*>(index),
                                   size, count, inner, first, padding});
    });
  });
}

void TakeAdvanced(Stream stream, size_t width, void* out, const Dims& dims, const Input& in,
                  const std::vector<AdvancedIndex>& indices, const Dims& index_strides) {
  if (indices.size() > kMaxIndices) throw std::invalid_argument("nvgpu: more than 8 index tensors");
  ForWidth(width, [&](auto t) {
    using T = decltype(t);
    TakeAdvancedLoop<T> loop{static_cast<T*>(out),
                             static_cast<const T*>(in.data),
                             Indexer<2>(dims, {in.strides, index_strides}),
                             {},
                             static_cast<int>(indices.size())};
    std::copy(indices.begin(), indices.end(), loop.indices);
    ForEach(stream, loop.indexer.count, loop);
  });
}

void OneHot(Stream stream, float* out, const void* index, Type index_type, int64_t count, int64_t classes) {
  ForIndex(index_type, [&](auto j) {
    using Index = decltype(j);
    ForEach(stream, count * classes, OneHotLoop<Index>{out, static_cast<const Index*>(index), classes});
  });
}

void Arange(Stream stream, Type type, void* out, Number start, Number step, int64_t count) {
  auto run = [&](auto t) {
    using T = decltype(t);
    if constexpr (std::is_integral_v<T>) {
      ForEach(stream, count, ArangeLoop<T>{static_cast<T*>(out), start.integer, step.integer});
    } else {
      using C = Compute<T>;
      ForEach(stream, count,
              ArangeLoop<T>{static_cast<T*>(out), static_cast<C>(start.real), static_cast<C>(step.real)});
    }
  };
  if (!ForNumbers(type, run)) NoCode("arange");
}

}  // namespace nvgpu::math
