// Numbers to MXFP8 and back (mxfp8.cuh): n of them, a multiple of 32. Each thread has 8.
//
// Compiled at run time by NVRTC. Every parameter is 8 bytes (see shim/launch.h). native/mxfp8.py defines ELEMENT,
// the type of the numbers, of 16 bits.

#include "mxfp8.cuh"

using Numbers = Vector<ELEMENT>;

__device__ long long vector_of_thread() { return static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; }

// bytes: n of them, and behind these the exponents.
extern "C" __global__ void mxfp8_store(const ELEMENT* x, unsigned char* bytes, long long n) {
  const long long i = vector_of_thread();
  if (i >= n / 8) return;
  const Numbers numbers = reinterpret_cast<const Numbers*>(x)[i];
  float values[8];
  for (int k = 0; k < 8; k++) values[k] = to_float(numbers.x[k]);
  Bytes packed;
  const unsigned e = to_mxfp8(values, packed);
  reinterpret_cast<Bytes*>(bytes)[i] = packed;
  if (i % kBlockVectors == 0) bytes[n + i / kBlockVectors] = e;
}

extern "C" __global__ void mxfp8_restore(const unsigned char* bytes, ELEMENT* x, long long n) {
  const long long i = vector_of_thread();
  if (i >= n / 8) return;
  float values[8];
  from_mxfp8(reinterpret_cast<const Bytes*>(bytes)[i], bytes[n + i / kBlockVectors], values);
  Numbers numbers;
  for (int k = 0; k < 8; k++) from_float(values[k], numbers.x[k]);
  reinterpret_cast<Numbers*>(x)[i] = numbers;
}
