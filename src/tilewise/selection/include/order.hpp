// Kernels in order of their scores.
#pragma once
#include <algorithm>
#include <cstring>

#include "forest.hpp"

enum { FEW = 160 };

struct tw_item {
  uint64_t key;
  int32_t at, unused;
};

static inline bool stands_before(const tw_item &x, const tw_item &y) {
  return x.key < y.key || (x.key == y.key && x.at < y.at);
}

// The bits of a double, turned so that a larger score is a smaller integer; -0 is 0.
static inline uint64_t turned(double score) {
  uint64_t bits;
  score += 0.0;
  std::memcpy(&bits, &score, 8);
  return bits >> 63 ? bits : ~bits & ~((uint64_t)1 << 63);
}

// Every kernel's place is how many stand before it. Counting has no branches to foresee, which
// makes up for the many comparisons while there are few kernels.
static void count_pool(const double *score, int count, int32_t *order) {
  uint64_t key[FEW];
  for (int i = 0; i < count; ++i) key[i] = turned(score[i]);
  for (int i = 0; i < count; ++i) {
    const uint64_t own = key[i];
    int64_t before = 0;
    for (int j = 0; j < i; ++j) before += key[j] <= own;
    for (int j = i + 1; j < count; ++j) before += key[j] < own;
    order[before] = i;
  }
}

// Best first and stable: of equal scores the earlier kernel of the pool comes first.
static void sort_pool(tw_context *c) {
  tw_item *items = (tw_item *)c->keys, *other = items + c->blocks * TW_BLOCK;
  const int64_t count = c->kernels;
  if (count <= FEW) {
    count_pool(c->score, (int)count, c->order);
    return;
  }
  for (int64_t i = 0; i < count; ++i) items[i] = {turned(c->score[i]), (int32_t)i, 0};
  if (count < 512) {
    std::sort(items, items + count, stands_before);
  } else {
    // Three digits of 11 bits tell nearly all scores apart; insertion puts the rest in order.
    for (int shift = 31; shift < 64; shift += 11) {
      int32_t start[2049] = {0};
      for (int64_t i = 0; i < count; ++i) ++start[(items[i].key >> shift & 2047) + 1];
      if (start[(items[0].key >> shift & 2047) + 1] == count) continue;
      for (int d = 0; d < 2048; ++d) start[d + 1] += start[d];
      for (int64_t i = 0; i < count; ++i) other[start[items[i].key >> shift & 2047]++] = items[i];
      std::swap(items, other);
    }
    for (int64_t i = 1; i < count; ++i) {
      const tw_item held = items[i];
      int64_t at = i;
      for (; at > 0 && stands_before(held, items[at - 1]); --at) items[at] = items[at - 1];
      items[at] = held;
    }
  }
  for (int64_t i = 0; i < count; ++i) c->order[i] = items[i].at;
}
