"""Dispatch: right answers, clear refusals, and a fallback for everything that can go wrong."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise.core.arch import Arch, load_arch
from tilewise.core.dtypes import tolerance
from tilewise.dispatch import default_registry
from tilewise.engines import get_engine
from tilewise.engines.cpu import CpuEngine
from tilewise.engines.device import detect
from tilewise.engines.toolchain import find_compiler
from tilewise.errors import (
    ExecutionError,
    FileError,
    InputError,
    KernelError,
    NoKernelError,
    ProblemError,
    TensorError,
)
from tilewise.ops.contract import get_op
from tilewise.ops.vendor import VendorKernel
from tilewise.settings import settings

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

ARCH = detect("cpu")


def arrays(m: int, n: int, k: int, dtype: type = np.float32) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(m * 7919 + n * 31 + k)
    a = generator.standard_normal((m, k)).astype(dtype)
    return a, generator.standard_normal((k, n)).astype(dtype)


def close(out: np.ndarray, expected: np.ndarray, k: int) -> bool:
    error = np.linalg.norm(out - expected) / max(np.linalg.norm(expected), 1e-30)
    return bool(error <= tolerance("fp32", "fp32", k))


@pytest.fixture
def registry() -> tw.Registry:
    """Two kernels of different families and the vendor."""
    whole = default_registry("gemm", ARCH)
    picked = [
        next(k for k in whole if k.engine == "cpu" and k.family == family and k.dtype == "fp32")
        for family in ("packed", "unpacked")
    ]
    made = tw.Registry("gemm", ARCH, name="test")
    made.declare(picked)
    return made


def test_matmul_is_right_for_arrays_and_tensors() -> None:
    a, b = arrays(33, 21, 17)
    assert close(tw.matmul(a, b), a.astype(np.float64) @ b, 17)
    out = tw.matmul(torch.from_numpy(a), torch.from_numpy(b))
    assert isinstance(out, torch.Tensor)
    assert close(out.numpy(), a.astype(np.float64) @ b, 17)


def test_every_layout_and_stride() -> None:
    a, b = arrays(16, 24, 40)
    wide = np.zeros((32, 80), np.float32)
    wide[::2, ::2] = a
    expected = a.astype(np.float64) @ b
    for left in (a, np.asfortranarray(a), wide[::2, ::2], a[::-1][::-1], a.T.copy().T):
        for right in (b, np.asfortranarray(b), np.repeat(b, 2, axis=1)[:, ::2]):
            assert close(tw.matmul(left, right), expected, 40)


def test_batches_and_their_broadcast() -> None:
    generator = np.random.default_rng(0)
    a = generator.standard_normal((3, 9, 8), dtype=np.float32)
    b = generator.standard_normal((8, 7), dtype=np.float32)
    spread = np.broadcast_to(b, (3, 8, 7))
    assert close(tw.matmul(a, spread), a.astype(np.float64) @ b, 8)


def test_out_is_written_in_place_whatever_its_strides() -> None:
    a, b = arrays(12, 10, 6)
    expected = a.astype(np.float64) @ b
    plain = np.full((12, 10), np.nan, np.float32)
    assert tw.matmul(a, b, out=plain) is plain
    assert close(plain, expected, 6)
    column_major = np.full((12, 10), np.nan, np.float32, order="F")
    tw.matmul(a, b, out=column_major)
    assert close(column_major, expected, 6)
    frame = np.full((14, 30), 7.0, np.float32)
    tw.matmul(a, b, out=frame[1:13, 3:23:2])
    assert close(frame[1:13, 3:23:2], expected, 6)
    frame[1:13, 3:23:2] = 7.0
    assert (frame == 7.0).all(), "nothing around the view was touched"


def test_copies_are_made_only_where_layouts_do_not_fit(registry: tw.Registry) -> None:
    a, b = arrays(16, 16, 16)
    problem = tw.GemmProblem(m=16, n=16, k=16, layout="rrr")
    assert registry.run(problem, a, b).copied == ()
    strided = np.repeat(a, 2, axis=1)[:, ::2]
    assert registry.run(problem, strided, b).copied == ("a",)


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        (np.zeros((2, 3), np.float32), np.zeros((4, 5), np.float32), "3 columns of a"),
        (np.zeros((2, 3), np.float32), np.zeros((3, 5), np.float16), "a is fp32 and b is fp16"),
        (np.zeros((), np.float32), np.zeros((3, 5), np.float32), "scalars are multiplied"),
        (np.zeros((2, 3), np.int64), np.zeros((3, 5), np.int64), "dtype int64 is not supported"),
        (np.zeros((2, 3)), np.zeros((3, 5)), r"dtype float64 is not supported; .*astype"),
        ([[1.0]], np.zeros((1, 1), np.float32), "list is not a tensor"),
        (
            np.zeros((2, 1, 3), np.float32),
            np.zeros((3, 3, 3), np.float32),
            r"batch \(2,\) and b \(3,\)",
        ),
        (np.zeros((2, 3), ">f4"), np.zeros((3, 5), ">f4"), "bytes are swapped"),
    ],
)
def test_wrong_tensors_are_refused_with_what_is_allowed(a: object, b: object, says: str) -> None:
    with pytest.raises(TensorError, match=says):
        tw.matmul(a, b)


def test_arrays_of_numpys_default_are_refused_by_every_call() -> None:
    x, w, dy = np.zeros((1, 2, 4, 4)), np.zeros((3, 2, 3, 3)), np.zeros((1, 3, 2, 2))
    for call in (
        lambda: tw.conv2d(x, w),
        lambda: tw.conv_input_gradient(x.shape, w, dy),
        lambda: tw.conv_weight_gradient(x, w.shape, dy),
        lambda: tw.linear(np.zeros((2, 3)), np.zeros((5, 3))),
        lambda: tw.linear(np.zeros((2, 3)), np.zeros((5, 3)), np.zeros(5)),
    ):
        with pytest.raises(TensorError, match=r"dtype float64 is not supported; .*astype"):
            call()


def test_wrong_outputs_are_refused() -> None:
    a, b = arrays(4, 4, 4)
    read_only = np.zeros((4, 4), np.float32)
    read_only.flags.writeable = False
    overlapping = np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), (4, 4), (4, 4))
    for out, says in (
        (np.zeros((4, 5), np.float32), "shape"),
        (np.zeros((4, 4), np.float64), "out is fp64"),
        (a, "out shares memory with a"),
        (b.T, "out shares memory with b"),
        (read_only, "read-only"),
        (overlapping, "share memory"),
    ):
        with pytest.raises(TensorError, match=says):
            tw.matmul(a, b, out=out)


@pytest.mark.parametrize("m,n,k", [(0, 4, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0)])
def test_zero_sizes_have_a_defined_result(m: int, n: int, k: int) -> None:
    out = tw.matmul(np.ones((m, k), np.float32), np.ones((k, n), np.float32))
    assert out.shape == (m, n)
    assert (out == 0).all()


def test_nan_and_infinity_go_where_arithmetic_sends_them() -> None:
    a, b = arrays(19, 23, 29)
    a[3, 5], a[7, 1] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        expected = a @ b
    out = tw.matmul(a, b)
    assert (np.isnan(out) == np.isnan(expected)).all()
    assert (np.isinf(out) == np.isinf(expected)).all()


def test_huge_sizes_are_refused_before_anything_is_computed() -> None:
    huge = np.broadcast_to(np.float32(1), (2**40, 8))
    with pytest.raises(TensorError, match="no memory"):
        tw.matmul(huge, np.zeros((8, 2**20), np.float32))


def test_only_problems_are_selected_for() -> None:
    with pytest.raises(InputError, match="None is not a problem; pass a GemmProblem"):
        tw.select(None)  # type: ignore[arg-type]


def test_choices_carry_their_reasons(registry: tw.Registry) -> None:
    # Far from everything that was measured: no shipped model is asked, whatever the machine.
    choice = registry.select(tw.GemmProblem(m=2**17, n=2**17, k=2**17))
    assert choice.path == "analytic"
    assert "predicted fastest by" in choice.reason
    assert choice.predicted_tflops > 0
    assert choice.kernel == choice.ranking[0].kernel or "already built" in choice.reason
    other = registry.select(tw.GemmProblem(m=8, n=8, k=8, dtype="bf16"))
    assert other.path == "vendor"
    assert set(other.rejected) == {k.name for k in registry}


def test_priorities_come_first(registry: tw.Registry) -> None:
    problem = tw.GemmProblem(m=64, n=64, k=64, layout="rrr")
    ranking = [r.kernel for r in registry.select(problem).ranking]
    last = ranking[-1]
    registry.declare(last, priority="high")
    assert registry.select(problem).kernel == last


def test_building_in_parallel_and_preferring_what_is_built(registry: tw.Registry) -> None:
    seen = []
    builds = registry.build(max_workers=2, on_done=seen.append)
    assert [b.status for b in builds] == ["ok", "ok"]
    assert len(seen) == 2
    assert all(b.was_cached for b in registry.build())


def test_registries_filter_merge_and_round_trip(registry: tw.Registry) -> None:
    packed = registry.filter("family == 'packed'")
    rest = registry.filter(lambda kernel: kernel not in packed)
    assert len(packed) == len(rest) == 1
    merged = packed.merge(rest)
    assert set(merged) == set(registry)
    again = tw.Registry.from_json(registry.to_json())
    assert again.kernels == registry.kernels
    assert again.to_json() == registry.to_json()
    with pytest.raises(InputError, match="one op on one architecture"):
        registry.merge(tw.Registry("conv_fwd", ARCH))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 99}', '{"schema": 1, "op": "gemm"}'])
def test_foreign_registry_files_are_refused(text: str) -> None:
    with pytest.raises(FileError):
        tw.Registry.from_json(text)


def test_registries_refuse_what_cannot_run() -> None:
    cuda = tw.Registry("gemm", "sm_90")
    kernel = next(k for k in default_registry("gemm", ARCH) if k.engine == "cpu")
    with pytest.raises(KernelError, match="cannot run on sm_90"):
        cuda.declare(kernel)
    conv = tw.Registry("conv_fwd", ARCH)
    with pytest.raises(KernelError, match="computes gemm, not conv_fwd"):
        conv.declare(kernel)
    with pytest.raises(ProblemError, match="holds conv_fwd kernels"):
        conv.run(tw.GemmProblem(m=1, n=1, k=1))


def test_nothing_can_serve_carries_what_was_asked() -> None:
    registry = tw.Registry("gemm", "sm_90").filter("True")
    problem = tw.GemmProblem(m=1, n=1, k=1, dtype="bf8")
    choice_or_error: object
    try:
        choice_or_error = registry.select(problem)
    except NoKernelError as error:
        assert error.asked
        return
    assert choice_or_error.path == "vendor"


def test_without_a_compiler_the_vendor_serves_and_says_so_once(
    registry: tw.Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TILEWISE_CXX", "no-such-compiler")
    settings.cache_clear()
    find_compiler.cache_clear()
    a, b = arrays(6, 7, 8)
    problem = tw.GemmProblem(m=6, n=7, k=8, layout="rrr")
    try:
        with caplog.at_level(logging.WARNING, "tilewise"):
            results = [registry.run(problem, a, b), registry.run(replace(problem, m=5), a[:5], b)]
    finally:
        monkeypatch.undo()
        settings.cache_clear()
        find_compiler.cache_clear()
    assert [r.path for r in results] == ["vendor", "vendor"]
    assert close(results[0].out, a.astype(np.float64) @ b, 8)
    told = [r.message for r in caplog.records if "no-such-compiler" in r.message]
    assert len([text for text in told if "engine cannot be used" in text]) == 1
    assert len(told) == len(set(told))


def test_a_kernel_that_fails_at_run_time_is_passed_over(
    registry: tw.Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = tw.GemmProblem(m=20, n=20, k=20, layout="rrr")
    first = registry.select(problem).kernel
    engine = get_engine("cpu")
    plan = engine.plan

    def failing(kernel, problem, arch):  # type: ignore[no-untyped-def]
        made = plan(kernel, problem, arch)
        if kernel == first:
            monkeypatch.setattr(made, "execute", _fail)
        return made

    monkeypatch.setattr(engine, "plan", failing)
    a, b = arrays(20, 20, 20)
    result = registry.run(problem, a, b)
    assert result.kernel != first
    assert close(result.out, a.astype(np.float64) @ b, 20)


def _fail(*_: object) -> None:
    raise ExecutionError("sabotaged")


def test_operands_are_padded_for_kernels_that_need_it() -> None:
    whole = default_registry("gemm", ARCH)
    exact = whole.filter(lambda kernel: getattr(kernel, "exact", False))
    kernel = exact.kernels[0]
    for m, n, k in ((kernel.mr, kernel.nr, 9), (kernel.mr + 1, kernel.nr - 1, 13), (1, 1, 1)):
        problem = tw.GemmProblem(m=m, n=n, k=k, layout="rrr")
        a, b = arrays(m, n, k)
        out = np.full((m, n), np.nan, np.float32)
        result = exact.run(problem, a, b, out=out)
        assert getattr(result.kernel, "exact", False)
        assert close(out, a.astype(np.float64) @ b, k)
        padding = result.workspace_bytes > 0
        assert padding == bool(m % result.kernel.mr or n % result.kernel.nr)


def test_plans_are_remembered_and_workspace_is_known(registry: tw.Registry) -> None:
    problem = tw.GemmProblem(m=96, n=96, k=96)
    plan, _ = registry.dispatcher.plan(problem)
    assert registry.dispatcher.plan(problem)[0] is plan
    assert registry.dispatcher.workspace_bytes(problem) == plan.workspace_bytes >= 0
    registry.declare(registry.kernels[0], priority="high")
    assert registry.dispatcher.plan(problem)[1] is not None


def test_eight_threads_dispatch_at_once() -> None:
    shapes = [(17 + 8 * i, 33, 29 + i) for i in range(8)]
    wrong: list[tuple[int, ...]] = []

    def work(m: int, n: int, k: int) -> None:
        a, b = arrays(m, n, k)
        expected = a.astype(np.float64) @ b
        for _ in range(50):
            if not close(tw.matmul(a, b), expected, k):
                wrong.append((m, n, k))

    threads = [threading.Thread(target=work, args=shape) for shape in shapes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_several_engines_with_their_own_threads() -> None:
    kernel = next(
        k for k in default_registry("gemm", ARCH) if k.engine == "cpu" and k.dtype == "fp32"
    )
    problem = tw.GemmProblem(m=65, n=47, k=33, layout="rrr")
    a, b = arrays(65, 47, 33)
    for threads in (1, 2, 5):
        out = np.full((65, 47), np.nan, np.float32)
        CpuEngine(threads).plan(kernel, problem, ARCH).execute((a, b), out)
        assert close(out, a.astype(np.float64) @ b, 33)


def test_a_batch_of_one_stays_a_batch() -> None:
    a, b = np.ones((1, 5, 7), np.float32), np.ones((1, 7, 9), np.float32)
    assert tw.matmul(a, b).shape == (1, 5, 9)
    x = torch.ones(1, 5, 7, requires_grad=True)
    tw.matmul(x, torch.ones(1, 7, 9)).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (1, 5, 7)


def test_lazily_negated_tensors_keep_their_sign() -> None:
    a, b = (torch.from_numpy(t) for t in arrays(5, 6, 7))
    assert torch.equal(tw.matmul(torch._neg_view(a), b), tw.matmul(-a, b))
    with pytest.raises(TensorError, match="lazily negated"):
        tw.matmul(a, b, out=torch._neg_view(torch.empty(5, 6)))


def test_tensors_of_other_devices_and_libraries_are_refused() -> None:
    a, b = (torch.from_numpy(t) for t in arrays(3, 3, 3))
    with pytest.raises(TensorError, match="on meta"):
        tw.matmul(a, b, out=torch.empty(3, 3, device="meta"))
    for left in (a, a.clone().requires_grad_()):
        with pytest.raises(TensorError, match="two libraries"):
            tw.matmul(left, b.numpy())
        with pytest.raises(TensorError, match="two libraries"):
            tw.matmul(b.numpy(), left)


def test_a_callers_workspace_is_enough_at_any_address_and_checked() -> None:
    kernel = next(k for k in default_registry("gemm", ARCH) if getattr(k, "family", "") == "packed")
    problem = tw.GemmProblem(m=70, n=50, k=30, layout="rrr")
    a, b = arrays(70, 50, 30)
    plan = get_engine("cpu").plan(kernel, problem, ARCH)
    for offset in (0, 1, 63):
        held = np.full(plan.workspace_bytes + 256, 7, np.uint8)
        out = np.full((70, 50), np.nan, np.float32)
        plan.execute((a, b), out, held[offset : offset + plan.workspace_bytes])
        assert close(out, a.astype(np.float64) @ b, 30)
        assert (held[offset + plan.workspace_bytes :] == 7).all()
        assert (held[:offset] == 7).all()
    with pytest.raises(ExecutionError, match="are needed"):
        plan.execute((a, b), out, np.empty(plan.workspace_bytes - 1, np.uint8))


def test_registries_keep_their_device_and_refuse_nonsense(registry: tw.Registry) -> None:
    h200 = tw.Registry("gemm", tw.load_arch("sm_90", "H200"))
    assert tw.Registry.from_json(h200.to_json()).arch == h200.arch
    assert tw.Registry.from_json(registry.to_json()).arch == registry.arch
    name = registry.kernels[0].name
    assert registry.declare([name]) == [registry.kernels[0]]
    for wrong in ({"priority": "urgent"}, {"mr": 4}):
        with pytest.raises(InputError):
            registry.declare(name, **wrong)
    with pytest.raises(FileError):
        tw.Registry.from_json(Path("no-such-file.json"))
    with pytest.raises(FileError):
        tw.Registry.from_json("[" * 200_000)
    with pytest.raises(InputError, match="top_k"):
        registry.select(tw.GemmProblem(m=1, n=1, k=1), top_k=0)


def test_building_without_a_compiler_is_a_recorded_failure(
    registry: tw.Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get_engine("cpu"), "why_unavailable", lambda: "no compiler")
    assert {b.status for b in registry.build()} == {"compile_error"}
    assert registry.select(tw.GemmProblem(m=8, n=8, k=8)).path == "vendor"


def test_tensors_that_require_gradients_may_be_run_directly(registry: tw.Registry) -> None:
    a, b = (torch.from_numpy(t).requires_grad_() for t in arrays(6, 5, 4))
    problem = tw.GemmProblem(m=6, n=5, k=4, layout="rrr")
    assert not registry.run(problem, a, b).out.requires_grad
    vendor = tw.Registry("gemm", ARCH)
    assert not vendor.run(problem, a, b).out.requires_grad


@pytest.mark.parametrize("op", ["gemm", "conv_fwd", "conv_bwd_data", "conv_bwd_weight"])
def test_numpy_alone_serves_every_op(op: str) -> None:
    values = {"M": 5, "N": 6, "K": 7} if op == "gemm" else {}
    if op != "gemm":
        values = {"N": 2, "C": 4, "K": 6, "G": 2, "Hi": 7, "Wi": 8, "Y": 3, "X": 2}
        values |= {"stride_h": 2, "pad_h": 1, "pad_w": 1, "dilation_w": 2, "layout": "nchw"}
    problem = get_op(op).make_problem(**values)
    generator = np.random.default_rng(1)
    *shapes, result = get_op(op).shapes(problem)
    operands = [generator.standard_normal(shape).astype(np.float32) for shape in shapes]
    vendor = get_op(op).kernel_from_name(f"{op}_vendor_numpy")
    out = np.full(result, np.nan, np.float32)
    get_engine("vendor").plan(vendor, problem, ARCH).execute(operands, out)
    assert close(out, get_op(op).reference(problem, *operands), problem.gemm.k)


def test_registry_json_is_plain(registry: tw.Registry) -> None:
    data = json.loads(registry.to_json())
    assert data["op"] == "gemm"
    assert {"priority", "op", "engine", "dtype"} <= set(data["kernels"][0])


def test_installed_vendors_are_candidates_where_they_run() -> None:
    def vendors(arch: Arch) -> set[str]:
        return {k.library for k in default_registry("gemm", arch) if isinstance(k, VendorKernel)}

    assert vendors(ARCH) == {"torch", "numpy"}
    assert vendors(load_arch("sm_90")) == {"torch"}
    ranked = {r.kernel.name for r in tw.select(tw.GemmProblem(m=8, n=8, k=8)).ranking}
    assert ranked >= {"gemm_vendor_torch", "gemm_vendor_numpy"}
