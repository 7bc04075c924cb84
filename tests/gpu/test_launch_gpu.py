"""The launch layer on a real GPU: steps, clusters, tensor maps, graphs, objects from elsewhere."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.version.hip:
    pytest.skip("there is no NVIDIA GPU here", allow_module_level=True)

import elsewhere  # noqa: E402

from tilewise.core.arch import Arch, load_arch  # noqa: E402
from tilewise.engines.device import detect  # noqa: E402
from tilewise.engines.gpu import bound, nvrtc, starting  # noqa: E402
from tilewise.engines.gpu.bound import BoundLaunch  # noqa: E402
from tilewise.engines.gpu.build import launch_module  # noqa: E402
from tilewise.engines.gpu.engine import GpuPlan  # noqa: E402
from tilewise.errors import ExecutionError  # noqa: E402
from tilewise.ops.configs import load_pool  # noqa: E402
from tilewise.ops.contract import get_op  # noqa: E402
from tilewise.ops.launch import (  # noqa: E402
    Argument,
    CudaSource,
    Im2col,
    Launch,
    Pointer,
    Scratch,
    Step,
    TensorMap,
    Zero,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(nvrtc.why_no_nvrtc()), reason=str(nvrtc.why_no_nvrtc())),
]
IS_HOPPER = torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not IS_HOPPER, reason="tensor maps and clusters are Hopper's")

PLAIN = """
extern "C" __global__ void add(const float *from, float *to, float *work, int count, float more) {
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) { work[at] += from[at]; to[at] += work[at] * more; }
}
extern "C" __global__ void twice(float *to, int count) {
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) to[at] *= 2.0f;
}
"""
HOPPER = """
#include "cuda/ptx.cuh"
// One copy of BYTES through shared memory, as it arrives.
DEVICE void pass_on(u32 barrier, u32 room, float *to) {
  barrier_wait(barrier, 0);
  for (int at = threadIdx.x; at < BYTES / 4; at += 128) to[at] = load_shared_f32(room + 4 * at);
}
DEVICE u32 begin() {
  u32 barrier = shared_base();
  if (threadIdx.x == 0) { barrier_init(barrier, 1); barrier_init_done(); fence_async(); }
  __syncthreads();
  if (threadIdx.x == 0) barrier_expect(barrier, BYTES);
  return barrier;
}
extern "C" __global__ void tiled(const __grid_constant__ TensorMap map, float *to, int c, int r) {
  u32 barrier = begin();
  if (threadIdx.x == 0) tma_load(barrier + 1024, &map, barrier, c, r);
  pass_on(barrier, barrier + 1024, to);
}
extern "C" __global__ void walked(const __grid_constant__ TensorMap map, float *to, int c, int w,
                                  int h, int n, int right, int down) {
  u32 barrier = begin();
  if (threadIdx.x == 0)
    tma_load_im2col(barrier + 1024, &map, barrier, c, w, h, n, (u16)right, (u16)down);
  pass_on(barrier, barrier + 1024, to);
}
extern "C" __global__ void ranks(int *to) {
  if (threadIdx.x == 0) to[blockIdx.x] = (int)cluster_rank();
  cluster_sync();
}
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels above beside what all ops share."""
    for folder in ("cuda", "cuda_tests"):
        (tmp_path / folder).mkdir()
    shared = (nvrtc.OPS / "cuda/ptx.cuh").read_text()
    for name, text in {
        "cuda/ptx": shared,
        "cuda_tests/plain": PLAIN,
        "cuda_tests/hopper": HOPPER,
    }.items():
        (tmp_path / f"{name}.cuh").write_text(text)
    monkeypatch.setattr(nvrtc, "OPS", tmp_path)
    monkeypatch.setattr(bound, "_LOADED", {})


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """PyTorch's fp32 is to compare with, so it must be fp32.

    By hand: these settings have no place of their own, and pytest would delete them in the end.
    """
    kinds = (torch.backends.cuda.matmul, torch.backends.cudnn)
    held = [kind.allow_tf32 for kind in kinds]
    for kind in kinds:
        kind.allow_tf32 = False
    yield
    for kind, was in zip(kinds, held, strict=True):
        kind.allow_tf32 = was


@pytest.fixture(params=["compiled", "ctypes"])
def launcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "ctypes":
        monkeypatch.setattr(starting, "_launcher", lambda: None)
    return str(request.param)


def arch() -> Arch:
    return detect("gpu")


def step(file: str, function: str, kinds: str, *arguments: Argument, **more: Any) -> Step:
    """A kernel of this file; `kinds` are its parameters'."""
    signature = {f"p{at}": kind for at, kind in enumerate(kinds.split())}
    constants = {"BYTES": more.pop("nbytes", 0)}
    source = CudaSource(
        file=f"cuda_tests/{file}.cuh", function=function, signature=signature, constants=constants
    )
    return Step(source=source, arguments=arguments, **{"grid": (1, 1, 1), "threads": 128, **more})


