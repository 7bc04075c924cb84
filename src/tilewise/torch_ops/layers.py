"""Who serves a layer: decided once for each of its inputs' shapes, before anything runs.

A layer is tilewise's where the kernels of its forward pass and gradients are expected to gain more
than calling them costs in Python; everywhere else it stays PyTorch's own call, with its own
autograd.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from tilewise.core.arch import Arch
from tilewise.core.dtypes import dtype
from tilewise.core.problem import Problem
from tilewise.dispatch import default_dispatcher, live_arch
from tilewise.errors import InputError, NoKernelError
from tilewise.ops.conv.infer import from_shapes, settings
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.selection.choice import WHO
from tilewise.torch_ops.products import rounds_to_tf32

SERVED = "_tilewise_served"
"""Where a patched layer keeps what was decided for each of its inputs."""
ALWAYS = "_tilewise_always"
"""Where a patched layer keeps whether tilewise serves whatever it can."""
PLAIN_CLASS = "_tilewise_plain_class"
"""Where a class of patched layers keeps the class of PyTorch's."""
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
CALL_US = {
    "linear": (8.0, 55.0),
    "conv": (6.0, 40.0),
    "chain": (1.0, 4.0),
    "pass": (0.0, 5.0),
}
"""What our calls cost in Python beyond PyTorch's: a forward pass alone, and one with gradients.

Above what `benchmarks/layer_overhead.py` reads on two AMD EPYC cores (7.8, 46.7, 4.4 and 30.7 us,
2026-11-18, the last two beside other work): where the gain is not sure, the call stays PyTorch's.
A chain is a call of ours, whichever routine computes its first layer, and our launch costs no more
than PyTorch's way to cuDNN. A pass is one of ours in place of several of PyTorch's, each of which
costs a call, too.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What serves a layer at one shape, and why."""

    is_ours: bool
    why: str
    pytorch_us: float = 0.0
    """What PyTorch's routines are expected to take; 0 where nobody knows."""
    ours_us: float = 0.0
    """What the chosen kernels are expected to take, calling them included; 0 where unknown."""

    @property
    def gain_us(self) -> float:
        """What is expected to be gained by tilewise; nothing where PyTorch serves."""
        return self.pytorch_us - self.ours_us if self.is_ours else 0.0


