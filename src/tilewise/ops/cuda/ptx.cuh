// Every PTX instruction that our kernels use, each behind one small function. Nothing else in the
// package contains inline assembly, and nothing is included: NVRTC finds no headers.
//
// Conventions. Shared memory is named by its 32-bit address (`u32`), never by a pointer, so that
// what touches it stands here. A barrier is an mbarrier, 8 bytes of shared memory. `T` is one of
// the element types below. Functions on whole warps or warpgroups must be reached by all of it.
// Template parameters are in CamelCase: kernels define their constants as macros in capitals.
#pragma once

#define DEVICE __device__ __forceinline__

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Element types as memory holds them. tf32 is stored as fp32; the matrix units drop its low bits.
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

// 16 bytes that are read and written at once.
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

// A cuTensorMap, passed by value as a __grid_constant__ parameter.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

// ---------------------------------------------------------------------------------- conversions

// Two neighbouring elements in one register, `low` in the low half.
template <class T>
DEVICE u32 pack2(float low, float high);
template <>
DEVICE u32 pack2<bf16>(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
template <>
DEVICE u32 pack2<fp16>(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

DEVICE float as_float(u32 bits) {
  float value;
  asm("mov.b32 %0, %1;" : "=f"(value) : "r"(bits));
  return value;
}
DEVICE u32 as_bits(float value) {
  u32 bits;
  asm("mov.b32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

DEVICE float to_float(bf16 value) { return as_float((u32)value.bits << 16); }
DEVICE float to_float(fp16 value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
}
DEVICE float to_float(fp32 value) { return value.value; }
DEVICE float to_float(tf32 value) { return value.value; }

template <class T>
DEVICE T from_float(float value);
template <>
DEVICE bf16 from_float<bf16>(float value) {
  bf16 narrow;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
  return narrow;
}
template <>
DEVICE fp16 from_float<fp16>(float value) {
  fp16 narrow;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
  return narrow;
}
template <>
DEVICE fp32 from_float<fp32>(float value) {
  return {value};
}

// e^x with the special function unit: 2 units in the last place over the range of activations.
DEVICE float exp_fast(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 1.4426950408889634f));
  return power;
}
DEVICE float divide_fast(float a, float b) {
  float quotient;
  asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
  return quotient;
}

// --------------------------------------------------------------------- shared memory, by address

// The block's dynamic shared memory, from its first multiple of 1024 bytes (whole swizzle patterns).
DEVICE u32 shared_base() {
  extern __shared__ u8 dynamic_shared[];
  u32 address;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }"
      : "=r"(address)
      : "l"(dynamic_shared));
  return (address + 1023) & ~1023u;
}

DEVICE u32 load_shared_u32(u32 from) {
  u32 v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
DEVICE u32x4 load_shared_u32x4(u32 from) {
  u32x4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}
DEVICE float load_shared_f32(u32 from) { return as_float(load_shared_u32(from)); }
DEVICE void store_shared_u16(u32 to, u16 v) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(v) : "memory");
}
DEVICE void store_shared_u32(u32 to, u32 v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}
DEVICE void store_shared_u32x2(u32 to, u32x2 v) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(v.x), "r"(v.y) : "memory");
}
DEVICE void store_shared_u32x4(u32 to, u32x4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
DEVICE void store_shared_f32(u32 to, float v) { store_shared_u32(to, as_bits(v)); }

// Where a 16-byte chunk of a row lies under TMA's swizzle, rows of RowBytes (128, 64 or 32).
template <int RowBytes>
DEVICE u32 swizzled(u32 row, u32 chunk) {
  constexpr u32 chunks = RowBytes / 16, rows_a_line = 128 / RowBytes;
  return row * RowBytes + ((chunk ^ (row / rows_a_line & (chunks - 1))) << 4);
}

// Eight rows of 16 bytes a matrix; lane i gives the address of row i % 8 of matrix i / 8.
DEVICE void load_matrix4(u32 (&r)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}
DEVICE void load_matrix4_transposed(u32 (&r)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}
DEVICE void load_matrix2(u32 (&r)[2], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(from)
               : "memory");
}
DEVICE void load_matrix2_transposed(u32 (&r)[2], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(from)
               : "memory");
}
DEVICE void store_matrix4(u32 to, u32 r0, u32 r1, u32 r2, u32 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}
DEVICE void store_matrix4_transposed(u32 to, u32 r0, u32 r1, u32 r2, u32 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}
DEVICE void store_matrix2(u32 to, u32 r0, u32 r1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(r0),
               "r"(r1)
               : "memory");
}
DEVICE void store_matrix2_transposed(u32 to, u32 r0, u32 r1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to),
               "r"(r0), "r"(r1)
               : "memory");
}

