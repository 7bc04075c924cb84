// SPDX-License-Identifier: MIT
// One vector register of floats or 32-bit integers, written with the compiler's vector extensions.
//
// <immintrin.h> is left out on purpose: parsing it takes longer than compiling a kernel. The few
// instructions that vector extensions cannot express are reached through compiler builtins.
// Multiply-add is written a * b + c and fused by -ffp-contract=fast.
#pragma once
#include <cstdint>
#include <cstring>

#define TW_INLINE inline __attribute__((always_inline))
#define TW_NOINLINE __attribute__((noinline))
#if defined(__clang__)
#define TW_UNROLL _Pragma("unroll")
#define TW_NO_UNROLL _Pragma("nounroll")
#else
// Complete unrolling of loops over registers: the limit is far above any register tile.
#define TW_UNROLL _Pragma("GCC unroll 64")
#define TW_NO_UNROLL _Pragma("GCC unroll 1")
#endif

namespace tw {

#if defined(TW_ISA_AVX512) || (defined(__AVX512F__) && !defined(TW_ISA_AVX2))
#define TW_LANES 16
constexpr int kRegisters = 32;
#else
#define TW_LANES 8
constexpr int kRegisters = 16;
#endif
constexpr int kLanes = TW_LANES;

typedef float vf __attribute__((vector_size(TW_LANES * 4)));
typedef int32_t vi __attribute__((vector_size(TW_LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(TW_LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(TW_LANES * 2)));
typedef int8_t vb __attribute__((vector_size(TW_LANES)));
typedef int8_t vbb __attribute__((vector_size(TW_LANES * 2)));

template <class T>
struct vec_of;
template <>
struct vec_of<float> {
  using type = vf;
};
template <>
struct vec_of<int32_t> {
  using type = vi;
};
template <class T>
using Vec = typename vec_of<T>::type;

// ---- whole registers, any alignment ----

template <class V, class T>
TW_INLINE V load_as(const T* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}
template <class V, class T>
TW_INLINE void store_as(T* p, V v) {
  __builtin_memcpy(p, &v, sizeof(V));
}
TW_INLINE vf load(const float* p) { return load_as<vf>(p); }
TW_INLINE vi load(const int32_t* p) { return load_as<vi>(p); }
TW_INLINE void store(float* p, vf v) { store_as(p, v); }
TW_INLINE void store(int32_t* p, vi v) { store_as(p, v); }

// x - 0 keeps the sign of a zero, so it costs no instruction; x + 0 would not.
TW_INLINE vf splat(float x) { return x - vf{}; }
TW_INLINE vi splat(int32_t x) { return vi{} + x; }
TW_INLINE vf bits_to_float(vu v) { return (vf)v; }
TW_INLINE vf bits_to_float(vi v) { return (vf)v; }

TW_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
TW_INLINE void prefetch_write(const void* p) { __builtin_prefetch(p, 1, 3); }

// ---- the first n lanes; lanes beyond n are zero, memory beyond n is not touched ----

#if TW_LANES == 16 && defined(__AVX512F__)
TW_INLINE uint16_t mask_of(int64_t n) { return (uint16_t)((1u << n) - 1); }
TW_INLINE vf load_n(const float* p, int64_t n) { return (vf)__builtin_ia32_loadups512_mask(p, vf{}, mask_of(n)); }
TW_INLINE vi load_n(const int32_t* p, int64_t n) { return (vi)load_n((const float*)p, n); }
TW_INLINE void store_n(float* p, vf v, int64_t n) { __builtin_ia32_storeups512_mask(p, v, mask_of(n)); }
TW_INLINE void store_n(int32_t* p, vi v, int64_t n) { store_n((float*)p, (vf)v, n); }
#elif TW_LANES == 8 && defined(__AVX2__)
TW_INLINE vi mask_of(int64_t n) {
  const vi lane = {0, 1, 2, 3, 4, 5, 6, 7};
  return (vi)(lane < splat((int32_t)n));
}
typedef float v8sf_ __attribute__((vector_size(32)));
TW_INLINE vf load_n(const float* p, int64_t n) {
  return (vf)__builtin_ia32_maskloadps256((const v8sf_*)p, mask_of(n));
}
TW_INLINE vi load_n(const int32_t* p, int64_t n) { return (vi)load_n((const float*)p, n); }
TW_INLINE void store_n(float* p, vf v, int64_t n) { __builtin_ia32_maskstoreps256((v8sf_*)p, mask_of(n), v); }
TW_INLINE void store_n(int32_t* p, vi v, int64_t n) { store_n((float*)p, (vf)v, n); }
#else
template <class T>
TW_INLINE Vec<T> load_n(const T* p, int64_t n) {
  Vec<T> v{};
  std::memcpy(&v, p, n * sizeof(T));
  return v;
}
TW_INLINE void store_n(float* p, vf v, int64_t n) { std::memcpy(p, &v, n * sizeof(float)); }
TW_INLINE void store_n(int32_t* p, vi v, int64_t n) { std::memcpy(p, &v, n * sizeof(int32_t)); }
#endif

// ---- widening and narrowing; GCC 12 lowers __builtin_convertvector of bytes lane by lane ----

TW_INLINE vu widen(vh v) {
#if defined(__clang__) || !defined(__AVX2__)
  return __builtin_convertvector(v, vu);
#elif TW_LANES == 16
  typedef short h16 __attribute__((vector_size(32)));
  return (vu)__builtin_ia32_pmovzxwd512_mask((h16)v, vi{}, (unsigned short)-1);
#else
  typedef short h8 __attribute__((vector_size(16)));
  return (vu)__builtin_ia32_pmovzxwd256((h8)v);
#endif
}
TW_INLINE vi widen(vb v) {
#if defined(__clang__) || !defined(__AVX2__)
  return __builtin_convertvector(v, vi);
#elif TW_LANES == 16
  typedef char b16 __attribute__((vector_size(16)));
  return (vi)__builtin_ia32_pmovsxbd512_mask((b16)v, vi{}, (unsigned short)-1);
#else
  typedef char b16 __attribute__((vector_size(16)));
  int64_t half;
  __builtin_memcpy(&half, &v, 8);
  typedef long long q2 __attribute__((vector_size(16)));
  const q2 whole = {half, 0};
  return (vi)__builtin_ia32_pmovsxbd256((b16)whole);
#endif
}
// 2 x kLanes bytes to as many 16-bit integers, seen as kLanes pairs.
TW_INLINE vi widen_pairs(vbb v) {
#if defined(__clang__) || !defined(__AVX2__)
  typedef int16_t wide __attribute__((vector_size(TW_LANES * 4)));
  return (vi)__builtin_convertvector(v, wide);
#elif TW_LANES == 16
  typedef char b32 __attribute__((vector_size(32)));
  typedef short h32 __attribute__((vector_size(64)));
  return (vi)__builtin_ia32_pmovsxbw512_mask((b32)v, h32{}, (unsigned)-1);
#else
  typedef char b16 __attribute__((vector_size(16)));
  return (vi)__builtin_ia32_pmovsxbw256((b16)v);
#endif
}
TW_INLINE vh narrow(vu v) { return __builtin_convertvector(v, vh); }

// ---- multiply-accumulate ----

TW_INLINE vf mac(vf a, vf b, vf c) { return a * b + c; }
// Lanes hold pairs of 16-bit integers; both products are added to the 32-bit accumulator, exactly.
TW_INLINE vi mac(vi a, vi b, vi c) {
  typedef short wide __attribute__((vector_size(TW_LANES * 4)));
#if TW_LANES == 16 && defined(__AVX512VNNI__)
  return (vi)__builtin_ia32_vpdpwssd_v16si(c, a, b);
#elif TW_LANES == 16 && defined(__AVX512BW__) && defined(__clang__)
  return (vi)__builtin_ia32_pmaddwd512((wide)a, (wide)b) + c;
#elif TW_LANES == 16 && defined(__AVX512BW__)
  return (vi)__builtin_ia32_pmaddwd512_mask((wide)a, (wide)b, vi{}, (unsigned short)-1) + c;
#elif TW_LANES == 8 && defined(__AVX2__)
  return (vi)__builtin_ia32_pmaddwd256((wide)a, (wide)b) + c;
#else
  const vi a_low = (a << 16) >> 16, b_low = (b << 16) >> 16;
  return a_low * b_low + (a >> 16) * (b >> 16) + c;
#endif
}

// ---- across lanes ----

template <class V>
TW_INLINE auto sum_lanes(V v) {
  // Halving keeps the order of additions fixed, so equal inputs give equal bits.
  using T = decltype(v[0] + v[0]);
  T part[kLanes];
  store_as(part, v);
  TW_UNROLL
  for (int width = kLanes / 2; width > 0; width /= 2) {
    TW_UNROLL
    for (int i = 0; i < width; ++i) part[i] += part[i + width];
  }
  return part[0];
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define TW_HAS_SHUFFLE 1
#endif
#endif

#if defined(TW_HAS_SHUFFLE) && TW_LANES == 16
#define TW_UNPACK_LO(a, b) \
  __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define TW_UNPACK_HI(a, b) \
  __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define TW_PAIR_LO(a, b) \
  __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define TW_PAIR_HI(a, b) \
  __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define TW_QUAD_EVEN(a, b) \
  __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define TW_QUAD_ODD(a, b) \
  __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
#elif defined(TW_HAS_SHUFFLE)
#define TW_UNPACK_LO(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define TW_UNPACK_HI(a, b) __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define TW_PAIR_LO(a, b) __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define TW_PAIR_HI(a, b) __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#define TW_QUAD_EVEN(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define TW_QUAD_ODD(a, b) __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15)
#endif

// Transposes a square of kLanes rows in registers.
TW_INLINE void transpose(vf (&r)[kLanes]) {
#if defined(TW_HAS_SHUFFLE)
  // Within 128-bit lanes first: u[g + c] holds columns c, c + 4, ... of rows g .. g + 3.
  vf u[kLanes];
  TW_UNROLL
  for (int g = 0; g < kLanes; g += 4) {
    const vf t0 = TW_UNPACK_LO(r[g], r[g + 1]), t1 = TW_UNPACK_HI(r[g], r[g + 1]);
    const vf t2 = TW_UNPACK_LO(r[g + 2], r[g + 3]), t3 = TW_UNPACK_HI(r[g + 2], r[g + 3]);
    u[g] = TW_PAIR_LO(t0, t2);
    u[g + 1] = TW_PAIR_HI(t0, t2);
    u[g + 2] = TW_PAIR_LO(t1, t3);
    u[g + 3] = TW_PAIR_HI(t1, t3);
  }
  TW_UNROLL
  for (int c = 0; c < 4; ++c) {
#if TW_LANES == 16
    const vf e0 = TW_QUAD_EVEN(u[c], u[4 + c]), o0 = TW_QUAD_ODD(u[c], u[4 + c]);
    const vf e1 = TW_QUAD_EVEN(u[8 + c], u[12 + c]), o1 = TW_QUAD_ODD(u[8 + c], u[12 + c]);
    r[c] = TW_QUAD_EVEN(e0, e1);
    r[c + 8] = TW_QUAD_ODD(e0, e1);
    r[c + 4] = TW_QUAD_EVEN(o0, o1);
    r[c + 12] = TW_QUAD_ODD(o0, o1);
#else
    r[c] = TW_QUAD_EVEN(u[c], u[4 + c]);
    r[c + 4] = TW_QUAD_ODD(u[c], u[4 + c]);
#endif
  }
#else
  float flat[kLanes][kLanes], turned[kLanes][kLanes];
  std::memcpy(flat, r, sizeof(flat));
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < kLanes; ++j) turned[j][i] = flat[i][j];
  std::memcpy(r, turned, sizeof(flat));
#endif
}
TW_INLINE void transpose(vi (&r)[kLanes]) {
  vf f[kLanes];
  TW_UNROLL
  for (int i = 0; i < kLanes; ++i) f[i] = (vf)r[i];
  transpose(f);
  TW_UNROLL
  for (int i = 0; i < kLanes; ++i) r[i] = (vi)f[i];
}

// ---- small integer helpers ----

TW_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
TW_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
TW_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
TW_INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace tw
