// A HIP runtime without a GPU: modules load, launches are written down.
#define __HIP_PLATFORM_AMD__
#include <hip/hip_runtime_api.h>
#include <string.h>

enum { MOST = 64 };
unsigned int tw_grid[3], tw_block[3], tw_shared;
void *tw_stream, *tw_function;
int tw_count = 0; // how many arguments a launch has; set by the caller
uint64_t tw_arguments[MOST];

static hipError_t properties(hipDeviceProp_t *prop, int device) {
  (void)device;
  memset(prop, 0, sizeof *prop);
  strcpy(prop->gcnArchName, "gfx942:sramecc+:xnack-");
  prop->sharedMemPerBlock = 65536;
  prop->warpSize = 64;
  return hipSuccess;
}

static hipError_t get_function(hipFunction_t *function, hipModule_t module, const char *name) {
  (void)module, (void)name;
  *function = (hipFunction_t)0xF00D;
  return hipSuccess;
}

static hipError_t attribute(int *value, hipFunction_attribute kind, hipFunction_t function) {
  (void)function;
  *value = kind == HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return hipSuccess;
}

static hipError_t launch(hipFunction_t function, unsigned int gx, unsigned int gy, unsigned int gz,
                         unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared,
                         hipStream_t stream, void **parameters, void **extra) {
  (void)extra;
  unsigned int grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
  memcpy(tw_grid, grid, sizeof grid);
  memcpy(tw_block, block, sizeof block);
  tw_shared = shared;
  tw_stream = stream;
  tw_function = function;
  for (int i = 0; i < tw_count && i < MOST; ++i)
    memcpy(&tw_arguments[i], parameters[i], 8); // the caller keeps the bytes that count
  return hipSuccess;
}

hipError_t hipDriverGetVersion(int *version) {
  *version = 60000000;
  return hipSuccess;
}

static hipError_t ignore(void) { return hipSuccess; }

hipError_t hipGetProcAddress(const char *symbol, void **pfn, int version, uint64_t flags,
                             hipDriverProcAddressQueryResult *status) {
  (void)version, (void)flags, (void)status;
  *pfn = (void *)ignore;
  if (!strncmp(symbol, "hipGetDeviceProperties", 22))
    *pfn = (void *)properties;
  else if (!strcmp(symbol, "hipModuleGetFunction"))
    *pfn = (void *)get_function;
  else if (!strcmp(symbol, "hipFuncGetAttribute"))
    *pfn = (void *)attribute;
  else if (!strcmp(symbol, "hipModuleLaunchKernel"))
    *pfn = (void *)launch;
  return hipSuccess;
}
