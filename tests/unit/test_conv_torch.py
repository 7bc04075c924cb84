"""What features say PyTorch does with a convolution is what it says itself."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tilewise.core.arch import load_arch
from tilewise.core.features import ARCH, KERNEL, PROBLEM, Rows, columns
from tilewise.ops.contract import get_op
from tilewise.ops.conv.families import FAMILIES
from tilewise.ops.conv.problem import ConvProblem, shapes
from tilewise.ops.fields import arch_values, kernel_values, problem_values
from tilewise.ops.vendor import VendorKernel


def unrolled(problems: list[ConvProblem], threads: int) -> list[bool]:
    """Which of them PyTorch writes out as columns, by the features."""
    features = get_op("conv_fwd").features
    arch = load_arch("x86_avx512").with_figures(compute_units=threads)
    figures = columns(features.fields_of(ARCH), [arch_values(arch)])
    torchs = kernel_values(VendorKernel(op_name="conv_fwd", library="torch"))
    rows = Rows(
        columns(features.fields_of(PROBLEM), [problem_values(p) for p in problems]),
        columns(features.fields_of(KERNEL), [torchs]),
        {name: float(value[0]) for name, value in figures.items()},
        np.arange(len(problems)),
        np.zeros(len(problems), np.int64),
    )
    found = features.evaluate(rows, ["unrolled"])["unrolled"]
    return (found > 0).tolist()


def asked(p: ConvProblem) -> bool:
    """The same, by PyTorch."""
    import torch

    x, w, _ = (torch.empty(1).expand(shape) for shape in shapes(p))
    layer = [
        [getattr(p, f"{what}_{dim}") for dim in "dhw"[3 - p.ndim :]]
        for what in ("stride", "pad", "dilation")
    ]
    zeros = [0] * p.ndim
    found = torch._C._select_conv_backend(x, w, None, *layer, False, zeros, p.g)
    return found.name.startswith("Slow")


@pytest.mark.parametrize("threads", [1, 2])
def test_columns_are_written_where_pytorch_says_so(threads: int) -> None:
    torch = pytest.importorskip("torch")
    rng = Random(5)
    drawn = [draw(rng) for draw in FAMILIES.values() for _ in range(20)]
    few = [{**sizes, "n": 1, "c": 64, "k": 64, "g": 1} for sizes in drawn]
    problems = [ConvProblem(**sizes) for sizes in (*drawn, *few)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        said = [asked(p) for p in problems]
    finally:
        torch.set_num_threads(before)
    assert unrolled(problems, threads) == said
    assert 0.1 < np.mean(said) < 0.9
