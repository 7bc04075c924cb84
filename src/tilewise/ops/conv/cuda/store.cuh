// From a math group's sums to memory: finished results, or partial sums in fp32.
#pragma once
#include "conv/cuda/walk.cuh"
#include "cuda/epilogue.cuh"

#define SUM_DIRECT 0  // the sums are whole: finish and store the result
#define SUM_SLICES 1  // one slice of the reduction: store fp32, a second kernel adds the slices up
#define SUM_ATOMIC 2  // one slice of the reduction: add it to fp32 sums that began at zero

// A kernel's parameter for TMA stores of its result, where it has STORE_BUFFERS.
#if STORE_BUFFERS
#define RESULT_MAP const __grid_constant__ TensorMap result_map,
#define RESULT_MAP_ADDRESS &result_map
#else
#define RESULT_MAP
#define RESULT_MAP_ADDRESS nullptr
#endif

// Columns of a math group's tile: channels from `column` of a group that begins at `channel`.
struct Columns {
  int column, count, channel;
};

// Where a math group's results leave: Buffers of 64 rows x 128 bytes that TMA reads, in turn, or with
// Buffers 0 one that its warps read back. `barrier` is the group's own named one.
template <int Buffers>
struct Staging {
  static constexpr bool is_copied = Buffers > 0;
  static constexpr int bytes = 8192 * (Buffers > 1 ? Buffers : 1);
  u32 base, barrier;
  u32 turn = 0;

  // The next buffer, when everything that read it is done; by the whole group.
  DEVICE u32 next(u32 thread) {
    if (thread == 0) tma_store_wait<Buffers - 1>();
    named_sync(barrier, 128);
    const u32 buffer = base + turn * 8192;
    if (Buffers > 1) turn ^= 1;
    return buffer;
  }
  // Every buffer is free.
  DEVICE void drain(u32 thread) const {
    if (is_copied && thread == 0) tma_store_wait<0>();
  }
};

// Which pixels the 64 rows of a block of sums are. Like any such type: `has(row)`, whether there is
// one; `index(row)`, its number among all pixels of the walk; `place(row)`, its elements' in the result;
// `copy(...)`, all of them by TMA from `channel` on.
// These lie one after the other, in the result too where it `is_flat`, which saves the divisions.
struct FlatRows {
  const Walk& walk;
  const Places& places;
  bool is_flat;
  int first, count;
  DEVICE bool has(int row) const { return first + row < count; }
  DEVICE int index(int row) const { return first + row; }
  DEVICE i64 place(int row) const {
    return is_flat ? places.first + (first + row) * places.w : places.of(walk.pixel(first + row));
  }
  DEVICE void copy(const TensorMap* map, u32 from, int channel) const {
    tma_store(map, from, channel, first);
  }
};

// Two neighbours at an even place.
template <class R>
DEVICE void store_pair(R* to, float a, float b) {
  *(u32*)to = pack2<R>(a, b);
}
DEVICE void store_pair(fp32* to, float a, float b) { *(f32x2*)to = {a, b}; }

// Two neighbouring partial sums; `both` says that the second is inside, too.
template <bool IsAtomic>
DEVICE void store_partial_pair(float* to, float a, float b, bool is_even, bool both) {
  if (is_even && both) {
    if constexpr (IsAtomic) add_global(to, a, b);
    else *(f32x2*)to = {a, b};
    return;
  }
  if constexpr (IsAtomic) add_global(to, a);
  else to[0] = a;
  if (!both) return;
  if constexpr (IsAtomic) add_global(to + 1, b);
  else to[1] = b;
}

// One warp's part of 64 x WIDTH sums (64 columns at most), as two neighbouring elements of R a
// register, into `buffer` (2 KB, rows of 128 bytes, swizzled), to be read again by the same warp.
template <class R, int Width>
DEVICE void pack_warp(u32 buffer, const float* sums, u32 lane) {
  const u32 row = (lane >> 3 & 1) * 8 + (lane & 7);
#pragma unroll
  for (int j = 0; j < Width / 16; j++) {
    const float* s = sums + 8 * j;
    store_matrix4(buffer + swizzled<128>(row, 2 * j + (lane >> 4)), pack2<R>(s[0], s[1]),
                  pack2<R>(s[2], s[3]), pack2<R>(s[4], s[5]), pack2<R>(s[6], s[7]));
  }
}

// Everything about the result that a kernel is told.
template <class R>
struct Output {
  R* result;
  const TensorMap* map;  // the same, in boxes of 64 pixels x 64 channels, where TMA stores it
  const R* bias;
  const R* residual;
  float* partial;  // slices of the reduction, or of the sums over pixels
  Places places;
  int pixels, channels, pitch;  // of the result: rows, channels of a group, channels of all groups
  bool is_aligned;              // to 16 bytes
};

