"""Predictions for a problem and kernels from a model folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tilewise.core.arch import Arch
from tilewise.core.compile_expr import Array
from tilewise.core.kernel import Kernel
from tilewise.core.model import Model
from tilewise.core.problem import Problem
from tilewise.errors import InputError, NoKernelError
from tilewise.ops.columns import pool_rows
from tilewise.selection.asking import asker
from tilewise.selection.choice import Ranked
from tilewise.selection.opening import open_model
from tilewise.selection.ranker import ModelRanker
from tilewise.selection.selector import why_foreign


class Predictor:
    """Predicts for any kernels how fast each will be, and ranks them."""

    def __init__(self, model: Model | Path | str, arch: Arch | None = None) -> None:
        self.model = model if isinstance(model, Model) else open_model(model)
        self.arch = self.model.figures_for(arch)
        self._ranker = ModelRanker(self.model)

    def rank_kernels(self, problem: Problem, kernels: Sequence[Kernel]) -> list[Ranked]:
        """The kernels, fastest first, with predicted times."""
        self._check(problem, kernels)
        return self._ranker.rank(problem, kernels, self.arch)

    def predict_latency(self, problem: Problem, kernels: Sequence[Kernel]) -> Array:
        """Microseconds, in the order given."""
        return self._absolute("latency", problem, kernels)

    def predict_tflops(self, problem: Problem, kernels: Sequence[Kernel]) -> Array:
        """TFLOP/s, in the order given."""
        return self._absolute("tflops", problem, kernels)

    def predict_bandwidth(self, problem: Problem, kernels: Sequence[Kernel]) -> Array:
        """GB/s, in the order given."""
        return self._absolute("bandwidth", problem, kernels)

    def _absolute(self, target: str, problem: Problem, kernels: Sequence[Kernel]) -> Array:
        """From the target's own forest where the model has one, else from the ranking's times."""
        self._check(problem, kernels)
        tactic = asker(self.model.features, kernels, self.arch)(problem)
        rows = pool_rows(self.model, kernels, self.arch, problem, tactic)
        if target in self.model.forests:
            return np.exp2(self.model.predict(target, rows))
        time_us = np.exp2(self.model.predict("level", rows) - self.model.scores(rows))
        amount = {
            "latency": time_us,
            "tflops": problem.flops / time_us * 1e-6,
            "bandwidth": problem.bytes / time_us * 1e-3,
        }
        return amount[target]

    def _check(self, problem: Problem, kernels: Sequence[Kernel]) -> None:
        why = why_foreign(self.model, problem, self.arch)
        if why is not None:
            raise InputError(why)
        if not kernels:
            raise NoKernelError("no kernels were given; there is nothing to predict")
        for kernel in kernels:
            if kernel.op != problem.op:
                raise InputError(f"{kernel.name} computes {kernel.op}, not {problem.op}")
