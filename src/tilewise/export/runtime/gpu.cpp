// @FACTS@
// Kernels of a GPU: objects are loaded when a plan first needs them, and launched through the
// vendor's driver, which is opened when the library is. Nothing else is linked.
#include <dlfcn.h>

#include <initializer_list>
#include <map>
#include <mutex>

#include "gpu_objects.hpp"
#include "internal.hpp"

namespace tilewise::detail {

const uintptr_t address_alignment = 16;

namespace {

using launching::kMapBytes, launching::kMostMaps, launching::kMostParameters;
constexpr size_t kRememberedMaps = 64;

constexpr std::initializer_list<const char *> kCudaNames = {"libcuda.so.1", "libcuda.so"};
constexpr std::initializer_list<const char *> kHipNames = {"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"};
constexpr int kMajorAttribute = 75, kMinorAttribute = 76, kUnitsAttribute = 16;
constexpr int kSharedSizeAttribute = 8, kClusterSizeAttribute = 14;
constexpr int kPortableCluster = 8;

// The driver's functions; those of the other vendor stay null.
struct Driver {
  int (*init)(unsigned);
  int (*device_get)(int *, int);
  int (*device_attribute)(int *, int, int);
  int (*retain)(void **, int);
  int (*current)(void **);
  int (*use)(void *);
  int (*module_load)(void **, const void *);
  int (*module_function)(void **, void *, const char *);
  int (*function_set)(void *, int, int);
  int (*error_text)(int, const char **);
  int (*clear)(void *, unsigned char, size_t, void *);
  int (*push)(void *);
  int (*pop)(void **);
  launching::CudaLaunch launch;
  int (*map_tiled)(void *, int, uint32_t, void *, const uint64_t *, const uint64_t *, const uint32_t *,
                   const uint32_t *, int, int, int, int);
  int (*map_im2col)(void *, int, uint32_t, void *, const uint64_t *, const uint64_t *, const int *, const int *,
                    uint32_t, uint32_t, const uint32_t *, int, int, int, int);
  int (*hip_get_device)(int *);
  int (*hip_set_device)(int);
  int (*hip_module_unload)(void *);
  const char *(*hip_error_text)(int);
  int (*hip_clear)(void *, int, size_t, void *);
  launching::HipLaunch hip_launch;
};

template <class Function>
bool find(void *library, const char *name, Function &found) {
  found = reinterpret_cast<Function>(dlsym(library, name));
  return found != nullptr;
}

bool find_cuda(void *library, Driver &d) {
  return find(library, "cuInit", d.init) && find(library, "cuDeviceGet", d.device_get) &&
         find(library, "cuDeviceGetAttribute", d.device_attribute) &&
         find(library, "cuDevicePrimaryCtxRetain", d.retain) && find(library, "cuCtxGetCurrent", d.current) &&
         find(library, "cuCtxSetCurrent", d.use) && find(library, "cuCtxPushCurrent_v2", d.push) &&
         find(library, "cuCtxPopCurrent_v2", d.pop) && find(library, "cuModuleLoadData", d.module_load) &&
         find(library, "cuModuleGetFunction", d.module_function) &&
         find(library, "cuFuncSetAttribute", d.function_set) && find(library, "cuGetErrorString", d.error_text) &&
         find(library, "cuMemsetD8Async", d.clear) && find(library, "cuLaunchKernelEx", d.launch) &&
         find(library, "cuTensorMapEncodeTiled", d.map_tiled) &&
         find(library, "cuTensorMapEncodeIm2col", d.map_im2col);
}

bool find_hip(void *library, Driver &d) {
  return find(library, "hipModuleLoadData", d.module_load) &&
         find(library, "hipModuleGetFunction", d.module_function) &&
         find(library, "hipModuleUnload", d.hip_module_unload) &&
         find(library, "hipGetDevice", d.hip_get_device) && find(library, "hipSetDevice", d.hip_set_device) &&
         find(library, "hipGetErrorString", d.hip_error_text) &&
         find(library, "hipMemsetAsync", d.hip_clear) && find(library, "hipModuleLaunchKernel", d.hip_launch);
}

}  // namespace

struct Backend {
  Driver driver{};
  int device = 0;
  void *context = nullptr;
  std::mutex lock;
  void *functions[kObjects ? kObjects : 1] = {};

