// The gradient of the first layer's filter: few channels in (3 or 4), many out.
//
//   gradient[16 filters][8 of a run] += result[16 filters][16 pixels] * image[16 pixels][8 of a run]
//
// where a run is a row of the filter, which lies side by side in the image's row (see runs.cuh). The
// result comes from [pixel][channel] tiles, read across; of the image each lane gathers its elements.
// A block owns 64 filters; each of its four warps takes every fourth row of the filter, and keeps its
// sums in registers over the tiles that the block walks over. Then each block stores its slice, for a
// second kernel to add up, or adds it to one that began at zero (ATOMIC).
// Macros: as in runs.cuh with TILE_W of 16, STAGES, BLOCKS, ATOMIC.
#pragma once
#include "conv/cuda/runs.cuh"

constexpr int warps = 4, block_filters = 64, filter_blocks = block_filters / 16;
constexpr int warp_rows = (FILTER_H + warps - 1) / warps;
constexpr int image_bytes = (patch_bytes + 1023) / 1024 * 1024;
constexpr int result_bytes = TILE_H * TILE_W * 2 * block_filters;
constexpr int pair_bytes = image_bytes + result_bytes;  // of a stage
static_assert(TILE_W % 16 == 0, "a product reduces over 16 pixels of a row");

using Sums = float[warp_rows][run_chunks][filter_blocks][4];

// 16 pixels of a row of the tile.
DEVICE void multiply_part(Sums& sums, u32 image, u32 result, int row, int column, u32 warp, u32 lane) {
  u32 gradients[filter_blocks][4];
#pragma unroll
  for (int block = 0; block < filter_blocks; block++)
    load_matrix4_transposed(
        gradients[block], result + swizzled<128>(row * TILE_W + column + (lane >> 4) * 8 + (lane & 7),
                                                 block * 2 + (lane >> 3 & 1)));
#pragma unroll
  for (int i = 0; i < warp_rows; i++) {
    const int y = warp + i * warps;
    if (y >= FILTER_H) continue;
    const u32 line = image + (row * STRIDE_H + y) * row_bytes + 2 * (lead + column * pixel_step + (int)lane / 4);
#pragma unroll
    for (int chunk = 0; chunk < run_chunks; chunk++) {
      u32 pixels[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const u32 from = line + 2 * ((half * 8 + (int)lane % 4 * 2) * pixel_step + chunk * 8);
        pixels[half] = load_one(from) | load_one(from + 2 * pixel_step) << 16;
      }
#pragma unroll
      for (int block = 0; block < filter_blocks; block++)
        mma_16816<ELEMENT>(sums[i][chunk][block], gradients[block], pixels[0], pixels[1]);
    }
  }
}

// The warp's rows of the filters, as [filter][y][run].
DEVICE void store(const Sums& sums, float* slice, int filters, u32 warp, u32 lane) {
#pragma unroll
  for (int i = 0; i < warp_rows; i++)
#pragma unroll
    for (int chunk = 0; chunk < run_chunks; chunk++)
#pragma unroll
      for (int block = 0; block < filter_blocks; block++)
#pragma unroll
        for (int part = 0; part < 4; part++) {
          const int y = warp + i * warps, at = chunk * 8 + lane % 4 * 2 + part % 2;
          const int filter = blockIdx.x * block_filters + block * 16 + lane / 4 + part / 2 * 8;
          if (y >= FILTER_H || at >= run || filter >= filters) continue;
          float* to = slice + ((i64)filter * FILTER_H + y) * run + at;
          if constexpr (ATOMIC) add_global(to, sums[i][chunk][block][part]);
          else *to = sums[i][chunk][block][part];
        }
}

extern "C" __global__ void __launch_bounds__(32 * warps, BLOCKS)
stem_weight(const __grid_constant__ TensorMap image, const __grid_constant__ TensorMap result,
            float* slices, i64 slice_size, int filters, int tiles_w, int tiles_h, int tile_count,
            int pad_h) {
  release_next_grid();
  const u32 stages = shared_base(), barriers = stages + STAGES * pair_bytes;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Tiles tiles{tiles_w, tiles_h, tile_count};
  const int first = blockIdx.y, step = gridDim.y;
  const auto fill = [&](int tile, u32 stage) {
    const auto spot = tiles.spot(tile);
    const u32 to = stages + stage * pair_bytes, barrier = barriers + 8 * stage;
    barrier_expect(barrier, patch_bytes + result_bytes);
    tma_load(to, &image, barrier, row_start(spot.w), spot.h * STRIDE_H - pad_h, spot.n);
    tma_load(to + image_bytes, &result, barrier, (int)blockIdx.x * block_filters, spot.w, spot.h, 0, spot.n);
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
    const u32 from = stages + stage * pair_bytes;
    barrier_wait(barriers + 8 * stage, round);
#pragma unroll 1
    for (int part = 0; part < TILE_H * TILE_W / 16; part++)
      multiply_part(sums, from, from + image_bytes, part / (TILE_W / 16), part % (TILE_W / 16) * 16, warp,
                    lane);
    __syncthreads();  // everyone has read the stage
    if (threadIdx.x == 0 && tile + STAGES * step < tile_count) fill(tile + STAGES * step, stage);
    if (++stage == STAGES) {
      stage = 0;
      round ^= 1;
    }
  }
  store(sums, slices + (ATOMIC ? 0 : blockIdx.y * slice_size), filters, warp, lane);
}
