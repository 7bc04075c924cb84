// Images of few channels as rows of elements: a row of the filter is a run of them.
// Macros: ELEMENT, IN_CHANNELS, FILTER_H/W, STRIDE_H/W, PAD_W, TILE_H, TILE_W (of 8).
#pragma once
#include "cuda/ptx.cuh"

constexpr int run = FILTER_W * IN_CHANNELS, run_chunks = (run + 7) / 8;  // of 8 elements
constexpr int pixel_step = STRIDE_W * IN_CHANNELS;
// TMA begins at multiples of 16 bytes: elements of a copied row before the first that is wanted.
constexpr int lead = (8 - PAD_W * IN_CHANNELS % 8) % 8;
constexpr bool is_even = pixel_step % 2 == 0 && lead % 2 == 0;  // then two elements are one word
// What the last pixel reads, and where pixels are odd a word more.
constexpr int row_elements =
    (lead + (TILE_W - 1) * pixel_step + run_chunks * 8 + (is_even ? 0 : 1) + 7) / 8 * 8;
constexpr int row_bytes = 2 * row_elements;
constexpr int patch_h = (TILE_H - 1) * STRIDE_H + FILTER_H;
constexpr int patch_bytes = patch_h * row_bytes;
constexpr int stage_bytes = (patch_bytes + 127) / 128 * 128;

struct Tiles {
  int across, down, count;
  struct Spot {
    int w, h, n;
  };
  DEVICE Spot spot(int tile) const {
    const int line = tile / across;
    return {tile % across * TILE_W, line % down * TILE_H, line / down};
  }
};

// Where a tile's row begins, in elements.
DEVICE int row_start(int w) { return (w * STRIDE_W - PAD_W) * IN_CHANNELS - lead; }

// Two neighbouring elements.
DEVICE u32 load_two(u32 from) {
  if constexpr (is_even) return load_shared_u32(from);
  const u32 first = load_shared_u32(from & ~3u), second = load_shared_u32((from & ~3u) + 4);
  return from & 2 ? first >> 16 | second << 16 : first;
}
// One element.
DEVICE u32 load_one(u32 from) { return load_shared_u32(from & ~3u) >> (from & 2 ? 16 : 0) & 0xFFFF; }
