"""What a Triton convolution is compiled from and called with, for one problem and its strides."""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

from tilewise.core.arch import Arch
from tilewise.core.dtypes import dtype as element
from tilewise.core.sizes import gcd
from tilewise.ops.arguments import Collected
from tilewise.ops.conv.epilogue import BIAS, FIRST, OUT, RESIDUAL, SECOND, SUMS, Epilogue
from tilewise.ops.conv.kernels.triton import Cut, TritonConvKernel, channels, cut, partial_bytes
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.conv.strides import Strides
from tilewise.ops.launch import Launch, Pointer, Scratch, Source, Step, Zero, triton_type

MODULE = "tilewise.ops.conv.triton"
DIMS = "dhw"
MODES = {"implicit": "taps", "packed": "packed", "merged": "merged"}
ADDING = {"BM": 32, "BN": 64}
"""Pixels by channels, or slices by entries of the filter, that a program adds up."""
ADDING_WARPS = 4


class Call(Collected):
    """A convolution kernel's arguments."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self._arch = arch

    def address(self, name: str, dtype: str, at: Pointer | Scratch | None, by: int = 1) -> None:
        """A tensor that begins at a multiple of `by` bytes, or none."""
        if at is None:
            self.constants[name] = None
        else:
            self.give(name, f"*{triton_type(dtype, self._arch)}", at, by)

    def number(self, name: str, value: int, *, fixed: bool = False) -> None:
        """A count; constant where it is one or nothing in all kernels of its kind."""
        if fixed:
            self.constants[name] = value
        else:
            self.give(name, "i32", value)

    def counted(self, name: str, value: int, by: int) -> None:
        """A number of channels, a multiple of `by`, which bounds how wide loads can be."""
        if value == 1:
            self.constants[name] = 1
        else:
            self.give(name, "i32", value, by)

    def stride(self, name: str, value: int, by: int, kind: str = "i64") -> None:
        if value == 1:
            self.constants[name] = 1
        else:
            self.give(name, kind, value, by)

    def step(self, function: str, grid: tuple[int, int, int], warps: int, stages: int) -> Step:
        source = Source(
            module=MODULE,
            function=function,
            signature=self.signature,
            constants=self.constants,
            divisible=self.divisible,
            options={"num_warps": warps, "num_stages": stages},
        )
        return Step(
            source=source,
            grid=grid,
            threads=warps * self._arch.warp_size,
            arguments=tuple(self.values),
        )


def _multiple(item: int, *values: int) -> int:
    """What wide loads, or the shortest asynchronous ones, may take all of these to be multiples of.

    One answer for all of a tensor's strides and channels: each is compiled on its own.
    """
    every = reduce(gcd, (value for value in values if value != 1), 0)
    return next(by for by in (16 // item, max(1, 4 // item), 1) if every % by == 0)


class Room(NamedTuple):
    """The workspace: slices of the reduction, then sums of rows of tiles."""

    partial: int
    sums: int
    """Where the sums begin."""
    total: int


def launch_triton(
    kernel: TritonConvKernel,
    problem: ConvProblem,
    arch: Arch,
    strides: tuple[Strides, Strides, Strides],
    is_aligned: bool,
    epilogue: Epilogue,
) -> Launch:
    """The kernel's steps; `is_aligned` says that every address is a multiple of 16 bytes."""
    made = cut(kernel, problem, arch)
    if problem.direction != "bwd_weight":
        return _pixels(kernel, problem, arch, strides, 16 * is_aligned, epilogue, made)
    return _filter(kernel, problem, arch, strides, 16 * is_aligned, made)


