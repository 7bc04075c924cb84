// The gradient of a network's image: many channels of the gradient in, few of the image (1 to 4) out.
//
// A place of the gradient stands for one period of the stride in the image: STRIDE_H lines of STRIDE_W
// pixels, whose channels are the columns of one product. Whatever the filter, a place is made of
// neighbouring places of the gradient, a shift each (see patches.cuh); on the matrix units
//
//   periods[16 places][8 columns] += gradient[16 places, shifted][16 channels] * filter[16 channels][8 columns]
//
// Phases that no tap of a shift reaches have zeros in the filter there: an Inf or NaN of the gradient
// spreads to the pixels of its periods.
//
// One warp copies patches of 32 or 64 channels by TMA, four multiply: 16 places of a line at a time. The
// filter lies in shared memory for as long as the block lives, in the order that lanes read it.
// Macros: ELEMENT, IN_CHANNELS (of the image), FILTER_H/W, STRIDE_H/W, LEAD_H/W, CHUNK (channels of a
// patch), CHUNKS, TILE_H, TILE_W (of 16), STAGES, BLOCKS, BIAS, RESIDUAL, ACTIVATION; BACKWARD is 1.
#pragma once
#include "conv/cuda/patches.cuh"
#include "cuda/ring.cuh"

using Lines = Axis<FILTER_H, STRIDE_H, 1, LEAD_H>;
using Columns = Axis<FILTER_W, STRIDE_W, 1, LEAD_W>;
constexpr int math_warps = 4, row_bytes = 2 * CHUNK;
constexpr int patch_h = Lines::patch(TILE_H), patch_w = Columns::patch(TILE_W);
constexpr int patch_bytes = patch_h * patch_w * row_bytes;
constexpr int stage_bytes = (patch_bytes + 1023) / 1024 * 1024;  // swizzle patterns begin there
constexpr int shifts = Lines::shifts * Columns::shifts;
constexpr int line = STRIDE_W * IN_CHANNELS;      // columns of a line of a period
constexpr int columns = (STRIDE_H * line + 7) / 8;  // blocks of 8
constexpr int pairs = CHUNK / 32;                 // of products, in a chunk
constexpr int filter_words = CHUNKS * shifts * pairs * columns * 128;
constexpr int own_parts = TILE_H * TILE_W / 16 / math_warps;
static_assert(own_parts * 16 * math_warps == TILE_H * TILE_W, "warps take whole lines of 16 places");

using StageRing = Ring<STAGES>;
using Place = Cursor<STAGES>;

struct Tiles {
  int across, down, count;
  struct Spot {
    int w, h, n;
  };
  DEVICE Spot spot(int tile) const {
    const int row = tile / across;
    return {tile % across * TILE_W, row % down * TILE_H, row / down};
  }
};

DEVICE void load(const StageRing& ring, u32 stages, const TensorMap* gradient, const Tiles& tiles,
                 int corner_h, int corner_w) {
  Place at;
  for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
    const auto spot = tiles.spot(tile);
    for (int chunk = 0; chunk < CHUNKS; chunk++, at.next()) {
      ring.wait_empty(at);
      ring.expect(at, patch_bytes);
      tma_load(stages + at.stage * stage_bytes, gradient, ring.full(at), chunk * CHUNK,
               spot.w + corner_w, spot.h + corner_h, 0, spot.n);
    }
  }
}

// One element of the filter: what channel `k` of the gradient, a shift away, gives a column.
DEVICE u32 tap(const ELEMENT* filter, i64 pitch, int k, int channels, int shift, int column) {
  const int phase = column / line, rest = column % line;
  if (phase >= STRIDE_H || k >= channels) return 0;
  const int y = Lines::tap_between(shift / Columns::shifts, 0, phase);
  const int x = Columns::tap_between(shift % Columns::shifts, 0, rest / IN_CHANNELS);
  if (y < 0 || x < 0) return 0;
  return filter[k * pitch + (y * FILTER_W + x) * IN_CHANNELS + rest % IN_CHANNELS].bits;
}

// The filter as lanes want it: four words for the two products of a pair.
DEVICE void keep(u32 to, const ELEMENT* filter, i64 pitch, int channels) {
#pragma unroll 4
  for (int word = threadIdx.x; word < filter_words; word += blockDim.x) {
    const int part = word % 4, lane = word / 4 % 32, block = word / 128;
    const int step = block / columns, shift = step / pairs % shifts;
    const int k = step / pairs / shifts * CHUNK + step % pairs * 32 + part * 8 + lane % 4 * 2;
    const int column = block % columns * 8 + lane / 4;
    const u32 low = tap(filter, pitch, k, channels, shift, column);
    store_shared_u32(to + 4 * word, low | tap(filter, pitch, k + 1, channels, shift, column) << 16);
  }
}

