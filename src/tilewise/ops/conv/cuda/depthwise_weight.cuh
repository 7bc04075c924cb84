// The gradient of the filter of a depthwise convolution, on the matrix units.
//
// A warp owns 8 channels. A product's rows are 2 rows of the result x 8 channels, its columns the image's
// 8 channels, its reduction 16 neighbouring pixels of a row:
//
//   gradient[(row, c)][c'] += result[(row, c)][pixel] * image[pixel][c']
//
// of which the diagonal c = c' is kept: row r of the image meets two rows of the result at once, which
// are two taps. Both operands come from [pixel][channel] tiles, read across; a tap is a shift of the
// address. All taps' sums stay in registers over the tiles that a block walks over; then each block
// stores its slice, for a second kernel to add up, or adds it to one that began at zero (ATOMIC).
// An Inf or NaN spreads over 8 channels. Planes of a filter in three dimensions are blocks of their own.
// Macros: ELEMENT, FILTER_D/H/W, STRIDE_D/H/W, DILATION_D/H/W, TILE_H, TILE_W (of 16), CHANNELS,
// STAGES, BLOCKS, ATOMIC.
#pragma once
#include "cuda/ptx.cuh"

constexpr int warps = CHANNELS / 8, pixel_bytes = 2 * CHANNELS;
constexpr int patch_h = (TILE_H - 1) * STRIDE_H + (FILTER_H - 1) * DILATION_H + 1;
constexpr int patch_w = (TILE_W - 1) * STRIDE_W + (FILTER_W - 1) * DILATION_W + 1;
constexpr int patch_bytes = patch_h * patch_w * pixel_bytes;
constexpr int image_bytes = (patch_bytes + 1023) / 1024 * 1024;
constexpr int result_bytes = TILE_H * TILE_W * pixel_bytes;
constexpr int stage_bytes = image_bytes + (result_bytes + 1023) / 1024 * 1024;
constexpr int open = (FILTER_H - 1) * DILATION_H / STRIDE_H + 1;  // rows of the result held at a time
static_assert(TILE_W % 16 == 0, "a product reduces over 16 pixels of a row");

// Taps that the same rows of the image feed, two and two: tap y is half y / STRIDE_H % 2 of its pair.
constexpr int class_pairs = ((FILTER_H + STRIDE_H - 1) / STRIDE_H + 1) / 2;
constexpr int pairs = STRIDE_H * class_pairs;
DEVICE constexpr int tap_of(int pair, int half) {
  const int tap = pair / class_pairs + STRIDE_H * (2 * (pair % class_pairs) + half);
  return tap < FILTER_H ? tap : -1;
}
// The row of the result that meets `row` of the image at a tap, or -1.
DEVICE constexpr int met(int row, int tap) {
  const int from = row - tap * DILATION_H;
  return tap >= 0 && from >= 0 && from % STRIDE_H == 0 && from / STRIDE_H < TILE_H ? from / STRIDE_H
                                                                                   : -1;
}

struct Tiles {
  int across, down, deep, count;
};

// Thread 0: what a tile needs, into a stage.
DEVICE void load(u32 stage, u32 barrier, const TensorMap* image, const TensorMap* result,
                 const Tiles& tiles, int tile, int pad_d, int pad_h, int pad_w) {
  const int line = tile / tiles.across, plane = line / tiles.down;
  const int w = tile % tiles.across * TILE_W, h = line % tiles.down * TILE_H;
  const int d = plane % tiles.deep, n = plane / tiles.deep, z = blockIdx.z;
  const int channel = blockIdx.x * CHANNELS;
  barrier_expect(barrier, patch_bytes + result_bytes);
  tma_load(stage, image, barrier, channel, w * STRIDE_W - pad_w, h * STRIDE_H - pad_h,
           d * STRIDE_D + z * DILATION_D - pad_d, n);
  tma_load(stage + image_bytes, result, barrier, channel, w, h, d, n);
}

using Sums = float[pairs][FILTER_W][4];