// Bias, residual and activation, in place.
template <int N, bool HasBias, bool HasResidual, int Kind, class R, class Rows>
DEVICE void finish_block(float (&sums)[N / 2], const Output<R>& out, const Rows& rows,
                         const Columns& tile, u32 thread) {
  const u32 warp = thread / 32, lane = thread % 32;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = warp * 16 + half * 8 + lane / 4;
    if (!rows.has(row)) continue;
    const i64 at = (HasResidual ? rows.place(row) : 0) + tile.channel;
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int column = tile.column + 8 * j + 2 * (lane % 4) + i;
        float& sum = sums[4 * j + 2 * half + i];
        if (column < tile.count)
          sum = finish<R, HasBias, HasResidual, Kind>(sum, out.bias, out.residual,
                                                      tile.channel + column, at + column);
      }
  }
}

// Finished sums of 16-bit results, 64 rows x N columns: through shared memory, 128 bytes a row.
template <int N, class R, class Rows>
DEVICE void store_16(float (&sums)[N / 2], const Output<R>& out, const Rows& rows,
                     const Columns& tile, u32 staging, u32 thread) {
  const u32 warp = thread / 32, lane = thread % 32, buffer = staging + warp * 2048;
  R* lines[4];  // of the rows that this lane stores: lane / 8 + 4 i of the warp's 16
  bool is_inside[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = warp * 16 + 4 * i + lane / 8;
    is_inside[i] = rows.has(row);
    lines[i] = out.result + tile.channel + (is_inside[i] ? rows.place(row) : 0);
  }
#pragma unroll
  for (int part = 0; part < N; part += 64) {
    constexpr int last = N % 64 ? N % 64 : 64;
    __syncwarp();  // the part before has been read
    if (part + 64 <= N) pack_warp<R, 64>(buffer, sums + part / 2, lane);
    else pack_warp<R, last>(buffer, sums + part / 2, lane);
    __syncwarp();
    const int within = part + 8 * (lane % 8), column = tile.column + within;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (!is_inside[i] || within >= N || column >= tile.count) continue;
      const u32x4 chunk = load_shared_u32x4(buffer + swizzled<128>(4 * i + lane / 8, lane % 8));
      R* to = lines[i] + column;
      if (out.is_aligned && column + 8 <= tile.count) {
        *(u32x4*)to = chunk;
        continue;
      }
      const u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
      for (int e = 0; e < 8; e++)
        if (column + e < tile.count) to[e].bits = (u16)(words[e / 2] >> (16 * (e % 2)));
    }
  }
}

// The same by TMA, 64 columns at a time: it clips the tensor's edge, and writes while the group goes on.
template <int N, int Buffers, class R, class Rows>
DEVICE void store_boxes(float (&sums)[N / 2], const Output<R>& out, const Rows& rows,
                        const Columns& tile, Staging<Buffers>& staging, u32 thread) {
#pragma unroll
  for (int part = 0; part < N; part += 64) {
    const u32 buffer = staging.next(thread);
    constexpr int last = N % 64 ? N % 64 : 64;  // what lies behind is beyond the tensor's edge, too
    const u32 to = buffer + thread / 32 * 2048;
    if (part + 64 <= N) pack_warp<R, 64>(to, sums + part / 2, thread % 32);
    else pack_warp<R, last>(to, sums + part / 2, thread % 32);
    fence_async();
    named_sync(staging.barrier, 128);
    if (thread != 0) continue;
    const int column = tile.column + part;
    if (column < tile.count && rows.has(0)) rows.copy(out.map, buffer, tile.channel + column);
    tma_store_commit();  // of nothing, too: buffers are counted by commits
  }
}

// Finished sums of fp32 results, from the registers.
template <int N, class Rows>
DEVICE void store_32(float (&sums)[N / 2], const Output<fp32>& out, const Rows& rows,
                     const Columns& tile, u32 thread) {
  const u32 warp = thread / 32, lane = thread % 32;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = warp * 16 + half * 8 + lane / 4;
    if (!rows.has(row)) continue;
    fp32* line = out.result + rows.place(row) + tile.channel;
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int column = tile.column + 8 * j + 2 * (lane % 4) + i;
        if (column < tile.count) line[column].value = sums[4 * j + 2 * half + i];
      }
  }
}

