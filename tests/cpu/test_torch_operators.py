"""PyTorch operators: gradients, opcheck, torch.compile, modes, the one-line switch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from leaves import gradients, leaf
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import tilewise as tw
from tilewise.engines.toolchain import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

OPS = torch.ops.tilewise
close = torch.testing.assert_close


LAYER = ([2, 1], [1, 0], [1, 2], 2, False)


def operators() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    x, w = leaf(2, 4, 9, 8), leaf(6, 2, 3, 2)
    dy = leaf(2, 6, 5, 6)
    return {
        "matmul": (OPS.matmul.default, (leaf(5, 7), leaf(7, 6), False)),
        "batched matmul": (OPS.matmul.default, (leaf(3, 5, 7), leaf(3, 7, 6), False)),
        "linear": (OPS.linear.default, (leaf(2, 5, 7), leaf(6, 7), leaf(6), "none")),
        "activated": (OPS.linear.default, (leaf(5, 7), leaf(6, 7), None, "gelu")),
        "convolution": (OPS.convolution.default, (x, w, leaf(6), None, "none", *LAYER)),
        "channels last": (
            OPS.convolution.default,
            (x.detach().to(memory_format=torch.channels_last), w, None, None, "none", *LAYER),
        ),
        "residual": (OPS.convolution.default, (x, w, leaf(6), dy, "relu", *LAYER)),
        "activated convolution": (OPS.convolution.default, (x, w, None, dy, "silu", *LAYER)),
        "input gradient": (OPS.conv_input_gradient.default, ([2, 4, 9, 8], w, dy, *LAYER)),
        "weight gradient": (OPS.conv_weight_gradient.default, (x, [6, 2, 3, 2], dy, *LAYER)),
        "scaled": (
            OPS.scaled_matmul.default,
            (
                torch.randn(4, 16).to(torch.float8_e4m3fn),
                torch.randn(8, 16).to(torch.float8_e4m3fn).t(),
                *(torch.tensor(2.0), torch.tensor(0.5), None, torch.bfloat16),
            ),
        ),
    }


def test_operators_exist() -> None:
    tw.matmul(torch.ones(1, 1), torch.ones(1, 1))
    for op, _ in operators().values():
        assert str(op).startswith("tilewise.")


@pytest.mark.parametrize(
    "name",
    [
        *("matmul", "batched matmul", "linear", "activated", "convolution", "channels last"),
        *("residual", "activated convolution", "input gradient", "weight gradient", "scaled"),
    ],
)
def test_operators_pass_opcheck(name: str) -> None:
    op, args = operators()[name]
    tests = ["test_faketensor", "test_aot_dispatch_dynamic"]
    if name != "scaled":  # PyTorch's schema check compares operands, which it cannot in fp8
        tests += ["test_schema", "test_autograd_registration"]
    torch.library.opcheck(op, args, test_utils=tests)


@pytest.mark.parametrize(
    "name",
    [
        *("matmul", "linear", "activated", "convolution", "residual", "activated convolution"),
        *("input gradient", "weight gradient"),
    ],
)
def test_gradients_of_gradients(name: str) -> None:
    """In float64, where PyTorch computes the values and the formulas are tilewise's."""
    op, args = operators()[name]
    wide = [
        a.detach().double().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args
    ]
    assert torch.autograd.gradcheck(op, wide, fast_mode=True)
    assert torch.autograd.gradgradcheck(op, wide, fast_mode=True)


