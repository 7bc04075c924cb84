"""CK's other convolutions as foreign kernels, by the names that CK gives them.

Its device operations say their traits in a type string: kernels whose load waves and math waves
are apart (wavelet), and those that take further tensors in their epilogue (multi-D):

    DeviceGroupedConvBwdWeight_Xdl_WaveletModel_CShuffleV3<256l+256m, 128, 128, 32, Default, 8, ...>
    DeviceGroupedConvBwdWeightMultipleD_Xdl_CShuffle<256, 128, 128, 4, Default, 8, 2, 2, ...>
    DeviceGroupedConvBwdDataMultipleD_Xdl_CShuffle_v1<256, 128, 256, 32, 8, 8, Default, 32, ...>
    DeviceGroupedConvFwdMultipleD_Xdl_CShuffle_Large_Tensor<256, 256, 128, 32, Default, 32, ...>
    DeviceGroupedConvFwdMultipleABD_Xdl_CShuffle<256, 128, 128, 32, Default, 32, 32, 2, 2, ...>

CK Tile's depthwise kernels are named by the code generator:

    grouped_conv_fwd_depthwise_fp16_ngchw_2d_8x8_f3_s1x1_p1x1_nb8_sub2x2_vec2_2
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from tilewise.core.arch import Arch
from tilewise.core.kernel import trait
from tilewise.errors import KernelError
from tilewise.ops.conv.kernels.directed import DirectedConvKernel
from tilewise.ops.conv.problem import ConvProblem

SPECIALIZATIONS = ("Default", "Filter1x1Stride1Pad0", "Filter1x1Pad0", "Filter3x3", "OddC")
_BLOCK = ("tile_m", "tile_n", "tile_k", "specialization")
_MULTIPLY = ("xdl_m", "xdl_n", "repeat_m", "repeat_n", "vector_a", "vector_b")
_SHUFFLE = ("shuffle_m", "shuffle_n")
_WEIGHT = (
    *(*_BLOCK, "k1", "repeat_m", "repeat_n", "vector_a", "store_a", "vector_b", "store_b"),
    *(*_SHUFFLE, "vector_c"),
)
FORMS: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {
    ("wavelet", "conv_bwd_weight"): (
        "DeviceGroupedConvBwdWeight_Xdl_WaveletModel_CShuffleV3",
        _WEIGHT,
    ),
    ("multiple_d", "conv_bwd_weight"): (
        "DeviceGroupedConvBwdWeightMultipleD_Xdl_CShuffle",
        _WEIGHT,
    ),
    ("multiple_d", "conv_bwd_data"): (
        "DeviceGroupedConvBwdDataMultipleD_Xdl_CShuffle_v1",
        (*_BLOCK[:3], "k1", "k1_b", _BLOCK[3], *_MULTIPLY, *_SHUFFLE),
    ),
    ("multiple_d", "conv_fwd"): (
        "DeviceGroupedConvFwdMultipleD_Xdl_CShuffle_Large_Tensor",
        (*_BLOCK, *_MULTIPLY, "vector_c", *_SHUFFLE),
    ),
    ("multiple_abd", "conv_fwd"): (
        "DeviceGroupedConvFwdMultipleABD_Xdl_CShuffle",
        (*_BLOCK, *_MULTIPLY, "vector_c", *_SHUFFLE, "num_groups_to_merge"),
    ),
}
"""Family and op -> how their type strings begin, and what they list after the threads."""
FAMILIES = tuple(dict.fromkeys(family for family, _ in FORMS))


@dataclass(frozen=True, slots=True, kw_only=True)
class CkDeviceKernel(DirectedConvKernel):
    """One device operation of CK, as far as its type string tells it apart."""

    engine: ClassVar[str] = "ck"

    family: str = trait("", FAMILIES)
    load_threads: int = trait("", (0, 128, 256), default=0, doc="of waves that only load")
    threads: int = trait("", (64, 128, 256), doc="of a block; of a wavelet's math waves")
    tile_m: int = trait("", (16, 32, 64, 128, 256))
    tile_n: int = trait("", (16, 32, 64, 128, 256))
    tile_k: int = trait("", (4, 8, 16, 32, 64))
    specialization: str = trait("", SPECIALIZATIONS, default="Default")
    k1: int = trait("", (0, 2, 4, 8), default=0)
    k1_b: int = trait("", (0, 2, 4, 8), default=0, doc="of the second operand, where it is said")
    xdl_m: int = trait("", (0, 16, 32), default=0)
    xdl_n: int = trait("", (0, 16, 32), default=0)
    repeat_m: int = trait("", (1, 2, 4, 8))
    repeat_n: int = trait("", (1, 2, 4, 8))
    vector_a: int = trait("", (1, 2, 4, 8))
    store_a: int = trait("", (0, 1, 2, 4, 8), default=0)
    vector_b: int = trait("", (1, 2, 4, 8))
    store_b: int = trait("", (0, 1, 2, 4, 8), default=0)
    shuffle_m: int = trait("", (1, 2))
    shuffle_n: int = trait("", (1, 2))
    vector_c: int = trait("", (0, 1, 2, 4, 8), default=0)
    num_groups_to_merge: int = trait("", (1, 2, 4, 8, 16), default=1)

    def __post_init__(self) -> None:
        self.check_choices()
        if (self.family, self.op_name) not in FORMS:
            ops = " or ".join(op for family, op in FORMS if family == self.family)
            raise KernelError(f"{self.family} kernels compute {ops}")
        if (self.family == "wavelet") != (self.load_threads > 0):
            raise KernelError("load_threads are the wavelet kernels', and they have some")
        sizes = (self.threads, self.tile_m, self.tile_n, self.tile_k, self.num_groups_to_merge)
        if min(sizes) < 1:
            raise KernelError("threads, tiles and num_groups_to_merge must be at least 1")
        said = {"family", "threads", "load_threads", *FORMS[self.family, self.op_name][1]}
        said |= {"num_groups_to_merge"} if self.family == "wavelet" else set()
        for unsaid in self.traits():
            if unsaid.name not in said and getattr(self, unsaid.name) != unsaid.default:
                raise KernelError(f"{self.family} kernels have no {unsaid.name} in their names")

    @property
    def tile(self) -> tuple[int, int, int]:
        return self.tile_m, self.tile_n, self.tile_k

    @classmethod
    def prefix(cls, op: str) -> str:
        return "DeviceGroupedConv"

    @property
    def name(self) -> str:
        start, listed = FORMS[self.family, self.op_name]
        loads = f"{self.load_threads}l+{self.threads}m" if self.load_threads else self.threads
        words = [str(loads), *(str(getattr(self, name)) for name in listed)]
        if self.family == "wavelet" and self.num_groups_to_merge > 1:
            words.append(str(self.num_groups_to_merge))
        return f"{start}<{', '.join(words)}>"

    @classmethod
    def from_name(cls, name: str) -> Self:
        for (family, op), (start, listed) in FORMS.items():
            if name.startswith(f"{start}<") and name.endswith(">"):
                words = name[len(start) + 1 : -1].split(", ")
                values = _values(name, family, listed, words)
                return cls.spelled(name, {"op_name": op, "family": family, **values})
        known = ", ".join(start for start, _ in FORMS.values())
        raise KernelError(f"{name!r} is no type string of CK that is known here: {known}")


def _values(name: str, family: str, listed: tuple[str, ...], words: list[str]) -> dict[str, Any]:
    """The traits that a type string lists."""
    first = re.fullmatch(r"(?:(\d+)l\+(\d+)m|(\d+))", words[0])
    names = [*listed]
    if family == "wavelet" and len(words) == len(listed) + 2:
        names.append("num_groups_to_merge")
    if first is None or len(words) != len(names) + 1:
        raise KernelError(f"{name!r}: {len(names) + 1} traits are expected, threads first")
    found: dict[str, Any] = {"threads": int(first[2] or first[3])}
    if first[1]:
        found["load_threads"] = int(first[1])
    for key, word in zip(names, words[1:], strict=True):
        if key != "specialization" and not re.fullmatch(r"\d{1,6}", word):
            raise KernelError(f"{name!r}: {key} is {word!r}, which is no number")
        found[key] = word if key == "specialization" else int(word)
    return found


_PAIR = r"_{}(?P<{}>\d+)x(?P<{}>\d+)"
_DEPTHWISE = re.compile(
    r"grouped_conv_fwd_depthwise_(?P<dtype>fp16|bf16|fp32)_(?P<layout>ngchw|ngcdhw|nhwgc|ndhwgc)_(?P<ndim>[23])d"
    + _PAIR.format("", "tile_h", "tile_w")
    + r"_f(?P<taps>\d+)"
    + _PAIR.format("s", "stride_h", "stride_w")
    + _PAIR.format("p", "pad_h", "pad_w")
    + r"_nb(?P<images>\d+)"
    + _PAIR.format("sub", "sub_h", "sub_w")
    + r"_vec(?P<vector_in>\d+)_(?P<vector_out>\d+)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CkDepthwiseKernel(DirectedConvKernel):
    """One forward depthwise kernel of CK Tile, made for a filter, stride and padding."""

    engine: ClassVar[str] = "ck"

    op_name: str = field(default="conv_fwd", metadata={"choices": ("conv_fwd",)})
    family: str = trait("", ("depthwise",), default="depthwise")
    dtype: str = trait("", ("fp16", "bf16", "fp32"))
    layout: str = trait("", ("ngchw", "ngcdhw", "nhwgc", "ndhwgc"), default="ngchw")
    ndim: int = trait("", (2, 3), default=2)
    tile_h: int = trait("", (4, 8, 16, 32))
    tile_w: int = trait("", (4, 8, 16, 32))
    taps: int = trait("", (3, 5, 7), doc="of a side of the filter")
    stride_h: int = trait("", (1, 2), default=1)
    stride_w: int = trait("", (1, 2), default=1)
    pad_h: int = trait("", (0, 1, 2, 3), default=1)
    pad_w: int = trait("", (0, 1, 2, 3), default=1)
    images: int = trait("", (1, 2, 4, 8), default=1, doc="of the batch that a block takes")
    sub_h: int = trait("", (1, 2, 4), default=1)
    sub_w: int = trait("", (1, 2, 4), default=1)
    vector_in: int = trait("", (1, 2, 4, 8), default=1)
    vector_out: int = trait("", (1, 2, 4, 8), default=1)

    def __post_init__(self) -> None:
        self.check_choices()
        if self.op_name != "conv_fwd":
            raise KernelError("CK Tile's depthwise kernels compute conv_fwd")
        if min(self.tile_h, self.tile_w, self.taps, self.stride_h, self.stride_w) < 1:
            raise KernelError("tiles, taps and strides must be at least 1")

    @property
    def tile(self) -> tuple[int, int, int]:
        return self.tile_h * self.tile_w * self.images, 1, self.taps * self.taps

    @classmethod
    def prefix(cls, op: str) -> str:
        return "grouped_conv_fwd_depthwise_"

    @property
    def name(self) -> str:
        return (
            f"{self.prefix(self.op)}{self.dtype}_{self.layout}_{self.ndim}d"
            f"_{self.tile_h}x{self.tile_w}_f{self.taps}_s{self.stride_h}x{self.stride_w}"
            f"_p{self.pad_h}x{self.pad_w}_nb{self.images}_sub{self.sub_h}x{self.sub_w}"
            f"_vec{self.vector_in}_{self.vector_out}"
        )

    @classmethod
    def from_name(cls, name: str) -> Self:
        found = _DEPTHWISE.fullmatch(name)
        if found is None:
            raise KernelError(f"{name!r} is not the name of a CK Tile depthwise convolution")
        parts = found.groupdict()
        return cls.spelled(name, {k: int(v) if v.isdigit() else v for k, v in parts.items()})


def why_unusable(
    kernel: CkDeviceKernel | CkDepthwiseKernel, problem: ConvProblem | None, arch: Arch
) -> str | None:
    """The first rule that keeps a kernel of CK from `problem` on `arch`, or None."""
    if arch.vendor != "amd":
        return f"CK's kernels are AMD's; {arch.name} is not"
    if problem is None:
        return None
    if isinstance(kernel, CkDepthwiseKernel):
        return _why_not_depthwise(kernel, problem)
    p = problem
    if p.dtype not in ("fp16", "bf16") or p.layout != "nhwc":
        return f"it multiplies 16 bits in nhwc, not {p.dtype} in {p.layout}"
    if kernel.family == "wavelet" and p.ndim == 1:
        return "it has two or three dimensions"
    if kernel.specialization.startswith("Filter1x1") and not (
        p.is_pointwise or (kernel.specialization == "Filter1x1Pad0" and p.taps == 1)
    ):
        return f"{kernel.specialization} needs a filter of one tap and no padding"
    if kernel.specialization == "Filter3x3" and (p.y, p.x) != (3, 3):
        return "Filter3x3 needs three taps a side"
    if p.g % kernel.num_groups_to_merge:
        return f"{p.g} groups cannot be merged {kernel.num_groups_to_merge} at a time"
    return _why_not_vectorized(kernel, p) if kernel.family == "wavelet" else None


def _why_not_vectorized(kernel: CkDeviceKernel, p: ConvProblem) -> str | None:
    """A wavelet's load waves take several channels at once, its math waves store several."""
    for name, count, vector in (
        ("K", p.k // p.g, kernel.vector_a),
        ("C", p.c // p.g, max(kernel.vector_b, kernel.vector_c)),
    ):
        if vector and count % vector:
            return f"{name} per group is {count}, no multiple of {vector}"
    return None


def _why_not_depthwise(kernel: CkDepthwiseKernel, p: ConvProblem) -> str | None:
    if p.dtype != kernel.dtype:
        return f"its dtype is {kernel.dtype}, not {p.dtype}"
    if kernel.ndim != 2:
        return "it is for volumes, and its name does not say how deep their filter is"
    if not p.c == p.k == p.g or p.ndim > 2:
        return "it is for images with one channel a group"
    if (kernel.layout == "nhwgc") != (p.layout == "nhwc"):
        return f"its layout is {kernel.layout}, the problem's {p.layout}"
    mine = (kernel.taps, kernel.taps, kernel.stride_h, kernel.stride_w, kernel.pad_h, kernel.pad_w)
    if mine != (p.y, p.x, p.stride_h, p.stride_w, p.pad_h, p.pad_w):
        return "it is made for another filter, stride or padding"
    if (p.dilation_h, p.dilation_w) != (1, 1):
        return "it knows no dilation"
    return None
