// SPDX-License-Identifier: MIT
// Backward-weight convolution: for every tap, (k x pixels) times (pixels x c).
//
// A block of pixels is copied once into channel panels, the input on padded planes, so that a tap
// is an offset and nothing is copied per tap. A tile is kMr channels of one tensor (broadcast) x kNv
// vectors of the other's, reduced over the rows of the block; its sums wait in scratch memory for
// the next block. Work is split by channels, or by pixels with one set of sums per worker added up
// in a fixed order.
#pragma once
#include <type_traits>

#include "conv_pack.hpp"
#include "conv_tile.hpp"

namespace tw {

// dst[p * kWidth + c] = channel c of pixel p; channels beyond `channels` are zero.
template <int kWidth, bool kNhwc, class In>
TW_INLINE void pixel_panel(float* dst, const In* src, int64_t channel_stride, int64_t channels, int64_t pixels, int64_t step) {
  if (kNhwc) {
    for (int64_t p = 0; p < pixels; ++p, dst += kWidth, src += step) {
      copy_run(dst, src, channels);
      if (channels < kWidth) zero_run(dst + channels, kWidth - channels);
    }
    return;
  }
  for (int64_t p = 0; p < pixels; p += kLanes) {
    const int64_t count = min_of(kLanes, pixels - p);
    for (int64_t c0 = 0; c0 < kWidth; c0 += kLanes) {
      vf square[kLanes];
      const In* from = src + p * step + c0 * channel_stride;
      if (step == 1 && count == kLanes) {
        TW_UNROLL
        for (int i = 0; i < kLanes; ++i) square[i] = c0 + i < channels ? lanes_of(from + i * channel_stride) : vf{};
      } else {
        for (int i = 0; i < kLanes; ++i) {
          float part[kLanes] = {};
          if (c0 + i < channels)
            for (int64_t j = 0; j < count; ++j) part[j] = lane_of(from[i * channel_stride + j * step]);
          square[i] = load(part);
        }
      }
      transpose(square);
      float* to = dst + p * kWidth + c0;
      for (int64_t i = 0; i < count; ++i) {
        if (c0 + kLanes <= kWidth)
          store(to + i * kWidth, square[i]);
        else
          std::memcpy(to + i * kWidth, &square[i], (kWidth % kLanes) * sizeof(float));
      }
    }
  }
}

template <class InT, class OutT, bool kNhwc, bool kVectorIsK, bool kByPixels, int kMr, int kNv, int kBlock>
struct WeightProduct {
  using In = InT;
  using Out = OutT;
  static constexpr int kNr = kNv * kLanes, kTile = kMr * kNr;
  static constexpr int kWideX = kVectorIsK ? kMr : kNr, kWideY = kVectorIsK ? kNr : kMr;
  static constexpr bool kExact = std::is_same<In, int8_t>::value;
  static_assert(!kExact || kBlock <= 1024, "sums of more int8 products are not exact in fp32");
  // The sums that a task goes through once per block should stay in the second-level cache.
  static constexpr int64_t kSumsBytes = 384 * 1024;

  const tw_conv_args* args;
  View view;
  Roles roles;  // of the forward direction: src is x, dst is y
  int64_t workers, c, k, panels_x, panels_y;
  int64_t rows, slabs, blocks;           // rows of a slab, slabs of a block
  int64_t splits_x, splits_y, slots;     // tasks by channels; sets of sums by pixels
  int64_t image_floats, still_floats, row_tables, sums_floats;
  float* sums;

