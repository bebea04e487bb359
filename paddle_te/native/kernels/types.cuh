// Element types of our kernels and their vectors of 16 bytes; NVRTC gets no header of CUDA's.
#pragma once

struct bfloat16 {
  unsigned short bits;
};
struct float16 {
  unsigned short bits;
};

__device__ float to_float(bfloat16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
__device__ float to_float(float16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ float to_float(float x) { return x; }
__device__ void from_float(float x, bfloat16& y) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }
__device__ void from_float(float x, float16& y) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }
__device__ void from_float(float x, float& y) { y = x; }

template <class T>
struct alignas(16) Vector {
  static constexpr int size = 16 / sizeof(T);
  T x[size];
};

// 1 / x to 1 ulp, for x from 2^-126 to 2^126.
__device__ float approximate_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// fp8: pack's low byte is of the first number. Rounded to nearest even, and to the greatest number instead of infinity,
// as Transformer Engine does. unpack: the numbers of such a pair.
struct e4m3 {
  static constexpr float kGreatest = 448;
  __device__ static unsigned short pack(float low, float high) {
    unsigned short bits;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
    return bits;
  }
  __device__ static void unpack(unsigned short bits, float& low, float& high) {
    unsigned halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(bits));
    low = to_float(float16{static_cast<unsigned short>(halves)});
    high = to_float(float16{static_cast<unsigned short>(halves >> 16)});
  }
};
struct e5m2 {
  static constexpr float kGreatest = 57344;
  __device__ static unsigned short pack(float low, float high) {
    unsigned short bits;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
    return bits;
  }
  __device__ static void unpack(unsigned short bits, float& low, float& high) {
    low = to_float(float16{static_cast<unsigned short>(bits << 8)});  // its upper half
    high = to_float(float16{static_cast<unsigned short>(bits & 0xff00)});
  }
};
