"""Arguments that GPU GEMM kernels have in common, and what they are compiled with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from tilewise.core.dtypes import dtype as element
from tilewise.errors import InputError
from tilewise.ops.arguments import Collected, check_activation
from tilewise.ops.gemm.kernels.gpu import GpuGemmKernel
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.ops.launch import TRITON_TYPES, Launch, Pointer, Scratch, Source, Step, Word

SCALINGS = ("none", "tensor", "row")
A, B, C, BIAS, A_SCALE, B_SCALE = range(6)
"""Positions of the tensors of a call."""
SMALL_STRIDE = 2**20
"""Below this the offsets of a tile with sides up to 2048 fit in 32 bits."""

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
        check_activation(self.activation)
        if self.scaling not in SCALINGS:
            raise InputError(f"scaling is {self.scaling!r}; use one of {SCALINGS}")

    @property
    def tensors(self) -> tuple[int, ...]:
        """Positions of what a call takes besides A, B and C, in the order given."""
        scales = () if self.scaling == "none" else (A_SCALE, B_SCALE)
        return ((BIAS,) if self.bias else ()) + scales


class View(NamedTuple):
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


class Arguments(Collected):
    """A GEMM kernel's arguments."""

    def __init__(self, item_bytes: int) -> None:
        super().__init__()
        self._multiples = (16 // item_bytes, max(1, 4 // item_bytes), 1)

    def _multiple(self, value: int) -> int:
        """What the kernel may take a size or stride to be a multiple of.

        Three classes are told apart, as each is compiled on its own: what loads of 16 bytes
        need, what the shortest asynchronous ones of 4 need, and anything.
        """
        return next(multiple for multiple in self._multiples if value % multiple == 0)

    def size(self, name: str, value: int, matters: bool = False) -> None:
        """A size; its divisibility is made known where it bounds neighbours in memory."""
        self.give(name, "i32", value, self._multiple(value) if matters else 1)

    def batch_stride(self, name: str, value: int) -> None:
        if value:
            self.give(name, "i64", value, self._multiple(value))
        else:
            self.constants[name] = 0

    def stride(self, name: str, value: int, wide: bool = False) -> None:
        if value == 1:
            self.constants[name] = 1
        else:
            kind = "i64" if wide or value >= SMALL_STRIDE else "i32"
            self.give(name, kind, value, self._multiple(value))


def give_result(args: Arguments, view: View, problem: GemmProblem, e: Epilogue) -> None:
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


def give_workspace(
    args: Arguments, kernel: GpuGemmKernel, tiles: int, slots: int, slot_bytes: int
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


def accumulation(kernel: GpuGemmKernel) -> dict[str, Any]:
    return {
        "ACC": Word(name="int32" if kernel.dtype == "int8" else "float32"),
        "PRECISION": "tf32" if kernel.dtype == "tf32" else "ieee",
    }


def tile_constants(kernel: GpuGemmKernel) -> dict[str, int]:
    return {
        "BM": kernel.tile_m,
        "BN": kernel.tile_n,
        "BK": kernel.tile_k,
        "GROUP_M": kernel.group_m,
    }


def source(args: Arguments, function: str, kernel: GpuGemmKernel, **options: Any) -> Source:
    return Source(
        module="tilewise.ops.gemm.gluon" if options.get("gluon") else "tilewise.ops.gemm.triton",
        function=function,
        is_gluon=bool(options.pop("gluon", False)),
        signature=args.signature,
        constants=args.constants,
        divisible=args.divisible,
        options={"num_warps": kernel.warps, "num_stages": kernel.stages, **options},
    )


def one_step(
    args: Arguments, source: Source, grid: tuple[int, int], total: int = 0, zeroed: int = 0
) -> Launch:
    """A launch of one kernel, with the bytes of its workspace and how many must be zero."""
    step = Step(source=source, grid=(*grid, 1), arguments=tuple(args.values))
    return Launch(steps=(step,), workspace_bytes=total, zeroed_bytes=zeroed)
