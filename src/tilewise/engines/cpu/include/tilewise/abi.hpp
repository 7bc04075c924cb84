// SPDX-License-Identifier: MIT
// The binary interface between tilewise and a compiled CPU kernel. Mirrored by the ops' abi.py.
#pragma once
#include <cstdint>

extern "C" {

// Runs task(context, i) for every i in [0, count) and returns when all are done.
struct tw_team {
  void* state;
  int64_t threads;
  void (*parallel)(void* state, void (*task)(void* context, int64_t index), void* context, int64_t count);
};

// Strides are in elements. C is row-major with unit column stride.
struct tw_gemm_args {
  const void* a;
  const void* b;
  void* c;
  void* workspace;  // 64-byte aligned, tw_workspace() bytes
  const tw_team* team;
  int64_t batch, m, n, k;
  int64_t a_batch, a_row, a_col;
  int64_t b_batch, b_row, b_col;
  int64_t c_batch, c_row;
};

// x is the forward input, w the filter, y the forward output; which one is written depends on the
// kernel's direction. Channel strides count single channels; group i owns channels [i c/g, (i+1) c/g).
// The filter has shape [k][c/g][z][y][x].
struct tw_conv_args {
  void* x;
  void* w;
  void* y;
  void* workspace;
  const tw_team* team;
  int64_t n, c, k, g;
  int64_t in[3], filter[3], out[3];  // depth, height, width
  int64_t stride[3], pad[3], dilation[3];
  int64_t x_n, x_c, x_s[3];
  int64_t w_k, w_c, w_s[3];
  int64_t y_n, y_k, y_s[3];
};

// Every kernel library exports, for its own args type:
//   int64_t tw_workspace(const Args*)   scratch bytes for these sizes and the team's threads
//   int32_t tw_run(const Args*)         0 when done
}
