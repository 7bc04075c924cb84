"""Ops that are learned beside another: they teach, and are never judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tilewise.core.arch import load_arch
from tilewise.errors import InputError
from tilewise.learn.cross import SEEN
from tilewise.learn.dataset import Dataset, from_stores
from tilewise.learn.params import Params
from tilewise.learn.split import folds, group_keys
from tilewise.learn.train import train
from tilewise.ops.conv.problem import ConvProblem

STORES = Path(__file__).parents[2] / "datasets" / "h200"
H200 = load_arch("sm_90", "H200")
OPS = ("conv_fwd", "conv_bwd_data")


@pytest.fixture(scope="module")
def both() -> Dataset:
    """Forward convolutions with gradients of the input beside them; few of either."""
    data = from_stores(
        [STORES / op for op in OPS], op="conv_fwd", arch=H200, beside=("conv_bwd_data",)
    )
    kept = [*np.flatnonzero(data.is_own)[:24], *np.flatnonzero(~data.is_own)[:24]]
    place = np.full(len(data.problems), -1)
    place[kept] = np.arange(len(kept))
    few = data.keep(data.of_problems(kept))
    return replace(
        few,
        problems=tuple(data.problems[i] for i in kept),
        labels=tuple(data.labels[i] for i in kept),
        problem_index=place[few.problem_index],
    )


def test_an_op_comes_alone_unless_others_are_asked_for() -> None:
    alone = from_stores([STORES / op for op in OPS], op="conv_fwd", arch=H200)
    assert alone.is_own.all() and {p.op for p in alone.problems} == {"conv_fwd"}


def test_what_stands_beside_teaches_and_is_never_judged(both: Dataset) -> None:
    trained = train(both, Params(trees=8, leaves=8, base=0, patience=0), fold_count=3)
    own = both.is_own
    assert own.sum() == (~own).sum() == 24
    assert (trained.cross.fold[~own] == SEEN).all() and (trained.cross.fold[own] != SEEN).all()
    assert trained.model.metrics["efficiency"]["problems"] == 24
    assert len(trained.model.measured.problems) == len(trained.model.measured.points) == 24
    manifest = trained.model.manifest
    assert (manifest["problems"], manifest["problems_beside"]) == (24, 24)
    factors = trained.model.calibration.kernels
    assert all(name.startswith("conv_fwd_") for name in (*manifest["kernels"], *factors))


def test_a_model_need_not_know_calibrated_times(both: Dataset) -> None:
    params = Params(trees=8, leaves=8, base=0, calibrated=False, patience=0)
    model = train(both, params, fold_count=3).model
    assert "calibrated_us" not in model.features.helpers
    assert not model.calibration.kernels and not model.calibration.tiles
    assert model.calibration.engines  # which say what was measured
    assert model.manifest["params"]["calibrated"] is False
    assert "calibrated" not in Params().to_dict()  # as before it could be left out


def test_a_layer_is_in_one_fold_in_every_direction() -> None:
    layers = [ConvProblem(n=n, c=64, k=64, h=14, w=14, y=3, x=3) for n in range(1, 21)]
    turned = [replace(p, direction="bwd_data", dtype="fp16") for p in layers]
    keys = group_keys([*layers, *turned])
    assert keys[:20] == keys[20:] and len(set(keys)) == 20
    fold = folds([*layers, *turned], 5)
    assert (fold[:20] == fold[20:]).all()


def test_an_op_does_not_stand_beside_itself() -> None:
    with pytest.raises(InputError, match="conv_fwd is what is learned"):
        from_stores([STORES / "conv_fwd"], op="conv_fwd", arch=H200, beside=OPS)


def test_only_ops_of_the_same_features_stand_beside_another() -> None:
    stores = [STORES / "conv_fwd", STORES / "gemm_odd"]
    with pytest.raises(InputError, match="gemm is described by other features than conv_fwd"):
        from_stores(stores, op="conv_fwd", arch=H200, beside=("gemm",))
