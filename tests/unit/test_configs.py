"""The instance builder: configs to kernels, kernels to JSON and back."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.core.arch import Arch, load_arch
from tilewise.core.kernel import Kernel, trait
from tilewise.core.problem import Problem
from tilewise.errors import FileError, InputError, KernelError
from tilewise.ops.configs import (
    dump_kernels,
    expand,
    expand_counted,
    filter_kernels,
    load_kernels,
    load_pool,
    read_config,
)
from tilewise.ops.contract import Op, all_ops, get_op

AVX2, AVX512 = load_arch("x86_avx2"), load_arch("x86_avx512")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyKernel(Kernel):
    engine: ClassVar[str] = "toy"

    isa: str = trait("", ("avx2", "avx512"))
    tile_m: int = trait("m", (2, 4, 8))
    tile_n: int = trait("n", (8, 16))
    pack: bool = trait("pack", (False, True), default=False)
    unroll: int = trait("u", (1, 2, 4), default=1)

    def __post_init__(self) -> None:
        self.check_choices()
        if self.tile_m * self.tile_n > 64:
            raise KernelError("too many registers")

    @classmethod
    def only_op(cls) -> str:
        return "gemm"

    @classmethod
    def is_dead_end(cls, values: dict[str, Any], arch: Arch) -> bool:
        return next(reversed(values)) == "tile_m" and values["tile_m"] == 99


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherKernel(ToyKernel):
    engine: ClassVar[str] = "other"

    stages: int = trait("s", (1, 2), default=1)


def why_unusable(kernel: Kernel, problem: Problem | None, arch: Arch) -> str | None:
    assert isinstance(kernel, ToyKernel)
    return None if arch.has(kernel.isa) else f"{arch.name} lacks {kernel.isa}"


@pytest.fixture
def op(tmp_path: Path) -> Op:
    (tmp_path / "pool").mkdir()
    return replace(
        get_op("gemm"),
        folder=tmp_path,
        kernel_types=(ToyKernel, OtherKernel),
        why_unusable=why_unusable,
    )


def block(**traits: Any) -> list[dict[str, Any]]:
    return [{"engine": "toy", "traits": traits}]


def toys(kernels: list[Kernel]) -> list[ToyKernel]:
    assert all(isinstance(k, ToyKernel) for k in kernels)
    return kernels  # type: ignore[return-value]


def test_absent_traits_take_their_default_or_every_choice(op: Op) -> None:
    found = toys(expand(block(), op, AVX512))
    assert {(k.isa, k.tile_m, k.tile_n) for k in found} == {
        (isa, m, n) for isa in ("avx2", "avx512") for m in (2, 4, 8) for n in (8, 16) if m * n <= 64
    }
    assert {(k.pack, k.unroll) for k in found} == {(False, 1)}


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        (4, {4}),
        ([2, 4], {2, 4}),
        ({"values": [4, 2]}, {2, 4}),
        ("*", {2, 4, 8}),
        (-1, {2, 4, 8}),
        ({"min": 1, "max": 7, "step": 2}, {1, 3, 5, 7}),
        ({"min": 1, "max": 6, "step": 2}, {1, 3, 5}),
        ({"min": 3, "max": 8}, {4, 8}),
        ({"min": 6, "max": 6, "step": 1}, {6}),
        (5, {5}),
    ],
)
def test_forms_of_a_trait(op: Op, spec: Any, values: set[int]) -> None:
    found = toys(expand(block(tile_m=spec, tile_n=8), op, AVX2))
    assert {k.tile_m for k in found} == values


def test_wildcards_work_for_text_and_flags(op: Op) -> None:
    found = toys(expand(block(isa="*", tile_m=2, tile_n=8, pack=-1), op, AVX512))
    assert {(k.isa, k.pack) for k in found} == {
        (isa, pack) for isa in ("avx2", "avx512") for pack in (False, True)
    }


def test_only_legal_kernels_of_the_architecture(op: Op) -> None:
    result = expand_counted(block(tile_n=8), op, AVX2)
    assert {k.isa for k in toys(result.kernels)} == {"avx2"}
    assert result.illegal == {"x86_avx2 lacks avx512": 3}
    assert result.combinations == 6


def test_impossible_combinations_are_counted(op: Op) -> None:
    result = expand_counted(block(isa="avx2", tile_m=[8, 99], tile_n=[8, 16]), op, AVX2)
    assert [k.name for k in result.kernels] == ["gemm_toy_avx2_m8_n8_u1"]
    assert result.impossible == 1 + 2 and result.combinations == 4


def test_kernels_come_once_and_in_a_fixed_order(op: Op) -> None:
    config = block(isa="avx2", tile_m=[8, 2], tile_n=8) + block(isa="avx2", tile_m="*", tile_n=8)
    result = expand_counted(config, op, AVX2)
    assert [k.tile_m for k in toys(result.kernels)] == [8, 2, 4]
    assert result.duplicates == 2
    assert expand(config, op, AVX2) == result.kernels


def test_blocks_are_for_architectures_and_ops(op: Op) -> None:
    config = block(isa="avx2", tile_m=2, tile_n=8)
    assert expand([{**config[0], "archs": ["x86_avx512"]}], op, AVX2) == []
    assert len(expand([{**config[0], "archs": ["x86_avx512"]}], op, AVX512)) == 1
    assert expand([{**config[0], "ops": ["conv_fwd"]}], op, AVX2) == []


def test_a_block_filter_cuts_combinations(op: Op) -> None:
    config = [{**block(isa="avx2")[0], "filter": "tile_n == 2 * tile_m"}]
    result = expand_counted(config, op, AVX2)
    assert [(k.tile_m, k.tile_n) for k in toys(result.kernels)] == [(4, 8)]
    assert result.filtered == 4 and result.impossible == 1
    named = [{**block(isa="avx2")[0], "filter": "name == 'gemm_toy_avx2_m4_n8_u1'"}]
    assert expand(named, op, AVX2) == result.kernels


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"engine": "toy"}, "a list of blocks, not dict"),
        ("toy", "a list of blocks"),
        ([3], "block 0: it must be an object"),
        ([{"traits": {}}], "an engine"),
        ([{"engine": "toy", "trait": {}}], "unknown keys.*'trait'"),
        ([{"engine": "toy", "traits": []}], "traits is"),
        ([{"engine": "toy", "archs": "x86_avx2"}], "a list of names"),
        ([{"engine": "gpu"}], "no kernels for engine 'gpu'; it has toy, other"),
        (block(tile_mm=4), "no trait 'tile_mm'; did you mean 'tile_m'"),
        (block(zzz=4), "it has isa, tile_m"),
        (block(tile_m="4"), "tile_m is '4'; it must be int, like 2, 4, 8"),
        (block(tile_m=4.0), "it must be int"),
        (block(tile_m=True), "it must be int"),
        (block(tile_m=[4, "*"]), "tile_m is '\\*'"),
        (block(tile_m=[]), "empty list"),
        (block(tile_m=None), "must be int"),
        (block(isa="sse"), "isa is 'sse'; use one of avx2, avx512"),
        (block(isa={"min": 1, "max": 2}), "numbers only"),
        (block(pack=1), "pack is 1; it must be bool"),
        (block(tile_m={"min": 1}), '"step": s'),
        (block(tile_m={"min": 1, "max": 4, "stride": 2}), '"step": s'),
        (block(tile_m={"min": 4, "max": 1}), "min <= max"),
        (block(tile_m={"min": 1, "max": 4, "step": 0}), "step is at least 1"),
        (block(tile_m={"min": 1.0, "max": 4}), "integers"),
        (block(tile_m={"min": 5, "max": 7}), "no choice lies between, they are 2, 4, 8"),
        (block(tile_m={"min": 0, "max": 10**9, "step": 1}), "more than"),
        (block(tile_m={"values": 3, "min": 1}), '"values"'),
        ([*block(isa="avx2"), *block(tile_m="x")], "block 1: tile_m"),
        ([{"engine": "toy", "filter": "tile_q > 1"}], "block 0: filter: unknown field 'tile_q'"),
    ],
)
def test_mistakes_are_named(op: Op, config: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        expand(config, op, AVX2)


def test_a_space_that_is_too_large_is_refused(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewise.ops.configs.MAX_COMBINATIONS", 5)
    with pytest.raises(InputError, match="name fewer values"):
        expand(block(), op, AVX2)


def test_pools_are_read_in_order_and_by_engine(op: Op) -> None:
    pool = op.folder / "pool"
    (pool / "b.json").write_text(json.dumps(block(isa="avx2", tile_m=2, tile_n=8)))
    other = [{"engine": "other", "traits": {"isa": "avx2", "tile_m": 4, "tile_n": 8}}]
    (pool / "a.json").write_text(json.dumps(other))
    assert [k.engine for k in load_pool(op, AVX2)] == ["other", "toy"]
    assert [k.engine for k in load_pool(op, AVX2, ["toy"])] == ["toy"]


@pytest.mark.parametrize("text", ["{", "{}", "[1]", "\xff"])
def test_a_damaged_pool_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "pool.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(FileError, match=r"pool\.json is not a config"):
        read_config(path)


def test_filters_over_kernels_of_several_kinds(op: Op) -> None:
    config = [{"engine": e, "traits": {"isa": "avx2", "tile_n": 8}} for e in ("toy", "other")]
    kernels = expand(config, op, AVX2)
    assert len(filter_kernels(kernels, "tile_m >= 4 and isa == 'avx2'")) == 4
    assert {k.engine for k in filter_kernels(kernels, "stages == 1")} == {"other"}
    assert {k.engine for k in filter_kernels(kernels, "engine == 'toy' and op == 'gemm'")} == {
        "toy"
    }
    assert len(filter_kernels(kernels, "'_m8_' in name")) == 2
    with pytest.raises(InputError, match="unknown field 'pipeline'"):
        filter_kernels(kernels, "pipeline == 'tma'")


def test_json_keeps_every_field(op: Op) -> None:
    config = [{"engine": e, "traits": {"pack": "*", "unroll": "*"}} for e in ("toy", "other")]
    kernels = expand(config, op, AVX512)
    again = load_kernels(dump_kernels(kernels), op)
    assert again == kernels and [k.name for k in again] == [k.name for k in kernels]
    assert load_kernels(dump_kernels([]), op) == []


GOOD = {"op": "gemm", "engine": "toy", "isa": "avx2", "tile_m": 2, "tile_n": 8}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({**GOOD, "tile_q": 1}, r"kernels\[1\]: unknown traits \['tile_q'\]; a ToyKernel has"),
        ({k: v for k, v in GOOD.items() if k != "tile_m"}, r"kernels\[1\]: traits \['tile_m'\]"),
        ({**GOOD, "tile_m": "2"}, r"kernels\[1\]: tile_m is '2'; it must be int"),
        ({**GOOD, "tile_m": 2.0}, "it must be int"),
        ({**GOOD, "tile_m": -2}, "cannot be negative"),
        ({**GOOD, "pack": 0}, "pack is 0; it must be bool"),
        ({**GOOD, "isa": "neon"}, "use one of avx2, avx512"),
        ({**GOOD, "op": "conv_fwd"}, r"kernels\[1\]: op is 'conv_fwd'; .* of gemm"),
        ({**GOOD, "engine": "gpu"}, "no kernels for engine 'gpu'"),
        ({**GOOD, "tile_m": 16, "tile_n": 16}, "too many registers"),
        ({"engine": "toy"}, "an object with op, engine"),
        ([], "an object with op, engine"),
    ],
)
def test_wrong_kernels_are_refused_with_their_position(op: Op, entry: Any, message: str) -> None:
    text = json.dumps({"schema": 1, "kernels": [GOOD, entry]})
    with pytest.raises(KernelError, match=message):
        load_kernels(text, op)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "not a kernel file"),
        ("{", "not JSON"),
        ('{"schema": 2, "kernels": []}', "schema is 2; this version reads 1"),
        ('{"kernels": []}', "schema is None"),
    ],
)
def test_foreign_files_are_refused(op: Op, text: str, message: str) -> None:
    with pytest.raises(FileError, match=message):
        load_kernels(text, op)


@given(
    st.builds(
        ToyKernel,
        isa=st.sampled_from(["avx2", "avx512"]),
        tile_m=st.integers(0, 8),
        tile_n=st.integers(0, 8),
        pack=st.booleans(),
        unroll=st.integers(0, 10**12),
    )
)
def test_any_kernel_survives_json(kernel: ToyKernel) -> None:
    op = replace(get_op("gemm"), kernel_types=(ToyKernel,))
    assert load_kernels(dump_kernels([kernel]), op) == [kernel]


@pytest.mark.parametrize("arch", ["x86_avx2", "x86_avx512", "sm_90", "gfx950"])
@pytest.mark.parametrize("name", sorted(all_ops()))
def test_shipped_pools_are_sound(name: str, arch: str) -> None:
    op = get_op(name)
    kernels = load_pool(op, load_arch(arch))
    assert len(set(kernels)) == len(kernels) == len({k.name for k in kernels})
    assert all(k.op == name for k in kernels)
    sample = kernels[:: max(1, len(kernels) // 300)]
    assert load_kernels(dump_kernels(sample), op) == sample
    assert [op.kernel_from_name(k.name) for k in sample] == sample
