// The sum of two tensors, where no kernel of TE's adds in passing.
//
// Compiled at run time by NVRTC. Every parameter is 8 bytes (see shim/launch.h).

#include "types.cuh"

// Each thread adds Vector::size numbers, the last one those that are left over too.
template <class T>
__device__ void add_to(T* out, const T* other, long long n) {
  constexpr int size = Vector<T>::size;
  const long long vectors = n / size, i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  auto add = [](T& x, T y) { from_float(to_float(x) + to_float(y), x); };
  if (i < vectors) {
    Vector<T> x = reinterpret_cast<Vector<T>*>(out)[i], y = reinterpret_cast<const Vector<T>*>(other)[i];
    for (int j = 0; j < size; j++) add(x.x[j], y.x[j]);
    reinterpret_cast<Vector<T>*>(out)[i] = x;
  }
  if (i == vectors)
    for (long long j = vectors * size; j < n; j++) add(out[j], other[j]);
}

#define ADD_TO(T) \
  extern "C" __global__ void add_to_##T(T* out, const T* other, long long n) { add_to(out, other, n); }
ADD_TO(bfloat16)
ADD_TO(float16)
ADD_TO(float)
