// Adds the rows of a matrix up in a fixed order: out[column] = sum over rows of partial[row][column].
// A block takes 32 columns; its 32 warps take every 32nd row each.
#pragma once
#include "cuda/ptx.cuh"

extern "C" __global__ void __launch_bounds__(1024)
sum_columns(const float* partial, float* out, int rows, int columns) {
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, shared = shared_base();
  const int column = (int)(blockIdx.x * 32 + lane);
  float sum = 0.f;
  wait_for_previous_grid();
  if (column < columns)
    for (int row = (int)warp; row < rows; row += 32) sum += partial[(i64)row * columns + column];
  store_shared_f32(shared + threadIdx.x * 4, sum);
  __syncthreads();
  if (warp != 0 || column >= columns) return;
  for (u32 other = 1; other < 32; other++) sum += load_shared_f32(shared + (other * 32 + lane) * 4);
  out[column] = sum;
}
