"""Exported libraries on a real GPU: their results against float64, and the example.

They are built by the C++ compiler alone: there may be no CMake.

pytest tests/gpu/test_export_gpu.py
compute-sanitizer --tool memcheck --error-exitcode 1 python -m pytest tests/gpu/test_export_gpu.py
"""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.version.hip:
    pytest.skip("there is no NVIDIA GPU here", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("the exported library is for sm_90", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from exported import Exported, compiled  # noqa: E402

from tilewise.core.arch import load_arch  # noqa: E402
from tilewise.core.dtypes import tolerance  # noqa: E402
from tilewise.core.kernel import Kernel  # noqa: E402
from tilewise.core.model import Model  # noqa: E402
from tilewise.core.problem import Problem  # noqa: E402
from tilewise.export.library import Wanted, prepared, write_library  # noqa: E402
from tilewise.export.rules import OpExport  # noqa: E402
from tilewise.export.top import for_layers  # noqa: E402
from tilewise.ops.configs import load_pool  # noqa: E402
from tilewise.ops.contract import get_op  # noqa: E402
from tilewise.ops.conv.problem import ConvProblem  # noqa: E402
from tilewise.ops.gemm.problem import GemmProblem  # noqa: E402
from tilewise.selection.models import load_models  # noqa: E402

pytestmark = pytest.mark.gpu

ARCH = load_arch("sm_90:H200")
WHERE = "batch == 1 and n % 64 == 0 and k % 64 == 0 and n >= 64 and m < 65536"
GEMMS = 12
CONVS = ("conv_fwd", "conv_bwd_data", "conv_bwd_weight")
LAYERS: tuple[dict[str, int], ...] = (
    {"c": 128, "k": 192, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1},
    {"c": 256, "k": 64, "y": 1, "x": 1},
    {"c": 64, "k": 128, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1, "stride_h": 2, "stride_w": 2},
    {"c": 128, "k": 128, "g": 32, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1},
    {"c": 96, "k": 96, "g": 96, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1},
    {"c": 3, "k": 64, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1, "stride_h": 2, "stride_w": 2},
    {"c": 96, "k": 96, "g": 4, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1},
)
"""Dense, pointwise, strided, grouped, depthwise, a first layer, and groups of 24 channels."""


def one_of_each(kernels: tuple[Kernel, ...], *traits: str) -> tuple[Kernel, ...]:
    found: dict[tuple[str, ...], Kernel] = {}
    for kernel in kernels:
        kind = tuple(str(getattr(kernel, name, "")) for name in traits)
        found.setdefault((*kind, str(getattr(kernel, "split_k", 1) > 1)), kernel)
    return tuple(found.values())


def built(export: OpExport, folder: Path) -> Exported:
    write_library(folder, [export])
    made = Exported(compiled(folder), [export])
    made.folder = folder  # type: ignore[attr-defined]
    return made


@pytest.fixture(scope="module")
def gemm(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """One kernel of each family and way to cut reductions."""
    wanted = Wanted(op="gemm", arch=ARCH, dtypes=("bf16",), layouts=("rcr",), where=WHERE)
    export = prepared(wanted)
    kernels = one_of_each(export.kernels, "family", "swap", "fill", "atomic")
    export = replace(export, kernels=kernels)
    return built(export, tmp_path_factory.mktemp("gemm") / "library")


@pytest.fixture(scope="module", params=CONVS)
def conv(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """One kernel of each family, CUDA's and Triton's, and one with atomics where there are such."""
    op = get_op(request.param)
    pool = [k for k in load_pool(op, ARCH, ["cuda", "triton"]) if getattr(k, "dtype", "") == "bf16"]
    kernels = one_of_each(tuple(pool), "engine", "family", "atomic", "spreads_nonfinite")
    layers = [ConvProblem(**sizes(op.name, layer, 8, 28, 28)) for layer in LAYERS]
    model = model_of(op.name, kernels, layers)
    export = prepared(Wanted(op=op.name, arch=ARCH, dtypes=("bf16",), model=model))
    export = replace(export, kernels=kernels)
    export = for_layers(export, layers, lambda kernel, p: op.why_unusable(kernel, p, ARCH) is None)
    return built(export, tmp_path_factory.mktemp(op.name) / "library")


def model_of(op: str, kernels: tuple[Kernel, ...], layers: list[Problem]) -> Model:
    """The shipped one; results do not depend on it."""
    shipped = load_models(op, ARCH)
    if shipped:
        return shipped[0]
    pytest.importorskip("lightgbm")
    from stand_in import stand_in

    return stand_in(op, ARCH, kernels, layers)


def sizes(op: str, layer: dict[str, int], n: int, h: int, w: int) -> dict[str, Any]:
    direction = op.removeprefix("conv_")
    return {**layer, "n": n, "h": h, "w": w, "direction": direction, "dtype": "bf16"}


def check(library: Exported, problem: Problem, operands: list[Any], expected: Any) -> int:
    """The chosen kernel and every other that can serve, twice; gives how many there were."""
    opened, (_, export) = library.open(), library.exports[problem.op]
    usable = [at for at in range(len(export.kernels)) if not library.why_unusable(problem, at)]
    for kernel in (None, *usable) if usable else ():
        plan = library.plan(opened, problem, kernel)
        facts = library.c.tilewise_facts(plan)
        out = torch.empty_like(expected, dtype=torch.bfloat16)
        workspace = torch.full((facts.workspace_bytes + 16,), 0x55, device="cuda").to(torch.uint8)
        tensors = (ctypes.c_void_p * 3)(*(t.data_ptr() for t in (*operands, out)))
        stream = torch.cuda.current_stream().cuda_stream
        for is_cleared in (0, 1):  # the kernel leaves its flags as it found them
            out.fill_(float("nan"))
            code = library.call(
                *("tilewise_execute", plan, tensors, 3, workspace.data_ptr()),
                *(facts.workspace_bytes, stream, is_cleared if facts.zeroed_bytes else 0),
            )
            assert code == 0, library.said
            torch.cuda.synchronize()
            error = (out.double() - expected).norm() / expected.norm()
            allowed = tolerance("bf16", "bf16", problem.gemm.k)
            assert error <= allowed, (facts.kernel_name, problem)
        library.c.tilewise_release(plan)
    library.c.tilewise_close(opened)
    return len(usable)


def test_products_are_right(gemm: Exported) -> None:
    rng = random.Random(1)
    torch.manual_seed(0)
    for _ in range(GEMMS):
        m = rng.choice((1, 16, 64, rng.randrange(1, 3000)))
        n, k = 64 * rng.randrange(1, 64), 64 * rng.randrange(1, 64)
        a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        problem = GemmProblem(m=m, n=n, k=k, dtype="bf16")
        assert check(gemm, problem, [a, b], a.double() @ b.double().T)


def test_convolutions_are_right(conv: Exported) -> None:
    rng = random.Random(2)
    torch.manual_seed(0)
    ((op, _),) = conv.exports.items()
    served = 0
    for layer in LAYERS:
        for _ in range(3):
            images, height, width = rng.randrange(1, 9), rng.randrange(7, 60), rng.randrange(7, 60)
            if layer["c"] == 3:
                width = 8 * (1 + width // 8)  # TMA copies rows of multiples of 8 elements
            problem = ConvProblem(**sizes(op, layer, images, height, width))
            served += check(conv, problem, *operands_of(problem))
    assert served > 3 * len(LAYERS)


def operands_of(p: ConvProblem) -> tuple[list[Any], Any]:
    """Operands, channels last, and the result in float64."""

    def drawn(*shape: int) -> Any:
        made = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        return made.contiguous(memory_format=torch.channels_last)

    x, w = drawn(p.n, p.c, p.h, p.w), drawn(p.k, p.c // p.g, p.y, p.x)
    dy = drawn(p.n, p.k, p.out_h, p.out_w)
    how: dict[str, Any] = {
        "stride": (p.stride_h, p.stride_w),
        "padding": (p.pad_h, p.pad_w),
        "groups": p.g,
    }
    grad = torch.nn.grad
    if p.direction == "fwd":
        given, result = [x, w], torch.nn.functional.conv2d(x.double(), w.double(), **how)
    elif p.direction == "bwd_data":
        given, result = [dy, w], grad.conv2d_input(x.shape, w.double(), dy.double(), **how)
    else:
        given, result = [x, dy], grad.conv2d_weight(x.double(), w.shape, dy.double(), **how)
    return given, result.contiguous(memory_format=torch.channels_last)


def test_the_example_runs(gemm: Exported) -> None:
    build = gemm.folder / "build"  # type: ignore[attr-defined]
    ran = subprocess.run([build / "example"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
