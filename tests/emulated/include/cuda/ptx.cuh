// The vocabulary of `ops/cuda/ptx.cuh`, emulated: the same names, types and contracts, word for word.
#pragma once

#include "machine/cuda.hpp"

#define DEVICE inline

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct bf16 {
  u16 bits;
};
struct fp16 {
  u16 bits;
};
struct fp32 {
  float value;
};
struct tf32 {
  float value;
};
struct alignas(16) u32x4 {
  u32 x, y, z, w;
};
struct alignas(8) u32x2 {
  u32 x, y;
};
struct alignas(8) f32x2 {
  float x, y;
};
struct alignas(16) f32x4 {
  float x, y, z, w;
};
struct alignas(64) TensorMap {
  u64 opaque[16];
};

template <class T>
constexpr emulated::Type type_of();
template <>
constexpr emulated::Type type_of<bf16>() {
  return emulated::Type::bf16;
}
template <>
constexpr emulated::Type type_of<fp16>() {
  return emulated::Type::fp16;
}
template <>
constexpr emulated::Type type_of<tf32>() {
  return emulated::Type::tf32;
}

// ---------------------------------------------------------------------------------- conversions

inline float as_float(u32 bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
inline u32 as_bits(float value) {
  u32 bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}
inline float to_float(bf16 value) { return emulated::from_bf16(value.bits); }
inline float to_float(fp16 value) { return emulated::from_fp16(value.bits); }
inline float to_float(fp32 value) { return value.value; }
inline float to_float(tf32 value) { return value.value; }
template <class T>
T from_float(float value);
template <>
inline bf16 from_float<bf16>(float value) {
  return {emulated::to_bf16(value)};
}
template <>
inline fp16 from_float<fp16>(float value) {
  return {emulated::to_fp16(value)};
}
template <>
inline fp32 from_float<fp32>(float value) {
  return {value};
}
template <class T>
u32 pack2(float low, float high) {
  return from_float<T>(low).bits | (u32)from_float<T>(high).bits << 16;
}
inline float exp_fast(float x) { return expf(x); }
inline float divide_fast(float a, float b) { return a / b; }

// --------------------------------------------------------------------- shared memory, by address

inline u32 shared_base() { return (emulated::shared_start() + 1023) & ~1023u; }
template <class T>
T load_shared(u32 from) {
  T value;
  emulated::read_shared(from, &value, sizeof value);
  return value;
}
inline u32 load_shared_u32(u32 from) { return load_shared<u32>(from); }
inline u32x4 load_shared_u32x4(u32 from) { return load_shared<u32x4>(from); }
inline float load_shared_f32(u32 from) { return load_shared<float>(from); }
inline void store_shared_u16(u32 to, u16 v) { emulated::write_shared(to, &v, sizeof v); }
inline void store_shared_u32(u32 to, u32 v) { emulated::write_shared(to, &v, sizeof v); }
inline void store_shared_u32x2(u32 to, u32x2 v) { emulated::write_shared(to, &v, sizeof v); }
inline void store_shared_u32x4(u32 to, u32x4 v) { emulated::write_shared(to, &v, sizeof v); }
inline void store_shared_f32(u32 to, float v) { emulated::write_shared(to, &v, sizeof v); }

template <int RowBytes>
u32 swizzled(u32 row, u32 chunk) {
  constexpr u32 chunks = RowBytes / 16, rows_a_line = 128 / RowBytes;
  return row * RowBytes + ((chunk ^ (row / rows_a_line & (chunks - 1))) << 4);
}

inline void load_matrix4(u32 (&r)[4], u32 from) { emulated::load_matrices(from, r, 4, false); }
inline void load_matrix4_transposed(u32 (&r)[4], u32 from) {
  emulated::load_matrices(from, r, 4, true);
}
inline void load_matrix2(u32 (&r)[2], u32 from) { emulated::load_matrices(from, r, 2, false); }
inline void load_matrix2_transposed(u32 (&r)[2], u32 from) {
  emulated::load_matrices(from, r, 2, true);
}
inline void store_matrix4(u32 to, u32 r0, u32 r1, u32 r2, u32 r3) {
  const u32 r[] = {r0, r1, r2, r3};
  emulated::store_matrices(to, r, 4, false);
}
inline void store_matrix4_transposed(u32 to, u32 r0, u32 r1, u32 r2, u32 r3) {
  const u32 r[] = {r0, r1, r2, r3};
  emulated::store_matrices(to, r, 4, true);
}
inline void store_matrix2(u32 to, u32 r0, u32 r1) {
  const u32 r[] = {r0, r1};
  emulated::store_matrices(to, r, 2, false);
}
inline void store_matrix2_transposed(u32 to, u32 r0, u32 r1) {
  const u32 r[] = {r0, r1};
  emulated::store_matrices(to, r, 2, true);
}

// -------------------------------------------------------------------------------------- barriers

inline void barrier_init(u32 barrier, u32 arrivals) { emulated::barrier_init(barrier, arrivals); }
inline void barrier_init_done() {}
inline void barrier_arrive(u32 barrier) { emulated::barrier_arrive(barrier, 1); }
inline void barrier_arrive_at(u32 barrier, u32 rank) {
  emulated::barrier_arrive(emulated::at_rank(barrier, rank), 1);
}
inline void barrier_expect(u32 barrier, u32 bytes) { emulated::barrier_expect(barrier, bytes, true); }
inline void barrier_wait(u32 barrier, u32 parity) { emulated::barrier_wait(barrier, parity); }
inline void barrier_arrive_after_copies(u32 barrier) { emulated::copy_arrive(barrier, false); }
inline void fence_async() { emulated::fence_async_proxy(); }
inline void named_sync(u32 id, u32 threads) { emulated::block_sync(id, threads); }
inline void named_arrive(u32 id, u32 threads) { emulated::block_arrive(id, threads); }
inline u32 cluster_rank() { return emulated::here->cluster_rank; }
inline void cluster_sync() {
  emulated::cluster_arrive();
  emulated::cluster_wait();
}
template <int Count>
void raise_registers() {
  static_assert(Count % 8 == 0 && Count >= 24 && Count <= 256, "");
  emulated::set_registers(Count, true);
}
template <int Count>
void lower_registers() {
  static_assert(Count % 8 == 0 && Count >= 24 && Count <= 256, "");
  emulated::set_registers(Count, false);
}
inline void wait_for_previous_grid() { emulated::wait_for_earlier_steps(); }
inline void release_next_grid() {}

// ------------------------------------------------------------- TMA: copies of boxes and of pixels

inline void prefetch_map(const TensorMap*) {}

template <class... At>
void tma_load(u32 to, const TensorMap* map, u32 barrier, At... at) {
  const int corner[] = {at...};
  emulated::tma_tiled(to, map, barrier, 0, sizeof...(at), corner);
}
template <class... At>
void tma_load_multicast(u32 to, const TensorMap* map, u32 barrier, u16 blocks, At... at) {
  const int corner[] = {at...};
  emulated::tma_tiled(to, map, barrier, blocks, sizeof...(at), corner);
}
inline void tma_load_im2col_multicast(u32 to, const TensorMap* map, u32 barrier, u16 blocks, int c,
                                      int w, int h, int n, u16 right, u16 down) {
  const int corner[] = {c, w, h, n}, tap[] = {right, down};
  emulated::tma_im2col(to, map, barrier, blocks, 4, corner, tap);
}
inline void tma_load_im2col_multicast(u32 to, const TensorMap* map, u32 barrier, u16 blocks, int c,
                                      int w, int h, int d, int n, u16 right, u16 down, u16 deep) {
  const int corner[] = {c, w, h, d, n}, tap[] = {right, down, deep};
  emulated::tma_im2col(to, map, barrier, blocks, 5, corner, tap);
}
inline void tma_load_im2col(u32 to, const TensorMap* map, u32 barrier, int c, int w, int h, int n,
                            u16 right, u16 down) {
  tma_load_im2col_multicast(to, map, barrier, 0, c, w, h, n, right, down);
}
inline void tma_load_im2col(u32 to, const TensorMap* map, u32 barrier, int c, int w, int h, int d,
                            int n, u16 right, u16 down, u16 deep) {
  tma_load_im2col_multicast(to, map, barrier, 0, c, w, h, d, n, right, down, deep);
}
template <class... At>
void tma_store(const TensorMap* map, u32 from, At... at) {
  const int corner[] = {at...};
  emulated::tma_store(map, from, sizeof...(at), corner, false);
}
inline void tma_store_commit() { emulated::bulk_commit(); }
template <int Pending>
void tma_store_wait() {
  emulated::bulk_wait(Pending);
}

// ----------------------------------------------- asynchronous copies by every thread (gathering)

template <int Bytes>
void copy_or_zero(u32 to, const void* from, bool is_inside) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "");
  emulated::copy_async(to, from, Bytes, is_inside ? Bytes : 0);
}
inline void copy_commit() { emulated::copy_commit(); }
template <int Pending>
void copy_wait() {
  emulated::copy_wait(Pending);
}