def network(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    hidden = tw.linear(tw.matmul(x, w), w, bias, activation="gelu")
    pixels = tw.conv2d(hidden.reshape(2, 2, 4, 4), f, bias[:3], padding=1)
    return tw.matmul(pixels.flatten(1), pixels.flatten(1).mT).sum(-1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_graph_breaks(backend: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    tensors = (leaf(8, 8), leaf(8, 8), leaf(8), leaf(3, 2, 3, 3))
    compiled = torch.compile(network, backend=backend, fullgraph=True, dynamic=dynamic)
    for ours, eager in zip(
        gradients(compiled, *tensors), gradients(network, *tensors), strict=True
    ):
        close(ours, eager)
    with torch.no_grad():
        close(compiled(*tensors), network(*tensors))
        with torch.autocast("cpu", torch.bfloat16):
            assert compiled(*tensors).dtype == torch.bfloat16


def test_compiled_graphs_hold_the_operators() -> None:
    torch._dynamo.reset()
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    x = torch.randn(4, 4)
    torch.compile(lambda a: tw.matmul(a, a), backend=backend, fullgraph=True)(x)
    assert "tilewise.matmul.default" in seen


def test_modes_see_the_operators_and_transforms_pytorchs() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    a, b = torch.randn(3, 4), torch.randn(4, 5)
    with Spy():
        tw.matmul(a, b)
        tw.linear(a, b.t())
    assert seen[0] == "tilewise.matmul.default"
    assert "tilewise.linear.default" in seen
    ours = torch.func.grad(lambda x: tw.matmul(x, b).square().sum())(a)
    close(ours, torch.func.grad(lambda x: torch.matmul(x, b).square().sum())(a))
    batch = torch.randn(6, 3, 4)
    close(torch.vmap(lambda x: tw.matmul(x, b))(batch), batch @ b)
    close(torch.vmap(lambda x: tw.linear(x, b.t()))(batch), batch @ b)


def test_compiled_transforms_are_pytorchs() -> None:
    x, w = torch.randn(1, 3, 4, 4), torch.randn(2, 3, 1, 1)
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    for ours, theirs, at in (
        (lambda t: tw.matmul(t, b), lambda t: t @ b, a),
        (lambda t: tw.linear(t, b.t()), lambda t: t @ b, a),
        (lambda t: tw.conv2d(t, w), lambda t: torch.nn.functional.conv2d(t, w), x),
    ):
        compiled = torch.compile(
            torch.func.grad(lambda t, ours=ours: ours(t).square().sum()), backend="eager"
        )
        close(compiled(at), torch.func.grad(lambda t, f=theirs: f(t).square().sum())(at))


def test_deterministic_algorithms_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.dispatch.dispatcher import Dispatcher

    asked = []
    plan = Dispatcher.plan

    def spy(self: Any, problem: Any, **options: Any) -> Any:
        asked.append(options["deterministic"])
        return plan(self, problem, **options)

    monkeypatch.setattr(Dispatcher, "plan", spy)
    a, one = torch.randn(31, 37), torch.tensor(1.0)
    small = a.to(torch.float8_e4m3fn)
    image, filters = torch.randn(1, 3, 7, 9), torch.randn(5, 3, 3, 3)
    for call in (
        lambda: tw.matmul(a, a.t()),
        lambda: tw.linear(a, a),
        lambda: tw.scaled_matmul(small, small.t(), one, one),
        lambda: tw.conv2d(image, filters),
    ):
        asked.clear()
        torch.use_deterministic_algorithms(True)
        try:
            call()
        finally:
            torch.use_deterministic_algorithms(False)
        call()
        assert asked[0] is True
        assert asked[-1] is False


def test_forward_mode_is_pytorchs() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    image, filters = torch.randn(1, 3, 7, 9), torch.randn(5, 3, 3, 3)
    for ours, theirs, at in (
        (lambda t: tw.matmul(t, b), lambda t: t @ b, a),
        (lambda t: tw.matmul(t, leaf(4, 5)), lambda t: t @ leaf(4, 5), a),
        (lambda t: tw.linear(t, b.t(), activation="gelu"), lambda t: functional.gelu(t @ b), a),
        (lambda t: tw.conv2d(t, filters), lambda t: functional.conv2d(t, filters), image),
    ):
        tangent = torch.randn_like(at)
        ours(at)  # remembered, with nothing to differentiate
        for _ in range(2):
            with forward_ad.dual_level():
                found = []
                for function in (ours, theirs):
                    torch.manual_seed(1)
                    dual = forward_ad.make_dual(at, tangent)
                    found.append(forward_ad.unpack_dual(function(dual)).tangent)
                close(*found)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_forward_mode_is_pytorchs(backend: str) -> None:
    torch._dynamo.reset()
    a, b, tangent = torch.randn(3, 4), torch.randn(4, 5), torch.randn(3, 4)
    for function in (lambda t: tw.matmul(t, b), lambda t: tw.linear(t, b.t())):
        compiled = torch.compile(function, backend=backend)
        close(compiled(a), a @ b)  # compiled before a level is open
        with forward_ad.dual_level():
            out = compiled(forward_ad.make_dual(a, tangent))
            close(forward_ad.unpack_dual(out).tangent, tangent @ b)
        close(compiled(a), a @ b)


def test_backward_passes_have_tangents() -> None:
    x, b = leaf(3, 4), torch.randn(4, 5)
    image, filters = leaf(1, 3, 7, 9), torch.randn(5, 3, 3, 3)
    for ours, theirs, at in (
        (lambda t: tw.matmul(t, b), lambda t: t @ b, x),
        (lambda t: tw.linear(t, b.t()), lambda t: t @ b, x),
        (lambda t: tw.conv2d(t, filters), lambda t: functional.conv2d(t, filters), image),
    ):
        found = []
        for function in (ours, theirs):
            torch.manual_seed(1)
            y = function(at)
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(torch.randn_like(y), torch.randn_like(y))
                (gradient,) = torch.autograd.grad(y, at, dual)
                found.append(forward_ad.unpack_dual(gradient).tangent)
        close(*found)


def test_narrow_products_mean_the_same_under_transforms() -> None:
    a = torch.full((2, 16), 100, dtype=torch.int8)
    small = torch.ones(2, 16).to(torch.float8_e4m3fn)
    with forward_ad.dual_level():
        assert tw.matmul(a, a.t()).tolist() == [[160_000] * 2] * 2
        assert tw.matmul(small, small.t()).dtype == torch.bfloat16
    mapped = torch.vmap(lambda t: tw.matmul(t, a.t()))(a[None])
    assert mapped.tolist() == [[[160_000] * 2] * 2]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_products_into_a_tensor(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(tw.matmul, backend=backend, fullgraph=True)
    a, b = (torch.randint(-100, 100, size, dtype=torch.int8) for size in ((8, 16), (16, 4)))
    out = torch.empty(8, 4, dtype=torch.int32)
    assert torch.equal(compiled(a, b, out=out), a.int() @ b.int())
    assert torch.equal(out, a.int() @ b.int())
    with pytest.raises(Exception, match=r"it must be torch\.int32"):
        compiled(a, b, out=torch.empty(8, 4))
    with pytest.raises(Exception, match="cannot be differentiated"):
        compiled(leaf(2, 2), leaf(2, 2), out=torch.empty(2, 2))


def test_what_is_traced_to_pytorch_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    a = torch.randn(4, 4).double()
    image = torch.randn(1, 2, 4, 4).double()
    with caplog.at_level(logging.WARNING, "tilewise"):
        for function in (
            lambda a, image: tw.matmul(a, a),
            lambda a, image: tw.linear(a, a),
            lambda a, image: tw.conv2d(image, image),
        ):
            torch.compile(function, backend="eager", fullgraph=True)(a, image)
    assert [r.message for r in caplog.records] == ["left to PyTorch: operands of torch.float64"]


def test_flops_are_counted_as_pytorchs() -> None:
    def count(function: Callable[[], Any]) -> int:
        with FlopCounterMode(display=False) as counter:
            function()
        return counter.get_total_flops()

    a, b, weight, bias = leaf(3, 4), leaf(4, 5), leaf(5, 4), leaf(5)
    image, filters = leaf(2, 3, 7, 9), leaf(5, 3, 3, 3)
    small, one = torch.ones(16, 32).to(torch.float8_e4m3fn), torch.tensor(1.0)
    for ours, theirs in (
        (lambda: tw.matmul(a, b), lambda: torch.matmul(a, b)),
        (lambda: tw.linear(a, weight, bias), lambda: functional.linear(a, weight, bias)),
        (lambda: tw.conv2d(image, filters), lambda: functional.conv2d(image, filters)),
    ):
        assert count(lambda f=ours: f().sum().backward()) == count(
            lambda f=theirs: f().sum().backward()
        )
    assert count(lambda: tw.scaled_matmul(small, small.t(), one, one)) == 2 * 16 * 16 * 32


class Block(torch.nn.Module):
    """Attention and a small convolutional stem, as models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 16, 3, stride=2, padding=1, padding_mode="reflect")
        self.depth = torch.nn.Conv2d(16, 16, 3, padding="same", groups=16)
        self.along = torch.nn.Conv1d(16, 16, 3, padding=1, bias=False)
        self.norm = torch.nn.LayerNorm(16)
        self.parts = torch.nn.Linear(16, 48, bias=False)
        self.out = torch.nn.Linear(16, 16)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16)
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.along(self.depth(self.stem(image)).flatten(2)).transpose(1, 2)
        q, k, v = self.parts(self.norm(x)).unflatten(-1, (2, 24)).transpose(1, 2).chunk(3, -1)
        x = x + self.out(
            functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        )
        return (x + self.mlp(x)).mean(1)


def test_one_line_switches_a_model() -> None:
    model, image = Block(), torch.randn(2, 3, 8, 8)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(image)
    expected.square().sum().backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    seen = []
    model.out.register_forward_hook(lambda *_: seen.append("hook"))
    assert tw.patch(model, always=True) is model
    names = [node.name() for node in graph_of(model(image).grad_fn)]
    assert any("tilewise_linear" in name for name in names)
    assert any("tilewise_convolution" in name for name in names)
    ours = model(image)
    close(ours, expected)
    ours.square().sum().backward()
    for name, parameter in model.named_parameters():
        close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-4)
    assert seen
    assert isinstance(model.out, torch.nn.Linear)
    model.load_state_dict(state)
    torch._dynamo.reset()
    close(torch.compile(model, backend="aot_eager", fullgraph=True)(image), expected)
    tw.unpatch(model)
    assert type(model.out) is torch.nn.Linear
    assert type(model.stem) is torch.nn.Conv2d


def graph_of(node: Any) -> list[Any]:
    """Every node of the backward graph from here on."""
    found, todo = {node}, [node]
    while todo:
        for other, _ in todo.pop().next_functions:
            if other is not None and other not in found:
                found.add(other)
                todo.append(other)
    return list(found)
