"""Networks from their definitions: published parameter counts pin every layer's shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tilewise.errors import InputError
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.problems.files import read_problems
from tilewise.problems.networks import NETWORKS, network, networks_with, trace
from tilewise.problems.networks.net import Layer

MLPERF = Path(__file__).parents[3] / "shared" / "problems" / "retinanet_mlperf.json"


def weights(layer: Layer) -> int:
    f = layer.fields
    if "gemm" in layer.ops:
        is_stored = layer.has_weights or "experts" in layer.name
        return is_stored * f["n"] * f["k"] * f.get("batch", 1) * layer.times
    taps = f.get("z", 1) * f.get("y", 1) * f["x"]
    return f["k"] * f["c"] // f["g"] * taps * layer.times


def stored(name: str) -> int:
    """Weights of all layers."""
    return sum(weights(layer) for layer in trace(name))


def conv_outputs(name: str) -> int:
    """Channels that all convolutions give: each has a bias, or a scale and a shift."""
    sides = ((layer.fields, layer.is_transposed, layer.times) for layer in trace(name)
             if "gemm" not in layer.ops)  # fmt: skip
    return sum(times * (f["c"] if transposed else f["k"]) for f, transposed, times in sides)


NORMALISED = {  # published totals; every convolution is followed by a batch normalisation
    "resnet18": (11_689_512, 1000),
    "resnet50": (25_557_032, 1000),
    "resnet101": (44_549_160, 1000),
    "resnext50": (25_028_904, 1000),
    "mobilenet_v2": (3_504_872, 1000),
}


@pytest.mark.parametrize("name", NORMALISED)
def test_parameters_of_normalised_networks(name: str) -> None:
    total, biases = NORMALISED[name]
    assert stored(name) + 2 * conv_outputs(name) + biases == total


def test_parameters_of_networks_with_exceptions() -> None:
    assert stored("vgg16") + conv_outputs("vgg16") + 4096 + 4096 + 1000 == 138_357_544
    assert stored("yolo_v3") + 2 * conv_outputs("yolo_v3") - 3 * 255 == 61_949_149
    biased = 2 + 512 + 256 + 128 + 64  # the classes and the transposed convolutions
    assert stored("unet") + 2 * (conv_outputs("unet") - biased) + biased == 31_037_698


LANGUAGE = {  # total, hidden, vocabulary, layers
    "llama2_7b": (6_738_415_616, 4096, 32000, 32),
    "llama2_70b": (68_976_648_192, 8192, 32000, 80),
    "llama3_8b": (8_030_261_248, 4096, 128256, 32),
    "llama3_70b": (70_553_706_496, 8192, 128256, 80),
    "mixtral_8x7b": (46_702_792_704, 4096, 32000, 32),
}


@pytest.mark.parametrize("name", LANGUAGE)
def test_parameters_of_language_models(name: str) -> None:
    total, hidden, vocabulary, layers = LANGUAGE[name]
    embedding, norms = hidden * vocabulary, hidden * (2 * layers + 1)
    assert stored(name) + embedding + norms == total


def test_parameters_of_deepseek() -> None:
    norms = 61 * (2 * 7168 + 1536 + 512) + 7168
    router_bias = 58 * 256
    assert stored("deepseek_v3") + 129280 * 7168 + norms + router_bias == 671_026_419_200


def test_multiply_adds_of_resnet50() -> None:
    layers = network("resnet50", "conv_fwd", batch=1)
    total = sum(problem.flops * labels["count"] for problem, labels in layers) / 2
    assert total + 2048 * 1000 == 4_089_184_256


@pytest.mark.skipif(not MLPERF.exists(), reason="the MLPerf layer list is not here")
def test_retinanet_equals_mlperf() -> None:
    listed = read_problems(MLPERF, "conv_fwd")
    assert len(listed) == len(json.loads(MLPERF.read_text())) == 38
    computed = network("retinanet", "conv_fwd", batch=8, size=800)
    assert set(computed.problems) == set(listed.problems)


def test_retinanet_freezes_its_stem() -> None:
    trained = network("retinanet", "conv_fwd")
    whole = network("retinanet", "conv_fwd", frozen=True)
    assert len(whole) > len(trained)
    stem = next(p for p, labels in whole if labels["layer"] == "stem.conv1")
    assert stem not in trained.problems
    counts = {labels["layer"]: labels["count"] for _, labels in trained}
    # Two towers of four, and the pyramid's own layer, all see the same shape.
    assert counts["fpn.layer.p3"] == 9


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("op", ["gemm", "conv_fwd", "conv_bwd_data", "conv_bwd_weight"])
def test_every_network_gives_labelled_distinct_problems(name: str, op: str) -> None:
    if name not in networks_with(op):
        with pytest.raises(InputError, match=f"{name} has no {op} layers"):
            network(name, op)
        return
    found = network(name, op, dtype="bf16", batch=3)
    assert len(set(found.problems)) == len(found)
    for problem, labels in found:
        assert (problem.op, problem.dtype) == (op, "bf16")
        assert labels["network"] == name
        assert labels["layer"]
        assert labels["count"] >= 1


def test_at_least_twelve_networks_and_every_kind_of_layer() -> None:
    assert len(NETWORKS) >= 12
    convs = [p for n in networks_with("conv_fwd") for p in network(n, "conv_fwd").problems]
    assert all(isinstance(p, ConvProblem) for p in convs)
    assert {p.ndim for p in convs if isinstance(p, ConvProblem)} == {1, 2, 3}
    assert {p.dilation_h for p in convs if isinstance(p, ConvProblem)} >= {1, 2, 4, 6, 12, 24, 36}
    assert any(p.is_depthwise for p in convs if isinstance(p, ConvProblem))


def test_scale() -> None:
    small = network("resnet50", "conv_fwd", batch=2, size=64)
    assert {p.to_dict()["N"] for p in small.problems} == {2}
    assert small.problems[0].to_dict()["Hi"] == 64
    with pytest.raises(InputError, match="too small"):
        network("inception_v3", "conv_fwd", size=16)
    with pytest.raises(InputError, match="batch is -1"):
        network("resnet50", "conv_fwd", batch=-1)
    with pytest.raises(InputError, match="dlrm has no tokens"):
        network("dlrm", "gemm", tokens=5)
    with pytest.raises(InputError, match="'resnet' is unknown; known: resnet18"):
        network("resnet", "conv_fwd")
    with pytest.raises(InputError, match="does not decode"):
        network("resnet50", "gemm", decode=True)


def test_prompt_and_decoding() -> None:
    prompt = network("llama3_8b", "gemm", batch=2, tokens=1024)
    assert prompt.problems[0] == GemmProblem(m=2048, n=6144, k=4096)
    decoding = network("llama3_8b", "gemm", batch=16, tokens=1024, decode=True)
    assert decoding.problems[0] == GemmProblem(m=16, n=6144, k=4096)
    scores = next(p for p, labels in decoding if labels["layer"] == "layer.scores")
    assert scores == GemmProblem(m=1, n=1025, k=128, batch=16 * 32)
    experts = network("deepseek_v3", "gemm", batch=4, decode=True)
    up = next(p for p, labels in experts if labels["layer"] == "sparse.experts.up")
    assert up == GemmProblem(m=1, n=4096, k=7168, batch=32)


def test_gradients_of_products() -> None:
    found = network("dlrm", "gemm", batch=64, backward=True)
    by_layer = {labels["layer"]: problem for problem, labels in found}
    assert by_layer["top0"] == GemmProblem(m=64, n=1024, k=479)
    assert by_layer["top0.dx"] == GemmProblem(m=64, n=479, k=1024, layout="rrr")
    assert by_layer["top0.dw"] == GemmProblem(m=1024, n=479, k=64, layout="crr")
    assert "bottom0.dw" in by_layer
    assert "bottom0.dx" not in by_layer


def test_the_image_needs_no_gradient() -> None:
    forward = network("vgg16", "conv_fwd")
    backward = network("vgg16", "conv_bwd_data")
    assert len(backward) == len(forward) - 1
    assert min(p.to_dict()["C"] for p in backward.problems) == 64
