"""Packed tensors cut into tiles with channels across, and the launches of kernels over them."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

from tilewise.core.arch import Arch
from tilewise.ops.arguments import Collected
from tilewise.ops.launch import Argument, Pointer, Scratch, Source, Step

COLUMNS, ROWS, WARPS = 128, 32, 8
"""Of a tile; a thread has 16 elements."""
BLOCKS = 4
"""Of a compute unit, that a reduction is cut for."""
MOST_SLICES = 256
"""The second stage of a reduction reads them one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Of `samples` parts, each of so many `pixels`, channels innermost."""

    pixels: int
    channels: int
    samples: int = 1

    @property
    def fold(self) -> int:
        """How many pixels make a row of whole tiles."""
        return COLUMNS // gcd(COLUMNS, self.channels)

    @property
    def width(self) -> int:
        return self.fold * self.channels

    @property
    def columns(self) -> int:
        """Tiles beside each other."""
        return self.width // COLUMNS

    @property
    def tiles(self) -> int:
        """Tiles of a sample below each other."""
        return -(-self.pixels // (self.fold * ROWS))

    @property
    def all_tiles(self) -> int:
        """Those of all samples."""
        return self.samples * self.tiles

    def slices(self, arch: Arch) -> int:
        """Of a reduction."""
        wanted = -(-BLOCKS * arch.compute_units // self.columns)
        return max(1, min(self.all_tiles, wanted, MOST_SLICES))


class TileCall(Collected):
    """A kernel's arguments."""

    def tensor(self, name: str, kind: str, at: int | Scratch | None, by: int = 16) -> None:
        """The address of a tensor or of scratch memory, a multiple of `by` bytes; None for none."""
        if at is None or not kind:
            self.constants[name] = None
            return
        place = at if isinstance(at, Scratch) else Pointer(tensor=at)
        self.give(name, f"*{kind}", place, by)

    def numbers(self, kind: str = "i32", **values: Argument) -> None:
        for name, value in values.items():
            by = 16 if isinstance(value, int) and value % 16 == 0 else 1
            self.give(name, kind, value, by)

    def step(
        self,
        module: str,
        function: str,
        grid: tuple[int, ...],
        arch: Arch,
        *,
        warps: int = WARPS,
        stages: int = 2,
        **constants: Any,
    ) -> Step:
        """A launch of `function` with what has been given and these constants."""
        source = Source(
            module=module,
            function=function,
            signature=self.signature,
            constants=self.constants | constants,
            divisible=self.divisible,
            options={"num_warps": warps, "num_stages": stages},
        )
        x, y, *_ = (*grid, 1)
        threads = warps * arch.warp_size
        return Step(source=source, grid=(x, y, 1), threads=threads, arguments=tuple(self.values))
