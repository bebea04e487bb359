// What shim.cpp needs of transformer_engine.h, gemm.h, fused_attn.h, cuda_runtime_api.h and cuda.h, as in
// Transformer Engine 2.20 and CUDA 13. tests/unit/native/test_headers.py compares it with those headers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "activations.h"

using NVTETensor = void*;
using NVTEConfig = void*;
using NVTEGroupedTensor = void*;
using cudaStream_t = void*;
using cudaEvent_t = void*;

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
static_assert(sizeof(NVTEShape) == 128 && sizeof(NVTEBasicTensor) == 144 && sizeof(NVTETensorPack) == 88);

enum DType { kByte = 0, kInt32 = 2, kInt64 = 3, kFloat32 = 4, kFloat16 = 5, kBFloat16 = 6, kE4M3 = 7, kE5M2 = 8 };
enum TensorParam { kRowwiseData, kColumnwiseData, kScale, kAmax, kRowwiseScaleInv, kColumnwiseScaleInv };
constexpr int kFirstDims = 7, kOffsets = 9;  // params of grouped tensors, beside those of tensors
// NVTE_DELAYED_TENSOR_SCALING: fp8 with one scale, and unquantized tensors; fp8 with a scale for each 1 x 128 or 128 x
// 128.
enum ScalingMode { kPerTensorScaling = 0, kBlockScaling1D = 2, kBlockScaling2D = 3 };
constexpr int kForcePow2Scales = 0, kAmaxEpsilon = 1;                                     // of a quantization config
constexpr int kBiasTensor = 0, kDBiasTensor = 1, kUseSplitAccumulator = 5, kSMCount = 6;  // of a matmul config
constexpr int kGroupedSMCount = 3, kGroupedSplitAccumulator = 4;                          // of a grouped one
enum DeviceAttribute { kMultiProcessorCount = 16, kComputeCapabilityMajor = 75, kComputeCapabilityMinor = 76 };
constexpr int kFormatBSHD = 1, kFormatTHD = 2, kFormatNotSet = 8;
constexpr int kLayoutT3HD = 10, kLayoutTHD = 14;  // the first and the last of the layouts of THD
constexpr int kPaddingMask = 1, kCausalMask = 2, kPaddingCausalMask = 3;
constexpr int kNoBias = 0, kPostScaleBias = 2;
constexpr int kVanillaSoftmax = 0, kLearnableSoftmax = 2;

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

