// From a math group's sums to memory: finished results, or partial sums in fp32.
#pragma once
#include "conv/cuda/walk.cuh"
#include "cuda/epilogue.cuh"

#define SUM_DIRECT 0  // the sums are whole: finish and store the result
#define SUM_SLICES 1  // one slice of the reduction: store fp32, a second kernel adds the slices up
#define SUM_ATOMIC 2  // one slice of the reduction: add it to fp32 sums that began at zero

// Where the tile of a math group lies: rows of 64 from `row`, columns (channels) from `column`.
struct Tile {
  int row, rows;        // the first, and one past the last of the result
  int column, columns;  // within the group of channels
  int channel;          // the group's first channel
};

// Two neighbours at an even place.
template <class R>
DEVICE void store_pair(R* to, float a, float b) {
  *(u32*)to = pack2<R>(a, b);
}
DEVICE void store_pair(fp32* to, float a, float b) { *(f32x2*)to = {a, b}; }

// One warp's part of 64 x 64 sums, as two neighbouring elements of T a register, into `buffer`
// (2 KB, rows of 128 bytes, swizzled), to be read again by the same warp.
template <class T>
DEVICE void pack_warp(u32 buffer, const float* sums, u32 lane) {
  const u32 row = (lane >> 3 & 1) * 8 + (lane & 7);
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const float* s = sums + 8 * j;
    store_matrix4(buffer + swizzled<128>(row, 2 * j + (lane >> 4)), pack2<T>(s[0], s[1]),
                  pack2<T>(s[2], s[3]), pack2<T>(s[4], s[5]), pack2<T>(s[6], s[7]));
  }
}

// Finished sums of 16-bit results, 64 rows x N columns: through shared memory, 128 bytes a row.
template <class R, int N, bool HasBias, bool HasResidual, int Kind>
DEVICE void store_finished_16(float (&sums)[N / 2], const Tile& tile, const Walk& walk,
                              const Places& places, R* result, const R* bias, const R* residual,
                              bool is_aligned, u32 staging, u32 thread) {
  const u32 warp = thread / 32, lane = thread % 32, buffer = staging + warp * 2048;
  if constexpr (HasBias || HasResidual || Kind != ACTIVATION_NONE) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = tile.row + warp * 16 + half * 8 + lane / 4;
      if (row >= tile.rows) continue;
      const i64 at = HasResidual ? places.of(walk.pixel(row)) + tile.channel : 0;
#pragma unroll
      for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int column = tile.column + 8 * j + 2 * (lane % 4) + i;
          float& sum = sums[4 * j + 2 * half + i];
          if (column < tile.columns)
            sum = finish<R, HasBias, HasResidual, Kind>(sum, bias, residual,
                                                          tile.channel + column, at + column);
        }
    }
  }
  R* lines[4];  // of the rows that this lane stores: lane / 8 + 4 i of the warp's 16
  bool is_inside[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = tile.row + warp * 16 + 4 * i + lane / 8;
    is_inside[i] = row < tile.rows;
    lines[i] = result + tile.channel + (is_inside[i] ? places.of(walk.pixel(row)) : 0);
  }
#pragma unroll
  for (int part = 0; part < N; part += 64) {
    __syncwarp();  // the part before has been read
    pack_warp<R>(buffer, sums + part / 2, lane);
    __syncwarp();
    const int column = tile.column + part + 8 * (lane % 8);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (!is_inside[i] || column >= tile.columns) continue;
      const u32x4 chunk = load_shared_u32x4(buffer + swizzled<128>(4 * i + lane / 8, lane % 8));
      R* to = lines[i] + column;
      if (is_aligned && column + 8 <= tile.columns) {
        *(u32x4*)to = chunk;
        continue;
      }
      const u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
      for (int e = 0; e < 8; e++)
        if (column + e < tile.columns) to[e].bits = (u16)(words[e / 2] >> (16 * (e % 2)));
    }
  }
}

// Finished sums of fp32 results, from the registers.
template <class R, int N, bool HasBias, bool HasResidual, int Kind>
DEVICE void store_finished_32(float (&sums)[N / 2], const Tile& tile, const Walk& walk,
                              const Places& places, R* result, const R* bias, const R* residual,
                              u32 thread) {
  const u32 warp = thread / 32, lane = thread % 32;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = tile.row + warp * 16 + half * 8 + lane / 4;
    if (row >= tile.rows) continue;
    const i64 at = places.of(walk.pixel(row)) + tile.channel;
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int column = tile.column + 8 * j + 2 * (lane % 4) + i;
        if (column < tile.columns)
          result[at + column].value = finish<R, HasBias, HasResidual, Kind>(
              sums[4 * j + 2 * half + i], bias, residual, tile.channel + column, at + column);
      }
  }
}

template <class R, int N, bool HasBias, bool HasResidual, int Kind>
DEVICE void store_finished(float (&sums)[N / 2], const Tile& tile, const Walk& walk,
                           const Places& places, R* result, const R* bias, const R* residual,
                           bool is_aligned, u32 staging, u32 thread) {
  if constexpr (sizeof(R) == 4)
    store_finished_32<R, N, HasBias, HasResidual, Kind>(sums, tile, walk, places, result, bias,
                                                        residual, thread);
  else
    store_finished_16<R, N, HasBias, HasResidual, Kind>(sums, tile, walk, places, result, bias,
                                                        residual, is_aligned, staging, thread);
}

// Partial sums, rows of `pitch` (all channels): stored into `partial`, or added to it.
template <int N, bool IsAtomic>
DEVICE void store_partial(float (&sums)[N / 2], const Tile& tile, float* partial, int pitch,
                          u32 thread) {
  const u32 warp = thread / 32, lane = thread % 32;
  const bool is_even = (pitch | tile.channel) % 2 == 0;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = tile.row + warp * 16 + half * 8 + lane / 4;
    if (row >= tile.rows) continue;
    float* line = partial + (i64)row * pitch + tile.channel;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      const int column = tile.column + 8 * j + 2 * (lane % 4);
      const float a = sums[4 * j + 2 * half], b = sums[4 * j + 2 * half + 1];
      float* to = line + column;
      if (is_even && column + 2 <= tile.columns) {
        if constexpr (IsAtomic) add_global(to, a, b);
        else *(f32x2*)to = {a, b};
      } else if (column < tile.columns) {
        if constexpr (IsAtomic) add_global(to, a);
        else to[0] = a;
        if (column + 1 < tile.columns) {
          if constexpr (IsAtomic) add_global(to + 1, b);
          else to[1] = b;
        }
      }
    }
  }
}
