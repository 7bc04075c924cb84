// A tensor map as the harness writes it; the kernel's argument begins with its address.
#pragma once

namespace emulated {

constexpr unsigned long long kMapMagic = 0x7457696c65ull;

struct TensorMap {
  unsigned long long magic;
  char* base;
  unsigned long long sizes[5];
  unsigned long long strides[5];  // in bytes; that of the innermost is not read
  unsigned box[5];                // the extent that a copy walks, in elements of the tensor
  unsigned steps[5];
  unsigned rank, element_bytes, swizzle;
  unsigned im2col_pixels;  // 0: tiled
  unsigned im2col_channels;
  int lower[3], upper[3];
};

}  // namespace emulated
