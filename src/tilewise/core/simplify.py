"""Feature sets made shorter by what is known of their fields.

Definitions serve every kind of device and kernel, and tell them apart by comparing words. Where
the words are known beforehand, such comparisons are settled and what stood behind the others goes.
Values stay the same, bit for bit.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from tilewise.core.features import FeatureSet

Facts = Mapping[str, frozenset[str]]
"""Text fields and the words each can have."""


def simplified(features: FeatureSet, facts: Facts) -> FeatureSet:
    """The same names and values where the facts hold."""
    settled: dict[str, float] = {}
    made: dict[str, str] = {}
    settle = _Settle(facts, settled, features.words)
    for name, expression in features.expressions.items():
        made[name] = expression.source
        if expression.fields.isdisjoint(facts) and expression.fields.isdisjoint(settled):
            continue
        # Parsed anew: a transformer changes the tree it is given.
        tree = settle.visit(ast.parse(expression.source, mode="eval").body)
        if (value := _number(tree)) is not None:
            settled[name] = value
        made[name] = ast.unparse(tree)
    return FeatureSet(
        features.fields,
        {name: made[name] for name in features.helpers},
        {name: made[name] for name in features.features},
    )


class _Settle(ast.NodeTransformer):
    """Settles comparisons of words, and what hangs on them; arithmetic is left alone."""

    def __init__(
        self, facts: Facts, settled: Mapping[str, float], words: Mapping[str, tuple[str, ...]]
    ) -> None:
        self._facts, self._settled, self._words = facts, settled, words

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._settled[node.id]) if node.id in self._settled else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        node.args = [self.visit(argument) for argument in node.args]  # not the function's name
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        answer = self._answer(node)
        if answer is not None:
            return ast.Constant(float(answer))
        self.generic_visit(node)
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        value = _number(node.operand)
        is_settled = isinstance(node.op, ast.Not) and value is not None
        return ast.Constant(float(not value)) if is_settled else node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        decides = isinstance(node.op, ast.Or)
        values = [_number(part) for part in node.values]
        if any(v is not None and bool(v) is decides for v in values):
            return ast.Constant(float(decides))
        node.values = [p for p, v in zip(node.values, values, strict=True) if v is None]
        if not node.values:
            return ast.Constant(float(not decides))
        if len(node.values) > 1:
            return node
        # The truth of a part, which need not be 0 or 1 itself.
        (only,) = node.values
        is_truth = isinstance(only, ast.Compare | ast.BoolOp)
        return only if is_truth else ast.Compare(only, [ast.NotEq()], [ast.Constant(0.0)])

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        node.test = self.visit(node.test)
        value = _number(node.test)
        if value is None:
            node.body, node.orelse = self.visit(node.body), self.visit(node.orelse)
            return node
        left: ast.expr = self.visit(node.body if value else node.orelse)
        return left

    def _answer(self, node: ast.Compare) -> bool | None:
        """Whether a field has a word, where that is known."""
        if len(node.ops) != 1 or not isinstance(node.left, ast.Name):
            return None
        possible = self._facts.get(node.left.id)
        op, right = node.ops[0], node.comparators[0]
        parts = right.elts if isinstance(right, ast.List | ast.Tuple) else [right]
        asked = [p.value for p in parts if isinstance(p, ast.Constant) and type(p.value) is str]
        is_of_words = isinstance(op, ast.Eq | ast.NotEq | ast.In | ast.NotIn)
        if possible is None or not is_of_words or len(asked) != len(parts):
            return None
        # A word that the field does not know equals nothing, not even itself.
        words = set(asked) & set(self._words.get(node.left.id, ()))
        if possible <= words:
            return isinstance(op, ast.Eq | ast.In)
        return isinstance(op, ast.NotEq | ast.NotIn) if possible.isdisjoint(words) else None


def _number(node: ast.expr) -> float | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    return None
