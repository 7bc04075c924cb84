#include "fiber.hpp"

#if defined(__x86_64__)

// Everything that a called function must keep is on the stack; the rest is the caller's own.
asm(R"(
.text
.globl emulated_switch
emulated_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
extern "C" void emulated_switch(void** from, void* to);

namespace emulated {

void switch_stack(void** from, void* to) { emulated_switch(from, to); }

void* fresh_stack(char* stack, unsigned long bytes, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + bytes) - 2;
  *top = reinterpret_cast<void*>(entry);  // what `ret` takes; 16 bytes aligned, as if just called
  return top - 6;
}

}  // namespace emulated

#else

#include <ucontext.h>

#include <map>
#include <memory>

namespace emulated {

static std::map<void**, std::unique_ptr<ucontext_t>> saved;

void switch_stack(void** from, void* to) {
  auto& mine = saved[from];
  if (!mine) mine = std::make_unique<ucontext_t>();
  *from = mine.get();
  swapcontext(mine.get(), static_cast<ucontext_t*>(to));
}

void* fresh_stack(char* stack, unsigned long bytes, void (*entry)()) {
  auto* context = reinterpret_cast<ucontext_t*>(stack);
  getcontext(context);
  context->uc_stack.ss_sp = stack + sizeof(ucontext_t);
  context->uc_stack.ss_size = bytes - sizeof(ucontext_t);
  makecontext(context, entry, 0);
  return context;
}

}  // namespace emulated

#endif
