// TMA in its modes, bulk copies and cp.async. Every copy lands some time after it was started, and
// what it is to fill reads as poison until then.
#include <algorithm>
#include <cstring>

#include "machine.hpp"
#include "tensor_map.hpp"

namespace emulated {

namespace {

// Chunks of 16 bytes change places with the number of their 128-byte line, by absolute address.
u32 swizzled(u32 address, u32 swizzle) {
  const u32 bits = swizzle == 128 ? 7 : swizzle == 64 ? 3 : swizzle == 32 ? 1 : 0;
  return address ^ ((address >> 7 & bits) << 4);
}

struct Box {
  const TensorMap* map;
  u32 counts[5];  // elements brought, of each dimension; ones above the rank
  u32 bytes;
};

const TensorMap* map_of(const void* opaque, int rank) {
  const TensorMap* map = *static_cast<const TensorMap* const*>(opaque);
  if (!map || map->magic != kMapMagic) fail("the argument is no tensor map");
  if (int(map->rank) != rank) fail("a copy of %d dimensions by a map of %u", rank, map->rank);
  return map;
}

Box box_of(const TensorMap* map) {
  Box box{map, {1, 1, 1, 1, 1}, map->element_bytes};
  for (u32 i = 0; i < map->rank; i++) {
    box.counts[i] = (map->box[i] + map->steps[i] - 1) / map->steps[i];
    box.bytes *= box.counts[i];
  }
  return box;
}

// Calls `row(offset in the box, address of element 0, first and last + 1 valid element)` for each
// innermost row; the address is null where the whole row lies outside.
template <class Row>
void each_row(const Box& box, const int* at, Row row) {
  const TensorMap& map = *box.map;
  const u32 row_bytes = box.counts[0] * map.element_bytes;
  u32 rows = 1;
  for (u32 i = 1; i < map.rank; i++) rows *= box.counts[i];
  for (u32 r = 0; r < rows; r++) {
    const char* address = map.base + long(at[0]) * map.element_bytes;
    bool is_inside = true;
    for (u32 i = 1, left = r; i < map.rank; left /= box.counts[i], i++) {
      const long where = at[i] + long(left % box.counts[i]) * map.steps[i];
      is_inside &= where >= 0 && where < long(map.sizes[i]);
      address += where * long(map.strides[i]);
    }
    const long first = std::max(0l, -long(at[0]));
    const long last = std::min(long(box.counts[0]), long(map.sizes[0]) - at[0]);
    row(r * row_bytes, is_inside && first < last ? address : nullptr, u32(first), u32(last));
  }
}

void fill_row(Spot to, u32 swizzle, u32 row_bytes, const char* from, u32 first, u32 last) {
  for (u32 i = 0; i < row_bytes; i++) {
    const u32 address = kSharedStart + to.offset + i;
    const u32 there = swizzled(address, swizzle) - kSharedStart;
    bytes_of({to.block, 0})[there] = from && i >= first && i < last ? from[i] : 0;
  }
}

void check_target(u32 to, const TensorMap* map, u32 row_bytes) {
  if (to % 128) fail("a TMA copy to %u, which is no multiple of 128", to);
  if (row_bytes % 16) fail("a TMA box with rows of %u bytes; use a multiple of 16", row_bytes);
  if (map->swizzle && row_bytes != map->swizzle)
    fail("a TMA box with rows of %u bytes under a swizzle of %u", row_bytes, map->swizzle);
}

// Starts a copy of `bytes` into each block of `ranks`; `fill` writes one block's copy.
void start_load(u32 to, u32 barrier, u32 ranks, u32 bytes, const std::function<void(Spot)>& fill) {
  Block* mine = machine->running->block;
  if (!ranks) ranks = 1u << mine->rank;
  for (u32 rank = 0; rank < 16; rank++) {
    if (!(ranks >> rank & 1)) continue;
    const Spot spot = locate(at_rank(to, rank), bytes, "a TMA copy");
    const Spot signal = locate(at_rank(barrier, rank), 8, "a TMA copy's barrier");
    poison(spot, bytes, "a TMA copy");
    machine->start({"a TMA copy into shared memory", mine, nullptr, [=] {
                      fill(spot);
                      note_async_write(spot, bytes);
                      complete_bytes(signal.block, signal.offset, bytes);
                    }});
  }
}

void start_store(u32 bytes, std::function<void()> write) {
  Fiber* self = machine->running;
  if (!bytes) fail("a bulk store of nothing");
  auto group = self->bulk.open;
  ++*group;
  machine->start({"a store out of shared memory", self->block, nullptr, [=] {
                    write();
                    --*group;
                    self->bulk.landed.wake();
                  }});
}

void store_element(char* to, const unsigned char* from, u32 bytes, bool adds, Spot spot) {
  if (bytes % 2 == 0) checked(from, spot, "a store");
  if (!adds) {
    memcpy(to, from, bytes);
    return;
  }
  if (bytes != 4) fail("adding stores are emulated for fp32 only");
  float sum, value;
  memcpy(&sum, to, 4);
  memcpy(&value, from, 4);
  sum += value;
  memcpy(to, &sum, 4);
}

}  // namespace

// Hardware answers what breaks these with an illegal instruction (seen on an H200, 2026-11-18).
static void check_corner(const TensorMap* map, const int* at, bool is_store) {
  if (at[0] * int(map->element_bytes) % 16)
    fail("a TMA copy begins at element %d of a row: no multiple of 16 bytes", at[0]);
  for (u32 i = 0; is_store && i < map->rank; i++)
    if (at[i] < 0 || at[i] >= int(map->sizes[i]))
      fail("a TMA store begins at %d of %d in dimension %d", at[i], int(map->sizes[i]), int(i));
}

void tma_tiled(u32 to, const void* opaque, u32 barrier, u32 ranks, int rank, const int* at) {
  const TensorMap* map = map_of(opaque, rank);
  if (map->im2col_pixels) fail("a tiled copy by an im2col map");
  const Box box = box_of(map);
  const u32 row_bytes = box.counts[0] * map->element_bytes;
  check_target(to, map, row_bytes);
  check_corner(map, at, false);
  std::vector<int> corner(at, at + rank);
  start_load(to, barrier, ranks, box.bytes, [=](Spot spot) {
    each_row(box, corner.data(), [&](u32 offset, const char* from, u32 first, u32 last) {
      fill_row({spot.block, spot.offset + offset}, map->swizzle, row_bytes, from,
               first * map->element_bytes, last * map->element_bytes);
    });
  });
}

void tma_im2col(u32 to, const void* opaque, u32 barrier, u32 ranks, int rank, const int* at,
                const int* offsets) {
  const TensorMap* map = map_of(opaque, rank);
  if (!map->im2col_pixels) fail("an im2col copy by a tiled map");
  const u32 row_bytes = map->im2col_channels * map->element_bytes, spatial = map->rank - 2;
  check_target(to, map, row_bytes);
  check_corner(map, at, false);
  std::vector<int> corner(at, at + rank), shift(offsets, offsets + spatial);
  for (u32 i = 0; i < spatial; i++)
    if (shift[i] > (spatial == 1 ? 65535 : spatial == 2 ? 255 : 31))
      fail("an im2col offset of %d", shift[i]);
  start_load(to, barrier, ranks, row_bytes * map->im2col_pixels, [=](Spot spot) {
    std::vector<int> pixel = corner;
    Box box{map, {map->im2col_channels, 1, 1, 1, 1}, row_bytes};
    for (u32 p = 0; p < map->im2col_pixels; p++) {
      std::vector<int> read = pixel;
      for (u32 i = 0; i < spatial; i++) read[i + 1] += shift[i];
      each_row(box, read.data(), [&](u32, const char* from, u32 first, u32 last) {
        fill_row({spot.block, spot.offset + p * row_bytes}, map->swizzle, row_bytes, from,
                 first * map->element_bytes, last * map->element_bytes);
      });
      for (u32 i = 0; i <= spatial; i++) {  // the next corner, or on to the next row or image
        pixel[i + 1] += i < spatial ? int(map->steps[i + 1]) : 1;
        if (i == spatial || pixel[i + 1] < int(map->sizes[i + 1]) + map->upper[i]) break;
        pixel[i + 1] = map->lower[i];
      }
    }
  });
}

void tma_store(const void* opaque, u32 from, int rank, const int* at, bool adds) {
  const TensorMap* map = map_of(opaque, rank);
  const Box box = box_of(map);
  check_target(from, map, box.counts[0] * map->element_bytes);
  check_corner(map, at, true);
  const Spot spot = locate(from, box.bytes, "a TMA store");
  check_fenced(spot, box.bytes, "a TMA store");
  std::vector<int> corner(at, at + rank);
  start_store(box.bytes, [=] {
    each_row(box, corner.data(), [&](u32 offset, const char* row, u32 first, u32 last) {
      for (u32 i = first; row && i < last; i++) {
        const u32 address = kSharedStart + spot.offset + offset + i * map->element_bytes;
        const Spot element{spot.block, swizzled(address, map->swizzle) - kSharedStart};
        store_element(const_cast<char*>(row) + i * map->element_bytes, bytes_of(element),
                      map->element_bytes, adds, element);
      }
    });
  });
}

void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
  if (bytes % 16 || to % 16 || u64(from) % 16) fail("a bulk copy of %u bytes is not aligned", bytes);
  start_load(to, barrier, 0, bytes, [=](Spot spot) { memcpy(bytes_of(spot), from, bytes); });
}

