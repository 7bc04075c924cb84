// Grouped convolution with few channels a group: forward, and the gradient of the input.
//
// Bound by memory, so every byte is fetched once: a block owns 64 channels of the result, TMA brings
// patches of the image with their rim, and all taps read them from shared memory. On the matrix units
// the result's channels are the rows (16 a warp), pixels the columns, the channels read the reduction:
//
//   result[16 channels][8 pixels] += filter[16 channels][16 channels] * image[16 channels][8 pixels]
//
// Groups below 16 channels share a product, whose filter is zero off the groups' diagonal: what is
// multiplied by it costs nothing, but an Inf or NaN there spreads over the 16 channels.
// The filter stays in registers over all tiles. A fragment of the image is read from shared memory
// once for each column shift and meets every row of the filter: sums of several rows of the result
// are open at a time, and a row leaves (through shared memory, by a TMA store that clips the image's
// edge) when its last row of the image has passed.
//
// Forward, row o of the result reads rows o * STRIDE_H + y * DILATION_H of the patch. Backward, the
// image is cut into STRIDE_H x STRIDE_W phases (see Axis), so nothing is multiplied by the zeros between.
//
// One warp loads, four multiply; blocks walk over the tiles of their 64 channels, padded where groups
// are none of 4, 8, 16 and 32: see units.cuh.
// Macros: ELEMENT, BACKWARD, READ_GROUP and WRITTEN_GROUP (channels a group of the image that is read
// and of the result), UNITS, MERGED, FILTER_D/H/W, STRIDE_D/H/W, DILATION_D/H/W, LEAD_H/W, TILE_H, TILE_W,
// STAGES, BLOCKS, BIAS, RESIDUAL, ACTIVATION.
#pragma once
#include "conv/cuda/patches.cuh"
#include "conv/cuda/units.cuh"
#include "cuda/ring.cuh"

constexpr int taps = FILTER_D * FILTER_H * FILTER_W;
constexpr int math_warps = block_channels / 16;
constexpr int steps = (read_unit + 15) / 16;  // of 16 channels of the reduction
static_assert(is_padded || READ_GROUP == WRITTEN_GROUP || READ_GROUP % 16 + WRITTEN_GROUP % 16 == 0,
              "a product of 16 channels reads whole products of 16");

using Depth = Axis<FILTER_D, BACKWARD ? 1 : STRIDE_D, DILATION_D, 0>;
using Rows = Axis<FILTER_H, STRIDE_H, DILATION_H, LEAD_H>;
using Columns = Axis<FILTER_W, STRIDE_W, DILATION_W, LEAD_W>;

constexpr int patch_d = Depth::patch(1), patch_h = Rows::patch(TILE_H), patch_w = Columns::patch(TILE_W);
constexpr int phases = Rows::phases * Columns::phases;
constexpr int result_w = TILE_W * Columns::phases, result_h = TILE_H * Rows::phases;
constexpr int patch_bytes = patch_d * patch_h * units * patch_w * read_bytes;
constexpr int stage_bytes = (patch_bytes + 1023) / 1024 * 1024;
constexpr int result_bytes = result_h * units * result_w * written_bytes;
constexpr int strip = TILE_W % 16 ? 8 : 16, parts = strip / 8;  // columns worked on together

using StageRing = Ring<STAGES>;
using Place = Cursor<STAGES>;

// Tiles are numbered columns first, then rows, depths, images.
struct Tiles {
  int across, down, deep, count;
  struct Spot {
    int w, h, d, n;
  };
  DEVICE Spot spot(int tile) const {
    const int line = tile / across, plane = line / down;
    return {tile % across * TILE_W, line % down * TILE_H, plane % deep, plane / deep};
  }
};

DEVICE void load(const StageRing& ring, u32 stages, const TensorMap* image, const Tiles& tiles,
                 Corner corner) {
  Place at;
  for (int tile = blockIdx.y; tile < tiles.count; tile += gridDim.y, at.next()) {
    const auto spot = tiles.spot(tile);
    ring.wait_empty(at);
    ring.expect(at, patch_bytes);
    const u32 to = stages + at.stage * stage_bytes;
    const int w = spot.w * Columns::step + corner.w, h = spot.h * Rows::step + corner.h;
    if constexpr (is_padded)
      tma_load(to, image, ring.full(at), 0, w, (int)blockIdx.x * units, h, spot.n);
    else
      tma_load(to, image, ring.full(at), (int)blockIdx.x * read_step, w, h,
               spot.d * (BACKWARD ? 1 : STRIDE_D) + corner.d, spot.n);
  }
}

// The filter as the left operand: rows are channels written, columns channels read.
struct Filter {
  u32 values[taps][steps][4];

