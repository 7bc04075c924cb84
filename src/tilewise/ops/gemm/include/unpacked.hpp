// SPDX-License-Identifier: MIT
// Small fp32 products: A is read where it lies, B too or copied one panel at a time. Packing a
// matrix costs as much as reading it, which only pays when every element is used many times.
#pragma once
#include "gemm.hpp"

namespace tw {

// Rows of A in place; rows that do not exist repeat the last one, so every address is valid.
template <int kRows>
struct ClampedA {
  const float* p;
  int64_t offset[kRows], col;
  TW_INLINE ClampedA(const float* first, int64_t row, int64_t col_, int64_t rows) : p(first), col(col_) {
    TW_UNROLL
    for (int i = 0; i < kRows; ++i) offset[i] = min_of(i, rows - 1) * row;
  }
  TW_INLINE float at(int i) const { return p[offset[i]]; }
  TW_INLINE void next() { p += col; }
};

// An exact kernel has no code for edges: M and N must be multiples of the tile.
template <int kMr, int kNv, int kUnroll, bool kPacksB, Split kSplit, bool kExact>
struct Unpacked {
  static constexpr int kNr = kNv * kLanes;

  struct Tile {
    const float* a;
    int64_t a_row, a_col;
    const float* b;  // a panel, or B in place
    int64_t b_row;
    float* c;
    int64_t c_row, k;
  };

  static TW_NOINLINE void whole(const Tile& t) {
    vf acc[kMr][kNv];
    zero_tile(acc);
    if constexpr (kPacksB)
      multiply<kMr, kNv, kUnroll>(t.k, StridedA<float>{t.a, t.a_row, t.a_col}, PanelB<float, kNr>{t.b}, acc);
    else
      multiply<kMr, kNv, kUnroll>(t.k, StridedA<float>{t.a, t.a_row, t.a_col}, StridedB<float>{t.b, t.b_row}, acc);
    store_tile<true>(acc, t.c, t.c_row, kMr, kNr);
  }

  template <int kRows, int kVectors>
  static TW_NOINLINE void part(const Tile& t, int64_t rows, int64_t cols) {
    vf acc[kRows][kVectors];
    zero_tile(acc);
    const ClampedA<kRows> a(t.a, t.a_row, t.a_col, rows);
    if constexpr (kPacksB)
      multiply<kRows, kVectors, 1>(t.k, a, PanelB<float, kNr>{t.b}, acc);
    else
      multiply<kRows, kVectors, 1>(
          t.k, a, StridedTailB<float, kVectors>{t.b, t.b_row, cols - (kVectors - 1) * kLanes}, acc);
    store_tile<false>(acc, t.c, t.c_row, rows, cols);
  }

  template <int kVectors>
  static TW_INLINE void edge(const Tile& t, int64_t rows, int64_t cols) {
    constexpr int kMost = (3 * kMr + 3) / 4, kHalf = (kMr + 1) / 2, kFew = (kMr + 3) / 4;
    if (kVectors > 1 && cols <= (kVectors - 1) * kLanes)
      edge<(kVectors > 1 ? kVectors - 1 : 1)>(t, rows, cols);
    else if (rows > kMost)
      part<kMr, kVectors>(t, rows, cols);
    else if (rows > kHalf)
      part<kMost, kVectors>(t, rows, cols);
    else if (rows > kFew)
      part<kHalf, kVectors>(t, rows, cols);
    else
      part<kFew, kVectors>(t, rows, cols);
  }

  static void range(const tw_gemm_args& g, const Matrices<float, float>& of, int64_t m0, int64_t m, int64_t n0,
                    int64_t n, float* panel) {
    for (int64_t j = 0; j < n; j += kNr) {
      const int64_t cols = min_of(kNr, n - j);
      const float* b = of.b + (n0 + j) * g.b_col;
      if (kPacksB) pack(panel, kNr, b, g.b_col, g.b_row, cols, g.k);
      for (int64_t i = 0; i < m; i += kMr) {
        const int64_t rows = min_of(kMr, m - i);
        const Tile t{of.a + (m0 + i) * g.a_row,        g.a_row, g.a_col, kPacksB ? panel : b, g.b_row,
                     of.c + (m0 + i) * g.c_row + n0 + j, g.c_row, g.k};
        if constexpr (kExact)
          whole(t);
        else if (rows == kMr && cols == kNr)
          whole(t);
        else
          edge<kNv>(t, rows, cols);
      }
    }
  }

  static TW_INLINE int64_t panel_bytes(const tw_gemm_args& g) { return kPacksB ? round_up(g.k * kNr * 4, 64) : 0; }

  static int64_t workspace(const tw_gemm_args& g) { return threads_of(g.team) * panel_bytes(g); }

  static int32_t run(const tw_gemm_args& g) {
    if (is_trivial<float>(g)) return 0;
    if (!kPacksB && g.b_col != 1 && g.n > 1) return 1;
    if (kExact && (g.m % kMr || g.n % kNr)) return 2;
    const int64_t threads = threads_of(g.team);
    const Grid grid = grid_of(kSplit, max_of(1, threads / min_of(g.batch, threads)), g.m, g.n, kMr, kNr);
    parallel_units(g.team, g.batch * grid.count(), [&](int64_t slot, int64_t unit) {
      const int64_t at = unit % grid.count();
      const int64_t m0 = at / grid.cols * grid.row_step, n0 = at % grid.cols * grid.col_step;
      range(g, {g, unit / grid.count()}, m0, min_of(grid.row_step, g.m - m0), n0, min_of(grid.col_step, g.n - n0),
            (float*)((char*)g.workspace + slot * panel_bytes(g)));
    });
    return 0;
  }
};

}  // namespace tw
