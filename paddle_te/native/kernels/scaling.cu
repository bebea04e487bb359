// Factors of fp8 tensors that no kernel of TE's or cuDNN's writes as they are needed.
//
// Compiled at run time by NVRTC. Every parameter is 8 bytes (see shim/launch.h).

// scale_inv[4 i] = 1 / scale[i], for i < n.
extern "C" __global__ void reciprocals(const float* scale, float* scale_inv, long long n) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) scale_inv[4 * i] = 1 / scale[i];
}

// The greatest amax so far, of two tensors, by one thread: cuDNN's attention overwrites what TE's casts add to.
extern "C" __global__ void raise_amaxes(const float* first, float* first_amax, const float* second,
                                        float* second_amax) {
  *first_amax = fmaxf(*first_amax, *first);
  *second_amax = fmaxf(*second_amax, *second);
}
