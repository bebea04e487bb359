// Rotary position embedding of a head, as rope.cu and qk_norm.cu have it.
//
// The first `turned` of a head's d numbers are rotated, in pairs (RoFormer, arXiv:2104.09864): pair i by angle a[i] is
//   y[first]  = x[first] cos(a[i]) - x[second] sin(a[i])
//   y[second] = x[second] cos(a[i]) + x[first] sin(a[i])      backward: the same with -sin.
// and a factor, which is 1 in most models, multiplies both (LongRoPE's, arXiv:2402.13753). A pair is numbers i and
// i + turned / 2 (NeoX, Llama), or, interleaved, numbers 2i and 2i + 1 (GPT-J, GLM). The rest is in pairs, too, which
// angle 0 leaves as they are.
//
// A thread holds two vectors of a head, `low` and `high`, which make as many pairs as a vector has numbers: those from
// `place` on. So place is from 0 to d / 2, in steps of Vector<T>::size, which must divide turned / 2 and d / 2.
#pragma once

#include "types.cuh"

// How wide a head is, and how many of its numbers are turned, two numbers of 32 bits in one parameter; and what the
// turned ones are multiplied by.
struct Widths {
  int d, turned;
  float factor;
  __device__ Widths(long long both, long long factor)
      : d(static_cast<int>(both)),
        turned(static_cast<int>(both >> 32)),
        factor(__uint_as_float(static_cast<unsigned>(factor))) {}
  __device__ Widths(int turned, float factor) : d(turned), turned(turned), factor(factor) {}  // all of it
};

// Fills cosines and sines [d / 2] of the token's pairs, in shared memory. angles: its row of at least turned / 2; 0 for
// none. sign: -1 for backward. The caller synchronises.
__device__ void take_angles(const float* angles, Widths widths, float sign, float* cosines, float* sines) {
  for (int i = threadIdx.x; i < widths.d / 2; i += blockDim.x) {
    float sine = 0, cosine = 1;
    if (angles && i < widths.turned / 2) {
      sincosf(angles[i], &sine, &cosine);
      sine *= widths.factor, cosine *= widths.factor;
    }
    cosines[i] = cosine;
    sines[i] = sign * sine;
  }
}

// Where the vectors of the thread at `place` begin in a head.
template <bool interleaved, int size>
struct Places {
  int low, high;
  __device__ Places(int place, Widths widths) {
    if (interleaved) {
      low = 2 * place, high = 2 * place + size;
    } else if (place < widths.turned / 2) {
      low = place, high = place + widths.turned / 2;
    } else {
      low = place + widths.turned / 2, high = place + widths.d / 2;
    }
  }
};

// Turns the thread's pairs. cosines, sines: from its place on.
template <bool interleaved, int size>
__device__ void turn(float (&low)[size], float (&high)[size], const float* cosines, const float* sines) {
  for (int i = 0; i < size; i++) {
    float& first = !interleaved ? low[i] : 2 * i < size ? low[2 * i] : high[2 * i - size];
    float& second = !interleaved ? high[i] : 2 * i < size ? low[2 * i + 1] : high[2 * i + 1 - size];
    const float a = first, b = second;
    first = a * cosines[i] - b * sines[i];
    second = b * cosines[i] + a * sines[i];
  }
}

template <class T>
__device__ void to_floats(const Vector<T>& from, float (&to)[Vector<T>::size]) {
  for (int i = 0; i < Vector<T>::size; i++) to[i] = to_float(from.x[i]);
}
template <class T>
__device__ void from_floats(const float (&from)[Vector<T>::size], Vector<T>& to) {
  for (int i = 0; i < Vector<T>::size; i++) from_float(from[i], to.x[i]);
}
