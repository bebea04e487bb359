// Rotary embedding and attention.
#pragma once

#include "elementwise.h"

// TE's own rotary kernel on one [b, s, h, d] tensor; `paddle_te.native.rope` has the faster one on packed q, k, v.
static void rope(const Tensor& input, const Tensor& freqs, const Tensor& output, bool backward, Stream& stream) {
  const size_t* shape = input.data.shape.data;
  const char* name = backward ? "nvte_fused_rope_backward" : "nvte_fused_rope_forward";
  Named named = {{"input", &input}, {"freqs", &freqs}, {"output", &output}};
  if (input.data.shape.ndim != 4) raise(describe(std::string(name) + ": input must be [b, s, h, d]", named));
  call(name, named, [&] {
    const int b = shape[0], s = shape[1], h = shape[2], d = shape[3], d2 = freqs.cols();
    auto f = backward ? nvte_fused_rope_backward : nvte_fused_rope_forward;
    const NVTETensor none = empty_tensor().handle;
    f(input.handle, none, freqs.handle, none, output.handle, kFormatBSHD, false, 1, 0, s, b, h, d, d2, h * d, s * h * d,
      d, 1, stream.handle);
  });
}

// A parameter object of fused attention for the length of a C++ scope.
class AttentionParams {
  using Set = void (*)(NVTEConfig, int, const void*, size_t);

 public:
  AttentionParams(NVTEConfig params, Set set, void (*destroy)(NVTEConfig))
      : params_(params), set_(set), destroy_(destroy) {}
  ~AttentionParams() { destroy_(params_); }
  AttentionParams(const AttentionParams&) = delete;
  AttentionParams& operator=(const AttentionParams&) = delete;
  operator NVTEConfig() const { return params_; }
  template <class T>
  void set(int attribute, T value) {
    set_(params_, attribute, &value, sizeof value);
  }
  void tensor(int attribute, const Tensor& value) { set<NVTETensor>(attribute, value.handle); }
  void no_tensors(std::initializer_list<int> attributes) {
    for (int attribute : attributes) tensor(attribute, empty_tensor());
  }

 private:
  NVTEConfig params_;
  Set set_;
  void (*destroy_)(NVTEConfig);
};

// TE wants the auxiliary tensors as a pack: softmax statistics, the random state (a slot even without dropout), the
// bias and the softmax's offset, if there are any.
static NVTETensorPack aux_pack(const Tensor& stats, const Tensor& rng_state, const Tensor* bias,
                               const Tensor* softmax_offset) {
  NVTETensorPack pack{};
  for (auto tensor : {&stats, &rng_state, bias, softmax_offset})
    if (tensor) pack.tensors[pack.size++] = tensor->handle;
  return pack;
}

static Key attention_key(EntryPoint entry, const Tensor& q, const Tensor& k, const Tensor& v, int layout, int mask,
                         int64_t window, const Tensor* cu_seqlens, const Tensor* bias, const Tensor* softmax_offset,
                         int64_t flags) {
  const size_t *qs = q.data.shape.data, *ks = k.data.shape.data;
  auto i = [](size_t v) { return static_cast<int64_t>(v); };
  flags += i(v.cols()) << 16;  // heads of v may be of another width
  if (bias) flags += 4 + 8 * (bias->data.shape.data[0] > 1) + 16 * (bias->data.shape.data[1] > 1);
  if (softmax_offset) flags += 1024;
  const int64_t documents = cu_seqlens ? i(cu_seqlens->numel()) : 0;
  return {entry,        i(qs[0]), i(qs[1]), i(qs[2]),  i(qs[3]), i(ks[1]), i(ks[2]),
          q.data.dtype, layout,   mask,     documents, flags,    window};
}

// Whether sequences of any lengths lie one after another, and q, k and v are [tokens, h, d]; cu_seqlens say where.
static bool is_thd(int layout) { return kLayoutT3HD <= layout && layout <= kLayoutTHD; }

// No sequence is longer: TE wants to know it.
static size_t max_seqlen(const Tensor& tensor, int layout) { return tensor.data.shape.data[is_thd(layout) ? 0 : 1]; }