// -------------------------------------------------------------------------------------- barriers

DEVICE void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After the last barrier_init, by the thread that did them.
DEVICE void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// On the barrier at the same address of block `rank` of the cluster. No cluster scope is named:
// with .release.cluster the compiler adds a full memory barrier (measured on an H200: 483 instead
// of 703 TFLOP/s). Enough where only copies and matrix instructions touch what the barrier guards.
DEVICE void barrier_arrive_at(u32 barrier, u32 rank) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
// Arrives, and makes the phase wait for `bytes` of copies besides.
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Waits until the phase of that parity has ended.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; "
      "@done bra DONE; bra AGAIN; DONE: }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Arrives once all earlier copy_* of this thread have landed; counted like any other arrival.
DEVICE void barrier_arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Makes ordinary writes to shared memory visible to copies and matrix instructions.
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Barriers 1 to 15 of the block, for `threads` of it; 0 is __syncthreads.
DEVICE void named_sync(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE void named_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// Registers of every thread of this warpgroup from here on, a multiple of 8.
template <int Count>
DEVICE void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
DEVICE void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

// Programmatic dependent launch: wait for the kernel before; let the kernel after begin.
DEVICE void wait_for_previous_grid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void release_next_grid() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ------------------------------------------------------------- TMA: copies of boxes and of pixels

DEVICE void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The box at the coordinates (innermost first) into shared memory; its bytes count on `barrier`.
DEVICE void tma_load(u32 to, const TensorMap* map, u32 barrier, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1)
      : "memory");
}
DEVICE void tma_load(u32 to, const TensorMap* map, u32 barrier, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
DEVICE void tma_load(u32 to, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
DEVICE void tma_load(u32 to, const TensorMap* map, u32 barrier, int c0, int c1, int c2, int c3,
                     int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// The same into every block of the cluster whose bit is in `blocks`, at the same addresses; the
// bytes count on each block's own barrier.
DEVICE void tma_load_multicast(u32 to, const TensorMap* map, u32 barrier, u16 blocks, int c0,
                               int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(to),
      "l"(map), "r"(barrier), "h"(blocks), "r"(c0), "r"(c1)
      : "memory");
}
DEVICE void tma_load_multicast(u32 to, const TensorMap* map, u32 barrier, u16 blocks, int c0,
                               int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(to),
      "l"(map), "r"(barrier), "h"(blocks), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
DEVICE void tma_load_multicast(u32 to, const TensorMap* map, u32 barrier, u16 blocks, int c0,
                               int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(to),
      "l"(map), "r"(barrier), "h"(blocks), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// Pixels of a convolution, from the one whose window's corner is (w, h[, d], n), each `channels`
// long from `c`, read (right, down[, deep]) of that corner: one tap of the filter.
DEVICE void tma_load_im2col(u32 to, const TensorMap* map, u32 barrier, int c, int w, int h, int n,
                            u16 right, u16 down) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n), "h"(right), "h"(down)
      : "memory");
}
DEVICE void tma_load_im2col(u32 to, const TensorMap* map, u32 barrier, int c, int w, int h, int d,
                            int n, u16 right, u16 down, u16 deep) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], {%8, %9, %10};" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(d), "r"(n), "h"(right), "h"(down),
      "h"(deep)
      : "memory");
}
DEVICE void tma_load_im2col_multicast(u32 to, const TensorMap* map, u32 barrier, u16 blocks, int c,
                                      int w, int h, int n, u16 right, u16 down) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6, %7}], [%2], {%8, %9}, %3;" ::"r"(to),
      "l"(map), "r"(barrier), "h"(blocks), "r"(c), "r"(w), "r"(h), "r"(n), "h"(right), "h"(down)
      : "memory");
}
DEVICE void tma_load_im2col_multicast(u32 to, const TensorMap* map, u32 barrier, u16 blocks, int c,
                                      int w, int h, int d, int n, u16 right, u16 down, u16 deep) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6, %7, %8}], [%2], {%9, %10, %11}, %3;" ::"r"(to),
      "l"(map), "r"(barrier), "h"(blocks), "r"(c), "r"(w), "r"(h), "r"(d), "r"(n), "h"(right),
      "h"(down), "h"(deep)
      : "memory");
}

