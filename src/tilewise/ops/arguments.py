"""What launches of GPU kernels have in common: collected arguments, and activations."""

from __future__ import annotations

from typing import Any

from tilewise.errors import InputError
from tilewise.ops.launch import Argument

ACTIVATIONS = ("none", "relu", "gelu", "silu")


def check_activation(name: str) -> None:
    """Raises where no epilogue has it."""
    if name not in ACTIVATIONS:
        raise InputError(f"activation is {name!r}; use one of {ACTIVATIONS}")


class Collected:
    """A Triton kernel's arguments in its order: passed ones with type and value, or constants."""

    def __init__(self) -> None:
        self.signature: dict[str, str] = {}
        self.constants: dict[str, Any] = {}
        self.divisible: dict[str, int] = {}
        self.values: list[Argument] = []

    def give(self, name: str, kind: str, value: Any, divisible: int = 1) -> None:
        """Passes a value that is a multiple of `divisible`."""
        self.signature[name] = kind
        self.values.append(value)
        if divisible > 1:
            self.divisible[name] = divisible
