"""What reaches a GPU's driver: real objects of every language, launched onto a stub of it."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if shutil.which("cc") is None:
    pytest.skip("there is no C compiler", allow_module_level=True)

from driver_stub import STREAM, Stub, install, number  # noqa: E402
from gemm_kernels import gemm_kernel  # noqa: E402

import tilewise as tw  # noqa: E402
from tilewise.core.arch import load_arch  # noqa: E402
from tilewise.engines.gpu import bound, engine, nvrtc, starting, workspaces  # noqa: E402
from tilewise.engines.gpu.bound import BoundLaunch  # noqa: E402
from tilewise.engines.gpu.engine import GpuPlan  # noqa: E402
from tilewise.errors import ExecutionError  # noqa: E402
from tilewise.ops.configs import load_pool  # noqa: E402
from tilewise.ops.contract import all_ops, get_op  # noqa: E402
from tilewise.ops.gemm.arguments import Epilogue  # noqa: E402
from tilewise.ops.gemm.kernels.gpu import GpuGemmKernel  # noqa: E402
from tilewise.ops.launch import (  # noqa: E402
    CudaSource,
    Im2col,
    Launch,
    Pointer,
    Scratch,
    Step,
    TensorMap,
    Zero,
)

H200, MI300X = load_arch("sm_90", "H200"), load_arch("gfx942")
PROBLEM = tw.GemmProblem(m=64, n=96, k=128, dtype="bf16")
FLAGS, SUMS = 1_000_000, 2_000_000


def kernel(family: str, m: int = 64, n: int = 64, k: int = 64, **traits: Any) -> GpuGemmKernel:
    return gemm_kernel(family=family, dtype="bf16", tile_m=m, tile_n=n, tile_k=k, **traits)


POINTER, SPLIT = kernel("pointer"), kernel("splitk", split_k=2)
ATOMIC = kernel("splitk", split_k=2, atomic=True)
SPECIALISED = kernel("ws", 128, 64, 64, warps=8, stages=4)
COPYING = kernel("tma")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("driver")


@pytest.fixture(params=["compiled", "ctypes"])
def stub(
    request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stub]:
    """The driver, behind the compiled launcher and behind ctypes alone."""
    made = Stub(folder)
    install(made, monkeypatch)
    if request.param == "ctypes":
        monkeypatch.setattr(starting, "_launcher", lambda: None)
    else:
        assert starting._launcher() is not None
    monkeypatch.setattr(workspaces.WORKSPACES, "addresses", lambda *_: (FLAGS, SUMS))
    yield made


def operands(problem: tw.GemmProblem = PROBLEM) -> tuple[Any, Any, Any]:
    a = torch.randn(problem.m, problem.k).bfloat16()
    b = torch.randn(problem.n, problem.k).bfloat16().t()
    return a, b, torch.empty(problem.m, problem.n, dtype=torch.bfloat16)


def only_step(plan: GpuPlan) -> Step:
    (step,) = plan._launch(None, True).steps
    assert isinstance(step, Step)
    return step


def passed(plan: GpuPlan, launch: dict[str, Any]) -> dict[str, int]:
    """A launch's arguments by name, for kernels without descriptors."""
    names = list(only_step(plan).source.signature)
    values = [number(text) for text in launch["parameters"]]
    assert values[len(names) :] == [0, 0]  # what Triton keeps for itself
    return dict(zip(names, values, strict=False))


