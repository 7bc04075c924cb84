// Starts prepared launches through NVIDIA's and AMD's drivers, with little in the way.
//
// A launch is prepared once, by Python, as bytes that `Plan` describes. `tw_starter` turns them
// into a Python function `start(stream, *values) -> code`: values are addresses (integers) and
// tensor maps (bytes); the code is the driver's, 0 for success. Of Python's stable interface the few
// functions that are needed are declared here, so that no header of Python's is.
#include <cstdint>
#include <cstring>

#include "launching.hpp"

extern "C" {
struct PyObject;
using FastCall = PyObject *(*)(PyObject *, PyObject *const *, intptr_t);
struct PyMethodDef {
  const char *name;
  FastCall call;
  int flags;
  const char *text;
};
PyObject *PyCFunction_NewEx(PyMethodDef *, PyObject *self, PyObject *module);
char *PyBytes_AsString(PyObject *);
PyObject *PyErr_Occurred();
void *PyEval_SaveThread();
void PyEval_RestoreThread(void *);
unsigned long long PyLong_AsUnsignedLongLong(PyObject *);
PyObject *PyLong_FromLong(long);
}

namespace {

using namespace launching;

constexpr int kFastCall = 0x0080;

struct Driver {
  uint64_t is_cuda;
  void *launch, *clear, *current_context, *use_context;
};

// One kernel, or with no function a piece of memory to clear: the first parameter, `size` bytes.
struct Step {
  void *function;
  uint64_t size;
  Shape shape;
  uint32_t unused;
  uint64_t count;
  Parameter parameters[1];
};

struct Plan {
  const Driver *driver;
  void *context;
  uint64_t values;
  uint64_t steps;
};

// A thread that has not used the GPU yet has no context of NVIDIA's.
int enter(const Plan *plan) {
  if (!plan->driver->is_cuda) return 0;
  void *current = nullptr;
  int failed = reinterpret_cast<int (*)(void **)>(plan->driver->current_context)(&current);
  if (failed || current) return failed;
  return reinterpret_cast<int (*)(void *)>(plan->driver->use_context)(plan->context);
}

int perform(const Driver *driver, const Step *step, void *stream, void **parameters) {
  if (!step->function)
    return reinterpret_cast<int (*)(void *, int, size_t, void *)>(driver->clear)(
        *static_cast<void **>(parameters[0]), 0, step->size, stream);
  void *launch = driver->launch;
  return driver->is_cuda
             ? on_cuda(reinterpret_cast<CudaLaunch>(launch), step->shape, step->function, stream, parameters)
             : on_hip(reinterpret_cast<HipLaunch>(launch), step->shape, step->function, stream, parameters);
}

int run(const Plan *plan, const Step *step, void *stream, void **parameters) {
  void *thread = PyEval_SaveThread();  // a full queue blocks, and others may go on meanwhile
  int failed = enter(plan);
  if (!failed) failed = perform(plan->driver, step, stream, parameters);
  PyEval_RestoreThread(thread);
  return failed;
}

PyObject *start(PyObject *self, PyObject *const *values, intptr_t count) {
  const Plan *plan = reinterpret_cast<const Plan *>(PyBytes_AsString(self));
  if (static_cast<uint64_t>(count) != plan->values + 1) return PyLong_FromLong(-1);
  void *stream = reinterpret_cast<void *>(PyLong_AsUnsignedLongLong(values[0]));
  const Step *step = reinterpret_cast<const Step *>(plan + 1);
  for (uint64_t nth = 0; nth < plan->steps; ++nth) {
    uint64_t addresses[kMostParameters];
    alignas(64) char maps[kMostMaps][kMapBytes];
    void *parameters[kMostParameters];
    uint32_t mapped = 0;
    for (uint64_t at = 0; at < step->count; ++at) {
      const Parameter *one = &step->parameters[at];
      if (one->kind == kNumber) {
        parameters[at] = const_cast<uint64_t *>(&one->number);
      } else if (one->kind == kAddress) {
        addresses[at] = PyLong_AsUnsignedLongLong(values[1 + one->index]) + one->number;
        parameters[at] = &addresses[at];
      } else {
        const char *map = PyBytes_AsString(values[1 + one->index]);
        if (!map) return nullptr;
        parameters[at] = memcpy(maps[mapped++], map, kMapBytes);
      }
    }
    if (PyErr_Occurred()) return nullptr;  // some value was no address
    if (int failed = run(plan, step, stream, parameters)) return PyLong_FromLong(failed);
    step = reinterpret_cast<const Step *>(&step->parameters[step->count]);
  }
  return PyLong_FromLong(0);
}

PyMethodDef definition = {"start", start, kFastCall, "start(stream, *values) -> code"};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject *tw_starter(PyObject *plan) {
  return PyCFunction_NewEx(&definition, plan, nullptr);
}
