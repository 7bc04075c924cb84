// SPDX-License-Identifier: MIT
// Forward and backward-data convolution as a product of packed filters and gathered pixels.
//
// Under nchw a tile is kMr channels (broadcast from the filter) x kNv vectors of pixels; under nhwc
// it is kMr pixels (broadcast from the image) x kNv vectors of channels. Pixels reach the tile
//   implicit   packed: the rows of the implicit matrix of this block, kChunk of the reduction at a time
//   direct     in place from a padded copy of kChunk channels, which every tap reads at an offset
//   pointwise  in place from the image itself, for 1x1 filters over all pixels
#pragma once
#include <type_traits>

#include "conv_pack.hpp"
#include "conv_tile.hpp"

namespace tw {

enum class Source { implicit, direct, pointwise };

// A stretch of neighbouring results within a panel of pixels.
struct Stretch {
  int64_t lane, length, offset;
};

template <class InT, class OutT, bool kBackward, bool kNhwcT, Source kSourceT, int kMrT, int kNvT, int kChunkT, int kBlockT>
struct Gather {
  using In = InT;
  using Out = OutT;
  static constexpr bool kNhwc = kNhwcT;
  static constexpr Source kSource = kSourceT;
  static constexpr int kMr = kMrT, kNv = kNvT, kNr = kNvT * kLanes, kTile = kMrT * kNr;
  static constexpr int kWidth = kNhwcT ? kNr : kMrT;   // result channels of a panel
  static constexpr int kPixels = kNhwcT ? kMrT : kNr;  // pixels of a panel
  // An odd number of cache lines between broadcast rows spreads them over the cache's sets.
  static constexpr int kStride = (kChunkT + 15) / 16 % 2 ? (kChunkT + 15) / 16 * 16 : kChunkT / 16 * 16 + 16;
  static constexpr bool kExact = std::is_same<In, int8_t>::value;
  static constexpr bool kInPlace = kSourceT == Source::pointwise;
  // Sums of this many int8 products are exact in fp32.
  static constexpr int64_t kExactTerms = 1024;

  const tw_conv_args* args;
  Roles roles;
  int64_t views, workers, panels;
  View* view;
  int64_t* first_task;
  float** packed;

  // What a worker owns; sized for the largest view.
  int64_t image_floats = 0, sums_floats = 0, tables = 0, stretches = 0;

  int64_t chunk_of(const View& v) const {
    if (kSource == Source::direct) {
      int64_t chunk = min_of(kChunkT, roles.sources);
      if (kExact) chunk = max_of(1, min_of(chunk, kExactTerms / v.taps));
      return chunk;
    }
    return roles.sources;
  }
  int64_t reduction(const View& v) const { return v.taps * roles.sources; }
  int64_t steps_of(const View& v) const {  // passes over the reduction
    if (kSource == Source::direct) return ceil_div(roles.sources, chunk_of(v));
    if (kInPlace && !kExact && kNhwc) return 1;
    return ceil_div(reduction(v), kChunkT);
  }
  int64_t rows_of(const View& v) const {
    return max_of(1, min_of(v.axis[1].count, kBlockT / max_of(1, v.axis[2].count)));
  }
  int64_t blocks_of(const View& v) const {
    if (v.pixels == 0 || args->n == 0) return 0;
    if (kSource == Source::direct) return args->n * v.axis[0].count * ceil_div(v.axis[1].count, rows_of(v));
    if (kInPlace && !kNhwc) return args->n * ceil_div(v.pixels, round_up(kBlockT, kPixels));
    return ceil_div(args->n * v.pixels, round_up(kBlockT, kPixels));
  }
  // With few blocks the channels are split as well, so that every worker has something to do.
  int64_t splits_of(const View& v) const {
    const int64_t blocks = blocks_of(v) * args->g;
    return blocks == 0 ? 1 : max_of(1, min_of(panels, ceil_div(workers == 1 ? 1 : 3 * workers, blocks)));
  }

