// Rotary position embedding of a pair of numbers, as all our kernels compute it: their results are equal to the bit.
#pragma once

// The pair (i, i + d/2) of a head, in place. sine: negative in backward. The order is told to the compiler, which would
// choose one for each kernel.
__device__ void rotate(float& low, float& high, float cosine, float sine) {
  const float a = low, b = high;
  low = fmaf(a, cosine, -(b * sine));
  high = fmaf(b, cosine, a * sine);
}
