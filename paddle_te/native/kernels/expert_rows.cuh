// Where matrices of experts lie, for kernels of cast_tile.cuh.
//
// The experts' rows follow each other, as do the transposed copies of their matrices: that of an expert with n rows
// from `first` on begins first * columns numbers behind the beginning. Each expert's rows are a multiple of 16, so that
// a chunk of a column is one expert's.
#pragma once

#include "cast_tile.cuh"

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

// The chunks of this block's tiles, which begin with first_row: where the rows of each one's expert begin, and how many
// these are.
struct Chunks {
  long long first_row;
  const long long *first, *rows;

  // Where the transposed copy has the chunk of a column that begins with a row. columns: of the matrices.
  __device__ long long at(long long columns, long long column, long long row) const {
    const long long chunk = (row - first_row) / 16;
    return first[chunk] * columns + column * rows[chunk] + row - first[chunk];
  }
};

// All threads of a block call it; they know the chunks after their next __syncthreads, which those that read need not
// wait for. begins [experts + 1]: where the experts' rows begin, times `columns`; null where each
// expert has rows / experts.
__device__ Chunks chunks_of_block(const long long* begins, long long experts, long long rows, long long columns,
                                  long long first_row) {
  __shared__ long long first_of_chunk[kChunks], rows_of_chunk[kChunks];
  if (threadIdx.x < kChunks) {
    const long long row = first_row + 16 * threadIdx.x;
    const long long expert = begins ? expert_at(begins, experts, row * columns) : row / (rows / experts);
    const long long first = begins ? begins[expert] / columns : expert * (rows / experts);
    first_of_chunk[threadIdx.x] = first;
    rows_of_chunk[threadIdx.x] = begins ? begins[expert + 1] / columns - first : rows / experts;
  }
  return {first_row, first_of_chunk, rows_of_chunk};
}

// The first block writes 1 / scale for each expert, unless scale_inv is null.
__device__ void write_scale_inv(float* scale_inv, const float* scale, long long experts) {
  if (blockIdx.x == 0 && scale_inv)
    for (long long i = threadIdx.x; i < experts; i += blockDim.x) scale_inv[i] = 1.f / (scale ? *scale : 1.f);
}
