"""What a model will have to compile, collected while PyTorch's routines run it once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


class Collector:
    """Sources of kernels; closed but for `tilewise.prepare`. Backward passes have other threads."""

    def __init__(self) -> None:
        self.is_open = False
        self._sources: list[Any] = []

    def add(self, sources: Iterable[Any]) -> None:
        """What would have been compiled now."""
        self._sources += sources

    @contextmanager
    def collect(self) -> Iterator[list[Any]]:
        """Lets nothing of ours compile or run until it is left; gives what is collected."""
        self._sources, self.is_open = [], True
        try:
            yield self._sources
        finally:
            self.is_open = False


COLLECTOR = Collector()


def clear(result: Tensor, *tensors: Tensor) -> None:
    """In place of a launch: nothing is computed, and nothing is left undefined."""
    result.zero_()
