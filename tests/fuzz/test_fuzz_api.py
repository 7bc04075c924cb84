"""The functional API against PyTorch's own answer or exception, whatever tensors it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from fuzzing import fuzz
from hypothesis import assume, example
from hypothesis import strategies as st
from spoiling import hostile
from tensors import KINDS, STORAGES, Recipe, stored
from torch import Tensor
from torch.nn import functional

import tilewise as tw
from tilewise.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")  # PyTorch's, once
SIZES = st.sampled_from((0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33))
HALVES = (torch.float32, torch.float32, torch.float16, torch.bfloat16)
NARROW = {torch.int8: torch.int32}
"""What tilewise multiplies into something wider than PyTorch does."""


def outcome(call: Callable[[], Any]) -> Any:
    """What a call gives, or what it raises; only errors that are meant are among these."""
    try:
        return call()
    except (InputError, RuntimeError, ValueError, TypeError, IndexError) as error:
        return error


def theirs_of(call: Callable[[], Any], drawn: Any) -> Any:
    """PyTorch's answer; it has none for freed storage, and need not be asked, as it may crash."""
    if any(recipe is not None and recipe.is_freed for recipe in drawn):
        return RuntimeError("freed")
    return outcome(call)


def whole(drawn: Any) -> list[Tensor | None]:
    return [None if recipe is None else recipe.exact() for recipe in drawn]


def failed(found: Any) -> bool:
    return isinstance(found, Exception)


def ours(call: Callable[[], Any]) -> Any:
    """The same for tilewise, which raises its own kind of error or PyTorch's."""
    found = outcome(call)
    assert not failed(found) or isinstance(found, InputError | RuntimeError), repr(found)
    return found


def agree(found: Any, theirs: Any, wanted: Callable[[], Tensor]) -> None:
    """The same failure on both sides, or the exact values, rounded once."""
    assert failed(found) == failed(theirs), (found, theirs)
    if not failed(found):
        values = wanted()
        assert found.shape == values.shape, (found.shape, values.shape)
        assert torch.equal(found.detach(), values.to(found.dtype)), (found, values)


_kinds, _halves = st.sampled_from(KINDS), st.sampled_from((*HALVES, torch.float64))
_batches = st.lists(st.sampled_from((0, 1, 2, 3)), max_size=2)
_left, _right, _fourth = st.integers(0, 4), st.integers(0, 5), st.sampled_from((0, 0, 0, 1))


@st.composite
def products(draw: Any) -> tuple[Recipe, Recipe]:
    """Two tensors that mostly go together."""
    m, n, k = draw(SIZES), draw(SIZES), draw(SIZES)
    batch = draw(_batches)
    left = ((k,), (m, k), (m, k), (*batch, m, k), (1, m, k))[draw(_left)]
    right = ((k,), (k, n), (k, n), (*batch, k, n), (k + 1, n), ())[draw(_right)]
    kind = draw(_kinds)
    other = torch.float32 if draw(_fourth) else kind
    return stored(draw, left, kind), stored(draw, right, other)


@fuzz(150, pair=products())
def test_products(pair: tuple[Recipe, Recipe]) -> None:
    a, b = (recipe.make() for recipe in pair)
    wide = NARROW.get(a.dtype, a.dtype) if a.dtype == b.dtype else a.dtype
    theirs = theirs_of(lambda: torch.matmul(a, b), pair)
    ours(lambda: tw.matmul(a, b))
    found = ours(lambda: tw.matmul(a, b))  # a remembered call
    if a.dtype != b.dtype and not failed(theirs):
        return  # PyTorch looks at types only where there is something to multiply
    agree(found, theirs, lambda: torch.matmul(*whole(pair)).to(wide))
    if not failed(found):
        assert found.dtype == wide
        assert found.requires_grad == theirs.requires_grad


OUT = (
    *("plain", "plain", "transposed", "sliced", "stepped", "shifted", "spread", "wanting"),
    *("freed", "first", "second", "wide", "list"),
)


def result_place(out: str, shape: tuple[int, ...], kind: torch.dtype, a: Any, b: Any) -> Any:
    """Where a result is asked to go."""
    if out in ("first", "second"):
        return a if out == "first" else b
    if out == "list":
        return [0.0]
    if out == "wide":
        return torch.zeros(shape, dtype=torch.float64 if kind != torch.float64 else torch.int32)
    return Recipe(shape, kind, out).make()


