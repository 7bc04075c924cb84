// SPDX-License-Identifier: MIT
// Loops over the threads of the team that a kernel was given.
#pragma once
#include <atomic>

#include "tilewise/abi.hpp"
#include "tilewise/vec.hpp"

#define TW_EXPORT extern "C" __attribute__((visibility("default")))

namespace tw {

TW_INLINE int64_t threads_of(const tw_team* team) { return team && team->threads > 1 ? team->threads : 1; }

// body(i) for every i in [0, count), on whichever threads are free.
template <class Body>
TW_INLINE void parallel_for(const tw_team* team, int64_t count, const Body& body) {
  if (count == 1 || threads_of(team) == 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  const auto task = [](void* context, int64_t index) { (*static_cast<const Body*>(context))(index); };
  team->parallel(team->state, task, const_cast<Body*>(&body), count);
}

// body(slot, i) for every i in [0, count). Slots number the loops that run at once, so each can own
// a part of the workspace; units go to whichever slot is free, which evens out slow cores.
template <class Body>
TW_INLINE void parallel_units(const tw_team* team, int64_t count, const Body& body) {
  std::atomic<int64_t> next{0};
  parallel_for(team, min_of(count, threads_of(team)), [&](int64_t slot) {
    for (int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < count;
         i = next.fetch_add(1, std::memory_order_relaxed))
      body(slot, i);
  });
}

// Hands out aligned parts of a workspace, or measures it when the base is null.
struct Arena {
  char* base;
  int64_t used = 0;
  template <class T>
  TW_INLINE T* take(int64_t count) {
    char* p = base + used;
    used += round_up(count * (int64_t)sizeof(T), 64);
    return reinterpret_cast<T*>(p);
  }
};

}  // namespace tw