  void plan(const tw_conv_args* a, Arena& arena) {
    args = a;
    roles = roles_of<kBackward>(a);
    views = view_count<kBackward>(a);
    workers = threads_of(a);
    panels = ceil_div(roles.results, kWidth);
    view = arena.take<View>(views);
    first_task = arena.take<int64_t>(views + 1);
    packed = arena.take<float*>(views);
    int64_t tasks = 0;
    for (int64_t i = 0; i < views; ++i) {
      View v;
      make_view<kBackward>(a, i, v, arena);
      float* at = arena.take<float>(a->g * panels * kWidth * reduction(v));
      if (arena.base) view[i] = v, packed[i] = at, first_task[i] = tasks;
      tasks += blocks_of(v) * splits_of(v) * a->g;
      size_scratch(v);
    }
    if (arena.base) first_task[views] = tasks;
  }

  void size_scratch(const View& v) {
    if (v.taps == 0 || roles.sources == 0) return;
    int64_t pixels = round_up(kBlockT, kPixels), image;
    if (kSource == Source::direct) {
      const int64_t rows = rows_of(v), bound = planes_bound(args, v, rows);
      // The pitch is not known here; no plane row is longer than its bound.
      const int64_t reach = (args->filter[2] - 1) * args->dilation[2] + 2;
      pixels = round_up(rows * (v.axis[2].count + reach), kPixels);
      image = kNhwc ? (bound + kPixels + 16) * kStride : (bound + 16) * chunk_of(v) + kNr;
    } else if (kNhwc) {
      image = kInPlace && !kExact ? kMr * roles.sources : pixels * (int64_t)kStride;
    } else {
      image = kInPlace ? (int64_t)kNr * min_of(kChunkT, reduction(v)) + kLanes : (pixels + kLanes) * min_of(kChunkT, reduction(v)) + kLanes;
    }
    image_floats = max_of(image_floats, image);
    const int64_t tiles = pixels / kPixels * panels;
    if (steps_of(v) > 1) sums_floats = max_of(sums_floats, tiles * kTile);
    tables = max_of(tables, max_of(v.taps, 1) * 2 + 8 + v.axis[1].step + v.axis[2].step + args->filter[1] + args->filter[2]);
    stretches = max_of(stretches, pixels);
  }

  // ---- the filter ----

  void pack_filters() {
    parallel(args->team, views * args->g * panels, [this](int64_t task) {
      const int64_t panel = task % panels, group = task / panels % args->g;
      const View& v = view[task / panels / args->g];
      if (v.taps == 0) return;
      const int64_t size = kWidth * reduction(v);
      pack_filter_panel<kWidth>(
          packed[task / panels / args->g] + (group * panels + panel) * size,
          static_cast<const In*>(roles.filter) + group * roles.w_group + panel * kWidth * roles.w_result,
          roles, v, min_of(kWidth, roles.results - panel * kWidth), chunk_of(v));
    });
  }

  // ---- one block of pixels x a range of channel panels ----

  struct Worker {
    float* image;
    float* sums;
    int64_t* offsets;   // of taps within the image
    int64_t* zeros;     // of taps within a filter panel
    int64_t* results;   // nhwc: offset of every pixel, -1 where there is none
    Stretch* stretch;   // nchw: by panel
    int64_t* stretch_count;
    char* arena_at;
    int64_t arena_size;
  };

  void worker_plan(Arena& arena, Worker& w) const {
    w.image = arena.take<float>(image_floats + kLanes);
    w.sums = arena.take<float>(sums_floats);
    w.offsets = arena.take<int64_t>(tables);
    w.zeros = arena.take<int64_t>(tables);
    w.results = arena.take<int64_t>(kNhwc ? stretches + kPixels : 1);
    w.stretch = arena.take<Stretch>(kNhwc ? 1 : stretches + kPixels);
    w.stretch_count = arena.take<int64_t>(kNhwc ? 1 : stretches / kPixels + 2);
    w.arena_size = 8 * tables + 256;
    w.arena_at = arena.take<char>(w.arena_size);
  }

  struct Block {
    const View* view;
    int64_t group, n, depth, row0, rows;  // direct
    int64_t first, count;                 // flattened pixels, or lanes of the padded rows
    int64_t pitch, panels;
  };

