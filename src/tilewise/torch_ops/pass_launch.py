"""How the passes between layers are compiled and launched, for one size of tensor."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.core.arch import Arch
from tilewise.core.dtypes import dtype as element
from tilewise.ops.arguments import check_activation
from tilewise.ops.launch import TRITON_TYPES, Launch, Scratch
from tilewise.torch_ops.channel_tiles import COLUMNS, ROWS, TileCall, Tiles

MODULE = "tilewise.torch_ops.pass_triton"
Y, Z, VECTOR, FACTORS, RESIDUAL, DY, DZ, DVECTOR = range(8)
G, U, DG, DU = range(8, 12)
FINISH = {"BR": 64, "BC": 16}
"""Of the tiles that sums of slices are added up in."""
GATE_ROWS, GATE_COLUMNS = 4, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Weigh(Tiles):
    """A weight of each channel, perhaps a factor of each sample, then an addition."""

    dtype: str
    weight: str
    """The weight's type."""
    out: str
    """Of the result, the factors and what is added."""
    has_factors: bool

    @property
    def forward_order(self) -> tuple[int, ...]:
        """The tensors of a call, in its order."""
        return (Y, Z, VECTOR, RESIDUAL, *((FACTORS,) if self.has_factors else ()))

    def forward(self, arch: Arch) -> Launch:
        call = TileCall()
        call.tensor("z", TRITON_TYPES[self.dtype], Z)
        call.tensor("weight", TRITON_TYPES[self.weight], VECTOR, by=1)
        self._give_factors(call)
        call.tensor("residual", TRITON_TYPES[self.out], RESIDUAL)
        call.tensor("y", TRITON_TYPES[self.out], Y)
        return _forward(call, "weigh_forward", self, arch)

    def backward_order(self, wants_sums: bool) -> tuple[int, ...]:
        more = ((FACTORS, self.has_factors), (Z, wants_sums), (DVECTOR, wants_sums))
        return (DZ, DY, VECTOR, *(at for at, is_there in more if is_there))

    def backward(self, arch: Arch, wants_sums: bool) -> Launch:
        """The gradient of what was weighed, and the weight's where it is wanted."""
        call = TileCall()
        call.tensor("dy", TRITON_TYPES[self.out], DY)
        call.tensor("z", TRITON_TYPES[self.dtype], Z if wants_sums else None)
        call.tensor("weight", TRITON_TYPES[self.weight], VECTOR, by=1)
        self._give_factors(call)
        call.tensor("dz", TRITON_TYPES[self.dtype], DZ)
        return _backward(call, "weigh_backward", self, arch, self.weight if wants_sums else "")

    def _give_factors(self, call: TileCall) -> None:
        call.tensor("factors", TRITON_TYPES[self.out], FACTORS if self.has_factors else None, by=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias(Tiles):
    """A bias of each channel, then an activation."""

    dtype: str
    bias: str
    """The bias's type."""
    activation: str

    forward_order = (Y, Z, VECTOR)
    backward_order = (DZ, DY, Z, VECTOR, DVECTOR)

    def __post_init__(self) -> None:
        check_activation(self.activation)

    def forward(self, arch: Arch) -> Launch:
        call = TileCall()
        call.tensor("z", TRITON_TYPES[self.dtype], Z)
        call.tensor("bias", TRITON_TYPES[self.bias], VECTOR, by=1)
        call.tensor("y", TRITON_TYPES[self.dtype], Y)
        call.constants["ACT"] = self.activation
        return _forward(call, "bias_forward", self, arch)

    def backward(self, arch: Arch) -> Launch:
        """The gradients of what was activated and of the bias."""
        call = TileCall()
        call.tensor("dy", TRITON_TYPES[self.dtype], DY)
        call.tensor("z", TRITON_TYPES[self.dtype], Z)
        call.tensor("bias", TRITON_TYPES[self.bias], VECTOR, by=1)
        call.tensor("dz", TRITON_TYPES[self.dtype], DZ)
        call.constants["ACT"] = self.activation
        return _backward(call, "bias_backward", self, arch, self.bias)


def _forward(call: TileCall, function: str, tiles: Tiles, arch: Arch) -> Launch:
    _give_sizes(call, tiles)
    grid = (tiles.all_tiles * tiles.columns,)
    return Launch(steps=(call.step(MODULE, function, grid, arch, BR=ROWS, BC=COLUMNS),))


def _backward(call: TileCall, function: str, tiles: Tiles, arch: Arch, sums: str) -> Launch:
    """One pass, and the sums it leaves added up into a vector of type `sums`; empty for none."""
    slices = tiles.slices(arch)
    call.tensor("work", "fp32", Scratch(offset=0) if sums else None)
    _give_sizes(call, tiles)
    call.numbers(all_tiles=tiles.all_tiles, slices=slices)
    grid = (tiles.columns, slices)
    one = call.step(MODULE, function, grid, arch, BR=ROWS, BC=COLUMNS)
    if not sums:
        return Launch(steps=(one,))
    call = TileCall()
    call.tensor("work", "fp32", Scratch(offset=0))
    call.tensor("out", TRITON_TYPES[sums], DVECTOR, by=1)
    call.numbers(channels=tiles.channels, rows=slices * tiles.fold)
    two = call.step(MODULE, "add_rows", (-(-tiles.channels // FINISH["BC"]),), arch, **FINISH)
    return Launch(steps=(one, two), workspace_bytes=4 * slices * tiles.width)


def _give_sizes(call: TileCall, tiles: Tiles) -> None:
    call.numbers("i64", part=tiles.pixels * tiles.channels)
    call.numbers(channels=tiles.channels, width=tiles.width, tiles=tiles.tiles)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """ACT(g) * u of `rows` times `width` elements, rows of g and of u so far from each other."""

    rows: int
    width: int
    dtype: str
    activation: str
    g_row: int
    u_row: int

    forward_order = (Y, G, U)
    backward_order = (DG, DU, DY, G, U)

    def __post_init__(self) -> None:
        check_activation(self.activation)

    def forward(self, arch: Arch) -> Launch:
        return self._launch("gate_forward", {"g": G, "u": U, "y": Y}, arch)

    def backward(self, arch: Arch) -> Launch:
        """The gradients of g and of u."""
        return self._launch("gate_backward", {"dy": DY, "g": G, "u": U, "dg": DG, "du": DU}, arch)

    def _launch(self, function: str, tensors: dict[str, int], arch: Arch) -> Launch:
        call, total = TileCall(), self.rows * self.width
        # Packed ones are one long row, cut into rows as long as a tile.
        is_packed = self.g_row == self.u_row == self.width
        width = GATE_COLUMNS if is_packed else self.width
        for name, at in tensors.items():
            call.tensor(name, TRITON_TYPES[self.dtype], at)
        rows = {"g_row": self.g_row, "u_row": self.u_row}
        call.numbers("i64", **(dict.fromkeys(rows, width) if is_packed else rows))
        call.numbers(width=width)
        call.numbers("i64", total=total)
        call.constants["ACT"] = self.activation
        grid = (-(-total // (width * GATE_ROWS)), -(-width // GATE_COLUMNS))
        step = call.step(MODULE, function, grid, arch, BR=GATE_ROWS, BC=GATE_COLUMNS)
        return Launch(steps=(step,))


@dataclass(frozen=True, slots=True, kw_only=True)
class GateProducts:
    """ACT(x gate^T) * (x up^T) in one kernel: x is [m, k], both filters [n, k], all packed."""

    m: int
    n: int
    k: int
    dtype: str
    activation: str

    forward_order = (Y, Z, G, U)

    def __post_init__(self) -> None:
        check_activation(self.activation)

    @property
    def tile(self) -> tuple[int, int, int, int]:
        """Sides of a tile, a step of the reduction, and warps.

        Few rows wait for memory, and want many short rows of the filters in flight; with many, two
        accumulators of 128 x 128 are what registers hold.
        """
        step = 128 // element(self.dtype).bytes
        if self.m <= 16:
            return 16, 32, 4 * step, 4
        return (64, 64, 2 * step, 4) if self.m <= 64 else (128, 128, step, 8)

    def forward(self, arch: Arch) -> Launch:
        rows, columns, step, warps = self.tile
        stage = (rows + 2 * columns) * step * element(self.dtype).bytes
        stages = max(1, min(4, arch.smem_per_block_bytes // stage - 1))
        call, aligned = TileCall(), 16 if self.k % 8 == 0 else 1
        for name, at in (("x", Z), ("gate", G), ("up", U), ("y", Y)):
            call.tensor(name, TRITON_TYPES[self.dtype], at, aligned)
        call.numbers(M=self.m, N=self.n, K=self.k)
        tiles = -(-self.m // rows), -(-self.n // columns)
        call.numbers(tiles_m=tiles[0], tiles_n=tiles[1])
        call.constants |= {"ACT": self.activation, "BM": rows, "BN": columns, "BK": step}
        call.constants |= {"GROUP_M": 8, "EVEN_K": self.k % step == 0}
        call.constants["PRECISION"] = "tf32" if self.dtype == "tf32" else "ieee"
        grid = (tiles[0] * tiles[1],)
        kernel = "gate_products"
        one = call.step(MODULE, kernel, grid, arch, warps=warps, stages=stages)
        return Launch(steps=(one,))
