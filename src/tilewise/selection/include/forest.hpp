// What a scorer is made of. The layout of both structs is mirrored in compiled.py.
#pragma once
#include <cstdint>

// A leaf whose bit is cleared in `keep` is out of reach for kernels whose bin in `row` is above
// `bound`. Both bytes are repeated four times: so a register is filled by a load alone.
struct tw_step {
  uint32_t row, bound, keep;
};

// Trees over bins. The leaves of a tree stand from left to right, eight to a byte. A node that
// sends a kernel right puts the leaves below its left side out of reach; the leftmost leaf that
// is left is the kernel's. Steps may be taken in any order, so they stand byte by byte.
struct tw_forest {
  int64_t trees, features;
  const int32_t *byte_start;  // where each tree's bytes begin
  const int32_t *step_start;  // where each byte's steps begin
  const int32_t *leaf_start;
  const tw_step *steps;
  const int32_t *leaves;  // and 128 more, as many as are loaded for a tree at most
  double scale, offset;
  // Per feature: where its row comes from (0 problem, 1 kernel, 2 mixed), which value that is,
  // and its thresholds.
  const int32_t *origin, *source;
  const double *const *thresholds;
  const int32_t *counts;
  const uint8_t *kernel_bins;
};

// The same trees as nodes: feature, bin, left and right child, a byte each; children below zero are
// leaves.
struct tw_walk {
  int64_t trees;
  const int32_t *node_start, *leaf_start;
  const uint32_t *nodes;
  const int32_t *leaves;
};

struct tw_context {
  int64_t kernels, blocks;
  double share;  // of an estimate's logarithm, that scores start from
  const double *arch;
  const double *kernel_values;
  const double *handicap;
  int64_t stride;
  const tw_forest *rank, *valid, *vendor;
  const uint8_t *is_vendor;  // per kernel; looked at where `vendor` is there
  // The level: a small forest over the problem's values, walked one node at a time.
  int64_t level_trees;
  const int32_t *level_start, *level_value, *level_left, *level_right;
  const double *level_bound, *level_leaf;
  const int32_t *level_leaf_start;
  double level_offset;
  int64_t points, axes;
  const double *point;  // axis by axis
  const int32_t *axis_value;
  double *far;
  // Results.
  int32_t *order;
  double *score;
  double *info;
  uint64_t *keys;
  // For choosing alone: the ranking's first trees, the vendor's as nodes, points in no order.
  const tw_forest *lead;
  const tw_walk *walk;
  const double *shuffled;
};
