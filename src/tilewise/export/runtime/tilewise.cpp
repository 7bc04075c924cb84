// @FACTS@
// The C interface: problems are checked, kernels chosen and plans remembered here.
#include <algorithm>
#include <atomic>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <unordered_map>

#include "internal.hpp"

using namespace tilewise::detail;

namespace {

constexpr size_t kRemembered = 65536;
constexpr int32_t kMostThreads = 4096;
constexpr const char *kNowhere = "there is no place for the result: a pointer is null";
constexpr const char *kNoLibrary = "there is no library: it was not opened";

struct Hash {
  size_t operator()(const tilewise_problem &p) const {
    uint64_t mixed = static_cast<uint32_t>(p.op);
    for (int32_t word : p.words) mixed = (mixed ^ static_cast<uint32_t>(word)) * 0x9E3779B97F4A7C15u;
    for (int i = 0; i < ops[p.op]->sizes; ++i) {
      mixed = (mixed ^ static_cast<uint64_t>(p.sizes[i])) * 0x9E3779B97F4A7C15u;
      mixed ^= mixed >> 29;
    }
    return static_cast<size_t>(mixed);
  }
};
struct Equal {
  bool operator()(const tilewise_problem &a, const tilewise_problem &b) const {
    return a.op == b.op && !std::memcmp(a.words, b.words, sizeof a.words) &&
           !std::memcmp(a.sizes, b.sizes, sizeof a.sizes[0] * static_cast<size_t>(ops[a.op]->sizes));
  }
};

}  // namespace

struct tilewise_plan {
  std::atomic<int64_t> holders{1};
  tilewise_plan_facts facts{};
  std::shared_ptr<Ready> ready;
};

struct tilewise_library {
  std::shared_ptr<Backend> backend;
  std::shared_mutex lock;
  std::unordered_map<tilewise_problem, tilewise_plan *, Hash, Equal> plans;

  void forget() {
    for (auto &held : plans) tilewise_release(held.second);
    plans.clear();
  }
};

namespace tilewise::detail {

Scratch &scratch_for(int64_t lanes) {
  thread_local Scratch own;
  const size_t wanted = static_cast<size_t>(lanes);
  if (own.order.size() < wanted) {
    own.order.resize(wanted);
    own.score.resize(wanted);
    own.keys.resize(4 * wanted);
  }
  return own;
}

}  // namespace tilewise::detail

