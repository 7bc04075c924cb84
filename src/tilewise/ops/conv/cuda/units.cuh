// How the groups of a block lie in shared memory, 64 channels of the result in all.
//
// UNITS 0: as in the images, side by side. Else a block has so many units of MERGED groups each, whose
// channels (multiples of 8) TMA pads with zeros to slots of 16, 32 or 64, and clips again when it stores:
// its maps have the channels of a unit and the units as dimensions of their own. A row of pixels lies
// in one piece for each unit.
// Macros: READ_GROUP, WRITTEN_GROUP (channels a group), UNITS, MERGED.
#pragma once
#include "cuda/ptx.cuh"

constexpr int block_channels = 64;  // of the result
constexpr bool is_padded = UNITS > 0;
constexpr int units = is_padded ? UNITS : 1;
constexpr int read_unit = MERGED * READ_GROUP, written_unit = MERGED * WRITTEN_GROUP;
constexpr int read_slot =
    !is_padded ? block_channels * READ_GROUP / WRITTEN_GROUP
               : read_unit > 32 ? 64 : read_unit > 16 ? 32 : 16;
constexpr int written_slot = block_channels / units;
constexpr int read_bytes = 2 * read_slot, written_bytes = 2 * written_slot;  // of a pixel of a unit
// Channels of the image and of the result from one block to the next.
constexpr int read_step = is_padded ? units * read_unit : read_slot;
constexpr int written_step = is_padded ? units * written_unit : written_slot;

// The 16 channels of the result that a warp of a block has.
struct Share {
  int unit, row;  // its unit in the block; where the 16 begin there
  DEVICE Share(u32 warp)
      : unit(is_padded ? warp * 16 / written_slot : 0),
        row(is_padded ? warp * 16 % written_slot : warp * 16) {}
  // Of the whole result.
  DEVICE int channel(u32 block) const { return (int)block * written_step + unit * written_unit + row; }
  // Chunks of 8 channels in a slot, where what it reads and what it writes begin.
  DEVICE int read_chunk() const {
    if (is_padded) return 0;
    return WRITTEN_GROUP < 16 ? row / 8 : row / WRITTEN_GROUP * READ_GROUP / 8;
  }
  DEVICE int written_chunk() const { return row / 8; }
  // Of a line of pixels that is `width` long in every unit: its first pixel's row.
  DEVICE int line(int line, int width) const { return (line * units + unit) * width; }
};

// Whether entry (channel written, channel read) of a unit is one of the filter's.
DEVICE bool is_in_filter(int written, int read) {
  return written < written_unit && read < read_unit && written / WRITTEN_GROUP == read / READ_GROUP;
}
