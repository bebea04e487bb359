// Reductions over any axes.
//
// The reduced elements of one output are split into `parts`, so that few outputs still fill a GPU; a second loop
// combines the parts, always in the same order, so that the result is the same in every run. Where the innermost axis
// is reduced, the threads of a team read neighbouring elements of one output; where it is kept, neighbouring threads
// have neighbouring outputs.
#include "indexing.h"
#include "launch.h"
#include "math.h"

namespace nvgpu::math {
namespace {

struct Plan {
  Indexer<1> kept, taken;  // where the first element of an output is, and the others from there
  bool inner_taken = true;
  int64_t parts = 1;

  Plan(const Dims& dims, const std::vector<bool>& reduced) {
    const Dims strides = DenseStrides(dims);
    Dims of_kept[2], of_taken[2];
    for (size_t axis = 0; axis < dims.size(); ++axis) {
      auto& side = reduced[axis] ? of_taken : of_kept;
      side[0].push_back(dims[axis]);
      side[1].push_back(strides[axis]);
      if (dims[axis] > 1) inner_taken = reduced[axis];
    }
    kept = Indexer<1>(of_kept[0], {of_kept[1]});
    taken = Indexer<1>(of_taken[0], {of_taken[1]});
    const int64_t teams = inner_taken ? kept.count : (kept.count + 255) / 256;
    const int64_t shortest = inner_taken ? 8192 : 16, most = inner_taken ? kParallel : 16 * kParallel;
    if (teams > 0) parts = std::min(most / teams, taken.count / shortest);
    parts = std::max<int64_t>(parts, 1);
  }
  // Of a part, the last but shorter: full packs, so that each part is as Aligned as the first.
  int64_t Length() const { return ((taken.count + parts - 1) / parts + 15) / 16 * 16; }
  bool InARow() const { return taken.rank == 0 || (taken.rank == 1 && taken.strides[0][0] == 1); }
};

// What each kind starts from, makes of an element, and combines with.
template <Reduction kind, typename S>
struct Rule {
  static constexpr bool kAdds = kind == Reduction::kSum || kind == Reduction::kMean || kind == Reduction::kSumOfSquares;
  NVGPU_FN static S Identity() {
    if constexpr (kind == Reduction::kMax || kind == Reduction::kMin) {
      const bool max = kind == Reduction::kMax;
      if constexpr (std::is_integral_v<S>) {
        return max ? INT64_MIN : INT64_MAX;
      } else {
        return max ? -S(INFINITY) : S(INFINITY);
      }
    }
    return kind == Reduction::kProduct || kind == Reduction::kAll ? S(1) : S(0);
  }
  NVGPU_FN static S Map(S value) {
    if constexpr (kind == Reduction::kSumOfSquares) return value * value;
    if constexpr (kind == Reduction::kAll || kind == Reduction::kAny) return S(value != S(0));
    return value;
  }
  NVGPU_FN S operator()(S a, S b) const {
    if constexpr (kAdds) return a + b;
    if constexpr (kind == Reduction::kProduct) return a * b;
    if constexpr (kind == Reduction::kMin || kind == Reduction::kAll) return Smaller()(a, b);
    return Larger()(a, b);
  }
};

template <typename R, typename T, typename S>
struct PartOf {  // the elements of one part of one output
  const T* in;
  Indexer<1> kept, taken;
  int64_t outputs, length;
  NVGPU_FN int64_t First(int64_t work) const { return work / outputs * length; }
  NVGPU_FN int64_t Count(int64_t work) const {
    const int64_t rest = taken.count - First(work);
    return rest < 0 ? 0 : (rest < length ? rest : length);
  }
  NVGPU_FN int64_t Base(int64_t work) const {
    int64_t at[1];
    kept.At(work % outputs, at);
    return at[0];
  }
  NVGPU_FN S Value(int64_t base, int64_t i) const {
    int64_t at[1];
    taken.At(i, at);
    return R::Map(static_cast<S>(in[base + at[0]]));
  }
};

template <typename R, typename T, typename S>
struct TeamLoop {
  PartOf<R, T, S> part;
  S* sums;
  bool in_a_row;
  NVGPU_DEVICE void operator()(const Team& team, int64_t work) const {
    const int64_t base = part.Base(work), first = part.First(work), count = part.Count(work);
    S sum;
    if (in_a_row) {
      const auto add = [](S& sum, const auto& values) {
        for (T value : values) sum = R()(sum, R::Map(static_cast<S>(value)));
      };
      sum = team.Reduce(count, Inputs<T, 1>{part.in + base + first}, R::Identity(), add, R());
    } else {
      sum = team.Reduce(count, R::Identity(), [&](int64_t i) { return part.Value(base, first + i); }, R());
    }
    team.Once([&] { sums[work] = sum; });
  }
};

template <typename R, typename T, typename S>
struct ThreadLoop {
  PartOf<R, T, S> part;
  S* sums;
  NVGPU_FN void operator()(int64_t work) const {
    const int64_t base = part.Base(work), first = part.First(work), count = part.Count(work);
    S sum = R::Identity();
    for (int64_t i = 0; i < count; ++i) sum = R()(sum, part.Value(base, first + i));
    sums[work] = sum;
  }
};

// Combines the parts of each output: a thread an output where these are many, else a team.
template <typename R, typename S, typename Out>
struct Finish {
  const S* sums;
  Out* out;
  int64_t outputs, parts;
  S divisor;
  NVGPU_FN S Part(int64_t i, int64_t part) const { return sums[part * outputs + i]; }
  NVGPU_FN void Write(int64_t i, S sum) const { out[i] = Convert<Out>(static_cast<Compute<Out>>(sum / divisor)); }

