"""Memory that may not be read or written: refused with one line, on every path of the API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise.errors import InputError, TensorError

Tensor = torch.Tensor


def freed(*shape: int, dtype: torch.dtype = torch.float32, start: int = 0) -> Tensor:
    """A tensor whose storage is gone, as sharded training leaves its parameters."""
    size = int(np.prod(shape))
    tensor = torch.ones(size + start, dtype=dtype)[start:].view(shape)
    tensor.untyped_storage().resize_(0)
    return tensor


ONES = torch.ones(64, 64)
X, W = torch.ones(1, 4, 8, 8), torch.ones(6, 4, 3, 3)
LAYER = torch.ones(1, 4, 10, 10), torch.ones(64, 4, 3, 3)
CALLS: dict[str, Callable[[Tensor], Any]] = {
    "matmul": lambda z: tw.matmul(z, ONES),
    "matmul second": lambda z: tw.matmul(ONES, z),
    "matmul batches": lambda z: tw.matmul(z.view(4, 16, 64), ONES),
    "matmul into": lambda z: tw.matmul(z, ONES, out=torch.empty(64, 64)),
    "matmul out": lambda z: tw.matmul(ONES, ONES, out=z),
    "matmul out of batches": lambda z: tw.matmul(ONES.view(4, 16, 64), ONES, out=z.view(4, 16, 64)),
    "linear": lambda z: tw.linear(z, ONES),
    "linear weight": lambda z: tw.linear(ONES, z, torch.ones(64)),
    "linear bias": lambda z: tw.linear(ONES, ONES, z.view(-1)[:64]),
    "conv2d": lambda z: tw.conv2d(z.view(16, 4, 8, 8), W),
    "conv2d weight": lambda z: tw.conv2d(torch.ones(2, 64, 8, 8), z.view(64, 64, 1, 1)),
    "conv2d bias": lambda z: tw.conv2d(X, W, z.view(-1)[:6]),
    "conv2d out": lambda z: tw.conv2d(*LAYER, out=z.view(1, 64, 8, 8)),
    "input gradient": lambda z: tw.conv_input_gradient(
        (1, 4, 10, 10), LAYER[1], z.view(1, 64, 8, 8)
    ),
}


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("name", CALLS)
def test_freed_storage_is_refused(name: str, start: int) -> None:
    call = CALLS[name]
    call(torch.ones(64, 64))  # the call is remembered before the storage is freed
    with pytest.raises((TensorError, RuntimeError), match=r"freed|not allocated|out of bounds"):
        call(freed(64, 64, start=start))


def test_gradients_of_freed_operands_are_refused() -> None:
    a, b = (torch.ones(8, 8).requires_grad_() for _ in range(2))
    product = tw.matmul(a, b)
    b.data.untyped_storage().resize_(0)
    with pytest.raises((TensorError, RuntimeError), match=r"freed|out of bounds"):
        product.sum().backward()


def test_scaled_products_of_freed_operands_are_refused() -> None:
    a = torch.ones(16, 16).to(torch.float8_e4m3fn)
    one = torch.ones(())
    tw.scaled_matmul(a, a, one, one)
    for tensors in (
        (freed(16, 16, dtype=a.dtype), a, one, one),
        (a, freed(16, 16, dtype=a.dtype), one, one),
        (a, a, freed(16, 1), torch.ones(16)),
    ):
        with pytest.raises(TensorError, match="freed"):
            tw.scaled_matmul(*tensors)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("padding", [2**61, 2**31, 2**30, (2**62, 0)])
def test_paddings_beyond_any_memory_are_refused(kind: torch.dtype, padding: Any) -> None:
    with pytest.raises(InputError, match="most"):
        tw.conv2d(X.to(kind), W.to(kind), padding=padding)
    with pytest.raises(InputError, match="most"):
        tw.conv2d(X.numpy(), W.numpy(), padding=padding)


A, B = torch.randn(2, 3, 4), torch.randn(4, 5)
WRONG_OUT: dict[str, Callable[[], Any]] = {
    "int32": lambda: torch.zeros(2, 3, 5, dtype=torch.int32),
    "overlapping": lambda: torch.zeros(100).as_strided((2, 3, 5), (1, 1, 1)),
    "one element": lambda: torch.zeros(1).expand(2, 3, 5),
    "gradient": lambda: torch.zeros(2, 3, 5, requires_grad=True),
    "shape": lambda: torch.zeros(2, 3, 6),
    "negated": lambda: torch._neg_view(torch.zeros(2, 3, 5)),
    "list": lambda: [1],
    "array": lambda: np.zeros((2, 3, 5), np.float32),
}


@pytest.mark.parametrize("name", WRONG_OUT)
def test_batches_refuse_what_cannot_hold_them(name: str) -> None:
    with pytest.raises(TensorError, match=r"out|list"):
        tw.matmul(A, B, out=WRONG_OUT[name]())


@pytest.mark.parametrize("name", WRONG_OUT)
def test_arrays_refuse_what_cannot_hold_them(name: str) -> None:
    made = WRONG_OUT[name]()
    if isinstance(made, torch.Tensor) and name not in ("gradient", "negated"):
        made = made.numpy()
    elif isinstance(made, np.ndarray):
        made = torch.from_numpy(made)
    with pytest.raises(TensorError, match=r"out|list"):
        tw.matmul(A.numpy(), B.numpy(), out=made)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.int64, torch.int8])
def test_results_never_lie_on_operands(kind: torch.dtype) -> None:
    a = torch.ones(4, 4, dtype=kind)
    with pytest.raises(TensorError, match="shares memory with a"):
        tw.matmul(a, a.clone(), out=a)
    cube = torch.ones(3, 4, 4, dtype=kind)
    with pytest.raises(TensorError, match=r"shares memory with b|must be"):
        tw.matmul(a, cube, out=cube)


def test_convolutions_never_overwrite_what_they_read() -> None:
    out = torch.ones(1, 6, 6, 6)
    for bias in (out[0, :, 0, 0], out[0, 0, 0]):
        with pytest.raises(TensorError, match="shares memory with bias"):
            tw.conv2d(X, W, bias=bias, out=out)
    array = out.numpy()
    with pytest.raises(TensorError, match="shares memory with bias"):
        tw.conv2d(X.numpy(), W.numpy(), bias=array[0, :, 0, 0], out=array)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("with_bias", [False, True])
def test_convolutions_into_a_tensor(kind: torch.dtype, with_bias: bool) -> None:
    x, w = torch.randn(2, 4, 8, 8).to(kind), torch.randn(6, 4, 3, 3).to(kind)
    bias = torch.randn(6).to(kind) if with_bias else None
    out = torch.empty(2, 6, 6, 6, dtype=kind)
    assert tw.conv2d(x, w, bias, out=out) is out
    torch.testing.assert_close(out, torch.nn.functional.conv2d(x, w, bias))
    one = torch.empty(6, 6, 6, dtype=kind)
    torch.testing.assert_close(tw.conv2d(x[0], w, bias, out=one), out[0])


def halves(kind: torch.dtype, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, weight = torch.randn(*shape, generator=generator), torch.randn(48, 64, generator=generator)
    bias = 100 * torch.randn(48, generator=generator)
    return x.to(kind), weight.to(kind), bias.to(kind)


def misrounded(result: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> float:
    """The share of elements that are not the exact sum, rounded once."""
    exact = x.double() @ weight.double().T + bias.double()
    return float((result != exact.to(x.dtype)).double().mean())


@pytest.mark.parametrize("is_theirs", [False, True])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(32, 64), (2, 3, 64), (2, 2, 5, 64), (1, 64), (64,)])
def test_half_precision_layers_round_once(
    shape: tuple[int, ...], kind: torch.dtype, is_theirs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias added to what is rounded already spoils more than a third of these elements."""
    from tilewise.torch_ops import products

    layer = halves(kind, *shape)
    if is_theirs:
        assert misrounded(products.torch_linear("none", *layer), *layer) < 0.02
    else:
        assert misrounded(tw.linear(*layer), *layer) < 0.02


