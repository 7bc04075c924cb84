"""Convolutions by patches that do not overlap, read as smaller ones over the same memory.

With channels last, X neighbouring pixels of C channels are one pixel of X * C. Where the filter's
columns are the stride, unpadded, a line of patches is therefore a line of pixels, and its filter
has one column. Where a line is a single patch, lines follow each other the same way. Lines that the
filter takes whole are images of their own. Nothing moves; filters are read alike.
"""

from __future__ import annotations

from dataclasses import replace

from tilewise.ops.conv.problem import ConvProblem

DIMS = (("w", "x"), ("h", "y"), ("d", "z"))
"""Dimensions of images and of filters, innermost first."""


def reshaped(problem: ConvProblem) -> ConvProblem:
    """The convolution of fewer taps that is the same on the same memory; often the problem."""
    p = problem
    if p.g > 1 or p.taps == 1 or not _is_side_by_side(p, "w", "x") or p.is_empty:
        return p
    if all(_is_whole(p, dim, taps) for dim, taps in DIMS):
        return _product(p)  # whatever the layout: images and filters are rows of one order
    if p.layout != "nhwc":
        return p
    for dim, taps in DIMS:
        if not _is_side_by_side(p, dim, taps):
            break
        p = _in_channels(p, dim, taps)
        if getattr(p, dim) > 1:
            # Backward, a line is a parity of one tap; in an image of its own it would meet all.
            return p if p.direction == "bwd_data" else _by_images(p)
    return p


def _is_whole(p: ConvProblem, dim: str, taps: str) -> bool:
    """Whether the filter is as long as the image along `dim`, which it meets once."""
    size: int = getattr(p, dim)
    return size == getattr(p, taps) and _is_packed(p, dim, taps)


def _is_side_by_side(p: ConvProblem, dim: str, taps: str) -> bool:
    """Whether patches fill the image along `dim` without overlap or rest."""
    count: int = getattr(p, taps)
    is_tiled = getattr(p, f"stride_{dim}") == count and getattr(p, dim) % count == 0
    return _is_whole(p, dim, taps) or (is_tiled and _is_packed(p, dim, taps))


def _is_packed(p: ConvProblem, dim: str, taps: str) -> bool:
    is_dense = getattr(p, taps) == 1 or getattr(p, f"dilation_{dim}") == 1
    return bool(is_dense and getattr(p, f"pad_{dim}") == 0)


def _product(p: ConvProblem) -> ConvProblem:
    """Whole images times whole filters."""
    return ConvProblem(
        direction=p.direction,
        n=p.n,
        c=p.c * p.taps,
        k=p.k,
        w=1,
        x=1,
        dtype=p.dtype,
        out_dtype=p.out_dtype,
    )


def _in_channels(p: ConvProblem, dim: str, taps: str) -> ConvProblem:
    """A patch's extent along `dim` as channels."""
    count = getattr(p, taps)
    sizes = {dim: getattr(p, dim) // count, taps: 1, f"stride_{dim}": 1, f"dilation_{dim}": 1}
    return replace(p, c=p.c * count, **sizes)


def _by_images(p: ConvProblem) -> ConvProblem:
    """Lines that patches take whole as images, those of all depths behind each other."""
    is_flat = p.z == p.stride_d == 1 and p.pad_d == 0
    if p.y == 1 or not is_flat or not _is_side_by_side(p, "h", "y"):
        return p
    return replace(p, n=p.n * p.d * (p.h // p.y), d=1, h=p.y, stride_h=1, dilation_h=1)
