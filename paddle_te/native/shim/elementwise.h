// Norms, casts, activations and the scales of fp8.
#pragma once

#include "calls.h"

enum EntryPoint {
  kLayernormFwd,
  kLayernormBwd,
  kRmsnormFwd,
  kRmsnormBwd,
  kRmsnormBwdAdd,
  kQuantizeDbias,
#define ENTRY_POINT(name) kQuantizeDbias_d##name,
  PLAIN_ACTIVATIONS(ENTRY_POINT)
#undef ENTRY_POINT
      kAttentionFwd,
  kAttentionBwd
};

static Key norm_key(EntryPoint entry, const Tensor& x, const Tensor& gamma, const Tensor& z, bool is_aligned,
                    bool zero_centered_gamma, int sms) {
  return {entry,
          static_cast<int64_t>(x.rows()),
          static_cast<int64_t>(x.cols()),
          x.data.dtype,
          gamma.data.dtype,
          z.data.dtype,
          is_aligned,
          zero_centered_gamma,
          sms};
}

static void layernorm_fwd(const Tensor& x, const Tensor& gamma, const Tensor& beta, float epsilon, const Tensor& z,
                          const Tensor& mu, const Tensor& rsigma, Stream& stream, bool zero_centered_gamma) {
  Named named = {{"x", &x}, {"gamma", &gamma}, {"beta", &beta}, {"z", &z}, {"mu", &mu}, {"rsigma", &rsigma}};
  call("nvte_layernorm_fwd", named, [&] {
    bool is_aligned = aligned({&z, &x, &gamma, &beta, &mu, &rsigma});
    Key key = norm_key(kLayernormFwd, x, gamma, z, is_aligned, zero_centered_gamma, stream.norm_fwd_sms);
    call_with_workspace(key, stream, [&](NVTETensor workspace) {
      nvte_layernorm_fwd(x.handle, gamma.handle, beta.handle, epsilon, z.handle, mu.handle, rsigma.handle, workspace,
                         stream.norm_fwd_sms, zero_centered_gamma, stream.handle);
    });
  });
}

static void layernorm_bwd(const Tensor& dz, const Tensor& x, const Tensor& mu, const Tensor& rsigma,
                          const Tensor& gamma, const Tensor& dx, const Tensor& dgamma, const Tensor& dbeta,
                          Stream& stream, bool zero_centered_gamma) {
  Named named = {{"dz", &dz},       {"x", &x},   {"mu", &mu},         {"rsigma", &rsigma},
                 {"gamma", &gamma}, {"dx", &dx}, {"dgamma", &dgamma}, {"dbeta", &dbeta}};
  call("nvte_layernorm_bwd", named, [&] {
    bool is_aligned = aligned({&x, &gamma, &mu, &rsigma, &dx, &dz, &dgamma, &dbeta});
    Key key = norm_key(kLayernormBwd, x, gamma, dz, is_aligned, zero_centered_gamma, stream.norm_bwd_sms);
    call_with_workspace(key, stream, [&](NVTETensor workspace) {
      nvte_layernorm_bwd(dz.handle, x.handle, mu.handle, rsigma.handle, gamma.handle, dx.handle, dgamma.handle,
                         dbeta.handle, workspace, stream.norm_bwd_sms, zero_centered_gamma, stream.handle);
    });
  });
}

static void rmsnorm_fwd(const Tensor& x, const Tensor& gamma, float epsilon, const Tensor& z, const Tensor& rsigma,
                        Stream& stream, bool zero_centered_gamma) {
  call("nvte_rmsnorm_fwd", {{"x", &x}, {"gamma", &gamma}, {"z", &z}, {"rsigma", &rsigma}}, [&] {
    Key key = norm_key(kRmsnormFwd, x, gamma, z, aligned({&z, &x, &gamma, &rsigma}), zero_centered_gamma,
                       stream.norm_fwd_sms);
    call_with_workspace(key, stream, [&](NVTETensor workspace) {
      nvte_rmsnorm_fwd(x.handle, gamma.handle, epsilon, z.handle, rsigma.handle, workspace, stream.norm_fwd_sms,
                       zero_centered_gamma, stream.handle);
    });
  });
}

