"""A small, safe expression language over named fields, used by kernel filters and features.

Comparisons, boolean logic, arithmetic, conditional expressions, `in` over literal lists and the
functions below; nothing else parses. Expressions are never handed to `eval`.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from math import ceil, floor, gcd, isfinite, log2
from typing import Any

from tilewise.errors import ExpressionError, closest

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "log2": lambda v: log2(v) if v > 0 else 0.0,
    "ceil": ceil,
    "floor": floor,
    "ceil_div": lambda a, b: -(-a // b),
    "gcd": lambda a, b: gcd(int(a), int(b)),
}

_ARGUMENTS = {"min": 0, "max": 0, "ceil_div": 2, "gcd": 2}
"""How many a function takes: 0 for two or more, 1 where it is not listed."""
MAX_LENGTH = 10_000
MAX_DEPTH = 200
MAX_WEIGHT = 20_000
"""Operations that one expression, or all of a model, may come to when they are written out."""

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


Values = Mapping[str, Any]
Evaluate = Callable[[Values], Any]


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression; `tree` is the checked syntax tree."""

    source: str
    tree: ast.expr = field(compare=False, repr=False)
    fields: frozenset[str]
    evaluate: Evaluate = field(compare=False, repr=False)
    weight: int = field(compare=False, repr=False)
    """Operations that it comes to when it is written out."""

    def __call__(self, values: Values) -> Any:
        """The value for one set of fields."""
        try:
            return self.evaluate(values)
        except KeyError as error:
            raise ExpressionError(
                f"cannot evaluate {self.source!r}: no value for {error}"
            ) from None
        except (TypeError, ArithmeticError, ValueError) as error:
            raise ExpressionError(f"cannot evaluate {self.source!r}: {error}") from None


MOST_HELD = 4096
_held: dict[str, Expression] = {}
"""What was parsed, by its text: a model's features are, as they come and as a scorer has them."""


def parse(source: str, known: Iterable[str]) -> Expression:
    """The expression, checked against the `known` field names; its tree is others' as well."""
    text = source.strip().replace("\n", " ")
    names = known if isinstance(known, Set) else frozenset(known)
    held = _held.get(text)
    if held is None or not held.fields <= names:
        held = _parsed(text, names)
        if len(_held) >= MOST_HELD:
            _held.clear()
        _held[text] = held
    return held


def _parsed(text: str, known: Set[str]) -> Expression:
    if len(text) > MAX_LENGTH:
        raise ExpressionError(
            f"the expression has {len(text)} characters; {MAX_LENGTH} are allowed"
        )
    try:
        with warnings.catch_warnings():
            # Python warns of odd escapes in text; they are compared, not executed.
            warnings.simplefilter("ignore")
            tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        column = max(0, (getattr(error, "offset", 1) or 1) - 1)
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        if text[column : column + 1] == "=":
            message += "; write == to compare"
        raise ExpressionError(f"not an expression: {message}", text, column) from None
    names: set[str] = set()
    _check(tree, known, names, text)
    weight = _weight(tree)
    if weight > MAX_WEIGHT:
        raise ExpressionError(f"the expression comes to more than {MAX_WEIGHT} operations", text)
    return Expression(text, tree, frozenset(names), _compile(tree), weight)


def _check(root: ast.expr, known: Set[str], names: set[str], text: str) -> None:
    # A work list, not recursion: a deeply nested expression must not exhaust the stack here.
    pending: list[tuple[ast.expr, int]] = [(root, 0)]
    while pending:
        node, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise ExpressionError(
                f"nested too deeply ({MAX_DEPTH} levels)", text, _column(text, node.col_offset)
            )
        pending += [(child, depth + 1) for child in _children(node, known, names, text)]


def _children(node: ast.expr, known: Set[str], names: set[str], text: str) -> Iterable[ast.expr]:
    match node:
        case ast.Constant(value=value) if isinstance(value, str) or _is_finite(value):
            return ()
        case ast.Name(id=name):
            if name not in known:
                meant = closest(name, known)
                fields = ", ".join(sorted(known))
                quoted = f"write words in quotes, as {name!r}; known fields: {fields}"
                hint = f"did you mean {meant!r}?" if meant else quoted
                raise ExpressionError(
                    f"unknown field {name!r}; {hint}", text, _column(text, node.col_offset)
                )
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
            if all(_is_literal(e) for e in elements):
                return elements
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            if name in FUNCTIONS and not any(isinstance(a, ast.Starred) for a in arguments):
                _check_arguments(name, len(arguments), text, _column(text, node.col_offset))
                return arguments
    start, end = node.col_offset, node.end_col_offset or len(text.encode())
    what = text.encode()[start:end].decode(errors="replace")
    raise ExpressionError(
        f"{what!r} is not allowed; allowed: {_ALLOWED}", text, _column(text, start)
    )