  // The same of a unit that is padded, whose 16 channels begin at `first` of `written`, with those that
  // the unit reads from `read` on.
  DEVICE void fetch_padded(const ELEMENT* filter, i64 pitch, int written, int read, int first,
                           int all_written, u32 lane) {
#pragma unroll
    for (int part = 0; part < 4; part++) {
      const int row = first + lane / 4 + part % 2 * 8, to = written - first + row;
      __syncwarp();  // as below
#pragma unroll
      for (int step = 0; step < steps; step++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int column = step * 16 + part / 2 * 8 + lane % 4 * 2 + i;
          const bool is_inside = to < all_written && is_in_filter(row, column);
          const ELEMENT* from = filter + (BACKWARD ? (read + column) * pitch + row % WRITTEN_GROUP
                                                   : to * pitch + column % READ_GROUP);
#pragma unroll
          for (int tap = 0; tap < taps; tap++) {
            const u32 bits = is_inside ? from[tap * (BACKWARD ? WRITTEN_GROUP : READ_GROUP)].bits : 0;
            values[tap][step][part] = i == 0 ? bits : values[tap][step][part] | bits << 16;
          }
        }
    }
  }

  // For channels from `written` on, which read those from `read` on.
  DEVICE void fetch(const ELEMENT* filter, i64 pitch, int written, int read, int all_written, u32 lane) {
#pragma unroll
    for (int part = 0; part < 4; part++) {
      const int row = lane / 4 + part % 2 * 8, column = lane % 4 * 2 + part / 2 * 8, to = written + row;
      const bool is_inside =
          to < all_written && (WRITTEN_GROUP >= 16 || row / WRITTEN_GROUP == column / READ_GROUP);
      const ELEMENT* from = filter + (BACKWARD ? (read + column) * pitch + to % WRITTEN_GROUP
                                               : to * pitch + column % READ_GROUP);
      const i64 next = BACKWARD ? pitch : 1;  // from one channel read to the next
      __syncwarp();                           // else the loads of all parts are under way at once
#pragma unroll
      for (int step = 0; step < steps; step++)
#pragma unroll
        for (int tap = 0; tap < taps; tap++) {
          const ELEMENT* pair = from + step * 16 * next + tap * (BACKWARD ? WRITTEN_GROUP : READ_GROUP);
          values[tap][step][part] =
              is_inside ? pair[0].bits | (u32)pair[next].bits << 16 : 0;
        }
    }
  }
};

using Sums = float[parts][4];

// 16 channels of 16 pixels, or of 8.
DEVICE void load_pixels(u32 (&image)[4], u32 from) { load_matrix4(image, from); }
DEVICE void load_pixels(u32 (&image)[2], u32 from) { load_matrix2(image, from); }
DEVICE void store_pixels(u32 to, const u32 (&packed)[2][2]) {
  store_matrix4_transposed(to, packed[0][0], packed[0][1], packed[1][0], packed[1][1]);
}
DEVICE void store_pixels(u32 to, const u32 (&packed)[1][2]) {
  store_matrix2_transposed(to, packed[0][0], packed[0][1]);
}

// A finished row of the tile into shared memory, one phase of it.
DEVICE void stage_row(Sums& sums, u32 buffer, int row, int column, int phase, const Share& share,
                      u32 lane, const Result& result, int channel, Tiles::Spot spot) {
  const int h = row * Rows::phases + phase / Columns::phases, a = phase % Columns::phases;
  u32 packed[parts][2];
#pragma unroll
  for (int part = 0; part < parts; part++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float two[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int w = (column + part * 8 + lane % 4 * 2 + i) * Columns::phases + a;
        two[i] = result.finished(sums[part][half * 2 + i], channel + half * 8 + lane / 4, spot.n,
                                 spot.d, spot.h * Rows::phases + h, spot.w * Columns::phases + w);
        sums[part][half * 2 + i] = 0.f;
      }
      packed[part][half] = pack2<ELEMENT>(two[0], two[1]);
    }
  const int at = column + (lane & 7) + (parts == 2 ? (lane >> 4) * 8 : 0);
  const u32 to = buffer + swizzled<written_bytes>(share.line(h, result_w) + at * Columns::phases + a,
                                                  share.written_chunk() + (lane >> 3 & 1));
  store_pixels(to, packed);
}

