"""What a GPU GEMM kernel is compiled from and called with, for one problem and set of strides."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

from tilewise.core.arch import Arch
from tilewise.core.dtypes import dtype as element
from tilewise.errors import InputError, TensorError
from tilewise.ops.gemm.kernels.gpu import TWO_GROUP_FAMILIES, TritonGemmKernel, staging
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.ops.launch import TRITON_TYPES, Descriptor, Launch, Pointer, Scratch, Source

ACTIVATIONS = ("none", "relu", "gelu", "silu")
SCALINGS = ("none", "tensor", "row")
A, B, C, BIAS, A_SCALE, B_SCALE = range(6)
"""Positions of the tensors of a call."""
FEWEST_STEPS = 2
"""A slice of the reduction shorter than this costs more than it saves."""
SMALL_STRIDE = 2**22
"""Up to here a tile's offsets fit in 32 bits."""

Strides = tuple[int, int, int]
"""Of batch, row and column, in elements; a batch of one has stride 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """What happens to a sum before it is stored: scaled, biased, activated."""

    bias: bool = False
    """A vector over N, of the result's type."""
    activation: str = "none"
    scaling: str = "none"
    """fp32 factors: one per operand (`tensor`), or one per row of A and column of B (`row`)."""

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise InputError(f"activation is {self.activation!r}; use one of {ACTIVATIONS}")
        if self.scaling not in SCALINGS:
            raise InputError(f"scaling is {self.scaling!r}; use one of {SCALINGS}")

    @property
    def tensors(self) -> tuple[int, ...]:
        """Positions of what a call takes besides A, B and C, in the order given."""
        scales = () if self.scaling == "none" else (A_SCALE, B_SCALE)
        return ((BIAS,) if self.bias else ()) + scales


class _View(NamedTuple):
    """The product as the kernel sees it: swapped kernels compute C' = B' A'."""

    m: int
    n: int
    k: int
    a: int
    b: int
    a_strides: Strides
    b_strides: Strides
    c_strides: Strides
    a_scale: int
    b_scale: int
    is_swapped: bool


class _Arguments:
    """Collects a kernel's arguments: passed ones with type and value, the rest as constants."""

    def __init__(self) -> None:
        self.signature: dict[str, str] = {}
        self.constants: dict[str, Any] = {}
        self.divisible: dict[str, int] = {}
        self.values: list[Pointer | Scratch | Descriptor | int] = []

    def give(self, name: str, kind: str, value: Any, divisible: int = 1) -> None:
        self.signature[name] = kind
        self.values.append(value)
        if divisible > 1:
            self.divisible[name] = divisible

    def size(self, name: str, value: int, matters: bool = False) -> None:
        """A size; its divisibility is made known where it bounds neighbours in memory."""
        self.give(name, "i32", value, gcd(value, 16) if matters else 1)

    def batch_stride(self, name: str, value: int) -> None:
        if value:
            self.give(name, "i64", value, gcd(value, 16))
        else:
            self.constants[name] = 0

    def stride(self, name: str, value: int, wide: bool = False) -> None:
        if value == 1:
            self.constants[name] = 1
        else:
            kind = "i64" if wide or value >= SMALL_STRIDE else "i32"
            self.give(name, kind, value, gcd(value, 16))


def default_strides(problem: GemmProblem) -> tuple[Strides, Strides, Strides]:
    """Of dense A, B and C in the problem's layout."""
    p = problem

    def dense(order: str, rows: int, cols: int) -> Strides:
        batch = rows * cols if p.batch > 1 else 0
        return (batch, cols, 1) if order == "r" else (batch, 1, rows)

    order = p.layout
    return dense(order[0], p.m, p.k), dense(order[1], p.k, p.n), dense(order[2], p.m, p.n)


def strides_of(problem: GemmProblem, shapes: Any) -> tuple[Strides, Strides, Strides]:
    """Normalised strides: those of sizes of one, which mean nothing, become the default ones."""
    p = problem
    extents = ((p.batch, p.m, p.k), (p.batch, p.k, p.n), (p.batch, p.m, p.n))
    result = []
    for given, extent, usual in zip(shapes, extents, default_strides(problem), strict=True):
        full = (0, *given) if len(given) == 2 else tuple(given)
        result.append(
            tuple(u if e == 1 else s for s, e, u in zip(full, extent, usual, strict=True))
        )
    return tuple(result)  # type: ignore[return-value]  # three operands in, three out