def _is_finite(value: Any) -> bool:
    """Whether a constant is a number that a double holds; `1e999` and 400 digits are none."""
    try:
        return isinstance(value, bool | int | float) and isfinite(value)
    except OverflowError:
        return False


def _check_arguments(name: str, given: int, text: str, column: int) -> None:
    wanted = _ARGUMENTS.get(name, 1)
    if given < 2 if wanted == 0 else given != wanted:
        takes = "two or more values" if wanted == 0 else f"{wanted} value{'s' * (wanted > 1)}"
        raise ExpressionError(f"{name} takes {takes}, not {given}", text, column)


def _weight(node: ast.expr) -> int:
    """Operations, those counted again that compiled comparisons write out again."""
    match node:
        case ast.Compare(left=left, ops=ops, comparators=others):
            sides = [_weight(side) for side in (left, *others)]
            again = [
                max(1, len(side.elts)) if isinstance(side, ast.List | ast.Tuple) else 1
                for side in others
            ]
            return sum((sides[i] + sides[i + 1]) * again[i] for i in range(len(ops)))
        case ast.BoolOp(values=parts) | ast.List(elts=parts) | ast.Tuple(elts=parts):
            return 1 + sum(map(_weight, parts))
        case ast.Call(args=parts):
            return 1 + sum(map(_weight, parts))
        case ast.UnaryOp(operand=operand):
            return 1 + _weight(operand)
        case ast.BinOp(left=left, right=right):
            return 1 + _weight(left) + _weight(right)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return 1 + _weight(test) + _weight(body) + _weight(orelse)
    return 1


def _is_literal(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return isinstance(node.operand, ast.Constant) and _is_finite(node.operand.value)
    return isinstance(node, ast.Constant)


def _column(text: str, offset: int) -> int:
    """Syntax trees count bytes, a pointer under the text counts characters."""
    return len(text.encode()[:offset].decode(errors="ignore"))


def _compile(node: ast.expr) -> Evaluate:
    """The checked tree as nested closures: ten times faster than walking it for every kernel."""
    match node:
        case ast.Constant(value=value):
            return lambda _: value
        case ast.Name(id=name):
            return lambda values: values[name]
        case ast.BoolOp(op=op, values=parts):
            return _junction(isinstance(op, ast.Or), [_compile(part) for part in parts])
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _compile(operand)
            return lambda values: not inner(values)
        case ast.UnaryOp(operand=operand):
            inner = _compile(operand)
            return lambda values: -inner(values)
        case ast.BinOp(left=left, op=binary, right=right):
            return _arithmetic(_BINARY[type(binary)], _compile(left), _compile(right))
        case ast.Compare(left=left, ops=ops, comparators=others):
            tests = [_COMPARE[type(op)] for op in ops]
            return _comparison(tests, [_compile(n) for n in (left, *others)])
        case ast.IfExp(test=test, body=body, orelse=orelse):
            choose, yes, no = _compile(test), _compile(body), _compile(orelse)
            return lambda values: yes(values) if choose(values) else no(values)
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            literal = [_compile(e)({}) for e in elements]
            return lambda _: literal
        case ast.Call(func=ast.Name(id=name), args=arguments):
            function, given = FUNCTIONS[name], [_compile(a) for a in arguments]
            return lambda values: function(*[part(values) for part in given])
    raise AssertionError(f"unchecked node {ast.dump(node)}")


def _junction(is_or: bool, parts: list[Evaluate]) -> Evaluate:
    def evaluate(values: Values) -> bool:
        for part in parts:
            if bool(part(values)) is is_or:
                return is_or
        return not is_or

    return evaluate


def _arithmetic(operate: Callable[[Any, Any], Any], left: Evaluate, right: Evaluate) -> Evaluate:
    def evaluate(values: Values) -> Any:
        a, b = left(values), right(values)
        if isinstance(a, str | list) or isinstance(b, str | list):
            raise TypeError("only numbers have arithmetic")
        if operate is operator.pow and (abs(b) > 64 or abs(a) > 2**32):
            raise OverflowError("power too large")
        return operate(a, b)

    return evaluate


def _comparison(tests: list[Callable[[Any, Any], bool]], parts: list[Evaluate]) -> Evaluate:
    def evaluate(values: Values) -> bool:
        a = parts[0](values)
        for test, part in zip(tests, parts[1:], strict=True):
            b = part(values)
            if not test(a, b):
                return False
            a = b
        return True

    return evaluate
