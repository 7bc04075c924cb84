// SPDX-License-Identifier: MIT
// Large products: both operands are packed into panels, a block of B stays in the outer caches, a
// block of A in the second level, a panel of B in the first, and a register tile runs over them.
#pragma once
#include "gemm.hpp"

namespace tw {

// The tiles of one block of C from a packed block of A and one of B.
template <class In, int kMr, int kNv, int kUnroll>
struct Tiles {
  using S = Slot<In>;
  using Acc = Accumulator<In>;
  static constexpr int kNr = kNv * kLanes;

  static TW_NOINLINE void whole(int64_t slots, const S* a, const S* b, Acc* c, int64_t row, bool adds) {
    // C is far away by the time it is needed, and too scattered for the hardware to foresee.
    constexpr int kLine = 64 / sizeof(Acc);
    TW_UNROLL
    for (int i = 0; i < kMr; ++i) {
      TW_UNROLL
      for (int j = 0; j < kNr; j += kLine) prefetch_write(c + i * row + j);
      prefetch_write(c + i * row + kNr - 1);
    }
    panel_tile<kMr, kNv, kUnroll, kMr, kNv, true>(slots, a, b, c, row, adds ? c : nullptr, row, kMr, kNr);
  }

  template <int kRows, int kVectors>
  static TW_NOINLINE void part(int64_t slots, const S* a, const S* b, Acc* c, int64_t row, bool adds, int64_t rows,
                               int64_t cols) {
    panel_tile<kRows, kVectors, 1, kMr, kNv, false>(slots, a, b, c, row, adds ? c : nullptr, row, rows, cols);
  }

  // Tiles at the border: the smallest of a few register tiles that covers what is left.
  template <int kVectors>
  static TW_INLINE void edge(int64_t slots, const S* a, const S* b, Acc* c, int64_t row, bool adds, int64_t rows,
                             int64_t cols) {
    constexpr int kMost = (3 * kMr + 3) / 4, kHalf = (kMr + 1) / 2, kFew = (kMr + 3) / 4;
    if (kVectors > 1 && cols <= (kVectors - 1) * kLanes)
      edge<(kVectors > 1 ? kVectors - 1 : 1)>(slots, a, b, c, row, adds, rows, cols);
    else if (rows > kMost)
      part<kMr, kVectors>(slots, a, b, c, row, adds, rows, cols);
    else if (rows > kHalf)
      part<kMost, kVectors>(slots, a, b, c, row, adds, rows, cols);
    else if (rows > kFew)
      part<kHalf, kVectors>(slots, a, b, c, row, adds, rows, cols);
    else
      part<kFew, kVectors>(slots, a, b, c, row, adds, rows, cols);
  }

  static TW_NOINLINE void run(int64_t m, int64_t n, int64_t slots, const S* a, const S* b, Acc* c, int64_t row,
                              bool adds) {
    for (int64_t j = 0; j < n; j += kNr) {
      const int64_t cols = min_of(kNr, n - j);
      for (int64_t i = 0; i < m; i += kMr) {
        const int64_t rows = min_of(kMr, m - i);
        const S* ap = a + i * slots;
        const S* bp = b + j * slots;
        Acc* cp = c + i * row + j;
        if (rows == kMr && cols == kNr)
          whole(slots, ap, bp, cp, row, adds);
        else
          edge<kNv>(slots, ap, bp, cp, row, adds, rows, cols);
      }
    }
  }
};

template <class Acc, class Out>
TW_NOINLINE void convert_block(const Acc* from, int64_t from_row, Out* to, int64_t to_row, int64_t m, int64_t n) {
  for (int64_t i = 0; i < m; ++i) {
    const Acc* p = from + i * from_row;
    Out* q = to + i * to_row;
    int64_t j = 0;
    for (; j + kLanes <= n; j += kLanes) store_out(q + j, load(p + j));
    if (j < n) store_out_n(q + j, load_n(p + j, n - j), n - j);
  }
}

template <class In, class Out, int kMr, int kNv, int kMc, int kKc, int kNc, int kUnroll, Split kSplit>
struct Packed {
  using S = Slot<In>;
  using Acc = Accumulator<In>;
  using Block = Tiles<In, kMr, kNv, kUnroll>;
  static constexpr int kNr = kNv * kLanes;
  static constexpr bool kInPlace = is_same<Acc, Out>::value;

