// SPDX-License-Identifier: MIT
// A matrix times a vector: nothing is reused but the vector, so all that counts is how many streams
// of the matrix are open at once and that no arithmetic stands between two loads.
#pragma once
#include "thin.hpp"

namespace tw {

// k contiguous: kL rows of the matrix at once, a dot product each.
template <class In, class Out, int kL, int kAhead>
struct GemvDot {
  using S = Slot<In>;
  using Acc = Accumulator<In>;

  static TW_INLINE int64_t row_slots(int64_t k) { return round_up(slots_of<In>(k), kLanes); }
  static int64_t workspace(const tw_gemm_args& g) { return g.batch * row_slots(g.k) * (int64_t)sizeof(S); }

  static int32_t run(const tw_gemm_args& g) {
    if (is_trivial<Out>(g)) return 0;
    if (short_side(g) != 1 || Thin<In, Out>(g, 0).big_k != 1) return 1;
    const int64_t row = row_slots(g.k), l = long_side(g);
    S* vectors = (S*)g.workspace;
    for (int64_t b = 0; b < g.batch; ++b) {
      const Thin<In, Out> t(g, b);
      widen_rows(vectors + b * row, row, t.small, t.s_stride, t.small_k, 1, t.k);
    }
    const int64_t step = balanced(l, ceil_div(l, 4 * threads_of(g.team)), kL), units = ceil_div(l, step);
    parallel_for(g.team, g.batch * units, [&](int64_t unit) {
      const int64_t b = unit / units, first = unit % units * step;
      const Thin<In, Out> t(g, b);
      for (int64_t l0 = first; l0 < min_of(l, first + step); l0 += kL) {
        Acc sums[kL];
        const int64_t exist = min_of(kL, l - l0);
        dot_tile<1, kL, kAhead>(vectors + b * row, row, t.big + l0 * t.l_stride, t.l_stride, exist, t.k, sums);
        for (int64_t j = 0; j < exist; ++j) t.out[(l0 + j) * t.out_l] = from_accumulator<Out>(sums[j]);
      }
    });
    return 0;
  }
};

// The long side contiguous: kK rows of the matrix at once are scaled and added to the result, which
// stays in the first cache because threads and blocks keep it short.
template <class In, class Out, int kK, int kBlock>
struct GemvAxpy {
  using S = Slot<In>;
  using Acc = Accumulator<In>;
  using Op = Operand<In>;

  static int64_t workspace(const tw_gemm_args& g) {
    if (g.k <= 0) return 0;
    Arena sizes{nullptr};
    sizes.take<S>(g.batch * round_up(slots_of<In>(g.k), kK)), sizes.take<Acc>(threads_of(g.team) * kBlock);
    return sizes.used;
  }

  template <bool kTail>
  static TW_INLINE void vector(const In* big, int64_t k_stride, const S* x, int64_t slots, int64_t k, Acc* y,
                               int64_t lanes) {
    Vec<Acc> sum = load(y);
    TW_UNROLL
    for (int i = 0; i < kK; ++i) {
      if (kTail && i >= slots) break;
      const In* p = big + i * Op::kStep * k_stride;
      const int64_t steps = kTail ? k - i * Op::kStep : Op::kStep;
      const auto v = lanes == kLanes ? Op::along_x(p, k_stride, steps) : Op::along_x_n(p, k_stride, steps, lanes);
      sum = mac(splat(x[i]), v, sum);
    }
    store(y, sum);
  }

  template <bool kTail>
  static TW_NOINLINE void rows(const In* big, int64_t k_stride, const S* x, int64_t slots, int64_t k, Acc* y,
                               int64_t width) {
    int64_t l = 0;
    TW_NO_UNROLL
    for (; l + kLanes <= width; l += kLanes) vector<kTail>(big + l, k_stride, x, slots, k, y + l, kLanes);
    if (l < width) vector<kTail>(big + l, k_stride, x, slots, k, y + l, width - l);
  }

  static int32_t run(const tw_gemm_args& g) {
    static_assert(kBlock % kLanes == 0, "a block is whole vectors");
    if (is_trivial<Out>(g)) return 0;
    if (short_side(g) != 1 || Thin<In, Out>(g, 0).l_stride != 1) return 1;
    const int64_t slots = slots_of<In>(g.k), l = long_side(g), row = round_up(slots, kK);
    Arena arena{(char*)g.workspace};
    S* vectors = arena.take<S>(g.batch * row);
    Acc* sums = arena.take<Acc>(threads_of(g.team) * kBlock);
    for (int64_t b = 0; b < g.batch; ++b) {
      const Thin<In, Out> t(g, b);
      widen_rows(vectors + b * row, row, t.small, t.s_stride, t.small_k, 1, t.k);
    }
    const int64_t step = min_of(kBlock, balanced(l, ceil_div(l, threads_of(g.team)), kLanes));
    const int64_t units = ceil_div(l, step);
    parallel_units(g.team, g.batch * units, [&](int64_t slot, int64_t unit) {
      const int64_t b = unit / units, first = unit % units * step, width = min_of(step, l - first);
      const Thin<In, Out> t(g, b);
      Acc* y = sums + slot * kBlock;
      std::memset(y, 0, round_up(width, kLanes) * sizeof(Acc));
      const S* x = vectors + b * row;
      int64_t s = 0;
      for (; (s + kK) * Op::kStep <= t.k; s += kK)
        rows<false>(t.big + s * Op::kStep * t.big_k + first, t.big_k, x + s, kK, t.k, y, width);
      if (s < slots)
        rows<true>(t.big + s * Op::kStep * t.big_k + first, t.big_k, x + s, slots - s, t.k - s * Op::kStep, y, width);
      for (int64_t j = 0; j < width; ++j) t.out[(first + j) * t.out_l] = from_accumulator<Out>(y[j]);
    });
    return 0;
  }
};

}  // namespace tw
