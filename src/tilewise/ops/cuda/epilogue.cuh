// What happens to a sum before it is stored: bias, residual, activation.
#pragma once
#include "cuda/ptx.cuh"

// ACTIVATION as `ops/launch` numbers them.
#define ACTIVATION_NONE 0
#define ACTIVATION_RELU 1
#define ACTIVATION_GELU 2
#define ACTIVATION_SILU 3

template <int Kind>
DEVICE float activate(float x) {
  if constexpr (Kind == ACTIVATION_RELU) return x < 0.f ? 0.f : x;  // NaN stays
  if constexpr (Kind == ACTIVATION_GELU) return 0.5f * x * (1.f + erff(x * 0.7071067811865476f));
  if constexpr (Kind == ACTIVATION_SILU) return divide_fast(x, 1.f + exp_fast(-x));
  return x;
}

// One sum at channel `channel`, element `at` of the result (and of the residual).
template <class R, bool HasBias, bool HasResidual, int Kind>
DEVICE float finish(float sum, const R* bias, const R* residual, int channel, i64 at) {
  if constexpr (HasBias) sum += to_float(bias[channel]);
  if constexpr (HasResidual) sum += to_float(residual[at]);
  return activate<Kind>(sum);
}
