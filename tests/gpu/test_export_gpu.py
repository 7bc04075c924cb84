"""An exported library on a real GPU: its results against float64, and the example.

pytest tests/gpu/test_export_gpu.py
compute-sanitizer --error-exitcode 1 FOLDER/build/example     once, on a library of one's own
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.version.hip:
    pytest.skip("there is no NVIDIA GPU here", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("the exported library is for sm_90", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from exported import Exported, built  # noqa: E402

from tilewise.core.arch import load_arch  # noqa: E402
from tilewise.core.dtypes import tolerance  # noqa: E402
from tilewise.core.kernel import Kernel  # noqa: E402
from tilewise.export.library import Wanted, prepared, write_library  # noqa: E402
from tilewise.ops.gemm.problem import GemmProblem  # noqa: E402

pytestmark = pytest.mark.gpu

WHERE = "batch == 1 and n % 8 == 0 and k % 8 == 0 and n >= 16 and k >= 16 and m < 65536"
SHAPES = [
    *((1, 4096, 4096), (16, 2112, 7168), (64, 512, 4096), (300, 264, 1000)),
    *((4096, 4096, 64), (2048, 1536, 512), (1111, 4096, 2048)),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """One kernel of each family and way to cut reductions."""
    from dataclasses import replace

    wanted = Wanted(
        op="gemm", arch=load_arch("sm_90:H200"), dtypes=("bf16",), layouts=("rcr",), where=WHERE
    )
    export = prepared(wanted)
    kinds: dict[object, Kernel] = {}
    for kernel in export.kernels:
        traits = ("family", "swap", "fill", "atomic")
        kind = tuple(getattr(kernel, name, "") for name in traits)
        kinds.setdefault((*kind, getattr(kernel, "split_k", 1) > 1), kernel)
    export = replace(export, kernels=tuple(kinds.values()))
    folder = tmp_path_factory.mktemp("export") / "library"
    write_library(folder, [export])
    made = Exported(built(folder), [export])
    made.folder = folder  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize("shape", SHAPES)
def test_every_kernel_is_right(library: Exported, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    problem = GemmProblem(m=m, n=n, k=k, dtype="bf16")
    torch.manual_seed(0)
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    expected = a.double() @ b.double().T
    opened = library.open()
    _, export = library.exports["gemm"]
    usable = [at for at in range(len(export.kernels)) if not library.why_unusable(problem, at)]
    assert usable
    for kernel in (None, *usable):
        plan = library.plan(opened, problem, kernel)
        facts = library.c.tilewise_facts(plan)
        out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        workspace = torch.full((facts.workspace_bytes + 16,), 0x55, device="cuda").to(torch.uint8)
        tensors = (ctypes.c_void_p * 3)(a.data_ptr(), b.data_ptr(), out.data_ptr())
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
            assert error <= tolerance("bf16", "bf16", k), facts.kernel_name
        library.c.tilewise_release(plan)
    library.c.tilewise_close(opened)


def test_the_example_runs(library: Exported) -> None:
    build = library.folder / "build"  # type: ignore[attr-defined]
    ran = subprocess.run([build / "example"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
