"""Several types of kernel for one engine and op, told apart by `family`; old names stay."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tilewise.core.arch import load_arch
from tilewise.core.kernel import Kernel, trait
from tilewise.errors import InputError, KernelError
from tilewise.ops.configs import dump_kernels, expand, load_kernels
from tilewise.ops.contract import Op, get_op
from tilewise.ops.gemm.kernels import GPU_KERNEL_TYPES
from tilewise.ops.gemm.kernels.gpu import GpuGemmKernel

PUBLISHED = Path(__file__).parent / "published_kernels.json.gz"
ARCH = load_arch("x86_avx2")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ToyCuda(Kernel):
    engine: ClassVar[str] = "cuda"
    op_name: str = field(metadata={"choices": ("conv_fwd", "conv_bwd_data")})

    def __post_init__(self) -> None:
        self.check_choices()

    @property
    def op(self) -> str:
        return self.op_name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows(_ToyCuda):
    family: str = trait("", ("rows", "columns"))
    depth: int = trait("d", (1, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Halo(_ToyCuda):
    family: str = trait("", ("halo",))
    order: str = trait("", ("rows", "any"), default="any")
    taps: int = trait("t", (3, 5))


def _usable(kernel: Any, problem: Any, arch: Any) -> str | None:
    return None


@pytest.fixture
def op() -> Op:
    base = get_op("conv_fwd")
    others = (kind for kind in base.kernel_types if kind.engine != "cuda")
    types = (*others, _Rows, _Halo)
    return replace(base, kernel_types=types, why_unusable=_usable)


def test_names_and_dicts_find_their_type(op: Op) -> None:
    for kernel, name in (
        (_Rows(op_name="conv_fwd", family="columns", depth=2), "conv_fwd_cuda_columns_d2"),
        (_Halo(op_name="conv_fwd", family="halo", taps=3), "conv_fwd_cuda_halo_any_t3"),
        # A word of one type may be a family of another.
        (_Halo(op_name="conv_fwd", family="halo", order="rows", taps=5), None),
    ):
        assert name is None or kernel.name == name
        assert op.kernel_from_name(kernel.name) == kernel
        assert op.kernel_from_dict(kernel.to_dict()) == kernel
        assert load_kernels(dump_kernels([kernel]), op) == [kernel]
    assert op.types_of("cuda") == (_Rows, _Halo)
    assert op.kernel_type("cuda", "halo") is _Halo


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "family is missing; cuda kernels of conv_fwd have one of rows, columns, halo"),
        ({"family": "tiles"}, "family is 'tiles'"),
        ({"family": ["halo"]}, "family is"),
        ({"family": "halo", "depth": 2}, "unknown traits"),
    ],
)
def test_a_wrong_family_is_named(op: Op, values: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        op.kernel_from_dict({"op": "conv_fwd", "engine": "cuda", **values})


def test_a_wrong_name_is_judged_by_the_type_of_its_family(op: Op) -> None:
    with pytest.raises(KernelError, match="expected taps"):
        op.kernel_from_name("conv_fwd_cuda_halo_any_d2")
    with pytest.raises(KernelError, match="no family of cuda kernels: rows, columns, halo"):
        op.kernel_from_name("conv_fwd_cuda_tiles_d2")


def test_a_block_means_the_types_of_its_families(op: Op) -> None:
    def names(**traits: Any) -> list[str]:
        block = {"engine": "cuda", "traits": traits}
        return [kernel.name.removeprefix("conv_fwd_cuda_") for kernel in expand([block], op, ARCH)]

    assert names(family="halo", taps=3) == ["halo_any_t3"]
    assert names(family={"values": ["rows"]}, depth=1) == ["rows_d1"]
    assert names(family=["halo", "rows"]) == ["rows_d1", "rows_d2", "halo_any_t3", "halo_any_t5"]
    assert len(names()) == len(names(family="*")) == len(names(family=-1)) == 6
    for wrong in ("tiles", ["halo", 3], []):
        with pytest.raises(InputError, match="use one of rows, columns, halo"):
            names(family=wrong)
    with pytest.raises(InputError, match="a _Halo has no trait 'depth'"):
        names(family=["rows", "halo"], depth=1)


def test_types_that_cannot_be_told_apart_are_refused(op: Op) -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Same(_ToyCuda):
        family: str = trait("", ("halo",))

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Without(_ToyCuda):
        taps: int = trait("t", (3,))

    for other in (Same, Without):
        with pytest.raises(KernelError, match="a trait `family` whose choices no other has"):
            replace(op, kernel_types=(*op.kernel_types, other))


@pytest.mark.parametrize("which", json.loads(gzip.decompress(PUBLISHED.read_bytes())).items())
def test_published_kernels_keep_their_names_and_keys(which: tuple[str, dict[str, Any]]) -> None:
    """Every kernel of the pools and published rows of version 0.1.0, by op."""
    op, told = which
    kernels = [get_op(op).kernel_from_name(name) for name in told["names"]]
    assert [kernel.name for kernel in kernels] == told["names"]
    assert [get_op(op).kernel_from_dict(k.to_dict()) for k in kernels] == kernels
    keys = "\n".join(kernel.key for kernel in kernels)
    assert sha256(keys.encode()).hexdigest() == told["keys_sha256"]


@pytest.mark.parametrize("kind", GPU_KERNEL_TYPES, ids=lambda kind: kind.__name__)
def test_a_gemm_kernel_has_the_traits_of_its_family(kind: type[GpuGemmKernel]) -> None:
    """What a family has no choice of stands in its names, and has one value."""
    tile: dict[str, Any] = {"dtype": "bf16", "tile_m": 128, "tile_n": 64, "tile_k": 64}
    for family in kind.families():
        plain = kind(family=family, **tile)
        assert get_op("gemm").kernel_type("triton", family) is kind
        others: dict[str, Any] = {"split_k": 2, "swap": True, "fill": True, "atomic": True}
        for name, value in others.items():
            if len(kind.space()[name]) == 1:
                with pytest.raises(KernelError, match=f"{family} has no {name}"):
                    replace(plain, **{name: value})
                assert not expand(
                    [{"engine": "triton", "traits": {**tile, "family": family, name: value}}],
                    get_op("gemm"),
                    load_arch("sm_90"),
                )
