"""Dense CUDA kernels for groups whose channels are no multiple of a step's."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import lru_cache

from tilewise.core.arch import Arch
from tilewise.core.kernel import trait
from tilewise.errors import KernelError
from tilewise.ops.conv.kernels import dense_rules
from tilewise.ops.conv.kernels.dense import DenseConvKernel
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.conv.walk import channels

OPS = ("conv_fwd", "conv_bwd_data")
LOADERS = ("im2col", "halo")


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedConvKernel(DenseConvKernel):
    """A dense kernel by im2col or over patches, whose last step of a group reaches into the next.

    Products take whole 16 channels (8 of tf32) of that step. Where the group ends within them,
    zeros fill them up: those of a map of the images that knows the groups, or where TMA has no
    dimension left for them (im2col, volumes) those of the filter, which meet the next group's
    channels. There an Inf or NaN spreads to the group before it: `spreads_nonfinite` says so.
    """

    op_name: str = field(metadata={"choices": OPS})
    family: str = trait("", ("ragged",))
    loader: str = trait("", LOADERS, doc="how load warps find the pixels")
    spreads_nonfinite: bool = trait("spreads", (False, True), default=False)

    def __post_init__(self) -> None:
        self.check_choices()
        if self.op_name not in OPS:
            raise KernelError(f"{self.name}: it is for {' and '.join(OPS)}; dense ones do the rest")
        _ = self.dense  # which checks the rest

    @property
    def dense(self) -> DenseConvKernel:
        """The same kernel for whole steps."""
        return _dense(self)

    def alignment(self, problem: ConvProblem) -> tuple[int, ...]:
        """Groups are not padded."""
        return ()


@lru_cache(maxsize=4096)
def _dense(k: RaggedConvKernel) -> DenseConvKernel:
    traits = {f.name: getattr(k, f.name) for f in fields(DenseConvKernel)}
    return DenseConvKernel(**{**traits, "family": k.loader})


def spreads(k: RaggedConvKernel, p: ConvProblem) -> bool:
    """Whether products meet the next group's channels."""
    has_zeros = k.loader == "halo" and p.ndim < 3
    return dense_rules.is_ragged(k.dense, p) and not has_zeros


def why_unusable(kernel: RaggedConvKernel, problem: ConvProblem | None, arch: Arch) -> str | None:
    """The first rule that keeps `kernel` from `problem` on `arch`, or None."""
    k, p = kernel, problem
    reason = dense_rules.why_not_on(k.dense, arch)
    if reason or p is None:
        return reason
    if p.g == 1 or channels(p)[0] % k.tile_k == 0:
        return f"it is for groups whose channels are no multiple of {k.tile_k}"
    reason = dense_rules.why_not_for_any_group(k.dense, p, arch)
    if reason is None and k.spreads_nonfinite != spreads(k, p):
        meet = "" if spreads(k, p) else "do not "
        return f"groups of {channels(p)[0]} channels {meet}meet those of the next group"
    return reason
