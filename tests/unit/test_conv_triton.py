"""Triton convolutions: right by Triton's interpreter, compiled for every GPU, launched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tilewise.core.arch import load_arch
from tilewise.errors import InputError, KernelError
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.conv import gpu_work
from tilewise.ops.conv.epilogue import Epilogue
from tilewise.ops.conv.kernels.directed import OPS
from tilewise.ops.conv.kernels.triton import FAMILIES, TritonConvKernel, cut, why_unusable
from tilewise.ops.conv.launch import (
    default_strides,
    launch,
    representative,
    strides_of,
    why_unfused,
)
from tilewise.ops.conv.problem import ConvProblem, shapes
from tilewise.ops.launch import Step, Zero
from tilewise.selection.shortlist import fair

pytest.importorskip("triton")
pytest.importorskip("torch")

from tilewise.engines.gpu.build import compile_step

SM_90 = load_arch("sm_90")
HERE = Path(__file__).parent
DIRECTIONS = ("fwd", "bwd_data", "bwd_weight")


def interpreted(direction: str, *replaced: str) -> list[dict[str, Any]]:
    """What the interpreter finds of every case of a direction."""
    done = subprocess.run(
        [sys.executable, str(HERE / "conv_interpreted.py"), direction, *replaced],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def is_right(found: dict[str, Any]) -> bool:
    return bool(found["error"] <= found["allowed"] and found["is_inside"])


@pytest.mark.slow
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_family_is_right(direction: str) -> None:
    found = interpreted(direction)
    wrong = [one for one in found if not is_right(one)]
    assert not wrong, wrong[:3]
    families = Counter(one["kernel"].split("_triton_")[1].split("_")[0] for one in found)
    assert set(families) == set(FAMILIES) and min(families.values()) >= 8
    assert any("atomic" in one["kernel"] for one in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("direction", "old", "new"),
    [
        ("fwd", "residue - pad, stride, gap", "residue - pad + 1, stride, gap"),
        ("bwd_data", "(at // common * inverse) % jump", "at * 0"),
        ("bwd_weight", "first + count):\n        pixel", "first + count - 1):\n        pixel"),
    ],
)
def test_a_sabotaged_kernel_fails(direction: str, old: str, new: str) -> None:
    found = interpreted(direction, old, new)
    wrong = [one for one in found if not is_right(one)]
    assert len(wrong) > len(found) / 4


def kernel(op: str, family: str, m: int, n: int, k: int, **traits: Any) -> TritonConvKernel:
    traits = {"dtype": "bf16", **traits}
    return TritonConvKernel(op_name=op, family=family, tile_m=m, tile_n=n, tile_k=k, **traits)


BUILT = [
    *(kernel(op, "implicit", 128, 128, 64, warps=8) for op in OPS),
    *(kernel(op, "implicit", 64, 64, 32, fill=2, stages=4) for op in OPS),
    *(kernel(op, "packed", 64, 64, 64, stages=2) for op in OPS),
    *(kernel(op, "merged", 64, 32, 32) for op in OPS),
    *(kernel(op, "direct", 16, 64, 1) for op in OPS[:2]),
    kernel("conv_bwd_weight", "direct", 4, 64, 16, fill=4, stages=1),
    kernel("conv_fwd", "implicit", 32, 32, 32, dtype="fp32", stages=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90", "gfx90a", "gfx942", "gfx950"])
@pytest.mark.parametrize("built", BUILT, ids=lambda k: k.name)
def test_compiles_with_hardly_a_spill(built: TritonConvKernel, arch: str) -> None:
    """Triton 3.7 spills 8 registers of one on gfx90a where 3.6 and 3.9 spill none."""
    assert why_unusable(built, representative(built), load_arch(arch)) is None
    epilogue = Epilogue()
    if built.op != "conv_bwd_weight":
        is_forward = built.op == "conv_fwd"
        epilogue = Epilogue(bias=True, residual=True, sums=is_forward, activation="relu")
    made = launch(built, representative(built), load_arch(arch), epilogue=epilogue)
    for step in made.steps:
        if isinstance(step, Step):
            found = compile_step(step, arch).resources
            assert found.spills <= 8, step.source
            assert 0 < found.registers <= 255


def test_names_and_values_come_back() -> None:
    for op in OPS:
        pool = [k for k in load_pool(get_op(op), SM_90) if k.engine == "triton"]
        for one in pool:
            assert get_op(op).kernel_from_name(one.name) == one
            assert get_op(op).kernel_from_dict(one.to_dict()) == one


LAYERS = {
    "dense": {"n": 32, "c": 256, "k": 256, "h": 28, "w": 28, "y": 3, "x": 3},
    "grouped": {"n": 32, "c": 128, "k": 128, "g": 32, "h": 28, "w": 28, "y": 3, "x": 3},
    "depthwise": {"n": 8, "c": 96, "k": 96, "g": 96, "h": 28, "w": 28, "y": 5, "x": 5},
    "stem": {"n": 8, "c": 3, "k": 64, "h": 224, "w": 224, "y": 7, "x": 7, "stride_h": 2},
    "volume": {"n": 1, "c": 96, "k": 96, "d": 8, "h": 60, "w": 104, "z": 3, "y": 3, "x": 3},
    "sound": {"n": 8, "c": 512, "k": 512, "w": 16000, "x": 3, "stride_w": 2},
    "odd": {"n": 3, "c": 35, "k": 21, "g": 7, "h": 13, "w": 11, "y": 4, "x": 2, "dilation_h": 3},
    "one pixel": {"n": 1, "c": 1, "k": 1, "h": 1, "w": 1, "y": 1, "x": 1},
    "beyond 2^31": {"n": 1, "c": 256, "k": 256, "d": 81, "h": 480, "w": 832, "y": 3, "x": 3},
}  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_90", "gfx90a", "gfx942", "gfx950"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "tf32"])
def test_every_layer_is_served(arch: str, dtype: str) -> None:
    device = load_arch(arch)
    if dtype not in device.peak_tflops:
        pytest.skip(f"{arch} has no {dtype}")
    for direction in DIRECTIONS:
        op = get_op(f"conv_{direction}")
        pool = [k for k in load_pool(op, device) if k.engine == "triton"]
        for name, layer in LAYERS.items():
            for layout in ("nhwc", "nchw"):
                problem = ConvProblem(direction=direction, dtype=dtype, layout=layout, **layer)
                served = {k.family for k in pool if why_unusable(k, problem, device) is None}
                assert "implicit" in served, (direction, name, layout)
                assert ("direct" in served) or name != "depthwise"
                assert ("merged" in served) or name != "grouped"


def test_a_launch_says_what_it_needs() -> None:
    problem = ConvProblem(
        direction="bwd_weight", n=32, c=64, k=64, h=56, w=56, y=3, x=3, dtype="bf16"
    )
    cutting = kernel("conv_bwd_weight", "implicit", 64, 64, 64, fill=2)
    slices = cut(cutting, problem, SM_90).slices
    assert slices == 2 * SM_90.compute_units // 9
    made = launch(cutting, problem, SM_90)
    assert made.workspace_bytes == 4 * 64 * 64 * 9 * slices
    assert [step.source.function for step in made.steps if isinstance(step, Step)] == [
        "conv_filter",
        "add_filter",
    ]
    summed = launch(
        kernel("conv_bwd_weight", "implicit", 64, 64, 64, fill=2, atomic=True), problem, SM_90
    )
    assert summed.workspace_bytes == 4 * 64 * 64 * 9 and isinstance(summed.steps[0], Zero)
    with pytest.raises(InputError, match="no epilogue"):
        launch(cutting, problem, SM_90, epilogue=Epilogue(bias=True))


def test_strided_gradients_multiply_no_zeros() -> None:
    """Four classes of pixels with 1 + 2 + 2 + 4 taps: nine in all, on a quarter each."""
    problem = ConvProblem(
        direction="bwd_data", n=1, c=64, k=64, h=56, w=56, y=3, x=3, pad_h=1, pad_w=1,
        stride_h=2, stride_w=2, dtype="bf16",
    )  # fmt: skip
    made = cut(kernel("conv_bwd_data", "implicit", 64, 64, 64), problem, SM_90)
    assert (made.classes, made.tiles_m) == (4, -(-28 * 28 // 64))
    (step,) = launch(kernel("conv_bwd_data", "implicit", 64, 64, 64), problem, SM_90).steps
    assert isinstance(step, Step) and step.grid == (made.tiles, 4, 1)


def test_strides_are_told_as_they_lie() -> None:
    problem = ConvProblem(n=2, c=8, k=16, h=5, w=7, y=3, x=1, dtype="bf16")
    x, w, y = default_strides(problem)
    assert x == (280, 1, 0, 56, 8) and w == (24, 1, 0, 8, 0) and y == (336, 1, 0, 112, 16)
    wide = [(1000, 1, 56, 8), (24, 1, 8, 8), (336, 1, 112, 16)]
    assert strides_of(problem, wide)[0] == (1000, 1, 0, 56, 8)
    # A call may carry a dimension of one that the problem does not count.
    sound = ConvProblem(n=2, c=4, k=4, w=9, x=3, dtype="bf16")
    assert len(shapes(sound)[0]) == 3
    assert strides_of(sound, [(36, 1, 36, 4), (12, 1, 12, 4), (28, 1, 28, 4)])[0] == (
        36,
        1,
        0,
        0,
        4,
    )


@pytest.mark.parametrize(
    ("traits", "words"),
    [
        ({"tile_m": 48}, "power of two"),
        ({"tile_k": 8}, "matrix units"),
        ({"atomic": True}, "give fill"),
        ({"family": "direct", "tile_k": 4}, "tile_k=1"),
        ({"family": "direct", "tile_k": 1, "dtype": "tf32"}, "use dtype fp32"),
    ],
)
def test_impossible_kernels_are_refused(traits: dict[str, Any], words: str) -> None:
    values = {"family": "implicit", "tile_m": 64, "tile_n": 64, "tile_k": 32, "dtype": "bf16"}
    with pytest.raises(KernelError, match=words):
        TritonConvKernel(op_name="conv_fwd", **{**values, **traits})


def test_a_shortlist_gives_every_family_its_turn() -> None:
    ranked = [kernel("conv_fwd", "implicit", m, n, 64) for m in (64, 128) for n in (32, 64, 128)]
    ranked += [kernel("conv_fwd", "packed", 64, 64, 64), kernel("conv_fwd", "direct", 16, 64, 1)]
    few = fair(ranked, 4)
    assert {k.family for k in few} == {"implicit", "packed", "direct"} and len(few) == 4
    assert few[0] == ranked[0] and fair(ranked, 20)[: len(few)] != ranked[: len(few)]
    assert set(fair(ranked, 20)) == set(ranked)


def test_the_analytic_ranking_fits_families_to_layers() -> None:
    """Without a model: families for a layer's class come first, the vendor where none fits."""
    from tilewise.ops.roofline import Estimates
    from tilewise.ops.vendor import VendorKernel

    device = load_arch("sm_90:H200")

    def first(direction: str, name: str) -> str:
        problem = ConvProblem(direction=direction, dtype="bf16", **LAYERS[name])
        op = get_op(problem.op)
        pool = load_pool(op, device, ["triton", "cuda"])
        legal = [k for k in pool if op.why_unusable(k, problem, device) is None]
        legal.append(VendorKernel(op_name=problem.op, library="torch"))  # type: ignore[arg-type]
        best = legal[int(Estimates(op.name, legal)(problem, device).argmin())]
        return str(getattr(best, "family", "vendor"))

    assert first("fwd", "dense") == first("bwd_weight", "dense") == "vendor"
    assert first("fwd", "depthwise") == first("bwd_data", "depthwise") == "depthwise"
    assert first("fwd", "grouped") == first("bwd_weight", "grouped") == "grouped"


