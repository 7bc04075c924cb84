"""Trees as steps that put leaves out of reach: what the compiled scorer takes them for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core.forest import Forest
from tilewise.selection.codegen import BLOCK

_STEP = np.dtype([("row", "u4"), ("bound", "u4"), ("keep", "u4")])
_FOUR_TIMES = 0x01010101


@dataclass(frozen=True, slots=True)
class Steps:
    """Arrays of `tw_forest` in include/forest.hpp, where they are explained."""

    byte_start: NDArray[np.int32]
    step_start: NDArray[np.int32]
    steps: NDArray[Any]
    leaf_start: NDArray[np.int32]
    leaves: NDArray[np.int32]


Step = tuple[int, int, int]


def steps_of(forest: Forest) -> Steps:
    """The forest's steps, trees alike side by side."""
    trees = [_tree_steps(forest, tree) for tree in range(forest.num_trees)]
    # Trees alike stand together: a processor foresees how often the loops over steps go round.
    trees.sort(key=lambda tree: (len(tree[0]), *map(len, tree[0])))
    every = [steps for tree in trees for steps in tree[0]]
    return Steps(
        _starts(len(tree[0]) for tree in trees),
        _starts(map(len, every)),
        np.array([step for steps in every for step in steps], _STEP),
        _starts(len(tree[1]) for tree in trees),
        np.array([leaf for tree in trees for leaf in tree[1]], np.int32),
    )


def _starts(sizes: Iterable[int]) -> NDArray[np.int32]:
    return np.cumsum([0, *sizes], dtype=np.int32)


def _tree_steps(forest: Forest, tree: int) -> tuple[list[list[Step]], list[int]]:
    """The steps of each byte, and the leaves from left to right."""
    nodes = slice(forest.node_start[tree], forest.node_start[tree + 1])
    ranges, place = _left_ranges(forest.left[nodes].tolist(), forest.right[nodes].tolist())
    features, bounds = forest.node_feature[nodes].tolist(), forest.node_bin[nodes].tolist()
    leaves = [0] * len(place)
    for at, leaf in zip(
        place, forest.leaf[forest.leaf_start[tree] :][: len(place)].tolist(), strict=True
    ):
        leaves[at] = leaf
    found: list[list[Step]] = []
    for byte in range(-(-len(place) // 8)):
        steps = []
        for feature, bound, (start, stop) in zip(features, bounds, ranges, strict=True):
            low, high = max(start - 8 * byte, 0), min(stop - 8 * byte, 8)
            if low < high:
                keep = 0xFF & ~((1 << high) - (1 << low))
                steps.append((feature * BLOCK, bound * _FOUR_TIMES, keep * _FOUR_TIMES))
        found.append(steps)
    return found, leaves


def _left_ranges(left: list[int], right: list[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """The leaves under each node's left side, and each leaf's place, counted from left to right."""
    count = [0] * len(left)
    for node in reversed(range(len(left))):  # children come after their parents
        count[node] = sum(count[c] if c >= 0 else 1 for c in (left[node], right[node]))
    start, place = [0] * len(left), [0] * (len(left) + 1)
    ranges = []
    for node, children in enumerate(zip(left, right, strict=True)):
        at = start[node]
        ranges.append((at, at + (count[left[node]] if left[node] >= 0 else 1)))
        for child in children:
            if child >= 0:
                start[child] = at
                at += count[child]
            else:
                place[~child] = at
                at += 1
    return ranges, place
