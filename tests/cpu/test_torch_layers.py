"""Patched layers: who serves them is decided once for each shape, and shown."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tilewise as tw
from tilewise.dispatch import Dispatcher
from tilewise.errors import InputError
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.torch_ops import casting, layers, switch
from tilewise.torch_ops.layers import Asked, Served, decide


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(128, 5))


IMAGE = torch.randn(2, 3, 4, 4)


def names(result: torch.Tensor) -> set[str]:
    """Every node of the graph behind a result."""
    found, todo = set(), [result.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None:
            found.add(node.name())
            todo += [other for other, _ in node.next_functions]
    return found


def said(monkeypatch: pytest.MonkeyPatch, served: Served) -> list[Asked]:
    """Lets every decision be `served`; gives what was asked."""
    asked: list[Asked] = []
    monkeypatch.setattr(switch, "decide", lambda one: asked.append(one) or served)
    return asked


def test_where_the_vendor_wins_the_call_is_pytorchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    said(monkeypatch, layers.by_pytorch("slower"))
    patched, plain = tw.patch(model()), model()
    assert names(patched(IMAGE)) == names(plain(IMAGE))
    assert torch.equal(patched(IMAGE), plain(IMAGE))


def test_where_we_win_forward_and_gradients_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    said(monkeypatch, Served(is_ours=True, why="faster"))
    patched, plain = tw.patch(model()), model()
    found = {name for name in names(patched(IMAGE)) if "tilewise" in name}
    assert found == {"tilewise_linearBackward", "tilewise_convolutionBackward"}
    for one in (patched, plain):
        one(IMAGE).square().sum().backward()
    for ours, theirs in zip(patched.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_decisions_are_made_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = said(monkeypatch, layers.by_pytorch("slower"))
    layer = tw.patch(nn.Linear(8, 8))
    for _ in range(3):
        layer(torch.randn(4, 8))
    assert len(asked) == 1
    layer(torch.randn(5, 8))
    with torch.no_grad():
        layer(torch.randn(5, 8))
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(5, 8))
    kinds = [(one.x[0], one.wants_w, one.dtype) for one in asked]
    assert kinds == [
        (4, True, torch.float32),
        (5, True, torch.float32),
        (5, False, torch.float32),
        (5, True, torch.bfloat16),
    ]


@pytest.mark.parametrize("layer", (nn.Linear(8, 8), nn.Conv2d(4, 8, 3)), ids=("linear", "conv"))
def test_autocast_makes_inputs_and_weights_alike(
    layer: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = said(monkeypatch, Served(is_ours=True, why="faster"))
    x = torch.randn(2, 4, 8, 8, dtype=torch.bfloat16)  # as the layer before left it
    patched = tw.patch(copy.deepcopy(layer))
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = patched(x), layer(x)
    assert [one.dtype for one in asked] == [torch.bfloat16]
    assert any("tilewise" in name for name in names(ours))
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
    with pytest.raises(RuntimeError):
        patched(x)  # as the plain layer does


def test_compiled_layers_are_pytorchs_to_fuse() -> None:
    seen: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(tw.patch(model(), always=True), backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(IMAGE), model()(IMAGE))
    assert torch._C._nn.linear in seen
    assert not any("tilewise" in str(target) for target in seen)


def test_a_table_says_what_serves_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    said(monkeypatch, Served(is_ours=True, why="faster", pytorch_us=30.0, ours_us=20.0))
    patched = tw.patch(model())
    assert not tw.layers(patched)
    assert str(tw.layers(patched)) == "no layer was served yet: patch the model, and run it once"
    patched(IMAGE)
    rows = tw.layers(patched)
    assert [(row.layer, row.kind, row.input) for row in rows] == [
        ("0", "Conv2d", (2, 3, 4, 4)),
        ("2", "Linear", (2, 128)),
    ]
    head, first, _ = str(rows).splitlines()
    assert head.split() == ["layer", "input", "served", "by", "gain", "us", "why"]
    assert first.split() == [
        *("0", "(Conv2d)", "2x3x4x4", "float32", "+", "gradients"),
        *("tilewise", "10.0", "faster"),
    ]
    with pytest.raises(InputError, match="not a model"):
        tw.layers([])  # type: ignore[arg-type]


def test_patched_models_are_copied_and_stored() -> None:
    patched = tw.patch(model(), always=True)
    expected = patched(IMAGE)
    for other in (copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))):
        torch.testing.assert_close(other(IMAGE), expected)
    plain = tw.unpatch(patched)
    assert type(plain[2]) is nn.Linear
    assert not any(name.startswith("_tilewise") for name in plain[2].__dict__)
    torch.testing.assert_close(plain(IMAGE), expected)


ASKED: dict[str, Any] = {
    "kind": "linear",
    "x": (64, 128),
    "w": (256, 128),
    "dtype": torch.float32,
    "device": torch.device("cpu"),
}


def expected(monkeypatch: pytest.MonkeyPatch, *times: tuple[float | None, float, bool]) -> None:
    told = iter(times)
    monkeypatch.setattr(layers, "_expected_us", lambda *_: next(told))


def test_gains_must_pay_for_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    expected(monkeypatch, (1000.0, 500.0, True))
    served = decide(Asked(**ASKED))
    assert served.is_ours
    assert served.gain_us == pytest.approx(500 - layers.CALL_US["linear"][0])
    expected(monkeypatch, (1000.0, 999.0, True))
    served = decide(Asked(**ASKED))
    assert not served.is_ours
    assert "us that a call costs" in served.why


def test_a_chain_calls_us_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_chain in (False, True):
        expected(monkeypatch, (1000.0, 996.0, True))
        assert decide(Asked(**ASKED, is_chain=is_chain)).is_ours == is_chain


def test_only_what_is_fused_saves_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that cannot fuse needs the pass that PyTorch needs."""
    problem = GemmProblem(m=64, n=256, k=128)
    arch = layers.arch_on(torch.device("cpu"))
    saved = int(1e3 * arch.memory_gb_s)  # a microsecond
    gains = []
    for fuses in (False, True):
        monkeypatch.setattr(Dispatcher, "vendor_us", lambda *_: 1e6)
        monkeypatch.setattr(Dispatcher, "fuses", lambda *_, fuses=fuses: fuses)
        (plain_us, ours_us, is_ours), (more_us, with_us, _) = (
            layers._expected_us(problem, arch, count, "an epilogue") for count in (0, saved)
        )
        assert is_ours
        gains.append((more_us or 0) - (plain_us or 0) - (with_us - ours_us))
    assert gains == pytest.approx([0, 1], abs=1e-3)


