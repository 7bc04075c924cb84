// SPDX-License-Identifier: MIT
// Products whose short side has at most a few register tiles: the short operand is packed once,
// the long one is streamed and widened on the fly.
#pragma once
#include "thin.hpp"

namespace tw {

// The long operand lies with k contiguous: dot products of kS x kL at a time.
template <class In, class Out, int kS, int kL, int kAhead>
struct SkinnyDot {
  using S = Slot<In>;
  using Acc = Accumulator<In>;

  static TW_INLINE int64_t row_slots(int64_t k) { return round_up(slots_of<In>(k), kLanes); }
  static TW_INLINE int64_t small_size(const tw_gemm_args& g) { return round_up(short_side(g), kS) * row_slots(g.k); }
  static int64_t workspace(const tw_gemm_args& g) { return g.batch * small_size(g) * (int64_t)sizeof(S); }

  static TW_NOINLINE void tile(const S* small, int64_t row, const Thin<In, Out>& t, int64_t s0, int64_t l0,
                               int64_t exist) {
    Acc sums[kS * kL];
    dot_tile<kS, kL, kAhead>(small + s0 * row, row, t.big + l0 * t.l_stride, t.l_stride, exist, t.k, sums);
    for (int64_t i = 0; i < min_of(kS, t.s - s0); ++i)
      for (int64_t j = 0; j < exist; ++j)
        t.out[(s0 + i) * t.out_s + (l0 + j) * t.out_l] = from_accumulator<Out>(sums[i * kL + j]);
  }

  static int32_t run(const tw_gemm_args& g) {
    if (is_trivial<Out>(g)) return 0;
    if (Thin<In, Out>(g, 0).big_k != 1) return 1;
    S* smalls = (S*)g.workspace;
    const int64_t row = row_slots(g.k);
    for (int64_t b = 0; b < g.batch; ++b) {
      const Thin<In, Out> t(g, b);
      S* small = smalls + b * small_size(g);
      widen_rows(small, row, t.small, t.s_stride, t.small_k, t.s, t.k);
      std::memset(small + t.s * row, 0, (round_up(t.s, kS) - t.s) * row * sizeof(S));
    }
    const int64_t step = balanced(long_side(g), ceil_div(long_side(g), 4 * threads_of(g.team)), kL);
    const int64_t units = ceil_div(long_side(g), step);
    parallel_for(g.team, g.batch * units, [&](int64_t unit) {
      const int64_t b = unit / units, first = unit % units * step;
      const Thin<In, Out> t(g, b);
      for (int64_t l0 = first; l0 < min_of(t.l, first + step); l0 += kL)
        for (int64_t s0 = 0; s0 < t.s; s0 += kS)
          tile(smalls + b * small_size(g), row, t, s0, l0, min_of(kL, t.l - l0));
    });
    return 0;
  }
};

// The long operand in place, its long side contiguous; only `last` lanes of the last vector exist.
template <class In, int kVectors, bool kWhole>
struct StreamB {
  using Op = Operand<In>;
  const In* p;
  int64_t k_stride, left, last;
  TW_INLINE auto load(int j) const {
    if (kWhole || j + 1 < kVectors) return Op::along_x(p + j * kLanes, k_stride, left);
    return Op::along_x_n(p + j * kLanes, k_stride, left, last);
  }
  TW_INLINE void next() {
    p += Op::kStep * k_stride;
    left -= Op::kStep;
  }
};

// The long operand lies with its long side contiguous: strips of kLv vectors, kKc steps of k at a
// time, so that few rows of it are open at once and each is read far enough to be prefetched.
template <class In, class Out, int kS, int kLv, int kKc, int kUnroll>
struct SkinnyStrip {
  using S = Slot<In>;
  using Acc = Accumulator<In>;
  static constexpr int kWide = kLv * kLanes;

  static TW_INLINE int64_t small_size(const tw_gemm_args& g) { return packed_size<In>(kS, short_side(g), g.k); }
  // Accumulators as [s][l]; C may be narrower, or lie the other way round.
  static TW_INLINE int64_t held_size(const tw_gemm_args& g) { return round_up(long_side(g), kLanes) * short_side(g); }
  static int64_t workspace(const tw_gemm_args& g) {
    if (g.batch <= 0 || g.m <= 0 || g.n <= 0 || g.k <= 0) return 0;
    Arena sizes{nullptr};
    sizes.take<S>(g.batch * small_size(g)), sizes.take<Acc>(g.batch * held_size(g));
    return sizes.used;
  }

