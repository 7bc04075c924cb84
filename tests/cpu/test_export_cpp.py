"""Exported C++ libraries of CPU kernels: Python's choices, and results as float64 has them."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from exported import Exported, built
from stand_in import one_of_each

from tilewise.core.arch import load_arch
from tilewise.core.dtypes import tolerance
from tilewise.core.problem import Problem
from tilewise.errors import ProblemError
from tilewise.export.cases import _drawn
from tilewise.export.library import Wanted, prepared, write_library
from tilewise.export.rules import OpExport
from tilewise.ops.contract import get_op
from tilewise.selection.selector import Selector

COUNT = 1000
OPS = ("gemm", "conv_fwd", "conv_bwd_data", "conv_bwd_weight")
TRAITS = ("family", "access", "layout", "split", "vector")


@pytest.fixture(scope="module")
def exports() -> list[OpExport]:
    """One kernel of each family and way to read, cut and share the work."""
    arch = load_arch("x86_avx512")
    found = [prepared(Wanted(op=op, arch=arch, dtypes=("fp32",))) for op in OPS]
    return [replace(one, kernels=tuple(one_of_each(one.kernels, *TRAITS))) for one in found]


@pytest.fixture(scope="module")
def library(exports: list[OpExport], tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp("export") / "library"
    write_library(folder, exports)
    made = Exported(built(folder), exports)
    made.folder = folder  # type: ignore[attr-defined]
    return made


def problems(op: str, count: int, most_bytes: float = float("inf")) -> list[Problem]:
    """Problems of every layout, different ones."""
    given, rng = get_op(op), random.Random(op)
    layouts = ("rcr", "rrr", "crr", "ccr") if op == "gemm" else ("nhwc", "nchw")
    found: dict[Problem, None] = {}
    for values in _drawn(given, 40 * count):
        try:
            problem = given.problem(**{**values, "dtype": "fp32", "layout": rng.choice(layouts)})
        except ProblemError:
            continue
        if not problem.is_empty and problem.bytes <= most_bytes:
            found[problem] = None
        if len(found) == count:
            break
    assert len(found) == count
    return list(found)


@pytest.mark.parametrize("op", OPS)
def test_choices_are_python_s(library: Exported, exports: list[OpExport], op: str) -> None:
    export = next(one for one in exports if one.op.name == op)
    selector = Selector(export.model, export.kernels, export.arch)
    why = export.op.why_unusable
    for problem in problems(op, COUNT):
        ranked = library.rank(problem)
        usable = [r for r in selector.rank(problem) if why(r.kernel, problem, export.arch) is None]
        assert [name for name, _ in ranked] == [r.kernel.name for r in usable]
        times = [us for _, us in ranked]
        np.testing.assert_allclose(times, [r.predicted_us for r in usable], rtol=1e-12)


@pytest.mark.parametrize("op", OPS)
def test_rules_say_what_python_s_say(library: Exported, exports: list[OpExport], op: str) -> None:
    export = next(one for one in exports if one.op.name == op)
    for problem in problems(op, 200):
        for at, kernel in enumerate(export.kernels):
            theirs = export.op.why_unusable(kernel, problem, export.arch)
            assert library.why_unusable(problem, at) == theirs


@pytest.mark.parametrize("op", OPS)
def test_results_are_right(library: Exported, exports: list[OpExport], op: str) -> None:
    """Every kernel, on problems that it can serve; the chosen one on all of them."""
    export = next(one for one in exports if one.op.name == op)
    opened = library.open(threads=2)
    tried: set[int] = set()
    for problem in problems(op, 120, most_bytes=3e6):
        usable = [
            at for at in range(len(export.kernels)) if library.why_unusable(problem, at) is None
        ]
        for kernel in (None, *(at for at in usable if at not in tried)):
            plan = library.plan(opened, problem, kernel)
            check_result(library, export, plan, problem)
            library.c.tilewise_release(plan)
            tried |= {kernel} - {None}
    library.c.tilewise_close(opened)
    assert len(tried) == len(export.kernels), "some kernels served no problem"


def check_result(
    library: Exported, export: OpExport, plan: ctypes.c_void_p, problem: Problem
) -> None:
    rng = np.random.default_rng(0)
    *shapes, result = export.op.shapes(problem)
    *stored, out_stored = export.op.storage(problem)
    operands = [rng.standard_normal(shape).astype("f4") for shape in shapes]
    laid = [
        np.ascontiguousarray(t.transpose(s.axes)) for t, s in zip(operands, stored, strict=True)
    ]
    out_shape = [result[axis] for axis in out_stored.axes]
    out = np.full(out_shape, np.nan, "f4")
    facts = library.c.tilewise_facts(plan)
    workspace = np.zeros(facts.workspace_bytes + 1, np.uint8)
    addresses = (ctypes.c_void_p * 3)(*(t.ctypes.data for t in (*laid, out)))
    code = library.call(
        *("tilewise_execute", plan, addresses, 3, workspace.ctypes.data, facts.workspace_bytes),
        *(None, 0),
    )
    assert code == 0, library.said
    expected = export.op.reference(problem, *operands)
    found = out.transpose(np.argsort(out_stored.axes)).astype("f8")
    error = np.linalg.norm(found - expected) / max(1e-30, np.linalg.norm(expected))
    assert error <= tolerance("fp32", "fp32", problem.gemm.k), facts.kernel_name


def test_a_plan_is_remembered_and_shared_by_threads(
    library: Exported, exports: list[OpExport]
) -> None:
    opened = library.open(threads=1)
    some = problems("gemm", 40, most_bytes=1e5)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        own = Exported(library.folder / "build", exports)  # type: ignore[attr-defined]
        try:
            for problem in random.Random(seed).sample(some, len(some)):
                plan = own.plan(opened, problem)
                check_result(own, exports[0], plan, problem)
                own.c.tilewise_release(plan)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    first, again = (library.plan(opened, some[0]) for _ in range(2))
    assert first.value == again.value
    library.c.tilewise_close(opened)  # plans outlive it
    check_result(library, exports[0], first, some[0])


def test_bad_calls_are_answered_with_a_reason(library: Exported) -> None:
    opened = library.open(threads=1)
    problem = problems("gemm", 1, most_bytes=1e5)[0]
    plan = library.plan(opened, problem)
    none = (ctypes.c_void_p * 3)()
    assert library.call("tilewise_execute", plan, none, 3, None, 0, None, 0) == 4
    assert "null" in library.said
    assert library.call("tilewise_execute", plan, none, 2, None, 0, None, 0) == 4
    assert "as many tensors" in library.said
    given = library.problem(problem)
    given.sizes[0] = -1
    made = ctypes.c_void_p()
    code = library.call("tilewise_plan_for", opened, ctypes.byref(given), ctypes.byref(made))
    assert (code, made.value) == (1, None)
    assert "from 0 to below 2^31" in library.said
    given = library.problem(problem)
    given.words[0] = 3  # fp16, for which nothing was exported
    assert library.call("tilewise_why_unusable", ctypes.byref(given), 0) == 1
    assert "not exported for this dtype" in library.said
    given.op = 7
    assert library.call("tilewise_why_unusable", ctypes.byref(given), 0) == 1


def test_sizes_that_cannot_be_are_refused_as_in_python(library: Exported) -> None:
    given = library.problem(problems("gemm", 1)[0])
    given.sizes[4] = 1 << 30  # split_k
    assert library.call("tilewise_why_unusable", ctypes.byref(given), 0) == 1
    assert "it cannot exceed K" in library.said


def test_the_example_runs(library: Exported) -> None:
    library.open(threads=1)  # skips where the processor has no such instructions
    build = library.folder / "build"  # type: ignore[attr-defined]
    ran = subprocess.run([build / "example"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "0 of " in ran.stdout
