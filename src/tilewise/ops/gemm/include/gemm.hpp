// SPDX-License-Identifier: MIT
// What the families of GEMM kernels share: cutting the result among threads, and trivial cases.
#pragma once
#include "tilewise/microkernel.hpp"
#include "tilewise/pack.hpp"
#include "tilewise/parallel.hpp"

namespace tw {

template <class A, class B>
struct is_same {
  static constexpr bool value = false;
};
template <class A>
struct is_same<A, A> {
  static constexpr bool value = true;
};

// Operands of one matrix product of a batch.
template <class In, class Out>
struct Matrices {
  const In* a;
  const In* b;
  Out* c;
  TW_INLINE Matrices(const tw_gemm_args& g, int64_t batch)
      : a((const In*)g.a + batch * g.a_batch), b((const In*)g.b + batch * g.b_batch), c((Out*)g.c + batch * g.c_batch) {}
};

// Whether nothing is left to do: an empty result, or an empty reduction, which gives zeros.
template <class Out>
TW_INLINE bool is_trivial(const tw_gemm_args& g) {
  if (g.batch <= 0 || g.m <= 0 || g.n <= 0) return true;
  if (g.k > 0) return false;
  for (int64_t b = 0; b < g.batch; ++b)
    for (int64_t i = 0; i < g.m; ++i) std::memset((Out*)g.c + b * g.c_batch + i * g.c_row, 0, g.n * sizeof(Out));
  return true;
}

// The arguments, without the team where the work is over before a second thread has woken up.
TW_INLINE tw_gemm_args worth_threads(const tw_gemm_args& given) {
  tw_gemm_args g = given;
  // In multiply-adds; an element moved takes about as long as eight. Doubles cannot overflow.
  const double m = (double)g.m, n = (double)g.n, k = (double)g.k;
  const double work = (double)g.batch * (m * n * k + 8 * (m * k + k * n + m * n));
  if (work < 512 * 1024) g.team = nullptr;
  return g;
}

// A block size for `total`, at most `most`, such that blocks come out equal and multiples of `step`.
TW_INLINE int64_t balanced(int64_t total, int64_t most, int64_t step) {
  const int64_t blocks = max_of(1, ceil_div(total, most));
  return max_of(step, round_up(ceil_div(total, blocks), step));
}

enum class Split { kM, kN, kGrid, kShared };

// How a result of m x n is cut into `rows` x `cols` equal parts for threads to work on alone.
struct Grid {
  int64_t rows, cols, row_step, col_step;
  TW_INLINE int64_t count() const { return rows * cols; }
};

TW_INLINE Grid grid_of(Split split, int64_t threads, int64_t m, int64_t n, int64_t row_tile, int64_t col_tile) {
  const int64_t row_tiles = ceil_div(m, row_tile), col_tiles = ceil_div(n, col_tile);
  int64_t rows = 1, cols = 1;
  if (split == Split::kM) {
    rows = min_of(threads, row_tiles);
  } else if (split == Split::kN) {
    cols = min_of(threads, col_tiles);
  } else {
    // The longest side of a part decides how much is packed twice; the most loaded part, the time.
    int64_t best = INT64_MAX;
    for (int64_t r = 1; r <= min_of(threads, row_tiles); ++r) {
      const int64_t c = min_of(threads / r, col_tiles);
      const int64_t tall = ceil_div(row_tiles, r) * row_tile, wide = ceil_div(col_tiles, c) * col_tile;
      const int64_t cost = tall * wide + 8 * (tall + wide);
      if (cost < best) best = cost, rows = r, cols = c;
    }
  }
  const int64_t row_step = ceil_div(row_tiles, rows) * row_tile, col_step = ceil_div(col_tiles, cols) * col_tile;
  return {ceil_div(m, row_step), ceil_div(n, col_step), row_step, col_step};
}

}  // namespace tw
