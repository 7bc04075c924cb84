// SPDX-License-Identifier: MIT
// A convolution direction seen as one or more forward convolutions with unit-stride results.
//
// Forward is a single view. The gradient of the input splits into stride x stride x stride phases:
// input pixels with the same remainder see the same taps of the filter, so each phase is a dense
// convolution over the gradient of the output, and nothing is scattered or multiplied by zero.
#pragma once
#include "tilewise/abi.hpp"
#include "tilewise/convert.hpp"

namespace tw {

// Scratch memory handed out in order; without a base it only counts.
struct Arena {
  char* base;
  int64_t used = 0;

  template <class T>
  T* take(int64_t count) {
    used = round_up(used, 64);
    T* at = base ? reinterpret_cast<T*>(base + used) : nullptr;
    used += count * (int64_t)sizeof(T);
    return at;
  }
};

// Strides of size-1 dimensions are meaningless; tensors are packed in the layout but for images and
// filters, whose distance is kept.
TW_INLINE tw_conv_args packed_strides(const tw_conv_args* args, bool is_nhwc) {
  tw_conv_args a = *args;
  auto pack = [is_nhwc](int64_t channels, const int64_t* size, int64_t& channel, int64_t* stride) {
    int64_t at = is_nhwc ? channels : 1;
    for (int d = 2; d >= 0; --d) stride[d] = at, at *= size[d];
    channel = is_nhwc ? 1 : at;
  };
  pack(a.c, a.in, a.x_c, a.x_s);
  pack(a.c / a.g, a.filter, a.w_c, a.w_s);
  pack(a.k, a.out, a.y_k, a.y_s);
  return a;
}

inline int64_t threads_of(const tw_conv_args* args) {
  return args->team && args->team->threads > 1 ? args->team->threads : 1;
}

template <class F>
void parallel(const tw_team* team, int64_t count, F body) {
  if (!team || team->threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  team->parallel(team->state, [](void* context, int64_t i) { (*static_cast<F*>(context))(i); }, &body, count);
}

// Gives every worker a slot of its own and hands tasks out as workers become free.
template <class F>
void parallel_tasks(const tw_team* team, int64_t workers, int64_t tasks, F body) {
  int64_t next = 0;
  parallel(team, min_of(workers, tasks), [&](int64_t slot) {
    for (;;) {
      const int64_t task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
      if (task >= tasks) return;
      body(slot, task);
    }
  });
}

// ---- elements to floats; int8 products are exact in fp32 and are summed in int32 ----

TW_INLINE vf lanes_of(const int8_t* p) { return __builtin_convertvector(widen(load_as<vb>(p)), vf); }
template <class In>
TW_INLINE vf lanes_of(const In* p) {
  return load_float(p);
}
template <class In>
TW_INLINE vf lanes_of_n(const In* p, int64_t n) {
  In part[kLanes] = {};
  std::memcpy(part, p, n * sizeof(In));
  return lanes_of(part);
}
TW_INLINE vf lanes_of_n(const float* p, int64_t n) { return load_n(p, n); }
TW_INLINE float lane_of(int8_t x) { return (float)x; }
template <class In>
TW_INLINE float lane_of(In x) {
  return to_float(x);
}

// dst[0, n) = src[0, n) as floats.
template <class In>
TW_INLINE void copy_run(float* dst, const In* src, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(dst + i, lanes_of(src + i));
  if (i < n) store_n(dst + i, lanes_of_n(src + i, n - i), n - i);
}
TW_INLINE void zero_run(float* dst, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(dst + i, vf{});
  if (i < n) store_n(dst + i, vf{}, n - i);
}
template <class In>
TW_INLINE void copy_strided(float* dst, const In* src, int64_t n, int64_t step) {
  if (step == 1) return copy_run(dst, src, n);
  int64_t i = 0;
#if defined(TW_HAS_SHUFFLE)
  // A vector is read beyond its last wanted element, which is why one more must follow.
  if (step == 2)
    for (; i + kLanes < n; i += kLanes) {
      const vf low = lanes_of(src + 2 * i), high = lanes_of(src + 2 * i + kLanes);
#if TW_LANES == 16
      store(dst + i, __builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30));
#else
      store(dst + i, __builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14));
#endif
    }
#endif
  for (; i < n; ++i) dst[i] = lane_of(src[i * step]);
}

// ---- geometry ----

// Results q in [0, count) lie at first + jump * q and read sources at step * q + base[tap].
struct Axis {
  int64_t count, step, first, jump, size, taps;
  int64_t* base;
  int64_t* index;  // of the tap in the filter
};