// A box of shared memory into the tensor; what lies outside the tensor is not written.
DEVICE void tma_store(const TensorMap* map, u32 from, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
                   map),
               "r"(from), "r"(c0), "r"(c1)
               : "memory");
}
DEVICE void tma_store(const TensorMap* map, u32 from, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(from), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
DEVICE void tma_store(const TensorMap* map, u32 from, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          map),
      "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
DEVICE void tma_store(const TensorMap* map, u32 from, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group "
      "[%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
      "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most Pending of this thread's commits still read shared memory.
template <int Pending>
DEVICE void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

// ----------------------------------------------- asynchronous copies by every thread (gathering)

// Bytes (4, 8 or 16) from global to shared memory; zeros where `is_inside` is false. `from` must be
// an address inside the tensor either way.
template <int Bytes>
DEVICE void copy_or_zero(u32 to, const void* from, bool is_inside) {
  const u32 bytes = is_inside ? Bytes : 0;
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(Bytes),
                 "r"(bytes)
                 : "memory");
  }
}
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most Pending of this thread's commits are still under way.
template <int Pending>
DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// ---------------------------------------------------------------------------- sums in global memory

DEVICE void add_global(float* to, float a) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(a) : "memory");
}
// `to` is a multiple of 8 bytes.
DEVICE void add_global(float* to, float a, float b) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(a), "f"(b)
               : "memory");
}
// `to` is a multiple of 16 bytes.
DEVICE void add_global(float* to, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a),
               "f"(b), "f"(c), "f"(d)
               : "memory");
}

// ------------------------------------------------------------------- matrix units, one warp (mma)

// d[16x8] += a[16x16] b[16x8]. Lane: rows lane / 4 and + 8, columns 2 (lane % 4) and + 1 of d.
template <class T>
DEVICE void mma_16816(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);
template <>
DEVICE void mma_16816<bf16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
DEVICE void mma_16816<fp16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---------------------------------------------------------- matrix units, one warpgroup (wgmma)

// Before the first wgmma that reads registers or sums that other instructions wrote.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most Pending of this warpgroup's commits are still under way.
template <int Pending>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// An operand in shared memory under the 128-byte swizzle. Groups of 8 rows (of 128 bytes) lie
// `group_bytes` apart; where rows are longer than 128 bytes (operands whose long side is not the
// reduction), their panels of 128 bytes lie `panel_bytes` apart. `address` may be any multiple of
// 128 bytes (plus a step of 32 along the reduction) inside a pattern that starts at one of 1024.
DEVICE u64 wgmma_operand(u32 address, u32 panel_bytes, u32 group_bytes) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)(panel_bytes >> 4) << 16) |
         ((u64)(group_bytes >> 4) << 32) | (1ull << 62);
}

// d[64 x N] (+)= a[64 x K] b[K x N]: K is 16 (16-bit elements) or 8 (tf32). Warp w of the group holds
// rows 16 w to 16 w + 15; d[4 j + i] of a lane is row lane / 4 + 8 (i / 2), column
// 8 j + 2 (lane % 4) + i % 2. With AByK (BByK) the reduction runs along the operand's rows of
// 128 bytes, else across them (16-bit elements only). `accumulate` 0 starts at zero.
template <class T, int N>
struct Wgmma;

#define REGS_4 "%0, %1, %2, %3"
#define REGS_8 REGS_4 ", %4, %5, %6, %7"
#define REGS_16 REGS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define REGS_32 REGS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define REGS_48 REGS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47"
#define REGS_64 REGS_48 ", %48, %49, %50, %51, %52, %53, %54, %55, " \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define REGS_80 REGS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, " \
  "%72, %73, %74, %75, %76, %77, %78, %79"