@pytest.mark.parametrize("arch", [H200, MI300X], ids=["nvidia", "amd"])
def test_a_launch_has_its_arguments_in_order(arch: Any, stub: Stub) -> None:
    a, b, out = operands()
    plan = GpuPlan(POINTER, PROBLEM, arch)
    plan.execute([a, b], out)
    plan.launcher([a, b], out)(out, a, b)
    plan.bind([a, b], out)()
    first, second, third = stub.launches()
    assert first == second == third
    assert (first["grid"], first["block"]) == ([2, 1, 1], [4 * arch.warp_size, 1, 1])
    assert (first["stream"], first["cluster"]) == (STREAM, [])
    assert 0 < first["smem"] <= arch.smem_per_block_bytes
    addresses = {"a_ptr": a.data_ptr(), "b_ptr": b.data_ptr(), "c_ptr": out.data_ptr()}
    sizes = {"tiles_m": 1, "tiles_n": 2, "M": 64, "N": 96, "K": 128}
    strides = {"a_row": 128, "b_col": 128, "c_row": 96}
    assert passed(plan, first) == addresses | sizes | strides
    assert [call["call"] for call in stub.calls()][:2] == ["load", "function"]
    assert stub.calls("load") == [{"call": "load", "elf": True}]


@pytest.mark.parametrize("chosen", [SPECIALISED, COPYING], ids=["gluon", "triton"])
def test_descriptors_are_maps_with_shape_and_strides(chosen: GpuGemmKernel, stub: Stub) -> None:
    a, b, out = operands()
    plan = GpuPlan(chosen, PROBLEM, H200)
    launch = plan.launcher([a, b], out)
    launch(out, a, b)
    other = torch.randn(64, 128).bfloat16()
    launch(out, other, b)
    launch(out, a, b)
    maps = stub.calls("tiled")
    assert [m["at"] for m in maps[:2]] == [a.data_ptr(), b.data_ptr()]
    assert maps[-1]["at"] == other.data_ptr()  # the others are remembered
    assert (maps[0]["type"], maps[0]["sizes"], maps[0]["strides"]) == (
        9,
        [128, 64, 1],
        [256, 16384],
    )
    tile = [64, chosen.tile_m, 1]
    assert (maps[0]["box"], maps[0]["steps"]) == (tile, [1, 1, 1])
    assert maps[0]["modes"] == [0, 3, 2, 0]  # 128 bytes swizzled, 128 fetched
    first, second, third = (call["parameters"] for call in stub.launches())
    assert first == third and first[0] == f"{maps[0]['serial']:02x}" * 128
    assert second[0] == f"{maps[-1]['serial']:02x}" * 128 and second[1:] == first[1:]
    assert [number(text) for text in first[1:7]] == [1, 64, 128, 8192, 128, 1]
    assert [len(text) // 2 for text in first[1:7]] == [4, 4, 4, 8, 8, 8]


def test_big_shared_memory_is_asked_for(stub: Stub) -> None:
    a, b, out = operands()
    GpuPlan(SPECIALISED, PROBLEM, H200).execute([a, b], out)
    (launch,) = stub.launches()
    assert launch["smem"] > 48 << 10
    assert stub.calls("attribute") == [{"call": "attribute", "kind": 8, "value": launch["smem"]}]


def test_epilogues_get_their_vectors(stub: Stub) -> None:
    a, b, out = operands()
    bias = torch.randn(96).bfloat16()
    plan = GpuPlan(POINTER, PROBLEM, H200, Epilogue(bias=True))
    plan.launcher([a, b, bias], out)(out, a, b, bias)
    assert passed(plan, stub.launches()[0])["bias_ptr"] == bias.data_ptr()


@pytest.mark.parametrize("chosen", [SPLIT, ATOMIC], ids=["sums", "atomics"])
def test_flags_and_sums_lie_apart(chosen: GpuGemmKernel, stub: Stub) -> None:
    a, b, out = operands()
    plan = GpuPlan(chosen, PROBLEM, H200)
    plan.execute([a, b], out)
    plan.launcher([a, b], out)(out, a, b)
    first, second = stub.launches()
    assert first == second
    given = passed(plan, first)
    assert given["flags"] == FLAGS
    # Sums that are added up must be found zero, so they lie behind the flags.
    assert given["work"] == (FLAGS + 256 if chosen.atomic else SUMS)


def test_a_callers_workspace_is_checked(stub: Stub) -> None:
    a, b, out = operands()
    plan = GpuPlan(SPLIT, PROBLEM, H200)
    own = torch.full((plan.workspace_bytes,), 9, dtype=torch.uint8)
    plan.execute([a, b], out, own)
    assert passed(plan, stub.launches()[0])["flags"] == own.data_ptr()
    assert not own[: plan._launch(None, True).zeroed_bytes].any()
    with pytest.raises(tw.TilewiseError, match="workspace is under"):
        plan.execute([a, b], out, own[:-1])


def test_a_launch_is_worked_out_once(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    module = engine.launch_module("gemm")
    made: list[Launch] = []
    launch = module.launch
    monkeypatch.setattr(module, "launch", lambda *a, **k: made.append(launch(*a, **k)) or made[-1])
    a, b, out = operands()
    plan = GpuPlan(POINTER, PROBLEM, H200)
    assert plan.why_unfit([a, b], out) is None
    plan.execute([a, b], out)
    plan.launcher([a, b], out)(out, a, b)
    assert len(made) == 1 and len(stub.launches()) == 2
    odd = torch.randn(64, 131).bfloat16()[:, :128]
    plan.why_unfit([odd, b], out)
    plan.execute([odd, b], out)
    assert len(made) == 2


def test_what_the_driver_refuses_is_said(stub: Stub) -> None:
    a, b, out = operands()
    plan = GpuPlan(POINTER, PROBLEM, H200)
    launch, fixed = plan.launcher([a, b], out), plan.bind([a, b], out)
    for call in (lambda: launch(out, a, b), fixed, lambda: plan.execute([a, b], out)):
        stub.fail(719)
        with pytest.raises(ExecutionError, match="cannot be launched: unspecified launch failure"):
            call()
    launch(out, a, b)
    amd = GpuPlan(POINTER, PROBLEM, MI300X)
    amd.prepare([a, b], out)
    stub.fail(1)
    with pytest.raises(ExecutionError, match="hip refuses"):
        amd.execute([a, b], out)


def test_threads_without_a_context_get_one(stub: Stub) -> None:
    a, b, out = operands()
    launch = GpuPlan(POINTER, PROBLEM, H200).launcher([a, b], out)
    thread = threading.Thread(target=launch, args=(out, a, b))
    thread.start()
    thread.join()
    assert [call["context"] for call in stub.launches()] == [True]


CUDA = """
struct alignas(64) Map { unsigned long long words[16]; };
extern "C" __global__ void fill(float *out, long long count, float value) {
  long long at = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (at < count) out[at] = value;
}
extern "C" __global__ void __launch_bounds__(SIZE) mapped(
    const __grid_constant__ Map tiled, const __grid_constant__ Map walked, float *a, float *b,
    float *c, float *d, float *work, int small) {
  extern __shared__ float room[];
  __shared__ float own[SIZE];
  own[threadIdx.x] = room[threadIdx.x] = (float)(tiled.words[0] + walked.words[1]) + *d;
  __syncthreads();
  a[0] = own[small] + room[small] + *b + *c + *work;
}
"""
TILED = TensorMap(
    tensor=1,
    dtype="fp16",
    sizes=(64, 30, 20),
    strides=(256, 4096),
    box=(32, 8, 4),
    steps=(1, 2, 2),
    swizzle=64,
    promotion=0,
    offset=128,
)
WALKED = TensorMap(
    tensor=2,
    dtype="fp32",
    sizes=(64, 56, 48, 8),
    strides=(256, 14336, 688128),
    steps=(1, 2, 2, 1),
    swizzle=128,
    im2col=Im2col(lower=(-1, -2), upper=(-1, 0), channels=32, pixels=64),
)


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if nvrtc.why_no_nvrtc():
        pytest.skip(str(nvrtc.why_no_nvrtc()))
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy/both.cuh").write_text(CUDA)
    monkeypatch.setattr(nvrtc, "OPS", tmp_path)
    nvrtc.sources.cache_clear()
    nvrtc._digest.cache_clear()


def many_steps() -> Launch:
    """Four operands, a result, two kernels, two pieces to clear, a cluster, maps and scratch."""
    fill = CudaSource(
        file="toy/both.cuh",
        function="fill",
        signature={"out": "*", "count": "i64", "value": "f32"},
        constants={"SIZE": 96},
    )
    mapped = CudaSource(
        file="toy/both.cuh",
        function="mapped",
        signature={"tiled": "map", "walked": "map"}
        | dict.fromkeys(("a", "b", "c", "d", "work"), "*")
        | {"small": "i32"},
        constants={"SIZE": 96},
    )
    return Launch(
        steps=(
            Zero(target=Pointer(tensor=4), size=640),
            Zero(target=Scratch(offset=512), size=5 << 32),
            Step(
                source=fill,
                grid=(7, 3, 2),
                threads=128,
                arguments=(Scratch(offset=256), 2**40, 1.5),
            ),
            Step(
                source=mapped,
                grid=(32, 2, 1),
                threads=96,
                smem_bytes=100_000,
                cluster=(16, 1, 1),
                overlaps=True,
                arguments=(
                    *(TILED, WALKED, *(Pointer(tensor=t) for t in (4, 0, 1, 3))),
                    *(Scratch(offset=0), -5),
                ),
            ),
        ),
        workspace_bytes=1024 + (5 << 32),
        zeroed_bytes=512,
    )


def test_a_launch_of_several_steps(stub: Stub, cuda: None) -> None:
    call = BoundLaunch(many_steps(), H200, "toy", order=(4, 0, 1, 2, 3))
    result, *given = 0x10000, 0x20000, 0x30000, 0x40000, 0x50000
    call.start([result, *given])
    steps = [one for one in stub.calls() if one["call"] in ("clear", "launch")]
    assert [one["call"] for one in steps] == ["clear", "clear", "launch", "launch"]
    first, second, fill, mapped = steps
    assert (first["at"], first["size"], first["value"]) == (result, 640, 0)
    assert (second["at"], second["size"]) == (SUMS, 5 << 32)
    assert {one["stream"] for one in steps} == {STREAM}
    assert (fill["grid"], fill["block"], fill["smem"]) == ([7, 3, 2], [128, 1, 1], 0)
    assert fill["cluster"] == [] and mapped["cluster"] == [16, 1, 1]
    assert mapped["overlaps"] and not fill["overlaps"]
    value = struct.pack("<f", 1.5).hex()
    assert fill["parameters"][0] == (FLAGS + 256).to_bytes(8, "little").hex()
    assert fill["parameters"][1:] == [(2**40).to_bytes(8, "little").hex(), value]
    assert (mapped["block"], mapped["smem"]) == ([96, 1, 1], 100_000)
    tiled, walked = mapped["parameters"][:2]
    numbers = [number(text) for text in mapped["parameters"][2:]]
    assert numbers == [result, given[0], given[1], given[3], FLAGS, 2**32 - 5]
    assert [len(text) // 2 for text in mapped["parameters"]] == [128, 128, *[8] * 5, 4]
    (one,), (other,) = stub.calls("tiled"), stub.calls("im2col")
    assert (tiled, walked) == (f"{one['serial']:02x}" * 128, f"{other['serial']:02x}" * 128)
    asked = [(call["kind"], call["value"]) for call in stub.calls("attribute")]
    assert asked == [(8, 100_000), (14, 1)]


def test_maps_are_encoded_as_described(stub: Stub, cuda: None) -> None:
    call = BoundLaunch(many_steps(), H200, "toy", order=(4, 0, 1, 2, 3))
    for _ in range(2):
        call.start([0x10000, 0x20000, 0x30000, 0x40000, 0x50000])
    (tiled,), (walked,) = stub.calls("tiled"), stub.calls("im2col")
    assert (tiled["type"], tiled["at"]) == (6, 0x30000 + 128)
    assert (tiled["sizes"], tiled["strides"]) == ([64, 30, 20], [256, 4096])
    assert (tiled["box"], tiled["steps"], tiled["modes"]) == ([32, 8, 4], [1, 2, 2], [0, 2, 0, 0])
    assert (walked["type"], walked["at"], walked["sizes"]) == (7, 0x40000, [64, 56, 48, 8])
    assert (walked["lower"], walked["upper"]) == ([-1, -2], [-1, 0])
    assert (walked["channels"], walked["pixels"]) == (32, 64)
    assert (walked["steps"], walked["modes"]) == ([1, 2, 2, 1], [0, 3, 2, 0])


def test_launches_that_do_not_fit_the_kernel_are_refused(stub: Stub, cuda: None) -> None:
    made = many_steps()
    step = made.steps[2]
    assert isinstance(step, Step)
    small = H200.with_figures(max_threads_per_block=64)
    with pytest.raises(ExecutionError, match="over a limit: 128 threads"):
        BoundLaunch(Launch(steps=(step,)), small, "toy", order=(0,))
    assert not stub.calls("load")


def test_a_kernel_of_the_cache_needs_no_triton(folder: Path, tmp_path: Path) -> None:
    """Compiled by one process; loaded and launched by another, which never imports Triton."""
    Stub(folder)  # compiles the driver
    ran = [
        subprocess.run(
            [sys.executable, str(Path(__file__).with_name("launch_alone.py")), str(folder)],
            env={**_environment(), "TILEWISE_CACHE_DIR": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            timeout=900,
        )
        for _ in range(2)
    ]
    assert [one.returncode for one in ran] == [0, 0], ran[-1].stderr
    assert [one.stdout.split() for one in ran] == [["triton", "2"], ["alone", "2"]]


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(Path(tw.__file__).parents[1])}


def test_a_kernel_is_loaded_once_for_all_problems(stub: Stub) -> None:
    for m in (64, 128):
        problem = tw.GemmProblem(m=m, n=96, k=128, dtype="bf16")
        a, b, out = operands(problem)
        GpuPlan(POINTER, problem, H200).execute([a, b], out)
    assert len(stub.calls("load")) == 1 and len(stub.launches()) == 2
    assert len(bound._LOADED) == 1


def families() -> list[Any]:
    """The first kernel of each family in CUDA C++, and of each op in Triton."""
    found = {}
    for op in all_ops().values():
        for made in load_pool(op, H200, ["cuda", "triton"]):
            is_cuda = made.engine == "cuda"
            found.setdefault((op.name, made.engine, made.family if is_cuda else ""), made)
    return [pytest.param(made, id=made.name) for made in found.values()]


def tensors(problem: Any, op: Any) -> list[Any]:
    """Operands and result without contents, dense in the problem's layout."""
    made = []
    for shape in op.shapes(problem):
        axes = range(len(shape))
        if problem.layout == "nhwc":
            axes = (0, *range(2, len(shape)), 1)
        stored = torch.empty([shape[axis] for axis in axes], dtype=torch.bfloat16)
        made.append(stored.permute([list(axes).index(axis) for axis in range(len(shape))]))
    return made


@pytest.mark.parametrize("chosen", families())
def test_every_family_reaches_the_driver(
    chosen: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = Stub(folder)
    install(stub, monkeypatch)
    monkeypatch.setattr(workspaces.WORKSPACES, "addresses", lambda *_: (FLAGS, SUMS))
    problem = engine.launch_module(chosen.op).representative(chosen)
    if chosen.engine == "cuda" and nvrtc.why_no_nvrtc():
        pytest.skip(str(nvrtc.why_no_nvrtc()))
    *given, out = tensors(problem, get_op(chosen.op))
    plan = GpuPlan(chosen, problem, H200)
    plan.execute(given, out)
    plan.launcher(given, out)(out, *given)
    steps = [one for one in stub.calls() if one["call"] in ("clear", "launch")]
    assert len(steps) == 2 * len(plan._launch(None, True).steps)
    assert steps[: len(steps) // 2] == steps[len(steps) // 2 :]
    seen = {number(text) for one in stub.launches() for text in one["parameters"]}
    seen |= {one["at"] for kind in ("tiled", "im2col") for one in stub.calls(kind)}
    assert {tensor.data_ptr() for tensor in (*given, out)} <= seen