  Block block_at(const View& v, int64_t group, int64_t index) const {
    Block b{&v, group, 0, 0, 0, 0, 0, 0, v.axis[2].count, 0};
    if (kSource == Source::direct) {
      const int64_t rows = rows_of(v), per_depth = ceil_div(v.axis[1].count, rows);
      b.row0 = index % per_depth * rows, index /= per_depth;
      b.depth = index % v.axis[0].count, b.n = index / v.axis[0].count;
      b.rows = min_of(rows, v.axis[1].count - b.row0);
    } else if (kInPlace && !kNhwc) {
      const int64_t size = round_up(kBlockT, kPixels), per_image = ceil_div(v.pixels, size);
      b.n = index / per_image;
      b.first = b.n * v.pixels + index % per_image * size;
      b.count = min_of(size, (b.n + 1) * v.pixels - b.first);
    } else {
      const int64_t size = round_up(kBlockT, kPixels);
      b.first = index * size;
      b.count = min_of(size, args->n * v.pixels - b.first);
    }
    return b;
  }

  // Where the results of the block go.
  void locate(const Block& b, Worker& w) const {
    const View& v = *b.view;
    const int64_t width = v.axis[2].count;
    int64_t q = 0, panel = 0;
    Stretch* out = w.stretch;
    int64_t found = 0;
    auto add = [&](int64_t lane, int64_t length, int64_t offset) {  // a run within one row
      const int64_t step = v.axis[2].jump * roles.dst_s[2];
      if (kNhwc) {
        for (int64_t i = 0; i < length; ++i) w.results[lane + i] = offset + i * step;
        return;
      }
      while (length > 0) {
        while (lane >= (panel + 1) * kPixels) w.stretch_count[panel++] = found, out += kPixels, found = 0;
        const int64_t part = min_of(length, (panel + 1) * kPixels - lane), at = lane - panel * kPixels;
        Stretch* last = out + found - 1;
        if (found && last->lane + last->length == at && last->offset + last->length * step == offset)
          last->length += part;
        else
          out[found++] = Stretch{at, part, offset};
        lane += part, length -= part, offset += part * step;
      }
    };
    if (kSource == Source::direct) {
      if (kNhwc)
        for (int64_t i = 0; i < b.panels * kPixels; ++i) w.results[i] = -1;
      for (int64_t row = 0; row < b.rows; ++row)
        add(row * b.pitch, width, result_offset(roles, v, b.n, b.depth, b.row0 + row, 0));
    } else {
      if (kNhwc)
        for (int64_t i = b.count; i < b.panels * kPixels; ++i) w.results[i] = -1;
      while (q < b.count) {
        const Pixel p = pixel_at(v, b.first + q);
        const int64_t part = min_of(width - p.q[2], b.count - q);
        add(q, part, result_offset(roles, v, p.n, p.q[0], p.q[1], p.q[2]));
        q += part;
      }
    }
    if (!kNhwc)
      for (; panel < b.panels; ++panel) w.stretch_count[panel] = found, found = 0;
  }

  // A finished tile, of which row m and its vectors lie at tile + m * kNr, to its place.
  void finish(const float* tile, const Block& b, const Worker& w, int64_t pixels, int64_t channels) const {
    const int64_t panel = pixels, first = channels * kWidth, left = min_of(kWidth, roles.results - first);
    Out* dst = static_cast<Out*>(roles.dst) + (b.group * roles.results + first) * roles.dst_c;
    auto put = [](Out* at, const float* from, int64_t n) {
      int64_t i = 0;
      for (; i + kLanes <= n; i += kLanes) store_sum(at + i, from + i);
      if (i < n) store_sum_n(at + i, from + i, n - i);
    };
    if (kNhwc) {
      for (int m = 0; m < kMr; ++m) {
        const int64_t at = w.results[panel * kPixels + m];
        if (at >= 0) put(dst + at, tile + m * kNr, left);
      }
      return;
    }
    const int64_t step = b.view->axis[2].jump * roles.dst_s[2];
    const Stretch* stretch = w.stretch + panel * kPixels;
    for (int64_t m = 0; m < left; ++m)
      for (int64_t s = 0; s < w.stretch_count[panel]; ++s) {
        Out* at = dst + m * roles.dst_c + stretch[s].offset;
        const float* from = tile + m * kNr + stretch[s].lane;
        if (step == 1)
          put(at, from, stretch[s].length);
        else
          for (int64_t i = 0; i < stretch[s].length; ++i) store_one(at + i * step, from + i);
      }
  }

