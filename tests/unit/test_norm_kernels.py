"""BatchNorm's kernels: right by Triton's interpreter, compiled for every GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

import torch
from driver_stub import Stub, install, number
from passes import interpreted, wrong

from tilewise.core.arch import load_arch
from tilewise.engines.gpu.bound import BoundLaunch
from tilewise.engines.gpu.build import compile_step
from tilewise.engines.gpu.objects import over_limit
from tilewise.torch_ops import channel_tiles, norm_launch
from tilewise.torch_ops.norm_launch import Norm

FULL: dict[str, Any] = {"parameters": "fp32", "running": "fp32", "is_tracked": True}


@pytest.mark.slow
def test_kernels_are_right() -> None:
    found = interpreted("norm_interpreted.py")
    assert len(found) > 40
    assert not wrong(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("second / count - mean * mean", "second / count"),
        ("-scale * first / count - factor * mean", "-scale * first / count"),
        ("rows % FOLD * channels", "rows % FOLD * 0"),
        ("var * unbiased", "var"),
    ],
)
def test_a_sabotaged_kernel_fails(old: str, new: str) -> None:
    assert wrong(interpreted("norm_interpreted.py", old, new))


NORMS = {
    "bf16, residual, relu": Norm(
        pixels=64 * 56 * 56,
        channels=512,
        dtype="bf16",
        has_residual=True,
        activation="relu",
        **FULL,
    ),
    "fp16, few channels, silu, sums": Norm(
        pixels=1000, channels=24, dtype="fp16", activation="silu", has_sums=True
    ),
    "fp32, odd channels, gelu": Norm(
        pixels=1000, channels=35, dtype="fp32", activation="gelu", **FULL
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sm_90", "gfx90a", "gfx942", "gfx950"])
@pytest.mark.parametrize("case", list(NORMS))
def test_kernels_compile(name: str, case: str) -> None:
    arch, norm = load_arch(name), NORMS[case]
    for launch in (
        norm_launch.forward(norm, arch),
        norm_launch.apply(norm, arch),
        norm_launch.backward(norm, arch, norm.has_residual),
    ):
        for step in launch.steps:
            made = compile_step(step, name)
            assert made.resources.spills == 0
            assert not over_limit(made.resources, arch)


def test_a_reduction_fills_the_device_and_no_more() -> None:
    arch = load_arch("sm_90")
    large, small = NORMS["bf16, residual, relu"], NORMS["fp32, odd channels, gelu"]
    blocks = large.slices(arch) * large.width // channel_tiles.COLUMNS
    assert blocks >= channel_tiles.BLOCKS * arch.compute_units
    assert small.slices(arch) == small.tiles
    assert small.width % channel_tiles.COLUMNS == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", list(NORMS))
def test_launches_pass_what_the_objects_take(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a driver that writes down what it is asked for; sizes of parameters are compared first."""
    stub, norm, arch = Stub(tmp_path), NORMS[case], load_arch("sm_90")
    install(stub, monkeypatch)
    for launch, order in (
        (norm_launch.forward(norm, arch), norm.forward_order),
        (
            norm_launch.backward(norm, arch, norm.has_residual),
            norm.backward_order(norm.has_residual),
        ),
    ):
        stub.forget()
        bound = BoundLaunch(launch, arch, "BatchNorm", order)
        addresses = [4096 * (1 + at) for at in range(len(order))]
        bound.start(addresses, torch.empty(launch.workspace_bytes, dtype=torch.uint8))
        launched = stub.launches()
        assert len(launched) == len(launch.steps)
        last = [number(text) for text in launched[-1]["parameters"]]
        result = addresses[0]
        assert result in last
        assert norm.pixels * norm.channels in last
