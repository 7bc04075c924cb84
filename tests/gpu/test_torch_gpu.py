"""PyTorch on CUDA tensors: strides, fused layers, scales, compile, graphs, autocast, streams."""

from __future__ import annotations

import logging
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import tilewise as tw  # noqa: E402
from tilewise import notices  # noqa: E402
from tilewise.dispatch import default_dispatcher  # noqa: E402
from tilewise.dispatch.remembered import CALLS  # noqa: E402
from tilewise.engines.device import detect  # noqa: E402

pytestmark = pytest.mark.gpu
functional = torch.nn.functional
BF16 = torch.bfloat16


def near(out: Any, expected: Any, limit: float = 1e-2) -> bool:
    wanted = expected.double()
    return bool((out.double() - wanted).norm() <= limit * wanted.norm())


def randn(*shape: int, dtype: Any = BF16) -> Any:
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.fixture
def only(request: pytest.FixtureRequest) -> Any:
    """Puts one family of kernels before all others, and sees that it serves plain tensors."""
    dispatcher = default_dispatcher("gemm", detect("gpu"))
    registry = dispatcher.registry
    raised: list[Any] = []

    def choose(family: str) -> None:
        found = [
            k
            for k in registry.kernels
            if getattr(k, "family", "") == family and getattr(k, "dtype", "") == "bf16"
        ]
        if not found and not detect("gpu").has("wgmma"):
            pytest.skip(f"no {family} kernels here")
        raised.extend(found)
        registry.declare(found, priority="high")
        plain = tw.GemmProblem(m=64, n=96, k=DEPTH, dtype="bf16")
        served = dispatcher.run(plain, randn(64, DEPTH), randn(96, DEPTH).t())
        assert getattr(served.kernel, "family", "") == family

    yield choose
    if raised:
        registry.declare(raised, priority="normal")


FAMILIES = ("pointer", "splitk", "streamk", "tma", "ws", "duo", "pingpong")
DEPTH = 256
"""Deep enough that every family has kernels for it."""


