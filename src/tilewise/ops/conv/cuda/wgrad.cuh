// The gradient of a dense filter as an implicit matrix product.
//
// dw[k][entry] = sum over pixels of dy[pixel][k] * x[window of pixel at the entry's tap][its channel]
//
// An entry is a tap and a channel of the filter. A tile is TILE_M filters x TILE_N entries of one
// group; a step of the reduction is 64 pixels. A stage holds panels of 64 pixels x 64 channels
// (128 bytes a pixel): TILE_M / 64 of dy, then TILE_N / 64 of x. Both are read across the
// reduction. Loaders that use TMA give every panel of entries one tap, and blocks of 64 channels;
// the gathering one packs taps and channels in one row, and wastes nothing on few channels.
// Math groups divide the filters, or the entries where there are 64 filters. The pixels are cut, see
// Schedule and store.cuh.
//
// Macros: ELEMENT, RESULT, TILE_M, TILE_N, STAGES, MATH_GROUPS, LOADER, LOAD_WARPS, SPATIAL, SUM, BLOCKS,
// STREAM; with TMA GRADIENT_ROWS (dy is a matrix without gaps between images), gathering VECTOR.
#pragma once
#include "conv/cuda/filter_sums.cuh"
#include "conv/cuda/shares.cuh"
#include "conv/cuda/walk.cuh"
#include "cuda/ring.cuh"

#define LOAD_IM2COL 0  // TMA walks the pixels: any padding, strides up to 8, channels in multiples of 8
#define LOAD_ROWS 1    // pixels are rows of a matrix: 1x1, stride 1, no padding
#define LOAD_GATHER 2  // load warps compute every address: anything

constexpr int step_pixels = 64;
constexpr int panel_bytes = step_pixels * 128;
constexpr int dy_panels = TILE_M / 64, x_panels = TILE_N / 64;
constexpr int stage_bytes = (dy_panels + x_panels) * panel_bytes;
constexpr bool is_gathering = LOADER == LOAD_GATHER;
constexpr int load_groups = (LOAD_WARPS + 3) / 4;
using Budget = Registers<load_groups, MATH_GROUPS, is_gathering>;
constexpr int math_threads = 128 * MATH_GROUPS;
constexpr int threads = math_threads + (Budget::are_moved ? 128 * load_groups : 32 * LOAD_WARPS);
constexpr bool divides_rows = TILE_M % (64 * MATH_GROUPS) == 0;
constexpr int row_blocks = divides_rows ? dy_panels / MATH_GROUPS : dy_panels;
constexpr int group_columns = divides_rows ? TILE_N : TILE_N / MATH_GROUPS;
static_assert(group_columns % 64 == 0, "math groups take whole panels");

using StageRing = Ring<STAGES>;
using Place = Cursor<STAGES>;

// Entries of the filter by the columns of the product.
struct Entries {
  int channels, taps;
  DEVICE int blocks() const { return (channels + 63) / 64; }  // of 64 channels, for each tap
  // Columns of the product, what fills up blocks included.
  DEVICE int columns() const { return is_gathering ? taps * channels : taps * blocks() * 64; }
  DEVICE int tap(int column) const {
    return is_gathering ? (u32)column / (u32)channels : (u32)column / 64 / (u32)blocks();
  }
  DEVICE int channel(int column) const {
    return is_gathering ? (u32)column % (u32)channels
                        : (u32)column / 64 % (u32)blocks() * 64 + column % 64;
  }
};

// Which tile is whose: entries innermost, so that neighbours share pixels in the cache.
//
// Every tile is cut into `splits` alike, or (STREAM) blocks share the steps of all tiles evenly, so that
// none idles: a block's works are the parts of tiles that its share covers. Then tiles have as many parts
// as blocks reach them, `splits` at most, and the last part's block clears the slices that are left.
struct Schedule {
  int row_tiles, column_tiles, groups, splits, steps;

  struct Work {
    int row, column, group, split, first, last;  // steps of the reduction
    int cleared;                                 // slices behind this one
  };
  DEVICE int tiles() const { return row_tiles * column_tiles * groups; }
  // A block's works are begin(), begin() + stride() and so on.
  DEVICE int begin() const { return STREAM ? 0 : (int)blockIdx.x; }
  DEVICE int stride() const { return STREAM ? 1 : (int)gridDim.x; }
  DEVICE int count() const {
    if (!STREAM) return tiles() * splits;
    const Shares shares = of_blocks();
    return ((u32)shares.first(blockIdx.x + 1) - 1) / steps - (u32)shares.first(blockIdx.x) / steps + 1;
  }
  DEVICE Work work(int index) const {
    if (!STREAM) {
      const u32 split = (u32)index / (u32)tiles();
      const Shares parts(steps, splits);
      return at(index - split * tiles(), split, parts.first(split), parts.first(split + 1), 0);
    }
    const Shares shares = of_blocks();
    const int from = shares.first(blockIdx.x), to = shares.first(blockIdx.x + 1);
    const int tile = (u32)from / (u32)steps + index, start = tile * steps;
    const int first = from > start ? from - start : 0;
    const int last = to < start + steps ? to - start : steps;
    const int split = (int)blockIdx.x - shares.owner(start);
    return at(tile, split, first, last, last == steps ? splits - split - 1 : 0);
  }
  DEVICE Work at(u32 tile, int split, int first, int last, int cleared) const {
    const u32 rest = tile / (u32)column_tiles, group = rest / (u32)row_tiles;
    return {(int)(rest - group * row_tiles) * TILE_M, (int)(tile - rest * column_tiles) * TILE_N,
            (int)group, split, first, last, cleared};
  }
  // The steps of all tiles, shared out to the blocks.
  DEVICE Shares of_blocks() const { return {(u32)(tiles() * steps), gridDim.x}; }
};

