// The sigmoid of SwiGLU's kernels.
#pragma once

#include "types.cuh"

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
