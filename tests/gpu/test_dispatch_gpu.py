"""The functional API on CUDA tensors: right whatever the sizes, strides and dtypes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import tilewise as tw  # noqa: E402
from tilewise.errors import TensorError  # noqa: E402

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
