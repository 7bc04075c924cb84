"""Remembered calls: found again for tensors alike in all that decides them, and for no others."""

from __future__ import annotations

import gc
import weakref
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import tilewise as tw
from tilewise import torch_ops
from tilewise.dispatch.remembered import CALLS, Remembered
from tilewise.engines.toolchain import find_compiler
from tilewise.errors import ArchError, InputError, TensorError
from tilewise.settings import settings
from tilewise.torch_ops import calls, guards

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

close = torch.testing.assert_close


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
    from tilewise.dispatch import shipped as array_calls

    a, b = torch.randn(19, 28).numpy(), torch.randn(28, 11).numpy()
    expected = tw.matmul(a, b)
    monkeypatch.setattr(array_calls, "default_dispatcher", None)
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
    a, b = torch.randn(19, 27), torch.randn(27, 11)
    expected = tw.matmul(a, b)
    monkeypatch.setattr(calls, "default_dispatcher", None)
    monkeypatch.setattr(calls, "prepare", None)
    close(tw.matmul(a, b), expected)
    with pytest.raises(TypeError):
        tw.matmul(a[:-1], b)  # the sabotage works: an unknown shape needs what is gone


def test_a_remembered_convolution_asks_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, bias = torch.randn(2, 8, 9, 9), torch.randn(12, 4, 3, 3), torch.randn(12)
    layer = {"stride": 2, "padding": (1, 1), "dilation": [1, 1], "groups": 2}
    for more in ({}, {"bias": bias}, {"bias": bias, "activation": "relu"}):
        for _ in range(3):  # the first dispatcher of a process forgets what was before
            expected = tw.conv2d(x, w, **more, **layer)
        with monkeypatch.context() as patched:
            patched.setattr(torch_ops, "_convolve", None)
            close(tw.conv2d(x.clone(), w, **more, **layer), expected)
            for other in (x[:, :, 1:], x.contiguous(memory_format=torch.channels_last)):
                with pytest.raises(TypeError):
                    tw.conv2d(other, w, **more, **layer)


def test_remembered_convolutions_know_what_decides_them() -> None:
    conv = torch.nn.functional.conv2d
    x, w, bias = torch.randn(2, 6, 9, 9), torch.randn(4, 6, 3, 3), torch.randn(4)
    trained = torch.nn.Parameter(w)
    for _ in range(3):
        close(tw.conv2d(x, w), conv(x, w))
        close(tw.conv2d(x, w, padding=1), conv(x, w, padding=1))
        close(tw.conv2d(x, w, bias, padding="same"), conv(x, w, bias, padding="same"))
        close(tw.conv2d(x, w, padding=[1, 0]), conv(x, w, padding=(1, 0)))
        close(tw.conv2d(x[0], w), conv(x[0], w))
        last = x.contiguous(memory_format=torch.channels_last)
        close(tw.conv2d(last, w), conv(last, w))
        assert (
            tw.conv2d(last, w).stride()
            == conv(last, w).contiguous(memory_format=torch.channels_last).stride()
        )
        close(tw.conv2d(torch._neg_view(x), w), -conv(x, w))
        assert tw.conv2d(x, trained).requires_grad
        with torch.no_grad():
            assert not tw.conv2d(x, trained).requires_grad
        with torch.autocast("cpu", torch.bfloat16):
            assert tw.conv2d(x, w).dtype == torch.bfloat16
        with pytest.raises(TensorError):
            tw.conv2d(x, w[:, :5])


