// Matrices of experts cast to fp8, each with its transposed copy, in one pass over memory; tokens are gathered to their
// experts' rows on the way.
//
// Compiled at run time by NVRTC. Every parameter is 8 bytes (see shim/launch.h). native/casts.py defines NAME, the
// kernel's, beside what cast_tile.cuh needs.

#include "expert_rows.cuh"

// token_of: of each row its token, `tokens` for padding, which is zeros; null where x has the rows themselves.
template <class T>
struct ExpertRows {
  using Element = T;
  static constexpr int kOutputs = 1, size = Vector<T>::size;
  const T* x;
  const int* token_of;
  long long tokens, columns;
  Chunks chunks;

  __device__ long long place(int, long long column) const { return column; }

  // Padding reads the last token, and is zero where it is computed: loads under a condition would wait for each other.
  struct Patch {
    Vector<T> values[kPatchRows];
    bool given[kPatchRows];
    __device__ Patch(const ExpertRows& of, long long row, long long column) {
      long long from[kPatchRows];
      for (int i = 0; i < kPatchRows; i++) from[i] = of.token_of ? of.token_of[row + i] : row + i;
      for (int i = 0; i < kPatchRows; i++) {
        given[i] = from[i] < of.tokens;
        values[i] = read(of.x + (given[i] ? from[i] : of.tokens - 1) * of.columns + column);
      }
    }
    __device__ void compute(int i, float (&y)[kOutputs][size]) const {
      for (int j = 0; j < size; j++) y[0][j] = given[i] ? to_float(values[i].x[j]) : 0.f;
    }
  };
};

template <class T>
__device__ long long chunk_at(const ExpertRows<T>& of, long long column, long long row, long long) {
  return of.chunks.at(of.columns, column, row);
}

// begins: null, or as `chunks_of_block` has it. What is behind the last expert's rows is neither read nor written.
// scale_inv [experts] gets 1 / scale.
extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS_PER_SM)
    NAME(const ELEMENT* x, const int* token_of, const long long* begins, TARGET_PARAMETERS, long long tokens,
         long long experts, long long rows, long long columns) {
  const Place place = first_of_block<kTilesWidth<ELEMENT>>(rows, columns);
  const long long used = begins ? begins[experts] / columns : rows;
  const Chunks chunks = chunks_of_block(begins, experts, rows, columns, place.row);
  const ExpertRows<ELEMENT> source{x, token_of, tokens, columns, chunks};
  Target target TARGET(nullptr);
  target.scale_inv = nullptr;
  cast_tiles<FLOAT8, ROUND>(source, target, place, used, columns);
  write_scale_inv(scale_inv, scale, experts);
}