  // Sums of int8 products are kept as integers.
  static TW_INLINE void store_sum(Out* at, const float* from) {
    if constexpr (kExact)
      store_out(at, load_as<vi>(from));
    else
      store_out(at, load(from));
  }
  static TW_INLINE void store_sum_n(Out* at, const float* from, int64_t n) {
    if constexpr (kExact)
      store_out_n(at, load_as<vi>(from), n);
    else
      store_out_n(at, load(from), n);
  }
  static TW_INLINE void store_one(Out* at, const float* from) {
    if constexpr (kExact)
      *at = from_accumulator<Out>(bit_cast<int32_t>(*from));
    else
      *at = from_accumulator<Out>(*from);
  }

  // One tile over one step of the reduction.
  void tile(Walk& walk, const Block& b, const Worker& w, int64_t panel, int64_t channels, int64_t step, int64_t steps,
            float* sums) const {
    float* rows[kMr];
    alignas(64) float local[kTile + kLanes];  // stores of the last row's end read a whole vector
    const bool is_last = step + 1 == steps;
    if constexpr (kExact) {
      for (int m = 0; m < kMr; ++m) rows[m] = local + m * kNr;
      run_tile<kMr, kNv, row_stride()>(walk, nullptr, rows);
      for (int i = 0; i < kTile; i += kLanes) {
        vi sum = __builtin_convertvector(load(local + i), vi);
        if (step) sum += load_as<vi>(sums + i);
        store_as(is_last ? local + i : sums + i, sum);
      }
      if (is_last) finish(local, b, w, panel, channels);
      return;
    }
    float* to = is_last ? local : sums;
    for (int m = 0; m < kMr; ++m) rows[m] = to + m * kNr;
    bool is_done = !is_last;
    if constexpr (std::is_same<Out, float>::value)
      if (is_last && (channels + 1) * kWidth <= roles.results) is_done = aim(rows, b, w, panel, channels);
    run_tile<kMr, kNv, row_stride()>(walk, step ? sums : nullptr, rows);
    if (!is_done) finish(local, b, w, panel, channels);
  }

  // Points the rows at the result itself where the whole tile fits; otherwise leaves them alone.
  bool aim(float** rows, const Block& b, const Worker& w, int64_t panel, int64_t channels) const {
    float* dst = static_cast<float*>(roles.dst) + (b.group * roles.results + channels * kWidth) * roles.dst_c;
    if (kNhwc) {
      const int64_t* at = w.results + panel * kPixels;
      for (int m = 0; m < kMr; ++m)
        if (at[m] < 0) return false;
      for (int m = 0; m < kMr; ++m) rows[m] = dst + at[m];
      return true;
    }
    const Stretch& only = w.stretch[panel * kPixels];
    if (w.stretch_count[panel] != 1 || only.length != kNr || b.view->axis[2].jump * roles.dst_s[2] != 1) return false;
    for (int m = 0; m < kMr; ++m) rows[m] = dst + m * roles.dst_c + only.offset;
    return true;
  }

  static constexpr int row_stride() { return !kNhwc ? 1 : kInPlace && !kExact ? 0 : kStride; }

