// Adds the slices of a cut reduction up, finishes the sums and stores the result.
//
// Slices are [slice][row][channel] in fp32. With no slices at all the sums are zero: pixels of a
// gradient that no tap reaches.
// Macros: RESULT, VECTOR (channels a thread takes, 4 or 1), BIAS, RESIDUAL, ACTIVATION.
#pragma once
#include "conv/cuda/walk.cuh"
#include "cuda/epilogue.cuh"

extern "C" __global__ void __launch_bounds__(256)
reduce(const float* partial, RESULT* result, const RESULT* bias, const RESULT* residual, int slices,
       int rows, int pitch, int size_d, int size_h, int size_w, i64 result_first, i64 result_n,
       i64 result_d, i64 result_h, i64 result_w) {
  const i64 index = (i64)blockIdx.x * 256 + threadIdx.x;
  const int row = (int)(index / (pitch / VECTOR)), channel = (int)(index % (pitch / VECTOR)) * VECTOR;
  if (row >= rows) return;
  wait_for_previous_grid();
  float sums[VECTOR] = {};
  const float* from = partial + (i64)row * pitch + channel;
  for (int slice = 0; slice < slices; slice++, from += (i64)rows * pitch) {
    if constexpr (VECTOR == 4) {
      const f32x4 four = *(const f32x4*)from;
      sums[0] += four.x;
      sums[1] += four.y;
      sums[2] += four.z;
      sums[3] += four.w;
    } else {
      sums[0] += *from;
    }
  }
  const int line = row / size_w, plane = line / size_h;
  const Pixel pixel = {plane / size_d, plane % size_d, line % size_h, row % size_w};
  const Places places = {result_first, result_n, result_d, result_h, result_w};
  const i64 at = places.of(pixel) + channel;
#pragma unroll
  for (int i = 0; i < VECTOR; i++)
    result[at + i] = from_float<RESULT>(finish<RESULT, BIAS, RESIDUAL, ACTIVATION>(
        sums[i], bias, residual, channel + i, at + i));
}
