"""Scores a pool of kernels for a problem: compiled where there is a compiler, else in NumPy.

What depends on the kernels alone is computed once, when a pool is prepared; a selection fills in
the problem's side. Both ways give the same scores, bit for bit, and so the same ranking.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from tilewise.core.arch import Arch
from tilewise.core.features import PROBLEM, Rows, columns
from tilewise.core.kernel import Kernel
from tilewise.core.model import Model
from tilewise.core.problem import Problem
from tilewise.core.simplify import Facts
from tilewise.engines.device import detect
from tilewise.engines.toolchain import Unit, library_of
from tilewise.errors import BuildError
from tilewise.notices import warn_once
from tilewise.ops.columns import arch_columns, kernel_columns
from tilewise.ops.fields import problem_values
from tilewise.selection.asking import asker
from tilewise.selection.choice import Scores
from tilewise.selection.codegen import Layout
from tilewise.selection.compiled import CompiledScorer
from tilewise.selection.scorer_source import INCLUDE, scorer_source

_CPU_FLAGS = {
    "avx512bw": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"),
    "avx2": ("-mavx2", "-mfma"),
}
# Contraction would round differently from NumPy.
_FLAGS = ("-O3", "-ffp-contract=off", "-fno-trapping-math", "-fno-strict-aliasing")


class NumpyScorer:
    """The same scores without a compiler; slower."""

    def __init__(self, model: Model, kernels: Sequence[Kernel], arch: Arch) -> None:
        self.model, self.kernels, self.arch = model, tuple(kernels), arch
        self._kernels = kernel_columns(model, kernels)
        self._arch = arch_columns(model.features, arch)
        self._handicap = model.handicaps(kernels)
        self._tactic = asker(model.features, kernels, arch)

    def rows(self, problem: Problem) -> Rows:
        fields = self.model.features.fields_of(PROBLEM)
        return Rows(
            columns(fields, [problem_values(problem, self._tactic(problem))]),
            self._kernels,
            self._arch,
            np.zeros(len(self.kernels), np.int64),
            np.arange(len(self.kernels)),
        )

    def level(self, problem: Problem) -> float:
        """What turns scores into times."""
        return float(self.model.predict("level", self.rows(problem).only(slice(1)))[0])

    can_lead = False
    """Whether `lead` spares anything."""

    def is_near(self, problem: Problem, reach: float) -> bool:
        """Whether a measured problem lies within so many octaves."""
        return self.nearest(problem)[0] <= reach

    def nearest(self, problem: Problem) -> tuple[float, int]:
        """Octaves to the nearest measured problem, and which that is."""
        axes = self.model.measured.axes
        found = self.model.features.evaluate(self.rows(problem).only(slice(1)), axes)
        here = np.array([found[a][0] for a in axes])
        step = self.model.measured.points - here
        far = np.zeros(len(step))
        for j in range(len(axes)):
            far = far + step[:, j] * step[:, j]
        which = int(np.argmin(far))
        return float(np.sqrt(far[which])), which

    def __call__(self, problem: Problem) -> Scores:
        rows = self.rows(problem)
        score = self.model.scores(rows)
        if "valid" in self.model.forests:
            score = np.where(self.model.predict("valid", rows) < 0, score - 1000.0, score)
        score = score - self._handicap
        order = np.argsort(-score, kind="stable").astype(np.int32)
        return Scores(order, score, self.level(problem))


Scorer = CompiledScorer | NumpyScorer


def make_scorer(
    model: Model, kernels: Sequence[Kernel], arch: Arch, *, compiled: bool | None = None
) -> Scorer:
    """The compiled scorer, or NumPy's where none can be compiled; `compiled` insists on one."""
    if compiled is not False and kernels:
        layout = Layout(model, facts_of(kernels, arch))
        try:
            return CompiledScorer(layout, kernels, arch, _compiled(layout))
        except BuildError as error:  # no compiler, or a cache folder that is full, for example
            if compiled:
                raise
            line = (error.log or str(error)).splitlines()[0]
            warn_once(f"selection falls back to NumPy, which is slower: {line}", why=line)
    return NumpyScorer(model, kernels, arch)


def facts_of(kernels: Sequence[Kernel], arch: Arch) -> Facts:
    """What spares most of the features and is the same for most pools: few scorers are compiled."""
    engines = frozenset(kernel.engine for kernel in kernels)
    return {"k_engine": engines, "a_kind": frozenset({arch.kind})}


def _compiled(layout: Layout) -> ctypes.CDLL:
    unit = Unit(
        source=scorer_source(layout),
        flags=(*_FLAGS, *_isa_flags()),
        include_dirs=(INCLUDE,),
    )
    # Holding the interpreter's lock is cheaper than giving it back for a few microseconds.
    return library_of(unit, "the scorer", "tw_rank", kind=ctypes.PyDLL)


def _isa_flags() -> tuple[str, ...]:
    arch = detect("cpu")
    if arch.has("avx512bw"):
        return _CPU_FLAGS["avx512bw"]
    return _CPU_FLAGS["avx2"] if arch.has("avx2") else ()