COUNT = 1000
FROM, TO = Pointer(tensor=0), Pointer(tensor=1)
SUMS = Scratch(offset=256)
STEPS = (
    Zero(target=TO, size=4 * COUNT),
    Zero(target=SUMS, size=4 * COUNT),
    step("plain", "add", "* * * i32 f32", FROM, TO, SUMS, COUNT, 0.5, grid=(8, 1, 1)),
    step("plain", "add", "* * * i32 f32", FROM, TO, SUMS, COUNT, 0.5, grid=(8, 1, 1)),
    step("plain", "twice", "* i32", TO, COUNT, grid=(8, 1, 1)),
)
"""0, then 0.5 x, then 0.5 (x + x) more, doubled: 3 x."""
MANY = Launch(steps=STEPS, workspace_bytes=256 + 4 * COUNT, zeroed_bytes=0)


def test_steps_follow_each_other(sources: None, launcher: str) -> None:
    x, out = torch.randn(COUNT, device="cuda"), torch.full((COUNT,), 7.0, device="cuda")
    call = BoundLaunch(MANY, arch(), "steps", order=(1, 0))
    for _ in range(3):
        call.start([out.data_ptr(), x.data_ptr()])
        torch.testing.assert_close(out, 3 * x)
    launch = call.launcher()
    launch(out.fill_(5.0), x)
    torch.testing.assert_close(out, 3 * x)


def test_steps_are_captured_and_replayed(sources: None, launcher: str) -> None:
    x, out = torch.randn(COUNT, device="cuda"), torch.zeros(COUNT, device="cuda")
    call = BoundLaunch(MANY, arch(), "steps", order=(1, 0))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call.start([out.data_ptr(), x.data_ptr()])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.start([out.data_ptr(), x.data_ptr()])
    for _ in range(3):
        x.normal_()
        out.fill_(9.0)
        graph.replay()
        torch.testing.assert_close(out, 3 * x)


def test_a_thread_that_never_used_the_gpu_launches(sources: None, launcher: str) -> None:
    x, out = torch.randn(COUNT, device="cuda"), torch.zeros(COUNT, device="cuda")
    call = BoundLaunch(MANY, arch(), "steps", order=(1, 0))
    torch.cuda.synchronize()
    thread = threading.Thread(target=call.start, args=([out.data_ptr(), x.data_ptr()],))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, 3 * x)


def test_what_the_driver_refuses_is_said(sources: None, launcher: str) -> None:
    wide = step("plain", "twice", "* i32", TO, COUNT, grid=(1, 1 << 20, 1))
    out = torch.zeros(COUNT, device="cuda")
    call = BoundLaunch(Launch(steps=(wide,)), arch(), "too wide", order=(1, 0))
    with pytest.raises(ExecutionError, match="too wide cannot be launched: invalid"):
        call.start([out.data_ptr(), out.data_ptr()])
    torch.cuda.synchronize()  # the context still answers
    assert not out.any()


@on_hopper
@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_clusters_have_their_size(size: int, sources: None, launcher: str) -> None:
    out = torch.full((32,), -1, device="cuda", dtype=torch.int32)
    made = step("hopper", "ranks", "*", TO, grid=(32, 1, 1), cluster=(size, 1, 1), nbytes=4)
    BoundLaunch(Launch(steps=(made,)), arch(), "ranks", order=(1, 0)).start(
        [out.data_ptr(), out.data_ptr()]
    )
    assert out.tolist() == [at % size for at in range(32)]


