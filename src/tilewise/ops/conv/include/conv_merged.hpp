// SPDX-License-Identifier: MIT
// Depthwise and small-group convolution over nhwc: lanes hold channels of neighbouring groups.
//
// Result channel r reads source j of its group. Where the sources of a vector of results fit a vector
// themselves, a shuffle puts source j into every lane; otherwise the padded copy holds kSources
// vectors per pixel, already shuffled. The product is then lane by lane, with full vectors however
// small the groups are.
#pragma once
#include <type_traits>

#include "conv_pack.hpp"

namespace tw {

// How a pixel of the copy becomes source j of every lane.
enum class Spread { same, shuffled, stored };

// Lane pick[l] of v in every lane l; Clang's own shuffle wants constants.
TW_INLINE vf shuffled(const vf& v, const vi& pick) {
#if !defined(__clang__)
  return __builtin_shuffle(v, pick);
#elif TW_LANES == 16 && defined(__AVX512F__)
  return __builtin_ia32_permvarsf512(v, pick);
#elif TW_LANES == 8 && defined(__AVX2__)
  return __builtin_ia32_permvarsf256(v, pick);
#else
  vf found;
  for (int l = 0; l < kLanes; ++l) found[l] = v[pick[l]];
  return found;
#endif
}

template <Spread kSpread>
TW_INLINE vf source_of(const float* pixel, int j, const vi& pick) {
  if (kSpread == Spread::shuffled) return shuffled(load(pixel), pick);
  return load(pixel + (kSpread == Spread::same ? 0 : j * kLanes));
}

// The sources of kLanes result channels starting at `first`, lane by lane.
template <int kSources>
struct LaneMap {
  int64_t low, span, lanes;  // sources lie in [low, low + span); results in the first `lanes` lanes
  vi pick[kSources];         // source of every lane, counted from low

  void set(int64_t first, int64_t results, int64_t groups) {
    lanes = min_of(kLanes, results * groups - first);
    const int64_t group = first / results;
    low = group * kSources;
    int64_t within = first - group * results, at = 0;
    for (int l = 0; l < kLanes; ++l) {
      for (int j = 0; j < kSources; ++j) pick[j][l] = l < lanes ? (int32_t)(at + j) : 0;
      if (l < lanes) span = at + kSources;
      if (++within == results) within = 0, at += kSources;
    }
  }
  // Whether one vector holds every source, to be shuffled when it is used.
  TW_INLINE bool is_narrow() const { return span <= kLanes; }
  TW_INLINE int64_t pixel_floats() const { return is_narrow() ? kLanes : kSources * kLanes; }

  // Calls body with the way of spreading, as a constant.
  template <class F>
  TW_INLINE void with_spread(bool is_depthwise, F body) const {
    if (is_depthwise)
      body(std::integral_constant<Spread, Spread::same>{});
    else if (is_narrow())
      body(std::integral_constant<Spread, Spread::shuffled>{});
    else
      body(std::integral_constant<Spread, Spread::stored>{});
  }

  // A pixel whose channels start at `pixel`: its sources as they are, or spread over lanes.
  template <class In>
  TW_INLINE void copy(float* to, const In* pixel) const {
    if (is_narrow()) {
      store(to, lanes_of_n(pixel + low, span));
    } else {
      for (int j = 0; j < kSources; ++j)
        for (int l = 0; l < kLanes; ++l) to[j * kLanes + l] = l < lanes ? lane_of(pixel[low + pick[j][l]]) : 0.0f;
    }
  }
};

// Pixels of the planes of a view for `panels` neighbouring vectors of results, each `distance` floats
// behind the other. Channels of a pixel are read in order, which is how memory delivers them.
template <int kSources, class In>
void copy_lanes(float* dst, int64_t distance, const In* src, const LaneMap<kSources>* map, int64_t panels, const Roles& r,
                const View& v, const Planes& p, int64_t depth, int64_t row0) {
  bool is_whole = true;
  for (int64_t i = 0; i < panels; ++i) is_whole &= map[i].span == kLanes;
  each_row(v, p, depth, row0, [&](int64_t at, int64_t z, int64_t h, int64_t phase) {
    int64_t first = 0, last = 0;
    if (z >= 0) columns_inside(v, p, phase, first, last);
    const int64_t step = v.axis[2].step * r.src_s[2];
    const In* from = src + z * r.src_s[0] + h * r.src_s[1] + ((first + p.low[1]) * v.axis[2].step + phase) * r.src_s[2];
    for (int64_t i = 0; i < panels; ++i) {
      const int64_t size = map[i].pixel_floats();
      float* to = dst + i * distance + at * p.pitch * size;
      for (int64_t q = 0; q < first * size; q += kLanes) store(to + q, vf{});
      for (int64_t q = last * size; q < p.pitch * size; q += kLanes) store(to + q, vf{});
      for (int64_t q = first; !is_whole && q < last; ++q) map[i].copy(to + q * size, from + (q - first) * step);
    }
    if (!is_whole) return;
    float* to = dst + at * p.pitch * kLanes;
    for (int64_t q = first; q < last; ++q, from += step)
      for (int64_t i = 0; i < panels; ++i) store(to + i * distance + q * kLanes, lanes_of(from + map[i].low));
  });
}

// Panels whose copies fit the second-level cache together.
constexpr int64_t kTogetherFloats = 16 * 1024;

template <class InT, class OutT, bool kBackward, int kSources, int kMr, int kBlock>
struct MergedLanes {
  using In = InT;
  using Out = OutT;
  static constexpr int kPixel = kSources * kLanes;
  static constexpr bool kExact = std::is_same<In, int8_t>::value;

