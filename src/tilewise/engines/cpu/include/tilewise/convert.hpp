// SPDX-License-Identifier: MIT
// Element types as stored in memory, and their conversion to and from the arithmetic type.
//
// Conversions to a narrower type round to nearest, ties to even, and keep NaN a NaN.
#pragma once
#include "tilewise/vec.hpp"

namespace tw {

struct fp16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};
struct fp8 {  // e4m3fn: no infinity, NaN is 0x7f and 0xff
  uint8_t bits;
};
struct bf8 {  // e5m2
  uint8_t bits;
};

// What products of an element type are accumulated in.
template <class In>
struct accumulator_of {
  using type = float;
};
template <>
struct accumulator_of<int8_t> {
  using type = int32_t;
};
template <class In>
using Accumulator = typename accumulator_of<In>::type;

// ---- vectors of kLanes elements to float ----

TW_INLINE vf to_float(vh half, fp16) {
#if TW_LANES == 16 && defined(__AVX512F__)
  typedef short h16 __attribute__((vector_size(32)));
  constexpr int kCurrentRounding = 4;
  return (vf)__builtin_ia32_vcvtph2ps512_mask((h16)half, vf{}, (unsigned short)-1, kCurrentRounding);
#elif TW_LANES == 8 && defined(__F16C__)
  typedef short h8 __attribute__((vector_size(16)));
  return (vf)__builtin_ia32_vcvtph2ps256((h8)half);
#else
  const vu bits = __builtin_convertvector(half, vu), rest = bits & 0x7fff;
  // Subnormals are counts of 2^-24; the exponent of normal numbers moves by 112.
  const vf tiny = __builtin_convertvector((vi)rest, vf) * 0x1p-24f;
  const vu normal = (rest << 13) + (rest >= 0x7c00 ? vu{} + (224u << 23) : vu{} + (112u << 23));
  const vu magnitude = rest < 0x400 ? (vu)tiny : normal;
  return (vf)(magnitude | (bits & 0x8000) << 16);
#endif
}
TW_INLINE vf to_float(vh half, bf16) { return (vf)(widen(half) << 16); }
TW_INLINE vf to_float(vb byte, fp8) {
  const vu bits = (vu)widen(byte), rest = bits & 0x7f;
  const vf tiny = __builtin_convertvector((vi)rest, vf) * 0x1p-9f;
  const vu normal = (rest << 20) + (120u << 23);
  vu magnitude = rest < 8 ? (vu)tiny : normal;
  magnitude = rest == 0x7f ? vu{} + 0x7fc00000u : magnitude;
  return (vf)(magnitude | (bits & 0x80000000u));
}
TW_INLINE vf to_float(vb byte, bf8) {
  // e5m2 is the upper half of an fp16.
  const vu bits = (vu)widen(byte) & 0xff;
  return to_float(narrow(bits << 8), fp16{});
}

template <class In>
TW_INLINE vf load_float(const In* p);
template <>
TW_INLINE vf load_float(const float* p) {
  return load(p);
}
template <>
TW_INLINE vf load_float(const fp16* p) {
  return to_float(load_as<vh>(p), fp16{});
}
template <>
TW_INLINE vf load_float(const bf16* p) {
  return to_float(load_as<vh>(p), bf16{});
}
template <>
TW_INLINE vf load_float(const fp8* p) {
  return to_float(load_as<vb>(p), fp8{});
}
template <>
TW_INLINE vf load_float(const bf8* p) {
  return to_float(load_as<vb>(p), bf8{});
}

// The first n elements, zero beyond; memory beyond n is not touched.
template <class In>
TW_INLINE vf load_float_n(const In* p, int64_t n) {
  In part[kLanes] = {};
  std::memcpy(part, p, n * sizeof(In));
  return load_float(part);
}
template <>
TW_INLINE vf load_float_n(const float* p, int64_t n) {
  return load_n(p, n);
}

// ---- single elements to float ----

template <class To, class From>
TW_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

TW_INLINE float to_float(float x) { return x; }
TW_INLINE float to_float(bf16 x) { return bit_cast<float>((uint32_t)x.bits << 16); }
TW_INLINE float to_float(fp16 x) {
  const uint32_t rest = x.bits & 0x7fff, sign = (uint32_t)(x.bits & 0x8000) << 16;
  const uint32_t normal = (rest << 13) + (rest >= 0x7c00 ? 224u << 23 : 112u << 23);
  const uint32_t tiny = bit_cast<uint32_t>((float)(int32_t)rest * 0x1p-24f);
  return bit_cast<float>((rest < 0x400 ? tiny : normal) | sign);
}
TW_INLINE float to_float(fp8 x) {
  const uint32_t rest = x.bits & 0x7f, sign = (uint32_t)(x.bits & 0x80) << 24;
  const uint32_t tiny = bit_cast<uint32_t>((float)(int32_t)rest * 0x1p-9f);
  const uint32_t magnitude = rest == 0x7f ? 0x7fc00000u : rest < 8 ? tiny : (rest << 20) + (120u << 23);
  return bit_cast<float>(magnitude | sign);
}
TW_INLINE float to_float(bf8 x) { return to_float(fp16{(uint16_t)(x.bits << 8)}); }

