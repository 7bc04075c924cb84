"""The functional API on CUDA tensors: right whatever the sizes, strides and dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import tilewise as tw  # noqa: E402
from tilewise.core.dtypes import tolerance  # noqa: E402
from tilewise.core.tensors import empty  # noqa: E402
from tilewise.dispatch import padding  # noqa: E402
from tilewise.dispatch.operands import prepare  # noqa: E402
from tilewise.dispatch.padding import PaddedPlan, aligned  # noqa: E402
from tilewise.engines.device import detect  # noqa: E402
from tilewise.errors import TensorError  # noqa: E402
from tilewise.ops.configs import load_pool  # noqa: E402
from tilewise.ops.contract import get_op  # noqa: E402
from tilewise.ops.conv.epilogue import Epilogue  # noqa: E402
from tilewise.ops.conv.problem import DIRECTIONS, shapes  # noqa: E402
from tilewise.ops.conv.vendor import bind_torch  # noqa: E402

pytestmark = pytest.mark.gpu


def close(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, limit: float) -> bool:
    expected = a.double() @ b.double()
    return bool((out.double() - expected).norm() <= limit * expected.norm())


@pytest.mark.parametrize(("m", "n", "k"), [(128, 256, 64), (77, 33, 45), (1, 999, 1001), (5, 1, 7)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_matmul(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(m + n + k)
    a, b = (torch.randn(s, device="cuda", dtype=dtype) for s in ((m, k), (k, n)))
    limit = {torch.float32: 1e-5, torch.float16: 2e-3}.get(dtype, 1e-2)
    for left in (a, a.t().contiguous().t()):
        for right in (b, b.t().contiguous().t()):
            assert close(tw.matmul(left, right), a, b, limit)


def test_gradients_batches_and_out() -> None:
    a = torch.randn(3, 40, 24, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    b = torch.randn(3, 24, 56, device="cuda", dtype=torch.bfloat16)
    tw.matmul(a, b).float().sum().backward()
    assert a.grad is not None
    assert close(a.grad, torch.ones(3, 40, 56, device="cuda"), b.mT, 2e-2)
    out = torch.full((3, 40, 56), float("nan"), device="cuda", dtype=torch.bfloat16)
    assert tw.matmul(a.detach(), b, out=out) is out
    assert close(out, a.detach(), b, 1e-2)


@pytest.mark.parametrize("m", [1, 16, 64])
def test_out_is_checked_and_written_every_time(m: int) -> None:
    a, b = (torch.randn(s, device="cuda").bfloat16() for s in ((m, 128), (128, 96)))
    pool = torch.empty(m * 96 + m * 128, device="cuda", dtype=torch.bfloat16)
    out, inside = pool[: m * 96].view(m, 96), pool[m * 96 - 8 :][: m * 128].view(m, 128)
    for _ in range(3):
        out.fill_(float("nan"))
        version = out._version
        assert tw.matmul(a, b, out=out) is out
        assert close(out, a, b, 1e-2)
        assert out._version > version
    with pytest.raises(TensorError, match="out shares memory with a"):
        tw.matmul(inside, b, out=out)


def test_remembered_calls_see_autocast_modes_and_gradients() -> None:
    a, b = (torch.randn(s, device="cuda") for s in ((32, 64), (64, 48)))
    leaf = torch.nn.Parameter(b.clone())
    with torch.no_grad():
        for _ in range(2):
            assert tw.matmul(a, b).dtype == torch.float32
            assert not tw.matmul(a, leaf).requires_grad
    with torch.autocast("cuda", torch.bfloat16):
        assert tw.matmul(a, b).dtype == torch.bfloat16
    assert tw.matmul(a, leaf).requires_grad


def test_tensors_of_two_devices_are_refused() -> None:
    a = torch.randn(4, 4, device="cuda")
    with pytest.raises(TensorError, match="move them to one device"):
        tw.matmul(a, torch.randn(4, 4))
    with pytest.raises(TensorError, match="out is on cpu"):
        tw.matmul(a, a, out=torch.empty(4, 4))


@pytest.mark.parametrize("groups", [1, 4])
def test_convolution_falls_back_to_the_vendor(groups: int) -> None:
    x = torch.randn(2, 8, 9, 9, device="cuda", dtype=torch.float16)
    w = torch.randn(12, 8 // groups, 3, 3, device="cuda", dtype=torch.float16)
    ours = tw.conv2d(x, w, padding=1, groups=groups)
    theirs = torch.nn.functional.conv2d(x, w, padding=1, groups=groups)
    torch.testing.assert_close(ours, theirs)


ODD: dict[str, dict[str, Any]] = {
    "both": {"c": 377, "k": 255},
    "odd k": {"c": 256, "k": 364},
    "odd c": {"c": 13, "k": 64, "stride_h": 2, "stride_w": 2},
    "1x1": {"c": 130, "k": 255, "y": 1, "x": 1, "pad_h": 0, "pad_w": 0},
    "volume": {"c": 21, "k": 35, "d": 5, "z": 3, "pad_d": 1},
    "fp16": {"c": 35, "k": 51, "dtype": "fp16"},
    "wide result": {"c": 35, "k": 51, "out_dtype": "fp32"},
}


def odd_layer(name: str, direction: str) -> tw.ConvProblem:
    sizes = {"n": 3, "h": 19, "w": 23, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1, "dtype": "bf16"}
    return tw.ConvProblem(direction=direction, **{**sizes, **ODD[name]})


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


def conv_tensors(p: tw.ConvProblem) -> list[torch.Tensor]:
    """Operands, and a poisoned result."""
    torch.manual_seed(p.c + p.k)
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    one, two, out = (torch.randn(shape, device="cuda") for shape in shapes(p))
    out.fill_(float("nan"))
    pairs = ((one, p.dtype), (two, p.dtype), (out, p.out_dtype))
    return [channels_last(tensor.to(kinds[kind])) for tensor, kind in pairs]


def check_conv(p: tw.ConvProblem, out: torch.Tensor, expected: torch.Tensor) -> None:
    apart = out.double() - expected
    limit = tolerance(p.dtype, p.out_dtype, p.gemm.k)
    assert float(apart.norm() / expected.norm()) <= limit
    assert float(apart.abs().max() / expected.abs().max()) <= limit


def padded_registries(p: tw.ConvProblem) -> Iterator[tw.Registry]:
    """One kernel each, of every family that serves a layer through padded copies alone."""
    arch, op = detect("gpu"), get_op(p.op)
    found = {}
    for kernel in load_pool(op, arch, engines=["cuda"]):
        larger = aligned(op, kernel, p)
        if larger != p and op.why_unusable(kernel, larger, arch) is None:
            found[kernel.family] = kernel  # type: ignore[attr-defined]
    for kernel in found.values():
        registry = tw.Registry(p.op, arch)
        registry.declare(kernel)
        yield registry


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in all memory that copies are made in."""
    monkeypatch.setattr(padding, "empty", lambda *of: empty(*of).fill_(float("nan")))


