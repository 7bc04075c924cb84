"""Trees as steps that put leaves out of reach: what the compiled scorer takes them for."""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class _Path:
    """Where leaves lie, counted from left to right in their tree."""

    start: NDArray[np.int64]
    """The first leaf under each node."""
    stop: NDArray[np.int64]
    """Behind the last leaf under each node's left side."""
    place: NDArray[np.int64]
    """Each leaf's own."""


def steps_of(forest: Forest) -> Steps:
    """The forest's steps, trees alike side by side."""
    walk, leaves = _walk(forest), np.diff(forest.leaf_start)
    bytes_of = -(-leaves // 8)
    tree = np.repeat(np.arange(forest.num_trees), np.diff(forest.node_start))
    # A node has a step in each byte that holds leaves of its left side.
    first = walk.start // 8
    many = (walk.stop - 1) // 8 - first + 1
    node = np.repeat(np.arange(len(tree)), many)
    byte = np.arange(len(node)) - np.repeat(np.cumsum(many) - many, many) + first[node]
    low = np.maximum(walk.start[node] - 8 * byte, 0)
    high = np.minimum(walk.stop[node] - 8 * byte, 8)
    steps = np.empty(len(node), _STEP)
    steps["row"] = forest.node_feature[node].astype(np.int64) * BLOCK
    steps["bound"] = forest.node_bin[node].astype(np.int64) * _FOUR_TIMES
    steps["keep"] = (0xFF & ~((1 << high) - (1 << low))) * _FOUR_TIMES
    first_byte = np.cumsum(bytes_of) - bytes_of
    counts = np.bincount(first_byte[tree[node]] + byte, minlength=int(bytes_of.sum()))
    order = _alike(bytes_of, counts)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    own = np.repeat(np.arange(forest.num_trees), leaves)
    within = forest.leaf_start[own] + walk.place
    ordered = np.empty(len(within), np.int32)
    ordered[within] = forest.leaf[: len(within)]
    widest = int(bytes_of.max(initial=1))
    by_byte = np.argsort(rank[tree[node]] * widest + byte, kind="stable")
    return Steps(
        _starts(bytes_of[order]),
        _starts(_picked(counts, first_byte, bytes_of, order)),
        steps[by_byte],
        _starts(leaves[order]),
        _picked(ordered, forest.leaf_start[:-1], leaves, order),
    )


def _alike(bytes_of: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.int64]:
    """Trees alike together: a processor foresees how often the loops over steps go round."""
    each = np.split(counts, np.cumsum(bytes_of)[:-1])
    keys = [(len(own), *own.tolist()) for own in each]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)


def _starts(sizes: NDArray[Any]) -> NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)


def _picked(
    values: NDArray[Any], starts: NDArray[Any], sizes: NDArray[Any], order: NDArray[np.int64]
) -> NDArray[Any]:
    """Stretches of `values`, of each tree in another order."""
    size = sizes[order]
    at = np.arange(int(size.sum())) - np.repeat(np.cumsum(size) - size, size)
    found: NDArray[Any] = values[at + np.repeat(starts[order], size)]
    return found


def _walk(forest: Forest) -> _Path:
    """Every tree at once, a depth at a time."""
    first = np.repeat(forest.node_start[:-1].astype(np.int64), np.diff(forest.node_start))
    leaf = np.repeat(forest.leaf_start[:-1].astype(np.int64), np.diff(forest.node_start))
    is_leaf = [side < 0 for side in (forest.left, forest.right)]
    child = [
        np.where(mask, leaf + ~side.astype(np.int64), first + side)
        for side, mask in zip((forest.left, forest.right), is_leaf, strict=True)
    ]
    depths = [np.unique(forest.node_start[:-1][np.diff(forest.node_start) > 0]).astype(np.int64)]
    while len(depths[-1]):
        here = depths[-1]
        below = [c[here][~mask[here]] for c, mask in zip(child, is_leaf, strict=True)]
        depths.append(np.concatenate(below))
    count = np.zeros((2, len(first)), np.int64)
    """Leaves under the left and the right side of each node."""
    for here in reversed(depths):
        for side in (0, 1):
            under = np.where(is_leaf[side][here], 0, child[side][here])
            count[side, here] = np.where(is_leaf[side][here], 1, count[:, under].sum(axis=0))
    start = np.zeros(len(first), np.int64)
    place = np.zeros(int(forest.leaf_start[-1]), np.int64)
    for here in depths:
        for side, at in ((0, start[here]), (1, start[here] + count[0, here])):
            ends = is_leaf[side][here]
            place[child[side][here][ends]] = at[ends]
            start[child[side][here][~ends]] = at[~ends]
    return _Path(start, start + count[0], place)


@dataclass(frozen=True, slots=True)
class Nodes:
    """A forest whose trees are walked a node at a time: four bytes a node."""

    node_start: NDArray[np.int32]
    leaf_start: NDArray[np.int32]
    nodes: NDArray[np.uint32]
    leaves: NDArray[np.int32]


def nodes_of(forest: Forest) -> Nodes | None:
    """The forest's nodes; None where a feature or child does not fit its byte."""
    if len(forest.features) > 256 or forest.max_leaves > 128:
        return None
    parts = (forest.node_feature, forest.node_bin, forest.left, forest.right)
    packed = np.stack([part.astype(np.uint8) for part in parts], axis=1)
    return Nodes(
        forest.node_start,
        forest.leaf_start,
        np.ascontiguousarray(packed).view(np.uint32).ravel(),
        forest.leaf,
    )
