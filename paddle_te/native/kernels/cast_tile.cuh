// Casts to fp8 with the transposed copy, in one pass over memory: what all kernels that do so are made of.
//
// A block of threads computes tiles. Each thread reads a patch of kPatchRows rows and one vector of columns of every
// input, so that the bytes of a column of its patch are a word. It stores the patch's rows at once, and the columns
// when all words of the tile are in shared memory, where a column of the tile is one piece.
//
// What is cast is a Source, of `columns` columns:
//   Element             the type of the inputs
//   kOutputs            numbers that come from one place of the inputs: what is written has kOutputs * columns columns
//   place(o, column)    the column of the number o
//   Patch               what a thread reads, at (source, row, column); compute(i, y): the numbers y[o][j] of row i
//
// The kernels' Python modules define TILE_ROWS, rows of a tile; TILES, tiles beside each other that a block computes;
// BAND, rows of tiles that blocks beside each other compute; BLOCKS_PER_SM, which limits registers; and ELEMENT, FLOAT8
// and ROUND, arguments of templates (native/casts.py). PLAIN, by default 0: whether the numbers are written in the
// inputs' type, too, so that data, transposed and amax may all be 0. STATISTICS, by default 0: whether a record of
// statistics.cuh is added to; then, too, all else may be 0. Kernels have TARGET_PARAMETERS, and make a Target of
// TARGET.
#pragma once

#include "statistics.cuh"

#ifndef PLAIN
#define PLAIN 0
#endif
#ifndef STATISTICS
#define STATISTICS 0
#endif

#define TARGET_PARAMETERS \
  unsigned char *data, unsigned char *transposed, const float *scale, float *amax, float *scale_inv STATISTICS_PARAMETER
#define TARGET(plain) {data, transposed, scale, amax, scale_inv, plain, STATISTICS_ARGUMENT}
#if STATISTICS
#define STATISTICS_PARAMETER , Counter* statistics
#define STATISTICS_ARGUMENT statistics
#else
#define STATISTICS_PARAMETER
#define STATISTICS_ARGUMENT nullptr
#endif

constexpr int kPatchRows = 4, kVectors = 8;  // of a row of a tile: 128 bytes of an input
constexpr int kTileRows = TILE_ROWS, kThreads = kTileRows / kPatchRows * kVectors;
constexpr int kChunks = kTileRows / 16;  // of 16 bytes, in a column of a tile

