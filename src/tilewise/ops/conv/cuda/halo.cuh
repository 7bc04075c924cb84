// Dense convolution over patches that stay in shared memory: forward with stride 1, and the gradient
// of the input (of strides above 1 by parities, which have stride 1 each).
//
// A tile is a list of 8 x 8 pixel blocks, anywhere in the batch, and TILE_N channels. For each step
// (64 channels at one depth of the filter) every block's patch is loaded once WITH its rim, and all
// TAPS_H x TAPS_W taps read it: a tap is a shift of the start address of the matrix instruction's
// operand, whose groups of 8 rows (8 pixels of a line) lie one line of the patch apart. Only the
// filter moves once a tap. Two rings: PATCHES stages of patches, STAGES of the filter. One load warp
// fills both, or one each. Clusters share the filter. Images that 8 x 8 blocks do not fill waste
// products; im2col wastes none.
//
// Macros: ELEMENT, RESULT, TILE_M, TILE_N, STAGES, PATCHES, MATH_GROUPS, LOAD_WARPS, SPATIAL, BACKWARD,
// CLUSTER, TAPS_H, TAPS_W, REACH_H, REACH_W, SUM, BIAS, RESIDUAL, ACTIVATION, CHANNEL_SUMS,
// STORE_BUFFERS, LAST_PARTS (quarters of a step that the last channels fill), RAGGED (a group's last
// channels end within a quarter: zeros fill it up, of images by a map with the groups in a dimension of
// their own; volumes have none to spare, and the next group's channels meet zeros of the filter).
#pragma once
#include "conv/cuda/filter.cuh"
#include "conv/cuda/schedule.cuh"
#include "conv/cuda/store.cuh"
#include "conv/cuda/walk.cuh"
#include "cuda/ring.cuh"

constexpr int side = 8;                            // of a block of pixels
constexpr int tile_k = 128 / (int)sizeof(ELEMENT);  // of a step
constexpr int instruction_k = 32 / (int)sizeof(ELEMENT);
constexpr int patch_h = side + (TAPS_H - 1) * REACH_H, patch_w = side + (TAPS_W - 1) * REACH_W;
constexpr int patch_copied = patch_h * patch_w * 128;
constexpr int patch_bytes = (patch_copied + 1023) / 1024 * 1024;  // swizzle patterns begin there
constexpr int tile_blocks = TILE_M / 64, group_blocks = tile_blocks / MATH_GROUPS;
using FilterTiles = FilterTile<TILE_N, tile_k, BACKWARD, CLUSTER, RAGGED>;
constexpr int patch_stage = tile_blocks * patch_bytes, filter_stage = FilterTiles::bytes;
constexpr int taps = TAPS_H * TAPS_W;
constexpr int unrolled_taps = taps <= 9 ? taps : 1;
using Budget = Registers<1, MATH_GROUPS, false>;
constexpr int math_threads = 128 * MATH_GROUPS;
constexpr int threads = math_threads + (Budget::are_moved ? 128 : 32 * LOAD_WARPS);
constexpr u32 group_barrier = 1;     // named, and those after it
static_assert(tile_blocks == group_blocks * MATH_GROUPS, "math groups take whole blocks");

using PatchRing = Ring<PATCHES>;
using FilterRing = Ring<STAGES, CLUSTER>;
using Tiles = Schedule<CLUSTER, true, SUM != SUM_DIRECT>;
using Room = Staging<STORE_BUFFERS>;  // for each math group

// The blocks of 8 x 8 pixels of all images.
struct Blocks {
  Walk walk;
  int images;
  DEVICE int lines() const { return (walk.size_h + side - 1) / side; }
  DEVICE int columns() const { return (walk.size_w + side - 1) / side; }
  DEVICE int count() const { return images * walk.size_d * lines() * columns(); }
  // The first pixel of a block; its image lies beyond the last one where there is no such block.
  DEVICE Pixel first(int block) const {
    const u32 line = (u32)block / (u32)columns(), plane = line / (u32)lines();
    const u32 image = walk.size_d > 1 ? plane / (u32)walk.size_d : plane;
    return {(int)image, (int)(plane - image * walk.size_d), (int)(line - plane * lines()) * side,
            (int)(block - line * columns()) * side};
  }
};

