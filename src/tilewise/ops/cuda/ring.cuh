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
//
// Template parameters are in CamelCase: kernels define their constants as macros in capitals.
#pragma once
#include "cuda/ptx.cuh"

// A place in a ring: which stage, and the parity of the round over all stages.
template <int Stages>
struct Cursor {
  u32 stage = 0, round = 0;
  DEVICE void next() {
    if (++stage == Stages) {
      stage = 0;
      round ^= 1;
    }
  }
  DEVICE void skip(u32 steps) {
    const u32 sum = stage + steps;
    round ^= sum / Stages & 1;
    stage = sum % Stages;
  }
};

// Stages pairs of barriers at `barriers`; Blocks of a cluster write each stage together.
template <int Stages, int Blocks = 1>
struct Ring {
  static constexpr u32 bytes = 16 * Stages;
  u32 barriers;

  // By one thread. `loads` arrivals fill a stage (1 where TMA does), `groups` math groups empty it.
  DEVICE void init(u32 loads, u32 groups) const {
    for (u32 stage = 0; stage < Stages; stage++) {
      barrier_init(barriers + 8 * stage, loads);
      barrier_init(barriers + 8 * (Stages + stage), groups * Blocks);
    }
  }
  DEVICE u32 full(u32 stage) const { return barriers + 8 * stage; }
  DEVICE u32 full(const Cursor<Stages>& at) const { return full(at.stage); }
  DEVICE u32 empty(u32 stage) const { return barriers + 8 * (Stages + stage); }

  DEVICE void wait_empty(const Cursor<Stages>& at) const {
    barrier_wait(empty(at.stage), at.round ^ 1);
  }
  DEVICE void expect(const Cursor<Stages>& at, u32 bytes) const { barrier_expect(full(at), bytes); }
  DEVICE void wait_full(const Cursor<Stages>& at) const { barrier_wait(full(at), at.round); }

  // By the threads of one math group (`thread` counts within it).
  DEVICE void release(u32 stage, u32 thread) const {
    if constexpr (Blocks == 1) {
      if (thread == 0) barrier_arrive(empty(stage));
    } else {
      if (thread < Blocks) barrier_arrive_at(empty(stage), thread);
    }
  }
};

// Hands back the stage before the one just begun; `flush` the last one, when its products are done.
template <int Stages, int Blocks = 1>
struct LateRelease {
  u32 stage = Stages;  // none yet
  DEVICE void step(const Ring<Stages, Blocks>& ring, const Cursor<Stages>& begun, u32 thread) {
    flush(ring, thread);
    stage = begun.stage;
  }
  DEVICE void flush(const Ring<Stages, Blocks>& ring, u32 thread) {
    if (stage != Stages) ring.release(stage, thread);
    stage = Stages;
  }
};

// Registers of a thread in load and math groups of 128 threads: what the load groups give up of those
// that the block is launched with, the math groups take.
// A load group that only starts TMA copies needs few; one that computes addresses needs more.
template <int LoadGroups, int MathGroups, bool IsGathering>
struct Registers {
  static constexpr int at_launch = 65536 / (128 * (LoadGroups + MathGroups)) / 8 * 8;
  static constexpr int load = IsGathering && MathGroups < 3 ? 88 : 56;
  static constexpr int left = at_launch * (LoadGroups + MathGroups) - load * LoadGroups;
  static constexpr int math = left / MathGroups / 8 * 8 > 240 ? 240 : left / MathGroups / 8 * 8;
  // With 256 threads or fewer every thread may have 255 registers anyway.
  static constexpr bool are_moved = LoadGroups + MathGroups > 2;
  static_assert(!are_moved || (load <= at_launch && at_launch <= math), "loaders give registers up");

  static DEVICE void for_load() {
    if constexpr (are_moved) lower_registers<load>();
  }
  static DEVICE void for_math() {
    if constexpr (are_moved) raise_registers<math>();
  }
};
