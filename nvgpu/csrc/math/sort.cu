// Order along an axis, and what follows from it: sums and assignments by index that are the same in every run.
#include "sort.h"

#include <utility>

#include "indexing.h"
#include "launch.h"

namespace nvgpu::math {
namespace {

// Where the element `place` of a row of an axis lies; a row is one of outer * inner.
NVGPU_FN inline int64_t PlaceOf(const Axis& axis, int64_t row, int64_t place) {
  return (row / axis.inner * axis.size + place) * axis.inner + row % axis.inner;
}

// Whether a comes before b; NaN is the greatest of all.
template <typename T>
NVGPU_FN bool Before(T a, T b, bool descending) {
  const auto x = static_cast<Compute<T>>(a), y = static_cast<Compute<T>>(b);
  const auto less = descending ? y : x, more = descending ? x : y;
  return less < more || (less == less && more != more);
}

struct CountLoop {
  int64_t* order;
  int64_t size;
  NVGPU_FN void operator()(int64_t i) const { order[i] = i % size; }
};

// Merges sorted stretches of a row in pairs: an element goes behind as many of the other stretch as come before it.
template <typename T>
struct MergeLoop {
  int64_t* to;
  const int64_t* from;
  const T* in;
  Axis axis;
  int64_t stretch;
  bool descending;

  NVGPU_FN T KeyOf(int64_t row, int64_t place) const { return in[PlaceOf(axis, row, from[row * axis.size + place])]; }
  NVGPU_FN void operator()(int64_t n) const {
    const int64_t row = n / axis.size, i = n % axis.size, begin = i / (2 * stretch) * 2 * stretch;
    const int64_t middle = begin + stretch < axis.size ? begin + stretch : axis.size;
    const int64_t end = begin + 2 * stretch < axis.size ? begin + 2 * stretch : axis.size;
    const bool is_left = i < middle;
    const T key = KeyOf(row, i);
    const int64_t other = is_left ? middle : begin;
    int64_t low = other, high = is_left ? end : middle;
    while (low < high) {
      const int64_t half = (low + high) / 2;
      const T found = KeyOf(row, half);
      if (is_left ? Before(found, key, descending) : !Before(key, found, descending)) {
        low = half + 1;
      } else {
        high = half;
      }
    }
    to[row * axis.size + begin + (i - (is_left ? begin : middle)) + (low - other)] = from[n];
  }
};

template <typename T>
struct TakeOrderedLoop {
  T* out;
  int64_t* indices;
  const T* in;
  const int64_t* order;
  Axis axis;
  int64_t count;
  NVGPU_FN void operator()(int64_t n) const {
    const int64_t row = n / count, i = n % count, place = order[row * axis.size + i];
    const int64_t to = PlaceOf(Axis{axis.outer, count, axis.inner}, row, i);
    out[to] = in[PlaceOf(axis, row, place)];
    if (indices != nullptr) indices[to] = place;
  }
};

// Of each run of equal indices, in their order, the first element's thread sums the run, or the last one's assigns.
template <typename T, bool kAdds>
struct ByIndexLoop {
  T* out;
  const T* from;
  const int64_t *index, *order;
  Axis axis;       // of the index, and of what is summed
  int64_t size;    // of the output's axis
  bool is_shared;  // one index for all rows

