// Adds slices of partial sums up in a fixed order: result[row][i] = sum over slices of partial[row][i].
// WAYS threads share the slices of each element, so that few elements of many slices take no longer.
// Macros: RESULT, VECTOR (elements a thread takes; rows and the result's pitch are multiples of it), WAYS.
#pragma once
#include "cuda/ptx.cuh"

constexpr int threads = 256, across = threads / WAYS;  // of a block; side by side

DEVICE void add(float (&sums)[1], const float* from) { sums[0] += *from; }
DEVICE void add(float (&sums)[2], const float* from) {
  const f32x2 two = *(const f32x2*)from;
  sums[0] += two.x;
  sums[1] += two.y;
}
DEVICE void add(float (&sums)[4], const float* from) {
  const f32x4 four = *(const f32x4*)from;
  sums[0] += four.x;
  sums[1] += four.y;
  sums[2] += four.z;
  sums[3] += four.w;
}

extern "C" __global__ void __launch_bounds__(threads)
sum_slices(const float* partial, RESULT* result, int slices, int rows, int row_size, i64 pitch) {
  const i64 size = (i64)rows * row_size;
  const int way = threadIdx.x / across, own = threadIdx.x % across;
  const i64 at = ((i64)blockIdx.x * across + own) * VECTOR;
  wait_for_previous_grid();
  float sums[VECTOR] = {};
  if (at < size)
#pragma unroll 4
    for (int slice = way; slice < slices; slice += WAYS) add(sums, partial + slice * size + at);
  if constexpr (WAYS > 1) {
    const u32 shared = shared_base();
#pragma unroll
    for (int i = 0; i < VECTOR; i++) store_shared_f32(shared + 4 * (i * threads + threadIdx.x), sums[i]);
    __syncthreads();
    if (way > 0) return;
#pragma unroll
    for (int i = 0; i < VECTOR; i++)
      for (int other = 1; other < WAYS; other++)
        sums[i] += load_shared_f32(shared + 4 * (i * threads + other * across + own));
  }
  if (at >= size) return;
  RESULT* to = result + at / row_size * pitch + at % row_size;
#pragma unroll
  for (int i = 0; i < VECTOR; i++) to[i] = from_float<RESULT>(sums[i]);
}
