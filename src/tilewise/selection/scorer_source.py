"""The scorer's C++ source around the generated features."""

from __future__ import annotations

from tilewise.core.compile_expr import C_PRELUDE
from tilewise.selection.codegen import BLOCK, SERVED, Layout

_HEAD = """\
#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define TW_RESTRICT __restrict__
#define TW_BLOCK %(block)d
#define TW_VALUES %(values)d
#define TW_MIXED %(mixed)d
#if defined(__AVX2__)
#define TW_LANES 4
#else
#define TW_LANES 2
#endif
#define TW_TOGETHER 4

"""

_BINS = """
/* Counts the thresholds below each value: few enough that comparing with all beats searching. */
#if defined(__AVX512BW__)
static inline void bin_block(const double *x, const double *bounds, int count, uint8_t *out) {
  for (int half = 0; half < 2; ++half) {
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
typedef double pair __attribute__((vector_size(TW_LANES * 8)));
typedef int64_t whole __attribute__((vector_size(TW_LANES * 8)));
static inline void bin_block(const double *x, const double *bounds, int count, uint8_t *out) {
  for (int i = 0; i < TW_BLOCK; i += 4 * TW_LANES) {
    pair value[4];
    whole below[4] = {};
    std::memcpy(value, x + i, sizeof value);
    for (int t = 0; t < count; ++t) {
      const pair bound = bounds[t] - (pair){};
      for (int j = 0; j < 4; ++j) below[j] -= (whole)(value[j] > bound);
    }
    for (int j = 0; j < 4; ++j)
      for (int l = 0; l < TW_LANES; ++l) out[i + j * TW_LANES + l] = (uint8_t)below[j][l];
  }
}
#endif
"""

