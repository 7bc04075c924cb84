// A thread of the emulated block: a stack and a place to go on from.
#pragma once

namespace emulated {

// Saves where the caller stands in `*from` and goes on at `to`, a value saved before.
void switch_stack(void** from, void* to);

// A saved value that begins `entry` on a fresh stack; `entry` must never return.
void* fresh_stack(char* stack, unsigned long bytes, void (*entry)());

}  // namespace emulated
