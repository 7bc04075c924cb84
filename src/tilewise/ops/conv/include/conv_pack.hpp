// SPDX-License-Identifier: MIT
// Filters as panels for the register tile, and images as padded planes without strides.
#pragma once
#include "conv_view.hpp"

namespace tw {

// ---- filters ----

// One panel of kWidth result channels: dst[(k) * kWidth + m], k running over chunks of `chunk`
// source channels, then taps, then the channels of the chunk. Channels beyond `width` are zero.
template <int kWidth, class In>
void pack_filter_panel(float* dst, const In* src, const Roles& r, const View& v, int64_t width, int64_t chunk) {
  const Axis* ax = v.axis;
  for (int64_t c0 = 0; c0 < r.sources; c0 += chunk) {
    const int64_t cc = min_of(chunk, r.sources - c0);
    for (int64_t tz = 0; tz < ax[0].taps; ++tz)
      for (int64_t ty = 0; ty < ax[1].taps; ++ty)
        for (int64_t tx = 0; tx < ax[2].taps; ++tx) {
          const In* tap =
              src + ax[0].index[tz] * r.w_s[0] + ax[1].index[ty] * r.w_s[1] + ax[2].index[tx] * r.w_s[2] + c0 * r.w_source;
          if (r.w_result == 1) {
            for (int64_t c = 0; c < cc; ++c, dst += kWidth) {
              copy_run(dst, tap + c * r.w_source, width);
              if (width < kWidth) zero_run(dst + width, kWidth - width);
            }
          } else {
            int64_t c = 0;
            if (r.w_source == 1)
              for (; c + kLanes <= cc; c += kLanes)
                for (int64_t m0 = 0; m0 < kWidth; m0 += kLanes) {
                  vf square[kLanes];
                  TW_UNROLL
                  for (int i = 0; i < kLanes; ++i)
                    square[i] = m0 + i < width ? lanes_of(tap + (m0 + i) * r.w_result + c) : vf{};
                  transpose(square);
                  TW_UNROLL
                  for (int i = 0; i < kLanes; ++i) {
                    float* row = dst + (c + i) * kWidth + m0;
                    if (m0 + kLanes <= kWidth)
                      store(row, square[i]);
                    else
                      std::memcpy(row, &square[i], (kWidth % kLanes) * sizeof(float));
                  }
                }
            for (; c < cc; ++c)
              for (int64_t m = 0; m < kWidth; ++m)
                dst[c * kWidth + m] = m < width ? lane_of(tap[m * r.w_result + c * r.w_source]) : 0.0f;
            dst += cc * kWidth;
          }
        }
  }
}

// ---- images ----

// Where the taps of a view find their pixels in a padded copy of `rows` result rows of one depth.
// With a stride, pixels are sorted by remainder into planes of their own, so that neighbouring
// results always read neighbouring pixels.
struct Planes {
  int64_t rows, pitch, plane, count;  // plane: pixels of one; count: of them
  int64_t low[2], used[2];            // first source (in strides), planes used along height and width
  int64_t* phase[2];                  // remainder held by each used plane
};

TW_INLINE Planes planes_of(const View& v, int64_t rows, Arena& arena) {
  Planes p;
  int64_t span[2];
  for (int d = 0; d < 2; ++d) {
    const Axis& x = v.axis[d + 1];
    p.phase[d] = arena.take<int64_t>(min_of(x.step, x.taps));
    int64_t low = 0, high = 0;
    p.used[d] = 0;
    for (int64_t t = 0; x.base && t < x.taps; ++t) {
      const int64_t at = floor_div(x.base[t], x.step), rest = x.base[t] - at * x.step;
      low = t ? min_of(low, at) : at, high = t ? max_of(high, at) : at;
      bool is_new = true;
      for (int64_t i = 0; i < p.used[d]; ++i) is_new &= p.phase[d][i] != rest;
      if (is_new) p.phase[d][p.used[d]++] = rest;
    }
    p.low[d] = low, span[d] = high - low;
  }
  p.rows = rows + span[0];
  p.pitch = v.axis[2].count + span[1];
  p.plane = p.rows * p.pitch;
  p.count = v.axis[0].taps * p.used[0] * p.used[1];
  return p;
}

// An upper bound of count * plane without tables, for sizing scratch memory.
TW_INLINE int64_t planes_bound(const tw_conv_args* a, const View& v, int64_t rows) {
  int64_t total = v.axis[0].taps;
  for (int d = 1; d < 3; ++d) {
    const Axis& x = v.axis[d];
    const int64_t reach = x.step == 1 ? (a->filter[d] - 1) * a->dilation[d] : ceil_div((a->filter[d] - 1) * a->dilation[d], x.step) + 1;
    total *= min_of(x.step, max_of(1, x.taps)) * ((d == 1 ? rows : x.count) + reach + 1);
  }
  return total;
}

// Pixel offsets of the taps, in filter order.
TW_INLINE void tap_offsets(const View& v, const Planes& p, int64_t* offset, int64_t scale) {
  int64_t place[2];
  for (int64_t tz = 0; tz < v.axis[0].taps; ++tz)
    for (int64_t ty = 0; ty < v.axis[1].taps; ++ty)
      for (int64_t tx = 0; tx < v.axis[2].taps; ++tx) {
        int64_t plane = tz;
        const int64_t tap[2] = {ty, tx};
        for (int d = 0; d < 2; ++d) {
          const Axis& x = v.axis[d + 1];
          const int64_t at = floor_div(x.base[tap[d]], x.step), rest = x.base[tap[d]] - at * x.step;
          int64_t which = 0;
          while (p.phase[d][which] != rest) ++which;
          plane = plane * p.used[d] + which;
          place[d] = at - p.low[d];
        }
        *offset++ = (plane * p.plane + place[0] * p.pitch + place[1]) * scale;
      }
}

// Calls row(plane row index, source row or -1, phase of the width) for every row of the planes.
template <class F>
TW_INLINE void each_row(const View& v, const Planes& p, int64_t depth, int64_t row0, F row) {
  int64_t at = 0;
  for (int64_t tz = 0; tz < v.axis[0].taps; ++tz) {
    const int64_t z = depth * v.axis[0].step + v.axis[0].base[tz];
    for (int64_t i = 0; i < p.used[0]; ++i)
      for (int64_t j = 0; j < p.used[1]; ++j)
        for (int64_t r = 0; r < p.rows; ++r, ++at) {
          const int64_t h = (row0 + r + p.low[0]) * v.axis[1].step + p.phase[0][i];
          const bool is_inside = z >= 0 && z < v.axis[0].size && h >= 0 && h < v.axis[1].size;
          row(at, is_inside ? z : -1, h, p.phase[1][j]);
        }
  }
}

// The columns [from, to) of a plane row that exist in the image.
TW_INLINE void columns_inside(const View& v, const Planes& p, int64_t phase, int64_t& from, int64_t& to) {
  const Axis& x = v.axis[2];
  const int64_t start = p.low[1] * x.step + phase;  // source of column 0
  from = start >= 0 ? 0 : ceil_div(-start, x.step);
  to = start >= x.size ? 0 : min_of(p.pitch, (x.size - 1 - start) / x.step + 1);
  if (to < from) from = to = 0;
}

// dst[0, n) = src[0, n), then zeros up to `end`; may write up to a vector beyond.
template <class In>
TW_INLINE void copy_then_zero(float* dst, const In* src, int64_t n, int64_t end) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(dst + i, lanes_of(src + i));
  if (i < n) store(dst + i, lanes_of_n(src + i, n - i)), i += kLanes;
  for (; i < end; i += kLanes) store(dst + i, vf{});
}

