// The factors A and B of several low-rank products as two matrices, and the gradients of these as theirs.
//
// Up to three parts have an A [inputs, r] and a B [r, size]. Side by side their A are [inputs, width], with columns of
// zeros up to width. Their B, times a factor, are [width, outputs]: each has rows of its own and, from its start on, as
// many columns as its size; all else is zeros. So x · A · B of all parts takes two products, and nobody else multiplies
// with the factor.
//
// Compiled at run time by NVRTC. Every parameter is 8 bytes (see shim/launch.h): the factor is a float's bits.

#include "types.cuh"

constexpr int kParts = 3;

template <class T>
struct Part {
  T* a;  // null for a part that is not there
  T* b;
  long long start, size;
};

__device__ long long this_thread() { return static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; }

// Each thread writes one number of a or b.
template <class T>
__device__ void pack(const Part<T>* parts, T* a, T* b, long long inputs, long long outputs, long long r,
                     long long width, float factor) {
  const long long i = this_thread(), numbers = inputs * width;
  if (i < numbers) {
    const long long row = i / width, column = i % width, part = column / r;
    const bool there = part < kParts && parts[part].a;
    from_float(there ? to_float(parts[part].a[row * r + column % r]) : 0.0f, a[i]);
  } else if (i < numbers + width * outputs) {
    const long long j = i - numbers, row = j / outputs, part = row / r;
    long long column = j % outputs;
    float value = 0;
    if (part < kParts && parts[part].b) {
      column -= parts[part].start;
      if (column >= 0 && column < parts[part].size)
        value = factor * to_float(parts[part].b[row % r * parts[part].size + column]);
    }
    from_float(value, b[j]);
  }
}

// Backward: each thread reads one number of a or b, the gradients, and writes it to its part, if that wants it.
template <class T>
__device__ void unpack(const Part<T>* parts, const T* a, const T* b, long long inputs, long long outputs, long long r,
                       long long width, float factor) {
  const long long i = this_thread(), numbers = inputs * width;
  if (i < numbers) {
    const long long row = i / width, column = i % width, part = column / r;
    if (part < kParts && parts[part].a) parts[part].a[row * r + column % r] = a[i];
  } else if (i < numbers + width * outputs) {
    const long long j = i - numbers, row = j / outputs, part = row / r;
    if (part < kParts && parts[part].b) {
      const long long column = j % outputs - parts[part].start;
      if (column >= 0 && column < parts[part].size)
        from_float(factor * to_float(b[j]), parts[part].b[row % r * parts[part].size + column]);
    }
  }
}

#define LOW_RANK(T)                                                                                                    \
  extern "C" __global__ void pack_##T(T* a0, T* a1, T* a2, T* b0, T* b1, T* b2, long long start0, long long start1,    \
                                      long long start2, long long size0, long long size1, long long size2, T* a, T* b, \
                                      long long inputs, long long outputs, long long r, long long width,               \
                                      long long factor) {                                                              \
    const Part<T> parts[kParts] = {{a0, b0, start0, size0}, {a1, b1, start1, size1}, {a2, b2, start2, size2}};         \
    pack(parts, a, b, inputs, outputs, r, width, __uint_as_float(static_cast<unsigned>(factor)));                      \
  }                                                                                                                    \
  extern "C" __global__ void unpack_##T(T* a0, T* a1, T* a2, T* b0, T* b1, T* b2, long long start0, long long start1,  \
                                        long long start2, long long size0, long long size1, long long size2,           \
                                        const T* a, const T* b, long long inputs, long long outputs, long long r,      \
                                        long long width, long long factor) {                                           \
    const Part<T> parts[kParts] = {{a0, b0, start0, size0}, {a1, b1, start1, size1}, {a2, b2, start2, size2}};         \
    unpack(parts, a, b, inputs, outputs, r, width, __uint_as_float(static_cast<unsigned>(factor)));                    \
  }
LOW_RANK(bfloat16)
LOW_RANK(float16)
LOW_RANK(float)
