// Which tile is whose: channels innermost, then groups, then pixels, then parts of the reduction, so
// that neighbours share pixels in the cache. A cluster takes neighbouring tiles: of pixels where it
// shares the filter, of channels where it shares the pixels.
#pragma once
#include "cuda/ptx.cuh"

template <int Blocks, bool SharesFilter>
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
    const int channel = index % channel_clusters(), rest = index / channel_clusters();
    const int pixel = rest / groups % pixel_clusters(), split = rest / groups / pixel_clusters();
    return {SharesFilter ? pixel * Blocks + (int)rank : pixel,
            SharesFilter ? channel : channel * Blocks + (int)rank,
            rest % groups,
            split,
            (int)((i64)steps * split / splits),
            (int)((i64)steps * (split + 1) / splits)};
  }
};
