// @FACTS@
// The front: describe a problem, plan it, execute the plan. What can go wrong comes back as a value;
// nothing throws but std::string and std::vector, where memory runs out. Everything may be called
// from several threads at once.
//
//   auto library = tilewise::Library::open();
//   if (!library) return fail(library.why());
//   auto plan = library->plan(problem);
//   if (!plan) return fail(plan.why());
//   auto status = plan->execute({a, b, c}, workspace, workspace_bytes, stream);
#pragma once
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "tilewise.h"

namespace tilewise {

// What became of a call: `ok()`, or a code and a sentence.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(tilewise_status code, std::string why) : code_(code), why_(std::move(why)) {}
  bool ok() const { return code_ == TILEWISE_OK; }
  explicit operator bool() const { return ok(); }
  tilewise_status code() const { return code_; }
  const std::string &why() const { return why_; }

 private:
  tilewise_status code_ = TILEWISE_OK;
  std::string why_;
};

// A value, or the status that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : status_(std::move(status)) {}
  explicit operator bool() const { return status_.ok(); }
  const Status &status() const { return status_; }
  const std::string &why() const { return status_.why(); }
  T &operator*() { return value_; }
  T *operator->() { return &value_; }
  const T &operator*() const { return value_; }
  const T *operator->() const { return &value_; }

 private:
  Status status_;
  T value_{};
};

enum class Dtype : int32_t { @DTYPES@, automatic = -1 };

@PROBLEMS@
// A kernel with its place in a ranking.
struct Ranked {
  int32_t kernel;
  const char *name;
  double expected_us;
};

namespace detail {
constexpr size_t kRoom = 512;
template <class Call>
Status told(const Call &call) {
  char why[kRoom];
  why[0] = 0;
  const tilewise_status code = call(why, kRoom);
  return code == TILEWISE_OK ? Status() : Status(code, why);
}
}  // namespace detail

// A kernel that is ready for one problem. Copies share it; it outlives the library it is from.
class Plan {
 public:
  Plan() = default;
  explicit Plan(tilewise_plan *held) : held_(held) {}
  Plan(const Plan &other) : held_(tilewise_keep(other.held_)) {}
  Plan(Plan &&other) noexcept : held_(std::exchange(other.held_, nullptr)) {}
  Plan &operator=(Plan other) noexcept {
    std::swap(held_, other.held_);
    return *this;
  }
  ~Plan() { tilewise_release(held_); }

  const char *kernel() const { return tilewise_facts(held_).kernel_name; }
  double expected_us() const { return tilewise_facts(held_).expected_us; }
  int64_t workspace_bytes() const { return tilewise_facts(held_).workspace_bytes; }
  int64_t zeroed_bytes() const { return tilewise_facts(held_).zeroed_bytes; }

  // Runs on dense tensors: the operands in order, then the result. On a GPU addresses are those of
  // the device, multiples of 16, and `stream` is a CUstream or hipStream_t; the call returns before
  // the work is done. `is_cleared` says that the first `zeroed_bytes()` of the workspace are zero,
  // as the kernels leave them; otherwise they are cleared on the stream first.
  Status execute(std::initializer_list<const void *> tensors, void *workspace = nullptr,
                 int64_t workspace_bytes = 0, void *stream = nullptr,
                 bool is_cleared = false) const {
    return detail::told([&](char *why, size_t room) {
      return tilewise_execute(held_, tensors.begin(), static_cast<int32_t>(tensors.size()),
                              workspace, workspace_bytes, stream, is_cleared, why, room);
    });
  }
  tilewise_plan *get() const { return held_; }

 private:
  tilewise_plan *held_ = nullptr;
};

// Why a kernel, by its number, cannot serve a problem; ok where it can.
inline Status why_unusable(const tilewise_problem &problem, int32_t kernel) {
  return detail::told([&](char *why, size_t room) {
    return tilewise_why_unusable(&problem, kernel, why, room);
  });
}

// The kernels that can serve a problem, fastest first.
inline Result<std::vector<Ranked>> rank(const tilewise_problem &problem) {
  int32_t count = tilewise_kernels(problem.op);
  std::vector<tilewise_ranked> found(static_cast<size_t>(count > 0 ? count : 0));
  Status status = detail::told([&](char *why, size_t room) {
    return tilewise_rank(&problem, found.data(), &count, why, room);
  });
  if (!status) return status;
  found.resize(static_cast<size_t>(count));
  std::vector<Ranked> ranked;
  for (const tilewise_ranked &one : found)
    ranked.push_back({one.kernel, tilewise_kernel_name(problem.op, one.kernel), one.expected_us});
  return ranked;
}

// One device. Choosing needs none; planning and executing do.
class Library {
 public:
  Library() = default;
  static Result<Library> open(tilewise_options options = {}) {
    Library made;
    Status status = detail::told([&](char *why, size_t room) {
      return tilewise_open(&options, &made.held_, why, room);
    });
    if (!status) return status;
    return made;
  }
  Library(Library &&other) noexcept : held_(std::exchange(other.held_, nullptr)) {}
  Library &operator=(Library &&other) noexcept {
    std::swap(held_, other.held_);
    return *this;
  }
  ~Library() { tilewise_close(held_); }

  // The fastest kernel that can serve, ready to run; problems seen before are remembered.
  Result<Plan> plan(const tilewise_problem &problem) {
    tilewise_plan *made = nullptr;
    Status status = detail::told([&](char *why, size_t room) {
      return tilewise_plan_for(held_, &problem, &made, why, room);
    });
    if (!status) return status;
    return Plan(made);
  }
  // The same with a kernel of the caller's choice, by its number.
  Result<Plan> plan(const tilewise_problem &problem, int32_t kernel) {
    tilewise_plan *made = nullptr;
    Status status = detail::told([&](char *why, size_t room) {
      return tilewise_plan_kernel(held_, &problem, kernel, &made, why, room);
    });
    if (!status) return status;
    return Plan(made);
  }

 private:
  tilewise_library *held_ = nullptr;
};

}  // namespace tilewise