namespace {

// The number of the problem's case, or below zero with what is wrong.
int32_t checked(const tilewise_problem *problem, Text *why) {
  constexpr int64_t kMost = int64_t{1} << 31;
  if (!problem || problem->op < 0 || problem->op >= TILEWISE_OPS) {
    if (why) why->put(problem ? "the library has no such op" : "there is no problem");
    return -1;
  }
  const Op &op = *ops[problem->op];
  for (int i = 0; i < op.words; ++i) {
    if (problem->words[i] >= 0 && problem->words[i] < op.word_counts[i]) continue;
    if (why) why->put("a dtype or layout has a number that none has");
    return -1;
  }
  for (int i = 0; i < op.sizes; ++i) {
    if (problem->sizes[i] >= 0 && problem->sizes[i] < kMost) continue;
    if (why) why->put("sizes must be from 0 to below 2^31, and one is "), why->put(problem->sizes[i]);
    return -1;
  }
  const int32_t which = op.case_of(problem->words, problem->sizes);
  if (which < 0 && why) why->put(op.why_no_case);
  return which >= 0 && op.is_possible(which, problem->sizes, why) ? which : -1;
}

// Whether the rules let a kernel serve, and its launch is one that was exported.
bool is_usable(const Op &op, int32_t kernel, int32_t which, const int64_t *sizes, Text *why) {
  return op.is_usable(kernel, which, sizes, why) && op.launch(kernel, which, sizes, nullptr, why);
}

struct Order {
  std::vector<int32_t> kernels;
  std::vector<double> us;
};

Order &ranked(const tilewise_problem &problem) {
  thread_local Order own;
  const Op &op = *ops[problem.op];
  if (own.kernels.size() < static_cast<size_t>(op.kernels)) {
    own.kernels.resize(static_cast<size_t>(op.kernels));
    own.us.resize(static_cast<size_t>(op.kernels));
  }
  op.rank(problem.sizes, problem.words, own.kernels.data(), own.us.data());
  return own;
}

tilewise_status make_plan(tilewise_library &library, const tilewise_problem &problem, int32_t which,
                          int32_t kernel, double us, tilewise_plan **made, Text *why) {
  const Op &op = *ops[problem.op];
  Launch launch;
  if (!op.launch(kernel, which, problem.sizes, &launch, why)) return TILEWISE_NO_KERNEL;
  auto ready = make_ready(library.backend, problem.op, kernel, launch, why);
  if (!ready) return TILEWISE_FAILED;
  auto *plan = new (std::nothrow) tilewise_plan;
  if (!plan) return fail(why, TILEWISE_FAILED, "there is no memory for a plan");
  plan->ready = std::move(ready);
  plan->facts = {problem.op, kernel, op.kernel_names[kernel], us, launch.workspace_bytes, launch.zeroed_bytes};
  *made = plan;
  return TILEWISE_OK;
}

// What the best ranked kernel would have needed, of those that have more to say than that their
// rules were not exported for such a problem.
void tell_why_none(const Op &op, const tilewise_problem &problem, int32_t which, const int32_t *order, Text &why) {
  char said[256];
  const auto is_told = [&](int32_t kernel) {
    Text text{said, sizeof said};
    is_usable(op, kernel, which, problem.sizes, &text);
    return std::strcmp(said, kUnseen) != 0;
  };
  const int32_t *end = order + op.kernels, *told = std::find_if(order, end, is_told);
  why.put("no kernel of the library can serve it; ");
  why.put(op.kernel_names[told == end ? *order : *told]);
  why.put(": ");
  why.put(said);
}

// The best ranked kernel that can serve; where none can, what the best would have needed.
tilewise_status choose(tilewise_library &library, const tilewise_problem &problem, int32_t which,
                       tilewise_plan **made, Text *why) {
  const Op &op = *ops[problem.op];
  const Order &order = ranked(problem);
  for (int32_t at = 0; at < op.kernels; ++at) {
    const int32_t kernel = order.kernels[static_cast<size_t>(at)];
    if (!is_usable(op, kernel, which, problem.sizes, nullptr)) continue;
    return make_plan(library, problem, which, kernel, order.us[static_cast<size_t>(at)], made, why);
  }
  if (why) tell_why_none(op, problem, which, order.kernels.data(), *why);
  return TILEWISE_NO_KERNEL;
}

// Nothing may be thrown across the interface; what the standard library throws is out of memory.
template <class Body>
tilewise_status guarded(char *why, size_t room, const Body &body) {
  Text told{why, room}, *text = why ? &told : nullptr;
  try {
    return body(text);
  } catch (...) {
    return fail(text, TILEWISE_FAILED, "memory ran out");
  }
}

}  // namespace

