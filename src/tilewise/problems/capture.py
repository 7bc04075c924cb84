"""Capture: every convolution and matrix product that a running PyTorch program computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tilewise.core.problem import Problem
from tilewise.errors import ProblemError
from tilewise.ops.capturing import Reader
from tilewise.ops.contract import all_ops
from tilewise.problems.problem_set import Labels, ProblemSet


@dataclass(slots=True, kw_only=True)
class Captured(ProblemSet):
    """The problems seen so far; labels hold `count`, the `layer` first seen in, and `call`."""

    skipped: Counter[str] = field(default_factory=Counter)
    """What was computed but is no problem here, and how often."""
    _places: dict[Problem, Labels] = field(default_factory=dict)

    def record(self, problem: Problem, labels: Labels) -> None:
        """Counts one more run of a problem."""
        if problem.is_empty:
            return
        if problem not in self._places:
            self.add(problem, {**labels, "count": 0})
            self._places[problem] = self.labels[-1]
        self._places[problem]["count"] += 1


@contextmanager
def capture() -> Iterator[Captured]:
    """Records every convolution and matrix product, forward and backward, while it is open.

    >>> with tw.capture() as found:
    ...     model(x).sum().backward()

    Tensors may be on any device, also on `meta`, where a model of any size costs nothing.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.module_tracker import ModuleTracker

    captured = Captured()
    tracker = ModuleTracker()
    readers = _readers()

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            name = func.overloadpacket.__name__
            if func.namespace != "aten":
                name = f"{func.namespace}::{name}"
            if name in readers:
                layer = max(tracker.parents - {"Global"}, key=len, default="")
                labels = {"call": name, **({"layer": layer} if layer else {})}
                for problem in _problems(name, args, result, captured.skipped):
                    captured.record(problem, labels)
            elif name.startswith("_scaled_dot_product"):
                captured.skipped[f"{name}: attention fused into one call"] += 1
            return result

    # Backward on the calling thread: the recorder is bound to it.
    single_thread = torch.autograd.set_multithreading_enabled(False)
    with tracker, Recorder(), single_thread:  # type: ignore[no-untyped-call]
        yield captured


def _problems(
    name: str, args: Sequence[Any], result: Any, skipped: Counter[str]
) -> Iterator[Problem]:
    try:
        yield from _readers()[name](args, result)
    except ProblemError as error:
        skipped[f"{name}: {error}"] += 1


@cache
def _readers() -> dict[str, Reader]:
    """How each kernel-level call of PyTorch, or operator of tilewise, is read.

    Everything else is built on these.
    """
    return {name: r for op in all_ops().values() for name, r in op.problems.readers.items()}
