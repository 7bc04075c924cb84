// The gradient of the filter of a depthwise convolution without matrix units: any filter, stride, padding
// and dilation; no channel ever meets another.
//
// A lane owns two channels, a block one row of the filter (blockIdx.z) for 64 channels. Its warps walk
// over strips of STRIP neighbouring pixels of the result and keep the row's sums in registers; then they
// add them up in shared memory, and the block stores its slice, for a second kernel to add up, or adds
// it to one that began at zero (ATOMIC).
// Macros: ELEMENT, FILTER_D/H/W, STRIDE_D/H/W, DILATION_D/H/W, STRIP, WARPS, BLOCKS, ATOMIC.
#pragma once
#include "conv/cuda/pairs.cuh"

constexpr int block_channels = 64, row_bytes = block_channels * 4;
constexpr int span = (STRIP - 1) * STRIDE_W + (FILTER_W - 1) * DILATION_W + 1;

// One strip of the result and the row of the image that it meets.
DEVICE void add_strip(float (&sums)[FILTER_W][2], const ELEMENT* result, int length, i64 result_pitch,
                      const ELEMENT* line, int first, int width, i64 pitch) {
  Pair read[span];
#pragma unroll
  for (int i = 0; i < span; i++) {
    const int column = first + i;
    read[i] = column >= 0 && column < width ? load_pair<ELEMENT>(line + column * pitch) : Pair{0.f, 0.f};
  }
#pragma unroll
  for (int i = 0; i < STRIP; i++) {
    if (i >= length) continue;
    const Pair value = load_pair<ELEMENT>(result + i * result_pitch);
#pragma unroll
    for (int x = 0; x < FILTER_W; x++) {
      sums[x][0] += value.a * read[i * STRIDE_W + x * DILATION_W].a;
      sums[x][1] += value.b * read[i * STRIDE_W + x * DILATION_W].b;
    }
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
channelwise_weight(const ELEMENT* image, const ELEMENT* result, float* slices, i64 slice_size, int channels,
                   int images, int pad_d, int pad_h, int pad_w, int read_d, int read_h, int read_w,
                   i64 pitch_read_n, i64 pitch_read_d, i64 pitch_read_h, i64 pitch_read_w, int depth,
                   int height, int width, i64 pitch_n, i64 pitch_d, i64 pitch_h, i64 pitch_w) {
  release_next_grid();
  const u32 staged = shared_base(), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_channel = blockIdx.x * block_channels, channel = first_channel + 2 * lane;
  const int z = blockIdx.z / FILTER_H, y = blockIdx.z % FILTER_H;
  const int strips = (width + STRIP - 1) / STRIP, count = images * depth * height * strips;
  float sums[FILTER_W][2] = {};
  if (channel < channels) {
    for (int strip = blockIdx.y * WARPS + warp; strip < count; strip += gridDim.y * WARPS) {
      const int row = strip / strips, plane = row / height, h = row % height, d = plane % depth;
      const int n = plane / depth, w = strip % strips * STRIP;
      const int line_d = d * STRIDE_D - pad_d + z * DILATION_D;
      const int line_h = h * STRIDE_H - pad_h + y * DILATION_H;
      if (line_d < 0 || line_d >= read_d || line_h < 0 || line_h >= read_h) continue;
      add_strip(sums, result + n * pitch_n + d * pitch_d + h * pitch_h + w * pitch_w + channel, width - w,
                pitch_w, image + n * pitch_read_n + line_d * pitch_read_d + line_h * pitch_read_h + channel,
                w * STRIDE_W - pad_w, read_w, pitch_read_w);
    }
  }
#pragma unroll
  for (int x = 0; x < FILTER_W; x++)
#pragma unroll
    for (int i = 0; i < 2; i++)
      store_shared_f32(staged + (warp * FILTER_W + x) * row_bytes + (2 * lane + i) * 4, sums[x][i]);
  __syncthreads();
  float* slice = slices + (ATOMIC ? 0 : blockIdx.y * slice_size);
  for (int i = threadIdx.x; i < block_channels * FILTER_W; i += 32 * WARPS) {
    const int own = i / FILTER_W, x = i % FILTER_W;
    if (first_channel + own >= channels) continue;
    float sum = 0.f;
    for (int from = 0; from < WARPS; from++)
      sum += load_shared_f32(staged + (from * FILTER_W + x) * row_bytes + own * 4);
    float* to = slice + ((i64)(first_channel + own) * FILTER_D * FILTER_H + blockIdx.z) * FILTER_W + x;
    if constexpr (ATOMIC) add_global(to, sum);
    else *to = sum;
  }
}
