"""A small, safe expression language over named fields, used by kernel filters and features.

Comparisons, boolean logic, arithmetic, conditional expressions, `in` over literal lists and the
functions below; nothing else parses. Expressions are never handed to `eval`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import ceil, floor, log2
from typing import Any

from tilewise.errors import ExpressionError

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "log2": lambda v: log2(v) if v > 0 else 0.0,
    "ceil": ceil,
    "floor": floor,
    "ceil_div": lambda a, b: -(-a // b),
}

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_ALLOWED = (
    "comparisons, and/or/not, arithmetic, if-else, in [...], known fields and the functions "
    + ", ".join(FUNCTIONS)
)


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression; `tree` is the checked syntax tree."""

    source: str
    tree: ast.expr
    fields: frozenset[str]

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """The value for one set of fields."""
        try:
            return _evaluate(self.tree, values)
        except (TypeError, ZeroDivisionError, OverflowError, ValueError) as error:
            raise ExpressionError(f"cannot evaluate {self.source!r}: {error}") from None


def parse(source: str, known: Iterable[str]) -> Expression:
    """The expression, checked against the `known` field names."""
    text = source.strip()
    if len(text) > 10_000:
        raise ExpressionError(f"the expression has {len(text)} characters; 10000 are allowed")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        column = max(0, (getattr(error, "offset", 1) or 1) - 1)
        raise ExpressionError(f"not an expression: {error}", text, column) from None
    names: set[str] = set()
    _check(tree, frozenset(known), names, text)
    return Expression(text, tree, frozenset(names))


def _check(root: ast.expr, known: frozenset[str], names: set[str], text: str) -> None:
    # A work list, not recursion: a deeply nested expression must not exhaust the stack here.
    pending: list[tuple[ast.expr, int]] = [(root, 0)]
    while pending:
        node, depth = pending.pop()
        if depth > 200:
            raise ExpressionError("nested too deeply (200 levels)", text, node.col_offset)
        pending += [(child, depth + 1) for child in _children(node, known, names, text)]


def _children(
    node: ast.expr, known: frozenset[str], names: set[str], text: str
) -> Iterable[ast.expr]:
    match node:
        case ast.Constant(value=value) if isinstance(value, bool | int | float | str):
            return ()
        case ast.Name(id=name):
            if name not in known:
                close = get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known: {sorted(known)}"
                raise ExpressionError(f"unknown field {name!r}; {hint}", text, node.col_offset)
            names.add(name)
            return ()
        case ast.BoolOp(values=values):
            return values
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            return (operand,)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return (left, right)
        case ast.Compare(left=left, ops=ops, comparators=others):
            if all(type(op) in _COMPARE for op in ops):
                return (left, *others)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return (test, body, orelse)
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            if all(isinstance(e, ast.Constant) for e in elements):
                return elements
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            if name in FUNCTIONS:
                return arguments
    what = ast.unparse(node)
    raise ExpressionError(f"{what!r} is not allowed; allowed: {_ALLOWED}", text, node.col_offset)


def _evaluate(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return values[name]
        case ast.BoolOp(op=op, values=parts):
            results = (_evaluate(part, values) for part in parts)
            return all(results) if isinstance(op, ast.And) else any(results)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _evaluate(operand, values)
        case ast.UnaryOp(operand=operand):
            return -_evaluate(operand, values)
        case ast.BinOp(left=left, op=binary, right=right):
            a, b = _evaluate(left, values), _evaluate(right, values)
            if isinstance(binary, ast.Pow) and (abs(b) > 64 or abs(a) > 2**32):
                raise OverflowError("power too large")
            if isinstance(a, str) or isinstance(b, str):
                raise TypeError("text has no arithmetic")
            return _BINARY[type(binary)](a, b)
        case ast.Compare(left=left, ops=ops, comparators=others):
            a = _evaluate(left, values)
            for comparison, other in zip(ops, others, strict=True):
                b = _evaluate(other, values)
                if not _COMPARE[type(comparison)](a, b):
                    return False
                a = b
            return True
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _evaluate(body if _evaluate(test, values) else orelse, values)
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_evaluate(e, values) for e in elements]
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return FUNCTIONS[name](*(_evaluate(a, values) for a in arguments))
    raise AssertionError(f"unchecked node {ast.dump(node)}")