def test_half_precision_arrays_round_once() -> None:
    x, weight, bias = halves(torch.float16, 5, 64)
    result = tw.linear(x.numpy(), weight.numpy(), bias.numpy())
    assert result.dtype == np.float16
    assert misrounded(torch.from_numpy(result), x, weight, bias) < 0.02


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_half_precision_convolutions_round_once(kind: torch.dtype) -> None:
    x, weight, bias = halves(kind, 7 * 9, 64)
    image = x.T.reshape(1, 64, 7, 9).contiguous()
    result = tw.conv2d(image, weight[:, :, None, None].contiguous(), bias)
    assert misrounded(result.reshape(48, -1).T, x, weight, bias) < 0.02


def test_what_was_made_in_inference_mode_is_written_only_there() -> None:
    """Else autograd would not know of it; the mode is not part of what finds a call again."""
    with torch.inference_mode():
        product, image = torch.empty(64, 64), torch.empty(1, 6, 6, 6)
        for _ in range(2):
            tw.matmul(ONES, ONES, out=product)
            tw.conv2d(X, W, out=image)
            tw.conv2d(X, W, torch.ones(6), out=image)
    for call in (
        lambda: tw.matmul(ONES, ONES, out=product),
        lambda: tw.conv2d(X, W, out=image),
        lambda: tw.conv2d(X, W, torch.ones(6), out=image),
    ):
        with torch.no_grad(), pytest.raises(TensorError, match="inference mode"):
            call()


def test_tensors_without_an_address_share_nothing() -> None:
    meta, sparse = torch.empty(4, 4, device="meta"), torch.eye(64).to_sparse()
    assert tw.matmul(meta, meta, out=torch.empty_like(meta)).shape == (4, 4)
    out = torch.empty(64, 64)
    assert tw.matmul(sparse, ONES, out=out) is out
    assert torch.equal(out, ONES)


def test_masked_arrays_are_refused() -> None:
    plain = np.ones((4, 4), np.float32)
    masked = np.ma.masked_array(plain.copy(), mask=np.eye(4))
    for call in (
        lambda: tw.matmul(masked, plain),
        lambda: tw.matmul(plain, masked[None]),
        lambda: tw.linear(plain, masked),
        lambda: tw.linear(plain, plain, masked[0]),
        lambda: tw.matmul(plain, plain, out=masked),
        lambda: tw.conv1d(masked[None], plain[:, :, None]),
        lambda: tw.conv1d(plain[None], plain[:, :, None], masked[0]),
    ):
        with pytest.raises(TensorError, match="masked"):
            call()


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_lists_are_refused_by_name(name: str) -> None:
    plain = np.ones((4, 4), np.float32)
    arrays = {"x": plain, "weight": plain, "bias": plain[0]}
    for convert in (lambda t: t, torch.from_numpy):
        given = {key: convert(array) for key, array in arrays.items()} | {name: [1.0] * 4}
        with pytest.raises(TensorError, match="list is not a tensor"):
            tw.linear(**given)
        image = {"x": given["x"][None], "w": convert(plain[:, :, None]), "bias": given["bias"]}
        if name == "bias":
            with pytest.raises(TensorError, match="list is not a tensor"):
                tw.conv1d(**image)