void bulk_store(void* to, u32 from, u32 bytes, bool adds) {
  if (bytes % 16 || from % 16 || u64(to) % 16) fail("a bulk store of %u bytes is not aligned", bytes);
  const Spot spot = locate(from, bytes, "a bulk store");
  check_fenced(spot, bytes, "a bulk store");
  start_store(bytes, [=] {
    for (u32 i = 0; i < bytes; i += 4)
      store_element(static_cast<char*>(to) + i, bytes_of(spot) + i, 4, adds, spot);
  });
}

void Groups::commit() {
  committed.push_back(open);
  open = std::make_shared<int>(0);
}

bool Groups::at_most(u32 groups_left) {
  while (!committed.empty() && *committed.front() == 0) committed.pop_front();
  return committed.size() <= groups_left ||
         std::all_of(committed.begin(), committed.end() - groups_left,
                     [](const auto& group) { return *group == 0; });
}

void bulk_commit() { machine->running->bulk.commit(); }

void bulk_wait(u32 groups_left) {
  Groups& groups = machine->running->bulk;
  wait_until(groups.landed, {"stores out of shared memory, all but %llu groups", groups_left},
             [&] { return groups.at_most(groups_left); });
}

namespace {

// Arrives for cp.async that all lie before the oldest still under way.
void settle_arrivals(Fiber* fiber) {
  auto oldest = std::min_element(fiber->copies_out.begin(), fiber->copies_out.end());
  const u64 landed_before = oldest == fiber->copies_out.end() ? ~0ull : *oldest;
  auto& arrivals = fiber->arrivals;
  for (size_t i = 0; i < arrivals.size();)
    if (arrivals[i].first <= landed_before) {
      const u32 offset = arrivals[i].second;
      arrivals.erase(arrivals.begin() + i);
      arrive(fiber->block, offset, 1);
    } else {
      i++;
    }
}

}  // namespace