// An activation's functions: itself, its gradient, and the gradient in fp8 with its transpose or with its rows' sum.
#define GATED_FUNCTIONS(name, X)                                            \
  X(void, nvte_##name, (NVTETensor, NVTETensor, cudaStream_t))              \
  X(void, nvte_d##name, (NVTETensor, NVTETensor, NVTETensor, cudaStream_t)) \
  X(void, nvte_d##name##_cast_transpose, (NVTETensor, NVTETensor, NVTETensor, cudaStream_t))
#define PLAIN_FUNCTIONS(name, X)                                            \
  X(void, nvte_##name, (NVTETensor, NVTETensor, cudaStream_t))              \
  X(void, nvte_d##name, (NVTETensor, NVTETensor, NVTETensor, cudaStream_t)) \
  X(void, nvte_quantize_dbias_d##name, (NVTETensor, NVTETensor, NVTETensor, NVTETensor, NVTETensor, cudaStream_t))

#define ACTIVATION_FUNCTIONS(X)         \
  GATED_ACTIVATIONS(GATED_FUNCTIONS, X) \
  PLAIN_ACTIVATIONS(PLAIN_FUNCTIONS, X)

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
  X(void, nvte_dequantize, (NVTETensor, NVTETensor, cudaStream_t))                                                    \
  X(void, nvte_transpose, (NVTETensor, NVTETensor, cudaStream_t))                                                     \
  ACTIVATION_FUNCTIONS(X)                                                                                             \
  X(void, nvte_fused_rope_forward,                                                                                    \
    (NVTETensor, NVTETensor, NVTETensor, NVTETensor, NVTETensor, int, bool, int, int, int, int, int, int, int, int,   \
     int, int, int, cudaStream_t))                                                                                    \
  X(void, nvte_fused_rope_backward,                                                                                   \
    (NVTETensor, NVTETensor, NVTETensor, NVTETensor, NVTETensor, int, bool, int, int, int, int, int, int, int, int,   \
     int, int, int, cudaStream_t))                                                                                    \
  X(NVTEGroupedTensor, nvte_create_grouped_tensor, (int, size_t, NVTEShape))                                          \
  X(void, nvte_destroy_grouped_tensor, (NVTEGroupedTensor))                                                           \
  X(void, nvte_set_grouped_tensor_param, (NVTEGroupedTensor, int, const void*, size_t))                               \
  X(NVTEConfig, nvte_create_grouped_matmul_config, ())                                                                \
  X(void, nvte_set_grouped_matmul_config_attribute, (NVTEConfig, int, const void*, size_t))                           \
  X(size_t, nvte_get_grouped_gemm_setup_workspace_size, (size_t))                                                     \
  X(void, nvte_grouped_gemm,                                                                                          \
    (NVTEGroupedTensor, int, NVTEGroupedTensor, int, NVTEGroupedTensor, NVTEGroupedTensor, NVTETensor, NVTETensor,    \
     NVTETensor, NVTETensor, NVTEConfig, cudaStream_t))                                                               \
  X(void, nvte_group_quantize, (NVTEGroupedTensor, NVTEGroupedTensor, NVTEConfig, cudaStream_t))                      \
  X(void, nvte_scaled_swiglu, (NVTETensor, NVTETensor, NVTETensor, int64_t, cudaStream_t))                            \
  X(void, nvte_scaled_dswiglu, (NVTETensor, NVTETensor, NVTETensor, NVTETensor, NVTETensor, int64_t, cudaStream_t))   \
  X(void, nvte_scaled_clamped_swiglu,                                                                                 \
    (NVTETensor, NVTETensor, NVTETensor, float, float, float, int64_t, cudaStream_t))                                 \
  X(void, nvte_scaled_clamped_dswiglu,                                                                                \
    (NVTETensor, NVTETensor, NVTETensor, NVTETensor, NVTETensor, float, float, float, int64_t, cudaStream_t))         \
  X(void, nvte_fused_topk_with_score_function_forward,                                                                \
    (NVTETensor, int, int, int, int, int, int, float, int, NVTETensor, NVTETensor, NVTETensor, NVTETensor,            \
     cudaStream_t))                                                                                                   \
  X(void, nvte_fused_topk_with_score_function_backward,                                                               \
    (NVTETensor, NVTETensor, NVTETensor, int, int, int, int, float, int, NVTETensor, cudaStream_t))                   \
  X(void, nvte_fused_attn_fwd_v2, (NVTEConfig))                                                                       \
  X(void, nvte_fused_attn_bwd_v2, (NVTEConfig))                                                                       \
  X(void, nvte_delayed_scaling_recipe_amax_and_scale_update,                                                          \
    (NVTETensor, NVTETensor, NVTETensor, NVTETensor, const char*, int, float, cudaStream_t))                          \
  X(void, nvte_compute_amax, (NVTETensor, NVTETensor, cudaStream_t))                                                  \
  X(void, nvte_compute_scale_from_amax, (NVTETensor, NVTEConfig, cudaStream_t))
#define CUDART_FUNCTIONS(X)                                                \
  X(int, cudaMemcpyAsync, (void*, const void*, size_t, int, cudaStream_t)) \
  X(int, cudaMemsetAsync, (void*, int, size_t, cudaStream_t))              \
  X(int, cudaMallocHost, (void**, size_t))                                 \
  X(int, cudaFreeHost, (void*))                                            \
  X(int, cudaStreamCreateWithFlags, (cudaStream_t*, unsigned))             \
  X(int, cudaStreamSynchronize, (cudaStream_t))                            \
  X(int, cudaStreamWaitEvent, (cudaStream_t, cudaEvent_t, unsigned))       \
  X(int, cudaEventCreateWithFlags, (cudaEvent_t*, unsigned))               \
  X(int, cudaEventRecord, (cudaEvent_t, cudaStream_t))                     \
  X(int, cudaEventSynchronize, (cudaEvent_t))                              \
  X(int, cudaEventDestroy, (cudaEvent_t))                                  \
  X(int, cudaGetDevice, (int*))                                            \
  X(int, cudaDeviceGetAttribute, (int*, int, int))                         \
  X(const char*, cudaGetErrorString, (int))
#define DRIVER_FUNCTIONS(X)                                                                                      \
  X(int, cuLaunchKernel,                                                                                         \
    (void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, cudaStream_t, void**, void**)) \
  X(int, cuGetErrorString, (int, const char**))

#define DECLARE(result, name, arguments) static result(*name) arguments = nullptr;
TE_FUNCTIONS(DECLARE)
CUDART_FUNCTIONS(DECLARE)
DRIVER_FUNCTIONS(DECLARE)
#undef DECLARE
