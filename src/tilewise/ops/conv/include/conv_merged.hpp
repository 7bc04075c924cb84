// SPDX-License-Identifier: MIT
// Depthwise and small-group convolution over nhwc: lanes hold channels of neighbouring groups.
//
// Result channel r reads source j of its group, so for each of the kSources sources of a group the
// padded copy holds one vector per pixel with that source already in the right lane. The product is
// then lane by lane, with full vectors however small the groups are.
#pragma once
#include <type_traits>

#include "conv_pack.hpp"

namespace tw {

// Spreads the sources of kLanes result channels starting at `first` over lanes.
template <class In, int kSources>
struct LaneMap {
  int64_t source[kSources][kLanes];  // channel of the source, -1 beyond the last result
  int64_t low, span;                 // the sources lie in [low, low + span)
  vi pick[kSources];

  void set(int64_t first, int64_t results, int64_t groups) {
    low = first / results * kSources, span = 0;
    for (int j = 0; j < kSources; ++j)
      for (int l = 0; l < kLanes; ++l) {
        const int64_t r = first + l;
        source[j][l] = r < results * groups ? r / results * kSources + j : -1;
        if (source[j][l] >= 0) span = max_of(span, source[j][l] + 1 - low);
        pick[j][l] = source[j][l] >= 0 ? (int32_t)(source[j][l] - low) : 0;
      }
  }

  // kSources vectors of one pixel whose channels start at `pixel`.
  TW_INLINE void spread(float* to, const In* pixel) const {
    if (kSources == 1 && span == kLanes) {
      store(to, lanes_of(pixel + low));
    } else if (span <= kLanes) {
      const vf all = lanes_of_n(pixel + low, span);
      TW_UNROLL
      for (int j = 0; j < kSources; ++j) store(to + j * kLanes, __builtin_shuffle(all, pick[j]));
    } else {
      for (int j = 0; j < kSources; ++j)
        for (int l = 0; l < kLanes; ++l) to[j * kLanes + l] = source[j][l] < 0 ? 0.0f : lane_of(pixel[source[j][l]]);
    }
  }
};

// Spread pixels of the planes of a view.
template <int kSources, class In>
void spread_planes(float* dst, const In* src, const LaneMap<In, kSources>& map, const Roles& r, const View& v, const Planes& p,
                   int64_t depth, int64_t row0) {
  constexpr int kPixel = kSources * kLanes;
  each_row(v, p, depth, row0, [&](int64_t at, int64_t z, int64_t h, int64_t phase) {
    float* to = dst + at * p.pitch * kPixel;
    int64_t first = 0, last = 0;
    if (z >= 0) columns_inside(v, p, phase, first, last);
    zero_run(to, first * kPixel);
    const int64_t step = v.axis[2].step * r.src_s[2];
    const In* from = src + z * r.src_s[0] + h * r.src_s[1] + ((first + p.low[1]) * v.axis[2].step + phase) * r.src_s[2];
    for (int64_t i = first; i < last; ++i, from += step) map.spread(to + i * kPixel, from);
    zero_run(to + last * kPixel, (p.pitch - last) * kPixel);
  });
}

template <class InT, class OutT, bool kBackward, int kSources, int kMr, int kBlock>
struct MergedLanes {
  using In = InT;
  using Out = OutT;
  static constexpr int kPixel = kSources * kLanes;
  static constexpr bool kExact = std::is_same<In, int8_t>::value;

  const tw_conv_args* args;
  Roles roles;
  int64_t views, workers, channels, panels;  // all result channels, in vectors of kLanes
  int64_t image_floats = 0, most_taps = 0, tables = 0;
  View* view;
  float** packed;
  int64_t* first_task;

  int64_t rows_of(const View& v) const { return max_of(1, min_of(v.axis[1].count, kBlock / max_of(1, v.axis[2].count))); }
  int64_t blocks_of(const View& v) const { return v.axis[0].count * ceil_div(v.axis[1].count, rows_of(v)); }

