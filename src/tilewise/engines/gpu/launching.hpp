// What a kernel is given, and how NVIDIA's and AMD's drivers are asked to start it.
#pragma once
#include <cstdint>
#include <cstring>

namespace launching {

constexpr uint32_t kMostParameters = 256, kMostMaps = 16, kMapBytes = 128;

enum Kind : uint32_t { kNumber = 0, kAddress = 1, kMap = 2 };

struct Parameter {
  uint32_t kind, index;  // of the call's values
  uint64_t number;       // its bits, or what is added to the address
};

struct Shape {
  uint32_t grid[3], cluster[3], threads, smem_bytes;
  uint32_t overlaps;  // whether it may begin before the kernel before it has ended
};

// CUDA's launch configuration and its attributes, as the driver reads them.
struct Attribute {
  int32_t id, padding;
  uint32_t value[16];
};
static_assert(sizeof(Attribute) == 72, "an id, padding, and a union of 64 bytes");
struct Configuration {
  uint32_t grid[3], block[3], smem_bytes;
  void *stream;
  Attribute *attributes;
  uint32_t count;
};
constexpr int32_t kClusterDimension = 4, kOverlapping = 6;

using CudaLaunch = int (*)(const Configuration *, void *function, void **parameters, void **extra);
using HipLaunch = int (*)(void *function, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t smem,
                          void *stream, void **parameters, void **extra);

inline int on_cuda(CudaLaunch launch, const Shape &shape, void *function, void *stream, void **parameters) {
  Attribute attributes[2];
  Configuration made{};
  if (shape.cluster[0] * shape.cluster[1] * shape.cluster[2] > 1) {
    Attribute &cluster = attributes[made.count++] = {};
    cluster.id = kClusterDimension;
    std::memcpy(cluster.value, shape.cluster, sizeof shape.cluster);
  }
  if (shape.overlaps) {
    Attribute &overlapping = attributes[made.count++] = {};
    overlapping.id = kOverlapping;
    overlapping.value[0] = 1;
  }
  std::memcpy(made.grid, shape.grid, sizeof shape.grid);
  made.block[0] = shape.threads;
  made.block[1] = made.block[2] = 1;
  made.smem_bytes = shape.smem_bytes;
  made.stream = stream;
  made.attributes = made.count ? attributes : nullptr;
  return launch(&made, function, parameters, nullptr);
}

inline int on_hip(HipLaunch launch, const Shape &shape, void *function, void *stream, void **parameters) {
  const uint32_t *grid = shape.grid;
  return launch(function, grid[0], grid[1], grid[2], shape.threads, 1, 1, shape.smem_bytes, stream, parameters,
                nullptr);
}

}  // namespace launching