def test_every_gpu_family_is_described_once() -> None:
    described = [*gpu_work.TAPS, *gpu_work.PACKED, *gpu_work.HALO, *gpu_work.MERGED]
    described += [*gpu_work.VECTOR, *gpu_work.STREAM, *gpu_work.PRODUCT]
    assert len(set(described)) == len(described)
    own = [kind for kind in get_op("conv_fwd").kernel_types if kind.engine in ("triton", "cuda")]
    assert {family for kind in own for family in kind.families()} <= set(described)


def test_the_vendors_tf32_leaves_the_setting_as_it_was() -> None:
    import torch

    from tilewise.ops.conv.vendor import _in_tf32

    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        assert _in_tf32(lambda: torch.backends.cudnn.allow_tf32) is True
        assert torch.backends.cudnn.allow_tf32 is False
        with pytest.raises(ZeroDivisionError):
            _in_tf32(lambda: 1 / 0)
        assert torch.backends.cudnn.allow_tf32 is False
    finally:
        torch.backends.cudnn.allow_tf32 = before


def test_kernels_say_what_they_cannot_fuse() -> None:
    arch, sums = load_arch("sm_90", "H200"), Epilogue(sums=True)
    for op, is_forward in (("conv_fwd", True), ("conv_bwd_data", False)):
        for kernel in load_pool(get_op(op), arch, ["cuda", "triton"])[::7]:
            problem = representative(kernel)
            why = why_unfused(kernel, problem, sums)
            if why is None:
                assert is_forward
                launch(kernel, problem, arch, epilogue=sums)
            else:
                assert "sums over pixels" in why
            assert why_unfused(kernel, problem, Epilogue(bias=True, activation="silu")) is None
