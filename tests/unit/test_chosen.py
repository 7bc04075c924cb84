"""What the shipped models choose, so that no change of code changes it unseen.

PYTHONPATH=src python tests/unit/test_chosen.py    writes the choices anew, where they should
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tilewise.core.model import Model, load_model
from tilewise.core.problem import Problem
from tilewise.dispatch import Dispatcher, Registry
from tilewise.engines import is_foreign
from tilewise.ops.contract import get_op
from tilewise.selection.models import SHIPPED
from tilewise.selection.opening import measured_kernels
from tilewise.selection.predictor import Predictor
from tilewise.selection.ranker import ModelRanker

FILE = Path(__file__).with_name("chosen.jsonl")
"""A model, a problem and the kernel taken for it in each line."""


def lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in FILE.read_text().splitlines()]


def choices(model: Model, problems: list[Problem]) -> Iterator[str]:
    """The kernels that a dispatcher takes; of a foreign library's, those that rank first."""
    kernels, arch = measured_kernels(model), model.trained_on
    if all(is_foreign(kernel.engine) for kernel in kernels):
        for problem in problems:
            legal = [k for k in kernels if get_op(model.op).why_unusable(k, problem, arch) is None]
            yield Predictor(model).rank_kernels(problem, legal)[0].kernel.name
        return
    registry = Registry(model.op, arch)
    registry.declare(kernels)
    dispatcher = Dispatcher(registry, rankers=[ModelRanker(model)])
    for problem in problems:
        yield dispatcher.select(problem).kernel.name


def chosen(name: str) -> list[str]:
    model = load_model(SHIPPED / name)
    made = [line["problem"] for line in lines() if line["model"] == name]
    return list(choices(model, [get_op(model.op).problem.from_dict(p) for p in made]))


@pytest.mark.parametrize("name", sorted(p.parent.name for p in SHIPPED.glob("*/manifest.json")))
def test_shipped_models_choose_what_they_chose(name: str) -> None:
    expected = [line["kernel"] for line in lines() if line["model"] == name]
    assert len(expected) >= 10
    assert chosen(name) == expected


def write() -> None:
    given = lines()
    found = {name: iter(chosen(name)) for name in dict.fromkeys(line["model"] for line in given)}
    made = [{**line, "kernel": next(found[line["model"]])} for line in given]
    FILE.write_text("".join(f"{json.dumps(line)}\n" for line in made))


if __name__ == "__main__":
    write()
