// Two neighbouring channels at a time, in any element type: what kernels without matrix units read.
#pragma once
#include "cuda/ptx.cuh"

struct Pair {
  float a, b;
};

DEVICE float half_of(u32 word, int half, bf16) { return to_float(bf16{(u16)(word >> (16 * half))}); }
DEVICE float half_of(u32 word, int half, fp16) { return to_float(fp16{(u16)(word >> (16 * half))}); }

// From global memory; `from` is a multiple of two elements.
template <class T>
DEVICE Pair load_pair(const T* from) {
  const u32 word = *(const u32*)from;
  return {half_of(word, 0, T{}), half_of(word, 1, T{})};
}
template <>
DEVICE Pair load_pair<fp32>(const fp32* from) {
  const f32x2 two = *(const f32x2*)from;
  return {two.x, two.y};
}
template <class T>
DEVICE void store_pair(T* to, Pair pair) {
  *(u32*)to = pack2<T>(pair.a, pair.b);
}
template <>
DEVICE void store_pair<fp32>(fp32* to, Pair pair) {
  *(f32x2*)to = {pair.a, pair.b};
}

// From and to shared memory.
DEVICE void stage_element(u32 to, bf16 value) { store_shared_u16(to, value.bits); }
DEVICE void stage_element(u32 to, fp16 value) { store_shared_u16(to, value.bits); }
DEVICE void stage_element(u32 to, fp32 value) { store_shared_f32(to, value.value); }
template <class T>
DEVICE Pair staged_pair(u32 from) {
  const u32 word = load_shared_u32(from);
  return {half_of(word, 0, T{}), half_of(word, 1, T{})};
}
template <>
DEVICE Pair staged_pair<fp32>(u32 from) {
  return {load_shared_f32(from), load_shared_f32(from + 4)};
}
