// Calls of an exported GEMM library: right ones by several threads, and wrong ones of every kind.
// Built with sanitizers by test_export_sanitized.py. Gives 0 where every answer is as it must be,
// 77 where the library cannot be opened.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "tilewise.hpp"

namespace {

#ifdef ON_STAND_IN
constexpr bool kIsGpu = true;
#else
constexpr bool kIsGpu = false;
#endif
constexpr int kThreads = 4, kProblems = 24;

std::atomic<int> wrong{0};

void expect(bool holds, const char *what) {
  if (holds) return;
  ++wrong;
  std::printf("not so: %s\n", what);
}

void refused(tilewise_status code, tilewise_status expected, const char *why, const char *what) {
  expect(code == expected, what);
  expect(why && std::strlen(why) > 8, what);
}

tilewise::GemmProblem product(int64_t m, int64_t n, int64_t k) {
  tilewise::GemmProblem made;
  made.m = m, made.n = n, made.k = k;
  return made;
}

// On the processor results are looked at; the stand-in for a GPU touches no memory.
void check(const tilewise::Plan &plan, const tilewise::GemmProblem &problem) {
  const size_t m = static_cast<size_t>(problem.m), n = static_cast<size_t>(problem.n),
               k = static_cast<size_t>(problem.k), bytes = static_cast<size_t>(plan.workspace_bytes());
  if (kIsGpu) {
    const auto at = [&](size_t which) { return reinterpret_cast<void *>((m + which) << 12); };
    expect(plan.execute({at(1), at(2), at(3)}, at(4), plan.workspace_bytes()).ok(), "it runs");
    return;
  }
  std::vector<float> a(m * k), b(n * k), c(m * n, -1.0f);
  std::vector<unsigned char> workspace(bytes);
  for (size_t i = 0; i < a.size(); ++i) a[i] = static_cast<float>(i % 5);
  for (size_t i = 0; i < b.size(); ++i) b[i] = static_cast<float>(i % 7);
  auto status = plan.execute({a.data(), b.data(), c.data()}, workspace.data(), plan.workspace_bytes());
  expect(status.ok(), status.why().c_str());
  for (size_t i = 0; i < m; ++i)
    for (size_t j = 0; j < n; ++j) {
      float sum = 0;
      for (size_t x = 0; x < k; ++x) sum += a[i * k + x] * b[j * k + x];
      if (sum != c[i * n + j]) return expect(false, "the product is right");
    }
}

void work(tilewise::Library &library, int64_t seed) {
  for (int64_t i = 0; i < kProblems; ++i) {
    const int64_t m = 1 + (7 * seed + 5 * i) % 37;
    const auto problem = kIsGpu ? product(m, 512, 4096) : product(m, 8 + 9 * (i % 5), 16 + 11 * (i % 3));
    auto plan = library.plan(problem);
    expect(bool(plan), plan.why().c_str());
    const tilewise::Plan copy = *plan;
    check(copy, problem);
  }
}

void open_wrongly() {
  char why[200] = "";
  refused(tilewise_open(nullptr, nullptr, why, sizeof why), TILEWISE_BAD_CALL, why, "no place for a library");
  for (int32_t threads : {-1, 1 << 30}) {
    tilewise_options options{};
    options.threads = threads;
    auto library = tilewise::Library::open(options);
    refused(library.status().code(), TILEWISE_BAD_CALL, library.why().c_str(), "threads");
  }
  for (int32_t device : {-2, 99}) {
    if (!kIsGpu) continue;
    tilewise_options options{};
    options.device = device;
    auto library = tilewise::Library::open(options);
    refused(library.status().code(), TILEWISE_BAD_DEVICE, library.why().c_str(), "no such device");
  }
  tilewise::Library none;
  auto plan = none.plan(product(8, 512, 4096));
  refused(plan.status().code(), TILEWISE_BAD_CALL, plan.why().c_str(), "no library");
  auto chosen = none.plan(product(8, 512, 4096), 0);
  refused(chosen.status().code(), TILEWISE_BAD_CALL, chosen.why().c_str(), "no library");
  auto status = plan->execute({});
  refused(status.code(), TILEWISE_BAD_CALL, status.why().c_str(), "no plan");
  expect(!*plan->kernel() && !plan->workspace_bytes(), "an empty plan has no facts");
  tilewise_close(nullptr);
  tilewise_release(tilewise_keep(nullptr));
}

// Whatever is asked with a problem gives this code, with a reason for which there may be no room.
void refuse(tilewise_library *library, const tilewise_problem *problem, tilewise_status code) {
  char why[200] = "";
  tilewise_plan *plan = nullptr;
  tilewise_ranked first;
  int32_t count = 1;
  refused(tilewise_why_unusable(problem, 0, why, sizeof why), code, why, "why_unusable");
  refused(tilewise_rank(problem, &first, &count, why, sizeof why), code, why, "rank");
  refused(tilewise_plan_for(library, problem, &plan, why, sizeof why), code, why, "plan_for");
  refused(tilewise_plan_kernel(library, problem, 0, &plan, why, sizeof why), code, why, "plan_kernel");
  expect(!plan, "there is no plan");
  for (size_t room : {size_t{0}, size_t{1}, size_t{5}}) {
    std::vector<char> tight(room + 1, '!');
    expect(tilewise_plan_for(library, problem, &plan, tight.data(), room) == code, "little room");
    expect(tight[room] == '!' && (!room || std::strlen(tight.data()) == room - 1), "it is cut");
  }
  expect(tilewise_plan_for(library, problem, &plan, nullptr, 77) == code, "no room at all");
}

void plan_wrongly(tilewise_library *library) {
  const auto good = product(8, 512, 4096);
  tilewise_problem problem = good;
  char why[200] = "";
  tilewise_plan *plan = nullptr;
  refuse(library, nullptr, TILEWISE_BAD_PROBLEM);
  for (int32_t op : {-1, 1, 1 << 30}) problem.op = op, refuse(library, &problem, TILEWISE_BAD_PROBLEM);
  for (int32_t word : {-1, 99, 3}) problem = good, problem.words[0] = word, refuse(library, &problem, TILEWISE_BAD_PROBLEM);
  for (int64_t size : {int64_t{-1}, INT64_MIN, int64_t{1} << 31, INT64_MAX})
    problem = good, problem.sizes[0] = size, refuse(library, &problem, TILEWISE_BAD_PROBLEM);
  auto typed = good;
  typed.dtype = tilewise::Dtype::automatic;
  problem = typed, refuse(library, &problem, TILEWISE_BAD_PROBLEM);
  problem = good;
  int32_t count = 4;
  tilewise_ranked some[2];
  refused(tilewise_rank(&problem, some, nullptr, why, sizeof why), TILEWISE_BAD_CALL, why, "no count");
  refused(tilewise_rank(&problem, nullptr, &count, why, sizeof why), TILEWISE_BAD_CALL, why, "no list");
  for (int32_t room : {-3, 0, 1}) {
    count = room;
    expect(!tilewise_rank(&problem, room > 0 ? some : nullptr, &count, nullptr, 0), "it counts");
    expect(count >= 1, "it says how many there are");
  }
  refused(tilewise_plan_for(library, &problem, nullptr, why, sizeof why), TILEWISE_BAD_CALL, why, "no place");
  refused(tilewise_plan_for(nullptr, &problem, &plan, why, sizeof why), TILEWISE_BAD_CALL, why, "no library");
  for (int32_t kernel : {-1, 1 << 20})
    refused(tilewise_plan_kernel(library, &problem, kernel, &plan, why, sizeof why), TILEWISE_NO_KERNEL, why, "no kernel");
  expect(!*tilewise_kernel_name(0, -1) && !*tilewise_kernel_name(7, 0) && !tilewise_kernels(7), "no names");
}

void execute_wrongly(const tilewise::Plan &plan) {
  alignas(64) static unsigned char memory[4096];
  const auto run = [&](std::initializer_list<const void *> tensors, void *workspace, int64_t bytes) {
    auto status = plan.execute(tensors, workspace, bytes);
    refused(status.code(), TILEWISE_BAD_CALL, status.why().c_str(), "a wrong call");
  };
  const int64_t most = INT64_MAX;
  run({memory, memory}, memory, most);
  run({memory, memory, memory, memory}, memory, most);
  run({memory, nullptr, memory}, memory, most);
  if (plan.workspace_bytes()) run({memory, memory, memory}, nullptr, most);
  if (plan.workspace_bytes()) run({memory, memory, memory}, memory, plan.workspace_bytes() - 1);
  if (plan.workspace_bytes()) run({memory, memory, memory}, memory, -1);
  if (kIsGpu) run({memory + 8, memory, memory}, memory, most);
  if (kIsGpu && plan.workspace_bytes()) run({memory, memory, memory}, memory + 8, most);
  char why[200] = "";
  refused(tilewise_execute(plan.get(), nullptr, 3, memory, most, nullptr, 0, why, sizeof why), TILEWISE_BAD_CALL, why,
          "no list of tensors");
}

}  // namespace

int main() {
  tilewise_options options{};
  options.threads = 2;
  auto opened = tilewise::Library::open(options);
  if (!opened) return std::printf("%s\n", opened.why().c_str()), 77;
  open_wrongly();
  tilewise_library *raw = nullptr;
  expect(!tilewise_open(nullptr, &raw, nullptr, 0), "usual options");
  plan_wrongly(raw);
  tilewise_close(raw);
  tilewise::Plan kept;
  const auto problem = product(8, 512, 4096);
  {
    tilewise::Library library = std::move(*opened);
    auto gone = opened->plan(problem);
    refused(gone.status().code(), TILEWISE_BAD_CALL, gone.why().c_str(), "a library that was moved");
    std::vector<std::thread> threads;
    for (int64_t seed = 0; seed < kThreads; ++seed) threads.emplace_back(work, std::ref(library), seed);
    for (auto &one : threads) one.join();
    auto plan = library.plan(problem);
    expect(bool(plan), plan.why().c_str());
    kept = *plan;
  }
  execute_wrongly(kept);
  check(kept, problem);  // it outlives the library
  std::printf("%d answers are wrong\n", wrong.load());
  return wrong.load() != 0;
}
