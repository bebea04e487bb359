// RMSNorm of rows whose statistics are known (rmsnorm_statistics.cu), cast to fp8 with the transposed copy, in one pass
// over memory; with PLAIN also written to `plain`, not cast. It begins with the rows whose statistics were computed
// last, which the GPU's cache still has.
//
// Compiled at run time by NVRTC. Every parameter is 8 bytes (see shim/launch.h). native/rmsnorm.py defines NAME,
// the kernel's, beside what cast_tile.cuh needs.

#define FROM_THE_END
#include "cast_tile.cuh"

template <class T>
struct Normed {
  using Element = T;
  static constexpr int kOutputs = 1, size = Vector<T>::size;
  const T *x, *gamma;
  const float* rsigma;
  long long columns;
  float added;  // to gamma

  __device__ long long place(int, long long column) const { return column; }

  struct Patch {
    Vector<T> values[kPatchRows], factors;
    float rsigma[kPatchRows], added;
    __device__ Patch(const Normed& of, long long row, long long column) : added(of.added) {
      factors = read(of.gamma + column);
      for (int i = 0; i < kPatchRows; i++) {
        values[i] = read(of.x + (row + i) * of.columns + column);
        rsigma[i] = of.rsigma[row + i];
      }
    }
    __device__ void compute(int i, float (&y)[kOutputs][size]) const {
      for (int j = 0; j < size; j++) {
        const float normed = rsigma[i] * to_float(values[i].x[j]);
        y[0][j] = (to_float(factors.x[j]) + added) * normed;
      }
    }
  };
};

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS_PER_SM)
    NAME(const ELEMENT* x, const ELEMENT* gamma, const float* rsigma, ELEMENT* plain, TARGET_PARAMETERS, long long rows,
         long long columns, long long zero_centered) {
  const Place first = first_of_block<kTilesWidth<ELEMENT>>(rows, columns);
  const Normed<ELEMENT> source{x, gamma, rsigma, columns, zero_centered ? 1.f : 0.f};
  cast_tiles<FLOAT8, ROUND>(source, Target TARGET(plain), first, rows, columns);
}
