// SPDX-License-Identifier: MIT
// The threads that CPU kernels share.
//
// A submitter opens a job, works on it like everyone else, closes it when every index has been
// claimed, and waits only for the workers that joined: one that wakes late finds the job closed and
// costs nothing. Workers spin for a moment after a job, because kernels often come in quick
// succession, then sleep. A team that is busy, or that a fork left without threads, runs the job on
// the calling thread.
//
// A team may borrow the threads of another library's OpenMP runtime instead: two sets of threads
// that both spin after their work would take the cores from each other.
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "tilewise/abi.hpp"

namespace {

constexpr uint64_t kOpen = 1ull << 32, kEpoch = 1ull << 33, kJoined = kOpen - 1;
// About 30 us on cores where a pause takes 140 cycles, 5 us where it takes 40.
constexpr int kSpins = 800;

std::atomic<uint64_t> forks{0};
pthread_once_t watch_forks = PTHREAD_ONCE_INIT;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// An OpenMP runtime's own entry points.
struct Runtime {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel
  int (*max_threads)();
  int (*in_parallel)();
};

struct alignas(64) Team {
  tw_team face{};
  Runtime runtime{};
  uint64_t born = 0;
  std::atomic<bool> is_busy{false};
  std::atomic<bool> is_stopping{false};
  void (*task)(void*, int64_t) = nullptr;
  void* context = nullptr;
  int64_t count = 0;

  // Epoch, open bit and number of workers that joined, changed together.
  alignas(64) std::atomic<uint64_t> job{0};
  alignas(64) std::atomic<int64_t> next{0};
  alignas(64) std::atomic<uint64_t> left{0};

  alignas(64) pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
  std::atomic<int64_t> sleepers{0};
  pthread_t* workers = nullptr;
  int64_t started = 0;

  void work() {
    const int64_t total = count;
    void (*const run)(void*, int64_t) = task;
    void* const argument = context;
    for (int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < total;
         i = next.fetch_add(1, std::memory_order_relaxed))
      run(argument, i);
  }

  void submit(void (*new_task)(void*, int64_t), void* new_context, int64_t new_count) {
    task = new_task;
    context = new_context;
    count = new_count;
    next.store(0, std::memory_order_relaxed);
    left.store(0, std::memory_order_relaxed);
    // Sequentially consistent with the sleepers count: either the worker sees the job or we see it.
    job.store((job.load(std::memory_order_relaxed) & ~(kEpoch - 1)) + kEpoch + kOpen);
    if (sleepers.load() > 0) {
      pthread_mutex_lock(&lock);
      pthread_mutex_unlock(&lock);
      pthread_cond_broadcast(&wake);
    }
    work();
    const uint64_t joined = job.fetch_and(~kOpen, std::memory_order_acq_rel) & kJoined;
    for (int spins = 0; left.load(std::memory_order_acquire) != joined; ++spins) {
      if (spins < kSpins)
        pause();
      else
        sched_yield();
    }
  }

  void loop() {
    uint64_t seen = 0;
    for (;;) {
      uint64_t now = await_job(seen);
      if (is_stopping.load(std::memory_order_relaxed)) return;
      seen = now / kEpoch;
      while (now & kOpen && now / kEpoch == seen) {
        if (job.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) {
          work();
          left.fetch_add(1, std::memory_order_release);
          break;
        }
      }
    }
  }

