// A stand-in for libtransformer_engine.so, libcudart.so and libcuda.so: records the calls and their arguments as JSON
// lines, computes nothing. Declarations written down independently of shim/declarations.h;
// only the names of the activations are its own.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "activations.h"

struct Shape {
  size_t data[15];
  size_t ndim;
};
struct Basic {
  void* data_ptr;
  int dtype;
  Shape shape;
};
struct Pack {
  void* tensors[10];
  size_t size;
};
using T = void*;

static std::map<uintptr_t, std::map<int, Basic>> g_tensors;
static std::map<uintptr_t, int> g_modes;  // of tensors whose scaling mode is not 0
static uintptr_t g_next = 1;
static int g_configs = 0;
static std::map<std::pair<void*, int>, std::string> g_attributes;  // of configs, as hex bytes
static std::string g_log, g_taken, g_fail_name, g_fail_message;
static bool g_fail_int = false;

static std::string show(T handle) {
  if (!handle) return "null";
  auto it = g_tensors.find(reinterpret_cast<uintptr_t>(handle));
  if (it == g_tensors.end()) return "\"dead handle\"";
  std::ostringstream out;
  out << "{";
  if (auto mode = g_modes.find(it->first); mode != g_modes.end()) out << "\"mode\": " << mode->second;
  for (auto& [param, basic] : it->second) {
    out << (out.str().size() > 1 ? ", " : "") << "\"" << param << "\": [" << reinterpret_cast<uintptr_t>(basic.data_ptr)
        << ", " << basic.dtype << ", [";
    for (size_t i = 0; i < basic.shape.ndim; i++) out << (i ? ", " : "") << basic.shape.data[i];
    out << "]]";
  }
  return out.str() + "}";
}
static std::string show(int v) { return std::to_string(v); }
static std::string show(long long v) { return std::to_string(v); }
static std::string show(size_t v) { return std::to_string(v); }
static std::string show(bool v) { return v ? "true" : "false"; }
static std::string show(float v) {
  std::ostringstream out;
  out << v;
  return out.str();
}
static std::string show(const char* v) { return std::string("\"") + v + "\""; }
static std::string number(const void* v) { return std::to_string(reinterpret_cast<uintptr_t>(v)); }

template <class... A>
static void record(const char* name, const A&... args) {
  if (g_fail_name == name) {
    g_fail_name.clear();
    if (g_fail_int) throw 7;
    throw std::runtime_error(g_fail_message);
  }
  g_log += std::string("[\"") + name + "\"";
  auto raw = [](const std::string& s) { return s; };
  ((g_log += ", " +
             [&] {
               if constexpr (std::is_same_v<A, std::string>)
                 return raw(args);
               else
                 return show(args);
             }()),
   ...);
  g_log += "]\n";
}

// An empty workspace asks for its size; the answer depends on nothing, 3 x 1000 of the dtype, bytes by default.
static bool query(T workspace, int dtype = 0) {
  auto& params = g_tensors.at(reinterpret_cast<uintptr_t>(workspace));
  if (params.count(0)) return false;
  Basic answer{};
  answer.dtype = dtype, answer.shape.data[0] = 3, answer.shape.data[1] = 1000, answer.shape.ndim = 2;
  params[0] = answer;
  return true;
}
static std::string attributes(void* config) {
  std::string text = "{";
  for (auto& [key, value] : g_attributes)
    if (key.first == config) text += (text.size() > 1 ? ", \"" : "\"") + std::to_string(key.second) + "\": " + value;
  return text + "}";
}
static void* create_config() {
  g_configs++;
  return new int;
}
static void destroy_config(void* config) {
  g_configs--;
  for (auto it = g_attributes.begin(); it != g_attributes.end();)
    it = it->first.first == config ? g_attributes.erase(it) : std::next(it);
  delete static_cast<int*>(config);
}
// Integers by their size, floats by attribute number, tensors by their contents, which may change until they are used.
static void set_attribute(void* config, int attribute, const void* buf, size_t size, const char* kinds) {
  std::string text;
  switch (kinds[attribute]) {
    case 't':
      text = show(*static_cast<const T*>(buf));
      if (size != 8) throw std::runtime_error("size");
      break;
    case 'b':
      text = show(int(*static_cast<const uint8_t*>(buf)));
      if (size != 1) throw std::runtime_error("size");
      break;
    case 'i':
      text = show(*static_cast<const int32_t*>(buf));
      if (size != 4) throw std::runtime_error("size");
      break;
    case 'f':
      text = show(*static_cast<const float*>(buf));
      if (size != 4) throw std::runtime_error("size");
      break;
    case 'l':
      text = std::to_string(*static_cast<const int64_t*>(buf));
      if (size != 8) throw std::runtime_error("size");
      break;
    case 'p': {
      auto pack = *static_cast<Pack* const*>(buf);
      text = "[";
      for (size_t i = 0; i < pack->size; i++) text += (i ? ", " : "") + show(pack->tensors[i]);
      text += "]";
      break;
    }
    default: throw std::runtime_error("unknown attribute");
  }
  g_attributes[{config, attribute}] = text;
}
static const char* kFwd =
    "tttttttpttttttt"
    "bbbiillbiffiiill"
    "tl";