DEVICE void multiply(float (&sums)[own_parts][columns][4], u32 patch, u32 filter, u32 warp, u32 lane) {
#pragma unroll 1
  for (int shift = 0; shift < shifts; shift++) {
    const int down = shift / Columns::shifts, right = shift % Columns::shifts;
#pragma unroll
    for (int pair = 0; pair < pairs; pair++) {
      u32x4 taps[columns];
#pragma unroll
      for (int column = 0; column < columns; column++)
        taps[column] = load_shared_u32x4(
            filter + (((shift * pairs + pair) * columns + column) * 32 + lane) * 16);
#pragma unroll
      for (int part = 0; part < own_parts; part++) {
        const int mine = warp * own_parts + part;
        const int row = mine / (TILE_W / 16), first = mine % (TILE_W / 16) * 16;
        const int place = (row + down) * patch_w + first + right + (int)lane % 16;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          u32 places[4];
          load_matrix4(places, patch + swizzled<row_bytes>(place, pair * 4 + half * 2 + lane / 16));
#pragma unroll
          for (int column = 0; column < columns; column++)
            mma_16816<ELEMENT>(sums[part][column], places,
                               half ? taps[column].z : taps[column].x,
                               half ? taps[column].w : taps[column].y);
        }
      }
    }
  }
}

// Two columns of a place of the gradient, in the image; neighbours there are stored as one word.
DEVICE void store(ELEMENT* image, const Result& result, const Tiles::Spot& spot, int row, int place,
                  int column, float low, float high, bool are_words) {
  const float two[2] = {low, high};
  u32 packed[2];
  i64 at[2];
  bool is_inside[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int phase = (column + i) / line, rest = (column + i) % line;
    const int h = (spot.h + row) * STRIDE_H + phase;
    const int w = (spot.w + place) * STRIDE_W + rest / IN_CHANNELS, c = rest % IN_CHANNELS;
    is_inside[i] = phase < STRIDE_H && h < result.height && w < result.width;
    at[i] = spot.n * result.pitch_n + h * result.pitch_h + w * result.pitch_w + c;
    packed[i] = pack2<ELEMENT>(is_inside[i] ? result.finished(two[i], c, spot.n, 0, h, w) : 0.f, 0.f);
  }
  if (line % 2 == 0 && are_words) {
    if (is_inside[0]) *(u32*)(image + at[0]) = packed[0] & 0xFFFF | packed[1] << 16;
  } else {
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (is_inside[i]) image[at[i]].bits = (u16)packed[i];
  }
}

extern "C" __global__ void __launch_bounds__(32 * (math_warps + 1), BLOCKS)
image(const __grid_constant__ TensorMap gradient, const ELEMENT* weights, ELEMENT* result_image,
      const ELEMENT* bias, const ELEMENT* residual, i64 filter_pitch, int channels, int tiles_w,
      int tiles_h, int tile_count, int corner_h, int corner_w, int height, int width, i64 pitch_n,
      i64 pitch_h, i64 pitch_w) {
  const u32 stages = shared_base(), filter = stages + STAGES * stage_bytes;
  const StageRing ring{filter + 4 * filter_words};
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Tiles tiles{tiles_w, tiles_h, tile_count};
  keep(filter, weights, filter_pitch, channels);
  if (threadIdx.x == 0) {
    ring.init(1, math_warps);
    barrier_init_done();
  }
  __syncthreads();
  if (warp == math_warps) {
    if (lane == 0) load(ring, stages, &gradient, tiles, corner_h, corner_w);
    return;
  }
  const Result result{bias, residual, IN_CHANNELS, 1, height, width, pitch_n, 0, pitch_h, pitch_w};
  const bool are_words = (pitch_n | pitch_h) % 2 == 0;
  Place at;
  for (int tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
    const auto spot = tiles.spot(tile);
    float sums[own_parts][columns][4] = {};
    for (int chunk = 0; chunk < CHUNKS; chunk++, at.next()) {
      ring.wait_full(at);
      multiply(sums, stages + at.stage * stage_bytes, filter + chunk * (4 * filter_words / CHUNKS), warp,
               lane);
      __syncwarp();
      ring.release(at.stage, lane);
    }
#pragma unroll
    for (int part = 0; part < own_parts; part++) {
      const int mine = warp * own_parts + part;
      const int row = mine / (TILE_W / 16), first = mine % (TILE_W / 16) * 16 + (int)lane / 4;
#pragma unroll
      for (int column = 0; column < columns; column++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          store(result_image, result, spot, row, first + 8 * half, column * 8 + (int)lane % 4 * 2,
                sums[part][column][2 * half], sums[part][column][2 * half + 1], are_words);
    }
  }
}