  template <int kVectors, bool kWhole>
  static TW_NOINLINE void tile(const S* small, const Thin<In, Out>& t, int64_t l0, int64_t k0, int64_t k1, Acc* held,
                               int64_t row, int64_t rows, int64_t cols) {
    Vec<Acc> acc[kS][kVectors];
    zero_tile(acc);
    const StreamB<In, kVectors, kWhole> b{t.big + k0 * t.big_k + l0, t.big_k, t.k - k0,
                                          cols - (kVectors - 1) * kLanes};
    multiply<kS, kVectors, kWhole ? kUnroll : 1>(slots_of<In>(k1 - k0), PanelA<S, kS>{small}, b, acc);
    if (k0 > 0) add_tile<false>(acc, held, row, rows, cols);
    store_tile<false>(acc, held, row, rows, cols);
  }

  template <int kVectors>
  static TW_INLINE void edge(const S* small, const Thin<In, Out>& t, int64_t l0, int64_t k0, int64_t k1, Acc* held,
                             int64_t row, int64_t rows, int64_t cols) {
    if (kVectors > 1 && cols <= (kVectors - 1) * kLanes)
      edge<(kVectors > 1 ? kVectors - 1 : 1)>(small, t, l0, k0, k1, held, row, rows, cols);
    else
      tile<kVectors, false>(small, t, l0, k0, k1, held, row, rows, cols);
  }

  static void strip(const Thin<In, Out>& t, const S* small, Acc* held, int64_t row, int64_t first, int64_t end) {
    for (int64_t k0 = 0; k0 < t.k; k0 += kKc) {
      const int64_t k1 = min_of(t.k, k0 + kKc);
      for (int64_t l0 = first; l0 < end; l0 += kWide) {
        const int64_t cols = min_of(kWide, end - l0);
        for (int64_t s0 = 0; s0 < t.s; s0 += kS) {
          const S* panel = small + (s0 * slots_of<In>(t.k) + k0 / Operand<In>::kStep * kS);
          Acc* acc = held + s0 * row + l0;
          const int64_t rows = min_of(kS, t.s - s0);
          if (cols == kWide)
            tile<kLv, true>(panel, t, l0, k0, k1, acc, row, rows, cols);
          else
            edge<kLv>(panel, t, l0, k0, k1, acc, row, rows, cols);
        }
      }
    }
  }

  static int32_t run(const tw_gemm_args& g) {
    static_assert(kKc % Operand<In>::kStep == 0, "blocks of k hold whole slots");
    if (is_trivial<Out>(g)) return 0;
    if (Thin<In, Out>(g, 0).l_stride != 1) return 1;
    Arena arena{(char*)g.workspace};
    S* smalls = arena.take<S>(g.batch * small_size(g));
    Acc* helds = arena.take<Acc>(g.batch * held_size(g));
    for (int64_t b = 0; b < g.batch; ++b) {
      const Thin<In, Out> t(g, b);
      pack(smalls + b * small_size(g), kS, t.small, t.s_stride, t.small_k, t.s, t.k);
    }
    const int64_t step = balanced(long_side(g), ceil_div(long_side(g), threads_of(g.team)), kWide);
    const int64_t units = ceil_div(long_side(g), step);
    parallel_for(g.team, g.batch * units, [&](int64_t unit) {
      const int64_t b = unit / units, first = unit % units * step;
      const Thin<In, Out> t(g, b);
      const int64_t end = min_of(t.l, first + step);
      const S* small = smalls + b * small_size(g);
      if constexpr (is_same<Acc, Out>::value) {
        if (t.out_l == 1) return strip(t, small, t.out, t.out_s, first, end);
      }
      const int64_t row = round_up(t.l, kLanes);
      Acc* held = helds + b * held_size(g);
      strip(t, small, held, row, first, end);
      for (int64_t l = first; l < end; ++l)
        for (int64_t s = 0; s < t.s; ++s)
          t.out[s * t.out_s + l * t.out_l] = from_accumulator<Out>(held[s * row + l]);
    });
    return 0;
  }
};

}  // namespace tw