// Planes of `channels` channels, one after the other, pixels next to each other (nchw). Rows are
// written in order, and each may spill zeros into the next: dst needs a vector of room at the end.
template <class In>
void copy_planes(float* dst, int64_t channel_stride, const In* src, const Roles& r, const View& v, const Planes& p,
                 int64_t channels, int64_t depth, int64_t row0) {
  const int64_t high = v.axis[1].size, step = v.axis[2].step, pitch = p.pitch;
  for (int64_t c = 0; c < channels; ++c, dst += channel_stride, src += r.src_c) {
    float* to = dst;
    for (int64_t tz = 0; tz < v.axis[0].taps; ++tz) {
      const int64_t z = depth * v.axis[0].step + v.axis[0].base[tz];
      const bool has_depth = z >= 0 && z < v.axis[0].size;
      for (int64_t i = 0; i < p.used[0]; ++i)
        for (int64_t j = 0; j < p.used[1]; ++j) {
          int64_t first, last;
          columns_inside(v, p, p.phase[1][j], first, last);
          const In* from = src + z * r.src_s[0] + (first + p.low[1]) * step + p.phase[1][j];
          int64_t h = (row0 + p.low[0]) * v.axis[1].step + p.phase[0][i];
          for (int64_t row = 0; row < p.rows; ++row, to += pitch, h += v.axis[1].step) {
            if (!has_depth || h < 0 || h >= high || first >= last) {
              for (int64_t q = 0; q < pitch; q += kLanes) store(to + q, vf{});
              continue;
            }
            for (int64_t q = 0; q < first; q += kLanes) store(to + q, vf{});
            if (step == 1) {
              copy_then_zero(to + first, from + h * r.src_s[1], last - first, pitch - first);
            } else {
              copy_strided(to + first, from + h * r.src_s[1], last - first, step);
              for (int64_t q = last; q < pitch; q += kLanes) store(to + q, vf{});
            }
          }
        }
    }
  }
}

// Planes of pixels, each with `channels` channels next to each other (nhwc), kStride floats apart.
template <int kStride, class In>
void copy_pixels(float* dst, const In* src, const Roles& r, const View& v, const Planes& p, int64_t channels,
                 int64_t depth, int64_t row0) {
  each_row(v, p, depth, row0, [&](int64_t at, int64_t z, int64_t h, int64_t phase) {
    float* to = dst + at * p.pitch * kStride;
    int64_t first = 0, last = 0;
    if (z >= 0) columns_inside(v, p, phase, first, last);
    for (int64_t i = 0; i < first; ++i) zero_run(to + i * kStride, channels);
    const int64_t step = v.axis[2].step;
    const In* from = src + z * r.src_s[0] + h * r.src_s[1];
    for (int64_t i = first; i < last; ++i)
      copy_run(to + i * kStride, from + ((i + p.low[1]) * step + phase) * r.src_s[2], channels);
    for (int64_t i = last; i < p.pitch; ++i) zero_run(to + i * kStride, channels);
  });
}

}  // namespace tw
