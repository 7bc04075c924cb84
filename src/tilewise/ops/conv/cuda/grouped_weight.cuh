// The gradient of the filter of a grouped convolution with few channels a group.
//
//   gradient[16 filters][8 channels] += result[16 filters][16 pixels] * image[16 pixels][8 channels]
//
// on the matrix units, the pixels being neighbours in a row of the result. Both operands come from
// [pixel][channel] tiles that TMA brings, read across by transposing loads; a tap is a shift of the
// pixel's address. A block owns 64 filters (16 a warp) and the channels they read; a fragment of the
// image meets every row of the filter from registers, so each is read once for a column shift.
// Groups below 16 share products; what lies off the groups' diagonal is dropped at the end.
// The sums of all taps stay in registers over the block's tiles. Then each block stores its slice, for
// a second kernel to add up, or adds it to one that began at zero (ATOMIC). Planes of a filter in
// three dimensions are blocks of their own.
// Groups that are none of 4, 8, 16 and 32 are padded: see units.cuh.
// Macros: ELEMENT, READ_GROUP (channels of the image a group), WRITTEN_GROUP (filters a group), UNITS, MERGED,
// FILTER_D/H/W, STRIDE_D/H/W, DILATION_D/H/W, TILE_H, TILE_W, STAGES, BLOCKS, ATOMIC.
#pragma once
#include "conv/cuda/units.cuh"

constexpr int warps = block_channels / 16;
// Of 8 channels, for each warp.
constexpr int pairs = is_padded ? (read_unit + 15) / 16 : WRITTEN_GROUP < 16 ? 1 : READ_GROUP / 16;
constexpr int patch_h = (TILE_H - 1) * STRIDE_H + (FILTER_H - 1) * DILATION_H + 1;
constexpr int patch_w = (TILE_W - 1) * STRIDE_W + (FILTER_W - 1) * DILATION_W + 1;
constexpr int patch_bytes = patch_h * units * patch_w * read_bytes;
constexpr int image_bytes = (patch_bytes + 1023) / 1024 * 1024;
constexpr int result_bytes = TILE_H * units * TILE_W * written_bytes;
constexpr int stage_bytes = image_bytes + result_bytes;
constexpr int open = (FILTER_H - 1) * DILATION_H / STRIDE_H + 1;  // rows of the result held at a time
constexpr int plane_taps = FILTER_H * FILTER_W;
static_assert(TILE_W % 16 == 0, "a product reduces over 16 pixels of a row");

struct Tiles {
  int across, down, deep, count;
};

// Thread 0: what tile `tile` needs, into a stage.
DEVICE void load(u32 stage, u32 barrier, const TensorMap* image, const TensorMap* result,
                 const Tiles& tiles, int tile, int pad_d, int pad_h, int pad_w) {
  const int line = tile / tiles.across, plane = line / tiles.down;
  const int w = tile % tiles.across * TILE_W, h = line % tiles.down * TILE_H;
  const int d = plane % tiles.deep, n = plane / tiles.deep, z = blockIdx.z;
  barrier_expect(barrier, patch_bytes + result_bytes);
  const int x = w * STRIDE_W - pad_w, y = h * STRIDE_H - pad_h, block = blockIdx.x;
  if constexpr (is_padded) {
    tma_load(stage, image, barrier, 0, x, block * units, y, n);
    tma_load(stage + image_bytes, result, barrier, 0, w, block * units, h, n);
  } else {
    tma_load(stage, image, barrier, block * read_step, x, y, d * STRIDE_D + z * DILATION_D - pad_d, n);
    tma_load(stage + image_bytes, result, barrier, block * written_step, w, h, d, n);
  }
}

using Sums = float[plane_taps][2 * pairs][4];