  const char *why(int code) const {
    if (!kIsCuda) return driver.hip_error_text(code);
    const char *text = nullptr;
    driver.error_text(code, &text);
    return text ? text : "an error that the driver does not know";
  }
  tilewise_status failed(Text *text, const char *what, int code) const {
    if (text) text->put(what), text->put(why(code));
    return TILEWISE_FAILED;
  }
};

// While it lives, the thread's GPU is the backend's. A thread that has used none keeps it.
class Entered {
 public:
  explicit Entered(const Backend &backend) : driver_(backend.driver) {
    if (!kIsCuda) {
      code_ = driver_.hip_get_device(&before_);
      if (!code_ && before_ != backend.device) code_ = driver_.hip_set_device(backend.device), is_other_ = !code_;
      return;
    }
    void *now = nullptr;
    code_ = driver_.current(&now);
    if (code_ || now == backend.context) return;
    code_ = now ? driver_.push(backend.context) : driver_.use(backend.context);
    is_other_ = now && !code_;
  }
  ~Entered() {
    void *ours = nullptr;
    if (is_other_ && kIsCuda) driver_.pop(&ours);
    if (is_other_ && !kIsCuda) driver_.hip_set_device(before_);
  }
  Entered(const Entered &) = delete;
  Entered &operator=(const Entered &) = delete;
  int code() const { return code_; }

