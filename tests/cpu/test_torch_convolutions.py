"""Convolutions of PyTorch tensors."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from fusing import fused  # noqa: F401  # a fixture
from leaves import gradients, leaf
from torch import nn
from torch.nn import functional

import tilewise as tw
from tilewise.engines.toolchain import find_compiler
from tilewise.ops.conv.epilogue import Epilogue

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

close = torch.testing.assert_close


def test_second_derivatives_of_a_convolution() -> None:
    x, w = leaf(1, 2, 5, 5), leaf(3, 2, 3, 3)

    def second(convolve: Any) -> torch.Tensor:
        (first,) = torch.autograd.grad(convolve(x, w).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), w)[0]

    close(second(tw.conv2d), second(functional.conv2d), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_gradients_of_a_batch_of_directions(activation: str | None) -> None:
    """As vectorised Jacobians ask for them: of tensors without memory of their own."""
    x, w, bias = torch.randn(2, 6, 7, 7), torch.randn(4, 6, 3, 3), torch.randn(4)
    act = {None: lambda z: z, "relu": functional.relu, "gelu": functional.gelu}[activation]

    def ours(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = tw.conv2d(x, w, bias, padding=1, activation=activation)
        return result.sum((0, 2, 3))

    def theirs(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return act(functional.conv2d(x, w, bias, padding=1)).sum((0, 2, 3))

    jacobian: Any = torch.autograd.functional.jacobian
    for given in (x, x.to(memory_format=torch.channels_last)):
        found = jacobian(ours, (given, w, bias), vectorize=True)
        close(found, jacobian(theirs, (given, w, bias), vectorize=True), atol=1e-3, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_convolutions_without_a_batch_and_uneven_same(rank: int) -> None:
    x, w, bias = torch.randn(3, *[7] * rank), torch.randn(4, 3, *[2] * rank), torch.randn(4)
    ours, theirs_ = getattr(tw, f"conv{rank}d"), getattr(functional, f"conv{rank}d")
    close(ours(x, w, bias), theirs_(x, w, bias))
    close(ours(x[None], w, bias, padding="same"), theirs_(x[None], w, bias, padding="same"))
    one, each = {"stride": (2,), "padding": (1,), "dilation": (2,)}, {"stride": 2, "padding": 1}
    close(ours(x[None], w, **one), theirs_(x[None], w, **each, dilation=2))
    for groups in (0, "1", None):
        with pytest.raises(tw.TilewiseError, match="it must be an integer of at least 1"):
            ours(x[None], w, groups=groups)


def layer(rank: int) -> tuple[Any, ...]:
    """Input, filter, bias and residual of a strided layer in two groups."""
    size, out = (9, 8, 7)[:rank], (5, 4, 4)[:rank]
    x, w = torch.randn(2, 6, *size), torch.randn(4, 3, *[3] * rank)
    return x, w, torch.randn(4), torch.randn(2, 4, *out)


SETTINGS: dict[str, Any] = {"stride": 2, "padding": 1, "groups": 2}
ACTIVATIONS: dict[str | None, Any] = {
    None: lambda z: z,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
}


def by_pytorch(activation: str | None, x: Any, w: Any, bias: Any, residual: Any) -> Any:
    convolve = getattr(functional, f"conv{x.dim() - 2}d")
    result = convolve(x, w, bias, **SETTINGS)
    return ACTIVATIONS[activation](result if residual is None else result + residual)


def by_us(activation: str | None, x: Any, w: Any, bias: Any, residual: Any) -> Any:
    convolve = getattr(tw, f"conv{x.ndim - 2}d")
    return convolve(x, w, bias, **SETTINGS, activation=activation, residual=residual)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("is_last", [False, True])
def test_what_is_done_to_a_result(rank: int, activation: str | None, is_last: bool) -> None:
    x, w, bias, residual = layer(rank)
    if is_last:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    for b, r in ((bias, residual), (None, residual), (bias, None), (None, None)):
        expected = by_pytorch(activation, x, w, b, r)
        for _ in range(2):  # chosen, remembered
            close(by_us(activation, x, w, b, r), expected, rtol=1e-4, atol=1e-5)
        arrays = [None if t is None else t.numpy() for t in (x, w, b, r)]
        result = torch.from_numpy(by_us(activation, *arrays))
        close(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_gradients_of_what_is_done_to_a_result(activation: str | None) -> None:
    given = layer(2)
    ours = gradients(partial(by_us, activation), *given)
    for one, other in zip(ours, gradients(partial(by_pytorch, activation), *given), strict=True):
        close(one, other, rtol=1e-4, atol=1e-4)


def test_all_that_is_done_to_halves_rounds_once() -> None:
    x, w, bias, residual = (t.bfloat16() for t in layer(2))
    exact = by_pytorch("silu", *(t.double() for t in (x, w, bias, residual)))
    result = by_us("silu", x, w, bias, residual)
    assert result.dtype == torch.bfloat16
    close(result.double(), exact, rtol=2**-8, atol=1e-5)


def test_kernels_are_given_what_to_fuse(fused: list[Epilogue]) -> None:  # noqa: F811
    seen = fused
    x, w, bias, residual = layer(2)
    last = residual.to(memory_format=torch.channels_last)  # not as the result is stored
    for given in ((x, w, bias, residual), (x, w, None, last), (x, w, bias[::1], None)):
        for _ in range(2):
            close(by_us("relu", *given), by_pytorch("relu", *given), rtol=1e-4, atol=1e-5)
    asked = [(e.bias, e.residual, e.activation) for e in seen]
    assert asked == [
        *[(True, True, "relu")] * 2,
        *[(False, True, "relu")] * 2,
        *[(True, False, "relu")] * 2,
    ]
    seen.clear()
    leaves = [t.clone().requires_grad_() for t in (x, w, bias, residual)]
    by_us("relu", *leaves).sum().backward()  # fused with gradients, too
    assert seen[0] == Epilogue(bias=True, residual=True, activation="relu")


def test_what_is_added_must_fit() -> None:
    x, w, bias, residual = layer(2)
    with pytest.raises(tw.TilewiseError, match=r"residual has shape .* the result's, \(2, 4, 5"):
        by_us(None, x, w, bias, residual[:1])
    with pytest.raises(tw.TilewiseError, match=r"residual is fp32 of shape \(1, 4, 5, 4\)"):
        by_us(None, *(t.numpy() for t in (x, w, bias, residual[:1])))
    for given in ((x, w, bias, residual), [t.numpy() for t in (x, w, bias, residual)]):
        with pytest.raises(tw.TilewiseError, match="activation is 'tanh'; use one of"):
            by_us("tanh", *given)


def test_into_a_tensor_of_the_caller() -> None:
    x, w, bias, residual = layer(2)
    out = torch.empty_like(residual)
    after: dict[str, Any] = {"activation": "relu", "residual": residual}
    assert tw.conv2d(x, w, bias, **SETTINGS, **after, out=out) is out
    close(out, by_pytorch("relu", x, w, bias, residual), rtol=1e-4, atol=1e-5)
    with pytest.raises(tw.TilewiseError, match="out shares memory with residual"):
        tw.conv2d(x, w, bias, **SETTINGS, **after, out=residual)


def test_compiled_convolutions_keep_what_is_fused() -> None:
    torch._dynamo.reset()
    x, w, bias, residual = layer(2)
    compiled = torch.compile(partial(by_us, "relu"), fullgraph=True, backend="aot_eager")
    close(compiled(x, w, bias, residual), by_pytorch("relu", x, w, bias, residual))


BESIDE = """
import torch, tilewise as tw
for size, taps, layer in (
    ((2, 4, 8, 1), (8, 2, 3, 1), dict(stride=[1, 2], padding=1, dilation=3, groups=2)),
    ((1, 2, 6, 7, 1), (4, 2, 3, 3, 1), dict(stride=[2, 3, 2], padding=1, dilation=2)),
    ((1, 12, 3, 1), (8, 3, 1, 1), dict(stride=[3, 3], padding=2, dilation=3, groups=4)),
):
    for _ in range(60):
        x, w = torch.randn(size).bfloat16(), torch.randn(taps).bfloat16()
        x = x.movedim(1, -1).contiguous().movedim(-1, 1).requires_grad_()
        convolve = getattr(tw, f"conv{x.dim() - 2}d")
        SERVED
        assert not y.any() and y.dtype == x.dtype, y
