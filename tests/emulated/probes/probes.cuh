// Small kernels that each ask one thing of the machine; MODE picks what goes wrong, 0 nothing.
#pragma once
#include "cuda/ptx.cuh"

// A box of 64 channels x 8 x 2 pixels in, and out again elsewhere.
extern "C" __global__ void copy_box(const __grid_constant__ TensorMap in,
                                    const __grid_constant__ TensorMap out, int c, int w, int h) {
  const u32 box = shared_base(), barrier = box + 2048;
  if (MODE == 6) c %= h - 4;
  if (threadIdx.x == 0) {
    barrier_init(barrier, 1);
    barrier_init_done();
    barrier_expect(barrier, 2048 + (MODE == 1 ? 16 : 0));
    tma_load(box + (MODE == 5 ? 64 : 0), &in, barrier, c, w, h);
  }
  __syncthreads();
  if (MODE != 2) barrier_wait(barrier, 0);
  // Each thread reads and writes its own 16 bytes, so that the store needs a fence.
  const u32 mine = box + swizzled<128>(threadIdx.x / 8, threadIdx.x % 8);
  store_shared_u32x4(mine, load_shared_u32x4(mine));
  if (MODE != 3) fence_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    tma_store(&out, box, c, w, h);
    tma_store_commit();
    if (MODE != 4) tma_store_wait<0>();
  }
}

// c[16 x 8] = a[16 x 16] b[8 x 16]^T through ldmatrix and one mma.
extern "C" __global__ void multiply_warp(const bf16* a, const bf16* b, float* c) {
  const u32 tile = shared_base(), lane = threadIdx.x;
  for (u32 i = lane; i < 16 * 16; i += 32) store_shared_u16(tile + 2 * i, a[i].bits);
  for (u32 i = lane; i < 8 * 16; i += 32) store_shared_u16(tile + 512 + 2 * i, b[i].bits);
  __syncwarp();
  u32 left[4], right[2];
  load_matrix4(left, tile + (lane % 16) * 32 + (lane / 16) * 16);
  load_matrix2(right, tile + 512 + (lane % 8) * 32 + (lane / 8 % 2) * 16);
  float sum[4] = {};
  if (MODE == 1 && lane == 7) return;  // a lane that leaves its warp alone
  mma_16816<bf16>(sum, left, right[0], right[1]);
  for (int i = 0; i < 4; i++) c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sum[i];
}

// c[64 x 16] = a b by one wgmma a step of 16, in the four ways that operands can lie.
template <bool AByK, bool BByK>
DEVICE void multiply_group(const TensorMap* a, const TensorMap* b, float* c) {
  const u32 left = shared_base(), right = left + 8192, barrier = right + 8192;
  const u32 bytes = 8192 + (BByK ? 2048 : 8192);
  if (threadIdx.x == 0) {
    barrier_init(barrier, 1);
    barrier_init_done();
    barrier_expect(barrier, bytes);
    tma_load(left, a, barrier, 0, 0);
    tma_load(right, b, barrier, 0, 0);
  }
  __syncthreads();
  barrier_wait(barrier, 0);
  float sum[8];
  wgmma_fence();
  for (int step = 0; step < 4; step++)
    wgmma<bf16, 16, AByK, BByK>(sum, wgmma_operand(left + step * (AByK ? 32 : 2048), 8192, 1024),
                                wgmma_operand(right + step * (BByK ? 32 : 2048), 8192, 1024),
                                step > 0);
  wgmma_commit();
  if (MODE != 1) wgmma_wait<0>();
  const u32 row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  for (int i = 0; i < 8; i++)
    c[(row + (i / 2 & 1) * 8) * 16 + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2] = sum[i];
}
extern "C" __global__ void multiply_kk(const __grid_constant__ TensorMap a,
                                       const __grid_constant__ TensorMap b, float* c) {
  multiply_group<true, true>(&a, &b, c);
}
extern "C" __global__ void multiply_mk(const __grid_constant__ TensorMap a,
                                       const __grid_constant__ TensorMap b, float* c) {
  multiply_group<false, true>(&a, &b, c);
}
extern "C" __global__ void multiply_kn(const __grid_constant__ TensorMap a,
                                       const __grid_constant__ TensorMap b, float* c) {
  multiply_group<true, false>(&a, &b, c);
}

// Every thread copies 16 bytes by cp.async, the last ones zeros, and reads its neighbour's.
extern "C" __global__ void gather(const float* from, float* to, int count) {
  const u32 buffer = shared_base(), barrier = buffer + 64 * 16, i = threadIdx.x;
  if (i == 0) {
    barrier_init(barrier, 64);
    barrier_init_done();
  }
  __syncthreads();
  copy_or_zero<16>(buffer + 16 * i, from + 4 * i, (int)i < count);
  if (MODE != 1) barrier_arrive_after_copies(barrier);
  if (MODE != 2) barrier_wait(barrier, 0);
  const u32x4 read = load_shared_u32x4(buffer + 16 * (63 - i));
  to[4 * i] = as_float(read.x);
  to[4 * i + 3 + (MODE == 3)] = as_float(read.w);
}

// Two blocks of a cluster send each other half of a tile.
extern "C" __global__ void exchange(const __grid_constant__ TensorMap in, float* to) {
  const u32 tile = shared_base(), barrier = tile + 2048, rank = cluster_rank();
  if (threadIdx.x == 0) {
    barrier_init(barrier, 1);
    barrier_init_done();
    barrier_expect(barrier, 2048);
  }
  if (MODE != 1) cluster_sync();
  if (threadIdx.x == 0) tma_load_multicast(tile + rank * 1024, &in, barrier, 3, 0, (int)rank * 32);
  barrier_wait(barrier, 0);
  for (u32 i = threadIdx.x; i < 512; i += 32)
    to[blockIdx.x * 512 + i] = load_shared_f32(tile + 4 * i);
  if (MODE != 2) cluster_sync();
}

// One warpgroup gives registers up, two take them: of 65536, 168 a thread of 384 at launch.
extern "C" __global__ void registers(int* to) {
  if (threadIdx.x < 256) raise_registers<MODE == 1 ? 232 : MODE == 2 ? 160 : 224>();
  else if (MODE != 3 || threadIdx.x < 352) lower_registers<56>();
  to[threadIdx.x] = 1;
}

// Doubles what the step before it wrote; a step that overlaps has to wait for it.
extern "C" __global__ void doubled(const float* from, float* to) {
  const float early = from[threadIdx.x];
  if (MODE != 2) wait_for_previous_grid();
  to[threadIdx.x] = 2 * (MODE == 1 ? early : *(volatile const float*)&from[threadIdx.x]);
}
