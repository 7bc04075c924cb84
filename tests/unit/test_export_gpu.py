"""Exported launches of GPU kernels equal Python's, number for number, for every family."""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver_stub import STREAM, Stub, install
from exported import COptions, Exported, built
from shown_launches import check_launches, show

from tilewise.core.arch import Arch, load_arch
from tilewise.core.kernel import Kernel
from tilewise.core.model import Model
from tilewise.core.problem import Problem
from tilewise.engines.gpu.bound import BoundLaunch
from tilewise.engines.gpu.build import compile_step
from tilewise.errors import ProblemError
from tilewise.export import gpu
from tilewise.export.cases import Case, _drawn, examples, size_fields
from tilewise.export.library import Wanted, prepared, write_library
from tilewise.export.rules import OpExport
from tilewise.ops.contract import get_op
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.ops.launch import Step
from tilewise.selection.models import load_models
from tilewise.selection.selector import Selector

COUNT = 1000
ARCH = load_arch("sm_90:H200")


def chosen(op: str, export: OpExport) -> OpExport:
    """One kernel of each family, and of each way to cut a reduction."""
    kinds: dict[Any, Kernel] = {}
    for kernel in export.kernels:
        traits = ("engine", "family", "swap", "fill", "atomic", "split_k")
        kind = tuple(str(getattr(kernel, name, "")) for name in traits)
        kinds.setdefault((*kind[:-1], kind[-1] == "1"), kernel)
    return replace(export, kernels=tuple(kinds.values()))


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[OpExport, Path, gpu.Objects]:
    """The launches of GEMM kernels as a program that prints them."""
    where = "k < 1048576 and n < 1048576 and m < 1048576"
    wanted = Wanted(op="gemm", arch=ARCH, dtypes=("bf16",), layouts=("rcr", "rrr"), where=where)
    export = chosen("gemm", prepared(wanted))
    return export, *show(export, tmp_path_factory.mktemp("launches") / "library")


