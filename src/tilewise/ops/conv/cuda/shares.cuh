// So many things for so many, evenly: the first ones have one more where they do not come out even.
// One division of 32 bits: schedules are worked out while the matrix units wait.
#pragma once
#include "cuda/ptx.cuh"

struct Shares {
  u32 least, more;  // what everybody has, and how many have one more
  DEVICE Shares(u32 things, u32 count) : least(things / count), more(things - things / count * count) {}
  // The first thing of share `index`; of the one behind the last, how many there are.
  DEVICE int first(u32 index) const { return index * least + (index < more ? index : more); }
  // Whose share a thing is in.
  DEVICE int owner(u32 thing) const {
    const u32 end = more * (least + 1);
    return thing < end ? thing / (least + 1) : more + (thing - end) / least;
  }
};