// Rows of a block of sums: the pixels of one block; see FlatRows.
struct BlockRows {
  const Blocks& blocks;
  const Places& places;
  Pixel first;
  DEVICE Pixel pixel(int row) const {
    return {first.n, first.d, first.h + row / side, first.w + row % side};
  }
  DEVICE bool has(int row) const {
    const Pixel at = pixel(row);
    return at.n < blocks.images && at.h < blocks.walk.size_h && at.w < blocks.walk.size_w;
  }
  DEVICE int index(int row) const { return blocks.walk.row(pixel(row)); }
  DEVICE i64 place(int row) const { return places.of(pixel(row)); }
  DEVICE void copy(const TensorMap* map, u32 from, int channel) const {
#if SPATIAL == 2
    tma_store(map, from, channel, first.w, first.h, first.n);
#else
    tma_store(map, from, channel, first.w, first.h, first.d, first.n);
#endif
  }
};

struct Loader {
  PatchRing patches;
  FilterRing filters;
  Tiles schedule;
  Blocks blocks;
  u32 patch_stages, filter_stages, rank;
  int in_channels, out_channels;
  const TensorMap *image_map, *filter_map;

  // One step of one tile; what the tile's patches need is worked out once.
  struct Turn {
    int index, step, last, group;
    Pixel corners[tile_blocks];
  };
  // Whether there is a tile `index`; its first step.
  DEVICE bool begin(Turn& turn, int index) const {
    if (index >= schedule.count()) return false;
    const Tiles::Work work = schedule.work(index, rank);
    turn.index = index;
    turn.step = work.first;
    turn.last = work.last;
    turn.group = work.group;
#pragma unroll
    for (int m = 0; m < tile_blocks; m++)
      turn.corners[m] = blocks.walk.corner(blocks.first(work.pixel_tile * tile_blocks + m));
    return true;
  }
  DEVICE bool advance(Turn& turn) const {
    if (++turn.step < turn.last) return true;
    return begin(turn, turn.index + gridDim.x / CLUSTER);
  }

  // A warp that brings both asks for the next step's patches as soon as their place is free, which is
  // when the math groups have begun this step: STAGES taps behind the filter's.
  DEVICE void run(u32 thread) const {
    if (thread % 32 != 0 || thread / 32 >= LOAD_WARPS) return;
    prefetch_map(image_map);
    prefetch_map(filter_map);
    const int first = blockIdx.x / CLUSTER;
    Cursor<PATCHES> patch;
    Turn turn;
    bool has_patches = begin(turn, first);
    if (LOAD_WARPS == 2 && thread == 0) {
      while (has_patches) has_patches = bring_patches(patch, turn);
      return;
    }
    constexpr int ahead = STAGES + 1 < taps ? STAGES + 1 : taps - 1;
    const Walk& walk = blocks.walk;
    const int channel_blocks = (in_channels + tile_k - 1) / tile_k;
    const FilterTiles filter = {filter_map, in_channels, out_channels, rank};
    Cursor<STAGES> at;
    if (LOAD_WARPS == 1 && has_patches) has_patches = bring_patches(patch, turn);
    for (int index = first; index < schedule.count(); index += gridDim.x / CLUSTER) {
      const Tiles::Work work = schedule.work(index, rank);
      for (int step = work.first; step < work.last; step++) {
        const int channel = step % channel_blocks * tile_k;
        Tap tap(walk, step / channel_blocks * taps);
        for (int i = 0; i < taps; i++, tap.next(walk), at.next()) {
          filters.wait_empty(at);
          filters.expect(at, filter_stage);
          filter.load(filter_stages + at.stage * filter_stage, filters.full(at), work.group,
                      work.channel_tile * TILE_N, tap.place(walk), channel);
          if (LOAD_WARPS == 1 && i == ahead && has_patches) has_patches = bring_patches(patch, turn);
        }
      }
    }
  }

