// Times `plan` and `execute` of an exported library beside cublasLtMatmul with its heuristic.
// Built and run by cpp_dispatch.py; needs CUDA's headers, cuBLASLt and a GPU.
#include <cublasLt.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "tilewise.hpp"

namespace {

constexpr int kRounds = 200, kCalls = 50;
constexpr size_t kLibraryWorkspace = 32 << 20;

// The median over rounds of the mean microseconds of a call; `between` runs untimed after a round.
template <class Call, class Between>
double median_us(const Call &call, const Between &between, int calls = kCalls) {
  std::vector<double> rounds;
  for (int round = 0; round < kRounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) call(round * calls + i);
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    rounds.push_back(took.count() / calls);
    between();
  }
  std::nth_element(rounds.begin(), rounds.begin() + kRounds / 2, rounds.end());
  return rounds[kRounds / 2];
}

void must(bool holds, const char *what) {
  if (!holds) std::fprintf(stderr, "%s failed\n", what), std::exit(1);
}

// C = A B^T of row-major bf16, as cuBLASLt sees it: column-major, transposed.
struct Vendor {
  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
  cublasLtMatmulPreference_t preference = nullptr;
  cublasLtMatmulHeuristicResult_t found{};

  Vendor(int64_t m, int64_t n, int64_t k) {
    const cublasOperation_t turned = CUBLAS_OP_T;
    must(!cublasLtCreate(&handle), "cublasLtCreate");
    must(!cublasLtMatmulDescCreate(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "a description");
    cublasLtMatmulDescSetAttribute(product, CUBLASLT_MATMUL_DESC_TRANSA, &turned, sizeof turned);
    must(!cublasLtMatrixLayoutCreate(&a, CUDA_R_16BF, k, n, k), "a layout");
    must(!cublasLtMatrixLayoutCreate(&b, CUDA_R_16BF, k, m, k), "a layout");
    must(!cublasLtMatrixLayoutCreate(&c, CUDA_R_16BF, n, m, n), "a layout");
    must(!cublasLtMatmulPreferenceCreate(&preference), "a preference");
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                         &kLibraryWorkspace, sizeof kLibraryWorkspace);
    choose();
  }
  void choose() {
    int count = 0;
    must(!cublasLtMatmulAlgoGetHeuristic(handle, product, a, b, c, c, preference, 1, &found, &count) && count,
         "the heuristic");
  }
  void run(const void *x, const void *w, void *y, void *workspace, cudaStream_t stream) {
    const float one = 1, zero = 0;
    must(!cublasLtMatmul(handle, product, &one, w, a, x, b, &zero, y, c, y, c, &found.algo, workspace,
                         kLibraryWorkspace, stream),
         "cublasLtMatmul");
  }
};

// A kernel that does nothing, launched by the driver's own call: what no library can go below.
class Bare {
 public:
  Bare() {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    auto *load = reinterpret_cast<CUresult (*)(CUmodule *, const void *)>(dlsym(driver, "cuModuleLoadData"));
    auto *find = reinterpret_cast<CUresult (*)(CUfunction *, CUmodule, const char *)>(
        dlsym(driver, "cuModuleGetFunction"));
    launch_ = reinterpret_cast<Launch>(dlsym(driver, "cuLaunchKernelEx"));
    CUmodule module;
    must(launch_ && !load(&module, kText) && !find(&function_, module, "nothing"), "a bare kernel");
  }
  void run(cudaStream_t stream) {
    uint64_t values[3] = {};
    void *parameters[3] = {&values[0], &values[1], &values[2]};
    CUlaunchConfig made{};
    made.gridDimX = made.gridDimY = made.gridDimZ = made.blockDimY = made.blockDimZ = 1;
    made.blockDimX = 128;
    made.hStream = stream;
    must(!launch_(&made, function_, parameters, nullptr), "cuLaunchKernelEx");
  }

 private:
  using Launch = CUresult (*)(const CUlaunchConfig *, CUfunction, void **, void **);
  static constexpr const char *kText =
      ".version 7.8\n.target sm_90\n.address_size 64\n"
      ".visible .entry nothing(.param .u64 a, .param .u64 b, .param .u64 c) { ret; }\n";
  Launch launch_ = nullptr;
  CUfunction function_ = nullptr;
};

}  // namespace

int main() {
  must(!cudaFree(nullptr), "CUDA");
  auto library = tilewise::Library::open();
  if (!library) return std::printf("%s\n", library.why().c_str()), 2;
  cudaStream_t stream;
  must(!cudaStreamCreate(&stream), "a stream");
  Bare bare;
  std::printf("%6s %6s %6s  %10s %10s %10s %10s %10s %10s  %s\n", "M", "N", "K", "plan new", "plan kept", "execute",
              "bare", "heuristic", "cublasLt", "kernel");
  const int64_t shapes[][3] = {{16, 4096, 4096}, {512, 2048, 2048}, {4096, 4096, 512}};
  for (const auto &shape : shapes) {
    const int64_t m = shape[0], n = shape[1], k = shape[2];
    tilewise::GemmProblem problem;
    problem.m = m, problem.n = n, problem.k = k;
    auto plan = library->plan(problem);
    if (!plan) return std::printf("%s\n", plan.why().c_str()), 1;
    void *x, *w, *y, *workspace, *own;
    const size_t own_bytes = static_cast<size_t>(plan->workspace_bytes());
    must(!cudaMalloc(&x, 2 * m * k) && !cudaMalloc(&w, 2 * n * k) && !cudaMalloc(&y, 2 * m * n) &&
             !cudaMalloc(&workspace, kLibraryWorkspace) && !cudaMalloc(&own, own_bytes + 16),
         "memory");
    must(!cudaMemset(own, 0, own_bytes + 16), "memory");
    Vendor vendor(m, n, k);
    const auto settle = [&] { cudaStreamSynchronize(stream); };
    const auto nothing = [] {};
    // New problems: another M each time, past the first so that none is remembered.
    tilewise::GemmProblem next = problem;
    const double fresh = median_us(
        [&](int at) {
          next.m = 128 + at;
          must(bool(library->plan(next)), "a plan");
        },
        nothing);
    const double kept = median_us([&](int) { must(bool(library->plan(problem)), "a plan"); }, nothing);
    const double execute = median_us(
        [&](int) {
          must(bool(plan->execute({x, w, y}, own, plan->workspace_bytes(), stream, true)), "execute");
        },
        settle);
    const double least = median_us([&](int) { bare.run(stream); }, settle);
    const double heuristic = median_us([&](int) { vendor.choose(); }, nothing);
    const double theirs = median_us([&](int) { vendor.run(x, w, y, workspace, stream); }, settle);
    std::printf("%6lld %6lld %6lld  %10.3f %10.3f %10.3f %10.3f %10.3f %10.3f  %s\n", (long long)m, (long long)n,
                (long long)k, fresh, kept, execute, least, heuristic, theirs, plan->kernel());
    for (void *one : {x, w, y, workspace, own}) cudaFree(one);
  }
}