def problems(export: OpExport, count: int) -> list[tuple[int, Problem]]:
    """Problems of the exported cases, with the number of each one's case."""
    op, rng = get_op(export.op.name), random.Random(7)
    found: list[tuple[int, Problem]] = []
    for values in _drawn(op, 100 * count):
        which = rng.randrange(len(export.cases))
        given = {**values, **export.cases[which].words}
        for name in op.problems.sizes:
            if rng.random() < 0.3:
                step = 1 << rng.randrange(7)
                given[name] = max(1, given.get(name, 1) // step) * step
        try:
            problem = op.problem(**given)
        except ProblemError:
            continue
        sizes = {name: getattr(problem, name) for name in size_fields(op)}
        if not problem.is_empty and (export.where is None or export.where(sizes)):
            found.append((which, problem))
        if len(found) == count:
            break
    assert len(found) == count
    return found


def test_launches_are_python_s(shown: tuple[OpExport, Path, gpu.Objects]) -> None:
    check_launches(*shown, problems(shown[0], COUNT))


def test_choices_are_python_s(shown: tuple[OpExport, Path, gpu.Objects]) -> None:
    """The same order of what can serve, but for ways that no example took."""
    export, program, _ = shown
    selector, library = (
        Selector(export.model, export.kernels, ARCH),
        Exported(program.parent, [export]),
    )
    why, tried = export.op.why_unusable, 0
    for _, problem in problems(export, COUNT):
        ours = library.rank(problem)
        ranked = [r for r in selector.rank(problem) if why(r.kernel, problem, ARCH) is None]
        names, theirs = [name for name, _ in ours], [r.kernel.name for r in ranked]
        assert [name for name in theirs if name in names] == names
        tried += names == theirs
        times = {r.kernel.name: r.predicted_us for r in ranked}
        np.testing.assert_allclose([us for _, us in ours], [times[name] for name in names])
    assert tried >= 0.99 * COUNT


def test_every_family_is_tried(shown: tuple[OpExport, Path, gpu.Objects]) -> None:
    families = {kernel.family for kernel in shown[0].kernels}  # type: ignore[attr-defined]
    assert families >= {
        *("pointer", "splitk", "streamk", "skinny", "gemv", "smallk"),
        *("tma", "ws", "duo", "pingpong"),
    }


def test_few_examples_are_not_remembered_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tests ask for fewer: later exports of the process refused a tenth of all launches."""
    case = Case(op=get_op("gemm"), words={"dtype": "bf16", "out_dtype": "bf16", "layout": "rcr"})
    many = examples(case, None).count
    monkeypatch.setattr("tilewise.export.cases.EXAMPLES", 40)
    assert 0 < examples(case, None).count <= 40 < many


SMALL = "batch == 1 and n % 8 == 0 and k % 8 == 0 and n >= 16 and k >= 16 and m < 65536"
ADDRESSES = (0x10000, 0x20000, 0x30000)
"""Of A, B and C."""
WORKSPACE = 0x900000


@pytest.fixture(scope="module")
def no_driver() -> None:
    """This machine has no GPU's driver of its own."""
    if find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            pytest.skip("a real driver would be found before the stand-in")


def model_for(arch: Arch) -> Model | None:
    """The shipped model; for AMD's GPUs, which have none, the same as if it were theirs."""
    if arch.vendor == "nvidia":
        return None
    (model,) = load_models("gemm", ARCH)
    manifest = {k: v for k, v in model.manifest.items() if k != "figures"}
    return replace(model, arch=arch.name, device="", manifest=manifest)


@pytest.mark.usefixtures("no_driver")
@pytest.mark.parametrize(
    ("label", "driver", "expression"),
    [
        (
            "sm_90:H200",
            "libcuda.so.1",
            'family == "duo" and tile_n == 128 and group_m == 4 or family == "ws" and fill == 1 '
            'and tile_m == 128 and tile_n == 128 or family == "splitk" and split_k == 4',
        ),
        (
            "gfx942",
            "libamdhip64.so",
            'family == "splitk" and split_k == 4 and tile_m == 32 or family == "pointer" '
            "and tile_m == 128 and tile_n == 128",
        ),
    ],
)
def test_drivers_are_asked_as_python_asks_them(
    label: str,
    driver: str,
    expression: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Real objects: what both launch is the same, from grids to the bytes of parameters."""
    pytest.importorskip("triton")
    pytest.importorskip("torch")
    arch = load_arch(label)
    wanted = Wanted(
        op="gemm",
        arch=arch,
        dtypes=("bf16",),
        layouts=("rcr",),
        expression=expression,
        where=SMALL,
        model=model_for(arch),
    )
    export = prepared(wanted)
    write_library(tmp_path / "library", [export])
    stub = Stub(name=driver)
    install(stub, monkeypatch)
    exported = Exported(built(tmp_path / "library"), [export])
    tried = 0
    for at, kernel in enumerate(export.kernels):
        for m, n, k in ((64, 512, 4096), (4096, 4096, 1024), (2048, 1536, 512)):
            problem = GemmProblem(m=m, n=n, k=k, dtype="bf16")
            if export.op.why_unusable(kernel, problem, export.arch) is None:
                theirs = python_calls(stub, export, kernel, problem)
                ours = library_calls(stub, exported, export, at, problem)
                assert ours == theirs
                tried += 1
    assert tried >= 2
    # A GPU that loads none of the kernels: refused when the library is opened, or with a plan.
    stub.fail_loading(209)
    code = exported.call(
        "tilewise_open", ctypes.byref(COptions(device=1)), ctypes.byref(opened := ctypes.c_void_p())
    )
    if arch.vendor == "amd":
        assert (code, opened.value) == (3, None)
        assert "for gfx942, whose kernels the device does not load: hip refuses" in exported.said
    else:
        given = ctypes.byref(exported.problem(GemmProblem(m=64, n=512, k=4096, dtype="bf16")))
        made = ctypes.c_void_p()
        assert exported.call("tilewise_plan_for", opened, given, ctypes.byref(made)) == 5
        assert "a kernel cannot be loaded: out of something" in exported.said
    stub.fail_loading(0)
    for device in (-2, 8):
        given = ctypes.byref(COptions(device=device))
        assert exported.call("tilewise_open", given, ctypes.byref(opened)) == 3
        assert exported.said


def python_calls(stub: Stub, export: OpExport, kernel: Kernel, problem: Problem) -> Any:
    launch = export.op.module("launch").launch(kernel, problem, export.arch)
    bound = BoundLaunch(launch, export.arch, kernel.name, (2, 0, 1))
    stub.forget()
    bound._workspace = (launch.zeroed_bytes, launch.workspace_bytes - launch.zeroed_bytes)
    a, b, c = ADDRESSES
    given = [c, a, b]
    if bound.needs_scratch:
        given += [WORKSPACE, WORKSPACE + launch.zeroed_bytes]
    for place, maps in bound._maps:
        given.append(maps[(c, a, b)[place]])
    assert bound._start(STREAM, *given) == 0
    return compared(stub.calls())


def library_calls(
    stub: Stub, exported: Exported, export: OpExport, at: int, problem: Problem
) -> Any:
    stub.use(None)
    opened = exported.open()
    launch = export.op.module("launch").launch(export.kernels[at], problem, export.arch)
    for step in launch.steps:
        if isinstance(step, Step):
            stub.tell(compile_step(step, export.arch.name).parameters)
    plan = exported.plan(opened, problem, at)
    facts = exported.c.tilewise_facts(plan)
    assert facts.workspace_bytes == launch.workspace_bytes
    assert facts.zeroed_bytes == launch.zeroed_bytes
    stub.forget()
    tensors = (ctypes.c_void_p * 3)(*ADDRESSES)
    code = exported.call(
        *("tilewise_execute", plan, tensors, 3, WORKSPACE, facts.workspace_bytes, STREAM, 1)
    )
    assert code == 0, exported.said
    exported.c.tilewise_release(plan)
    exported.c.tilewise_close(opened)
    return compared(stub.calls())


def compared(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls without what differs from one time to the next: handles and serial numbers."""
    kept = []
    for call in calls:
        call.pop("function", None)
        call.pop("serial", None)
        call.pop("context", None)
        if "parameters" in call:
            call["parameters"] = [p if len(p) < 256 else "map" for p in call["parameters"]]
        kept.append(call)
    return sorted(kept, key=lambda call: (call["call"], str(call)))


@pytest.mark.usefixtures("no_driver")
def test_what_the_driver_answers_is_a_value_and_its_device_is_kept(tmp_path: Path) -> None:
    """A launch that fails, addresses that do not fit, a workspace that is too small; a thread that
    uses another GPU uses it afterwards, too."""
    pytest.importorskip("triton")
    expression = 'family == "splitk" and split_k == 4 and tile_m == 32'
    wanted = Wanted(
        op="gemm",
        arch=ARCH,
        dtypes=("bf16",),
        layouts=("rcr",),
        expression=expression,
        where=SMALL,
    )
    export = prepared(wanted)
    write_library(tmp_path / "library", [export])
    stub = Stub(name="libcuda.so.1")
    exported = Exported(built(tmp_path / "library"), [export])
    opened = exported.open()
    plan = exported.plan(opened, GemmProblem(m=64, n=512, k=4096, dtype="bf16"), 0)
    size = exported.c.tilewise_facts(plan).workspace_bytes
    assert size > 0

    def execute(tensors: tuple[int, ...], room: int) -> int:
        given = (ctypes.c_void_p * len(tensors))(*tensors)
        return exported.call(
            *("tilewise_execute", plan, given, len(tensors), WORKSPACE, room, STREAM, 0)
        )

    stub.forget()
    assert execute(ADDRESSES, size) == 0
    assert [call["call"] for call in stub.calls()] == ["clear", "launch"]
    assert execute(ADDRESSES, size - 1) == 4
    assert "workspace" in exported.said
    assert execute((0x10000, 0x20008, 0x30000), size) == 4
    assert "multiple of 16" in exported.said
    stub.fail(719)
    assert execute(ADDRESSES, size) == 5
    assert "unspecified launch failure" in exported.said

    empty = exported.problem(GemmProblem(m=0, n=512, k=4096, dtype="bf16"))
    made = ctypes.byref(ctypes.c_void_p())
    assert exported.call("tilewise_plan_for", opened, ctypes.byref(empty), made) == 2
    assert "can serve it; gemm_triton_splitk" in exported.said
    assert "there is nothing to compute" in exported.said

    plan = exported.plan(exported.open(device=1), GemmProblem(m=64, n=512, k=4096, dtype="bf16"), 0)
    stub.use(0)
    stub.forget()
    assert execute(ADDRESSES, size) == 0
    assert [call["call"] for call in stub.calls()] == ["push", "clear", "launch", "pop"]
    assert stub.calls("push")[0]["device"] == 1
    stub.use(None)
