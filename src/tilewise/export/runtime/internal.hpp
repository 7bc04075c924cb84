// What the parts of the library share; no part of the interface.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "launching.hpp"
#include "tilewise.h"

namespace tilewise::detail {

// Room that a caller gave for a sentence; cut where it is too long.
struct Text {
  char *at;
  size_t room;
  void put(const char *text) {
    const size_t size = std::strlen(text), fits = size < room ? size : room ? room - 1 : 0;
    if (!room) return;
    std::memcpy(at, text, fits);
    at += fits;
    room -= fits;
    *at = 0;
  }
  void put(int64_t number) {
    char digits[24];
    std::snprintf(digits, sizeof digits, "%lld", static_cast<long long>(number));
    put(digits);
  }
};

inline tilewise_status fail(Text *why, tilewise_status code, const char *text) {
  if (why) why->put(text);
  return code;
}

// ------------------------------------------------------- what rules and launches compute with

__extension__ typedef __int128 wide;

template <class A, class B>
auto floor_div(A a, B b) -> decltype(a + b) {
  const decltype(a + b) x = a, y = b;
  if (y == 0) return 0;  // never reached: callers check before they divide
  const auto quotient = x / y;
  return quotient * y != x && ((x < 0) != (y < 0)) ? quotient - 1 : quotient;
}
template <class A, class B>
auto ceil_div(A a, B b) -> decltype(a + b) {
  return -floor_div(-a, b);
}
template <class A, class B>
auto floor_mod(A a, B b) -> decltype(a + b) {
  return a - floor_div(a, b) * b;
}

template <class Cost>
struct Cheapest {
  Cost cost;
  int64_t place;
};
// The least cost of the numbers from `first` to `last`, and the first number that has it.
template <class Of>
auto cheapest(int64_t first, int64_t last, const Of &cost_of) -> Cheapest<decltype(cost_of(first))> {
  Cheapest<decltype(cost_of(first))> best{cost_of(first), first};
  for (int64_t at = first + 1; at <= last; ++at) {
    const auto cost = cost_of(at);
    if (cost < best.cost) best = {cost, at};
  }
  return best;
}

constexpr const char *kUnseen = "it was not exported for sizes like these";
inline bool unseen(Text *why) {
  if (why) why->put(kUnseen);
  return false;
}

// Which function of a kind serves, and where its numbers begin.
struct Row {
  int32_t function, numbers, fractions;
};

// Functions of a kind with the numbers they read, by row.
template <class Function>
struct Functions {
  const Function *functions;
  const int64_t *numbers;
  const double *fractions;
  const Row *rows;
  template <class... Rest>
  bool operator()(int32_t which, const int64_t *p, Text *why, Rest... rest) const {
    const Row &row = rows[which];
    return functions[row.function](p, numbers + row.numbers, fractions + row.fractions, why, rest...);
  }
};

// ------------------------------------------------------------------------------------- launches

using launching::kAddress, launching::kMap, launching::kNumber;
// Tensors of a call are numbered first, then comes the workspace; maps have numbers of their own.
using launching::Parameter;

// A TMA descriptor over a tensor of the call; dimensions innermost first.
struct Map {
  int32_t tensor = 0, type = 0, rank = 0, swizzle = 0, promotion = 0;
  bool is_im2col = false;
  int64_t offset = 0;
  uint64_t sizes[5] = {}, strides[4] = {};
  uint32_t box[5] = {}, steps[5] = {1, 1, 1, 1, 1};
  int32_t lower[3] = {}, upper[3] = {};
  uint32_t channels = 0, pixels = 0;
};

// One kernel, or with no object memory to clear: the first parameter, `clear_bytes` of it.
struct Step {
  int32_t object = -1;
  int64_t clear_bytes = 0;
  uint32_t grid[3] = {1, 1, 1}, cluster[3] = {1, 1, 1};
  bool overlaps = false;
  std::vector<Parameter> parameters;
};

// What a plan does; generated code fills it in.
struct Launch {
  std::vector<Step> steps;
  std::vector<Map> maps;
  int64_t workspace_bytes = 0, zeroed_bytes = 0;
  std::vector<int64_t> numbers;  // of a CPU kernel

