// Transformer Engine's C library for Python.
//
// Why not ctypes: TE reports errors as C++ exceptions, which would end the process, and one layer makes a few hundred
// calls. TE's functions are resolved with dlsym in bind(), so this file needs neither CUDA's nor TE's headers; the
// declarations below repeat TE 2.20's (tests/native compares them with the wheel's headers).
//
// TE's handles live in Tensor objects and in locals here: none can leak. All work goes to the given Stream.
#include <dlfcn.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <initializer_list>
#include <list>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace py = pybind11;

// ---- declarations of transformer_engine.h, gemm.h, fused_attn.h, cuda_runtime_api.h, cuda.h, cublasLt.h ---------

using NVTETensor = void*;
using NVTEConfig = void*;
using cudaStream_t = void*;
using cudaEvent_t = void*;
using cudaGraph_t = void*;
using cudaGraphExec_t = void*;

struct NVTEShape {
  size_t data[15];
  size_t ndim;
};
struct NVTEBasicTensor {
  void* data_ptr;
  int32_t dtype;
  NVTEShape shape;
};
struct NVTETensorPack {
  NVTETensor tensors[10];
  size_t size;
};
struct cudaGraphExecUpdateResultInfo {
  int result;
  void *errorNode, *errorFromNode;
};
static_assert(sizeof(NVTEShape) == 128 && sizeof(NVTEBasicTensor) == 144 && sizeof(NVTETensorPack) == 88);

enum DType { kByte = 0, kInt32 = 2, kInt64 = 3, kFloat32 = 4, kFloat16 = 5, kBFloat16 = 6, kE4M3 = 7, kE5M2 = 8 };
enum TensorParam { kRowwiseData, kColumnwiseData, kScale, kAmax, kRowwiseScaleInv, kColumnwiseScaleInv };
// NVTE_DELAYED_TENSOR_SCALING: fp8 with one scale, and unquantized tensors; fp8 with a scale for each 1 x 128 or 128 x
// 128.
enum ScalingMode { kPerTensorScaling = 0, kBlockScaling1D = 2, kBlockScaling2D = 3 };
constexpr int kForcePow2Scales = 0, kAmaxEpsilon = 1;                                     // of a quantization config
constexpr int kBiasTensor = 0, kDBiasTensor = 1, kUseSplitAccumulator = 5, kSMCount = 6;  // of a matmul config
enum DeviceAttribute { kMultiProcessorCount = 16, kComputeCapabilityMajor = 75, kComputeCapabilityMinor = 76 };
constexpr int kCuda32F = 0, kCuda16F = 2, kCuda16BF = 14, kCudaE4M3 = 28, kCudaE5M2 = 29, kCompute32F = 68;
// cuBLASLt's: attributes of a product, of a preference among its algorithms, and of an algorithm; epilogues.
enum LtProduct {
  kLtTransA = 3,
  kLtTransB = 4,
  kLtEpilogue = 7,
  kLtBiasPointer = 8,
  kLtSMCountTarget = 15,
  kLtAScalePointer = 17,
  kLtBScalePointer = 18,
  kLtFastAccum = 25,
  kLtBiasDataType = 26
};
enum LtPreference { kLtMaxWorkspace = 1, kLtAlignmentA = 5, kLtAlignmentB, kLtAlignmentC, kLtAlignmentD };
enum LtAlgorithm { kLtSplitK = 2, kLtReductionScheme = 3 };
constexpr int kLtNoEpilogue = 1, kLtBias = 4;
struct LtHeuristic {
  std::array<uint64_t, 8> algorithm;
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};
constexpr int kFormatBSHD = 1, kFormatTHD = 2, kFormatNotSet = 8;
constexpr int kLayoutT3HD = 10, kLayoutTHD = 14;  // the first and the last of the layouts of THD
constexpr int kPaddingMask = 1, kCausalMask = 2, kPaddingCausalMask = 3;
constexpr int kNoBias = 0, kPostScaleBias = 2;

// clang-format off: one a line they would fill a page
enum FwdParam {
  kFwdQ, kFwdK, kFwdV, kFwdBias, kFwdSoftmaxOffset, kFwdS, kFwdO, kFwdAux, kFwdCuSeqlensQ, kFwdCuSeqlensKV,
  kFwdCuSeqlensQPadded, kFwdCuSeqlensKVPadded, kFwdPageTableK, kFwdPageTableV, kFwdRngState, kFwdIsTraining,
  kFwdCudaGraph, kFwdReturnMaxLogit, kFwdMask, kFwdBiasType, kFwdWindowLeft, kFwdWindowRight, kFwdBottomRight,
  kFwdSoftmaxType, kFwdDropout, kFwdScale, kFwdQKVLayout, kFwdOFormat, kFwdScaleInvFormat, kFwdMaxSeqlenQ,
  kFwdMaxSeqlenKV, kFwdWorkspace, kFwdStream
};
enum BwdParam {
  kBwdQ, kBwdK, kBwdV, kBwdO, kBwdDO, kBwdS, kBwdDP, kBwdAux, kBwdDQ, kBwdDK, kBwdDV, kBwdDBias, kBwdDSoftmaxOffset,
  kBwdCuSeqlensQ, kBwdCuSeqlensKV, kBwdCuSeqlensQPadded, kBwdCuSeqlensKVPadded, kBwdDeterministic, kBwdCudaGraph,
  kBwdMask, kBwdBiasType, kBwdWindowLeft, kBwdWindowRight, kBwdBottomRight, kBwdSoftmaxType, kBwdDropout, kBwdScale,
  kBwdQKVLayout, kBwdOFormat, kBwdDOFormat, kBwdDQKVLayout, kBwdScaleInvFormat, kBwdDOScaleInvFormat, kBwdMaxSeqlenQ,
  kBwdMaxSeqlenKV, kBwdWorkspace, kBwdStream
};
// clang-format on

// X(result, name, arguments): every foreign function used here.
#define TE_FUNCTIONS(X)                                                                                               \
  X(NVTETensor, nvte_create_tensor, (int))                                                                            \
  X(void, nvte_destroy_tensor, (NVTETensor))                                                                          \
  X(void, nvte_set_tensor_param_v2, (NVTETensor, int, const void*, size_t))                                           \
  X(void, nvte_get_tensor_param_v2, (NVTETensor, int, void*, size_t, size_t*))                                        \
  X(NVTEConfig, nvte_create_matmul_config, ())                                                                        \
  X(void, nvte_set_matmul_config_attribute, (NVTEConfig, int, const void*, size_t))                                   \
  X(void, nvte_destroy_matmul_config, (NVTEConfig))                                                                   \
  X(NVTEConfig, nvte_create_quantization_config, ())                                                                  \
  X(void, nvte_set_quantization_config_attribute, (NVTEConfig, int, const void*, size_t))                             \
  X(void, nvte_destroy_quantization_config, (NVTEConfig))                                                             \
  X(NVTEConfig, nvte_create_fused_attn_fwd_params, ())                                                                \
  X(void, nvte_set_fused_attn_fwd_params_attribute, (NVTEConfig, int, const void*, size_t))                           \
  X(void, nvte_destroy_fused_attn_fwd_params, (NVTEConfig))                                                           \
  X(NVTEConfig, nvte_create_fused_attn_bwd_params, ())                                                                \
  X(void, nvte_set_fused_attn_bwd_params_attribute, (NVTEConfig, int, const void*, size_t))                           \
  X(void, nvte_destroy_fused_attn_bwd_params, (NVTEConfig))                                                           \
  X(void, nvte_layernorm_fwd,                                                                                         \
    (NVTETensor, NVTETensor, NVTETensor, float, NVTETensor, NVTETensor, NVTETensor, NVTETensor, int, bool,            \
     cudaStream_t))                                                                                                   \
  X(void, nvte_layernorm_bwd,                                                                                         \
    (NVTETensor, NVTETensor, NVTETensor, NVTETensor, NVTETensor, NVTETensor, NVTETensor, NVTETensor, NVTETensor, int, \
     bool, cudaStream_t))                                                                                             \
  X(void, nvte_rmsnorm_fwd,                                                                                           \
    (NVTETensor, NVTETensor, float, NVTETensor, NVTETensor, NVTETensor, int, bool, cudaStream_t))                     \
  X(void, nvte_rmsnorm_bwd,                                                                                           \
    (NVTETensor, NVTETensor, NVTETensor, NVTETensor, NVTETensor, NVTETensor, NVTETensor, int, bool, cudaStream_t))    \
  X(void, nvte_rmsnorm_bwd_add,                                                                                       \
    (NVTETensor, NVTETensor, NVTETensor, NVTETensor, NVTETensor, NVTETensor, NVTETensor, NVTETensor, int, bool,       \
     cudaStream_t))                                                                                                   \
  X(void, nvte_cublas_gemm_v2,                                                                                        \
    (int, int, const float*, NVTETensor, NVTETensor, const float*, NVTETensor, NVTETensor, NVTETensor, NVTEConfig,    \
     cudaStream_t))                                                                                                   \
  X(void, nvte_quantize, (NVTETensor, NVTETensor, cudaStream_t))                                                      \
  X(void, nvte_quantize_v2, (NVTETensor, NVTETensor, NVTEConfig, cudaStream_t))                                       \
  X(void, nvte_quantize_dbias, (NVTETensor, NVTETensor, NVTETensor, NVTETensor, cudaStream_t))                        \
  X(void, nvte_quantize_dbias_dgelu, (NVTETensor, NVTETensor, NVTETensor, NVTETensor, NVTETensor, cudaStream_t))      \
  X(void, nvte_quantize_dbias_drelu, (NVTETensor, NVTETensor, NVTETensor, NVTETensor, NVTETensor, cudaStream_t))      \
  X(void, nvte_dequantize, (NVTETensor, NVTETensor, cudaStream_t))                                                    \
  X(void, nvte_transpose, (NVTETensor, NVTETensor, cudaStream_t))                                                     \
  X(void, nvte_swiglu, (NVTETensor, NVTETensor, cudaStream_t))                                                        \
  X(void, nvte_geglu, (NVTETensor, NVTETensor, cudaStream_t))                                                         \
  X(void, nvte_gelu, (NVTETensor, NVTETensor, cudaStream_t))                                                          \
  X(void, nvte_relu, (NVTETensor, NVTETensor, cudaStream_t))                                                          \
  X(void, nvte_dswiglu, (NVTETensor, NVTETensor, NVTETensor, cudaStream_t))                                           \
  X(void, nvte_dgeglu, (NVTETensor, NVTETensor, NVTETensor, cudaStream_t))                                            \
  X(void, nvte_dgelu, (NVTETensor, NVTETensor, NVTETensor, cudaStream_t))                                             \
  X(void, nvte_drelu, (NVTETensor, NVTETensor, NVTETensor, cudaStream_t))                                             \
  X(void, nvte_dswiglu_cast_transpose, (NVTETensor, NVTETensor, NVTETensor, cudaStream_t))                            \
  X(void, nvte_dgeglu_cast_transpose, (NVTETensor, NVTETensor, NVTETensor, cudaStream_t))                             \
  X(void, nvte_fused_rope_forward,                                                                                    \
    (NVTETensor, NVTETensor, NVTETensor, NVTETensor, NVTETensor, int, bool, int, int, int, int, int, int, int, int,   \
     int, int, int, cudaStream_t))                                                                                    \
  X(void, nvte_fused_rope_backward,                                                                                   \
    (NVTETensor, NVTETensor, NVTETensor, NVTETensor, NVTETensor, int, bool, int, int, int, int, int, int, int, int,   \
     int, int, int, cudaStream_t))                                                                                    \
  X(void, nvte_fused_attn_fwd_v2, (NVTEConfig))                                                                       \
  X(void, nvte_fused_attn_bwd_v2, (NVTEConfig))                                                                       \
  X(void, nvte_delayed_scaling_recipe_amax_and_scale_update,                                                          \
    (NVTETensor, NVTETensor, NVTETensor, NVTETensor, const char*, int, float, cudaStream_t))                          \
  X(void, nvte_compute_amax, (NVTETensor, NVTETensor, cudaStream_t))                                                  \
  X(void, nvte_compute_scale_from_amax, (NVTETensor, NVTEConfig, cudaStream_t))
