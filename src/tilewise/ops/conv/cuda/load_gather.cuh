// Loads by every thread of the load warps: 16 bytes (or 8, 4, 2) at a time, each at an address of its
// own, zeros outside the image. Serves any stride, padding, dilation and number of channels, and
// wastes nothing on few channels: taps and channels are one row of the reduction, cut into steps of
// 128 bytes wherever they end. Included by implicit.cuh.

#define SOURCE_PARAMETERS                                                                        \
  const ELEMENT *image, const ELEMENT *filter, int image_d, int image_h, int image_w,           \
      int image_pitch, i64 image_stride, i64 filter_stride, int filter_taps
#define SOURCE_ARGUMENTS                                                                         \
  image, filter, image_d, image_h, image_w, image_pitch, image_stride, filter_stride, filter_taps

constexpr int load_threads = 32 * LOAD_WARPS;
constexpr int loads_of_a_stage = load_threads;
constexpr int load_barrier = 1;                       // named: the load warps among themselves
constexpr int chunk_bytes = VECTOR * element_bytes;   // of one copy
constexpr int chunks = 128 / chunk_bytes;             // in a row
static_assert(CLUSTER == 1, "what is gathered is not shared");

DEVICE int reduction_steps(const Walk& walk, int in_channels) {
  return (walk.taps() * in_channels + tile_k - 1) / tile_k;
}

// One copy into `to`; 2-byte elements go through a register, as no asynchronous copy is so short.
DEVICE void copy_chunk(u32 to, const ELEMENT* from, bool is_inside) {
  if constexpr (chunk_bytes >= 4) copy_or_zero<chunk_bytes>(to, from, is_inside);
  else store_shared_u16(to, is_inside ? *(const u16*)from : (u16)0);
}

// Where a chunk of a row of 128 bytes lies in a tile, swizzled.
DEVICE u32 chunk_place(u32 row, u32 chunk) {
  const u32 byte = chunk * chunk_bytes;
  return swizzled<128>(row, byte / 16) + byte % 16;
}

struct Loader {
  StageRing ring;
  Tiles schedule;
  Walk walk;
  u32 stages, rank;
  int pixels, in_channels, out_channels;
  const ELEMENT *image, *filter;
  int image_d, image_h, image_w, image_pitch;
  i64 image_stride, filter_stride;
  int filter_taps;

  DEVICE void run(u32 thread) const {
    if (thread >= load_threads) return;
    const u32 corners = ring.barriers + StageRing::bytes;  // of the tile's pixels, 16 bytes each
    const int entries = walk.taps() * in_channels;
    Place at;
    for (int index = blockIdx.x; index < schedule.count(); index += gridDim.x) {
      const Tiles::Work work = schedule.work(index, rank);
      named_sync(load_barrier, load_threads);  // the tile before is done with its corners
      note_corners(corners, work, thread);
      named_sync(load_barrier, load_threads);
      for (int step = work.first; step < work.last; step++) {
        const u32 to = stages + at.stage * stage_bytes;
        ring.wait_empty(at);
        load_pixels(to, corners, work, step * tile_k, entries, thread);
        const u32 filter_to = to + pixel_bytes;
        if constexpr (BACKWARD) load_filter_across(filter_to, work, step * tile_k, entries, thread);
        else load_filter(filter_to, work, step * tile_k, entries, thread);
        if constexpr (chunk_bytes >= 4) {
          barrier_arrive_after_copies(ring.full(at));
        } else {
          fence_async();
          barrier_arrive(ring.full(at));
        }
        at.next();
      }
    }
  }

  // The corner of each pixel's window; pixels beyond the last have an image of -1.
  DEVICE void note_corners(u32 corners, const Tiles::Work& work, u32 thread) const {
    for (u32 row = thread; row < TILE_M; row += load_threads) {
      const int pixel = work.pixel_tile * TILE_M + (int)row;
      Pixel corner = walk.corner(walk.pixel(pixel));
      if (pixel >= pixels) corner.n = -1;
      store_shared_u32x4(corners + row * 16,
                         {(u32)corner.n, (u32)corner.d, (u32)corner.h, (u32)corner.w});
    }
  }

  // Thread: one chunk of every row whose number is thread / chunks modulo load_threads / chunks.
  DEVICE void load_pixels(u32 to, u32 corners, const Tiles::Work& work, int first, int entries,
                          u32 thread) const {
    const u32 chunk = thread % chunks;
    const int entry = first + (int)chunk * VECTOR;
    const Tap tap(walk, entry / in_channels);
    const int channel = work.group * in_channels + entry % in_channels;
    const int deep = tap.deep(walk), down = tap.down(walk), right = tap.right(walk);
    const bool is_entry = entry < entries;
#pragma unroll 4
    for (u32 row = thread / chunks; row < TILE_M; row += load_threads / chunks) {
      const u32x4 corner = load_shared_u32x4(corners + row * 16);
      const int n = (int)corner.x, d = (int)corner.y + deep, h = (int)corner.z + down;
      const int w = (int)corner.w + right;
      const bool is_inside = is_entry && n >= 0 && (u32)d < (u32)image_d && (u32)h < (u32)image_h &&
                             (u32)w < (u32)image_w;
      const int pixel = (d * image_h + h) * image_w + w;
      const i64 place = is_inside ? n * image_stride + (i64)pixel * image_pitch + channel : 0;
      copy_chunk(to + chunk_place(row, chunk), image + place, is_inside);
    }
  }

  // Forward: rows are channels of the result, and a row of the filter is the reduction itself.
  DEVICE void load_filter(u32 to, const Tiles::Work& work, int first, int entries,
                          u32 thread) const {
    const u32 chunk = thread % chunks;
    const int entry = first + (int)chunk * VECTOR;
#pragma unroll 4
    for (u32 row = thread / chunks; row < TILE_N; row += load_threads / chunks) {
      const int column = work.channel_tile * TILE_N + (int)row;
      const bool is_inside = entry < entries && column < out_channels;
      const i64 place = (i64)(work.group * out_channels + column) * filter_stride + entry;
      copy_chunk(to + chunk_place(row, chunk), filter + (is_inside ? place : 0), is_inside);
    }
  }

  // Backward: rows are the reduction (a tap and a filter each), panels of 64 channels of the result.
  DEVICE void load_filter_across(u32 to, const Tiles::Work& work, int first, int entries,
                                 u32 thread) const {
    const u32 chunk = thread % chunks;
#pragma unroll 1
    for (u32 row = thread / chunks; row < tile_k; row += load_threads / chunks) {
      const int entry = first + (int)row;
      const Tap tap(walk, entry / in_channels);
      const i64 line = (work.group * in_channels + entry % in_channels) * filter_stride +
                       (i64)tap.place(walk) * out_channels;
#pragma unroll
      for (int panel = 0; panel < TILE_N / 64; panel++) {
        const int column = work.channel_tile * TILE_N + panel * 64 + (int)chunk * VECTOR;
        const bool is_inside = entry < entries && column < out_channels;
        copy_chunk(to + panel * tile_k * 128 + chunk_place(row, chunk),
                   filter + (is_inside ? line + column : 0), is_inside);
      }
    }
  }
};