  void plan(const tw_conv_args* a, Arena& arena) {
    args = a;
    roles = roles_of<false>(a);
    make_view<false>(a, 0, view, arena);
    workers = threads_of(a);
    c = a->c / a->g, k = a->k / a->g;
    panels_x = ceil_div(c, kWideX), panels_y = ceil_div(k, kWideY);
    const int64_t high = view.axis[1].count, wide = view.axis[2].count;
    rows = max_of(1, min_of(high, kBlock / wide));
    rows = ceil_div(high, ceil_div(high, rows));  // equal cuts
    slabs = rows == high ? max_of(1, kBlock / (high * wide)) : 1;
    const int64_t all = args->n * view.axis[0].count * ceil_div(high, rows);
    slabs = max_of(1, min_of(slabs, all));
    blocks = ceil_div(all, slabs);
    split();
    const int64_t plane = planes_bound(a, view, rows);
    image_floats = (plane * slabs + kLanes) * kWideX * ceil_div(panels_x, splits_x) + kLanes;
    still_floats = (rows * wide * slabs + kLanes) * kWideY * ceil_div(panels_y, splits_y) + kLanes;
    row_tables = rows * slabs;
    sums_floats = view.taps * panels_x * panels_y * kTile;
    sums = arena.take<float>(sums_floats * a->g * slots);
  }

  void split() {
    splits_x = splits_y = slots = 1;
    if (panels_x == 0 || panels_y == 0) return;
    if (kByPixels) {
      slots = max_of(1, min_of(workers, blocks));
      return;
    }
    const int64_t bytes = view.taps * panels_y * kTile * 4;  // of one panel of x against all of y
    splits_x = min_of(panels_x, ceil_div(panels_x * bytes, kSumsBytes));
    if (splits_x == panels_x) splits_y = min_of(panels_y, ceil_div(bytes, 2 * kSumsBytes));
    while (workers > 1 && splits_x * splits_y * args->g < 2 * workers) {
      if (splits_x < panels_x)
        splits_x = min_of(panels_x, splits_x * 2);
      else if (splits_y < panels_y)
        splits_y = min_of(panels_y, splits_y * 2);
      else
        break;
    }
  }

  struct Worker {
    float* image;
    float* still;
    int64_t *taps, *image_rows, *still_rows;
    char* arena_at;
  };

  void worker_plan(Arena& arena, Worker& w) const {
    w.image = arena.take<float>(image_floats);
    w.still = arena.take<float>(still_floats);
    w.taps = arena.take<int64_t>(view.taps);
    w.image_rows = arena.take<int64_t>(row_tables + 1);
    w.still_rows = arena.take<int64_t>(row_tables + 1);
    w.arena_at = arena.take<char>(512 + 8 * (args->filter[1] + args->filter[2]));
  }
  int64_t worker_bytes() const {
    Arena count{nullptr};
    Worker w;
    worker_plan(count, w);
    return round_up(count.used, 4096) + 64;
  }

  float* sums_of(int64_t slot, int64_t group) const { return sums + (slot * args->g + group) * sums_floats; }
  // Tiles of one vector panel lie together.
  int64_t tile_at(int64_t tap, int64_t x, int64_t y) const {
    return kVectorIsK ? ((y * panels_x + x) * view.taps + tap) * kTile : ((x * view.taps + tap) * panels_y + y) * kTile;
  }

