"""PyTorch on top: autograd, autocast, torch.compile, transforms, fallbacks, the one-line switch."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from torch.nn import functional

import tilewise as tw
from tilewise.dispatch.remembered import CALLS, Remembered
from tilewise.engines.toolchain import find_compiler
from tilewise.errors import TensorError
from tilewise.settings import settings
from tilewise.torch_ops import theirs

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

OPS = torch.ops.tilewise
close = torch.testing.assert_close


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def gradients(function: Any, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The result and the gradient of each tensor, under an uneven gradient of the result."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = function(*leaves)
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.dtype)
    out.backward(weights)
    return [out.detach(), *[t.grad for t in leaves]]  # type: ignore[misc]


SHAPES = {
    "matrices": ((5, 7), (7, 6)),
    "dot": ((7,), (7,)),
    "row": ((7,), (7, 6)),
    "column": ((5, 7), (7,)),
    "batch": ((3, 5, 7), (3, 7, 6)),
    "batch of one": ((1, 5, 7), (1, 7, 6)),
    "shared right": ((2, 3, 5, 7), (7, 6)),
    "shared left": ((5, 7), (3, 7, 6)),
    "broadcast": ((2, 1, 5, 7), (3, 7, 6)),
    "vector by batch": ((7,), (3, 7, 6)),
    "batch by vector": ((2, 3, 5, 7), (7,)),
    "no rows": ((0, 7), (7, 6)),
    "no depth": ((5, 0), (0, 6)),
    "no batch": ((0, 5, 7), (0, 7, 6)),
}


@pytest.mark.parametrize(("a", "b"), SHAPES.values(), ids=SHAPES)
def test_matmul_is_pytorchs_for_any_dimensions(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    x, y = torch.randn(a), torch.randn(b)
    close(tw.matmul(x, y), torch.matmul(x, y))
    assert tw.matmul(x.numpy(), y.numpy()).shape == torch.matmul(x, y).shape
    for ours, theirs_ in zip(
        gradients(tw.matmul, x, y), gradients(torch.matmul, x, y), strict=True
    ):
        close(ours, theirs_)


def test_any_strides_the_first_time_and_remembered() -> None:
    wide = torch.randn(40, 60)
    views = {
        "plain": wide[:12, :16],
        "transposed": wide.t()[:12, :16],
        "strided": wide[:24:2, :48:3],
        "shifted": wide[1:13, 1:17],
        "expanded": wide[:1, :16].expand(12, 16),
        "constant": wide[:1, :1].expand(12, 16),
        "odd pitch": torch.randn(12, 17)[:, :16],
        "unfolded": torch.randn(27).unfold(0, 16, 1),
    }
    right = torch.randn(16, 9)
    for left in views.values():
        for _ in range(3):
            close(tw.matmul(left, right), left @ right)
            close(tw.matmul(right.t(), left.t()), right.t() @ left.t())


def test_equal_shapes_at_other_addresses_and_values() -> None:
    """What is remembered is the way, never the operands."""
    for offset in (0, 1, 2, 5, 16):
        flat = torch.randn(12 * 8 + 16)
        a = flat[offset : offset + 96].view(12, 8)
        b = torch.randn(8, 4)
        close(tw.matmul(a, b), a @ b)


def test_remembered_calls_know_what_decides_them() -> None:
    a, b = torch.randn(24, 40), torch.randn(40, 32)
    for left, right in (
        (a, b),
        (a.half(), b.half()),
        (a.bfloat16(), b.bfloat16()),
        (a.t().contiguous().t(), b),
        (a.double(), b.double()),
    ):
        for _ in range(2):
            out = tw.matmul(left, right)
            assert out.dtype == left.dtype
            close(out, left @ right)
    neg = torch._neg_view(a)
    close(tw.matmul(neg, b), -(a @ b))


def test_remembered_calls_are_bounded_and_forgotten_when_stale() -> None:
    few = Remembered(most=2)
    for key in range(3):
        few.keep(key, lambda: None, few.generation)
    assert len(few) == 2
    assert few.get(0) is None
    stale = few.generation
    few.forget()
    few.keep(9, lambda: None, stale)
    assert few.get(9) is None


def test_declaring_kernels_and_new_settings_forget_calls() -> None:
    a, b = torch.randn(21, 22), torch.randn(22, 23)
    tw.matmul(a, b)
    assert len(CALLS)
    registry = tw.Registry("gemm", tw.detect("cpu"))
    registry.declare(tw.select(tw.GemmProblem(m=8, n=8, k=8), arch=registry.arch).kernel)
    assert not len(CALLS)
    tw.matmul(a, b)
    settings.cache_clear()
    assert CALLS.get("anything") is None
    assert not len(CALLS)
    close(tw.matmul(a, b), a @ b)


def test_arrays_are_remembered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.dispatch import calls

    a, b = torch.randn(19, 28).numpy(), torch.randn(28, 11).numpy()
    expected = tw.matmul(a, b)
    monkeypatch.setattr(calls, "default_dispatcher", None)
    assert (tw.matmul(a.copy(), b) == expected).all()
    with pytest.raises(TypeError):
        tw.matmul(a[:-1], b)


def test_what_is_remembered_holds_no_tensor() -> None:
    held = []
    for array in (False, True):
        a, b = torch.randn(20, 29), torch.randn(29, 12)
        for left in (a, a.t().contiguous().t(), torch.randn(20, 58)[:, ::2]):
            given = [left.numpy(), b.numpy()] if array else [left, b]
            tw.matmul(*given)
            held.append(weakref.ref(given[0]))
            if not array:
                tw.linear(left, b.t().contiguous())
        del a, b, left, given
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)


def test_a_remembered_call_does_not_select_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.torch_ops import calls

    a, b = torch.randn(19, 27), torch.randn(27, 11)
    expected = tw.matmul(a, b)
    monkeypatch.setattr(calls, "default_dispatcher", None)
    monkeypatch.setattr(calls, "prepare", None)
    close(tw.matmul(a, b), expected)
    with pytest.raises(TypeError):
        tw.matmul(a[:-1], b)  # the sabotage works: an unknown shape needs what is gone


@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (2, 3, 4), (0,)])
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_linear_is_pytorchs(lead: tuple[int, ...], activation: str | None) -> None:
    x, weight, bias = torch.randn(*lead, 12), torch.randn(9, 12), torch.randn(9)
    after = getattr(functional, activation) if activation else lambda z: z
    for given in ((x, weight), (x, weight, bias)):
        for _ in range(2):
            close(tw.linear(*given, activation=activation), after(functional.linear(*given)))
        ours = gradients(lambda *t: tw.linear(*t, activation=activation), *given)
        expected = gradients(lambda *t: after(functional.linear(*t)), *given)
        for one, other in zip(ours, expected, strict=True):
            close(one, other)


def test_linear_takes_any_strides() -> None:
    weight, bias = torch.randn(12, 9).t(), torch.randn(18)[::2]
    for x in (torch.randn(4, 5, 24)[..., ::2], torch.randn(5, 4, 12).transpose(0, 1)):
        for _ in range(2):
            close(tw.linear(x, weight, bias), functional.linear(x, weight, bias))


def test_linear_on_arrays() -> None:
    x, weight, bias = torch.randn(2, 3, 12), torch.randn(9, 12), torch.randn(9)
    ours = tw.linear(x.numpy(), weight.numpy(), bias.numpy(), activation="relu")
    close(torch.from_numpy(ours), functional.relu(functional.linear(x, weight, bias)))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((torch.zeros(2, 3), torch.zeros(4, 5)), "last size of x"),
        ((torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(3)), r"bias has shape \(3,\)"),
        ((torch.zeros(2, 3), torch.zeros(4, 3).half()), "convert one of them"),
        ((torch.zeros(2, 3).double(), torch.zeros(4, 5).double()), "PyTorch says"),
    ],
)
def test_wrong_layers_are_refused(given: tuple[torch.Tensor, ...], says: str) -> None:
    with pytest.raises(TensorError, match=says):
        tw.linear(*given)
    with pytest.raises(TensorError, match="activation is 'tanh'"):
        tw.linear(torch.zeros(2, 3), torch.zeros(4, 3), activation="tanh")


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("scaling", ["tensor", "row", "mixed"])
def test_scaled_products_are_right(kind: torch.dtype, scaling: str) -> None:
    a, b = torch.randn(20, 48).to(kind), torch.randn(24, 48).to(kind).t()
    left = torch.rand(20, 1) + 0.5 if scaling != "tensor" else torch.tensor(0.5)
    right = torch.rand(1, 24) + 0.5 if scaling == "row" else torch.tensor(3.0)
    bias = torch.randn(24).bfloat16()
    for _ in range(2):
        for given in (None, bias):
            out = tw.scaled_matmul(a, b, left, right, given)
            assert out.dtype == torch.bfloat16
            expected = (a.double() @ b.double()) * left * right
            expected = expected + given if given is not None else expected
            close(out, expected.bfloat16(), rtol=1e-2, atol=1e-2)
    for wrong, says in (
        ((a, b, torch.ones(3), right), "one factor or 20"),
        ((a, b, left.double(), right), "pass float32"),
        ((a.float(), b.float(), left, right), "float8_e4m3fn"),
    ):
        with pytest.raises(TensorError, match=says):
            tw.scaled_matmul(*wrong)


def test_unsupported_cases_go_to_pytorch_and_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
    theirs._told.clear()
    a, b = torch.randn(4, 5), torch.randn(5, 6)
    cases = {
        "operands of torch.float64": (a.double(), b.double()),
        "operands of torch.complex64": (a.cfloat(), b.cfloat()),
        "operands of torch.int64": (a.long(), b.long()),
        "torch.sparse_coo tensors": (a.to_sparse(), b),
        "tensors on meta": (a.to("meta"), b.to("meta")),
        "tensors of type Odd": (a.as_subclass(Odd), b),
    }
    for why, (left, right) in cases.items():
        caplog.clear()
        with caplog.at_level(logging.WARNING, "tilewise"):
            for _ in range(2):
                out = tw.matmul(left, right)
                if out.device.type != "meta":
                    close(out.to_dense(), torch.matmul(left, right).to_dense())
        assert [r.message for r in caplog.records] == [f"left to PyTorch: {why}"]


class Odd(torch.Tensor):
    """A subclass with a mind of its own."""


def test_what_pytorch_refuses_too_is_a_tensor_error() -> None:
    for a, b in (
        (torch.ones(2, 3).double(), torch.ones(4, 5).double()),
        (torch.ones(2, 3), torch.ones(3, 5).double()),
        (torch.ones(2, 3).to_sparse(), torch.ones(4, 5)),
        (torch.ones(2, 3), torch.ones(4, 5)),
        (torch.ones(()), torch.ones(3)),
    ):
        with pytest.raises(TensorError):
            tw.matmul(a, b)
    with pytest.raises(TensorError, match="no gradient"):
        x = torch.ones(2, 2, dtype=torch.float8_e4m3fn, requires_grad=True)
        tw.matmul(x, torch.ones(2, 2, dtype=torch.float8_e4m3fn))
    with pytest.raises(TensorError, match="cannot be differentiated"):
        tw.matmul(leaf(2, 2), leaf(2, 2), out=torch.empty(2, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_pytorchs(dtype: torch.dtype) -> None:
    x, w, bias = leaf(6, 8), leaf(5, 8), leaf(5)
    image, filters = leaf(2, 4, 6, 6), leaf(3, 4, 3, 3)
    with torch.autocast("cpu", dtype):
        for ours, expected in (
            (tw.matmul(x, w.t()), torch.matmul(x, w.t())),
            (tw.matmul(x.detach(), w.detach().t()), torch.matmul(x, w.t())),
            (tw.linear(x, w, bias), functional.linear(x, w, bias)),
            (tw.conv2d(image, filters), functional.conv2d(image, filters)),
        ):
            assert ours.dtype == expected.dtype == dtype
            close(ours, expected, rtol=2e-2, atol=2e-2, check_stride=False)
        tw.linear(x, w, bias).float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert tw.matmul(x, w.t()).dtype == torch.float32


LAYER = ([2, 1], [1, 0], [1, 2], 2, False)


def operators() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    x, w = leaf(2, 4, 9, 8), leaf(6, 2, 3, 2)
    dy = leaf(2, 6, 5, 6)
    return {
        "matmul": (OPS.matmul.default, (leaf(5, 7), leaf(7, 6), False)),
        "batched matmul": (OPS.matmul.default, (leaf(3, 5, 7), leaf(3, 7, 6), False)),
        "linear": (OPS.linear.default, (leaf(2, 5, 7), leaf(6, 7), leaf(6), "none")),
        "activated": (OPS.linear.default, (leaf(5, 7), leaf(6, 7), None, "gelu")),
        "convolution": (OPS.convolution.default, (x, w, leaf(6), *LAYER)),
        "channels last": (
            OPS.convolution.default,
            (x.detach().to(memory_format=torch.channels_last), w, None, *LAYER),
        ),
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
    assert {op for op, _ in operators().values()}


@pytest.mark.parametrize(
    "name",
    [
        *("matmul", "batched matmul", "linear", "activated", "convolution", "channels last"),
        *("input gradient", "weight gradient", "scaled"),
    ],
)
def test_operators_pass_opcheck(name: str) -> None:
    op, args = operators()[name]
    tests = ["test_faketensor", "test_aot_dispatch_dynamic"]
    if name != "scaled":  # PyTorch's schema check compares operands, which it cannot in fp8
        tests += ["test_schema", "test_autograd_registration"]
    torch.library.opcheck(op, args, test_utils=tests)


@pytest.mark.parametrize(
    "name", ["matmul", "linear", "activated", "convolution", "input gradient", "weight gradient"]
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


def test_deterministic_algorithms_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.dispatch.dispatcher import Dispatcher

    asked = []
    plan = Dispatcher.plan

    def spy(self: Any, problem: Any, **options: Any) -> Any:
        asked.append(options["deterministic"])
        return plan(self, problem, **options)

    monkeypatch.setattr(Dispatcher, "plan", spy)
    a = torch.randn(31, 37)
    torch.use_deterministic_algorithms(True)
    try:
        tw.matmul(a, a.t())
    finally:
        torch.use_deterministic_algorithms(False)
    tw.matmul(a, a.t())
    assert asked[0] is True
    assert asked[-1] is False


def test_second_derivatives_of_a_convolution() -> None:
    x, w = leaf(1, 2, 5, 5), leaf(3, 2, 3, 3)

    def second(convolve: Any) -> torch.Tensor:
        (first,) = torch.autograd.grad(convolve(x, w).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), w)[0]

    close(second(tw.conv2d), second(functional.conv2d), rtol=1e-4, atol=1e-3)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_convolutions_without_a_batch_and_uneven_same(rank: int) -> None:
    x, w, bias = torch.randn(3, *[7] * rank), torch.randn(4, 3, *[2] * rank), torch.randn(4)
    ours, theirs_ = getattr(tw, f"conv{rank}d"), getattr(functional, f"conv{rank}d")
    close(ours(x, w, bias), theirs_(x, w, bias))
    close(ours(x[None], w, bias, padding="same"), theirs_(x[None], w, bias, padding="same"))


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
    assert tw.patch(model) is model
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
