"""Sizes that are not known yet: arithmetic on them is written down, questions are asked.

`Number`s stand in the place of a problem's sizes. What is computed from them is a tree of `Node`s;
where one is asked whether something holds, `core/trace.py` answers.
Helpers that would loop over sizes or need their value (`cheapest`, `either`, `gcd`, `concrete`) are
here too; on plain numbers they compute as usual.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from tilewise.errors import TilewiseError

MOST = 2**31
"""Sizes of a traced problem lie below."""
MOST_VALUES = 32
"""Of a size that has to be known; more are no longer cases of their own."""
_MARK = re.compile("\x02(\\d+)\x03")


class TraceError(TilewiseError):
    """A function does what cannot be followed."""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One operation; equal ones are the same object."""

    op: str
    args: tuple[Any, ...]
    low: float
    high: float
    """Between which its value lies; of integers exactly."""
    is_float: bool = False


_NODES: dict[tuple[Any, ...], Node] = {}
_SPELT: list[Node] = []
"""Nodes that stand in texts, by number."""


def _node(op: str, *args: Any, low: float, high: float, **kind: bool) -> Node:
    key = (op, *args, *(type(a) for a in args), *sorted(kind.items()))
    found = _NODES.get(key)
    if found is None:
        found = _NODES[key] = Node(op, args, low, high, **kind)
    return found


