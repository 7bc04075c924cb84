// Loads by TMA: one thread starts all copies of a stage. With two load warps, one brings the pixels
// and the other the filter. Included by implicit.cuh.
#include "conv/cuda/filter.cuh"

#define SOURCE_PARAMETERS                         \
  const __grid_constant__ TensorMap pixels_map, const __grid_constant__ TensorMap filter_map
#define SOURCE_ARGUMENTS &pixels_map, &filter_map

constexpr int loads_of_a_stage = LOAD_WARPS;
constexpr u16 everyone = (1 << CLUSTER) - 1;
constexpr int filter_share = SHARE_FILTER ? CLUSTER : 1;
constexpr bool are_pixels_shared = CLUSTER > 1 && !SHARE_FILTER;
constexpr int step_taps = tile_k / row_k;
// From one tap to the next in a stage's filter: read across, in every panel.
constexpr u32 filter_step = BACKWARD ? row_k * 128 : TILE_N * row_bytes;
static_assert(LOAD_WARPS <= 2, "one warp for the pixels, one for the filter");
static_assert(step_taps == 1 || CLUSTER == 1, "several taps in a step are not shared");

DEVICE int reduction_steps(const Walk& walk, int in_channels) {
  return (walk.taps() + step_taps - 1) / step_taps * ((in_channels + tile_k - 1) / tile_k);
}

struct Loader {
  StageRing ring;
  Tiles schedule;
  Walk walk;
  u32 stages, rank;
  int pixels, in_channels, out_channels;
  const TensorMap *pixels_map, *filter_map;

  DEVICE void run(u32 thread) const {
    if (thread % 32 != 0 || thread / 32 >= LOAD_WARPS) return;
    const bool brings_pixels = LOAD_WARPS == 1 || thread == 0;
    const bool brings_filter = LOAD_WARPS == 1 || thread != 0;
    if (brings_pixels) prefetch_map(pixels_map);
    if (brings_filter) prefetch_map(filter_map);
    const int count = schedule.count(), stride = gridDim.x / CLUSTER;
    const int blocks = (in_channels + tile_k - 1) / tile_k;
    const FilterTile<TILE_N, tile_k, BACKWARD, filter_share, RAGGED> filter = {
        filter_map, in_channels, out_channels, filter_share > 1 ? rank : 0};
    Place at;
    for (int index = blockIdx.x / CLUSTER; index < count; index += stride) {
      const Tiles::Work work = schedule.work(index, rank);
      const Pixel corner = walk.corner(walk.pixel(first_pixel(work)));
      const int skipped = SUM == SUM_DIRECT ? 0 : work.first / blocks;
      Tap tap(walk, skipped * step_taps);
      int block = work.first - skipped * blocks;
      for (int step = work.first; step < work.last; step++) {
        const u32 to = stages + at.stage * stage_bytes;
        const int left = walk.taps() - step * step_taps;
        const int taps = step_taps == 1 || left > step_taps ? step_taps : left;
        ring.wait_empty(at);
        ring.expect(at, taps * ((brings_pixels ? pixel_bytes / step_taps : 0) +
                                (brings_filter ? filter_bytes / step_taps : 0)));
        for (int i = 0; i < taps; i++) {
          if (brings_pixels)
            load_pixels(to + i * (pixel_bytes / step_taps), ring.full(at), work, corner, tap,
                        block * tile_k);
          if (brings_filter)
            filter.load(to + pixel_bytes + i * filter_step, ring.full(at), work.group,
                        work.channel_tile * TILE_N, tap.place(walk), block * tile_k);
          if (++block == blocks) {
            block = 0;
            tap.next(walk);
          }
        }
        at.next();
      }
    }
  }

  DEVICE int first_pixel(const Tiles::Work& work) const {
    const int first = work.pixel_tile * TILE_M;
    return are_pixels_shared ? first + (int)rank * (TILE_M / CLUSTER) : first;
  }

  DEVICE void load_pixels(u32 to, u32 barrier, const Tiles::Work& work, Pixel corner,
                          const Tap& tap, int channel) const {
    const int c = work.group * in_channels + channel;
    if (are_pixels_shared) to += rank * (pixel_bytes / CLUSTER);
#if LOADER == LOAD_ROWS
    if (are_pixels_shared)
      tma_load_multicast(to, pixels_map, barrier, everyone, c, first_pixel(work));
    else tma_load(to, pixels_map, barrier, c, first_pixel(work));
#elif SPATIAL == 2
    const u16 right = tap.right(walk), down = tap.down(walk);
    if (are_pixels_shared)
      tma_load_im2col_multicast(to, pixels_map, barrier, everyone, c, corner.w, corner.h, corner.n,
                                right, down);
    else tma_load_im2col(to, pixels_map, barrier, c, corner.w, corner.h, corner.n, right, down);
#else
    const u16 right = tap.right(walk), down = tap.down(walk), deep = tap.deep(walk);
    if (are_pixels_shared)
      tma_load_im2col_multicast(to, pixels_map, barrier, everyone, c, corner.w, corner.h, corner.d,
                                corner.n, right, down, deep);
    else
      tma_load_im2col(to, pixels_map, barrier, c, corner.w, corner.h, corner.d, corner.n, right,
                      down, deep);
#endif
  }
};