  // Sizes of the cache blocks for a part of m x n.
  struct Blocks {
    int64_t mc, nc, kc, a_size, b_size, c_size;
    TW_INLINE Blocks(int64_t m, int64_t n, int64_t k, bool keeps_rows) {
      mc = balanced(m, kMc, kMr);
      nc = balanced(n, kNc, kNr);
      kc = balanced(k, kKc, 8);
      a_size = packed_size<In>(kMr, mc, kc);
      b_size = packed_size<In>(kNr, nc, kc);
      // Accumulators live outside C where it is narrower; with one block of k only a block of them.
      c_size = kInPlace ? 0 : nc * (k > kc || keeps_rows ? m : mc);
    }
  };

  // One part of the result, by one thread.
  static void part(const tw_gemm_args& g, const Matrices<In, Out>& of, int64_t m0, int64_t m, int64_t n0, int64_t n,
                   const Blocks& s, Arena arena) {
    S* a = arena.take<S>(s.a_size);
    S* b = arena.take<S>(s.b_size);
    Acc* held = arena.take<Acc>(s.c_size);
    for (int64_t jc = 0; jc < n; jc += s.nc) {
      const int64_t nc = min_of(s.nc, n - jc);
      for (int64_t pc = 0; pc < g.k; pc += s.kc) {
        const int64_t kc = min_of(s.kc, g.k - pc);
        pack(b, kNr, of.b + (n0 + jc) * g.b_col + pc * g.b_row, g.b_col, g.b_row, nc, kc);
        for (int64_t ic = 0; ic < m; ic += s.mc) {
          const int64_t mc = min_of(s.mc, m - ic);
          pack(a, kMr, of.a + (m0 + ic) * g.a_row + pc * g.a_col, g.a_row, g.a_col, mc, kc);
          Acc* block = held + (g.k > s.kc ? ic * s.nc : 0);
          finish(g, of.c + (m0 + ic) * g.c_row + n0 + jc, block, s.nc, mc, nc, pc, kc, a, b);
        }
      }
    }
  }

  // Multiplies one block, into C or by way of accumulators.
  static TW_INLINE void finish(const tw_gemm_args& g, Out* c, Acc* block, int64_t block_row, int64_t mc, int64_t nc,
                               int64_t pc, int64_t kc, const S* a, const S* b) {
    const int64_t slots = slots_of<In>(kc);
    if constexpr (kInPlace) {
      Block::run(mc, nc, slots, a, b, c, g.c_row, pc > 0);
    } else {
      Block::run(mc, nc, slots, a, b, block, block_row, pc > 0);
      if (pc + kc >= g.k) convert_block(block, block_row, c, g.c_row, mc, nc);
    }
  }

  // Threads work on parts of their own and pack what they need.
  struct Alone {
    Grid grid;
    Blocks blocks;
    int64_t slots, slot_bytes;
    TW_INLINE explicit Alone(const tw_gemm_args& g)
        : grid(grid_of(kSplit, max_of(1, threads_of(g.team) / max_of(1, min_of(g.batch, threads_of(g.team)))), g.m,
                       g.n, kMr, kNr)),
          blocks(min_of(g.m, grid.row_step), min_of(g.n, grid.col_step), g.k, false) {
      Arena sizes{nullptr};
      sizes.take<S>(blocks.a_size), sizes.take<S>(blocks.b_size), sizes.take<Acc>(blocks.c_size);
      slots = min_of(threads_of(g.team), g.batch * grid.count());
      slot_bytes = sizes.used;
    }
  };

