"""Real networks, computed from their definitions at any batch, image size and sequence length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tilewise.core.problem import Problem
from tilewise.errors import InputError, nearest
from tilewise.ops.contract import get_op
from tilewise.problems.networks import classifiers, detectors, transformers
from tilewise.problems.networks.net import Layer, Net, check_scale
from tilewise.problems.problem_set import ProblemSet
from tilewise.problems.sampling import maker

__all__ = ["NETWORKS", "Network", "network", "networks_with", "trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network and the scale it usually runs at."""

    name: str
    build: Callable[[Net], None]
    batch: int = 32
    size: int = 224
    """Pixels of the square image, where it sees one."""
    tokens: int = 0
    """Length of a sequence, where it reads one."""


def _listed() -> dict[str, Network]:
    sizes = {
        "inception_v3": 299, "unet": 512, "deeplab_v3": 520, "retinanet": 800, "ssd300": 300,
        "yolo_v3": 416, "r3d18": 112, "unet3d": 128,
    }  # fmt: skip
    batches = {"retinanet": 8, "unet": 4, "deeplab_v3": 8, "r3d18": 8, "unet3d": 2, "wav2vec2": 8}
    builders = [
        classifiers.resnet18, classifiers.resnet50, classifiers.resnet101, classifiers.resnext50,
        classifiers.vgg16, classifiers.inception_v3, classifiers.mobilenet_v2,
        classifiers.mobilenet_v3, classifiers.efficientnet_b0, classifiers.convnext_tiny,
        detectors.unet, detectors.deeplab_v3, detectors.retinanet, detectors.ssd300,
        detectors.yolo_v3, detectors.r3d18, detectors.unet3d, transformers.vit_b16,
    ]  # fmt: skip
    found = [
        Network(
            name=b.__name__,
            build=b,
            size=sizes.get(b.__name__, 224),
            batch=batches.get(b.__name__, 32),
        )
        for b in builders
    ]
    found.append(Network(name="wav2vec2", build=detectors.wav2vec2, batch=8, size=0, tokens=160000))
    for name, model in transformers.LANGUAGE_MODELS.items():
        build = partial(transformers.language_model, model=model)
        tokens = 512 if name.startswith("bert") else 2048
        found.append(Network(name=name, build=build, batch=1, size=0, tokens=tokens))
    found.append(
        Network(name="deepseek_v3", build=transformers.deepseek_v3, batch=1, size=0, tokens=2048)
    )
    found.append(Network(name="dlrm", build=transformers.dlrm, batch=2048, size=0))
    return {each.name: each for each in found}


NETWORKS: dict[str, Network] = _listed()


def network(
    name: str,
    op: str = "",
    *,
    dtype: str = "",
    batch: int = 0,
    size: int = 0,
    tokens: int = 0,
    decode: bool = False,
    backward: bool = False,
    frozen: bool = False,
    **fixed: Any,
) -> ProblemSet:
    """The problems of `op` in one pass of a network, each once, labelled with how often it runs.

    Without an op they are those of the first layer's. Zeros take the network's usual scale.
    `decode` adds one token to each sequence instead of reading all. `backward` adds the products of
    the gradients to the GEMMs. `frozen` keeps layers that training leaves alone.
    """
    layers = trace(name, batch=batch, size=size, tokens=tokens, decode=decode)
    op = op or layers[0].ops[0]
    make = maker(op, dtype, **fixed)
    found = ProblemSet()
    for layer in layers:
        if op not in layer.ops or (layer.is_frozen and not frozen):
            continue
        for suffix, problem in _problems(layer, make, backward and "m" in layer.fields):
            labels = {"network": name, "layer": layer.name + suffix, "count": layer.times}
            if layer.is_transposed:
                labels["transposed"] = True
            found.add(problem, labels)
    if not found.problems:
        has = sorted({each for layer in layers for each in layer.ops})
        raise InputError(f"{name} has no {op} layers; it has {', '.join(has)}")
    return found.distinct()


def trace(
    name: str, *, batch: int = 0, size: int = 0, tokens: int = 0, decode: bool = False
) -> list[Layer]:
    """Every layer of a network in the order it runs."""
    if name not in NETWORKS:
        raise InputError(
            f"network {name!r} is unknown; known: {', '.join(NETWORKS)}{nearest(name, NETWORKS)}"
        )
    known = NETWORKS[name]
    if decode and name not in (*transformers.LANGUAGE_MODELS, "deepseek_v3"):
        raise InputError(f"{name} does not decode token by token; leave decode out")
    for what, given, usual in (("size", size, known.size), ("tokens", tokens, known.tokens)):
        if given and not usual:
            raise InputError(f"{name} has no {what} to choose; leave it out")
    check_scale(batch=batch or known.batch, size=size or known.size or 1)
    check_scale(tokens=tokens or known.tokens or 1)
    net = Net(
        batch=batch or known.batch,
        size=size or known.size,
        tokens=tokens or known.tokens,
        is_decoding=decode,
    )
    known.build(net)
    return net.layers


def _problems(
    layer: Layer, make: Callable[..., Problem], backward: bool
) -> list[tuple[str, Problem]]:
    found = [("", make(**layer.fields))]
    if backward:
        m, n, k = (layer.fields[size] for size in "mnk")
        rest = {"batch": layer.fields.get("batch", 1)}
        if layer.has_weights:
            # dX = dY W reads the weights as they lie; dW = dY^T X transposes the rows away.
            found.append((".dw", make(m=n, n=k, k=m, layout="crr", **rest)))
        else:
            found.append((".db", make(m=k, n=n, k=m, layout="crr", **rest)))
        if not layer.is_first:
            found.append((".dx", make(m=m, n=k, k=n, layout="rrr", **rest)))
    return found


def networks_with(op: str) -> list[str]:
    """Names of the networks that have layers of `op`."""
    get_op(op)
    return [n for n in NETWORKS if any(op in layer.ops for layer in trace(n))]
