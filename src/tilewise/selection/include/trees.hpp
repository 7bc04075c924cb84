// The sum of leaves for blocks of kernels. See forest.hpp for how a kernel finds its leaf.
#pragma once
#include <cstring>

#include "forest.hpp"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512BW__)
// How many bits are set in each byte, for bytes that are a power of two less one.
static inline __m512i ones(__m512i x) {
  const __m512i table = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, 1, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 4));
  const __m512i nibble = _mm512_set1_epi8(15);
  return _mm512_add_epi8(
      _mm512_shuffle_epi8(table, _mm512_and_si512(x, nibble)),
      _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(x, 4), nibble)));
}

// The leaves numbered by `at`, of at most so many: registers hold up to 128, and looking up in them
// needs no loads. More are gathered from memory.
template <int LEAVES>
static inline __m512i leaves_at(const int32_t *leaf, __m512i at) {
  if constexpr (LEAVES == 16) {
    return _mm512_permutexvar_epi32(at, _mm512_loadu_si512(leaf));
  } else if constexpr (LEAVES == 32) {
    const __m512i low = _mm512_loadu_si512(leaf), high = _mm512_loadu_si512(leaf + 16);
    return _mm512_permutex2var_epi32(low, at, high);
  } else if constexpr (LEAVES <= 128) {
    const __mmask16 is_high = _mm512_test_epi32_mask(at, _mm512_set1_epi32(LEAVES / 2));
    return _mm512_mask_mov_epi32(leaves_at<LEAVES / 2>(leaf, at), is_high,
                                 leaves_at<LEAVES / 2>(leaf + LEAVES / 2, at));
  } else {
    return _mm512_i32gather_epi32(at, leaf, 4);
  }
}

template <int LEAVES>
static inline void add_some(const int32_t *leaf, __m512i at, __m512i *sums) {
  const __m128i part[4] = {_mm512_castsi512_si128(at), _mm512_extracti32x4_epi32(at, 1),
                           _mm512_extracti32x4_epi32(at, 2), _mm512_extracti32x4_epi32(at, 3)};
  for (int j = 0; j < 4; ++j)
    sums[j] = _mm512_add_epi32(sums[j], leaves_at<LEAVES>(leaf, _mm512_cvtepu8_epi32(part[j])));
}

// Adds the leaves numbered by `at` to 64 sums.
static inline void add_leaves(const int32_t *leaf, int count, __m512i at, __m512i *sums) {
  if (count <= 16)
    add_some<16>(leaf, at, sums);
  else if (count <= 32)
    add_some<32>(leaf, at, sums);
  else if (count <= 64)
    add_some<64>(leaf, at, sums);
  else if (count <= 128)
    add_some<128>(leaf, at, sums);
  else
    add_some<256>(leaf, at, sums);
}

// Which of eight leaves a block of kernels can reach.
static inline __m512i reach(const tw_forest *f, int byte, const uint8_t *rows) {
  __m512i alive = _mm512_set1_epi8(-1);
  const tw_step *const end = f->steps + f->step_start[byte + 1];
  for (const tw_step *s = f->steps + f->step_start[byte]; s != end; ++s) {
    const __mmask64 above = _mm512_cmpgt_epu8_mask(_mm512_load_si512(rows + s->row),
                                                   _mm512_set1_epi32((int)s->bound));
    const __m512i kept = _mm512_and_si512(alive, _mm512_set1_epi32((int)s->keep));
    alive = _mm512_mask_mov_epi8(alive, above, kept);
  }
  return alive;
}

static inline void sum_trees(const tw_forest *f, const uint8_t *rows, int32_t *total) {
  __m512i sums[4];
  for (int j = 0; j < 4; ++j) sums[j] = _mm512_setzero_si512();
  for (int64_t tree = 0; tree < f->trees; ++tree) {
    __m512i alive = reach(f, f->byte_start[tree], rows), base = _mm512_setzero_si512();
    for (int byte = f->byte_start[tree] + 1; byte < f->byte_start[tree + 1]; ++byte) {
      const __mmask64 none = _mm512_testn_epi8_mask(alive, alive);
      alive = _mm512_mask_mov_epi8(alive, none, reach(f, byte, rows));
      base = _mm512_mask_add_epi8(base, none, base, _mm512_set1_epi8(8));
    }
    // Ones below the lowest bit that is set: as many as leaves before the kernel's.
    const __m512i below =
        _mm512_andnot_si512(alive, _mm512_add_epi8(alive, _mm512_set1_epi8(-1)));
    const int count = f->leaf_start[tree + 1] - f->leaf_start[tree];
    add_leaves(f->leaves + f->leaf_start[tree], count, _mm512_add_epi8(base, ones(below)), sums);
  }
  for (int j = 0; j < 4; ++j) _mm512_storeu_si512(total + 16 * j, sums[j]);
}
#else
#if defined(__AVX2__)
enum { WIDTH = 32, PARTS = TW_BLOCK / WIDTH };
#else
enum { WIDTH = 16, PARTS = TW_BLOCK / WIDTH };
#endif
typedef unsigned char bytes __attribute__((vector_size(WIDTH), may_alias));

// How many bits are set in each byte.
static inline bytes ones(bytes x) {
  x = x - ((x >> 1) & 0x55);
  x = (x & 0x33) + ((x >> 2) & 0x33);
  return (x + (x >> 4)) & 0x0f;
}

// Adds the leaves numbered by `at` to 64 sums.
static inline void add_leaves(const int32_t *leaf, int count, const uint8_t *at, int32_t *sums) {
#if defined(__AVX2__)
  if (count <= 16) {
    // Sixteen leaves fit two registers, and looking up in registers needs no loads.
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

// Which of eight leaves a block of kernels can reach.
static inline void reach(const tw_forest *f, int byte, const uint8_t *rows, bytes *alive) {
  for (int p = 0; p < PARTS; ++p) alive[p] = ~(bytes){};
  const tw_step *const end = f->steps + f->step_start[byte + 1];
  for (const tw_step *s = f->steps + f->step_start[byte]; s != end; ++s) {
    const bytes bound = (uint8_t)s->bound + (bytes){}, keep = (uint8_t)s->keep + (bytes){};
    const bytes *row = (const bytes *)(rows + s->row);
    for (int p = 0; p < PARTS; ++p) alive[p] &= (bytes)(row[p] <= bound) | keep;
  }
}

static inline void sum_trees(const tw_forest *f, const uint8_t *rows, int32_t *total) {
  for (int64_t tree = 0; tree < f->trees; ++tree) {
    const int first = f->byte_start[tree];
    bytes alive[PARTS], base[PARTS] = {};
    reach(f, first, rows, alive);
    for (int byte = first + 1; byte < f->byte_start[tree + 1]; ++byte) {
      bytes more[PARTS];
      reach(f, byte, rows, more);
      for (int p = 0; p < PARTS; ++p) {
        const bytes none = (bytes)(alive[p] == 0);
        alive[p] |= more[p] & none;
        base[p] += none & 8;
      }
    }
    uint8_t at[TW_BLOCK];
    for (int p = 0; p < PARTS; ++p) {
      // Ones below the lowest bit that is set: as many as leaves before the kernel's.
      const bytes which = base[p] + ones((bytes)(~alive[p] & (alive[p] - 1)));
      std::memcpy(at + p * WIDTH, &which, WIDTH);
    }
    const int count = f->leaf_start[tree + 1] - f->leaf_start[tree];
    add_leaves(f->leaves + f->leaf_start[tree], count, at, total);
  }
}
#endif
