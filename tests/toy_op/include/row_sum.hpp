// SPDX-License-Identifier: MIT
#pragma once
#include "tilewise/abi.hpp"

struct row_sum_args {
  const float* x;
  float* y;
  void* workspace;
  const tw_team* team;
  int64_t rows, columns, pitch;
};

template <int kSums>
int32_t sum_rows(const row_sum_args& args) {
  for (int64_t row = 0; row < args.rows; ++row) {
    const float* x = args.x + row * args.pitch;
    float sums[kSums] = {};
    for (int64_t at = 0; at < args.columns; ++at) sums[at % kSums] += x[at];
    float total = 0;
    for (float sum : sums) total += sum;
    args.y[row] = total;
  }
  return 0;
}