@example(pair=(Recipe((1, 1)), Recipe((1, 1), storage="negated")), out="plain")
@example(pair=(Recipe((1,)), Recipe((1,), storage="negated")), out="plain")
@fuzz(150, pair=products(), out=st.sampled_from(OUT))
def test_products_into_a_tensor(pair: tuple[Recipe, Recipe], out: str) -> None:
    a, b = (recipe.make() for recipe in pair)
    before = outcome(lambda: torch.matmul(*whole(pair)))
    assume(not failed(before) and before.numel() and a.dtype == b.dtype)
    place = result_place(out, tuple(before.shape), NARROW.get(a.dtype, a.dtype), a, b)
    ours(lambda: tw.matmul(a, b, out=place))
    found = ours(lambda: tw.matmul(a, b, out=place))  # a remembered call
    is_bad = out in ("spread", "wanting", "freed", "first", "second", "wide", "list")
    is_bad = is_bad and not (out == "spread" and before.numel() == 1)
    is_bad = is_bad and not (out == "wanting" and not place.requires_grad)
    is_bad = is_bad or any(t.requires_grad or r.is_freed for t, r in zip((a, b), pair, strict=True))
    if is_bad:
        assert failed(found), found
        return
    assert found is place, found
    assert torch.equal(place, before.to(place.dtype))


_eighth = st.integers(0, 7)
_leads = st.lists(st.sampled_from((0, 1, 2, 5)), max_size=3)


@st.composite
def layers(draw: Any) -> tuple[Recipe, Recipe, Recipe | None]:
    k, n = draw(SIZES), draw(SIZES)
    kind = draw(_halves)
    x = stored(draw, (*draw(_leads), k), kind)
    weight = stored(draw, (n, k), kind)
    length = (None, None, None, n, n, n, n + 1, 1)[draw(_eighth)]
    bias = None if length is None else stored(draw, (length,), kind)
    return x, weight, bias


@fuzz(150, layer=layers(), activation=st.sampled_from((None, "relu")))
def test_layers(layer: tuple[Recipe, Recipe, Recipe | None], activation: str | None) -> None:
    x, weight, bias = (recipe and recipe.make() for recipe in layer)
    act = functional.relu if activation else lambda z: z
    theirs = theirs_of(lambda: act(functional.linear(x, weight, bias)), layer)
    ours(lambda: tw.linear(x, weight, bias, activation=activation))
    found = ours(lambda: tw.linear(x, weight, bias, activation=activation))  # a remembered call
    if bias is not None and bias.shape != weight.shape[:1] and failed(found):
        return  # PyTorch spreads a bias of one; tilewise does not
    agree(found, theirs, lambda: act(functional.linear(*whole(layer))))


_ranks, _groups = st.sampled_from((1, 2, 2, 3)), st.sampled_from((1, 1, 1, 2, 4))
_few, _some = st.integers(0, 4), st.integers(1, 4)
_rows = {rank: st.lists(st.integers(1, 9), min_size=rank, max_size=rank) for rank in (1, 2, 3)}
_taps = st.sampled_from((1, 1, 2, 3))
_filters = {rank: st.lists(_taps, min_size=rank, max_size=rank) for rank in (1, 2, 3)}
_thirds = st.sampled_from((False, False, True))
_images = st.sampled_from([(1,), (2,), (2,), (0,), ()])
_numbers = st.sampled_from((1, 1, 1, 2, 3, 0, -1, 1.0, True))
_steps = {
    rank: _numbers | st.lists(st.integers(1, 3), min_size=rank, max_size=rank) for rank in (1, 2, 3)
}
_paddings = st.sampled_from((0, 0, 1, 2, -1, 2**40, "same", "valid", "full"))
_other_groups = st.sampled_from((None, None, None, None, None, None, 3, 0, 1.0, True))


