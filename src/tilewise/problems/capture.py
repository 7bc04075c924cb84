"""Capture: every convolution and matrix product that a running PyTorch program computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

from tilewise.core.problem import Problem
from tilewise.errors import ProblemError
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.problems.problem_set import Labels, ProblemSet

_DTYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "bf8",
    "int8": "int8",
}


@dataclass(slots=True, kw_only=True)
class Captured(ProblemSet):
    """The problems seen so far; labels hold `count`, the `layer` first seen in, and `call`."""

    skipped: Counter[str] = field(default_factory=Counter)
    """What was computed but is no problem here, and how often."""
    _places: dict[Problem, Labels] = field(default_factory=dict)

    def record(self, problem: Problem, labels: Labels) -> None:
        """Counts one more run of a problem."""
        if problem.is_empty:
            return
        if problem not in self._places:
            self.add(problem, {**labels, "count": 0})
            self._places[problem] = self.labels[-1]
        self._places[problem]["count"] += 1


@contextmanager
def capture() -> Iterator[Captured]:
    """Records every convolution and matrix product, forward and backward, while it is open.

    with capture() as problems:
        model(x).sum().backward()

    Tensors may be on any device, also on `meta`, where a model of any size costs nothing.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.module_tracker import ModuleTracker

    captured = Captured()
    tracker = ModuleTracker()

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            name = func.overloadpacket.__name__
            if func.namespace != "aten":
                name = f"{func.namespace}::{name}"
            if name in _READERS:
                layer = max(tracker.parents - {"Global"}, key=len, default="")
                labels = {"call": name, **({"layer": layer} if layer else {})}
                for problem in _problems(name, args, result, captured.skipped):
                    captured.record(problem, labels)
            elif name.startswith("_scaled_dot_product"):
                captured.skipped[f"{name}: attention fused into one call"] += 1
            return result

    # Backward on the calling thread: the recorder is bound to it.
    single_thread = torch.autograd.set_multithreading_enabled(False)
    with tracker, Recorder(), single_thread:  # type: ignore[no-untyped-call]
        yield captured


def _problems(
    name: str, args: Sequence[Any], result: Any, skipped: Counter[str]
) -> Iterator[Problem]:
    try:
        yield from _READERS[name](args, result)
    except ProblemError as error:
        skipped[f"{name}: {error}"] += 1


def _dtype(tensor: Any) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ProblemError(f"dtype {name} is not supported")
    return _DTYPES[name]


def _product(a_at: int) -> Callable[[Sequence[Any], Any], Iterator[Problem]]:
    """Reads calls whose arguments `a_at` and the next are the matrices (or batches of them)."""

    def read(args: Sequence[Any], result: Any) -> Iterator[Problem]:
        a, b = args[a_at], args[a_at + 1]
        vector = b.dim() == 1
        yield GemmProblem(
            m=a.shape[-2],
            n=1 if vector else b.shape[-1],
            k=a.shape[-1],
            batch=a.shape[0] if a.dim() == 3 else 1,
            dtype=_dtype(a),
            layout=_order(a) + ("r" if vector else _order(b)) + "r",
        )

    return read


def _linear(args: Sequence[Any], result: Any) -> Iterator[Problem]:
    x, weight = args[0], args[1]
    rows = x.numel() // max(1, x.shape[-1])
    layout = "rrr" if _order(weight) == "c" else "rcr"
    yield GemmProblem(m=rows, n=weight.shape[0], k=weight.shape[1], dtype=_dtype(x), layout=layout)


def _order(matrix: Any) -> str:
    """`c` where only the columns are contiguous, as in a transposed view."""
    rows, columns = matrix.shape[-2:]
    is_row_major = matrix.stride(-1) == 1 and matrix.stride(-2) >= columns
    return "c" if matrix.stride(-2) == 1 and rows > 1 and not is_row_major else "r"