def _pixels(
    kernel: TritonConvKernel, p: ConvProblem, arch: Arch, strides: Any, by: int, e: Epilogue, c: Cut
) -> Launch:
    is_cut = c.slices > 1
    pixels, count = (p.in_pixels, p.c) if p.direction == "bwd_data" else (p.out_pixels, p.k)
    rows = -(-pixels // ADDING["BM"]) if is_cut else c.classes * c.tiles_m
    partial = _rounded(partial_bytes(kernel, p, c.slices))
    room = Room(partial, partial, partial + (8 * rows * count if e.sums else 0))
    steps: list[Step | Zero] = []
    if kernel.atomic and is_cut:
        steps.append(Zero(target=Scratch(offset=0), size=partial))
    steps.append(_pixels_step(kernel, p, arch, strides, by, e, c, room))
    if is_cut:
        slices = 1 if kernel.atomic else c.slices
        steps.append(_add_pixels(p, arch, strides[2], by, e, slices, room))
    if e.sums:
        call = Call(arch)
        call.address("sums", "fp32", Pointer(tensor=SUMS))
        call.address("work", "fp32", Scratch(offset=room.sums), 16)
        call.number("rows", rows)
        call.number("channels", count)
        call.constants |= ADDING
        grid = (-(-2 * count // ADDING["BN"]), 1, 1)
        steps.append(call.step("add_sums", grid, ADDING_WARPS, 2))
    return Launch(steps=tuple(steps), workspace_bytes=room.total)


def _rounded(size: int) -> int:
    return -(-size // 256) * 256


def _pixels_step(
    kernel: TritonConvKernel,
    p: ConvProblem,
    arch: Arch,
    strides: Any,
    by: int,
    e: Epilogue,
    c: Cut,
    room: Room,
) -> Step:
    call, is_cut, is_back = Call(arch), c.slices > 1, p.direction == "bwd_data"
    call.address("src", p.dtype, Pointer(tensor=FIRST), by)
    call.address("filt", p.dtype, Pointer(tensor=SECOND), by)
    _result(call, p, Epilogue() if is_cut else e, by, room, is_cut)
    for name, value in (
        ("tiles_m", c.tiles_m),
        ("tiles_n", c.tiles_n),
        ("pieces", c.tiles),
        ("slices", c.slices),
        ("images", p.n),
    ):
        call.number(name, value, fixed=name == "slices" and not is_cut)
    source, result = channels(p)
    read = _multiple(element(p.dtype).bytes, source, *strides[0], *strides[1])
    written = _multiple(element(p.out_dtype).bytes, result, *strides[2])
    _channels(call, kernel, p, c, read, written)
    _geometry(call, p, is_back)
    _tensor(call, "src", strides[0], read)
    k, c_in, *taps = strides[1]
    group = k * (source if is_back else result)
    if kernel.family != "direct":
        call.stride("filt_tile", c.merged * group, read, "i32")
    call.stride("filt_group", group, read, "i32")
    call.stride("filt_out", c_in if is_back else k, read, "i32")
    call.stride("filt_in", k if is_back else c_in, read, "i32")
    for dim, stride in zip(DIMS, taps, strict=True):
        call.stride(f"filt_{dim}", stride, read, "i32")
    _tensor(call, "out", strides[2], written)
    call.constants |= {
        "BACKWARD": is_back,
        "NDIM": p.ndim,
        "BM": kernel.tile_m,
        "BN": kernel.tile_n,
        "GROUP_M": kernel.group_m,
        "ACT": "none" if is_cut else e.activation,
    }
    function = "conv_direct"
    if kernel.family != "direct":
        function = "conv_pixels"
        call.constants |= _product(kernel, c, source % kernel.tile_k == 0)
    grid = (c.tiles * c.slices, c.classes, 1)
    return call.step(function, grid, kernel.warps, kernel.stages)


def _channels(
    call: Call, kernel: TritonConvKernel, p: ConvProblem, c: Cut, read: int, written: int
) -> None:
    """Channels of a group, of a tile, and how many groups there are."""
    source, result = channels(p)
    call.counted("source_channels", source, read)
    call.counted("result_channels", result, written)
    if kernel.family != "direct":
        call.counted("lanes_in", c.merged * source, read)
        call.counted("lanes_out", c.merged * result, written)
    call.number("groups", p.g)


def _product(kernel: TritonConvKernel, c: Cut, is_even: bool) -> dict[str, Any]:
    """Constants of kernels that multiply matrices."""
    return {
        "MODE": MODES[kernel.family],
        "BK": kernel.tile_k,
        "EVEN_C": is_even,
        "CUT": c.slices > 1,
        "ATOMIC": kernel.atomic,
        "PRECISION": "tf32" if kernel.dtype == "tf32" else "ieee",
    }


def _result(call: Call, p: ConvProblem, e: Epilogue, by: int, room: Room, is_cut: bool) -> None:
    call.address("out", p.out_dtype, Pointer(tensor=OUT), by)
    call.address("bias", p.out_dtype, Pointer(tensor=BIAS) if e.bias else None)
    call.address("residual", p.out_dtype, Pointer(tensor=RESIDUAL) if e.residual else None)
    call.address("work", "fp32", Scratch(offset=0) if is_cut else None, 16)
    call.address("sums", "fp32", Scratch(offset=room.sums) if e.sums else None, 16)


def _geometry(call: Call, p: ConvProblem, is_back: bool, *, is_filter: bool = False) -> None:
    """Sizes, taps, strides, padding and dilation of each dimension, source and result."""
    x, y = (p.d, p.h, p.w), (p.out_d, p.out_h, p.out_w)
    source, result = (y, x) if is_back else (x, y)
    strides, gaps = (p.stride_d, p.stride_h, p.stride_w), (p.dilation_d, p.dilation_h, p.dilation_w)
    is_unit = set(strides) == {1}
    common = [gcd(s, g) for s, g in zip(strides, gaps, strict=True)]
    inverse = [
        pow(g // both, -1, s // both) if s > both else 0
        for s, g, both in zip(strides, gaps, common, strict=True)
    ]
    tables: list[tuple[str, Any, bool]] = [
        ("source", source, False),
        ("result", result, False),
        ("taps", (p.z, p.y, p.x), p.taps == 1),
        ("stride", strides, is_unit and is_back),
        ("pad", (p.pad_d, p.pad_h, p.pad_w), False),
        ("gap", gaps, False),
    ]
    if not is_filter:
        is_moot = not is_back or is_unit
        tables += [
            ("common", (1, 1, 1) if is_moot else common, is_moot),
            ("inverse", (0, 0, 0) if is_moot else inverse, is_moot),
        ]
    for name, values, is_fixed in tables:
        for at, (dim, value) in enumerate(zip(DIMS, values, strict=True)):
            call.number(f"{name}_{dim}", value, fixed=is_fixed or at < 3 - p.ndim)


def _tensor(call: Call, name: str, strides: Strides, by: int, first: str = "n") -> None:
    """Strides, multiples of `by` where they are not 1; those of absent dimensions are 0."""
    for axis, stride in zip((first, "c", *DIMS), strides, strict=True):
        call.stride(f"{name}_{axis}", stride, by)


def _add_pixels(
    p: ConvProblem, arch: Arch, strides: Strides, by: int, e: Epilogue, slices: int, room: Room
) -> Step:
    is_back = p.direction == "bwd_data"
    pixels, count = (p.in_pixels, p.c) if is_back else (p.out_pixels, p.k)
    sizes = (p.d, p.h, p.w) if is_back else (p.out_d, p.out_h, p.out_w)
    call = Call(arch)
    _result(call, p, e, by, room, True)
    columns = -(-count // ADDING["BN"])
    for name, value in (
        ("tiles_n", columns),
        ("slices", slices),
        ("pixels", pixels),
        ("channels", count),
    ):
        call.number(name, value)
    for at, (dim, size) in enumerate(zip(DIMS, sizes, strict=True)):
        call.number(f"result_{dim}", size, fixed=at < 3 - p.ndim)
    _tensor(call, "out", strides, _multiple(element(p.out_dtype).bytes, count, *strides))
    call.constants |= {**ADDING, "NDIM": p.ndim, "ACT": e.activation}
    grid = (-(-pixels // ADDING["BM"]) * columns, 1, 1)
    return call.step("add_pixels", grid, ADDING_WARPS, 2)


def _filter(
    kernel: TritonConvKernel, p: ConvProblem, arch: Arch, strides: Any, by: int, c: Cut
) -> Launch:
    is_cut = c.slices > 1
    size = _rounded(partial_bytes(kernel, p, c.slices))
    steps: list[Step | Zero] = []
    if kernel.atomic and is_cut:
        steps.append(Zero(target=Scratch(offset=0), size=size))
    steps.append(_filter_step(kernel, p, arch, strides, by, c))
    if is_cut:
        steps.append(_add_filter(p, arch, strides[2], by, 1 if kernel.atomic else c.slices))
    return Launch(steps=tuple(steps), workspace_bytes=size)


def _filter_step(
    kernel: TritonConvKernel, p: ConvProblem, arch: Arch, strides: Any, by: int, c: Cut
) -> Step:
    call, is_cut = Call(arch), c.slices > 1
    call.address("src", p.dtype, Pointer(tensor=FIRST), by)
    call.address("grad", p.dtype, Pointer(tensor=SECOND), by)
    call.address("out", p.out_dtype, Pointer(tensor=OUT), by)
    call.address("work", "fp32", Scratch(offset=0) if is_cut else None, 16)
    for name, value in (
        ("tiles_m", c.tiles_m),
        ("tiles_n", c.tiles_n),
        ("pieces", c.tiles),
        ("slices", c.slices),
        ("pixels", p.out_pixels),
    ):
        call.number(name, value, fixed=name == "slices" and not is_cut)
    source, result = channels(p)
    item = element(p.dtype).bytes
    read, grad = _multiple(item, source, *strides[0]), _multiple(item, result, *strides[1])
    _channels(call, kernel, p, c, read, grad)
    _geometry(call, p, False, is_filter=True)
    _tensor(call, "src", strides[0], read)
    _tensor(call, "grad", strides[1], grad)
    _tensor(call, "out", strides[2], 1, "k")
    call.constants |= {
        "NDIM": p.ndim,
        "BM": kernel.tile_m,
        "BN": kernel.tile_n,
        "BK": kernel.tile_k,
        "CUT": is_cut,
        "ATOMIC": kernel.atomic,
    }
    function = "filter_direct"
    if kernel.family != "direct":
        function = "conv_filter"
        call.constants |= _product(kernel, c, source % kernel.tile_n == 0)
        call.constants["GROUP_M"] = kernel.group_m
    return call.step(function, (c.tiles * c.slices, 1, 1), kernel.warps, kernel.stages)


def _add_filter(p: ConvProblem, arch: Arch, strides: Strides, by: int, slices: int) -> Step:
    call = Call(arch)
    source = p.c // p.g
    call.address("out", p.out_dtype, Pointer(tensor=OUT), by)
    call.address("work", "fp32", Scratch(offset=0), 16)
    for name, value in (
        ("slices", slices),
        ("entries", p.filter_elements),
        ("per_filter", source * p.taps),
        ("channels", source),
    ):
        call.number(name, value)
    for at, (name, value) in enumerate((("taps_h", p.y), ("taps_w", p.x)), 1):
        call.number(name, value, fixed=p.taps == 1 or at < 3 - p.ndim)
    _tensor(call, "out", strides, 1, "k")
    call.constants |= {**ADDING, "NDIM": p.ndim}
    grid = (-(-p.filter_elements // ADDING["BN"]), 1, 1)
    return call.step("add_filter", grid, ADDING_WARPS, 2)


def representative(kernel: TritonConvKernel) -> ConvProblem:
    """A layer of the usual kind for this kernel."""
    rest: dict[str, Any] = {
        "direction": kernel.op.removeprefix("conv_"),
        "dtype": kernel.dtype,
        "n": 32,
    }
    rest |= {"y": 3, "x": 3, "pad_h": 1, "pad_w": 1}
    if kernel.family == "direct":
        return ConvProblem(c=96, k=96, g=96, h=28, w=28, **rest)
    if kernel.family == "merged":
        return ConvProblem(c=128, k=128, g=32, h=28, w=28, **rest)
    if kernel.family == "packed":
        few, many = (64, 3) if kernel.op == "conv_bwd_data" else (3, 64)
        return ConvProblem(c=few, k=many, h=56, w=56, **rest)
    # Few tiles where the reduction is cut: few filters, or few pixels.
    if kernel.fill and kernel.op == "conv_bwd_weight":
        return ConvProblem(c=64, k=64, h=14, w=14, **rest)
    return ConvProblem(c=256, k=256, h=14, w=14, **{**rest, "n": 1 if kernel.fill else 32})
