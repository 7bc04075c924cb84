"""Expressions from anywhere are refused or evaluated, in the same way in NumPy and in C's words."""

from __future__ import annotations

import re

import numpy as np
from fuzzing import fuzz
from hypothesis import strategies as st

from tilewise.core.compile_expr import evaluate, to_c
from tilewise.core.expressions import FUNCTIONS, parse
from tilewise.errors import ExpressionError

FIELDS = ("p_m", "k_tile", "p_layout")
WORDS = {"p_layout": ("rcr", "rrr")}
_leaf = st.sampled_from(
    [*FIELDS, "1", "0", "1e999", "-2.5", "10**400", "'rcr'", "['rcr', -1]", "True", "None", "x y"]
) | st.text(max_size=3)
_infix = st.sampled_from(
    ["+", "-", "*", "/", "//", "%", "**", "<", "==", "!=", " in ", " and ", " or ", " if 1 else "]
)


def _grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return (
        st.builds("({}{}{})".format, inner, _infix, inner)
        | st.builds("({}{})".format, st.sampled_from(["-", "not ", "+", "~"]), inner)
        | st.builds("{}({}, {})".format, st.sampled_from(list(FUNCTIONS)), inner, inner)
        | st.builds("{}({})".format, st.sampled_from(list(FUNCTIONS)), inner)
    )


expressions = st.recursive(_leaf, _grown, max_leaves=8)
C_TOKEN = re.compile(r"[\s(),?:!<>=&|+*/-]|[a-z]\w*|\d+(\.\d+)?(e[+-]?\d+)?", re.ASCII)


@fuzz(150, source=expressions)
def test_an_expression_is_refused_or_has_a_value(source: str) -> None:
    try:
        found = parse(source, FIELDS)
        found({"p_m": 8, "k_tile": 3.5, "p_layout": "rcr"})
    except ExpressionError:
        return


@fuzz(150, source=expressions)
def test_only_names_and_numbers_enter_c(source: str) -> None:
    """What `to_c` writes is made of its own names, numbers and signs, nothing else."""
    try:
        found = parse(source, FIELDS)
        text = to_c(found, {name: f"x_{name}" for name in FIELDS}, WORDS)
    except ExpressionError:
        return
    assert C_TOKEN.sub("", text) == ""
    values = {name: np.array([4.0]) for name in FIELDS}
    assert evaluate(found, values, WORDS).size == 1
