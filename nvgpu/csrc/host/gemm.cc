// Matrix products of the host runtime: the BLAS that Paddle's CPU kernels use and that is in the process with them. The
// short floats are multiplied in float32 and rounded once.
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <stdexcept>

#include "libraries.h"
#include "math/math.h"
#include "math/types.h"

namespace nvgpu::math {
namespace {

template <typename T>
using BlasGemm = void (*)(int order, int transpose_a, int transpose_b, int m, int n, int k, T alpha, const T* a,
                          int lda, const T* b, int ldb, T beta, T* c, int ldc);

// Paddle opens its BLAS at the first product on the CPU, which may come later than ours.
void* BlasLibrary() {
  static void* const library = [] {
    void* handle = dlopen((PaddleLibs() + "libmklml_intel.so").c_str(), RTLD_LAZY);
    for (const char* other : {"libopenblas.so.0", "libblas.so.3"}) {
      if (handle == nullptr) handle = dlopen(other, RTLD_LAZY | RTLD_NOLOAD);
    }
    return handle;
  }();
  return library;
}

template <typename Function>
Function Blas(const char* name) {
  return BlasLibrary() == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(BlasLibrary(), name));
}

// MKL in one thread: several processes stand for as many devices here, and MKL's threads wait in busy loops.
class OneThread {
 public:
  OneThread() : before_(set_ == nullptr ? 0 : set_(1)) {}
  ~OneThread() {
    if (set_ != nullptr) set_(before_);
  }

 private:
  inline static const auto set_ = Blas<int (*)(int)>("MKL_Set_Num_Threads_Local");
  int before_;
};

template <typename T>
void Multiply(const T* a, const T* b, T* c, const Gemm& g) {
  static const auto blas = Blas<BlasGemm<T>>(sizeof(T) == 4 ? "cblas_sgemm" : "cblas_dgemm");
  if (g.m == 0 || g.n == 0) return;
  const int64_t lda = g.RowA(), ldb = g.RowB(), ldc = g.RowC();
  if (blas != nullptr && g.k > 0) {
    constexpr int kRowMajor = 101, kNo = 111, kYes = 112;
    const OneThread one_thread;
    return blas(kRowMajor, g.transpose_a ? kYes : kNo, g.transpose_b ? kYes : kNo, g.m, g.n, g.k, T(1), a, lda, b, ldb,
                T(g.adds ? 1 : 0), c, ldc);
  }
  for (int64_t i = 0; i < g.m; ++i) {
    for (int64_t j = 0; j < g.n; ++j) {
      double sum = g.adds ? double(c[i * ldc + j]) : 0;
      for (int64_t l = 0; l < g.k; ++l) {
        sum +=
            double(g.transpose_a ? a[l * lda + i] : a[i * lda + l]) * (g.transpose_b ? b[j * ldb + l] : b[l * ldb + j]);
      }
      c[i * ldc + j] = static_cast<T>(sum);
    }
  }
}

// Rows one after another. Aligned, because which of its loops MKL takes, and so how it rounds, may depend on the
// addresses.
struct Wide {
  explicit Wide(int64_t count)
      : values(static_cast<float*>(std::aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64)), std::free) {}
  template <typename T>
  Wide(const T* from, int64_t rows, int64_t columns, int64_t row) : Wide(rows * columns) {
    for (int64_t i = 0; i < rows; ++i) std::copy_n(from + i * row, columns, values.get() + i * columns);
  }
  std::unique_ptr<float, void (*)(void*)> values;
};

template <typename T>
void MultiplyShort(const T* a, const T* b, void* c, const Gemm& g) {
  const Wide wide_a(a, g.transpose_a ? g.k : g.m, g.transpose_a ? g.m : g.k, g.RowA());
  const Wide wide_b(b, g.transpose_b ? g.n : g.k, g.transpose_b ? g.k : g.n, g.RowB());
  Gemm dense = g;
  dense.row_a = dense.row_b = 0;
  if (g.wide_c) return Multiply(wide_a.values.get(), wide_b.values.get(), static_cast<float*>(c), dense);
  const Wide wide_c(g.m * g.n);
  dense.row_c = 0;
  Multiply(wide_a.values.get(), wide_b.values.get(), wide_c.values.get(), dense);
  for (int64_t i = 0; i < g.m; ++i) {
    const float* row = wide_c.values.get() + i * g.n;
    std::transform(row, row + g.n, static_cast<T*>(c) + i * g.RowC(), [](float value) { return T(value); });
  }
}

template <typename T>
void Run(const Gemm& g) {
  const size_t width_c = g.wide_c && sizeof(T) < 4 ? sizeof(float) : sizeof(T);
  for (int64_t i = 0; i < g.batch; ++i) {
    const T* a = static_cast<const T*>(g.a) + i * g.stride_a;
    const T* b = static_cast<const T*>(g.b) + i * g.stride_b;
    void* c = static_cast<char*>(g.c) + i * g.stride_c * width_c;
    if constexpr (sizeof(T) >= 4) {
      Multiply(a, b, static_cast<T*>(c), g);
    } else {
      MultiplyShort(a, b, c, g);
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