  void block(const Block& at, Worker& w, int64_t panel_from, int64_t panel_to) const {
    Block b = at;
    const View& v = *b.view;
    const int64_t steps = steps_of(v), chunk = chunk_of(v), total = reduction(v);
    Arena arena{w.arena_at};
    Planes planes{};
    if (kSource == Source::direct) {
      planes = planes_of(v, b.rows, arena);
      b.pitch = planes.pitch;
      b.count = (b.rows - 1) * b.pitch + v.axis[2].count;
      tap_offsets(v, planes, w.offsets, kNhwc ? kStride : 1);
    }
    b.panels = ceil_div(b.count, kPixels);
    locate(b, w);
    const float* filters =
        packed[b.view - view] + b.group * panels * kWidth * total;
    const int64_t channel_stride = kSource == Source::direct ? round_up(planes.count * planes.plane, 16) : 0;
    if (kSource == Source::direct) clear_beyond(b, w, planes, chunk, channel_stride);
    const In* src = static_cast<const In*>(roles.src) + b.group * roles.sources * roles.src_c;
    static const int64_t kZero[1] = {0};
    for (int64_t step = 0; step < steps; ++step) {
      Walk walk;
      int64_t k0, length;
      if (kSource == Source::direct) {
        const int64_t c0 = step * chunk;
        length = min_of(chunk, roles.sources - c0);
        k0 = c0 * v.taps;
        const In* from = src + b.n * roles.src_n + c0 * roles.src_c;
        if constexpr (kNhwc)
          copy_pixels<kStride>(w.image, from, roles, v, planes, length, b.depth, b.row0);
        else
          copy_planes(w.image, channel_stride, from, roles, v, planes, length, b.depth, b.row0);
        for (int64_t t = 0; t < v.taps; ++t) w.zeros[t] = t * length * kWidth;
        walk.segments = v.taps, walk.length = length;
        walk.a_offset = kNhwc ? w.offsets : w.zeros, walk.b_offset = kNhwc ? w.zeros : w.offsets;
      } else {
        const int64_t size = steps == 1 ? total : (int64_t)kChunkT;
        k0 = step * size;
        length = min_of(size, total - k0);
        if constexpr (kNhwc) {
          if constexpr (!kInPlace || kExact) gather_rows(w.image, src, b, k0, length);
        } else if constexpr (!kInPlace) {
          for (int64_t p = 0; p < b.panels; ++p)
            gather_columns(w.image + p * (length * kNr), src, b, p, k0, length);
        }
        walk.segments = 1, walk.length = length;
        walk.a_offset = walk.b_offset = kZero;
      }
      for (int64_t p = 0; p < b.panels; ++p) {
        const float* pixels = w.image;
        int64_t pixel_step = kNhwc ? 1 : kNr;
        if (kSource == Source::direct) {
          pixels += p * kPixels * (kNhwc ? kStride : 1);
          pixel_step = kNhwc ? 1 : channel_stride;
        } else if (!kInPlace || kExact) {
          pixels += kNhwc ? p * (int64_t)kMr * kStride : p * (length * kNr);
        } else if constexpr (std::is_same<In, float>::value) {
          pixels = in_place(w, src, b, p, k0, length, pixel_step, walk);
        }
        for (int64_t m = panel_from; m < panel_to; ++m) {
          const float* filter = filters + m * kWidth * total + k0 * kWidth;
          walk.a = kNhwc ? pixels : filter;
          walk.b = kNhwc ? filter : pixels;
          walk.a_step = kNhwc ? 1 : kWidth;
          walk.b_step = kNhwc ? kWidth : pixel_step;
          tile(walk, b, w, p, m, step, steps, w.sums + ((m - panel_from) * b.panels + p) * (steps > 1 ? kTile : 0));
        }
      }
    }
  }

  // Zeros what the last panel reads behind the planes. Its results are dropped, yet denormal numbers
  // left there by others would make it sixty times as slow.
  void clear_beyond(const Block& b, const Worker& w, const Planes& planes, int64_t chunk, int64_t channel_stride) const {
    int64_t farthest = 0;
    for (int64_t t = 0; t < b.view->taps; ++t) farthest = max_of(farthest, w.offsets[t]);
    const int64_t held = planes.count * planes.plane, read = b.panels * kPixels + farthest / (kNhwc ? kStride : 1);
    if (kNhwc) {
      for (int64_t i = held; i < read; ++i) zero_run(w.image + i * kStride, chunk);
      return;
    }
    for (int64_t c = 0; c + 1 < chunk; ++c) zero_run(w.image + c * channel_stride + held, channel_stride - held);
    zero_run(w.image + (chunk - 1) * channel_stride + held, max_of(read, held) - held);
  }

