"""tilewise on PyTorch tensors. A call goes one of four ways:

- one like an earlier one, on plain tensors, is found by its key and launched at once (`calls`);
- the first of its kind chooses a kernel, runs it and remembers that (`products`, `convolutions`);
- one that needs PyTorch's dispatcher (autocast, torch.compile, modes) takes the operators that
  `operators` registers, which cost several microseconds;
- what tilewise has no kernels for is left to PyTorch (`fallback`).

`switch` puts such calls into a model's layers; `finding`, `fused` and what they import serve layers
that follow each other as one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tilewise.core.tensors import require_memory, view
from tilewise.dispatch.operands import check_kind, check_memory
from tilewise.dispatch.remembered import CALLS
from tilewise.dispatch.shipped import has_product, product_of_any, run_conv
from tilewise.errors import ProblemError, TensorError
from tilewise.ops.conv.infer import (
    LayerSettings,
    Padding,
    Sizes,
    fixed,
    group_count,
    infer,
    named,
    settings,
    tensor_sizes,
)
from tilewise.torch_ops import convolutions, operators, products, scaled
from tilewise.torch_ops.calls import is_capturing
from tilewise.torch_ops.fallback import (
    PLAIN,
    forward_level,
    has_tangent,
    leave,
    tell_traced,
    torch_matmul,
    why_no_kernels,
    why_not_plain,
    why_untraced,
)
from tilewise.torch_ops.guards import guard
from tilewise.torch_ops.memory import alignment
from tilewise.torch_ops.registering import is_deterministic, is_watched, modes, transform
from tilewise.torch_ops.threads import share_threads

share_threads()
_is_traced = torch.compiler.is_dynamo_compiling
"""Asked before anything that cannot be traced; tracing of other kinds shows in `_is_compiling`."""
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled


def _is_plain(*tensors: Tensor | None) -> bool:
    """Whether kernels may read these tensors' memory with nobody noticing."""
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in PLAIN or tensor.is_neg():
            return False
        if tensor.requires_grad and _is_grad_enabled():
            return False
    return not is_watched()


def _why_left(*tensors: Any) -> str | None:
    """Why the call is left to PyTorch, or None; raises where it is nobody's."""
    given = [tensor for tensor in tensors if tensor is not None]
    _require_tensors(*given)
    for tensor in given:
        if type(tensor) in PLAIN and tensor.layout is torch.strided and transform() is None:
            require_memory(tensor)  # not every routine of PyTorch asks
    if transform() is not None:  # operators made in Python take no part in torch.func
        return "tensors under a transform of torch.func"
    if has_tangent(*given):
        return "tensors under forward-mode differentiation"
    return why_not_plain(*given) or why_no_kernels(*given)


def _require(*tensors: Any) -> None:
    """Refuses what is neither a tensor nor an array, None among it."""
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            view(tensor)


def _require_tensors(*tensors: Any) -> None:
    """Refuses arrays, too."""
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            view(tensor)  # refuses what is no array either
            raise TensorError("an array and a tensor come from two libraries; convert one of them")


def refuse_gradient(what: str, *tensors: Any) -> None:
    if _is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        raise TensorError(f"{what}; leave it out or use torch.no_grad()")


def matmul(a: Any, b: Any, out: Any = None, deterministic: bool = False) -> Tensor:
    """`torch.matmul` for tensors of any dimensions."""
    if _is_traced():
        why = why_untraced(a, b)
        if why is not None:
            tell_traced(why)
            return torch_matmul(a, b, out)
        if out is None:
            return _product(a, b, deterministic)
        refuse_gradient("out= cannot be differentiated", a, b)
        return _into(out, _product(a, b, deterministic))
    if out is not None:
        return _matmul_into(a, b, out, deterministic)
    if type(a) not in PLAIN or type(b) not in PLAIN:
        return _matmul(a, b, deterministic)
    try:
        key = (
            *(a.shape, b.shape, alignment(a, b), _is_grad_enabled()),
            *(forward_level(), deterministic or is_deterministic()),
            a.dtype is torch.float32 and products.rounds_to_tf32(),
        )
    except RuntimeError:  # neither strided nor with memory of its own
        return _matmul(a, b, deterministic)
    for is_alike, call in CALLS.get(key) or ():
        if is_alike(a, b):
            return call(a, b)  # type: ignore[no-any-return]
    generation = CALLS.generation
    result = _matmul(a, b, deterministic)
    if _is_plain(a, b):
        guard(key, CALLS.get(products.matmul_key(a, b, deterministic)), (a, b), generation)
    return result