  static constexpr uint32_t kWorkspace = 0xFFFF;

  Launch &kernel(int64_t object, int64_t x, int64_t y, int64_t z) {
    Step step;
    step.object = static_cast<int32_t>(object);
    step.grid[0] = static_cast<uint32_t>(x);
    step.grid[1] = static_cast<uint32_t>(y);
    step.grid[2] = static_cast<uint32_t>(z);
    steps.push_back(step);
    return *this;
  }
  Launch &cluster(int64_t x, int64_t y, int64_t z) {
    uint32_t *of = steps.back().cluster;
    of[0] = static_cast<uint32_t>(x), of[1] = static_cast<uint32_t>(y), of[2] = static_cast<uint32_t>(z);
    return *this;
  }
  Launch &overlaps() {
    steps.back().overlaps = true;
    return *this;
  }
  Launch &clear(int64_t bytes) {
    Step step;
    step.clear_bytes = bytes;
    steps.push_back(step);
    return *this;
  }
  Launch &tensor(int64_t which) { return give(kAddress, static_cast<uint32_t>(which), 0); }
  Launch &scratch(int64_t offset) { return give(kAddress, kWorkspace, static_cast<uint64_t>(offset)); }
  Launch &i32(int64_t value) { return give(kNumber, 0, static_cast<uint32_t>(value)); }
  Launch &i64(int64_t value) { return give(kNumber, 0, static_cast<uint64_t>(value)); }
  Launch &f32(double value) {
    const float narrow = static_cast<float>(value);
    uint32_t bits;
    std::memcpy(&bits, &narrow, 4);
    return give(kNumber, 0, bits);
  }
  Launch &map(const Map &given) {
    maps.push_back(given);
    return give(kMap, static_cast<uint32_t>(maps.size() - 1), 0);
  }
  Launch &needs(int64_t total, int64_t zeroed) {
    workspace_bytes = total;
    zeroed_bytes = zeroed;
    return *this;
  }

 private:
  Launch &give(uint32_t kind, uint32_t index, uint64_t number) {
    steps.back().parameters.push_back({kind, index, number});
    return *this;
  }
};

// ------------------------------------------------------------------------------------------ ops

// What a generated file says of its op.
struct Op {
  const char *name;
  int32_t sizes, words, tensors, kernels;
  const char *const *kernel_names;
  const char *why_no_case;
  const int32_t *word_counts;
  // The case of a problem, or below zero where it was not exported.
  int32_t (*case_of)(const int32_t *words, const int64_t *sizes);
  bool (*is_possible)(int32_t which, const int64_t *sizes, Text *why);
  bool (*is_usable)(int32_t kernel, int32_t which, const int64_t *sizes, Text *why);
  void (*rank)(const int64_t *sizes, const int32_t *words, int32_t *order, double *us);
  bool (*launch)(int32_t kernel, int32_t which, const int64_t *sizes, Launch *made, Text *why);
};
extern const Op *const ops[];
extern const char about[];

// ------------------------------------------------------------------------------------- the device

// Memory for results of a ranking, kept by each thread.
struct Scratch {
  std::vector<int32_t> order;
  std::vector<double> score;
  std::vector<uint64_t> keys;
};
Scratch &scratch_for(int64_t lanes);

struct Backend;
struct Ready;  // a launch that is bound to a device

std::shared_ptr<Backend> open_backend(const tilewise_options &options, Text *why);
// Null where the device cannot run it.
std::shared_ptr<Ready> make_ready(const std::shared_ptr<Backend> &backend, int32_t op,
                                  int32_t kernel, Launch &launch, Text *why);
tilewise_status run(const Ready &ready, const void *const *tensors, void *workspace, void *stream,
                    bool is_cleared, Text *why);
// What every address of a call must be a multiple of.
extern const uintptr_t address_alignment;

}  // namespace tilewise::detail
