// Adds slices of partial sums up in a fixed order: result[row][i] = sum over slices of partial[row][i].
// Macros: RESULT, VECTOR (elements a thread takes; rows and the result's pitch are multiples of it).
#pragma once
#include "cuda/ptx.cuh"

extern "C" __global__ void __launch_bounds__(256)
sum_slices(const float* partial, RESULT* result, int slices, int rows, int row_size, i64 pitch) {
  const i64 size = (i64)rows * row_size, at = ((i64)blockIdx.x * 256 + threadIdx.x) * VECTOR;
  if (at >= size) return;
  float sums[VECTOR] = {};
  for (int slice = 0; slice < slices; slice++)
#pragma unroll
    for (int i = 0; i < VECTOR; i++) sums[i] += partial[slice * size + at + i];
  RESULT* to = result + at / row_size * pitch + at % row_size;
#pragma unroll
  for (int i = 0; i < VECTOR; i++) to[i] = from_float<RESULT>(sums[i]);
}