  static void run_alone(const tw_gemm_args& g) {
    const Alone plan(g);
    parallel_units(g.team, g.batch * plan.grid.count(), [&](int64_t slot, int64_t unit) {
      const int64_t batch = unit / plan.grid.count(), at = unit % plan.grid.count();
      const int64_t m0 = at / plan.grid.cols * plan.grid.row_step, n0 = at % plan.grid.cols * plan.grid.col_step;
      part(g, {g, batch}, m0, min_of(plan.grid.row_step, g.m - m0), n0, min_of(plan.grid.col_step, g.n - n0),
           plan.blocks, {(char*)g.workspace + slot * plan.slot_bytes});
    });
  }

  // Threads pack one block of k together, then share its tiles.
  static void run_shared(const tw_gemm_args& g) {
    const Blocks s(g.m, g.n, g.k, true);
    Arena arena{(char*)g.workspace};
    S* a = arena.take<S>(packed_size<In>(kMr, g.m, s.kc));
    S* b = arena.take<S>(s.b_size);
    Acc* held = arena.take<Acc>(s.c_size);
    // Work comes in units of a few panels: enough for every thread, and to even out slow ones.
    const int64_t threads = threads_of(g.team), m_tiles = ceil_div(g.m, kMr);
    for (int64_t batch = 0; batch < g.batch; ++batch) {
      const Matrices<In, Out> of(g, batch);
      for (int64_t jc = 0; jc < g.n; jc += s.nc) {
        const int64_t nc = min_of(s.nc, g.n - jc), n_tiles = ceil_div(nc, kNr);
        const int64_t mu = min_of(s.mc, balanced(g.m, ceil_div(m_tiles, threads) * kMr, kMr));
        const int64_t m_units = ceil_div(g.m, mu);
        const int64_t nu = balanced(nc, ceil_div(n_tiles, max_of(1, 4 * threads / m_units)) * kNr, kNr);
        const int64_t n_units = ceil_div(nc, nu);
        for (int64_t pc = 0; pc < g.k; pc += s.kc) {
          const int64_t kc = min_of(s.kc, g.k - pc), slots = slots_of<In>(kc);
          parallel_for(g.team, m_units + n_units, [&](int64_t unit) {
            if (unit < n_units) {
              const int64_t j = unit * nu;
              pack(b + j * slots, kNr, of.b + (jc + j) * g.b_col + pc * g.b_row, g.b_col, g.b_row, min_of(nu, nc - j),
                   kc);
            } else {
              const int64_t i = (unit - n_units) * mu;
              pack(a + i * slots, kMr, of.a + i * g.a_row + pc * g.a_col, g.a_row, g.a_col, min_of(mu, g.m - i), kc);
            }
          });
          parallel_for(g.team, m_units * n_units, [&](int64_t unit) {
            const int64_t i = unit / n_units * mu, j = unit % n_units * nu;
            finish(g, of.c + i * g.c_row + jc + j, held + i * s.nc + j, s.nc, min_of(mu, g.m - i), min_of(nu, nc - j),
                   pc, kc, a + i * slots, b + j * slots);
          });
        }
      }
    }
  }

  static int64_t workspace(const tw_gemm_args& g) {
    if (g.batch <= 0 || g.m <= 0 || g.n <= 0 || g.k <= 0) return 0;
    if constexpr (kSplit == Split::kShared) {
      const Blocks s(g.m, g.n, g.k, true);
      Arena sizes{nullptr};
      sizes.take<S>(packed_size<In>(kMr, g.m, s.kc)), sizes.take<S>(s.b_size), sizes.take<Acc>(s.c_size);
      return sizes.used;
    } else {
      const Alone plan(g);
      return plan.slots * plan.slot_bytes;
    }
  }

  static int32_t run(const tw_gemm_args& g) {
    if (is_trivial<Out>(g)) return 0;
    if constexpr (kSplit == Split::kShared)
      run_shared(g);
    else
      run_alone(g);
    return 0;
  }
};

}  // namespace tw
