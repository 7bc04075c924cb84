"""How GPU kernels are chosen for tensors as they lie, on a machine without a GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from gemm_kernels import gemm_kernel  # noqa: E402

import tilewise as tw  # noqa: E402
from tilewise.cli import doctor  # noqa: E402
from tilewise.core.arch import load_arch  # noqa: E402
from tilewise.dispatch.operands import prepare  # noqa: E402
from tilewise.dispatch.padding import irregular  # noqa: E402
from tilewise.engines import Build, get_engine  # noqa: E402
from tilewise.engines.gpu import bound, triton_build  # noqa: E402
from tilewise.engines.gpu.engine import GpuPlan  # noqa: E402
from tilewise.errors import BuildError, ExecutionError  # noqa: E402
from tilewise.ops.gemm.arguments import Epilogue  # noqa: E402
from tilewise.ops.gemm.kernels.gpu import GpuGemmKernel  # noqa: E402
from tilewise.ops.vendor import VendorKernel  # noqa: E402

ARCH = load_arch("sm_90", "H200")
PROBLEM = tw.GemmProblem(m=64, n=96, k=128, dtype="bf16")


def kernel(family: str, m: int = 64, n: int = 64, k: int = 64, **traits: Any) -> GpuGemmKernel:
    return gemm_kernel(family=family, dtype="bf16", tile_m=m, tile_n=n, tile_k=k, **traits)


POINTER, SPLIT = kernel("pointer"), kernel("splitk", split_k=2)
SPECIALISED = kernel("ws", 128, 64, 64, warps=8, stages=4)


def operands(problem: tw.GemmProblem = PROBLEM) -> tuple[Any, Any, Any]:
    a = torch.randn(problem.m, problem.k).bfloat16()
    b = torch.randn(problem.n, problem.k).bfloat16().t()
    return a, b, torch.empty(problem.m, problem.n, dtype=torch.bfloat16)


def views() -> dict[str, tuple[Any, bool]]:
    """[64, 128] tensors, and whether TMA can address them."""
    wide = torch.randn(200, 400).bfloat16()
    return {
        "plain": (torch.randn(64, 128).bfloat16(), True),
        "wide pitch": (wide[:64, :128], True),
        "odd pitch": (torch.randn(64, 131).bfloat16()[:, :128], False),
        "shifted": (wide[:64, 1:129], False),
        "expanded": (wide[:1, :128].expand(64, 128), False),
    }


@pytest.mark.parametrize("name", list(views()))
def test_plans_know_what_they_cannot_address(name: str) -> None:
    a, is_regular = views()[name]
    _, b, out = operands()
    assert (GpuPlan(SPECIALISED, PROBLEM, ARCH).why_unfit([a, b], out) is None) == is_regular
    assert GpuPlan(POINTER, PROBLEM, ARCH).why_unfit([a, b], out) is None
    assert irregular((a, b, out)) == (frozenset() if is_regular else {0})


class Computing(GpuPlan):
    """Refuses what the kernel would refuse, and multiplies on the CPU."""

    def execute(self, operands: Sequence[Any], out: Any, workspace: Any = None) -> None:
        why = self.why_unfit(operands, out)
        assert why is None, why
        a, b, *bias = operands
        result = a.double() @ b.double()
        if bias:
            assert bias[0].shape[0] >= out.shape[1]
            result = result + bias[0].double()[: result.shape[1]]
        out.copy_(result)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a GPU."""
    engine = get_engine("triton")
    monkeypatch.setattr(engine, "why_unavailable", lambda: None)
    monkeypatch.setattr(
        engine,
        "plan",
        lambda kernel, problem, arch, epilogue=None: Computing(kernel, problem, arch, epilogue),
    )


def registry(*kernels: GpuGemmKernel) -> tw.Registry:
    made = tw.Registry("gemm", ARCH)
    made.declare(kernels)
    return made


@pytest.mark.parametrize("name", list(views()))
@pytest.mark.parametrize("others", [(), (POINTER,)], ids=["alone", "with another"])
def test_tensors_are_served_as_they_lie(
    name: str, others: tuple[GpuGemmKernel, ...], here: None
) -> None:
    a, is_regular = views()[name]
    _, b, _ = operands()
    ours = registry(SPECIALISED, *others)
    ours.declare(SPECIALISED, priority="high")
    before = a.clone()
    for _ in range(2):
        result = ours.run(PROBLEM, a, b)
        torch.testing.assert_close(result.out, a @ b, rtol=2e-2, atol=2e-2)
        assert ("strides" in result.reason) == (not is_regular)
        if is_regular:
            assert result.kernel == SPECIALISED
        if not others:
            copied = result.workspace_bytes >= a.numel() * 2
            assert copied == (not is_regular)
    assert torch.equal(a, before)


def test_out_that_tma_cannot_address_is_served(here: None) -> None:
    a, b, _ = operands()
    frame = torch.zeros(64, 97).bfloat16()
    registry(kernel("tma", 128, 64, 64, warps=8)).run(PROBLEM, a, b, out=frame[:, 1:])
    torch.testing.assert_close(frame[:, 1:], a @ b, rtol=2e-2, atol=2e-2)
    assert not frame[:, 0].any()


