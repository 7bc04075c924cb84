"""A forest of decision trees as flat arrays over features quantised to its own thresholds.

A feature's bin is the number of thresholds below its value, so `value <= threshold[i]` is
`bin <= i`: at most 255 thresholds make a bin one byte. Leaves are integers with one common scale;
their sums are exact in any order, hence equal in NumPy, in C and in an exported header.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tilewise.core.compile_expr import Array
from tilewise.core.packed import Numbers
from tilewise.errors import ModelError

MAX_THRESHOLDS = 255
MAX_LEAVES = 255
MAX_FEATURES = 2048
_INT_LIMIT = 2**31 - 1
_WALKS_AT_ONCE = 200_000
"""Rows times trees; more would leave the cache."""

Ints = NDArray[np.int32]
_INTS = ("node_feature", "node_bin", "left", "right", "node_start", "leaf_start", "leaf")


@dataclass(frozen=True, slots=True)
class Forest:
    """Trees over the columns `features`. Children below zero are leaves: `~child` is which."""

    features: tuple[str, ...]
    thresholds: tuple[Array, ...]
    """Sorted and distinct, per feature."""
    node_feature: Ints
    node_bin: Ints
    left: Ints
    right: Ints
    node_start: Ints
    """Where each tree's nodes begin, one more than there are trees; parents precede children."""
    leaf_start: Ints
    leaf: Ints
    scale: float
    offset: float

    @property
    def num_trees(self) -> int:
        return len(self.node_start) - 1

    @property
    def max_leaves(self) -> int:
        return int(np.diff(self.leaf_start).max(initial=1))

    def first(self, count: int) -> Forest:
        """The first trees alone, over the features that they ask for."""
        nodes, leaves = self.node_start[count], self.leaf_start[count]
        used, feature = np.unique(self.node_feature[:nodes], return_inverse=True)
        return Forest(
            tuple(self.features[i] for i in used),
            tuple(self.thresholds[i] for i in used),
            feature.astype(np.int32),
            self.node_bin[:nodes],
            self.left[:nodes],
            self.right[:nodes],
            self.node_start[: count + 1],
            self.leaf_start[: count + 1],
            self.leaf[:leaves],
            self.scale,
            self.offset,
        )

    def bins(self, matrix: Array) -> NDArray[np.uint8]:
        """The bin of every value; columns are those of `features`."""
        out = np.empty(matrix.shape, np.uint8)
        for column, thresholds in enumerate(self.thresholds):
            out[:, column] = np.searchsorted(thresholds, matrix[:, column], side="left")
        return out

    def predict(self, matrix: Array) -> Array:
        """The sum of leaves, per row."""
        bins = self.bins(matrix)
        total = np.zeros(len(matrix), np.int64)
        step = max(1, _WALKS_AT_ONCE // max(1, self.num_trees))
        for start in range(0, len(matrix), step):
            total[start : start + step] = self._sums(bins[start : start + step])
        return total.astype(np.float64) * self.scale + self.offset

    def _sums(self, bins: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Walks all rows down all trees at once."""
        if not self.num_trees:
            return np.zeros(len(bins), np.int64)
        rows = np.repeat(np.arange(len(bins)), self.num_trees)
        first = np.tile(self.node_start[:-1], len(bins))
        at = np.zeros(len(rows), np.int32)
        live = np.arange(len(rows))
        while len(live):
            node = first[live] + at[live]
            goes_left = bins[rows[live], self.node_feature[node]] <= self.node_bin[node]
            there = np.where(goes_left, self.left[node], self.right[node])
            at[live] = there
            live = live[there >= 0]
        leaf = self.leaf[np.tile(self.leaf_start[:-1], len(bins)) + ~at]
        sums: NDArray[np.int64] = leaf.reshape(len(bins), -1).sum(axis=1, dtype=np.int64)
        return sums

    def to_dict(self, numbers: Numbers) -> dict[str, Any]:
        """JSON-ready, with its arrays added to `numbers`; all are exact."""
        return {
            "features": list(self.features),
            "thresholds": [numbers.put(t) for t in self.thresholds],
            **{name: numbers.put(getattr(self, name)) for name in _INTS},
            "scale": self.scale,
            "offset": self.offset,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], numbers: Numbers) -> Self:
        """The forest that `to_dict` wrote; impossible structure is refused."""
        forest = cls(
            features=tuple(values["features"]),
            thresholds=tuple(numbers.get(t, np.float64) for t in values["thresholds"]),
            **{name: numbers.get(values[name], np.int32) for name in _INTS},
            scale=float(values["scale"]),
            offset=float(values["offset"]),
        )
        forest._check()
        return forest

    def _check(self) -> None:
        """Raises on anything that scorers, which read these arrays in C, do not allow for."""
        nodes = len(self.node_feature)
        trees = len(self.node_start)
        sound = (
            all(a.ndim == 1 for a in (*self.thresholds, *(getattr(self, n) for n in _INTS)))
            and len(self.thresholds) == len(self.features)
            and all(len(t) <= MAX_THRESHOLDS for t in self.thresholds)
            and trees == len(self.leaf_start) >= 1
            and len(self.node_bin) == len(self.left) == len(self.right) == nodes
            and self.node_start[[0, -1]].tolist() == [0, nodes]
            and self.leaf_start[[0, -1]].tolist() == [0, len(self.leaf)]
            and bool(np.all(np.diff(self.node_start) == np.diff(self.leaf_start) - 1))
            and bool(np.all(np.diff(self.node_start) >= 1))
            and self.max_leaves <= MAX_LEAVES
            and len(self.features) == len(set(self.features)) <= MAX_FEATURES
            and bool(np.isfinite([self.scale, self.offset]).all())
            and all(bool(np.isfinite(t).all() and (np.diff(t) > 0).all()) for t in self.thresholds)
        )
        if not sound or (nodes and not (self._are_trees() and self._are_splits())):
            raise ValueError("the forest's arrays do not fit together")
        if self._most() > _INT_LIMIT:
            raise ValueError("the sum of the forest's leaves can overflow")

    def _are_trees(self) -> bool:
        """Whether children follow their parents, and every node and leaf has exactly one."""
        sizes = np.diff(self.node_start).astype(np.int64)
        own = np.arange(len(self.left)) - np.repeat(self.node_start[:-1], sizes)
        size = np.repeat(sizes, sizes)
        first, leaf = np.repeat(self.node_start[:-1], sizes), np.repeat(self.leaf_start[:-1], sizes)
        places = [self.node_start[:-1].astype(np.int64)]  # roots, which have no parent
        for child in (self.left.astype(np.int64), self.right.astype(np.int64)):
            inside = np.where(child >= 0, (child > own) & (child < size), ~child <= size)
            if not inside.all():
                return False
            places.append(np.where(child >= 0, first + child, len(self.left) + leaf + ~child))
        seen = np.bincount(np.concatenate(places), minlength=len(self.left) + len(self.leaf))
        return bool((seen == 1).all())

    def _are_splits(self) -> bool:
        """Whether every node asks for a threshold that its feature has."""
        counts = np.array([len(t) for t in self.thresholds], np.int64)
        known = (self.node_feature >= 0) & (self.node_feature < len(counts))
        if not known.all():
            return False
        return bool(((self.node_bin >= 0) & (self.node_bin < counts[self.node_feature])).all())

    def _most(self) -> int:
        """The largest sum, either way, that trees can add up to."""
        if not self.num_trees:
            return 0
        largest = np.maximum.reduceat(np.abs(self.leaf.astype(np.int64)), self.leaf_start[:-1])
        return int(largest.sum())


def from_lightgbm(text: str, names: Sequence[str]) -> Forest:
    """The forest of a LightGBM model file trained on the columns `names`, numeric splits only."""
    trees = [_tree(block) for block in text.split("\nTree=")[1:]]
    offset = sum((float(t["leaf_value"][0]) for t in trees if t["num_leaves"] == 1), 0.0)
    trees = [t for t in trees if t["num_leaves"] > 1]
    used = sorted({f for t in trees for f in t["split_feature"]})
    column = {f: i for i, f in enumerate(used)}
    pairs: dict[int, set[float]] = {f: set() for f in used}
    for tree in trees:
        for f, value in zip(tree["split_feature"], tree["threshold"], strict=True):
            pairs[f].add(value)
    thresholds = [np.array(sorted(pairs[f])) for f in used]
    most = max((len(t) for t in thresholds), default=0)
    if most > MAX_THRESHOLDS:
        raise ModelError(f"a feature has {most} thresholds; train with max_bin at most 255")
    node_feature: list[int] = []
    node_bin: list[int] = []
    left: list[int] = []
    right: list[int] = []
    leaves: list[float] = []
    node_start, leaf_start = [0], [0]
    for tree in trees:
        order = _by_level(tree)
        place = {node: i for i, node in enumerate(order)}
        for node in order:
            f = tree["split_feature"][node]
            node_feature.append(column[f])
            at = np.searchsorted(thresholds[column[f]], tree["threshold"][node])
            node_bin.append(int(at))
            for side, child in ((left, "left_child"), (right, "right_child")):
                target = tree[child][node]
                side.append(place[target] if target >= 0 else target)
        leaves += tree["leaf_value"]
        node_start.append(len(node_feature))
        leaf_start.append(len(leaves))
    values, scale = _quantised(leaves, leaf_start)
    forest = Forest(
        features=tuple(names[f] for f in used),
        thresholds=tuple(thresholds),
        node_feature=np.array(node_feature, np.int32),
        node_bin=np.array(node_bin, np.int32),
        left=np.array(left, np.int32),
        right=np.array(right, np.int32),
        node_start=np.array(node_start, np.int32),
        leaf_start=np.array(leaf_start, np.int32),
        leaf=values,
        scale=scale,
        offset=offset,
    )
    forest._check()
    return forest


def _quantised(leaves: Sequence[float], starts: Sequence[int]) -> tuple[Ints, float]:
    """Leaves as integers whose sum over all trees cannot overflow, and their power-of-two unit."""
    values = np.array(leaves, np.float64)
    largest = sum(float(np.abs(values[a:b]).max()) for a, b in pairwise(starts))
    if not np.isfinite(largest):
        raise ModelError("the leaves of the forest do not add up to a finite number")
    room = min((_INT_LIMIT - len(starts)) / largest, 1e300) if largest > 0 else 1.0
    bits = int(np.floor(np.log2(room)))
    return np.rint(np.ldexp(values, bits)).astype(np.int32), float(2.0**-bits)


def _tree(block: str) -> dict[str, Any]:
    held = dict(line.split("=", 1) for line in block.split("\n\n")[0].splitlines() if "=" in line)
    if held.get("num_cat", "0") != "0" or held.get("is_linear", "0") != "0":
        raise ModelError("only plain numeric splits and constant leaves can be served")
    tree: dict[str, Any] = {"num_leaves": int(held["num_leaves"])}
    tree["leaf_value"] = [float(v) for v in held["leaf_value"].split()]
    for name in ("split_feature", "left_child", "right_child"):
        tree[name] = [int(v) for v in held.get(name, "").split()]
    tree["threshold"] = [float(v) for v in held.get("threshold", "").split()]
    return tree


def _by_level(tree: Mapping[str, Any]) -> list[int]:
    """Level by level: neighbours do not depend on each other, which keeps a processor busy."""
    order = [0]
    for node in order:
        order += [c for c in (tree["left_child"][node], tree["right_child"][node]) if c >= 0]
    return order
