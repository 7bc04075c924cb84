// What kernels over patches of channels-last images share: which place of a patch feeds which place of
// the result, and how a sum is finished.
// Macros: ELEMENT, BACKWARD, BIAS, RESIDUAL, ACTIVATION.
#pragma once
#include "cuda/epilogue.cuh"

// Backward, how many places of the gradient the one that a tap reads lies before the last that any reads.
DEVICE constexpr int shift_back(int tap, int stride, int lead) {
  return (lead > 0) - (tap % stride < lead) + tap / stride;
}
// Of all taps, counted; `ops/conv/patches.py` says the same.
DEVICE constexpr int shifts_back(int taps, int stride, int lead) {
  int most = 0;
  for (int tap = 0; tap < taps; tap++)
    if (shift_back(tap, stride, lead) > most) most = shift_back(tap, stride, lead);
  return most + 1;
}

// What one dimension of a patch means for the result.
//
// Forward, place o of the result reads places o * Stride + tap * Dilation of the patch. Backward, the
// image is cut into Stride phases. Its place q * Stride + a, which lies Lead further from the padding's
// last whole period, is reached by the taps of the residue (a + Lead) % Stride: tap residue + Stride * j
// reads place q + (a + Lead) / Stride - j of the gradient. So nothing is multiplied by the zeros between,
// and phases begin where the image does: TMA stores nothing that begins before a tensor.
template <int Taps, int Stride, int Dilation, int Lead>
struct Axis {
  static constexpr int phases = BACKWARD ? Stride : 1;
  static constexpr int shifts = BACKWARD ? shifts_back(Taps, Stride, Lead) : Taps;
  static constexpr int step = BACKWARD ? 1 : Stride;  // patch pixels between pixels of the result
  static constexpr int reach = (shifts - 1) * Dilation;
  static constexpr int open = reach / step + 1;  // places of the result that are open at a time
  static DEVICE constexpr int patch(int tile) { return (tile - 1) * step + reach + 1; }
  static DEVICE constexpr int phase(int tap) {
    return BACKWARD ? (tap % Stride - Lead + Stride) % Stride : 0;
  }
  static DEVICE constexpr int shift(int tap) {
    return BACKWARD ? shift_back(tap, Stride, Lead) : tap;
  }
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
    if (!BACKWARD) return from / Dilation;
    const int turns = (phase + Lead) / Stride - (Lead > 0) + shifts - 1 - from / Dilation;
    const int tap = (phase + Lead) % Stride + Stride * turns;
    return turns >= 0 && tap < Taps ? tap : -1;
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