  void plan(const tw_conv_args* a, Arena& arena) {
    args = a;
    roles = roles_of<kBackward>(a);
    views = view_count<kBackward>(a);
    workers = threads_of(a);
    channels = a->g * roles.results, panels = ceil_div(channels, kLanes);
    view = arena.take<View>(views);
    packed = arena.take<float*>(views);
    first_task = arena.take<int64_t>(views + 1);
    int64_t tasks = 0;
    for (int64_t i = 0; i < views; ++i) {
      View v;
      make_view<kBackward>(a, i, v, arena);
      float* at = arena.take<float>(panels * v.taps * kPixel);
      if (arena.base) view[i] = v, packed[i] = at, first_task[i] = tasks;
      tasks += v.pixels ? a->n * blocks_of(v) * panels : 0;
      image_floats = max_of(image_floats, (planes_bound(a, v, rows_of(v)) + kMr) * kPixel);
      most_taps = max_of(most_taps, v.taps);
      tables = max_of(tables, 64 + v.axis[1].taps + v.axis[2].taps);
    }
    if (arena.base) first_task[views] = tasks;
  }
  int64_t worker_bytes() const { return round_up(image_floats * 4 + (most_taps + tables) * 8 + 512, 4096); }

  // [tap][source][lane] of every panel.
  void pack_filters() const {
    parallel(args->pool, views * panels, [this](int64_t task) {
      const View& v = view[task / panels];
      const int64_t panel = task % panels;
      float* to = packed[task / panels] + panel * v.taps * kPixel;
      const In* w = static_cast<const In*>(roles.filter);
      for (int64_t tz = 0; tz < v.axis[0].taps; ++tz)
        for (int64_t ty = 0; ty < v.axis[1].taps; ++ty)
          for (int64_t tx = 0; tx < v.axis[2].taps; ++tx)
            for (int64_t j = 0; j < kSources; ++j)
              for (int64_t l = 0; l < kLanes; ++l, ++to) {
                const int64_t r = panel * kLanes + l;
                const int64_t at = v.axis[0].index[tz] * roles.w_s[0] + v.axis[1].index[ty] * roles.w_s[1] + v.axis[2].index[tx] * roles.w_s[2];
                *to = r < channels ? lane_of(w[r / roles.results * roles.w_group + r % roles.results * roles.w_result + j * roles.w_source + at]) : 0.0f;
              }
    });
  }

  static TW_NOINLINE void tile(vf (&sum)[kMr], const float* image, const float* filter, const int64_t* offset, int64_t taps) {
    vf acc[kMr];
    TW_UNROLL
    for (int m = 0; m < kMr; ++m) acc[m] = vf{};
    int64_t t = 0;
    do {
      const float* at = image + offset[t];
      TW_UNROLL
      for (int j = 0; j < kSources; ++j) {
        const vf w = load(filter + j * kLanes);
        TW_UNROLL
        for (int m = 0; m < kMr; ++m) acc[m] = mac(w, load(at + m * kPixel + j * kLanes), acc[m]);
      }
      filter += kPixel;
    } while (++t < taps);
    TW_UNROLL
    for (int m = 0; m < kMr; ++m) sum[m] = acc[m];
  }

  static TW_INLINE void put(Out* to, vf sum, int64_t lanes) {
    auto whole = [&](auto v) {
      if (lanes == kLanes)
        store_out(to, v);
      else
        store_out_n(to, v, lanes);
    };
    if constexpr (kExact)
      whole(__builtin_convertvector(sum, vi));
    else
      whole(sum);
  }

  void block(char* scratch, const View& v, int64_t panel, int64_t n, int64_t index) const {
    const int64_t rows = rows_of(v), cuts = ceil_div(v.axis[1].count, rows), depth = index / cuts, row0 = index % cuts * rows;
    const int64_t high = min_of(rows, v.axis[1].count - row0), wide = v.axis[2].count;
    float* image = reinterpret_cast<float*>(scratch);
    int64_t* offsets = reinterpret_cast<int64_t*>(scratch + round_up(image_floats * 4, 64));
    Arena arena{reinterpret_cast<char*>(offsets + most_taps)};
    const int64_t lanes = min_of(kLanes, channels - panel * kLanes);
    Out* dst = static_cast<Out*>(roles.dst) + panel * kLanes;
    if (v.taps == 0) {
      for (int64_t r = 0; r < high; ++r)
        for (int64_t q = 0; q < wide; ++q) put(dst + result_offset(roles, v, n, depth, row0 + r, q), vf{}, lanes);
      return;
    }
    const Planes p = planes_of(v, high, arena);
    tap_offsets(v, p, offsets, kPixel);
    LaneMap<In, kSources> map;
    map.set(panel * kLanes, roles.results, args->g);
    spread_planes<kSources>(image, static_cast<const In*>(roles.src) + n * roles.src_n, map, roles, v, p, depth, row0);
    const float* filter = packed[&v - view] + panel * v.taps * kPixel;
    for (int64_t r = 0; r < high; ++r) {
      Out* row = dst + result_offset(roles, v, n, depth, row0 + r, 0);
      const int64_t step = v.axis[2].jump * roles.dst_s[2];
      for (int64_t q = 0; q < wide; q += kMr) {
        vf sum[kMr];
        tile(sum, image + (r * p.pitch + q) * kPixel, filter, offsets, v.taps);
        const int64_t count = min_of(kMr, wide - q);
        for (int64_t m = 0; m < count; ++m) put(row + (q + m) * step, sum[m], lanes);
      }
    }
  }