  // The state of a job that is not the one numbered `seen`.
  uint64_t await_job(uint64_t seen) {
    for (int spins = 0; spins < kSpins; ++spins) {
      const uint64_t now = job.load(std::memory_order_acquire);
      if (now / kEpoch != seen || is_stopping.load(std::memory_order_relaxed)) return now;
      pause();
    }
    pthread_mutex_lock(&lock);
    sleepers.fetch_add(1);
    uint64_t now;
    while ((now = job.load()) / kEpoch == seen && !is_stopping.load()) pthread_cond_wait(&wake, &lock);
    sleepers.fetch_sub(1);
    pthread_mutex_unlock(&lock);
    return now;
  }
};

void parallel(void* state, void (*task)(void*, int64_t), void* context, int64_t count) {
  Team& team = *static_cast<Team*>(state);
  const bool is_alone = count <= 1 || team.started == 0 || team.born != forks.load(std::memory_order_relaxed);
  if (is_alone || team.is_busy.exchange(true, std::memory_order_acquire)) {
    for (int64_t i = 0; i < count; ++i) task(context, i);
    return;
  }
  team.submit(task, context, count);
  team.is_busy.store(false, std::memory_order_release);
}

struct Job {
  void (*task)(void*, int64_t);
  void* context;
  int64_t count;
  std::atomic<int64_t> next{0};
};

void share(void* data) {
  Job& job = *static_cast<Job*>(data);
  for (int64_t i = job.next.fetch_add(1, std::memory_order_relaxed); i < job.count;
       i = job.next.fetch_add(1, std::memory_order_relaxed))
    job.task(job.context, i);
}

// All of the runtime's threads, as its other users take: teams of changing sizes would end and
// start threads. A child of a fork has none of them, and some runtimes would wait for them forever.
void borrowed(void* state, void (*task)(void*, int64_t), void* context, int64_t count) {
  Team& team = *static_cast<Team*>(state);
  const Runtime& runtime = team.runtime;
  const int threads = count > 1 && team.born == forks.load(std::memory_order_relaxed) ? runtime.max_threads() : 1;
  if (threads <= 1 || runtime.in_parallel()) {
    for (int64_t i = 0; i < count; ++i) task(context, i);
    return;
  }
  Job job{task, context, count};
  runtime.parallel(share, &job, static_cast<unsigned>(threads), 0);
}

void* enter(void* team) {
  static_cast<Team*>(team)->loop();
  return nullptr;
}

}  // namespace

extern "C" {

// From now on jobs run on the threads of an OpenMP runtime, as many as it gives its other users.
// The team's own sleep from then on; jobs are cut for `threads` as before.
__attribute__((visibility("default"))) void tw_team_borrow(tw_team* face, void* parallel, void* max_threads,
                                                           void* in_parallel) {
  Team* team = static_cast<Team*>(face->state);
  team->runtime = {reinterpret_cast<decltype(Runtime::parallel)>(parallel),
                   reinterpret_cast<decltype(Runtime::max_threads)>(max_threads),
                   reinterpret_cast<decltype(Runtime::in_parallel)>(in_parallel)};
  __atomic_store_n(&face->parallel, &borrowed, __ATOMIC_RELEASE);
}

__attribute__((visibility("default"))) void tw_team_destroy(tw_team* face) {
  if (!face) return;
  Team* team = static_cast<Team*>(face->state);
  // After a fork the threads are the parent's: there is nobody to join.
  if (team->born == forks.load()) {
    pthread_mutex_lock(&team->lock);
    team->is_stopping.store(true);
    pthread_mutex_unlock(&team->lock);
    pthread_cond_broadcast(&team->wake);
    for (int64_t i = 0; i < team->started; ++i) pthread_join(team->workers[i], nullptr);
  }
  std::free(team->workers);
  team->~Team();
  std::free(team);
}

// A team of `threads` threads, the caller's included. Where the system grants fewer, it has fewer;
// null when there is no memory for it. One that will borrow its threads starts none.
__attribute__((visibility("default"))) tw_team* tw_team_create(int64_t threads, int32_t is_borrowing) {
  pthread_once(&watch_forks, [] { pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); }); });
  void* memory = std::aligned_alloc(alignof(Team), sizeof(Team));
  if (!memory) return nullptr;
  Team* team = new (memory) Team;
  team->born = forks.load();
  const int64_t wanted = threads > 1 && !is_borrowing ? threads - 1 : 0;
  team->workers = static_cast<pthread_t*>(std::calloc(wanted + 1, sizeof(pthread_t)));
  if (!team->workers) {
    std::free(memory);
    return nullptr;
  }
  while (team->started < wanted && !pthread_create(&team->workers[team->started], nullptr, enter, team))
    ++team->started;
  team->face = {team, is_borrowing ? threads : team->started + 1, parallel};
  return &team->face;
}
}