 private:
  const Driver &driver_;
  int code_ = 0, before_ = 0;
  bool is_other_ = false;
};

// A launch whose objects are loaded. Tensor maps depend on addresses: recent ones are kept.
struct Ready {
  std::shared_ptr<Backend> backend;
  Launch launch;
  std::vector<void *> functions;
  std::vector<launching::Shape> shapes;
  struct Encoded {
    const void *address = nullptr;
    alignas(64) unsigned char bytes[kMapBytes];
  };
  mutable std::mutex lock;
  mutable std::vector<std::vector<Encoded>> maps;  // of each map
  mutable std::vector<size_t> oldest;
};

namespace {

bool refuse(Text *why, const char *text) {
  if (why) why->put(text);
  return false;
}

bool check_device(Backend &made, Text *why) {
  if (!kIsCuda) {
    const Entered entered(made);
    if (entered.code()) return made.failed(why, "there is no such device: ", entered.code()), false;
    // HIP has no number for an architecture; a device of another one loads none of the kernels.
    void *module = nullptr;
    int refusal = made.driver.module_load(&module, gpu_objects[0].image);
    if (!refusal) refusal = made.driver.hip_module_unload(module);
    if (!refusal) return true;
    if (why) why->put("the library is for "), why->put(kArch), why->put(", whose kernels the device does not load: ");
    return made.failed(why, "", refusal), false;
  }
  int code = made.driver.init(0), device = 0, major = 0, minor = 0, units = 0;
  if (!code) code = made.driver.device_get(&device, made.device);
  if (!code) code = made.driver.device_attribute(&major, kMajorAttribute, device);
  if (!code) code = made.driver.device_attribute(&minor, kMinorAttribute, device);
  if (!code) code = made.driver.device_attribute(&units, kUnitsAttribute, device);
  if (!code) code = made.driver.retain(&made.context, device);
  if (code) return made.failed(why, "the device cannot be used: ", code), false;
  if (major != kMajor || minor != kMinor) {
    if (why) {
      why->put("the library is for ");
      why->put(kArch);
      why->put(", the device is of compute capability ");
      why->put(static_cast<int64_t>(major)), why->put("."), why->put(static_cast<int64_t>(minor));
    }
    return false;
  }
  if (units < kUnits) {
    // Kernels whose blocks wait for each other must all be resident at once.
    if (why) {
      why->put("the library was exported for ");
      why->put(static_cast<int64_t>(kUnits)), why->put(" multiprocessors, the device has ");
      why->put(static_cast<int64_t>(units));
    }
    return false;
  }
  return true;
}

// The object's function, loaded on first use.
void *function_of(Backend &backend, int32_t object, Text *why) {
  std::lock_guard<std::mutex> holding(backend.lock);
  void *&found = backend.functions[object];
  if (found) return found;
  const GpuObject &of = gpu_objects[object];
  const Driver &d = backend.driver;
  void *module = nullptr, *function = nullptr;
  const Entered entered(backend);
  int code = entered.code();
  if (!code) code = d.module_load(&module, of.image);
  if (!code) code = d.module_function(&function, module, of.function);
  constexpr uint32_t kUsual = 48 << 10;  // what needs no asking for
  if (!code && kIsCuda && of.smem_bytes > kUsual)
    code = d.function_set(function, kSharedSizeAttribute, static_cast<int>(of.smem_bytes));
  if (!code && kIsCuda && of.cluster_size > kPortableCluster)
    code = d.function_set(function, kClusterSizeAttribute, 1);
  if (code) return backend.failed(why, "a kernel cannot be loaded: ", code), nullptr;
  return found = function;
}

int encode(const Driver &d, const Map &map, const void *address, void *out) {
  void *at = const_cast<char *>(static_cast<const char *>(address) + map.offset);
  const uint32_t rank = static_cast<uint32_t>(map.rank);
  if (map.is_im2col)
    return d.map_im2col(out, map.type, rank, at, map.sizes, map.strides, map.lower, map.upper, map.channels,
                        map.pixels, map.steps, 0, map.swizzle, map.promotion, 0);
  return d.map_tiled(out, map.type, rank, at, map.sizes, map.strides, map.box, map.steps, 0, map.swizzle,
                     map.promotion, 0);
}

// Copies every map of the launch for these addresses to `out`.
int map_all(const Ready &ready, const void *const *tensors, unsigned char (*out)[kMapBytes]) {
  std::lock_guard<std::mutex> holding(ready.lock);
  for (size_t i = 0; i < ready.launch.maps.size(); ++i) {
    const Map &map = ready.launch.maps[i];
    const void *address = tensors[map.tensor];
    auto &known = ready.maps[i];
    const Ready::Encoded *found = nullptr;
    for (const auto &one : known)
      if (one.address == address) found = &one;
    if (!found) {
      if (known.size() < kRememberedMaps) known.emplace_back(), ready.oldest[i] = known.size() - 1;
      else ready.oldest[i] = (ready.oldest[i] + 1) % kRememberedMaps;
      Ready::Encoded &fresh = known[ready.oldest[i]];
      fresh.address = nullptr;
      const int code = encode(ready.backend->driver, map, address, fresh.bytes);
      if (code) return code;
      fresh.address = address;
      found = &fresh;
    }
    std::memcpy(out[i], found->bytes, kMapBytes);
  }
  return 0;
}

int clear(const Driver &d, void *at, int64_t bytes, void *stream) {
  if (!kIsCuda) return d.hip_clear(at, 0, static_cast<size_t>(bytes), stream);
  return d.clear(at, 0, static_cast<size_t>(bytes), stream);
}

int launch_one(const Driver &d, const launching::Shape &shape, void *function, void *stream, void **parameters) {
  return kIsCuda ? launching::on_cuda(d.launch, shape, function, stream, parameters)
                 : launching::on_hip(d.hip_launch, shape, function, stream, parameters);
}

launching::Shape shape_of(const Step &step) {
  const GpuObject &of = gpu_objects[step.object];
  launching::Shape made{};
  std::memcpy(made.grid, step.grid, sizeof made.grid);
  std::memcpy(made.cluster, step.cluster, sizeof made.cluster);
  made.threads = of.threads;
  made.smem_bytes = of.smem_bytes;
  made.overlaps = step.overlaps;
  return made;
}

}  // namespace

std::shared_ptr<Backend> open_backend(const tilewise_options &options, Text *why) {
  // Kernels stay loaded: work may be under way when a library is closed, and who opens it again
  // finds them. Never destroyed, as threads may outlive what a process destroys when it ends.
  static auto &opened = *new std::map<int32_t, std::shared_ptr<Backend>>;
  static std::mutex &lock = *new std::mutex;
  const std::lock_guard<std::mutex> holding(lock);
  const auto known = opened.find(options.device);
  if (known != opened.end()) return known->second;
  auto made = std::make_shared<Backend>();
  made->device = options.device;
  void *library = nullptr;
  for (const char *name : kIsCuda ? kCudaNames : kHipNames)
    if (!library) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    refuse(why, kIsCuda ? "there is no libcuda.so.1 here, the driver of NVIDIA's GPUs"
                        : "there is no libamdhip64.so here, the driver of AMD's GPUs");
    return nullptr;
  }
  if (!(kIsCuda ? find_cuda : find_hip)(library, made->driver)) {
    refuse(why, "the driver is too old: it has not all of the functions that kernels need");
    return nullptr;
  }
  if (!check_device(*made, why)) return nullptr;
  return opened[options.device] = made;
}

