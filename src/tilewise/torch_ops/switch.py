"""One line for an existing model: its linear and convolution layers compute with tilewise."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, nn

from tilewise.errors import InputError
from tilewise.torch_ops import convolve, linear
from tilewise.torch_ops.convolutions import is_known

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class Linear(nn.Linear):
    """`nn.Linear` through `tilewise.linear`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # PyTorch's name
        return linear(input, self.weight, self.bias)


def _convolve(layer: nn.modules.conv._ConvNd, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """A layer's convolution; edges other than zeros are padded by PyTorch first."""
    padding = layer.padding
    if layer.padding_mode != "zeros":
        twice = layer._reversed_padding_repeated_twice
        x, padding = nn.functional.pad(x, twice, mode=layer.padding_mode), (0,) * len(layer.stride)
    rank = len(layer.stride)
    return convolve(
        rank, x, w, bias, layer.stride, padding, layer.dilation, layer.groups, deterministic=False
    )


class Conv1d(nn.Conv1d):
    """`nn.Conv1d` through `tilewise.conv1d`."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not is_known(x.device):
            theirs: Tensor = super()._conv_forward(x, weight, bias)
            return theirs
        return _convolve(self, x, weight, bias)


class Conv2d(nn.Conv2d):
    """`nn.Conv2d` through `tilewise.conv2d`."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not is_known(x.device):
            theirs: Tensor = super()._conv_forward(x, weight, bias)
            return theirs
        return _convolve(self, x, weight, bias)


class Conv3d(nn.Conv3d):
    """`nn.Conv3d` through `tilewise.conv3d`."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not is_known(x.device):
            theirs: Tensor = super()._conv_forward(x, weight, bias)
            return theirs
        return _convolve(self, x, weight, bias)


OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: Linear,
    nn.Conv1d: Conv1d,
    nn.Conv2d: Conv2d,
    nn.Conv3d: Conv3d,
}
"""PyTorch's layers and what they become; subclasses of users stay what they are."""
THEIRS = {ours: theirs for theirs, ours in OURS.items()}


def patch(model: AnyModule) -> AnyModule:
    """Lets the linear and convolution layers of `model` compute with tilewise; gives it back.

    Parameters, buffers, hooks and names stay as they are, so optimizers and checkpoints do too.
    """
    return _change(model, OURS)


def unpatch(model: AnyModule) -> AnyModule:
    """Undoes `patch`."""
    return _change(model, THEIRS)


def _change(model: AnyModule, classes: dict[type[nn.Module], type[nn.Module]]) -> AnyModule:
    if not isinstance(model, nn.Module):
        raise InputError(f"a {type(model).__name__} is no model; pass a torch.nn.Module")
    for module in model.modules():
        other = classes.get(type(module))
        if other is not None:
            module.__class__ = other
    return model
