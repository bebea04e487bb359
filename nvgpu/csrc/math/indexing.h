// From the number of an element to its place in tensors of given strides.
#pragma once

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "math.h"
#include "types.h"

namespace nvgpu::math {

inline int64_t CountOf(const Dims& dims) {
  int64_t count = 1;
  for (int64_t dim : dims) count *= dim;
  return count;
}

[[noreturn]] inline void NoCode(const char* what) {
  throw std::invalid_argument(std::string("nvgpu: ") + what + " has no code for this element type");
}

// N tensors over the same dims. Axes that lie behind one another in all of them are one axis here.
template <int N>
struct Indexer {
  int64_t count = 1;
  int rank = 0;
  int64_t dims[kMaxRank];
  int64_t strides[N][kMaxRank];

  Indexer() = default;
  Indexer(const Dims& shape, const std::array<Dims, N>& all) : count(CountOf(shape)) {
    for (size_t axis = 0; axis < shape.size(); ++axis) {
      if (shape[axis] != 1) Append(shape[axis], axis, all);
    }
  }

  // Counts n neighbours as one element from now on, if they lie in a row in all tensors and no element is left over.
  bool Group(int64_t n) {
    if (rank == 0 || dims[rank - 1] % n != 0) return false;
    for (const auto& tensor : strides) {
      for (int axis = 0; axis < rank - 1; ++axis) {
        if (tensor[axis] % n != 0) return false;
      }
      if (tensor[rank - 1] != 1) return false;
    }
    count /= n;
    dims[rank - 1] /= n;
    for (auto& tensor : strides) {
      for (int axis = 0; axis < rank - 1; ++axis) tensor[axis] /= n;
    }
    return true;
  }

  NVGPU_FN void At(int64_t i, int64_t (&offsets)[N]) const {
    for (int n = 0; n < N; ++n) offsets[n] = 0;
    if (rank == 1) {
      for (int n = 0; n < N; ++n) offsets[n] = i * strides[n][0];
    } else if (count <= INT32_MAX) {  // 64-bit division costs a GPU some seventy instructions
      Split<uint32_t>(i, offsets);
    } else {
      Split<uint64_t>(i, offsets);
    }
  }

 private:
  template <typename Integer>
  NVGPU_FN void Split(int64_t i, int64_t (&offsets)[N]) const {
    Integer rest = static_cast<Integer>(i);
    for (int axis = rank - 1; axis >= 0; --axis) {
      const Integer dim = static_cast<Integer>(dims[axis]), next = rest / dim;
      const int64_t index = rest - next * dim;
      rest = next;
      for (int n = 0; n < N; ++n) offsets[n] += index * strides[n][axis];
    }
  }
  void Append(int64_t dim, size_t axis, const std::array<Dims, N>& all) {
    bool joins = rank > 0;
    for (int n = 0; n < N && joins; ++n) joins = strides[n][rank - 1] == all[n][axis] * dim;
    if (joins) {
      dims[rank - 1] *= dim;
    } else {
      if (rank == kMaxRank) throw std::invalid_argument("nvgpu: tensors of more than 9 axes are not supported");
      dims[rank++] = dim;
    }
    for (int n = 0; n < N; ++n) strides[n][rank - 1] = all[n][axis];
  }
};

inline Dims DenseStrides(const Dims& dims) {
  Dims strides(dims.size());
  int64_t stride = 1;
  for (int axis = static_cast<int>(dims.size()) - 1; axis >= 0; --axis) {
    strides[axis] = stride;
    stride *= dims[axis];
  }
  return strides;
}

}  // namespace nvgpu::math
