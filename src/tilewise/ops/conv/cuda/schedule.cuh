// Which tile is whose: channels innermost, then groups, then pixels, then parts of the reduction, so
// that neighbours share pixels in the cache. A cluster takes neighbouring tiles: of pixels where it
// shares the filter, of channels where it shares the pixels. IsCut: the reduction comes in parts.
//
// Everybody works this out between two tiles, when the matrix units are idle: no division is signed or
// of 64 bits, and none is done whose answer is known.
#pragma once
#include "conv/cuda/shares.cuh"

template <int Blocks, bool SharesFilter, bool IsCut>
struct Schedule {
  int pixel_tiles, channel_tiles, groups, splits, steps;

  struct Work {
    int pixel_tile, channel_tile, group, split, first, last;  // steps of the reduction
  };
  static DEVICE int clusters(int tiles, bool is_shared) {
    return is_shared ? (tiles + Blocks - 1) / Blocks : tiles;
  }
  DEVICE int pixel_clusters() const { return clusters(pixel_tiles, SharesFilter); }
  DEVICE int channel_clusters() const { return clusters(channel_tiles, !SharesFilter); }
  DEVICE int count() const { return pixel_clusters() * channel_clusters() * groups * splits; }
  DEVICE Work work(int index, u32 rank) const {
    const u32 across = channel_clusters();
    u32 rest = (u32)index / across;
    const int channel = index - rest * across;
    int group = 0, split = 0, first = 0, last = steps;
    if (groups > 1) {
      const u32 outer = rest / (u32)groups;
      group = rest - outer * groups;
      rest = outer;
    }
    if constexpr (IsCut) {
      split = rest / (u32)pixel_clusters();
      rest -= split * pixel_clusters();
      const Shares parts(steps, splits);
      first = parts.first(split);
      last = parts.first(split + 1);
    }
    const int pixel = rest;
    return {SharesFilter ? pixel * Blocks + (int)rank : pixel,
            SharesFilter ? channel : channel * Blocks + (int)rank,
            group,
            split,
            first,
            last};
  }
};