@st.composite
def convolutions(draw: Any) -> tuple[int, Recipe, Recipe, Recipe | None, dict[str, Any]]:
    rank, groups = draw(_ranks), draw(_groups)
    c, k = groups * draw(_few), groups * draw(_some)
    sizes, taps = draw(_rows[rank]), draw(_filters[rank])
    are_patches = draw(_thirds)  # side by side: read as products
    if are_patches:
        sizes = [size % 3 * count or count for size, count in zip(sizes, taps, strict=True)]
    kind = draw(_halves)
    x = stored(draw, (*draw(_images), c, *sizes), kind)
    w = stored(draw, (k, c // groups, *taps), kind)
    length = (None, None, None, k, k, k + 1)[draw(_right)]
    bias = None if length is None else stored(draw, (length,), kind)
    given = draw(_other_groups)
    layer: dict[str, Any] = {
        "stride": draw(_steps[rank]),
        "padding": draw(_paddings),
        "dilation": draw(_numbers),
        "groups": groups if given is None else given,
    }
    if are_patches:
        layer |= {"stride": tuple(taps), "padding": 0}
    return rank, x, w, bias, layer


@fuzz(200, case=convolutions())
def test_convolutions(case: tuple[int, Recipe, Recipe, Recipe | None, dict[str, Any]]) -> None:
    rank, *drawn, layer = case
    x, w, bias = (recipe and recipe.make() for recipe in drawn)
    name = f"conv{rank}d"
    ours(lambda: getattr(tw, name)(x, w, bias, **layer))
    found = ours(lambda: getattr(tw, name)(x, w, bias, **layer))  # a remembered call
    if layer["padding"] == 2**40:  # PyTorch's own may crash here
        assert failed(found)
        return
    # In float64: oneDNN, which PyTorch has for narrower types, crashes now and then on padded 1x1
    # filters whose channels come last (torch 2.13).
    theirs = theirs_of(lambda: getattr(functional, name)(*whole(drawn), **layer), drawn)
    agree(found, theirs, lambda: theirs)


@fuzz(100, case=convolutions(), seed=st.integers(0, 3))
def test_gradients_of_convolutions(case: Any, seed: int) -> None:
    rank, *drawn, layer = case
    assume(layer["padding"] != 2**40)
    drawn = [r and replace(r, storage=_live(r.storage)) for r in drawn]
    same_gradients(
        lambda x, w, bias: getattr(tw, f"conv{rank}d")(x, w, bias, **layer),
        lambda x, w, bias: getattr(functional, f"conv{rank}d")(x, w, bias, **layer),
        drawn,
        seed,
    )


@example(layer=(Recipe((0,)), Recipe((0, 0)), None), seed=0)
@fuzz(100, layer=layers(), seed=st.integers(0, 3))
def test_gradients_of_layers(layer: Any, seed: int) -> None:
    assume(layer[2] is None or layer[2].shape == layer[1].shape[:1])
    drawn = [r and replace(r, storage=_live(r.storage)) for r in layer]
    same_gradients(tw.linear, functional.linear, drawn, seed)


@fuzz(100, pair=products(), seed=st.integers(0, 3))
def test_gradients_of_products(pair: tuple[Recipe, Recipe], seed: int) -> None:
    assume(all(recipe.kind in (*HALVES, torch.float64) for recipe in pair))
    drawn = [replace(r, storage=_live(r.storage)) for r in pair]
    same_gradients(tw.matmul, torch.matmul, drawn, seed)


def _live(storage: str) -> str:
    return "plain" if storage.startswith("freed") else storage


def same_gradients(one: Any, other: Any, drawn: Any, seed: int) -> None:
    """Both sides fail, or both have the gradients of the exact call."""
    tensors = [recipe and recipe.make().detach().requires_grad_() for recipe in drawn]
    found = ours(lambda: one(*tensors))
    wide = [t if t is None else t.requires_grad_() for t in whole(drawn)]
    theirs = outcome(lambda: other(*wide))
    if failed(found) and any(t is not None and t.dtype != tensors[0].dtype for t in tensors):
        return
    assert failed(found) == failed(theirs), (found, theirs)
    if failed(found):
        return
    dy = Recipe(tuple(found.shape), found.dtype, "plain", seed)
    theirs.backward(dy.exact())
    found.backward(dy.make())
    for tensor, wanted in zip(tensors, wide, strict=True):
        if tensor is not None:
            assert tensor.grad is not None
            assert torch.equal(tensor.grad, wanted.grad.to(tensor.dtype)), (tensor, wanted.grad)


ARRAYS = (*STORAGES[:8], "backwards", "masked", "read-only", "unaligned", "swapped")


def array(recipe: Recipe) -> Any:
    """A NumPy array stored as its recipe says."""
    plain = replace(
        recipe, storage=_live(recipe.storage if recipe.storage in STORAGES else "plain")
    )
    made: Any = plain.make().detach().resolve_neg().numpy()
    if recipe.storage == "backwards" and made.ndim:
        return np.ascontiguousarray(made[..., ::-1])[..., ::-1]
    if recipe.storage == "masked":
        return np.ma.masked_array(made, mask=made > 0)
    if recipe.storage == "read-only":
        made.flags.writeable = False
    if recipe.storage == "unaligned":
        bytes_of = np.zeros(made.nbytes + 1, np.uint8)[1:]
        view = bytes_of.view(made.dtype).reshape(made.shape)
        view[...] = made
        return view
    if recipe.storage == "swapped":
        return made.astype(made.dtype.newbyteorder())
    return made


_products, _convolutions = products(), convolutions()
_array_kinds = st.sampled_from((torch.float32, torch.float32, torch.float16, torch.int8))
_places = st.sampled_from(ARRAYS)


@st.composite
def arrays(draw: Any) -> tuple[Recipe, Recipe]:
    a, b = draw(_products)
    kind = draw(_array_kinds)
    return tuple(replace(r, kind=kind, storage=draw(_places)) for r in (a, b))  # type: ignore[return-value]


@fuzz(150, pair=arrays(), out=st.sampled_from((None, None, *ARRAYS)))
def test_products_of_arrays(pair: tuple[Recipe, Recipe], out: str | None) -> None:
    a, b = map(array, pair)
    whole = [np.asarray(t).astype(np.float64) for t in (a, b)]
    wanted = outcome(lambda: np.matmul(*whole))
    kind = np.dtype(np.int32) if a.dtype == np.int8 else a.dtype.newbyteorder("=")
    place = None
    if out is not None and not failed(wanted):
        named = {"float32": torch.float32, "float16": torch.float16, "int32": torch.int32}
        place = array(Recipe(np.shape(wanted), named[kind.name], out))
    found = ours(lambda: tw.matmul(a, b, out=place))
    refused = ("masked", "swapped", "unaligned")
    strange = [t for t, r in ((a, pair[0]), (b, pair[1])) if r.storage in refused]
    if failed(wanted) or any(isinstance(t, np.ma.MaskedArray) for t in strange):
        assert failed(found), found
    elif strange or place is not None:
        assert failed(found) or np.array_equal(found, wanted.astype(kind)), (found, wanted)
        if out == "masked" or (out in ("read-only", "spread") and np.size(wanted) > 1):
            assert failed(found)
    else:
        assert not failed(found), found
        assert np.array_equal(found, wanted.astype(kind)), (found, wanted)


_sizes = st.none() | hostile | st.lists(st.integers(-1, 9), max_size=6)


@fuzz(80, case=convolutions(), seed=st.integers(0, 3), size=_sizes, are_arrays=st.booleans())
def test_gradients_by_name(case: Any, seed: int, size: Any, are_arrays: bool) -> None:
    """What autograd asks for, asked for by itself, of tensors of the right sizes or of any."""
    rank, x, w, _, layer = case
    assume(layer["padding"] != 2**40 and len(x.shape) == rank + 2 and 0 not in (*x.shape, *w.shape))
    drawn = [replace(recipe, storage=_live(recipe.storage)) for recipe in (x, w)]
    exact = [recipe.exact().requires_grad_() for recipe in drawn]
    y = outcome(lambda: getattr(functional, f"conv{rank}d")(*exact, **layer))
    shape = (1,) * (rank + 2) if failed(y) else tuple(y.shape)
    drawn.append(Recipe(shape, x.kind, "plain", seed))
    wanted = y if failed(y) else torch.autograd.grad(y, exact, drawn[-1].exact())
    is_array = are_arrays and x.kind in (torch.float32, torch.float16)
    one, two, dy = (array(recipe) if is_array else recipe.make() for recipe in drawn)
    for place, gradient in enumerate(
        (
            lambda of: tw.conv_input_gradient(of, two, dy, **layer),
            lambda of: tw.conv_weight_gradient(one, of, dy, **layer),
        )
    ):
        other = ours(partial(gradient, size))
        assert failed(other) or tuple(other.shape) == tuple(size)
        found = ours(partial(gradient, drawn[place].shape))
        if failed(wanted):
            assert failed(found), found
        elif not failed(found):
            values = torch.as_tensor(found).detach()
            assert torch.equal(values, wanted[place].to(values.dtype)), (found, wanted)
        else:  # as much padding on both sides, unlike PyTorch
            assert "padding 'same' needs" in str(found), found


_float_kinds = st.sampled_from((torch.float32, torch.float32, torch.float16))
_image_places = st.sampled_from((*ARRAYS, "last", "last"))


@st.composite
def convolved_arrays(draw: Any) -> tuple[int, Recipe, Recipe, dict[str, Any]]:
    rank, x, w, _, layer = draw(_convolutions)
    kind = draw(_float_kinds)
    one, two = (replace(recipe, kind=kind, storage=draw(_image_places)) for recipe in (x, w))
    return rank, one, two, layer


@example(
    case=(1, Recipe((1, 1, 1)), Recipe((1, 1, 2)), {"padding": "same"}),
    out=None,
)
@fuzz(150, case=convolved_arrays(), out=st.sampled_from((None, None, "last", "first", *ARRAYS)))
def test_convolutions_of_arrays(case: Any, out: str | None) -> None:
    rank, *drawn, layer = case
    # PyTorch's own may crash here; of nothing it takes any layer, and gives results without zeros.
    assume(layer["padding"] != 2**40 and 0 not in (*drawn[0].shape, *drawn[1].shape))
    x, w = map(array, drawn)
    whole = [torch.from_numpy(np.ascontiguousarray(t).astype(np.float64)) for t in (x, w)]
    wanted = outcome(lambda: getattr(functional, f"conv{rank}d")(*whole, **layer))
    place = None
    if out is not None and not failed(wanted):
        place = x if out == "first" else array(Recipe(tuple(wanted.shape), drawn[0].kind, out))
    call = partial(getattr(tw, f"conv{rank}d"), x, w, out=place, **layer)
    ours(call)
    found = ours(call)  # a remembered call
    if failed(wanted) or any(isinstance(t, np.ma.MaskedArray) for t in (x, w)):
        assert failed(found), found
    elif not failed(found):
        assert found.dtype == x.dtype.newbyteorder("=") and (place is None or found is place)
        assert np.array_equal(found, wanted.numpy().astype(found.dtype)), (found, wanted)
        assert out not in ("first", "masked")
        assert out not in ("read-only", "spread") or found.size < 2
    else:
        is_uneven = "padding 'same' needs" in str(found)  # as much on both sides, unlike PyTorch
        assert is_uneven or x.ndim < rank + 2 or {out, *(r.storage for r in drawn)} & UNSERVED


UNSERVED = {"masked", "swapped", "unaligned", "read-only", "spread", "first"}
"""Arrays that a call may refuse, as operands or as the result."""
FP8 = st.sampled_from((torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32))


@example(
    sizes=(0, 0, 0), kinds=(torch.float8_e4m3fn, torch.float8_e5m2), rows=True, bias=False, freed=9
)
@fuzz(
    60,
    sizes=st.tuples(SIZES, SIZES, SIZES),
    kinds=st.tuples(FP8, FP8),
    rows=st.booleans(),
    bias=st.booleans(),
    freed=st.integers(0, 12),
)
def test_scaled_products(
    sizes: tuple[int, ...], kinds: tuple[torch.dtype, ...], rows: bool, bias: bool, freed: int
) -> None:
    m, n, k = sizes
    a, b = (Recipe(s).values().to(kind) for s, kind in zip(((m, k), (n, k)), kinds, strict=True))
    scales = torch.full((m, 1) if rows else (), 2.0), torch.full((1, n) if rows else (), 0.5)
    extra = torch.ones(n, dtype=torch.bfloat16) if bias else None
    tensors = [a, b.t(), *scales, extra]
    gone = tensors[freed] if freed < 5 else None
    if gone is not None and gone.numel():
        gone.untyped_storage().resize_(0)
        assert failed(ours(lambda: tw.scaled_matmul(*tensors)))
        return
    found = ours(lambda: tw.scaled_matmul(*tensors))
    if torch.float32 in kinds or kinds[0] != kinds[1]:
        return  # nobody's, or PyTorch's to say
    wanted = a.double() @ b.double().t() + (1.0 if bias else 0.0)
    assert torch.equal(found, wanted.to(torch.bfloat16)), (found, wanted)