def views() -> dict[str, Any]:
    """[64, DEPTH] tensors, some of which TMA cannot address."""
    wide = randn(200, 2 * DEPTH + 8)
    return {
        "plain": randn(64, DEPTH),
        "wide pitch": wide[:64, :DEPTH],
        "odd pitch": randn(64, DEPTH + 3)[:, :DEPTH],
        "shifted": wide[:64, 1 : DEPTH + 1],
        "transposed": randn(DEPTH, 64).t(),
        "odd transposed": randn(DEPTH, 67).t()[:64],
        "strided": wide[:128:2, : 2 * DEPTH : 2],
        "expanded": randn(1, DEPTH).expand(64, DEPTH),
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", list(views()))
def test_any_strides(family: str, name: str, only: Any) -> None:
    only(family)
    a, b = views()[name], randn(96, DEPTH).t()
    for _ in range(3):  # chosen, remembered, remembered
        assert near(tw.matmul(a, b), a.double() @ b.double())
        assert near(tw.matmul(b.t(), a.t()), b.double().t() @ a.double().t())


def test_a_view_with_an_odd_pitch_is_served_without_an_error_under_tma_alone() -> None:
    registry = default_dispatcher("gemm", detect("gpu")).registry
    hopper = registry.filter(lambda k: getattr(k, "family", "") in ("tma", "ws", "duo"))
    if not len(hopper):
        pytest.skip("no kernels that copy with TMA here")
    a, b = randn(64, 131)[:, :128], randn(96, 128).t()
    problem = tw.GemmProblem(m=64, n=96, k=128, dtype="bf16")
    result = hopper.run(problem, a, b)
    assert near(result.out, a.double() @ b.double())
    assert "strides" in result.reason
    assert result.workspace_bytes >= 64 * 128 * 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize(("n", "k"), [(96, DEPTH), (97, DEPTH + 1)])
def test_linear(family: str, activation: str | None, n: int, k: int, only: Any) -> None:
    only(family)
    x, weight, bias = randn(2, 24, k), randn(n, k), randn(n)
    after = getattr(functional, activation) if activation else lambda z: z
    expected = after(functional.linear(x.double(), weight.double(), bias.double()))
    for _ in range(2):
        assert near(tw.linear(x, weight, bias, activation=activation), expected)


def test_linear_gradients_and_autocast() -> None:
    x, weight, bias = (torch.randn(s, device="cuda") for s in ((4, 33, 72), (40, 72), (40,)))
    grads = []
    for layer in (tw.linear, functional.linear):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        with torch.autocast("cuda", BF16):
            out = layer(*leaves)
        assert out.dtype == BF16
        out.float().square().sum().backward()
        grads.append([t.grad for t in leaves])
    for ours, expected in zip(*grads, strict=True):
        assert ours.dtype == torch.float32
        assert near(ours, expected, 2e-2)


@pytest.mark.parametrize("scaling", ["tensor", "row", "mixed"])
@pytest.mark.parametrize(("m", "n", "k"), [(64, 96, 128), (50, 97, 130), (1, 256, 512)])
@pytest.mark.parametrize("out_dtype", [BF16, torch.float32])
def test_scaled_matmul(scaling: str, m: int, n: int, k: int, out_dtype: Any) -> None:
    fp8 = torch.float8_e4m3fn
    a, b = randn(m, k, dtype=fp8), randn(n, k, dtype=fp8).t()
    one = {"device": "cuda"}
    left = torch.tensor(0.5, **one) if scaling == "tensor" else torch.rand(m, 1, **one) + 0.5
    right = torch.rand(1, n, **one) + 0.5 if scaling == "row" else torch.tensor(3.0, **one)
    bias = randn(n, dtype=out_dtype)
    for given in (None, bias):
        expected = (a.double() @ b.double()) * left.double() * right.double()
        expected = expected if given is None else expected + given.double()
        for _ in range(2):
            out = tw.scaled_matmul(a, b, left, right, given, out_dtype)
            assert out.dtype == out_dtype
            assert near(out, expected)


def test_graphs_replay_remembered_calls() -> None:
    x, weight, bias = randn(16, 512), randn(256, 512), randn(256)
    tw.linear(x, weight, bias)
    tw.matmul(x, weight.t())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, second = tw.linear(x, weight, bias), tw.matmul(x, weight.t())
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert near(first, functional.linear(x.double(), weight.double(), bias.double()))
        assert near(second, x.double() @ weight.double().t())


def test_a_first_call_inside_a_capture_is_pytorchs(caplog: pytest.LogCaptureFixture) -> None:
    notices._told.clear()
    CALLS.forget()
    x, weight = randn(16, 520), randn(264, 520)
    torch.mm(x, weight.t())  # cuBLAS has its own first call
    graph = torch.cuda.CUDAGraph()
    with caplog.at_level(logging.WARNING, "tilewise"), torch.cuda.graph(graph):
        out = tw.matmul(x, weight.t())
    graph.replay()
    assert near(out, x.double() @ weight.double().t())
    assert any("Run the model once" in record.message for record in caplog.records)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # PyTorch's own, to hold memory
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_layers(mode: str) -> None:
    torch._dynamo.reset()
    weight, bias = randn(256, 512), randn(256)

    def layer(x: Any) -> Any:
        return tw.linear(x * 2, weight, bias, activation="gelu") + 1

    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for _ in range(4):
        x = randn(32, 512)
        assert near(compiled(x).clone(), layer(x))


def test_operators_pass_opcheck() -> None:
    a, b = (randn(*shape).requires_grad_() for shape in ((24, 40), (40, 32)))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.tilewise.matmul.default, (a, b, False), test_utils=tests)


def test_threads_and_streams() -> None:
    import threading

    wrong: list[int] = []

    def work(index: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            a, b = randn(16 + index, 4096), randn(64, 4096).t()
            expected = a.double() @ b.double()
            for _ in range(30):
                if not near(tw.matmul(a, b), expected):
                    wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_tf32_follows_pytorchs_setting() -> None:
    a, b = randn(256, 1024, dtype=torch.float32), randn(1024, 256, dtype=torch.float32)
    expected = a.double() @ b.double()
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        assert near(tw.matmul(a, b), expected, 1e-5)
        torch.backends.cuda.matmul.allow_tf32 = True
        assert near(tw.matmul(a, b), expected, 2e-3)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_another_device_than_the_current_one() -> None:
    a, b = (torch.randn(s, device="cuda:1").to(BF16) for s in ((64, 128), (128, 96)))
    for _ in range(2):
        assert near(tw.matmul(a, b), a.double() @ b.double())
