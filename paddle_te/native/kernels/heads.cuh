// The heads of q, k and v, and norms of them: what qk_norm.cu and rotation_cast.cu share.
//
// Compiled with INTERLEAVED and OVER_ALL (see qk_norm.cu) as 0 or 1.
#pragma once

#include "rotation.cuh"

constexpr unsigned kAllLanes = 0xffffffff;

// The sum over the threads of a head. All threads of the block call it.
__device__ float sum_of_head(float x, int lanes) {
  for (int lane = 1; lane < lanes; lane *= 2) x += __shfl_xor_sync(kAllLanes, x, lane);
  return x;
}

// The norm's epsilon, what is added to its weights, 1 or 0, and how many ranks share the heads: in one parameter.
struct Norm {
  float epsilon, added;
  int ranks;
  __device__ explicit Norm(long long all)
      : epsilon(__uint_as_float(static_cast<unsigned>(all))),
        added(static_cast<float>(all >> 32 & 1)),
        ranks(static_cast<int>(all >> 33)) {}
};

// Heads of q, and of k: two numbers of 32 bits in one parameter.
struct Counts {
  int q, kv;
  __device__ explicit Counts(long long both) : q(static_cast<int>(both)), kv(static_cast<int>(both >> 32)) {}
  __device__ int all() const { return q + kv; }
};

// Two vectors of a head, as rotation.cuh has them.
template <class T>
struct Pair {
  using At = Places<INTERLEAVED, Vector<T>::size>;
  Vector<T> low, high;
  __device__ static Pair at(const T* head, const At& at) {
    return {*reinterpret_cast<const Vector<T>*>(head + at.low), *reinterpret_cast<const Vector<T>*>(head + at.high)};
  }
  __device__ void store(T* head, const At& at) const {
    *reinterpret_cast<Vector<T>*>(head + at.low) = low;
    *reinterpret_cast<Vector<T>*>(head + at.high) = high;
  }
};

// q, k and v of all tokens: where each begins, and the elements from a token to the next.
template <class T>
struct Heads {
  T *q, *k, *v;
  long long q_stride, k_stride, v_stride;
  __device__ T* head(long long token, int head, int q_heads, int d) const {
    return head < q_heads ? q + token * q_stride + head * d : k + token * k_stride + (head - q_heads) * d;
  }
};

// The weights of a head.
template <class T>
__device__ const T* weights_of(const T* q_weight, const T* k_weight, int head, Counts counts, int d) {
  if (head < counts.q) return q_weight + (OVER_ALL ? head * d : 0);
  return k_weight + (OVER_ALL ? (head - counts.q) * d : 0);
}

// Threads of a head.
template <class T>
__device__ int lanes_of_head(long long d) {
  int lanes = 1;
  while (lanes * 2 * Vector<T>::size < d) lanes *= 2;
  return lanes;
}