  static int64_t workspace(const tw_conv_args* given) {
    const tw_conv_args args = packed_strides(given, true);
    MergedLanes m;
    Arena arena{nullptr};
    m.plan(&args, arena);
    return round_up(arena.used, 64) + m.workers * m.worker_bytes();
  }
  static int32_t execute(const tw_conv_args* given) {
    const tw_conv_args args = packed_strides(given, true);
    MergedLanes m;
    Arena arena{static_cast<char*>(args.workspace)};
    m.plan(&args, arena);
    m.pack_filters();
    char* scratch = arena.base + round_up(arena.used, 64);
    const int64_t bytes = m.worker_bytes();
    parallel_tasks(args.pool, m.workers, m.first_task[m.views], [&](int64_t slot, int64_t task) {
      int64_t i = 0;
      while (task >= m.first_task[i + 1]) ++i;
      const int64_t local = task - m.first_task[i], blocks = m.blocks_of(m.view[i]);
      m.block(scratch + slot * bytes, m.view[i], local % m.panels, local / m.panels / blocks, local / m.panels % blocks);
    });
    return 0;
  }
};

// The gradient of the filter, lane by lane: one vector of sums per tap and source.
template <class InT, class OutT, bool kByPixels, int kSources, int kBlock>
struct MergedWeight {
  using In = InT;
  using Out = OutT;
  static constexpr int kPixel = kSources * kLanes;
  static constexpr bool kExact = std::is_same<In, int8_t>::value;
  using Sum = typename std::conditional<kExact, int32_t, float>::type;
  static constexpr int kFit = (kRegisters - 3) / kSources;
  // Taps whose sums are held in registers together.
  static constexpr int kTogether = kFit < 1 ? 1 : kFit > 9 ? 9 : kFit;

  const tw_conv_args* args;
  Roles roles;
  View view;
  int64_t workers, channels, panels, rows, cuts, blocks, slots, image_floats, grid_floats;
  float* sums;

  void plan(const tw_conv_args* a, Arena& arena) {
    args = a;
    roles = roles_of<false>(a);
    workers = threads_of(a);
    make_view<false>(a, 0, view, arena);
    channels = a->k, panels = ceil_div(channels, kLanes);
    rows = max_of(1, min_of(view.axis[1].count, kBlock / view.axis[2].count));
    cuts = ceil_div(view.axis[1].count, rows);
    blocks = a->n * view.axis[0].count * cuts;
    slots = kByPixels ? max_of(1, min_of(workers, blocks)) : 1;
    image_floats = (planes_bound(a, view, rows) + 1) * kPixel;
    grid_floats = rows * view.axis[2].count * kLanes;
    sums = arena.take<float>(slots * panels * view.taps * kPixel);
  }
  int64_t worker_bytes() const {
    return round_up((image_floats + grid_floats) * 4 + (view.taps + 64 + view.axis[1].taps + view.axis[2].taps) * 8 + 512, 4096);
  }

  template <int kCount>
  static TW_NOINLINE void taps(float* to, const float* image, const int64_t* offset, const float* grid, int64_t high, int64_t wide,
                               int64_t pitch, bool is_first) {
    vf acc[kCount][kSources];
    TW_UNROLL
    for (int t = 0; t < kCount; ++t) {
      TW_UNROLL
      for (int j = 0; j < kSources; ++j) acc[t][j] = vf{};
    }
    for (int64_t r = 0; r < high; ++r) {
      const float* at[kCount];
      TW_UNROLL
      for (int t = 0; t < kCount; ++t) at[t] = image + offset[t] + r * pitch * kPixel;
      for (int64_t q = 0; q < wide; ++q, grid += kLanes) {
        const vf d = load(grid);
        TW_UNROLL
        for (int t = 0; t < kCount; ++t) {
          TW_UNROLL
          for (int j = 0; j < kSources; ++j) acc[t][j] = mac(d, load(at[t] + q * kPixel + j * kLanes), acc[t][j]);
        }
      }
    }
    TW_UNROLL
    for (int t = 0; t < kCount; ++t) {
      TW_UNROLL
      for (int j = 0; j < kSources; ++j) {
        float* sum = to + (t * kSources + j) * kLanes;
        if constexpr (kExact)
          store_as(sum, __builtin_convertvector(acc[t][j], vi) + (is_first ? vi{} : load_as<vi>(sum)));
        else
          store(sum, acc[t][j] + (is_first ? vf{} : load(sum)));
      }
    }
  }

