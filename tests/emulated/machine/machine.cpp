#include "machine.hpp"

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstring>

#include "fiber.hpp"

namespace emulated {

Machine* machine = nullptr;
const Place* here = nullptr;

namespace {

constexpr unsigned long kStackBytes = 256 * 1024;

void* scheduler_stack = nullptr;
sigjmp_buf on_failure;
std::vector<char*> stacks;  // kept between runs

std::string who(const Fiber& fiber) {
  char text[96];
  const Dim& b = fiber.place.block;
  snprintf(text, sizeof text, "block (%u, %u, %u), thread %u", b.x, b.y, b.z, fiber.place.thread.x);
  return text;
}

char* stack_of(size_t index) {
  while (stacks.size() <= index) {
    void* made = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    stacks.push_back(static_cast<char*>(made));
  }
  return stacks[index];
}

void leave_fiber() { switch_stack(&machine->running->stack, scheduler_stack); }

void fiber_main() {
  machine->body();
  Fiber* self = machine->running;
  self->is_done = true;
  self->block->done++;
  // Those that wait for all threads of the block now wait for one less.
  for (NamedBarrier& named : self->block->named) named.waiting.wake();
  leave_fiber();
}

void run_fiber(Fiber* fiber) {
  machine->running = fiber;
  here = &fiber->place;
  switch_stack(&scheduler_stack, fiber->stack);
  machine->running = nullptr;
}

std::unique_ptr<Block> make_block(u32 rank, Dim at, size_t first_stack) {
  const Grid& g = machine->grid;
  auto block = std::make_unique<Block>();
  block->rank = rank;
  block->shared.assign(kSharedBytes / 2, kPoison);
  block->unfenced.assign(kSharedBytes / 16, 0);
  const u32 cluster_size = g.cluster[0] * g.cluster[1] * g.cluster[2];
  block->place = {{0, 0, 0}, at, {g.threads, 1, 1}, {g.grid[0], g.grid[1], g.grid[2]}, rank,
                  cluster_size};
  block->warpgroups.resize((g.threads + 127) / 128);
  for (Warpgroup& group : block->warpgroups) group.registers = kRegisters / g.threads / 8 * 8;
  for (u32 i = 0; i < g.threads; i++) {
    if (i % 32 == 0) {
      block->warps.push_back(std::make_unique<Warp>());
      block->warps.back()->index = i / 32;
    }
    Warp* warp = block->warps.back().get();
    auto fiber = std::make_unique<Fiber>();
    fiber->place = block->place;
    fiber->place.thread.x = i;
    fiber->block = block.get();
    fiber->warp = warp;
    fiber->lane = i % 32;
    fiber->stack = fresh_stack(stack_of(first_stack + i), kStackBytes, fiber_main);
    warp->lanes.push_back(fiber.get());
    warp->ready |= 1u << fiber->lane;
    block->fibers.push_back(std::move(fiber));
  }
  return block;
}

void report_deadlock() {
  std::string text = "deadlock: every thread waits and nothing is under way\n";
  for (auto& block : machine->blocks)
    for (auto& warp : block->warps) {
      std::map<std::string, std::vector<u32>> by_reason;
      for (Fiber* f : warp->lanes)
        if (!f->is_done) by_reason[f->waits_for.text()].push_back(f->place.thread.x);
      for (auto& [reason, threads] : by_reason) {
        char line[256];
        snprintf(line, sizeof line, "  block (%u, %u, %u), %zu threads of warp %u from %u: %s\n",
                 block->place.block.x, block->place.block.y, block->place.block.z, threads.size(),
                 warp->index, threads.front(), reason.c_str());
        text += line;
      }
    }
  for (auto& block : machine->blocks)
    for (auto& [offset, barrier] : block->barriers)
      if (barrier.pending != barrier.count || barrier.bytes) {
        char line[160];
        snprintf(line, sizeof line,
                 "  barrier at %u of rank %u: phase %llu lacks %ld of %u arrivals and %ld bytes\n",
                 offset + kSharedStart, block->rank, barrier.phase, barrier.pending, barrier.count,
                 barrier.bytes);
        text += line;
      }
  fail("%s", text.c_str());
}

void land_one() {
  auto& pending = machine->pending;
  size_t at = machine->random() % pending.size();
  if (const void* stream = pending[at].stream)
    at = std::find_if(pending.begin(), pending.end(),
                      [&](const Async& a) { return a.stream == stream; }) - pending.begin();
  Async async = std::move(pending[at]);
  pending.erase(pending.begin() + at);
  async.land();
}

void run_warp(Warp* warp) {
  u32 lanes = warp->ready;
  warp->ready = 0;
  for (Fiber* fiber : warp->lanes)
    if (lanes >> fiber->lane & 1) run_fiber(fiber);
}

void check_end() {
  if (machine->pending.empty()) return;
  const Async& left = machine->pending.front();
  const Dim& b = left.block->place.block;
  fail("block (%u, %u, %u) ended while %zu copies were under way, the first: %s", b.x, b.y, b.z,
       machine->pending.size(), left.what);
}

void on_signal(int signal, siginfo_t* info, void*) {
  const std::string by = machine->running ? who(*machine->running) : "copy";
  if (signal == SIGFPE)
    snprintf(machine->report, machine->report_bytes, "%s: a division by zero", by.c_str());
  else
    snprintf(machine->report, machine->report_bytes, "%s: access to %p outside of every tensor (%s)",
             by.c_str(), info->si_addr, strsignal(signal));
  siglongjmp(on_failure, 1);
}

}  // namespace

void Machine::run_cluster(Dim first) {
  blocks.clear();
  pending.clear();
  cluster = {};
  u32 rank = 0;
  for (u32 z = 0; z < grid.cluster[2]; z++)
    for (u32 y = 0; y < grid.cluster[1]; y++)
      for (u32 x = 0; x < grid.cluster[0]; x++, rank++)
        blocks.push_back(make_block(rank, {first.x + x, first.y + y, first.z + z},
                                    size_t(rank) * grid.threads));
  // How often a copy lands although threads could run: often, seldom, or hardly ever.
  const u64 rarity = 4ull << (3 * (grid.seed % 3));
  std::vector<Warp*> ready;
  for (;;) {
    ready.clear();
    u32 alive = 0;
    for (auto& block : blocks) {
      alive += block->fibers.size() - block->done;
      for (auto& warp : block->warps)
        if (warp->ready) ready.push_back(warp.get());
    }
    if (!alive) break;
    const bool is_random = grid.seed != 0;
    if (!pending.empty() && (ready.empty() || (is_random && random() % rarity == 0)))
      land_one();
    else if (ready.empty())
      report_deadlock();
    else
      run_warp(ready[is_random ? random() % ready.size() : 0]);
  }
  check_end();
}

int run(const Grid& grid, void (*body)(void**), void** arguments, char* report, u32 report_bytes) {
  Machine mine;
  machine = &mine;
  mine.grid = grid;
  mine.report = report;
  mine.report_bytes = report_bytes;
  mine.random.seed(grid.seed);
  mine.body = [=] { body(arguments); };
  static char signal_stack[64 * 1024];
  stack_t alternate{}, before_stack{};
  alternate.ss_sp = signal_stack;
  alternate.ss_size = sizeof signal_stack;
  struct sigaction action {}, before_segv{}, before_bus{}, before_fpe{};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaltstack(&alternate, &before_stack);
  sigaction(SIGSEGV, &action, &before_segv);
  sigaction(SIGBUS, &action, &before_bus);
  sigaction(SIGFPE, &action, &before_fpe);
  const int failed = sigsetjmp(on_failure, 1);
  if (!failed) {
    if (grid.smem_bytes > 227 * 1024) fail("%u bytes of shared memory; 232448 exist", grid.smem_bytes);
    const u32* c = grid.cluster;
    for (int i = 0; i < 3; i++)
      if (grid.grid[i] % c[i]) fail("a grid of %u is no multiple of its cluster", grid.grid[i]);
    for (u32 z = 0; z < grid.grid[2]; z += c[2])
      for (u32 y = 0; y < grid.grid[1]; y += c[1])
        for (u32 x = 0; x < grid.grid[0]; x += c[0]) mine.run_cluster({x, y, z});
    if (grid.hidden_count && !mine.has_waited) fail("it ends without waiting for the steps before it");
  }
  sigaction(SIGSEGV, &before_segv, nullptr);
  sigaction(SIGBUS, &before_bus, nullptr);
  sigaction(SIGFPE, &before_fpe, nullptr);
  sigaltstack(&before_stack, nullptr);
  machine = nullptr;
  return failed;
}

void fail(const char* format, ...) {
  std::string text = machine->running ? who(*machine->running) + ": " : "";
  char message[8192];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  snprintf(machine->report, machine->report_bytes, "%s%s", text.c_str(), message);
  siglongjmp(on_failure, 1);
}

std::string Reason::text() const {
  char buffer[160];
  snprintf(buffer, sizeof buffer, format, a, b, c);
  return buffer;
}

void Queue::wake() {
  for (Fiber* fiber : waiting)
    if (!fiber->is_done) fiber->warp->ready |= 1u << fiber->lane;
  waiting.clear();
}

void wait_on(Queue& queue, Reason reason) {
  Fiber* self = machine->running;
  self->waits_for = reason;
  queue.waiting.push_back(self);
  leave_fiber();
  here = &self->place;
}

void meet(const char* what, u32 mask, void* argument,
          const std::function<void(const std::vector<Fiber*>&, const std::vector<void*>&)>& act) {
  Fiber* self = machine->running;
  Warp* warp = self->warp;
  if (!(mask >> self->lane & 1)) fail("%s with a mask of %#x that lacks the lane itself", what, mask);
  Meeting& meeting = warp->meetings[mask];
  if (!meeting.what) {
    meeting.what = what;
    meeting.arguments.assign(32, nullptr);
    meeting.arrived = 0;
  }
  if (strcmp(meeting.what, what))
    fail("lanes of warp %u part: some are at %s, others at %s", warp->index, meeting.what, what);
  meeting.arguments[self->lane] = argument;
  meeting.arrived |= 1u << self->lane;
  if (meeting.arrived == mask) {
    act(warp->lanes, meeting.arguments);
    meeting.what = nullptr;
    meeting.round++;
    meeting.waiting.wake();
    return;
  }
  const u64 round = meeting.round;
  wait_until(meeting.waiting, {"the other lanes of mask %#llx at an instruction of the warp", mask},
             [&] { return meeting.round != round; });
}

void meet_warpgroup(const char* what, void* argument,
                    const std::function<void(Warpgroup&, const std::vector<void*>&)>& act) {
  Fiber* self = machine->running;
  const u32 index = self->place.thread.x / 128, at = self->place.thread.x % 128;
  if ((index + 1) * 128 > self->block->fibers.size())
    fail("%s in warps that are no whole warpgroup", what);
  Warpgroup& group = self->block->warpgroups[index];
  Meeting& meeting = group.meeting;
  if (!meeting.what) {
    meeting.what = what;
    meeting.arguments.assign(128, nullptr);
    meeting.arrived = 0;
  }
  if (strcmp(meeting.what, what))
    fail("warps of warpgroup %u part: some are at %s, others at %s", index, meeting.what, what);
  meeting.arguments[at] = argument;
  if (++meeting.arrived == 128) {
    act(group, meeting.arguments);
    meeting.what = nullptr;
    meeting.round++;
    meeting.waiting.wake();
    return;
  }
  const u64 round = meeting.round;
  wait_until(meeting.waiting, {"the rest of warpgroup %llu at a wgmma instruction", index},
             [&] { return meeting.round != round; });
}

// Shared memory

u32 shared_start() { return kSharedStart; }

u32 at_rank(u32 address, u32 rank) {
  if (rank >= machine->blocks.size()) fail("rank %u of a cluster of %zu", rank, machine->blocks.size());
  return (address & ((1u << kRankShift) - 1)) | (rank + 1) << kRankShift;
}

Spot locate(u32 address, u32 bytes, const char* what) {
  const u32 rank = address >> kRankShift, plain = address & ((1u << kRankShift) - 1);
  Block* block = rank ? machine->blocks.at(rank - 1).get() : machine->running->block;
  if (block->done == block->fibers.size())
    fail("%s in block %u of the cluster, whose threads have all ended", what, block->rank);
  const u32 offset = plain - kSharedStart;
  if (plain < kSharedStart || offset + bytes > machine->grid.smem_bytes)
    fail("%s of %u bytes at %d of %u bytes of shared memory", what, bytes, int(offset),
         machine->grid.smem_bytes);
  return {block, offset};
}

void poison(Spot spot, u32 bytes, const char* what) {
  auto barrier = spot.block->barriers.lower_bound(spot.offset);
  if (barrier != spot.block->barriers.end() && barrier->first < spot.offset + bytes)
    fail("%s of %u bytes at %u runs over the barrier at %u", what, bytes, spot.offset,
         barrier->first);
  auto* words = reinterpret_cast<u16*>(bytes_of(spot));
  std::fill(words, words + bytes / 2, kPoison);
}

void note_generic_write(Spot spot, u32 bytes) {
  Fiber* self = machine->running;
  for (u32 chunk = spot.offset / 16; chunk <= (spot.offset + bytes - 1) / 16; chunk++) {
    spot.block->unfenced[chunk] = u16(self->place.thread.x + 1);
    self->unfenced.push_back(chunk);
  }
}

void note_async_write(Spot spot, u32 bytes) {
  for (u32 chunk = spot.offset / 16; chunk <= (spot.offset + bytes - 1) / 16; chunk++)
    spot.block->unfenced[chunk] = 0;
}

void check_fenced(Spot spot, u32 bytes, const char* what) {
  for (u32 chunk = spot.offset / 16; chunk <= (spot.offset + bytes - 1) / 16; chunk++)
    if (const u16 writer = spot.block->unfenced[chunk])
      fail("%s reads shared memory at %u, which thread %u wrote without a fence for asynchronous "
           "readers", what, chunk * 16, writer - 1);
}

void fence_async_proxy() {
  Fiber* self = machine->running;
  const u16 mine = u16(self->place.thread.x + 1);
  for (u32 chunk : self->unfenced)
    if (self->block->unfenced[chunk] == mine) self->block->unfenced[chunk] = 0;
  self->unfenced.clear();
}

u16 checked(const unsigned char* at, Spot spot, const char* what) {
  u16 value;
  memcpy(&value, at, 2);
  if (value == kPoison)
    fail("%s reads shared memory at %ld that nothing has written, or that a copy is still to fill",
         what, long(at - bytes_of({spot.block, 0})));
  return value;
}

void read_shared(u32 address, void* to, u32 bytes) {
  if (address % bytes) fail("a read of %u bytes at %u is not aligned", bytes, address);
  const Spot spot = locate(address, bytes, "read");
  if (bytes % 2 == 0) checked(bytes_of(spot), spot, "a read");
  memcpy(to, bytes_of(spot), bytes);
}

void write_shared(u32 address, const void* from, u32 bytes) {
  if (address % bytes) fail("a write of %u bytes at %u is not aligned", bytes, address);
  const Spot spot = locate(address, bytes, "write");
  memcpy(bytes_of(spot), from, bytes);
  note_generic_write(spot, bytes);
}

void add_shared(u32 address, float value) {
  float old;
  read_shared(address, &old, 4);
  old += value;
  write_shared(address, &old, 4);
}

void add_global(float* to, float value) { *to += value; }

}  // namespace emulated