// All products of 16 columns of a tile.
DEVICE void multiply_strip(Sums& sums, u32 image, u32 result, int column, const Share& share,
                           u32 lane) {
  const u32 pixel = lane & 7, half = lane >> 3 & 1, quarter = lane >> 4;
  const u32 chunk = share.read_chunk();
  u32 rows[open][4];  // of the result: 16 filters x 16 pixels each
#pragma unroll
  for (int row = 0; row < patch_h; row++) {
    if (row % STRIDE_H == 0 && row / STRIDE_H < TILE_H) {
      const int next = row / STRIDE_H;
      load_matrix4_transposed(
          rows[next % open],
          result + swizzled<written_bytes>(share.line(next, TILE_W) + column + quarter * 8 + pixel,
                                           share.written_chunk() + half));
    }
#pragma unroll
    for (int x = 0; x < FILTER_W; x++)
#pragma unroll
      for (int pair = 0; pair < pairs; pair++) {
        u32 patch[4];
        const int at = share.line(row, patch_w) + (column + half * 8 + pixel) * STRIDE_W + x * DILATION_W;
        load_matrix4_transposed(patch, image + swizzled<read_bytes>(at, chunk + pair * 2 + quarter));
#pragma unroll
        for (int y = 0; y < FILTER_H; y++) {
          const int from = row - y * DILATION_H;
          if (from < 0 || from % STRIDE_H || from / STRIDE_H >= TILE_H) continue;
          float(&sum)[2 * pairs][4] = sums[y * FILTER_W + x];
          mma_16816<ELEMENT>(sum[2 * pair], rows[from / STRIDE_H % open], patch[0], patch[1]);
          mma_16816<ELEMENT>(sum[2 * pair + 1], rows[from / STRIDE_H % open], patch[2], patch[3]);
        }
      }
  }
}

// One sum of a unit's, into its filter at a tap.
DEVICE void store_padded(float* to, float sum, int row, int column) {
  if (!is_in_filter(row, column)) return;
  if constexpr (ATOMIC) add_global(to + column % READ_GROUP, sum);
  else to[column % READ_GROUP] = sum;
}

// The warp's sums as rows of [filter][tap][channel of the group].
DEVICE void store(Sums& sums, float* slice, int filter_count, const Share& share, u32 lane) {
#pragma unroll
  for (int tap = 0; tap < plane_taps; tap++)
#pragma unroll
    for (int part = 0; part < 2 * pairs; part++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = half * 8 + lane / 4, column = part * 8 + lane % 4 * 2;
        const int filter = share.channel(blockIdx.x) + row;
        if (filter >= filter_count) continue;
        if (!is_padded && WRITTEN_GROUP < 16 && row / WRITTEN_GROUP != column / READ_GROUP) continue;
        const i64 place = ((i64)filter * FILTER_D + blockIdx.z) * plane_taps + tap;
        float* to = slice + place * READ_GROUP + column % READ_GROUP;
        const float a = sums[tap][part][half * 2], b = sums[tap][part][half * 2 + 1];
        if constexpr (is_padded) {
          store_padded(slice + place * READ_GROUP, a, share.row + row, column);
          store_padded(slice + place * READ_GROUP, b, share.row + row, column + 1);
        } else if constexpr (ATOMIC) add_global(to, a, b);
        else *(f32x2*)to = {a, b};
      }
}

extern "C" __global__ void __launch_bounds__(32 * warps, BLOCKS)
grouped_weight(const __grid_constant__ TensorMap image, const __grid_constant__ TensorMap result,
               float* slices, i64 slice_size, int filter_count, int tiles_w, int tiles_h, int tiles_d,
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
  const Share share(warp);
  Sums sums = {};
  u32 stage = 0, round = 0;
  for (int tile = first; tile < tile_count; tile += step) {
    const u32 from = stages + stage * stage_bytes;
    barrier_wait(barriers + 8 * stage, round);
#pragma unroll
    for (int column = 0; column < TILE_W; column += 16)
      multiply_strip(sums, from, from + image_bytes, column, share, lane);
    __syncthreads();  // everyone has read the stage
    if (threadIdx.x == 0 && tile + STAGES * step < tile_count) fill(tile + STAGES * step, stage);
    if (++stage == STAGES) {
      stage = 0;
      round ^= 1;
    }
  }
  store(sums, slices + (ATOMIC ? 0 : blockIdx.y * slice_size), filter_count, share, lane);
}
