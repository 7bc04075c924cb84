// SPDX-License-Identifier: MIT
// Products with one short side, seen from either operand: out[s][l] = sum over k of
// small[s][k] * big[l][k], where the big operand is read once, at the speed of memory.
#pragma once
#include "gemm.hpp"

namespace tw {

template <class In, class Out>
struct Thin {
  const In* small;
  int64_t s_stride, small_k;
  const In* big;
  int64_t l_stride, big_k;
  Out* out;
  int64_t out_s, out_l;
  int64_t s, l, k;

  // The short side is that of C; of two equal ones, its rows.
  TW_INLINE Thin(const tw_gemm_args& g, int64_t batch) {
    const Matrices<In, Out> of(g, batch);
    k = g.k;
    if (g.m <= g.n) {
      small = of.a, s_stride = g.a_row, small_k = g.a_col, s = g.m;
      big = of.b, l_stride = g.b_col, big_k = g.b_row, l = g.n;
      out = of.c, out_s = g.c_row, out_l = 1;
    } else {
      small = of.b, s_stride = g.b_col, small_k = g.b_row, s = g.n;
      big = of.a, l_stride = g.a_row, big_k = g.a_col, l = g.m;
      out = of.c, out_s = 1, out_l = g.c_row;
    }
    // The stride of a dimension of one is never used and may be anything.
    if (k == 1) big_k = 1;
    if (l == 1) l_stride = 1;
  }
};

TW_INLINE int64_t short_side(const tw_gemm_args& g) { return min_of(g.m, g.n); }
TW_INLINE int64_t long_side(const tw_gemm_args& g) { return max_of(g.m, g.n); }

// Rows widened to slots, k contiguous, each row padded with zeros to `row` slots.
template <class In>
TW_NOINLINE void widen_rows(Slot<In>* dst, int64_t row, const In* src, int64_t stride, int64_t k_stride, int64_t rows,
                            int64_t k) {
  using Op = Operand<In>;
  for (int64_t i = 0; i < rows; ++i) {
    Slot<In>* q = dst + i * row;
    const In* p = src + i * stride;
    const int64_t slots = slots_of<In>(k);
    int64_t s = 0;
    if (k_stride == 1)
      for (; (s + kLanes) * Op::kStep <= k; s += kLanes) store(q + s, Op::along_k(p + s * Op::kStep));
    for (; s < slots; ++s) q[s] = Op::one(p + s * Op::kStep * k_stride, k_stride, k - s * Op::kStep);
    for (; s < row; ++s) q[s] = 0;
  }
}

// Sums of the lanes of `count` registers, through transposed squares: a shuffle per register and
// step, where summing each on its own takes several.
template <int kCount, class V, class Acc>
TW_INLINE void sum_each(const V* acc, Acc* sums) {
  TW_UNROLL
  for (int at = 0; at < kCount; at += kLanes) {
    V r[kLanes];
    TW_UNROLL
    for (int i = 0; i < kLanes; ++i) r[i] = at + i < kCount ? acc[at + i < kCount ? at + i : 0] : V{};
    transpose(r);
    TW_UNROLL
    for (int width = kLanes / 2; width > 0; width /= 2) {
      TW_UNROLL
      for (int i = 0; i < width; ++i) r[i] += r[i + width];
    }
    store_n(sums + at, r[0], min_of(kLanes, kCount - at));
  }
}

// The tile of kS x kL dot products; operands are k-contiguous, `small` in slots padded with zeros.
// Rows of `big` that do not exist repeat the last one.
template <int kS, int kL, int kAhead, class In, class Acc>
TW_INLINE void dot_tile(const Slot<In>* small, int64_t row, const In* big, int64_t l_stride, int64_t exist, int64_t k,
                        Acc (&sums)[kS * kL]) {
  using Op = Operand<In>;
  using V = Vec<Acc>;
  constexpr int kElements = kLanes * Op::kStep;
  V acc[kS * kL];
  TW_UNROLL
  for (int i = 0; i < kS * kL; ++i) acc[i] = V{};
  const In* p[kL];
  TW_UNROLL
  for (int j = 0; j < kL; ++j) p[j] = big + min_of(j, exist - 1) * l_stride;
  int64_t at = 0;
  TW_NO_UNROLL
  for (; at + kElements <= k; at += kElements) {
    V b[kL];
    // Where a row ends soon, what comes next is the same row of the next tile.
    const int64_t later = at + kAhead * kElements, ahead = later < k ? later : later - k + kL * l_stride;
    TW_UNROLL
    for (int j = 0; j < kL; ++j) {
      b[j] = Op::along_k(p[j] + at);
      if (kAhead) prefetch(p[j] + ahead);
    }
    TW_UNROLL
    for (int i = 0; i < kS; ++i) {
      const V a = load(small + i * row + at / Op::kStep);
      TW_UNROLL
      for (int j = 0; j < kL; ++j) acc[i * kL + j] = mac(a, b[j], acc[i * kL + j]);
    }
  }
  if (at < k) {
    TW_UNROLL
    for (int j = 0; j < kL; ++j) {
      const V b = Op::along_k_n(p[j] + at, k - at);
      TW_UNROLL
      for (int i = 0; i < kS; ++i) acc[i * kL + j] = mac(load(small + i * row + at / Op::kStep), b, acc[i * kL + j]);
    }
  }
  sum_each<kS * kL>(acc, sums);
}

}  // namespace tw
