// The first layer of a network, forward: few channels in (3 or 4), many out.
//
// The channels of neighbouring pixels lie side by side, so a row of the filter is one run of
// FILTER_W * IN_CHANNELS elements of the image's row, and TMA sees the image as rows of width times
// channels. On the matrix units
//
//   result[16 channels][8 pixels] += filter[16 channels][16 of the runs] * image[16 of the runs][8 pixels]
//
// where runs are filled up to multiples of 8 elements with zeros of the filter. Those meet the pixels
// that follow in the row: an Inf or NaN spreads to its neighbours on the left. A pair of elements of the
// run is one word of shared memory (or parts of two, where pixels lie an odd number of elements apart).
//
// One warp loads, four multiply: two take 32 channels each, and two halves of the tile. The filter stays
// in registers while a block walks over tiles.
// Macros: ELEMENT, IN_CHANNELS, FILTER_H/W, STRIDE_H/W, PAD_W, TILE_H, TILE_W (of 8), STAGES, BLOCKS,
// BIAS, RESIDUAL, ACTIVATION; BACKWARD is 0.
#pragma once
#include "conv/cuda/patches.cuh"
#include "conv/cuda/runs.cuh"
#include "cuda/ring.cuh"

constexpr int math_warps = 4, block_channels = 64, halves = 2;  // m16 blocks of a warp
constexpr int steps = (FILTER_H * run_chunks + 1) / 2;          // of 16 elements
constexpr int result_bytes = TILE_H * TILE_W * 2 * block_channels;

using StageRing = Ring<STAGES>;
using Place = Cursor<STAGES>;

DEVICE void load(const StageRing& ring, u32 stages, const TensorMap* image, const Tiles& tiles, int pad_h) {
  Place at;
  for (int tile = blockIdx.y; tile < tiles.count; tile += gridDim.y, at.next()) {
    const auto spot = tiles.spot(tile);
    ring.wait_empty(at);
    ring.expect(at, patch_bytes);
    tma_load(stages + at.stage * stage_bytes, image, ring.full(at),
             row_start(spot.w), spot.h * STRIDE_H - pad_h, spot.n);
  }
}

struct Filter {
  u32 values[steps][halves][4];

  DEVICE void fetch(const ELEMENT* filter, i64 pitch, int channel, int channels, u32 lane) {
#pragma unroll
    for (int part = 0; part < 4; part++)
#pragma unroll
      for (int half = 0; half < halves; half++) {
        const int to = channel + half * 16 + lane / 4 + part % 2 * 8;
        const ELEMENT* from = filter + to * pitch;
        __syncwarp();  // else the loads of all parts are under way at once
#pragma unroll
        for (int step = 0; step < steps; step++) {
          const int chunk = 2 * step + part / 2, y = chunk / run_chunks;
          u32 pair = 0;
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const int at = chunk % run_chunks * 8 + lane % 4 * 2 + i;
            if (to < channels && y < FILTER_H && at < run)
              pair |= (u32)from[y * run + at].bits << (16 * i);
          }
          values[step][half][part] = pair;
        }
      }
  }
};

extern "C" __global__ void __launch_bounds__(32 * (math_warps + 1), BLOCKS)
stem(const __grid_constant__ TensorMap image, const __grid_constant__ TensorMap stored,
     const ELEMENT* weights, const ELEMENT* bias, const ELEMENT* residual, i64 filter_pitch, int channels,
     int tiles_w, int tiles_h, int tile_count, int pad_h, int height, int width, i64 pitch_n,
     i64 pitch_h, i64 pitch_w) {
  const u32 stages = shared_base(), buffers = (stages + STAGES * stage_bytes + 1023) & ~1023u;
  const StageRing ring{buffers + 2 * result_bytes};
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Tiles tiles{tiles_w, tiles_h, tile_count};
  if (threadIdx.x == 0) {
    ring.init(1, math_warps);
    barrier_init_done();
  }
  __syncthreads();
  if (warp == math_warps) {
    if (lane == 0) load(ring, stages, &image, tiles, pad_h);
    return;
  }
  const int own = warp % 2 * 32, channel = blockIdx.x * block_channels + own;
  const Result result{bias, residual, channels, 1, height, width, pitch_n, 0, pitch_h, pitch_w};
  Filter filter;
  filter.fetch(weights, filter_pitch, channel, channels, lane);
  Place at;
  u32 turn = 0;
  for (int tile = blockIdx.y; tile < tiles.count; tile += gridDim.y, at.next(), turn ^= 1) {
    const auto spot = tiles.spot(tile);
    const u32 patch = stages + at.stage * stage_bytes, buffer = buffers + turn * result_bytes;
    ring.wait_full(at);
    if (threadIdx.x == 0) tma_store_wait<1>();  // the tile before the last has left this buffer
    named_sync(1, 32 * math_warps);
#pragma unroll 1
    for (int part = warp / 2; part < TILE_H * TILE_W / 8; part += 2) {
      const int row = part / (TILE_W / 8), column = part % (TILE_W / 8) * 8;
      const u32 first = patch + row * STRIDE_H * row_bytes +
                        2 * (lead + (column + (int)lane / 4) * pixel_step + (int)lane % 4 * 2);
      float sums[halves][4] = {};
#pragma unroll
      for (int step = 0; step < steps; step++) {
        u32 pixels[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int chunk = 2 * step + i;
          pixels[i] = chunk < FILTER_H * run_chunks
                          ? load_two(first + chunk / run_chunks * row_bytes + chunk % run_chunks * 16)
                          : 0;
        }
#pragma unroll
        for (int half = 0; half < halves; half++)
          mma_16816<ELEMENT>(sums[half], filter.values[step][half], pixels[0], pixels[1]);
      }
#pragma unroll
      for (int half = 0; half < halves; half++) {
        u32 packed[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float two[2];
#pragma unroll
          for (int j = 0; j < 2; j++)
            two[j] = result.finished(sums[half][2 * i + j], channel + half * 16 + i * 8 + lane / 4, spot.n,
                                     0, spot.h + row, spot.w + column + lane % 4 * 2 + j);
          packed[i] = pack2<ELEMENT>(two[0], two[1]);
        }
        const u32 chunk = own / 8 + half * 2 + (lane >> 3 & 1);
        store_matrix2_transposed(buffer + swizzled<128>(row * TILE_W + column + (lane & 7), chunk),
                                 packed[0], packed[1]);
      }
    }
    __syncwarp();
    ring.release(at.stage, lane);
    fence_async();
    named_sync(1, 32 * math_warps);
    if (threadIdx.x == 0) {
      tma_store(&stored, buffer, (int)blockIdx.x * block_channels, spot.w, spot.h, 0, spot.n);
      tma_store_commit();
    }
  }
  if (threadIdx.x == 0) tma_store_wait<0>();
}
