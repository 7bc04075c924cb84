// SPDX-License-Identifier: MIT
// Multiply-adds that depend on nothing but themselves: as fast as the processor can.
#include <stdint.h>

typedef float vec __attribute__((vector_size(4 * TW_LANES)));

extern "C" __attribute__((visibility("default"))) float tw_peak(int64_t rounds) {
  vec sum[TW_CHAINS];
  const vec factor = {0.5f}, term = {1.0f};
  for (int i = 0; i < TW_CHAINS; ++i) sum[i] = term * (float)i;
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 32
    for (int i = 0; i < TW_CHAINS; ++i) sum[i] = sum[i] * factor + term;
  }
  float total = 0;
  for (int i = 0; i < TW_CHAINS; ++i)
    for (int lane = 0; lane < TW_LANES; ++lane) total += sum[i][lane];
  return total;
}