def test_a_kernel_that_does_not_compile_is_passed_over(
    here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = registry(POINTER, SPLIT)
    a, b, _ = operands()
    first = ours.select(PROBLEM).kernel
    execute = Computing.execute

    def failing(self: Computing, *args: Any) -> None:
        if self.kernel == first:
            raise BuildError("does not compile")
        execute(self, *args)

    monkeypatch.setattr(Computing, "execute", failing)
    result = ours.run(PROBLEM, a, b)
    assert result.kernel != first
    torch.testing.assert_close(result.out, a @ b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("refused", ["by the compiler", "by the driver"])
def test_a_kernel_that_cannot_be_had_is_not_taken_for_built(
    refused: str, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = registry(POINTER, SPLIT)
    a, b, _ = operands()
    first = ours.select(PROBLEM).kernel
    execute = Computing.execute

    def failing(self: Computing, *args: Any) -> None:
        if self.kernel == first and refused == "by the compiler":
            raise BuildError("does not compile")
        if self.kernel == first:
            raise ExecutionError("device kernel image is invalid")
        execute(self, *args)

    monkeypatch.setattr(Computing, "execute", failing)
    result = ours.run(PROBLEM, a, b)
    assert result.kernel != first
    torch.testing.assert_close(result.out, a @ b, rtol=2e-2, atol=2e-2)
    build = ours.build_of(first)
    if refused == "by the compiler":
        assert build is not None and build.status == "compile_error"
    else:
        assert build is None
    assert ours.build_of(result.kernel) == Build(kernel=result.kernel, status="ok")
    known = Build(kernel=result.kernel, status="ok", seconds=3.0)
    ours._builds[result.kernel] = known
    ours.run(PROBLEM, a, b)
    assert ours.build_of(result.kernel) is known


def test_objects_are_made_for_the_device_not_for_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, file in (((12, 0), "sm_80"), ((10, 3), "sm_100"), ((9, 0), "sm_90")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        target = bound.live_target(load_arch(file))
        assert target == f"sm_{capability[0]}{capability[1]}"
    assert bound.live_target(load_arch("gfx942")) == "gfx942"


def test_copies_follow_the_tensors_of_each_call(here: None) -> None:
    ours = registry(SPECIALISED)
    shifted = torch.randn(64, 136).bfloat16()[:, 1:129]
    _, b, _ = operands()
    columns = torch.randn(96, 136).bfloat16()[:, 1:129].t()
    plan, _ = ours.dispatcher.execute(PROBLEM, prepare(ours.op, PROBLEM, (shifted, b)))
    whole = prepare(ours.op, PROBLEM, (torch.randn(64, 128).bfloat16(), columns))
    plan.execute(whole.operands, whole.out)
    torch.testing.assert_close(whole.out, whole.operands[0] @ columns, rtol=2e-2, atol=2e-2)


def test_priorities_hold_for_irregular_tensors(here: None) -> None:
    ours = registry(POINTER, SPLIT)
    ours.declare(SPECIALISED, priority="high")
    for name, (a, _) in views().items():
        assert ours.run(PROBLEM, a, operands()[1]).kernel == SPECIALISED, name
    # The analytic model cannot judge a vendor's routine, and leaves it to the end.
    vendor = VendorKernel(op_name="gemm", library="torch")
    with_vendor = registry(SPECIALISED)
    with_vendor.declare(vendor)
    analytic = tw.Dispatcher(with_vendor)
    for name, (a, _) in views().items():
        assert analytic.run(PROBLEM, a, operands()[1]).kernel == SPECIALISED, name


def test_padded_products_pad_the_bias_too(here: None) -> None:
    problem = tw.GemmProblem(m=8, n=3, k=5, dtype="bf16", layout="rrr")
    a, b = torch.randn(8, 5).bfloat16(), torch.randn(5, 3).bfloat16()
    bias = torch.randn(3).bfloat16()
    dispatcher = registry(SPECIALISED).dispatcher
    call = prepare(dispatcher.registry.op, problem, (a, b))
    epilogue = Epilogue(bias=True)
    plan, _ = dispatcher.execute(problem, call, epilogue=epilogue, vectors=(bias,))
    assert plan.epilogue == epilogue
    torch.testing.assert_close(call.out, a @ b + bias, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0", "main"])
def test_an_unknown_triton_leaves_the_work_to_the_vendor(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_build, "triton_version", lambda: version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    triton_build.why_no_triton.cache_clear()
    try:
        said = f"Triton {version} is not supported; install 3.6 to 3.9"
        assert get_engine("triton").why_unavailable() == said
        ours = registry(POINTER)
        ours.declare(VendorKernel(op_name="gemm", library="torch"))
        a, b, _ = operands()
        result = ours.run(PROBLEM, a, b)
        assert result.kernel.engine == "vendor"
        torch.testing.assert_close(result.out, a @ b)
        (row,) = (row for row in doctor._versions() if row[0] == "triton")
        assert row == ("triton", "unused", f"{said}; until then the vendor's routines are used")
    finally:
        triton_build.why_no_triton.cache_clear()


def test_ci_compiles_under_both_ends_of_the_known_versions() -> None:
    """Whichever Triton an environment's PyTorch brought."""
    script = Path(__file__).parents[2] / ".ci" / "run"
    named = re.findall(r"gpu_compile\.py --triton (\d+)\.(\d+)", script.read_text())
    ends = {tuple(map(int, numbers)) for numbers in named}
    assert ends == {triton_build.OLDEST, triton_build.NEWEST}


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0", "3.9.0+git1234"])
def test_known_versions_of_triton(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_build, "triton_version", lambda: version)
    assert triton_build.why_no_triton.__wrapped__() is None


@pytest.mark.parametrize(
    ("installed", "found"),
    [({"triton": "3.9.0"}, "3.9.0"), ({"pytorch-triton-rocm": "3.6.0+abc"}, "3.6.0+abc"), ({}, "")],
)
def test_triton_is_known_by_any_of_its_names(
    installed: dict[str, str], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(triton_build, "version", version)
    modules = {"triton": list(installed)} if installed else {}
    monkeypatch.setattr(triton_build, "packages_distributions", lambda: modules)
    assert triton_build.triton_version.__wrapped__() == found
