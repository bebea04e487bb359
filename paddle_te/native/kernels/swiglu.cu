// SwiGLU and its gradient in fp8, with the transposed copy, in one pass over memory.
//
// Of z = [gate, up], with s = 1 / (1 + exp(-gate)):
//   swiglu    y = gate s · up
//   dswiglu   [dgate, dup] = [(gate s (1 - s) + s) dy · up, dy · gate s]
// in float32, in the order in which Transformer Engine's functions compute it: the results are equal to the bit.
//
// A block of threads computes a tile. Each thread reads a patch of kPatchRows rows and one vector of columns of every
// input, so that the bytes of a column of its patch are a word. It stores the patch's rows at once, and the columns
// when all words of the tile are in shared memory, where a column of the tile is one piece.
//
// Compiled at run time by NVRTC. Every parameter is 8 bytes (see launch in shim.cpp). native/swiglu.py defines
// NAME, the kernel's; FUNCTION, ELEMENT, FLOAT8 and ROUND, the template's arguments; TILE_ROWS, rows of a tile; BAND,
// rows of tiles that blocks beside each other compute; BLOCKS_PER_SM, which limits registers.

#include "types.cuh"

constexpr int kPatchRows = 4, kVectors = 8;  // of a row of a tile: 128 bytes of an input
constexpr int kTileRows = TILE_ROWS, kThreads = kTileRows / kPatchRows * kVectors;
constexpr int kChunks = kTileRows / 16;  // of 16 bytes, in a column of a tile

struct alignas(16) Chunk {  // of a column
  unsigned words[4];
};

// s = 1 / (1 + exp(-x)) of a vector, rounded as the compiler's division rounds. Below 2^126 that is one of Newton's
// steps, and a branch for each number to know it; here there is one for the vector, and the numbers run side by side.
template <int size>
__device__ void sigmoids(const float (&x)[size], float (&s)[size]) {
  float least = x[0];
  for (int i = 1; i < size; i++) least = fminf(least, x[i]);
  if (least > -87.f)
    for (int i = 0; i < size; i++) {
      const float d = 1.f + expf(-x[i]), r = approximate_reciprocal(d);
      s[i] = fmaf(r, fmaf(-d, r, 1.f), r);
    }
  else
    for (int i = 0; i < size; i++) s[i] = 1.f / (1.f + expf(-x[i]));
}

struct SwiGLU {
  static constexpr int kOutputs = 1;
  float y[kOutputs];
  __device__ SwiGLU(float, float gate, float s, float up) { y[0] = gate * s * up; }
};

struct DSwiGLU {
  static constexpr int kOutputs = 2;
  float y[kOutputs];
  __device__ DSwiGLU(float dy, float gate, float s, float up) {
    y[0] = (gate * (s * (1.f - s)) + s) * dy * up;
    y[1] = dy * (gate * s);
  }
};

template <class T>
__device__ Vector<T> read(const T* at) {
  return *reinterpret_cast<const Vector<T>*>(at);
}

template <class T>
__device__ float rounded(float x) {
  T y;
  from_float(x, y);
  return to_float(y);
}

// columns[j]: the bytes j of four words.
__device__ void transpose(const unsigned (&rows)[4], unsigned (&columns)[4]) {
  const unsigned low01 = __byte_perm(rows[0], rows[1], 0x5140), low23 = __byte_perm(rows[2], rows[3], 0x5140);
  const unsigned high01 = __byte_perm(rows[0], rows[1], 0x7362), high23 = __byte_perm(rows[2], rows[3], 0x7362);
  columns[0] = __byte_perm(low01, low23, 0x5410), columns[1] = __byte_perm(low01, low23, 0x7632);
  columns[2] = __byte_perm(high01, high23, 0x5410), columns[3] = __byte_perm(high01, high23, 0x7632);
}

// Where a chunk of a column lies in shared memory, in chunks. column: of the vector `vector`. Threads that store words
// beside each other, of all vectors, and threads that read chunks beside each other meet all banks alike.
__device__ int place(int vector, int column, int chunk) {
  constexpr int rows = kChunks < 8 ? kChunks : 8;
  return ((column * kVectors + vector) * kChunks + chunk) ^ (vector * rows / 8);
}

struct Place {
  long long row, column;
};

// The first element of this block's tile. Blocks go down the rows of tiles of a band before they go to the right.
template <int width>
__device__ Place first_of_block(long long rows, long long cols) {
  const unsigned across = (cols + width - 1) / width, down = (rows + kTileRows - 1) / kTileRows;
  const unsigned band = blockIdx.x / (BAND * across), in_band = blockIdx.x % (BAND * across);
  const unsigned rest = down - band * BAND, height = rest < BAND ? rest : BAND;
  return {static_cast<long long>(band * BAND + in_band % height) * kTileRows,
          static_cast<long long>(in_band / height) * width};
}

