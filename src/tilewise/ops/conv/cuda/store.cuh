// From a math group's sums to memory: finished results, or partial sums in fp32.
#pragma once
#include "conv/cuda/walk.cuh"
#include "cuda/epilogue.cuh"

#define SUM_DIRECT 0  // the sums are whole: finish and store the result
#define SUM_SLICES 1  // one slice of the reduction: store fp32, a second kernel adds the slices up
#define SUM_ATOMIC 2  // one slice of the reduction: add it to fp32 sums that began at zero

// Columns of a math group's tile: channels from `column` of a group that begins at `channel`.
struct Columns {
  int column, count, channel;
};

// Which pixels the 64 rows of a block of sums are: those of an image one after the other. Like any
// such type, `pixel(row)` gives a pixel whose image is -1 where the row lies beyond the last one.
struct FlatRows {
  const Walk& walk;
  int first, count;
  DEVICE Pixel pixel(int row) const {
    return first + row < count ? walk.pixel(first + row) : Pixel{-1, 0, 0, 0};
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
template <class R, int N, bool HasBias, bool HasResidual, int Kind, class Rows>
DEVICE void store_finished_16(float (&sums)[N / 2], const Rows& rows, const Columns& tile,
                              const Places& places, R* result, const R* bias, const R* residual,
                              bool is_aligned, u32 staging, u32 thread) {
  const u32 warp = thread / 32, lane = thread % 32, buffer = staging + warp * 2048;
  if constexpr (HasBias || HasResidual || Kind != ACTIVATION_NONE) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const Pixel pixel = rows.pixel(warp * 16 + half * 8 + lane / 4);
      if (pixel.n < 0) continue;
      const i64 at = places.of(pixel) + tile.channel;
#pragma unroll
      for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int column = tile.column + 8 * j + 2 * (lane % 4) + i;
          float& sum = sums[4 * j + 2 * half + i];
          if (column < tile.count)
            sum = finish<R, HasBias, HasResidual, Kind>(sum, bias, residual,
                                                          tile.channel + column, at + column);
        }
    }
  }
  R* lines[4];  // of the rows that this lane stores: lane / 8 + 4 i of the warp's 16
  bool is_inside[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const Pixel pixel = rows.pixel(warp * 16 + 4 * i + lane / 8);
    is_inside[i] = pixel.n >= 0;
    lines[i] = result + tile.channel + (is_inside[i] ? places.of(pixel) : 0);
  }
#pragma unroll
  for (int part = 0; part < N; part += 64) {
    __syncwarp();  // the part before has been read
    pack_warp<R>(buffer, sums + part / 2, lane);
    __syncwarp();
    const int column = tile.column + part + 8 * (lane % 8);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (!is_inside[i] || column >= tile.count) continue;
      const u32x4 chunk = load_shared_u32x4(buffer + swizzled<128>(4 * i + lane / 8, lane % 8));
      R* to = lines[i] + column;
      if (is_aligned && column + 8 <= tile.count) {
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

// Finished sums of fp32 results, from the registers.
template <class R, int N, bool HasBias, bool HasResidual, int Kind, class Rows>
DEVICE void store_finished_32(float (&sums)[N / 2], const Rows& rows, const Columns& tile,
                              const Places& places, R* result, const R* bias, const R* residual,
                              u32 thread) {
  const u32 warp = thread / 32, lane = thread % 32;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const Pixel pixel = rows.pixel(warp * 16 + half * 8 + lane / 4);
    if (pixel.n < 0) continue;
    const i64 at = places.of(pixel) + tile.channel;
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int column = tile.column + 8 * j + 2 * (lane % 4) + i;
        if (column < tile.count)
          result[at + column].value = finish<R, HasBias, HasResidual, Kind>(
              sums[4 * j + 2 * half + i], bias, residual, tile.channel + column, at + column);
      }
  }
}

template <class R, int N, bool HasBias, bool HasResidual, int Kind, class Rows>
DEVICE void store_finished(float (&sums)[N / 2], const Rows& rows, const Columns& tile,
                           const Places& places, R* result, const R* bias, const R* residual,
                           bool is_aligned, u32 staging, u32 thread) {
  if constexpr (sizeof(R) == 4)
    store_finished_32<R, N, HasBias, HasResidual, Kind>(sums, rows, tile, places, result, bias,
                                                        residual, thread);
  else
    store_finished_16<R, N, HasBias, HasResidual, Kind>(sums, rows, tile, places, result, bias,
                                                        residual, is_aligned, staging, thread);
}

// Partial sums, rows of `pitch` (all channels): stored into `partial`, or added to it.
template <int N, bool IsAtomic, class Rows>
DEVICE void store_partial(float (&sums)[N / 2], const Rows& rows, const Columns& tile,
                          const Walk& walk, float* partial, int pitch, u32 thread) {
  const u32 warp = thread / 32, lane = thread % 32;
  const bool is_even = (pitch | tile.channel) % 2 == 0;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const Pixel pixel = rows.pixel(warp * 16 + half * 8 + lane / 4);
    if (pixel.n < 0) continue;
    float* line = partial + (i64)walk.row(pixel) * pitch + tile.channel;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      const int column = tile.column + 8 * j + 2 * (lane % 4);
      const float a = sums[4 * j + 2 * half], b = sums[4 * j + 2 * half + 1];
      if (column < tile.count)
        store_partial_pair<IsAtomic>(line + column, a, b, is_even, column + 1 < tile.count);
    }
  }
}

// Everything about the result that a kernel is told.
template <class R>
struct Output {
  R* result;
  const R* bias;
  const R* residual;
  float* partial;
  Places places;
  int pixels, channels, pitch;  // of the result: rows, channels of a group, channels of all groups
  bool is_aligned;              // to 16 bytes
};

// One block of 64 rows, finished or as slice `split` of the reduction.
template <int Sum, int N, bool HasBias, bool HasResidual, int Kind, class R, class Rows>
DEVICE void store_block(float (&sums)[N / 2], const Output<R>& out, const Rows& rows,
                        const Columns& tile, const Walk& walk, int split, u32 staging, u32 thread) {
  if constexpr (Sum == SUM_DIRECT) {
    store_finished<R, N, HasBias, HasResidual, Kind>(sums, rows, tile, out.places, out.result,
                                                     out.bias, out.residual, out.is_aligned,
                                                     staging, thread);
  } else {
    const i64 first = Sum == SUM_SLICES ? (i64)split * out.pixels * out.pitch : 0;
    store_partial<N, Sum == SUM_ATOMIC>(sums, rows, tile, walk, out.partial + first, out.pitch,
                                        thread);
  }
}