  const tw_conv_args* args;
  Roles roles;
  int64_t views, workers, channels, panels, groups;  // all result channels, in vectors of kLanes, in groups
  int64_t image_floats = 0, together = 1;
  View* view;
  Planes* planes;
  int64_t** offsets;
  float** packed;
  int64_t* first_task;
  LaneMap<kSources>* map;

  int64_t rows_of(const View& v) const { return max_of(1, min_of(v.axis[1].count, kBlock / max_of(1, v.axis[2].count))); }
  int64_t blocks_of(const View& v) const { return v.axis[0].count * ceil_div(v.axis[1].count, rows_of(v)); }

  void plan(const tw_conv_args* a, Arena& arena) {
    args = a;
    roles = roles_of<kBackward>(a);
    views = view_count<kBackward>(a);
    workers = threads_of(a);
    channels = a->g * roles.results, panels = ceil_div(channels, kLanes);
    view = arena.take<View>(views);
    planes = arena.take<Planes>(views);
    offsets = arena.take<int64_t*>(views);
    packed = arena.take<float*>(views);
    first_task = arena.take<int64_t>(views + 1);
    map = arena.take<LaneMap<kSources>>(panels);
    for (int64_t i = 0; arena.base && i < panels; ++i) map[i].set(i * kLanes, roles.results, a->g);
    int64_t tasks = 0, blocks = 0;
    for (int64_t i = 0; i < views; ++i) {
      View v;
      make_view<kBackward>(a, i, v, arena);
      float* at = arena.take<float>(panels * v.taps * kPixel);
      const Planes p = planes_of(v, rows_of(v), arena);
      int64_t* offset = arena.take<int64_t>(v.taps);
      if (arena.base) {
        view[i] = v, packed[i] = at, first_task[i] = tasks, planes[i] = p, offsets[i] = offset;
        if (v.taps) tap_offsets(v, p, offset, 1);
      }
      tasks += v.pixels ? a->n * blocks_of(v) : 0;
      image_floats = max_of(image_floats, round_up((planes_bound(a, v, rows_of(v)) + kMr) * kPixel, 16));
    }
    blocks = max_of(1, tasks);
    together = max_of(1, min_of(panels, kTogetherFloats / max_of(1, image_floats)));
    if (workers > 1) together = max_of(1, min_of(together, panels * blocks / (4 * workers)));
    groups = ceil_div(panels, together);
    if (arena.base) first_task[views] = tasks;
  }
  int64_t worker_bytes() const { return round_up(image_floats * together * 4 + 512, 4096); }