struct alignas(16) Chunk {  // of a column
  unsigned words[4];
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
__device__ int place_of_chunk(int vector, int column, int chunk) {
  constexpr int rows = kChunks < 8 ? kChunks : 8;
  return ((column * kVectors + vector) * kChunks + chunk) ^ (vector * rows / 8);
}

struct Place {
  long long row, column;
};

// How many blocks of threads compute a matrix.
template <int width>
__device__ unsigned blocks_of(long long rows, long long columns) {
  return (columns + width - 1) / width * ((rows + kTileRows - 1) / kTileRows);
}

// The first element of the tiles of a block, of this one by default. Blocks go down the rows of tiles of a band before
// they go to the right.
template <int width>
__device__ Place first_of_block(long long rows, long long columns, unsigned block = blockIdx.x) {
  const unsigned across = (columns + width - 1) / width, down = (rows + kTileRows - 1) / kTileRows;
#ifdef FROM_THE_END
  block = across * down - 1 - block;
#endif
  const unsigned band = block / (BAND * across), in_band = block % (BAND * across);
  const unsigned rest = down - band * BAND, height = rest < BAND ? rest : BAND;
  return {static_cast<long long>(band * BAND + in_band % height) * kTileRows,
          static_cast<long long>(in_band / height) * width};
}

// What is written. data [rows, kOutputs columns] and transposed, its transpose, are 0 where they are not wanted. scale:
// 0 for 1; amax, which is raised; scale_inv: 0, or 1 / scale is written. plain: Element [rows, kOutputs columns].
// statistics: a record.
struct Target {
  unsigned char *data, *transposed;
  const float* scale;
  float *amax, *scale_inv;
  void* plain;
  Counter* statistics;
};

// Casts this block's tiles of a Source whose matrix has so many rows and columns, multiples of 16; first: of
// first_of_block<kTilesWidth<Element>>. kRound: the numbers are rounded to Element before they are cast.
template <class T>
constexpr int kTileWidth = kVectors * Vector<T>::size;
template <class T>
constexpr int kTilesWidth = TILES * kTileWidth<T>;

// Where the transposed copy has the chunk of a column that begins with a row. Sources with a copy of another kind
// overload it.
template <class Source>
__device__ long long chunk_at(const Source&, long long column, long long row, long long rows) {
  return column * rows + row;
}

template <class Float8, bool kRound, class Source>
__device__ void cast_tiles(const Source& source, const Target& target, Place first, long long rows, long long columns) {
  using T = typename Source::Element;
  constexpr int size = Vector<T>::size, outputs = Source::kOutputs, words = size / 4;
  struct alignas(size) Row {
    unsigned words[size / 4];
  };
  __shared__ Chunk tile[outputs][kVectors * size * kChunks];
  __shared__ unsigned greatest[kThreads / 32];

  const int vector = threadIdx.x % kVectors, patch = threadIdx.x / kVectors;
  const long long row = first.row + patch * kPatchRows;
  const float factor = target.scale ? *target.scale : 1.f;
  float max = 0;
#if STATISTICS
  Counts counts;
#endif
  for (int t = 0; t < TILES; t++) {
    const long long first_column = first.column + t * kTileWidth<T>, column = first_column + vector * size;
    if (t) __syncthreads();  // the tile before has been stored
    if (row < rows && column < columns) {
      const typename Source::Patch inputs(source, row, column);
      unsigned patches[outputs][words][kPatchRows];
#pragma unroll
      for (int i = 0; i < kPatchRows; i++) {
        Row out[outputs];
        float y[outputs][size];
        inputs.compute(i, y);
#if PLAIN
#pragma unroll
        for (int o = 0; o < outputs; o++) {
          Vector<T> numbers;
#pragma unroll
          for (int j = 0; j < size; j++) from_float(y[o][j], numbers.x[j]);
          const long long at = (row + i) * outputs * columns + source.place(o, column);
          *reinterpret_cast<Vector<T>*>(static_cast<T*>(target.plain) + at) = numbers;
        }
#endif
#pragma unroll
        for (int o = 0; o < outputs; o++) {
          float unscaled[size];
#pragma unroll
          for (int j = 0; j < size; j++) {
            if constexpr (kRound) y[o][j] = rounded<T>(y[o][j]);
            max = fmaxf(fabsf(y[o][j]), max);
            unscaled[j] = y[o][j];
            y[o][j] *= factor;
          }
#pragma unroll
          for (int w = 0; w < words; w++) {
            const float* four = y[o] + 4 * w;
            const unsigned low = Float8::pack(four[0], four[1]), high = Float8::pack(four[2], four[3]);
            patches[o][w][i] = out[o].words[w] = low | high << 16;
#if STATISTICS
            float numbers[4];
            Float8::unpack(low, numbers[0], numbers[1]);
            Float8::unpack(high, numbers[2], numbers[3]);
            for (int j = 0; j < 4; j++) counts.see<Float8>(unscaled[4 * w + j], four[j], numbers[j]);
#endif
          }
        }
        if (target.data)
          for (int o = 0; o < outputs; o++)
            *reinterpret_cast<Row*>(target.data + (row + i) * outputs * columns + source.place(o, column)) = out[o];
      }
      if (target.transposed)
        for (int o = 0; o < outputs; o++)
          for (int w = 0; w < words; w++) {
            unsigned of_columns[4];
            transpose(patches[o][w], of_columns);
            for (int j = 0; j < 4; j++)
              tile[o][place_of_chunk(vector, 4 * w + j, patch / 4)].words[patch % 4] = of_columns[j];
          }
    }
    __syncthreads();
    if (target.transposed)
      for (int o = 0; o < outputs; o++)
        for (int i = threadIdx.x; i < kVectors * size * kChunks; i += kThreads) {
          const int chunk = i % kChunks, v = i / kChunks % kVectors, c = i / kChunks / kVectors;
          const long long to_row = first.row + chunk * 16, to_column = first_column + v * size + c;
          if (to_row < rows && to_column < columns)
            *reinterpret_cast<Chunk*>(target.transposed + chunk_at(source, source.place(o, to_column), to_row, rows)) =
                tile[o][place_of_chunk(v, c, chunk)];
        }
  }
#if STATISTICS
  if (counts.nonzero) counts.scale = factor, counts.scale_inv = 1.f / factor;
  counts.add_to(target.statistics);
#endif
  if ((PLAIN || STATISTICS) && !target.amax) return;
  const unsigned of_warp = __reduce_max_sync(0xffffffff, __float_as_uint(max));  // floats >= 0 are ordered as ints
  if (threadIdx.x % 32 == 0) greatest[threadIdx.x / 32] = of_warp;
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned of_block = 0;
    for (int i = 0; i < kThreads / 32; i++) of_block = greatest[i] > of_block ? greatest[i] : of_block;
    atomicMax(reinterpret_cast<int*>(target.amax), static_cast<int>(of_block));
    if (first.row == 0 && first.column == 0 && target.scale_inv) *target.scale_inv = 1.f / factor;
  }
}
