"""How the kernels of BatchNorm are compiled and launched, for one size of tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilewise.core.arch import Arch
from tilewise.ops.arguments import check_activation
from tilewise.ops.launch import TRITON_TYPES, Launch, Scratch, Step
from tilewise.torch_ops.channel_tiles import COLUMNS, ROWS, TileCall, Tiles

MODULE = "tilewise.torch_ops.norm_triton"
Z, Y, DY, DZ, STATS, SUMS, RESIDUAL, DRESIDUAL = range(8)
GAMMA, BETA, DGAMMA, DBETA, MEAN, VAR, TRACKED = range(8, 15)
"""Tensors of a call; those of the second line are no larger than the channels."""
FINISH = {"BR": 64, "BC": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm(Tiles):
    """A BatchNorm over `pixels` of so many `channels`, with all that decides its kernels."""

    dtype: str
    parameters: str = ""
    """The type of gamma and beta; empty where there are none."""
    running: str = ""
    """The type of the running statistics; empty where none are kept."""
    is_tracked: bool = False
    """Whether batches are counted."""
    has_sums: bool = False
    """Whether sums and sums of squares of each channel are given."""
    has_residual: bool = False
    activation: str = "none"
    eps: float = 1e-5
    momentum: float = 0.1

    def __post_init__(self) -> None:
        check_activation(self.activation)

    @property
    def reads_result(self) -> bool:
        """Whether the backward pass takes relu's slope from the result, as a residual is gone."""
        return self.has_residual and self.activation == "relu"

    @property
    def forward_order(self) -> tuple[int, ...]:
        """The tensors of `forward`, in the order of a call."""
        return (Y, Z, STATS, *self._asked((SUMS, self.has_sums), *self._both))

    @property
    def apply_order(self) -> tuple[int, ...]:
        """Of `apply`."""
        return (Y, Z, STATS, *self._asked((RESIDUAL, self.has_residual)))

    def backward_order(self, wants_residual: bool) -> tuple[int, ...]:
        """Of `backward`."""
        has = bool(self.parameters)
        more = ((Y, self.reads_result), (DRESIDUAL, wants_residual), (DGAMMA, has), (DBETA, has))
        return (DZ, DY, Z, STATS, *self._asked(*more))

    @property
    def _both(self) -> tuple[tuple[int, Any], ...]:
        given = ((RESIDUAL, self.has_residual), (GAMMA, self.parameters), (BETA, self.parameters))
        return (*given, (MEAN, self.running), (VAR, self.running), (TRACKED, self.is_tracked))

    @staticmethod
    def _asked(*tensors: tuple[int, Any]) -> tuple[int, ...]:
        return tuple(tensor for tensor, is_there in tensors if is_there)


class _NormCall(TileCall):
    """A kernel's arguments; big tensors begin at multiples of 16 bytes."""

    def tensor(self, name: str, kind: str, at: int | Scratch | None, by: int = 16) -> None:
        is_small = isinstance(at, int) and at >= GAMMA
        super().tensor(name, kind, at, 1 if is_small else by)


def forward(norm: Norm, arch: Arch) -> Launch:
    """Statistics of the batch, then the normalised, activated result."""
    steps, slices = [], norm.slices(arch)
    work: int | Scratch = SUMS if norm.has_sums else Scratch(offset=0)
    if not norm.has_sums:
        call = _NormCall()
        call.tensor("z", _kind(norm), Z)
        call.tensor("work", "fp32", work)
        _sizes(call, norm)
        call.numbers(tiles=norm.tiles, slices=slices)
        call.constants |= {"BR": ROWS, "BC": COLUMNS}
        steps.append(call.step(MODULE, "forward_sums", (norm.columns, slices, 1), arch))
    call = _NormCall()
    call.tensor("work", "fp32", work)
    call.tensor("stats", "fp32", STATS)
    for name, kind, tensor in (
        ("gamma", norm.parameters, GAMMA),
        ("beta", norm.parameters, BETA),
        ("running_mean", norm.running, MEAN),
        ("running_var", norm.running, VAR),
        ("tracked", "i64" if norm.is_tracked else "", TRACKED),
    ):
        call.tensor(name, TRITON_TYPES.get(kind, kind), tensor)
    call.numbers(channels=norm.channels, slices=1 if norm.has_sums else slices)
    count = norm.pixels
    call.numbers("fp32", count=float(count), unbiased=count / max(1, count - 1))
    call.numbers("fp32", eps=norm.eps, momentum=norm.momentum)
    call.constants |= {"FOLD": 1 if norm.has_sums else norm.fold, **FINISH}
    steps.append(call.step(MODULE, "finish_forward", _channel_grid(norm), arch))
    room = 0 if norm.has_sums else _work_bytes(norm, arch)
    return Launch(steps=(*steps, _apply_step(norm, arch)), workspace_bytes=room)


