// Attention of matrix products, with the scores of a stretch of queries at a time between them.
//
// The heads that share a key-value head have one batched product each, over all key-value heads; a causal mask leaves
// out the keys that no query of a stretch sees. Gradients of k and v are added up in float32.
#include "launch.h"
#include "math.h"

namespace nvgpu::math {
namespace {

// Which keys a query sees.
struct Mask {
  bool causal;
  int64_t shift;         // the last key that query 0 sees under a causal mask
  const int32_t* bound;  // of the sample's head
  int64_t bounds;

  NVGPU_FN bool Sees(int64_t query, int64_t key) const {
    if (causal && key > query + shift) return false;
    if (bounds == 0) return true;
    const int32_t* at = bound + key * bounds;
    if (bounds == 1) return query < at[0];
    if (bounds == 2) return causal ? query < at[0] || query >= at[1] : query < at[0] && query >= at[1];
    return (query < at[0] || query >= at[1]) && (query < at[2] || query >= at[3]);
  }
};

// The stretch of queries from `first` on of the heads `group`, `group` + heads / kv_heads..., of one sample.
struct Stretch {
  Attention attention;
  int64_t sample, group, first, queries, keys;  // keys: as many as one of the queries may see

  NVGPU_FN int64_t Groups() const { return attention.heads / attention.kv_heads; }
  NVGPU_FN int64_t Head(int64_t row) const { return row / queries * Groups() + group; }
  NVGPU_FN int64_t Query(int64_t row) const { return first + row % queries; }
  NVGPU_FN int64_t LseAt(int64_t row) const {
    return (sample * attention.heads + Head(row)) * attention.queries + Query(row);
  }
  NVGPU_FN Mask MaskOf(int64_t row) const {
    const Attention& a = attention;
    const int64_t head = a.bound_heads == 1 ? 0 : Head(row) * a.bound_heads / a.heads;
    return {a.causal, a.keys - a.queries, a.bound + (sample * a.bound_heads + head) * a.keys * a.bounds, a.bounds};
  }
  // Where the stretch begins in a tensor [batch, queries, heads, width], and in one [batch, keys, kv_heads, width].
  int64_t OfQueries(int64_t width) const {
    return ((sample * attention.queries + first) * attention.heads + group) * width;
  }
  int64_t OfKeys(int64_t width) const { return sample * attention.keys * attention.kv_heads * width; }
};

// Scores to probabilities, and their logarithmic sum.
template <typename T>
struct ProbabilitiesRow {
  Stretch stretch;
  const float* scores;
  T* probabilities;
  float* lse;
  NVGPU_DEVICE void operator()(const Team& team, int64_t r) const {
    const Mask mask = stretch.MaskOf(r);
    const int64_t query = stretch.Query(r), keys = stretch.keys;
    const float *row = scores + r * keys, scale = stretch.attention.scale;
    const auto score = [=](int64_t key) { return mask.Sees(query, key) ? row[key] * scale : -INFINITY; };
    const float max = team.Reduce(keys, -float(INFINITY), score, Larger());
    const float base = max == -INFINITY ? 0.0f : max;
    const auto exp = [=](int64_t key) { return static_cast<Sum<float>>(std::exp(score(key) - base)); };
    const Sum<float> sum = team.Reduce(keys, Sum<float>(0), exp, Plus());
    // of a query that sees nothing infinite, so that its probabilities are 0
    const float log_sum = sum == 0 ? float(INFINITY) : base + std::log(static_cast<float>(sum));
    team.Once([&] { lse[stretch.LseAt(r)] = log_sum; });
    T* out = probabilities + r * keys;
    team.ForEach(keys, [=](int64_t key) { out[key] = Convert<T>(std::exp(score(key) - log_sum)); });
  }
};

// Probabilities again, and the scores' gradient from theirs: scale * p * (p_grad - sum of p * p_grad).
template <typename T>
struct ScoresGradRow {
  Stretch stretch;
  const float *scores, *probabilities_grad, *lse;
  T *probabilities, *scores_grad;
  NVGPU_DEVICE void operator()(const Team& team, int64_t r) const {
    const Mask mask = stretch.MaskOf(r);
    const int64_t query = stretch.Query(r), keys = stretch.keys;
    const float *row = scores + r * keys, *grad = probabilities_grad + r * keys;
    const float scale = stretch.attention.scale, log_sum = lse[stretch.LseAt(r)];
    const auto probability = [=](int64_t key) {
      return mask.Sees(query, key) ? std::exp(row[key] * scale - log_sum) : 0.0f;
    };
    const auto product = [=](int64_t key) { return static_cast<Sum<float>>(probability(key) * grad[key]); };
    const float sum = static_cast<float>(team.Reduce(keys, Sum<float>(0), product, Plus()));
    T *out = probabilities + r * keys, *out_grad = scores_grad + r * keys;
    team.ForEach(keys, [=](int64_t key) {
      const float p = probability(key);
      out[key] = Convert<T>(p);
      out_grad[key] = Convert<T>(scale * p * (grad[key] - sum));
    });
  }
};

constexpr int64_t kAligned = 256;  // bytes, of what lies in a workspace
int64_t RoundUp(int64_t bytes) { return (bytes + kAligned - 1) / kAligned * kAligned; }

#ifdef __CUDACC__
constexpr int64_t kScoreBytes = int64_t(256) << 20;
#else
constexpr int64_t kScoreBytes = int64_t(64) << 10;  // so that several stretches are tested here
#endif
int64_t QueriesOfAStretch(const Attention& a) {
  const int64_t most = kScoreBytes / (4 * a.kv_heads * std::max<int64_t>(a.keys, 1));
  return std::max<int64_t>(1, std::min(a.queries, most > 16 ? most / 16 * 16 : most));
}
int64_t ScoresOfAStretch(const Attention& a) { return a.kv_heads * QueriesOfAStretch(a) * a.keys; }

template <typename Function>
void ForEachStretch(const Attention& a, int64_t sample, Function function) {
  const int64_t step = QueriesOfAStretch(a);
  for (int64_t group = 0; group < a.heads / a.kv_heads; ++group) {
    for (int64_t first = 0; first < a.queries; first += step) {
      const int64_t queries = std::min(step, a.queries - first);
      const int64_t last = first + queries + a.keys - a.queries;
      const int64_t keys = a.causal ? std::min(a.keys, std::max<int64_t>(last, 1)) : a.keys;
      function(Stretch{a, sample, group, first, queries, keys});
    }
  }
}

// The matrices of products over all key-value heads, in a tensor that has a row a query and in one that has a row a
// key.
struct Side {
  int64_t row, stride;
};
Side QuerySide(const Stretch& s, int64_t width) { return {s.attention.heads * width, s.Groups() * width}; }
Side KeySide(const Stretch& s, int64_t width) { return {s.attention.kv_heads * width, width}; }
Side ScoreSide(const Stretch& s) { return {s.keys, s.queries * s.keys}; }

void Multiply(Stream stream, const Stretch& s, const void* a, Side side_a, bool transpose_a, const void* b, Side side_b,
              bool transpose_b, void* c, Side side_c, int64_t m, int64_t n, int64_t k, bool wide = false,
              bool adds = false) {
  Gemm gemm{a, b, c, transpose_a, transpose_b, m, n, k};
  gemm.batch = s.attention.kv_heads;
  gemm.stride_a = side_a.stride, gemm.stride_b = side_b.stride, gemm.stride_c = side_c.stride;
  gemm.row_a = side_a.row, gemm.row_b = side_b.row, gemm.row_c = side_c.row;
  gemm.wide_c = wide, gemm.adds = adds;
  RunGemm(stream, s.attention.type, gemm);
}
// Of queries and keys, or of the output's gradient and the values.
void Scores(Stream stream, const Stretch& s, const void* queries, const void* keys, int64_t width, float* scores) {
  Multiply(stream, s, queries, QuerySide(s, width), false, keys, KeySide(s, width), true, scores, ScoreSide(s),
           s.queries, s.keys, width, true);
}
void SumOverKeys(Stream stream, const Stretch& s, const void* weights, const void* keys, int64_t width, void* out) {
  Multiply(stream, s, weights, ScoreSide(s), false, keys, KeySide(s, width), false, out, QuerySide(s, width), s.queries,
           width, s.keys);
}
void AddOverQueries(Stream stream, const Stretch& s, const void* weights, const void* queries, int64_t width,
                    float* sums) {
  Multiply(stream, s, weights, ScoreSide(s), true, queries, QuerySide(s, width), false, sums, KeySide(s, width), s.keys,
           width, s.queries, true, true);
}

template <typename Function>
void For(Type type, Function function) {
  if (!Match<Function, float, bfloat16, half>(type, function)) {
    throw std::invalid_argument("nvgpu: attention has no code for this element type");
  }
}

}  // namespace

size_t AttentionWorkspace(const Attention& a) {
  return RoundUp(4 * ScoresOfAStretch(a)) + RoundUp(SizeOf(a.type) * ScoresOfAStretch(a));
}

void RunAttention(Stream stream, const Attention& a, void* out, float* lse, void* workspace) {
  For(a.type, [&](auto t) {
    using T = decltype(t);
    auto* scores = static_cast<float*>(workspace);
    T* probabilities = reinterpret_cast<T*>(static_cast<char*>(workspace) + RoundUp(4 * ScoresOfAStretch(a)));
    const T *q = static_cast<const T*>(a.q), *k = static_cast<const T*>(a.k), *v = static_cast<const T*>(a.v);
    for (int64_t sample = 0; sample < a.batch; ++sample) {
      ForEachStretch(a, sample, [&](const Stretch& s) {
        Scores(stream, s, q + s.OfQueries(a.width), k + s.OfKeys(a.width), a.width, scores);
        ForEachRow(stream, a.kv_heads * s.queries, ProbabilitiesRow<T>{s, scores, probabilities, lse});
        SumOverKeys(stream, s, probabilities, v + s.OfKeys(a.v_width), a.v_width,
                    static_cast<T*>(out) + s.OfQueries(a.v_width));
      });
    }
  });
}

size_t AttentionGradWorkspace(const Attention& a) {
  return 2 * AttentionWorkspace(a) + RoundUp(4 * a.keys * a.kv_heads * (a.width + a.v_width));
}

void RunAttentionGrad(Stream stream, const Attention& a, const float* lse, const void* out_grad, void* q_grad,
                      void* k_grad, void* v_grad, void* workspace) {
  For(a.type, [&](auto t) {
    using T = decltype(t);
    char* next = static_cast<char*>(workspace);
    const auto take = [&](int64_t bytes) {
      char* taken = next;
      next += RoundUp(bytes);
      return taken;
    };
    const int64_t size = ScoresOfAStretch(a), of_k = a.keys * a.kv_heads * a.width,
                  of_v = a.keys * a.kv_heads * a.v_width;
    auto* scores = reinterpret_cast<float*>(take(4 * size));
    auto* probabilities_grad = reinterpret_cast<float*>(take(4 * size));
    T* probabilities = reinterpret_cast<T*>(take(sizeof(T) * size));
    T* scores_grad = reinterpret_cast<T*>(take(sizeof(T) * size));
    auto* k_sums = reinterpret_cast<float*>(take(4 * (of_k + of_v)));
    float* v_sums = k_sums + of_k;
    const T *q = static_cast<const T*>(a.q), *k = static_cast<const T*>(a.k), *v = static_cast<const T*>(a.v);
    const T* dout = static_cast<const T*>(out_grad);
    for (int64_t sample = 0; sample < a.batch; ++sample) {
      runtime::Fill(k_sums, 0, 4 * (of_k + of_v), stream);
      ForEachStretch(a, sample, [&](const Stretch& s) {
        Scores(stream, s, q + s.OfQueries(a.width), k + s.OfKeys(a.width), a.width, scores);
        Scores(stream, s, dout + s.OfQueries(a.v_width), v + s.OfKeys(a.v_width), a.v_width, probabilities_grad);
        ForEachRow(stream, a.kv_heads * s.queries,
                   ScoresGradRow<T>{s, scores, probabilities_grad, lse, probabilities, scores_grad});
        if (q_grad != nullptr) {
          SumOverKeys(stream, s, scores_grad, k + s.OfKeys(a.width), a.width,
                      static_cast<T*>(q_grad) + s.OfQueries(a.width));
        }
        AddOverQueries(stream, s, scores_grad, q + s.OfQueries(a.width), a.width, k_sums);
        AddOverQueries(stream, s, probabilities, dout + s.OfQueries(a.v_width), a.v_width, v_sums);
      });
      if (k_grad != nullptr) Cast(stream, k_sums, Type::kFloat, static_cast<T*>(k_grad) + sample * of_k, a.type, of_k);
      if (v_grad != nullptr) Cast(stream, v_sums, Type::kFloat, static_cast<T*>(v_grad) + sample * of_v, a.type, of_v);
    }
  });
}

}  // namespace nvgpu::math