static void rmsnorm_bwd(const Tensor& dz, const Tensor& x, const Tensor& rsigma, const Tensor& gamma, const Tensor& dx,
                        const Tensor& dgamma, Stream& stream, const Tensor* add, bool zero_centered_gamma) {
  const char* name = add ? "nvte_rmsnorm_bwd_add" : "nvte_rmsnorm_bwd";
  Named named = {{"dz", &dz},       {"x", &x},   {"add", add},       {"rsigma", &rsigma},
                 {"gamma", &gamma}, {"dx", &dx}, {"dgamma", &dgamma}};
  call(name, named, [&] {
    bool is_aligned = aligned({&x, &gamma, &rsigma, &dx, &dz, &dgamma, add ? add : &x});
    Key key = norm_key(add ? kRmsnormBwdAdd : kRmsnormBwd, x, gamma, dz, is_aligned, zero_centered_gamma,
                       stream.norm_bwd_sms);
    call_with_workspace(key, stream, [&](NVTETensor workspace) {
      if (add)
        nvte_rmsnorm_bwd_add(dz.handle, x.handle, add->handle, rsigma.handle, gamma.handle, dx.handle, dgamma.handle,
                             workspace, stream.norm_bwd_sms, zero_centered_gamma, stream.handle);
      else
        nvte_rmsnorm_bwd(dz.handle, x.handle, rsigma.handle, gamma.handle, dx.handle, dgamma.handle, workspace,
                         stream.norm_bwd_sms, zero_centered_gamma, stream.handle);
    });
  });
}

static void quantize(const Tensor& input, const Tensor& output, Stream& stream) {
  call("nvte_quantize", {{"input", &input}, {"output", &output}},
       [&] { nvte_quantize(input.handle, output.handle, stream.handle); });
}

// One for the process's life for each pair of settings.
static NVTEConfig quantization_config(bool force_pow_2_scales, float amax_epsilon) {
  static std::map<std::pair<bool, float>, NVTEConfig> configs;
  NVTEConfig& config = configs[{force_pow_2_scales, amax_epsilon}];
  if (!config) {
    config = nvte_create_quantization_config();
    const uint8_t force = force_pow_2_scales;
    nvte_set_quantization_config_attribute(config, kForcePow2Scales, &force, sizeof force);
    nvte_set_quantization_config_attribute(config, kAmaxEpsilon, &amax_epsilon, sizeof amax_epsilon);
  }
  return config;
}

static void quantize_blocks(const Tensor& input, const Tensor& output, bool force_pow_2_scales, float amax_epsilon,
                            Stream& stream) {
  call("nvte_quantize_v2", {{"input", &input}, {"output", &output}}, [&] {
    nvte_quantize_v2(input.handle, output.handle, quantization_config(force_pow_2_scales, amax_epsilon), stream.handle);
  });
}

// A cast to fp8 that also sums the rows of what it casts, into dbias. run(workspace): TE's function.
template <class F>
static void cast_with_dbias(EntryPoint entry, const char* name, Named named, const Tensor& input, const Tensor& output,
                            const Tensor& dbias, Stream& stream, F&& run) {
  if (dbias.numel() != input.cols() || dbias.data.dtype != input.data.dtype)
    raise(
        describe(std::string(name) + ": dbias must have one number for each of input's columns, in its dtype", named));
  call(name, named, [&] {
    Key key = {entry, static_cast<int64_t>(input.rows()), static_cast<int64_t>(input.cols()), input.data.dtype,
               output.data.dtype};
    call_with_workspace(key, stream, run);
  });
}

