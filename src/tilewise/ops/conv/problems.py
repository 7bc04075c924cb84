"""Which convolutions are worth looking at: families, edges, buckets, and how files say them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from tilewise.ops.buckets import INTENSITY, Buckets, by_alignment, by_size, excluded
from tilewise.ops.contract import Problems
from tilewise.ops.conv.capture import READERS
from tilewise.ops.conv.commands import COMMANDS
from tilewise.ops.conv.families import FAMILIES, LARGEST, uniform
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.draws import BESIDE_TILES, PRIMES, TINY, Fields, scaled


def _edges() -> Iterator[tuple[str, Fields]]:
    yield from _conv_sizes()
    yield from _conv_filters()
    yield from _conv_groups()
    yield from _conv_dimensions()


def _layer(c: int = 64, k: int = 64, size: int = 14, taps: int = 3, **more: Any) -> dict[str, Any]:
    """A plain padded 2-D layer with some fields changed."""
    base = {"n": 2, "c": c, "k": k, "h": size, "w": size, "y": taps, "x": taps}
    return {**base, "pad_h": taps // 2, "pad_w": taps // 2, **more}


def _conv_sizes() -> Iterator[tuple[str, Fields]]:
    for taps in (1, 3):
        for c, k in product(TINY, repeat=2):
            yield "tiny_channels", _layer(c, k, taps=taps)
        for value in (1, *PRIMES, *BESIDE_TILES):
            yield "edge_c", _layer(c=value, taps=taps)
            yield "edge_k", _layer(k=value, taps=taps)
        for n in (1, 3, 7, 31, 33):
            yield "edge_n", _layer(taps=taps, n=n)
        for h, w in product((1, 2, 3, 5, 7, 13, 31, 33, 65), repeat=2):
            yield "edge_image", _layer(taps=taps, h=h, w=w)


def _conv_filters() -> Iterator[tuple[str, Fields]]:
    for y, x in product((1, 2, 3, 4, 5, 7), repeat=2):
        yield "filter", _layer(y=y, x=x, pad_h=y // 2, pad_w=x // 2)
        yield "filter_unpadded", _layer(y=y, x=x, pad_h=0, pad_w=0)
    for size in (1, 2, 3, 5, 7, 14):
        yield "filter_is_image", _layer(size=size, taps=size, pad_h=0, pad_w=0)
    for taps, stride in product((1, 2, 3, 5), (2, 3, 4, 5, 16)):
        yield "stride", _layer(taps=taps, stride_h=stride, stride_w=stride)
    for h, w in ((1, 2), (2, 1), (3, 1)):
        yield "uneven_stride", _layer(stride_h=h, stride_w=w)
    for dilation in (2, 3, 5, 6):
        for pad in (0, 1, dilation):
            yield "dilation", _layer(dilation_h=dilation, dilation_w=dilation, pad_h=pad, pad_w=pad)
    for pad in (2, 3, 7):
        yield "wide_padding", _layer(pad_h=pad, pad_w=pad)
        yield "padded_pointwise", _layer(taps=1, pad_h=pad, pad_w=pad)
    yield "exact_reach", _layer(size=13, dilation_h=6, dilation_w=6, pad_h=0, pad_w=0)


def _conv_groups() -> Iterator[tuple[str, Fields]]:
    for taps, stride in ((1, 1), (3, 1), (3, 2), (5, 1), (7, 1)):
        steps = {"stride_h": stride, "stride_w": stride}
        for g in (2, 3, 7, 8, 32, 33):
            for per_c, per_k in ((1, 1), (1, 2), (1, 7), (2, 1), (3, 5), (4, 4), (17, 8), (8, 1)):
                name = "depthwise" if per_c == 1 else "grouped"
                yield name, _layer(g * per_c, g * per_k, taps=taps, g=g, **steps)


def _conv_dimensions() -> Iterator[tuple[str, Fields]]:
    for w, x, stride in product((1, 7, 100, 1021), (1, 2, 3, 9), (1, 2, 3)):
        for c in (1, 3, 64):
            yield "one_d", {
                "n": 2, "c": c, "k": 32, "w": w, "x": x, "stride_w": stride, "pad_w": x // 2,
            }  # fmt: skip
    for d, z, stride in product((1, 2, 5, 16), (1, 2, 3), (1, 2)):
        deep = {"d": d, "z": z, "pad_d": z // 2, "stride_d": stride}
        for c, g in ((3, 1), (32, 1), (32, 4), (32, 32)):
            yield "three_d", _layer(c, 32, size=9, g=g, **deep)


def _kind(p: ConvProblem) -> str:
    return "depthwise" if p.is_depthwise else "dense" if p.g == 1 else "grouped"


def _filter(p: ConvProblem) -> str:
    largest = max(p.z, p.y, p.x)
    return "1" if p.taps == 1 else "3" if largest == 3 else "2" if largest == 2 else "5 and more"


_AXES = (
    Buckets(name="dimensions", buckets=("1", "2", "3"), bucket=lambda p: str(p.ndim)),
    Buckets(name="kind", buckets=("dense", "grouped", "depthwise"), bucket=_kind),
    Buckets(name="filter", buckets=("1", "2", "3", "5 and more"), bucket=_filter),
    by_size("stride", lambda p: max(p.stride_d, p.stride_h, p.stride_w), 2),
    by_size("dilation", lambda p: max(p.dilation_d, p.dilation_h, p.dilation_w), 2),
    by_size("N", lambda p: p.n, 2, 8, 32),
    by_size("C", lambda p: p.c, 8, 64, 256, 1024),
    by_size("K", lambda p: p.k, 8, 64, 256, 1024),
    by_size("image", lambda p: max(p.h, p.w), 8, 32, 128),
    by_alignment("C/G alignment", lambda p: p.c // p.g),
    by_alignment("K/G alignment", lambda p: p.k // p.g),
    INTENSITY,
)
_EXCLUDED = frozenset(
    excluded("C", "<8", "C/G alignment", "x64", "x8")
    + excluded("C", "8-63", "C/G alignment", "x64")
    + excluded("K", "<8", "K/G alignment", "x64", "x8")
    + excluded("K", "8-63", "K/G alignment", "x64")
    + excluded("kind", "depthwise", "C/G alignment", "x64", "x8", "x2")
    # A single tap has nothing to spread.
    + excluded("dilation", ">=2", "filter", "1")
)

_ALIASES: dict[str, tuple[str, ...]] = {
    "batch": ("N",),
    "batchsize": ("N",),
    "batch_size": ("N",),
    "in_channels": ("C",),
    "out_channels": ("K",),
    "groups": ("G",),
    "group_count": ("G",),
    "in_d": ("Di",),
    "in_h": ("Hi",),
    "in_w": ("Wi",),
    "fil_d": ("Z",),
    "fil_h": ("Y",),
    "fil_w": ("X",),
    "kernel_d": ("Z",),
    "kernel_h": ("Y",),
    "kernel_w": ("X",),
    **{f"conv_stride_{dim}": (f"stride_{dim}",) for dim in "dhw"},
    **{f"padding_{dim}": (f"pad_{dim}",) for dim in "dhw"},
    "stride": ("stride_h", "stride_w"),
    "pad": ("pad_h", "pad_w"),
    "padding": ("pad_h", "pad_w"),
    "dilation": ("dilation_h", "dilation_w"),
}
_LAYOUT_ALIASES = {
    **dict.fromkeys(("nwc", "ndhwc", "nhwgc", "ndhwgc", "nwgc"), "nhwc"),
    **dict.fromkeys(("ncw", "ncdhw", "ngchw", "ngcdhw", "ngcw"), "nchw"),
}
_DIRECTION_ALIASES = {
    "forward": "fwd",
    "backward_data": "bwd_data",
    "bwd": "bwd_data",
    "backward_weight": "bwd_weight",
    "wrw": "bwd_weight",
}


def _shape(p: ConvProblem) -> str:
    kinds = {
        "depthwise": p.is_depthwise,
        "grouped": p.g > 1,
        "3-D": p.d > 1 or p.z > 1,
        "1-D": p.h == 1 and p.y == 1,
        "dilated": max(p.dilation_d, p.dilation_h, p.dilation_w) > 1,
        "strided": max(p.stride_d, p.stride_h, p.stride_w) > 1,
        "pointwise": p.taps == 1,
    }
    return next((name for name, fits in kinds.items() if fits), "dense")


def _scaled(values: Fields, name: str, factor: float) -> dict[str, int]:
    """Channels of a grouped layer: of a depthwise one the groups grow, else the groups' width."""
    c, k, g = values["c"], values["k"], values["g"]
    if name not in ("c", "k") or g == 1:
        return scaled(values, name, factor)
    if c == g:
        groups = max(2, round(g * factor))
        groups = max(8, groups - groups % 8) if g % 8 == 0 else groups
        return {"c": groups, "g": groups, "k": k // g * groups}
    return {name: g * scaled({name: values[name] // g}, name, factor)[name]}


def _brief(problem: ConvProblem) -> dict[str, Any]:
    """An image of 56 x 56 is one word."""
    values = problem.to_dict()
    dims = "dhw"[3 - problem.ndim :]
    sizes = {"image": [values[f"{dim.upper()}i"] for dim in dims]}
    sizes["filter"] = [values["zyx"["dhw".index(dim)].upper()] for dim in dims]
    for what in ("stride", "pad", "dilation"):
        sizes[what] = [values[f"{what}_{dim}"] for dim in dims]
    head = {key: values[key] for key in ("op", "dtype", "layout", "N", "C", "K", "G")}
    return {**head, **{key: _by(extents) for key, extents in sizes.items()}}


def _by(extents: list[int]) -> str:
    """`3`, or `1x7` where the sides differ."""
    return str(extents[0]) if len(set(extents)) == 1 else "x".join(map(str, extents))


PROBLEMS = Problems(
    families=FAMILIES,
    uniform=uniform,
    largest=LARGEST,
    edges=_edges,
    sizes=("n", "c", "k", "d", "h", "w"),
    scaled=_scaled,
    axes=_AXES,
    excluded=_EXCLUDED,
    aliases=_ALIASES,
    words={"layout": _LAYOUT_ALIASES, "direction": _DIRECTION_ALIASES},
    # A 2-D layer without its height would be another, 1-D one.
    never_empty=frozenset({"Hi", "Y"}),
    shape=_shape,
    slices={
        "direction": lambda p: str(p.direction),
        "filter": lambda p: f"{p.z}x{p.y}x{p.x}",
        "stride": lambda p: str(max(p.stride_d, p.stride_h, p.stride_w)),
    },
    columns=(
        *("N", "C", "K", "G", "Di", "Hi", "Wi", "Z", "Y", "X"),
        *("stride_d", "stride_h", "stride_w", "pad_d", "pad_h", "pad_w"),
        *("dilation_d", "dilation_h", "dilation_w"),
    ),
    rates=("latency_ms", "tflops", "non_zero"),
    brief=_brief,
    readers=READERS,
    commands=COMMANDS,
)
