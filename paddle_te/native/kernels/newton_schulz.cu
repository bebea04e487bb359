// Matrices divided by their norms; and by square tiles: a symmetric one from its upper block rows, transposed copies.
//
// Compiled at run time by NVRTC. Every parameter is 8 bytes (see shim/launch.h).

#include "types.cuh"

constexpr int kTile = 64;      // divides the sizes of matrices of tiles
constexpr int kThreads = 256;  // of a block that sums

// The sum of all threads' values, in the same order each time.
__device__ float sum_of_block(float value) {
  __shared__ float values[kThreads];
  values[threadIdx.x] = value;
  __syncthreads();
  for (int half = kThreads / 2; half; half /= 2) {
    if (threadIdx.x < half) values[threadIdx.x] += values[threadIdx.x + half];
    __syncthreads();
  }
  return values[0];
}

// function(x) for each number of this block's part of its matrix: of `parts` parts of matrices of `size` numbers that
// lie one behind the other, the blockIdx.x'th. By vectors where each matrix begins with one. writes: what it changes.
template <bool writes, class T, class Function>
__device__ void for_part(T* x, long long size, long long parts, Function function) {
  constexpr int width = Vector<T>::size;
  const long long part = blockIdx.x % parts, step = size % width ? 1 : width, lines = size / step;
  T* matrix = x + blockIdx.x / parts * size;
  const long long each = (lines + parts - 1) / parts, end = (part + 1) * each < lines ? (part + 1) * each : lines;
  for (long long line = part * each + threadIdx.x; line < end; line += kThreads) {
    if (step == 1) {
      function(matrix[line]);
      continue;
    }
    Vector<T> values = reinterpret_cast<Vector<T>*>(matrix)[line];
    for (int j = 0; j < width; j++) function(values.x[j]);
    if (writes) reinterpret_cast<Vector<T>*>(matrix)[line] = values;
  }
}

// sums[blockIdx.x] = the sum of squares of a part.
template <class T>
__device__ void squares(T* x, float* sums, long long size, long long parts) {
  float sum = 0;
  for_part<false>(x, size, parts, [&](const T& number) { sum += to_float(number) * to_float(number); });
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// Divides each matrix by the root of the sum of its parts' sums, or by `least` where that is greater.
template <class T>
__device__ void divide_by_norms(T* x, const float* sums, long long size, long long parts, float least) {
  float sum = 0;
  for (long long part = threadIdx.x; part < parts; part += kThreads) sum += sums[blockIdx.x / parts * parts + part];
  const float norm = fmaxf(sqrtf(sum_of_block(sum)), least);
  for_part<true>(x, size, parts, [&](T& number) { from_float(to_float(number) / norm, number); });
}

// Half a bank more than a row: threads that read a column read other banks.
template <class T>
using Tile = T[kTile][kTile + 2];

// The threads of a block read a tile whose first element is `from`, of a matrix with `cols` columns.
template <class T>
__device__ void load(Tile<T>& tile, const T* from, long long cols) {
  constexpr int size = Vector<T>::size, vectors = kTile / size;
  for (int i = threadIdx.x; i < kTile * vectors; i += blockDim.x) {
    const int row = i / vectors, col = i % vectors * size;
    const Vector<T> values = *reinterpret_cast<const Vector<T>*>(from + row * cols + col);
    for (int j = 0; j < size; j++) tile[row][col + j] = values.x[j];
  }
}

template <bool transposed, class T>
__device__ void store(const Tile<T>& tile, T* to, long long cols) {
  constexpr int size = Vector<T>::size, vectors = kTile / size;
  for (int i = threadIdx.x; i < kTile * vectors; i += blockDim.x) {
    const int row = i / vectors, col = i % vectors * size;
    Vector<T> values;
    for (int j = 0; j < size; j++) values.x[j] = transposed ? tile[col + j][row] : tile[row][col + j];
    *reinterpret_cast<Vector<T>*>(to + row * cols + col) = values;
  }
}

// out [n, n] = the symmetric matrix of which `upper` has block rows of `rows` rows, one behind the other, each from the
// diagonal's block on. A block of threads for each tile of out; those below the diagonal's blocks have nothing to do.
template <class T>
__device__ void mirror(const T* upper, T* out, long long n, long long rows) {
  __shared__ Tile<T> tile;
  const long long tiles = n / kTile, row = blockIdx.x / tiles * kTile, col = blockIdx.x % tiles * kTile;
  const long long block = row / rows, first = block * rows;
  if (col < first) return;
  const T* block_row = upper + rows * (block * n - rows * (block * (block - 1) / 2));
  load(tile, block_row + (row - first) * (n - first) + col - first, n - first);
  __syncthreads();
  store<false>(tile, out + row * n + col, n);
  if (col >= first + rows) store<true>(tile, out + col * n + row, n);
}

// out [cols, rows] = x [rows, cols] transposed. A block of threads for each tile.
template <class T>
__device__ void transpose_tiles(const T* x, T* out, long long rows, long long cols) {
  __shared__ Tile<T> tile;
  const long long tiles = cols / kTile, row = blockIdx.x / tiles * kTile, col = blockIdx.x % tiles * kTile;
  load(tile, x + row * cols + col, cols);
  __syncthreads();
  store<true>(tile, out + col * rows + row, rows);
}

#define KERNELS(T)                                                                                         \
  extern "C" __global__ void squares_##T(T* x, float* sums, long long size, long long parts) {             \
    squares(x, sums, size, parts);                                                                         \
  }                                                                                                        \
  extern "C" __global__ void divide_by_norms_##T(T* x, const float* sums, long long size, long long parts, \
                                                 long long least) {                                        \
    divide_by_norms(x, sums, size, parts, __uint_as_float(static_cast<unsigned>(least)));                  \
  }                                                                                                        \
  extern "C" __global__ void mirror_##T(const T* upper, T* out, long long n, long long rows) {             \
    mirror(upper, out, n, rows);                                                                           \
  }                                                                                                        \
  extern "C" __global__ void transpose_tiles_##T(const T* x, T* out, long long rows, long long cols) {     \
    transpose_tiles(x, out, rows, cols);                                                                   \
  }
KERNELS(bfloat16)
KERNELS(float16)
KERNELS(float)
