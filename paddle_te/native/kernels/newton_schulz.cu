// Matrices by square tiles: a symmetric one from its upper block rows, and transposed copies.
//
// Compiled at run time by NVRTC. Every parameter is 8 bytes (see shim/launch.h). All sizes are multiples of kTile.

#include "types.cuh"

constexpr int kTile = 64;

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

#define KERNELS(T)                                                                                     \
  extern "C" __global__ void mirror_##T(const T* upper, T* out, long long n, long long rows) {         \
    mirror(upper, out, n, rows);                                                                       \
  }                                                                                                    \
  extern "C" __global__ void transpose_tiles_##T(const T* x, T* out, long long rows, long long cols) { \
    transpose_tiles(x, out, rows, cols);                                                               \
  }
KERNELS(bfloat16)
KERNELS(float16)
KERNELS(float)
