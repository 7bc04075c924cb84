// mbarriers, barriers of the block and of the cluster, and what lanes of a warp tell each other.
#include "machine.hpp"

namespace emulated {

// mbarrier

void barrier_init(u32 address, u32 count) {
  const Spot spot = locate(address, 8, "mbarrier.init");
  if (address % 8) fail("a barrier at %u is not aligned to 8 bytes", address);
  if (!count) fail("a barrier of no arrivals");
  spot.block->barriers[spot.offset] = {count, long(count), 0, 0, {}};
}

Barrier& barrier_at(u32 address, const char* what) {
  const Spot spot = locate(address, 8, what);
  auto found = spot.block->barriers.find(spot.offset);
  if (found == spot.block->barriers.end()) fail("%s: no barrier was made at %u", what, spot.offset);
  return found->second;
}

static void advance(Barrier& barrier) {
  if (barrier.pending || barrier.bytes) return;
  barrier.phase++;
  barrier.pending = barrier.count;
  barrier.waiting.wake();
}

void arrive(Block* block, u32 offset, u32 count) {
  Barrier& barrier = block->barriers.at(offset);
  if (long(count) > barrier.pending)
    fail("barrier at %u takes %u arrivals a phase, and got more", offset, barrier.count);
  barrier.pending -= count;
  advance(barrier);
}

void complete_bytes(Block* block, u32 offset, u32 bytes) {
  auto found = block->barriers.find(offset);
  if (found == block->barriers.end()) fail("a copy completes on %u, where no barrier was made", offset);
  found->second.bytes -= bytes;
  advance(found->second);
}

void barrier_arrive(u32 address, u32 count) {
  barrier_at(address, "mbarrier.arrive");
  const Spot spot = locate(address, 8, "mbarrier.arrive");
  arrive(spot.block, spot.offset, count);
}

void barrier_expect(u32 address, u32 bytes, bool arrives) {
  Barrier& barrier = barrier_at(address, "mbarrier.expect_tx");
  barrier.bytes += bytes;
  if (barrier.bytes >= 1 << 20) fail("a barrier counts less than 2^20 bytes, not %ld", barrier.bytes);
  if (arrives) barrier_arrive(address, 1);
}

bool barrier_passed(u32 address, u32 parity) {
  Barrier& barrier = barrier_at(address, "mbarrier.test_wait");
  return (barrier.phase & 1) != (parity & 1);
}

void barrier_wait(u32 address, u32 parity) {
  Barrier& barrier = barrier_at(address, "mbarrier.try_wait");
  wait_until(barrier.waiting,
             {"barrier at %llu, parity %llu, in its phase %llu", address - kSharedStart, parity & 1,
              barrier.phase},
             [&] { return (barrier.phase & 1) != (parity & 1); });
}

// Barriers of the block and the cluster

static bool has_met(const NamedBarrier& barrier, const Block* block) {
  // A barrier of the whole block counts the threads that have not ended.
  const u32 expected = barrier.expected ? barrier.expected : u32(block->fibers.size()) - block->done;
  return barrier.arrived >= expected;
}

static NamedBarrier& join(u32 id, u32 threads) {
  if (id > 15) fail("barrier %u; there are 0 to 15", id);
  NamedBarrier& barrier = machine->running->block->named[id];
  if (barrier.arrived && barrier.expected != threads)
    fail("barrier %u with %u threads, where others said %u", id, threads, barrier.expected);
  if (threads % 32) fail("barrier %u with %u threads; use a multiple of 32", id, threads);
  barrier.expected = threads;
  barrier.arrived++;
  return barrier;
}

static void settle(NamedBarrier& barrier, const Block* block) {
  if (!has_met(barrier, block)) return;
  barrier.arrived = 0;
  barrier.round++;
  barrier.waiting.wake();
}

void block_sync(u32 id, u32 threads) {
  Block* block = machine->running->block;
  NamedBarrier& barrier = join(id, threads);
  const u64 round = barrier.round;
  settle(barrier, block);
  wait_until(barrier.waiting, {"barrier %llu of the block, %llu threads (0: all)", id, threads}, [&] {
    if (barrier.round == round) settle(barrier, block);
    return barrier.round != round;
  });
}

void block_arrive(u32 id, u32 threads) { settle(join(id, threads), machine->running->block); }

void cluster_arrive() {
  NamedBarrier& barrier = machine->cluster;
  machine->running->cluster_round = barrier.round;
  if (++barrier.arrived < machine->blocks.size() * machine->grid.threads) return;
  barrier.arrived = 0;
  barrier.round++;
  barrier.waiting.wake();
}

void cluster_wait() {
  const u64 round = machine->running->cluster_round;
  NamedBarrier& barrier = machine->cluster;
  wait_until(barrier.waiting, {"the barrier of the cluster"}, [&] { return barrier.round != round; });
}

// Steps

void wait_for_earlier_steps() {
  if (machine->has_waited) return;
  machine->has_waited = true;
  const Grid& g = machine->grid;
  for (u32 i = 0; i < g.hidden_count; i++)
    for (u64 at = 0; at < g.hidden[i].count; at++)
      if (g.hidden[i].is_missing[at]) g.hidden[i].at[at] = g.hidden[i].bytes[at];
}

// Warpgroups

void set_registers(u32 count, bool raises) {
  meet_warpgroup("setmaxnreg", nullptr, [&](Warpgroup& group, auto&) {
    Block* block = machine->running->block;
    if (raises ? count < group.registers : count > group.registers)
      fail("%s to %u registers, a thread has %u", raises ? "raised" : "lowered", count,
           group.registers);
    if (raises) {
      const u32 more = count - group.registers;
      wait_until(block->given_up, {"%llu registers a thread that nobody gives up", more},
                 [&] { return block->spare_registers >= more; });
      block->spare_registers -= more;
    } else {
      block->spare_registers += group.registers - count;
      block->given_up.wake();
    }
    group.registers = count;
  });
}

// Warps

void warp_sync(u32 mask) {
  meet("syncwarp", mask, nullptr, [](auto&, auto&) {});
}

u32 shuffle(u32 mask, u32 value, u32 source_lane) {
  struct Call {
    u32 value, source, result;
  } call{value, source_lane & 31, 0};
  meet("shuffle", mask, &call, [&](auto&, const std::vector<void*>& calls) {
    for (void* one : calls)
      if (one) {
        auto* mine = static_cast<Call*>(one);
        auto* source = static_cast<Call*>(calls[mine->source]);
        if (!source) fail("shuffle from lane %u, which is not in the mask", mine->source);
        mine->result = source->value;
      }
  });
  return call.result;
}

u32 ballot(u32 mask, bool value) {
  struct Call {
    bool value;
    u32 result;
  } call{value, 0};
  meet("ballot", mask, &call, [&](auto&, const std::vector<void*>& calls) {
    u32 all = 0;
    for (u32 lane = 0; lane < 32; lane++)
      if (calls[lane] && static_cast<Call*>(calls[lane])->value) all |= 1u << lane;
    for (void* one : calls)
      if (one) static_cast<Call*>(one)->result = all;
  });
  return call.result;
}

}  // namespace emulated
