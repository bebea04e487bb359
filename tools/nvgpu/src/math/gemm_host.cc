// Matrix products of the host runtime: the BLAS that Paddle's CPU kernels use and that is in the process with them. The
// short floats are multiplied in float32 and rounded once.
#include <dlfcn.h>

#include <stdexcept>
#include <vector>

#include "math.h"
#include "types.h"

namespace nvgpu::math {
namespace {

template <typename T>
using BlasGemm = void (*)(int order, int transpose_a, int transpose_b, int m, int n, int k, T alpha, const T* a, int lda,
                          const T* b, int ldb, T beta, T* c, int ldc);

template <typename T>
BlasGemm<T> Blas(const char* name) {
  for (const char* library : {"libmklml_intel.so", "libopenblas.so.0", "libblas.so.3"}) {
    void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    void* found = handle == nullptr ? nullptr : dlsym(handle, name);
    if (found != nullptr) return reinterpret_cast<BlasGemm<T>>(found);
  }
  return nullptr;
}

template <typename T>
void Multiply(const T* a, const T* b, T* c, const Gemm& g) {
  static const BlasGemm<T> blas = Blas<T>(sizeof(T) == 4 ? "cblas_sgemm" : "cblas_dgemm");
  const int64_t lda = g.transpose_a ? g.m : g.k, ldb = g.transpose_b ? g.k : g.n;
  if (blas != nullptr && g.m > 0 && g.n > 0 && g.k > 0) {
    constexpr int kRowMajor = 101, kNo = 111, kYes = 112;
    return blas(kRowMajor, g.transpose_a ? kYes : kNo, g.transpose_b ? kYes : kNo, g.m, g.n, g.k, T(1), a, lda, b, ldb,
                T(0), c, g.n);
  }
  for (int64_t i = 0; i < g.m; ++i) {
    for (int64_t j = 0; j < g.n; ++j) {
      double sum = 0;
      for (int64_t l = 0; l < g.k; ++l) {
        sum += double(g.transpose_a ? a[l * lda + i] : a[i * lda + l]) * (g.transpose_b ? b[j * ldb + l] : b[l * ldb + j]);
      }
      c[i * g.n + j] = static_cast<T>(sum);
    }
  }
}

template <typename T>
std::vector<float> Widen(const void* from, int64_t count) {
  const T* values = static_cast<const T*>(from);
  return std::vector<float>(values, values + count);
}

template <typename T>
void Run(const Gemm& g) {
  for (int64_t i = 0; i < g.batch; ++i) {
    const T* a = static_cast<const T*>(g.a) + i * g.stride_a;
    const T* b = static_cast<const T*>(g.b) + i * g.stride_b;
    T* c = static_cast<T*>(g.c) + i * g.stride_c;
    if constexpr (sizeof(T) >= 4) {
      Multiply(a, b, c, g);
    } else {
      const auto wide_a = Widen<T>(a, g.m * g.k), wide_b = Widen<T>(b, g.k * g.n);
      std::vector<float> wide_c(g.m * g.n);
      Multiply(wide_a.data(), wide_b.data(), wide_c.data(), g);
      for (size_t j = 0; j < wide_c.size(); ++j) c[j] = T(wide_c[j]);
    }
  }
}

}  // namespace

void RunGemm(Stream stream, Type type, const Gemm& gemm) {
  runtime::Synchronize(stream);
  const bool found = ForFloats(type, [&](auto t) { Run<decltype(t)>(gemm); });
  if (!found) throw std::invalid_argument("nvgpu: matmul has no code for this element type");
}

}  // namespace nvgpu::math