  NVGPU_FN int64_t Wanted(int64_t row, int64_t i) const {
    const int64_t n = is_shared ? order[i] : order[row * axis.size + i];
    const int64_t found = index[is_shared ? n : PlaceOf(axis, row, n)];
    return found < 0 ? found + size : found;
  }
  NVGPU_FN T At(int64_t row, int64_t i) const {
    return from[PlaceOf(axis, row, is_shared ? order[i] : order[row * axis.size + i])];
  }
  NVGPU_FN void operator()(int64_t n) const {
    const int64_t row = n / axis.size, i = n % axis.size, wanted = Wanted(row, i);
    T* to = out + PlaceOf(Axis{axis.outer, size, axis.inner}, row, wanted);
    if constexpr (kAdds) {
      if (i > 0 && Wanted(row, i - 1) == wanted) return;
      Sum<T> sum = 0;
      for (int64_t j = i; j < axis.size && Wanted(row, j) == wanted; ++j)
        sum += static_cast<Sum<T>>(static_cast<Compute<T>>(At(row, j)));
      *to = Convert<T>(static_cast<Compute<T>>(sum));
    } else {
      if (i + 1 == axis.size || Wanted(row, i + 1) != wanted) *to = At(row, i);
    }
  }
};

// Sums in log2(size) steps, each of which adds what lies a distance before (Hillis and Steele, 1986).
template <typename T>
struct CumSumLoads {
  Compute<T>* to;
  const T* in;
  Axis axis;
  bool is_reverse;
  NVGPU_FN int64_t Mirrored(int64_t i) const {
    const int64_t place = i / axis.inner % axis.size;
    return is_reverse ? i + (axis.size - 1 - 2 * place) * axis.inner : i;
  }
  NVGPU_FN void operator()(int64_t i) const { to[i] = static_cast<Compute<T>>(in[Mirrored(i)]); }
};
template <typename C>
struct CumSumStep {
  C* to;
  const C* from;
  Axis axis;
  int64_t distance;
  NVGPU_FN void operator()(int64_t i) const {
    const bool has = i / axis.inner % axis.size >= distance;
    to[i] = has ? from[i - distance * axis.inner] + from[i] : from[i];
  }
};
template <typename T>
struct CumSumStores {
  T* out;
  const Compute<T>* from;
  CumSumLoads<T> loads;
  bool is_exclusive;
  NVGPU_FN void operator()(int64_t i) const {
    const bool is_first = i / loads.axis.inner % loads.axis.size == 0;
    const Compute<T> sum = !is_exclusive ? from[i] : is_first ? Compute<T>(0) : from[i - loads.axis.inner];
    out[loads.Mirrored(i)] = Convert<T>(sum);
  }
};

}  // namespace

void ArgSort(Stream stream, Type type, bool descending, int64_t* order, const void* in, const Axis& axis,
             int64_t* workspace) {
  int64_t passes = 0;
  for (int64_t stretch = 1; stretch < axis.size; stretch *= 2) ++passes;
  int64_t *from = passes % 2 ? workspace : order, *to = passes % 2 ? order : workspace;
  ForEach(stream, axis.Count(), CountLoop{from, axis.size});
  auto run = [&](auto t) {
    using T = decltype(t);
    for (int64_t stretch = 1; stretch < axis.size; stretch *= 2) {
      ForEach(stream, axis.Count(), MergeLoop<T>{to, from, static_cast<const T*>(in), axis, stretch, descending});
      std::swap(from, to);
    }
  };
  if (!ForAll(type, run)) NoCode("a sort");
}

void TakeOrdered(Stream stream, size_t width, void* out, int64_t* indices, const void* in, const int64_t* order,
                 const Axis& axis, int64_t count) {
  auto run = [&](auto t) {
    using T = decltype(t);
    ForEach(stream, axis.outer * axis.inner * count,
            TakeOrderedLoop<T>{static_cast<T*>(out), indices, static_cast<const T*>(in), order, axis, count});
  };
  switch (width) {
    case 1: return run(uint8_t());
    case 2: return run(uint16_t());
    case 4: return run(uint32_t());
    case 8: return run(uint64_t());
    default: NoCode("a sort");
  }
}

template <bool kAdds>
void ByIndex(Stream stream, Type type, void* out, const void* from, const int64_t* index, const int64_t* order,
             const Axis& axis, int64_t size, bool is_shared) {
  auto run = [&](auto t) {
    using T = decltype(t);
    ForEach(
        stream, axis.Count(),
        ByIndexLoop<T, kAdds>{static_cast<T*>(out), static_cast<const T*>(from), index, order, axis, size, is_shared});
  };
  if (!ForAll(type, run)) NoCode("an assignment by index");
}

void SumByIndex(Stream stream, Type type, void* out, const void* from, const int64_t* index, const int64_t* order,
                const Axis& axis, int64_t size, bool is_shared) {
  ByIndex<true>(stream, type, out, from, index, order, axis, size, is_shared);
}

void AssignByIndex(Stream stream, Type type, void* out, const void* from, const int64_t* index, const int64_t* order,
                   const Axis& axis, int64_t size, bool is_shared) {
  ByIndex<false>(stream, type, out, from, index, order, axis, size, is_shared);
}

void CumSum(Stream stream, Type type, void* out, const void* in, const Axis& axis, bool is_exclusive, bool is_reverse,
            void* workspace) {
  auto run = [&](auto t) {
    using T = decltype(t);
    using C = Compute<T>;
    C *from = static_cast<C*>(workspace), *to = from + axis.Count();
    const CumSumLoads<T> loads{from, static_cast<const T*>(in), axis, is_reverse};
    ForEach(stream, axis.Count(), loads);
    for (int64_t distance = 1; distance < axis.size; distance *= 2) {
      ForEach(stream, axis.Count(), CumSumStep<C>{to, from, axis, distance});
      std::swap(from, to);
    }
    ForEach(stream, axis.Count(), CumSumStores<T>{static_cast<T*>(out), from, loads, is_exclusive});
  };
  if (!ForAll(type, run)) NoCode("cumsum");
}

}  // namespace nvgpu::math
