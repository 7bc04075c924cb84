// @FACTS@
// Memory for the example.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

// An element's bytes, and its bits.
struct Pattern {
  size_t bytes;
  uint32_t bits;
};

class Memory {
 public:
  ~Memory() {
    for (void *one : held_) std::free(one);
  }
  void *allocate(size_t bytes) { return held_.emplace_back(std::calloc(bytes, 1)); }
  bool fill(void *at, size_t elements, Pattern with) {
    for (size_t i = 0; i < elements; ++i)
      std::memcpy(static_cast<char *>(at) + i * with.bytes, &with.bits, with.bytes);
    return true;
  }
  bool read(void *to, const void *from, size_t bytes) { return std::memcpy(to, from, bytes), true; }

 private:
  std::vector<void *> held_;
};
