// Order along an axis, and what follows from it: see math.h for what functions here have in common.
#pragma once

#include "math.h"
#include "types.h"

namespace nvgpu::math {

// The axis of a tensor [outer, size, inner]. A row is one of outer * inner.
struct Axis {
  int64_t outer, size, inner;
  NVGPU_FN int64_t Count() const { return outer * size * inner; }
};

// order [rows, size]: the places of a row's elements in order. Equal ones stay as they are, NaN is the greatest.
// workspace: as large as order.
void ArgSort(Stream stream, Type type, bool descending, int64_t* order, const void* in, const Axis& axis,
             int64_t* workspace);
// The first `count` elements of that order, of 1, 2, 4 or 8 bytes; indices: their places, or null.
void TakeOrdered(Stream stream, size_t width, void* out, int64_t* indices, const void* in, const int64_t* order,
                 const Axis& axis, int64_t count);
// out[o, index[o, j, k], k] = the sum of from[o, j, k] over the j in a row, or the last of them, for out [outer, size,
// inner]; where no index points out stays. axis: of the index and of `from`. order: ArgSort's of the index. is_shared:
// the index is [axis.size], of all rows.
void SumByIndex(Stream stream, Type type, void* out, const void* from, const int64_t* index, const int64_t* order,
                const Axis& axis, int64_t size, bool is_shared);
void AssignByIndex(Stream stream, Type type, void* out, const void* from, const int64_t* index, const int64_t* order,
                   const Axis& axis, int64_t size, bool is_shared);
// Sums up to each element, without it where is_exclusive, from the axis's end where is_reverse; in float32 (float64,
// int64). workspace: 2 * axis.Count() numbers of 8 bytes.
void CumSum(Stream stream, Type type, void* out, const void* in, const Axis& axis, bool is_exclusive, bool is_reverse,
            void* workspace);

}  // namespace nvgpu::math
