// Depthwise convolution on the matrix units: forward, and the gradient of the input.
//
// A warp owns 8 channels. A product's rows are 2 rows of the result x 8 channels, its columns 8
// neighbouring pixels, its reduction 2 rows of the image x 8 channels:
//
//   result[(row, c)][pixel] += filter[(row, c)][(image row, c)] * image[(image row, c)][pixel]
//
// The filter's operand is diagonal in the channel and Toeplitz in the rows: one product carries two of
// the filter's rows for two rows of the result, without unpacking a number. The 16 bytes that a lane
// gives to a matrix load are the 8 channels of one pixel, so a tap is an address. What lies off the
// diagonal is multiplied by zero: an Inf or NaN spreads over 8 channels and the pair of rows.
//
// A block loads one tile with its rim, four rows a copy, each with a barrier of its own, and computes as
// they land. Many small blocks, channels innermost in the grid: neighbours run at the same time, so
// that rims are read from the cache. (Blocks that walk over tiles drift apart: on an H200 they read
// 26 % more from memory.)
// Macros: ELEMENT, BACKWARD, FILTER_D/H/W, STRIDE_D/H/W, DILATION_D/H/W, LEAD_H/W, TILE_H (even),
// TILE_W (of 8), CHANNELS (a block's, 16, 32 or 64), BLOCKS, BIAS, RESIDUAL, ACTIVATION.
#pragma once
#include "conv/cuda/patches.cuh"

using Depth = Axis<FILTER_D, BACKWARD ? 1 : STRIDE_D, DILATION_D, 0>;
using Rows = Axis<FILTER_H, STRIDE_H, DILATION_H, LEAD_H>;
using Columns = Axis<FILTER_W, STRIDE_W, DILATION_W, LEAD_W>;

constexpr int warps = CHANNELS / 8, pixel_bytes = 2 * CHANNELS;
constexpr int patch_h = Rows::patch(TILE_H);
constexpr int quads = (patch_h + 3) / 4;  // copies of four rows
// Even, so that four rows are whole periods of the swizzle and a step to them is a constant.
constexpr int patch_w = (Columns::patch(TILE_W) + 1) / 2 * 2;
constexpr int quad_bytes = 4 * patch_w * pixel_bytes;
constexpr int patch_bytes = (FILTER_D * quads * quad_bytes + 1023) / 1024 * 1024;
constexpr int result_w = TILE_W * Columns::phases, result_h = TILE_H * Rows::phases;
constexpr int result_bytes = result_h * result_w * pixel_bytes;
constexpr int phases = Rows::phases * Columns::phases, parts = TILE_W / 8;
// Pairs of rows that are open at a time; one more, as two begin before one is finished.
constexpr int open = (Rows::step + Rows::reach) / 2 / Rows::step + 2;
static_assert(TILE_H % 2 == 0 && TILE_W % 8 == 0, "rows come in pairs, pixels by eight");

// Whether pair `from` of the patch's rows feeds pair `to` of the result's.
DEVICE constexpr bool meets(int from, int to, int phase) {
  return Rows::tap_between(2 * from, 2 * to, phase) >= 0 ||
         Rows::tap_between(2 * from + 1, 2 * to, phase) >= 0 ||
         Rows::tap_between(2 * from, 2 * to + 1, phase) >= 0 ||
         Rows::tap_between(2 * from + 1, 2 * to + 1, phase) >= 0;
}
// The last pair of the patch's rows that feeds pair `to`.
DEVICE constexpr int last_of(int to) { return ((2 * to + 1) * Rows::step + Rows::reach) / 2; }

// Every tap of a lane's channel, in the half of the register where the diagonal wants it.
struct Filter {
  u32 values[FILTER_D][FILTER_H][FILTER_W];

  DEVICE void fetch(const ELEMENT* filter, i64 pitch, int channel, int channels, u32 lane) {
    const u32 own = lane / 4;
    const bool is_diagonal = own / 2 == lane % 4 && channel + (int)own < channels;
    const ELEMENT* from = filter + (channel + own) * pitch;
#pragma unroll
    for (int z = 0; z < FILTER_D; z++)
#pragma unroll
      for (int y = 0; y < FILTER_H; y++)
#pragma unroll
        for (int x = 0; x < FILTER_W; x++)
          values[z][y][x] =
              is_diagonal ? (u32)from[(z * FILTER_H + y) * FILTER_W + x].bits << (16 * (own % 2)) : 0;
  }
  DEVICE u32 at(int z, int tap, int x) const { return tap < 0 ? 0 : values[z][tap < 0 ? 0 : tap][x]; }
};

using Sums = float[parts][4];

