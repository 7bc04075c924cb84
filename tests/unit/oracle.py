"""A ranker that predicts what it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem


class Oracle:
    """Microseconds of kernels by their name, or by another trait."""

    path = "model"

    def __init__(self, us: Mapping[str, float], by: str = "name") -> None:
        self.us, self._by = us, by

    def why_unfit(self, problem: Problem, arch: Arch) -> str | None:
        return None

    def caveat(self, arch: Arch) -> str | None:
        return None

    def knows_vendor(self, kernel: Kernel) -> bool:
        return True

    def strange(self, kernels: Sequence[Kernel], arch: Arch) -> Any:
        return None

    def predict_us(self, problem: Problem, kernels: Sequence[Kernel], arch: Arch) -> Any:
        return np.array([self.us[getattr(kernel, self._by)] for kernel in kernels])

    def leaders_us(self, *_: Any) -> Any:
        return None
