"""A tiny language in which networks are written down: features flow, layers are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tilewise.errors import InputError, ProblemError

Sizes = int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Feature:
    """What flows between layers: channels over an image of one, two or three dimensions."""

    channels: int
    size: tuple[int, ...]
    is_input: bool = False
    """Whether it enters the network, and so needs no gradient."""

    @property
    def pixels(self) -> int:
        count = 1
        for extent in self.size:
            count *= extent
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One recorded layer: the fields of its problem, and what it is called."""

    name: str
    fields: dict[str, Any]
    ops: tuple[str, ...]
    """What it computes, forward and in training."""
    is_first: bool = False
    """Whether it reads the network's input: no gradient flows further back."""
    is_frozen: bool = False
    """Whether training leaves it alone: it runs forward only."""
    is_transposed: bool = False
    """Whether its forward pass is the backward-data op of its fields."""
    has_weights: bool = True
    times: int = 1


@dataclass(slots=True, kw_only=True)
class Net:
    """The network being written: its scale, and the layers so far."""

    batch: int
    size: int
    """Of the square input image, in pixels."""
    tokens: int
    """Of a sequence; with `is_decoding` those already cached."""
    is_decoding: bool = False
    """Whether every sequence adds a single token."""
    layers: list[Layer] = field(default_factory=list)
    _scope: list[str] = field(default_factory=list)
    _times: int = 1
    _is_frozen: bool = False

    @contextmanager
    def at(self, name: str, *, times: int = 1, frozen: bool = False) -> Iterator[None]:
        """Layers inside are called `name.…`, run `times` as often, and may be frozen."""
        before = self._times, self._is_frozen
        self._scope.append(name)
        self._times *= times
        self._is_frozen |= frozen
        try:
            yield
        finally:
            self._scope.pop()
            self._times, self._is_frozen = before

    def image(self, channels: int = 3, *size: int) -> Feature:
        """The network's input."""
        return Feature(channels, size or (self.size, self.size), is_input=True)

    def conv(
        self,
        name: str,
        x: Feature,
        channels: int,
        taps: Sizes = 1,
        *,
        stride: Sizes = 1,
        pad: Sizes | None = None,
        dilation: int = 1,
        groups: int = 1,
        transposed: bool = False,
    ) -> Feature:
        """A convolution; unless `pad` is given it keeps the image's size at stride one."""
        rank = len(x.size)
        taps_, strides = _spread(taps, rank), _spread(stride, rank)
        pads = _spread(pad, rank) if pad is not None else tuple(dilation * (t // 2) for t in taps_)
        out = tuple(
            s * each if transposed else _outputs(self._name(name), s, t, each, p, dilation)
            for s, t, each, p in zip(x.size, taps_, strides, pads, strict=True)
        )
        y = Feature(channels, out)
        large, small = (y, x) if transposed else (x, y)
        fields: dict[str, Any] = {"c": large.channels, "k": small.channels, "g": groups}
        dims, filter_dims = "dhw"[3 - rank :], "zyx"[3 - rank :]
        for at, (dim, filter_dim) in enumerate(zip(dims, filter_dims, strict=True)):
            fields |= {dim: large.size[at], filter_dim: taps_[at]}
            fields |= {f"stride_{dim}": strides[at], f"pad_{dim}": pads[at]}
            fields |= {f"dilation_{dim}": dilation}
        # Nobody asks for the gradient of the network's input.
        ops = ("conv_fwd", "conv_bwd_weight", *(() if x.is_input else ("conv_bwd_data",)))
        facts = {"is_first": x.is_input, "is_transposed": transposed}
        self._record(name, {"n": self.batch, **fields}, ops=ops, **facts)
        return y

    def depthwise(self, name: str, x: Feature, taps: Sizes, *, stride: Sizes = 1) -> Feature:
        """A convolution of every channel by itself."""
        return self.conv(name, x, x.channels, taps, stride=stride, groups=x.channels)

    def linear(self, name: str, x: Feature, channels: int) -> Feature:
        """A fully connected layer over the channels, at every pixel or token alike."""
        self.gemm(name, self.batch * x.pixels, channels, x.channels, is_first=x.is_input)
        return Feature(channels, x.size)

    def gemm(self, name: str, m: int, n: int, k: int, *, is_first: bool = False) -> None:
        """A product with weights: k inputs give n outputs for each of m rows."""
        self._record(name, {"m": m, "n": n, "k": k}, ops=("gemm",), is_first=is_first)

    def product(self, name: str, batch: int, m: int, n: int, k: int, layout: str = "rcr") -> None:
        """A batch of products of activations, or of several experts' weights."""
        fields = {"m": m, "n": n, "k": k, "batch": batch, "layout": layout}
        self._record(name, fields, ops=("gemm",), has_weights=False)

    def pool(
        self, x: Feature, taps: int, stride: int = 0, pad: int = 0, *, ceil: bool = False
    ) -> Feature:
        """Pooling over windows; `ceil` keeps a last partial window."""
        step = stride or taps
        up = step - 1 if ceil else 0
        return Feature(x.channels, tuple((s + 2 * pad - taps + up) // step + 1 for s in x.size))

    def _record(self, name: str, fields: dict[str, Any], **facts: Any) -> None:
        self.layers.append(
            Layer(
                name=self._name(name),
                fields=fields,
                times=self._times,
                is_frozen=self._is_frozen,
                **facts,
            )
        )

    def _name(self, name: str) -> str:
        return ".".join([*self._scope, name])


def joined(*features: Feature) -> Feature:
    """Features laid one behind the other along the channels."""
    return Feature(sum(f.channels for f in features), features[0].size)


def pooled(x: Feature) -> Feature:
    """The average over the image: one pixel."""
    return Feature(x.channels, (1,) * len(x.size))


def upsampled(x: Feature) -> Feature:
    """Twice as large along every side."""
    return Feature(x.channels, tuple(2 * s for s in x.size))


def flat(x: Feature) -> Feature:
    """Every pixel's channels in one row, as a fully connected layer takes them."""
    return Feature(x.channels * x.pixels, (1,))


def rounded(channels: float, step: int = 8) -> int:
    """The multiple of `step` nearest to `channels`, never less than nine tenths of it."""
    near = max(step, int(channels + step / 2) // step * step)
    return near + step if near < 0.9 * channels else near


def _spread(value: Sizes, rank: int) -> tuple[int, ...]:
    return (value,) * rank if isinstance(value, int) else value


def _outputs(name: str, size: int, taps: int, stride: int, pad: int, dilation: int) -> int:
    left = size + 2 * pad - (taps - 1) * dilation - 1
    if left < 0:
        raise ProblemError(f"the image is too small: layer {name} would see {size} pixels")
    return left // stride + 1


def check_scale(**scale: int) -> None:
    for name, value in scale.items():
        if value < 1:
            raise InputError(f"{name} is {value}; it must be at least 1")