  // The image itself where the whole panel lies in it, otherwise a packed copy.
  const float* in_place(Worker& w, const float* src, const Block& b, int64_t p, int64_t k0, int64_t length, int64_t& step,
                        Walk& walk) const {
    const View& v = *b.view;
    const int64_t first = b.first + p * kPixels, count = min_of(kPixels, b.count - p * kPixels);
    if (kNhwc) {
      const Pixel from = pixel_at(v, first), last = pixel_at(v, first + count - 1);
      const int64_t a = from.n * roles.src_n + (first - from.n * v.pixels) * roles.src_s[2];
      const int64_t z = last.n * roles.src_n + (first + count - 1 - last.n * v.pixels) * roles.src_s[2];
      walk.a_row = roles.src_s[2];
      if (count == kPixels && z - a == (kPixels - 1) * roles.src_s[2]) return src + a;
      for (int64_t m = 0; m < kPixels; ++m) {
        const Pixel at = pixel_at(v, min_of(first + m, first + count - 1));
        const int64_t flat = min_of(first + m, first + count - 1) - at.n * v.pixels;
        std::memcpy(w.image + m * roles.sources, src + at.n * roles.src_n + flat * roles.src_s[2], roles.sources * sizeof(float));
      }
      walk.a_row = roles.sources;
      return w.image;
    }
    const float* at = src + b.n * roles.src_n + (first - b.n * v.pixels) + k0 * roles.src_c;
    if (count == kPixels) {
      step = roles.src_c;
      return at;
    }
    for (int64_t k = 0; k < length; ++k) {
      copy_run(w.image + k * kNr, at + k * roles.src_c, count);
      zero_run(w.image + k * kNr + count, kNr - count);
    }
    step = kNr;
    return w.image;
  }

  // nhwc: kMr rows of the implicit matrix per panel, columns [k0, k0 + length) of each.
  void gather_rows(float* image, const In* src, const Block& b, int64_t k0, int64_t length) const {
    const View& v = *b.view;
    const Axis* ax = v.axis;
    for (int64_t i = 0; i < b.panels * kMr; ++i) {
      float* to = image + i * kStride;
      if (i >= b.count) {
        zero_run(to, length);
        continue;
      }
      const Pixel p = pixel_at(v, b.first + i);
      for (int64_t k = k0; k < k0 + length;) {
        const int64_t tap = k / roles.sources, c = k % roles.sources;
        const int64_t run = min_of(roles.sources - c, k0 + length - k);
        const int64_t tx = tap % ax[2].taps, ty = tap / ax[2].taps % ax[1].taps, tz = tap / ax[2].taps / ax[1].taps;
        const int64_t z = p.q[0] * ax[0].step + ax[0].base[tz], y = p.q[1] * ax[1].step + ax[1].base[ty],
                      x = p.q[2] * ax[2].step + ax[2].base[tx];
        const bool is_inside =
            (uint64_t)z < (uint64_t)ax[0].size && (uint64_t)y < (uint64_t)ax[1].size && (uint64_t)x < (uint64_t)ax[2].size;
        if (is_inside)
          copy_run(to, src + p.n * roles.src_n + z * roles.src_s[0] + y * roles.src_s[1] + x * roles.src_s[2] + c, run);
        else
          zero_run(to, run);
        to += run, k += run;
      }
    }
  }

