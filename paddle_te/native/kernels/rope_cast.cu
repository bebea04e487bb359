// The gradient of rotary position embedding, cast to fp8 with the transposed copy, in one pass over memory: the packed
// gradient of q, k and v from attention's, which lie in three buffers or in one.
//
// Its bits are those of rope.cu's kernel, whose result is rounded to 16 bits and cast afterwards.
//
// Compiled at run time by NVRTC. Every parameter is 8 bytes (see launch in shim.cpp). native/rope.py defines NAME, the
// kernel's, beside what cast_tile.cuh needs.

#include "cast_tile.cuh"
#include "rotation.cuh"

// The columns are pairs (i, i + d/2) of the heads of q, k and v: half of the columns that are written.
template <class T>
struct Rotation {
  using Element = T;
  static constexpr int kOutputs = 2, size = Vector<T>::size;
  const T *q, *k, *v;
  long long q_stride, k_stride, v_stride;  // elements a token
  unsigned heads, kv_heads, half;          // half: of a head's size
  const float* table;                      // of this block's rows, in shared memory; nullptr: nothing is rotated
  long long first_row;

  __device__ long long place(int o, long long column) const {
    const unsigned pair = column;
    return column + pair / half * half + o * half;
  }

  // Where a row of the table has the cosine of a pair; its sine is `half` numbers behind. Threads that read 16 bytes of
  // vectors beside each other meet all banks.
  __device__ unsigned in_table(unsigned pair) const { return pair % size / 4 * (half / (size / 4)) + pair / size * 4; }

  struct Patch {
    Vector<T> low[kPatchRows], high[kPatchRows];
    const float* cosines;  // of the first row; nullptr: it is not rotated
    unsigned half, stride;

    __device__ Patch(const Rotation& of, long long row, long long column) {
      const unsigned head = static_cast<unsigned>(column) / of.half, pair = static_cast<unsigned>(column) % of.half;
      const bool of_q = head < of.heads, of_k = !of_q && head < of.heads + of.kv_heads;
      const unsigned before = of_q ? 0 : of_k ? of.heads : of.heads + of.kv_heads;
      const long long stride = of_q ? of.q_stride : of_k ? of.k_stride : of.v_stride;
      const T* at = (of_q ? of.q : of_k ? of.k : of.v) + row * stride + (head - before) * 2 * of.half + pair;
      for (int i = 0; i < kPatchRows; i++) {
        low[i] = read(at + i * stride);
        high[i] = read(at + i * stride + of.half);
      }
      half = of.half;
      cosines = of.table && (of_q || of_k) ? of.table + (row - of.first_row) * 2 * half + of.in_table(pair) : nullptr;
    }

    __device__ void compute(int i, float (&y)[kOutputs][size]) const {
      for (int j = 0; j < size; j++) y[0][j] = to_float(low[i].x[j]), y[1][j] = to_float(high[i].x[j]);
      if (!cosines) return;
      for (int w = 0; w < size / 4; w++) {
        const float* at = cosines + i * 2 * half + w * (half / (size / 4));
        const Vector<float> cosine = read(at), sine = read(at + half);
        for (int j = 0; j < 4; j++) rotate(y[0][4 * w + j], y[1][4 * w + j], cosine.x[j], sine.x[j]);
      }
    }
  };
};

// angles: float32 [s, d], of which the first half of each row is read; row t % s for token t. Shared memory: a float
// for each row of a tile and number of a head, none without angles.
extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS_PER_SM)
    NAME(const ELEMENT* q, const ELEMENT* k, const ELEMENT* v, long long q_stride, long long k_stride,
         long long v_stride, unsigned char* data, unsigned char* transposed, const float* scale, float* amax,
         float* scale_inv, const float* angles, long long s, long long tokens, long long heads, long long kv_heads,
         long long d) {
  extern __shared__ Vector<float> quads[];
  float* table = reinterpret_cast<float*>(quads);
  const unsigned half = d / 2;
  const long long columns = (heads + 2 * kv_heads) * half;
  const Place first = first_of_block<kTilesWidth<ELEMENT>>(tokens, columns);
  const Rotation<ELEMENT> source{q,
                                 k,
                                 v,
                                 q_stride,
                                 k_stride,
                                 v_stride,
                                 static_cast<unsigned>(heads),
                                 static_cast<unsigned>(kv_heads),
                                 half,
                                 angles ? table : nullptr,
                                 first.row};
  if (angles) {
    for (unsigned i = threadIdx.x; i < kTileRows * half; i += kThreads) {
      const unsigned row = i / half, pair = i % half;
      float sine = 0, cosine = 1;
      const unsigned token = first.row + row;
      if (token < tokens) sincosf(angles[token % static_cast<unsigned>(s) * d + pair], &sine, &cosine);
      float* at = table + row * 2 * half + source.in_table(pair) + pair % 4;
      at[0] = cosine;
      at[half] = -sine;
    }
    __syncthreads();
  }
  cast_tiles<FLOAT8, true>(source, Target{data, transposed, scale, amax, scale_inv}, first, tokens, columns);
}