def _matmul(a: Any, b: Any, deterministic: bool) -> Tensor:
    _require(a, b)
    if _is_compiling() and why_untraced(a, b) is None:
        return _product(a, b, deterministic)
    if _is_plain(a, b):
        return products.matmul(a, b, deterministic)
    why = _why_left(a, b)
    if why:
        return leave(why, torch_matmul, a, b)
    if a.dtype.itemsize < 2:
        refuse_gradient(f"products of {a.dtype} have no gradient", a, b)
    return _product(a, b, deterministic)


def _product(a: Tensor, b: Tensor, deterministic: bool) -> Tensor:
    if has_product(a, b):
        return operators.matmul(a, b, deterministic)
    result: Tensor = product_of_any(a, b, lambda x, y: operators.matmul(x, y, deterministic))
    return result


def _matmul_into(a: Any, b: Any, out: Any, deterministic: bool) -> Tensor:
    if not PLAIN.issuperset((type(a), type(b), type(out))):
        return _matmul_slowly_into(a, b, out, deterministic)[0]
    try:
        key = (
            *("into", a.shape, b.shape, alignment(a, b, out)),
            *(_is_grad_enabled(), forward_level(), deterministic or is_deterministic()),
            a.dtype is torch.float32 and products.rounds_to_tf32(),
        )
    except RuntimeError:
        return _matmul_slowly_into(a, b, out, deterministic)[0]
    for is_alike, call in CALLS.get(key) or ():
        if is_alike(a, b, out):
            return call(a, b, out)  # type: ignore[no-any-return]
    generation = CALLS.generation
    result, again = _matmul_slowly_into(a, b, out, deterministic)
    guard(key, again, (a, b, out), generation)
    return result


def _matmul_slowly_into(
    a: Any, b: Any, out: Any, deterministic: bool
) -> tuple[Tensor, Callable[..., Tensor] | None]:
    """`out`, and the way for calls like this one where there is a quick one."""
    _require(a, b)
    if not isinstance(out, Tensor):
        raise TensorError(f"out is a {type(out).__name__}; pass a tensor, as the operands are")
    refuse_gradient("out= cannot be differentiated", a, b)
    why = _why_left(a, b)
    is_plain = _is_plain(a, b, out)
    a, b = a.resolve_neg(), b.resolve_neg()
    if why:
        if out.layout is not torch.strided or type(out) not in PLAIN:
            return leave(why, torch_matmul, a, b, out), None
        return _into(out, leave(why, torch_matmul, a, b), a=a, b=b), None
    is_seen = modes() > 0  # modes see operators, which make their results
    if has_product(a, b) and not is_seen and not is_capturing(a):
        again = products.matmul_into(a, b, out, deterministic)
        return out, again if is_plain else None
    result = (_product if is_seen else products.matmul)(a, b, deterministic)
    return _into(out, result, a=a, b=b), None


def _into(out: Tensor, result: Tensor, **operands: Tensor | None) -> Tensor:
    """`result` moved into the caller's own tensor, which may lie nowhere near `operands`."""
    check_kind(out, result)
    if type(out) in PLAIN and not _is_compiling():  # stand-ins have no memory to ask for
        check_memory(out, operands)
    return out.copy_(result)


def linear(x: Any, weight: Any, bias: Any = None, activation: str | None = None) -> Tensor:
    """`torch.nn.functional.linear`, activated; the bias and activation are fused where possible."""
    name = "none" if activation is None else activation
    if _is_traced():
        products.check_activation(name)
        why = why_untraced(x, weight)
        if why is not None:
            tell_traced(why)
            return products.torch_linear(name, x, weight, bias)
        return _layer(x, weight, bias, name)
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if not PLAIN.issuperset(map(type, tensors)):
        return _linear(x, weight, bias, name)
    try:
        key = (
            *(x.shape, weight.shape, alignment(*tensors), _is_grad_enabled()),
            *(forward_level(), is_deterministic()),
            *(x.dtype is torch.float32 and products.rounds_to_tf32(), bias is None, name),
        )
        ready = CALLS.get(key) or ()
    except (RuntimeError, TypeError):  # without memory, or an activation without a hash
        return _linear(x, weight, bias, name)
    for is_alike, call in ready:
        if is_alike(*tensors):
            return call(*tensors)  # type: ignore[no-any-return]
    generation = CALLS.generation
    result = _linear(x, weight, bias, name)
    if _is_plain(*tensors):
        guard(key, CALLS.get(products.linear_key(x, weight, bias, name)), tensors, generation)
    return result


