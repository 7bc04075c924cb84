// SPDX-License-Identifier: MIT
// The register tile: kRows x (kVectors * kLanes) accumulators that stay in registers while
// k runs, fed by one broadcast per row and one vector load per column block.
#pragma once
#include "tilewise/convert.hpp"

namespace tw {

// ---- where the operands come from: at(i) is row i of A, load(j) is vector j of B, next() steps k ----

// A packed as [k][width].
template <class S, int kWidth>
struct PanelA {
  const S* p;
  TW_INLINE S at(int i) const { return p[i]; }
  TW_INLINE void next() { p += kWidth; }
};

// A in place, with any strides.
template <class S>
struct StridedA {
  const S* p;
  int64_t row, col;
  TW_INLINE S at(int i) const { return p[i * row]; }
  TW_INLINE void next() { p += col; }
};

// B packed as [k][kWidth].
template <class S, int kWidth>
struct PanelB {
  const S* p;
  TW_INLINE Vec<S> load(int j) const { return tw::load(p + j * kLanes); }
  TW_INLINE void next() { p += kWidth; }
};

// B in place, row-major.
template <class S>
struct StridedB {
  const S* p;
  int64_t row;
  TW_INLINE Vec<S> load(int j) const { return tw::load(p + j * kLanes); }
  TW_INLINE void next() { p += row; }
};

// B in place, where only `last` lanes of the last vector exist.
template <class S, int kVectors>
struct StridedTailB {
  const S* p;
  int64_t row, last;
  TW_INLINE Vec<S> load(int j) const {
    return j + 1 < kVectors ? tw::load(p + j * kLanes) : load_n(p + j * kLanes, last);
  }
  TW_INLINE void next() { p += row; }
};

// ---- the product ----

template <int kRows, int kVectors, class V>
TW_INLINE void zero_tile(V (&acc)[kRows][kVectors]) {
  TW_UNROLL
  for (int i = 0; i < kRows; ++i) {
    TW_UNROLL
    for (int j = 0; j < kVectors; ++j) acc[i][j] = V{};
  }
}

// acc += A B over `slots` steps.
template <int kRows, int kVectors, int kUnroll, class A, class B, class V>
TW_INLINE void multiply(int64_t slots, A a, B b, V (&acc)[kRows][kVectors]) {
  const auto step = [&]() __attribute__((always_inline)) {
    V column[kVectors];
    TW_UNROLL
    for (int j = 0; j < kVectors; ++j) column[j] = b.load(j);
    TW_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const V row = splat(a.at(i));
      TW_UNROLL
      for (int j = 0; j < kVectors; ++j) acc[i][j] = mac(row, column[j], acc[i][j]);
    }
    a.next();
    b.next();
  };
  int64_t s = slots;
  if (kUnroll > 1) {
    TW_NO_UNROLL
    for (; s >= kUnroll; s -= kUnroll) {
      TW_UNROLL
      for (int u = 0; u < kUnroll; ++u) step();
    }
  }
  TW_NO_UNROLL
  for (; s > 0; --s) step();
}

// ---- the result ----

// Adds what earlier blocks of the reduction left in `partial`; only `rows` and `cols` of it exist.
template <bool kWhole, int kRows, int kVectors, class Acc, class V>
TW_INLINE void add_tile(V (&acc)[kRows][kVectors], const Acc* partial, int64_t stride, int64_t rows, int64_t cols) {
  TW_UNROLL
  for (int i = 0; i < kRows; ++i) {
    if (!kWhole && i >= rows) break;
    TW_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      const int64_t left = cols - j * kLanes;
      const Acc* p = partial + i * stride + j * kLanes;
      if (kWhole || left >= kLanes)
        acc[i][j] += load(p);
      else if (left > 0)
        acc[i][j] += load_n(p, left);
    }
  }
}

// Writes the `rows` x `cols` part of the tile that exists, as Out.
template <bool kWhole, int kRows, int kVectors, class Out, class V>
TW_INLINE void store_tile(const V (&acc)[kRows][kVectors], Out* out, int64_t stride, int64_t rows, int64_t cols) {
  TW_UNROLL
  for (int i = 0; i < kRows; ++i) {
    if (!kWhole && i >= rows) break;
    TW_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      const int64_t left = cols - j * kLanes;
      Out* p = out + i * stride + j * kLanes;
      if (kWhole || left >= kLanes)
        store_out(p, acc[i][j]);
      else if (left > 0)
        store_out_n(p, acc[i][j], left);
    }
  }
}

// One tile of C from two panels: C = A B, plus `partial` where it is given. A tile that is not
// whole writes only its first `rows` rows and `cols` columns. Panels are kPanelRows and
// kPanelVectors * kLanes wide, of which the tile may use the front.
template <int kRows, int kVectors, int kUnroll, int kPanelRows, int kPanelVectors, bool kWhole, class S, class Out,
          class Acc>
TW_INLINE void panel_tile(int64_t slots, const S* a, const S* b, Out* out, int64_t out_stride, const Acc* partial,
                          int64_t partial_stride, int64_t rows, int64_t cols) {
  Vec<Acc> acc[kRows][kVectors];
  zero_tile(acc);
  multiply<kRows, kVectors, kUnroll>(slots, PanelA<S, kPanelRows>{a}, PanelB<S, kPanelVectors * kLanes>{b}, acc);
  if (partial) add_tile<kWhole>(acc, partial, partial_stride, rows, cols);
  store_tile<kWhole>(acc, out, out_stride, rows, cols);
}

}  // namespace tw
