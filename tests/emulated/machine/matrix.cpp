// ldmatrix, stmatrix, mma.sync and wgmma: where each element of a fragment or tile lies.
#include <cmath>
#include <cstring>

#include "machine.hpp"

namespace emulated {

float from_bf16(u16 bits) {
  const u32 wide = u32(bits) << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

u16 to_bf16(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  if (std::isnan(value)) return 0x7FFF;
  return u16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

float from_fp16(u16 bits) {
  _Float16 value;
  memcpy(&value, &bits, 2);
  return float(value);
}

u16 to_fp16(float value) {
  const _Float16 narrow = _Float16(value);
  u16 bits;
  memcpy(&bits, &narrow, 2);
  return bits;
}

u32 to_tf32(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return bits & ~0x1FFFu;
}

namespace {

float widen(u16 bits, Type type) { return type == Type::bf16 ? from_bf16(bits) : from_fp16(bits); }

u16 half_of(u32 word, int half) { return u16(word >> (16 * half)); }

}  // namespace

void load_matrices(u32 address, u32* out, int count, bool transposed) {
  struct Call {
    u32 address;
    u32* out;
  } call{address, out};
  char name[48];
  snprintf(name, sizeof name, "ldmatrix x%d%s", count, transposed ? " transposed" : "");
  meet(name, kAllLanes, &call, [&](auto&, const std::vector<void*>& calls) {
    for (int m = 0; m < count; m++) {
      u16 tile[8][8];
      for (int row = 0; row < 8; row++) {
        const u32 from = static_cast<Call*>(calls[m * 8 + row])->address;
        if (from % 16) fail("ldmatrix at %u, which is no multiple of 16", from);
        const Spot spot = locate(from, 16, "ldmatrix");
        for (int i = 0; i < 8; i++) tile[row][i] = checked(bytes_of(spot) + 2 * i, spot, "ldmatrix");
      }
      for (int lane = 0; lane < 32; lane++) {
        const int r = lane / 4, c = lane % 4 * 2;
        const u16 low = transposed ? tile[c][r] : tile[r][c];
        const u16 high = transposed ? tile[c + 1][r] : tile[r][c + 1];
        static_cast<Call*>(calls[lane])->out[m] = low | u32(high) << 16;
      }
    }
  });
}

void store_matrices(u32 address, const u32* in, int count, bool transposed) {
  struct Call {
    u32 address;
    const u32* in;
  } call{address, in};
  char name[48];
  snprintf(name, sizeof name, "stmatrix x%d%s", count, transposed ? " transposed" : "");
  meet(name, kAllLanes, &call, [&](const std::vector<Fiber*>& lanes, const std::vector<void*>& calls) {
    for (int m = 0; m < count; m++) {
      u16 tile[8][8];
      for (int lane = 0; lane < 32; lane++) {
        const u32 word = static_cast<Call*>(calls[lane])->in[m];
        const int r = lane / 4, c = lane % 4 * 2;
        (transposed ? tile[c][r] : tile[r][c]) = half_of(word, 0);
        (transposed ? tile[c + 1][r] : tile[r][c + 1]) = half_of(word, 1);
      }
      for (int row = 0; row < 8; row++) {
        const u32 to = static_cast<Call*>(calls[m * 8 + row])->address;
        if (to % 16) fail("stmatrix at %u, which is no multiple of 16", to);
        const Spot spot = locate(to, 16, "stmatrix");
        memcpy(bytes_of(spot), tile[row], 16);
        Fiber* last = machine->running;
        machine->running = lanes[m * 8 + row];  // the lane that gave the address has written
        note_generic_write(spot, 16);
        machine->running = last;
      }
    }
  });
}

void mma(float* d, const u32* a, const u32* b, const float* c, int k, Type type) {
  struct Call {
    float* d;
    const u32 *a, *b;
    const float* c;
  } call{d, a, b, c};
  if (k != 16 || (type != Type::bf16 && type != Type::fp16)) fail("no such mma is emulated");
  meet("mma.m16n8k16", kAllLanes, &call, [&](auto&, const std::vector<void*>& calls) {
    float left[16][16], right[16][8];
    for (int lane = 0; lane < 32; lane++) {
      const auto* mine = static_cast<Call*>(calls[lane]);
      for (int i = 0; i < 8; i++) {
        const int row = lane / 4 + (i / 2 & 1) * 8, column = lane % 4 * 2 + (i / 4) * 8 + i % 2;
        left[row][column] = widen(half_of(mine->a[i / 2], i % 2), type);
      }
      for (int i = 0; i < 4; i++)
        right[lane % 4 * 2 + (i / 2) * 8 + i % 2][lane / 4] =
            widen(half_of(mine->b[i / 2], i % 2), type);
    }
    float product[16][8] = {};
    for (int m = 0; m < 16; m++)
      for (int j = 0; j < 16; j++)
        for (int n = 0; n < 8; n++) product[m][n] += left[m][j] * right[j][n];
    for (int lane = 0; lane < 32; lane++) {
      auto* mine = static_cast<Call*>(calls[lane]);
      for (int i = 0; i < 4; i++)
        mine->d[i] = mine->c[i] + product[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    }
  });
}

namespace {

// An operand of wgmma in shared memory, as its 64-bit descriptor says.
struct Tile {
  Block* block;
  u32 start, leading, stride, swizzle;
  bool is_transposed;  // the reduction runs across the rows of the pattern
  u32 element_bytes;

  Tile(Block* block, u64 bits, bool is_transposed, u32 element_bytes)
      : block(block), is_transposed(is_transposed), element_bytes(element_bytes) {
    start = u32(bits & 0x3FFF) << 4;
    leading = u32(bits >> 16 & 0x3FFF) << 4;
    stride = u32(bits >> 32 & 0x3FFF) << 4;
    const u32 offset = u32(bits >> 49 & 7), mode = u32(bits >> 62 & 3);
    if (offset) fail("wgmma descriptors with a base offset are not emulated");
    const u32 modes[] = {0, 128, 64, 32};
    swizzle = modes[mode];
    if (!swizzle) fail("wgmma descriptors without swizzle are not emulated");
    if (start % 16) fail("a wgmma operand at %u", start);
  }

  // Where element `k` of row (or column) `i` lies.
  u32 address(u32 i, u32 k) const {
    u32 at = start;
    if (is_transposed) {
      const u32 panel = swizzle / element_bytes;
      at += i / panel * leading + i % panel * element_bytes + k / 8 * stride + k % 8 * swizzle;
    } else {
      at += i / 8 * stride + i % 8 * swizzle + k * element_bytes;
    }
    return at ^ ((at >> 7 & (swizzle / 16 - 1)) << 4);
  }

  float read(u32 i, u32 k, Type type) const {
    const Spot spot = locate(at_rank(address(i, k), block->rank), element_bytes, "wgmma");
    check_fenced(spot, element_bytes, "wgmma");
    const u16 low = checked(bytes_of(spot), spot, "wgmma");
    if (element_bytes == 2) return widen(low, type);
    float value;
    u32 bits;
    memcpy(&bits, bytes_of(spot), 4);
    bits = bits & ~0x1FFFu;
    memcpy(&value, &bits, 4);
    return value;
  }
};

struct Product {
  float* d[128];
  u32 a[128][4];
  bool a_in_registers, accumulates, a_transposed, b_transposed;
  u64 a_tile, b_tile;
  int n;
  Type type;
  Block* block;
};

void multiply(const Product& p) {
  const u32 bytes = p.type == Type::tf32 ? 4 : 2, depth = 32 / bytes;
  std::vector<float> left(64 * depth), right(size_t(p.n) * depth), sum(64 * size_t(p.n));
  if (p.a_in_registers) {
    for (u32 t = 0; t < 128; t++)
      for (u32 i = 0; i < 8; i++) {
        const u32 row = t / 32 * 16 + t % 32 / 4 + (i / 2 & 1) * 8;
        left[row * depth + t % 4 * 2 + (i / 4) * 8 + i % 2] = widen(half_of(p.a[t][i / 2], i % 2), p.type);
      }
  } else {
    const Tile tile(p.block, p.a_tile, p.a_transposed, bytes);
    for (u32 m = 0; m < 64; m++)
      for (u32 k = 0; k < depth; k++) left[m * depth + k] = tile.read(m, k, p.type);
  }
  const Tile tile(p.block, p.b_tile, p.b_transposed, bytes);
  for (int n = 0; n < p.n; n++)
    for (u32 k = 0; k < depth; k++) right[k * p.n + n] = tile.read(n, k, p.type);
  for (u32 m = 0; m < 64; m++)
    for (u32 k = 0; k < depth; k++)
      for (int n = 0; n < p.n; n++) sum[m * p.n + n] += left[m * depth + k] * right[k * p.n + n];
  for (u32 t = 0; t < 128; t++)
    for (int i = 0; i < p.n / 2; i++) {
      const u32 row = t / 32 * 16 + t % 32 / 4 + (i / 2 & 1) * 8;
      const float value = sum[row * p.n + i / 4 * 8 + t % 4 * 2 + i % 2];
      p.d[t][i] = p.accumulates ? p.d[t][i] + value : value;
    }
}

}  // namespace

void wgmma(float* d, const u32* a, u64 a_tile, u64 b_tile, int n, bool accumulates, Type type,
           bool a_transposed, bool b_transposed) {
  struct Call {
    float* d;
    const u32* a;
    u64 a_tile, b_tile;
    int n;
    bool accumulates;
  } call{d, a, a_tile, b_tile, n, accumulates};
  meet_warpgroup("wgmma", &call, [&](Warpgroup& group, const std::vector<void*>& calls) {
    if (!group.is_fenced) fail("wgmma without a wgmma.fence since all before were waited for");
    auto product = std::make_shared<Product>();
    product->a_in_registers = a != nullptr;
    product->accumulates = accumulates;
    product->a_transposed = a_transposed;
    product->b_transposed = b_transposed;
    product->a_tile = a_tile;
    product->b_tile = b_tile;
    product->n = n;
    product->type = type;
    product->block = machine->running->block;
    for (u32 t = 0; t < 128; t++) {
      const auto* mine = static_cast<Call*>(calls[t]);
      if (mine->a_tile != a_tile || mine->b_tile != b_tile || mine->n != n ||
          mine->accumulates != accumulates)
        fail("threads of a warpgroup give different operands to one wgmma");
      product->d[t] = mine->d;
      if (a) memcpy(product->a[t], mine->a, sizeof product->a[t]);
    }
    auto open = group.open;
    ++*open;
    Warpgroup* where = &group;
    machine->start({"wgmma", product->block, where, [=] {
                      multiply(*product);
                      --*open;
                      where->landed.wake();
                    }});
  });
}

void wgmma_fence() {
  meet_warpgroup("wgmma.fence", nullptr,
                 [](Warpgroup& group, const std::vector<void*>&) { group.is_fenced = true; });
}

void wgmma_commit() {
  meet_warpgroup("wgmma.commit", nullptr, [](Warpgroup& group, const std::vector<void*>&) {
    group.committed.push_back(group.open);
    group.open = std::make_shared<int>(0);
  });
}

void wgmma_wait(u32 groups_left) {
  meet_warpgroup("wgmma.wait", nullptr, [](Warpgroup&, const std::vector<void*>&) {});
  Fiber* self = machine->running;
  Warpgroup& group = self->block->warpgroups[self->place.thread.x / 128];
  wait_until(group.landed, {"wgmma, all but %llu groups", groups_left}, [&] {
    while (!group.committed.empty() && *group.committed.front() == 0) group.committed.pop_front();
    return group.committed.size() <= groups_left;
  });
  if (!groups_left) group.is_fenced = false;  // the sums may be changed now
}

}  // namespace emulated
