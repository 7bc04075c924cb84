// @FACTS@
// Chooses, plans and runs one problem, and checks the result: all operands are ones, so that
// what comes out is known.
#include <cstdio>
#include <cstring>
#include <vector>

#include "memory.hpp"
#include "tilewise.hpp"

int main() {
  auto library = tilewise::Library::open();
  if (!library) return std::printf("%s\n", library.why().c_str()), 2;

  tilewise::@PROBLEM_TYPE@ problem;
@PROBLEM_FIELDS@
  auto plan = library->plan(problem);
  if (!plan) return std::printf("%s\n", plan.why().c_str()), 1;
  std::printf("%s, %.1f us expected, %lld bytes of workspace\n", plan->kernel(), plan->expected_us(),
              static_cast<long long>(plan->workspace_bytes()));

  // An element of @DTYPE@: its bytes, and the bits of a one. The result's are of @OUT_DTYPE@: so many of
  // these bits, one after the other, and all of it again and again.
  const Pattern one{@ITEM@, @ONE@};
  const size_t out_bytes = @OUT_ITEM@;
  const struct {
    size_t count;
    uint32_t bits;
  } expected[] = {@EXPECTED@};
  Memory memory;
  std::vector<const void *> tensors;
  for (size_t elements : {@ELEMENTS@}) {
    void *tensor = memory.allocate(elements * one.bytes + 16);
    if (!tensor || !memory.fill(tensor, elements, one)) return std::printf("there is no memory\n"), 1;
    tensors.push_back(tensor);
  }
  void *out = memory.allocate(@OUT_ELEMENTS@ * out_bytes + 16);
  void *workspace = memory.allocate(static_cast<size_t>(plan->workspace_bytes()) + 16);
  if (!out || !workspace) return std::printf("there is no memory\n"), 1;

  auto status = plan->execute({@TENSORS@, out}, workspace, plan->workspace_bytes());
  if (!status) return std::printf("%s\n", status.why().c_str()), 1;
  std::vector<unsigned char> result(@OUT_ELEMENTS@ * out_bytes);
  if (!memory.read(result.data(), out, result.size())) return std::printf("the kernel failed\n"), 1;
  size_t wrong = 0, at = 0;
  while (at < result.size())
    for (const auto &run : expected)
      for (size_t i = 0; i < run.count; ++i, at += out_bytes)
        wrong += std::memcmp(&result[at], &run.bits, out_bytes) != 0;
  std::printf("%zu of %zu elements are wrong\n", wrong, result.size() / out_bytes);
  return wrong != 0;
}