// What TE and cuDNN take on trust. same_size: pairs of tensors that must have as many elements. out: attention's, whose
// heads are as many as q's and as wide as v's.
static void check_attention(const char* name, Named named, const Tensor& q, const Tensor& k, const Tensor& v,
                            std::initializer_list<std::pair<const Tensor*, const Tensor*>> same_size, const Tensor& out,
                            const Tensor& stats, int layout, int mask, float dropout, const Tensor* rng_state,
                            const Tensor* cu_seqlens, const Tensor* bias, const Tensor* softmax_offset) {
  auto refuse = [&](const char* text) { raise(describe(std::string(name) + ": " + text, named)); };
  const bool padded = mask == kPaddingMask || mask == kPaddingCausalMask;
  for (auto tensor : {&q, &k, &v})
    if (tensor->data.shape.ndim != (is_thd(layout) ? 3 : 4))
      refuse("q, k and v must be [b, s, h, d], and with a layout of THD [tokens, h, d]");
  if (is_thd(layout) && !padded) refuse("a layout of THD needs a padding mask");
  for (auto& [left, right] : same_size)
    if (left->numel() != right->numel()) refuse("shapes do not fit");
  auto heads_of = [](const Tensor& tensor) { return tensor.numel() / tensor.cols(); };
  if (heads_of(k) != heads_of(v) || out.numel() != heads_of(q) * v.cols()) refuse("shapes do not fit");
  if (stats.numel() * q.cols() != q.numel()) refuse("stats must be [b, h, s, 1], and with THD [tokens, h, 1]");
  if (dropout > 0 && !rng_state) refuse("dropout needs rng_state");
  if (padded && !cu_seqlens) refuse("a padding mask needs cu_seqlens");
  if (cu_seqlens && (cu_seqlens->data.dtype != kInt32 || cu_seqlens->data.shape.ndim != 1 || cu_seqlens->numel() < 2))
    refuse("cu_seqlens must be int32 [sequences + 1]");
  const size_t heads = q.data.shape.data[q.data.shape.ndim - 2];
  if (softmax_offset && (softmax_offset->data.dtype != kFloat32 || softmax_offset->numel() != heads))
    refuse("softmax_offset must be float32 [heads of q]");
  if (bias) {
    const size_t *s = bias->data.shape.data, *qs = q.data.shape.data;
    auto one_or = [](size_t size, size_t full) { return size == 1 || size == full; };
    if (bias->data.shape.ndim != 4 || !one_or(s[0], qs[0]) || !one_or(s[1], qs[2]) || s[2] != qs[1] ||
        s[3] != k.data.shape.data[1])
      refuse("bias must be [b or 1, h or 1, s, keys]");
    if (bias->data.dtype != q.data.dtype) refuse("bias must have q's dtype");
  }
}

// In fp8 TE reads factors without asking whether they are there. operands: read through scale_inv; results: written
// under scale, with their amax; factors: of what never leaves the kernel, which needs all three.
static void check_fp8_attention(const char* name, Named named, std::initializer_list<const Tensor*> operands,
                                std::initializer_list<const Tensor*> results,
                                std::initializer_list<const Tensor*> factors) {
  const bool fp8 = (*operands.begin())->is_fp8();
  auto refuse = [&](const char* text) { raise(describe(std::string(name) + ": " + text, named)); };
  for (auto tensor : operands)
    if (tensor->is_fp8() != fp8 || (fp8 && !tensor->scale_inv)) refuse("all operands in fp8, with scale_inv, or none");
  for (auto tensor : results)
    if (tensor->is_fp8() != fp8 || (fp8 && !(tensor->scale && tensor->amax)))
      refuse("results are in fp8, with scale and amax, where q is, and only there");
  for (auto tensor : factors)
    if (!tensor != !fp8 || (tensor && !(tensor->scale && tensor->amax && tensor->scale_inv)))
      refuse("fp8 needs s, in backward dp as well, with scale, amax and scale_inv; other dtypes take none");
}

