// Transformer Engine's GEMM, which is cuBLASLt's.
#pragma once

#include "calls.h"

static void gemm(const Tensor& a, const Tensor& b, const Tensor& d, bool transa, bool transb, Stream& stream,
                 bool accumulate, bool split_accumulator, const Tensor* bias, const Tensor* dbias, float alpha,
                 float beta) {
  const char* name = "nvte_cublas_gemm_v2";
  Named named = {{"A", &a}, {"B", &b}, {"D", &d}, {"bias", bias}, {"dbias", dbias}};
  // cuBLAS is column-major: in rows and columns this is D[n, m] = op(B)[n, k] · op(A)[k, m]. TE trusts D's shape.
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
    const float of_d = accumulate ? beta : 0;
    nvte_cublas_gemm_v2(transa, transb, &alpha, a.handle, b.handle, &of_d, d.handle, d.handle, workspace, config,
                        stream.handle);
  });
}
