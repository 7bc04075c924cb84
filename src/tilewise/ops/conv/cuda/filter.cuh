// A tile of the filter [k][tap][c] by TMA. Forward: TILE_N rows (filters) of 128 bytes of channels.
// Backward, where the filter is read across: panels of 64 channels, a row for each filter of the step.
// ByGroup: its map has the filters of a group in a dimension of their own, so that what a step reads
// beyond them is zero, not the next group's.
#pragma once
#include "cuda/ptx.cuh"

template <int TileN, int TileK, bool IsBackward, int Blocks, bool ByGroup>
struct FilterTile {
  static constexpr int panels = (TileN + 63) / 64;  // backward; the last may be wider than the tile
  static constexpr u32 bytes = (IsBackward ? panels * TileK : TileN) * 128;
  static constexpr u16 everyone = (1 << Blocks) - 1;
  const TensorMap* map;
  int in_channels, out_channels;  // of a group
  u32 rank;                       // in a cluster whose blocks fetch a part each, for all

  DEVICE void load(u32 to, u32 barrier, int group, int column, int tap, int channel) const {
    if constexpr (!IsBackward) {
      constexpr int rows = TileN / Blocks;
      copy(to + rank * rows * 128, barrier, channel, tap,
           group * out_channels + column + (int)rank * rows);
    } else {
      constexpr int rows = TileK / Blocks;
#pragma unroll
      for (int panel = 0; panel < panels; panel++)
        if constexpr (ByGroup)
          copy(to + (panel * TileK + rank * rows) * 128, barrier, column + panel * 64, tap,
               channel + (int)rank * rows, group);
        else
          copy(to + (panel * TileK + rank * rows) * 128, barrier, column + panel * 64, tap,
               group * in_channels + channel + (int)rank * rows);
    }
  }
  template <class... At>
  DEVICE void copy(u32 to, u32 barrier, At... at) const {
    if constexpr (Blocks > 1) tma_load_multicast(to, map, barrier, everyone, at...);
    else tma_load(to, map, barrier, at...);
  }
};
