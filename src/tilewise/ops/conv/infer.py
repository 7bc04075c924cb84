"""The convolution problem behind tensors and a layer's settings."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

from tilewise.core.tensors import TensorView, require_operand, view
from tilewise.errors import ProblemError, TensorError
from tilewise.ops.conv.problem import ConvProblem

Sizes = int | Sequence[int]
Padding = Sizes | str
"""One size for all dimensions or one each; "same" and "valid" as PyTorch means them."""
LayerSettings = tuple[Sizes, Padding, Sizes, int]
"""Stride, padding, dilation and groups as a caller gave them."""
MOST_STEPS = 2**31 - 1
"""Of a stride, padding or dilation: twice as much and a size fit in 64 bits."""
MOST_BYTES = 2**48
"""What processors address."""


def infer(x: Any, w: Any, **layer: Any) -> ConvProblem:
    """A convolution of x [N, C, ...] with w [K, C / groups, ...]; `layer` as in `from_shapes`."""
    a, b = view(x), view(w)
    if a.dtype != b.dtype:
        raise TensorError(f"x is {a.dtype} and w is {b.dtype}; convert one of them")
    require_operand(a.dtype)
    return from_shapes(a.shape, b.shape, dtype=a.dtype, layout=layout_of(a), **layer)


def from_shapes(
    x: tuple[int, ...],
    w: tuple[int, ...],
    *,
    dtype: str,
    layout: str,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    direction: str = "fwd",
) -> ConvProblem:
    """The problem of a layer with input [N, C, ...] and filter [K, C / groups, ...]."""
    rank = len(x) - 2
    if rank not in (1, 2, 3) or len(w) != rank + 2:
        raise TensorError(
            f"x has shape {tuple(x)} and w {tuple(w)}; pass [N, C, (D, (H,)) W] and "
            "[K, C / groups, (Z, (Y,)) X]"
        )
    groups = group_count(groups)
    check_groups(x[1], w[1], groups)
    dims = "dhw"[3 - rank :]
    values: dict[str, Any] = {"n": x[0], "c": x[1], "k": w[0], "g": groups}
    values |= dict(zip(dims, x[2:], strict=True))
    values |= dict(zip("zyx"[3 - rank :], w[2:], strict=True))
    layer = settings(w, rank, stride, padding, dilation)
    for name, sizes in zip(("stride", "pad", "dilation"), layer, strict=True):
        values |= {f"{name}_{dim}": size for dim, size in zip(dims, sizes, strict=True)}
    problem = ConvProblem(direction=direction, dtype=dtype, layout=layout, **values)
    check_addressable(problem.bytes)
    return problem


def named(stride: Sizes, padding: Padding, dilation: Sizes, groups: int) -> dict[str, Any]:
    """A layer's settings as `infer` and `from_shapes` take them."""
    return {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}


def check_addressable(size_bytes: int) -> None:
    """Raises where tensors of so many bytes cannot exist: beyond, sizes overflow unseen."""
    if size_bytes >= MOST_BYTES:
        raise ProblemError(
            f"the tensors take {size_bytes} bytes; {MOST_BYTES} are the most: pad less"
        )


def group_count(groups: Any) -> int:
    """`groups` as a plain integer; raises where it is none."""
    try:
        count = _integer(groups)
    except TypeError:
        count = 0
    if count < 1:
        raise TensorError(f"groups is {groups!r}; it must be an integer of at least 1")
    return count


def check_groups(given: int, each: int, groups: int) -> None:
    """Raises where the input's channels are not those of the filter in all groups."""
    if given != each * groups:
        raise TensorError(
            f"x has {given} channels; a filter over {each} channels in {groups} groups needs "
            f"{each * groups}"
        )


def tensor_sizes(name: str, given: Any) -> tuple[int, ...]:
    """The sizes of a layer's tensor as the caller gave them."""
    sizes = _listed(given)
    if len(sizes) not in (3, 4, 5):
        raise TensorError(
            f"{name} is {given!r}; pass a sequence of 3 to 5 integers, such as the tensor's shape"
        )
    return sizes


