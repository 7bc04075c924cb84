// SPDX-License-Identifier: MIT
// Depthwise convolution over nchw: every channel is an image of its own.
//
// A channel is copied once into padded planes that fit the first cache levels. With a stride of one
// and a square filter of kTaps, kRows result rows are kept in registers, so a loaded vector serves
// every filter row that needs it. Anything else runs tap by tap over the flattened planes.
#pragma once
#include <type_traits>

#include "conv_pack.hpp"

namespace tw {

template <class InT, class OutT, bool kBackward, int kTaps, int kRows, int kNv>
struct DepthwiseRows {
  using In = InT;
  using Out = OutT;
  using Sum = typename std::conditional<std::is_same<In, int8_t>::value, int32_t, float>::type;
  static constexpr int kStep = kNv * kLanes;
  static constexpr int64_t kBatchFloats = 4096;
  // Vectors may reach this far beyond the last pixel.
  static constexpr int64_t kSlack = 2 * kStep + 2 * kLanes;

  const tw_conv_args* args;
  Roles roles;
  int64_t views, workers, channels;
  int64_t image_floats = 0, result_floats = 0, most_taps = 0, batch = 1;
  View* view;
  Planes* planes;
  int64_t** offsets;
  bool* is_square;

  void plan(const tw_conv_args* a, Arena& arena) {
    args = a;
    roles = roles_of<kBackward>(a);
    views = view_count<kBackward>(a);
    workers = threads_of(a);
    channels = a->g;
    view = arena.take<View>(views);
    planes = arena.take<Planes>(views);
    offsets = arena.take<int64_t*>(views);
    is_square = arena.take<bool>(views);
    for (int64_t i = 0; i < views; ++i) {
      View v;
      make_view<kBackward>(a, i, v, arena);
      const Planes p = planes_of(v, v.axis[1].count, arena);
      int64_t* at = arena.take<int64_t>(v.taps);
      if (arena.base) {
        view[i] = v, planes[i] = p, offsets[i] = at, is_square[i] = square_of(v);
        if (v.taps) tap_offsets(v, p, at, 1);
      }
      const int64_t bound = v.taps ? planes_bound(a, v, v.axis[1].count) : 0;
      image_floats = max_of(image_floats, bound + kSlack + kRows * (v.axis[2].count + a->filter[2] * a->dilation[2] + 2));
      result_floats = max_of(result_floats, max_of(bound, v.axis[1].count * v.axis[2].count) + kSlack);
      most_taps = max_of(most_taps, v.taps);
    }
    image_floats = round_up(image_floats, 16);
    if (!kBackward || a->stride[2] == 1) batch = max_of(1, min_of(16, kBatchFloats / image_floats));
  }

  int64_t worker_bytes() const {
    return round_up((image_floats * batch + args->stride[2] * result_floats + most_taps) * 4 + 512, 4096);
  }

  // result[q] = sum over taps of weight[t] * image[q + offset[t]], for all q of the planes' rows.
  static void any_taps(float* result, const float* image, const float* weight, const int64_t* offset, int64_t taps, int64_t count) {
    for (int64_t q = 0; q < count; q += kStep) {
      vf acc[kNv];
      TW_UNROLL
      for (int v = 0; v < kNv; ++v) acc[v] = vf{};
      for (int64_t t = 0; t < taps; ++t) {
        const vf x = splat(weight[t]);
        const float* at = image + q + offset[t];
        TW_UNROLL
        for (int v = 0; v < kNv; ++v) acc[v] = mac(x, load(at + v * kLanes), acc[v]);
      }
      TW_UNROLL
      for (int v = 0; v < kNv; ++v) store(result + q + v * kLanes, acc[v]);
    }
  }

  // Filters that leave room for the sums stay in registers while an image is done.
  static constexpr bool kHeld = kTaps * kTaps + kRows + 1 <= kRegisters;
  struct Filter {
    vf held[kHeld ? kTaps * kTaps : 1];
    const float* weight;
    TW_INLINE explicit Filter(const float* w) : weight(w) {
      TW_UNROLL
      for (int t = 0; kHeld && t < kTaps * kTaps; ++t) held[t] = splat(w[t]);
    }
    TW_INLINE vf at(int t) const { return kHeld ? held[t] : splat(weight[t]); }
  };