static const char* kBwd =
    "tttttttptttttttttbbiillbiffiiiiiill"
    "tl";

#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT const char* fake_take_log() {
  g_taken.swap(g_log);
  g_log.clear();
  return g_taken.c_str();
}
EXPORT size_t fake_live_tensors() { return g_tensors.size(); }
EXPORT int fake_live_configs() { return g_configs; }
EXPORT void fake_fail(const char* name, const char* message, int as_int) {
  g_fail_name = name, g_fail_message = message, g_fail_int = as_int;
}

EXPORT T nvte_create_tensor(int mode) {
  if (mode != 0 && mode != 2 && mode != 3) throw std::runtime_error("scaling mode");
  if (g_fail_name == "nvte_create_tensor") {
    g_fail_name.clear();
    throw std::runtime_error(g_fail_message);
  }
  g_tensors[g_next];
  if (mode) g_modes[g_next] = mode;
  return reinterpret_cast<T>(g_next++);
}
EXPORT void nvte_destroy_tensor(T t) {
  if (!g_tensors.erase(reinterpret_cast<uintptr_t>(t))) __builtin_trap();
  g_modes.erase(reinterpret_cast<uintptr_t>(t));
}
EXPORT void nvte_set_tensor_param_v2(T t, int param, const void* buf, size_t size) {
  if (size != sizeof(Basic)) throw std::runtime_error("size of NVTEBasicTensor");
  g_tensors.at(reinterpret_cast<uintptr_t>(t))[param] = *static_cast<const Basic*>(buf);
}
EXPORT void nvte_get_tensor_param_v2(T t, int param, void* buf, size_t size, size_t* written) {
  if (size != sizeof(Basic)) throw std::runtime_error("size of NVTEBasicTensor");
  *static_cast<Basic*>(buf) = g_tensors.at(reinterpret_cast<uintptr_t>(t))[param];
  *written = size;
}
EXPORT T nvte_create_grouped_tensor(int mode, size_t count, Shape shape) {
  T tensor = nvte_create_tensor(mode);
  Basic logical{nullptr, static_cast<int>(count), shape};
  g_tensors[reinterpret_cast<uintptr_t>(tensor)][-1] = logical;  // shown as [0, number of tensors, shape]
  return tensor;
}
EXPORT void nvte_destroy_grouped_tensor(T t) { nvte_destroy_tensor(t); }
EXPORT void nvte_set_grouped_tensor_param(T t, int param, const void* buf, size_t size) {
  nvte_set_tensor_param_v2(t, param, buf, size);
}
EXPORT void* nvte_create_grouped_matmul_config() { return create_config(); }
EXPORT void nvte_set_grouped_matmul_config_attribute(void* c, int a, const void* buf, size_t n) {
  set_attribute(c, a, buf, n, "???ib");
}
EXPORT size_t nvte_get_grouped_gemm_setup_workspace_size(size_t count) { return 100 * count; }
EXPORT void* nvte_create_matmul_config() { return create_config(); }
EXPORT void nvte_set_matmul_config_attribute(void* c, int a, const void* buf, size_t n) {
  set_attribute(c, a, buf, n, "ttbbtbi");
}
EXPORT void nvte_destroy_matmul_config(void* c) { destroy_config(c); }
EXPORT void* nvte_create_quantization_config() { return create_config(); }
EXPORT void nvte_set_quantization_config_attribute(void* c, int a, const void* buf, size_t n) {
  set_attribute(c, a, buf, n, "bft");
}
EXPORT void nvte_destroy_quantization_config(void* c) { destroy_config(c); }
EXPORT void* nvte_create_fused_attn_fwd_params() { return create_config(); }
EXPORT void nvte_set_fused_attn_fwd_params_attribute(void* c, int a, const void* b, size_t n) {
  set_attribute(c, a, b, n, kFwd);
}
EXPORT void nvte_destroy_fused_attn_fwd_params(void* c) { destroy_config(c); }
EXPORT void* nvte_create_fused_attn_bwd_params() { return create_config(); }
EXPORT void nvte_set_fused_attn_bwd_params_attribute(void* c, int a, const void* b, size_t n) {
  set_attribute(c, a, b, n, kBwd);
}
EXPORT void nvte_destroy_fused_attn_bwd_params(void* c) { destroy_config(c); }