// ---------------------------------------------------------------------------- sums in global memory

inline void check_aligned(const void* to, u64 bytes) {
  if ((u64)to % bytes) emulated::fail("a sum at %p, which is no multiple of %llu", to, bytes);
}
inline void add_global(float* to, float a) { emulated::add_global(to, a); }
inline void add_global(float* to, float a, float b) {
  check_aligned(to, 8);
  emulated::add_global(to, a);
  emulated::add_global(to + 1, b);
}
inline void add_global(float* to, float a, float b, float c, float d) {
  check_aligned(to, 16);
  add_global(to, a, b);
  add_global(to + 2, c, d);
}

// ----------------------------------------------------------------------------------- matrix units

template <class T>
void mma_16816(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const u32 b[] = {b0, b1};
  emulated::mma(d, a, b, d, 16, type_of<T>());
}
inline void wgmma_fence() { emulated::wgmma_fence(); }
inline void wgmma_commit() { emulated::wgmma_commit(); }
template <int Pending>
void wgmma_wait() {
  emulated::wgmma_wait(Pending);
}
inline u64 wgmma_operand(u32 address, u32 panel_bytes, u32 group_bytes) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)(panel_bytes >> 4) << 16) |
         ((u64)(group_bytes >> 4) << 32) | (1ull << 62);
}
template <class T, int N, bool AByK, bool BByK>
void wgmma(float (&d)[N / 2], u64 a, u64 b, int accumulate) {
  emulated::wgmma(d, nullptr, a, b, N, accumulate != 0, type_of<T>(), !AByK, !BByK);
}