  // kRows rows of kLanes results each, from kRows + kTaps - 1 rows of the image.
  template <class Store>
  static TW_INLINE void row_block(const float* image, int64_t pitch, const Filter& filter, Store put) {
    vf acc[kRows];
    TW_UNROLL
    for (int r = 0; r < kRows; ++r) acc[r] = vf{};
    TW_UNROLL
    for (int i = 0; i < kRows + kTaps - 1; ++i) {
      TW_UNROLL
      for (int x = 0; x < kTaps; ++x) {
        const vf pixel = load(image + i * pitch + x);
        TW_UNROLL
        for (int y = 0; y < kTaps; ++y)
          if (i - y >= 0 && i - y < kRows) acc[i - y] = mac(filter.at(y * kTaps + x), pixel, acc[i - y]);
      }
    }
    TW_UNROLL
    for (int r = 0; r < kRows; ++r) put(r, acc[r]);
  }

  static TW_NOINLINE void square_taps(Out* out, int64_t out_row, const float* image, int64_t pitch, const float* weight,
                                      int64_t high, int64_t wide) {
    const Filter filter(weight);
    for (int64_t q = 0; q < wide; q += kLanes) {
      const int64_t lanes = min_of(kLanes, wide - q);
      for (int64_t r = 0; r < high; r += kRows) {
        const int64_t rows = min_of(kRows, high - r);
        Out* to = out + r * out_row + q;
        row_block(image + r * pitch + q, pitch, filter, [&](int i, vf sum) {
          if (i >= rows) return;
          if (lanes == kLanes)
            put(to + i * out_row, sum);
          else
            put_n(to + i * out_row, sum, lanes);
        });
      }
    }
  }

  static TW_INLINE void put(Out* at, vf sum) {
    if constexpr (std::is_same<Sum, int32_t>::value)
      store_out(at, __builtin_convertvector(sum, vi));
    else
      store_out(at, sum);
  }
  static TW_INLINE void put_n(Out* at, vf sum, int64_t n) {
    if constexpr (std::is_same<Sum, int32_t>::value)
      store_out_n(at, __builtin_convertvector(sum, vi), n);
    else
      store_out_n(at, sum, n);
  }

  static bool square_of(const View& v) {
    return v.axis[0].taps == 1 && v.axis[1].taps == kTaps && v.axis[2].taps == kTaps && v.axis[1].jump == 1 &&
           v.axis[2].jump == 1 && is_dense(v.axis[1]) && is_dense(v.axis[2]);
  }
  static bool is_dense(const Axis& x) {
    const int64_t step = kBackward ? -1 : 1;
    for (int64_t t = 1; t < x.taps; ++t)
      if (x.base[t] != x.base[t - 1] + step) return false;
    return x.step == 1;
  }

  // Channels [c, c + count) of image n. All are copied before the first is used: a load right behind
  // the stores that it spans would wait for each of them.
  void some_channels(float* scratch, int64_t n, int64_t c, int64_t count) const {
    float* image = scratch;
    float* weight = image + round_up(image_floats * batch, 16);
    float* result = weight + round_up(most_taps, 16);
    const In* src = static_cast<const In*>(roles.src) + n * roles.src_n + c * roles.src_c;
    const In* filter = static_cast<const In*>(roles.filter) + c * roles.w_group;
    Out* dst = static_cast<Out*>(roles.dst) + n * roles.dst_n + c * roles.dst_c;
    const int64_t stride = view[0].axis[2].jump;
    // The phases of the width of one row come one after the other; they are woven together.
    for (int64_t first = 0; first < views; first += stride)
      for (int64_t z = 0; z < view[first].axis[0].count; ++z) {
        if (stride == 1 && view[first].taps)
          copy_planes(image, image_floats, src, roles, view[first], planes[first], count, z, 0);
        for (int64_t i = 0; i < count; ++i) {
          for (int64_t phase = 0; phase < stride; ++phase) {
            if (stride > 1 && view[first + phase].taps && view[first + phase].pixels)
              copy_planes(image, 0, src + i * roles.src_c, roles, view[first + phase], planes[first + phase], 1, z, 0);
            one_phase(dst + i * roles.dst_c, result + phase * result_floats, image + (stride == 1 ? i * image_floats : 0), weight,
                      filter + i * roles.w_group, first + phase, z);
          }
          if (!is_square[first]) weave(dst + i * roles.dst_c, result, first, z, stride);
        }
      }
  }

  void one_phase(Out* dst, float* result, const float* image, float* weight, const In* filter, int64_t index, int64_t z) const {
    const View& v = view[index];
    const Planes& p = planes[index];
    const int64_t high = v.axis[1].count, wide = v.axis[2].count;
    if (v.pixels == 0) return;
    if (v.taps == 0) return zero_run(result, high * wide);
    read_filter(weight, filter, v, is_square[index]);
    if (is_square[index])
      square_taps(dst + result_offset(roles, v, 0, z, 0, 0), roles.dst_s[1], image, p.pitch, weight, high, wide);
    else
      any_taps(result, image, weight, offsets[index], v.taps, (high - 1) * p.pitch + wide);
  }

