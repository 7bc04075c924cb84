"""CUDA kernels over patches are legal where they should be, and compile without spilling."""

from __future__ import annotations

import pytest

from tilewise.core.arch import load_arch
from tilewise.core.kernel import Kernel
from tilewise.engines.gpu.nvrtc import compile_cuda
from tilewise.errors import TensorError
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.conv.launch import launch, representative
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.conv.strides import default_strides
from tilewise.ops.launch import CudaSource, TensorMap

ARCH = load_arch("sm_90:H200")
DIRECTIONS = ("fwd", "bwd_data", "bwd_weight")
FAMILIES = ("channelwise", "depthwise", "grouped", "image", "stem")


def layers(direction: str) -> dict[str, ConvProblem]:
    """Typical layers of each family."""
    base = {"n": 32, "h": 56, "w": 56, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1, "dtype": "bf16"}
    strided = {"stride_h": 2, "stride_w": 2}
    made = {
        "grouped_4": base | {"c": 128, "k": 128, "g": 32},
        "grouped_32": base | {"c": 1024, "k": 1024, "g": 32, "h": 14, "w": 14},
        "grouped_8_strided": base | {"c": 256, "k": 256, "g": 32} | strided,
    }
    for taps in (3, 5, 7):
        wide = {"c": 96, "k": 96, "g": 96, "y": taps, "x": taps, "pad_h": taps // 2}
        made[f"depthwise_{taps}"] = base | wide | {"pad_w": taps // 2}
        made[f"depthwise_{taps}_strided"] = made[f"depthwise_{taps}"] | strided
    large = {"c": 96, "k": 96, "g": 96, "y": 31, "x": 31, "pad_h": 15, "pad_w": 15}
    made["channelwise_31"] = base | large
    wide = base | strided | {"c": 3, "k": 64, "h": 224, "w": 224}
    made["stem_3"] = wide
    made["stem_7"] = wide | {"y": 7, "x": 7, "pad_h": 3, "pad_w": 3}
    line = {"h": 1, "y": 1, "pad_h": 0, "w": 2048, "x": 4, "pad_w": 3}
    made["depthwise_1d"] = base | line | {"c": 1536, "k": 1536, "g": 1536, "n": 8}
    return {name: ConvProblem(direction=direction, **sizes) for name, sizes in made.items()}


def legal(problem: ConvProblem, families: tuple[str, ...] = FAMILIES) -> list[Kernel]:
    op = get_op(problem.op)
    return [
        kernel
        for kernel in load_pool(op, ARCH, ["cuda"])
        if getattr(kernel, "family", "") in families and not op.why_unusable(kernel, problem, ARCH)
    ]


@pytest.mark.parametrize("name", layers("fwd"))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_layer_has_kernels_that_do_not_spill(direction: str, name: str) -> None:
    problem = layers(direction)[name]
    kernels = legal(problem)
    is_image = name.startswith("stem") and direction == "bwd_data"
    assert all((k.family == "image") == is_image for k in kernels)  # type: ignore[attr-defined]
    assert len(kernels) >= 2
    for kernel in (kernels[0], kernels[-1]):
        for source in launch(kernel, problem, ARCH).sources:
            assert isinstance(source, CudaSource)
            made = compile_cuda(source, "sm_90")
            assert made.resources.spills == 0, f"{kernel.name}: {source.function}"


@pytest.mark.parametrize("k", [64, 96])
def test_large_filters_of_a_first_layer_have_kernels_for_the_image(k: int) -> None:
    """AlexNet's, whose filters fill most of the shared memory."""
    square = {"h": 224, "w": 224, "y": 11, "x": 11, "pad_h": 2, "pad_w": 2}
    strides = {"stride_h": 4, "stride_w": 4}
    p = ConvProblem(direction="bwd_data", n=32, c=3, k=k, dtype="bf16", **square, **strides)
    assert len(legal(p)) >= 2


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_kernel_can_serve_what_represents_it(direction: str) -> None:
    op = get_op(f"conv_{direction}")
    for kernel in load_pool(op, ARCH, ["cuda"]):
        if getattr(kernel, "family", "") in FAMILIES:
            assert op.why_unusable(kernel, representative(kernel), ARCH) is None, kernel.name


def a_kernel_of_each_family(direction: str) -> list[Kernel]:
    every = load_pool(get_op(f"conv_{direction}"), ARCH, ["cuda"])
    return list({getattr(kernel, "family", ""): kernel for kernel in every}.values())


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("gap", [0, 1, 4, 8])
def test_tensors_that_copies_cannot_reach_are_told(direction: str, gap: int) -> None:
    """With images, or filters, so many elements apart; the driver takes strides of whole chunks.

    A dispatcher takes another kernel, or copies, where it is told by a TensorError.
    """
    told = set()
    for kernel in a_kernel_of_each_family(direction):
        problem = representative(kernel)
        usual = default_strides(problem)
        for at in range(3):
            strides = [*usual]
            strides[at] = (usual[at][0] + gap, *usual[at][1:])
            try:
                made = launch(kernel, problem, ARCH, strides=tuple(strides), is_aligned=gap > 0)
            except TensorError:
                told.add(getattr(kernel, "family", ""))
                continue
            for step in made.steps:
                for argument in getattr(step, "arguments", ()):
                    if isinstance(argument, TensorMap):
                        assert not any(size % 16 for size in argument.strides), kernel.name
    families = {getattr(kernel, "family", "") for kernel in a_kernel_of_each_family(direction)}
    assert (told == families) if gap == 0 else bool(told) == (gap < 8)
