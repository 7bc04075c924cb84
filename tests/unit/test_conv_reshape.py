"""Convolutions by patches, read in simpler shapes: the same results, no byte moved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tilewise.core.tensors import view
from tilewise.dispatch.reshaping import reshaped_view
from tilewise.errors import TensorError
from tilewise.ops.contract import get_op
from tilewise.ops.conv.problem import DIRECTIONS, ConvProblem, shapes, storage
from tilewise.ops.conv.reference import reference
from tilewise.ops.conv.reshape import reshaped


def layer(direction: str = "fwd", **sizes: Any) -> ConvProblem:
    return ConvProblem(direction=direction, **{"n": 2, "c": 3, "k": 5, **sizes})


def square(size: int, patch: int, **more: Any) -> dict[str, Any]:
    sides = {"h": size, "w": size, "y": patch, "x": patch}
    return {**sides, "stride_h": patch, "stride_w": patch, **more}


VIEWED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "patches": (square(12, 4), {"n": 6, "c": 12, "h": 4, "w": 3, "y": 4}),
    "lines left over": (
        square(8, 4, h=9),
        {"c": 12, "h": 9, "w": 2, "y": 4, "stride_h": 4},
    ),
    "lines that overlap": (
        square(8, 4, stride_h=2, pad_h=1),
        {"c": 12, "h": 8, "w": 2, "y": 4, "stride_h": 2, "pad_h": 1},
    ),
    "one patch a line": (square(4, 4, h=12), {"c": 48, "h": 3, "w": 1}),
    "one patch": (square(4, 4, stride_h=1, stride_w=3), {"c": 48, "w": 1}),
    "a line": ({"w": 12, "x": 3, "stride_w": 3}, {"c": 9, "w": 4}),
    "one column": (
        {"h": 8, "w": 5, "y": 2, "x": 1, "stride_h": 2},
        {"n": 8, "h": 2, "w": 5, "y": 2},
    ),
    "frames": (
        square(8, 4, d=3, z=1),
        {"n": 12, "c": 12, "d": 1, "h": 4, "w": 2, "y": 4},
    ),
    "boxes": (
        square(8, 4, d=4, z=2, stride_d=2),
        {"c": 12, "d": 4, "h": 8, "w": 2, "z": 2, "y": 4, "stride_d": 2, "stride_h": 4},
    ),
    "one box": (square(4, 4, d=2, z=2), {"c": 96, "w": 1}),
    "filters along h are dilated": (
        square(8, 4, h=12, dilation_h=2, pad_h=1),
        {"c": 12, "h": 12, "w": 2, "y": 4, "stride_h": 4, "dilation_h": 2, "pad_h": 1},
    ),
}
KEPT: dict[str, dict[str, Any]] = {
    "columns left over": square(12, 4, w=13),
    "padded": square(12, 4, pad_w=2),
    "overlapping": square(12, 4, stride_w=2),
    "dilated": square(14, 4, w=16, dilation_w=2),
    "groups": square(12, 4, c=4, k=4, g=2),
    "nchw": square(12, 4, layout="nchw"),
    "1x1": square(12, 1),
    "nothing": square(12, 4, n=0),
}


@pytest.mark.parametrize("direction", ["fwd", "bwd_weight"])
@pytest.mark.parametrize("name", VIEWED)
def test_simpler_shapes(name: str, direction: str) -> None:
    given, wanted = VIEWED[name]
    assert reshaped(layer(direction, **given)) == layer(direction, **{"x": 1, **wanted})


def test_lines_of_gradients_stay_lines() -> None:
    """Their parities are of one tap each."""
    found = reshaped(layer("bwd_data", **square(12, 4)))
    assert found == layer("bwd_data", c=12, h=12, w=3, y=4, x=1, stride_h=4)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", KEPT)
def test_other_layers_stay_as_they_are(name: str, direction: str) -> None:
    p = layer(direction, **KEPT[name])
    assert reshaped(p) is p


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", VIEWED)
def test_the_same_results_of_the_same_memory(name: str, direction: str) -> None:
    p = layer(direction, **VIEWED[name][0])
    found = reshaped(p)
    tensors = [_stored(p, at) for at in range(3)]
    seen = [_seen(p, found, at, tensor) for at, tensor in enumerate(tensors)]
    assert all(map(np.shares_memory, tensors, seen))
    assert [each.shape for each in seen] == list(shapes(found))
    seen[2][...] = reference(found, *seen[:2])
    np.testing.assert_allclose(tensors[2], reference(p, *tensors[:2]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_whole_images_in_any_layout(direction: str) -> None:
    p = layer(direction, **square(4, 4, d=2, z=2, layout="nchw"))
    found = reshaped(p)
    assert found == layer(direction, c=96, w=1, x=1)
    tensors = [_stored(p, at) for at in range(3)]
    seen = [_seen(p, found, at, tensor) for at, tensor in enumerate(tensors)]
    seen[2][...] = reference(found, *seen[:2])
    np.testing.assert_allclose(tensors[2], reference(p, *tensors[:2]), rtol=1e-6, atol=1e-6)


def test_images_apart_keep_their_distance_or_are_refused() -> None:
    p = layer(**square(8, 4))
    apart = _stored(layer(**square(8, 4, n=4)), 0)[::2]
    with pytest.raises(TensorError, match="rows lie 384 elements apart"):
        _seen(p, reshaped(p), 0, apart)
    backward = layer("bwd_data", **square(8, 4))  # whose images stay images
    seen = _seen(backward, reshaped(backward), 2, apart)
    assert view(seen).strides == (384, 1, 24, 12)


def test_only_convolutions_have_simpler_shapes() -> None:
    assert get_op("gemm").reshaped is None


def _stored(p: ConvProblem, at: int) -> np.ndarray[Any, Any]:
    """One of a problem's tensors in logical order, stored in its layout."""
    drawn = np.random.default_rng(at).standard_normal(shapes(p)[at]).astype(np.float32)
    axes = storage(p)[at].axes
    return np.ascontiguousarray(drawn.transpose(axes)).transpose(np.argsort(axes))


def _seen(p: ConvProblem, found: ConvProblem, at: int, tensor: Any) -> np.ndarray[Any, Any]:
    return reshaped_view(tensor, storage(p)[at], shapes(found)[at], storage(found)[at])
