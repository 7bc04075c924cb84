"""Compiled convolutions: whoever is expected to be faster, direction by direction."""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import tilewise as tw
from tilewise.core.problem import Problem
from tilewise.engines.toolchain import find_compiler
from tilewise.torch_ops import inductor_convs

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
LAST = torch.channels_last
close = torch.testing.assert_close


@pytest.fixture(autouse=True)
def _own_choices() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        yield
    tw.choose_in_compile(False)
    torch._dynamo.reset()


class Block(nn.Module):
    """A grouped layer with a bias, a BatchNorm, a strided layer and a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(8, 16, 3, padding=1, groups=2)
        self.norm, self.second = nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3, 2, 1, bias=False)
        self.shortcut = nn.Conv2d(8, 16, 1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(self.norm(self.first(x)).relu()) + self.shortcut(x)).relu()


def stepped(model: Any, x: Tensor) -> list[Tensor]:
    """The result of a step in training, and all gradients."""
    given = x.clone().requires_grad_()
    result = model(given)
    (result * torch.linspace(-1, 1, result.numel()).reshape(result.shape)).sum().backward()
    own = getattr(model, "_orig_mod", model)
    found = [result.detach(), given.grad, *(p.grad for p in own.parameters())]
    own.zero_grad(set_to_none=True)
    return found  # type: ignore[return-value]


def calls(code: list[str]) -> Counter[str]:
    """What compiled code calls: our convolutions by direction, and PyTorch's."""
    text = "\n".join(code)
    ours = re.findall(r"extern_kernels\.tilewise_conv\([^\n]*?direction='(\w+)'", text)
    theirs = re.findall(r"(?:extern_kernels\.|ops\.aten\.)(convolution\w*)", text)
    return Counter([*ours, *theirs])


def image(layout: Any = LAST) -> Tensor:
    return torch.randn(2, 8, 12, 12).to(memory_format=layout)


def modules(layout: Any = LAST) -> tuple[nn.Module, nn.Module]:
    return Block().to(memory_format=layout), Block().to(memory_format=layout)


@pytest.mark.parametrize("layout", [LAST, torch.contiguous_format])
def test_a_compiled_step_calls_our_kernels_in_every_direction(layout: Any) -> None:
    tw.choose_in_compile(always=True)
    plain, other = modules(layout)
    x = image(layout)
    found, code = run_and_get_code(stepped, torch.compile(other, fullgraph=True), x)
    assert calls(code) == {"fwd": 3, "bwd_data": 3, "bwd_weight": 3}
    for one, expected in zip(found, stepped(plain, x), strict=True):
        close(one, expected, rtol=1e-3, atol=1e-3)
        assert one.stride() == expected.stride()


def test_each_direction_is_chosen_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Problem] = []

    def is_faster(problem: Any, arch: Any) -> bool:
        asked.append(problem)
        return bool(problem.direction == "bwd_weight" or problem.g == 2)

    monkeypatch.setattr(inductor_convs, "is_faster", is_faster)
    tw.choose_in_compile()
    plain, other = modules()
    x = image()
    found, code = run_and_get_code(stepped, torch.compile(other, fullgraph=True), x)
    called = calls(code)
    assert (called["fwd"], called["bwd_data"], called["bwd_weight"]) == (1, 1, 3)
    assert called["convolution_backward"] >= 2  # the others' gradients of their inputs
    assert len(asked) == 9
    for one, expected in zip(found, stepped(plain, x), strict=True):
        close(one, expected, rtol=1e-3, atol=1e-3)


def test_inference_is_chosen_for_too() -> None:
    tw.choose_in_compile(always=True)
    plain, other = (model.eval() for model in modules())
    x = image()
    with torch.no_grad():
        found, code = run_and_get_code(torch.compile(other, fullgraph=True), x)
        assert calls(code) == {"fwd": 3}
        close(found, plain(x), rtol=1e-3, atol=1e-3)


def test_what_is_not_ours_stays_pytorchs() -> None:
    tw.choose_in_compile(always=True)
    x = image()
    with torch.no_grad():
        for layer, given in (
            (nn.ConvTranspose2d(8, 8, 3).to(memory_format=LAST), x),
            (nn.Conv2d(8, 8, 3).double(), x.double()),
            (nn.Conv2d(8, 8, 3), x[..., ::2]),
        ):
            found, code = run_and_get_code(torch.compile(layer), given)
            assert "tilewise" not in "\n".join(code)
            close(found, layer(given), rtol=1e-3, atol=1e-3)


def test_without_the_line_and_after_it_nothing_is_ours() -> None:
    seen: list[Any] = []
    with torch._inductor.config.patch(post_grad_custom_pre_pass=seen.append):
        tw.choose_in_compile(always=True)
        tw.choose_in_compile(False)
        with torch.no_grad():
            _, code = run_and_get_code(torch.compile(Block().eval()), image())
        assert "tilewise" not in "\n".join(code)
        assert len(seen) == 1  # somebody else's pass runs as before


def test_somebody_elses_pass_still_runs() -> None:
    seen: list[Any] = []
    with torch._inductor.config.patch(post_grad_custom_pre_pass=seen.append):
        tw.choose_in_compile(always=True)
        with torch.no_grad():
            _, code = run_and_get_code(torch.compile(Block().eval()), image())
        tw.choose_in_compile(False)
    assert len(seen) == 1 and calls(code) == {"fwd": 3}


def test_who_chooses_can_be_kept() -> None:
    """PyTorch 2.11 finds compiled code by its settings, pickled; later versions leave this out."""
    if not hasattr(torch._inductor.config, "inductor_choices_class"):
        pytest.skip("this PyTorch keeps who chooses apart from its settings")
    tw.choose_in_compile(always=True)
    try:
        kept = pickle.dumps(torch._inductor.config.inductor_choices_class)
        assert pickle.loads(kept) == torch._inductor.config.inductor_choices_class
    finally:
        tw.choose_in_compile(False)


def test_compiled_code_is_kept_with_its_choices(tmp_path: Path) -> None:
    """Code on disk is found again by who chose, and by nobody else."""
    plain, x = Block().eval(), image()
    hits = []
    with (
        torch.no_grad(),
        torch._inductor.config.patch(fx_graph_cache=True),
        mock.patch.dict("os.environ", {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}),
    ):
        for always in (True, True, False):
            torch._dynamo.reset()
            counters.clear()
            if always:
                tw.choose_in_compile(always=True)
            else:
                tw.choose_in_compile(False)
            close(torch.compile(Block().eval())(x), plain(x), rtol=1e-3, atol=1e-3)
            hits.append(counters["inductor"]["fxgraph_cache_hit"])
    assert hits == [0, 1, 0]
