// A matrix, or two, cast to fp8 with the transposed copy, in one pass over memory.
//
// Compiled at run time by NVRTC. Every parameter is 8 bytes (see shim/launch.h). native/casts.py defines NAME, the
// kernel's, and MATRICES, 1 or 2, beside what cast_tile.cuh needs.

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

struct Matrix {
  const ELEMENT* x;
  Target target;
  long long rows, columns;
};

// block: of those that compute this matrix.
__device__ void cast(const Matrix& of, unsigned block) {
  const Place first = first_of_block<kTilesWidth<ELEMENT>>(of.rows, of.columns, block);
  const Values<ELEMENT> source{of.x, of.columns};
  cast_tiles<FLOAT8, ROUND>(source, of.target, first, of.rows, of.columns);
}

#if MATRICES == 1
extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS_PER_SM)
    NAME(const ELEMENT* x, TARGET_PARAMETERS, long long rows, long long columns) {
  cast({x, TARGET(nullptr), rows, columns}, blockIdx.x);
}
#else
extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS_PER_SM)
    NAME(const ELEMENT* x, TARGET_PARAMETERS, long long rows, long long columns, const ELEMENT* x2,
         unsigned char* data2, unsigned char* transposed2, const float* scale2, float* amax2, float* scale_inv2,
         long long rows2, long long columns2) {
  const unsigned blocks = blocks_of<kTilesWidth<ELEMENT>>(rows, columns);
  unsigned block = blockIdx.x;
  if (block >= blocks) {  // each number by itself: structs to choose from would lie in memory
    block -= blocks, x = x2, rows = rows2, columns = columns2;
    data = data2, transposed = transposed2, scale = scale2, amax = amax2, scale_inv = scale_inv2;
  }
  cast({x, TARGET(nullptr), rows, columns}, block);
}
#endif
