// Depthwise convolution without matrix units: forward, and the gradient of the input. Any filter up to
// what shared memory holds, any stride, padding and dilation; no channel ever meets another.
//
// A lane owns two channels, a warp 64 of them: a pixel is one line of memory. A warp computes a strip of
// STRIP neighbouring pixels: for each row of the filter it reads the row of the image that the strip
// needs once and multiplies it by the row's taps, which lie in shared memory as [tap][channel].
//
// Backward, strips lie in the padded image, where pixel i is reached by tap x from column
// (i - x * DILATION_W) / STRIDE_W of the gradient, if that is whole.
// Macros: ELEMENT, BACKWARD, FILTER_D/H/W, STRIDE_D/H/W, DILATION_D/H/W, STRIP (backward a multiple of
// STRIDE_W), WARPS, BLOCKS, BIAS, RESIDUAL, ACTIVATION.
#pragma once
#include "conv/cuda/pairs.cuh"
#include "cuda/epilogue.cuh"

constexpr int block_channels = 64, taps = FILTER_D * FILTER_H * FILTER_W;
constexpr int tap_bytes = block_channels * sizeof(ELEMENT);
constexpr int reach = (FILTER_W - 1) * DILATION_W;
constexpr int before = BACKWARD ? (reach + STRIDE_W - 1) / STRIDE_W : 0;  // columns left of the strip's own
constexpr int span = BACKWARD ? (STRIP - 1) / STRIDE_W + before + 1 : (STRIP - 1) * STRIDE_W + reach + 1;
static_assert(!BACKWARD || STRIP % STRIDE_W == 0, "strips are whole periods of the stride");

// Which of the `span` columns pixel `at` of a strip reads at a tap, or -1.
DEVICE constexpr int column_of(int at, int tap) {
  if (!BACKWARD) return at * STRIDE_W + tap * DILATION_W;
  const int from = at - tap * DILATION_W + before * STRIDE_W;
  return from % STRIDE_W ? -1 : from / STRIDE_W;
}
// The row of the image that row `at` reads at a tap, or -1 where it reads none.
DEVICE int line_of(int at, int tap, int stride, int dilation, int pad, int size) {
  int from = BACKWARD ? at + pad - tap * dilation : at * stride - pad + tap * dilation;
  if (BACKWARD) {
    if (from < 0 || from % stride) return -1;
    from /= stride;
  }
  return from >= 0 && from < size ? from : -1;
}

struct Image {
  int depth, height, width;
  i64 pitch_n, pitch_d, pitch_h, pitch_w;
  DEVICE i64 at(int n, int d, int h, int w) const {
    return n * pitch_n + d * pitch_d + h * pitch_h + w * pitch_w;
  }
};

// One row of the filter over one row of the image.
DEVICE void add_row(float (&sums)[STRIP][2], const ELEMENT* line, int first, int width, i64 pitch,
                    u32 filter_row) {
  Pair read[span];
#pragma unroll
  for (int i = 0; i < span; i++) {
    const int column = first + i;
    read[i] = column >= 0 && column < width ? load_pair<ELEMENT>(line + column * pitch) : Pair{0.f, 0.f};
  }
#pragma unroll
  for (int x = 0; x < FILTER_W; x++) {
    const Pair weight = staged_pair<ELEMENT>(filter_row + x * tap_bytes);
#pragma unroll
    for (int i = 0; i < STRIP; i++) {
      const int column = column_of(i, x);
      if (column < 0) continue;
      sums[i][0] += weight.a * read[column].a;
      sums[i][1] += weight.b * read[column].b;
    }
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
channelwise(const ELEMENT* source, const ELEMENT* weights, ELEMENT* result, const ELEMENT* bias,
            const ELEMENT* residual, i64 filter_pitch, int channels, int images, int pad_d, int pad_h,
            int pad_w, int read_d, int read_h, int read_w, i64 pitch_read_n, i64 pitch_read_d,
            i64 pitch_read_h, i64 pitch_read_w, int depth, int height, int width, i64 pitch_n,
            i64 pitch_d, i64 pitch_h, i64 pitch_w) {
  const u32 filter = shared_base(), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_channel = blockIdx.x * block_channels, channel = first_channel + 2 * lane;
  const Image from{read_d, read_h, read_w, pitch_read_n, pitch_read_d, pitch_read_h, pitch_read_w};
  const Image to{depth, height, width, pitch_n, pitch_d, pitch_h, pitch_w};
  for (int i = threadIdx.x; i < block_channels * taps; i += 32 * WARPS) {
    const int own = i / taps, tap = i % taps;
    const bool is_inside = first_channel + own < channels;
    stage_element(filter + tap * tap_bytes + own * (int)sizeof(ELEMENT),
                  is_inside ? weights[(first_channel + own) * filter_pitch + tap] : ELEMENT{});
  }
  __syncthreads();
  if (channel >= channels) return;
  // Backward, the first strip begins at the last period of the stride that is padding, or at 0.
  const int skipped = BACKWARD ? pad_w / STRIDE_W * STRIDE_W : 0;
  const int strips = ((BACKWARD ? width + pad_w - skipped : width) + STRIP - 1) / STRIP;
  const int count = images * depth * height * strips;
  for (int strip = blockIdx.y * WARPS + warp; strip < count; strip += gridDim.y * WARPS) {
    const int row = strip / strips, plane = row / height, h = row % height, d = plane % depth;
    const int n = plane / depth, start = strip % strips * STRIP + skipped;  // padded, backward
    float sums[STRIP][2] = {};
#pragma unroll 1
    for (int z = 0; z < FILTER_D; z++) {
      const int line_d = line_of(d, z, STRIDE_D, DILATION_D, pad_d, from.depth);
      if (line_d < 0) continue;
#pragma unroll 1
      for (int y = 0; y < FILTER_H; y++) {
        const int line_h = line_of(h, y, STRIDE_H, DILATION_H, pad_h, from.height);
        if (line_h < 0) continue;
        const int first = BACKWARD ? start / STRIDE_W - before : start * STRIDE_W - pad_w;
        add_row(sums, source + from.at(n, line_d, line_h, 0) + channel, first, from.width, from.pitch_w,
                filter + (z * FILTER_H + y) * FILTER_W * tap_bytes + 2 * lane * (int)sizeof(ELEMENT));
      }
    }
#pragma unroll
    for (int i = 0; i < STRIP; i++) {
      const int w = start + i - (BACKWARD ? pad_w : 0);
      if (w < 0 || w >= width) continue;
      const i64 at = to.at(n, d, h, w) + channel;
      Pair done;
      done.a = finish<ELEMENT, BIAS, RESIDUAL, ACTIVATION>(sums[i][0], bias, residual, channel, at);
      done.b = finish<ELEMENT, BIAS, RESIDUAL, ACTIVATION>(sums[i][1], bias, residual, channel + 1, at + 1);
      store_pair<ELEMENT>(result + at, done);
    }
  }
}