// All products of 16 columns of a tile.
DEVICE void multiply_strip(Sums& sums, u32 image, u32 result, int column, u32 warp, u32 lane) {
  const int pixel = column + (lane & 15);  // lanes 16 and up give addresses that are not read
  u32 rows[open][2];                       // of the result: 8 channels x 16 pixels each
#pragma unroll
  for (int row = 0; row < patch_h; row++) {
    if (row % STRIDE_H == 0 && row / STRIDE_H < TILE_H) {
      const int next = row / STRIDE_H;
      load_matrix2_transposed(rows[next % open],
                              result + swizzled<pixel_bytes>(next * TILE_W + pixel, warp));
    }
#pragma unroll
    for (int x = 0; x < FILTER_W; x++) {
      u32 patch[2];
      load_matrix2_transposed(patch, image + swizzled<pixel_bytes>(row * patch_w + pixel * STRIDE_W +
                                                                       x * DILATION_W, warp));
#pragma unroll
      for (int pair = 0; pair < pairs; pair++) {
        const int first = met(row, tap_of(pair, 0)), second = met(row, tap_of(pair, 1));
        if (first < 0 && second < 0) continue;
        const u32 left[4] = {first < 0 ? 0 : rows[first < 0 ? 0 : first % open][0],
                             second < 0 ? 0 : rows[second < 0 ? 0 : second % open][0],
                             first < 0 ? 0 : rows[first < 0 ? 0 : first % open][1],
                             second < 0 ? 0 : rows[second < 0 ? 0 : second % open][1]};
        mma_16816<ELEMENT>(sums[pair][x], left, patch[0], patch[1]);
      }
    }
  }
}

// The diagonal, as rows of [channel][tap].
DEVICE void store(const Sums& sums, float* slice, int channels, u32 warp, u32 lane) {
  const u32 own = lane / 4;
  const int channel = blockIdx.x * CHANNELS + warp * 8 + own;
  if (own / 2 != lane % 4 || channel >= channels) return;
  float* to = slice + ((i64)channel * FILTER_D + blockIdx.z) * FILTER_H * FILTER_W;
#pragma unroll
  for (int pair = 0; pair < pairs; pair++)
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int x = 0; x < FILTER_W; x++) {
        const int tap = tap_of(pair, half);
        if (tap < 0) continue;
        const float* two = &sums[pair][x][2 * half];
        const float sum = own % 2 ? two[1] : two[0];
        if constexpr (ATOMIC) add_global(to + tap * FILTER_W + x, sum);
        else to[tap * FILTER_W + x] = sum;
      }
}

extern "C" __global__ void __launch_bounds__(32 * warps, BLOCKS)
depthwise_weight(const __grid_constant__ TensorMap image, const __grid_constant__ TensorMap result,
                 float* slices, i64 slice_size, int channels, int tiles_w, int tiles_h, int tiles_d,
                 int tile_count, int pad_d, int pad_h, int pad_w) {
  release_next_grid();
  const u32 stages = shared_base(), barriers = stages + STAGES * stage_bytes;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Tiles tiles{tiles_w, tiles_h, tiles_d, tile_count};
  const int first = blockIdx.y, step = gridDim.y;
  const auto fill = [&](int tile, u32 stage) {
    load(stages + stage * stage_bytes, barriers + 8 * stage, &image, &result, tiles, tile, pad_d, pad_h,
         pad_w);
  };
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(barriers + 8 * i, 1);
    barrier_init_done();
    for (int i = 0; i < STAGES; i++)
      if (first + i * step < tile_count) fill(first + i * step, i);
  }
  __syncthreads();
  Sums sums = {};
  u32 stage = 0, round = 0;
  for (int tile = first; tile < tile_count; tile += step) {
    const u32 from = stages + stage * stage_bytes;
    barrier_wait(barriers + 8 * stage, round);
#pragma unroll
    for (int column = 0; column < TILE_W; column += 16)
      multiply_strip(sums, from, from + image_bytes, column, warp, lane);
    __syncthreads();  // everyone has read the stage
    if (threadIdx.x == 0 && tile + STAGES * step < tile_count) fill(tile + STAGES * step, stage);
    if (++stage == STAGES) {
      stage = 0;
      round ^= 1;
    }
  }
  store(sums, slices + (ATOMIC ? 0 : blockIdx.y * slice_size), channels, warp, lane);
}
