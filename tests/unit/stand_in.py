"""A small model of convolutions on a GPU, of made-up times, for what needs some model at all."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.model import Model
from tilewise.core.problem import Problem
from tilewise.learn.dataset import Dataset
from tilewise.learn.params import Params
from tilewise.learn.train import train
from tilewise.ops.contract import get_op

QUICK = Params(trees=20, leaves=6)


def stand_in(
    op: str, arch: Arch, kernels: Sequence[Kernel], problems: Sequence[Problem], *, seed: int = 0
) -> Model:
    """What is learned from times that only depend on tiles and sizes, and on chance."""
    why, rng = get_op(op).why_unusable, np.random.default_rng(seed)
    pairs = [
        (p, k)
        for p, problem in enumerate(problems)
        for k, kernel in enumerate(kernels)
        if why(kernel, problem, arch) is None
    ]
    liking = rng.uniform(0.7, 1.4, len(kernels))
    times = [
        (2 + problems[p].flops / 4e8 + problems[p].bytes / 4e6)
        * liking[k]
        * (1 + abs(np.log2(1 + problems[p].flops) - 20 - 2 * (k % 8)) / 8)
        for p, k in pairs
    ]
    index = np.array(pairs, np.int64).reshape(-1, 2)
    data = Dataset(
        op,
        arch,
        tuple(problems),
        tuple(kernels),
        ({},) * len(problems),
        index[:, 0],
        index[:, 1],
        np.array(times),
        np.array(times) * 0.01,
        np.full(len(times), 20),
        "made up",
    )
    return train(data, QUICK, fold_count=2, name=f"stand_in_{op}").model


def one_of_each(kernels: Sequence[Kernel], *traits: str) -> list[Kernel]:
    """The first kernel of every combination of these traits, at random elsewhere."""
    mixed = random.Random(3).sample(list(kernels), len(kernels))
    found: dict[tuple[str, ...], Kernel] = {}
    for kernel in mixed:
        found.setdefault(tuple(str(getattr(kernel, name, "")) for name in traits), kernel)
    return sorted(found.values(), key=lambda kernel: kernel.name)