  void panel_into(char* scratch, float* into, int64_t panel, int64_t from, int64_t to) const {
    float* image = reinterpret_cast<float*>(scratch);
    float* grid = image + image_floats;
    int64_t* offsets = reinterpret_cast<int64_t*>(scratch + round_up((image_floats + grid_floats) * 4, 64));
    Arena arena{reinterpret_cast<char*>(offsets + view.taps)};
    const Planes p = planes_of(view, rows, arena);
    tap_offsets(view, p, offsets, kPixel);
    LaneMap<In, kSources> map;
    map.set(panel * kLanes, roles.results, args->g);
    const int64_t lanes = min_of(kLanes, channels - panel * kLanes), wide = view.axis[2].count;
    for (int64_t block = from; block < to; ++block) {
      const int64_t row0 = block % cuts * rows, depth = block / cuts % view.axis[0].count, n = block / cuts / view.axis[0].count;
      const int64_t high = min_of(rows, view.axis[1].count - row0);
      spread_planes<kSources>(image, static_cast<const In*>(args->x) + n * args->x_n, map, roles, view, p, depth, row0);
      const In* y = static_cast<const In*>(args->y) + n * args->y_n + depth * args->y_s[0] + row0 * args->y_s[1] + panel * kLanes;
      for (int64_t q = 0; q < high * wide; ++q)
        store(grid + q * kLanes, lanes == kLanes ? lanes_of(y + q * args->y_s[2]) : lanes_of_n(y + q * args->y_s[2], lanes));
      int64_t t = 0;
      for (; t + kTogether <= view.taps; t += kTogether)
        taps<kTogether>(into + t * kPixel, image, offsets + t, grid, high, wide, p.pitch, block == from);
      for (; t < view.taps; ++t) taps<1>(into + t * kPixel, image, offsets + t, grid, high, wide, p.pitch, block == from);
    }
  }

  void finish(int64_t panel) const {
    float* total = sums + panel * view.taps * kPixel;
    for (int64_t i = 0; i < view.taps * kSources; ++i) {
      Sum part[kLanes];
      Vec<Sum> sum = load_as<Vec<Sum>>(total + i * kLanes);
      for (int64_t slot = 1; slot < slots; ++slot) sum += load_as<Vec<Sum>>(total + slot * panels * view.taps * kPixel + i * kLanes);
      store_as(part, sum);
      const int64_t tap = i / kSources, j = i % kSources;
      for (int64_t l = 0; l < min_of(kLanes, channels - panel * kLanes); ++l)
        static_cast<Out*>(args->w)[(panel * kLanes + l) * args->w_k + j * args->w_c + tap * args->w_s[2]] = from_accumulator<Out>(part[l]);
    }
  }

  static int64_t workspace(const tw_conv_args* given) {
    const tw_conv_args args = packed_strides(given, true);
    MergedWeight m;
    Arena arena{nullptr};
    m.plan(&args, arena);
    return round_up(arena.used, 64) + m.workers * m.worker_bytes();
  }
  static int32_t execute(const tw_conv_args* given) {
    const tw_conv_args args = packed_strides(given, true);
    MergedWeight m;
    Arena arena{static_cast<char*>(args.workspace)};
    m.plan(&args, arena);
    char* scratch = arena.base + round_up(arena.used, 64);
    const int64_t bytes = m.worker_bytes(), size = m.view.taps * kPixel;
    if (args.n == 0) std::memset(static_cast<void*>(m.sums), 0, m.panels * size * sizeof(float));
    parallel_tasks(args.pool, m.workers, args.n ? m.panels * m.slots : 0, [&](int64_t slot, int64_t task) {
      const int64_t panel = task % m.panels, part = task / m.panels;
      m.panel_into(scratch + slot * bytes, m.sums + task * size, panel, m.blocks * part / m.slots, m.blocks * (part + 1) / m.slots);
    });
    parallel(args.pool, m.panels, [&](int64_t panel) { m.finish(panel); });
    return 0;
  }
};

}  // namespace tw
