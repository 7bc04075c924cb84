"""A toolchain tells which text of the kernels it compiled: rows of another are other rows."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tilewise.core.arch import load_arch
from tilewise.core.measurement import Measurement, Policy, Setting, sources_of, with_sources
from tilewise.engines import engines_for, get_engine
from tilewise.engines.contract import digest_of
from tilewise.learn.dataset import from_measurements
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import all_ops, get_op
from tilewise.ops.gemm.problem import GemmProblem

ENGINES = ("cpu", "triton", "cuda", "vendor")


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_says_what_it_compiles_with_and_from(name: str) -> None:
    engine = get_engine(name)
    assert set(engine.kinds) <= {"cpu", "gpu"} and engine.kinds
    for op in all_ops().values():
        found = engine.toolchain(op)
        assert len(sources_of(found)) == 12
        assert found == with_sources(found.partition("; sources ")[0], sources_of(found))
    assert sources_of(engine.toolchain(get_op("gemm"))) != sources_of(
        engine.toolchain(get_op("conv_fwd"))
    )


def test_engines_are_those_that_an_op_has_kernels_for() -> None:
    assert engines_for("cpu", get_op("gemm")) == ("cpu", "vendor")
    assert engines_for("gpu", get_op("gemm")) == ("triton", "vendor")


@pytest.mark.parametrize(
    ("engine", "file"),
    [
        ("cpu", "include/packed.hpp"),
        ("cpu", "cpu.py"),
        ("cpu", "abi.py"),
        ("triton", "gluon.py"),
        ("triton", "triton.py"),
        ("triton", "launch_hopper.py"),
        ("triton", "launch.py"),
        ("vendor", "vendor.py"),
    ],
)
def test_another_text_is_another_toolchain(engine: str, file: str, tmp_path: Path) -> None:
    op = get_op("gemm")
    copy = tmp_path / op.folder.name
    shutil.copytree(op.folder, copy)
    moved = replace(op, folder=copy)
    before = get_engine(engine).toolchain(moved)
    assert before == get_engine(engine).toolchain(op), "where it lies does not matter"
    (copy / "reference.py").write_text("")
    assert get_engine(engine).toolchain(moved) == before, "it is no kernel"
    (copy / file).write_text((copy / file).read_text() + "\n")
    assert get_engine(engine).toolchain(moved) != before


@pytest.mark.parametrize("op", ["conv_fwd", "conv_bwd_data", "conv_bwd_weight"])
def test_a_family_is_told_by_the_files_its_launches_name(op: str) -> None:
    arch = load_arch("sm_90")
    module = get_op(op).module("launch")
    for kernel in load_pool(get_op(op), arch, ["cuda"]):
        made = module.launch(kernel, module.representative(kernel), arch)
        assert {s.file for s in made.sources} <= {*module.cuda_files(op, kernel.family)}  # type: ignore[attr-defined]


def test_a_kernel_written_anew_leaves_other_families_their_rows(tmp_path: Path) -> None:
    op, engine = get_op("conv_fwd"), get_engine("cuda")
    copy = tmp_path / op.folder.name
    shutil.copytree(op.folder, copy)
    moved = replace(op, folder=copy)

    def all_of() -> dict[str, str]:
        return {family: engine.toolchain(moved, family) for family in engine.families(moved)}

    before = all_of()
    assert before == {family: engine.toolchain(op, family) for family in before}
    assert len(set(before.values())) >= 5
    (copy / "launch_halo.py").write_text((copy / "launch_halo.py").read_text() + "\n")
    after = all_of()
    assert [family for family in before if before[family] != after[family]] == ["halo", "ragged"]
    (copy / "launch_pieces.py").write_text((copy / "launch_pieces.py").read_text() + "\n")
    assert {"im2col", "gather"} <= {name for name in before if before[name] != all_of()[name]}


def test_what_a_digest_is_of(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.hpp").write_text("1")
    first = digest_of([tmp_path / "a", tmp_path / "missing"])
    (tmp_path / "a" / "notes.txt").write_text("not compiled")
    assert digest_of([tmp_path / "a"]) == first
    (tmp_path / "a" / "one.hpp").rename(tmp_path / "a" / "two.hpp")
    assert digest_of([tmp_path / "a"]) != first


def test_a_kernel_written_anew_is_learned_from_its_own_rows() -> None:
    kernels = load_pool(get_op("gemm"), load_arch("x86_avx512"), ["cpu"])[:3]
    problems = [GemmProblem(m=64 * m, n=64, k=64) for m in range(1, 4)]

    def rows(sources: str, run: str, us: float) -> list[Measurement]:
        toolchain = with_sources("g++ 12", sources) if sources else "g++ 12"
        setting = Setting(arch="x86_avx512", device="a CPU", toolchain=toolchain, policy=Policy())
        return [
            Measurement.of(
                *(problem, kernel, setting),
                **{"status": "ok", "time_us": us, "min_us": us, "spread_us": 0.1, "repeats": 9},
                **{"run_id": run, "stage": "leader"},
            )
            for problem in problems
            for kernel in kernels
        ]

    # The old kernel was faster, and was a leader, too.
    old, new = rows("", "20260101T000000-a", 5.0), rows("0123456789ab", "20260201T000000-b", 9.0)
    assert not {row.key for row in old} & {row.key for row in new}
    for given in ([*old, *new], [*new, *old]):
        found = from_measurements(given, arch=load_arch("x86_avx512"))
        assert found.time_us.tolist() == [9.0] * 9