// A pair of finished rows of one phase into shared memory.
DEVICE void stage_pair(Sums& sums, u32 buffer, int pair, int phase, u32 warp, u32 lane,
                       const Result& result, int channel, int n, int d, int first_h, int first_w) {
  const int down = phase / Columns::phases, right = phase % Columns::phases;
#pragma unroll
  for (int part = 0; part < parts; part++) {
    float done[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int h = (2 * pair + i / 2) * Rows::phases + down;
      const int w = (part * 8 + lane % 4 * 2 + i % 2) * Columns::phases + right;
      done[i] = result.finished(sums[part][i], channel + lane / 4, n, d, first_h + h, first_w + w);
      sums[part][i] = 0.f;
    }
    const int row = (2 * pair + (lane >> 3 & 1)) * Rows::phases + down;
    const int column = (part * 8 + (lane & 7)) * Columns::phases + right;
    store_matrix2_transposed(buffer + swizzled<pixel_bytes>(row * result_w + column, warp),
                             pack2<ELEMENT>(done[0], done[1]), pack2<ELEMENT>(done[2], done[3]));
  }
}

extern "C" __global__ void __launch_bounds__(32 * warps, BLOCKS)
depthwise(const __grid_constant__ TensorMap image, const __grid_constant__ TensorMap stored,
          const ELEMENT* weights, const ELEMENT* bias, const ELEMENT* residual, i64 filter_pitch,
          int channels, int channel_blocks, int tiles_w, int tiles_h, int tiles_d, int patch_corner_d,
          int patch_corner_h, int patch_corner_w, int depth, int height, int width, i64 pitch_n, i64 pitch_d, i64 pitch_h, i64 pitch_w) {
  const u32 patch = shared_base(), buffer = patch + patch_bytes, barriers = buffer + result_bytes;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tile = blockIdx.x / channel_blocks, block_channel = blockIdx.x % channel_blocks * CHANNELS;
  const int line = tile / tiles_w, plane = line / tiles_h;
  const int w = tile % tiles_w * TILE_W, h = line % tiles_h * TILE_H, d = plane % tiles_d;
  const int n = plane / tiles_d;
  if (threadIdx.x == 0) {
    for (int quad = 0; quad < quads; quad++) barrier_init(barriers + 8 * quad, 1);
    barrier_init_done();
    for (int quad = 0; quad < quads; quad++) {
      barrier_expect(barriers + 8 * quad, FILTER_D * quad_bytes);
      for (int z = 0; z < FILTER_D; z++)
        tma_load(patch + (z * quads + quad) * quad_bytes, &image, barriers + 8 * quad, block_channel,
                 w * Columns::step + patch_corner_w, h * Rows::step + patch_corner_h + 4 * quad,
                 d * (BACKWARD ? 1 : STRIDE_D) + patch_corner_d + Depth::offset(z), n);
    }
  }
  const int channel = block_channel + warp * 8;
  const Result result{bias, residual, channels, depth, height, width,
                      pitch_n, pitch_d, pitch_h, pitch_w};
  const int first_h = h * Rows::phases, first_w = w * Columns::phases;
  Filter filter;
  filter.fetch(weights, filter_pitch, channel, channels, lane);
  u32 places[Columns::shifts];  // of the lane's pixel, for each column shift
#pragma unroll
  for (int shift = 0; shift < Columns::shifts; shift++)
    places[shift] = patch + swizzled<pixel_bytes>((lane >> 3) * patch_w + (lane & 7) * Columns::step +
                                                      Columns::offset(shift), warp);
  __syncthreads();
  Sums sums[open][phases] = {};
#pragma unroll
  for (int quad = 0; quad < quads; quad++) {
    barrier_wait(barriers + 8 * quad, 0);
#pragma unroll
    for (int z = 0; z < FILTER_D; z++)
#pragma unroll
      for (int shift = 0; shift < Columns::shifts; shift++)
#pragma unroll
        for (int part = 0; part < parts; part++) {
          u32 rows[4];
          load_matrix4(rows, places[shift] + part * 8 * Columns::step * pixel_bytes +
                                 (z * quads + quad) * quad_bytes);
#pragma unroll
          for (int half = 0; half < 2; half++)
#pragma unroll
            for (int before = 0; before < open; before++)
#pragma unroll
              for (int down = 0; down < Rows::phases; down++) {
                const int from = 2 * quad + half, to = from / Rows::step - before;
                if (to < 0 || to >= TILE_H / 2 || !meets(from, to, down)) continue;
#pragma unroll
                for (int x = 0; x < FILTER_W; x++) {
                  if (Columns::shift(x) != shift) continue;
                  u32 toeplitz[4];
#pragma unroll
                  for (int i = 0; i < 4; i++)
                    toeplitz[i] = filter.at(
                        z, Rows::tap_between(2 * from + i / 2, 2 * to + i % 2, down), x);
                  mma_16816<ELEMENT>(
                      sums[to % open][down * Columns::phases + Columns::phase(x)][part], toeplitz,
                      rows[2 * half], rows[2 * half + 1]);
                }
              }
        }
#pragma unroll
    for (int before = open - 1; before >= 0; before--) {
      const int to = (2 * quad + 1) / Rows::step - before;
      if (to < 0 || to >= TILE_H / 2 || last_of(to) / 2 != quad) continue;
#pragma unroll
      for (int phase = 0; phase < phases; phase++)
        stage_pair(sums[to % open][phase], buffer, to, phase, warp, lane, result, channel, n,
                   d, first_h, first_w);
    }
  }
  fence_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    tma_store(&stored, buffer, block_channel, first_w, first_h, d, n);
    tma_store_commit();
    tma_store_wait<0>();
  }
}
