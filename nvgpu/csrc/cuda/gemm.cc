// Matrix products of the CUDA runtime: cuBLAS, opened at the first use, with its constants written down here.
#include <climits>
#include <map>
#include <stdexcept>
#include <string>

#include "libraries.h"
#include "math/math.h"

namespace nvgpu::math {
namespace {

using Handle = void*;

struct Cublas {
  int (*create)(Handle*);
  int (*set_stream)(Handle, Stream);
  int (*gemm)(Handle, int transpose_a, int transpose_b, int m, int n, int k, const void* alpha, const void* a,
              int type_a, int lda, long long stride_a, const void* b, int type_b, int ldb, long long stride_b,
              const void* beta, void* c, int type_c, int ldc, long long stride_c, int batch, int compute_type,
              int algorithm);
  const char* (*status_string)(int);

  Cublas() {
    OpenLibrary(
        "libcublasLt.so.13");  // cuBLAS would look for it on LD_LIBRARY_PATH first, where another release's may be
    void* library = OpenLibrary("libcublas.so.13");
    Find(library, "cublasCreate_v2", &create);
    Find(library, "cublasSetStream_v2", &set_stream);
    Find(library, "cublasGemmStridedBatchedEx", &gemm);
    Find(library, "cublasGetStatusString", &status_string);
  }
};

const Cublas& Library() {
  static const auto* cublas = new Cublas;
  return *cublas;
}

void Check(int code, const char* what) {
  if (code != 0) throw std::runtime_error(std::string(what) + ": " + Library().status_string(code));
}

// One a thread and device, kept for the life of the process.
Handle HandleOf(int device) {
  thread_local std::map<int, Handle> handles;
  Handle& handle = handles[device];
  if (handle == nullptr) Check(Library().create(&handle), "cublasCreate");
  return handle;
}

int CudaType(Type type) {
  switch (type) {
    case Type::kFloat: return 0;      // CUDA_R_32F
    case Type::kDouble: return 1;     // CUDA_R_64F
    case Type::kHalf: return 2;       // CUDA_R_16F
    case Type::kBfloat16: return 14;  // CUDA_R_16BF
    default: throw std::invalid_argument("nvgpu: matmul has no code for this element type");
  }
}

}  // namespace

// cuBLAS is column-major: it computes the transpose of C, from those of B and A.
void RunGemm(Stream stream, Type type, const Gemm& g) {
  if (g.m > INT_MAX || g.n > INT_MAX || g.k > INT_MAX || g.batch > INT_MAX) {
    throw std::invalid_argument("nvgpu: a matrix product of more than 2^31 rows or columns");
  }
  constexpr int kCompute32 = 68, kCompute64 = 70, kDefaultAlgorithm = -1;
  const float one = 1, beta = g.adds ? 1 : 0;
  const double double_one = 1, double_beta = beta;
  const bool wide = type == Type::kDouble;
  const int kind = CudaType(type), kind_c = g.wide_c && !wide ? CudaType(Type::kFloat) : kind, m = g.m, n = g.n,
            k = g.k;
  const Handle handle = HandleOf(runtime::CurrentDevice());
  Check(Library().set_stream(handle, stream), "cublasSetStream");
  Check(Library().gemm(handle, g.transpose_b, g.transpose_a, n, m, k, wide ? (const void*)&double_one : &one, g.b, kind,
                       g.RowB(), g.stride_b, g.a, kind, g.RowA(), g.stride_a, wide ? (const void*)&double_beta : &beta,
                       g.c, kind_c, g.RowC(), g.stride_c, g.batch, wide ? kCompute64 : kCompute32, kDefaultAlgorithm),
        "cublasGemmStridedBatchedEx");
}

}  // namespace nvgpu::math
