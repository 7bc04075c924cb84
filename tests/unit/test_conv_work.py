"""What features say a GPU convolution kernel does is what its launch does."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewise.core.arch import load_arch
from tilewise.core.features import ARCH as OF_ARCH
from tilewise.core.features import KERNEL, PROBLEM, Rows, columns
from tilewise.core.kernel import Kernel
from tilewise.learn.dataset import from_stores
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.conv.kernels import stem
from tilewise.ops.conv.launch import launch
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.fields import arch_values, kernel_values, problem_values
from tilewise.ops.launch import Step
from tilewise.ops.roofline import Estimates

ROOT = Path(__file__).parents[2]
ARCH = load_arch("sm_90", "H200")
DIRECTIONS = ("fwd", "bwd_data", "bwd_weight")
BEHIND = ("reduce", "sum_slices", "sum_columns")
"""Steps that finish what others computed."""
SQUARE = {"n": 5, "c": 72, "k": 200, "h": 27, "w": 41, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1}
STRIDED = {"n": 5, "c": 72, "k": 200, "h": 32, "w": 48, "stride_h": 2, "stride_w": 2}
"""In images whose classes of pixels are equally large."""
LAYERS: dict[str, dict[str, Any]] = {
    "dense": SQUARE,
    "few channels": {**SQUARE, "c": 8, "k": 24, "y": 5, "x": 5, "pad_h": 2, "pad_w": 2},
    "1x1": {**SQUARE, "y": 1, "x": 1, "pad_h": 0, "pad_w": 0},
    "3-D": {**SQUARE, "d": 6, "z": 3, "pad_d": 1},
    "odd groups": {**SQUARE, "c": 120, "k": 180, "g": 3},
    "small groups": {**SQUARE, "c": 256, "k": 256, "g": 32},
    "depthwise": {**SQUARE, "c": 136, "k": 136, "g": 136},
    "many depthwise": {**SQUARE, "n": 64, "c": 960, "k": 960, "g": 960, "h": 7, "w": 7},
    "strided": {**STRIDED, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1},
    "1x1 strided": {**STRIDED, "y": 1, "x": 1},
    "strided and dilated": {**STRIDED, "y": 3, "x": 3, "dilation_h": 2, "dilation_w": 2},
    "stem": {**SQUARE, "c": 3, "k": 64, "h": 96, "w": 96, "stride_h": 2, "stride_w": 2},
}


CUT = ("strided",)


def told(kernels: list[Kernel], p: ConvProblem, names: list[str]) -> dict[str, Any]:
    """Helpers of every kernel on a problem."""
    features = get_op(p.op).features
    arch = columns(features.fields_of(OF_ARCH), [arch_values(ARCH)])
    rows = Rows(
        columns(features.fields_of(PROBLEM), [problem_values(p)]),
        columns(features.fields_of(KERNEL), [kernel_values(k) for k in kernels]),
        {name: float(value[0]) for name, value in arch.items()},
        np.zeros(len(kernels), np.int64),
        np.arange(len(kernels)),
    )
    return features.evaluate(rows, names)


def blocks(kernel: Kernel, p: ConvProblem) -> int:
    """Of the steps that multiply."""
    steps = [step for step in launch(kernel, p, ARCH).steps if isinstance(step, Step)]
    names = [str(step.source.file) for step in steps]  # type: ignore[union-attr]
    return sum(
        prod(step.grid)
        for step, name in zip(steps, names, strict=True)
        if not any(word in name for word in BEHIND)
    )


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_tiles_are_those_of_the_launch(direction: str, layer: str) -> None:
    op = get_op(f"conv_{direction}")
    p = ConvProblem(direction=direction, dtype="bf16", **LAYERS[layer])
    kernels = [
        k
        for k in load_pool(op, ARCH, engines=("cuda",))
        if op.why_unusable(k, p, ARCH) is None
        # Resident blocks share tiles, and tiles of a cluster come in whole clusters.
        and not getattr(k, "persistent", False)
        and getattr(k, "cluster", 1) == 1
        # Each class of pixels of a strided gradient is cut by its own number of taps.
        and not (direction == "bwd_data" and layer in CUT and getattr(k, "fill", 0))
    ]
    assert kernels
    names = ["tiles", "patch_columns", "patch_walkers", "is_wide"]
    found = told(kernels, p, names)
    patched = found["patch_columns"] * found["patch_walkers"]
    counted = np.where(found["is_wide"] > 0, patched, found["tiles"])
    launched = np.array([blocks(k, p) for k in kernels])
    wrong = [k.name for k, a, b in zip(kernels, counted, launched, strict=True) if a != b]
    assert not wrong, f"{len(wrong)} of {len(kernels)}: {wrong[:3]}"


@pytest.mark.parametrize("layer", ["dense", "depthwise", "strided", "1x1 strided"])
def test_launches_are_counted(layer: str) -> None:
    """A strided gradient has one for each class of pixels that a tap reaches, and sums of each."""
    op = get_op("conv_bwd_data")
    p = ConvProblem(direction="bwd_data", dtype="bf16", **LAYERS[layer])
    kernels = [
        k for k in load_pool(op, ARCH, engines=("cuda",)) if op.why_unusable(k, p, ARCH) is None
    ]
    steps = [launch(k, p, ARCH).steps for k in kernels]
    launched = [sum(isinstance(step, Step) for step in found) for found in steps]
    assert told(kernels, p, ["own_launches"])["own_launches"].tolist() == launched


@pytest.mark.parametrize("direction", ["fwd", "bwd_weight"])
def test_first_layers_multiply_whole_chunks_of_their_filters(direction: str) -> None:
    p = ConvProblem(direction=direction, dtype="bf16", **{**LAYERS["stem"], "k": 72})
    pool = load_pool(get_op(p.op), ARCH, engines=("cuda",))
    kernels = [k for k in pool if getattr(k, "family", "") == "stem"]
    multiplied = 2 * stem.CHANNELS * p.y * stem.chunks(p) * stem.CHUNK
    waste = told(kernels, p, ["stream_waste"])["stream_waste"]
    np.testing.assert_allclose(waste * p.y * p.x * p.c * p.k, multiplied)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_estimate_of_the_vendor_follows_what_it_took(direction: str) -> None:
    """On the published dense layers of an H200, most of them to within half as much again."""
    op = f"conv_{direction}"
    data = from_stores([ROOT / "datasets/h200" / op], op=op, arch=ARCH)
    is_dense = np.array([p.g == 1 and p.ndim == 2 for p in data.problems])[data.problem_index]
    kept = data.is_vendor & is_dense & data.is_ok
    features = get_op(op).features
    told_us = features.evaluate(data.rows(features), ["vendor_us"])["vendor_us"][kept]
    octaves = np.log2(data.time_us[kept] / told_us)
    assert kept.sum() > 50
    assert octaves.std() < 0.6 and abs(octaves.mean()) < 0.5


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_without_a_model_the_choice_beats_the_vendor(direction: str) -> None:
    """Of what was measured on each published problem, by estimates alone."""
    op = f"conv_{direction}"
    data = from_stores([ROOT / "datasets/h200" / op], op=op, arch=ARCH)
    ratios = []
    for index, problem in enumerate(data.problems):
        rows = np.flatnonzero((data.problem_index == index) & data.is_ok)
        kernels = tuple(data.kernels[k] for k in data.kernel_index[rows])
        vendors = [at for at, k in enumerate(kernels) if k.engine == "vendor"]
        if vendors and len(kernels) > 1:
            chosen = rows[Estimates(op, kernels)(problem, ARCH).argmin()]
            ratios.append(data.time_us[rows[vendors[0]]] / data.time_us[chosen])
    assert len(ratios) > 100
    assert np.exp(np.log(ratios).mean()) > 1.1
    assert np.mean(np.array(ratios) < 0.95) < 0.2
