"""CK Tile's grouped-convolution kernels, by the two kinds of name that CK Tile gives them.

The tile engine's short names, and with them all published measurements, leave much unsaid:

    grouped_conv_forward_bf16_2d_64x64x64_compv3_intrawave_gm2_dsb_si_2stage

A scheduler that is absent is `default`, waves, warp tile and vectors are 0 (unspecified), and the
rest takes its defaults. The code generator's long names say everything:

    grouped_conv_fwd_bf16_nhwgc_2d_compv3_cshuffle_intrawave_64x64x64_4x1x1_16x16x16_vec8_8_8_wg2
        _gm2_dsb_2stage_filter1x1_pad0_explicit_gemm_streamk_tree_persistent_large_tensor_pad110

where absent vectors are 4, 8 and 8, and `large_tensor` is what short names call `si`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Self

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel, trait
from tilewise.core.problem import Problem
from tilewise.errors import KernelError
from tilewise.ops.cktile_rules import (
    CONV_PIPELINES,
    DTYPES,
    CkTileKernel,
    Values,
    by_trait,
    common_rules,
    first_broken,
    is_dead_end,
    rule,
    text,
)
from tilewise.ops.conv.kernels.directed import OPS
from tilewise.ops.conv.problem import ConvProblem

LAYOUTS = {"nhwgc": 0, "nwgc": 1, "ndhwgc": 3, "ngchw": 2, "ngcdhw": 3}
"""Layout -> its dimensions; nhwgc also stands for "channels last" in any number of them."""
SPECIALIZATIONS = ("default", "filter1x1_pad0", "filter1x1_stride1_pad0", "filter3x3")
DEFAULT_VECTORS = (4, 8, 8)

_SHORT = {"forward": "conv_fwd", "bwd_data": "conv_bwd_data", "bwd_weight": "conv_bwd_weight"}
_LONG = {"fwd": "conv_fwd", "bwd_data": "conv_bwd_data", "bwd_weight": "conv_bwd_weight"}
_SAID_IN_LONG_NAMES = {
    "layout": "nhwgc",
    "epilogue": "cshuffle",
    "pad_m": True,
    "pad_n": True,
    "pad_k": True,
    "vector_a": 0,
    "block_per_cu": 1,
    "num_wave_groups": 1,
    "specialization": "default",
    "explicit_gemm": False,
    "streamk": "off",
    "streamk_persistent": False,
}

_DTYPE = rf"_(?P<dtype>{'|'.join(DTYPES)})"
_PIPELINE = rf"_(?P<pipeline>{'|'.join(CONV_PIPELINES)})"
_TRIPLE = {
    what: rf"_(?P<{what}_m>\d+)x(?P<{what}_n>\d+)x(?P<{what}_k>\d+)"
    for what in ("tile", "wave", "warp_tile")
}
_MERGE = r"(?:_gm(?P<num_groups_to_merge>\d+))?(?P<double_smem_buffer>_dsb)?"
_SHORT_NAME = re.compile(
    rf"grouped_conv_(?P<op_name>{'|'.join(_SHORT)}){_DTYPE}_(?P<ndim>\d)d{_TRIPLE['tile']}{_PIPELINE}"
    rf"(?:_(?P<scheduler>intrawave|interwave))?{_MERGE}(?P<split_image>_si)?(?P<two_stage>_2stage)?"
)
_LONG_NAME = re.compile(
    rf"grouped_conv_(?P<op_name>{'|'.join(_LONG)}){_DTYPE}_(?P<layout>{'|'.join(LAYOUTS)})"
    rf"_(?P<ndim>\d)d{_PIPELINE}_(?P<epilogue>cshuffle|default)"
    rf"_(?P<scheduler>intrawave|interwave|default){''.join(_TRIPLE.values())}"
    r"(?:_vec(?P<vector_a>\d+)_(?P<vector_b>\d+)_(?P<vector_c>\d+))?(?:_bpc(?P<block_per_cu>\d+))?"
    rf"(?:_wg(?P<num_wave_groups>\d+))?{_MERGE}(?P<two_stage>_2stage)?"
    rf"(?:_(?P<specialization>{'|'.join(SPECIALIZATIONS[1:])}))?(?P<explicit_gemm>_explicit_gemm)?"
    r"(?:_streamk_(?P<streamk>tree|linear)(?P<streamk_persistent>_persistent)?)?"
    r"(?P<split_image>_large_tensor)?(?:_pad(?P<pads>[01]{3}))?"
)
_FLAGS = (
    "double_smem_buffer",
    "split_image",
    "two_stage",
    "explicit_gemm",
    "streamk_persistent",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CkTileConvKernel(CkTileKernel):
    """One grouped-convolution kernel of CK Tile, in any of the three directions."""

    op_name: str = field(metadata={"choices": OPS})
    wave_m: int = trait("", (1, 2, 4, 8), default=0)
    wave_n: int = trait("", (1, 2, 4), default=0)
    wave_k: int = trait("", (1, 2), default=0)
    warp_tile_m: int = trait("", (4, 16, 32, 64), default=0)
    warp_tile_n: int = trait("", (4, 16, 32, 64), default=0)
    warp_tile_k: int = trait("", (4, 8, 16, 32, 64, 128), default=0)
    pipeline: str = trait("", CONV_PIPELINES)
    layout: str = trait("", tuple(LAYOUTS), default="nhwgc")
    ndim: int = trait("", (1, 2, 3), default=2)
    num_groups_to_merge: int = trait("", (1, 2, 4, 8, 16, 32), default=1)
    double_smem_buffer: bool = trait("", (False, True), default=False)
    split_image: bool = trait("", (False, True), default=False)
    two_stage: bool = trait("", (False, True), default=False)
    block_per_cu: int = trait("", (1, 2), default=1)
    num_wave_groups: int = trait("", (1, 2), default=1)
    specialization: str = trait("", SPECIALIZATIONS, default="default")
    explicit_gemm: bool = trait("", (False, True), default=False)
    streamk: str = trait("", ("off", "tree", "linear"), default="off")
    streamk_persistent: bool = trait("", (False, True), default=False)

    def __post_init__(self) -> None:
        CkTileKernel.__post_init__(self)
        if self.op_name not in OPS:
            raise KernelError(f"op is {self.op_name!r}; use one of {', '.join(OPS)}")
        if self.ndim not in (1, 2, 3):
            raise KernelError(f"ndim is {self.ndim}; use 1, 2 or 3")
        if LAYOUTS[self.layout] not in (0, self.ndim):
            raise KernelError(f"layout {self.layout} does not have {self.ndim} dimensions")
        for count in ("num_groups_to_merge", "block_per_cu", "num_wave_groups"):
            if getattr(self, count) < 1:
                raise KernelError(f"{count} is {getattr(self, count)}; it must be at least 1")
        if self.streamk == "off" and self.streamk_persistent:
            raise KernelError("streamk_persistent needs streamk to be tree or linear")
        if self.is_short:
            self._check_short()
        elif not self.vector_a:
            for name, size in zip("abc", DEFAULT_VECTORS, strict=True):
                object.__setattr__(self, f"vector_{name}", size)

    @property
    def is_short(self) -> bool:
        """Whether waves, warp tile and vectors are unspecified, as in short names."""
        return self.wave_m == 0

    def _check_short(self) -> None:
        for name, usual in _SAID_IN_LONG_NAMES.items():
            if getattr(self, name) != usual:
                raise KernelError(
                    f"{name} is {getattr(self, name)!r} but the waves are unspecified; "
                    f"only kernels with waves and a warp tile can differ from {usual!r}"
                )

    @property
    def op(self) -> str:
        return self.op_name

    @classmethod
    def prefix(cls, op: str) -> str:
        return f"grouped_conv_{op.removeprefix('conv_').replace('fwd', 'f')}"

    @property
    def name(self) -> str:
        direction = self.op_name.removeprefix("conv_")
        if self.is_short:
            direction = direction.replace("fwd", "forward")
            words = [direction, self.dtype, f"{self.ndim}d", text(self.tile), self.pipeline]
            words += [self.scheduler] if self.scheduler != "default" else []
            words += self._merge_words()
            words += [w for w, on in (("si", self.split_image), ("2stage", self.two_stage)) if on]
        else:
            words = [direction, self.dtype, self.layout, f"{self.ndim}d", self.pipeline]
            words += [self.epilogue, self.scheduler]
            words += [text(self.tile), text(self.wave), text(self.warp_tile)]
            words += self._long_suffix()
        return "_".join(["grouped_conv", *words])

    def _merge_words(self) -> list[str]:
        merge = self.num_groups_to_merge
        return [f"gm{merge}"] * (merge != 1) + ["dsb"] * self.double_smem_buffer

    def _long_suffix(self) -> list[str]:
        vectors = (self.vector_a, self.vector_b, self.vector_c)
        pads = f"pad{self.pad_m:d}{self.pad_n:d}{self.pad_k:d}"
        return [
            *([f"vec{vectors[0]}_{vectors[1]}_{vectors[2]}"] * (vectors != DEFAULT_VECTORS)),
            *([f"bpc{self.block_per_cu}"] * (self.block_per_cu != 1)),
            *([f"wg{self.num_wave_groups}"] * (self.num_wave_groups != 1)),
            *self._merge_words(),
            *(["2stage"] * self.two_stage),
            *([self.specialization] * (self.specialization != "default")),
            *(["explicit_gemm"] * self.explicit_gemm),
            *([f"streamk_{self.streamk}"] * (self.streamk != "off")),
            *(["persistent"] * self.streamk_persistent),
            *(["large_tensor"] * self.split_image),
            *([pads] * (pads != "pad111")),
        ]

    @classmethod
    def from_name(cls, name: str) -> Self:
        short, long = _SHORT_NAME.fullmatch(name), _LONG_NAME.fullmatch(name)
        found = short or long
        if not found:
            raise KernelError(
                f"{name!r} is not the name of a CK Tile convolution: "
                "grouped_conv_DIRECTION_DTYPE_NDd_TILE_PIPELINE and suffixes, or "
                "grouped_conv_DIRECTION_DTYPE_LAYOUT_NDd_PIPELINE_EPILOGUE_SCHEDULER_TILE_WAVES"
                "_WARPTILE and suffixes"
            )
        values: dict[str, Any] = {}
        for key, part in found.groupdict().items():
            if part is not None:
                values[key] = True if key in _FLAGS else int(part) if part.isdigit() else part
        values["op_name"] = (_SHORT if short else _LONG)[found["op_name"]]
        values.setdefault("scheduler", "default")
        if "pads" in values:
            pads = found["pads"]
            del values["pads"]
            values |= {f"pad_{axis}": pads[i] == "1" for i, axis in enumerate("mnk")}
        return cls.spelled(name, values)

    @classmethod
    def is_dead_end(cls, values: dict[str, Any], arch: Arch) -> bool:
        return is_dead_end(_RULES_BY_TRAIT, values, arch)


def _direction(v: Values, arch: Arch) -> str | None:
    backward = v["op_name"] != "conv_fwd"
    # CK Tile's Python layer rewrites other pipelines than compv3 and mem without a word; its
    # generator refuses compv5 alone, whose tiles cannot be transposed.
    if backward and v.get("pipeline") == "compv5":
        return "compv5 computes forward convolutions only"
    if v["op_name"] != "conv_bwd_weight":
        if v.get("two_stage", False):
            return "two stages are for the backward-weight direction"
        if v.get("streamk", "off") != "off":
            return "stream-K is for the backward-weight direction"
    return None


def _explicit(v: Values, arch: Arch) -> str | None:
    if v["explicit_gemm"] and v["specialization"] != "filter1x1_stride1_pad0":
        return "an explicit GEMM needs the filter1x1_stride1_pad0 specialization"
    return None


def _loads(v: Values, arch: Arch) -> str | None:
    threads = v["wave_m"] * v["wave_n"] * v["wave_k"] * arch.warp_size
    for tile, vector in (("tile_m", "vector_a"), ("tile_n", "vector_b")):
        share = v[tile] * v["tile_k"]
        size = v.get(vector, 1)
        if share < size * threads:
            return f"{threads} threads with vectors of {size} load more than {tile} x tile_k"
    return None


RULES = (
    *common_rules((16, 16, 16)),
    rule(_direction, "pipeline", "two_stage", "streamk"),
    rule(_explicit, "explicit_gemm"),
    rule(_loads, "vector_a", "vector_b"),
)
_RULES_BY_TRAIT = by_trait(RULES)


def why_unusable(kernel: Kernel, problem: Problem | None, arch: Arch) -> str | None:
    """The first rule that keeps a CK Tile kernel from `problem` on `arch`, or None."""
    assert isinstance(kernel, CkTileConvKernel)
    broken = first_broken(RULES, kernel, arch)
    if broken or not isinstance(problem, ConvProblem):
        return broken
    if kernel.op != problem.op:
        return f"it computes {kernel.op}, not {problem.op}"
    if kernel.dtype != problem.dtype:
        return f"its dtype is {kernel.dtype}, not {problem.dtype}"
    if kernel.ndim < problem.ndim:
        return f"it has {kernel.ndim} dimensions, the problem {problem.ndim}"
    if kernel.layout.endswith("gc") != (problem.layout == "nhwc"):
        return f"its layout is {kernel.layout}, the problem's {problem.layout}"
    return _groups(kernel, problem) or _special(kernel, problem) or _vectors(kernel, problem)


def _groups(kernel: CkTileConvKernel, problem: ConvProblem) -> str | None:
    merge = kernel.num_groups_to_merge
    if problem.g % merge:
        return f"{problem.g} groups cannot be merged {merge} at a time"
    if merge > 1 and kernel.op == "conv_fwd" and problem.c != problem.g:
        return "merged groups are read along the groups, which needs one channel in each"
    return None


def _special(kernel: CkTileConvKernel, problem: ConvProblem) -> str | None:
    spec = kernel.specialization
    pads, strides = (
        tuple(getattr(problem, f"{what}_{dim}") for dim in "dhw") for what in ("pad", "stride")
    )
    if spec.startswith("filter1x1") and (problem.taps != 1 or any(pads)):
        return f"{spec} needs a filter of one tap and no padding"
    if spec == "filter1x1_stride1_pad0" and set(strides) != {1}:
        return f"{spec} needs strides of 1"
    if spec == "filter3x3":
        taps = (problem.z, problem.y, problem.x)[-kernel.ndim :]
        if problem.c != problem.g or set(taps) != {3}:
            return f"{spec} needs one channel a group and three taps a side"
    return None


def _vectors(kernel: CkTileConvKernel, problem: ConvProblem) -> str | None:
    """Channels that a vector load would split; short names do not say their vectors."""
    if kernel.is_short or kernel.num_groups_to_merge > 1:
        return None
    c, k = problem.c // problem.g, problem.k // problem.g
    channels = {
        "conv_fwd": (("C", c), ("C", c), ("K", k)),
        "conv_bwd_data": (("K", k), ("C", c), ("C", c)),
        "conv_bwd_weight": (("K", k), ("C", c), ("C", c)),
    }[kernel.op]
    for name, (which, size) in zip("abc", channels, strict=True):
        vector = getattr(kernel, f"vector_{name}")
        if size % vector:
            return f"{which} per group is {size}, no multiple of vector_{name}, {vector}"
    return None
