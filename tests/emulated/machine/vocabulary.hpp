// What a kernel may ask of the machine: one function for each instruction that `ptx.cuh` names.
// Included by every emulated kernel, so it includes nothing.
#pragma once

namespace emulated {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct Dim {
  u32 x, y, z;
};

struct Place {
  Dim thread, block, block_size, grid_size;
  u32 cluster_rank, cluster_size;
};

extern const Place* here;  // of the thread that runs

enum class Type { bf16, fp16, tf32, fp32 };

// Shared memory is known by 32-bit addresses; `at_rank` names the same place in another block of
// the cluster. A generic write must be fenced before TMA or wgmma may read it.
u32 shared_start();
u32 at_rank(u32 address, u32 rank);
void read_shared(u32 address, void* to, u32 bytes);
void write_shared(u32 address, const void* from, u32 bytes);
void add_shared(u32 address, float value);
void fence_async_proxy();

// mbarrier
void barrier_init(u32 address, u32 count);
void barrier_arrive(u32 address, u32 count);
void barrier_expect(u32 address, u32 bytes, bool arrives);
void barrier_wait(u32 address, u32 parity);
bool barrier_passed(u32 address, u32 parity);

// Barriers of the block, the cluster and the warp
void block_sync(u32 id, u32 threads);  // 0 threads: all of the block
void block_arrive(u32 id, u32 threads);
void cluster_arrive();
void cluster_wait();
void warp_sync(u32 mask);
u32 shuffle(u32 mask, u32 value, u32 source_lane);
u32 ballot(u32 mask, bool value);

// griddepcontrol.wait: what earlier steps wrote is there from here on.
void wait_for_earlier_steps();

// setmaxnreg: a warpgroup gives registers up, or waits until the block has so many to spare.
void set_registers(u32 count, bool raises);

// Copies. Coordinates are innermost first; `ranks` is a mask of the cluster's blocks.
void tma_tiled(u32 to, const void* map, u32 barrier, u32 ranks, int rank, const int* at);
void tma_im2col(u32 to, const void* map, u32 barrier, u32 ranks, int rank, const int* at,
                const int* offsets);
void tma_store(const void* map, u32 from, int rank, const int* at, bool adds);
void bulk_store(void* to, u32 from, u32 bytes, bool adds);
void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier);
void bulk_commit();
void bulk_wait(u32 groups_left);
void copy_async(u32 to, const void* from, u32 bytes, u32 valid_bytes);
void copy_commit();
void copy_wait(u32 groups_left);
void copy_arrive(u32 barrier, bool counts_itself);

// Matrices
void load_matrices(u32 address, u32* out, int count, bool transposed);
void store_matrices(u32 address, const u32* in, int count, bool transposed);
void mma(float* d, const u32* a, const u32* b, const float* c, int k, Type type);
void wgmma(float* d, const u32* a, u64 a_tile, u64 b_tile, int n, bool accumulates, Type type,
           bool a_transposed, bool b_transposed);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(u32 groups_left);

u16 to_bf16(float value);
u16 to_fp16(float value);
float from_bf16(u16 value);
float from_fp16(u16 value);
u32 to_tf32(float value);
void add_global(float* to, float value);

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Memory of which bytes are missing until somebody waits for the steps before this one.
struct Hidden {
  unsigned char* at;
  const unsigned char *bytes, *is_missing;
  u64 count;
};

// How the harness starts a kernel.
struct Grid {
  u32 grid[3], cluster[3];
  u32 threads, smem_bytes;
  u64 seed;  // 0: copies land as late as they can; any other: at random
  const Hidden* hidden;
  u32 hidden_count;
};
int run(const Grid& grid, void (*body)(void**), void** arguments, char* report, u32 report_bytes);

}  // namespace emulated
