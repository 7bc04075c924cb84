// Loads of a filter's gradient by every thread of the load warps: 16 bytes (or 8, 4, 2) at a time,
// zeros outside the image. Included by wgrad.cuh.

#define SOURCE_PARAMETERS                                                                     \
  const ELEMENT *dy, const ELEMENT *x, int image_d, int image_h, int image_w, int image_pitch, \
      i64 image_stride, int dy_pitch, i64 dy_stride
#define SOURCE_ARGUMENTS dy, x, image_d, image_h, image_w, image_pitch, image_stride, dy_pitch, dy_stride

constexpr int load_threads = 32 * LOAD_WARPS;
constexpr int loads_of_a_stage = load_threads;
constexpr int chunk_bytes = VECTOR * (int)sizeof(ELEMENT);  // of one copy
constexpr int chunks = 128 / chunk_bytes;                   // in a pixel's 64 channels
static_assert(load_threads % chunks == 0, "a thread keeps to one column of chunks");

// One copy into `to`; 2-byte elements go through a register, as no asynchronous copy is so short.
DEVICE void copy_chunk(u32 to, const ELEMENT* from, bool is_inside) {
  if constexpr (chunk_bytes >= 4) copy_or_zero<chunk_bytes>(to, from, is_inside);
  else store_shared_u16(to, is_inside ? *(const u16*)from : (u16)0);
}

// What a thread reads of each panel of entries: always the same tap and channel.
struct Column {
  int deep, down, right, channel;
  bool is_inside;
};

struct Loader {
  StageRing ring;
  Schedule schedule;
  Walk walk;
  Entries entries;
  u32 stages;
  int in_channels, out_channels, pixels;
  const ELEMENT *dy, *x;
  int image_d, image_h, image_w, image_pitch;
  i64 image_stride;
  int dy_pitch;
  i64 dy_stride;

  DEVICE void run(u32 thread) const {
    if (thread >= load_threads) return;
    Place at;
    for (int index = schedule.begin(); index < schedule.count(); index += schedule.stride()) {
      const Schedule::Work work = schedule.work(index);
      Column columns[x_panels];
#pragma unroll
      for (int panel = 0; panel < x_panels; panel++) columns[panel] = column(work, panel, thread);
      for (int step = work.first; step < work.last; step++) {
        ring.wait_empty(at);
#pragma unroll 1
        for (u32 row = thread / chunks; row < step_pixels; row += load_threads / chunks)
          load_pixel(stages + at.stage * stage_bytes, work, columns, row,
                     step * step_pixels + (int)row, thread);
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

  DEVICE Column column(const Schedule::Work& work, int panel, u32 thread) const {
    const int entry = work.column + panel * 64 + (int)(thread % chunks) * VECTOR;
    const Tap tap(walk, entries.tap(entry));
    return {tap.deep(walk), tap.down(walk), tap.right(walk),
            work.group * in_channels + entries.channel(entry), entry < entries.columns()};
  }

  // One chunk of every panel, for one pixel.
  DEVICE void load_pixel(u32 stage, const Schedule::Work& work, const Column (&columns)[x_panels],
                         u32 row, int pixel, u32 thread) const {
    const u32 byte = thread % chunks * chunk_bytes;
    const u32 to = stage + swizzled<128>(row, byte / 16) + byte % 16;
    const bool is_pixel = pixel < pixels;
    const Pixel at = walk.pixel(is_pixel ? pixel : 0), corner = walk.corner(at);
    const ELEMENT* line =
        dy + at.n * dy_stride +
        (i64)((at.d * walk.size_h + at.h) * walk.size_w + at.w) * dy_pitch;
#pragma unroll
    for (int panel = 0; panel < dy_panels; panel++) {
      const int k = work.row + panel * 64 + (int)(thread % chunks) * VECTOR;
      const bool is_inside = is_pixel && k < out_channels;
      copy_chunk(to + panel * panel_bytes,
                 line + (is_inside ? work.group * out_channels + k : 0), is_inside);
    }
#pragma unroll
    for (int panel = 0; panel < x_panels; panel++) {
      const Column& c = columns[panel];
      const int d = corner.d + c.deep, h = corner.h + c.down, w = corner.w + c.right;
      const bool is_inside = is_pixel && c.is_inside && (u32)d < (u32)image_d &&
                             (u32)h < (u32)image_h && (u32)w < (u32)image_w;
      const int place = (d * image_h + h) * image_w + w;
      const i64 from = is_inside ? at.n * image_stride + (i64)place * image_pitch + c.channel : 0;
      copy_chunk(to + (dy_panels + panel) * panel_bytes, x + from, is_inside);
    }
  }
};