  // [tap][source][lane] of every panel.
  void pack_filters() const {
    parallel(args->team, views * panels, [this](int64_t task) {
      const View& v = view[task / panels];
      const int64_t panel = task % panels;
      float* to = packed[task / panels] + panel * v.taps * kPixel;
      const In* w = static_cast<const In*>(roles.filter);
      const int64_t lanes = map[panel].lanes;
      int64_t lane[kLanes];
      for (int64_t l = 0; l < lanes; ++l) {
        const int64_t r = panel * kLanes + l, group = r / roles.results;
        lane[l] = group * roles.w_group + (r - group * roles.results) * roles.w_result;
      }
      for (int64_t tz = 0; tz < v.axis[0].taps; ++tz)
        for (int64_t ty = 0; ty < v.axis[1].taps; ++ty)
          for (int64_t tx = 0; tx < v.axis[2].taps; ++tx) {
            const int64_t at = v.axis[0].index[tz] * roles.w_s[0] + v.axis[1].index[ty] * roles.w_s[1] + v.axis[2].index[tx] * roles.w_s[2];
            for (int64_t j = 0; j < kSources; ++j, to += kLanes)
              for (int l = 0; l < kLanes; ++l) to[l] = l < lanes ? lane_of(w[lane[l] + at + j * roles.w_source]) : 0.0f;
          }
    });
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

  // One row of `wide` results; the last tile may compute more than it keeps.
  template <Spread kSpread>
  static TW_NOINLINE void one_row(Out* row, int64_t step, int64_t wide, const float* image, const float* filters,
                                  const int64_t* offset, int64_t taps, const LaneMap<kSources>& map) {
    constexpr int kFloats = kSpread == Spread::stored ? kPixel : kLanes;
    const int64_t lanes = map.lanes;
    for (int64_t q = 0; q < wide; q += kMr, image += kMr * kFloats, row += kMr * step) {
      vf acc[kMr];
      TW_UNROLL
      for (int m = 0; m < kMr; ++m) acc[m] = vf{};
      const float* filter = filters;
      int64_t t = 0;
      do {
        const float* at = image + offset[t] * kFloats;
        TW_UNROLL
        for (int j = 0; j < kSources; ++j) {
          const vf w = load(filter + j * kLanes);
          const vi pick = map.pick[j];
          TW_UNROLL
          for (int m = 0; m < kMr; ++m) acc[m] = mac(w, source_of<kSpread>(at + m * kFloats, j, pick), acc[m]);
        }
        filter += kPixel;
      } while (++t < taps);
      if (q + kMr <= wide && lanes == kLanes) {
        TW_UNROLL
        for (int m = 0; m < kMr; ++m) put(row + m * step, acc[m], kLanes);
      } else {
        TW_UNROLL
        for (int m = 0; m < kMr; ++m)
          if (q + m < wide) put(row + m * step, acc[m], lanes);
      }
    }
  }

  void block(char* scratch, const View& v, int64_t from, int64_t n, int64_t index) const {
    const int64_t rows = rows_of(v), cuts = ceil_div(v.axis[1].count, rows), depth = index / cuts, row0 = index % cuts * rows;
    const int64_t high = min_of(rows, v.axis[1].count - row0), wide = v.axis[2].count, to = min_of(panels, from + together);
    float* image = reinterpret_cast<float*>(scratch);
    const int64_t which = &v - view, step = v.axis[2].jump * roles.dst_s[2];
    const Planes& p = planes[which];
    if (v.taps) {
      copy_lanes<kSources>(image, image_floats, static_cast<const In*>(roles.src) + n * roles.src_n, map + from, to - from, roles, v,
                           p, depth, row0);
      // The last tile of a row reads beyond the planes: zeros, for denormal numbers would slow it down.
      for (int64_t i = from; i < to; ++i) {
        const int64_t size = map[i].pixel_floats();
        zero_run(image + (i - from) * image_floats + p.count * p.plane * size, kMr * size);
      }
    }
    for (int64_t r = 0; r < high; ++r) {
      Out* row = static_cast<Out*>(roles.dst) + result_offset(roles, v, n, depth, row0 + r, 0);
      for (int64_t panel = from; panel < to; ++panel) {
        const LaneMap<kSources>& lane = map[panel];
        Out* at = row + panel * kLanes;
        if (v.taps == 0) {
          for (int64_t q = 0; q < wide; ++q) put(at + q * step, vf{}, lane.lanes);
          continue;
        }
        const float* pixels = image + (panel - from) * image_floats + r * p.pitch * lane.pixel_floats();
        lane.with_spread(kSources == 1 && roles.results == 1, [&](auto spread) {
          one_row<decltype(spread)::value>(at, step, wide, pixels, packed[which] + panel * v.taps * kPixel, offsets[which], v.taps, lane);
        });
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
    parallel_tasks(args.team, m.workers, m.first_task[m.views] * m.groups, [&](int64_t slot, int64_t task) {
      int64_t i = 0;
      while (task / m.groups >= m.first_task[i + 1]) ++i;
      const int64_t local = task / m.groups - m.first_task[i], blocks = m.blocks_of(m.view[i]);
      m.block(scratch + slot * bytes, m.view[i], task % m.groups * m.together, local / blocks, local % blocks);
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
  Planes planes;
  int64_t workers, channels, panels, rows, cuts, blocks, slots, image_floats, grid_floats, together, groups;
  LaneMap<kSources>* map;
  int64_t* offsets;
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
    map = arena.take<LaneMap<kSources>>(panels);
    for (int64_t i = 0; arena.base && i < panels; ++i) map[i].set(i * kLanes, roles.results, a->g);
    image_floats = round_up((planes_bound(a, view, rows) + 1) * kPixel, 16);
    grid_floats = rows * view.axis[2].count * kLanes;
    together = max_of(1, min_of(panels, kTogetherFloats / (image_floats + grid_floats)));
    if (workers > 1 && !kByPixels) together = max_of(1, min_of(together, panels / (2 * workers)));
    groups = ceil_div(panels, together);
    sums = arena.take<float>(slots * panels * view.taps * kPixel);
    planes = planes_of(view, rows, arena);
    offsets = arena.take<int64_t>(view.taps);
    if (arena.base) tap_offsets(view, planes, offsets, 1);
  }
  int64_t worker_bytes() const { return round_up((image_floats + grid_floats) * together * 4 + 512, 4096); }

  template <int kCount, Spread kSpread>
  static TW_NOINLINE void taps(float* to, const float* image, const int64_t* offset, const float* grid, int64_t high, int64_t wide,
                               int64_t pitch, bool is_first, const LaneMap<kSources>& map) {
    constexpr int kFloats = kSpread == Spread::stored ? kPixel : kLanes;
    vf acc[kCount][kSources];
    TW_UNROLL
    for (int t = 0; t < kCount; ++t) {
      TW_UNROLL
      for (int j = 0; j < kSources; ++j) acc[t][j] = vf{};
    }
    for (int64_t r = 0; r < high; ++r) {
      const float* at[kCount];
      TW_UNROLL
      for (int t = 0; t < kCount; ++t) at[t] = image + (offset[t] + r * pitch) * kFloats;
      for (int64_t q = 0; q < wide; ++q, grid += kLanes) {
        const vf d = load(grid);
        TW_UNROLL
        for (int t = 0; t < kCount; ++t) {
          TW_UNROLL
          for (int j = 0; j < kSources; ++j) acc[t][j] = mac(d, source_of<kSpread>(at[t] + q * kFloats, j, map.pick[j]), acc[t][j]);
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

  void panels_into(char* scratch, float* into, int64_t panel0, int64_t from, int64_t to) const {
    float* image = reinterpret_cast<float*>(scratch);
    const int64_t count = min_of(together, panels - panel0), wide = view.axis[2].count;
    float* grid = image + image_floats * together;
    for (int64_t block = from; block < to; ++block) {
      const int64_t row0 = block % cuts * rows, depth = block / cuts % view.axis[0].count, n = block / cuts / view.axis[0].count;
      const int64_t high = min_of(rows, view.axis[1].count - row0);
      copy_lanes<kSources>(image, image_floats, static_cast<const In*>(args->x) + n * args->x_n, map + panel0, count, roles, view,
                           planes, depth, row0);
      const In* y = static_cast<const In*>(args->y) + n * args->y_n + depth * args->y_s[0] + row0 * args->y_s[1] + panel0 * kLanes;
      for (int64_t q = 0; q < high * wide; ++q, y += args->y_s[2])
        for (int64_t i = 0; i < count; ++i) {
          const int64_t lanes = map[panel0 + i].lanes;
          const In* at = y + i * kLanes;
          store(grid + i * grid_floats + q * kLanes, lanes == kLanes ? lanes_of(at) : lanes_of_n(at, lanes));
        }
      for (int64_t i = 0; i < count; ++i)
        map[panel0 + i].with_spread(kSources == 1 && roles.results == 1, [&](auto spread) {
          all_taps<decltype(spread)::value>(into + i * view.taps * kPixel, image + i * image_floats, grid + i * grid_floats, high,
                                            block == from, map[panel0 + i]);
        });
    }
  }

  template <Spread kSpread>
  void all_taps(float* into, const float* image, const float* grid, int64_t high, bool is_first, const LaneMap<kSources>& map) const {
    int64_t t = 0;
    for (; t + kTogether <= view.taps; t += kTogether)
      taps<kTogether, kSpread>(into + t * kPixel, image, offsets + t, grid, high, view.axis[2].count, planes.pitch, is_first, map);
    for (; t < view.taps; ++t)
      taps<1, kSpread>(into + t * kPixel, image, offsets + t, grid, high, view.axis[2].count, planes.pitch, is_first, map);
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
    parallel_tasks(args.team, m.workers, args.n ? m.groups * m.slots : 0, [&](int64_t slot, int64_t task) {
      const int64_t panel = task % m.groups * m.together, part = task / m.groups;
      m.panels_into(scratch + slot * bytes, m.sums + (part * m.panels + panel) * size, panel, m.blocks * part / m.slots,
                    m.blocks * (part + 1) / m.slots);
    });
    parallel(args.team, m.panels, [&](int64_t panel) { m.finish(panel); });
    return 0;
  }
};

}  // namespace tw
