// The gradient of a dense filter over patches that stay in shared memory, stride 1 along lines and
// columns.
//
// A block computes 64 filters x 64 channels for all TAPS_H x TAPS_W taps (of one depth of the
// filter). A step of the reduction is a tile of TILE_H x TILE_W pixels: one tile of dy and one patch
// of x with its rim feed every tap. One math group per line of the filter; the taps of the line are
// ONE matrix instruction of 64 TAPS_W columns, whose panels of 64 channels lie one pixel of the patch
// (REACH_W) apart. The pixels are cut into `splits`, see store.cuh.
//
// Macros: ELEMENT, RESULT, TILE_H, TILE_W, STAGES, LOAD_WARPS, SPATIAL, TAPS_H, TAPS_W, REACH_H, REACH_W, SUM.
#pragma once
#include "conv/cuda/filter_sums.cuh"
#include "conv/cuda/shares.cuh"
#include "conv/cuda/walk.cuh"
#include "cuda/ring.cuh"

constexpr int patch_h = TILE_H + (TAPS_H - 1) * REACH_H, patch_w = TILE_W + (TAPS_W - 1) * REACH_W;
constexpr int patch_copied = patch_h * patch_w * 128;
constexpr int patch_bytes = (patch_copied + 1023) / 1024 * 1024;  // swizzle patterns begin there
constexpr int dy_bytes = TILE_H * TILE_W * 128;
constexpr int stage_bytes = patch_bytes + dy_bytes;
constexpr int columns = 64 * TAPS_W;
using Budget = Registers<1, TAPS_H, false>;
constexpr int math_threads = 128 * TAPS_H;
constexpr int threads = math_threads + (Budget::are_moved ? 128 : 32 * LOAD_WARPS);
static_assert(TILE_H % 2 == 0 && TILE_W % 8 == 0, "a product takes two lines of 8 pixels");

using StageRing = Ring<STAGES>;
using Place = Cursor<STAGES>;
using Sums = FilterSums<RESULT, SUM>;

// Which tile is whose: channels innermost, so that neighbours share dy in the cache.
struct Schedule {
  int channel_tiles, filter_tiles, depths, groups, splits, steps;

  struct Work {
    int channel, filter, deep, group, split, first, last;  // steps of the reduction
  };
  DEVICE int count() const { return channel_tiles * filter_tiles * depths * groups * splits; }
  DEVICE Work work(int index) const {
    const u32 filter = (u32)index / (u32)channel_tiles, deep = filter / (u32)filter_tiles;
    const u32 group = depths > 1 ? deep / (u32)depths : deep;
    const u32 split = groups > 1 ? group / (u32)groups : group;
    const Shares parts(steps, splits);
    return {(int)(index - filter * channel_tiles) * 64,
            (int)(filter - deep * filter_tiles) * 64,
            (int)(deep - group * depths),
            (int)(group - split * groups),
            (int)split,
            parts.first(split),
            parts.first(split + 1)};
  }
};

// Tiles of pixels over all images.
struct PixelTiles {
  Walk walk;
  int images;
  DEVICE int lines() const { return (walk.size_h + TILE_H - 1) / TILE_H; }
  DEVICE int columns() const { return (walk.size_w + TILE_W - 1) / TILE_W; }
  DEVICE int count() const { return images * walk.size_d * lines() * columns(); }
  DEVICE Pixel first(int tile) const {
    const u32 line = (u32)tile / (u32)columns(), plane = line / (u32)lines();
    const u32 image = walk.size_d > 1 ? plane / (u32)walk.size_d : plane;
    return {(int)image, (int)(plane - image * walk.size_d), (int)(line - plane * lines()) * TILE_H,
            (int)(tile - line * columns()) * TILE_W};
  }
  // Of the tile behind the one that begins at `at`.
  DEVICE Pixel next(Pixel at) const {
    at.w += TILE_W;
    if (at.w >= walk.size_w) at.w = 0, at.h += TILE_H;
    if (at.h >= walk.size_h) at.h = 0, at.d++;
    if (at.d >= walk.size_d) at.d = 0, at.n++;
    return at;
  }
};

