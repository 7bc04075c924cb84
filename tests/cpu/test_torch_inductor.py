"""Inductor takes tilewise's choices for matrix products, and nobody else's, where it is told to."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import tilewise as tw
from tilewise.torch_ops import inductor, layers
from tilewise.torch_ops.layers import Asked, Served

X, W, B = torch.randn(32, 64), torch.randn(48, 64), torch.randn(48)


@pytest.fixture(autouse=True)
def _own_choices() -> Iterator[None]:
    """Every test compiles anew, and the choices are PyTorch's again after it."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        yield
    tw.choose_in_compile(False)
    torch._dynamo.reset()


def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, w, b)


def called(function: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    """The external kernels that compiled code calls; its result is checked."""
    result, code = run_and_get_code(torch.compile(function, **options), *args)
    torch.testing.assert_close(result, function(*args), rtol=1e-4, atol=1e-4)
    return re.findall(r"extern_kernels\.(\w+)\(", "\n".join(code))


def test_without_the_line_choices_are_pytorchs() -> None:
    assert called(linear, X, W, B) == ["addmm"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_line_lets_compiled_code_call_tilewise(dynamic: bool) -> None:
    tw.choose_in_compile(always=True)
    assert called(linear, X, W, B, dynamic=dynamic) == ["tilewise_addmm"]
    assert called(torch.mm, X, W.t(), dynamic=dynamic) == ["tilewise_mm"]
    batch = torch.randn(3, 16, 64)
    assert called(torch.bmm, batch, batch.mT, dynamic=dynamic) == ["tilewise_bmm"]


def test_one_graph_serves_every_size() -> None:
    tw.choose_in_compile(always=True)
    compiled = torch.compile(linear, dynamic=True)
    for m in (5, 17, 64):
        x = torch.randn(m, 64)
        torch.testing.assert_close(compiled(x, W, B), linear(x, W, B), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_ours", [False, True])
def test_choices_are_made_while_compiling(is_ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Asked] = []
    served = Served(is_ours=True, why="faster") if is_ours else layers.by_pytorch("slower")
    monkeypatch.setattr(inductor, "decide", lambda one: asked.append(one) or served)
    tw.choose_in_compile()
    compiled = torch.compile(linear)
    assert called(compiled, X, W, B) == (["tilewise_addmm"] if is_ours else ["addmm"])
    assert [(one.x, one.w, one.dtype) for one in asked] == [((32, 64), (48, 64), torch.float32)]
    compiled(X, W, B)
    assert len(asked) == 1


def test_what_is_no_layer_stays_pytorchs() -> None:
    tw.choose_in_compile(always=True)
    full = torch.randn(32, 48)
    assert called(lambda x, w, c: torch.addmm(c, x, w.t()), X, W, full) == ["addmm"]
    assert called(lambda x, w, b: torch.addmm(b, x, w.t(), beta=2), X, W, B) == ["addmm"]
    assert called(torch.mm, X.double(), W.t().double()) == ["mm"]


def test_gradients_are_compiled_alike() -> None:
    tw.choose_in_compile(always=True)
    w, again = (W.clone().requires_grad_() for _ in range(2))
    torch.compile(linear)(X, w, B).sum().backward()
    linear(X, again, B).sum().backward()
    torch.testing.assert_close(w.grad, again.grad, rtol=1e-4, atol=1e-4)
