"""Every GPU convolution of the pools on a real GPU against float64, outputs poisoned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tilewise.core.arch import Arch
from tilewise.core.dtypes import tolerance
from tilewise.core.kernel import Kernel
from tilewise.dispatch.padding import plan_for
from tilewise.dispatch.reshaping import reshaped_for
from tilewise.engines import get_engine
from tilewise.engines.device import detect
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.conv.epilogue import Epilogue
from tilewise.ops.conv.problem import ConvProblem, shapes
from tilewise.ops.conv.vendor import bind_torch

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)

pytestmark = pytest.mark.gpu

ENGINES = ("cuda", "triton")
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DIRECTIONS = ("fwd", "bwd_data", "bwd_weight")
DEFAULTS = {"n": 3, "c": 136, "k": 200, "h": 19, "w": 23, "y": 3, "x": 3, "pad_h": 1, "pad_w": 1}
DEPTHWISE = {"c": 96, "k": 96, "g": 96}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one image": {"n": 1, "c": 64, "k": 64, "h": 8, "w": 8},
    "many tiles": {"n": 16, "c": 256, "k": 256, "h": 28, "w": 28},
    "unpadded": {"pad_h": 0, "pad_w": 0},
    "dilated": {"dilation_h": 2, "dilation_w": 3, "pad_h": 2, "pad_w": 3},
    "strided": {"stride_h": 2, "stride_w": 2},
    "uneven": {"x": 5, "stride_h": 2, "stride_w": 3, "dilation_h": 2, "pad_w": 2},
    "1x1": {"y": 1, "x": 1, "pad_h": 0, "pad_w": 0},
    "1x1 of many tiles": {"n": 16, "c": 512, "k": 256, "h": 28, "w": 28, "y": 1, "x": 1}
    | {"pad_h": 0, "pad_w": 0},
    "1x1 of few channels": {"n": 16, "c": 64, "k": 64, "h": 56, "w": 56, "y": 1, "x": 1}
    | {"pad_h": 0, "pad_w": 0},
    "strided 1x1": {"y": 1, "x": 1, "pad_h": 0, "pad_w": 0, "stride_h": 2, "stride_w": 2},
    "5x5": {"y": 5, "x": 5, "pad_h": 2, "pad_w": 2},
    "line": {"h": 1, "w": 401, "y": 1, "pad_h": 0, "x": 3, "dilation_w": 2, "pad_w": 4},
    "volume": {"d": 7, "z": 3, "pad_d": 1, "h": 9, "w": 13},
    "strided volume": {"d": 7, "z": 3, "pad_d": 1, "stride_d": 2, "stride_h": 2, "h": 9, "w": 13},
    "large groups": {"c": 256, "k": 128, "g": 2},
    "groups of 4": {"c": 128, "k": 128, "g": 32},
    "groups of 16": {"c": 128, "k": 128, "g": 8, "stride_h": 2, "stride_w": 2},
    "groups of 12": {"c": 96, "k": 96, "g": 8},
    "groups of 24": {"c": 192, "k": 144, "g": 6},
    "strided groups of 40": {"c": 160, "k": 160, "g": 4, "stride_h": 2, "stride_w": 2},
    "1x1 of groups of 72": {"c": 144, "k": 176, "g": 2, "y": 1, "x": 1, "pad_h": 0, "pad_w": 0},
    "volume of groups of 24": {"c": 96, "k": 96, "g": 4, "d": 5, "z": 3, "pad_d": 1}
    | {"h": 9, "w": 13},
    "depthwise": DEPTHWISE,
    "strided depthwise": {**DEPTHWISE, "stride_h": 2, "stride_w": 2},
    "depthwise 7x7": {**DEPTHWISE, "y": 7, "x": 7, "pad_h": 3, "pad_w": 3},
    "stem": {"c": 3, "k": 64, "h": 65, "w": 57, "y": 7, "x": 7, "stride_h": 2, "stride_w": 2},
    "stem of whole rows": {"c": 3, "k": 64, "h": 65, "w": 56, "stride_h": 2, "stride_w": 2},
    "stem of patches": {"c": 3, "k": 96, "h": 32, "w": 64, "y": 4, "x": 4, "stride_h": 4}
    | {"stride_w": 4, "pad_h": 0, "pad_w": 0},
    "taps of 32": {"c": 32, "k": 32},
    "taps of 24": {"c": 24, "k": 24, "y": 5, "pad_h": 2, "stride_h": 2, "stride_w": 2},
    "taps of 16": {"c": 16, "k": 16, "d": 7, "z": 3, "pad_d": 1, "h": 9, "w": 13},
    "images of one channel": {"c": 1, "k": 64, "stride_h": 2, "stride_w": 2},
    "images by 4": {"c": 4, "k": 48, "h": 64, "w": 66, "y": 11, "x": 11, "stride_h": 4}
    | {"stride_w": 4, "pad_h": 2, "pad_w": 2},
    "groups of 32": {"c": 256, "k": 256, "g": 8},
    "volume of groups": {"c": 64, "k": 64, "g": 8, "d": 5, "z": 3, "pad_d": 1, "h": 9, "w": 13},
    "depthwise 5x5 by 2": {**DEPTHWISE, "y": 5, "x": 5, "pad_h": 2, "stride_h": 2, "stride_w": 2},
    "depthwise 31x31": {**DEPTHWISE, "y": 31, "x": 31, "pad_h": 15, "pad_w": 15},
    "depthwise line": {**DEPTHWISE, "h": 1, "w": 401, "y": 1, "pad_h": 0, "x": 4, "pad_w": 3},
    "depthwise volume": {**DEPTHWISE, "d": 5, "z": 3, "pad_d": 1, "h": 9, "w": 13},
    "odd channels": {"c": 35, "k": 51},
    "fp16": {"dtype": "fp16"},
    "tf32": {"dtype": "tf32", "out_dtype": "fp32"},
    "wide result": {"out_dtype": "fp32"},
}


@cache
def arch() -> Arch:
    return detect("gpu")


@cache
def pool(op: str) -> tuple[Kernel, ...]:
    usable = [name for name in ENGINES if get_engine(name).why_unavailable() is None]
    return tuple(load_pool(get_op(op), arch(), engines=usable))


def problem(layer: str, direction: str) -> ConvProblem:
    values = {"dtype": "bf16", "layout": "nhwc", **DEFAULTS, **LAYERS[layer]}
    return ConvProblem(direction=direction, **values)


def legal(p: ConvProblem) -> list[Kernel]:
    rule = get_op(p.op).why_unusable
    return [kernel for kernel in pool(p.op) if rule(kernel, p, arch()) is None]


def families(p: ConvProblem) -> list[Kernel]:
    """One kernel of each engine and family, the last of the pool: cut or atomic where there are."""
    found = {(k.engine, k.family): k for k in legal(p)}  # type: ignore[attr-defined]
    return list(found.values())


def dtype_of(name: str) -> Any:
    return TYPES["fp32" if name == "tf32" else name]


def channels_last(tensor: Any) -> Any:
    """The same values, channels innermost in memory."""
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


def tensors(p: ConvProblem) -> tuple[list[Any], Any]:
    """Operands, and a poisoned result."""
    torch.manual_seed(11)
    *given, result = shapes(p)
    operands = [channels_last(torch.randn(s, device="cuda").to(dtype_of(p.dtype))) for s in given]
    out = channels_last(torch.full(result, float("nan"), device="cuda").to(dtype_of(p.out_dtype)))
    return operands, out


def expected(p: ConvProblem, operands: list[Any], out: Any) -> Any:
    return bind_torch(p, [t.double() for t in operands], torch.zeros_like(out).double())()


def why_wrong(p: ConvProblem, out: Any, reference: Any) -> str:
    """What is wrong about a result; nothing where rounding explains it."""
    apart = out.double() - reference
    worst = float(apart.abs().max() / reference.abs().max())
    whole = float(apart.norm() / reference.norm())
    most = tolerance(p.dtype, p.out_dtype, p.gemm.k)
    return "" if max(worst, whole) <= most else f"errors {worst:.2e}, {whole:.2e} over {most:.2e}"


def compile_ahead(kernels: list[Kernel], p: ConvProblem) -> None:
    for name in {kernel.engine for kernel in kernels}:
        pairs = [(kernel, p) for kernel in kernels if kernel.engine == name]
        failed = get_engine(name).compile_ahead(pairs, arch())
        assert not failed, "\n".join(failed)


def failures(kernels: list[Kernel], p: ConvProblem) -> Iterator[str]:
    """Each kernel runs twice: the second launch meets the workspace as the first one left it."""
    operands, out = tensors(p)
    reference = expected(p, operands, out)
    for kernel in kernels:
        plan = get_engine(kernel.engine).plan(kernel, p, arch())
        seen = []
        for _ in range(2):
            out.fill_(float("nan"))
            plan.execute(operands, out)
            torch.cuda.synchronize()
            seen.append(out.clone())
            if wrong := why_wrong(p, out, reference):
                yield f"{kernel.name}: {wrong}"
                break
        else:
            if kernel.is_deterministic and not torch.equal(*seen):
                yield f"{kernel.name}: two runs differ"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layer", LAYERS)
def test_every_kernel(layer: str, direction: str) -> None:
    p = problem(layer, direction)
    kernels = legal(p)
    assert kernels
    compile_ahead(kernels, p)
    wrong = list(failures(kernels, p))
    assert not wrong, f"{len(wrong)} of {len(kernels)}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layer", ["plain", "strided", "groups of 4", "depthwise"])
def test_graphs_replay(layer: str, direction: str) -> None:
    """Into another result, with other operands, than the first launch had."""
    p = problem(layer, direction)
    for kernel in families(p):
        operands, out = tensors(p)
        plan = get_engine(kernel.engine).plan(kernel, p, arch())
        plan.execute(operands, out)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            plan.execute(operands, out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plan.execute(operands, out)
        for operand in operands:
            operand.copy_(torch.randn_like(operand, dtype=torch.float32))
        out.fill_(float("nan"))
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert not why_wrong(p, out, expected(p, operands, out)), kernel.name


@pytest.mark.parametrize("layer", ["plain", "1x1", "volume", "depthwise"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_images_with_gaps(layer: str, direction: str) -> None:
    """Operands and result are every other image of larger tensors."""
    p = problem(layer, direction)
    for kernel in families(p):
        operands, out = tensors(p)
        wide = [channels_last(t.repeat_interleave(2, 0)) for t in (*operands, out)]
        *spread, result = (t[::2] for t in wide)
        plan = get_engine(kernel.engine).plan(kernel, p, arch())
        if plan.why_unfit(spread, result):
            continue
        plan.execute(spread, result)
        torch.cuda.synchronize()
        assert not why_wrong(p, result, expected(p, operands, out)), kernel.name
        assert bool(wide[2][1::2].isnan().all()), f"{kernel.name} wrote between the images"


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "silu"])
def test_epilogues(activation: str) -> None:
    p = problem("plain", "fwd")
    act = {"none": lambda x: x, "relu": torch.relu, "silu": torch.nn.functional.silu}
    act["gelu"] = torch.nn.functional.gelu
    epilogue = Epilogue(bias=True, residual=True, activation=activation)
    for kernel in families(p):
        operands, out = tensors(p)
        bias = torch.randn(p.k, device="cuda").to(out.dtype)
        residual = channels_last(torch.randn(out.shape, device="cuda").to(out.dtype))
        plan = get_engine(kernel.engine).plan(kernel, p, arch(), epilogue=epilogue)
        plan.execute([*operands, bias, residual], out)
        torch.cuda.synchronize()
        sums = expected(p, operands, out) + bias.double()[:, None, None] + residual.double()
        assert not why_wrong(p, out, act[activation](sums)), kernel.name


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "silu"])
@pytest.mark.parametrize("direction", ["fwd", "bwd_data"])
def test_bias_and_activation_of_products(direction: str, activation: str) -> None:
    """Matrix products fuse them, and leave residuals to whoever asked."""
    p = problem("1x1", direction)
    act = {"none": lambda x: x, "relu": torch.relu, "silu": torch.nn.functional.silu}
    act["gelu"] = torch.nn.functional.gelu
    kernels = [k for k in legal(p) if getattr(k, "family", "") == "gemm"]
    assert kernels
    for kernel in {k.product: k for k in kernels}.values():  # type: ignore[attr-defined]
        operands, out = tensors(p)
        bias = torch.randn(out.shape[1], device="cuda").to(out.dtype)
        epilogue = Epilogue(bias=True, activation=activation)
        plan = get_engine(kernel.engine).plan(kernel, p, arch(), epilogue=epilogue)
        plan.execute([*operands, bias], out)
        torch.cuda.synchronize()
        sums = expected(p, operands, out) + bias.double()[:, None, None]
        assert not why_wrong(p, out, act[activation](sums)), kernel.name


@pytest.mark.parametrize("direction", ["fwd", "bwd_data"])
def test_tensors_beyond_two_to_the_31(direction: str) -> None:
    """The last line of a large volume is right; cuDNN's own way is asked for that line alone."""
    p = ConvProblem(
        direction=direction, n=1, c=64, k=64, d=17, h=1408, w=1408, z=1, y=3, x=3,
        pad_h=1, pad_w=1, dtype="bf16", layout="nhwc",
    )  # fmt: skip
    assert min(p.input_elements, p.output_elements) > 2**31
    for kernel in families(p):
        operands, out = tensors(p)
        get_engine(kernel.engine).plan(kernel, p, arch()).execute(operands, out)
        torch.cuda.synchronize()
        last = replace(p, d=1)
        image = operands[0][:, :, -1:].contiguous()
        reference = bind_torch(
            last, [image.double(), operands[1].double()], torch.zeros_like(image).double()
        )()
        assert not why_wrong(last, out[:, :, -1:], reference.view_as(image)), kernel.name
        del operands, out