  void read_filter(float* weight, const In* filter, const View& v, bool square) const {
    if (square) {
      filter += v.axis[0].index[0] * roles.w_s[0];
      // Backward, taps run against the pixels.
      for (int t = 0; t < kTaps * kTaps; ++t) weight[kBackward ? kTaps * kTaps - 1 - t : t] = lane_of(filter[t]);
      return;
    }
    for (int64_t tz = 0; tz < v.axis[0].taps; ++tz)
      for (int64_t ty = 0; ty < v.axis[1].taps; ++ty)
        for (int64_t tx = 0; tx < v.axis[2].taps; ++tx)
          *weight++ = lane_of(filter[v.axis[0].index[tz] * roles.w_s[0] + v.axis[1].index[ty] * roles.w_s[1] + v.axis[2].index[tx]]);
  }

  void weave(Out* dst, const float* result, int64_t first, int64_t z, int64_t stride) const {
    const View& base = view[first];
    for (int64_t y = 0; y < base.axis[1].count; ++y) {
      Out* row = dst + result_offset(roles, base, 0, z, y, 0);
      if (stride == 1) {
        const float* from = result + y * (base.taps ? planes[first].pitch : base.axis[2].count);
        int64_t i = 0;
        const int64_t wide = base.axis[2].count;
        for (; i + kLanes <= wide; i += kLanes) put(row + i, load(from + i));
        if (i < wide) put_n(row + i, load(from + i), wide - i);
        continue;
      }
      const float* from[2];
      for (int64_t phase = 0; phase < stride; ++phase) {
        const View& v = view[first + phase];
        const float* at = result + phase * result_floats + y * (v.taps ? planes[first + phase].pitch : v.axis[2].count);
        if (stride == 2)
          from[phase] = at;
        else
          for (int64_t i = 0; i < v.axis[2].count; ++i) row[i * stride + phase] = from_accumulator<Out>((Sum)at[i]);
      }
      if (stride == 2) {
        const int64_t even = base.axis[2].count, odd = view[first + 1].axis[2].count;
        for (int64_t i = 0; i < odd; ++i) row[2 * i] = single((from[0])[i]), row[2 * i + 1] = single((from[1])[i]);
        if (even > odd) row[2 * odd] = single(from[0][odd]);
      }
    }
  }
  static TW_INLINE Out single(float x) { return from_accumulator<Out>((Sum)x); }

  // Zeros what vectors read behind the planes. Their results are dropped, yet denormal numbers left
  // there by others would make them many times as slow.
  void clear_beyond(float* image) const {
    int64_t held = image_floats;
    for (int64_t i = 0; i < views; ++i) held = min_of(held, planes[i].count * planes[i].plane);
    for (int64_t i = 0; i < batch; ++i) zero_run(image + i * image_floats + held, image_floats - held);
  }

  void run(Arena& arena) {
    char* scratch = arena.base + round_up(arena.used, 64);
    const int64_t bytes = worker_bytes(), total = args->n * channels;
    const int64_t chunk = max_of(1, min_of(16, total / (4 * workers)));
    for (int64_t slot = 0; slot < workers; ++slot) clear_beyond(reinterpret_cast<float*>(scratch + slot * bytes));
    parallel_tasks(args->team, workers, ceil_div(total, chunk), [&](int64_t slot, int64_t task) {
      const int64_t first = task * chunk, last = min_of(total, first + chunk);
      int64_t n = first / channels, c = first % channels;
      for (int64_t i = first; i < last;) {
        const int64_t count = min_of(batch, min_of(channels - c, last - i));
        some_channels(reinterpret_cast<float*>(scratch + slot * bytes), n, c, count);
        i += count, c += count;
        if (c == channels) c = 0, ++n;
      }
    });
  }

  static int64_t workspace(const tw_conv_args* given) {
    const tw_conv_args args = packed_strides(given, false);
    DepthwiseRows d;
    Arena arena{nullptr};
    d.plan(&args, arena);
    return round_up(arena.used, 64) + d.workers * d.worker_bytes();
  }
  static int32_t execute(const tw_conv_args* given) {
    const tw_conv_args args = packed_strides(given, false);
    DepthwiseRows d;
    Arena arena{static_cast<char*>(args.workspace)};
    d.plan(&args, arena);
    d.run(arena);
    return 0;
  }
};

}  // namespace tw
