"""CUDA kernels for small groups of any count of channels, which they pad to 16, 32 or 64."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.core.arch import Arch
from tilewise.core.kernel import trait
from tilewise.core.sizes import either, gcd
from tilewise.ops.conv.kernels.few_channels import why_not_tma, why_not_typed
from tilewise.ops.conv.kernels.grouped import (
    CHANNELS,
    ROWS,
    GroupedConvKernel,
    Slots,
    read_group,
    why_not_side_by_side,
    why_not_sized,
    written_group,
)
from tilewise.ops.conv.problem import ConvProblem

CHUNK = 8
"""Channels whose multiples TMA copies."""
SLOTS = (16, 32, 64)
"""Channels of a slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedConvKernel(GroupedConvKernel):
    """A kernel for small groups whose channels TMA pads with zeros, and clips when it stores.

    As many groups as have a multiple of 8 channels are a unit; units take 16, 32 or 64 channels
    of shared memory each. Groups of a unit share products: there an Inf or NaN spreads to the
    others of its unit, and `spreads_nonfinite` says so.
    """

    family: str = trait("", ("padded",))

    def slots(self, problem: ConvProblem) -> Slots:
        merged = merged_groups(problem)
        read, wide = merged * read_group(problem), merged * written_group(problem)
        written = _slot(wide)
        units = CHANNELS // written
        return Slots(
            *(read, wide, _slot(read), written),
            columns=-(-problem.g // (merged * units)),
            units=units,
            merged=merged,
        )


def merged_groups(p: ConvProblem) -> int:
    """Groups of a unit, whose channels read and written are multiples of 8."""
    counts = read_group(p), written_group(p)
    # Of powers of two the largest is the least common multiple.
    merged: int = max(CHUNK // gcd(CHUNK, count) for count in counts)
    return merged


def _slot(channels: int) -> int:
    small, middle, large = SLOTS
    # Not questions: every answer would be a way of its own through an exported rule.
    slot: int = either(channels <= small, small, either(channels <= middle, middle, large))
    return slot


def why_unusable(kernel: PaddedConvKernel, problem: ConvProblem | None, arch: Arch) -> str | None:
    """The first rule that keeps `kernel` from `problem` on `arch`, or None."""
    reason = why_not_tma(arch)
    if reason or problem is None:
        return reason
    return (
        why_not_typed(kernel, problem)
        or _why_not_meant(kernel, problem)
        or why_not_sized(kernel, problem, arch)
    )


def _why_not_meant(k: PaddedConvKernel, p: ConvProblem) -> str | None:
    if p.g < 2 or why_not_side_by_side(p) is None:
        return "it is for groups that cannot lie side by side"
    if p.ndim > 2:
        return "it is for images"
    merged = merged_groups(p)
    if p.g % merged:
        return f"{p.g} groups are no whole units of {merged}"
    most = merged * max(read_group(p), written_group(p))
    if not ROWS <= most <= CHANNELS:
        return f"units have {most} channels; it is for {ROWS} to {CHANNELS}"
    if k.spreads_nonfinite != (merged > 1):
        return f"units of {merged} {'groups share' if merged > 1 else 'need no'} products"
    return None