// Only what cannot be derived is a parameter: causal masks aligned to the top left. With THD there is
// nothing between the sequences: where they lie in memory ("padded") follows from their lengths.
#define SET_ATTENTION(kind)                                                                              \
  params.tensor(k##kind##CuSeqlensQ, or_empty(cu_seqlens));                                              \
  params.tensor(k##kind##CuSeqlensKV, or_empty(cu_seqlens));                                             \
  params.tensor(k##kind##CuSeqlensQPadded, is_thd(layout) ? *cu_seqlens : empty_tensor());               \
  params.tensor(k##kind##CuSeqlensKVPadded, is_thd(layout) ? *cu_seqlens : empty_tensor());              \
  params.tensor(k##kind##S, or_empty(s));                                                                \
  params.set<uint8_t>(k##kind##CudaGraph, 0);                                                            \
  params.set<int32_t>(k##kind##Mask, mask);                                                              \
  params.set<int32_t>(k##kind##BiasType, bias ? kPostScaleBias : kNoBias);                               \
  params.set<int64_t>(k##kind##WindowLeft, window);                                                      \
  params.set<int64_t>(k##kind##WindowRight, mask == kCausalMask || mask == kPaddingCausalMask ? 0 : -1); \
  params.set<uint8_t>(k##kind##BottomRight, 0);                                                          \
  params.set<int32_t>(k##kind##SoftmaxType, softmax_offset ? kLearnableSoftmax : kVanillaSoftmax);       \
  params.set<float>(k##kind##Dropout, dropout);                                                          \
  params.set<float>(k##kind##Scale, scale);                                                              \
  params.set<int32_t>(k##kind##QKVLayout, layout);                                                       \
  params.set<int32_t>(k##kind##OFormat, is_thd(layout) ? kFormatTHD : kFormatBSHD);                      \
  params.set<int32_t>(k##kind##ScaleInvFormat, kFormatNotSet);                                           \
  params.set<size_t>(k##kind##MaxSeqlenQ, max_seqlen(q, layout));                                        \
  params.set<size_t>(k##kind##MaxSeqlenKV, max_seqlen(k, layout));                                       \
  params.set<cudaStream_t>(k##kind##Stream, stream.handle)

static void attention_fwd(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& stats,
                          float scale, int layout, int mask, bool is_training, Stream& stream, float dropout,
                          const Tensor* rng_state, const Tensor* cu_seqlens, const Tensor* bias, const Tensor* s,
                          int64_t window, const Tensor* softmax_offset) {
  const char* name = "nvte_fused_attn_fwd_v2";
  Named named = {{"q", &q},      {"k", &k},         {"v", &v},
                 {"out", &out},  {"stats", &stats}, {"cu_seqlens", cu_seqlens},
                 {"bias", bias}, {"s", s},          {"softmax_offset", softmax_offset}};
  check_attention(name, named, q, k, v, {}, out, stats, layout, mask, dropout, rng_state, cu_seqlens, bias,
                  softmax_offset);
  check_fp8_attention(name, named, {&q, &k, &v}, {&out}, {s});
  call(name, named, [&] {
    NVTETensorPack aux = aux_pack(stats, or_empty(rng_state), bias, softmax_offset);
    AttentionParams params(nvte_create_fused_attn_fwd_params(), nvte_set_fused_attn_fwd_params_attribute,
                           nvte_destroy_fused_attn_fwd_params);
    SET_ATTENTION(Fwd);
    params.tensor(kFwdQ, q);
    params.tensor(kFwdK, k);
    params.tensor(kFwdV, v);
    params.tensor(kFwdO, out);
    params.tensor(kFwdRngState, or_empty(rng_state));
    params.tensor(kFwdBias, or_empty(bias));
    params.tensor(kFwdSoftmaxOffset, or_empty(softmax_offset));
    params.no_tensors({kFwdPageTableK, kFwdPageTableV});
    params.set<NVTETensorPack*>(kFwdAux, &aux);
    params.set<uint8_t>(kFwdIsTraining, is_training);
    params.set<uint8_t>(kFwdReturnMaxLogit, 0);
    const int64_t flags = is_training + 2 * (dropout > 0);
    Key key = attention_key(kAttentionFwd, q, k, v, layout, mask, window, cu_seqlens, bias, softmax_offset, flags);
    call_with_workspace(key, stream, [&](NVTETensor workspace) {
      params.set<NVTETensor>(kFwdWorkspace, workspace);
      nvte_fused_attn_fwd_v2(params);
    });
  });
}

static void attention_bwd(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& dout,
                          const Tensor& stats, const Tensor& dq, const Tensor& dk, const Tensor& dv, float scale,
                          int layout, int mask, Stream& stream, float dropout, bool deterministic,
                          const Tensor* rng_state, const Tensor* cu_seqlens, const Tensor* bias, const Tensor* dbias,
                          const Tensor* s, const Tensor* dp, int64_t window, const Tensor* softmax_offset,
                          const Tensor* dsoftmax_offset) {
  const char* name = "nvte_fused_attn_bwd_v2";
  Named named = {{"q", &q},
                 {"k", &k},
                 {"v", &v},
                 {"out", &out},
                 {"dout", &dout},
                 {"stats", &stats},
                 {"dq", &dq},
                 {"dk", &dk},
                 {"dv", &dv},
                 {"cu_seqlens", cu_seqlens},
                 {"bias", bias},
                 {"dbias", dbias},
                 {"s", s},
                 {"dp", dp},
                 {"softmax_offset", softmax_offset},
                 {"dsoftmax_offset", dsoftmax_offset}};
  check_attention(name, named, q, k, v, {{&dout, &out}, {&dq, &q}, {&dk, &k}, {&dv, &v}}, out, stats, layout, mask,
                  dropout, rng_state, cu_seqlens, bias, softmax_offset);
  if (bias && (!dbias || dbias->numel() != bias->numel()))
    raise(describe(std::string(name) + ": a bias needs dbias, of its shape", named));
  if (softmax_offset && (!dsoftmax_offset || dsoftmax_offset->data.dtype != kFloat32 ||
                         dsoftmax_offset->numel() != softmax_offset->numel()))
    raise(describe(std::string(name) + ": softmax_offset needs dsoftmax_offset, of its shape and dtype", named));
  check_fp8_attention(name, named, {&q, &k, &v, &out, &dout}, {&dq, &dk, &dv}, {s, dp});
  call(name, named, [&] {
    NVTETensorPack aux = aux_pack(stats, or_empty(rng_state), bias, softmax_offset);
    AttentionParams params(nvte_create_fused_attn_bwd_params(), nvte_set_fused_attn_bwd_params_attribute,
                           nvte_destroy_fused_attn_bwd_params);
    SET_ATTENTION(Bwd);
    params.tensor(kBwdQ, q);
    params.tensor(kBwdK, k);
    params.tensor(kBwdV, v);
    params.tensor(kBwdO, out);
    params.tensor(kBwdDO, dout);
    params.tensor(kBwdDQ, dq);
    params.tensor(kBwdDK, dk);
    params.tensor(kBwdDV, dv);
    params.tensor(kBwdDBias, or_empty(dbias));
    params.tensor(kBwdDP, or_empty(dp));
    params.tensor(kBwdDSoftmaxOffset, or_empty(dsoftmax_offset));
    params.set<NVTETensorPack*>(kBwdAux, &aux);
    params.set<uint8_t>(kBwdDeterministic, deterministic);
    params.set<int32_t>(kBwdDOFormat, is_thd(layout) ? kFormatTHD : kFormatBSHD);
    params.set<int32_t>(kBwdDQKVLayout, layout);
    params.set<int32_t>(kBwdDOScaleInvFormat, kFormatNotSet);
    const int64_t flags = deterministic + 2 * (dropout > 0) + 32 * dout.data.dtype;
    Key key = attention_key(kAttentionBwd, q, k, v, layout, mask, window, cu_seqlens, bias, softmax_offset, flags);
    call_with_workspace(key, stream, [&](NVTETensor workspace) {
      params.set<NVTETensor>(kBwdWorkspace, workspace);
      nvte_fused_attn_bwd_v2(params);
    });
  });
}