_TREES = """
/* A slot says which kernels of the block reach a node or leaf; each reaches exactly one leaf. */
#if defined(__AVX512BW__)
/* N blocks at once: they do not wait for each other. */
template <int N>
static inline void sum_blocks(const tw_forest *f, const uint8_t *rows, int32_t *total) {
  uint64_t slots[2 * 256][N];
  __m512i sums[N][4], number[32];
  for (int b = 0; b < N; ++b)
    for (int j = 0; j < 4; ++j) sums[b][j] = _mm512_loadu_si512(total + TW_BLOCK * b + 16 * j);
  for (int j = 0; j < 32; ++j) number[j] = _mm512_set1_epi8((char)j);
  for (int64_t tree = 0; tree < f->trees; ++tree) {
    const tw_node *node = f->nodes + f->node_start[tree];
    const int count = f->node_start[tree + 1] - f->node_start[tree];
    const int32_t *leaf = f->leaves + f->leaf_start[tree];
    for (int b = 0; b < N; ++b) slots[0][b] = ~(uint64_t)0;
    for (int i = 0; i < count; ++i) {
      const uint8_t *row = rows + (size_t)node[i].feature * TW_BLOCK;
      const __m512i bound = _mm512_set1_epi8((char)node[i].bound);
      for (int b = 0; b < N; ++b) {
        const uint64_t here = slots[i][b];
        const uint64_t goes_left =
            _mm512_cmple_epu8_mask(_mm512_load_si512(row + (size_t)b * TW_ROWS * TW_BLOCK), bound);
        slots[node[i].left][b] = here & goes_left;
        slots[node[i].right][b] = here & ~goes_left;
      }
    }
    if (count < 32) {
      /* Leaves are padded, so that 32 can always be loaded. */
      const __m512i low = _mm512_loadu_si512(leaf), high = _mm512_loadu_si512(leaf + 16);
      for (int b = 0; b < N; ++b) {
        __m512i which = _mm512_setzero_si512();
        for (int i = 1; i <= count; ++i)
          which = _mm512_mask_mov_epi8(which, slots[count + i][b], number[i]);
        const __m128i part[4] = {
            _mm512_castsi512_si128(which), _mm512_extracti32x4_epi32(which, 1),
            _mm512_extracti32x4_epi32(which, 2), _mm512_extracti32x4_epi32(which, 3)};
        for (int j = 0; j < 4; ++j)
          sums[b][j] = _mm512_add_epi32(
              sums[b][j], _mm512_permutex2var_epi32(low, _mm512_cvtepu8_epi32(part[j]), high));
      }
    } else {
      for (int b = 0; b < N; ++b) {
        alignas(64) uint8_t at[TW_BLOCK];
        alignas(64) int32_t picked[TW_BLOCK];
        __m512i which = _mm512_setzero_si512();
        for (int i = 1; i <= count; ++i)
          which = _mm512_mask_mov_epi8(which, slots[count + i][b], _mm512_set1_epi8((char)i));
        _mm512_store_si512(at, which);
        for (int l = 0; l < TW_BLOCK; ++l) picked[l] = leaf[at[l]];
        for (int j = 0; j < 4; ++j)
          sums[b][j] = _mm512_add_epi32(sums[b][j], _mm512_load_si512(picked + 16 * j));
      }
    }
  }
  for (int b = 0; b < N; ++b)
    for (int j = 0; j < 4; ++j) _mm512_storeu_si512(total + TW_BLOCK * b + 16 * j, sums[b][j]);
}

static inline void sum_trees(const tw_forest *f, const uint8_t *rows, int32_t *total, int blocks) {
  const size_t size = (size_t)TW_ROWS * TW_BLOCK;
  int b = 0;
  for (; b + 4 <= blocks; b += 4) sum_blocks<4>(f, rows + b * size, total + b * TW_BLOCK);
  for (; b + 2 <= blocks; b += 2) sum_blocks<2>(f, rows + b * size, total + b * TW_BLOCK);
  for (; b < blocks; ++b) sum_blocks<1>(f, rows + b * size, total + b * TW_BLOCK);
}
#else
typedef unsigned char vec __attribute__((vector_size(TW_LANES * 8), may_alias));
enum { WIDTH = TW_LANES * 8, PARTS = TW_BLOCK / WIDTH };

/* Adds each kernel's leaf of one tree; `count` is the number of the last leaf. */
static inline void add_leaves(const int32_t *leaf, int count, const uint8_t *at, int32_t *sums) {
#if defined(__AVX2__)
  if (count < 16) {
    /* Sixteen leaves fit two registers, and looking up in registers needs no loads. */
    const __m256i low = _mm256_loadu_si256((const __m256i *)leaf);
    const __m256i high = _mm256_loadu_si256((const __m256i *)(leaf + 8));
    for (int i = 0; i < TW_BLOCK; i += 8) {
      const __m256i which = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(at + i)));
      const __m256 a = _mm256_castsi256_ps(_mm256_permutevar8x32_epi32(low, which));
      const __m256 b = _mm256_castsi256_ps(_mm256_permutevar8x32_epi32(high, which));
      const __m256 is_high = _mm256_castsi256_ps(_mm256_slli_epi32(which, 28));
      const __m256i picked = _mm256_castps_si256(_mm256_blendv_ps(a, b, is_high));
      __m256i *sum = (__m256i *)(sums + i);
      _mm256_storeu_si256(sum, _mm256_add_epi32(_mm256_loadu_si256(sum), picked));
    }
    return;
  }
#endif
  (void)count;
  for (int i = 0; i < TW_BLOCK; ++i) sums[i] += leaf[at[i]];
}

static inline void sum_block(const tw_forest *f, const uint8_t *rows, int32_t *total) {
  vec slots[2 * 256][PARTS];
  for (int64_t tree = 0; tree < f->trees; ++tree) {
    const tw_node *node = f->nodes + f->node_start[tree];
    const int count = f->node_start[tree + 1] - f->node_start[tree];
    for (int p = 0; p < PARTS; ++p) slots[0][p] = ~(vec){};
    for (int i = 0; i < count; ++i) {
      const uint8_t *row = rows + (size_t)node[i].feature * TW_BLOCK;
      const vec bound = node[i].bound + (vec){};
      for (int p = 0; p < PARTS; ++p) {
        const vec here = slots[i][p];
        const vec goes_left = (vec)(*(const vec *)(row + p * WIDTH) <= bound);
        slots[node[i].left][p] = here & goes_left;
        slots[node[i].right][p] = here & ~goes_left;
      }
    }
    uint8_t at[TW_BLOCK];
    for (int p = 0; p < PARTS; ++p) {
      vec which = (vec){};
      for (int i = 1; i <= count; ++i) which |= slots[count + i][p] & ((uint8_t)i + (vec){});
      std::memcpy(at + p * WIDTH, &which, WIDTH);
    }
    add_leaves(f->leaves + f->leaf_start[tree], count, at, total);
  }
}

static inline void sum_trees(const tw_forest *f, const uint8_t *rows, int32_t *total, int blocks) {
  for (int b = 0; b < blocks; ++b)
    sum_block(f, rows + (size_t)b * TW_ROWS * TW_BLOCK, total + b * TW_BLOCK);
}
#endif
"""

