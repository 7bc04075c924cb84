"""Ways to spoil what a reader reads: bytes flipped, cut and repeated; JSON values swapped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

HOSTILE: list[Any] = [
    *(None, True, False, 0, -1, 1, 255, 2**31, 2**63, 2**70, -(2**70), 0.5, -0.0, 1e308),
    *(float("inf"), float("nan"), "", "x", "a b", "a\nb", "x" * 300, "é", "\0", "nan", "1e999"),
    *("..", "-", "gemm", "bf16", "[[[", [], {}, [[]], [None], {"a": 1}, {"": {}}, [1, "a", None]),
    *("u1@0+9999999", "f8@0+1", "i4@-1+2", "p_m", "p_m ** 99", "1 < p_m < 2", "k_engine == 'cpu'"),
]
hostile = st.sampled_from(HOSTILE)
Edit = Callable[[Any], Any]


# Strategies that last are drawn from twice as fast as those made for every case.
_ways = st.lists(st.integers(0, 2**16), min_size=1, max_size=8)
_changes = st.lists(st.tuples(st.sampled_from("rrrdxc"), hostile), min_size=1, max_size=3)
_move = st.tuples(
    st.sampled_from("fftdri"), st.integers(0, 2**20), st.integers(0, 255), st.binary(max_size=6)
)
_moves = st.lists(_move, min_size=1, max_size=6)


@st.composite
def edits(draw: st.DrawFn) -> Edit:
    """A function that changes a value somewhere inside a JSON tree, up to three times."""
    steps, changes = draw(_ways), draw(_changes)

    def edit(value: Any) -> Any:
        made = copy.deepcopy(value)
        for number, (what, new) in enumerate(changes):
            made = _edited(made, [s + 31 * number for s in steps], what, copy.deepcopy(new))
        return made

    return edit


def _edited(tree: Any, steps: list[int], what: str, new: Any) -> Any:
    """Walks down by `steps`, then replaces, drops, adds or copies what it came to."""
    at, above, key = tree, None, None
    for step in steps:
        if not isinstance(at, dict | list) or not at:
            break
        above = at
        key = list(at)[step % len(at)] if isinstance(at, dict) else step % len(at)
        at = at[key]
    if above is None or key is None:
        return new
    if what == "d":
        del above[key]
    elif what == "x" and isinstance(above, dict):
        above["extra" if not isinstance(new, str) else new] = new
    elif what in "xc" and isinstance(above, list):
        above.insert(int(key), at)
    else:
        above[key] = new
    return tree


@st.composite
def spoils(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """A function that flips, drops, repeats or replaces some bytes."""
    moves = draw(_moves)

    def spoil(data: bytes) -> bytes:
        body = bytearray(data)
        for what, where, value, text in moves:
            at = where % (len(body) + 1)
            if what == "f" and at < len(body):
                body[at] ^= value or 1
            elif what == "t":
                del body[at:]
            elif what == "d":
                del body[at : at + value]
            elif what == "r":
                body[at:at] = body[max(0, at - value) : at]
            else:
                body[at:at] = text
        return bytes(body)

    return spoil