#define CUDART_FUNCTIONS(X)                                                                   \
  X(int, cudaMemcpyAsync, (void*, const void*, size_t, int, cudaStream_t))                    \
  X(int, cudaMemsetAsync, (void*, int, size_t, cudaStream_t))                                 \
  X(int, cudaMallocHost, (void**, size_t))                                                    \
  X(int, cudaFreeHost, (void*))                                                               \
  X(int, cudaStreamCreateWithFlags, (cudaStream_t*, unsigned))                                \
  X(int, cudaStreamSynchronize, (cudaStream_t))                                               \
  X(int, cudaStreamWaitEvent, (cudaStream_t, cudaEvent_t, unsigned))                          \
  X(int, cudaEventCreateWithFlags, (cudaEvent_t*, unsigned))                                  \
  X(int, cudaEventRecord, (cudaEvent_t, cudaStream_t))                                        \
  X(int, cudaEventSynchronize, (cudaEvent_t))                                                 \
  X(int, cudaEventDestroy, (cudaEvent_t))                                                     \
  X(int, cudaEventElapsedTime, (float*, cudaEvent_t, cudaEvent_t))                            \
  X(int, cudaStreamBeginCapture, (cudaStream_t, int))                                         \
  X(int, cudaStreamEndCapture, (cudaStream_t, cudaGraph_t*))                                  \
  X(int, cudaGraphInstantiate, (cudaGraphExec_t*, cudaGraph_t, unsigned long long))           \
  X(int, cudaGraphExecUpdate, (cudaGraphExec_t, cudaGraph_t, cudaGraphExecUpdateResultInfo*)) \
  X(int, cudaGraphLaunch, (cudaGraphExec_t, cudaStream_t))                                    \
  X(int, cudaGraphExecDestroy, (cudaGraphExec_t))                                             \
  X(int, cudaGraphDestroy, (cudaGraph_t))                                                     \
  X(int, cudaGetLastError, ())                                                                \
  X(int, cudaGetDevice, (int*))                                                               \
  X(int, cudaDeviceGetAttribute, (int*, int, int))                                            \
  X(const char*, cudaGetErrorString, (int))
#define DRIVER_FUNCTIONS(X)                                                                                      \
  X(int, cuLaunchKernel,                                                                                         \
    (void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, cudaStream_t, void**, void**)) \
  X(int, cuGetErrorString, (int, const char**))
#define CUBLASLT_FUNCTIONS(X)                                                                                          \
  X(int, cublasLtCreate, (void**))                                                                                     \
  X(int, cublasLtMatmulDescCreate, (void**, int, int))                                                                 \
  X(int, cublasLtMatmulDescSetAttribute, (void*, int, const void*, size_t))                                            \
  X(int, cublasLtMatmulDescDestroy, (void*))                                                                           \
  X(int, cublasLtMatrixLayoutCreate, (void**, int, uint64_t, uint64_t, int64_t))                                       \
  X(int, cublasLtMatrixLayoutDestroy, (void*))                                                                         \
  X(int, cublasLtMatmulPreferenceCreate, (void**))                                                                     \
  X(int, cublasLtMatmulPreferenceSetAttribute, (void*, int, const void*, size_t))                                      \
  X(int, cublasLtMatmulPreferenceDestroy, (void*))                                                                     \
  X(int, cublasLtMatmulAlgoGetHeuristic, (void*, void*, void*, void*, void*, void*, void*, int, LtHeuristic*, int*))   \
  X(int, cublasLtMatmulAlgoConfigGetAttribute, (const void*, int, void*, size_t, size_t*))                             \
  X(int, cublasLtMatmul,                                                                                               \
    (void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*, void*, void*, \
     const void*, void*, size_t, cudaStream_t))                                                                        \
  X(const char*, cublasLtGetStatusString, (int))

#define DECLARE(result, name, arguments) static result(*name) arguments = nullptr;
TE_FUNCTIONS(DECLARE)
CUDART_FUNCTIONS(DECLARE)
DRIVER_FUNCTIONS(DECLARE)
CUBLASLT_FUNCTIONS(DECLARE)
#undef DECLARE

// ---- end of declarations ----------------------------------------------------------------------------------------

static bool g_bound = false;

// Resolves every function above in the libraries (handles of dlopen). Raises ImportError naming those missing.
static void bind(uintptr_t te, uintptr_t cudart, uintptr_t driver, uintptr_t cublaslt) {
  if (g_bound) throw py::import_error("already bound: tensors and statics hold handles of that library");
  std::string missing;
  auto find = [&](uintptr_t library, const char* name) {
    void* symbol = dlsym(reinterpret_cast<void*>(library), name);
    if (!symbol) missing += std::string(missing.empty() ? "" : ", ") + name;
    return symbol;
  };
#define RESOLVE_IN(library, name) name = reinterpret_cast<decltype(name)>(find(library, #name));
#define RESOLVE_TE(result, name, arguments) RESOLVE_IN(te, name)
#define RESOLVE_CUDART(result, name, arguments) RESOLVE_IN(cudart, name)
#define RESOLVE_DRIVER(result, name, arguments) RESOLVE_IN(driver, name)
#define RESOLVE_CUBLASLT(result, name, arguments) RESOLVE_IN(cublaslt, name)
  TE_FUNCTIONS(RESOLVE_TE)
  CUDART_FUNCTIONS(RESOLVE_CUDART)
  DRIVER_FUNCTIONS(RESOLVE_DRIVER)
  CUBLASLT_FUNCTIONS(RESOLVE_CUBLASLT)
  g_bound = missing.empty();
  if (!g_bound) throw py::import_error("entry points missing from the libraries: " + missing);
}

// ---- errors ------------------------------------------------------------------------------------------------------

static PyObject* g_error = nullptr;  // paddle_te.native.errors.TransformerEngineError

[[noreturn]] static void raise(const std::string& message) {
  PyErr_SetString(g_error, message.c_str());
  throw py::error_already_set();
}