// All rows of one strip of the tile.
DEVICE void multiply_strip(const Filter& filter, u32 patch, u32 buffer, int column,
                           const Share& share, u32 lane, const Result& result, int channel,
                           Tiles::Spot spot) {
  Sums sums[Rows::open][phases] = {};
  const int pixel = column + (lane & 7) + (parts == 2 ? (lane >> 4) * 8 : 0);
#pragma unroll
  for (int row = 0; row < patch_h; row++) {
#pragma unroll
    for (int plane = 0; plane < FILTER_D; plane++)
#pragma unroll
      for (int shift = 0; shift < Columns::shifts; shift++)
#pragma unroll
        for (int step = 0; step < steps; step++) {
          const int line = Depth::offset(plane) * patch_h + row;
          const u32 from = patch + swizzled<read_bytes>(
              share.line(line, patch_w) + pixel * Columns::step + Columns::offset(shift),
              share.read_chunk() + step * 2 + (lane >> 3 & 1));
          u32 image[2 * parts];
          load_pixels(image, from);
#pragma unroll
          for (int y = 0; y < FILTER_H; y++)
#pragma unroll
            for (int x = 0; x < FILTER_W; x++) {
              const int to = Rows::fed(row, y, TILE_H);
              if (to < 0 || Columns::shift(x) != shift) continue;
              const int phase = Rows::phase(y) * Columns::phases + Columns::phase(x);
#pragma unroll
              for (int part = 0; part < parts; part++)
                mma_16816<ELEMENT>(sums[to % Rows::open][phase][part],
                                   filter.values[(plane * FILTER_H + y) * FILTER_W + x][step],
                                   image[2 * part], image[2 * part + 1]);
            }
        }
    const int done = row - Rows::reach;
    if (done < 0 || done % Rows::step) continue;
#pragma unroll
    for (int phase = 0; phase < phases; phase++)
      stage_row(sums[done / Rows::step % Rows::open][phase], buffer, done / Rows::step, column, phase,
                share, lane, result, channel, spot);
  }
}

extern "C" __global__ void __launch_bounds__(32 * (math_warps + 1), BLOCKS)
grouped(const __grid_constant__ TensorMap image, const __grid_constant__ TensorMap stored,
        const ELEMENT* weights, const ELEMENT* bias, const ELEMENT* residual, i64 filter_pitch,
        int channels_written, int tiles_w, int tiles_h, int tiles_d, int tile_count,
        int patch_corner_d, int patch_corner_h, int patch_corner_w, int depth, int height, int width, i64 pitch_n, i64 pitch_d, i64 pitch_h,
        i64 pitch_w) {
  const u32 stages = shared_base(), buffers = stages + STAGES * stage_bytes;
  const StageRing ring{buffers + 2 * result_bytes};
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Tiles tiles{tiles_w, tiles_h, tiles_d, tile_count};
  if (threadIdx.x == 0) {
    ring.init(1, math_warps);
    barrier_init_done();
  }
  __syncthreads();
  if (warp == math_warps) {
    if (lane == 0)
      load(ring, stages, &image, tiles, {patch_corner_d, patch_corner_h, patch_corner_w});
    return;
  }
  const Share share(warp);
  const int channel = share.channel(blockIdx.x);
  const Result result{bias, residual, channels_written, depth, height, width,
                      pitch_n, pitch_d, pitch_h, pitch_w};
  Filter filter;
  if constexpr (is_padded)
    filter.fetch_padded(weights, filter_pitch, channel,
                        blockIdx.x * read_step + share.unit * read_unit, share.row,
                        channels_written, lane);
  else
    filter.fetch(weights, filter_pitch, channel,
                 WRITTEN_GROUP < 16 ? channel : channel / WRITTEN_GROUP * READ_GROUP,
                 channels_written, lane);
  Place at;
  u32 turn = 0;
  for (int tile = blockIdx.y; tile < tiles.count; tile += gridDim.y, at.next(), turn ^= 1) {
    const auto spot = tiles.spot(tile);
    const u32 buffer = buffers + turn * result_bytes;
    ring.wait_full(at);
    if (threadIdx.x == 0) tma_store_wait<1>();  // the tile before the last has left this buffer
    named_sync(1, 32 * math_warps);
    const bool has_channels = !is_padded || share.row < written_unit;
#pragma unroll
    for (int column = 0; column < TILE_W && has_channels; column += strip)
      multiply_strip(filter, stages + at.stage * stage_bytes, buffer, column, share, lane, result,
                     channel, spot);
    __syncwarp();
    ring.release(at.stage, lane);
    fence_async();
    named_sync(1, 32 * math_warps);
    if (threadIdx.x == 0) {
      const int w = spot.w * Columns::phases, h = spot.h * Rows::phases;
      if constexpr (is_padded) tma_store(&stored, buffer, 0, w, (int)blockIdx.x * units, h, spot.n);
      else tma_store(&stored, buffer, (int)blockIdx.x * written_step, w, h, spot.d, spot.n);
      tma_store_commit();
    }
  }
  if (threadIdx.x == 0) tma_store_wait<0>();
}
