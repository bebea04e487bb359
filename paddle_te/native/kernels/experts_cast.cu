// Matrices of experts cast to fp8, each with its transposed copy, in one pass over memory; tokens are gathered to their
// experts' rows on the way.
//
// The experts' rows follow each other, as do the transposed copies of their matrices: that of an expert with n rows
// from `first` on begins first * columns numbers behind the beginning. Each expert's rows are a multiple of 16, so that
// a chunk of a column is one expert's.
//
// Compiled at run time by NVRTC. Every parameter is 8 bytes (see shim/launch.h). native/casts.py defines NAME, the
// kernel's, beside what cast_tile.cuh needs.

#include "cast_tile.cuh"

// token_of: of each row its token, `tokens` for padding, which is zeros; null where x has the rows themselves.
// first_of_chunk, rows_of_chunk: of the expert whose rows a chunk of this block's tiles has.
template <class T>
struct ExpertRows {
  using Element = T;
  static constexpr int kOutputs = 1, size = Vector<T>::size;
  const T* x;
  const int* token_of;
  long long tokens, columns, first_row;
  const long long *first_of_chunk, *rows_of_chunk;

  __device__ long long place(int, long long column) const { return column; }

  struct Patch {
    Vector<T> values[kPatchRows];
    __device__ Patch(const ExpertRows& of, long long row, long long column) {
      for (int i = 0; i < kPatchRows; i++) {
        const long long from = of.token_of ? of.token_of[row + i] : row + i;
        values[i] = from < of.tokens ? read(of.x + from * of.columns + column) : Vector<T>{};
      }
    }
    __device__ void compute(int i, float (&y)[kOutputs][size]) const {
      for (int j = 0; j < size; j++) y[0][j] = to_float(values[i].x[j]);
    }
  };
};

template <class T>
__device__ long long chunk_at(const ExpertRows<T>& of, long long column, long long row, long long) {
  const long long chunk = (row - of.first_row) / 16, first = of.first_of_chunk[chunk];
  return first * of.columns + column * of.rows_of_chunk[chunk] + row - first;
}

// The expert that has the number `at` of the experts' rows, the last one for what is behind them.
__device__ long long expert_at(const long long* begins, long long experts, long long at) {
  long long low = 0, high = experts - 1;
  while (low < high) {
    const long long middle = (low + high) / 2;
    if (begins[middle + 1] <= at)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// begins [experts + 1]: where the experts' rows begin, times `columns`; null where each expert has `rows / experts`.
// What is behind the last one's is neither read nor written. scale_inv [experts] gets 1 / scale.
extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS_PER_SM)
    NAME(const ELEMENT* x, const int* token_of, const long long* begins, TARGET_PARAMETERS, long long tokens,
         long long experts, long long rows, long long columns) {
  __shared__ long long first_of_chunk[kChunks], rows_of_chunk[kChunks];
  const Place place = first_of_block<kTilesWidth<ELEMENT>>(rows, columns);
  const long long used = begins ? begins[experts] / columns : rows;
  if (threadIdx.x < kChunks) {
    const long long row = place.row + 16 * threadIdx.x;
    const long long expert = begins ? expert_at(begins, experts, row * columns) : row / (rows / experts);
    const long long first = begins ? begins[expert] / columns : expert * (rows / experts);
    first_of_chunk[threadIdx.x] = first;
    rows_of_chunk[threadIdx.x] = begins ? begins[expert + 1] / columns - first : rows / experts;
  }
  __syncthreads();
  const ExpertRows<ELEMENT> source{x, token_of, tokens, columns, place.row, first_of_chunk, rows_of_chunk};
  Target target TARGET(nullptr);
  target.scale_inv = nullptr;
  cast_tiles<FLOAT8, ROUND>(source, target, place, used, columns);
  if (blockIdx.x == 0 && scale_inv)
    for (long long i = threadIdx.x; i < experts; i += blockDim.x) scale_inv[i] = 1.f / (scale ? *scale : 1.f);
}
