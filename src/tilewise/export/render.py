"""Trees of questions as C++ functions; kernels whose trees differ in numbers alone share one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewise.core.sizes import Node, as_node, pieces
from tilewise.core.source import number
from tilewise.core.trace import Branch, Leaf, Tree

_WIDE = 2**63
_PLAIN = range(-1, 3)
"""Numbers that are written out: what they mean seldom differs between kernels."""


@dataclass(slots=True)
class Constants:
    """Numbers and texts of one tree, in the order in which its function reads them."""

    texts: Texts
    shared: Callable[[str], str]
    """The name of a function of its own for statements that many leaves have in common."""
    numbers: list[int] = field(default_factory=list)
    fractions: list[float] = field(default_factory=list)

    def whole(self, value: int) -> str:
        self.numbers.append(value)
        return f"c[{len(self.numbers) - 1}]"

    def fraction(self, value: float) -> str:
        self.fractions.append(value)
        return f"f[{len(self.fractions) - 1}]"

    def text(self, value: str) -> str:
        return self.whole(self.texts.place(value))


@dataclass(slots=True)
class Texts:
    """Every text once."""

    places: dict[str, int] = field(default_factory=dict)

    def place(self, text: str) -> int:
        return self.places.setdefault(text, len(self.places))


def _is_wide(node: Node) -> bool:
    return not node.is_float and max(abs(node.low), abs(node.high)) >= _WIDE


def expression(node: Node, constants: Constants) -> str:
    """A node as C++; integers are `int64_t`, or `wide` where they may not fit."""

    def of(one: Node) -> str:
        return expression(one, constants)

    def real(one: Node) -> str:
        return of(one) if one.is_float else f"double({of(one)})"

    op, args = node.op, node.args
    match op:
        case "const":
            value = args[0]
            if isinstance(value, float):
                return constants.fraction(value)
            if _is_wide(node):  # more than a literal or the table of numbers holds
                return f"(wide({value >> 32}) * {2**32} + {value % 2**32})"
            return number(value) if value in _PLAIN else constants.whole(value)
        case "field":
            return f"p[{args[0]}_]"
        case "loop":
            return f"at{args[0]}"
        case "-" if _negated(node) and _negated(args[1]) is None and args[1].op == "//":
            over, under = args[1].args
            inner = _negated(over)
            if inner is not None:
                text = f"ceil_div({of(inner)}, {of(under)})"
                return _narrowed(node, text, over, under)
            return f"(-{of(args[1])})"
        case "-" if _negated(node):
            return f"(-{of(args[1])})"
        case "+" | "-" | "*" if node.is_float:
            return f"({real(args[0])} {op} {real(args[1])})"
        case "+" | "-" | "*":
            first = f"wide({of(args[0])})" if _is_wide(node) else of(args[0])
            return _narrowed(node, f"({first} {op} {of(args[1])})", *args)
        case "//" | "%":
            name = "floor_div" if op == "//" else "floor_mod"
            return _narrowed(node, f"{name}({of(args[0])}, {of(args[1])})", *args)
        case "/":
            return f"({real(args[0])} / {real(args[1])})"
        case "round":
            return f"int64_t(std::nearbyint({of(args[0])}))"
        case "gcd":
            return f"std::gcd(int64_t({of(args[0])}), int64_t({of(args[1])}))"
        case "either":
            side = real if node.is_float else of
            return f"({of(args[0])} ? {side(args[1])} : {side(args[2])})"
        case "cost" | "place":
            first, last, depth, body = args
            loop = f"[&](int64_t at{depth}) {{ return {of(body)}; }}"
            ends = (f"int64_t({of(end)})" if _is_wide(end) else of(end) for end in (first, last))
            return f"cheapest({', '.join(ends)}, {loop}).{op}"
    side = real if any(one.is_float for one in args) else of
    return f"({side(args[0])} {op} {side(args[1])})"


def _negated(node: Node) -> Node | None:
    """What a node is the negative of, if it is written so."""
    if node.op != "-" or node.args[0].op != "const" or node.args[0].args[0] != 0:
        return None
    found: Node = node.args[1]
    return found


def _narrowed(node: Node, text: str, *operands: Node) -> str:
    """Back to 64 bits where the operands were wider than the result."""
    was_wide = any(map(_is_wide, operands))
    return f"int64_t({text})" if was_wide and not _is_wide(node) else text


def value(given: object, constants: Constants) -> str:
    """A number, known or not, as C++ of 64 bits, into which the rules let it fit."""
    node = as_node(given)
    text = expression(node, constants)
    return f"int64_t({text})" if _is_wide(node) else text


LeafSource = Callable[[Leaf, Constants], list[str]]
"""Statements that a leaf becomes; the last one returns."""


def body(tree: Tree | None, leaf: LeafSource, constants: Constants, indent: int = 1) -> str:
    """A tree as statements; where nobody went it says so."""
    pad = "  " * indent
    if tree is None:
        return f"{pad}return unseen(why);\n"
    if isinstance(tree, Leaf):
        return "".join(f"{pad}{line}\n" for line in _leaf_lines(tree, leaf, constants))
    assert isinstance(tree, Branch)
    test = expression(tree.test, constants)
    test = test[1:-1] if test.startswith("(") else test
    yes = body(tree.yes, leaf, constants, indent + 1)
    if tree.yes is None or isinstance(tree.yes, Leaf) or tree.no is None:
        no = body(tree.no, leaf, constants, indent)
        return f"{pad}if ({test}) {{\n{yes}{pad}}}\n{no}"
    no = body(tree.no, leaf, constants, indent + 1)
    return f"{pad}if ({test}) {{\n{yes}{pad}}} else {{\n{no}{pad}}}\n"


SHORT = 3
"""Statements of a leaf that stand in the tree; longer ones are functions of their own."""


def _leaf_lines(tree: Leaf, leaf: LeafSource, constants: Constants) -> list[str]:
    own = Constants(constants.texts, constants.shared)
    lines = leaf(tree, own)
    if len(lines) <= SHORT:
        return leaf(tree, constants)
    name = constants.shared("".join(f"  {line}\n" for line in lines))
    numbers, fractions = len(constants.numbers), len(constants.fractions)
    constants.numbers += own.numbers
    constants.fractions += own.fractions
    return [f"return {name}(p, c + {numbers}, f + {fractions}, why, made);"]


def reason(leaf: Leaf, constants: Constants) -> list[str]:
    """A leaf of a rule: nothing is wrong, or what is, with its numbers filled in."""
    if leaf.value is None:
        return ["return true;"]
    said = []
    for part in pieces(leaf.value):
        said.append(constants.text(part) if isinstance(part, str) else value_of(part, constants))
    calls = "".join(
        f".{'text' if isinstance(part, str) else 'number'}({code})"
        for part, code in zip(pieces(leaf.value), said, strict=True)
    )
    return [f"if (why) Words(*why){calls};", "return false;"]


def value_of(node: Node, constants: Constants) -> str:
    return f"int64_t({expression(node, constants)})" if not node.is_float else "0"


@dataclass(frozen=True, slots=True)
class Row:
    """Which function serves, and where its numbers begin."""

    function: int
    numbers: int
    fractions: int


class Functions:
    """C++ functions of one kind, each written once; rows say who uses which with what numbers."""

    def __init__(self, prefix: str, parameters: str, texts: Texts) -> None:
        self.prefix, self.parameters, self.texts = prefix, parameters, texts
        self._bodies: dict[str, int] = {}
        self._leaves: dict[str, int] = {}
        self._numbers: list[int] = []
        self._fractions: list[float] = []
        self._places: dict[tuple[object, ...], int] = {}

    def add(self, tree: Tree | None, leaf: LeafSource) -> Row:
        """The row of a tree."""
        constants = Constants(self.texts, self._shared)
        text = body(tree, leaf, constants)
        function = self._bodies.setdefault(text, len(self._bodies))
        return Row(
            function,
            self._placed(tuple(constants.numbers), self._numbers),
            self._placed(tuple(constants.fractions), self._fractions),
        )

    def _shared(self, text: str) -> str:
        return f"{self.prefix}_leaf_{self._leaves.setdefault(text, len(self._leaves))}"

    def _placed(self, values: tuple[Any, ...], table: list[Any]) -> int:
        key = (id(table), *values)
        if key not in self._places:
            self._places[key] = len(table)
            table.extend(values)
        return self._places[key]

    def source(self) -> str:
        """The functions and their numbers."""
        name = self.prefix
        named = [(f"{name}_leaf_{at}", text) for text, at in self._leaves.items()]
        named += [(f"{name}_{at}", text) for text, at in self._bodies.items()]
        names = [parameter.split()[-1].lstrip("*") for parameter in self.parameters.split(",")]
        unused = f"  {', '.join(f'(void){one}' for one in names)};\n"
        parts = [f"bool {own}({self.parameters}) {{\n{unused}{text}}}\n" for own, text in named]
        listed = ", ".join(f"{name}_{at}" for at in range(len(self._bodies)))
        parts.append(f"constexpr decltype(&{name}_0) {name}_functions[] = {{{listed}}};\n")
        parts.append(array(f"constexpr int64_t {name}_numbers", self._numbers or [0]))
        parts.append(array(f"constexpr double {name}_fractions", self._fractions or [0.0]))
        return "\n".join(parts)


def array(declaration: str, values: Sequence[int | float]) -> str:
    """An array in lines of moderate length."""
    lines, line = [], ""
    for item in map(number, values):
        if len(line) + len(item) > 96:
            lines.append(line.rstrip())
            line = ""
        line += f"{item}, "
    lines.append(line.rstrip(", "))
    joined = "\n    ".join(lines)
    return f"{declaration}[] = {{\n    {joined}}};\n"


def rows_table(name: str, rows: Sequence[Row]) -> str:
    """Rows as an array of `Row`."""
    items = ", ".join(f"{{{r.function}, {r.numbers}, {r.fractions}}}" for r in rows)
    wrapped = items.replace("}, {", "},\n    {")
    return f"constexpr Row {name}[] = {{\n    {wrapped}}};\n"


def text_literal(text: str) -> str:
    """A C++ string literal; signs beyond ASCII by their bytes."""
    shown = "".join(
        f"\\{ch}" if ch in '\\"' else ch if " " <= ch <= "~" else _octal(ch) for ch in text
    )
    return f'"{shown}"'


def _octal(ch: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in ch.encode())