def _convolution(args: Sequence[Any], result: Any) -> Iterator[Problem]:
    x, weight, _, stride, padding, dilation, transposed, _, groups = args[:9]
    sizes = _conv_fields(weight, stride, padding, dilation, groups)
    if transposed:
        yield _conv("bwd_data", small=x, large=result, **sizes)
    else:
        yield _conv("fwd", small=result, large=x, **sizes)


def _convolution_backward(args: Sequence[Any], result: Any) -> Iterator[Problem]:
    dy, x, weight, _, stride, padding, dilation, transposed, _, groups, mask = args[:11]
    sizes = _conv_fields(weight, stride, padding, dilation, groups)
    # Of a transposed convolution the gradient of the input is a forward convolution.
    small, large = (x, dy) if transposed else (dy, x)
    if mask[0]:
        yield _conv("fwd" if transposed else "bwd_data", small=small, large=large, **sizes)
    if mask[1]:
        yield _conv("bwd_weight", small=small, large=large, **sizes)


def _own_convolution(args: Sequence[Any], result: Any) -> Iterator[Problem]:
    x, weight, _, *layer = args
    yield _conv("fwd", small=result, large=x, **_conv_fields(weight, *layer[:4]))


def _own_input_gradient(args: Sequence[Any], result: Any) -> Iterator[Problem]:
    _, weight, dy, *layer = args
    yield _conv("bwd_data", small=dy, large=result, **_conv_fields(weight, *layer[:4]))


def _own_weight_gradient(args: Sequence[Any], result: Any) -> Iterator[Problem]:
    x, _, dy, *layer = args
    yield _conv("bwd_weight", small=dy, large=x, **_conv_fields(result, *layer[:4]))


def _conv_fields(
    weight: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> dict[str, Any]:
    dims = "dhw"[5 - weight.dim() :]
    found: dict[str, Any] = {"g": groups}
    for name, values in (("stride", stride), ("pad", padding), ("dilation", dilation)):
        spread = list(values) * (len(dims) if len(values) == 1 else 1)
        found |= {f"{name}_{dim}": value for dim, value in zip(dims, spread, strict=True)}
    taps = "zyx"[5 - weight.dim() :]
    return {**found, **dict(zip(taps, weight.shape[2:], strict=True))}


def _conv(direction: str, *, small: Any, large: Any, **sizes: Any) -> ConvProblem:
    """The problem whose forward input is `large` and whose forward output is `small`."""
    dims = "dhw"[5 - large.dim() :]
    return ConvProblem(
        direction=direction,
        n=large.shape[0],
        c=large.shape[1],
        k=small.shape[1],
        dtype=_dtype(large),
        layout=_layout(large),
        **dict(zip(dims, large.shape[2:], strict=True)),
        **sizes,
    )


def _layout(image: Any) -> str:
    channels, pixels = image.shape[1], prod(image.shape[2:])
    is_last = image.stride(1) == 1 and (channels > 1 or image.stride(-1) == channels)
    return "nhwc" if is_last and pixels > 1 else "nchw"


_READERS: dict[str, Callable[[Sequence[Any], Any], Iterator[Problem]]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "linear": _linear,
    "mm": _product(0),
    "bmm": _product(0),
    "mv": _product(0),
    "_int_mm": _product(0),
    "_scaled_mm": _product(0),
    "addmm": _product(1),
    "_addmm_activation": _product(1),
    "baddbmm": _product(1),
    "addbmm": _product(1),
    "addmv": _product(1),
    "tilewise::convolution": _own_convolution,
    "tilewise::conv_input_gradient": _own_input_gradient,
    "tilewise::conv_weight_gradient": _own_weight_gradient,
    "tilewise::linear": _linear,
    "tilewise::matmul": _product(0),
    "tilewise::scaled_matmul": _product(0),
}
"""How each kernel-level call of PyTorch, or operator of tilewise, is read; everything else is built
on these."""
