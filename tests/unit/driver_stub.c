// NVIDIA's and AMD's drivers without a GPU: objects load, and every call is written down as a line
// of JSON. `tw_parameters` says how many bytes each parameter of the next loaded function takes.
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROOM = 1 << 20, FUNCTIONS = 4096, MOST = 256, GPUS = 8 };
char tw_log[ROOM];
int tw_failure = 0; // what the next launch answers
int tw_load_failure = 0; // what loading answers
static int used = 0, functions = 0;
static int counts[FUNCTIONS], sizes[FUNCTIONS][MOST];
static __thread void *context = 0, *below = 0;

static void say(const char *form, ...) {
  static int silent = -1; // for several threads, which would write over each other's lines
  if (silent < 0) silent = getenv("TW_SILENT") != 0;
  if (silent) return;
  va_list values;
  va_start(values, form);
  used += vsnprintf(tw_log + used, ROOM - used, form, values);
  va_end(values);
}

void tw_forget(void) { tw_log[used = 0] = 0; }

void tw_parameters(int count, const int *bytes) {
  if (functions >= FUNCTIONS || count > MOST) abort();
  counts[functions] = count;
  memcpy(sizes[functions], bytes, count * sizeof *bytes);
}

static void numbers(const char *name, int count, const void *values, int width) {
  say(", \"%s\": [", name);
  for (int i = 0; i < count; ++i) {
    long long value = 0;
    if (width == 8) value = ((const int64_t *)values)[i];
    if (width == 4) value = ((const uint32_t *)values)[i];
    if (width == -4) value = ((const int32_t *)values)[i];
    say("%s%lld", i ? ", " : "", value);
  }
  say("]");
}

static int launched(void *function, const uint32_t *grid, const uint32_t *block, uint32_t smem,
                    void *stream, const uint32_t *cluster, int overlaps, void **parameters) {
  int nth = (int)((uintptr_t)function - 0xF00);
  say("{\"call\": \"launch\", \"function\": %d, \"smem\": %u, \"stream\": %llu", nth, smem,
      (unsigned long long)(uintptr_t)stream);
  numbers("grid", 3, grid, 4);
  numbers("block", 3, block, 4);
  numbers("cluster", cluster ? 3 : 0, cluster, 4);
  say(", \"overlaps\": %s", overlaps ? "true" : "false");
  say(", \"context\": %s, \"parameters\": [", context ? "true" : "false");
  for (int i = 0; i < counts[nth]; ++i) {
    say("%s\"", i ? ", " : "");
    for (int b = 0; b < sizes[nth][i]; ++b) say("%02x", ((unsigned char *)parameters[i])[b]);
    say("\"");
  }
  say("]}\n");
  int failed = tw_failure;
  tw_failure = 0;
  return failed;
}

static int loaded(void **module, const void *image) {
  say("{\"call\": \"load\", \"elf\": %s}\n", memcmp(image, "\177ELF", 4) ? "false" : "true");
  *module = (void *)0xAAA;
  return tw_load_failure;
}

static int found(void **function, const char *name) {
  say("{\"call\": \"function\", \"name\": \"%s\"}\n", name);
  *function = (void *)(uintptr_t)(0xF00 + functions++);
  return 0;
}

static int cleared(void *at, unsigned value, size_t size, void *stream) {
  say("{\"call\": \"clear\", \"at\": %llu, \"value\": %u, \"size\": %zu, \"stream\": %llu}\n",
      (unsigned long long)(uintptr_t)at, value & 0xFF, size, (unsigned long long)(uintptr_t)stream);
  return 0;
}

// ---------------------------------------------------------------------------------------- NVIDIA

typedef struct {
  int id, padding;
  uint32_t cluster[3];
  unsigned char rest[52];
} Attribute;
typedef struct {
  uint32_t grid[3], block[3], smem;
  void *stream;
  Attribute *attributes;
  uint32_t count;
} Configuration;

