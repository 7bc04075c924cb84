"""Grouped convolution in 1, 2 or 3 dimensions, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from tilewise.core.dtypes import OPERAND_DTYPES, dtype
from tilewise.core.problem import GemmView, Problem, check_dtypes, check_size
from tilewise.core.sizes import gcd
from tilewise.core.tensors import Storage
from tilewise.errors import ProblemError

DIRECTIONS = ("fwd", "bwd_data", "bwd_weight")
LAYOUTS = ("nhwc", "nchw")
"""Memory order of activations; filters follow: k z y x c under nhwc, k c z y x under nchw."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConvProblem(Problem):
    """One convolution. Sizes are those of the forward input in every direction.

    `c` and `k` count the channels of all `g` groups. A 1-D convolution runs along `w` with
    `h = y = 1`; a 2-D one has `d = z = 1`. Under nhwc activations lie as [n, d, h, w, channels] and
    filters as [k, z, y, x, c / g], under nchw as [n, channels, d, h, w] and [k, c / g, z, y, x].
    """

    direction: str = "fwd"
    n: int
    c: int
    k: int
    g: int = 1
    d: int = 1
    h: int = 1
    w: int
    z: int = 1
    y: int = 1
    x: int
    stride_d: int = 1
    stride_h: int = 1
    stride_w: int = 1
    pad_d: int = 0
    pad_h: int = 0
    pad_w: int = 0
    dilation_d: int = 1
    dilation_h: int = 1
    dilation_w: int = 1
    dtype: str = "fp32"
    out_dtype: str = ""
    layout: str = "nhwc"

    KEYS: ClassVar[dict[str, str]] = {
        "N": "n",
        "C": "c",
        "K": "k",
        "G": "g",
        "Di": "d",
        "Hi": "h",
        "Wi": "w",
        "Z": "z",
        "Y": "y",
        "X": "x",
        **{
            f"{what}_{dim}": f"{what}_{dim}"
            for what in ("stride", "pad", "dilation")
            for dim in "dhw"
        },
        "dtype": "dtype",
        "out_dtype": "out_dtype",
        "layout": "layout",
        "direction": "direction",
    }

    def __post_init__(self) -> None:
        if self.direction not in DIRECTIONS:
            raise ProblemError(f"direction is {self.direction!r}; use {', '.join(DIRECTIONS)}")
        if self.layout not in LAYOUTS:
            raise ProblemError(f"layout is {self.layout!r}; use one of {', '.join(LAYOUTS)}")
        for key, field in self.KEYS.items():
            if field not in ("dtype", "out_dtype", "layout", "direction"):
                least = 0 if key in ("N", "C", "K") or key.startswith("pad") else 1
                object.__setattr__(self, field, check_size(key, getattr(self, field), least))
        for key, channels in (("C", self.c), ("K", self.k)):
            if channels % self.g:
                raise ProblemError(f"{key} is {channels}, which {self.g} groups (G) do not divide")
        for dim, taps in (("d", self.z), ("h", self.y), ("w", self.x)):
            size, pad = getattr(self, dim), getattr(self, f"pad_{dim}")
            reach = (taps - 1) * getattr(self, f"dilation_{dim}") + 1
            if size + 2 * pad < reach:
                raise ProblemError(
                    f"the filter spans {reach} along {dim}, but the padded input has only "
                    f"{size + 2 * pad}; enlarge {dim} or pad_{dim}"
                )
        object.__setattr__(
            self, "out_dtype", check_dtypes(self.dtype, self.out_dtype, OPERAND_DTYPES)
        )
        self._settle()

    @property
    def op(self) -> str:
        return f"conv_{self.direction}"

    def _out(self, dim: str, taps: int) -> int:
        size, pad = getattr(self, dim), getattr(self, f"pad_{dim}")
        reach = (taps - 1) * getattr(self, f"dilation_{dim}") + 1
        out: int = (size + 2 * pad - reach) // getattr(self, f"stride_{dim}") + 1
        return out

    @property
    def out_d(self) -> int:
        return self._out("d", self.z)

    @property
    def out_h(self) -> int:
        return self._out("h", self.y)

    @property
    def out_w(self) -> int:
        return self._out("w", self.x)

    @property
    def out_pixels(self) -> int:
        """Positions of the forward output, all images together."""
        return self.n * self.out_d * self.out_h * self.out_w

    @property
    def in_pixels(self) -> int:
        """Positions of the forward input, all images together."""
        return self.n * self.d * self.h * self.w

    @property
    def taps(self) -> int:
        """Positions of the filter."""
        return self.z * self.y * self.x

    @property
    def ndim(self) -> int:
        """3, 2 or 1: the fewest dimensions that describe the same work."""
        if (self.d, self.z, self.pad_d) != (1, 1, 0):
            return 3
        return 1 if (self.h, self.y, self.pad_h) == (1, 1, 0) else 2

    @property
    def is_depthwise(self) -> bool:
        """Whether every group has a single input channel."""
        return self.g > 1 and self.c == self.g

    @property
    def is_pointwise(self) -> bool:
        """Whether the filter is 1x1, unpadded and unstrided: a plain GEMM per group."""
        is_padded = self.pad_d or self.pad_h or self.pad_w
        return self.taps == 1 and not is_padded and self.in_pixels == self.out_pixels

    @property
    def input_elements(self) -> int:
        return self.in_pixels * self.c

    @property
    def filter_elements(self) -> int:
        return self.k * (self.c // self.g) * self.taps

    @property
    def output_elements(self) -> int:
        return self.out_pixels * self.k

    @property
    def flops(self) -> int:
        return 2 * self.out_pixels * self.k * (self.c // self.g) * self.taps

    @property
    def bytes(self) -> int:
        sizes = {
            "bwd_data": self.input_elements,
            "bwd_weight": self.filter_elements,
            "fwd": self.output_elements,
        }
        written = sizes[self.direction]
        read = self.input_elements + self.filter_elements + self.output_elements - written
        return read * dtype(self.dtype).bytes + written * dtype(self.out_dtype).bytes

    @property
    def gemm(self) -> GemmView:
        """The product whose m x n result is the op's output, per group.

        Forward is pixels x k x (taps c), backward-weight k x (taps c) x pixels. In backward-data
        a stride leaves only some taps that reach a given input pixel; the most that can are
        counted, so strided layers are not charged for products that do not exist.
        """
        c, k = self.c // self.g, self.k // self.g
        if self.direction == "fwd":
            return GemmView(self.g, self.out_pixels, k, c * self.taps)
        if self.direction == "bwd_weight":
            return GemmView(self.g, k, c * self.taps, self.out_pixels)
        reaching = 1
        for dim, taps in (("d", self.z), ("h", self.y), ("w", self.x)):
            stride, dilation = getattr(self, f"stride_{dim}"), getattr(self, f"dilation_{dim}")
            reaching *= -(-taps // (stride // gcd(stride, dilation)))
        return GemmView(self.g, self.in_pixels, c, k * reaching)


def shapes(problem: ConvProblem) -> tuple[tuple[int, ...], ...]:
    """Logical shapes, channels second, of the two operands and the result."""
    p = problem
    at = 3 - p.ndim
    x = (p.n, p.c, *(p.d, p.h, p.w)[at:])
    w = (p.k, p.c // p.g, *(p.z, p.y, p.x)[at:])
    y = (p.n, p.k, *(p.out_d, p.out_h, p.out_w)[at:])
    return {"fwd": (x, w, y), "bwd_data": (y, w, x), "bwd_weight": (x, y, w)}[p.direction]


def padded(problem: ConvProblem, alignment: tuple[int, ...]) -> ConvProblem:
    """The smallest problem at least as large whose C and K are multiples of `alignment`.

    Groups stay as they are: room for more channels in each would move those of the next.
    """
    c, k = (
        -(-count // least) * least
        for count, least in zip((problem.c, problem.k), alignment, strict=True)
    )
    if problem.g > 1 or (c, k) == (problem.c, problem.k):
        return problem
    return replace(problem, c=c, k=k)


def storage(problem: ConvProblem) -> tuple[Storage, ...]:
    """Packed in the problem's layout; only images (or filters) may lie further apart."""
    rank = problem.ndim + 2
    spatial = tuple(range(2, rank))
    axes = (0, *spatial, 1) if problem.layout == "nhwc" else (0, 1, *spatial)
    return (Storage(axes, dense=rank - 1),) * 3
