"""How GPU kernels are bound and chosen for tensors as they lie, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import tilewise as tw  # noqa: E402
from tilewise.core.arch import load_arch  # noqa: E402
from tilewise.dispatch.operands import prepare  # noqa: E402
from tilewise.dispatch.padding import irregular  # noqa: E402
from tilewise.engines import Build, get_engine, triton_launch  # noqa: E402
from tilewise.engines.triton import TritonPlan  # noqa: E402
from tilewise.errors import BuildError  # noqa: E402
from tilewise.ops.gemm.arguments import Epilogue  # noqa: E402
from tilewise.ops.gemm.kernels.gpu import TritonGemmKernel  # noqa: E402
from tilewise.ops.vendor import VendorKernel  # noqa: E402

ARCH = load_arch("sm_90", "H200")
PROBLEM = tw.GemmProblem(m=64, n=96, k=128, dtype="bf16")


def kernel(family: str, m: int = 64, n: int = 64, k: int = 64, **traits: Any) -> TritonGemmKernel:
    return TritonGemmKernel(family=family, dtype="bf16", tile_m=m, tile_n=n, tile_k=k, **traits)


POINTER, SPLIT = kernel("pointer"), kernel("splitk", split_k=2)
ATOMIC = kernel("splitk", split_k=2, atomic=True)
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


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """Arguments of every launch; nothing is compiled, and stream 7 of device 0 is current."""
    seen: list[list[Any]] = []
    loaded = SimpleNamespace(
        start=lambda *values: seen.append(list(values)),
        function="function",
        fixed=("fixed",),
        boxes=[{}] * 4,
    )
    monkeypatch.setattr(triton_launch, "load", lambda *_: loaded)
    monkeypatch.setattr(triton_launch, "Descriptors", lambda *_: Described())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    monkeypatch.setattr(
        triton_launch.WORKSPACES, "addresses", lambda *_: (1_000_000, 2_000_000), raising=True
    )
    return seen


class Described(dict[int, str]):
    def __missing__(self, address: int) -> str:
        return f"descriptor of {address}"


def test_a_launch_has_its_arguments_in_order(launches: list[list[Any]]) -> None:
    a, b, out = operands()
    plan = TritonPlan(POINTER, PROBLEM, ARCH)
    plan.execute([a, b], out)
    plan.launcher([a, b], out)(out, a, b)
    plan.bind([a, b], out)()
    grid_x, grid_y, grid_z, stream, function, fixed, *arguments = launches[0]
    assert (grid_x, grid_y, grid_z, stream, function, fixed) == (2, 1, 1, 7, "function", "fixed")
    assert arguments[:3] == [a.data_ptr(), b.data_ptr(), out.data_ptr()]
    assert len(arguments) == len(plan._launch().source.signature)
    assert launches[1] == launches[2] == launches[0]


def test_a_launcher_follows_the_tensors(launches: list[list[Any]]) -> None:
    a, b, out = operands()
    launch = TritonPlan(SPECIALISED, PROBLEM, ARCH).launcher([a, b], out)
    other_a, other_b, other_out = operands()
    launch(other_out, other_a, other_b)
    expected = [f"descriptor of {t.data_ptr()}" for t in (other_a, other_b, other_out)]
    assert [value for value in launches[0] if isinstance(value, str)][2:] == expected


def test_epilogues_get_their_vectors(launches: list[list[Any]]) -> None:
    a, b, out = operands()
    bias = torch.randn(96).bfloat16()
    plan = TritonPlan(POINTER, PROBLEM, ARCH, Epilogue(bias=True))
    plan.launcher([a, b, bias], out)(out, a, b, bias)
    names = list(plan._launch().source.signature)
    assert launches[0][6 + names.index("bias_ptr")] == bias.data_ptr()


@pytest.mark.parametrize("chosen", [SPLIT, ATOMIC], ids=["sums", "atomics"])
def test_flags_and_sums_lie_apart(chosen: TritonGemmKernel, launches: list[list[Any]]) -> None:
    a, b, out = operands()
    plan = TritonPlan(chosen, PROBLEM, ARCH)
    plan.execute([a, b], out)
    names = list(plan._launch().source.signature)
    flags, work = (launches[0][6 + names.index(name)] for name in ("flags", "work"))
    assert flags == 1_000_000
    # Sums that are added up must be found zero, so they lie behind the flags.
    assert work == (1_000_000 + 256 if chosen.atomic else 2_000_000)


def test_a_callers_workspace_is_checked(launches: list[list[Any]]) -> None:
    a, b, out = operands()
    plan = TritonPlan(SPLIT, PROBLEM, ARCH)
    own = torch.full((plan.workspace_bytes,), 9, dtype=torch.uint8)
    plan.execute([a, b], out, own)
    names = list(plan._launch().source.signature)
    assert launches[0][6 + names.index("flags")] == own.data_ptr()
    assert not own[: plan._launch().zeroed_bytes].any()
    with pytest.raises(tw.TilewiseError, match="workspace is under"):
        plan.execute([a, b], out, own[:-1])


@pytest.mark.parametrize("name", list(views()))
def test_plans_know_what_they_cannot_address(name: str) -> None:
    a, is_regular = views()[name]
    _, b, out = operands()
    assert (TritonPlan(SPECIALISED, PROBLEM, ARCH).why_unfit([a, b], out) is None) == is_regular
    assert TritonPlan(POINTER, PROBLEM, ARCH).why_unfit([a, b], out) is None
    assert irregular((a, b, out)) == (frozenset() if is_regular else {0})


class Computing(TritonPlan):
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


def registry(*kernels: TritonGemmKernel) -> tw.Registry:
    made = tw.Registry("gemm", ARCH)
    made.declare(kernels)
    return made


@pytest.mark.parametrize("name", list(views()))
@pytest.mark.parametrize("others", [(), (POINTER,)], ids=["alone", "with another"])
def test_tensors_are_served_as_they_lie(
    name: str, others: tuple[TritonGemmKernel, ...], here: None
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

    class Image:
        def _init_handles(self) -> None:
            raise RuntimeError("device kernel image is invalid")

    def failing(self: Computing, *args: Any) -> None:
        if self.kernel == first and refused == "by the compiler":
            raise BuildError("does not compile")
        if self.kernel == first:
            triton_launch._load(Image(), first.name)
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
        target = triton_launch.live_target(load_arch(file))
        assert (target.backend, target.arch) == ("cuda", 10 * capability[0] + capability[1])
    assert triton_launch.live_target(load_arch("gfx942")).arch == "gfx942"


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
