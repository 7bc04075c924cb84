"""Passes between layers: right by Triton's interpreter, taken by models, compiled for every GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

import torch
from driver_stub import Stub, install, number
from passes import interpreted, wrong

from tilewise.core.arch import Arch, load_arch
from tilewise.engines.gpu.bound import BoundLaunch
from tilewise.engines.gpu.build import compile_step
from tilewise.engines.gpu.objects import over_limit
from tilewise.ops.launch import Launch
from tilewise.torch_ops.pass_launch import Bias, Gate, GateProducts, Weigh

TAKEN: dict[str, dict[str, int]] = {
    "convolutions": {"weighed addition (forward)": 2},
    "ConvNeXt": {"weighed addition (forward)": 4, "weighed addition (backward)": 2},
    "MLP": {
        **{"weighed addition (forward)": 4, "weighed addition (backward)": 2},
        **{"bias and activation (forward)": 2, "bias and activation (backward)": 2},
        **{"gated activation (forward)": 8, "gated activation (backward)": 4},
    },
}
"""Launches of two steps of training and two of inference."""
BATCH_NORM = {"forward", "apply", "backward", "backward with residual"}


@pytest.mark.slow
def test_kernels_are_right() -> None:
    found = interpreted("pass_interpreted.py")
    assert len(found) == 33
    assert not wrong(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("factors + sample).to(tl.float32)\n    value", "factors).to(tl.float32)\n    value"),
        ("inside < part", "inside < part - 1"),
        ("total += gradient *", "total = gradient *"),
        ("total += gradient\n", "total += 1.0\n"),
        ("gradient * other * slope(gate, ACT)", "gradient * slope(gate, ACT)"),
        ("row * width + column < total", "row * width + column < total - 1"),
        ("(row < rows)[:, None]", "(row < BR)[:, None]"),
        ("activate(gated, ACT) * other", "activate(other, ACT) * gated"),
    ],
)
def test_a_sabotaged_kernel_fails(old: str, new: str) -> None:
    assert wrong(interpreted("pass_interpreted.py", old, new))


@pytest.mark.slow
def test_fused_models_are_right_by_these_kernels() -> None:
    """Results, gradients and buffers, and what was launched for them."""
    found = interpreted("chain_interpreted.py")
    assert {(one["model"], one["cast"]) for one in found} == {
        ("convolutions", False),
        ("always", False),
        ("twice", False),
        *((name, cast) for name in ("ConvNeXt", "MLP") for cast in (False, True)),
    }
    assert [one for one in found if not one["error"] <= (3e-2 if one["cast"] else 2e-5)] == []
    assert all(one["same"] for one in found)
    for one in found:
        norms = {name for name in one["launched"] if name.startswith("BatchNorm")}
        passes = {name: n for name, n in one["launched"].items() if name not in norms}
        if one["model"] == "always":
            is_watched = one["case"] == "True"
            assert passes.get("gated MLP (forward)", 0) == (not is_watched)
            assert passes["gated activation (forward)"] == 1 + is_watched
        elif one["model"] != "twice":
            assert passes == TAKEN[one["model"]]
        assert bool(norms) == (one["model"] == "convolutions")
    first = next(one["launched"] for one in found if one["model"] == "convolutions")
    assert {f"BatchNorm ({what})" for what in BATCH_NORM} == {*first} - {*TAKEN["convolutions"]}


def launches(arch: Arch) -> dict[str, tuple[Launch, tuple[int, ...]]]:
    """Of layers of ConvNeXt-T, ViT-B and Llama 8B, and of odd ones."""
    weigh = Weigh(
        **{"samples": 256, "pixels": 56 * 56, "channels": 96, "dtype": "bf16", "out": "fp32"},
        **{"weight": "fp32", "has_factors": True},
    )
    odd = Weigh(
        **{"samples": 3, "pixels": 7, "channels": 35, "dtype": "fp16", "out": "fp16"},
        **{"weight": "fp16", "has_factors": False},
    )
    bias = Bias(pixels=64 * 197, channels=3072, dtype="bf16", bias="fp32", activation="gelu")
    shape: dict[str, Any] = {"rows": 2048, "width": 14336, "dtype": "bf16", "activation": "silu"}
    gate, halves = Gate(**shape, g_row=14336, u_row=14336), Gate(**shape, g_row=28672, u_row=28672)
    filters: dict[str, Any] = {"n": 14336, "k": 4096, "dtype": "bf16", "activation": "silu"}
    products = {m: GateProducts(m=m, **filters) for m in (1, 64, 2048)}
    return {
        **{f"{m} tokens": (one.forward(arch), one.forward_order) for m, one in products.items()},
        "weighed": (weigh.forward(arch), weigh.forward_order),
        "weighed backward": (weigh.backward(arch, True), weigh.backward_order(True)),
        "weighed backward without sums": (weigh.backward(arch, False), weigh.backward_order(False)),
        "odd": (odd.forward(arch), odd.forward_order),
        "odd backward": (odd.backward(arch, True), odd.backward_order(True)),
        "biased": (bias.forward(arch), bias.forward_order),
        "biased backward": (bias.backward(arch), bias.backward_order),
        "gated": (gate.forward(arch), gate.forward_order),
        "gated backward": (gate.backward(arch), gate.backward_order),
        "halves": (halves.forward(arch), halves.forward_order),
        "halves backward": (halves.backward(arch), halves.backward_order),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sm_90", "gfx90a", "gfx942", "gfx950"])
def test_kernels_compile(name: str) -> None:
    arch = load_arch(name)
    for launch, _ in launches(arch).values():
        for step in launch.steps:
            made = compile_step(step, name)
            assert made.resources.spills == 0
            assert not over_limit(made.resources, arch)


@pytest.mark.slow
def test_launches_pass_what_the_objects_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a driver that writes down what it is asked for; sizes of parameters are compared first."""
    stub, arch = Stub(tmp_path), load_arch("sm_90")
    install(stub, monkeypatch)
    for name, (launch, order) in launches(arch).items():
        stub.forget()
        bound = BoundLaunch(launch, arch, name, order)
        addresses = [4096 * (1 + at) for at in range(len(order))]
        bound.start(addresses, torch.empty(launch.workspace_bytes, dtype=torch.uint8))
        launched = stub.launches()
        assert len(launched) == len(launch.steps)
        passed = {number(text) for one in launched for text in one["parameters"]}
        assert passed >= {*addresses}, f"{name}: a tensor is not passed"


def test_a_long_packed_result_is_one_grid() -> None:
    """Grids are counted in 31 bits down, and in 16 across."""
    arch = load_arch("sm_90")
    for launch, _ in launches(arch).values():
        for step in launch.steps:
            assert max(step.grid[1:]) < 2**16
    (step,) = (
        Gate(rows=2**20, width=14336, dtype="bf16", activation="silu", g_row=14336, u_row=14336)
        .forward(arch)
        .steps
    )
    assert step.grid[0] * step.grid[1] * 4096 >= 2**20 * 14336