static void quantize_dbias(const Tensor& input, const Tensor& output, const Tensor& dbias, Stream& stream) {
  cast_with_dbias(kQuantizeDbias, "nvte_quantize_dbias", {{"input", &input}, {"output", &output}, {"dbias", &dbias}},
                  input, output, dbias, stream, [&](NVTETensor workspace) {
                    nvte_quantize_dbias(input.handle, output.handle, dbias.handle, workspace, stream.handle);
                  });
}

static void dequantize(const Tensor& input, const Tensor& output, Stream& stream) {
  call("nvte_dequantize", {{"input", &input}, {"output", &output}},
       [&] { nvte_dequantize(input.handle, output.handle, stream.handle); });
}

static void transpose(const Tensor& input, const Tensor& output, Stream& stream) {
  call("nvte_transpose", {{"input", &input}, {"output", &output}},
       [&] { nvte_transpose(input.handle, output.handle, stream.handle); });
}

#define ACTIVATION(name)                                                        \
  static void name(const Tensor& input, const Tensor& output, Stream& stream) { \
    call("nvte_" #name, {{"input", &input}, {"output", &output}},               \
         [&] { nvte_##name(input.handle, output.handle, stream.handle); });     \
  }
#define ACTIVATION_GRADIENT(name)                                                                   \
  static void name(const Tensor& grad, const Tensor& input, const Tensor& output, Stream& stream) { \
    call("nvte_" #name, {{"grad", &grad}, {"input", &input}, {"output", &output}},                  \
         [&] { nvte_##name(grad.handle, input.handle, output.handle, stream.handle); });            \
  }
#define ACTIVATION_GRADIENT_WITH_DBIAS(name, entry)                                                       \
  static void name(const Tensor& grad, const Tensor& input, const Tensor& output, const Tensor& dbias,    \
                   Stream& stream) {                                                                      \
    Named named = {{"grad", &grad}, {"input", &input}, {"output", &output}, {"dbias", &dbias}};           \
    cast_with_dbias(entry, "nvte_" #name, named, grad, output, dbias, stream, [&](NVTETensor workspace) { \
      nvte_##name(grad.handle, input.handle, output.handle, dbias.handle, workspace, stream.handle);      \
    });                                                                                                   \
  }

#define GATED(name)            \
  ACTIVATION(name)             \
  ACTIVATION_GRADIENT(d##name) \
  ACTIVATION_GRADIENT(d##name##_cast_transpose)
#define PLAIN(name)            \
  ACTIVATION(name)             \
  ACTIVATION_GRADIENT(d##name) \
  ACTIVATION_GRADIENT_WITH_DBIAS(quantize_dbias_d##name, kQuantizeDbias_d##name)

GATED_ACTIVATIONS(GATED)
PLAIN_ACTIVATIONS(PLAIN)
#undef GATED
#undef PLAIN
#undef ACTIVATION
#undef ACTIVATION_GRADIENT
#undef ACTIVATION_GRADIENT_WITH_DBIAS

static void amax_and_scale_update(const Tensor& history, const Tensor& scale, const std::string& algo, int fp8_dtype,
                                  float margin, Stream& stream) {
  call("nvte_delayed_scaling_recipe_amax_and_scale_update", {{"amax_history", &history}, {"scale", &scale}}, [&] {
    nvte_delayed_scaling_recipe_amax_and_scale_update(history.handle, scale.handle, history.handle, scale.handle,
                                                      algo.c_str(), fp8_dtype, margin, stream.handle);
  });
}

static void compute_amax(const Tensor& input, const Tensor& output, Stream& stream) {
  call("nvte_compute_amax", {{"input", &input}, {"output", &output}},
       [&] { nvte_compute_amax(input.handle, output.handle, stream.handle); });
}

static void compute_scale_from_amax(const Tensor& output, Stream& stream) {
  call("nvte_compute_scale_from_amax", {{"output", &output}},
       [&] { nvte_compute_scale_from_amax(output.handle, quantization_config(false, 0), stream.handle); });
}