  NVGPU_FN void operator()(int64_t i) const {
    S sum = Part(i, 0);
    for (int64_t part = 1; part < parts; ++part) sum = R()(sum, Part(i, part));
    Write(i, sum);
  }
  NVGPU_DEVICE void operator()(const Team& team, int64_t i) const {
    const S sum = team.Reduce(parts, R::Identity(), [&](int64_t part) { return Part(i, part); }, R());
    team.Once([&] { Write(i, sum); });
  }
};

template <Reduction kind, typename T, typename Out>
void Run(Stream stream, void* out, const void* in, const Plan& plan, void* workspace) {
  using S = Sum<T>;
  using R = Rule<kind, S>;
  const int64_t outputs = plan.kept.count, work = outputs * plan.parts;
  S* sums = static_cast<S*>(workspace);
  const PartOf<R, T, S> part{static_cast<const T*>(in), plan.kept, plan.taken, outputs, plan.Length()};
  if (plan.inner_taken) {
    ForEachRow(stream, work, TeamLoop<R, T, S>{part, sums, plan.InARow()});
  } else {
    ForEach(stream, work, ThreadLoop<R, T, S>{part, sums});
  }
  const S divisor = kind == Reduction::kMean ? static_cast<S>(plan.taken.count) : S(1);
  const Finish<R, S, Out> finish{sums, static_cast<Out*>(out), outputs, plan.parts, divisor};
  if (outputs < plan.parts) {
    ForEachRow(stream, outputs, finish);
  } else {
    ForEach(stream, outputs, finish);
  }
}

// The sum of squares of one of several arrays: its parts, then these together, exactly as `Run` adds them.
template <typename T>
struct SquaresLoop {
  using S = Sum<T>;
  const T* in;
  S* sums;
  int64_t count, length;
  NVGPU_DEVICE void operator()(const Team& team, int64_t part) const {
    using R = Rule<Reduction::kSumOfSquares, S>;
    const auto add = [](S& sum, const auto& values) {
      for (T value : values) sum = R()(sum, R::Map(static_cast<S>(value)));
    };
    const int64_t first = part * length, rest = count - first, taken = rest < 0 ? 0 : (rest < length ? rest : length);
    const S sum = team.Reduce(taken, Inputs<T, 1>{in + first}, R::Identity(), add, R());
    team.Once([&] { sums[part] = sum; });
  }
};
template <typename T>
struct SquaresFinish {
  const Sum<T>* sums;
  T* out;
  int64_t parts;
  NVGPU_DEVICE void operator()(const Team& team, int64_t) const {
    using R = Rule<Reduction::kSumOfSquares, Sum<T>>;
    const Sum<T> sum = team.Reduce(parts, R::Identity(), [&](int64_t part) { return sums[part]; }, R());
    team.Once([&] { *out = Convert<T>(static_cast<Compute<T>>(sum)); });
  }
};

template <typename T>
struct ArgLoop {
  const T* in;
  void* out;
  bool largest, narrow;
  int64_t size, inner;

