"""`prepare` compiles what a step launches, before any step, and changes nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fusing import fused  # noqa: F401  # a fixture
from residual_blocks import network

import tilewise as tw
from tilewise.engines.toolchain import find_compiler
from tilewise.errors import InputError
from tilewise.ops.conv.epilogue import Epilogue
from tilewise.torch_ops import preparing

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
IMAGES = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was handed to the compilers."""
    seen: list[Any] = []

    def compile_together(sources: Any, target: str, workers: int | None) -> list[str]:
        seen.extend(sources)
        return []

    monkeypatch.setattr(preparing, "compile_together", compile_together)
    return seen


def test_what_a_step_launches_is_compiled_before(
    fused: list[Epilogue],  # noqa: F811
    compiled: list[Any],
) -> None:
    model = tw.patch(network().eval(), fuse=True, always=True)
    with torch.no_grad():
        assert tw.prepare(model, IMAGES) == []
        assert not fused  # no kernel ran
        wanted = [epilogue for op, epilogue in compiled if op == "conv_fwd"]
        model(IMAGES)
    assert wanted == fused and Epilogue(bias=True, residual=True, activation="relu") in wanted


def test_a_model_in_training_is_left_as_it_was(
    fused: list[Epilogue],  # noqa: F811
    compiled: list[Any],
) -> None:
    model = tw.patch(network().train(), fuse=True, always=True)
    held = [tensor.clone() for tensor in model.state_dict().values()]
    before = torch.get_rng_state()
    tw.prepare(model, IMAGES)
    assert compiled and not fused
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), before)
    for tensor, was in zip(model.state_dict().values(), held, strict=True):
        assert torch.equal(tensor, was)
    model(IMAGES).square().mean().backward()
    assert fused  # and now kernels do


def test_only_models_are_prepared() -> None:
    with pytest.raises(InputError, match=r"a str is not a model; pass a torch\.nn\.Module"):
        tw.prepare("resnet50")
