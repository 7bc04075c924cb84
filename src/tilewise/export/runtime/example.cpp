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

  // Elements of @DTYPE@ and, for the result, of @OUT_DTYPE@: their bytes, and the bits of a one.
  const Pattern one{@ITEM@, @ONE@}, expected{@OUT_ITEM@, @EXPECTED@};
  Memory memory;
  std::vector<const void *> tensors;
  for (size_t elements : {@ELEMENTS@}) {
    void *tensor = memory.allocate(elements * one.bytes + 16);
    if (!tensor || !memory.fill(tensor, elements, one)) return std::printf("there is no memory\n"), 1;
    tensors.push_back(tensor);
  }
  void *out = memory.allocate(@OUT_ELEMENTS@ * expected.bytes + 16);
  void *workspace = memory.allocate(static_cast<size_t>(plan->workspace_bytes()) + 16);
  if (!out || !workspace) return std::printf("there is no memory\n"), 1;

  auto status = plan->execute({@TENSORS@, out}, workspace, plan->workspace_bytes());
  if (!status) return std::printf("%s\n", status.why().c_str()), 1;
  std::vector<unsigned char> result(@OUT_ELEMENTS@ * expected.bytes);
  if (!memory.read(result.data(), out, result.size())) return std::printf("the kernel failed\n"), 1;
  size_t wrong = 0;
  for (size_t at = 0; at < result.size(); at += expected.bytes)
    wrong += std::memcmp(&result[at], &expected.bits, expected.bytes) != 0;
  std::printf("%zu of %zu elements are wrong\n", wrong, result.size() / expected.bytes);
  return wrong != 0;
}
