// What attention in fp8 subtracts from keys and values, the means over a sequence's tokens: what centring.cu and
// rotation_cast.cu share.
//
// Compiled with INTERLEAVED, NORM, whether there are norms, as 0 or 1, and OVER_ALL as 0.
#pragma once

#include "heads.cuh"

// all: [sequences, 2, kv heads, d], of k and then of v. sequence: its tokens.
struct Means {
  const float* all;
  long long sequence;
  __device__ const float* of_k(long long token, int numbers) const { return all + token / sequence * 2 * numbers; }
  __device__ const float* of_v(long long token, int numbers) const { return of_k(token, numbers) + numbers; }
};

// x - mean, rounded to T. mean: at a multiple of 16 bytes.
template <class T>
__device__ void subtract(Vector<T>& x, const float* mean) {
  constexpr int quarter = Vector<float>::size;
  for (int i = 0; i < Vector<T>::size; i += quarter) {
    const Vector<float> m = *reinterpret_cast<const Vector<float>*>(mean + i);
    for (int j = 0; j < quarter; j++) from_float(to_float(x.x[i + j]) - m.x[j], x.x[i + j]);
  }
}

// Norms, with NORM, and turns what a thread holds of a head, and rounds it to T, as if it had been stored. All threads
// of the block call it, as those of a head add up together. weights: the norm's, read by threads that work.
template <class T>
__device__ void norm_and_turn(Pair<T>& x, const T* weights, bool works, const typename Pair<T>::At& at, int d,
                              int lanes, Norm norm, const float* cosines, const float* sines) {
  constexpr int size = Vector<T>::size;
  float low[size], high[size];
  to_floats(x.low, low), to_floats(x.high, high);
  if (NORM) {
    float squares = 0;
    for (int i = 0; i < size; i++) squares += low[i] * low[i] + high[i] * high[i];
    const float r = rsqrtf(sum_of_head(squares, lanes) / d + norm.epsilon);
    if (works) {
      const Pair<T> w = Pair<T>::at(weights, at);
      for (int i = 0; i < size; i++) {
        low[i] *= r * (to_float(w.low.x[i]) + norm.added);
        high[i] *= r * (to_float(w.high.x[i]) + norm.added);
      }
    }
  }
  if (!works) return;
  turn<INTERLEAVED>(low, high, cosines, sines);
  from_floats(low, x.low), from_floats(high, x.high);
}
