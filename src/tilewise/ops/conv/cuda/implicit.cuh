// Dense convolution as an implicit matrix product, forward and the gradient of the input.
//
// result[pixel][n] = sum over taps and channels of image[window of pixel at tap][c] * filter[n][tap][c]
//
// A tile is TILE_M pixels x TILE_N channels of one group; a step of the reduction is one row of 128
// bytes: 64 channels (32 of tf32) of one tap, or where the loader gathers, of all taps in a row. Few
// channels come as several taps in a step, one block of shorter rows behind the other.
// Load warps fill a ring of stages (pixels, then filter), math groups multiply:
//   cooperative  the groups divide the tile's rows
//   PINGPONG     two groups take turns, one tile each; one multiplies while the other stores
// Blocks walk over tiles (channels innermost, so that neighbours share pixels in the cache); with a
// grid of one block a tile each does one. CLUSTER 2: two blocks share the filter's tile (SHARE_FILTER,
// they own neighbouring pixels) or the pixels (they own neighbouring channels); each fetches half of
// what is shared, and sends it to both.
// The reduction may be cut into `splits`, see store.cuh.
//
// Backward (data), the filter [k][tap][c] is read across: its rows are the reduction, its columns n.
//
// Macros: ELEMENT, RESULT, TILE_M, TILE_N, STAGES, MATH_GROUPS, PINGPONG, LOADER, LOAD_WARPS, SPATIAL,
// BACKWARD, CLUSTER, SHARE_FILTER, SUM, BIAS, RESIDUAL, ACTIVATION, CHANNEL_SUMS, STORE_BUFFERS,
// LAST_PARTS (quarters of a step that a tap's last channels, or the last taps, fill), RAGGED (channels
// end within a quarter: the next group's, which fill it up, meet zeros of the filter), BLOCKS; gathering
// VECTOR besides, several taps a step TAP_CHANNELS (16 or 32).
#pragma once
#include "conv/cuda/schedule.cuh"
#include "conv/cuda/store.cuh"
#include "conv/cuda/walk.cuh"
#include "cuda/ring.cuh"

#define LOAD_IM2COL 0  // TMA walks the pixels: any padding, strides up to 8, channels in multiples of 8
#define LOAD_ROWS 1    // pixels are rows of a matrix: 1x1, stride 1, no padding
#define LOAD_GATHER 2  // load warps compute every address: anything
#define LOAD_TAPS 3    // as im2col, TAP_CHANNELS channels of each tap and several taps a step

constexpr int element_bytes = sizeof(ELEMENT);
constexpr int tile_k = 128 / element_bytes;        // of a stage
constexpr int instruction_k = 32 / element_bytes;  // of a wgmma
#if LOADER == LOAD_TAPS
constexpr int row_k = TAP_CHANNELS;                // of a row of pixels
#else
constexpr int row_k = tile_k;
#endif
constexpr u32 row_bytes = row_k * element_bytes;   // which is what the swizzle spans
// Read across, the filter comes in whole panels of 64 columns.
constexpr int pixel_bytes = TILE_M * 128;
constexpr int filter_bytes = (BACKWARD ? (TILE_N + 63) / 64 * 64 : TILE_N) * 128;
constexpr int stage_bytes = pixel_bytes + filter_bytes;
constexpr bool is_gathering = LOADER == LOAD_GATHER;
constexpr int load_groups = (LOAD_WARPS + 3) / 4;
using Budget = Registers<load_groups, MATH_GROUPS, is_gathering>;
constexpr int math_threads = 128 * MATH_GROUPS;
constexpr int threads = math_threads + (Budget::are_moved ? 128 * load_groups : 32 * LOAD_WARPS);
constexpr int tile_groups = PINGPONG ? 1 : MATH_GROUPS;  // that work on one tile
constexpr int row_blocks = TILE_M / 64 / tile_groups;    // of 64 pixels, for each of them
constexpr u32 group_barrier = 2;                         // named, and those after it
constexpr u32 turn_barrier = group_barrier + MATH_GROUPS;  // two of them
static_assert(TILE_M == row_blocks * 64 * tile_groups, "math groups take whole blocks of 64 pixels");
static_assert(!PINGPONG || MATH_GROUPS == 2, "two groups take turns");