// dy [rows, cols], unless Function needs none; z [rows, 2 cols]. data [rows, kOutputs cols] and transposed, its
// transpose, are 0 where they are not wanted. kRound: the result is rounded to T before it is cast. scale: 0 for 1;
// amax, which is raised; scale_inv: 0, or 1 / scale is written. rows and cols are multiples of 16.
template <class Function, class T, class Float8, bool kRound>
__device__ void cast_tile(const T* dy, const T* z, unsigned char* data, unsigned char* transposed, const float* scale,
                          float* amax, float* scale_inv, long long rows, long long cols) {
  constexpr int size = Vector<T>::size, outputs = Function::kOutputs, words = size / 4;
  struct alignas(size) Row {
    unsigned words[size / 4];
  };
  __shared__ Chunk tile[outputs][kVectors * size * kChunks];
  __shared__ unsigned greatest[kThreads / 32];

  const auto [first_row, first_column] = first_of_block<kVectors * size>(rows, cols);
  const int vector = threadIdx.x % kVectors, patch = threadIdx.x / kVectors;
  const long long row = first_row + patch * kPatchRows, column = first_column + vector * size;
  const float factor = scale ? *scale : 1.f;
  float max = 0;
  if (row < rows && column < cols) {
    Vector<T> grads[kPatchRows], gates[kPatchRows], ups[kPatchRows];
    for (int i = 0; i < kPatchRows; i++) {
      const T* at = z + (row + i) * 2 * cols + column;
      gates[i] = read(at);
      ups[i] = read(at + cols);
      if (outputs > 1) grads[i] = read(dy + (row + i) * cols + column);
    }
    unsigned patches[outputs][words][kPatchRows];
#pragma unroll
    for (int i = 0; i < kPatchRows; i++) {
      Row out[outputs];
      float gate[size], s[size];
      for (int k = 0; k < size; k++) gate[k] = to_float(gates[i].x[k]);
      sigmoids(gate, s);
#pragma unroll
      for (int w = 0; w < words; w++) {
        float y[outputs][4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int k = 4 * w + j;
          const Function f(outputs > 1 ? to_float(grads[i].x[k]) : 0.f, gate[k], s[k], to_float(ups[i].x[k]));
          for (int o = 0; o < outputs; o++) {
            float value = f.y[o];
            if constexpr (kRound) value = rounded<T>(value);
            max = fmaxf(fabsf(value), max);
            y[o][j] = value * factor;
          }
        }
        for (int o = 0; o < outputs; o++) {
          const unsigned low = Float8::pack(y[o][0], y[o][1]), high = Float8::pack(y[o][2], y[o][3]);
          patches[o][w][i] = out[o].words[w] = low | high << 16;
        }
      }
      if (data)
        for (int o = 0; o < outputs; o++)
          *reinterpret_cast<Row*>(data + ((row + i) * outputs + o) * cols + column) = out[o];
    }
    if (transposed)
      for (int o = 0; o < outputs; o++)
        for (int w = 0; w < words; w++) {
          unsigned columns[4];
          transpose(patches[o][w], columns);
          for (int j = 0; j < 4; j++) tile[o][place(vector, 4 * w + j, patch / 4)].words[patch % 4] = columns[j];
        }
  }
  const unsigned of_warp = __reduce_max_sync(0xffffffff, __float_as_uint(max));  // floats >= 0 are ordered as ints
  if (threadIdx.x % 32 == 0) greatest[threadIdx.x / 32] = of_warp;
  __syncthreads();
  if (transposed)
    for (int o = 0; o < outputs; o++)
      for (int i = threadIdx.x; i < kVectors * size * kChunks; i += kThreads) {
        const int chunk = i % kChunks, v = i / kChunks % kVectors, c = i / kChunks / kVectors;
        const long long to_row = first_row + chunk * 16, to_column = first_column + v * size + c;
        if (to_row < rows && to_column < cols)
          *reinterpret_cast<Chunk*>(transposed + (o * cols + to_column) * rows + to_row) = tile[o][place(v, c, chunk)];
      }
  if (threadIdx.x == 0) {
    unsigned of_block = 0;
    for (int i = 0; i < kThreads / 32; i++) of_block = greatest[i] > of_block ? greatest[i] : of_block;
    atomicMax(reinterpret_cast<int*>(amax), static_cast<int>(of_block));
    if (blockIdx.x == 0 && scale_inv) *scale_inv = 1.f / factor;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS_PER_SM)
    NAME(const ELEMENT* dy, const ELEMENT* z, unsigned char* data, unsigned char* transposed, const float* scale,
         float* amax, float* scale_inv, long long rows, long long cols) {
  cast_tile<FUNCTION, ELEMENT, FLOAT8, ROUND>(dy, z, data, transposed, scale, amax, scale_inv, rows, cols);
}