needs_tma = pytest.mark.skipif(not detect("gpu").has("tma"), reason="the GPU has no TMA")


@needs_tma
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ODD)
def test_odd_channels_are_padded(name: str, direction: str, poisoned: None) -> None:
    p = odd_layer(name, direction)
    one, two, out = conv_tensors(p)
    expected = bind_torch(p, [one.double(), two.double()], torch.zeros_like(out).double())()
    registries = list(padded_registries(p))
    assert bool(registries) == (direction != "fwd" or p.c % 8 > 0)
    for registry in registries:
        for _ in range(2):
            out.fill_(float("nan"))
            result = registry.run(p, one, two, out=out)
            assert result.kernel == registry.kernels[0]
            assert isinstance(registry.dispatcher.plan(p)[0], PaddedPlan)
            check_conv(p, out, expected)
        check_conv(p, registry.run(p, one, two).out, expected)


@needs_tma
def test_padded_convolutions_fuse_their_epilogue(poisoned: None) -> None:
    p = odd_layer("both", "fwd")
    one, two, out = conv_tensors(p)
    expected = bind_torch(p, [one.double(), two.double()], torch.zeros_like(out).double())()
    bias = torch.randn(p.k, device="cuda").to(out.dtype)
    residual = channels_last(torch.randn_like(out))
    expected = torch.relu(expected + bias.double()[:, None, None] + residual.double())
    after = Epilogue(bias=True, residual=True, activation="relu")
    for registry in padded_registries(p):
        call = prepare(registry.op, p, (one, two), out.fill_(float("nan")))
        plan, choice = registry.dispatcher.execute(
            p, call, epilogue=after, vectors=(bias, residual)
        )
        assert (plan.epilogue, choice.kernel) == (after, registry.kernels[0])
        check_conv(p, out, expected)


@needs_tma
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_padded_convolutions_replay_in_graphs(direction: str) -> None:
    p = odd_layer("both", direction)
    for registry in padded_registries(p):
        one, two, out = conv_tensors(p)
        plan, _ = registry.dispatcher.plan(p)
        plan.execute((one, two), out)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            plan.execute((one, two), out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plan.execute((one, two), out)
        one.copy_(torch.randn_like(one))
        out.fill_(float("nan"))
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        expected = bind_torch(p, [one.double(), two.double()], torch.zeros_like(out).double())()
        check_conv(p, out, expected)


@needs_tma
def test_an_even_tensor_may_begin_anywhere() -> None:
    p = odd_layer("odd k", "bwd_weight")
    x, dy, out = conv_tensors(p)
    pixels = x.movedim(1, -1)
    shifted = torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view(pixels.shape)
    shifted = shifted.copy_(pixels).movedim(-1, 1)
    expected = bind_torch(p, [x.double(), dy.double()], torch.zeros_like(out).double())()
    for registry in padded_registries(p):
        result = registry.run(p, shifted, dy, out=out.fill_(float("nan")))
        assert result.kernel == registry.kernels[0]
        check_conv(p, out, expected)
