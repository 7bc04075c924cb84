// How an implicit product walks a convolution: which pixels its rows are, which taps its steps.
//
// Rows are pixels of the result, images outermost. Each has a window in the image that is read; a
// tap is a fixed distance from the window's corner. Forward, the windows step by the stride and the
// taps by the dilation. Backward (data), the result is one parity of the image: its pixels read the
// gradient at distances that step by one or by the dilation, and only the taps that reach them
// take part, in falling order. Both are described by the same numbers.
#pragma once
#include "cuda/ptx.cuh"

struct Pixel {
  int n, d, h, w;
};

struct Walk {
  int size_d, size_h, size_w;        // pixels of an image of the result
  int stride_d, stride_h, stride_w;  // from one window to the next
  int corner_d, corner_h, corner_w;  // of the first window: minus the padding
  int taps_d, taps_h, taps_w;
  int reach_d, reach_h, reach_w;     // from one tap to the next
  int tap_first, tap_d, tap_h, tap_w;  // their places in the filter

  DEVICE int taps() const { return taps_d * taps_h * taps_w; }
  DEVICE Pixel pixel(int row) const {
    const u32 line = (u32)row / (u32)size_w, plane = line / (u32)size_h;
    const u32 image = size_d > 1 ? plane / (u32)size_d : plane;
    return {(int)image, (int)(plane - image * size_d), (int)(line - plane * size_h),
            (int)(row - line * size_w)};
  }
  // The pixel as many rows behind `at` as `by` is behind the first: no divisions.
  DEVICE Pixel plus(Pixel at, Pixel by) const {
    at = {at.n + by.n, at.d + by.d, at.h + by.h, at.w + by.w};
    if (at.w >= size_w) at.w -= size_w, at.h++;
    if (at.h >= size_h) at.h -= size_h, at.d++;
    if (at.d >= size_d) at.d -= size_d, at.n++;
    return at;
  }
  DEVICE int row(Pixel at) const {
    return ((at.n * size_d + at.d) * size_h + at.h) * size_w + at.w;
  }
  // The corner of a pixel's window.
  DEVICE Pixel corner(Pixel at) const {
    return {at.n, at.d * stride_d + corner_d, at.h * stride_h + corner_h,
            at.w * stride_w + corner_w};
  }
};

// One tap, and its distance from the window's corner.
struct Tap {
  int z, y, x;
  DEVICE Tap(const Walk& walk, int index) : z(0), y(0), x(0) {
    if (index == 0) return;
    const u32 line = (u32)index / (u32)walk.taps_w;
    z = line / (u32)walk.taps_h;
    y = line - z * walk.taps_h;
    x = index - line * walk.taps_w;
  }
  DEVICE void next(const Walk& walk) {
    if (++x < walk.taps_w) return;
    x = 0;
    if (++y < walk.taps_h) return;
    y = 0;
    ++z;
  }
  DEVICE int deep(const Walk& walk) const { return z * walk.reach_d; }
  DEVICE int down(const Walk& walk) const { return y * walk.reach_h; }
  DEVICE int right(const Walk& walk) const { return x * walk.reach_w; }
  // Where it stands in the filter.
  DEVICE int place(const Walk& walk) const {
    return walk.tap_first + z * walk.tap_d + y * walk.tap_h + x * walk.tap_w;
  }
};

#define WALK_PARAMETERS                                                                       \
  int size_d, int size_h, int size_w, int stride_d, int stride_h, int stride_w, int corner_d, \
      int corner_h, int corner_w, int taps_d, int taps_h, int taps_w, int reach_d, int reach_h, \
      int reach_w, int tap_first, int tap_d, int tap_h, int tap_w
#define WALK_ARGUMENTS                                                                         \
  size_d, size_h, size_w, stride_d, stride_h, stride_w, corner_d, corner_h, corner_w, taps_d, \
      taps_h, taps_w, reach_d, reach_h, reach_w, tap_first, tap_d, tap_h, tap_w

// Elements from the tensor's first to that of a pixel.
struct Places {
  i64 first, n, d, h, w;
  DEVICE i64 of(Pixel at) const { return first + at.n * n + at.d * d + at.h * h + at.w * w; }
  // Whether the pixels of a walk lie one after the other.
  DEVICE bool are_flat(const Walk& walk) const {
    return h == walk.size_w * w && d == walk.size_h * h && n == walk.size_d * d;
  }
};