def _linear(x: Any, weight: Any, bias: Any, name: str) -> Tensor:
    _require(x, weight, *() if bias is None else (bias,))
    products.check_activation(name)
    if not (_is_compiling() and why_untraced(x, weight) is None):
        if _is_plain(x, weight, bias):
            return products.linear(x, weight, bias, name)
        why = _why_left(x, weight, bias)
        if why:
            return leave(why, products.torch_linear, name, x, weight, bias)
    return _layer(x, weight, bias, name)


def _layer(x: Tensor, weight: Tensor, bias: Tensor | None, name: str) -> Tensor:
    if name != "none" and _is_grad_enabled():  # its backward pass wants what was activated
        return products.ACTIVATE[name](operators.linear(x, weight, bias, "none"))
    return operators.linear(x, weight, bias, name)


def scaled_matmul(
    a: Any,
    b: Any,
    scale_a: Any,
    scale_b: Any,
    bias: Any = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The product of fp8 matrices with scales, as `torch._scaled_mm` takes them."""
    tensors = (a, b, scale_a, scale_b, bias)
    if _is_compiling():
        return operators.scaled_matmul(*tensors, out_dtype)
    _require(a, b, scale_a, scale_b, *() if bias is None else (bias,))
    refuse_gradient("scaled products have no gradient", *tensors)
    if _is_plain(*tensors):
        return scaled.scaled_matmul(*tensors, out_dtype)
    _why_left(a, b, scale_a, scale_b)
    return operators.scaled_matmul(*tensors, out_dtype)


def convolve(
    rank: int,
    x: Any,
    w: Any,
    bias: Any,
    stride: Sizes,
    padding: Padding,
    dilation: Sizes,
    groups: int,
    deterministic: bool,
    activation: str | None = None,
    residual: Any = None,
) -> Tensor:
    """`torch.nn.functional.conv1d`, `conv2d` or `conv3d`, with a residual added, activated.

    Bias, residual and activation are fused where possible.
    """
    name = "none" if activation is None else activation
    tensors = (x, w) if bias is None else (x, w, bias)
    if residual is not None:
        tensors += (residual,)
    layer = (stride, padding, dilation, groups)
    if _is_traced() or not PLAIN.issuperset(map(type, tensors)):
        return _convolve(rank, x, w, bias, layer, deterministic, name, residual)
    are_numbers = type(stride) is type(padding) is type(dilation) is type(groups) is int
    settled = layer if are_numbers else fixed(*layer)
    if settled is None:
        return _convolve(rank, x, w, bias, layer, deterministic, name, residual)
    try:
        key = (
            *(rank, x.shape, w.shape, alignment(*tensors), _is_grad_enabled(), forward_level()),
            *(settled, deterministic or is_deterministic(), bias is None, residual is None, name),
        )
        ready = CALLS.get(key) or ()
    except (RuntimeError, TypeError):  # without memory, or an activation without a hash
        return _convolve(rank, x, w, bias, layer, deterministic, name, residual)
    for is_alike, call in ready:
        if is_alike(*tensors):
            return call(*tensors)  # type: ignore[no-any-return]
    return _convolve(rank, x, w, bias, layer, deterministic, name, residual, key)


def _convolve(
    rank: int,
    x: Any,
    w: Any,
    bias: Any,
    given: LayerSettings,
    deterministic: bool,
    name: str,
    residual: Any,
    key: Any = None,
) -> Tensor:
    """`convolve` by all that has to be asked; calls like this one will find the way by `key`."""
    stride, padding, dilation, groups = *given[:3], group_count(given[3])
    is_compiling = _is_compiling()
    if not is_compiling:
        _require(x, w, *(t for t in (bias, residual) if t is not None))
    products.check_activation(name)
    if x.dim() == rank + 1:  # one image without a batch
        more = None if residual is None else residual.unsqueeze(0)
        one = _convolve(rank, x.unsqueeze(0), w, bias, given, deterministic, name, more)
        return one.squeeze(0)
    why = why_untraced(x, w) if is_compiling else _why_left(x, w, bias, residual)
    if why is None and not is_compiling and (0 in x.shape or 0 in w.shape):
        why = "convolutions of nothing"
    if why is None and not convolutions.is_known(x.device):
        why = "convolutions on a GPU that no model knows"
    layer = None
    try:  # asked for PyTorch too, which crashes where sizes overflow
        layer = settings(tuple(w.shape), rank, stride, padding, dilation)
    except ProblemError as error:
        if padding != "same":
            raise
        why = why or f"padding 'same' where {error}"
    if layer is not None and not is_compiling:
        convolutions.check_size(x, w, (*layer, groups))
    if why is not None:
        pytorch = partial(_torch_convolution, rank, name, residual, layer and (*layer, groups))
        args = (x, w, bias, stride, padding, dilation, groups)
        if not is_compiling:
            return leave(str(why), pytorch, *args)
        tell_traced(str(why))
        return pytorch(*args)
    assert layer is not None
    convolutions.check(rank, x, w, bias, None if is_compiling else residual, (*layer, groups))
    if not is_compiling and _is_plain(x, w, bias, residual):
        return _remembered(key, x, w, bias, residual, ((*layer, groups), deterministic, name))
    if name in ("gelu", "silu") and _is_grad_enabled():  # backward wants what was activated
        more = (*layer, groups, deterministic)
        return products.ACTIVATE[name](operators.convolution(x, w, bias, residual, "none", *more))
    return operators.convolution(x, w, bias, residual, name, *layer, groups, deterministic)


def _remembered(
    key: Any,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    how: tuple[convolutions.Layer, bool, str],
) -> Tensor:
    """A convolution of plain tensors, which `key` finds from now on."""
    generation, (layer, deterministic, name) = CALLS.generation, how
    result = convolutions.convolution(
        *(x, w, bias, layer, deterministic), residual=residual, activation=name
    )
    if key is not None:
        tensors = tuple(t for t in (x, w, bias, residual) if t is not None)
        missing = (bias is None, True)
        own = convolutions.call_key("fwd", tensors, (), layer, deterministic, missing, name)
        guard(key, CALLS.get(own), tensors, generation)
    return result


def _torch_convolution(
    rank: int, activation: str, residual: Tensor | None, layer: Any, *args: Any
) -> Tensor:
    functions = (functional.conv1d, functional.conv2d, functional.conv3d)
    x, w, *_ = args
    if layer and not _is_compiling() and convolutions.crashes(x, x.shape, w.shape, layer):
        wide: list[Any] = [arg.float() if isinstance(arg, Tensor) else arg for arg in args]
        result: Tensor = functions[rank - 1](*wide).to(x.dtype)
    else:
        result = functions[rank - 1](*args)
    return products.ACTIVATE[activation](result if residual is None else result + residual)


def convolve_into(
    out: Any,
    rank: int,
    x: Any,
    w: Any,
    bias: Any,
    stride: Sizes,
    padding: Padding,
    dilation: Sizes,
    groups: int,
    deterministic: bool,
    activation: str | None = None,
    residual: Any = None,
) -> Tensor:
    """`convolve` into the caller's own tensor."""
    _require(x, w, *(t for t in (bias, residual) if t is not None))
    if not isinstance(out, Tensor):
        raise TensorError(f"out is a {type(out).__name__}; pass a tensor, as the operands are")
    refuse_gradient("out= cannot be differentiated", x, w, bias, residual)
    name = "none" if activation is None else activation
    products.check_activation(name)
    is_bare = bias is None and residual is None and name == "none"
    is_ours = _is_plain(x, w, out) and not _why_left(x, w) and convolutions.is_known(x.device)
    layer = (stride, padding, dilation, group_count(groups))
    if is_bare and x.dim() == rank + 2 and is_ours:
        convolutions.check(rank, x, w, None, None, ((), (), (), layer[-1]))
        is_fixed = deterministic or is_deterministic()
        run_conv(infer(x, w, **named(*layer)), x, w, out=out, deterministic=is_fixed)
        return out
    result = convolve(rank, x, w, bias, *layer, deterministic, name, residual)
    return _into(out, result, x=x, w=w, bias=bias, residual=residual)


def conv_input_gradient(size: Any, w: Tensor, dy: Tensor, **layer: Any) -> Tensor:
    """The gradient of a convolution's input of `size`."""
    _require_tensors(w, dy)
    x = _sizes("input_size", size)
    return operators.conv_input_gradient(x, w, dy, *_layer_of(tuple(w.shape), **layer), False)


def conv_weight_gradient(x: Tensor, size: Any, dy: Tensor, **layer: Any) -> Tensor:
    """The gradient of a convolution's filter of `size`."""
    _require_tensors(x, dy)
    w = _sizes("weight_size", size)
    return operators.conv_weight_gradient(x, w, dy, *_layer_of(tuple(w), **layer), False)


def _sizes(name: str, given: Any) -> list[Any]:
    """A tensor's sizes; while a call is traced they need not be known, and nothing is asked."""
    return list(given if _is_compiling() else tensor_sizes(name, given))


def _layer_of(w: tuple[int, ...], groups: int, **layer: Any) -> tuple[Any, ...]:
    return *settings(w, len(w) - 2, **layer), group_count(groups)
