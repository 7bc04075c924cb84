// From sums over pixels to the gradient of a filter: the result, a slice of it, or fp32 sums.
#pragma once
#include "conv/cuda/store.cuh"

template <class R, int Sum>
struct FilterSums {
  R* result;
  float* partial;
  i64 pitch, slice;       // elements from one filter of the result to the next, and of one slice
  int filters, channels;  // of a group
  int taps;

  DEVICE bool is_even() const { return (channels | pitch) % 2 == 0; }

  // Sums of two neighbouring entries from `at` of a filter; `both`: the second is inside, too.
  DEVICE void store(float a, float b, int filter, i64 at, bool is_even, bool both, int split) const {
    if constexpr (Sum == SUM_DIRECT) {
      R* to = result + filter * pitch + at;
      if (is_even && both) return store_pair(to, a, b);
      to[0] = from_float<R>(a);
      if (both) to[1] = from_float<R>(b);
    } else {
      float* to = partial + (i64)filter * taps * channels + at;
      if (Sum == SUM_SLICES) to += split * slice;
      store_partial_pair<Sum == SUM_ATOMIC>(to, a, b, is_even, both);
    }
  }
};