"""
OURS = "y = convolve(x, w.requires_grad_(), **layer); y.sum().backward()"
UNDER_VMAP = "y = torch.func.vmap(lambda x: convolve(x, w, **layer))(x.detach()[None])"
INTO = "y = convolve(x.detach(), w, **layer); convolve(x.detach(), w, out=y, **layer)"


@pytest.mark.parametrize("served", [OURS, UNDER_VMAP, INTO])
@pytest.mark.parametrize("compiler", ["", "/nonexistent"])
def test_padding_alone_does_not_end_the_process(served: str, compiler: str) -> None:
    """PyTorch's own convolution in bf16 reads beside its tensors there; without a compiler it is
    PyTorch's that serves."""
    code = BESIDE.replace("SERVED", served)
    environment = {**os.environ, **({"TILEWISE_CXX": compiler} if compiler else {})}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, lazily negated, as `torch.conj(z).imag` is."""
    return torch._neg_view(-tensor)


@pytest.mark.parametrize("which", ["x", "w", "dy"])
def test_gradients_of_lazily_negated_tensors(which: str) -> None:
    given = {"x": torch.randn(2, 8, 9), "w": torch.randn(12, 2, 3), "dy": torch.randn(2, 12, 9)}
    found = []
    for lazy in ("", which):
        x, w, dy = (negated(t) if name == lazy else t for name, t in given.items())
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        tw.conv1d(x, w, padding=1, groups=4).backward(dy)
        assert x.grad is not None and w.grad is not None
        found.append((x.grad, w.grad))
    for plain, lazy in zip(*found, strict=True):
        torch.testing.assert_close(lazy.resolve_neg(), plain)


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("which", ["x", "residual", "weight", "bias", "dy"])
def test_chains_of_lazily_negated_tensors(which: str, is_training: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            return functional.relu(self.norm(self.conv(x)) + residual)

    plain = Block().train(is_training)
    patched = tw.patch(copy.deepcopy(plain), fuse=True, always=True)
    for last in (False, True):
        order = torch.channels_last if last else torch.contiguous_format
        given = {n: torch.randn(2, 4, 9, 9) for n in ("x", "residual", "dy")}
        for lazy in ("", which):  # the second call finds what the first left behind
            if lazy in ("weight", "bias"):
                for module in (plain, patched):
                    held = getattr(module.conv, lazy).detach()
                    setattr(module.conv, lazy, nn.Parameter(negated(held)))
            tensors = {n: t.to(memory_format=order) for n, t in given.items()}
            tensors = {n: negated(t) if n == lazy else t for n, t in tensors.items()}
            found = []
            for module in (plain, patched):
                x, residual = (tensors[n].detach().requires_grad_() for n in ("x", "residual"))
                y = module(x, residual)
                y.backward(tensors["dy"])
                with torch.no_grad():
                    again = module(tensors["x"], tensors["residual"])
                found.append((y, again, x.grad, residual.grad, module.conv.weight.grad))
                module.zero_grad()
            for theirs, ours in zip(*found, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