PATCHED: dict[str, dict[str, Any]] = {
    "patches": {"c": 3, "k": 72, "h": 48, "w": 64, "y": 16, "x": 16},
    "lines left over": {"c": 64, "k": 72, "h": 13, "w": 24, "y": 4, "x": 4},
    "whole images": {"n": 70, "c": 24, "k": 72, "h": 4, "w": 4, "y": 4, "x": 4},
}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layer", PATCHED)
def test_patches_in_simpler_shapes(layer: str, direction: str) -> None:
    """Every kernel that sees them there computes the problem on the tensors as they lie."""
    sizes = {"n": 3, "pad_h": 0, "pad_w": 0, **PATCHED[layer], "dtype": "bf16"}
    steps = {"stride_h": sizes["y"], "stride_w": sizes["x"]}
    p = ConvProblem(direction=direction, **sizes, **steps)
    op, (operands, out) = get_op(p.op), tensors(p)
    reference = expected(p, operands, out)
    seen = [k for k in pool(p.op) if reshaped_for(op, k, p, arch()) is not None]
    assert seen
    for kernel in seen[:: max(1, len(seen) // 24)]:
        plan = plan_for(op, get_engine(kernel.engine), kernel, p, arch())
        out.fill_(float("nan"))
        plan.execute(operands, out)
        launch = plan.launcher(operands, out)
        out.fill_(float("nan"))
        launch(out, *operands)
        torch.cuda.synchronize()
        assert not why_wrong(p, out, reference), kernel.name