def representative(kernel: TritonGemmKernel) -> GemmProblem:
    """A problem of the usual kind for this kernel, to compile ahead of time for."""
    size = 4096
    short = {"gemv": 1, "skinny": kernel.tile_n}.get(kernel.family, kernel.tile_n)
    m = short if kernel.swap or kernel.family in ("gemv", "skinny") else size
    return GemmProblem(m=m, n=size, k=max(size, kernel.tile_k), dtype=kernel.dtype)


def launch(
    kernel: TritonGemmKernel,
    problem: GemmProblem,
    arch: Arch,
    *,
    strides: tuple[Strides, Strides, Strides] | None = None,
    is_aligned: bool = True,
    epilogue: Epilogue | None = None,
) -> Launch:
    """The kernel's source, grid and arguments.

    `is_aligned` says that every address is a multiple of 16 bytes.
    """
    view = _view(kernel, problem, strides or default_strides(problem))
    build = {
        "pointer": _pointer,
        "splitk": _pointer,
        "skinny": _pointer,
        "streamk": _streamk,
        "gemv": _gemv,
        "tma": _tma,
        "ws": _specialised,
        "duo": _specialised,
        "pingpong": _specialised,
    }[kernel.family]
    return build(kernel, problem, view, arch, is_aligned, epilogue or Epilogue())


def _view(
    kernel: TritonGemmKernel, problem: GemmProblem, strides: tuple[Strides, Strides, Strides]
) -> _View:
    p, (a, b, c) = problem, strides
    if not kernel.swaps(p):
        return _View(p.m, p.n, p.k, A, B, a, b, c, A_SCALE, B_SCALE, False)
    flip = [(batch, col, row) for batch, row, col in (b, a, c)]
    return _View(p.n, p.m, p.k, B, A, flip[0], flip[1], flip[2], B_SCALE, A_SCALE, True)


def _result(args: _Arguments, view: _View, problem: GemmProblem, aligned: int, e: Epilogue) -> None:
    """Arguments of what happens to a finished tile, C's address apart."""
    out = TRITON_TYPES[problem.out_dtype]
    if e.bias:
        args.give("bias_ptr", f"*{out}", Pointer(tensor=BIAS))
    else:
        args.constants["bias_ptr"] = None
    for name, tensor in (("a_scale_ptr", view.a_scale), ("b_scale_ptr", view.b_scale)):
        if e.scaling == "none":
            args.constants[name] = None
        else:
            args.give(name, "*fp32", Pointer(tensor=tensor))
    args.constants |= {"SWAP": view.is_swapped, "SCALE": e.scaling, "ACT": e.activation}


