// Loads of a filter's gradient by TMA: one thread starts all copies of a stage. With two load warps,
// one brings dy and the other x. Included by wgrad.cuh.

#define SOURCE_PARAMETERS \
  const __grid_constant__ TensorMap dy_map, const __grid_constant__ TensorMap x_map
#define SOURCE_ARGUMENTS &dy_map, &x_map

constexpr int loads_of_a_stage = LOAD_WARPS;
static_assert(LOAD_WARPS <= 2, "one warp for dy, one for x");

// What a panel of entries reads, the same in every step: a channel, and its tap's distance.
struct Panel {
  int c;
  u16 right, down, deep;
};

struct Loader {
  StageRing ring;
  Schedule schedule;
  Walk walk;
  Entries entries;
  u32 stages;
  int in_channels, out_channels, pixels;
  const TensorMap *dy_map, *x_map;

  DEVICE void run(u32 thread) const {
    if (thread % 32 != 0 || thread / 32 >= LOAD_WARPS) return;
    const bool brings_dy = LOAD_WARPS == 1 || thread == 0;
    const bool brings_x = LOAD_WARPS == 1 || thread != 0;
    constexpr u32 dy_bytes = dy_panels * panel_bytes, x_bytes = x_panels * panel_bytes;
    const Pixel next = walk.pixel(step_pixels);  // from one step to the next
    Place at;
    for (int index = schedule.begin(); index < schedule.count(); index += schedule.stride()) {
      const Schedule::Work work = schedule.work(index);
      Panel panels[x_panels];
#pragma unroll
      for (int i = 0; i < x_panels; i++) panels[i] = panel(work, i);
      Pixel pixel = walk.pixel(work.first * step_pixels);
      for (int step = work.first; step < work.last; step++, pixel = walk.plus(pixel, next)) {
        const u32 to = stages + at.stage * stage_bytes;
        ring.wait_empty(at);
        ring.expect(at, (brings_dy ? dy_bytes : 0) + (brings_x ? x_bytes : 0));
        if (brings_dy) load_dy(to, ring.full(at), work, step * step_pixels, pixel);
        if (brings_x) load_x(to + dy_bytes, ring.full(at), panels, step * step_pixels, pixel);
        at.next();
      }
    }
  }

  DEVICE void load_dy(u32 to, u32 barrier, const Schedule::Work& work, int row, Pixel at) const {
#pragma unroll
    for (int panel = 0; panel < dy_panels; panel++, to += panel_bytes) {
      const int k = work.group * out_channels + work.row + panel * 64;
#if GRADIENT_ROWS
      tma_load(to, dy_map, barrier, k, row);
#elif SPATIAL == 2
      tma_load_im2col(to, dy_map, barrier, k, at.w, at.h, at.n, 0, 0);
#else
      tma_load_im2col(to, dy_map, barrier, k, at.w, at.h, at.d, at.n, 0, 0, 0);
#endif
    }
  }

  // Panels beyond the last tap are copied like the last: their sums are not stored.
  DEVICE Panel panel(const Schedule::Work& work, int panel) const {
    const int last = entries.columns() - 64, column = work.column + panel * 64;
    const int inside = column < last ? column : last;
    const Tap tap(walk, entries.tap(inside));
    return {work.group * in_channels + entries.channel(inside), (u16)tap.right(walk),
            (u16)tap.down(walk), (u16)tap.deep(walk)};
  }

  DEVICE void load_x(u32 to, u32 barrier, const Panel (&panels)[x_panels], int row, Pixel at) const {
    const Pixel corner = walk.corner(at);
#pragma unroll
    for (int i = 0; i < x_panels; i++, to += panel_bytes) {
      const Panel& p = panels[i];
#if LOADER == LOAD_ROWS
      tma_load(to, x_map, barrier, p.c, row);
#elif SPATIAL == 2
      tma_load_im2col(to, x_map, barrier, p.c, corner.w, corner.h, corner.n, p.right, p.down);
#else
      tma_load_im2col(to, x_map, barrier, p.c, corner.w, corner.h, corner.d, corner.n, p.right,
                      p.down, p.deep);
#endif
    }
  }
};