using StageRing = Ring<STAGES, CLUSTER>;
using Place = Cursor<STAGES>;

using Tiles = Schedule<CLUSTER, SHARE_FILTER, SUM != SUM_DIRECT>;
using Room = Staging<STORE_BUFFERS>;  // for each math group

#if LOADER == LOAD_GATHER
#include "conv/cuda/load_gather.cuh"
#else
#include "conv/cuda/load_tma.cuh"
#endif

// The groups' turns at the ring under PINGPONG. A barrier's parity tells one round from the next and no
// more, so a group must not look at its stages before the other has seen all of its own full.
struct Turns {
  u32 group;
  DEVICE void start() const {
    if (PINGPONG && group == 1) named_arrive(turn_barrier, 256);  // the first turn is group 0's
  }
  DEVICE void wait() const {
    if (PINGPONG) named_sync(turn_barrier + group, 256);
  }
  DEVICE void pass(bool is_wanted) const {
    if (PINGPONG && is_wanted) named_arrive(turn_barrier + (group ^ 1), 256);
  }
};

// Rows along the reduction. The descriptor's mode of swizzling counts from 1, for 128 bytes.
DEVICE u64 rows_operand(u32 address) {
  constexpr u64 shorter = row_bytes == 128 ? 0 : row_bytes == 64 ? 1 : 2;
  return wgmma_operand(address, 16, 8 * row_bytes) + (shorter << 62);
}

// One step, of whose channels the first Parts quarters are multiplied.
template <int Parts>
DEVICE void multiply_step(float (&sums)[row_blocks][TILE_N / 2], u32 pixels, u32 filter,
                          int accumulate) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < Parts; k++) {
    const u32 tap = k * instruction_k / row_k, along = k * 32 % row_bytes;
    const u64 b = BACKWARD ? wgmma_operand(filter + k * instruction_k * 128, tile_k * 128, 1024)
                           : rows_operand(filter + tap * TILE_N * row_bytes + along);
#pragma unroll
    for (int m = 0; m < row_blocks; m++)
      wgmma<ELEMENT, TILE_N, true, !BACKWARD>(
          sums[m], rows_operand(pixels + (tap * TILE_M + m * 64) * row_bytes + along), b,
          accumulate || k > 0);
  }
  wgmma_commit();
}

// All steps of a tile into `sums`; one step's products stay in flight. A step whose number is a
// multiple of `blocks` less one has a tap's last channels, or the last taps, which may be few.
DEVICE void multiply(float (&sums)[row_blocks][TILE_N / 2], const StageRing& ring, Place& at,
                     u32 stages, const Tiles::Work& work, int blocks, int first_row,
                     const Turns& turns, bool has_next, u32 thread) {
  LateRelease<STAGES, CLUSTER> late;
  for (int step = work.first; step < work.last; step++) {
    ring.wait_full(at);
    if constexpr (is_gathering) fence_async();  // what threads copied is read by the matrix units
    const u32 pixels = stages + at.stage * stage_bytes + first_row * row_bytes;
    const u32 filter = stages + at.stage * stage_bytes + pixel_bytes;
    if (LAST_PARTS < 4 && step % blocks == blocks - 1)
      multiply_step<LAST_PARTS>(sums, pixels, filter, step > work.first);
    else multiply_step<4>(sums, pixels, filter, step > work.first);
    wgmma_wait<1>();
    late.step(ring, at, thread);
    at.next();
  }
  turns.pass(has_next);  // while the last products are under way
  wgmma_wait<0>();
  late.flush(ring, thread);
}