  // Copies a block's rows into panels [x0, x1) of x and [y0, y1) of y; gives the number of rows.
  int64_t copy_block(Worker& w, const Planes& p, int64_t block, int64_t group, int64_t x0, int64_t x1, int64_t y0, int64_t y1,
                     int64_t& image_pixels, int64_t& still_pixels) const {
    const int64_t high = view.axis[1].count, wide = view.axis[2].count, cuts = ceil_div(high, rows);
    const int64_t all = args->n * view.axis[0].count * cuts;
    const int64_t first = block * slabs, last = min_of(all, first + slabs);
    const int64_t slab_pixels = p.count * p.plane;
    image_pixels = slab_pixels * slabs, still_pixels = rows * slabs * wide;
    const In* x = static_cast<const In*>(args->x) + group * c * args->x_c;
    const In* y = static_cast<const In*>(args->y) + group * k * args->y_k;
    int64_t found = 0;
    for (int64_t slab = first; slab < last; ++slab) {
      const int64_t row0 = slab % cuts * rows, depth = slab / cuts % view.axis[0].count, n = slab / cuts / view.axis[0].count;
      const int64_t count = min_of(rows, high - row0), image_at = (slab - first) * slab_pixels;
      for (int64_t r = 0; r < count; ++r) {
        w.image_rows[found + r] = (image_at + r * p.pitch) * kWideX;
        w.still_rows[found + r] = (found + r) * wide * kWideY;
      }
      for (int64_t panel = y0; panel < y1; ++panel) {
        const int64_t at = panel * kWideY;
        float* to = w.still + ((panel - y0) * still_pixels + found * wide) * kWideY;
        const In* from = y + n * args->y_n + at * args->y_k + depth * args->y_s[0] + row0 * args->y_s[1];
        // Rows of a depth follow each other, so they are one run.
        pixel_panel<kWideY, kNhwc>(to, from, args->y_k, min_of(kWideY, k - at), count * wide, args->y_s[2]);
      }
      for (int64_t panel = x0; panel < x1; ++panel) {
        const int64_t at = panel * kWideX, channels = min_of(kWideX, c - at);
        float* to = w.image + ((panel - x0) * image_pixels + image_at) * kWideX;
        const In* from = x + n * args->x_n + at * args->x_c;
        each_row(view, p, depth, row0, [&](int64_t row, int64_t z, int64_t h, int64_t phase) {
          float* line = to + row * p.pitch * kWideX;
          int64_t begin = 0, end = 0;
          if (z >= 0) columns_inside(view, p, phase, begin, end);
          zero_run(line, begin * kWideX);
          const int64_t step = view.axis[2].step;
          if (end > begin)
            pixel_panel<kWideX, kNhwc>(
                line + begin * kWideX,
                from + z * args->x_s[0] + h * args->x_s[1] + ((begin + p.low[1]) * step + phase) * args->x_s[2], args->x_c,
                channels, end - begin, step * args->x_s[2]);
          zero_run(line + end * kWideX, (p.pitch - end) * kWideX);
        });
      }
      found += count;
    }
    return found;
  }

  void blocks_into(Worker& w, float* into, int64_t group, int64_t from, int64_t to, int64_t x0, int64_t x1, int64_t y0, int64_t y1) const {
    Arena arena{w.arena_at};
    const Planes p = planes_of(view, rows, arena);
    tap_offsets(view, p, w.taps, kWideX);
    for (int64_t block = from; block < to; ++block) {
      int64_t image_pixels, still_pixels;
      Walk walk;
      walk.segments = copy_block(w, p, block, group, x0, x1, y0, y1, image_pixels, still_pixels);
      walk.length = view.axis[2].count;
      walk.a_step = kMr, walk.b_step = kNr;
      walk.a_offset = kVectorIsK ? w.image_rows : w.still_rows;
      walk.b_offset = kVectorIsK ? w.still_rows : w.image_rows;
      auto one = [&](int64_t x, int64_t y, int64_t tap) {
        const float* moving = w.image + (x - x0) * image_pixels * kWideX + w.taps[tap];
        const float* still = w.still + (y - y0) * still_pixels * kWideY;
        walk.a = kVectorIsK ? moving : still, walk.b = kVectorIsK ? still : moving;
        add_tile(walk, into + tile_at(tap, x, y), block == from);
      };
      if (kVectorIsK)
        for (int64_t y = y0; y < y1; ++y)
          for (int64_t x = x0; x < x1; ++x)
            for (int64_t tap = 0; tap < view.taps; ++tap) one(x, y, tap);
      else
        for (int64_t x = x0; x < x1; ++x)
          for (int64_t tap = 0; tap < view.taps; ++tap)
            for (int64_t y = y0; y < y1; ++y) one(x, y, tap);
    }
  }

  static void add_tile(const Walk& walk, float* at, bool is_first) {
    float* rows[kMr];
    if constexpr (kExact) {
      alignas(64) float local[kTile];
      for (int m = 0; m < kMr; ++m) rows[m] = local + m * kNr;
      run_tile<kMr, kNv, 1>(walk, nullptr, rows);
      for (int i = 0; i < kTile; i += kLanes) {
        vi sum = __builtin_convertvector(load(local + i), vi);
        if (!is_first) sum += load_as<vi>(at + i);
        store_as(at + i, sum);
      }
    } else {
      for (int m = 0; m < kMr; ++m) rows[m] = at + m * kNr;
      run_tile<kMr, kNv, 1>(walk, is_first ? nullptr : at, rows);
    }
  }

