"""Expressions as array arithmetic and as C source, with bit-equal results.

Everything is a double and every operation is one IEEE operation in a fixed order, so a batch, a
single row and compiled C agree exactly. Integers are exact below 2**53, floor division and
remainder included. `log2` is computed from those operations too, because mathematical libraries
differ in the last bit. Text is compared through codes: 0 is every unknown word, known words count
from 1.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core.expressions import Expression
from tilewise.core.source import number
from tilewise.errors import ExpressionError

Array = NDArray[np.float64]
Categories = Mapping[str, Sequence[str]]
"""Text field -> its known words."""

_ARITHMETIC = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_COMPARISONS = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
_LOG2_TERMS = [2.885390081777926814719849362003784069 / (2 * i + 1) for i in range(13)]
"""log2((1 + s) / (1 - s)) = sum of terms[i] * s**(2 i + 1)."""
_SQRT2 = 1.4142135623730951

_PRELUDE = """\
static inline double tw_min(double a, double b) { return b < a ? b : a; }
static inline double tw_max(double a, double b) { return b > a ? b : a; }
static inline double tw_abs(double a) { return a < 0.0 ? -a : a; }
static inline double tw_floor(double a) {
  /* Adding and taking away 2**52 rounds to an integer without a library call. */
  const double big = 4503599627370496.0;
  double r = (tw_abs(a) < big) ? ((a < 0.0) ? (a - big) + big : (a + big) - big) : a;
  return r > a ? r - 1.0 : r;
}
static inline double tw_ceil(double a) { return -tw_floor(-a); }
static inline double tw_floor_div(double a, double b) { return tw_floor(a / b); }
static inline double tw_mod(double a, double b) { return a - tw_floor(a / b) * b; }
static inline double tw_ceil_div(double a, double b) { return -tw_floor(-a / b); }
static inline double tw_gcd(double a, double b) {
  while (b > 0.0) { double r = tw_mod(a, b); a = b; b = r; }
  return a;
}
static inline double tw_log2(double a) {
  union { double d; unsigned long long u; } x, e;
  double m, s, q, p;
  x.d = a > 0.0 ? a : 1.0;
  e.u = (x.u >> 52) | 0x4330000000000000ull;
  x.u = (x.u & 0x000fffffffffffffull) | 0x3ff0000000000000ull;
  m = x.d > %(sqrt2)s ? x.d * 0.5 : x.d;
  q = (e.d - 4503599627370496.0) - (x.d > %(sqrt2)s ? 1022.0 : 1023.0);
  s = (m - 1.0) / (m + 1.0);
  p = %(polynomial)s;
  return q + s * p;
}
"""


def _polynomial() -> str:
    text = repr(_LOG2_TERMS[-1])
    for term in reversed(_LOG2_TERMS[:-1]):
        text = f"({text} * (s * s) + {term!r})"
    return text


C_PRELUDE = _PRELUDE % {"sqrt2": repr(_SQRT2), "polynomial": _polynomial()}


def encode(value: Any, words: Sequence[str] | None) -> float:
    """A field's value as a number; text becomes its code, 0 where the word is not known."""
    if isinstance(value, str):
        return float(words.index(value) + 1) if words and value in words else 0.0
    return float(value)


def log2(value: Array) -> Array:
    """The base-2 logarithm, 0 for what has none; the same bits as the C version."""
    x = np.where(value > 0.0, value, 1.0)
    bits = np.ascontiguousarray(x).view(np.uint64)
    exponent = (bits >> np.uint64(52)).astype(np.float64)
    mantissa = ((bits & np.uint64(0x000FFFFFFFFFFFFF)) | np.uint64(0x3FF0000000000000)).view(
        np.float64
    )
    is_high = mantissa > _SQRT2
    m = np.where(is_high, mantissa * 0.5, mantissa)
    q = exponent - np.where(is_high, 1022.0, 1023.0)
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    p = np.full_like(s, _LOG2_TERMS[-1])
    for term in reversed(_LOG2_TERMS[:-1]):
        p = p * square + term
    result: Array = q + s * p
    return result