def settings(
    w: tuple[int, ...], rank: int, stride: Sizes, padding: Padding, dilation: Sizes
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Stride, padding and dilation of each dimension, for a filter of shape `w`."""
    steps, gaps = _sizes("stride", stride, rank), _sizes("dilation", dilation, rank)
    return steps, _pads(padding, w[2:], steps, gaps), gaps


def _sizes(name: str, given: Sizes, rank: int) -> tuple[int, ...]:
    """`given` once per dimension."""
    sizes = _once_each(name, given, rank)
    if max(sizes, default=0) > MOST_STEPS:
        raise ProblemError(f"{name} is {given!r}; the most is {MOST_STEPS}")
    return sizes


def _integer(given: Any) -> int:
    """`given` as an integer; True and False are none, as they are none to PyTorch."""
    if isinstance(given, bool):
        raise TypeError(given)
    return index(given)


def _once_each(name: str, given: Sizes, rank: int) -> tuple[int, ...]:
    try:
        return (_integer(given),) * rank
    except TypeError:
        sizes = _listed(given)
    if len(sizes) == 1:  # as PyTorch takes it
        return sizes * rank
    if len(sizes) != rank:
        raise ProblemError(f"{name} is {given!r}; pass one integer or {rank} of them")
    return sizes


def _listed(given: Any) -> tuple[int, ...]:
    """A sequence's integers; none where it is something else."""
    is_listed = isinstance(given, Sequence) or hasattr(given, "__array__")  # sets have no order
    if not is_listed or isinstance(given, bytes | bytearray):
        return ()
    try:
        return tuple(_integer(size) for size in given)
    except TypeError:
        return ()


def fixed(stride: Any, padding: Any, dilation: Any, groups: Any) -> LayerSettings | None:
    """Settings of plain integers and words, lists as tuples; None where one is something else.

    Only calls with such settings can be found again by them: 1.0 and True equal 1 and are none,
    and what counts as a number may be another one later, as a tensor's.
    """
    for one in (stride, padding, dilation, groups):
        kind = type(one)
        if kind is tuple or kind is list:
            for size in one:
                if type(size) is not int:
                    return None
        elif kind is not int and kind is not str:
            return None
    return (
        tuple(stride) if type(stride) is list else stride,
        tuple(padding) if type(padding) is list else padding,
        tuple(dilation) if type(dilation) is list else dilation,
        groups,
    )


def _pads(
    padding: Padding, taps: tuple[int, ...], steps: tuple[int, ...], gaps: tuple[int, ...]
) -> tuple[int, ...]:
    if not isinstance(padding, str):
        return _sizes("padding", padding, len(taps))
    if padding == "valid":
        return (0,) * len(taps)
    if padding != "same":
        raise ProblemError(f"padding is {padding!r}; pass sizes, 'same' or 'valid'")
    pads = []
    for tap, step, gap in zip(taps, steps, gaps, strict=True):
        total = gap * (tap - 1)
        if step != 1 or total % 2:
            raise ProblemError(
                f"padding 'same' needs stride 1 and as much on both sides, but a dimension has "
                f"stride {step} and {total} in all; pad the input and use sizes"
            )
        pads.append(total // 2)
    return tuple(pads)


def layout_of(seen: TensorView) -> str:
    """nhwc where channels alone are packed innermost, nchw otherwise."""
    return layout_by(seen.shape, seen.strides[1])


def layout_by(shape: Sequence[Any], channel_stride: Any) -> str:
    """The same of a tensor that may have no memory, by what decides it."""
    has_pixels = any(n > 1 for n in shape[2:])
    return "nhwc" if has_pixels and shape[1] > 1 and channel_stride == 1 else "nchw"


def misses_input(
    sizes: Sequence[int],
    taps: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
) -> bool:
    """Whether in some dimension every output reads padding alone, so that all sums are zero.

    There oneDNN reads beside its tensors in bf16 and ends the process (PyTorch 2.13; in fp32 and
    fp16 it does not): PyTorch is asked in fp32.
    """
    if min(*strides, *dilations) < 1:  # no layer at all
        return False
    dims = zip(sizes, taps, strides, pads, dilations, strict=True)
    return any(pad and not _meets(size, tap, step, pad, gap) for size, tap, step, pad, gap in dims)


def _meets(size: int, taps: int, step: int, pad: int, gap: int) -> bool:
    outputs = (size + 2 * pad - gap * (taps - 1) - 1) // step + 1
    for at in range(-pad, gap * taps - pad, gap):
        output = max(0, -(at // step))  # the first that this tap does not lead before the input
        if output < outputs and output * step + at < size:
            return True
    return False
