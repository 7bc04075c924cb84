// SPDX-License-Identifier: MIT
// Backward-weight convolution over nchw as dot products along the pixels.
//
// Both tensors are copied to the grid of the padded planes, y with zeros between its rows, so that an
// element of the filter is a dot product of two runs. Tiles are kMr filters x kTaps taps of vectors;
// lanes are added up once, at the end. Vectors are full however few channels a group has.
#pragma once
#include <type_traits>

#include "conv_pack.hpp"

namespace tw {

template <class InT, class OutT, int kMr, int kTaps, int kBlock>
struct DotWeight {
  using In = InT;
  using Out = OutT;
  static constexpr bool kExact = std::is_same<In, int8_t>::value;
  using Sum = typename std::conditional<kExact, int32_t, float>::type;
  // Vectors of y's and x's runs may reach this far beyond the last pixel.
  static constexpr int64_t kSlack = 2 * kLanes;

  const tw_conv_args* args;
  Roles roles;
  View view;
  Planes planes;
  int64_t workers, c, k, filters;        // filters: k in whole tiles
  int64_t rows, slabs, cuts, all;        // rows of a slab; slabs of a block, of an image, in total
  int64_t image_floats, grid_floats, splits, most_channels;
  int64_t* offsets;
  float* sums;

  void plan(const tw_conv_args* a, Arena& arena) {
    args = a;
    roles = roles_of<false>(a);
    workers = threads_of(a);
    make_view<false>(a, 0, view, arena);
    c = a->c / a->g, k = a->k / a->g, filters = round_up(k, kMr);
    const int64_t high = view.axis[1].count, wide = view.axis[2].count;
    rows = max_of(1, min_of(high, kBlock / wide));
    cuts = ceil_div(high, rows);
    rows = ceil_div(high, cuts);
    all = a->n * view.axis[0].count * cuts;
    slabs = max_of(1, min_of(all, cuts > 1 ? 1 : kBlock / (high * wide)));
    planes = planes_of(view, rows, arena);
    offsets = arena.take<int64_t>(view.taps + kTaps);
    if (arena.base) {
      tap_offsets(view, planes, offsets, 1);
      for (int64_t t = view.taps; t < view.taps + kTaps; ++t) offsets[t] = offsets[view.taps - 1];
    }
    image_floats = round_up(planes_bound(a, view, rows) + kSlack, 16);
    const int64_t reach = (a->filter[2] - 1) * a->dilation[2] + 2;
    grid_floats = round_up(rows * (wide + reach) + kSlack, 16);
    splits = a->g >= 2 * workers ? 1 : max_of(1, min_of(c, ceil_div(2 * workers, a->g)));
    most_channels = ceil_div(c, splits);
    sums = arena.take<float>(a->g * filters * c * padded_taps() * kLanes);
  }
  int64_t padded_taps() const { return round_up(view.taps, kTaps); }
  int64_t worker_bytes() const {
    return round_up((image_floats * most_channels + grid_floats * filters) * slabs * 4 + 512, 4096);
  }

  struct Runs {
    int64_t segments, length, image_step, grid_step, grid_row;
  };

  static TW_NOINLINE void tile(float* to, int64_t filter_step, const float* image, const int64_t* offset, const float* grid,
                               const Runs& runs, bool is_first) {
    vf acc[kMr][kTaps];
    TW_UNROLL
    for (int m = 0; m < kMr; ++m) {
      TW_UNROLL
      for (int t = 0; t < kTaps; ++t) acc[m][t] = vf{};
    }
    const int64_t row = runs.grid_row, length = runs.length;
    for (int64_t s = 0; s < runs.segments; ++s) {
      const float* at[kTaps];
      TW_UNROLL
      for (int t = 0; t < kTaps; ++t) at[t] = image + s * runs.image_step + offset[t];
      const float* y = grid + s * runs.grid_step;
      for (int64_t q = 0; q < length; q += kLanes) {
        vf d[kMr];
        TW_UNROLL
        for (int m = 0; m < kMr; ++m) d[m] = load(y + m * row + q);
        TW_UNROLL
        for (int t = 0; t < kTaps; ++t) {
          const vf x = load(at[t] + q);
          TW_UNROLL
          for (int m = 0; m < kMr; ++m) acc[m][t] = mac(d[m], x, acc[m][t]);
        }
      }
    }
    TW_UNROLL
    for (int m = 0; m < kMr; ++m) {
      TW_UNROLL
      for (int t = 0; t < kTaps; ++t) {
        float* sum = to + m * filter_step + t * kLanes;
        // Lane sums of int8 products are exact in fp32; they go on as integers.
        if constexpr (kExact)
          store_as(sum, __builtin_convertvector(acc[m][t], vi) + (is_first ? vi{} : load_as<vi>(sum)));
        else
          store(sum, acc[m][t] + (is_first ? vf{} : load(sum)));
      }
    }
  }

