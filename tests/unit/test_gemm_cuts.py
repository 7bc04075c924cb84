"""How the tiles of a last wave are cut: every step of every tile is done once, by somebody."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gemm_kernels import gemm_kernel

from tilewise.core.arch import load_arch
from tilewise.ops.gemm.kernels.gpu import GpuGemmKernel
from tilewise.ops.gemm.launch_hopper import Handout, _cut_plan

pytest.importorskip("triton")

from tilewise.ops.gemm import gluon

SM90 = load_arch("sm_90")


class Values(np.ndarray):
    """An array that converts as a tensor does."""

    def to(self, kind: Any) -> Any:
        return self.astype(kind)


def kernel(**traits: Any) -> GpuGemmKernel:
    shape = {"family": "ws", "dtype": "bf16", "tile_m": 128, "tile_n": 192, "tile_k": 64}
    return gemm_kernel(**{**shape, "warps": 8, "stages": 5, **traits})


def shares(
    monkeypatch: pytest.MonkeyPatch, plan: Handout, tiles: int, steps: int, may_cut: bool
) -> list[tuple[int, ...]]:
    """(tile, part, first step, steps) of each piece, by the kernel's own function."""
    language = SimpleNamespace(
        maximum=np.maximum,
        minimum=np.minimum,
        where=lambda *x: np.where(*x).view(Values),
        int32=np.int32,
        to_tensor=np.int32,
        num_programs=lambda _: plan.programs,
    )
    monkeypatch.setattr(gluon, "gl", language)
    pieces = np.arange(plan.pieces, dtype=np.int32).view(Values)
    schedule = (tiles, plan.pieces, plan.whole, plan.slices, plan.most, 1, tiles, steps)
    rows = gluon.assign.fn(pieces, schedule, SimpleNamespace(CUT=may_cut))
    return list(zip(*(np.broadcast_to(row, pieces.shape).tolist() for row in rows), strict=True))


@pytest.mark.parametrize("steps", [1, 3, 4, 7, 33, 112, 296])
@pytest.mark.parametrize("tiles", [1, 8, 44, 66, 76, 88, 112, 131, 132, 133, 272, 352, 395])
@pytest.mark.parametrize("traits", [{"fill": True}, {"split_k": 3}, {}], ids=["fill", "z3", "not"])
def test_every_step_is_done_once(
    monkeypatch: pytest.MonkeyPatch, traits: dict[str, Any], tiles: int, steps: int
) -> None:
    plan = _cut_plan(kernel(**traits), tiles, steps, SM90)
    done = np.zeros((tiles, steps), np.int32)
    parts: set[tuple[int, int]] = set()
    for tile, part, first, count in shares(monkeypatch, plan, tiles, steps, bool(traits)):
        done[tile, first : first + count] += 1
        if count:
            assert part < plan.slices and (tile, part) not in parts
            parts.add((tile, part))
    assert (done == 1).all()
    assert plan.programs <= SM90.compute_units


def test_idle_programs_help_the_others() -> None:
    """88 tiles in the last wave: 44 programs have none, and each does the end of two."""
    plan = _cut_plan(kernel(fill=True), 352, 112, SM90)
    assert (plan.programs, plan.pieces, plan.whole, plan.slices) == (132, 528, 264, 2)
    assert 112 * 2 / 3 <= plan.most < 90


def test_a_full_wave_is_not_cut() -> None:
    assert _cut_plan(kernel(fill=True), 264, 112, SM90) == Handout(132, 264, 264, 1)
