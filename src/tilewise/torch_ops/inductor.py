"""torch.compile: tilewise's choices for products and convolutions, made while Inductor compiles.

One line before compiling, and models stay as they are. Nothing is measured: with sizes known, what
the vendor wins stays an ATen call that Inductor plans as ever, and what tilewise wins is called by
the compiled code. With sizes unknown the call chooses afresh for each, when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tilewise import __version__
from tilewise.errors import InputError
from tilewise.settings import settings
from tilewise.torch_ops import inductor_convs, products
from tilewise.torch_ops.layers import NAMES, Asked, decide

SERVED = ("mm", "addmm", "bmm")


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return products.matmul(a, b)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, alpha: float = 1, beta: float = 1) -> Tensor:
    """A product and a vector over its columns; `Choices` takes no other."""
    return products.linear(a, b.t(), bias if bias.dim() == 1 else bias[0])


KERNELS: dict[str, Callable[..., Tensor]] = {"mm": _mm, "addmm": _addmm, "bmm": _mm}


@dataclass(frozen=True, slots=True)
class _Choosers:
    """Makes who chooses. PyTorch 2.11 keeps compiled code by its settings, which it pickles."""

    always: bool

    def __call__(self) -> Any:
        return _choices(self.always)


def choose_in_compile(enabled: bool = True, *, always: bool = False) -> None:
    """Makes `torch.compile` use tilewise's choices for products and convolutions from now on.

    With `always`, tilewise serves everything it can, even where PyTorch is expected to be faster.
    What is already compiled stays as it is.
    """
    from torch._inductor import config
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    if not hasattr(InductorChoices, "_finalize_template_configs"):
        raise InputError(
            f"torch {torch.__version__} has no way to choose kernels; tilewise needs 2.10 or later"
        )
    make = _Choosers(always) if enabled else None
    register = getattr(torch._inductor, "register_inductor_choices", None)
    if register is not None:  # since 2.15
        register(make)
    else:
        config.inductor_choices_class = make
    # A thread that has compiled before keeps who chose then.
    V.set_choices_handler(InductorChoices() if make is None else make())
    before = config.post_grad_custom_pre_pass
    if isinstance(before, inductor_convs.Pass):
        before = before.before
    if enabled:
        inductor_convs.lower()
        made = inductor_convs.make_pass(_sign(always), always, before)
        config.post_grad_custom_pre_pass = made
    else:
        config.post_grad_custom_pre_pass = before


def _choices(always: bool) -> Any:
    """An `InductorChoices` of tilewise's; PyTorch's is imported only where one compiles."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.kernel_inputs import MMKernelInputs
    from torch._inductor.virtualized import V

    class Choices(InductorChoices):
        """What Inductor asks which kernels to consider."""

        def uuid(self) -> str:
            """Part of the key of compiled code on disk."""
            return _sign(always)

        def _finalize_template_configs(
            self,
            template_choices: Any,
            kernel_inputs: Any,
            templates: Any,
            op_name: str,
            *rest: Any,
        ) -> Any:
            usual = super()._finalize_template_configs
            is_known = op_name in SERVED and isinstance(kernel_inputs, MMKernelInputs)
            if is_known and not V.graph.cpp_wrapper and _is_ours(op_name, kernel_inputs, always):
                return [_ours(op_name, kernel_inputs)]
            return usual(template_choices, kernel_inputs, templates, op_name, *rest)

    for name in SERVED:
        _registered(name)
    return Choices()


def _sign(always: bool) -> str:
    """What choices depend on besides the graph."""
    return f"tilewise {__version__} always={always} {settings()}"


@cache
def _registered(op_name: str) -> Any:
    """The function as Inductor knows it: compiled code calls it by name."""
    from torch._inductor.select_algorithm import ExternKernelChoice

    name = f"tilewise_{op_name}"
    return ExternKernelChoice(KERNELS[op_name], name=name, has_out_variant=False)


def _ours(op_name: str, inputs: Any) -> Any:
    """The one choice that Inductor is left with; the result is packed row by row."""
    from torch._inductor.kernel_template_choice import KernelTemplateChoice
    from torch._inductor.template_heuristics.params import DictKernelTemplateParams

    return KernelTemplateChoice(
        template=_registered(op_name),
        params=DictKernelTemplateParams({}),
        extra_kwargs={},
        layout=inputs.output_layout(flexible=False),
        inputs=inputs,
    )


def _is_ours(op_name: str, inputs: Any, always: bool) -> bool:
    """Whether tilewise serves a product that is being compiled."""
    left, right = inputs.mat1mat2()
    kind = left.get_dtype()
    same = kind == right.get_dtype() == inputs.out_dtype()
    if not same or kind not in NAMES or inputs.device_type not in ("cpu", "cuda"):
        return False
    if op_name == "addmm" and not _is_bias(inputs):
        return False
    if always:
        return True
    given = [size for node in (left, right) for size in node.get_size()]
    if not all(map(_is_known, given)):  # each size is chosen for when it comes
        return True
    if op_name == "bmm":
        return False  # a layer's decision speaks of single products
    m, k, _, n = map(int, given)
    if 0 in (m, k, n):
        return False
    asked = Asked(kind="linear", x=(m, k), w=(n, k), dtype=kind, device=inputs.device())
    return decide(asked).is_ours


def _is_bias(inputs: Any) -> bool:
    """Whether what is added is a vector over the columns, as a layer's bias is."""
    bias = inputs.nodes()[0]
    plain = all(inputs.get_scalar(name) == 1 for name in ("alpha", "beta"))
    sides = bias.get_size()
    is_vector = len(sides) == 1 or (len(sides) == 2 and bias.get_stride()[0] == 0)
    n = inputs.mat1mat2()[1].get_size()[-1]
    same = bias.get_dtype() == inputs.out_dtype()
    return plain and is_vector and same and bool(sides[-1] == n)


def _is_known(size: Any) -> bool:
    """Whether a size is the same in every call."""
    return bool(getattr(size, "is_number", isinstance(size, int)))
