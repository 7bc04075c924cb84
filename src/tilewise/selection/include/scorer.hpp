// From a problem to scores and an order. The features before it are generated: `tw_problem` fills
// values that the problem fixes, `tw_mixed` those that a block of kernels adds.
#pragma once
#include "bins.hpp"
#include "forest.hpp"
#include "order.hpp"
#include "trees.hpp"

#ifndef TW_API
#define TW_API extern "C" __attribute__((visibility("default")))
#endif

static double level_of(const tw_context *c, const double *values) {
  double total = 0.0;
  for (int64_t tree = 0; tree < c->level_trees; ++tree) {
    const int start = c->level_start[tree];
    int at = 0;
    do {
      const int node = start + at;
      at = values[c->level_value[node]] <= c->level_bound[node] ? c->level_left[node]
                                                                : c->level_right[node];
    } while (at >= 0);
    total += c->level_leaf[c->level_leaf_start[tree] + ~at];
  }
  return total + c->level_offset;
}

// The squared distance to the nearest measured problem, and which that is.
static void nearest(const tw_context *c, const double *values, double *info) {
  // Copied: what is read through `c` might be what is written, and then nothing vectorises.
  const int64_t points = c->points;
  double *TW_RESTRICT far = c->far;
  for (int64_t p = 0; p < points; ++p) far[p] = 0.0;
  for (int64_t j = 0; j < c->axes; ++j) {
    const double *TW_RESTRICT point = c->point + j * points;
    const double here = values[c->axis_value[j]];
    for (int64_t p = 0; p < points; ++p) far[p] += (point[p] - here) * (point[p] - here);
  }
  // Doubles that are not negative stand in the order of their bits, whose least vectorises.
  const int64_t *bits = (const int64_t *)far;
  int64_t least = INT64_MAX, which = 0;
  for (int64_t p = 0; p < points; ++p) least = bits[p] < least ? bits[p] : least;
  while (which < points - 1 && bits[which] != least) ++which;
  info[1] = points ? far[which] : 1e300;
  info[2] = (double)which;
}

TW_API void tw_level(tw_context *c, const double *problem) {
  double values[TW_VALUES + 1];
  tw_problem(problem, c->arch, values);
  c->info[0] = level_of(c, values);
}

TW_API void tw_nearest(tw_context *c, const double *problem) {
  double values[TW_VALUES + 1];
  tw_problem(problem, c->arch, values);
  nearest(c, values, c->info);
}

// What the forest of the vendor's routines says, in place of the ranking's, in blocks with any.
static void score_vendor(const tw_context *c, int64_t block, int lanes, const double *values,
                         const double *mixed, double *score) {
  const uint8_t *is_vendor = c->is_vendor + block * TW_BLOCK;
  if (!std::memchr(is_vendor, 1, (size_t)lanes)) return;
  alignas(64) uint8_t rows[TW_ROWS * TW_BLOCK];
  alignas(64) int32_t total[TW_BLOCK] = {0};
  fill_problem_rows(c->vendor, values, rows);
  fill_rows(c->vendor, block, lanes, mixed, rows);
  sum_trees(c->vendor, rows, total);
  for (int i = 0; i < lanes; ++i)
    if (is_vendor[i]) score[i] = total[i] * c->vendor->scale + c->vendor->offset;
}

TW_API void tw_features(tw_context *c, const double *problem, double *values, double *mixed) {
  tw_problem(problem, c->arch, values);
  for (int64_t b = 0; b < c->blocks; ++b)
    tw_mixed(values, c->kernel_values + b * TW_BLOCK, c->stride,
             mixed + b * TW_MIXED * TW_BLOCK);
}

TW_API void tw_rank(tw_context *c, const double *problem) {
  double values[TW_VALUES + 1];
  alignas(64) double mixed[(TW_MIXED + 1) * TW_BLOCK];
  // Lanes beyond the last kernel are scored too, whatever they hold, and never looked at.
  alignas(64) uint8_t rank_rows[TW_ROWS * TW_BLOCK] = {0}, valid_rows[TW_ROWS * TW_BLOCK] = {0};
  tw_problem(problem, c->arch, values);
  fill_problem_rows(c->rank, values, rank_rows);
  if (c->valid) fill_problem_rows(c->valid, values, valid_rows);
  for (int64_t block = 0; block < c->blocks; ++block) {
    alignas(64) int32_t total[TW_BLOCK] = {0}, will_run[TW_BLOCK] = {0};
    double *score = c->score + block * TW_BLOCK;
    const int lanes = (int)std::min<int64_t>(TW_BLOCK, c->kernels - block * TW_BLOCK);
    tw_mixed(values, c->kernel_values + block * TW_BLOCK, c->stride, mixed);
    fill_rows(c->rank, block, lanes, mixed, rank_rows);
    sum_trees(c->rank, rank_rows, total);
    if (c->valid) {
      fill_rows(c->valid, block, lanes, mixed, valid_rows);
      sum_trees(c->valid, valid_rows, will_run);
    }
    for (int i = 0; i < TW_BLOCK; ++i) score[i] = total[i] * c->rank->scale + c->rank->offset;
    if (c->vendor) score_vendor(c, block, lanes, values, mixed, score);
    for (int i = 0; i < TW_BLOCK; ++i) {
      if (c->share > 0.0) score[i] -= c->share * tw_log2(mixed[(TW_MIXED - 1) * TW_BLOCK + i]);
      if (c->valid && will_run[i] * c->valid->scale + c->valid->offset < 0.0) score[i] -= 1000.0;
      score[i] -= c->handicap[block * TW_BLOCK + i];
    }
  }
  sort_pool(c);
}

#include "lead.hpp"