void copy_async(u32 to, const void* from, u32 bytes, u32 valid_bytes) {
  if (to % bytes || u64(from) % bytes) fail("cp.async of %u bytes is not aligned", bytes);
  const Spot spot = locate(to, bytes, "cp.async");
  poison(spot, bytes, "cp.async");
  Fiber* self = machine->running;
  auto group = self->copies.open;
  ++*group;
  const u64 number = self->copies_issued++;
  self->copies_out.push_back(number);
  machine->start({"cp.async", self->block, nullptr, [=] {
                    memset(bytes_of(spot), 0, bytes);
                    memcpy(bytes_of(spot), from, valid_bytes);
                    note_async_write(spot, bytes);
                    --*group;
                    auto& out = self->copies_out;
                    out.erase(std::find(out.begin(), out.end(), number));
                    self->copies.landed.wake();
                    settle_arrivals(self);
                  }});
}

void copy_commit() { machine->running->copies.commit(); }

void copy_wait(u32 groups_left) {
  Groups& groups = machine->running->copies;
  wait_until(groups.landed, {"cp.async, all but %llu groups", groups_left},
             [&] { return groups.at_most(groups_left); });
}

void copy_arrive(u32 barrier, bool counts_itself) {
  Barrier& target = barrier_at(barrier, "cp.async.mbarrier.arrive");
  if (counts_itself) target.pending++;
  Fiber* self = machine->running;
  self->arrivals.push_back({self->copies_issued, locate(barrier, 8, "").offset});
  settle_arrivals(self);
}

}  // namespace emulated
