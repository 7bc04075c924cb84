"""Products of PyTorch tensors: any dimensions and strides, layers, scales, autocast, fallbacks."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from leaves import gradients, leaf
from torch.nn import functional

import tilewise as tw
from tilewise.engines.toolchain import find_compiler
from tilewise.errors import InputError, TensorError
from tilewise.ops.gemm.vendor import _matmul_tf32, scaled_operands

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

close = torch.testing.assert_close


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


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_layers_left_to_pytorch_have_gradients(activation: str) -> None:
    x, weight = torch.randn(5, 12).double(), torch.randn(9, 12).double()
    after = getattr(functional, activation)
    ours = gradients(lambda *t: tw.linear(*t, activation=activation), x, weight)
    expected = gradients(lambda *t: after(functional.linear(*t)), x, weight)
    for one, other in zip(ours, expected, strict=True):
        close(one, other)
    slope = torch.func.grad(lambda t: tw.linear(t, weight.float(), activation=activation).sum())
    close(
        slope(x.float()),
        torch.func.grad(lambda t: after(functional.linear(t, weight)).sum())(x).float(),
    )


def test_linear_takes_any_strides() -> None:
    weight, bias = torch.randn(12, 9).t(), torch.randn(18)[::2]
    for x in (torch.randn(4, 5, 24)[..., ::2], torch.randn(5, 4, 12).transpose(0, 1)):
        for _ in range(2):
            close(tw.linear(x, weight, bias), functional.linear(x, weight, bias))


def test_linear_on_arrays() -> None:
    x, weight, bias = torch.randn(2, 3, 12), torch.randn(9, 12), torch.randn(9)
    ours = tw.linear(x.numpy(), weight.numpy(), bias.numpy(), activation="relu")
    close(torch.from_numpy(ours), functional.relu(functional.linear(x, weight, bias)))
    for wrong in (bias, bias.numpy()[:-1], bias.double().numpy(), bias.numpy()[None]):
        with pytest.raises(TensorError, match="array"):
            tw.linear(x.numpy(), weight.numpy(), wrong)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((torch.zeros(2, 3), torch.zeros(4, 5)), "last size of x"),
        ((torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(3)), r"bias has shape \(3,\)"),
        ((torch.zeros(2, 3), torch.zeros(4, 3).half()), "convert one of them"),
        ((torch.zeros(2, 3).double(), torch.zeros(4, 5).double()), "PyTorch says"),
        ((torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(1, 4)), r"bias has shape \(1, 4\)"),
        ((torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(4).half()), "bias is torch.float16"),
        ((torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(4).double()), "PyTorch says"),
        ((torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(4, device="meta")), "PyTorch says"),
        ((torch.zeros(2, 3), torch.zeros(4, 3), np.zeros(4, np.float32)), "two libraries"),
        ((torch.zeros(2, 3), torch.zeros(4, 3), [0.0] * 4), "list is not a tensor"),
    ],
)
def test_wrong_layers_are_refused(given: tuple[Any, ...], says: str) -> None:
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


def test_scaled_products_of_two_kinds_are_pytorchs(caplog: pytest.LogCaptureFixture) -> None:
    a = torch.randn(16, 32).to(torch.float8_e5m2)
    b = torch.randn(48, 32).to(torch.float8_e4m3fn).t()
    one, rows = torch.tensor(1.0), torch.rand(16) + 0.5
    with caplog.at_level(logging.WARNING, "tilewise"):
        for left in (one, rows):
            out = tw.scaled_matmul(a, b, left, one)
            close(out.double(), a.double() @ b.double() * left.reshape(-1, 1), rtol=1e-2, atol=1e-1)
        small = tw.scaled_matmul(b.t(), b, one, one, out_dtype=torch.float8_e4m3fn)
        assert small.dtype == torch.float8_e4m3fn
    assert [record.message.split("products of ")[1] for record in caplog.records] == [
        "torch.float8_e5m2 and torch.float8_e4m3fn",
        "results in torch.float8_e4m3fn",
    ]
    with pytest.raises(TensorError, match="PyTorch says"):
        tw.scaled_matmul(a, b[:16], one, one)
    with pytest.raises(TensorError, match=r"out_dtype is torch\.int8"):
        tw.scaled_matmul(a, b, one, one, out_dtype=torch.int8)


def test_unsupported_cases_go_to_pytorch_and_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
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


def test_nothing_is_no_tensor() -> None:
    a = torch.ones(2, 2)
    one, image = torch.tensor(1.0), torch.ones(1, 1, 2, 2)
    for call in (
        lambda: tw.matmul(None, a),
        lambda: tw.matmul(a, None),
        lambda: tw.matmul(a, None, out=a),
        lambda: tw.linear(a, None),
        lambda: tw.scaled_matmul(a, None, one, one),
        lambda: tw.conv2d(image, None),
    ):
        with pytest.raises(TensorError, match="NoneType is not a tensor"):
            call()
    with pytest.raises(TensorError, match="out is a ndarray"):
        tw.matmul(a, a, out=a.numpy())
    with pytest.raises(InputError, match="a int is not a model"):
        tw.patch(3)


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


def test_operands_of_scaled_products_lie_where_cublas_reads_them() -> None:
    kind = torch.float8_e4m3fn
    flat = torch.randn(32 * 64 + 1).to(kind)
    plain = torch.randn(32, 64).to(kind)
    wide = torch.randn(32, 72).to(kind)[:, :64]  # rows of 72 bytes
    for a in (plain, flat[1:].view(32, 64), wide):
        left, right = scaled_operands(a, a.t())
        assert (left is a) == (a is plain)
        for made in (left, right.t()):
            assert made.data_ptr() % 16 == made.stride(0) % 16 == 0 and made.stride(1) == 1
            assert torch.equal(made.float(), a.float())


def test_tf32_leaves_pytorchs_setting_as_it_was() -> None:
    of_all, of_products = torch.backends, torch.backends.cuda.matmul
    before = of_all.fp32_precision, of_products.fp32_precision
    a = torch.randn(4, 4)
    try:
        for everywhere, here, later in (("tf32", "none", "ieee"), ("none", "ieee", "tf32")):
            of_all.fp32_precision, of_products.fp32_precision = everywhere, here
            close(_matmul_tf32(a, a, torch.empty(4, 4)), a @ a)
            of_all.fp32_precision = later
            assert of_products.fp32_precision == "ieee"
    finally:
        of_all.fp32_precision, of_products.fp32_precision = before
