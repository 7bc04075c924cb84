// SPDX-License-Identifier: MIT
// Operands copied into panels that a micro-kernel reads front to back.
//
// A panel holds `width` rows of A (or columns of B) for every k: element (x, k) lies at
// [k][x], rows beyond the matrix are zero. Narrow types are widened on the way; int8 becomes pairs
// of 16-bit integers along k, so one 32-bit slot holds two steps of the reduction.
#pragma once
#include "tilewise/convert.hpp"

namespace tw {

// How elements of a type lie in a panel: as `Slot`s, each holding `kStep` steps of the reduction.
template <class In>
struct Operand {
  using Slot = float;
  static constexpr int kStep = 1;
  // kLanes slots along k.
  static TW_INLINE vf along_k(const In* p) { return load_float(p); }
  static TW_INLINE vf along_k_n(const In* p, int64_t elements) { return load_float_n(p, elements); }
  // One slot of kLanes neighbours in x; `steps` says how many steps of k exist.
  static TW_INLINE vf along_x(const In* p, int64_t, int64_t) { return load_float(p); }
  static TW_INLINE vf along_x_n(const In* p, int64_t, int64_t, int64_t n) { return load_float_n(p, n); }
  static TW_INLINE float one(const In* p, int64_t, int64_t) { return to_float(*p); }
};

template <>
struct Operand<int8_t> {
  using Slot = int32_t;
  static constexpr int kStep = 2;
  static TW_INLINE vi along_k(const int8_t* p) { return widen_pairs(load_as<vbb>(p)); }
  static TW_INLINE vi along_k_n(const int8_t* p, int64_t elements) {
    int8_t part[2 * kLanes] = {};
    std::memcpy(part, p, elements);
    return along_k(part);
  }
  static TW_INLINE vi along_x(const int8_t* p, int64_t k_stride, int64_t steps) {
    const vi first = widen(load_as<vb>(p)) & 0xffff;
    return steps > 1 ? first | widen(load_as<vb>(p + k_stride)) << 16 : first;
  }
  static TW_INLINE vi along_x_n(const int8_t* p, int64_t k_stride, int64_t steps, int64_t n) {
    int8_t part[2][kLanes] = {};
    std::memcpy(part[0], p, n);
    if (steps > 1) std::memcpy(part[1], p + k_stride, n);
    return along_x(part[0], kLanes, 2);
  }
  static TW_INLINE int32_t one(const int8_t* p, int64_t k_stride, int64_t steps) {
    const uint32_t first = (uint16_t)(int16_t)*p;
    return (int32_t)(steps > 1 ? first | (uint32_t)(int32_t)p[k_stride] << 16 : first);
  }
};

template <class In>
using Slot = typename Operand<In>::Slot;

// Slots that k elements of the reduction take.
template <class In>
TW_INLINE int64_t slots_of(int64_t k) {
  return ceil_div(k, Operand<In>::kStep);
}

// Slots that `x` rows (or columns) by `k` take in panels of `width`.
template <class In>
TW_INLINE int64_t packed_size(int64_t width, int64_t x, int64_t k) {
  return round_up(x, width) * slots_of<In>(k);
}

// One panel from a source whose k is contiguous: squares of kLanes are transposed in registers.
template <class In>
TW_NOINLINE void pack_panel_along_k(Slot<In>* dst, int64_t width, const In* src, int64_t x_stride, int64_t x,
                                    int64_t k) {
  using Op = Operand<In>;
  const int64_t slots = slots_of<In>(k), last_block = (width - 1) / kLanes * kLanes;
  for (int64_t s = 0; s < slots; s += kLanes) {
    const int64_t left = k - s * Op::kStep, count = min_of(kLanes, slots - s);
    // From the last block to the first: a narrow last block is stored whole, and what it spills
    // into the next k is overwritten afterwards.
    for (int64_t block = last_block; block >= 0; block -= kLanes) {
      Vec<Slot<In>> r[kLanes];
      const In* p = src + block * x_stride + s * Op::kStep;
      if (left >= kLanes * Op::kStep && x - block >= kLanes) {
        TW_UNROLL
        for (int i = 0; i < kLanes; ++i) r[i] = Op::along_k(p + i * x_stride);
      } else {
        for (int i = 0; i < kLanes; ++i) {
          r[i] = Vec<Slot<In>>{};
          if (i < x - block) r[i] = Op::along_k_n(p + i * x_stride, min_of(left, kLanes * Op::kStep));
        }
      }
      transpose(r);
      Slot<In>* q = dst + s * width + block;
      // How far a whole store at `q` may reach without leaving the panel.
      const int64_t room = (slots - s) * width - block - kLanes, wide = min_of(kLanes, width - block);
      if (count == kLanes && (kLanes - 1) * width <= room) {
        TW_UNROLL
        for (int i = 0; i < kLanes; ++i) store(q + i * width, r[i]);
      } else {
        for (int i = 0; i < count; ++i) {
          if (i * width <= room)
            store(q + i * width, r[i]);
          else
            store_n(q + i * width, r[i], wide);
        }
      }
    }
  }
}

// Panels from a source whose x is contiguous. Several k at a time, so that a cache line of the
// source that straddles two panels is still there for the second.
template <class In>
TW_NOINLINE void pack_along_x(Slot<In>* dst, int64_t width, const In* src, int64_t k_stride, int64_t x, int64_t k) {
  using Op = Operand<In>;
  constexpr int64_t kChunk = 16;
  const int64_t slots = slots_of<In>(k);
  for (int64_t s0 = 0; s0 < slots; s0 += kChunk) {
    const int64_t s1 = min_of(slots, s0 + kChunk);
    for (int64_t x0 = 0; x0 < x; x0 += width) {
      for (int64_t s = s0; s < s1; ++s) {
        const In* p = src + s * Op::kStep * k_stride + x0;
        Slot<In>* q = dst + x0 * slots + s * width;
        const int64_t steps = k - s * Op::kStep;
        for (int64_t block = 0; block < width; block += kLanes) {
          const int64_t left = x - x0 - block, wide = min_of(kLanes, width - block);
          Vec<Slot<In>> v{};
          if (left >= kLanes)
            v = Op::along_x(p + block, k_stride, steps);
          else if (left > 0)
            v = Op::along_x_n(p + block, k_stride, steps, left);
          // A whole store may spill into later k, which are written later, but not out of the panel.
          if (wide == kLanes || (slots - s) * width >= block + kLanes)
            store(q + block, v);
          else
            store_n(q + block, v, wide);
        }
      }
    }
  }
}

// Panels from a source with any strides.
template <class In>
TW_NOINLINE void pack_any(Slot<In>* dst, int64_t width, const In* src, int64_t x_stride, int64_t k_stride, int64_t x,
                          int64_t k) {
  using Op = Operand<In>;
  const int64_t slots = slots_of<In>(k);
  for (int64_t x0 = 0; x0 < x; x0 += width)
    for (int64_t s = 0; s < slots; ++s)
      for (int64_t i = 0; i < width; ++i) {
        const In* p = src + (x0 + i) * x_stride + s * Op::kStep * k_stride;
        dst[x0 * slots + s * width + i] = x0 + i < x ? Op::one(p, k_stride, k - s * Op::kStep) : Slot<In>{};
      }
}

// Packs x by k elements into ceil(x / width) panels; writes packed_size() slots and no more.
template <class In>
TW_INLINE void pack(Slot<In>* dst, int64_t width, const In* src, int64_t x_stride, int64_t k_stride, int64_t x,
                    int64_t k) {
  if (k_stride == 1) {
    for (int64_t x0 = 0; x0 < x; x0 += width)
      pack_panel_along_k(dst + x0 * slots_of<In>(k), width, src + x0 * x_stride, x_stride, min_of(width, x - x0), k);
  } else if (x_stride == 1) {
    pack_along_x(dst, width, src, k_stride, x, k);
  } else {
    pack_any(dst, width, src, x_stride, k_stride, x, k);
  }
}

}  // namespace tw