DEVICE void load(const StageRing& ring, const Schedule& schedule, const PixelTiles& tiles, u32 stages,
                 int in_channels, int out_channels, const TensorMap* dy_map, const TensorMap* x_map,
                 u32 thread) {
  if (thread % 32 != 0 || thread / 32 >= LOAD_WARPS) return;
  const bool brings_x = LOAD_WARPS == 1 || thread == 0, brings_dy = LOAD_WARPS == 1 || thread != 0;
  Place at;
  for (int index = blockIdx.x; index < schedule.count(); index += gridDim.x) {
    const Schedule::Work work = schedule.work(index);
    const int c = work.group * in_channels + work.channel;
    const int k = work.group * out_channels + work.filter;
    Pixel pixel = tiles.first(work.first);
    for (int step = work.first; step < work.last; step++, at.next(), pixel = tiles.next(pixel)) {
      const Pixel corner = tiles.walk.corner(pixel);
      const u32 to = stages + at.stage * stage_bytes;
      ring.wait_empty(at);
      ring.expect(at, (brings_x ? patch_copied : 0) + (brings_dy ? dy_bytes : 0));
#if SPATIAL == 2
      if (brings_x) tma_load(to, x_map, ring.full(at), c, corner.w, corner.h, corner.n);
      if (brings_dy)
        tma_load(to + patch_bytes, dy_map, ring.full(at), k, pixel.w, pixel.h, pixel.n);
#else
      if (brings_x)
        tma_load(to, x_map, ring.full(at), c, corner.w, corner.h,
                 corner.d + work.deep * tiles.walk.reach_d, corner.n);
      if (brings_dy)
        tma_load(to + patch_bytes, dy_map, ring.full(at), k, pixel.w, pixel.h, pixel.d, pixel.n);
#endif
    }
  }
}

DEVICE void store(float (&sums)[columns / 2], const Sums& out, const Schedule::Work& work, int line,
                  u32 thread) {
  const u32 warp = thread / 32, lane = thread % 32;
#pragma unroll
  for (int j = 0; j < columns / 8; j++) {
    const int channel = work.channel + 8 * (j % 8) + 2 * (lane % 4);
    if (channel >= out.channels) continue;
    const int tap = (work.deep * TAPS_H + line) * TAPS_W + j / 8;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = work.filter + warp * 16 + half * 8 + lane / 4;
      if (row < out.filters)
        out.store(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1],
                  work.group * out.filters + row, (i64)tap * out.channels + channel, out.is_even(),
                  channel + 1 < out.channels, work.split);
    }
  }
}

DEVICE void math(const StageRing& ring, const Schedule& schedule, const Sums& out, u32 stages) {
  const u32 line = threadIdx.x / 128, thread = threadIdx.x % 128;
  Place at;
  for (int index = blockIdx.x; index < schedule.count(); index += gridDim.x) {
    const Schedule::Work work = schedule.work(index);
    float sums[columns / 2];
    LateRelease<STAGES> late;
    for (int step = work.first; step < work.last; step++, at.next()) {
      ring.wait_full(at);
      const u32 x = stages + at.stage * stage_bytes + line * REACH_H * patch_w * 128;
      const u32 dy = stages + at.stage * stage_bytes + patch_bytes;
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < TILE_H * TILE_W / 16; i++) {
        const int h = i * 2 % TILE_H, w = i * 2 / TILE_H * 8;  // two lines of 8 pixels
        wgmma<ELEMENT, columns, false, false>(
            sums, wgmma_operand(dy + (h * TILE_W + w) * 128, 8192, TILE_W * 128),
            wgmma_operand(x + (h * patch_w + w) * 128, REACH_W * 128, patch_w * 128),
            step > work.first || i > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();
      late.step(ring, at, thread);
    }
    wgmma_wait<0>();
    late.flush(ring, thread);
    store(sums, out, work, line, thread);
  }
}

extern "C" __global__ void __launch_bounds__(threads, 1)
halo_wgrad(const __grid_constant__ TensorMap dy_map, const __grid_constant__ TensorMap x_map,
           RESULT* result, float* partial, int images, int in_channels, int out_channels, int groups,
           int splits, i64 result_pitch, i64 slice_elements, WALK_PARAMETERS) {
  release_next_grid();
  const Walk walk = {WALK_ARGUMENTS};
  const PixelTiles tiles = {walk, images};
  const Schedule schedule = {(in_channels + 63) / 64, (out_channels + 63) / 64, walk.taps_d, groups,
                             splits, tiles.count()};
  const u32 stages = shared_base();
  const StageRing ring = {stages + STAGES * stage_bytes};
  if (threadIdx.x == 0) {
    ring.init(LOAD_WARPS, TAPS_H);
    barrier_init_done();
  }
  __syncthreads();
  if (threadIdx.x >= math_threads) {
    Budget::for_load();
    load(ring, schedule, tiles, stages, in_channels, out_channels, &dy_map, &x_map,
         threadIdx.x - math_threads);
  } else {
    Budget::for_math();
    const Sums out = {result,       partial,     result_pitch, slice_elements,
                      out_channels, in_channels, walk.taps()};
    math(ring, schedule, out, stages);
  }
}