  // Adds the slots up in order and writes panel x of a group.
  void finish(int64_t group, int64_t x) const {
    using Sum = typename std::conditional<kExact, int32_t, float>::type;
    const int64_t channels = min_of(kWideX, c - x * kWideX);
    for (int64_t y = 0; y < panels_y; ++y) {
      const int64_t filters = min_of(kWideY, k - y * kWideY);
      for (int64_t tap = 0; tap < view.taps; ++tap) {
        float* tile = sums_of(0, group) + tile_at(tap, x, y);
        for (int64_t slot = 1; slot < slots; ++slot) {
          const float* more = sums_of(slot, group) + tile_at(tap, x, y);
          for (int i = 0; i < kTile; i += kLanes)
            store_as(reinterpret_cast<Sum*>(tile) + i, load_as<Vec<Sum>>(tile + i) + load_as<Vec<Sum>>(more + i));
        }
      }
      for (int64_t i = 0; i < filters; ++i)
        for (int64_t j = 0; j < channels; ++j) {
          Out* to = static_cast<Out*>(args->w) + (group * k + y * kWideY + i) * args->w_k + (x * kWideX + j) * args->w_c;
          const int64_t at = kVectorIsK ? j * kNr + i : i * kNr + j;
          const float* from = sums_of(0, group) + tile_at(0, x, y) + at;
          const int64_t next = tile_at(1, 0, 0) - tile_at(0, 0, 0), step = args->w_s[2];
          for (int64_t tap = 0; tap < view.taps; ++tap) {
            Sum sum;
            std::memcpy(&sum, from + tap * next, sizeof(Sum));
            to[tap * step] = from_accumulator<Out>(sum);
          }
        }
    }
  }

  void zero() const {
    for (int64_t i = 0; i < args->k; ++i)
      for (int64_t j = 0; j < c * view.taps; ++j) static_cast<Out*>(args->w)[i * args->w_k + j] = Out{};
  }

  void run(Arena& arena) {
    char* scratch = arena.base + round_up(arena.used, 64);
    const int64_t bytes = worker_bytes();
    auto worker = [&](int64_t slot) {
      Arena own{scratch + slot * bytes};
      Worker w;
      worker_plan(own, w);
      return w;
    };
    if (kByPixels) {
      parallel(args->team, slots, [&](int64_t slot) {
        Worker w = worker(slot);
        for (int64_t group = 0; group < args->g; ++group)
          blocks_into(w, sums_of(slot, group), group, blocks * slot / slots, blocks * (slot + 1) / slots, 0, panels_x, 0, panels_y);
      });
    } else {
      parallel_tasks(args->team, workers, args->g * splits_x * splits_y, [&](int64_t slot, int64_t task) {
        Worker w = worker(slot);
        const int64_t y = task % splits_y, x = task / splits_y % splits_x, group = task / splits_y / splits_x;
        blocks_into(w, sums_of(0, group), group, 0, blocks, panels_x * x / splits_x, panels_x * (x + 1) / splits_x,
                    panels_y * y / splits_y, panels_y * (y + 1) / splits_y);
      });
    }
    parallel(args->team, args->g * panels_x, [&](int64_t task) { finish(task / panels_x, task % panels_x); });
  }

  static int64_t workspace(const tw_conv_args* given) {
    const tw_conv_args args = packed_strides(given, kNhwc);
    WeightProduct p;
    Arena arena{nullptr};
    p.plan(&args, arena);
    return round_up(arena.used, 64) + p.workers * p.worker_bytes();
  }
  static int32_t execute(const tw_conv_args* given) {
    const tw_conv_args args = packed_strides(given, kNhwc);
    WeightProduct p;
    Arena arena{static_cast<char*>(args.workspace)};
    p.plan(&args, arena);
    if (p.c == 0 || p.k == 0) return 0;
    if (args.n == 0)
      p.zero();
    else
      p.run(arena);
    return 0;
  }
};

}  // namespace tw
