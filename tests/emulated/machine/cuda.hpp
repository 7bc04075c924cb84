// What a CUDA compiler gives by itself, for emulated kernels.
#pragma once

#include <math.h>

#include "vocabulary.hpp"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __shared__ static_assert(false, "name shared memory by address: see shared_base in ptx.cuh");

#define threadIdx (emulated::here->thread)
#define blockIdx (emulated::here->block)
#define blockDim (emulated::here->block_size)
#define gridDim (emulated::here->grid_size)

template <class T>
inline T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
inline T max(T a, T b) {
  return a < b ? b : a;
}

inline void __syncthreads() { emulated::block_sync(0, 0); }
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { emulated::warp_sync(mask); }
inline unsigned __ballot_sync(unsigned mask, int value) { return emulated::ballot(mask, value != 0); }
inline void __threadfence() {}

template <class T>
inline T shuffled(unsigned mask, T value, unsigned source) {
  static_assert(sizeof(T) == 4, "shuffles move 4 bytes");
  unsigned bits;
  __builtin_memcpy(&bits, &value, 4);
  bits = emulated::shuffle(mask, bits, source);
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
template <class T>
inline T __shfl_sync(unsigned mask, T value, int source) {
  return shuffled(mask, value, source);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return shuffled(mask, value, (threadIdx.x % 32) ^ bits);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned by) {
  const unsigned lane = threadIdx.x % 32;
  return shuffled(mask, value, lane + by < 32 ? lane + by : lane);
}

inline float atomicAdd(float* to, float value) {
  const float before = *to;
  emulated::add_global(to, value);
  return before;
}
inline unsigned atomicAdd(unsigned* to, unsigned value) {
  const unsigned before = *to;
  *to += value;
  return before;
}
inline float __expf(float x) { return expf(x); }
template <class T>
inline T __ldg(const T* from) {
  return *from;
}