def _workspace(
    args: _Arguments, kernel: TritonGemmKernel, tiles: int, slots: int, slot_bytes: int
) -> tuple[int, int]:
    """Flags first, then partial sums; gives the workspace's bytes and how many must be zero."""
    if not slots:
        args.constants |= {"work": None, "flags": None}
        return 0, 0
    flags = -(-4 * tiles // 256) * 256
    accumulator = TRITON_TYPES[element(kernel.dtype).accumulator]
    args.give("work", f"*{accumulator}", Scratch(offset=flags), 16)
    args.give("flags", "*i32", Scratch(offset=0), 16)
    total = flags + slots * slot_bytes
    return total, total if kernel.atomic else flags


def _accumulation(kernel: TritonGemmKernel) -> dict[str, Any]:
    from triton import language as tl

    return {
        "ACC": tl.int32 if kernel.dtype == "int8" else tl.float32,
        "PRECISION": "tf32" if kernel.dtype == "tf32" else "ieee",
    }


def _operands(args: _Arguments, view: _View, problem: GemmProblem, aligned: int) -> None:
    kind = TRITON_TYPES[problem.dtype]
    args.give("a_ptr", f"*{kind}", Pointer(tensor=view.a), aligned)
    args.give("b_ptr", f"*{kind}", Pointer(tensor=view.b), aligned)
    args.give("c_ptr", f"*{TRITON_TYPES[problem.out_dtype]}", Pointer(tensor=C), aligned)


def _all_strides(args: _Arguments, view: _View, wide: bool = False) -> None:
    for name, strides in (("a", view.a_strides), ("b", view.b_strides), ("c", view.c_strides)):
        args.batch_stride(f"{name}_batch", strides[0])
        args.stride(f"{name}_row", strides[1], wide)
        args.stride(f"{name}_col", strides[2], wide)


def _sizes(args: _Arguments, view: _View) -> None:
    a_col, b_row = view.a_strides[1] == 1, view.b_strides[2] == 1
    args.size("M", view.m, a_col or view.c_strides[1] == 1)
    args.size("N", view.n, b_row or view.c_strides[2] == 1)
    args.size("K", view.k, view.a_strides[2] == 1 or view.b_strides[1] == 1)


def _tile_constants(kernel: TritonGemmKernel) -> dict[str, int]:
    return {
        "BM": kernel.tile_m,
        "BN": kernel.tile_n,
        "BK": kernel.tile_k,
        "GROUP_M": kernel.group_m,
    }


def _pointer_constants(kernel: TritonGemmKernel, view: _View) -> dict[str, Any]:
    return {
        "A_COL": view.a_strides[1] == 1 and view.a_strides[2] != 1,
        "B_ROW": view.b_strides[2] == 1 and view.b_strides[1] != 1,
        "EVEN_K": view.k % kernel.tile_k == 0,
        **_tile_constants(kernel),
        **_accumulation(kernel),
    }


def _source(args: _Arguments, function: str, kernel: TritonGemmKernel, **options: Any) -> Source:
    return Source(
        module="tilewise.ops.gemm.gluon" if options.get("gluon") else "tilewise.ops.gemm.triton",
        function=function,
        is_gluon=bool(options.pop("gluon", False)),
        signature=args.signature,
        constants=args.constants,
        divisible=args.divisible,
        options={"num_warps": kernel.warps, "num_stages": kernel.stages, **options},
    )


def _pointer(
    kernel: TritonGemmKernel, p: GemmProblem, view: _View, arch: Arch, aligned: bool, e: Epilogue
) -> Launch:
    args = _Arguments()
    _operands(args, view, p, 16 * aligned)
    _result(args, view, p, aligned, e)
    rows, cols = kernel.tiles(p)
    tiles = rows * cols * p.batch
    slots = tiles * (kernel.split_k if not kernel.atomic else 1) if kernel.split_k > 1 else 0
    total, zeroed = _workspace(args, kernel, tiles, slots, 4 * kernel.tile_m * kernel.tile_n)
    args.size("tiles_m", rows)
    args.size("tiles_n", cols)
    _sizes(args, view)
    _all_strides(args, view)
    args.constants |= _pointer_constants(kernel, view)
    args.constants |= {"SPLIT": kernel.split_k, "ATOMIC": kernel.atomic}
    return Launch(
        source=_source(args, "gemm_pointer", kernel),
        grid=(tiles * kernel.split_k, 1),
        arguments=tuple(args.values),
        workspace_bytes=total,
        zeroed_bytes=zeroed,
    )


def _stream_plan(kernel: TritonGemmKernel, tiles: int, steps: int, arch: Arch) -> tuple[int, int]:
    """(programs, tiles that are shared out by steps): the last wave and the one before it."""
    programs = min(arch.compute_units * kernel.blocks, tiles * steps)
    remainder = tiles % programs
    if not remainder:
        return programs, 0
    return programs, tiles if tiles < programs else programs + remainder


def _streamk(
    kernel: TritonGemmKernel, p: GemmProblem, view: _View, arch: Arch, aligned: bool, e: Epilogue
) -> Launch:
    args = _Arguments()
    _operands(args, view, p, 16 * aligned)
    _result(args, view, p, aligned, e)
    rows, cols = kernel.tiles(p)
    tiles = rows * cols * p.batch
    programs, shared = _stream_plan(kernel, tiles, -(-p.k // kernel.tile_k), arch)
    slot_bytes = 4 * kernel.tile_m * kernel.tile_n
    total, zeroed = _workspace(args, kernel, tiles, 2 * programs, slot_bytes)
    args.size("tiles", tiles)
    args.size("stream_tiles", shared)
    args.size("tiles_m", rows)
    args.size("tiles_n", cols)
    _sizes(args, view)
    _all_strides(args, view)
    args.constants |= _pointer_constants(kernel, view)
    return Launch(
        source=_source(args, "gemm_streamk", kernel),
        grid=(programs, 1),
        arguments=tuple(args.values),
        workspace_bytes=total,
        zeroed_bytes=zeroed,
    )


def _gemv(
    kernel: TritonGemmKernel, p: GemmProblem, view: _View, arch: Arch, aligned: bool, e: Epilogue
) -> Launch:
    args = _Arguments()
    _operands(args, view, p, 16 * aligned)
    _result(args, view, p, aligned, e)
    tiles = -(-view.m // kernel.tile_m)
    slots = tiles * kernel.split_k * p.batch if kernel.split_k > 1 else 0
    total, zeroed = _workspace(args, kernel, tiles * p.batch, slots, 4 * kernel.tile_m * view.n)
    args.size("M", view.m, view.a_strides[1] == 1)
    args.size("K", view.k, view.a_strides[2] == 1 or view.b_strides[1] == 1)
    _all_strides(args, view, wide=True)
    args.constants |= {
        "VECTORS": view.n,
        "BM": kernel.tile_m,
        "BK": kernel.tile_k,
        "SPLIT": kernel.split_k,
    }
    return Launch(
        source=_source(args, "gemv", kernel),
        grid=(tiles * kernel.split_k, p.batch),
        arguments=tuple(args.values),
        workspace_bytes=total,
        zeroed_bytes=zeroed,
    )


def _box(rows: int, cols: int, along_rows: bool) -> tuple[int, int]:
    return (rows, cols) if along_rows else (cols, rows)


def _cut_plan(kernel: TritonGemmKernel, tiles: int, steps: int, arch: Arch) -> tuple[int, int, int]:
    """(programs, tiles computed whole, slices of each of the others)."""
    room = arch.compute_units * kernel.blocks
    if kernel.fill:
        rest = tiles % room
        # One program adds all slices up, so beyond some number each costs more than it saves.
        worth = min(steps // FEWEST_STEPS, int(1.5 * steps**0.5))
        cut = max(1, min(room // rest, worth)) if rest else 1
        return min(room, tiles * cut), tiles - rest, cut
    whole = 0 if kernel.split_k > 1 else tiles
    return min(room, tiles * kernel.split_k), whole, kernel.split_k


def _descriptor(
    tensor: int, name: str, strides: Strides, batch: int, rows: int, cols: int, size: int
) -> Descriptor:
    """Over [batch, outer, contiguous]; what TMA cannot address is refused."""
    by_rows = strides[2] == 1
    if not by_rows and strides[1] != 1:
        raise TensorError(f"{name} has strides {strides[1:]}; TMA needs one of them to be 1")
    outer, inner, pitch = (rows, cols, strides[1]) if by_rows else (cols, rows, strides[2])
    jump = strides[0] if batch > 1 else outer * pitch
    if pitch * size % 16 or jump * size % 16 or pitch < inner:
        raise TensorError(
            f"{name} has strides {strides} of {size}-byte elements; TMA needs multiples of 16 bytes"
        )
    return Descriptor(tensor=tensor, shape=(batch, outer, inner), strides=(jump, pitch, 1))


def _plane(descriptor: Descriptor) -> Descriptor:
    """The same without its batch dimension."""
    return Descriptor(
        tensor=descriptor.tensor, shape=descriptor.shape[1:], strides=descriptor.strides[1:]
    )


def _require_alignment(aligned: bool) -> None:
    if not aligned:
        raise TensorError("TMA needs addresses that are multiples of 16 bytes")


def _tma(
    kernel: TritonGemmKernel, p: GemmProblem, view: _View, arch: Arch, aligned: bool, e: Epilogue
) -> Launch:
    _require_alignment(aligned)
    args = _Arguments()
    kind, size = TRITON_TYPES[p.dtype], element(p.dtype).bytes
    a = _plane(_descriptor(view.a, "A", view.a_strides, 1, view.m, view.k, size))
    b = _plane(_descriptor(view.b, "B", view.b_strides, 1, view.k, view.n, size))
    a_row, b_row = view.a_strides[2] == 1, view.b_strides[2] == 1
    a_box = _box(kernel.tile_m, kernel.tile_k, a_row)
    b_box = _box(kernel.tile_k, kernel.tile_n, b_row)
    args.give("ad", f"tensordesc<{kind}{list(a_box)}>", a)
    args.give("bd", f"tensordesc<{kind}{list(b_box)}>", b)
    args.give("c_ptr", f"*{TRITON_TYPES[p.out_dtype]}", Pointer(tensor=C), 16)
    _result(args, view, p, 16, e)
    rows, cols = kernel.tiles(p)
    args.size("tiles", rows * cols)
    args.size("tiles_m", rows)
    args.size("tiles_n", cols)
    args.size("steps", -(-p.k // kernel.tile_k))
    args.size("M", view.m, view.c_strides[1] == 1)
    args.size("N", view.n, view.c_strides[2] == 1)
    args.batch_stride("c_batch", view.c_strides[0])
    args.stride("c_row", view.c_strides[1])
    args.stride("c_col", view.c_strides[2])
    args.constants |= {"A_ROW": a_row, "B_ROW": b_row}
    args.constants |= _tile_constants(kernel) | _accumulation(kernel)
    return Launch(
        source=_source(args, "gemm_tma", kernel),
        grid=(min(rows * cols, arch.compute_units * kernel.blocks), 1),
        arguments=tuple(args.values),
    )


def _shared_descriptor(kind: str, box: tuple[int, ...]) -> str:
    """A Gluon descriptor's type: element, box, and the swizzle that suits both."""
    from triton.experimental.gluon import language as gl

    bits = {"fp32": gl.float32, "i32": gl.int32, "fp16": gl.float16, "bf16": gl.bfloat16}
    layout = gl.NVMMASharedLayout.get_default_for(list(box), bits.get(kind, gl.int8))
    return f"tensordesc<{kind}{list(box)},{layout!r}>"


def _specialised(
    kernel: TritonGemmKernel, p: GemmProblem, view: _View, arch: Arch, aligned: bool, e: Epilogue
) -> Launch:
    _require_alignment(aligned)
    args = _Arguments()
    kind, size = TRITON_TYPES[p.dtype], element(p.dtype).bytes
    a = _descriptor(view.a, "A", view.a_strides, p.batch, view.m, view.k, size)
    b = _descriptor(view.b, "B", view.b_strides, p.batch, view.k, view.n, size)
    a_row, b_row = view.a_strides[2] == 1, view.b_strides[2] == 1
    if size != 2 and (not a_row or b_row):
        raise TensorError(f"in {p.dtype} warpgroup products need both operands along K")
    a_box = (1, *_box(kernel.tile_m, kernel.tile_k, a_row))
    wide, extra = kernel.columns
    b_box = (1, *_box(kernel.tile_k, wide, b_row))
    args.give("ad", _shared_descriptor(kind, a_box), a)
    args.give("bd", _shared_descriptor(kind, b_box), b)
    if extra:
        e_box = (1, *_box(kernel.tile_k, extra, b_row))
        args.give("ed", _shared_descriptor(kind, e_box), b)
    _specialised_result(args, kernel, p, view, arch, e)
    rows, cols = kernel.tiles(p)
    tiles, steps = rows * cols * p.batch, -(-p.k // kernel.tile_k)
    programs, whole, cut = _cut_plan(kernel, tiles, steps, arch)
    total = zeroed = 0
    if kernel.family == "ws":
        slots = (tiles - whole) * cut if cut > 1 else 0
        is_cut = kernel.fill or kernel.split_k > 1
        slot_bytes = 4 * kernel.tile_m * kernel.tile_n
        # Kernels that may cut take the addresses even where this problem needs none.
        total, zeroed = _workspace(args, kernel, tiles, max(slots, is_cut), slot_bytes)
        args.size("tiles", tiles)
        args.size("whole", whole)
        args.size("cut", cut)
        args.constants["CUT"] = is_cut
    else:
        args.size("tiles", tiles)
        args.constants["SHARE"] = kernel.family == "duo"
    args.size("tiles_m", rows)
    args.size("tiles_n", cols)
    args.size("steps", steps)
    args.size("M", view.m)
    args.size("N", view.n)
    _specialised_strides(args, view)
    args.constants |= {"A_ROW": a_row, "B_ROW": b_row, "STAGES": kernel.stages}
    args.constants |= _tile_constants(kernel) | _layout_constants(kernel, p)
    if extra:
        args.constants |= {"BN": wide, "EN": extra}
    return Launch(
        source=_source(
            args,
            _specialised_function(kernel),
            kernel,
            gluon=True,
            maxnreg=_register_cap(kernel),
        ),
        grid=(programs, 1),
        arguments=tuple(args.values),
        workspace_bytes=total,
        zeroed_bytes=zeroed,
    )


def _specialised_function(kernel: TritonGemmKernel) -> str:
    if kernel.family in TWO_GROUP_FAMILIES:
        return "gemm_two_groups"
    return "gemm_uneven" if kernel.columns[1] else "gemm_ws"


def _specialised_result(
    args: _Arguments,
    kernel: TritonGemmKernel,
    p: GemmProblem,
    view: _View,
    arch: Arch,
    e: Epilogue,
) -> None:
    """Through shared memory and TMA where C allows it, else from registers."""
    out, size = TRITON_TYPES[p.out_dtype], element(p.out_dtype).bytes
    room = staging(kernel, size, arch)
    batch, row, col = view.c_strides
    strides = (batch, col, row) if view.is_swapped else (batch, row, col)
    rows, cols = (view.n, view.m) if view.is_swapped else (view.m, view.n)
    descriptor = None
    if room and strides[2] == 1:
        try:
            descriptor = _descriptor(C, "C", strides, p.batch, rows, cols, size)
        except TensorError:
            descriptor = None
    parts, buffers = room if room and descriptor else (1, 1)
    if descriptor:
        narrow, tall = kernel.tile_n // parts, kernel.tile_m
        if kernel.family == "duo":
            tall //= 2
        box = (1, narrow, tall) if view.is_swapped else (1, tall, narrow)
        args.give("cd", _shared_descriptor(out, box), descriptor)
        args.constants["c_ptr"] = None
    else:
        args.constants["cd"] = None
        args.give("c_ptr", f"*{out}", Pointer(tensor=C))
    args.constants |= {"TMA_STORE": descriptor is not None, "BUFFERS": buffers}
    extra = kernel.columns[1]
    if extra:
        args.constants["NARROW"] = kernel.tile_n // parts if descriptor else extra
    else:
        args.constants["PARTS"] = parts
    _result(args, view, p, 16, e)


def _specialised_strides(args: _Arguments, view: _View) -> None:
    names = ("c_batch", "c_row", "c_col")
    if args.constants["TMA_STORE"]:
        args.constants |= dict.fromkeys(names, 0)
        return
    for name, stride in zip(names, view.c_strides, strict=True):
        if stride in (0, 1):
            args.constants[name] = stride
        else:
            args.give(name, "i64", stride)


def _layout_constants(kernel: TritonGemmKernel, p: GemmProblem) -> dict[str, Any]:
    from triton.experimental.gluon import language as gl

    wide, extra = kernel.columns

    def layout(columns: int) -> Any:
        return gl.NVMMADistributedLayout(
            version=[3, 0],
            warps_per_cta=[kernel.warps, 1],
            instr_shape=[16, min(columns, 256), 32 // element(p.dtype).bytes],
        )

    kinds = {"fp32": gl.float32, "fp16": gl.float16, "bf16": gl.bfloat16, "int32": gl.int32}
    return {
        "layout": layout(wide),
        **({"e_layout": layout(extra)} if extra else {}),
        "acc_type": gl.int32 if p.dtype == "int8" else gl.float32,
        "out_type": kinds[p.out_dtype],
    }


def _register_cap(kernel: TritonGemmKernel) -> int | None:
    """Registers per thread at launch; math warps then take over what the load warp gives up.

    The load warp counts as four, so a block of w math warps launches w + 4.
    """
    if kernel.family in TWO_GROUP_FAMILIES or kernel.warps > 4:
        return 168
    return {1: None, 2: 128, 3: 80, 4: 64}[kernel.blocks]
