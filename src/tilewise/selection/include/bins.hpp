// Values to bins: how many thresholds of its feature lie below each.
#pragma once
#include <algorithm>
#include <cstring>

#include "forest.hpp"

#if defined(__AVX512F__)
enum { DOUBLES = 8 };
#elif defined(__AVX2__)
enum { DOUBLES = 4 };
#else
enum { DOUBLES = 2 };
#endif
typedef double doubles __attribute__((vector_size(DOUBLES * 8)));
typedef int64_t whole __attribute__((vector_size(DOUBLES * 8)));

static inline double least(doubles x) {
  double found = x[0];
  for (int l = 1; l < DOUBLES; ++l) found = x[l] < found ? x[l] : found;
  return found;
}

// Kernels next to each other are alike: few thresholds lie between the smallest value and the
// largest. Comparing with those beats searching.
static inline void bin_block(const double *x, const double *bounds, int count, uint8_t *out) {
  enum { WAYS = 4 };
  for (int i = 0; i < TW_BLOCK; i += WAYS * DOUBLES) {
    doubles value[WAYS];
    std::memcpy(value, x + i, sizeof value);
    doubles low = value[0], high = value[0];
    for (int j = 1; j < WAYS; ++j) {
      low = value[j] < low ? value[j] : low;
      high = value[j] > high ? value[j] : high;
    }
    const double smallest = least(low), largest = -least(-high);
    int first = 0;
    while (first < count && bounds[first] < smallest) ++first;
    whole below[WAYS];
    for (int j = 0; j < WAYS; ++j) below[j] = first - (whole){};
    for (int t = first; t < count && bounds[t] < largest; ++t) {
      const doubles bound = bounds[t] - (doubles){};
      for (int j = 0; j < WAYS; ++j) below[j] -= (whole)(value[j] > bound);
    }
    for (int j = 0; j < WAYS; ++j)
      for (int l = 0; l < DOUBLES; ++l) out[i + j * DOUBLES + l] = (uint8_t)below[j][l];
  }
}

static inline uint8_t bin_one(double x, const double *bounds, int count) {
  return (uint8_t)(std::lower_bound(bounds, bounds + count, x) - bounds);
}

// The rows of one block: problem rows stand already, kernel rows are copied, mixed ones binned.
static inline void fill_rows(const tw_forest *f, int64_t block, const double *mixed,
                             uint8_t *rows) {
  for (int64_t i = 0; i < f->features; ++i) {
    uint8_t *row = rows + i * TW_BLOCK;
    if (f->origin[i] == 1)
      std::memcpy(row, f->kernel_bins + (block * f->features + i) * TW_BLOCK, TW_BLOCK);
    else if (f->origin[i] == 2)
      bin_block(mixed + (size_t)f->source[i] * TW_BLOCK, f->thresholds[i], f->counts[i], row);
  }
}

static inline void fill_problem_rows(const tw_forest *f, const double *values, uint8_t *rows) {
  for (int64_t i = 0; i < f->features; ++i)
    if (f->origin[i] == 0)
      std::memset(rows + i * TW_BLOCK,
                  bin_one(values[f->source[i]], f->thresholds[i], f->counts[i]), TW_BLOCK);
}
