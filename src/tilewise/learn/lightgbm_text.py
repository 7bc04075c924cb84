"""LightGBM's text of a forest, checked before LightGBM reads it.

Its parser trusts what it is given: a count that is off by one ends the process, or reads beyond an
array. So nothing reaches it that does not have the very shape it writes itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise

from tilewise.core.forest import from_lightgbm
from tilewise.core.source import identifier
from tilewise.errors import ModelError, TilewiseError

_INT = r"-?\d{1,18}"
_REAL = r"-?\d{1,40}(?:\.\d{1,40})?(?:e[+-]?\d{1,3})?"
_HEAD = {
    "version": r"v4",
    "num_class": r"1",
    "num_tree_per_iteration": r"1",
    "label_index": r"0",
    "max_feature_idx": r"\d{1,4}",
    "objective": r"regression|lambdarank|binary sigmoid:\d(?:\.\d{1,3})?",
    "feature_names": r"[\w ]+",
    "feature_infos": r"[\w\[\]:.+ -]+",
    "tree_sizes": r"\d{1,9}(?: \d{1,9})*",
}
_FREE = ("objective", "tree_sizes")
"""Lines that need not be there; the mean of several draws has no sizes."""
_PER_NODE = {
    **dict.fromkeys(("split_feature", "left_child", "right_child", "decision_type"), _INT),
    **dict.fromkeys(("split_gain", "threshold", "internal_value", "internal_weight"), _REAL),
    "internal_count": _INT,
}
_PER_LEAF = {"leaf_value": _REAL, "leaf_weight": _REAL, "leaf_count": _INT}
_ONE = {"num_leaves": r"\d{1,3}", "num_cat": "0", "is_linear": "0", "shrinkage": _REAL}
_END = "end of trees"


def checked_text(text: str) -> str:
    """The part of a forest's text that holds its trees; raises where it is not LightGBM's own."""
    body, end, _ = text.partition(f"\n{_END}\n")
    try:
        if not end:
            raise ValueError(f"it does not come to {_END!r}")
        head, *trees = re.split(r"(?<=\n)(?=Tree=)", body + "\n")
        names = _check_head(head, [len(tree.encode()) for tree in trees])
        for number, tree in enumerate(trees):
            _check_tree(tree, number, len(names))
        from_lightgbm(body, names)  # its trees are trees
    except (ValueError, IndexError, KeyError, TilewiseError) as error:
        raise ModelError(f"the text of a forest is damaged: {error}") from None
    return f"{body}\n{_END}\n"


def _check_head(head: str, sizes: list[int]) -> list[str]:
    """The names of the columns; raises where the head does not fit the trees behind it."""
    first, _, rest = head.partition("\n")
    held = _pairs(rest)
    if first != "tree" or held.keys() - _HEAD.keys() or _HEAD.keys() - held.keys() - {*_FREE}:
        raise ValueError(f"its head has the lines {', '.join(held)[:200]}")
    for name, value in held.items():
        _match(name, value, _HEAD[name])
    names = [identifier(name) for name in held["feature_names"].split()]
    wide = int(held["max_feature_idx"]) + 1
    if len(names) != wide or len(held["feature_infos"].split()) != wide:
        raise ValueError(f"it has {len(names)} names of {wide} columns")
    if "tree_sizes" in held and held["tree_sizes"] != " ".join(map(str, sizes)):
        raise ValueError("its trees are not of the sizes that its head says")
    return names


def _check_tree(text: str, number: int, columns: int) -> None:
    held = _pairs(text)
    wanted = {"Tree", *_ONE, *_PER_NODE, *_PER_LEAF}
    if held.get("Tree") != str(number) or held.keys() - wanted:
        raise ValueError(f"tree {number} has the lines {', '.join(held)[:200]}")
    for name, pattern in _ONE.items():
        _match(name, held[name], pattern)
    leaves = int(held["num_leaves"])
    if leaves == 1:
        _numbers(held, "leaf_value", _REAL, 1)
        return
    for name, pattern in _PER_LEAF.items():
        _numbers(held, name, pattern, leaves)
    for name, pattern in _PER_NODE.items():
        _numbers(held, name, pattern, leaves - 1)
    if not all(0 <= int(f) < columns for f in held["split_feature"].split()):
        raise ValueError(f"tree {number} splits on a column that is not there")
    # Bits of a split: categorical, default left, and how missing values are told.
    if not all(0 <= int(kind) < 12 and not int(kind) & 1 for kind in held["decision_type"].split()):
        raise ValueError(f"tree {number} has splits that are not numeric")


def _pairs(text: str) -> dict[str, str]:
    lines = [line.partition("=") for line in text.split("\n") if line]
    if any(not equals for _, equals, _ in lines):
        raise ValueError("a line is no NAME=VALUE")
    names = sorted(name for name, _, _ in lines)
    if any(a == b for a, b in pairwise(names)):
        raise ValueError("a line stands twice")
    return {name: value for name, _, value in lines}


def _numbers(held: Mapping[str, str], name: str, pattern: str, count: int) -> None:
    parts = held[name].split(" ")
    if len(parts) != count:
        raise ValueError(f"{name} has {len(parts)} values, not {count}")
    for part in parts:
        _match(name, part, pattern)


def _match(name: str, value: str, pattern: str) -> None:
    if not re.fullmatch(pattern, value, re.ASCII):
        raise ValueError(f"{name} is {value[:40]!r}")