#define REGS_96 REGS_80 ", %80, %81, %82, %83, %84, %85, %86, %87, " \
  "%88, %89, %90, %91, %92, %93, %94, %95"
#define REGS_112 REGS_96 ", %96, %97, %98, %99, %100, %101, %102, %103, " \
  "%104, %105, %106, %107, %108, %109, %110, %111"
#define REGS_128 REGS_112 ", %112, %113, %114, %115, %116, %117, %118, %119, " \
  "%120, %121, %122, %123, %124, %125, %126, %127"
#define SUMS_4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define SUMS_8 SUMS_4, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define SUMS_16 SUMS_8, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
  "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define SUMS_32 SUMS_16, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), \
  "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
  "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define SUMS_48 SUMS_32, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), \
  "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), \
  "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define SUMS_64 SUMS_48, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), \
  "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), \
  "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define SUMS_80 SUMS_64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), \
  "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), \
  "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), \
  "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define SUMS_96 SUMS_80, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), \
  "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), \
  "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), \
  "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define SUMS_112 SUMS_96, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), \
  "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), \
  "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), \
  "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define SUMS_128 SUMS_112, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), \
  "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), \
  "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), \
  "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

#define WGMMA_16(T, NAME, N, R, A, B, ON, TA, TB)                                                  \
  template <>                                                                                      \
  struct Wgmma<T, N> {                                                                             \
    template <bool AByK, bool BByK>                                                            \
    static DEVICE void run(float (&d)[R], u64 a, u64 b, int accumulate) {                          \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, " ON ", 0; "                                    \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" REGS_##R   \
                   "}, " A ", " B ", p, 1, 1, " TA ", " TB "; }"                                   \
                   : SUMS_##R                                                                      \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(!AByK), "n"(!BByK));                 \
    }                                                                                              \
  };
#define WGMMA_TF32(N, R, A, B, ON)                                                                 \
  template <>                                                                                      \
  struct Wgmma<tf32, N> {                                                                          \
    template <bool AByK, bool BByK>                                                            \
    static DEVICE void run(float (&d)[R], u64 a, u64 b, int accumulate) {                          \
      static_assert(AByK && BByK, "tf32 is read along the reduction only");                    \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, " ON ", 0; "                                    \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k8.f32.tf32.tf32 {" REGS_##R            \
                   "}, " A ", " B ", p, 1, 1; }"                                                   \
                   : SUMS_##R                                                                      \
                   : "l"(a), "l"(b), "r"(accumulate));                                             \
    }                                                                                              \
  };
#define WGMMA_TYPES(N, R, A, B, ON, TA, TB)                                                        \
  WGMMA_16(bf16, "bf16", N, R, A, B, ON, TA, TB)                                                   \
  WGMMA_16(fp16, "f16", N, R, A, B, ON, TA, TB)                                                    \
  WGMMA_TF32(N, R, A, B, ON)

WGMMA_TYPES(8, 4, "%4", "%5", "%6", "%7", "%8")
WGMMA_TYPES(16, 8, "%8", "%9", "%10", "%11", "%12")
WGMMA_TYPES(32, 16, "%16", "%17", "%18", "%19", "%20")
WGMMA_TYPES(64, 32, "%32", "%33", "%34", "%35", "%36")
WGMMA_TYPES(96, 48, "%48", "%49", "%50", "%51", "%52")
WGMMA_TYPES(128, 64, "%64", "%65", "%66", "%67", "%68")
WGMMA_TYPES(160, 80, "%80", "%81", "%82", "%83", "%84")
WGMMA_TYPES(192, 96, "%96", "%97", "%98", "%99", "%100")
WGMMA_TYPES(224, 112, "%112", "%113", "%114", "%115", "%116")
WGMMA_TYPES(256, 128, "%128", "%129", "%130", "%131", "%132")

template <class T, int N, bool AByK, bool BByK>
DEVICE void wgmma(float (&d)[N / 2], u64 a, u64 b, int accumulate) {
  Wgmma<T, N>::template run<AByK, BByK>(d, a, b, accumulate);
}