  // y on the grid of the planes: what lies between and behind its rows is zero.
  void copy_grid(float* grid, const In* y, int64_t high) const {
    for (int64_t r = 0; r < rows; ++r)
      copy_then_zero(grid + r * planes.pitch, y + r * args->y_s[1], r < high ? view.axis[2].count : 0, planes.pitch);
    store(grid + rows * planes.pitch, vf{});
    store(grid + rows * planes.pitch + kLanes, vf{});
  }

  void task(char* scratch, int64_t group, int64_t c0, int64_t c1) const {
    float* image = reinterpret_cast<float*>(scratch);
    float* grid = image + image_floats * most_channels * slabs;
    const int64_t padded = padded_taps(), filter_step = c * padded * kLanes;
    float* into = sums + group * filters * filter_step;
    Runs runs{0, (rows - 1) * planes.pitch + view.axis[2].count, image_floats, grid_floats, grid_floats * slabs};
    const In* x = static_cast<const In*>(args->x) + (group * c + c0) * args->x_c;
    const In* y = static_cast<const In*>(args->y) + group * k * args->y_k;
    for (int64_t first = 0; first < all; first += slabs) {
      runs.segments = min_of(slabs, all - first);
      for (int64_t s = 0; s < runs.segments; ++s) {
        const int64_t slab = first + s, row0 = slab % cuts * rows, z = slab / cuts % view.axis[0].count, n = slab / cuts / view.axis[0].count;
        const int64_t high = min_of(rows, view.axis[1].count - row0);
        copy_planes(image + s * image_floats, image_floats * slabs, x + n * args->x_n, roles, view, planes, c1 - c0, z, row0);
        for (int64_t i = 0; i < c1 - c0; ++i)
          for (int64_t j = 0; j < kSlack; j += kLanes)
            store(image + (i * slabs + s) * image_floats + planes.count * planes.plane + j, vf{});
        for (int64_t i = 0; i < filters; ++i)
          copy_grid(grid + (i * slabs + s) * grid_floats, y + n * args->y_n + min_of(i, k - 1) * args->y_k + z * args->y_s[0] + row0 * args->y_s[1], high);
      }
      for (int64_t i = c0; i < c1; ++i)
        for (int64_t t = 0; t < view.taps; t += kTaps)
          for (int64_t m = 0; m < filters; m += kMr)
            tile(into + m * filter_step + (i * padded + t) * kLanes, filter_step, image + (i - c0) * image_floats * slabs, offsets + t,
                 grid + m * grid_floats * slabs, runs, first == 0);
    }
    finish(into, group, c0, c1);
  }

  void finish(const float* from, int64_t group, int64_t c0, int64_t c1) const {
    const int64_t padded = padded_taps(), total = (c1 - c0) * padded;
    for (int64_t m = 0; m < k; ++m) {
      Out* to = static_cast<Out*>(args->w) + (group * k + m) * args->w_k + c0 * args->w_c;
      int64_t tap = 0;
      for (int64_t i = 0; i < total; i += kLanes) {
        // A transposed square has the lanes of its rows in columns, so adding rows adds lanes.
        const int64_t count = min_of(kLanes, total - i);
        Vec<Sum> square[kLanes];
        for (int64_t j = 0; j < kLanes; ++j)
          square[j] = j < count ? load_as<Vec<Sum>>(from + ((m * c + c0) * padded + i + j) * kLanes) : Vec<Sum>{};
        transpose(square);
        Sum part[kLanes];
        for (int width = kLanes / 2; width > 0; width /= 2)
          for (int j = 0; j < width; ++j) square[j] += square[j + width];
        store_as(part, square[0]);
        for (int64_t j = 0; j < count; ++j) {
          if (tap < view.taps) *to++ = from_accumulator<Out>(part[j]);
          if (++tap == padded) tap = 0;
        }
      }
    }
  }

  void zero() const {
    for (int64_t i = 0; i < args->k; ++i)
      for (int64_t j = 0; j < c * view.taps; ++j) static_cast<Out*>(args->w)[i * args->w_k + j] = Out{};
  }

  static int64_t workspace(const tw_conv_args* given) {
    const tw_conv_args args = packed_strides(given, false);
    DotWeight d;
    Arena arena{nullptr};
    d.plan(&args, arena);
    return round_up(arena.used, 64) + d.workers * d.worker_bytes();
  }
  static int32_t execute(const tw_conv_args* given) {
    const tw_conv_args args = packed_strides(given, false);
    DotWeight d;
    Arena arena{static_cast<char*>(args.workspace)};
    d.plan(&args, arena);
    if (d.c == 0 || d.k == 0) return 0;
    if (args.n == 0) {
      d.zero();
      return 0;
    }
    char* scratch = arena.base + round_up(arena.used, 64);
    const int64_t bytes = d.worker_bytes();
    parallel_tasks(args.team, d.workers, args.g * d.splits, [&](int64_t slot, int64_t task) {
      const int64_t group = task / d.splits, part = task % d.splits;
      d.task(scratch + slot * bytes, group, d.c * part / d.splits, d.c * (part + 1) / d.splits);
    });
    return 0;
  }
};

}  // namespace tw