  // nchw: kNr columns of the implicit matrix, rows [k0, k0 + length) of them.
  void gather_columns(float* image, const In* src, const Block& b, int64_t panel, int64_t k0, int64_t length) const {
    const View& v = *b.view;
    const Axis* ax = v.axis;
    const int64_t first = b.first + panel * kNr, count = min_of(kNr, b.count - panel * kNr);
    for (int64_t k = k0; k < k0 + length;) {
      const int64_t tap = k / roles.sources, c0 = k % roles.sources;
      const int64_t run = min_of(roles.sources - c0, k0 + length - k);
      const int64_t tx = tap % ax[2].taps, ty = tap / ax[2].taps % ax[1].taps, tz = tap / ax[2].taps / ax[1].taps;
      // Stretches of the panel that exist in the image, for every channel alike.
      int64_t lane[kNr + 1], size[kNr + 1], from[kNr + 1], found = 0;
      int64_t in_from, in_to;
      inside(ax[2], tx, in_from, in_to);
      for (int64_t q = 0; q < count;) {
        const Pixel p = pixel_at(v, first + q);
        const int64_t part = min_of(ax[2].count - p.q[2], count - q);
        const int64_t z = p.q[0] * ax[0].step + ax[0].base[tz], y = p.q[1] * ax[1].step + ax[1].base[ty];
        const int64_t a = max_of(in_from, p.q[2]), e = min_of(in_to, p.q[2] + part);
        if ((uint64_t)z < (uint64_t)ax[0].size && (uint64_t)y < (uint64_t)ax[1].size && a < e) {
          const int64_t at = p.n * roles.src_n + z * roles.src_s[0] + y * roles.src_s[1] + (a * ax[2].step + ax[2].base[tx]);
          const int64_t start = q + a - p.q[2];
          if (found && ax[2].step == 1 && lane[found - 1] + size[found - 1] == start &&
              from[found - 1] + size[found - 1] == at)
            size[found - 1] += e - a;
          else
            lane[found] = start, size[found] = e - a, from[found] = at, ++found;
        }
        q += part;
      }
      const In* channel = src + c0 * roles.src_c;
      if (found == 1 && size[0] == kNr && ax[2].step == 1) {
        for (int64_t c = 0; c < run; ++c, image += kNr, channel += roles.src_c) {
          TW_UNROLL
          for (int i = 0; i < kNr; i += kLanes) store(image + i, lanes_of(channel + from[0] + i));
        }
      } else {
        for (int64_t c = 0; c < run; ++c, image += kNr, channel += roles.src_c) {
          TW_UNROLL
          for (int i = 0; i < kNr; i += kLanes) store(image + i, vf{});
          for (int64_t s = 0; s < found; ++s) copy_strided(image + lane[s], channel + from[s], size[s], ax[2].step);
        }
      }
      k += run;
    }
  }

  // ---- the whole ----

  void zero_view(const View& v) const {
    parallel(args->team, args->n * v.axis[0].count, [&](int64_t task) {
      const int64_t n = task / v.axis[0].count, z = task % v.axis[0].count;
      for (int64_t y = 0; y < v.axis[1].count; ++y) {
        Out* row = static_cast<Out*>(roles.dst) + result_offset(roles, v, n, z, y, 0);
        const int64_t step = v.axis[2].jump * roles.dst_s[2], channels = args->g * roles.results;
        for (int64_t outer = 0; outer < (kNhwc ? v.axis[2].count : channels); ++outer)
          for (int64_t inner = 0; inner < (kNhwc ? channels : v.axis[2].count); ++inner)
            row[outer * (kNhwc ? step : roles.dst_c) + inner * (kNhwc ? roles.dst_c : step)] = Out{};
      }
    });
  }

  void run(Arena& arena) {
    pack_filters();
    char* scratch = arena.base + round_up(arena.used, 64);
    const int64_t slot_bytes = worker_bytes();
    for (int64_t i = 0; i < views; ++i)
      if (view[i].taps == 0 || roles.sources == 0) zero_view(view[i]);
    if (roles.sources == 0) return;
    parallel_tasks(args->team, workers, first_task[views], [&](int64_t slot, int64_t task) {
      int64_t i = 0;
      while (task >= first_task[i + 1]) ++i;
      if (view[i].taps == 0) return;
      Arena own{scratch + slot * slot_bytes};
      Worker w;
      worker_plan(own, w);
      const int64_t local = task - first_task[i], splits = splits_of(view[i]), blocks = blocks_of(view[i]);
      const int64_t split = local % splits, index = local / splits % blocks, group = local / splits / blocks;
      block(block_at(view[i], group, index), w, panels * split / splits, panels * (split + 1) / splits);
    });
  }

  int64_t worker_bytes() const {
    Arena count{nullptr};
    Worker w;
    worker_plan(count, w);
    return round_up(count.used, 4096) + 64;
  }

  static int64_t workspace(const tw_conv_args* given) {
    const tw_conv_args args = packed_strides(given, kNhwc);
    Gather g;
    Arena arena{nullptr};
    g.plan(&args, arena);
    return round_up(arena.used, 64) + g.workers * g.worker_bytes();
  }
  static int32_t execute(const tw_conv_args* given) {
    const tw_conv_args args = packed_strides(given, kNhwc);
    Gather g;
    Arena arena{static_cast<char*>(args.workspace)};
    g.plan(&args, arena);
    if (args.n > 0 && g.roles.results > 0) g.run(arena);
    return 0;
  }
};

}  // namespace tw
