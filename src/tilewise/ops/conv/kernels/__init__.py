"""Every kind of conv kernel, and the one function that says whether a kernel can serve."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.ops import vendor

_MODULES: list[Any] = [
    import_module(f"{__name__}.{name}")
    for name in ("cpu", "gpu", "cktile")
    if find_spec(f"{__name__}.{name}")
]
_RULES: dict[type[Kernel], Any] = {vendor.VendorKernel: vendor.why_unusable}
for _module in _MODULES:
    for _value in vars(_module).values():
        if (
            isinstance(_value, type)
            and issubclass(_value, Kernel)
            and _value.__module__ == _module.__name__
        ):
            _RULES[_value] = _module.why_unusable

KERNEL_TYPES: tuple[type[Kernel], ...] = tuple(_RULES)


def why_unusable(kernel: Kernel, problem: Problem | None, arch: Arch) -> str | None:
    """The first rule that keeps `kernel` from `problem` on `arch`, or None.

    Without a problem: whether the kernel could serve any problem there.
    """
    if problem is not None and kernel.op != problem.op:
        return f"it computes {kernel.op}, not {problem.op}"
    reason: str | None = _RULES[type(kernel)](kernel, problem, arch)
    return reason