  // A step's patches; whether there is another step, which `turn` is then.
  DEVICE bool bring_patches(Cursor<PATCHES>& at, Turn& turn) const {
    const int channel_blocks = (in_channels + tile_k - 1) / tile_k;
    const int within = turn.step % channel_blocks * tile_k;
    const int group = RAGGED && SPATIAL == 2 ? turn.group : turn.group * in_channels;
    patches.wait_empty(at);
    patches.expect(at, tile_blocks * patch_copied);
#pragma unroll
    for (int m = 0; m < tile_blocks; m++) {
      const Pixel corner = turn.corners[m];
      const u32 to = patch_stages + at.stage * patch_stage + m * patch_bytes;
#if SPATIAL == 2 && RAGGED
      tma_load(to, image_map, patches.full(at), within, group, corner.w, corner.h, corner.n);
#elif SPATIAL == 2
      tma_load(to, image_map, patches.full(at), group + within, corner.w, corner.h, corner.n);
#else
      const int deep = turn.step / channel_blocks * blocks.walk.reach_d;
      tma_load(to, image_map, patches.full(at), group + within, corner.w, corner.h, corner.d + deep,
               corner.n);
#endif
    }
    at.next();
    return advance(turn);
  }
};

struct Math {
  PatchRing patches;
  FilterRing filters;
  u32 patch_stages, filter_stages;
  u32 group, thread;
  Cursor<PATCHES> patch;
  Cursor<STAGES> at;

  // All steps of a tile into `sums`; one tap's products stay in flight. A step whose number is a
  // multiple of `blocks` less one has the last channels, which may be few.
  DEVICE void multiply(float (&sums)[group_blocks][TILE_N / 2], int first, int last, int blocks) {
    LateRelease<PATCHES> late_patch;
    LateRelease<STAGES, CLUSTER> late;
    for (int step = first; step < last; step++) {
      patches.wait_full(patch);
      if (LAST_PARTS < 4 && step % blocks == blocks - 1)
        multiply_step<LAST_PARTS>(sums, late, late_patch, step > first);
      else multiply_step<4>(sums, late, late_patch, step > first);
      patch.next();
    }
    wgmma_wait<0>();
    late.flush(filters, thread);
    late_patch.flush(patches, thread);
  }

  // All taps over one patch, of whose channels the first Parts quarters are multiplied.
  template <int Parts>
  DEVICE void multiply_step(float (&sums)[group_blocks][TILE_N / 2], LateRelease<STAGES, CLUSTER>& late,
                            LateRelease<PATCHES>& late_patch, int accumulate) {
    const u32 first = patch_stages + patch.stage * patch_stage + group * group_blocks * patch_bytes;
#pragma unroll unrolled_taps
    for (int tap = 0; tap < taps; tap++) {
      const int shift = (tap / TAPS_W * REACH_H * patch_w + tap % TAPS_W * REACH_W) * 128;
      filters.wait_full(at);
      multiply_tap<Parts>(sums, first + shift, filter_stages + at.stage * filter_stage,
                          accumulate || tap > 0);
      late.step(filters, at, thread);
      if (tap == 0) late_patch.step(patches, patch, thread);
      at.next();
    }
  }

