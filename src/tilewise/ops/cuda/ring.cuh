// The one contract between load warps and math groups: a ring of stages in shared memory, each with
// a `full` and an `empty` barrier.
//
//   loader                                   math group
//     ring.wait_empty(at)                      ring.wait_full(at)
//     ring.expect(at, bytes)                   ... multiply from stage at.stage ...
//     tma_load(..., ring.full(at), ...)        ring.release(...)   the stage before, one step late
//     at.next()                                at.next()
//
// Loaders that copy by themselves (copy_or_zero, ordinary stores) do not expect bytes: each of their
// threads arrives on ring.full(at), by barrier_arrive_after_copies or after fence_async.
//
// A stage is handed back one step late, when the next step's products are on their way: one group
// of wgmma stays in flight, and nobody waits for an empty matrix unit. `LateRelease` does that.
//
// In a cluster whose blocks send parts of a stage to each other, a math group hands a stage back to
// every block that writes it. Barriers never name the cluster's scope (see barrier_arrive_at), and
// no block may leave before all have arrived: end such kernels with cluster_sync.
#pragma once
#include "cuda/ptx.cuh"

// A place in a ring: which stage, and the parity of the round over all stages.
template <int STAGES>
struct Cursor {
  u32 stage = 0, round = 0;
  DEVICE void next() {
    if (++stage == STAGES) {
      stage = 0;
      round ^= 1;
    }
  }
  DEVICE void skip(u32 steps) {
    const u32 sum = stage + steps;
    round ^= sum / STAGES & 1;
    stage = sum % STAGES;
  }
};

// STAGES pairs of barriers at `barriers`; BLOCKS of a cluster write each stage together.
template <int STAGES, int BLOCKS = 1>
struct Ring {
  static constexpr u32 bytes = 16 * STAGES;
  u32 barriers;

  // By one thread. `loads` arrivals fill a stage (1 where TMA does), `groups` math groups empty it.
  DEVICE void init(u32 loads, u32 groups) const {
    for (u32 stage = 0; stage < STAGES; stage++) {
      barrier_init(barriers + 8 * stage, loads);
      barrier_init(barriers + 8 * (STAGES + stage), groups * BLOCKS);
    }
  }
  DEVICE u32 full(u32 stage) const { return barriers + 8 * stage; }
  DEVICE u32 full(const Cursor<STAGES>& at) const { return full(at.stage); }
  DEVICE u32 empty(u32 stage) const { return barriers + 8 * (STAGES + stage); }

  DEVICE void wait_empty(const Cursor<STAGES>& at) const {
    barrier_wait(empty(at.stage), at.round ^ 1);
  }
  DEVICE void expect(const Cursor<STAGES>& at, u32 bytes) const { barrier_expect(full(at), bytes); }
  DEVICE void wait_full(const Cursor<STAGES>& at) const { barrier_wait(full(at), at.round); }

  // By the threads of one math group (`thread` counts within it).
  DEVICE void release(u32 stage, u32 thread) const {
    if constexpr (BLOCKS == 1) {
      if (thread == 0) barrier_arrive(empty(stage));
    } else {
      if (thread < BLOCKS) barrier_arrive_at(empty(stage), thread);
    }
  }
};

// Hands back the stage before the one just begun; `flush` the last one, when its products are done.
template <int STAGES, int BLOCKS = 1>
struct LateRelease {
  u32 stage = STAGES;  // none yet
  DEVICE void step(const Ring<STAGES, BLOCKS>& ring, const Cursor<STAGES>& begun, u32 thread) {
    flush(ring, thread);
    stage = begun.stage;
  }
  DEVICE void flush(const Ring<STAGES, BLOCKS>& ring, u32 thread) {
    if (stage != STAGES) ring.release(stage, thread);
    stage = STAGES;
  }
};

// Registers of a thread in load and math groups of 128 threads, within 65536 for the whole block.
// A load group that only starts TMA copies needs few; one that computes addresses needs more.
template <int LOAD_GROUPS, int MATH_GROUPS, bool IS_GATHERING>
struct Registers {
  static constexpr int at_launch = 65536 / (128 * (LOAD_GROUPS + MATH_GROUPS)) / 8 * 8;
  static constexpr int load = IS_GATHERING ? (MATH_GROUPS > 2 ? 56 : 88) : (MATH_GROUPS > 2 ? 32 : 40);
  static constexpr int left = 65536 / 128 - load * LOAD_GROUPS;
  static constexpr int math = left / MATH_GROUPS / 8 * 8 > 240 ? 240 : left / MATH_GROUPS / 8 * 8;
  // With 256 threads or fewer every thread may have 255 registers anyway.
  static constexpr bool are_moved = LOAD_GROUPS + MATH_GROUPS > 2;

  static DEVICE void for_load() {
    if constexpr (are_moved) lower_registers<load>();
  }
  static DEVICE void for_math() {
    if constexpr (are_moved) raise_registers<math>();
  }
};
