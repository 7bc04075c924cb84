"""What launches of CUDA convolutions ask of the driver is within its limits, whatever the layer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tilewise.core.arch import load_arch
from tilewise.core.dtypes import dtype as element
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.launch import Step, TensorMap
from tilewise.problems.sampling import wide_coverage

ARCH = load_arch("sm_90:H200")
OPS = ("conv_fwd", "conv_bwd_data", "conv_bwd_weight")
CORNERS = {4: 128, 5: 16}
"""How far a window's corner may lie from the image, by dimensions of a map in im2col mode."""


def steps(op: str) -> Iterator[tuple[Kernel, Problem, Step]]:
    """Of one kernel of each family on drawn layers, not always the same one."""
    pool, rule = load_pool(get_op(op), ARCH, ["cuda"]), get_op(op).why_unusable
    problems = wide_coverage(op, ARCH, 60, dtype="bf16", seed=5, max_ms=2.0).problems
    for turn, problem in enumerate(problems):
        legal: dict[str, list[Kernel]] = {}
        for kernel in pool:
            if rule(kernel, problem, ARCH) is None:
                legal.setdefault(kernel.family, []).append(kernel)  # type: ignore[attr-defined]
        for own in legal.values():
            kernel = own[turn % len(own)]
            made = get_op(op).module("launch").launch(kernel, problem, ARCH)
            yield from ((kernel, problem, s) for s in made.steps if isinstance(s, Step))


def why_not_encoded(m: TensorMap) -> str | None:
    """The first limit of cuTensorMapEncodeTiled or cuTensorMapEncodeIm2col that a map breaks."""
    rank, size = len(m.sizes), element(m.dtype).bytes
    inner = (m.im2col.channels if m.im2col else m.box[0]) * size
    rules = {
        "dimensions": rank > 5 or len(m.strides) != rank - 1,
        "sizes": not all(0 < extent <= 2**32 for extent in m.sizes),
        "strides": any(step % 16 or not 0 < step < 2**40 for step in m.strides),
        "address": m.offset % 16,
        "steps": not all(0 < step <= 8 for step in m.steps),
        "row": inner % 16 or (m.swizzle and inner > m.swizzle),
    }
    if m.im2col is None:
        rules["box"] = len(m.box) != rank or not all(0 < extent <= 256 for extent in m.box)
    else:
        most, walk = CORNERS[rank], m.im2col
        corners = (*walk.lower, *walk.upper)
        rules["corners"] = not all(-most <= corner < most for corner in corners)
        rules["pixels"] = not (0 < walk.channels <= 256 and 0 < walk.pixels <= 1024)
    return next((rule for rule, is_broken in rules.items() if is_broken), None)


@pytest.mark.parametrize("op", OPS)
def test_what_is_asked_of_the_driver_is_within_its_limits(op: str) -> None:
    families = set()
    for kernel, problem, step in steps(op):
        told = f"{kernel.name} on {problem}"
        families.add(kernel.family)  # type: ignore[attr-defined]
        assert 0 < step.grid[0] < 2**31 and max(step.grid[1:]) < 2**16, told
        blocks = zip(step.grid, step.cluster, strict=True)
        assert not any(count % together for count, together in blocks), told
        assert step.smem_bytes <= ARCH.smem_per_block_bytes, told
        for argument, kind in zip(step.arguments, step.source.signature.values(), strict=True):
            if isinstance(argument, TensorMap):
                assert why_not_encoded(argument) is None, (told, argument)
            elif kind == "i32":
                assert isinstance(argument, int) and -(2**31) <= argument < 2**31, told
    assert len(families) >= 8
