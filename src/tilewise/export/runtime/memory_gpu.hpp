// @FACTS@
// Memory of the device for the example, through the driver that the library has opened.
#pragma once
#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <vector>

// An element's bytes, and its bits.
struct Pattern {
  size_t bytes;
  uint32_t bits;
};

class Memory {
 public:
  Memory() {
    void *driver = dlopen("@DRIVER@", RTLD_NOW);
    find(driver, "@ALLOCATE@", allocate_);
    find(driver, "@TO_DEVICE@", to_device_);
    find(driver, "@TO_HOST@", to_host_);
    find(driver, "@FREE@", free_);
  }
  ~Memory() {
    for (void *one : held_)
      if (free_) free_(one);
  }
  void *allocate(size_t bytes) {
    void *made = nullptr;
    if (!allocate_ || allocate_(&made, bytes)) return nullptr;
    return held_.emplace_back(made);
  }
  bool fill(void *at, size_t elements, Pattern with) {
    std::vector<unsigned char> filled(elements * with.bytes);
    for (size_t i = 0; i < elements; ++i) std::memcpy(&filled[i * with.bytes], &with.bits, with.bytes);
    return to_device_ && !to_device_(at, filled.data(), filled.size());
  }
  // Waits for what was launched on the stream 0.
  bool read(void *to, const void *from, size_t bytes) { return to_host_ && !to_host_(to, from, bytes); }

 private:
  template <class Function>
  void find(void *driver, const char *name, Function &found) {
    found = driver ? reinterpret_cast<Function>(dlsym(driver, name)) : nullptr;
  }
  int (*allocate_)(void **, size_t);
  int (*to_device_)(void *, const void *, size_t);
  int (*to_host_)(void *, const void *, size_t);
  int (*free_)(void *);
  std::vector<void *> held_;
};