std::shared_ptr<Ready> make_ready(const std::shared_ptr<Backend> &backend, int32_t, int32_t, Launch &launch,
                                  Text *why) {
  auto made = std::make_shared<Ready>();
  made->backend = backend;
  for (const Step &step : launch.steps) {
    if (step.parameters.size() > kMostParameters || launch.maps.size() > kMostMaps)
      return refuse(why, "a kernel has too many parameters"), nullptr;
    void *function = step.object < 0 ? nullptr : function_of(*backend, step.object, why);
    if (step.object >= 0 && !function) return nullptr;
    made->functions.push_back(function);
    made->shapes.push_back(step.object < 0 ? launching::Shape{} : shape_of(step));
  }
  made->maps.resize(launch.maps.size());
  made->oldest.resize(launch.maps.size());
  made->launch = launch;
  return made;
}

tilewise_status run(const Ready &ready, const void *const *tensors, void *workspace, void *stream, bool is_cleared,
                    Text *why) {
  const Backend &backend = *ready.backend;
  const Launch &launch = ready.launch;
  const Entered entered(backend);
  int code = entered.code();
  if (code) return backend.failed(why, "the device cannot be used: ", code);
  alignas(64) unsigned char maps[kMostMaps][kMapBytes];
  if (!launch.maps.empty() && (code = map_all(ready, tensors, maps)))
    return backend.failed(why, "a tensor cannot be described to the device: ", code);
  if (launch.zeroed_bytes && !is_cleared && (code = clear(backend.driver, workspace, launch.zeroed_bytes, stream)))
    return backend.failed(why, "the workspace cannot be cleared: ", code);
  for (size_t nth = 0; nth < launch.steps.size(); ++nth) {
    const Step &step = launch.steps[nth];
    uint64_t values[kMostParameters];
    void *parameters[kMostParameters];
    for (size_t i = 0; i < step.parameters.size(); ++i) {
      const Parameter &one = step.parameters[i];
      parameters[i] = &values[i];
      if (one.kind == kNumber) {
        values[i] = one.number;
      } else if (one.kind == kMap) {
        parameters[i] = maps[one.index];
      } else {
        const void *base = one.index == Launch::kWorkspace ? workspace : tensors[one.index];
        values[i] = reinterpret_cast<uintptr_t>(base) + one.number;
      }
    }
    code = step.object >= 0
               ? launch_one(backend.driver, ready.shapes[nth], ready.functions[nth], stream, parameters)
               : clear(backend.driver, reinterpret_cast<void *>(static_cast<uintptr_t>(values[0])), step.clear_bytes,
                       stream);
    if (code) return backend.failed(why, "a kernel cannot be launched: ", code);
  }
  return TILEWISE_OK;
}

}  // namespace tilewise::detail