DEVICE void store(float (&sums)[row_blocks][TILE_N / 2], const Tiles::Work& work, const Walk& walk,
                  const Output<RESULT>& out, u32 group, Room& room, u32 thread) {
  const Columns columns = {work.channel_tile * TILE_N, out.channels, work.group * out.channels};
  const u32 part = PINGPONG ? 0 : group;  // of the tile's rows
  const auto rows = [&](int m) {
    const int first = work.pixel_tile * TILE_M + ((int)part * row_blocks + m) * 64;
    return FlatRows{walk, out.places, out.places.are_flat(walk), first, out.pixels};
  };
  store_tile<SUM, TILE_N, row_blocks, BIAS, RESIDUAL, ACTIVATION, CHANNEL_SUMS>(
      sums, out, rows, columns, work.split, work.pixel_tile * tile_groups + (int)part, room, thread);
}

DEVICE void math(const StageRing& ring, const Tiles& schedule, const Walk& walk,
                 const Output<RESULT>& out, u32 stages, u32 staging, u32 rank, int blocks) {
  const u32 group = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int first_row = PINGPONG ? 0 : (int)group * row_blocks * 64;
  const int count = schedule.count(), stride = gridDim.x / CLUSTER;
  Room room = {staging + group * Room::bytes, group_barrier + group};
  const Turns turns = {group};
  turns.start();
  Place at;
  bool is_mine = !PINGPONG || group == 0;
  for (int index = blockIdx.x / CLUSTER; index < count; index += stride) {
    const Tiles::Work work = schedule.work(index, rank);
    if (is_mine) {
      float sums[row_blocks][TILE_N / 2];
      turns.wait();
      multiply(sums, ring, at, stages, work, blocks, first_row, turns, index + stride < count,
               thread);
      store(sums, work, walk, out, group, room, thread);
    } else {
      at.skip(work.last - work.first);
    }
    if (PINGPONG) is_mine = !is_mine;
  }
  room.drain(thread);
}

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(threads, BLOCKS)
implicit(SOURCE_PARAMETERS, RESULT_MAP RESULT* result, const RESULT* bias, const RESULT* residual,
         float* partial, int pixels, int in_channels, int out_channels, int groups, int splits,
         i64 result_first, i64 result_n, i64 result_d, i64 result_h, i64 result_w,
         WALK_PARAMETERS) {
  release_next_grid();
  const Walk walk = {WALK_ARGUMENTS};
  const int steps = reduction_steps(walk, in_channels);
  const Tiles schedule = {(pixels + TILE_M - 1) / TILE_M, (out_channels + TILE_N - 1) / TILE_N,
                          groups, splits, steps};
  const u32 stages = shared_base(), staging = stages + STAGES * stage_bytes;
  const StageRing ring = {staging + MATH_GROUPS * Room::bytes};
  const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
  if (threadIdx.x == 0) {
    ring.init(loads_of_a_stage, tile_groups);
    barrier_init_done();
  }
  if (CLUSTER > 1) cluster_sync();
  else __syncthreads();
  if (threadIdx.x >= math_threads) {
    Budget::for_load();
    const Loader loader = {ring, schedule, walk, stages, rank, pixels, in_channels, out_channels,
                           SOURCE_ARGUMENTS};
    loader.run(threadIdx.x - math_threads);
    __syncwarp();
  } else {
    Budget::for_math();
    const i64 unaligned = result_first | result_n | result_d | result_h | result_w | out_channels;
    const Output<RESULT> out = {result, RESULT_MAP_ADDRESS, bias, residual, partial,
                        {result_first, result_n, result_d, result_h, result_w},
                        pixels, out_channels, out_channels * groups, unaligned % 8 == 0};
    const int blocks = LOADER == LOAD_TAPS ? steps : (in_channels + tile_k - 1) / tile_k;
    math(ring, schedule, walk, out, stages, staging, rank, blocks);
  }
  if (CLUSTER > 1) cluster_sync();  // no block leaves while its neighbour may still arrive on it
  wait_for_previous_grid();  // another part of the result: who waits for this one has both
}