TW_INLINE void forward_axis(const tw_conv_args* a, int d, Axis& x, Arena& arena) {
  x.count = a->out[d], x.step = a->stride[d], x.first = 0, x.jump = 1, x.size = a->in[d];
  x.taps = a->filter[d];
  x.base = arena.take<int64_t>(x.taps), x.index = arena.take<int64_t>(x.taps);
  for (int64_t t = 0; x.base && t < x.taps; ++t) x.base[t] = t * a->dilation[d] - a->pad[d], x.index[t] = t;
}

TW_INLINE void phase_axis(const tw_conv_args* a, int d, int64_t phase, Axis& x, Arena& arena) {
  const int64_t s = a->stride[d];
  x.count = phase < a->in[d] ? ceil_div(a->in[d] - phase, s) : 0;
  x.step = 1, x.first = phase, x.jump = s, x.size = a->out[d], x.taps = 0;
  x.base = arena.take<int64_t>(a->filter[d]), x.index = arena.take<int64_t>(a->filter[d]);
  for (int64_t t = 0; t < a->filter[d]; ++t) {
    const int64_t at = phase + a->pad[d] - t * a->dilation[d];
    if (at % s) continue;
    if (x.base) x.base[x.taps] = at / s, x.index[x.taps] = t;
    ++x.taps;
  }
}

struct View {
  Axis axis[3];
  int64_t taps, pixels;  // pixels of one image
};

// Source, result and filter of a direction; channel counts are per group.
struct Roles {
  const void* src;
  void* dst;
  const void* filter;
  int64_t sources, results;
  int64_t src_n, src_c, src_s[3];
  int64_t dst_n, dst_c, dst_s[3];
  int64_t w_result, w_source, w_s[3], w_group;
};

template <bool kBackward>
TW_INLINE Roles roles_of(const tw_conv_args* a) {
  Roles r;
  const int64_t c = a->c / a->g, k = a->k / a->g;
  r.filter = a->w;
  r.w_group = k * a->w_k;
  for (int d = 0; d < 3; ++d) r.w_s[d] = a->w_s[d];
  if (kBackward) {
    r.src = a->y, r.dst = a->x, r.sources = k, r.results = c;
    r.src_n = a->y_n, r.src_c = a->y_k, r.dst_n = a->x_n, r.dst_c = a->x_c;
    r.w_result = a->w_c, r.w_source = a->w_k;
  } else {
    r.src = a->x, r.dst = a->y, r.sources = c, r.results = k;
    r.src_n = a->x_n, r.src_c = a->x_c, r.dst_n = a->y_n, r.dst_c = a->y_k;
    r.w_result = a->w_k, r.w_source = a->w_c;
  }
  for (int d = 0; d < 3; ++d) {
    r.src_s[d] = kBackward ? a->y_s[d] : a->x_s[d];
    r.dst_s[d] = kBackward ? a->x_s[d] : a->y_s[d];
  }
  return r;
}

template <bool kBackward>
TW_INLINE int64_t view_count(const tw_conv_args* a) {
  return kBackward ? a->stride[0] * a->stride[1] * a->stride[2] : 1;
}

template <bool kBackward>
TW_INLINE void make_view(const tw_conv_args* a, int64_t index, View& v, Arena& arena) {
  int64_t rest = index;
  v.taps = v.pixels = 1;
  for (int d = 2; d >= 0; --d) {
    if (kBackward)
      phase_axis(a, d, rest % a->stride[d], v.axis[d], arena);
    else
      forward_axis(a, d, v.axis[d], arena);
    rest /= a->stride[d];
    v.taps *= v.axis[d].taps;
    v.pixels *= v.axis[d].count;
  }
}

// A pixel of a view's results, flattened over images, depth, height and width.
struct Pixel {
  int64_t n, q[3];
};

TW_INLINE Pixel pixel_at(const View& v, int64_t flat) {
  Pixel p;
  for (int d = 2; d >= 0; --d) p.q[d] = flat % v.axis[d].count, flat /= v.axis[d].count;
  p.n = flat;
  return p;
}

TW_INLINE int64_t result_offset(const Roles& r, const View& v, int64_t n, int64_t qd, int64_t qh, int64_t qw) {
  const int64_t q[3] = {qd, qh, qw};
  int64_t at = n * r.dst_n;
  for (int d = 0; d < 3; ++d) at += (v.axis[d].first + v.axis[d].jump * q[d]) * r.dst_s[d];
  return at;
}

// The range of q in [0, count) whose source step * q + base lies in [0, size).
TW_INLINE void inside(const Axis& x, int64_t tap, int64_t& from, int64_t& to) {
  const int64_t base = x.base[tap];
  from = base >= 0 ? 0 : ceil_div(-base, x.step);
  to = base >= x.size ? 0 : min_of(x.count, (x.size - 1 - base) / x.step + 1);
  if (to < from) to = from;
}

TW_INLINE int64_t floor_div(int64_t a, int64_t b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

}  // namespace tw
