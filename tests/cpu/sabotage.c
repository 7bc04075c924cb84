// SPDX-License-Identifier: MIT
// Matrix products that go wrong in every way a kernel can; compiled by the fault suite.
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int trapped = 0, snared = 0;

// C[m][n] = A[m][k] * B[n][k], all row-major.
static void product(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t l = 0; l < k; ++l) sum += (double)a[i * k + l] * b[j * k + l];
      c[i * n + j] = (float)sum;
    }
}

// Takes all memory but the last 32 MB, which whoever comes next can live on for a while.
static void exhaust(void) {
  char *last[32] = {0}, *block;
  for (int i = 0; (block = malloc(1 << 20)) != NULL; i = (i + 1) % 32) {
    memset(block, 1, 1 << 20);
    last[i] = block;
  }
  for (int i = 0; i < 32; ++i) free(last[i]);
}

int run(const char* deed, float* a, float* b, float* c, int64_t m, int64_t n, int64_t k) {
  if (trapped && strcmp(deed, "trap")) *(volatile int*)8 = 1;
  if (snared && strcmp(deed, "snare")) sleep(600);
  if (!strcmp(deed, "spin"))
    for (volatile int64_t i = 0;; ++i) {}
  if (!strcmp(deed, "sleep")) sleep(600);
  if (!strcmp(deed, "segfault")) *(volatile int*)8 = 1;
  if (!strcmp(deed, "abort")) abort();
  if (!strcmp(deed, "quit")) exit(0);
  if (!strcmp(deed, "vanish")) raise(SIGKILL);
  if (!strcmp(deed, "refuse")) return 7;
  if (!strcmp(deed, "heap")) {
    char* small = malloc(24);
    memset(small, 0x5a, 1 << 16);
    free(small);
    free(malloc(1 << 20));
    abort();
  }
  if (!strcmp(deed, "hog")) {
    exhaust();
    fprintf(stderr, "terminate called after throwing an instance of 'std::bad_alloc'\n");
    abort();
  }
  product(a, b, c, m, n, k);
  if (!strcmp(deed, "wrong")) c[0] += 1.0f + c[0];
  if (!strcmp(deed, "nothing")) memset(c, 0xff, sizeof(float) * m * n);
  if (!strcmp(deed, "zeros")) memset(c, 0, sizeof(float) * m * n);
  if (!strcmp(deed, "overrun")) c[m * n] = 1.0f;
  if (!strcmp(deed, "spoil")) memset(a, 0, sizeof(float) * m * k);
  if (!strcmp(deed, "trap")) trapped = 1;
  if (!strcmp(deed, "snare")) snared = 1;
  if (!strcmp(deed, "leak")) exhaust();
  if (!strcmp(deed, "babble"))
    for (int i = 0; i < 50; ++i) printf("{\"event\": \"result\", \"id\": 0, \"status\": \"ok\"}\n");
  fflush(stdout);
  return 0;
}