class Number:
    """A size, or what was computed from sizes; never hashed."""

    __slots__ = ("node",)

    def __hash__(self) -> int:
        """None: a cache would answer for other sizes."""
        raise TraceError("a size that is not known cannot be looked up")

    def __init__(self, node: Node) -> None:
        self.node = node

    def __add__(self, other: Any) -> Any:
        return _arithmetic("+", self, other)

    def __radd__(self, other: Any) -> Any:
        return _arithmetic("+", other, self)

    def __sub__(self, other: Any) -> Any:
        return _arithmetic("-", self, other)

    def __rsub__(self, other: Any) -> Any:
        return _arithmetic("-", other, self)

    def __mul__(self, other: Any) -> Any:
        return _arithmetic("*", self, other)

    def __rmul__(self, other: Any) -> Any:
        return _arithmetic("*", other, self)

    def __floordiv__(self, other: Any) -> Any:
        return _arithmetic("//", self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _arithmetic("//", other, self)

    def __mod__(self, other: Any) -> Any:
        return _arithmetic("%", self, other)

    def __rmod__(self, other: Any) -> Any:
        return _arithmetic("%", other, self)

    def __truediv__(self, other: Any) -> Any:
        return _arithmetic("/", self, other)

    def __neg__(self) -> Any:
        return _arithmetic("-", 0, self)

    def __round__(self) -> Any:
        one = self.node
        return Number(_node("round", one, low=round(one.low), high=round(one.high)))

    def __eq__(self, other: object) -> Any:
        return _test("==", self, other)

    def __ne__(self, other: object) -> Any:
        return _test("!=", self, other)

    def __lt__(self, other: Any) -> Any:
        return _test("<", self, other)

    def __le__(self, other: Any) -> Any:
        return _test("<=", self, other)

    def __gt__(self, other: Any) -> Any:
        return _test("<", other, self)

    def __ge__(self, other: Any) -> Any:
        return _test("<=", other, self)

    def __bool__(self) -> bool:
        return bool(_test("!=", self, 0))

    def __format__(self, form: str) -> str:
        if form:
            raise TraceError(f"a size cannot be written as {form!r} without knowing it")
        _SPELT.append(self.node)
        return f"\x02{len(_SPELT) - 1}\x03"

    def __str__(self) -> str:
        return format(self)

    __repr__ = __str__

    def __index__(self) -> int:
        """The value, each of those that examples have followed on a path of its own."""
        return concrete(self)

    __int__ = __index__

    def __float__(self) -> NoReturn:
        raise TraceError("a size that is not known was asked for as a number")


class Truth:
    """Whether something holds, followed both ways where it is asked."""

    __slots__ = ("node",)

    def __init__(self, node: Node) -> None:
        self.node = node

    def __bool__(self) -> bool:
        return _current().ask(self.node)

    def __index__(self) -> int:
        return int(bool(self))

    __int__ = __index__

    def __eq__(self, other: object) -> Any:
        return bool(self) == bool(other)


class Answers(Protocol):
    """Whoever follows a function down one of its paths."""

    def ask(self, test: Node) -> bool:
        """Whether a question holds on this path."""

    def values_of(self, node: Node) -> list[int]:
        """Every value that a size can have on this path."""


_ANSWERING: list[Answers] = []


@contextmanager
def answering(answers: Answers) -> Iterator[None]:
    """Questions are put to `answers` inside."""
    _ANSWERING.append(answers)
    try:
        yield
    finally:
        _ANSWERING.pop()


def _current() -> Answers:
    if not _ANSWERING:
        raise TraceError("sizes that are not known were compared outside of a trace")
    return _ANSWERING[-1]


def as_node(value: Any) -> Node:
    """A number of either kind as a node."""
    if isinstance(value, Number):
        return value.node
    if isinstance(value, bool):
        value = int(value)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise TraceError(f"{value!r} is no number that can be followed")
    return _node("const", value, low=value, high=value, is_float=isinstance(value, float))


def _value(node: Node) -> Any:
    return node.args[0] if node.op == "const" else Number(node)


def _arithmetic(op: str, left: Any, right: Any) -> Any:
    a, b = as_node(left), as_node(right)
    is_float = a.is_float or b.is_float or op == "/"
    if op == "//" and is_float:
        raise TraceError("floor division of fractions cannot be followed")
    for one, other, keeps in ((a, b, ("+", "-", "*", "//")), (b, a, ("+", "*"))):
        neutral = 0 if op in ("+", "-") else 1
        if op in keeps and other.op == "const" and other.args[0] == neutral and not is_float:
            return _value(one)
    if op == "*" and not is_float and any(one.low == one.high == 0 for one in (a, b)):
        return 0
    if op == "-" and a is b and not is_float:
        return 0
    if op in ("+", "-") and b.op == "const" and a.op in ("+", "-") and not is_float:
        # x + 2 - 3 + 1 is x: sizes that come out the same look the same.
        inner, last = a.args
        if last.op == "const":
            added = (last.args[0] if a.op == "+" else -last.args[0]) + (
                b.args[0] if op == "+" else -b.args[0]
            )
            return _arithmetic("+" if added >= 0 else "-", _value(inner), abs(added))
    low, high = _range(op, a, b)
    return Number(_node(op, a, b, low=low, high=high, is_float=is_float))


def _range(op: str, a: Node, b: Node) -> tuple[float, float]:
    if op == "%":
        return 0, b.high - 1
    if op == "+":
        return a.low + b.low, a.high + b.high
    if op == "-":
        return a.low - b.high, a.high - b.low
    act: Callable[[Any, Any], Any] = {
        "*": lambda x, y: x * y,
        "//": lambda x, y: x // y,
        "/": lambda x, y: x / y,
    }[op]
    # Whoever divides by a size knows it to be above zero.
    least = max(1, b.low) if op != "*" and not b.is_float else b.low
    ends = [act(x, y) for x in (a.low, a.high) for y in (least, b.high)]
    return min(ends), max(ends)


def _test(op: str, left: Any, right: Any) -> Any:
    if isinstance(left, str) or isinstance(right, str) or left is None or right is None:
        return op == "!="
    a, b = as_node(left), as_node(right)
    if a is b or _is_swapped(a, b):
        return op in ("==", "<=")
    if op == "<" and (a.high < b.low or a.low >= b.high):
        return a.high < b.low
    if op == "<=" and (a.high <= b.low or a.low > b.high):
        return a.high <= b.low
    if op in ("==", "!=") and (a.high < b.low or a.low > b.high):
        return op == "!="
    return Truth(_node(op, a, b, low=0, high=1))


def _is_swapped(a: Node, b: Node) -> bool:
    """Whether they are one sum or product, written the other way round."""
    return a.op == b.op and a.op in ("+", "*") and a.args == b.args[::-1]


def either(test: Any, this: Any, that: Any) -> Any:
    """`this if test else that`, in places where both are worked out."""
    if not isinstance(test, Truth):
        return this if test else that
    a, b = as_node(this), as_node(that)
    low, high = min(a.low, b.low), max(a.high, b.high)
    return Number(
        _node("either", test.node, a, b, low=low, high=high, is_float=a.is_float or b.is_float)
    )


def gcd(a: Any, b: Any) -> Any:
    """The greatest common divisor."""
    if not isinstance(a, Number) and not isinstance(b, Number):
        return math.gcd(a, b)
    one, two = as_node(a), as_node(b)
    return Number(_node("gcd", one, two, low=0, high=max(one.high, two.high)))


_LOOPS = 0


def cheapest(first: int, last: Any, cost: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The least cost of the numbers from `first` to `last`, and the first number that has it."""
    global _LOOPS
    if not isinstance(last, Number) and not isinstance(cost(first), Number):
        return min((cost(place), place) for place in range(first, last + 1))
    end, depth = as_node(last), _LOOPS
    _LOOPS += 1
    try:
        loop = _node("loop", depth, low=first, high=max(first, end.high))
        body = as_node(cost(Number(loop)))
    finally:
        _LOOPS -= 1
    parts = (as_node(first), end, depth, body)
    best = _node("cost", *parts, low=body.low, high=body.high, is_float=body.is_float)
    return Number(best), Number(_node("place", *parts, low=first, high=max(first, end.high)))


def concrete(number: Any) -> int:
    """A size's value, where it must be known: every value of the examples is a path."""
    if not isinstance(number, Number):
        return int(number)
    found = _current().values_of(number.node)
    if not 0 < len(found) <= MOST_VALUES:
        raise TraceError(
            f"{len(found)} values of one size are cases of their own; {MOST_VALUES} are possible"
        )
    for value in found[:-1]:
        if number == value:
            return value
    # Asked all the same: a value that no example has must not pass for the last.
    if number == found[-1]:
        return found[-1]
    raise Unseen


class Unseen(BaseException):
    """A path that no example takes."""


def fields_of(names: Sequence[str], least: Mapping[str, int]) -> dict[str, Number]:
    """Sizes that are not known, by name."""
    return {n: Number(_node("field", n, low=least.get(n, 0), high=MOST - 1)) for n in names}


def pieces(text: str) -> list[str | Node]:
    """A text that sizes were written into, as its parts."""
    parts = _MARK.split(text)
    return [_SPELT[int(part)] if at % 2 else part for at, part in enumerate(parts) if part]
