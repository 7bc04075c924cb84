// SPDX-License-Identifier: MIT
// Small results of a long reduction: the reduction is cut into slices that threads compute side by
// side, and their partial results are added in a fixed order, so equal inputs give equal bits.
#pragma once
#include "packed.hpp"

namespace tw {

template <class In, class Out, int kMr, int kNv, int kMc, int kKc, int kNc, int kUnroll, int kSlices>
struct SplitK {
  using Acc = Accumulator<In>;
  using Slice = Packed<In, Acc, kMr, kNv, kMc, kKc, kNc, kUnroll, Split::kM>;

  struct Plan {
    int64_t step, slices, partial, slots, slot_bytes;
    typename Slice::Blocks blocks;
    TW_INLINE explicit Plan(const tw_gemm_args& g) : blocks(g.m, g.n, min_of(g.k, ceil_div(g.k, kSlices) + 1), false) {
      // Slices start at even steps, which keeps pairs of int8 together.
      step = round_up(ceil_div(g.k, kSlices), 2);
      slices = ceil_div(g.k, step);
      partial = round_up(g.m * g.n, 16);
      Arena sizes{nullptr};
      sizes.template take<Slot<In>>(blocks.a_size), sizes.template take<Slot<In>>(blocks.b_size);
      slots = min_of(threads_of(g.team), g.batch * slices);
      slot_bytes = sizes.used;
    }
  };

  static int64_t workspace(const tw_gemm_args& g) {
    if (g.batch <= 0 || g.m <= 0 || g.n <= 0 || g.k <= 0) return 0;
    const Plan plan(g);
    return plan.slots * plan.slot_bytes + g.batch * plan.slices * plan.partial * (int64_t)sizeof(Acc);
  }

  static void add_slices(const Acc* from, int64_t slices, int64_t stride, Out* to, int64_t n) {
    for (int64_t j = 0; j < n; j += kLanes) {
      const int64_t left = min_of(kLanes, n - j);
      Vec<Acc> sum = load_n(from + j, left);
      for (int64_t s = 1; s < slices; ++s) sum += load_n(from + s * stride + j, left);
      store_out_n(to + j, sum, left);
    }
  }

  static int32_t run(const tw_gemm_args& g) {
    if (is_trivial<Out>(g)) return 0;
    const Plan plan(g);
    Acc* partial = (Acc*)((char*)g.workspace + plan.slots * plan.slot_bytes);
    parallel_units(g.team, g.batch * plan.slices, [&](int64_t slot, int64_t unit) {
      const int64_t batch = unit / plan.slices, k0 = unit % plan.slices * plan.step;
      const Matrices<In, Out> whole(g, batch);
      tw_gemm_args slice = g;
      slice.a = whole.a + k0 * g.a_col;
      slice.b = whole.b + k0 * g.b_row;
      slice.c = partial + unit * plan.partial;
      slice.c_row = g.n;
      slice.k = min_of(plan.step, g.k - k0);
      Slice::part(slice, {slice, 0}, 0, g.m, 0, g.n, plan.blocks, {(char*)g.workspace + slot * plan.slot_bytes});
    });
    // A few rows at a time: enough work to be worth a thread.
    const int64_t rows = max_of(1, ceil_div(g.m, 4 * threads_of(g.team))), groups = ceil_div(g.m, rows);
    parallel_for(g.team, g.batch * groups, [&](int64_t unit) {
      const int64_t batch = unit / groups, i0 = unit % groups * rows;
      const Matrices<In, Out> whole(g, batch);
      const Acc* from = partial + batch * plan.slices * plan.partial;
      for (int64_t i = i0; i < min_of(g.m, i0 + rows); ++i)
        add_slices(from + i * g.n, plan.slices, plan.partial, whole.c + i * g.c_row, g.n);
    });
    return 0;
  }
};

}  // namespace tw
