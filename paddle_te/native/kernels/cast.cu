// A matrix cast to fp8 with the transposed copy, in one pass over memory.
//
// Compiled at run time by NVRTC. Every parameter is 8 bytes (see launch in shim.cpp). native/casts.py defines NAME, the
// kernel's, beside what cast_tile.cuh needs.

#include "cast_tile.cuh"

template <class T>
struct Values {
  using Element = T;
  static constexpr int kOutputs = 1, size = Vector<T>::size;
  const T* x;
  long long columns;

  __device__ long long place(int, long long column) const { return column; }

  struct Patch {
    Vector<T> values[kPatchRows];
    __device__ Patch(const Values& of, long long row, long long column) {
      for (int i = 0; i < kPatchRows; i++) values[i] = read(of.x + (row + i) * of.columns + column);
    }
    __device__ void compute(int i, float (&y)[kOutputs][size]) const {
      for (int j = 0; j < size; j++) y[0][j] = to_float(values[i].x[j]);
    }
  };
};

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS_PER_SM)
    NAME(const ELEMENT* x, unsigned char* data, unsigned char* transposed, const float* scale, float* amax,
         float* scale_inv, long long rows, long long columns) {
  const Place first = first_of_block<kTilesWidth<ELEMENT>>(rows, columns);
  const Values<ELEMENT> source{x, columns};
  cast_tiles<FLOAT8, ROUND>(source, Target{data, transposed, scale, amax, scale_inv}, first, rows, columns);
}