_BODY = """
struct tw_node { uint16_t feature; uint8_t bound; uint8_t unused; uint16_t left, right; };

/* Trees over bins; the slots of a tree are its nodes, then its leaves. */
struct tw_forest {
  int64_t trees, features;
  const int32_t *node_start, *leaf_start;
  const tw_node *nodes;
  const int32_t *leaves;
  double scale, offset;
  /* Per feature: where its row comes from (0 problem, 1 kernel, 2 mixed), which value that is,
     and its thresholds. */
  const int32_t *origin, *source;
  const double *const *thresholds;
  const int32_t *counts;
  const uint8_t *kernel_bins;
};

struct tw_context {
  int64_t kernels, blocks, has_base;
  const double *arch;
  const double *kernel_values;
  const double *handicap;
  int64_t stride;
  const tw_forest *rank, *valid;
  /* The level: a small forest over the problem's values, walked one node at a time. */
  int64_t level_trees;
  const int32_t *level_start, *level_value, *level_left, *level_right;
  const double *level_bound, *level_leaf;
  const int32_t *level_leaf_start;
  double level_offset;
  int64_t points, axes;
  const double *point;
  const int32_t *axis_value;
  /* Results. */
  int32_t *order;
  double *score;
  double *info;
  uint64_t *keys;
};

%(bins)s
static inline uint8_t bin_one(double x, const double *bounds, int count) {
  return (uint8_t)(std::lower_bound(bounds, bounds + count, x) - bounds);
}

%(trees)s
/* The rows of one block: problem rows stand already, kernel rows are copied, mixed ones binned. */
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

static void nearest(const tw_context *c, const double *values, double *info) {
  double best = 1e300;
  int64_t which = -1;
  for (int64_t p = 0; p < c->points; ++p) {
    double far = 0.0;
    for (int64_t j = 0; j < c->axes; ++j) {
      const double step = c->point[p * c->axes + j] - values[c->axis_value[j]];
      far += step * step;
    }
    if (far < best) { best = far; which = p; }
  }
  info[1] = best;
  info[2] = (double)which;
}

#define TW_API extern "C" __attribute__((visibility("default")))

TW_API void tw_measure(tw_context *c, const double *problem) {
  double values[TW_VALUES + 1];
  tw_problem(problem, c->arch, values);
  c->info[0] = level_of(c, values);
  nearest(c, values, c->info);
}

TW_API void tw_features(tw_context *c, const double *problem, double *values, double *mixed) {
  tw_problem(problem, c->arch, values);
  for (int64_t b = 0; b < c->blocks; ++b)
    tw_mixed(values, c->kernel_values + b * TW_BLOCK, c->stride,
             mixed + b * TW_MIXED * TW_BLOCK);
}

/* Best first and stable: of equal scores the earlier kernel of the pool comes first. */
static void sort_pool(tw_context *c) {
  struct item { uint64_t key; int32_t at; int32_t unused; };
  item *items = (item *)c->keys, *other = items + c->blocks * TW_BLOCK;
  const int64_t count = c->kernels;
  for (int64_t i = 0; i < count; ++i) {
    /* The bits of a double, turned so that a larger score is a smaller integer; -0 is 0. */
    const double score = c->score[i] + 0.0;
    uint64_t bits;
    std::memcpy(&bits, &score, 8);
    items[i] = {bits >> 63 ? bits : ~bits & ~((uint64_t)1 << 63), (int32_t)i, 0};
  }
  if (count < 512) {
    std::sort(items, items + count, [](const item &x, const item &y) {
      return x.key < y.key || (x.key == y.key && x.at < y.at);
    });
  } else {
    for (int shift = 0; shift < 64; shift += 11) {
      int32_t start[2049] = {0};
      for (int64_t i = 0; i < count; ++i) ++start[(items[i].key >> shift & 2047) + 1];
      if (start[(items[0].key >> shift & 2047) + 1] == count) continue;
      for (int d = 0; d < 2048; ++d) start[d + 1] += start[d];
      for (int64_t i = 0; i < count; ++i) other[start[items[i].key >> shift & 2047]++] = items[i];
      std::swap(items, other);
    }
  }
  for (int64_t i = 0; i < count; ++i) c->order[i] = items[i].at;
}

TW_API void tw_rank(tw_context *c, const double *problem) {
  double values[TW_VALUES + 1];
  alignas(64) double mixed[(TW_MIXED + 1) * TW_BLOCK];
  alignas(64) static thread_local uint8_t rank_rows[TW_TOGETHER * TW_ROWS * TW_BLOCK];
  alignas(64) static thread_local uint8_t valid_rows[TW_TOGETHER * TW_ROWS * TW_BLOCK];
  const size_t size = (size_t)TW_ROWS * TW_BLOCK;
  tw_problem(problem, c->arch, values);
  c->info[0] = level_of(c, values);
  nearest(c, values, c->info);
  for (int b = 0; b < TW_TOGETHER && b < c->blocks; ++b) {
    fill_problem_rows(c->rank, values, rank_rows + b * size);
    if (c->valid) fill_problem_rows(c->valid, values, valid_rows + b * size);
  }
  for (int64_t first = 0; first < c->blocks; first += TW_TOGETHER) {
    const int blocks = (int)std::min<int64_t>(TW_TOGETHER, c->blocks - first);
    int32_t total[TW_TOGETHER * TW_BLOCK] = {0}, will_run[TW_TOGETHER * TW_BLOCK] = {0};
    double *score = c->score + first * TW_BLOCK;
    for (int b = 0; b < blocks; ++b) {
      tw_mixed(values, c->kernel_values + (first + b) * TW_BLOCK, c->stride, mixed);
      fill_rows(c->rank, first + b, mixed, rank_rows + b * size);
      if (c->valid) fill_rows(c->valid, first + b, mixed, valid_rows + b * size);
      if (c->has_base)
        for (int i = 0; i < TW_BLOCK; ++i)
          score[b * TW_BLOCK + i] = tw_log2(mixed[(TW_MIXED - 1) * TW_BLOCK + i]);
    }
    sum_trees(c->rank, rank_rows, total, blocks);
    if (c->valid) sum_trees(c->valid, valid_rows, will_run, blocks);
    for (int i = 0; i < blocks * TW_BLOCK; ++i) {
      const double forest = total[i] * c->rank->scale + c->rank->offset;
      score[i] = c->has_base ? forest - score[i] : forest;
      if (c->valid && will_run[i] * c->valid->scale + c->valid->offset < 0.0) score[i] -= 1000.0;
      score[i] -= c->handicap[first * TW_BLOCK + i];
    }
  }
  sort_pool(c);
}
"""


def scorer_source(layout: Layout) -> str:
    """The whole translation unit of a model."""
    rows = max((len(f.features) for n, f in layout.model.forests.items() if n in SERVED), default=1)
    head = _HEAD % {
        "block": BLOCK,
        "values": len(layout.problem_values),
        "mixed": len(layout.mixed_outputs),
    }
    head += f"#define TW_ROWS {max(1, rows)}\n\n"
    body = _BODY.replace("%(bins)s", _BINS).replace("%(trees)s", _TREES)
    return head + C_PRELUDE + layout.problem_source() + layout.mixed_source() + body
