// The fastest of the algorithms that cuBLASLt has for a GEMM.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <numeric>
#include <optional>
#include <vector>

#include "gemm.h"

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