@pytest.mark.parametrize("name", ["stride", "padding", "dilation", "groups"])
def test_settings_that_change_are_read_in_every_call(name: str) -> None:
    """A tensor that counts is a setting, too, and found again as the same while it changes."""
    conv, count = torch.nn.functional.conv2d, torch.tensor(1)
    x, w = torch.randn(2, 6, 9, 9), torch.randn(6, 3, 3, 3)
    groups: dict[str, Any] = {} if name == "groups" else {"groups": 2}
    for number in (2, 1, 2):
        if name == "groups":
            w = torch.randn(6, 6 // number, 3, 3)
        count.fill_(number)
        for _ in range(2):
            close(tw.conv2d(x, w, **{name: count}, **groups), conv(x, w, **{name: count}, **groups))
        if name != "groups":
            pair = {name: (count, 1)}
            close(tw.conv2d(x, w, **pair, **groups), conv(x, w, **{name: (number, 1)}, **groups))


EQUAL_TO_ONE = (1.0, True, np.float64(1), np.True_, Fraction(1), torch.tensor(1.0))
"""What a key would take for 1, and PyTorch refuses; likewise in pairs."""


@pytest.mark.parametrize("name", ["stride", "padding", "dilation", "groups"])
def test_what_equals_an_integer_is_none(name: str) -> None:
    x, w = torch.randn(1, 4, 6, 6), torch.randn(4, 4, 3, 3)
    pairs = [] if name == "groups" else [*((v, 1) for v in EQUAL_TO_ONE), [1, 1.0]]
    for given in (*EQUAL_TO_ONE, *pairs):
        for kind in (lambda t: t, lambda t: t.numpy()):
            for known in (1, *([] if name == "groups" else [(1, 1), [1, 1]])):
                for _ in range(2):
                    tw.conv2d(kind(x), kind(w), **{name: known})
            for _ in range(2):
                with pytest.raises(InputError, match=f"{name} is"):
                    tw.conv2d(kind(x), kind(w), **{name: given})
                with pytest.raises(InputError, match=f"{name} is"):
                    tw.conv2d(kind(x), kind(w), out=kind(torch.empty(1, 4, 4, 4)), **{name: given})


@pytest.mark.parametrize("fuses", [False, True])
def test_what_equals_an_integer_is_none_in_layers(fuses: bool) -> None:
    x = torch.randn(1, 4, 6, 6)
    made = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.ReLU())
    with torch.no_grad():
        expected = made(x)
        model = tw.patch(made, always=True, fuse=fuses)
        for _ in range(2):
            close(model(x), expected)
        for name in ("stride", "padding", "dilation", "groups"):
            kept = getattr(model[0], name)
            setattr(model[0], name, 1.0 if name == "groups" else (True, 1.0))
            with pytest.raises((InputError, TypeError, RuntimeError)):
                model(x)
            setattr(model[0], name, kept if name == "groups" else list(kept))
            close(model(x), expected)


@pytest.mark.parametrize("activation", ["", 0, False, ["relu"], {}, np.array(["relu", "gelu"])])
def test_activations_that_are_none_are_refused(activation: Any) -> None:
    x, w, weight = torch.randn(1, 4, 6, 6), torch.randn(4, 4, 3, 3), torch.randn(5, 6)
    for kind in (lambda t: t, lambda t: t.numpy()):
        with pytest.raises(InputError, match="activation is"):
            tw.conv2d(kind(x), kind(w), activation=activation)
        with pytest.raises(InputError, match="activation is"):
            tw.linear(kind(x), kind(weight), activation=activation)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
def test_remembered_calls_see_what_watches_them() -> None:
    """One way is remembered; what differs in type, gradient, autocast or modes takes another."""
    a, b = torch.randn(18, 26), torch.randn(26, 14)
    weight = torch.nn.Parameter(b.t().contiguous())
    with torch.no_grad():
        for _ in range(2):
            assert tw.matmul(a, weight.t()).dtype == torch.float32
            assert tw.linear(a, weight).dtype == torch.float32
            assert tw.matmul(a, b).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert tw.matmul(a, b).dtype == torch.bfloat16
            assert tw.linear(a, weight).dtype == torch.bfloat16
    assert tw.matmul(a, weight.t()).requires_grad
    assert tw.linear(a, weight).requires_grad
    close(tw.matmul(torch._neg_view(a), b), -(a @ b))
    batch = torch.randn(3, 18, 26)
    close(torch.vmap(lambda x: tw.matmul(x, b))(batch), batch @ b)
    traced = torch.jit.trace(lambda x: tw.matmul(x, b), (a,))
    close(traced(2 * a), 2 * a @ b)


def test_without_guards_calls_are_found_by_their_whole_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "_Guards", None)
    CALLS.forget()
    a, b, out = torch.randn(17, 26), torch.randn(26, 13), torch.empty(17, 13)
    for _ in range(2):
        close(tw.matmul(a, b), a @ b)
        close(tw.linear(a, b.t()), a @ b)
        close(tw.matmul(a, b, out=out), a @ b)
    assert len(CALLS) == 2


