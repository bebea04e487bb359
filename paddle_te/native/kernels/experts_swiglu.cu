// SwiGLU of experts times the rows' probabilities, and its gradient, in fp8, each expert's matrix with its transposed
// copy, in one pass over memory.
//
// Of z = [gate, up] and a row's probability p, with s = 1 / (1 + exp(-gate)), in float32:
//   forward    y = gate s · up · p
//   gradient   [dgate, dup] = [(gate s (1 - s) + s) dy p · up, dy p · gate s]
//              dp = the row's sum of dy · gate s · up
//
// Compiled at run time by NVRTC. Every parameter is 8 bytes (see shim/launch.h). native/experts.py defines NAME, the
// kernel's, and GRADIENT beside what cast_tile.cuh needs.

#include "expert_rows.cuh"
#include "sigmoid.cuh"

// dy [rows, columns], for the gradient; z [rows, 2 columns]. shares: a row's sum over each tile's columns, so that a
// second kernel adds them up in the same order in every run; or null.
template <class T, bool kGradient>
struct Activation {
  using Element = T;
  static constexpr int kOutputs = kGradient ? 2 : 1, size = Vector<T>::size;
  const T *dy, *z;
  const float* prob_of;
  float* shares;
  long long columns;
  Chunks chunks;

  __device__ long long place(int o, long long column) const { return o * columns + column; }

  // The threads of a row of a tile call it, all of them: columns are a multiple of a tile's.
  __device__ void add_up(float share, long long row, long long column) const {
    const unsigned mask = 0xffu << threadIdx.x % 32 / kVectors * kVectors;
    for (int lanes = 1; lanes < kVectors; lanes *= 2) share += __shfl_xor_sync(mask, share, lanes);
    if (threadIdx.x % kVectors == 0) shares[row * (columns / kTileWidth<T>)+column / kTileWidth<T>] = share;
  }

  struct Patch {
    Vector<T> gates[kPatchRows], ups[kPatchRows], grads[kPatchRows];
    float probs[kPatchRows];
    const Activation& of;
    long long row, column;
    __device__ Patch(const Activation& of, long long row, long long column) : of(of), row(row), column(column) {
      for (int i = 0; i < kPatchRows; i++) {
        const T* const at = of.z + (row + i) * 2 * of.columns + column;
        gates[i] = read(at), ups[i] = read(at + of.columns);
        if (kGradient) grads[i] = read(of.dy + (row + i) * of.columns + column);
        probs[i] = of.prob_of[row + i];
      }
    }
    __device__ void compute(int i, float (&y)[kOutputs][size]) const {
      float gate[size], s[size], share = 0;
#pragma unroll
      for (int k = 0; k < size; k++) gate[k] = to_float(gates[i].x[k]);
      sigmoids(gate, s);
#pragma unroll
      for (int k = 0; k < size; k++) {
        const float up = to_float(ups[i].x[k]), silu = gate[k] * s[k];
        if constexpr (kGradient) {
          const float dy = to_float(grads[i].x[k]), scaled = dy * probs[i];
          share += dy * (silu * up);
          y[0][k] = (gate[k] * (s[k] * (1.f - s[k])) + s[k]) * scaled * up;
          y[1][k] = scaled * silu;
        } else {
          y[0][k] = silu * up * probs[i];
        }
      }
      if (kGradient && of.shares) of.add_up(share, row + i, column);
    }
  };
};

template <class T, bool kGradient>
__device__ long long chunk_at(const Activation<T, kGradient>& of, long long column, long long row, long long) {
  return of.chunks.at(of.kOutputs * of.columns, column, row);
}

// begins: as `chunks_of_block` has it, of dy's columns. What is behind the last expert's rows is neither read nor
// written. scale_inv [experts] gets 1 / scale.
extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS_PER_SM)
    NAME(const ELEMENT* dy, const ELEMENT* z, const float* prob_of, const long long* begins, TARGET_PARAMETERS,
         float* shares, long long experts, long long rows, long long columns) {
  const Place place = first_of_block<kTilesWidth<ELEMENT>>(rows, columns);
  const Chunks chunks = chunks_of_block(begins, experts, rows, columns, place.row);
  const Activation<ELEMENT, GRADIENT> source{dy, z, prob_of, shares, columns, chunks};
  Target target TARGET(nullptr);
  target.scale_inv = nullptr;
  cast_tiles<FLOAT8, ROUND>(source, target, place, begins[experts] / columns, columns);
  write_scale_inv(scale_inv, scale, experts);
}