// ---- float to a narrower type ----

TW_INLINE vh to_bf16_bits(vf x) {
  const vu bits = (vu)x;
  const vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  // Rounding could carry a NaN into infinity; quieten it instead.
  return narrow((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16 | 0x40) : rounded);
}
TW_INLINE vh to_fp16_bits(vf x) {
#if TW_LANES == 16 && defined(__AVX512F__)
  typedef short h16 __attribute__((vector_size(32)));
  return (vh)__builtin_ia32_vcvtps2ph512_mask(x, 0, h16{}, (unsigned short)-1);
#elif TW_LANES == 8 && defined(__F16C__)
  return (vh)__builtin_ia32_vcvtps2ph256(x, 0);
#else
  const vu bits = (vu)x, rest = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000;
  const vu normal = (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13;
  // Adding 0.5 lines a subnormal's last bit up with the last bit of the sum.
  const vu tiny = (vu)((vf)rest + 0.5f) - 0x3f000000u;
  vu half = rest < (113u << 23) ? tiny : normal;
  half = rest >= 0x47800000u ? vu{} + 0x7c00u : half;
  half = rest > 0x7f800000u ? (rest >> 13 & 0x3ff) | 0x7e00u : half;
  return narrow(half | sign);
#endif
}

TW_INLINE void store_out(float* p, vf v) { store(p, v); }
TW_INLINE void store_out(bf16* p, vf v) { store_as(p, to_bf16_bits(v)); }
TW_INLINE void store_out(fp16* p, vf v) { store_as(p, to_fp16_bits(v)); }
TW_INLINE void store_out(int32_t* p, vi v) { store(p, v); }
TW_INLINE void store_out(float* p, vi v) { store(p, __builtin_convertvector(v, vf)); }

// The first n lanes only.
template <class Out, class V>
TW_INLINE void store_out_n(Out* p, V v, int64_t n) {
  Out part[kLanes];
  store_out(part, v);
  std::memcpy(p, part, n * sizeof(Out));
}
TW_INLINE void store_out_n(float* p, vf v, int64_t n) { store_n(p, v, n); }
TW_INLINE void store_out_n(int32_t* p, vi v, int64_t n) { store_n(p, v, n); }
TW_INLINE void store_out_n(float* p, vi v, int64_t n) { store_n(p, __builtin_convertvector(v, vf), n); }

// One element, through the vector conversion so that both agree to the bit.
template <class Out, class Acc>
TW_INLINE Out from_accumulator(Acc x) {
  Out part[kLanes];
  store_out(part, splat(x));
  return part[0];
}
template <>
TW_INLINE float from_accumulator<float, float>(float x) {
  return x;
}
template <>
TW_INLINE int32_t from_accumulator<int32_t, int32_t>(int32_t x) {
  return x;
}
template <>
TW_INLINE float from_accumulator<float, int32_t>(int32_t x) {
  return (float)x;
}

// Rounds a float to an 8-bit type with `kMantissa` bits; values too large become `overflow`.
template <int kMantissa, int kBias>
TW_INLINE uint8_t to_byte_bits(float x, uint32_t largest, uint8_t overflow, uint8_t nan) {
  const uint32_t bits = bit_cast<uint32_t>(x), rest = bits & 0x7fffffffu;
  const uint8_t sign = (uint8_t)(bits >> 24 & 0x80);
  if (rest > 0x7f800000u) return sign | nan;
  constexpr uint32_t kShift = 23 - kMantissa, kLeast = (127 - kBias + 1) << 23;
  uint32_t magnitude;
  if (rest < kLeast) {
    // Adding a power of two whose last bit is the smallest subnormal rounds to that grid.
    constexpr uint32_t kGrid = (uint32_t)(127 - kBias + 1 + 23 - kMantissa) << 23;
    magnitude = bit_cast<uint32_t>(bit_cast<float>(rest) + bit_cast<float>(kGrid)) - kGrid;
  } else {
    const uint32_t rounded = rest + (1u << (kShift - 1)) - 1 + (rest >> kShift & 1);
    magnitude = (rounded - ((uint32_t)(127 - kBias) << 23)) >> kShift;
  }
  return sign | (magnitude > largest ? overflow : (uint8_t)magnitude);
}
// e4m3fn has no infinity: what is too large becomes the largest number.
TW_INLINE fp8 to_fp8(float x) { return {to_byte_bits<3, 7>(x, 0x7e, 0x7e, 0x7f)}; }
TW_INLINE bf8 to_bf8(float x) { return {to_byte_bits<2, 15>(x, 0x7b, 0x7c, 0x7f)}; }

}  // namespace tw