def test_few_calls_lie_behind_one_small_key() -> None:
    CALLS.forget()
    wide = torch.randn(4 * guards.MOST, 40)
    for step in range(1, guards.MOST + 4):
        a = wide.as_strided((4, 8), (40 * step // 2, 1))
        b = torch.randn(8, 8)
        for _ in range(2):
            close(tw.matmul(a, b), a @ b)
    behind = [found for found in CALLS._calls.values() if isinstance(found, tuple)]
    assert behind
    assert max(map(len, behind)) <= guards.MOST


def test_out_is_found_again_and_checked_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(19, 25), torch.randn(25, 12)
    pool = torch.empty(19 * 12 + 19 * 25)
    out = pool[: 19 * 12].view(19, 12)
    for _ in range(2):  # the first dispatcher of a process forgets what was before
        tw.matmul(a, b, out=out)
    with monkeypatch.context() as patch:
        patch.setattr(calls, "default_dispatcher", None)
        version = out._version
        assert tw.matmul(2 * a, b, out=out.zero_()) is out
        close(out, 2 * a @ b)
        assert out._version > version + 1
        with pytest.raises(TypeError):
            tw.matmul(a[:-1], b, out=out[:-1])  # the sabotage works
    inside = pool[19 * 12 - 4 :][: 19 * 25].view(19, 25)  # alike but for where it lies
    with pytest.raises(TensorError, match="out shares memory with a"):
        tw.matmul(inside, b, out=out)
    beside = pool[19 * 12 :].view(19, 25)
    close(tw.matmul(beside.copy_(a), b, out=out), a @ b)
    for wrong, says in (
        (torch.empty(12, 19), "out has shape"),
        (torch.empty(19, 12).half(), "out is fp16"),
        (torch.empty(1, 12).expand(19, 12), "elements that share memory"),
        (torch.empty(19, 12, requires_grad=True), "out requires a gradient"),
    ):
        with pytest.raises(TensorError, match=says):
            tw.matmul(a, b, out=wrong)
    column_major = torch.empty(12, 19).t()
    for _ in range(2):
        close(tw.matmul(a, b, out=column_major.zero_()), a @ b)


def test_what_out_overwrites_is_no_good_for_gradients() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    out = torch.randn(4, 4)
    loss = (x * out).sum()
    for _ in range(2):
        tw.matmul(x.detach(), x.detach(), out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("way", ["conv2d", "run"])
def test_what_other_calls_overwrite_is_no_good_either(way: str) -> None:
    x, w = torch.randn(1, 4, 5, 5), torch.randn(4, 4, 1, 1)
    out, weight = torch.randn(1, 4, 5, 5), torch.randn(1, 4, 5, 5, requires_grad=True)
    loss = (weight * out).sum()
    if way == "run":
        problem = tw.ConvProblem(n=1, c=4, k=4, h=5, w=5, y=1, x=1, dtype="fp32")
        tw.run(problem, x, w, out=out)
    else:
        tw.conv2d(x, w, out=out)
    close(out, torch.nn.functional.conv2d(x, w))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_call_new_to_a_graph_is_pytorchs_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "is_capturing", lambda tensor: True)
    a, b = torch.randn(11, 13), torch.randn(13, 17)
    close(tw.matmul(a, b), a @ b)
    whole = torch.ones(11, 13, dtype=torch.int8)
    with pytest.raises(TensorError, match="run the model once before"):
        tw.matmul(whole, whole.t())


def test_a_device_that_is_unknown_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(tensor: torch.Tensor) -> None:
        raise ArchError("Tesla V100 is sm_70, which has no data file")

    monkeypatch.setattr(calls, "live_arch", unknown)
    a, b, out = torch.randn(7, 19), torch.randn(19, 5), torch.empty(7, 5)
    for _ in range(2):
        close(tw.matmul(a, b), a @ b)
        close(tw.matmul(a, b, out=out), a @ b)
    with pytest.raises(TensorError, match="out has shape"):
        tw.matmul(a, b, out=torch.empty(3, 3))
    whole = torch.ones(7, 19, dtype=torch.int8)
    with pytest.raises(ArchError, match="no data file"):
        tw.matmul(whole, whole.t())