  struct Best {
    Compute<T> value;
    int64_t index;
  };
  struct Better {
    bool largest;
    NVGPU_FN Best operator()(const Best& a, const Best& b) const {
      if (b.index < 0) return a;
      if (a.index < 0) return b;
      const bool a_wins = largest ? a.value > b.value : a.value < b.value;
      const bool b_wins = largest ? b.value > a.value : b.value < a.value;
      return a_wins || (!b_wins && a.index < b.index) ? a : b;
    }
  };
  NVGPU_DEVICE void operator()(const Team& team, int64_t row) const {
    const T* first = in + row / inner * size * inner + row % inner;
    const int64_t step = inner;
    const Best best = team.Reduce(
        size, Best{0, -1}, [&](int64_t i) { return Best{static_cast<Compute<T>>(first[i * step]), i}; },
        Better{largest});
    team.Once([&] {
      if (narrow) {
        static_cast<int32_t*>(out)[row] = static_cast<int32_t>(best.index);
      } else {
        static_cast<int64_t*>(out)[row] = best.index;
      }
    });
  }
};

}  // namespace

size_t ReduceWorkspace(const Dims& dims, const std::vector<bool>& reduced) {
  const Plan plan(dims, reduced);
  return sizeof(double) * plan.kept.count * plan.parts;
}

void Reduce(Stream stream, Reduction reduction, Type type, void* out, const void* in, const Dims& dims,
            const std::vector<bool>& reduced, void* workspace) {
  const Plan plan(dims, reduced);
  bool found = false;
  switch (reduction) {
#define NVGPU_REDUCTION(kind, types, Out)                             \
  case Reduction::kind:                                               \
    found = types(type, [&](auto t) {                                 \
      using T = decltype(t);                                          \
      Run<Reduction::kind, T, Out>(stream, out, in, plan, workspace); \
    });                                                               \
    break;
    NVGPU_REDUCTION(kSum, ForNumbers, T)
    NVGPU_REDUCTION(kMean, ForFloats, T)
    NVGPU_REDUCTION(kMax, ForNumbers, T)
    NVGPU_REDUCTION(kMin, ForNumbers, T)
    NVGPU_REDUCTION(kProduct, ForNumbers, T)
    NVGPU_REDUCTION(kAll, ForAll, bool)
    NVGPU_REDUCTION(kAny, ForAll, bool)
    NVGPU_REDUCTION(kSumOfSquares, ForFloats, Compute<T>)
#undef NVGPU_REDUCTION
  }
  if (!found) NoCode("a reduction");
}

int64_t SumsOfSquaresWorkspace(const std::vector<int64_t>& counts) {
  int64_t parts = 0;
  for (int64_t count : counts) parts += Plan({count}, {true}).parts;
  return sizeof(double) * parts;
}

void SumsOfSquares(Stream stream, Type type, void* out, const std::vector<const void*>& in,
                   const std::vector<int64_t>& counts, void* workspace) {
  auto run = [&](auto t) {
    using T = decltype(t);
    auto* sums = static_cast<Sum<T>*>(workspace);
    std::vector<Part<SquaresLoop<T>>> loops;
    std::vector<Part<SquaresFinish<T>>> finishes;
    for (size_t n = 0; n < in.size(); ++n) {
      const Plan plan({counts[n]}, {true});
      loops.push_back({{static_cast<const T*>(in[n]), sums, counts[n], plan.Length()}, plan.parts});
      finishes.push_back({{sums, static_cast<T*>(out) + n, plan.parts}, 1});
      sums += plan.parts;
    }
    ForEachRow(stream, loops);
    ForEachRow(stream, finishes);
  };
  if (!ForFloats(type, run)) NoCode("sums of squares");
}

void ArgExtreme(Stream stream, bool largest, Type type, void* out, Type out_type, const void* in, int64_t outer,
                int64_t size, int64_t inner) {
  auto run = [&](auto t) {
    using T = decltype(t);
    ForEachRow(stream, outer * inner,
               ArgLoop<T>{static_cast<const T*>(in), out, largest, out_type == Type::kInt32, size, inner});
  };
  if (!ForNumbers(type, run)) NoCode("argmax");
}

}  // namespace nvgpu::math
