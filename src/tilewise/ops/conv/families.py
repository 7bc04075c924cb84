"""Families of convolutions, each a way to draw layers that stress something else."""

from __future__ import annotations

from random import Random
from typing import Any

from tilewise.ops.draws import Draw, log_uniform

_IMAGES = (7, 8, 10, 13, 14, 16, 19, 20, 25, 28, 32, 38, 40, 50, 56, 64, 75, 80, 100, 112, 128)


def _square(
    rng: Random,
    *,
    taps: int = 1,
    stride: int = 1,
    dilation: int = 1,
    align: int = 8,
    image: tuple[int, int] = (7, 128),
) -> dict[str, Any]:
    """A dense 2-D layer that keeps its image size at stride one."""
    size = rng.choice([i for i in _IMAGES if image[0] <= i <= image[1]] or [image[1]])
    pad = dilation * (taps // 2)
    return {
        "n": log_uniform(rng, 1, 128),
        "c": log_uniform(rng, align, 2048, align),
        "k": log_uniform(rng, align, 2048, align),
        **dict.fromkeys(("h", "w"), size),
        **dict.fromkeys(("y", "x"), taps),
        **dict.fromkeys(("stride_h", "stride_w"), stride),
        **dict.fromkeys(("dilation_h", "dilation_w"), dilation),
        **dict.fromkeys(("pad_h", "pad_w"), pad),
    }


LARGEST = 2048
"""Channels of uniform draws."""


def uniform(align: int) -> Draw:
    """Log-uniform sizes with usual filters, strides, groups and numbers of dimensions.

    Channels of a group are multiples of `align`, but for the depthwise tenth of the layers.
    """

    def draw(rng: Random) -> dict[str, Any]:
        dims = rng.choices(("hw", "dhw", "w"), (8, 1, 1))[0]
        groups = rng.choices((1, log_uniform(rng, 2, 64)), (8, 1))[0]
        drawn: dict[str, Any] = {
            "n": log_uniform(rng, 1, 256),
            "c": groups * log_uniform(rng, align, max(align, LARGEST // groups), align),
            "k": groups * log_uniform(rng, align, max(align, LARGEST // groups), align),
            "g": groups,
        }
        if rng.random() < 0.1:
            drawn |= {"c": drawn["k"], "g": drawn["k"]}
        largest = {"w": 16384, "hw": 384, "dhw": 64}[dims]
        stride = rng.choices((1, 2), (4, 1))[0]
        dilation = rng.choices((1, 2, 4), (18, 1, 1))[0]
        taps = rng.choices((1, 3, 5, 7), (5, 6, 1, 1))[0]
        for dim, filter_dim in zip("dhw", "zyx", strict=True):
            if dim in dims:
                drawn[dim] = log_uniform(rng, 4, largest)
                drawn[filter_dim] = taps
                drawn[f"stride_{dim}"] = stride
                drawn[f"dilation_{dim}"] = dilation
                drawn[f"pad_{dim}"] = dilation * (taps // 2) * (rng.random() < 0.9)
        return drawn

    return draw


def pointwise(rng: Random) -> dict[str, Any]:
    return _square(rng)


def pointwise_strided(rng: Random) -> dict[str, Any]:
    return _square(rng, stride=2)


def three_by_three(rng: Random) -> dict[str, Any]:
    return _square(rng, taps=3)


def strided(rng: Random) -> dict[str, Any]:
    return _square(rng, taps=rng.choice((3, 3, 5, 7)), stride=2)


def dilated(rng: Random) -> dict[str, Any]:
    return _square(rng, taps=3, dilation=rng.choice((2, 4, 6, 12)), image=(25, 80))


def large_filter(rng: Random) -> dict[str, Any]:
    return {**_square(rng, taps=rng.choice((5, 7, 9, 11))), "c": log_uniform(rng, 8, 256, 8)}


def stem(rng: Random) -> dict[str, Any]:
    """The first layer of a network: few channels, a large image, a stride."""
    size = rng.choice((96, 128, 160, 224, 256, 299, 384, 512))
    taps, stride, pad = rng.choice(((7, 2, 3), (3, 2, 1), (3, 1, 1), (5, 2, 2), (11, 4, 2)))
    drawn = _square(rng, taps=taps, stride=stride)
    return {
        **drawn,
        "c": rng.choice((1, 3, 4, 6)),
        "k": rng.choice((16, 24, 32, 48, 64, 96)),
        **dict.fromkeys(("h", "w"), size),
        **dict.fromkeys(("pad_h", "pad_w"), pad),
    }


def patches(rng: Random) -> dict[str, Any]:
    """Patch embedding and down-sampling: the stride is the filter's size."""
    taps = rng.choice((2, 4, 8, 14, 16))
    drawn = _square(rng, taps=taps, stride=taps)
    size = taps * rng.randint(4, 56)
    return {
        **drawn,
        "c": 3 if taps > 4 else log_uniform(rng, 32, 768, 32),
        **dict.fromkeys(("h", "w"), size),
        **dict.fromkeys(("pad_h", "pad_w"), 0),
    }


def asymmetric(rng: Random) -> dict[str, Any]:
    """Filters of one row or column, and images that are not square."""
    taps = rng.choice((3, 5, 7))
    drawn = {**_square(rng, align=16), "w": rng.choice(_IMAGES)}
    if rng.random() < 0.5:
        return {**drawn, "y": taps, "pad_h": taps // 2}
    return {**drawn, "x": taps, "pad_w": taps // 2}


def grouped(rng: Random) -> dict[str, Any]:
    groups = rng.choice((2, 3, 4, 8, 16, 32, 64))
    drawn = _square(rng, taps=rng.choice((1, 3, 3, 3)), stride=rng.choice((1, 1, 1, 2)))
    c, k = (groups * log_uniform(rng, 4, max(4, 1024 // groups), 4) for _ in range(2))
    return {**drawn, "c": c, "k": rng.choice((c, k)), "g": groups}


def depthwise(rng: Random) -> dict[str, Any]:
    taps, stride = rng.choice((3, 3, 5, 7)), rng.choice((1, 1, 2))
    drawn = _square(rng, taps=taps, stride=stride, image=(7, 112))
    channels = log_uniform(rng, 16, 1536, 8)
    multiplier = rng.choice((1, 1, 1, 1, 2))
    return {**drawn, "c": channels, "k": channels * multiplier, "g": channels}


def small_image(rng: Random) -> dict[str, Any]:
    size = rng.randint(1, 6)
    return {**_square(rng, taps=rng.choice((1, 3)), align=64), "h": size, "w": size}


def large_image(rng: Random) -> dict[str, Any]:
    h, w = (log_uniform(rng, 256, 1024, 16) for _ in range(2))
    drawn = _square(rng, taps=rng.choice((1, 3, 5)))
    return {**drawn, "n": rng.choice((1, 2, 4)), "c": log_uniform(rng, 8, 128, 8), "h": h, "w": w}


def single_image(rng: Random) -> dict[str, Any]:
    return {**_square(rng, taps=rng.choice((1, 3)), stride=rng.choice((1, 1, 2))), "n": 1}


def odd_channels(rng: Random) -> dict[str, Any]:
    drawn = _square(rng, taps=rng.choice((1, 3)), align=1)
    return {**drawn, "c": drawn["c"] | 1, "k": drawn["k"] | 1}


def odd_image(rng: Random) -> dict[str, Any]:
    drawn = _square(rng, taps=rng.choice((1, 2, 3, 4)), stride=rng.choice((1, 2, 3)))
    return {**drawn, "h": log_uniform(rng, 5, 200) | 1, "w": log_uniform(rng, 5, 200) | 1}


def volume(rng: Random) -> dict[str, Any]:
    """3-D layers of video and medical networks."""
    taps, stride = rng.choice((1, 3, 3, 3)), rng.choice((1, 1, 1, 2))
    drawn = _square(rng, taps=taps, stride=stride, image=(7, 64))
    z = rng.choice((1, taps))
    return {
        **drawn,
        "n": log_uniform(rng, 1, 16),
        **_channels(rng, 512),
        "d": rng.choice((4, 8, 16, 32, 64)),
        "z": z,
        "stride_d": stride if z > 1 else 1,
        "pad_d": z // 2,
    }


def sequence(rng: Random) -> dict[str, Any]:
    """1-D layers of audio and text networks."""
    taps, dilation = rng.choice((1, 3, 5, 7, 15)), rng.choice((1, 1, 1, 2, 4, 8))
    return {
        "n": log_uniform(rng, 1, 64),
        **_channels(rng, 1024),
        "w": log_uniform(rng, 32, 32768),
        "x": taps,
        "stride_w": rng.choice((1, 1, 2)),
        "dilation_w": dilation,
        "pad_w": dilation * (taps // 2),
    }


def _channels(rng: Random, most: int) -> dict[str, int]:
    """Mostly dense; a fifth of the layers is depthwise, a fifth grouped."""
    c, k = (log_uniform(rng, 8, most, 8) for _ in range(2))
    kind = rng.randrange(5)
    if kind == 0:
        return {"c": c, "k": c, "g": c}
    if kind == 1:
        return {"c": c, "k": k, "g": rng.choice((2, 4, 8))}
    return {"c": c, "k": k, "g": 1}


FAMILIES: dict[str, Draw] = {
    draw.__name__: draw
    for draw in (
        pointwise,
        pointwise_strided,
        three_by_three,
        strided,
        dilated,
        large_filter,
        stem,
        patches,
        asymmetric,
        grouped,
        depthwise,
        small_image,
        large_image,
        single_image,
        odd_channels,
        odd_image,
        volume,
        sequence,
    )
}
