"""Definitions that known words make shorter: what goes, what stays, and the same values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from synthetic import synthetic_problems

from tilewise.core.arch import load_arch
from tilewise.core.features import ARCH, KERNEL, PROBLEM, FeatureSet, Field, Rows, columns
from tilewise.core.model import load_model
from tilewise.core.simplify import simplified
from tilewise.ops.columns import pool_rows
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.fields import arch_values, kernel_values, problem_values
from tilewise.ops.roofline import Estimates
from tilewise.selection.models import SHIPPED

FIELDS = (
    Field(name="p_m"),
    Field(name="k_engine", words=("cpu", "triton", "vendor")),
    Field(name="a_kind", words=("cpu", "gpu")),
)


def made(source: str, **facts: str) -> str:
    """What is left of a definition where fields have one of the words given."""
    features = FeatureSet(FIELDS, {}, {"f": source})
    known = {name: frozenset(words.split()) for name, words in facts.items()}
    return simplified(features, known).features["f"]


@pytest.mark.parametrize(
    ("source", "left"),
    [
        ('p_m if a_kind == "gpu" else 2 * p_m', "p_m"),
        ('p_m if a_kind != "gpu" else 2 * p_m', "2 * p_m"),
        ('a_kind == "gpu"', "1.0"),
        ('not a_kind == "gpu"', "0.0"),
        ('k_engine == "cpu"', "0.0"),
        ('k_engine == "vendor"', "k_engine == 'vendor'"),
        ('k_engine in ["triton", "vendor"]', "1.0"),
        ('k_engine in ["cpu"]', "0.0"),
        ('k_engine not in ["cpu"]', "1.0"),
        ('k_engine in ["cpu", "triton"]', "k_engine in ['cpu', 'triton']"),
        ('p_m > 3 and k_engine == "cpu"', "0.0"),
        ('p_m > 3 or a_kind == "gpu"', "1.0"),
        ('p_m > 3 and a_kind == "gpu"', "p_m > 3"),
        ('p_m and a_kind == "gpu"', "p_m != 0.0"),
        ('p_m > 3 and p_m < 9 and a_kind == "gpu"', "p_m > 3 and p_m < 9"),
        ('1 if a_kind == "gpu" and k_engine != "cpu" else p_m', "1"),
        ("k_engine > 0", "k_engine > 0"),
        ("k_engine == 2", "k_engine == 2"),
        ("k_engine == p_m", "k_engine == p_m"),
        ('min(p_m, 3) if a_kind == "gpu" else 0', "min(p_m, 3)"),
    ],
)
def test_what_is_left(source: str, left: str) -> None:
    assert made(source, k_engine="triton vendor", a_kind="gpu") == left


@pytest.mark.parametrize("sign", ["==", "!="])
def test_a_word_that_a_field_does_not_know_equals_nothing(sign: str) -> None:
    features = FeatureSet(FIELDS, {}, {"f": f'k_engine {sign} "mine"'})
    rows = Rows({}, {"k_engine": np.array([0.0])}, {}, np.zeros(1, int), np.zeros(1, int))
    short = simplified(features, {"k_engine": frozenset({"mine"})})
    assert short.evaluate(rows, ["f"])["f"] == features.evaluate(rows, ["f"])["f"]


def test_a_helper_may_be_called_like_a_function() -> None:
    features = FeatureSet(FIELDS, {"min": 'a_kind == "gpu"'}, {"f": "min(p_m, 3) + min"})
    assert simplified(features, {"a_kind": frozenset({"gpu"})}).features["f"] == "min(p_m, 3) + 1.0"


def test_nothing_is_known_of_other_fields() -> None:
    source = 'p_m if a_kind == "gpu" else 2 * p_m'
    assert made(source, k_engine="cpu") == source


def test_settled_helpers_settle_what_uses_them() -> None:
    features = FeatureSet(
        FIELDS, {"is_gpu": 'a_kind == "gpu"', "own": "p_m * 3"}, {"f": "own if is_gpu else 0"}
    )
    left = simplified(features, {"a_kind": frozenset({"cpu"})})
    assert left.features["f"] == "0"
    assert left._needed(["f"]) == {"f"}
    assert features.helpers["is_gpu"] == 'a_kind == "gpu"'  # the original stays as it was


def test_one_part_of_a_junction_is_still_a_truth() -> None:
    features = FeatureSet(FIELDS, {}, {"f": 'p_m and a_kind == "gpu"'})
    rows = Rows({"p_m": np.array([0.0, 7.0])}, {}, {"a_kind": 2.0}, np.arange(2), np.zeros(2, int))
    for each in (features, simplified(features, {"a_kind": frozenset({"gpu"})})):
        assert each.evaluate(rows, ["f"])["f"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("folder", sorted(SHIPPED.iterdir()), ids=lambda path: path.name)
def test_shipped_definitions_keep_their_values(folder: Path) -> None:
    model = load_model(folder)
    names = model.manifest["kernels"]
    chosen = {*names[:: max(1, len(names) // 60)], *(n for n in names if "_vendor_" in n)}
    kernels = [get_op(model.op).kernel_from_name(n) for n in sorted(chosen)]
    arch = model.trained_on
    facts = {"k_engine": frozenset(k.engine for k in kernels), "a_kind": frozenset({arch.kind})}
    short = simplified(model.features, facts)
    names = list(model.features.expressions)
    served = model.forests["rank"].features
    if arch.kind == "gpu":  # what only CPU kernels have is gone
        assert len(short._needed(served)) < len(model.features._needed(served))
    for problem in synthetic_problems(model.op, model.dtypes[0], 5, seed=3):
        rows = pool_rows(model, kernels, arch, problem)
        before, after = model.features.evaluate(rows, names), short.evaluate(rows, names)
        for name in names:
            assert np.array_equal(before[name], after[name], equal_nan=True), name


@pytest.mark.parametrize(("op", "name"), [("gemm", "x86_avx512"), ("conv_fwd", "sm_90")])
def test_estimates_are_those_of_the_whole_definitions(op: str, name: str) -> None:
    """They are worked out by what the kernels' engines and the device leave of them."""
    arch, features = load_arch(name), get_op(op).features
    kernels = load_pool(get_op(op), arch)[::20]
    for problem in synthetic_problems(op, "fp32" if arch.kind == "cpu" else "bf16", 5, seed=4):
        figures = columns(features.fields_of(ARCH), [arch_values(arch)])
        rows = Rows(
            columns(features.fields_of(PROBLEM), [problem_values(problem)]),
            columns(features.fields_of(KERNEL), [kernel_values(k) for k in kernels]),
            {name: float(value[0]) for name, value in figures.items()},
            np.zeros(len(kernels), np.int64),
            np.arange(len(kernels)),
        )
        asked = "estimate_us" if "estimate_us" in features.helpers else "analytic_us"
        whole = features.evaluate(rows, [asked])
        assert Estimates(op, kernels)(problem, arch).tolist() == whole[asked].tolist()