def test_a_bias_saves_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []

    def told(problem: Any, arch: Any, saved_bytes: int = 0, epilogue: Any = None) -> Any:
        saved.append(saved_bytes)
        return 10.0, 10.0, False

    monkeypatch.setattr(layers, "_expected_us", told)
    image = torch.randn(2, 3, 8, 8, requires_grad=True)
    for bias in (False, True):
        tw.patch(torch.nn.Conv2d(3, 5, 3, bias=bias))(image)
    once = 2 * 2 * 5 * 6 * 6 * 4  # read and written
    assert saved == [0, 0, 0, once, 0, 0]


def test_gradients_count_in_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(**ASKED, wants_x=True, wants_w=True)
    shapes = [(p.m, p.n, p.k) for p in asked.problems()]
    assert shapes == [(64, 256, 128), (64, 128, 256), (256, 128, 64)]
    expected(monkeypatch, (1000.0, 400.0, True), (1000.0, 1000.0, False), (2000.0, 2000.0, False))
    assert decide(asked).pytorch_us == 4000
    conv = Asked(
        **ASKED | {"kind": "conv", "x": (2, 8, 9, 9), "w": (4, 8, 3, 3)},
        settings=(1, "same", 1, 1),
        wants_x=True,
        wants_w=True,
    )
    assert [p.op for p in conv.problems()] == ["conv_fwd", "conv_bwd_data", "conv_bwd_weight"]


def test_what_nobody_measured_stays_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    expected(monkeypatch, (None, 5.0, True))
    served = decide(Asked(**ASKED))
    assert not served.is_ours
    assert "nobody measured" in served.why
    assert not decide(Asked(**ASKED | {"dtype": torch.float64})).is_ours


def test_autocast_casts_a_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = tw.patch(nn.Linear(8, 8), always=True), torch.randn(4, 8)
    made: list[int] = []
    keep = casting.Casts.get

    def get(self: Any, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        cast = keep(self, weight, dtype)
        if weight is layer.weight:
            made.append(id(cast))
        return cast

    monkeypatch.setattr(casting.Casts, "get", get)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            results = [layer(x) for _ in range(3)]
        assert results[0].dtype == torch.bfloat16
        sum(r.float().sum() for r in results).backward()
        with torch.no_grad():
            layer.weight.add_(1)
    assert len(made) == 6
    assert len(set(made[:3])) == len(set(made[3:])) == 1
    plain = nn.Linear(8, 8)
    plain.load_state_dict(layer.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer(x), plain(x))


def test_casts_end_with_autocast() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    with torch.autocast("cpu", torch.bfloat16):
        first = casting.CASTS.get(weight, torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            assert casting.CASTS.get(weight, torch.bfloat16) is first
    weight.data.mul_(2)  # which no version counts
    with torch.autocast("cpu", torch.bfloat16):
        assert casting.CASTS.get(weight, torch.bfloat16)[0, 0] == 2


class Foreign(Tensor):
    """Somebody's own tensors, whose memory need not be what it seems."""


@pytest.mark.parametrize("fuses", [False, True])
def test_parameters_that_become_of_another_kind_are_pytorchs(fuses: bool) -> None:
    layer = nn.Conv2d(4, 4, 3)
    model = tw.patch(nn.Sequential(layer, nn.ReLU()), always=True, fuse=fuses)
    x = torch.randn(1, 4, 6, 6)
    with torch.no_grad():
        expected = model(x)
        layer._parameters["weight"] = layer.weight.detach().as_subclass(Foreign)  # type: ignore
        found = model(x)
    assert type(found) is Foreign
    torch.testing.assert_close(found.as_subclass(Tensor), expected)


def test_settings_may_be_lists() -> None:
    layer = tw.patch(nn.Conv2d(4, 4, 3), always=True)
    layer.stride = [2, 1]  # type: ignore[assignment]
    x = torch.randn(1, 4, 6, 6)
    with torch.no_grad():
        expected = functional.conv2d(x, layer.weight, layer.bias, (2, 1))
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)