@on_hopper
@pytest.mark.parametrize("corner", [(0, 0), (-4, -2), (24, 18)], ids=["whole", "before", "behind"])
def test_tiled_maps_with_offset_and_steps(
    corner: tuple[int, int], sources: None, launcher: str
) -> None:
    """Boxes of 8 rows by 16 columns of every second row from the third on; zeros outside."""
    x, out = torch.randn(40, 32, device="cuda"), torch.full((8, 16), 7.0, device="cuda")
    view = x[2:]
    described = TensorMap(
        tensor=0,
        dtype="fp32",
        sizes=(32, 38),
        strides=(128,),
        box=(16, 16),
        steps=(1, 2),
        offset=2 * 128,
    )
    made = step(
        "hopper", "tiled", "map * i32 i32", described, TO, *corner, smem_bytes=4096, nbytes=512
    )
    call = BoundLaunch(Launch(steps=(made,)), arch(), "tiled", order=(1, 0))
    call.start([out.data_ptr(), x.data_ptr()])
    expected = torch.zeros_like(out)
    for row in range(8):
        for col in range(16):
            r, c = corner[1] + 2 * row, corner[0] + col
            if 0 <= r < 38 and 0 <= c < 32:
                expected[row, col] = view[r, c]
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@on_hopper
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("tap", [(0, 0), (1, 2), (2, 2)])
def test_im2col_maps_walk_pixels(
    stride: int, tap: tuple[int, int], sources: None, launcher: str
) -> None:
    """32 pixels of a 3x3 convolution with padding 1, one tap, 8 channels, from the first on."""
    n, h, w, c, pixels = 2, 7, 9, 16, 32
    x, out = torch.randn(n, h, w, c, device="cuda"), torch.full((pixels, 8), 7.0, device="cuda")
    described = TensorMap(
        tensor=0,
        dtype="fp32",
        sizes=(c, w, h, n),
        strides=(4 * c, 4 * c * w, 4 * c * w * h),
        steps=(1, stride, stride, 1),
        im2col=Im2col(lower=(-1, -1), upper=(-1, -1), channels=8, pixels=pixels),
    )
    down, right = tap
    made = step(
        *("hopper", "walked", "map * i32 i32 i32 i32 i32 i32", described, TO),
        *(8, -1, -1, 0, right, down),
        smem_bytes=4096,
        nbytes=4 * 8 * pixels,
    )
    call = BoundLaunch(Launch(steps=(made,)), arch(), "walked", order=(1, 0))
    call.start([out.data_ptr(), x.data_ptr()])
    padded = torch.nn.functional.pad(x, (0, 0, 1, 1, 1, 1))
    # Corners lie where a 3x3 filter begins: from -1 to the size less 2, `stride` apart.
    corners = [
        (i, r, q) for i in range(n) for r in range(0, h, stride) for q in range(0, w, stride)
    ][:pixels]
    expected = torch.stack([padded[i, r + down, q + right, 8:16] for i, r, q in corners])
    torch.testing.assert_close(out[: len(corners)], expected, rtol=0, atol=0)


def dense(shape: Any, layout: str) -> Any:
    """Random bf16 in the problem's layout."""
    made = torch.randn(shape, device="cuda").bfloat16()
    is_last = layout == "nhwc" and len(shape) == 4
    return made.contiguous(memory_format=torch.channels_last) if is_last else made


def expected(problem: Any, given: Any) -> Any:
    """By PyTorch in fp32."""
    a, b = (tensor.float() for tensor in given)
    if problem.op == "gemm":
        return a @ b
    p = problem
    how = {
        "stride": (p.stride_h, p.stride_w),
        "padding": (p.pad_h, p.pad_w),
        "dilation": (p.dilation_h, p.dilation_w),
        "groups": p.g,
    }
    if p.direction == "fwd":
        return torch.nn.functional.conv2d(a, b, **how)
    if p.direction == "bwd_data":
        return torch.nn.grad.conv2d_input((p.n, p.c, p.h, p.w), b, a, **how)
    return torch.nn.grad.conv2d_weight(a, (p.k, p.c // p.g, p.y, p.x), b, **how)


def check(plan: GpuPlan) -> None:
    problem, op = plan.problem, get_op(plan.problem.op)
    *given, out = (dense(shape, problem.layout) for shape in op.shapes(problem))
    if problem.op == "gemm":  # whose second operand lies along K
        given[1] = given[1].t().contiguous().t()
    out.fill_(float("nan"))
    wanted = expected(problem, given)
    plan.execute(given, out)
    apart = (out.float() - wanted).norm() / wanted.norm()
    assert float(apart) < 1e-2, f"{plan.kernel.name}: {float(apart)}"
    plan.launcher(given, out)(out.fill_(float("nan")), *given)
    assert float((out.float() - wanted).norm() / wanted.norm()) < 1e-2


def usual(kernel: Any, where: Arch) -> GpuPlan:
    return GpuPlan(kernel, launch_module(kernel.op).representative(kernel), where)


@pytest.mark.parametrize("op", ["conv_fwd", "conv_bwd_data", "conv_bwd_weight"])
def test_cuda_convolutions_are_right(op: str) -> None:
    found: dict[Any, Any] = {}
    for kernel in load_pool(get_op(op), arch(), ["cuda"]):
        if kernel.dtype == "bf16":  # type: ignore[attr-defined]
            found.setdefault(kernel.family, kernel)  # type: ignore[attr-defined]
    assert found or not IS_HOPPER
    for kernel in found.values():
        check(usual(kernel, arch()))


@on_hopper
def test_objects_compiled_elsewhere_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every family, compiled by another Triton on another machine (`elsewhere.py`)."""
    folder = os.environ.get(elsewhere.FOLDER)
    if not folder:
        pytest.skip(f"{elsewhere.FOLDER} names no folder of objects")
    where = load_arch("sm_90", "H200")
    for kernel in elsewhere.kernels(where):
        made = iter(range(len(elsewhere.steps(kernel, where))))
        with monkeypatch.context() as patch:
            patch.setattr(bound, "_LOADED", {})
            patch.setattr(
                bound,
                "compile_or_raise",
                lambda *_, kernel=kernel, made=made: elsewhere.read(
                    Path(folder), kernel, next(made)
                ),
            )
            check(usual(kernel, where))