def by_pytorch(why: str, **times: float) -> Served:
    """PyTorch serves."""
    return Served(is_ours=False, why=why, **times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Everything about a call of a layer that decides."""

    kind: str
    """`linear` or `conv`."""
    x: tuple[int, ...]
    w: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    layout: str = "nchw"
    settings: tuple[Any, ...] = ()
    """Stride, padding, dilation and groups of a convolution."""
    wants_x: bool = False
    wants_w: bool = False
    saved_bytes: int = 0
    """What the forward kernel fuses that PyTorch reads and writes in a pass of its own."""
    epilogue: Any = None
    """What has to be fused for that, where not every kernel can."""
    has_bias: bool = False
    """Whether a convolution has a bias of its own, which PyTorch adds on a GPU in another pass."""
    is_chain: bool = False
    """Whether what follows the layer is served with it."""

    @property
    def call_us(self) -> float:
        """What serving it by ourselves costs in Python beyond PyTorch's call."""
        return CALL_US["chain" if self.is_chain else self.kind][self.wants_x or self.wants_w]

    def problems(self) -> Iterator[Problem]:
        """The forward pass and the gradients that are asked for."""
        name = NAMES[self.dtype]
        if self.kind == "linear":
            (n, k), rows = self.w, prod(self.x[:-1])
            kind = "tf32" if name == "fp32" and self._is_tf32() else name
            yield GemmProblem(m=rows, n=n, k=k, dtype=kind, layout="rcr")
            if self.wants_x:
                yield GemmProblem(m=rows, n=k, k=n, dtype=kind, layout="rrr")
            if self.wants_w:
                yield GemmProblem(m=n, n=k, k=rows, dtype=kind, layout="crr")
            return
        rank = len(self.x) - 2
        stride, padding, dilation, groups = self.settings
        layer = settings(self.w, rank, stride, padding, dilation)
        named: dict[str, Any] = dict(zip(("stride", "padding", "dilation"), layer, strict=True))
        first = from_shapes(
            *(self.x, self.w), dtype=name, layout=self.layout, groups=groups, **named
        )
        yield first
        if self.wants_x:
            yield replace(first, direction="bwd_data")
        if self.wants_w:
            yield replace(first, direction="bwd_weight")

    def _is_tf32(self) -> bool:
        return self.device.type == "cuda" and rounds_to_tf32()


def decide(asked: Asked) -> Served:
    """Who serves; nothing is built or run."""
    if asked.dtype not in NAMES or asked.device.type not in ("cpu", "cuda"):
        return by_pytorch(f"tilewise has no layers of {asked.dtype} on {asked.device.type}")
    try:
        arch = arch_on(asked.device)
        problems = list(asked.problems())
        first, *rest = problems
        saved = asked.saved_bytes
        if asked.has_bias and isinstance(first, ConvProblem):
            saved += 2 * first.output_elements * dtype(first.out_dtype).bytes
        times = [_expected_us(first, arch, saved, asked.epilogue)]
        times += [_expected_us(problem, arch) for problem in rest]
    except (InputError, NoKernelError) as error:
        return by_pytorch(str(error).splitlines()[0])
    if not any(is_ours for _, _, is_ours in times):
        return by_pytorch("PyTorch's routine is predicted to be as fast or faster", **_sums(times))
    if any(vendor_us is None for vendor_us, _, _ in times):
        return by_pytorch("nobody measured PyTorch's routine on this device; tw.tune does")
    call_us = asked.call_us
    pytorch_us, ours_us = sum(t[0] or 0.0 for t in times), sum(t[1] for t in times)
    found = {"pytorch_us": pytorch_us, "ours_us": ours_us + call_us}
    if ours_us + call_us >= pytorch_us:
        return by_pytorch(f"it gains less than the {call_us:.0f} us that a call costs", **found)
    return Served(is_ours=True, why=f"predicted faster by {_who(asked, arch)}", **found)


def is_faster(problem: Problem, device: torch.device) -> bool:
    """Whether our kernel for one problem gains more than compiled code spends on calling it."""
    try:
        vendor_us, ours_us, is_ours = _expected_us(problem, arch_on(device))
    except (InputError, NoKernelError):
        return False
    return is_ours and vendor_us is not None and ours_us + CALL_US["chain"][0] < vendor_us


def is_worth(saved_bytes: int, device: torch.device, *, with_gradients: bool) -> bool:
    """Whether moving fewer bytes gains more than a pass of ours costs in Python."""
    gained_us = saved_bytes / (arch_on(device).memory_gb_s * 1e3)
    return gained_us >= CALL_US["pass"][with_gradients]


def _sums(times: Sequence[tuple[float | None, float, bool]]) -> dict[str, float]:
    known = [us for us, _, _ in times if us is not None]
    return {"pytorch_us": sum(known)} if len(known) == len(times) else {}


@cache
def arch_on(device: torch.device) -> Arch:
    """Of a device that tensors are on."""
    return live_arch(torch.empty(0, device=device))


def _who(asked: Asked, arch: Arch) -> str:
    problem = next(asked.problems())
    path = default_dispatcher(problem.op, arch).select(problem).path
    return WHO.get(path, path)


def _expected_us(
    problem: Problem, arch: Arch, saved_bytes: int = 0, epilogue: Any = None
) -> tuple[float | None, float, bool]:
    """What PyTorch's routine is expected to take, what the chosen one, and whether it is ours."""
    dispatcher = default_dispatcher(problem.op, arch)
    choice = dispatcher.select_fusing(problem, saved_bytes=saved_bytes, epilogue=epilogue)
    pass_us = saved_bytes / (arch.memory_gb_s * 1e3)
    vendor_us = dispatcher.vendor_us(problem)
    if vendor_us is not None:
        vendor_us += pass_us
    if choice.kernel.engine == "vendor":
        return vendor_us, vendor_us or 0.0, False
    is_fused = dispatcher.fuses(choice.kernel, problem, epilogue)
    return vendor_us, choice.predicted_us + (0.0 if is_fused else pass_us), True


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd records what is done to one of these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
