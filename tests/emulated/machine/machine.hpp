// The machine inside: fibers, warps, blocks of one cluster, and copies that are under way.
#pragma once

#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "vocabulary.hpp"

namespace emulated {

constexpr u32 kSharedBytes = 256 * 1024;
constexpr u32 kSharedStart = 1040;  // address of the first dynamic byte: CUDA promises 16 of alignment
constexpr u16 kPoison = 0xFFA5;  // a NaN in bf16, fp16 and, twice, in fp32
constexpr u32 kRankShift = 24;   // an address that names a rank has rank + 1 above this bit
constexpr u32 kAllLanes = 0xFFFFFFFFu;
constexpr u32 kRegisters = 65536;  // of a multiprocessor, which such a block has for itself

struct Fiber;
struct Warp;
struct Block;

// Fibers that wait for one thing.
struct Queue {
  std::vector<Fiber*> waiting;
  void wake();
};

struct Reason {
  const char* format = "";
  u64 a = 0, b = 0, c = 0;
  std::string text() const;
};

// cp.async or bulk copies of one thread, in the groups that it committed.
struct Groups {
  std::deque<std::shared_ptr<int>> committed;  // how many of each are still to land
  std::shared_ptr<int> open = std::make_shared<int>(0);
  Queue landed;
  void commit();
  bool at_most(u32 groups_left);
};

struct Fiber {
  Place place;
  Block* block = nullptr;
  Warp* warp = nullptr;
  u32 lane = 0;
  bool is_done = false;
  void* stack = nullptr;  // where it goes on
  Reason waits_for;
  u64 cluster_round = 0;
  Groups copies, bulk;
  std::vector<u64> copies_out;  // cp.async not landed, by number
  u64 copies_issued = 0;
  std::vector<std::pair<u64, u32>> arrivals;  // (all before this number, barrier)
  std::vector<u32> unfenced;                  // chunks of shared memory written, not yet fenced
};

// Lanes of a warp (or threads of a warpgroup) that meet in one instruction.
struct Meeting {
  const char* what = nullptr;
  u64 mask = 0;
  u32 arrived = 0;
  u64 round = 0;
  std::vector<void*> arguments;  // by lane
  std::vector<bool> is_here;
  Queue waiting;
};

struct Warp {
  u32 index = 0;
  std::vector<Fiber*> lanes;
  u32 ready = 0;  // mask
  std::map<u32, Meeting> meetings;
};

struct Warpgroup {
  Meeting meeting;
  std::shared_ptr<int> open = std::make_shared<int>(0);
  std::deque<std::shared_ptr<int>> committed;
  Queue landed;
  bool is_fenced = false;
  u32 registers = 0;  // of a thread
};

struct Barrier {
  u32 count;
  long pending;
  long bytes = 0;
  u64 phase = 0;
  Queue waiting;
};

struct NamedBarrier {
  u32 arrived = 0, expected = 0;
  u64 round = 0;
  Queue waiting;
};

struct Block {
  Place place;
  u32 rank = 0;
  std::vector<u16> shared;    // kSharedBytes, of which smem_bytes may be used
  std::vector<u16> unfenced;  // by 16-byte chunk: thread + 1 that wrote it
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<Warpgroup> warpgroups;
  std::map<u32, Barrier> barriers;
  NamedBarrier named[16];
  u32 spare_registers = 0;  // which warpgroups gave up, for each thread of one
  Queue given_up;
  u32 done = 0;
};

// Something the hardware does on its own time.
struct Async {
  const char* what;
  Block* block;
  const void* stream;  // those of one stream land in order; null: in any
  std::function<void()> land;
};

struct Machine {
  Grid grid;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<Async> pending;
  std::mt19937_64 random;
  NamedBarrier cluster;
  bool has_waited = false;  // for the steps before this one
  Fiber* running = nullptr;
  std::function<void()> body;
  char* report = nullptr;
  u32 report_bytes = 0;

  void run_cluster(Dim first);
  void start(Async async) { pending.push_back(std::move(async)); }
};

extern Machine* machine;

// Stops the running fiber until `queue` is woken.
void wait_on(Queue& queue, Reason reason);

template <class Ready>
void wait_until(Queue& queue, Reason reason, Ready is_ready) {
  while (!is_ready()) wait_on(queue, reason);
}

// Brings the lanes of `mask` together; `act` runs once, on the last to come, with everyone's
// arguments.
void meet(const char* what, u32 mask, void* argument,
          const std::function<void(const std::vector<Fiber*>&, const std::vector<void*>&)>& act);
void meet_warpgroup(const char* what, void* argument,
                    const std::function<void(Warpgroup&, const std::vector<void*>&)>& act);

struct Spot {
  Block* block;
  u32 offset;  // in `block->shared`
};

// Where an address lies; fails outside of the block's shared memory.
Spot locate(u32 address, u32 bytes, const char* what);
inline unsigned char* bytes_of(Spot spot) {
  return reinterpret_cast<unsigned char*>(spot.block->shared.data()) + spot.offset;
}

void poison(Spot spot, u32 bytes, const char* what);
void note_generic_write(Spot spot, u32 bytes);
void note_async_write(Spot spot, u32 bytes);
void check_fenced(Spot spot, u32 bytes, const char* what);
u16 checked(const unsigned char* at, Spot spot, const char* what);  // fails on poison
Barrier& barrier_at(u32 address, const char* what);
void complete_bytes(Block* block, u32 offset, u32 bytes);
void arrive(Block* block, u32 offset, u32 count);

}  // namespace emulated
