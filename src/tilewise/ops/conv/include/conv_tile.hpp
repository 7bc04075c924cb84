// SPDX-License-Identifier: MIT
// The register tile of every matrix-like convolution kernel: kMr broadcast rows x kNv vectors.
#pragma once
#include "tilewise/vec.hpp"

namespace tw {

// The reduction runs over `segments` stretches of `length` steps: taps x channels, or rows x pixels.
// Each operand starts a stretch at its own offset and walks it by its own step, so the same loop
// reads packed panels and images in place.
struct Walk {
  const float* a;
  const float* b;
  int64_t a_step, b_step, length, segments;
  const int64_t* a_offset;
  const int64_t* b_offset;
  int64_t a_row = 0;  // distance of broadcast rows where kRow is 0
};

// Neither `segments` nor `length` may be zero.
// rows[m] receives kNv vectors each; `start`, where given, holds the tile to add to, row after row.
template <int kMr, int kNv, int kRow>
TW_NOINLINE void run_tile(const Walk& w, const float* start, float* const* rows) {
  vf acc[kMr][kNv];
  TW_UNROLL
  for (int m = 0; m < kMr; ++m) {
    TW_UNROLL
    for (int v = 0; v < kNv; ++v) acc[m][v] = vf{};
  }
  const int64_t a_step = w.a_step, b_step = w.b_step, row = kRow ? kRow : w.a_row;
  int64_t s = 0;
  // Counting without a test at the top keeps the accumulators in place between the loops.
  do {
    const float* a = w.a + w.a_offset[s];
    const float* b = w.b + w.b_offset[s];
    int64_t i = w.length;
    do {
      vf column[kNv];
      TW_UNROLL
      for (int v = 0; v < kNv; ++v) column[v] = load(b + v * kLanes);
      TW_UNROLL
      for (int m = 0; m < kMr; ++m) {
        const vf x = splat(a[m * row]);
        TW_UNROLL
        for (int v = 0; v < kNv; ++v) acc[m][v] = mac(x, column[v], acc[m][v]);
      }
      a += a_step;
      b += b_step;
    } while (--i);
  } while (++s < w.segments);
  TW_UNROLL
  for (int m = 0; m < kMr; ++m) {
    TW_UNROLL
    for (int v = 0; v < kNv; ++v) {
      const vf add = start ? load(start + (m * kNv + v) * kLanes) : vf{};
      store(rows[m] + v * kLanes, acc[m][v] + add);
    }
  }
}

}  // namespace tw