// Partial sums, rows of `pitch` (all channels): stored into `partial`, or added to it.
template <int N, bool IsAtomic, class Rows>
DEVICE void store_partial(float (&sums)[N / 2], const Rows& rows, const Columns& tile,
                          float* partial, int pitch, u32 thread) {
  const u32 warp = thread / 32, lane = thread % 32;
  const bool is_even = (pitch | tile.channel) % 2 == 0;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = warp * 16 + half * 8 + lane / 4;
    if (!rows.has(row)) continue;
    float* line = partial + (i64)rows.index(row) * pitch + tile.channel;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      const int column = tile.column + 8 * j + 2 * (lane % 4);
      const float a = sums[4 * j + 2 * half], b = sums[4 * j + 2 * half + 1];
      if (column < tile.count)
        store_partial_pair<IsAtomic>(line + column, a, b, is_even, column + 1 < tile.count);
    }
  }
}

// Sums and sums of squares of a math group's results over its rows, channel by channel, as the result
// holds them (rounded): one slice [2][pitch] of out.partial, added up by a second kernel.
template <int N, int RowBlocks, int Buffers, class R, class MakeRows>
DEVICE void store_channel_sums(const float (&sums)[RowBlocks][N / 2], const Output<R>& out,
                               const MakeRows& make_rows, const Columns& tile, int slice,
                               const Staging<Buffers>& staging, u32 thread) {
  const u32 warp = thread / 32, lane = thread % 32, buffer = staging.base + warp * 2048;
  if (staging.is_copied) {
    staging.drain(thread);
    named_sync(staging.barrier, 128);
  }
  bool is_inside[RowBlocks][2];
#pragma unroll
  for (int m = 0; m < RowBlocks; m++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      is_inside[m][half] = make_rows(m).has(warp * 16 + half * 8 + lane / 4);
#pragma unroll
  for (int j = 0; j < N / 8; j++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float sum = 0.f, square = 0.f;
#pragma unroll
      for (int m = 0; m < RowBlocks; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          if (is_inside[m][half]) {
            const float value = to_float(from_float<R>(sums[m][4 * j + 2 * half + i]));
            sum += value;
            square += value * value;
          }
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        square += __shfl_xor_sync(0xffffffffu, square, lanes);
      }
      const u32 column = 8 * j + 2 * (lane % 4) + i;
      if (lane < 4) {
        store_shared_f32(buffer + 4 * column, sum);
        store_shared_f32(buffer + 4 * (N + column), square);
      }
    }
  named_sync(staging.barrier, 128);
  for (int at = (int)thread; at < 2 * N; at += 128) {
    const int column = tile.column + at % N;
    if (column >= tile.count) continue;
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < 4; w++) total += load_shared_f32(staging.base + w * 2048 + 4 * at);
    out.partial[((i64)slice * 2 + at / N) * out.pitch + tile.channel + column] = total;
  }
  named_sync(staging.barrier, 128);  // the staging is free again
}

// All blocks of 64 rows of a math group: finished, or as slice `split` of the reduction.
// `make_rows(m)` says which pixels block m has; `slice` is this group's own of the sums over pixels.
template <int Sum, int N, int RowBlocks, bool HasBias, bool HasResidual, int Kind, bool HasSums,
          int Buffers, class R, class MakeRows>
DEVICE void store_tile(float (&sums)[RowBlocks][N / 2], const Output<R>& out,
                       const MakeRows& make_rows, const Columns& tile, int split, int slice,
                       Staging<Buffers>& staging, u32 thread) {
  if constexpr (Sum != SUM_DIRECT) {
    const i64 first = Sum == SUM_SLICES ? (i64)split * out.pixels * out.pitch : 0;
#pragma unroll
    for (int m = 0; m < RowBlocks; m++)
      store_partial<N, Sum == SUM_ATOMIC>(sums[m], make_rows(m), tile, out.partial + first,
                                          out.pitch, thread);
  } else {
    if constexpr (HasBias || HasResidual || Kind != ACTIVATION_NONE) {
#pragma unroll
      for (int m = 0; m < RowBlocks; m++)
        finish_block<N, HasBias, HasResidual, Kind>(sums[m], out, make_rows(m), tile, thread);
    }
    if constexpr (HasSums)
      store_channel_sums<N, RowBlocks>(sums, out, make_rows, tile, slice, staging, thread);
#pragma unroll
    for (int m = 0; m < RowBlocks; m++) {
      if constexpr (Buffers > 0) store_boxes<N>(sums[m], out, make_rows(m), tile, staging, thread);
      else if constexpr (sizeof(R) == 4) store_32<N>(sums[m], out, make_rows(m), tile, thread);
      else store_16<N>(sums[m], out, make_rows(m), tile, staging.base, thread);
    }
  }
}
