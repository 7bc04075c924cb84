"""Kernels of every op, engine and architecture keep the one contract."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.core.arch import known_archs, load_arch
from tilewise.core.kernel import Kernel
from tilewise.errors import KernelError
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import all_ops, get_op
from tilewise.ops.vendor import VendorKernel

POOLS = [(op, arch) for op in all_ops() for arch in known_archs()]
KINDS = [(op, kind) for op in all_ops() for kind in get_op(op).kernel_types]


@pytest.mark.parametrize(("op", "arch"), POOLS)
def test_pools_round_trip_and_are_legal(op: str, arch: str) -> None:
    kernels = load_pool(get_op(op), load_arch(arch))
    assert len({kernel.name for kernel in kernels}) == len(kernels), "names differ"
    assert len({kernel.key for kernel in kernels}) == len(kernels), "keys differ"
    for kernel in kernels:
        assert get_op(op).kernel_from_name(kernel.name) == kernel
        assert get_op(op).kernel_from_dict(kernel.to_dict()) == kernel
        assert get_op(op).why_unusable(kernel, None, load_arch(arch)) is None
        assert len(kernel.tile) == 3


@pytest.mark.parametrize(("op", "kind"), KINDS, ids=lambda v: getattr(v, "__name__", v))
def test_any_kernel_of_the_space_round_trips(op: str, kind: type[Kernel]) -> None:
    """Random points of the whole space, not only of the shipped pools."""
    space = kind.space()
    extra = {"op_name": op} if any(f.name == "op_name" for f in fields(kind)) else {}

    @given(st.fixed_dictionaries({name: st.sampled_from(v) for name, v in space.items()}))
    def check(values: dict) -> None:
        try:
            kernel = kind(**values, **extra)
        except KernelError:
            return
        assert kind.from_name(kernel.name) == kernel
        assert kind.from_dict(kernel.to_dict()) == kernel
        for name, choices in space.items():
            for other in choices:
                if other != getattr(kernel, name):
                    try:
                        changed = replace(kernel, **{name: other})
                    except KernelError:
                        continue
                    assert changed.name != kernel.name, f"{name} is not in the name"

    check()


@pytest.mark.parametrize("engine", ["cpu"])
@pytest.mark.parametrize("arch", ["x86_avx2", "x86_avx512"])
def test_the_cpu_pools_are_large_enough(engine: str, arch: str) -> None:
    for op, least in {
        "gemm": 60,
        "conv_fwd": 40,
        "conv_bwd_data": 40,
        "conv_bwd_weight": 40,
    }.items():
        pool = load_pool(get_op(op), load_arch(arch), [engine])
        assert sum(kernel.dtype == "fp32" for kernel in pool) >= least, op
        assert {k.dtype for k in pool} >= {"fp32", "fp16", "bf16", "fp8", "bf8", "int8"}, op


def test_wrong_names_and_traits_are_refused() -> None:
    op = get_op("gemm")
    kernel = load_pool(op, load_arch("x86_avx2"), ["cpu"])[0]
    for name in (kernel.name + "_extra", kernel.name[:-3], "gemm_cpu_", "nonsense", ""):
        with pytest.raises(KernelError):
            op.kernel_from_name(name)
    with pytest.raises(KernelError, match="unknown traits"):
        op.kernel_from_dict({**kernel.to_dict(), "colour": 3})
    with pytest.raises(KernelError, match="missing"):
        op.kernel_from_dict({"op": "gemm", "engine": "cpu"})
    with pytest.raises(KernelError, match="no kernels for engine 'abacus'"):
        op.kernel_from_dict({"op": "gemm", "engine": "abacus"})


def test_vendor_kernels_are_kernels() -> None:
    kernel = VendorKernel(op_name="conv_fwd", library="torch")
    assert VendorKernel.from_name(kernel.name) == kernel
    assert VendorKernel.from_dict(kernel.to_dict()) == kernel
    assert get_op("gemm").why_unusable(
        VendorKernel(op_name="gemm", library="numpy"), None, load_arch("sm_90")
    )


@pytest.mark.parametrize(
    ("dtype", "n", "serves"), [("fp8", 96, True), ("fp8", 97, False), ("bf8", 96, False)]
)
def test_the_vendor_does_not_stand_for_routines_it_lacks(dtype: str, n: int, serves: bool) -> None:
    from tilewise.ops.gemm.problem import GemmProblem

    problem = GemmProblem(m=64, n=n, k=128, dtype=dtype)
    kernel = VendorKernel(op_name="gemm", library="torch")
    reason = get_op("gemm").why_unusable(kernel, problem, load_arch("sm_90"))
    assert (reason is None) == serves
    numpy = VendorKernel(op_name="gemm", library="numpy")
    assert get_op("gemm").why_unusable(numpy, problem, load_arch("sm_90")) is not None