static int64_t to_integer(PyObject* object) {  // pybind11's own cast costs more than all the rest of a Tensor
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

static void check_bound() {
  if (!g_bound) throw py::import_error("paddle_te.native.load() has not been called");
}

static void check_cuda(const char* name, int code) {
  if (code) raise(std::string(name) + " failed: " + cudaGetErrorString(code));
}

static std::string dtype_name(int dtype) {
  static const char* names[] = {"byte",    "int16",    "int32",    "int64",   "float32",
                                "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"};
  return 0 <= dtype && dtype < 9 ? names[dtype] : "dtype " + std::to_string(dtype);
}

// ---- tensors -----------------------------------------------------------------------------------------------------

// A TE handle for the length of a C++ scope.
class Handle {
 public:
  explicit Handle(int scaling_mode = kPerTensorScaling) {
    check_bound();
    handle_ = nvte_create_tensor(scaling_mode);
  }
  ~Handle() { nvte_destroy_tensor(handle_); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  operator NVTETensor() const { return handle_; }
  void set(int param, const NVTEBasicTensor& value) { nvte_set_tensor_param_v2(handle_, param, &value, sizeof value); }
  void set_scalar(int param, uintptr_t pointer) { set(param, {reinterpret_cast<void*>(pointer), kFloat32, {{1}, 1}}); }

 private:
  NVTETensor handle_;
};

// The shape of scale_inv of a matrix's row-wise data; that of the columnwise data is the transposed matrix's. cuBLAS
// wants the scales of 1 x 128 blocks transposed, and rows of scales whose lengths are multiples of 4
// (Float8BlockQuantizer::get_scale_shape in TE's pytorch/csrc/quantizer.cpp).
static NVTEShape scale_inv_shape(int scaling_mode, size_t rows, size_t cols) {
  constexpr size_t kBlock = 128;
  auto up = [](size_t n, size_t multiple) { return (n + multiple - 1) / multiple; };
  switch (scaling_mode) {
    case kBlockScaling1D: return {{up(cols, kBlock), 4 * up(rows, 4)}, 2};
    case kBlockScaling2D: return {{up(rows, kBlock), 4 * up(up(cols, kBlock), 4)}, 2};
    default: return {{1}, 1};
  }
}

// A view of device memory; owns the handle, not the memory.
struct Tensor {
  // Of the data, the transposed copy, and fp8's factors; 0 for none.
  struct Addresses {
    uintptr_t data, columnwise, scale, amax, scale_inv, columnwise_scale_inv;
  };

  NVTEBasicTensor data{};
  uintptr_t columnwise = 0, scale = 0, amax = 0, scale_inv = 0;
  Addresses given{};  // to the constructor
  int scaling_mode = kPerTensorScaling;
  Handle handle;

  Tensor() = default;  // an empty tensor, for what TE wants passed but does not use
  Tensor(uintptr_t pointer, const py::tuple& shape, int dtype, uintptr_t columnwise, uintptr_t scale, uintptr_t amax,
         uintptr_t scale_inv, uintptr_t columnwise_scale_inv, int scaling_mode)
      : given{pointer, columnwise, scale, amax, scale_inv, columnwise_scale_inv},
        scaling_mode(scaling_mode),
        handle(scaling_mode) {
    if (shape.size() > 14) throw py::value_error("a tensor has at most 14 dimensions");
    data.dtype = dtype;
    for (; data.shape.ndim < shape.size(); data.shape.ndim++)
      data.shape.data[data.shape.ndim] = to_integer(PyTuple_GET_ITEM(shape.ptr(), data.shape.ndim));
    point(given);
  }

  // Moves the view to other memory.
  void point(const Addresses& to) {
    columnwise = to.columnwise, scale = to.scale, amax = to.amax, scale_inv = to.scale_inv;
    data.data_ptr = reinterpret_cast<void*>(to.data);
    if (to.data || !columnwise) handle.set(kRowwiseData, data);
    if (columnwise) {
      if (data.shape.ndim != 2) throw py::value_error("a tensor with columnwise data must have 2 dimensions");
      handle.set(kColumnwiseData, {reinterpret_cast<void*>(columnwise), data.dtype, {{cols(), rows()}, 2}});
    }
    if (scale) handle.set_scalar(kScale, scale);
    if (amax) handle.set_scalar(kAmax, amax);
    if (to.data || !columnwise) set_scale_inv(kRowwiseScaleInv, scale_inv, rows(), cols());
    if (columnwise) {
      const bool is_shared = scaling_mode == kPerTensorScaling;
      set_scale_inv(kColumnwiseScaleInv, is_shared ? scale_inv : to.columnwise_scale_inv, cols(), rows());
    }
  }

  // rows, cols: of the data that is read with it.
  void set_scale_inv(int param, uintptr_t pointer, size_t rows, size_t cols) {
    if (!pointer) return;
    // cuBLASLt answers "functionality is not supported" otherwise, without saying why.
    if (pointer % 16) throw py::value_error("scale_inv must be 16-byte aligned");
    handle.set(param, {reinterpret_cast<void*>(pointer), kFloat32, scale_inv_shape(scaling_mode, rows, cols)});
  }

  size_t cols() const { return data.shape.ndim ? data.shape.data[data.shape.ndim - 1] : 1; }
  size_t rows() const {
    size_t n = 1;
    for (size_t i = 0; i + 1 < data.shape.ndim; i++) n *= data.shape.data[i];
    return n;
  }
  size_t numel() const { return rows() * cols(); }
  size_t bytes() const {
    static const size_t sizes[] = {1, 2, 4, 8, 4, 2, 2, 1, 1};  // of byte, int16, int32, int64, float32, ..., e5m2
    return numel() * sizes[data.dtype];
  }
  bool is_fp8() const { return data.dtype == kE4M3 || data.dtype == kE5M2; }
  py::tuple shape() const {
    py::tuple result(data.shape.ndim);
    for (size_t i = 0; i < data.shape.ndim; i++) result[i] = data.shape.data[i];
    return result;
  }
  std::string describe() const {
    if (!data.data_ptr && !columnwise) return "empty";
    std::ostringstream out;
    out << dtype_name(data.dtype) << " [";
    for (size_t i = 0; i < data.shape.ndim; i++) out << (i ? ", " : "") << data.shape.data[i];
    out << "]" << (!columnwise ? "" : data.data_ptr ? " with columnwise copy" : " columnwise only");
    return out.str();
  }
};

static const Tensor& empty_tensor() {
  static Tensor* tensor = new Tensor;  // never destroyed: TE may be gone when this process's statics are
  return *tensor;
}
static const Tensor& or_empty(const Tensor* tensor) { return tensor ? *tensor : empty_tensor(); }

using Named = std::initializer_list<std::pair<const char*, const Tensor*>>;

static std::string describe(const std::string& what, Named tensors) {
  std::string text = what;
  for (auto& [name, tensor] : tensors)
    if (tensor) text += std::string("\n  ") + name + ": " + tensor->describe();
  return text;
}

// Runs f; a C++ exception becomes TransformerEngineError with the entry point, TE's message and the tensors.
template <class F>
static void call(const char* name, Named tensors, F&& f) {
  try {
    f();
  } catch (py::error_already_set&) {
    throw;  // a Python error from the workspace's allocator
  } catch (const std::exception& e) {
    raise(describe(std::string(name) + " failed: " + e.what(), tensors));
  } catch (...) {
    raise(describe(std::string(name) + " failed with an unknown C++ exception", tensors));
  }
}

// ---- stream and workspace ------------------------------------------------------------------------------------

// The SMs that kernels use when TE's variable `margin` leaves some of them to other streams' kernels, such as NCCL's.
static int sms_without(const char* margin, int sm_count) {
  const char* text = std::getenv(margin);
  if (!text || !*text) return sm_count;
  char* end = nullptr;
  const long sms = std::strtol(text, &end, 10);
  if (*end || sms < 0 || sms >= sm_count)
    throw py::value_error(std::string(margin) + "=" + text + ": it must be an integer from 0 to " +
                          std::to_string(sm_count - 1) + ", the SMs that are left to other kernels");
  return sm_count - static_cast<int>(sms);
}

constexpr int kDefaultKind = 4;  // cudaMemcpyDefault: the direction follows from the addresses

// A CUDA stream of the current device with the scratch memory its kernels share (they run one after another).
class Stream {
 public:
  // allocate(bytes) returns an object with data_ptr(), which keeps the memory alive.
  Stream(uintptr_t handle, py::function allocate)
      : handle(reinterpret_cast<cudaStream_t>(handle)), allocate_(std::move(allocate)) {
    check_bound();
    check_cuda("cudaGetDevice", cudaGetDevice(&device));
    auto get = [&](int* value, DeviceAttribute attribute) {
      check_cuda("cudaDeviceGetAttribute", cudaDeviceGetAttribute(value, attribute, device));
    };
    get(&sm_count, kMultiProcessorCount);
    get(&major, kComputeCapabilityMajor);
    get(&minor, kComputeCapabilityMinor);
    gemm_sms = sms_without("NVTE_EXT_MARGIN_SM", sm_count);
    norm_fwd_sms = sms_without("NVTE_FWD_LAYERNORM_SM_MARGIN", sm_count);
    norm_bwd_sms = sms_without("NVTE_BWD_LAYERNORM_SM_MARGIN", sm_count);
  }

  void* workspace(size_t bytes) {
    if (bytes > size_) {
      // Kernels in flight may use the old memory, and not every allocator knows streams.
      if (size_) check_cuda("cudaStreamSynchronize", cudaStreamSynchronize(handle));
      size_ = 0;
      memory_ = py::none();
      memory_ = allocate_(bytes);
      pointer_ = memory_.attr("data_ptr")().cast<uintptr_t>();
      if (pointer_ % 256) throw py::value_error("the workspace must be 256-byte aligned");
      size_ = bytes;
    }
    return reinterpret_cast<void*>(pointer_);
  }
  size_t workspace_size() const { return size_; }
  uintptr_t workspace_pointer() const { return pointer_; }
  // Memory for one call, an object with data_ptr(); the allocator may hand it to later work of this stream at once.
  py::object temporary(size_t bytes) { return allocate_(bytes); }

  cudaStream_t handle;                    // what calls give their work to
  cudaStream_t capture_handle = nullptr;  // in its place while that is captured
  bool captures = false;                  // whether it is captured at the moment
  bool has_one_workspace = false;         // whatever its size: graphs name it by its address
  int device = 0, sm_count = 0, major = 0, minor = 0;
  int gemm_sms = 0, norm_fwd_sms = 0, norm_bwd_sms = 0;  // of sm_count, those that these kernels use

 private:
  py::function allocate_;
  py::object memory_ = py::none();
  uintptr_t pointer_ = 0;
  size_t size_ = 0;
};

// Captures what a Stream is given as long as this lives, instead of starting it.
//
// It is given to a stream that nobody else knows: other threads record events in the Stream's own, such as Paddle's
// reader of data, whose work a capture would take for a part of the graph.
class Capture {
 public:
  explicit Capture(Stream& stream) : stream_(stream), handle_(stream.handle) {
    constexpr unsigned kNonBlocking = 1;
    constexpr int kThreadLocal = 1;                 // other threads may allocate memory meanwhile
    cudaStream_t& unknown = stream.capture_handle;  // never destroyed: CUDA may be gone when the process's objects are
    if (!unknown) check_cuda("cudaStreamCreateWithFlags", cudaStreamCreateWithFlags(&unknown, kNonBlocking));
    check_cuda("cudaStreamBeginCapture", cudaStreamBeginCapture(unknown, kThreadLocal));
    stream.handle = unknown, stream.captures = true;
  }
  ~Capture() {
    if (stream_.captures) stop();
    if (graph_) cudaGraphDestroy(graph_);
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  // The graph, which lives as long as this.
  cudaGraph_t end() {
    check_cuda("cudaStreamEndCapture", stop());
    return graph_;
  }

 private:
  int stop() {
    const int code = cudaStreamEndCapture(stream_.handle, &graph_);
    stream_.handle = handle_, stream_.captures = false;
    return code;
  }

  Stream& stream_;
  const cudaStream_t handle_;
  cudaGraph_t graph_ = nullptr;
};

// ---- copies between device and host, beside other work -----------------------------------------------------------

// Pinned memory of the host, without which copies wait for the host.
class HostMemory {
 public:
  explicit HostMemory(size_t bytes) : bytes(bytes) {
    check_bound();
    check_cuda("cudaMallocHost", cudaMallocHost(&pointer_, bytes));
  }
  ~HostMemory() { cudaFreeHost(pointer_); }
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;
  uintptr_t data_ptr() const { return reinterpret_cast<uintptr_t>(pointer_); }

  const size_t bytes;

 private:
  void* pointer_ = nullptr;
};

// What a stream had been given when it was made.
class Event {
 public:
  explicit Event(cudaStream_t stream) {
    constexpr unsigned kDisableTiming = 2;
    check_cuda("cudaEventCreateWithFlags", cudaEventCreateWithFlags(&event_, kDisableTiming));
    check_cuda("cudaEventRecord", cudaEventRecord(event_, stream));
  }
  ~Event() { cudaEventDestroy(event_); }  // CUDA lets it go when it is over
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void hold_stream(cudaStream_t stream) const {
    check_cuda("cudaStreamWaitEvent", cudaStreamWaitEvent(stream, event_, 0));
  }
  void hold(const Stream& stream) const { hold_stream(stream.handle); }
  void wait() const { check_cuda("cudaEventSynchronize", cudaEventSynchronize(event_)); }

 private:
  cudaEvent_t event_ = nullptr;
};

// A stream of its own, for copies alone. It is never destroyed: CUDA may be gone when the process's objects are.
class CopyStream {
 public:
  CopyStream() {
    check_bound();
    constexpr unsigned kNonBlocking = 1;
    check_cuda("cudaStreamCreateWithFlags", cudaStreamCreateWithFlags(&stream_, kNonBlocking));
  }
  void follow(const Stream& stream) { Event(stream.handle).hold_stream(stream_); }
  void follow_event(const Event& event) { event.hold_stream(stream_); }
  void copy(uintptr_t to, uintptr_t from, size_t bytes) {
    check_cuda("cudaMemcpyAsync", cudaMemcpyAsync(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from),
                                                  bytes, kDefaultKind, stream_));
  }
  std::unique_ptr<Event> mark() const { return std::make_unique<Event>(stream_); }

 private:
  cudaStream_t stream_ = nullptr;
};

// ---- the module's functions: counted, called at once or recorded ----------------------------------------------------

// Where recorded addresses are in one run. Such an address is index << 48 | offset and becomes bases[index] + offset.
class Bases {
 public:
  explicit Bases(const py::list& bases) : bases_(bases) {}
  static size_t index(int64_t address) { return address < 0 ? 0 : address >> 48; }
  uintptr_t at(uintptr_t address) const {
    const size_t number = index(address);
    if (number >= static_cast<size_t>(PyList_GET_SIZE(bases_.ptr())))
      throw py::index_error("no base for index " + std::to_string(number));
    return to_integer(PyList_GET_ITEM(bases_.ptr(), number)) + (address & ((uintptr_t{1} << 48) - 1));
  }
  // What a tensor's constructor was given: 0 where that was no recorded address.
  uintptr_t of_tensor(uintptr_t address) const { return index(address) ? at(address) : 0; }
  // An integer among arguments: itself where it is no recorded address.
  int64_t of_number(int64_t number) const { return index(number) ? at(number) : number; }

 private:
  const py::list& bases_;
};

// A kernel's parameters, pointers and long longs.
struct KernelArguments {
  static constexpr size_t kMost = 24;

  explicit KernelArguments(const py::args& arguments) : count(arguments.size()) {
    if (count > kMost) throw py::value_error("too many kernel arguments");
    for (size_t i = 0; i < count; i++) values[i] = to_integer(PyTuple_GET_ITEM(arguments.ptr(), i));
  }

  size_t count;
  int64_t values[kMost];
};

// How a recorded call keeps an argument, and gets it back in each run: objects by address, numbers by value.
template <class T>
struct Kept {
  using Type = std::decay_t<T>;
  static const Type& keep(const Type& value) { return value; }
  static const Type& get(const Type& value, const Bases&) { return value; }
};
template <class T>
struct KeptObject {
  using Type = T*;
  static T* keep(T& object) { return &object; }
  static T& get(T* object, const Bases&) { return *object; }
};
template <>
struct Kept<const Tensor&> : KeptObject<const Tensor> {};
template <>
struct Kept<Stream&> : KeptObject<Stream> {};
template <>
struct Kept<uintptr_t> {
  using Type = uintptr_t;
  static uintptr_t keep(uintptr_t value) { return value; }
  static uintptr_t get(uintptr_t value, const Bases& bases) { return bases.of_number(value); }
};
template <>
struct Kept<const KernelArguments&> {
  using Type = KernelArguments;
  static const KernelArguments& keep(const KernelArguments& values) { return values; }
  static KernelArguments get(KernelArguments arguments, const Bases& bases) {
    for (size_t i = 0; i < arguments.count; i++) arguments.values[i] = bases.of_number(arguments.values[i]);
    return arguments;
  }
};

// In which precision a call computes: fp8 if any tensor is, else the first one's dtype; "" for calls without tensors.
class Precision {
 public:
  static constexpr size_t kCount = kE5M2 + 2;

  void see(const Tensor& tensor) {
    if (tensor.is_fp8() || number_ == 0) number_ = 1 + (tensor.is_fp8() ? int{kE4M3} : tensor.data.dtype);
  }
  void see(const Tensor* tensor) {
    if (tensor) see(*tensor);
  }
  template <class T>
  void see(const T&) {}

  size_t number() const { return number_; }
  static std::string name(size_t number) {
    return number == 0 ? "" : number == 1 + kE4M3 ? "fp8" : dtype_name(static_cast<int>(number) - 1);
  }

 private:
  size_t number_ = 0;
};

// A function of this module that starts work, and how often it has, by precision.
struct Function {
  const char* name;
  std::array<int64_t, Precision::kCount> counts{};
};
static std::deque<Function> g_functions;

static py::dict counts() {
  py::dict result;
  for (const Function& counted : g_functions)
    for (size_t i = 0; i < counted.counts.size(); i++)
      if (counted.counts[i]) result[py::make_tuple(counted.name, Precision::name(i))] = counted.counts[i];
  return result;
}

static PyObject* g_module = nullptr;

// How often Sequences have started their calls as a graph; how often these were captured for that, and the graphs made.
static struct {
  int64_t launched, captured, instantiated;
} g_graph_counts;

// CUDA graphs of the same calls on different memory, the latest used first.
//
// Where the allocator gives the same addresses again, their graph is found. Where it does not, the calls are captured
// once more, and the graph that has not been used for longest gets the new addresses, if there are `most` already.
// CUDA lets a graph be updated or destroyed while it runs; that holds for later launches.
class Graphs {
 public:
  using Addresses = std::vector<uintptr_t>;  // all that the calls read in a run

  explicit Graphs(size_t most) : most_(most) {}
  ~Graphs() {
    for (const Graph& graph : graphs_) cudaGraphExecDestroy(graph.executable);
  }
  Graphs(const Graphs&) = delete;
  Graphs& operator=(const Graphs&) = delete;

  // nullptr where there is none.
  cudaGraphExec_t find(const Addresses& addresses) {
    for (auto it = graphs_.begin(); it != graphs_.end(); ++it)
      if (it->addresses == addresses) {
        graphs_.splice(graphs_.begin(), graphs_, it);
        return it->executable;
      }
    return nullptr;
  }

  cudaGraphExec_t add(Addresses addresses, cudaGraph_t captured) {
    g_graph_counts.captured++;
    cudaGraphExec_t executable = graphs_.size() < most_ ? nullptr : update_last(captured);
    if (!executable) {
      check_cuda("cudaGraphInstantiate", cudaGraphInstantiate(&executable, captured, 0));
      g_graph_counts.instantiated++;
    }
    graphs_.push_front({std::move(addresses), executable});
    return executable;
  }

 private:
  struct Graph {
    Addresses addresses;
    cudaGraphExec_t executable;
  };

  // Takes the last one off the list, and returns it if it could be updated.
  cudaGraphExec_t update_last(cudaGraph_t captured) {
    cudaGraphExec_t last = graphs_.back().executable;
    graphs_.pop_back();
    cudaGraphExecUpdateResultInfo info;
    if (!cudaGraphExecUpdate(last, captured, &info)) return last;
    cudaGetLastError();  // other kernels, such as cuBLAS chooses for other addresses: no failure
    cudaGraphExecDestroy(last);
    return nullptr;
  }

  const size_t most_;
  std::list<Graph> graphs_;
};

// Says it through Python's logger of this package's native code.
static void log(const char* level, const std::string& message) {
  py::module_::import("logging").attr("getLogger")("paddle_te.native").attr(level)(message);
}

// Calls that are made again and again, on other memory each time. Their arguments are converted once.
class Sequence {
 public:
  Sequence(const py::tuple& tensors, const py::tuple& calls, size_t graphs) : tensors_(tensors), arguments_(calls) {
    for (py::handle tensor : tensors) moved_.push_back(&tensor.cast<Tensor&>());
    const Scope scope(this);
    for (py::handle object : calls) {
      const auto [name, arguments] = object.cast<std::pair<py::str, py::tuple>>();
      const size_t before = calls_.size();
      py::handle(g_module).attr(name)(*arguments);  // which comes back here, see record
      if (calls_.size() != before + 1) throw py::value_error(std::string(name) + " cannot be recorded");
      for (py::handle argument : arguments) see(argument);
    }
    if (graphs && stream_) {
      graphs_ = std::make_unique<Graphs>(graphs);
      stream_->has_one_workspace = true;
    }
  }

  void run(const py::list& list) {
    const Bases bases(list);
    if (!launch(bases)) {
      move(bases);
      for (const Call& call : calls_) {
        call.make(bases);
        call.count++;
      }
      prepared_ = std::this_thread::get_id();
      return;
    }
    for (const Call& call : calls_) call.count++;
  }

  // The call for the Sequence that is being made, if one is.
  template <class... Args>
  static bool record(Function& counted, void (*function)(Args...), const Precision& precision, Args... args) {
    if (!recording_) return false;
    std::tuple<typename Kept<Args>::Type...> kept(Kept<Args>::keep(args)...);
    auto make = [function, kept](const Bases& bases) {
      std::apply([&](const auto&... values) { function(Kept<Args>::get(values, bases)...); }, kept);
    };
    recording_->calls_.push_back({make, counted.counts[precision.number()]});
    return true;
  }

 private:
  struct Scope {
    explicit Scope(Sequence* sequence) { recording_ = sequence; }
    ~Scope() { recording_ = nullptr; }
  };
  struct Call {
    std::function<void(const Bases&)> make;
    int64_t& count;
  };
  inline static Sequence* recording_ = nullptr;  // the interpreter's lock is held from beginning to end

  // Notes the stream, and which addresses a call reads.
  void see(py::handle argument) {
    if (py::isinstance<Stream>(argument)) stream_ = &argument.cast<Stream&>();
    if (py::isinstance<Tensor>(argument)) {
      const auto& from = argument.cast<Tensor&>().given;
      for (uintptr_t address :
           {from.data, from.columnwise, from.scale, from.amax, from.scale_inv, from.columnwise_scale_inv})
        used_.insert(Bases::index(address));
    }
    if (PyLong_CheckExact(argument.ptr())) used_.insert(Bases::index(to_integer(argument.ptr())));
    used_.erase(0);
  }

  void move(const Bases& bases) const {
    for (Tensor* tensor : moved_) {
      const auto& from = tensor->given;
      tensor->point({bases.of_tensor(from.data), bases.of_tensor(from.columnwise), bases.of_tensor(from.scale),
                     bases.of_tensor(from.amax), bases.of_tensor(from.scale_inv),
                     bases.of_tensor(from.columnwise_scale_inv)});
    }
  }

  // Whether a graph was launched in place of the calls. A thread makes them once before: its handles of cuBLAS and
  // cuDNN, their plans, kernels and scratch memory come with the first calls, and cannot while they are captured.
  bool launch(const Bases& bases) {
    if (!graphs_ || prepared_ != std::this_thread::get_id()) return false;
    Graphs::Addresses addresses{stream_->workspace_pointer()};
    for (size_t index : used_) addresses.push_back(bases.at(index << 48));
    cudaGraphExec_t graph = graphs_->find(addresses);
    if (!graph) {
      try {
        Capture capture(*stream_);
        move(bases);
        for (const Call& call : calls_) call.make(bases);
        graph = graphs_->add(std::move(addresses), capture.end());
      } catch (const std::exception& error) {
        give_up(error.what());
        return false;
      }
    }
    check_cuda("cudaGraphLaunch", cudaGraphLaunch(graph, stream_->handle));
    g_graph_counts.launched++;
    return true;
  }

  // From now on the calls are made one by one.
  void give_up(std::string reason) {
    cudaGetLastError();  // or the next call takes it for its own
    graphs_.reset();
    std::set<std::string> functions;
    for (py::handle call : arguments_) functions.insert(py::str(call[py::int_(0)]));
    std::string names;
    for (const std::string& name : functions) names += (names.empty() ? "" : ", ") + name;
    for (char& character : reason)
      if (character == '\n') character = ';';
    log("warning", "CUDA graphs: a recorded program of " + std::to_string(calls_.size()) + " calls (" + names +
                       ") runs without a graph from now on, because it cannot be captured: " + reason);
  }

  py::tuple tensors_, arguments_;  // keep alive what the calls and moved_ point to
  std::vector<Tensor*> moved_;
  std::vector<Call> calls_;
  std::set<size_t> used_;  // the indices of all addresses that the calls read
  Stream* stream_ = nullptr;
  std::unique_ptr<Graphs> graphs_;
  std::thread::id prepared_;  // the thread that has made the calls before
};

// Makes the call, unless it is recorded. What raises has not run and is not counted.
template <class... Args>
static void enter(Function& counted, void (*function)(Args...), Args... args) {
  Precision precision;
  (precision.see(args), ...);
  if (Sequence::record<Args...>(counted, function, precision, args...)) return;
  function(args...);
  counted.counts[precision.number()]++;
}

static Function& new_function(const char* name) { return g_functions.emplace_back(Function{name}); }

// m.def for what starts work.
template <class... Args, class... Extra>
static void define(py::module_& m, const char* name, void (*function)(Args...), const Extra&... extra) {
  Function& counted = new_function(name);
  m.def(name, [&counted, function](Args... args) { enter<Args...>(counted, function, args...); }, extra...);
}

// TE's own sizes (transformer_engine/pytorch/module/base.py): 32 MiB, and 1 KiB for alignment and NVFP4's scalars.
constexpr size_t kGemmWorkspace = 32 * 1024 * 1024 + 1024;

// Bytes of a number of these dtypes.
static size_t bytes_of(int dtype) {
  switch (dtype) {
    case kInt64: return 8;
    case kInt32:
    case kFloat32: return 4;
    case kFloat16:
    case kBFloat16: return 2;
    default: return 1;
  }
}

// Entry points with a scratch tensor: called with an empty one they fill in the shape and the dtype they need. The
// answer depends on `key` alone and is kept.
using Key = std::array<int64_t, 13>;

template <class F>
static void call_with_workspace(const Key& key, Stream& stream, F&& f) {
  static std::map<Key, NVTEBasicTensor> answers;
  auto it = answers.find(key);
  if (it == answers.end()) {
    Handle query;
    f(query);
    NVTEBasicTensor answer{};
    size_t written = 0;
    nvte_get_tensor_param_v2(query, kRowwiseData, &answer, sizeof answer, &written);
    it = answers.emplace(key, answer).first;
  }
  const int dtype = it->second.dtype;
  const NVTEShape& shape = it->second.shape;
  size_t bytes = bytes_of(dtype);
  for (size_t i = 0; i < shape.ndim; i++) bytes *= shape.data[i];
  Handle workspace;
  if (bytes <= kGemmWorkspace || stream.has_one_workspace) {
    workspace.set(kRowwiseData, {stream.workspace(bytes), dtype, shape});
    f(workspace);
  } else {
    // cuDNN's backward sums dq in float32: as large as an activation, so activations get it back in between.
    py::object memory = stream.temporary(bytes);
    auto pointer = memory.attr("data_ptr")().cast<uintptr_t>();
    workspace.set(kRowwiseData, {reinterpret_cast<void*>(pointer), dtype, shape});
    f(workspace);
  }
}

static bool aligned(std::initializer_list<const Tensor*> tensors) {
  for (auto tensor : tensors)
    if (reinterpret_cast<uintptr_t>(tensor->data.data_ptr) % 16) return false;
  return true;
}

// ---- norms, casts, activations -------------------------------------------------------------------------------

enum EntryPoint {
  kLayernormFwd,
  kLayernormBwd,
  kRmsnormFwd,
  kRmsnormBwd,
  kRmsnormBwdAdd,
  kQuantizeDbias,
  kQuantizeDbiasDgelu,
  kQuantizeDbiasDrelu,
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

ACTIVATION(swiglu)
ACTIVATION(geglu)
ACTIVATION(gelu)
ACTIVATION(relu)
ACTIVATION_GRADIENT(dswiglu)
ACTIVATION_GRADIENT(dgeglu)
ACTIVATION_GRADIENT(dgelu)
ACTIVATION_GRADIENT(drelu)
ACTIVATION_GRADIENT(dswiglu_cast_transpose)
ACTIVATION_GRADIENT(dgeglu_cast_transpose)
ACTIVATION_GRADIENT_WITH_DBIAS(quantize_dbias_dgelu, kQuantizeDbiasDgelu)
ACTIVATION_GRADIENT_WITH_DBIAS(quantize_dbias_drelu, kQuantizeDbiasDrelu)
#undef ACTIVATION
#undef ACTIVATION_GRADIENT
#undef ACTIVATION_GRADIENT_WITH_DBIAS

// ---- GEMM ----------------------------------------------------------------------------------------------------

// cuBLAS is column-major: in rows and columns this is D[n, m] = op(B)[n, k] · op(A)[k, m]. TE trusts D's shape.
static void check_gemm(const char* name, Named named, const Tensor& a, const Tensor& b, const Tensor& d, bool transa,
                       bool transb, const Tensor* bias, const Tensor* dbias) {
  const size_t m = transa ? a.rows() : a.cols(), k = transa ? a.cols() : a.rows();
  const size_t n = transb ? b.cols() : b.rows(), kb = transb ? b.rows() : b.cols();
  if (k != kb || d.rows() != n || d.cols() != m)
    raise(describe(std::string(name) + ": shapes do not fit (transa=" + (transa ? "1" : "0") +
                       ", transb=" + (transb ? "1" : "0") + ")",
                   named));
  if (bias && dbias) raise(describe(std::string(name) + ": bias and dbias are two GEMMs' epilogues", named));
  for (auto [vector, size] : {std::pair{bias, m}, std::pair{dbias, n}})
    if (vector && (vector->numel() != size || vector->data.dtype != d.data.dtype))
      raise(describe(std::string(name) + ": bias needs D's columns, dbias its rows, and both D's dtype", named));
}

static void gemm(const Tensor& a, const Tensor& b, const Tensor& d, bool transa, bool transb, Stream& stream,
                 bool accumulate, bool split_accumulator, const Tensor* bias, const Tensor* dbias) {
  const char* name = "nvte_cublas_gemm_v2";
  Named named = {{"A", &a}, {"B", &b}, {"D", &d}, {"bias", bias}, {"dbias", dbias}};
  check_gemm(name, named, a, b, d, transa, transb, bias, dbias);
  call(name, named, [&] {
    static std::map<std::tuple<bool, int, bool, bool>, NVTEConfig> configs;  // for the process's life
    NVTEConfig& config = configs[{split_accumulator, stream.gemm_sms, bias, dbias}];
    if (!config) {
      config = nvte_create_matmul_config();
      const uint8_t split = split_accumulator;
      nvte_set_matmul_config_attribute(config, kUseSplitAccumulator, &split, sizeof split);
      const int32_t sms = stream.gemm_sms;
      if (sms < stream.sm_count) nvte_set_matmul_config_attribute(config, kSMCount, &sms, sizeof sms);
    }
    for (auto [vector, attribute] : {std::pair{bias, kBiasTensor}, std::pair{dbias, kDBiasTensor}}) {
      if (!vector) continue;
      const NVTETensor handle = vector->handle;
      nvte_set_matmul_config_attribute(config, attribute, &handle, sizeof handle);
    }
    Handle workspace;
    workspace.set(kRowwiseData, {stream.workspace(kGemmWorkspace), kByte, {{kGemmWorkspace}, 1}});
    const float alpha = 1, beta = accumulate;
    nvte_cublas_gemm_v2(transa, transb, &alpha, a.handle, b.handle, &beta, d.handle, d.handle, workspace, config,
                        stream.handle);
  });
}

// ---- the fastest algorithm of a GEMM --------------------------------------------------------------------------

// TE launches the first of the algorithms that cuBLASLt proposes for a product; another one can be faster, and have the
// same bits. A Product is described as TE 2.20 does it (cublas_gemm in common/gemm/cublaslt_gemm.cu), for fp8 operands
// with one scale each, on GPUs before Blackwell, whose fp8 GEMMs read both operands along k, and for a D of 16 or 32
// bits. TE's mode of scales is cuBLASLt's default and needs no attribute.
namespace lt {

using Algorithm = std::array<uint64_t, 8>;  // cublasLtMatmulAlgo_t

static void check(const char* name, int status) {
  if (status) throw std::runtime_error(std::string(name) + " failed: " + cublasLtGetStatusString(status));
}

// Of this thread and a device, as TE has them; never destroyed, as TE's are not.
static void* handle(int device) {
  thread_local std::map<int, void*> handles;
  void*& found = handles[device];
  if (!found) check("cublasLtCreate", cublasLtCreate(&found));
  return found;
}

// A description of cuBLASLt's for the length of a C++ scope.
class Object {
 public:
  template <class... Args>
  Object(int (*destroy)(void*), int (*create)(void**, Args...), Args... args) : destroy_(destroy) {
    check("cuBLASLt's description", create(&object_, args...));
  }
  ~Object() { destroy_(object_); }
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  operator void*() const { return object_; }

 private:
  int (*destroy_)(void*);
  void* object_ = nullptr;
};

static int type_of(const Tensor& tensor) {
  switch (tensor.data.dtype) {
    case kFloat32: return kCuda32F;
    case kFloat16: return kCuda16F;
    case kBFloat16: return kCuda16BF;
    case kE4M3: return kCudaE4M3;
    case kE5M2: return kCudaE5M2;
    default: throw std::runtime_error("no GEMM of " + dtype_name(tensor.data.dtype));
  }
}

static uint32_t alignment(const void* pointer) {
  uint32_t bytes = 256;
  while (reinterpret_cast<uintptr_t>(pointer) % bytes) bytes /= 2;
  return bytes;
}

// The copy of a matrix that has k in its rows.
static const void* along_k(const Tensor& matrix, bool k_in_rows) {
  const void* data = k_in_rows ? matrix.data.data_ptr : reinterpret_cast<const void*>(matrix.columnwise);
  if (!data) throw std::runtime_error("an operand lacks the copy that this GEMM reads");
  return data;
}

// D (+)= B · op(A) (+ bias), as tuned_gemm has it: column by column D [m, n] = Aᵀ [m, k] · B [k, n].
class Product {
 public:
  Product(const Tensor& a, const Tensor& b, const Tensor& d, bool transa, bool accumulate, const Tensor* bias,
          Stream& stream)
      : stream_(stream),
        a_(along_k(a, transa)),
        b_(along_k(b, true)),
        beta_(accumulate),
        m_(d.cols()),
        n_(d.rows()),
        k_(b.cols()),
        product_(cublasLtMatmulDescDestroy, cublasLtMatmulDescCreate, int{kCompute32F}, int{kCuda32F}),
        of_a_(cublasLtMatrixLayoutDestroy, cublasLtMatrixLayoutCreate, type_of(a), k_, m_, int64_t(k_)),
        of_b_(cublasLtMatrixLayoutDestroy, cublasLtMatrixLayoutCreate, type_of(b), k_, n_, int64_t(k_)),
        of_c_(cublasLtMatrixLayoutDestroy, cublasLtMatrixLayoutCreate, type_of(d), m_, n_, int64_t(m_)),
        of_d_(cublasLtMatrixLayoutDestroy, cublasLtMatrixLayoutCreate, type_of(d), m_, n_, int64_t(m_)),
        alignments_{alignment(a_), alignment(b_), alignment(d.data.data_ptr), alignment(d.data.data_ptr)},
        key_{stream.device, stream.gemm_sms, a.data.dtype,   b.data.dtype,   d.data.dtype, int64_t(m_),    int64_t(n_),
             int64_t(k_),   alignments_[0],  alignments_[1], alignments_[2], accumulate,   bias != nullptr} {
    set(kLtTransA, int32_t{1});
    set(kLtTransB, int32_t{0});
    if (stream.gemm_sms < stream.sm_count) set(kLtSMCountTarget, int32_t{stream.gemm_sms});
    set(kLtFastAccum, int8_t{1});
    set(kLtAScalePointer, a.scale_inv);
    set(kLtBScalePointer, b.scale_inv);
    if (bias) {
      set(kLtBiasDataType, int32_t{type_of(*bias)});
      set(kLtBiasPointer, bias->data.data_ptr);
    }
    set(kLtEpilogue, int32_t{bias ? kLtBias : kLtNoEpilogue});
  }

  // All that may decide on an algorithm.
  const Key& key() const { return key_; }

  // Into memory aligned as D is. Returns cuBLASLt's status.
  int launch(const Algorithm& algorithm, void* d) const {
    const float alpha = 1;
    return cublasLtMatmul(handle(stream_.device), product_, &alpha, a_, of_a_, b_, of_b_, &beta_, d, of_c_, d, of_d_,
                          &algorithm, stream_.workspace(kGemmWorkspace), kGemmWorkspace, stream_.handle);
  }

  // TE's, and others that add up what k gives in one piece.
  std::vector<Algorithm> algorithms() const {
    constexpr int kMost = 16;
    const Object preference(cublasLtMatmulPreferenceDestroy, cublasLtMatmulPreferenceCreate);
    auto prefer = [&](int attribute, const auto& value) {
      check("cublasLtMatmulPreferenceSetAttribute",
            cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
    };
    prefer(kLtMaxWorkspace, kGemmWorkspace);
    for (int i = 0; i < 4; i++) prefer(kLtAlignmentA + i, alignments_[i]);
    std::vector<Algorithm> found;
    for (int wanted : {1, kMost}) {  // TE asks for one
      std::array<LtHeuristic, kMost> results{};
      int count = 0;
      check("cublasLtMatmulAlgoGetHeuristic",
            cublasLtMatmulAlgoGetHeuristic(handle(stream_.device), product_, of_a_, of_b_, of_c_, of_d_, preference,
                                           wanted, results.data(), &count));
      for (int i = 0; i < count; i++) {
        const Algorithm& algorithm = results[i].algorithm;
        if (wanted == 1 || (!results[i].state && algorithm != found[0] && sums_in_one_piece(algorithm)))
          found.push_back(algorithm);
      }
      if (found.empty()) throw std::runtime_error("cuBLASLt has no algorithm for this product");
    }
    return found;
  }

  std::string describe() const {
    return "[" + std::to_string(n_) + ", " + std::to_string(k_) + "] x [" + std::to_string(k_) + ", " +
           std::to_string(m_) + "]" + (beta_ ? " + D" : "");
  }

 private:
  template <class T>
  void set(int attribute, const T& value) {
    check("cublasLtMatmulDescSetAttribute", cublasLtMatmulDescSetAttribute(product_, attribute, &value, sizeof value));
  }
  // Neither split-K nor a reduction, which would add in another order.
  static bool sums_in_one_piece(const Algorithm& algorithm) {
    auto attribute = [&](int which) {
      uint32_t value = 0;
      size_t written = 0;
      check("cublasLtMatmulAlgoConfigGetAttribute",
            cublasLtMatmulAlgoConfigGetAttribute(&algorithm, which, &value, sizeof value, &written));
      return value;
    };
    return attribute(kLtSplitK) <= 1 && attribute(kLtReductionScheme) == 0;
  }

  Stream& stream_;
  const void *a_, *b_;
  const float beta_;
  const uint64_t m_, n_, k_;
  const Object product_, of_a_, of_b_, of_c_, of_d_;
  const std::array<uint32_t, 4> alignments_;  // of A, B, C and D, which is C
  const Key key_;
};

// Milliseconds of what a stream is given between the two. The host waits for them.
class Stopwatch {
 public:
  explicit Stopwatch(cudaStream_t stream) : stream_(stream) {
    for (cudaEvent_t* event : {&begin_, &end_})
      check_cuda("cudaEventCreateWithFlags", cudaEventCreateWithFlags(event, 0));
  }
  ~Stopwatch() {
    for (cudaEvent_t event : {begin_, end_}) cudaEventDestroy(event);
  }
  void start() { check_cuda("cudaEventRecord", cudaEventRecord(begin_, stream_)); }
  float stop() {
    float ms = 0;
    check_cuda("cudaEventRecord", cudaEventRecord(end_, stream_));
    check_cuda("cudaEventSynchronize", cudaEventSynchronize(end_));
    check_cuda("cudaEventElapsedTime", cudaEventElapsedTime(&ms, begin_, end_));
    return ms;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

static void copy(void* to, const void* from, size_t bytes, int kind, Stream& stream) {
  check_cuda("cudaMemcpyAsync", cudaMemcpyAsync(to, from, bytes, kind, stream.handle));
}

// Whether two pieces of device memory have the same bytes, which the host compares.
static bool same_bytes(const char* one, const char* other, size_t bytes, Stream& stream) {
  constexpr size_t kAtOnce = size_t{64} << 20;
  constexpr int kDeviceToHost = 2;
  std::vector<char> left(std::min(bytes, kAtOnce)), right(left.size());
  for (size_t first = 0; first < bytes; first += kAtOnce) {
    const size_t count = std::min(kAtOnce, bytes - first);
    copy(left.data(), one + first, count, kDeviceToHost, stream);
    copy(right.data(), other + first, count, kDeviceToHost, stream);
    check_cuda("cudaStreamSynchronize", cudaStreamSynchronize(stream.handle));
    if (std::memcmp(left.data(), right.data(), count)) return false;
  }
  return true;
}

static void* address(const py::object& memory) {
  const auto pointer = memory.attr("data_ptr")().cast<uintptr_t>();
  if (pointer % 256) throw py::value_error("memory to time GEMMs in must be 256-byte aligned");
  return reinterpret_cast<void*>(pointer);
}

// The fastest algorithm whose result has the bytes of `d`, which is TE's. Nothing where that is TE's own algorithm, or
// where TE's is at most 2 % slower: timings differ by as much. before: what D was, if it is added to.
static std::optional<Algorithm> fastest(const Product& product, const Tensor& d, const void* before, Stream& stream) {
  constexpr int kRounds = 9, kLaunches = 2;
  constexpr float kWorthwhile = 0.98f;
  const py::object memory = stream.temporary(d.bytes());
  void* scratch = address(memory);
  std::vector<Algorithm> algorithms = product.algorithms();
  // the first launch of each loads its kernel, and tells whether it can be launched at all
  auto fails = [&](const Algorithm& algorithm) {
    if (!product.launch(algorithm, scratch)) return false;
    cudaGetLastError();  // or the next call takes it for its own
    return true;
  };
  algorithms.erase(std::remove_if(algorithms.begin() + 1, algorithms.end(), fails), algorithms.end());
  // in turn, as the GPU's clock falls under load
  Stopwatch watch(stream.handle);
  std::vector<std::array<float, kRounds>> rounds(algorithms.size());
  for (int round = 0; round < kRounds; round++)
    for (size_t i = 0; i < algorithms.size(); i++) {
      watch.start();
      for (int j = 0; j < kLaunches; j++) check("cublasLtMatmul", product.launch(algorithms[i], scratch));
      rounds[i][round] = watch.stop() / kLaunches;
    }
  std::vector<float> ms;
  for (auto& of_algorithm : rounds) {
    std::sort(of_algorithm.begin(), of_algorithm.end());
    ms.push_back(of_algorithm[kRounds / 2]);  // the median: other streams' work may have been beside some
  }
  std::vector<size_t> order(algorithms.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](size_t i, size_t j) { return ms[i] < ms[j]; });
  auto us = [&](size_t i) { return std::to_string(static_cast<int>(1000 * ms[i] + 0.5f)) + " us"; };
  const std::string timed = "GEMM autotune: fp8 " + product.describe() + ", " + std::to_string(ms.size()) +
                            " algorithms timed; cuBLASLt's first: " + us(0);
  size_t others = 0;  // with other bits
  for (size_t i : order) {
    if (ms[i] > kWorthwhile * ms[0]) break;
    if (before) copy(scratch, before, d.bytes(), kDefaultKind, stream);
    check("cublasLtMatmul", product.launch(algorithms[i], scratch));
    if (same_bytes(static_cast<char*>(scratch), static_cast<char*>(d.data.data_ptr), d.bytes(), stream)) {
      log("info", timed + ", taken: " + us(i) + "; faster ones with other bits: " + std::to_string(others));
      return algorithms[i];
    }
    others++;
  }
  log("info", timed + ", which stays; faster ones with other bits: " + std::to_string(others));
  return {};
}

}  // namespace lt

static void tuned_gemm(const Tensor& a, const Tensor& b, const Tensor& d, bool transa, Stream& stream, bool accumulate,
                       const Tensor* bias) {
  const char* name = "tuned_gemm";
  Named named = {{"A", &a}, {"B", &b}, {"D", &d}, {"bias", bias}};
  check_gemm(name, named, a, b, d, transa, false, bias, nullptr);
  if (stream.major >= 10)
    raise(describe(std::string(name) + ": not on Blackwell, where TE describes fp8 GEMMs in another way; leave " +
                       "gemm_autotune out",
                   named));
  for (const Tensor* operand : {&a, &b})
    if (!operand->is_fp8() || operand->scaling_mode != kPerTensorScaling || !operand->scale_inv || d.is_fp8())
      raise(describe(std::string(name) + ": A and B must be fp8 with one scale_inv each, and D not fp8", named));
  call(name, named, [&] {
    static std::map<Key, std::optional<lt::Algorithm>> chosen;  // for the process's life; nothing: TE's
    auto by_te = [&] { gemm(a, b, d, transa, false, stream, accumulate, false, bias, nullptr); };
    const lt::Product product(a, b, d, transa, accumulate, bias, stream);
    const auto known = chosen.find(product.key());
    if (known != chosen.end() && known->second)
      return lt::check("cublasLtMatmul", product.launch(*known->second, d.data.data_ptr));
    if (known != chosen.end() || stream.captures) return by_te();
    py::object before = py::none();
    if (accumulate) {
      before = stream.temporary(d.bytes());
      lt::copy(lt::address(before), d.data.data_ptr, d.bytes(), kDefaultKind, stream);
    }
    by_te();
    chosen[product.key()] = lt::fastest(product, d, accumulate ? lt::address(before) : nullptr, stream);
  });
}

// ---- scaling -------------------------------------------------------------------------------------------------

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

// ---- rotary embedding and attention --------------------------------------------------------------------------

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

// TE wants the auxiliary tensors as a pack: softmax statistics, the random state (a slot even without dropout), and
// the bias if there is one.
static NVTETensorPack aux_pack(const Tensor& stats, const Tensor& rng_state, const Tensor* bias) {
  NVTETensorPack pack{};
  pack.tensors[0] = stats.handle;
  pack.tensors[1] = rng_state.handle;
  if (bias) pack.tensors[2] = bias->handle;
  pack.size = bias ? 3 : 2;
  return pack;
}

static Key attention_key(EntryPoint entry, const Tensor& q, const Tensor& k, int layout, int mask, int64_t window,
                         const Tensor* cu_seqlens, const Tensor* bias, int64_t flags) {
  const size_t *qs = q.data.shape.data, *ks = k.data.shape.data;
  auto i = [](size_t v) { return static_cast<int64_t>(v); };
  if (bias) flags += 4 + 8 * (bias->data.shape.data[0] > 1) + 16 * (bias->data.shape.data[1] > 1);
  const int64_t documents = cu_seqlens ? i(cu_seqlens->numel()) : 0;
  return {entry,        i(qs[0]), i(qs[1]), i(qs[2]),  i(qs[3]), i(ks[1]), i(ks[2]),
          q.data.dtype, layout,   mask,     documents, flags,    window};
}

// Whether sequences of any lengths lie one after another, and q, k and v are [tokens, h, d]; cu_seqlens say where.
static bool is_thd(int layout) { return kLayoutT3HD <= layout && layout <= kLayoutTHD; }

// No sequence is longer: TE wants to know it.
static size_t max_seqlen(const Tensor& tensor, int layout) { return tensor.data.shape.data[is_thd(layout) ? 0 : 1]; }

// What TE and cuDNN take on trust. same_size: pairs of tensors that must have as many elements.
static void check_attention(const char* name, Named named, const Tensor& q, const Tensor& k, const Tensor& v,
                            std::initializer_list<std::pair<const Tensor*, const Tensor*>> same_size,
                            const Tensor& stats, int layout, int mask, float dropout, const Tensor* rng_state,
                            const Tensor* cu_seqlens, const Tensor* bias) {
  auto refuse = [&](const char* text) { raise(describe(std::string(name) + ": " + text, named)); };
  const bool padded = mask == kPaddingMask || mask == kPaddingCausalMask;
  for (auto tensor : {&q, &k, &v})
    if (tensor->data.shape.ndim != (is_thd(layout) ? 3 : 4))
      refuse("q, k and v must be [b, s, h, d], and with a layout of THD [tokens, h, d]");
  if (is_thd(layout) && !padded) refuse("a layout of THD needs a padding mask");
  for (auto& [left, right] : same_size)
    if (left->numel() != right->numel()) refuse("shapes do not fit");
  if (stats.numel() * q.cols() != q.numel()) refuse("stats must be [b, h, s, 1], and with THD [tokens, h, 1]");
  if (dropout > 0 && !rng_state) refuse("dropout needs rng_state");
  if (padded && !cu_seqlens) refuse("a padding mask needs cu_seqlens");
  if (cu_seqlens && (cu_seqlens->data.dtype != kInt32 || cu_seqlens->data.shape.ndim != 1 || cu_seqlens->numel() < 2))
    refuse("cu_seqlens must be int32 [sequences + 1]");
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

// Only what cannot be derived is a parameter: plain softmax, causal masks aligned to the top left. With THD there is
// nothing between the sequences: where they lie in memory ("padded") follows from their lengths.
#define SET_ATTENTION(kind)                                                                              \
  params.tensor(k##kind##CuSeqlensQ, or_empty(cu_seqlens));                                              \
  params.tensor(k##kind##CuSeqlensKV, or_empty(cu_seqlens));                                             \
  params.tensor(k##kind##CuSeqlensQPadded, is_thd(layout) ? *cu_seqlens : empty_tensor());               \
  params.tensor(k##kind##CuSeqlensKVPadded, is_thd(layout) ? *cu_seqlens : empty_tensor());              \
  params.tensor(k##kind##S, or_empty(s));                                                                \
  params.set<uint8_t>(k##kind##CudaGraph, stream.captures);                                              \
  params.set<int32_t>(k##kind##Mask, mask);                                                              \
  params.set<int32_t>(k##kind##BiasType, bias ? kPostScaleBias : kNoBias);                               \
  params.set<int64_t>(k##kind##WindowLeft, window);                                                      \
  params.set<int64_t>(k##kind##WindowRight, mask == kCausalMask || mask == kPaddingCausalMask ? 0 : -1); \
  params.set<uint8_t>(k##kind##BottomRight, 0);                                                          \
  params.set<int32_t>(k##kind##SoftmaxType, 0);                                                          \
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
                          int64_t window) {
  const char* name = "nvte_fused_attn_fwd_v2";
  Named named = {{"q", &q},      {"k", &k}, {"v", &v}, {"out", &out}, {"stats", &stats}, {"cu_seqlens", cu_seqlens},
                 {"bias", bias}, {"s", s}};
  check_attention(name, named, q, k, v, {{&out, &q}, {&k, &v}}, stats, layout, mask, dropout, rng_state, cu_seqlens,
                  bias);
  check_fp8_attention(name, named, {&q, &k, &v}, {&out}, {s});
  call(name, named, [&] {
    NVTETensorPack aux = aux_pack(stats, or_empty(rng_state), bias);
    AttentionParams params(nvte_create_fused_attn_fwd_params(), nvte_set_fused_attn_fwd_params_attribute,
                           nvte_destroy_fused_attn_fwd_params);
    SET_ATTENTION(Fwd);
    params.tensor(kFwdQ, q);
    params.tensor(kFwdK, k);
    params.tensor(kFwdV, v);
    params.tensor(kFwdO, out);
    params.tensor(kFwdRngState, or_empty(rng_state));
    params.tensor(kFwdBias, or_empty(bias));
    params.no_tensors({kFwdSoftmaxOffset, kFwdPageTableK, kFwdPageTableV});
    params.set<NVTETensorPack*>(kFwdAux, &aux);
    params.set<uint8_t>(kFwdIsTraining, is_training);
    params.set<uint8_t>(kFwdReturnMaxLogit, 0);
    const int64_t flags = is_training + 2 * (dropout > 0);
    Key key = attention_key(kAttentionFwd, q, k, layout, mask, window, cu_seqlens, bias, flags);
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
                          const Tensor* s, const Tensor* dp, int64_t window) {
  const char* name = "nvte_fused_attn_bwd_v2";
  Named named = {{"q", &q},         {"k", &k},        {"v", &v},   {"out", &out}, {"dout", &dout},
                 {"stats", &stats}, {"dq", &dq},      {"dk", &dk}, {"dv", &dv},   {"cu_seqlens", cu_seqlens},
                 {"bias", bias},    {"dbias", dbias}, {"s", s},    {"dp", dp}};
  check_attention(name, named, q, k, v, {{&out, &q}, {&dout, &q}, {&dq, &q}, {&k, &v}, {&dk, &k}, {&dv, &v}}, stats,
                  layout, mask, dropout, rng_state, cu_seqlens, bias);
  if (bias && (!dbias || dbias->numel() != bias->numel()))
    raise(describe(std::string(name) + ": a bias needs dbias, of its shape", named));
  check_fp8_attention(name, named, {&q, &k, &v, &out, &dout}, {&dq, &dk, &dv}, {s, dp});
  call(name, named, [&] {
    NVTETensorPack aux = aux_pack(stats, or_empty(rng_state), bias);
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
    params.no_tensors({kBwdDSoftmaxOffset});
    params.set<NVTETensorPack*>(kBwdAux, &aux);
    params.set<uint8_t>(kBwdDeterministic, deterministic);
    params.set<int32_t>(kBwdDOFormat, is_thd(layout) ? kFormatTHD : kFormatBSHD);
    params.set<int32_t>(kBwdDQKVLayout, layout);
    params.set<int32_t>(kBwdDOScaleInvFormat, kFormatNotSet);
    const int64_t flags = deterministic + 2 * (dropout > 0) + 32 * dout.data.dtype;
    Key key = attention_key(kAttentionBwd, q, k, layout, mask, window, cu_seqlens, bias, flags);
    call_with_workspace(key, stream, [&](NVTETensor workspace) {
      params.set<NVTETensor>(kBwdWorkspace, workspace);
      nvte_fused_attn_bwd_v2(params);
    });
  });
}

// ---- memory and own kernels ----------------------------------------------------------------------------------

static void memcpy_async(const Tensor& destination, const Tensor& source, Stream& stream) {
  if (source.bytes() != destination.bytes())
    raise(describe("cudaMemcpyAsync: sizes differ", {{"destination", &destination}, {"source", &source}}));
  check_cuda("cudaMemcpyAsync", cudaMemcpyAsync(destination.data.data_ptr, source.data.data_ptr, source.bytes(),
                                                kDefaultKind, stream.handle));
}

static void memset_async(uintptr_t destination, int value, size_t bytes, Stream& stream) {
  check_cuda("cudaMemsetAsync", cudaMemsetAsync(reinterpret_cast<void*>(destination), value, bytes, stream.handle));
}

// Launches a kernel of native/kernels, whose parameters are 8 bytes each.
static void launch(uintptr_t kernel, unsigned grid, unsigned block, unsigned shared_bytes, Stream& stream,
                   const KernelArguments& arguments) {
  void* pointers[KernelArguments::kMost];
  for (size_t i = 0; i < arguments.count; i++) pointers[i] = const_cast<int64_t*>(&arguments.values[i]);
  int code = cuLaunchKernel(reinterpret_cast<void*>(kernel), grid, 1, 1, block, 1, 1, shared_bytes, stream.handle,
                            pointers, nullptr);
  if (code) {
    const char* text = nullptr;
    cuGetErrorString(code, &text);
    raise(std::string("cuLaunchKernel failed: ") + (text ? text : "unknown error"));
  }
}

// ---- module --------------------------------------------------------------------------------------------------

PYBIND11_MODULE(_shim, m) {
  using namespace pybind11::literals;
  m.doc() = "Transformer Engine's C library: tensors, one function an entry point. Call paddle_te.native.load() first.";
  g_module = m.ptr();
  g_error = py::object(py::module_::import("paddle_te.native.errors").attr("TransformerEngineError")).release().ptr();

  // What TE throws outside of call(): no handle left in its pool.
  py::register_local_exception_translator([](std::exception_ptr exception) {
    try {
      std::rethrow_exception(exception);
    } catch (const py::builtin_exception&) {
      throw;
    } catch (const std::runtime_error& e) {
      PyErr_SetString(g_error, e.what());
    }
  });

  m.def("bind", &bind, "te"_a, "cudart"_a, "driver"_a, "cublaslt"_a,
        "Resolves all entry points in four dlopen handles. ImportError names the missing ones.");
  m.attr("SIZES") = py::dict("NVTEShape"_a = sizeof(NVTEShape), "NVTEBasicTensor"_a = sizeof(NVTEBasicTensor),
                             "NVTETensorPack"_a = sizeof(NVTETensorPack));

  py::class_<Tensor>(m, "Tensor", py::module_local(), R"(A view of device memory, which it does not own.

data: device address of the row-major data (0: none, factors only); shape: tuple of ints; dtype: types.DType.
columnwise: address of the transposed copy [cols, rows] that Hopper's fp8 GEMM needs; 2 dimensions only.
scale, amax, scale_inv: addresses of float32 scalars on the device; scale_inv must be 16-byte aligned. Functions that
produce fp8 read `scale`, write `scale_inv`, and raise `amax` to the input's greatest magnitude. A bfloat16 output
with `amax` makes rmsnorm_fwd and swiglu write it as well.
scaling_mode: types.ScalingMode. With block scaling there is no scale and no amax. scale_inv is float32
[cols / 128, rows] for blocks of 1 x 128 and [rows / 128, cols / 128 rounded up to 4] for 128 x 128; columnwise_scale_inv,
of the transposed copy, the same of the transposed matrix.)")
      .def(py::init<uintptr_t, const py::tuple&, int, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, int>(),
           "data"_a, "shape"_a, "dtype"_a, "columnwise"_a = 0, "scale"_a = 0, "amax"_a = 0, "scale_inv"_a = 0,
           "columnwise_scale_inv"_a = 0, "scaling_mode"_a = int{kPerTensorScaling})
      .def_property_readonly("data_ptr", [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data.data_ptr); })
      .def_readonly("columnwise", &Tensor::columnwise)
      .def_property_readonly("shape", &Tensor::shape)
      .def_property_readonly("dtype", [](const Tensor& t) { return t.data.dtype; })
      .def("__repr__", [](const Tensor& t) { return "Tensor(" + t.describe() + ")"; });

  py::class_<Sequence>(m, "Sequence", py::module_local(),
                       R"(Calls that are made again and again, on other memory each time.

calls: a tuple of (name, arguments), of functions of this module. tensors: a tuple of those among the arguments that move.
graphs: 0, or from the second run of a thread on the calls, all on one Stream, are launched as a CUDA graph, of which so
many are kept for as many different bases. tensors must then have all tensors of the calls that move. What cannot be
captured runs without, and the logger paddle_te.native says why.
Raises AttributeError, TypeError or ValueError, as the call would, for what cannot be called or recorded.)")
      .def(py::init<const py::tuple&, const py::tuple&, size_t>(), "tensors"_a, "calls"_a, "graphs"_a = 0)
      .def("run", &Sequence::run, "bases"_a, R"(Moves the tensors, and makes the calls.

An address index << 48 | offset, given to a Tensor's constructor or an argument of its own, becomes bases[index] + offset;
bases: a list, whose first element counts for nothing. Where a tensor was given no address it gets none.)");

  m.def("counts", &counts,
        R"(How often each function has started work since the module was loaded, as {(name, precision): number}.

precision: fp8 if any tensor is, else the first one's dtype; "" for calls without tensors.)");

  m.def(
      "graph_counts",
      [] {
        return py::dict("launched"_a = g_graph_counts.launched, "captured"_a = g_graph_counts.captured,
                        "instantiated"_a = g_graph_counts.instantiated);
      },
      R"(How often Sequences have run as CUDA graphs since the module was loaded: {"launched": number of such runs,
"captured": of how many of them the calls had to be captured first, "instantiated": how many graphs were made}.)");

  py::class_<Stream>(m, "Stream", py::module_local(), R"(A CUDA stream of the current device, and its scratch memory.

handle: the cudaStream_t as an int. allocate(bytes): returns device memory as an object with data_ptr(); called when
more scratch memory is needed than there is (after the stream has been synchronised, if there was some).)")
      .def(py::init<uintptr_t, py::function>(), "handle"_a, "allocate"_a)
      .def_property_readonly("handle", [](const Stream& s) { return reinterpret_cast<uintptr_t>(s.handle); })
      .def_readonly("sm_count", &Stream::sm_count)
      .def_property_readonly("capability", [](const Stream& s) { return py::make_tuple(s.major, s.minor); })
      .def_property_readonly("workspace_size", &Stream::workspace_size);

  py::class_<HostMemory>(m, "HostMemory", py::module_local(), "Pinned memory of the host, of so many bytes.")
      .def(py::init<size_t>(), "bytes"_a)
      .def_readonly("bytes", &HostMemory::bytes)
      .def("data_ptr", &HostMemory::data_ptr);

  py::class_<Event>(m, "Event", py::module_local(), "What a CopyStream had been given when `mark` made this.")
      .def("hold", &Event::hold, "stream"_a, "What the Stream is given from now on waits for it.")
      .def("wait", &Event::wait, py::call_guard<py::gil_scoped_release>(), "The host waits for it.");

  py::class_<CopyStream>(m, "CopyStream", py::module_local(),
                         "A CUDA stream of its own, for copies that run beside other streams' work.")
      .def(py::init<>())
      .def("follow", &CopyStream::follow, "stream"_a, "Copies from now on wait for what the Stream has been given.")
      .def("follow", &CopyStream::follow_event, "event"_a,
           "Copies from now on wait for an Event of another CopyStream.")
      .def("copy", &CopyStream::copy, "destination"_a, "source"_a, "bytes"_a,
           "Between addresses on the device and in HostMemory, which must stay until the copy is over.")
      .def("mark", &CopyStream::mark, "An Event of the copies so far.");

  define(m, "layernorm_fwd", &layernorm_fwd, "x"_a, "gamma"_a, "beta"_a, "epsilon"_a, "z"_a, "mu"_a, "rsigma"_a,
         "stream"_a, "zero_centered_gamma"_a = false,
         "z = (x - mean(x)) / std(x) * gamma + beta. x, z: [tokens, h]; z may be fp8; mu, rsigma: float32 [tokens], "
         "mean(x) and 1 / std(x). zero_centered_gamma: 1 + gamma in gamma's place.");
  define(m, "layernorm_bwd", &layernorm_bwd, "dz"_a, "x"_a, "mu"_a, "rsigma"_a, "gamma"_a, "dx"_a, "dgamma"_a,
         "dbeta"_a, "stream"_a, "zero_centered_gamma"_a = false, "dx, dgamma and dbeta from dz. All in x's dtype.");
  define(m, "rmsnorm_fwd", &rmsnorm_fwd, "x"_a, "gamma"_a, "epsilon"_a, "z"_a, "rsigma"_a, "stream"_a,
         "zero_centered_gamma"_a = false,
         "z = x / rms(x) * gamma. x, z: [tokens, h]; z may be fp8; rsigma: float32 [tokens], 1 / rms(x). "
         "zero_centered_gamma: as layernorm_fwd's.");
  define(m, "rmsnorm_bwd", &rmsnorm_bwd, "dz"_a, "x"_a, "rsigma"_a, "gamma"_a, "dx"_a, "dgamma"_a, "stream"_a,
         "add"_a = nullptr, "zero_centered_gamma"_a = false,
         "dx and dgamma from dz; dx has `add`, a residual's gradient, added. All in x's dtype.");
  define(m, "quantize", &quantize, "input"_a, "output"_a, "stream"_a,
         "fp8 output = input * scale, its transposed copy too where it has one; writes scale_inv and amax.");
  define(m, "quantize_blocks", &quantize_blocks, "input"_a, "output"_a, "force_pow_2_scales"_a, "amax_epsilon"_a,
         "stream"_a,
         "fp8 output with block scaling from the input's amax in each block, its transposed copy too where it has one; "
         "writes their scale_inv. force_pow_2_scales: scales are powers of 2. amax_epsilon: the least amax.");
  define(m, "quantize_dbias", &quantize_dbias, "input"_a, "output"_a, "dbias"_a, "stream"_a,
         "quantize, and dbias [cols] = the sum of input's rows, in input's dtype, in one pass. output [rows, cols] has "
         "its transposed copy.");
  define(m, "dequantize", &dequantize, "input"_a, "output"_a, "stream"_a, "output = fp8 input * scale_inv.");
  define(m, "transpose", &transpose, "input"_a, "output"_a, "stream"_a, "output [n, m] = input [m, n] transposed.");
  const char* gated =
      "output [tokens, f] = act(input[:, :f]) * input[:, f:]; output may be fp8. act: swiglu silu, "
      "geglu gelu in its tanh form.";
  define(m, "swiglu", &swiglu, "input"_a, "output"_a, "stream"_a, gated);
  define(m, "geglu", &geglu, "input"_a, "output"_a, "stream"_a, gated);
  const char* plain = "output = act(input); output may be fp8. gelu is its tanh form.";
  define(m, "gelu", &gelu, "input"_a, "output"_a, "stream"_a, plain);
  define(m, "relu", &relu, "input"_a, "output"_a, "stream"_a, plain);
  const char* gradient =
      "The gradient of the activation's input from its output's; output may be fp8, but that a gated "
      "activation then writes no transposed copy.";
  define(m, "dswiglu", &dswiglu, "grad"_a, "input"_a, "output"_a, "stream"_a, gradient);
  define(m, "dgeglu", &dgeglu, "grad"_a, "input"_a, "output"_a, "stream"_a, gradient);
  define(m, "dgelu", &dgelu, "grad"_a, "input"_a, "output"_a, "stream"_a, gradient);
  define(m, "drelu", &drelu, "grad"_a, "input"_a, "output"_a, "stream"_a, gradient);
  const char* transposed = "The gradient in fp8 with its transposed copy, in one kernel.";
  define(m, "dswiglu_cast_transpose", &dswiglu_cast_transpose, "grad"_a, "input"_a, "output"_a, "stream"_a, transposed);
  define(m, "dgeglu_cast_transpose", &dgeglu_cast_transpose, "grad"_a, "input"_a, "output"_a, "stream"_a, transposed);
  const char* with_dbias =
      "The gradient in fp8 with its transposed copy, and dbias [cols] = the sum of its rows, in one "
      "pass. dbias: in grad's dtype.";
  define(m, "quantize_dbias_dgelu", &quantize_dbias_dgelu, "grad"_a, "input"_a, "output"_a, "dbias"_a, "stream"_a,
         with_dbias);
  define(m, "quantize_dbias_drelu", &quantize_dbias_drelu, "grad"_a, "input"_a, "output"_a, "dbias"_a, "stream"_a,
         with_dbias);
  define(m, "gemm", &gemm, "A"_a, "B"_a, "D"_a, "transa"_a, "transb"_a, "stream"_a, "accumulate"_a = false,
         "split_accumulator"_a = false, "bias"_a = nullptr, "dbias"_a = nullptr,
         R"(D [n, m] (+)= op(B) [n, k] · op(A) [k, m], op by BLAS's column-major rule:
A is [m, k] if transa else [k, m]; B is [k, n] if transb else [n, k]. With weight W [out, in], tokens x [t, in]:
y = gemm(W, x, y, True, False); dx = gemm(W, dy, dx, False, False); dW = gemm(x, dy, dW, False, True).
accumulate: adds to D (a residual, or a float32 main gradient). split_accumulator: fp8's exact sum, for gradients.
bias [m]: added to each row of D (of y). dbias [n]: written, the sum of op(B)'s columns (of dW's GEMM the bias's
gradient); cuBLAS has none in fp8, see quantize_dbias. Both in D's dtype.)");
  define(m, "tuned_gemm", &tuned_gemm, "A"_a, "B"_a, "D"_a, "transa"_a, "stream"_a, "accumulate"_a = false,
         "bias"_a = nullptr,
         R"(gemm(A, B, D, transa, False, stream, accumulate, False, bias), with its bits, for fp8 A and B with one scale
each, on GPUs before Blackwell.
The first call for a description of sizes, dtypes and so on launches TE's GEMM. Then it times the algorithms that
cuBLASLt proposes, into other memory as large as D (twice as large with accumulate), and the host waits for that. Later
calls launch the fastest one whose result had the bytes of D. In a capture nothing is timed: what is not known yet is
TE's.)");
  define(m, "amax_and_scale_update", &amax_and_scale_update, "amax_history"_a, "scale"_a, "algo"_a, "fp8_dtype"_a,
         "margin"_a, "stream"_a,
         "Delayed scaling, in place: scale [n] from float32 amax_history [len, n], which is then rolled by one.");
  define(m, "compute_amax", &compute_amax, "input"_a, "output"_a, "stream"_a, "output's amax = max(abs(input)).");
  define(m, "compute_scale_from_amax", &compute_scale_from_amax, "output"_a, "stream"_a,
         "Current scaling: fp8 output's scale = fp8's greatest value / amax.");
  define(m, "rope", &rope, "input"_a, "freqs"_a, "output"_a, "backward"_a, "stream"_a,
         "TE's rotary embedding on [b, s, h, d], half-split (NeoX) convention; freqs: angles, float32 [s, 1, 1, d].");
  define(
      m, "attention_fwd", &attention_fwd, "q"_a, "k"_a, "v"_a, "out"_a, "stats"_a, "scale"_a, "layout"_a, "mask"_a,
      "is_training"_a, "stream"_a, "dropout"_a = 0.f, "rng_state"_a = nullptr, "cu_seqlens"_a = nullptr,
      "bias"_a = nullptr, "s"_a = nullptr, "window"_a = -1,
      R"(out [b, s, h, d] = softmax(scale q·kᵀ + mask + bias)·v. q: [b, s, h, d]; k, v: [b, keys, kv heads, d], at the
addresses that `layout` (types.QKVLayout) implies. stats: float32 [b, h, s, 1], kept for backward. mask: types.Mask; the padding
masks need cu_seqlens, int32 [b + 1]. The layouts of THD have sequences of any lengths one after another: q and out are
[tokens, h, d], k and v [tokens, kv heads, d], stats [tokens, h, 1], and cu_seqlens (with a padding mask) end with tokens.
dropout needs rng_state, int64 [2]: seed, offset. bias: [b or 1, h or 1, s,
keys], in q's dtype; cuDNN takes none with a padding mask. In fp8 (q, k, v and out): s has scale, amax and scale_inv of
the softmax, and no data; out's scale_inv is not written. window: how many keys before its own a query sees; -1: all.)");
  define(
      m, "attention_bwd", &attention_bwd, "q"_a, "k"_a, "v"_a, "out"_a, "dout"_a, "stats"_a, "dq"_a, "dk"_a, "dv"_a,
      "scale"_a, "layout"_a, "mask"_a, "stream"_a, "dropout"_a = 0.f, "deterministic"_a = false,
      "rng_state"_a = nullptr, "cu_seqlens"_a = nullptr, "bias"_a = nullptr, "dbias"_a = nullptr, "s"_a = nullptr,
      "dp"_a = nullptr, "window"_a = -1,
      "dq, dk, dv, laid out as q, k, v are; dbias, the bias's gradient, which cuDNN always computes. In fp8: s as in "
      "forward, dp the same for the softmax's gradient; dq's, dk's and dv's scale_inv are not written.");
  define(m, "memcpy_async", &memcpy_async, "destination"_a, "source"_a, "stream"_a, "destination = source, as bytes.");
  define(m, "memset_async", &memset_async, "destination"_a, "value"_a, "bytes"_a, "stream"_a);
  Function& launched = new_function("launch");
  m.def(
      "launch",
      [&launched](uintptr_t kernel, unsigned grid, unsigned block, unsigned shared_bytes, Stream& stream,
                  const py::args& arguments) {
        enter<uintptr_t, unsigned, unsigned, unsigned, Stream&, const KernelArguments&>(
            launched, launch, kernel, grid, block, shared_bytes, stream, KernelArguments(arguments));
      },
      "kernel"_a, "grid"_a, "block"_a, "shared_bytes"_a, "stream"_a,
      "Launches a kernel of native/kernels; its arguments, ints, follow.");
}