#if LOADER == LOAD_GATHER
#include "conv/cuda/wgrad_gather.cuh"
#else
#include "conv/cuda/wgrad_tma.cuh"
#endif

using Sums = FilterSums<RESULT, SUM>;

DEVICE void store(float (&sums)[row_blocks][group_columns / 2], const Sums& out,
                  const Entries& entries, const Schedule::Work& work, int first_row,
                  int first_column, u32 thread) {
  const u32 warp = thread / 32, lane = thread % 32;
  const int columns = entries.columns();
#pragma unroll
  for (int panel = 0; panel < group_columns; panel += 64) {
    // Of the panel's first column; where TMA brings them, all 64 are channels of one tap.
    const int begin = work.column + first_column + panel;
    const int block_tap = entries.tap(begin), block_channel = entries.channel(begin);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int column = begin + 8 * j + 2 * (lane % 4);
      const int tap = is_gathering ? entries.tap(column) : block_tap;
      const int channel = is_gathering ? column - tap * out.channels : block_channel + column - begin;
      if (column >= columns || channel >= out.channels) continue;
      const i64 at = (i64)tap * out.channels + channel;
      // Packed entries go on with the next tap; blocks of channels end.
      const bool both = is_gathering ? column + 1 < columns : channel + 1 < out.channels;
#pragma unroll
      for (int m = 0; m < row_blocks; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int row = work.row + first_row + m * 64 + warp * 16 + half * 8 + lane / 4;
          if (row >= out.filters) continue;
          const int filter = work.group * out.filters + row, i = panel / 2 + 4 * j + 2 * half;
          out.store(sums[m][i], sums[m][i + 1], filter, at, out.is_even(), both, work.split);
          if (STREAM && SUM == SUM_SLICES)
            for (int behind = 1; behind <= work.cleared; behind++)
              out.store(0.f, 0.f, filter, at, out.is_even(), both, work.split + behind);
        }
    }
  }
}

DEVICE void math(const StageRing& ring, const Schedule& schedule, const Sums& out,
                 const Entries& entries, u32 stages) {
  const u32 group = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int first_row = divides_rows ? group * row_blocks * 64 : 0;
  const int first_column = divides_rows ? 0 : group * group_columns;
  Place at;
  for (int index = schedule.begin(); index < schedule.count(); index += schedule.stride()) {
    const Schedule::Work work = schedule.work(index);
    float sums[row_blocks][group_columns / 2];
    LateRelease<STAGES> late;
    for (int step = work.first; step < work.last; step++) {
      ring.wait_full(at);
      if constexpr (is_gathering) fence_async();  // what threads copied is read by the matrix units
      const u32 dy = stages + at.stage * stage_bytes + first_row / 64 * panel_bytes;
      const u32 x = stages + at.stage * stage_bytes + (dy_panels + first_column / 64) * panel_bytes;
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < step_pixels / 16; k++) {
        const u64 b = wgmma_operand(x + k * 2048, panel_bytes, 1024);
#pragma unroll
        for (int m = 0; m < row_blocks; m++)
          wgmma<ELEMENT, group_columns, false, false>(
              sums[m], wgmma_operand(dy + m * panel_bytes + k * 2048, panel_bytes, 1024), b,
              step > work.first || k > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();
      late.step(ring, at, thread);
      at.next();
    }
    wgmma_wait<0>();
    late.flush(ring, thread);
    store(sums, out, entries, work, first_row, first_column, thread);
  }
}

extern "C" __global__ void __launch_bounds__(threads, BLOCKS)
wgrad(SOURCE_PARAMETERS, RESULT* result, float* partial, int pixels, int in_channels,
      int out_channels, int groups, int splits, i64 result_pitch, i64 slice_elements,
      WALK_PARAMETERS) {
  release_next_grid();
  const Walk walk = {WALK_ARGUMENTS};
  const Entries entries = {in_channels, walk.taps()};
  const Schedule schedule = {(out_channels + TILE_M - 1) / TILE_M,
                             (entries.columns() + TILE_N - 1) / TILE_N, groups, splits,
                             (pixels + step_pixels - 1) / step_pixels};
  const u32 stages = shared_base();
  const StageRing ring = {stages + STAGES * stage_bytes};
  if (threadIdx.x == 0) {
    ring.init(loads_of_a_stage, MATH_GROUPS);
    barrier_init_done();
  }
  __syncthreads();
  if (threadIdx.x >= math_threads) {
    Budget::for_load();
    const Loader loader = {ring,        schedule,     walk,   entries, stages,
                           in_channels, out_channels, pixels, SOURCE_ARGUMENTS};
    loader.run(threadIdx.x - math_threads);
  } else {
    Budget::for_math();
    const Sums out = {result,       partial,     result_pitch, slice_elements,
                      out_channels, in_channels, walk.taps()};
    math(ring, schedule, out, entries, stages);
  }
}