extern "C" {

const char *tilewise_about(void) { return about; }

int32_t tilewise_kernels(int32_t op) { return op >= 0 && op < TILEWISE_OPS ? ops[op]->kernels : 0; }

const char *tilewise_kernel_name(int32_t op, int32_t kernel) {
  return kernel >= 0 && kernel < tilewise_kernels(op) ? ops[op]->kernel_names[kernel] : "";
}

tilewise_status tilewise_open(const tilewise_options *options, tilewise_library **made, char *why,
                              size_t room) {
  return guarded(why, room, [&](Text *text) {
    if (!made) return fail(text, TILEWISE_BAD_CALL, kNowhere);
    *made = nullptr;
    const tilewise_options given = options ? *options : tilewise_options{};
    if (given.threads < 0 || given.threads > kMostThreads)
      return fail(text, TILEWISE_BAD_CALL, "threads must be from 0 to 4096");
    auto backend = open_backend(given, text);
    if (!backend) return TILEWISE_BAD_DEVICE;
    *made = new tilewise_library;
    (*made)->backend = std::move(backend);
    return TILEWISE_OK;
  });
}

void tilewise_close(tilewise_library *library) {
  if (!library) return;
  library->forget();
  delete library;
}

tilewise_status tilewise_why_unusable(const tilewise_problem *problem, int32_t kernel, char *why,
                                      size_t room) {
  return guarded(why, room, [&](Text *text) {
    const int32_t which = checked(problem, text);
    if (which < 0) return TILEWISE_BAD_PROBLEM;
    if (kernel < 0 || kernel >= ops[problem->op]->kernels)
      return fail(text, TILEWISE_NO_KERNEL, "the library has no kernel of this number");
    return is_usable(*ops[problem->op], kernel, which, problem->sizes, text) ? TILEWISE_OK : TILEWISE_NO_KERNEL;
  });
}

tilewise_status tilewise_rank(const tilewise_problem *problem, tilewise_ranked *ranked_out,
                              int32_t *count, char *why, size_t room) {
  return guarded(why, room, [&](Text *text) {
    if (!count || (*count > 0 && !ranked_out)) return fail(text, TILEWISE_BAD_CALL, kNowhere);
    const int32_t which = checked(problem, text);
    if (which < 0) return TILEWISE_BAD_PROBLEM;
    const Op &op = *ops[problem->op];
    const Order &order = ranked(*problem);
    int32_t found = 0;
    for (size_t at = 0; at < static_cast<size_t>(op.kernels); ++at) {
      if (!is_usable(op, order.kernels[at], which, problem->sizes, nullptr)) continue;
      if (found < *count) ranked_out[found] = {order.kernels[at], order.us[at]};
      ++found;
    }
    *count = found;
    return TILEWISE_OK;
  });
}

tilewise_status tilewise_plan_for(tilewise_library *library, const tilewise_problem *problem,
                                  tilewise_plan **made, char *why, size_t room) {
  return guarded(why, room, [&](Text *text) {
    if (!library || !made) return fail(text, TILEWISE_BAD_CALL, library ? kNowhere : kNoLibrary);
    *made = nullptr;
    if (problem && problem->op >= 0 && problem->op < TILEWISE_OPS) {
      std::shared_lock<std::shared_mutex> reading(library->lock);
      const auto found = library->plans.find(*problem);
      if (found != library->plans.end()) {
        *made = tilewise_keep(found->second);
        return TILEWISE_OK;
      }
    }
    const int32_t which = checked(problem, text);
    if (which < 0) return TILEWISE_BAD_PROBLEM;
    const tilewise_status status = choose(*library, *problem, which, made, text);
    if (status != TILEWISE_OK) return status;
    std::unique_lock<std::shared_mutex> writing(library->lock);
    if (library->plans.size() >= kRemembered) library->forget();
    // Another thread may have been first; both plans are as good.
    if (library->plans.emplace(*problem, *made).second) tilewise_keep(*made);
    return TILEWISE_OK;
  });
}

tilewise_status tilewise_plan_kernel(tilewise_library *library, const tilewise_problem *problem,
                                     int32_t kernel, tilewise_plan **made, char *why, size_t room) {
  return guarded(why, room, [&](Text *text) {
    if (!library || !made) return fail(text, TILEWISE_BAD_CALL, library ? kNowhere : kNoLibrary);
    *made = nullptr;
    const tilewise_status usable = tilewise_why_unusable(problem, kernel, why, room);
    if (usable != TILEWISE_OK) return usable;
    const Order &order = ranked(*problem);
    double us = 0;
    for (size_t at = 0; at < static_cast<size_t>(ops[problem->op]->kernels); ++at)
      if (order.kernels[at] == kernel) us = order.us[at];
    const int32_t which = checked(problem, nullptr);
    return make_plan(*library, *problem, which, kernel, us, made, text);
  });
}

tilewise_plan_facts tilewise_facts(const tilewise_plan *plan) {
  return plan ? plan->facts : tilewise_plan_facts{-1, -1, "", 0, 0, 0};
}

tilewise_plan *tilewise_keep(tilewise_plan *plan) {
  if (plan) plan->holders.fetch_add(1, std::memory_order_relaxed);
  return plan;
}

void tilewise_release(tilewise_plan *plan) {
  if (plan && plan->holders.fetch_sub(1, std::memory_order_acq_rel) == 1) delete plan;
}

tilewise_status tilewise_execute(const tilewise_plan *plan, const void *const *tensors, int32_t count,
                                 void *workspace, int64_t workspace_bytes, void *stream,
                                 int32_t is_cleared, char *why, size_t room) {
  return guarded(why, room, [&](Text *text) {
    if (!plan) return fail(text, TILEWISE_BAD_CALL, "there is no plan");
    if (!tensors || count != ops[plan->facts.op]->tensors)
      return fail(text, TILEWISE_BAD_CALL, "the call needs as many tensors as the op has: operands, then the result");
    uintptr_t bits = plan->facts.workspace_bytes ? reinterpret_cast<uintptr_t>(workspace) : 0;
    for (int32_t i = 0; i < count; ++i) {
      if (!tensors[i]) return fail(text, TILEWISE_BAD_CALL, "a tensor's address is null");
      bits |= reinterpret_cast<uintptr_t>(tensors[i]);
    }
    if (bits % address_alignment) return fail(text, TILEWISE_BAD_CALL, "an address is no multiple of 16 bytes");
    if (workspace_bytes < plan->facts.workspace_bytes || (!workspace && plan->facts.workspace_bytes))
      return fail(text, TILEWISE_BAD_CALL, "the workspace is smaller than the plan's workspace_bytes");
    return run(*plan->ready, tensors, workspace, stream, is_cleared != 0, text);
  });
}
}
