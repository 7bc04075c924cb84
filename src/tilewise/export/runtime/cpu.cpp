// @FACTS@
// Kernels of the CPU: a team of threads, and calls of compiled functions.
#include <sched.h>
#include <thread>

#include "cpu_kernels.hpp"
#include "internal.hpp"
#include "tilewise/abi.hpp"

extern "C" tw_team *tw_team_create(int64_t threads, int32_t is_borrowing);
extern "C" void tw_team_destroy(tw_team *team);

namespace tilewise::detail {

const uintptr_t address_alignment = 1;

struct Backend {
  tw_team *team = nullptr;
  ~Backend() { tw_team_destroy(team); }
};

constexpr size_t kAlignment = 64, kMostArguments = 64;

// Arguments are words: tensors, workspace and team, then sizes and strides.
struct Ready {
  std::shared_ptr<Backend> backend;
  const CpuKernel *kernel;
  const int32_t *places;  // which of the call's tensors stands where
  size_t tensors;
  std::vector<int64_t> arguments;
};

namespace {

// The cores that the process may use.
int64_t usable_cores() {
  cpu_set_t set;
  if (!sched_getaffinity(0, sizeof set, &set)) return CPU_COUNT(&set);
  return std::thread::hardware_concurrency();
}

const char *missing_instructions() {
  __builtin_cpu_init();
  if (kNeedsAvx512 && !(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")))
    return "the processor has no AVX-512, which kernels of this library need";
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
    return "the processor has no AVX2, which kernels of this library need";
  return nullptr;
}

}  // namespace

std::shared_ptr<Backend> open_backend(const tilewise_options &options, Text *why) {
  if (const char *missing = missing_instructions()) {
    fail(why, TILEWISE_BAD_DEVICE, missing);
    return nullptr;
  }
  auto made = std::make_shared<Backend>();
  made->team = tw_team_create(options.threads > 0 ? options.threads : usable_cores(), 0);
  if (made->team) return made;
  fail(why, TILEWISE_BAD_DEVICE, "there is no memory for a team of threads");
  return nullptr;
}

std::shared_ptr<Ready> make_ready(const std::shared_ptr<Backend> &backend, int32_t op, int32_t kernel,
                                  Launch &launch, Text *why) {
  auto made = std::make_shared<Ready>();
  made->backend = backend;
  made->kernel = cpu_kernels[op] + kernel;
  made->places = cpu_places[op];
  made->tensors = static_cast<size_t>(ops[op]->tensors);
  made->arguments.resize(made->tensors + 1);
  made->arguments.push_back(static_cast<int64_t>(reinterpret_cast<intptr_t>(backend->team)));
  made->arguments.insert(made->arguments.end(), launch.numbers.begin(), launch.numbers.end());
  if (made->arguments.size() > kMostArguments) {
    fail(why, TILEWISE_FAILED, "the kernel has too many arguments");
    return nullptr;
  }
  const int64_t needed = made->kernel->workspace(made->arguments.data());
  // Kernels want it aligned; a caller's may have any address.
  launch.workspace_bytes = needed ? needed + static_cast<int64_t>(kAlignment) - 1 : 0;
  return made;
}

tilewise_status run(const Ready &ready, const void *const *tensors, void *workspace, void *, bool, Text *why) {
  int64_t arguments[kMostArguments];
  std::memcpy(arguments, ready.arguments.data(), ready.arguments.size() * sizeof(int64_t));
  for (size_t i = 0; i < ready.tensors; ++i)
    arguments[i] = static_cast<int64_t>(reinterpret_cast<intptr_t>(tensors[ready.places[i]]));
  const uintptr_t given = reinterpret_cast<uintptr_t>(workspace);
  arguments[ready.tensors] = static_cast<int64_t>((given + kAlignment - 1) / kAlignment * kAlignment);
  const int32_t status = ready.kernel->run(arguments);
  return status ? fail(why, TILEWISE_FAILED, "the kernel reported a failure") : TILEWISE_OK;
}

}  // namespace tilewise::detail
