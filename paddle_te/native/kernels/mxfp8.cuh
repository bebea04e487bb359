// Numbers in MXFP8 (OCP Microscaling Formats 1.0, 2023): of each 32 beside each other an e4m3 byte, and for all of them
// one exponent, a byte e that stands for 2^(e - 127). It is the least one with which no number is beyond 448. The four
// threads that have the 32 numbers, 8 each, are beside each other in a warp.
//
// What is read back is exact in bfloat16 and float16. A block in which a number is not finite is read back as numbers
// that are not.
#pragma once

#include "types.cuh"

constexpr int kBlock = 32, kBlockVectors = 4;

struct alignas(8) Bytes {  // of 8 numbers
  unsigned words[2];
};

// For 448 = 1.75 * 2^8, from the greatest magnitude.
__device__ unsigned exponent_of(unsigned magnitude) {
  const int exponent = static_cast<int>(magnitude >> 23) - 8 + ((magnitude & 0x7fffff) > 0x600000);
  return magnitude >= 0x7f800000 ? 255 : exponent > 0 ? exponent : 0;
}

// 2^(e - 127), infinity for 255.
__device__ float power(unsigned e) { return __uint_as_float(e ? e << 23 : 0x400000); }

// The bytes of 8 numbers, and the exponent of the 32 that these four threads have.
__device__ unsigned to_mxfp8(const float (&x)[8], Bytes& bytes) {
  unsigned magnitude = 0;
  for (int i = 0; i < 8; i++) {
    const unsigned of_x = __float_as_uint(x[i]) & 0x7fffffff;
    magnitude = of_x > magnitude ? of_x : magnitude;
  }
  const unsigned threads = 0xfu << (threadIdx.x % 32 & ~3);
  for (int lanes = 1; lanes < kBlockVectors; lanes *= 2) {
    const unsigned other = __float_as_uint(__shfl_xor_sync(threads, __uint_as_float(magnitude), lanes));
    magnitude = other > magnitude ? other : magnitude;
  }
  const unsigned e = exponent_of(magnitude);
  const float factor = power(254 - (e < 254 ? e : 254));
  for (int w = 0; w < 2; w++) {
    const float* four = x + 4 * w;
    const unsigned low = e4m3::pack(four[0] * factor, four[1] * factor);
    bytes.words[w] = low | static_cast<unsigned>(e4m3::pack(four[2] * factor, four[3] * factor)) << 16;
  }
  return e;
}

// A byte's bits are a float32's 120 powers of 2 below, subnormal ones too.
__device__ void from_mxfp8(Bytes bytes, unsigned e, float (&x)[8]) {
  const float factor = power(e);
  for (int i = 0; i < 8; i++) {
    const unsigned byte = bytes.words[i / 4] >> 8 * (i % 4) & 0xff;
    x[i] = __uint_as_float((byte & 0x80) << 24 | (byte & 0x7f) << 20) * 0x1p120f * factor;
  }
}
