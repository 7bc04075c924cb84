// The kernels that are most likely fast, scored like the others but without them: few trees pick
// one block of kernels, and only that block is taken through the whole forest.
#pragma once
#include <algorithm>
#include <cmath>

#include "bins.hpp"
#include "forest.hpp"
#include "order.hpp"
#include "trees.hpp"

// What the forest's first trees say of every kernel that is asked about; the others come last.
static void guess_all(const tw_context *c, const double *values, const uint8_t *asked,
                      double *mixed, double *guess) {
  alignas(64) uint8_t rows[TW_ROWS * TW_BLOCK] = {0};
  fill_problem_rows(c->lead, values, rows);
  for (int64_t block = 0; block < c->blocks; ++block) {
    alignas(64) int32_t total[TW_BLOCK] = {0};
    const int lanes = (int)std::min<int64_t>(TW_BLOCK, c->kernels - block * TW_BLOCK);
    tw_mixed(values, c->kernel_values + block * TW_BLOCK, c->stride, mixed);
    fill_rows(c->lead, block, lanes, mixed, rows);
    sum_trees(c->lead, rows, total);
    for (int i = 0; i < lanes; ++i) {
      const int64_t at = block * TW_BLOCK + i;
      const double base = tw_log2(mixed[(TW_MIXED - 1) * TW_BLOCK + i]);
      const double score = total[i] * c->lead->scale - base - c->handicap[at];
      guess[at] = asked[at] ? score : -INFINITY;
    }
  }
}

// The vendor's routines, then as many of the best guesses as a block holds.
static int pick(const tw_context *c, const uint8_t *asked, const double *guess, int32_t *picked) {
  int count = 0;
  tw_item *items = (tw_item *)c->keys;
  int64_t others = 0;
  for (int64_t i = 0; i < c->kernels; ++i) {
    if (!asked[i]) continue;
    if (c->is_vendor[i] && count < TW_BLOCK / 4)
      picked[count++] = (int32_t)i;
    else
      items[others++] = {turned(guess[i]), (int32_t)i, 0};
  }
  const int64_t room = std::min<int64_t>(TW_BLOCK - count, others);
  std::partial_sort(items, items + room, items + others, stands_before);
  for (int64_t i = 0; i < room; ++i) picked[count++] = items[i].at;
  return count;
}

// What is known of the picked kernels, side by side as in a block of the pool.
static void gather_values(const tw_context *c, const int32_t *picked, double *values) {
  for (int v = 0; v < TW_KERNEL_VALUES; ++v)
    for (int i = 0; i < TW_BLOCK; ++i)
      values[v * TW_BLOCK + i] = c->kernel_values[v * c->stride + picked[i]];
}

static void gather_rows(const tw_forest *f, const int32_t *picked, const double *mixed,
                        uint8_t *rows) {
  for (int64_t i = 0; i < f->features; ++i) {
    uint8_t *row = rows + i * TW_BLOCK;
    if (f->origin[i] == 1)
      for (int j = 0; j < TW_BLOCK; ++j)
        row[j] = f->kernel_bins[(picked[j] / TW_BLOCK * f->features + i) * TW_BLOCK +
                                picked[j] % TW_BLOCK];
    else if (f->origin[i] == 2)
      bin_block(mixed + (size_t)f->source[i] * TW_BLOCK, TW_BLOCK, f->thresholds[i],
                f->counts[i], row);
  }
}

// One kernel down every tree, a node at a time: for so few lanes quicker than all leaves at once.
static int32_t walk(const tw_walk *w, const uint8_t *rows, int lane) {
  int32_t total = 0;
  for (int64_t tree = 0; tree < w->trees; ++tree) {
    const uint32_t *nodes = w->nodes + w->node_start[tree];
    int at = w->node_start[tree + 1] > w->node_start[tree] ? 0 : -1;
    while (at >= 0) {
      const uint32_t node = nodes[at];
      const bool is_left = rows[(int)(node & 255) * TW_BLOCK + lane] <= (node >> 8 & 255);
      at = (int8_t)(is_left ? node >> 16 : node >> 24);
    }
    total += w->leaves[w->leaf_start[tree] + ~at];
  }
  return total;
}

static void score_routines(const tw_context *c, const double *values, const int32_t *picked,
                           int count, const double *mixed, double *score) {
  alignas(64) uint8_t rows[TW_ROWS * TW_BLOCK];
  fill_problem_rows(c->vendor, values, rows);
  gather_rows(c->vendor, picked, mixed, rows);
  for (int i = 0; i < count; ++i)
    if (c->is_vendor[picked[i]])
      score[i] = walk(c->walk, rows, i) * c->vendor->scale + c->vendor->offset;
}

// Fills `order` with the picked kernels, best first, and their places in `score`; `info[1]` says
// how many they are, `info[0]` the level.
TW_API void tw_lead(tw_context *c, const double *problem, const uint8_t *asked) {
  double values[TW_VALUES + 1];
  alignas(64) double mixed[(TW_MIXED + 1) * TW_BLOCK], known[(TW_KERNEL_VALUES + 1) * TW_BLOCK];
  alignas(64) uint8_t rows[TW_ROWS * TW_BLOCK] = {0};
  alignas(64) int32_t total[TW_BLOCK] = {0};
  int32_t picked[TW_BLOCK] = {0};
  double score[TW_BLOCK];
  tw_problem(problem, c->arch, values);
  guess_all(c, values, asked, mixed, c->score);
  const int count = pick(c, asked, c->score, picked);
  gather_values(c, picked, known);
  tw_mixed(values, known, TW_BLOCK, mixed);
  fill_problem_rows(c->rank, values, rows);
  gather_rows(c->rank, picked, mixed, rows);
  sum_trees(c->rank, rows, total);
  for (int i = 0; i < count; ++i) score[i] = total[i] * c->rank->scale + c->rank->offset;
  if (c->vendor) score_routines(c, values, picked, count, mixed, score);
  tw_item *items = (tw_item *)c->keys;
  for (int i = 0; i < count; ++i) {
    score[i] -= tw_log2(mixed[(TW_MIXED - 1) * TW_BLOCK + i]);
    score[i] -= c->handicap[picked[i]];
    c->score[picked[i]] = score[i];
    items[i] = {turned(score[i]), picked[i], 0};
  }
  std::sort(items, items + count, stands_before);
  for (int i = 0; i < count; ++i) c->order[i] = items[i].at;
  c->info[0] = level_of(c, values);
  c->info[1] = (double)count;
}

// Whether a measured problem lies within a squared distance; `info[1]` is 1 where one does. The
// points stand in an order of no meaning, so that some of the first are near where any are.
TW_API void tw_near(tw_context *c, const double *problem, double reach) {
  enum { SOME = 512 };
  double values[TW_VALUES + 1], far[SOME];
  tw_problem(problem, c->arch, values);
  c->info[1] = 0.0;
  for (int64_t start = 0; start < c->points; start += SOME) {
    const int count = (int)std::min<int64_t>(SOME, c->points - start);
    for (int p = 0; p < count; ++p) far[p] = 0.0;
    for (int64_t j = 0; j < c->axes; ++j) {
      const double *TW_RESTRICT point = c->shuffled + j * c->points + start;
      const double here = values[c->axis_value[j]];
      for (int p = 0; p < count; ++p) far[p] += (point[p] - here) * (point[p] - here);
    }
    bool is_near = false;
    for (int p = 0; p < count; ++p) is_near |= far[p] <= reach;
    if (is_near) {
      c->info[1] = 1.0;
      return;
    }
  }
}