int cuInit(unsigned flags) { return (int)flags; }
// NVRTC 13.5 opens the driver and calls this without a look; an error makes it go on without.
int cuGetExportTable(const void **table, const void *id) { return (void)id, *table = NULL, 500; }
int cuDeviceGet(int *device, int nth) { return *device = nth, nth < -1 || nth >= GPUS ? 101 : 0; }
int cuDeviceGetAttribute(int *value, int kind, int device) {
  *value = kind == 75 ? 9 : kind == 76 ? 0 : 132; // compute capability, then multiprocessors
  return (void)device, 0;
}
int cuDevicePrimaryCtxRetain(void **made, int device) { return *made = (void *)(0xC0L + device), 0; }
int cuCtxGetCurrent(void **made) { return *made = context, 0; }
int cuCtxSetCurrent(void *made) { return context = made, 0; }
int cuCtxPushCurrent_v2(void *made) {
  say("{\"call\": \"push\", \"device\": %d}\n", (int)((uintptr_t)made - 0xC0));
  return below = context, context = made, 0;
}
int cuCtxPopCurrent_v2(void **made) {
  say("{\"call\": \"pop\"}\n");
  return *made = context, context = below, 0;
}
int cuModuleLoadData(void **module, const void *image) { return loaded(module, image); }
int cuModuleGetFunction(void **function, void *module, const char *name) {
  return (void)module, found(function, name);
}
int cuFuncSetAttribute(void *function, int kind, int value) {
  say("{\"call\": \"attribute\", \"kind\": %d, \"value\": %d}\n", kind, value);
  return (void)function, 0;
}
int cuGetErrorString(int code, const char **text) {
  return *text = code == 719 ? "unspecified launch failure" : "out of something", 0;
}
int cuMemsetD8Async(void *at, unsigned char value, size_t size, void *stream) {
  return cleared(at, value, size, stream);
}
int cuLaunchKernelEx(const Configuration *made, void *function, void **parameters, void **extra) {
  const uint32_t *cluster = 0;
  int overlaps = 0;
  if (extra) return 1;
  for (uint32_t i = 0; i < made->count; ++i) {
    const Attribute *one = &made->attributes[i];
    if (one->id != 4 && one->id != 6) return 1;
    if (one->id == 4) cluster = one->cluster;
    else overlaps = (int)one->cluster[0];
  }
  return launched(function, made->grid, made->block, made->smem, made->stream, cluster, overlaps,
                  parameters);
}

static int encoded(void *map, const char *kind, int type, uint32_t rank, void *at,
                   const uint64_t *sizes_, const uint64_t *strides, const uint32_t *steps) {
  static unsigned char serial = 0;
  if ((uintptr_t)map % 64) return 1;
  memset(map, ++serial, 128);
  say("{\"call\": \"%s\", \"serial\": %d, \"type\": %d, \"at\": %llu", kind, serial, type,
      (unsigned long long)(uintptr_t)at);
  numbers("sizes", rank, sizes_, 8);
  numbers("strides", rank - 1, strides, 8);
  numbers("steps", rank, steps, 4);
  return 0;
}
int cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *at, const uint64_t *sizes_,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps,
                           int interleave, int swizzle, int promotion, int fill) {
  if (encoded(map, "tiled", type, rank, at, sizes_, strides, steps)) return 1;
  numbers("box", rank, box, 4);
  say(", \"modes\": [%d, %d, %d, %d]}\n", interleave, swizzle, promotion, fill);
  return 0;
}
int cuTensorMapEncodeIm2col(void *map, int type, uint32_t rank, void *at, const uint64_t *sizes_,
                            const uint64_t *strides, const int *lower, const int *upper,
                            uint32_t channels, uint32_t pixels, const uint32_t *steps,
                            int interleave, int swizzle, int promotion, int fill) {
  if (encoded(map, "im2col", type, rank, at, sizes_, strides, steps)) return 1;
  numbers("lower", rank - 2, lower, -4);
  numbers("upper", rank - 2, upper, -4);
  say(", \"channels\": %u, \"pixels\": %u", channels, pixels);
  say(", \"modes\": [%d, %d, %d, %d]}\n", interleave, swizzle, promotion, fill);
  return 0;
}

// ------------------------------------------------------------------------------------------- AMD

static __thread int hip_device = 0;
int hipGetDevice(int *device) { return *device = hip_device, 0; }
int hipSetDevice(int device) {
  if (device < -1 || device >= GPUS) return 101;
  return hip_device = device, 0;
}
int hipModuleLoadData(void **module, const void *image) { return loaded(module, image); }
int hipModuleGetFunction(void **function, void *module, const char *name) {
  return (void)module, found(function, name);
}
int hipModuleUnload(void *module) { return module ? 0 : 1; }
const char *hipGetErrorString(int code) { return code ? "hip refuses" : "fine"; }
int hipMemsetAsync(void *at, int value, size_t size, void *stream) {
  return cleared(at, (unsigned)value, size, stream);
}
int hipModuleLaunchKernel(void *function, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx,
                          uint32_t by, uint32_t bz, uint32_t smem, void *stream, void **parameters,
                          void **extra) {
  uint32_t grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
  return extra ? 1 : launched(function, grid, block, smem, stream, 0, 0, parameters);
}
