// Values to bins: how many thresholds of its feature lie below each.
#pragma once
#include <algorithm>
#include <cstring>

#include "forest.hpp"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Comparing with all thresholds beats searching: there are few.
#if defined(__AVX512BW__)
static inline void bin_block(const double *x, int lanes, const double *bounds, int count,
                             uint8_t *out) {
  for (int half = 0; 32 * half < lanes; ++half) {
    const double *at = x + 32 * half;
    const __m512d a = _mm512_loadu_pd(at), b = _mm512_loadu_pd(at + 8);
    const __m512d c = _mm512_loadu_pd(at + 16), d = _mm512_loadu_pd(at + 24);
    const __m512i one = _mm512_set1_epi64(1);
    __m512i na = _mm512_setzero_si512(), nb = na, nc = na, nd = na;
    for (int t = 0; t < count; ++t) {
      const __m512d bound = _mm512_set1_pd(bounds[t]);
      na = _mm512_mask_add_epi64(na, _mm512_cmp_pd_mask(a, bound, _CMP_GT_OQ), na, one);
      nb = _mm512_mask_add_epi64(nb, _mm512_cmp_pd_mask(b, bound, _CMP_GT_OQ), nb, one);
      nc = _mm512_mask_add_epi64(nc, _mm512_cmp_pd_mask(c, bound, _CMP_GT_OQ), nc, one);
      nd = _mm512_mask_add_epi64(nd, _mm512_cmp_pd_mask(d, bound, _CMP_GT_OQ), nd, one);
    }
    const __m512i all[4] = {na, nb, nc, nd};
    for (int j = 0; j < 4; ++j)
      _mm_storel_epi64((__m128i *)(out + 32 * half + 8 * j), _mm512_cvtepi64_epi8(all[j]));
  }
}
#else
#if defined(__AVX2__)
enum { DOUBLES = 4 };
#else
enum { DOUBLES = 2 };
#endif
typedef double doubles __attribute__((vector_size(DOUBLES * 8)));
typedef int64_t whole __attribute__((vector_size(DOUBLES * 8)));
static inline void bin_block(const double *x, int lanes, const double *bounds, int count,
                             uint8_t *out) {
  for (int i = 0; i < lanes; i += 4 * DOUBLES) {
    doubles value[4];
    whole below[4] = {};
    std::memcpy(value, x + i, sizeof value);
    for (int t = 0; t < count; ++t) {
      const doubles bound = bounds[t] - (doubles){};
      for (int j = 0; j < 4; ++j) below[j] -= (whole)(value[j] > bound);
    }
    for (int j = 0; j < 4; ++j)
      for (int l = 0; l < DOUBLES; ++l) out[i + j * DOUBLES + l] = (uint8_t)below[j][l];
  }
}
#endif

static inline uint8_t bin_one(double x, const double *bounds, int count) {
  return (uint8_t)(std::lower_bound(bounds, bounds + count, x) - bounds);
}

// The rows of one block: problem rows stand already, kernel rows are copied, mixed ones binned
// as far as there are kernels.
static inline void fill_rows(const tw_forest *f, int64_t block, int lanes, const double *mixed,
                             uint8_t *rows) {
  for (int64_t i = 0; i < f->features; ++i) {
    uint8_t *row = rows + i * TW_BLOCK;
    if (f->origin[i] == 1)
      std::memcpy(row, f->kernel_bins + (block * f->features + i) * TW_BLOCK, TW_BLOCK);
    else if (f->origin[i] == 2)
      bin_block(mixed + (size_t)f->source[i] * TW_BLOCK, lanes, f->thresholds[i], f->counts[i],
                row);
  }
}

static inline void fill_problem_rows(const tw_forest *f, const double *values, uint8_t *rows) {
  for (int64_t i = 0; i < f->features; ++i)
    if (f->origin[i] == 0)
      std::memset(rows + i * TW_BLOCK,
                  bin_one(values[f->source[i]], f->thresholds[i], f->counts[i]), TW_BLOCK);
}