  template <int Parts>
  DEVICE void multiply_tap(float (&sums)[group_blocks][TILE_N / 2], u32 pixels, u32 filter,
                           int accumulate) const {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Parts; k++) {
      const u64 b = BACKWARD ? wgmma_operand(filter + k * instruction_k * 128, tile_k * 128, 1024)
                             : wgmma_operand(filter + k * 32, 16, 1024);
#pragma unroll
      for (int m = 0; m < group_blocks; m++)
        wgmma<ELEMENT, TILE_N, true, !BACKWARD>(
            sums[m], wgmma_operand(pixels + m * patch_bytes + k * 32, 16, patch_w * 128), b,
            accumulate || k > 0);
    }
    wgmma_commit();
    wgmma_wait<1>();
  }
};

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(threads, 1)
halo(const __grid_constant__ TensorMap image_map, const __grid_constant__ TensorMap filter_map,
     RESULT_MAP RESULT* result, const RESULT* bias, const RESULT* residual, float* partial, int images,
     int in_channels, int out_channels, int groups, int splits, i64 result_first, i64 result_n,
     i64 result_d, i64 result_h, i64 result_w, WALK_PARAMETERS) {
  release_next_grid();
  const Walk walk = {WALK_ARGUMENTS};
  const Blocks blocks = {walk, images};
  const Tiles schedule = {(blocks.count() + tile_blocks - 1) / tile_blocks,
                          (out_channels + TILE_N - 1) / TILE_N, groups, splits,
                          walk.taps_d * ((in_channels + tile_k - 1) / tile_k)};
  const u32 patch_stages = shared_base(), filter_stages = patch_stages + PATCHES * patch_stage;
  const u32 staging = filter_stages + STAGES * filter_stage;
  const PatchRing patches = {staging + MATH_GROUPS * Room::bytes};
  const FilterRing filters = {patches.barriers + PatchRing::bytes};
  const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
  if (threadIdx.x == 0) {
    patches.init(1, MATH_GROUPS);
    filters.init(1, MATH_GROUPS);
    barrier_init_done();
  }
  if (CLUSTER > 1) cluster_sync();
  else __syncthreads();
  if (threadIdx.x >= math_threads) {
    Budget::for_load();
    const Loader loader = {patches,       filters, schedule,    blocks,       patch_stages,
                           filter_stages, rank,    in_channels, out_channels, &image_map,
                           &filter_map};
    loader.run(threadIdx.x - math_threads);
    __syncwarp();
  } else {
    Budget::for_math();
    const i64 unaligned = result_first | result_n | result_d | result_h | result_w | out_channels;
    const Output<RESULT> out = {result, RESULT_MAP_ADDRESS, bias, residual, partial,
                                {result_first, result_n, result_d, result_h, result_w},
                                images * walk.size_d * walk.size_h * walk.size_w, out_channels,
                                out_channels * groups, unaligned % 8 == 0};
    const u32 group = threadIdx.x / 128, thread = threadIdx.x % 128;
    Math math = {patches, filters, patch_stages, filter_stages, group, thread, {}, {}};
    Room room = {staging + group * Room::bytes, group_barrier + group};
    const int stride = gridDim.x / CLUSTER;
    for (int index = blockIdx.x / CLUSTER; index < schedule.count(); index += stride) {
      const Tiles::Work work = schedule.work(index, rank);
      float sums[group_blocks][TILE_N / 2];
      math.multiply(sums, work.first, work.last, (in_channels + tile_k - 1) / tile_k);
      const Columns columns = {work.channel_tile * TILE_N, out_channels, work.group * out_channels};
      const int part = work.pixel_tile * MATH_GROUPS + (int)group;
      const auto rows = [&](int m) {
        return BlockRows{blocks, out.places, blocks.first(part * group_blocks + m)};
      };
      store_tile<SUM, TILE_N, group_blocks, BIAS, RESIDUAL, ACTIVATION, CHANNEL_SUMS>(
          sums, out, rows, columns, work.split, part, room, thread);
    }
    room.drain(thread);
  }
  if (CLUSTER > 1) cluster_sync();  // no block leaves while its neighbour may still arrive on it
  wait_for_previous_grid();  // another part of the result: who waits for this one has both
}
