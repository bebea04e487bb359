// SwiGLU and its gradient in fp8, with the transposed copy, in one pass over memory.
//
// Of z = [gate, up], with s = 1 / (1 + exp(-gate)):
//   swiglu    y = gate s · up
//   dswiglu   [dgate, dup] = [(gate s (1 - s) + s) dy · up, dy · gate s]
// in float32, in the order in which Transformer Engine's functions compute it: the results are equal to the bit.
//
// Compiled at run time by NVRTC. Every parameter is 8 bytes (see launch in shim.cpp). native/swiglu.py defines
// NAME, the kernel's, and FUNCTION, the Source's function, beside what cast_tile.cuh needs.

#include "cast_tile.cuh"

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

// dy [rows, columns], unless Function needs none; z [rows, 2 columns].
template <class T, class Function>
struct Activation {
  using Element = T;
  static constexpr int kOutputs = Function::kOutputs, size = Vector<T>::size;
  const T *dy, *z;
  long long columns;

  __device__ long long place(int o, long long column) const { return o * columns + column; }

  struct Patch {
    Vector<T> grads[kPatchRows], gates[kPatchRows], ups[kPatchRows];
    __device__ Patch(const Activation& of, long long row, long long column) {
      for (int i = 0; i < kPatchRows; i++) {
        const T* at = of.z + (row + i) * 2 * of.columns + column;
        gates[i] = read(at);
        ups[i] = read(at + of.columns);
        if (kOutputs > 1) grads[i] = read(of.dy + (row + i) * of.columns + column);
      }
    }
    __device__ void compute(int i, float (&y)[kOutputs][size]) const {
      float gate[size], s[size];
      for (int k = 0; k < size; k++) gate[k] = to_float(gates[i].x[k]);
      sigmoids(gate, s);
      for (int k = 0; k < size; k++) {
        const Function f(kOutputs > 1 ? to_float(grads[i].x[k]) : 0.f, gate[k], s[k], to_float(ups[i].x[k]));
        for (int o = 0; o < kOutputs; o++) y[o][k] = f.y[o];
      }
    }
  };
};

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS_PER_SM)
    NAME(const ELEMENT* dy, const ELEMENT* z, unsigned char* data, unsigned char* transposed, const float* scale,
         float* amax, float* scale_inv, long long rows, long long columns) {
  const Place first = first_of_block<kTilesWidth<ELEMENT>>(rows, columns);
  const Activation<ELEMENT, FUNCTION> source{dy, z, columns};
  cast_tiles<FLOAT8, ROUND>(source, Target{data, transposed, scale, amax, scale_inv}, first, rows, columns);
}