static std::vector<std::pair<void*, T>> g_workspaces;  // set last: the attribute text tells whether it is a query
static void attention(const char* name, void* params, int workspace_attribute) {
  const std::string text = g_attributes.at({params, workspace_attribute});
  if (text == "{}") {  // the newest handle is the workspace of this query
    query(reinterpret_cast<T>(g_next - 1));
    return record((std::string(name) + " query").c_str());
  }
  record(name, attributes(params));
}
EXPORT void nvte_fused_attn_fwd_v2(void* p) { attention("nvte_fused_attn_fwd_v2", p, 31); }
EXPORT void nvte_fused_attn_bwd_v2(void* p) { attention("nvte_fused_attn_bwd_v2", p, 35); }

EXPORT void nvte_layernorm_fwd(T x, T gamma, T beta, float eps, T z, T mu, T rsigma, T ws, int sms, bool zero_centered,
                               T stream) {
  if (query(ws)) return record("nvte_layernorm_fwd query");
  record("nvte_layernorm_fwd", x, gamma, beta, eps, z, mu, rsigma, ws, sms, zero_centered, number(stream));
}
EXPORT void nvte_layernorm_bwd(T dz, T x, T mu, T rsigma, T gamma, T dx, T dgamma, T dbeta, T ws, int sms, bool zc,
                               T stream) {
  if (query(ws)) return record("nvte_layernorm_bwd query");
  record("nvte_layernorm_bwd", dz, x, mu, rsigma, gamma, dx, dgamma, dbeta, ws, sms, zc, number(stream));
}
EXPORT void nvte_rmsnorm_fwd(T x, T gamma, float eps, T z, T rsigma, T ws, int sms, bool zero_centered, T stream) {
  if (query(ws)) return record("nvte_rmsnorm_fwd query");
  record("nvte_rmsnorm_fwd", x, gamma, eps, z, rsigma, ws, sms, zero_centered, number(stream));
}
EXPORT void nvte_rmsnorm_bwd(T dz, T x, T rsigma, T gamma, T dx, T dgamma, T ws, int sms, bool zc, T stream) {
  if (query(ws)) return record("nvte_rmsnorm_bwd query");
  record("nvte_rmsnorm_bwd", dz, x, rsigma, gamma, dx, dgamma, ws, sms, zc, number(stream));
}
EXPORT void nvte_rmsnorm_bwd_add(T dz, T x, T add, T rsigma, T gamma, T dx, T dgamma, T ws, int sms, bool zc,
                                 T stream) {
  if (query(ws)) return record("nvte_rmsnorm_bwd_add query");
  record("nvte_rmsnorm_bwd_add", dz, x, add, rsigma, gamma, dx, dgamma, ws, sms, zc, number(stream));
}
EXPORT void nvte_quantize_dbias(T input, T output, T dbias, T ws, T stream) {
  if (query(ws, 4)) return record("nvte_quantize_dbias query");  // float32, as in the library
  record("nvte_quantize_dbias", input, output, dbias, ws, number(stream));
}
#define CAST_WITH_DBIAS(name)                                            \
  EXPORT void name(T grad, T input, T output, T dbias, T ws, T stream) { \
    if (query(ws, 4)) return record(#name " query"); /* float32 too */   \
    record(#name, grad, input, output, dbias, ws, number(stream));       \
  }
EXPORT void nvte_cublas_gemm_v2(int ta, int tb, const float* alpha, T a, T b, const float* beta, T c, T d, T ws,
                                void* config, T stream) {
  record("nvte_cublas_gemm_v2", ta, tb, *alpha, a, b, *beta, c, d, ws, attributes(config), number(stream));
}
EXPORT void nvte_grouped_gemm(T a, int ta, T b, int tb, T c, T d, T alpha, T beta, T setup, T ws, void* config,
                              T stream) {
  record("nvte_grouped_gemm", a, ta, b, tb, c, d, alpha, beta, setup, ws, attributes(config), number(stream));
}
EXPORT void nvte_group_quantize(T input, T output, void* config, T stream) {
  record("nvte_group_quantize", input, output, attributes(config), number(stream));
}
EXPORT void nvte_scaled_swiglu(T a, T b, T c, int64_t interleave, T stream) {
  record("nvte_scaled_swiglu", a, b, c, int(interleave), number(stream));
}
EXPORT void nvte_scaled_clamped_swiglu(T a, T b, T c, float limit, float alpha, float offset, int64_t interleave,
                                       T stream) {
  record("nvte_scaled_clamped_swiglu", a, b, c, limit, alpha, offset, int(interleave), number(stream));
}
EXPORT void nvte_scaled_clamped_dswiglu(T a, T b, T c, T d, T e, float limit, float alpha, float offset,
                                        int64_t interleave, T stream) {
  record("nvte_scaled_clamped_dswiglu", a, b, c, d, e, limit, alpha, offset, int(interleave), number(stream));
}
EXPORT void nvte_scaled_dswiglu(T a, T b, T c, T d, T e, int64_t interleave, T stream) {
  record("nvte_scaled_dswiglu", a, b, c, d, e, int(interleave), number(stream));
}
EXPORT void nvte_fused_topk_with_score_function_forward(T logits, int tokens, int experts, int topk, int pre,
                                                        int groups, int group_topk, float scaling, int function, T bias,
                                                        T probs, T map, T scores, T stream) {
  record("nvte_fused_topk_with_score_function_forward", logits, tokens, experts, topk, pre, groups, group_topk, scaling,
         function, bias, probs, map, scores, number(stream));
}
EXPORT void nvte_fused_topk_with_score_function_backward(T map, T scores, T dprobs, int tokens, int experts, int topk,
                                                         int pre, float scaling, int function, T dlogits, T stream) {
  record("nvte_fused_topk_with_score_function_backward", map, scores, dprobs, tokens, experts, topk, pre, scaling,
         function, dlogits, number(stream));
}
#define TWO(name) \
  EXPORT void name(T a, T b, T stream) { record(#name, a, b, number(stream)); }
TWO(nvte_quantize)
TWO(nvte_dequantize)
TWO(nvte_transpose)
TWO(nvte_compute_amax)
#define THREE(name) \
  EXPORT void name(T a, T b, T c, T stream) { record(#name, a, b, c, number(stream)); }
#define GATED(name)   \
  TWO(nvte_##name)    \
  THREE(nvte_d##name) \
  THREE(nvte_d##name##_cast_transpose)
#define PLAIN(name)   \
  TWO(nvte_##name)    \
  THREE(nvte_d##name) \
  CAST_WITH_DBIAS(nvte_quantize_dbias_d##name)
GATED_ACTIVATIONS(GATED)
PLAIN_ACTIVATIONS(PLAIN)
EXPORT void nvte_quantize_v2(T input, T output, void* config, T stream) {
  record("nvte_quantize_v2", input, output, attributes(config), number(stream));
}
EXPORT void nvte_compute_scale_from_amax(T output, void* config, T stream) {
  record("nvte_compute_scale_from_amax", output, attributes(config), number(stream));
}
EXPORT void nvte_delayed_scaling_recipe_amax_and_scale_update(T history, T scale, T new_history, T new_scale,
                                                              const char* algo, int dtype, float margin, T stream) {
  record("nvte_delayed_scaling_recipe_amax_and_scale_update", history, scale, new_history, new_scale, algo, dtype,
         margin, number(stream));
}
#define ROPE(name)                                                                                                 \
  EXPORT void name(T x, T cu, T freqs, T start, T y, int format, bool interleaved, int cp, int rank, int s, int b, \
                   int h, int d, int d2, int ss, int sb, int sh, int sd, T stream) {                               \
    record(#name, x, cu, freqs, start, y, format, interleaved, cp, rank, s, b, h, d, d2, ss, sb, sh, sd,           \
           number(stream));                                                                                        \
  }
ROPE(nvte_fused_rope_forward)
ROPE(nvte_fused_rope_backward)

static int g_cuda_error = 0;
EXPORT void fake_cuda_error(int code) { g_cuda_error = code; }
static int cuda(int ok = 0) {
  int code = g_cuda_error ? g_cuda_error : ok;
  g_cuda_error = 0;
  return code;
}
EXPORT int cudaMemcpyAsync(void* to, const void* from, size_t n, int kind, T stream) {
  record("cudaMemcpyAsync", number(to), number(from), n, kind, number(stream));
  return cuda();
}
EXPORT int cudaMemsetAsync(void* to, int value, size_t n, T stream) {
  record("cudaMemsetAsync", number(to), value, n, number(stream));
  return cuda();
}
EXPORT int cudaMallocHost(void** pointer, size_t bytes) {
  record("cudaMallocHost", bytes);
  *pointer = reinterpret_cast<void*>(0x7000);
  return cuda();
}
EXPORT int cudaFreeHost(void* pointer) {
  record("cudaFreeHost", number(pointer));
  return 0;
}
EXPORT int cudaStreamCreateWithFlags(T* stream, unsigned flags) {
  *stream = reinterpret_cast<T>(0x6000);
  record("cudaStreamCreateWithFlags", int(flags));
  return cuda();
}
EXPORT int cudaStreamWaitEvent(T stream, T event, unsigned flags) {
  record("cudaStreamWaitEvent", number(stream), number(event), int(flags));
  return cuda();
}
static uintptr_t g_event = 0x800;
EXPORT int cudaEventCreateWithFlags(T* event, unsigned flags) {
  *event = reinterpret_cast<T>(++g_event);
  record("cudaEventCreateWithFlags", number(*event), int(flags));
  return cuda();
}
EXPORT int cudaEventSynchronize(T event) {
  record("cudaEventSynchronize", number(event));
  return cuda();
}
EXPORT int cudaEventRecord(T event, T stream) {
  record("cudaEventRecord", number(event), number(stream));
  return cuda();
}
EXPORT int cudaEventDestroy(T event) {
  record("cudaEventDestroy", number(event));
  return 0;
}
EXPORT int cudaStreamSynchronize(T stream) {
  record("cudaStreamSynchronize", number(stream));
  return cuda();
}
EXPORT int cudaGetDevice(int* device) {
  *device = 3;
  return cuda();
}
EXPORT int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 16 && device == 3 ? 132 : attribute == 75 ? 9 : attribute == 76 ? 0 : -1;
  return 0;
}
EXPORT const char* cudaGetErrorString(int code) { return code == 2 ? "out of memory" : "other"; }
EXPORT int cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, T stream, void** args, void** extra) {
  int n = reinterpret_cast<intptr_t>(f) & 0xff;  // the test passes the number of arguments in the function's address
  std::string values;
  for (int i = 0; i < n; i++) values += (i ? ", " : "") + std::to_string(*static_cast<long long*>(args[i]));
  record("cuLaunchKernel", int(gx), int(gy), int(gz), int(bx), int(by), int(bz), int(shared), number(stream),
         "[" + values + "]", extra != nullptr);
  return cuda();
}
EXPORT int cuGetErrorString(int, const char** text) {
  *text = "launch failed";
  return 0;
}
