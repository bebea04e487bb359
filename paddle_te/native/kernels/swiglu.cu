// SwiGLU and its gradient in fp8, with the transposed copy, in one pass over memory.
//
// Of z = [gate, up], with s = 1 / (1 + exp(-gate)):
//   swiglu    y = gate s · up
//   dswiglu   [dgate, dup] = [(gate s (1 - s) + s) dy · up, dy · gate s]
// in float32, in the order in which Transformer Engine's functions compute it: the results are equal to the bit.
//
// z can be in MXFP8: written so beside what is computed of it, for a later kernel that reads it so.
//
// Compiled at run time by NVRTC. Every parameter is 8 bytes (see shim/launch.h). native/swiglu.py defines
// NAME, the kernel's, FUNCTION, the Source's function, STORED, a Stored, and AGAIN, whether dswiglu writes swiglu's y,
// too, beside what cast_tile.cuh needs.

#include "cast_tile.cuh"
#include "mxfp8.cuh"
#include "sigmoid.cuh"

enum Stored { kNone, kWritten, kRead };

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

// Eight numbers of z, as they are read.
template <class T>
struct Numbers {
  Vector<T> numbers;
  __device__ void load(const T* z, const unsigned char*, const unsigned char*, long long at) { numbers = read(z + at); }
  __device__ void to_floats(float (&x)[Vector<T>::size]) const {
#pragma unroll
    for (int k = 0; k < Vector<T>::size; k++) x[k] = to_float(numbers.x[k]);
  }
};

struct Restored {
  Bytes bytes;
  unsigned exponent;
  template <class T>
  __device__ void load(const T*, const unsigned char* stored, const unsigned char* exponents, long long at) {
    bytes = *reinterpret_cast<const Bytes*>(stored + at), exponent = exponents[at / kBlock];
  }
  __device__ void to_floats(float (&x)[8]) const { from_mxfp8(bytes, exponent, x); }
};

template <class T, int kStored>
struct InputOf {
  using Type = Numbers<T>;
};
template <class T>
struct InputOf<T, kRead> {
  using Type = Restored;
};

// dy [rows, columns], unless Function needs none; z [rows, 2 columns], or in its place, or beside it, `stored`: its
// bytes and exponents. again: [rows, columns], or 0.
template <class T, class Function>
struct Activation {
  using Element = T;
  static constexpr int kOutputs = Function::kOutputs, size = Vector<T>::size;
  const T *dy, *z;
  unsigned char *stored, *exponents;
  T* again;
  long long columns;

  __device__ long long place(int o, long long column) const { return o * columns + column; }

  __device__ void store(const float (&x)[size], long long at) const {
    Bytes bytes;
    const unsigned e = to_mxfp8(x, bytes);
    *reinterpret_cast<Bytes*>(stored + at) = bytes;
    if (at % kBlock == 0) exponents[at / kBlock] = e;
  }

  struct Patch {
    typename InputOf<T, STORED>::Type gates[kPatchRows], ups[kPatchRows];
    Vector<T> grads[kPatchRows];
    const Activation& of;
    long long row, column;
    __device__ Patch(const Activation& of, long long row, long long column) : of(of), row(row), column(column) {
      for (int i = 0; i < kPatchRows; i++) {
        const long long at = (row + i) * 2 * of.columns + column;
        gates[i].load(of.z, of.stored, of.exponents, at);
        ups[i].load(of.z, of.stored, of.exponents, at + of.columns);
        if (kOutputs > 1) grads[i] = read(of.dy + (row + i) * of.columns + column);
      }
    }
    __device__ void compute(int i, float (&y)[kOutputs][size]) const {
      float gate[size], up[size], s[size];
      gates[i].to_floats(gate);
      ups[i].to_floats(up);
#if STORED == 1
      const long long at = (row + i) * 2 * of.columns + column;
      of.store(gate, at);
      of.store(up, at + of.columns);
#endif
      sigmoids(gate, s);
      for (int k = 0; k < size; k++) {
        const Function f(kOutputs > 1 ? to_float(grads[i].x[k]) : 0.f, gate[k], s[k], up[k]);
        for (int o = 0; o < kOutputs; o++) y[o][k] = f.y[o];
      }
#if AGAIN
      Vector<T> numbers;
#pragma unroll
      for (int k = 0; k < size; k++) from_float(SwiGLU(0, gate[k], s[k], up[k]).y[0], numbers.x[k]);
      *reinterpret_cast<Vector<T>*>(of.again + (row + i) * of.columns + column) = numbers;
#endif
    }
  };
};

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS_PER_SM)
    NAME(const ELEMENT* dy, const ELEMENT* z, unsigned char* stored, ELEMENT* again, ELEMENT* plain, TARGET_PARAMETERS,
         long long rows, long long columns) {
  const Place first = first_of_block<kTilesWidth<ELEMENT>>(rows, columns);
  const Activation<ELEMENT, FUNCTION> source{dy, z, stored, stored + rows * 2 * columns, again, columns};
  cast_tiles<FLOAT8, ROUND>(source, Target TARGET(plain), first, rows, columns);
}
