// What kernels over patches of channels-last images share: which place of a patch feeds which place of
// the result, and how a sum is finished.
// Macros: ELEMENT, BACKWARD, BIAS, RESIDUAL, ACTIVATION.
#pragma once
#include "cuda/epilogue.cuh"

// What one dimension of a patch means for the result.
//
// Forward, place o of the result reads places o * Stride + tap * Dilation of the patch. Backward, the
// padded image is cut into Stride phases: its place q * Stride + a is reached by the taps
// a + Stride * j, from place q - j of the gradient. So nothing is multiplied by the zeros between.
template <int Taps, int Stride, int Dilation>
struct Axis {
  static constexpr int phases = BACKWARD ? Stride : 1;
  static constexpr int shifts = BACKWARD ? (Taps + Stride - 1) / Stride : Taps;
  static constexpr int step = BACKWARD ? 1 : Stride;  // patch pixels between pixels of the result
  static constexpr int reach = (shifts - 1) * Dilation;
  static constexpr int open = reach / step + 1;  // places of the result that are open at a time
  static DEVICE constexpr int patch(int tile) { return (tile - 1) * step + reach + 1; }
  static DEVICE constexpr int phase(int tap) { return BACKWARD ? tap % Stride : 0; }
  static DEVICE constexpr int shift(int tap) { return BACKWARD ? tap / Stride : tap; }
  // Where a shift reads, from the first place that the result's place can read.
  static DEVICE constexpr int offset(int shift) {
    return (BACKWARD ? shifts - 1 - shift : shift) * Dilation;
  }
  // The place of the result that place `at` of the patch feeds through a tap, or -1.
  static DEVICE constexpr int fed(int at, int tap, int tile) {
    const int from = at - offset(shift(tap));
    return from >= 0 && from % step == 0 && from / step < tile ? from / step : -1;
  }
  // The tap through which place `at` of the patch feeds place `to` of a phase, or -1.
  static DEVICE constexpr int tap_between(int at, int to, int phase) {
    const int from = at - to * step;
    if (from < 0 || from > reach || from % Dilation) return -1;
    const int tap = BACKWARD ? phase + Stride * (shifts - 1 - from / Dilation) : from / Dilation;
    return tap < Taps ? tap : -1;
  }
};
struct Corner {
  int d, h, w;
};

// What becomes of the sums: where the tile lies in the result, and what is added.
struct Result {
  const ELEMENT* bias;
  const ELEMENT* residual;
  int channels, depth, height, width;
  i64 pitch_n, pitch_d, pitch_h, pitch_w;

  // One sum of a channel at a pixel.
  DEVICE float finished(float sum, int channel, int n, int d, int h, int w) const {
    if constexpr (!BIAS && !RESIDUAL && ACTIVATION == ACTIVATION_NONE) return sum;
    const bool is_inside = channel < channels && h >= 0 && h < height && w >= 0 && w < width &&
                           d >= 0 && d < depth;
    if (!is_inside) return 0.f;
    const i64 at = n * pitch_n + d * pitch_d + h * pitch_h + w * pitch_w + channel;
    return finish<ELEMENT, BIAS, RESIDUAL, ACTIVATION>(sum, bias, residual, channel, at);
  }
};