def _gcd(a: Array, b: Array) -> Array:
    a, b = np.broadcast_arrays(a, b)
    return np.gcd(a.astype(np.int64), b.astype(np.int64)).astype(np.float64)


_NUMPY_FUNCTIONS: dict[str, Any] = {
    "abs": np.abs,
    "log2": log2,
    "ceil": np.ceil,
    "floor": np.floor,
    "ceil_div": lambda a, b: -np.floor(-a / b),
    "gcd": _gcd,
}


def evaluate(expression: Expression, values: Mapping[str, Array], words: Categories) -> Array:
    """The expression over arrays of field values (text fields as codes)."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        result = _numpy(expression.tree, values, words)
    return np.asarray(result, dtype=np.float64)


def _numpy(node: ast.expr, values: Mapping[str, Array], words: Categories) -> Any:
    def rest(child: ast.expr) -> Any:
        return _numpy(child, values, words)

    match node:
        case ast.Constant(value=int() | float() as value):
            return np.float64(value)
        case ast.Name(id=name):
            return values[name]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return (rest(operand) == 0.0) * 1.0
        case ast.UnaryOp(operand=operand):
            return -rest(operand)
        case ast.BoolOp(op=op, values=parts):
            held = [rest(part) != 0.0 for part in parts]
            join = np.logical_and if isinstance(op, ast.And) else np.logical_or
            result = held[0]
            for other in held[1:]:
                result = join(result, other)
            return result * 1.0
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return np.where(rest(test) != 0.0, rest(body), rest(orelse))
        case ast.BinOp(left=left, op=op, right=right):
            return _numpy_binary(op, rest(left), rest(right))
        case ast.Compare():
            tests = [_numpy_test(*test, values, words) for test in _tests(node)]
            result = tests[0]
            for other in tests[1:]:
                result = np.logical_and(result, other)
            return result * 1.0
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=arguments):
            result = rest(arguments[0])
            for argument in arguments[1:]:
                other = rest(argument)
                is_other = other < result if name == "min" else other > result
                result = np.where(is_other, other, result)
            return result
        case ast.Call(func=ast.Name(id=name), args=arguments) if name in _NUMPY_FUNCTIONS:
            return _NUMPY_FUNCTIONS[name](*(np.asarray(rest(a)) for a in arguments))
    raise _unsupported(node)


def _numpy_binary(op: ast.operator, a: Any, b: Any) -> Any:
    match op:
        case ast.Add():
            return a + b
        case ast.Sub():
            return a - b
        case ast.Mult():
            return a * b
        case ast.Div():
            return a / b
        case ast.FloorDiv():
            return np.floor(a / b)
        case ast.Mod():
            return a - np.floor(a / b) * b
    raise ExpressionError(f"{type(op).__name__} has no compiled form; use products")


def _tests(node: ast.Compare) -> list[tuple[ast.expr, ast.cmpop, ast.expr]]:
    """A chain of comparisons as pairs."""
    sides = [node.left, *node.comparators]
    return [(sides[i], op, sides[i + 1]) for i, op in enumerate(node.ops)]


def _numpy_test(
    left: ast.expr,
    op: ast.cmpop,
    right: ast.expr,
    values: Mapping[str, Array],
    words: Categories,
) -> Any:
    if isinstance(op, ast.In | ast.NotIn):
        a, found = _numpy(left, values, words), False
        for element in _elements(right):
            found = np.logical_or(found, a == _operand(element, left, words))
        return found if isinstance(op, ast.In) else np.logical_not(found)
    if _is_text(left) or _is_text(right):
        text, other = _sides(left, op, right)
        same = _numpy(other, values, words) == _operand(text, other, words)
        return same if isinstance(op, ast.Eq) else np.logical_not(same)
    a, b = _numpy(left, values, words), _numpy(right, values, words)
    return {
        "==": np.equal,
        "!=": np.not_equal,
        "<": np.less,
        "<=": np.less_equal,
        ">": np.greater,
        ">=": np.greater_equal,
    }[_COMPARISONS[type(op)]](a, b)


def to_c(expression: Expression, names: Mapping[str, str], words: Categories) -> str:
    """The expression as C over doubles; `names` maps fields to C expressions."""
    return _c(expression.tree, names, words)


def check_compiles(expression: Expression, words: Categories) -> None:
    """Raises where an expression has no compiled form: powers, and text where numbers belong."""
    _c(expression.tree, dict.fromkeys(expression.fields, "x"), words)


def _c(node: ast.expr, names: Mapping[str, str], words: Categories) -> str:
    def rest(child: ast.expr) -> str:
        return _c(child, names, words)

    match node:
        case ast.Constant(value=int() | float() as value):
            return number(float(value))
        case ast.Name(id=name):
            return names[name]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"(({rest(operand)}) == 0.0 ? 1.0 : 0.0)"
        case ast.UnaryOp(operand=operand):
            return f"(-{rest(operand)})"
        case ast.BoolOp(op=op, values=parts):
            join = " && " if isinstance(op, ast.And) else " || "
            return f"(({join.join(f'({rest(p)} != 0.0)' for p in parts)}) ? 1.0 : 0.0)"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return f"(({rest(test)}) != 0.0 ? {rest(body)} : {rest(orelse)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return f"({rest(left)} {_ARITHMETIC[type(op)]} {rest(right)})"
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
            return f"tw_floor_div({rest(left)}, {rest(right)})"
        case ast.BinOp(left=left, op=ast.Mod(), right=right):
            return f"tw_mod({rest(left)}, {rest(right)})"
        case ast.Compare():
            tests = " && ".join(_c_test(*test, names, words) for test in _tests(node))
            return f"(({tests}) ? 1.0 : 0.0)"
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=arguments):
            text = rest(arguments[0])
            for argument in arguments[1:]:
                text = f"tw_{name}({text}, {rest(argument)})"
            return text
        case ast.Call(func=ast.Name(id=name), args=arguments) if name in _NUMPY_FUNCTIONS:
            return f"tw_{name}({', '.join(rest(a) for a in arguments)})"
    raise _unsupported(node)


def _c_test(
    left: ast.expr, op: ast.cmpop, right: ast.expr, names: Mapping[str, str], words: Categories
) -> str:
    if isinstance(op, ast.In | ast.NotIn):
        a = _c(left, names, words)
        any_of = " || ".join(f"{a} == {number(_operand(e, left, words))}" for e in _elements(right))
        return f"({any_of or '0'})" if isinstance(op, ast.In) else f"(!({any_of or '0'}))"
    if _is_text(left) or _is_text(right):
        text, other = _sides(left, op, right)
        sign = "==" if isinstance(op, ast.Eq) else "!="
        return f"({_c(other, names, words)} {sign} {number(_operand(text, other, words))})"
    return f"({_c(left, names, words)} {_COMPARISONS[type(op)]} {_c(right, names, words)})"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _sides(left: ast.expr, op: ast.cmpop, right: ast.expr) -> tuple[ast.expr, ast.expr]:
    """The text and what it is compared with; words are equal or not, they have no order."""
    if not isinstance(op, ast.Eq | ast.NotEq):
        raise _unsupported(left)
    return (left, right) if _is_text(left) else (right, left)


def _elements(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.List | ast.Tuple):
        return node.elts
    raise _unsupported(node)


def _operand(constant: ast.expr, field: ast.expr, words: Categories) -> float:
    """What a constant is compared as; a word the field never has equals nothing."""
    if isinstance(constant, ast.UnaryOp):  # a literal below zero
        return -_operand(constant.operand, field, words)
    if not isinstance(constant, ast.Constant):
        raise _unsupported(constant)
    if isinstance(constant.value, int | float):
        return float(constant.value)
    if not isinstance(field, ast.Name):
        raise _unsupported(field)
    return encode(str(constant.value), words.get(field.id, ())) or -1.0


def _unsupported(node: ast.expr) -> ExpressionError:
    return ExpressionError(f"{ast.unparse(node)!r} has no compiled form")