def apply(norm: Norm, arch: Arch) -> Launch:
    """The result by statistics that are known."""
    return Launch(steps=(_apply_step(norm, arch),))


def _apply_step(norm: Norm, arch: Arch) -> Step:
    call = _NormCall()
    call.tensor("z", _kind(norm), Z)
    call.tensor("stats", "fp32", STATS)
    call.tensor("residual", _kind(norm), RESIDUAL if norm.has_residual else None)
    call.tensor("y", _kind(norm), Y)
    _sizes(call, norm)
    call.constants |= {"ACT": norm.activation, "BR": ROWS, "BC": COLUMNS}
    return call.step(MODULE, "apply_forward", _tile_grid(norm), arch)


def backward(norm: Norm, arch: Arch, wants_residual: bool) -> Launch:
    """Gradients of gamma and beta, of what was normalised, and of the residual where wanted."""
    slices, work = norm.slices(arch), Scratch(offset=0)
    factors = Scratch(offset=_work_bytes(norm, arch))
    y = Y if norm.reads_result else None
    call = _NormCall()
    for name, tensor in (("dy", DY), ("z", Z), ("y", y)):
        call.tensor(name, _kind(norm), tensor)
    call.tensor("stats", "fp32", STATS)
    call.tensor("work", "fp32", work)
    _sizes(call, norm)
    call.numbers(tiles=norm.tiles, slices=slices)
    call.constants |= {"ACT": norm.activation, "BR": ROWS, "BC": COLUMNS}
    reduce = call.step(MODULE, "backward_sums", (norm.columns, slices, 1), arch)
    call = _NormCall()
    call.tensor("work", "fp32", work)
    call.tensor("stats", "fp32", STATS)
    call.tensor("factors", "fp32", factors)
    call.tensor("dgamma", TRITON_TYPES.get(norm.parameters, ""), DGAMMA)
    call.tensor("dbeta", TRITON_TYPES.get(norm.parameters, ""), DBETA)
    call.numbers(channels=norm.channels, slices=slices)
    call.numbers("fp32", count=float(norm.pixels))
    call.constants |= {"FOLD": norm.fold, **FINISH}
    finish = call.step(MODULE, "finish_backward", _channel_grid(norm), arch)
    call = _NormCall()
    for name, tensor in (("dy", DY), ("z", Z), ("y", y)):
        call.tensor(name, _kind(norm), tensor)
    call.tensor("stats", "fp32", STATS)
    call.tensor("factors", "fp32", factors)
    call.tensor("dz", _kind(norm), DZ)
    call.tensor("dresidual", _kind(norm), DRESIDUAL if wants_residual else None)
    _sizes(call, norm)
    call.constants |= {"ACT": norm.activation, "BR": ROWS, "BC": COLUMNS}
    room = factors.offset + 8 * norm.channels
    return Launch(
        steps=(reduce, finish, call.step(MODULE, "apply_backward", _tile_grid(norm), arch)),
        workspace_bytes=room,
    )


def _kind(norm: Norm) -> str:
    return TRITON_TYPES[norm.dtype]


def _sizes(call: _NormCall, norm: Norm) -> None:
    call.numbers("i64", total=norm.pixels * norm.channels)
    call.numbers(channels=norm.channels, width=norm.width)


def _tile_grid(norm: Norm) -> tuple[int, int, int]:
    return (norm.tiles * norm.columns, 1, 1)


def _channel_grid(norm: Norm) -> tuple[int, int, int]:
    return (-(-norm.channels // FINISH["BC"]), 1, 1)


def _work_bytes(norm: Norm, arch: Arch) -> int:
    return -(-8 * norm.slices(arch) * norm.width // 256) * 256
