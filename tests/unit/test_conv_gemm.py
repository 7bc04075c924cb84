"""1x1 convolutions by the kernels of matrix products: names, rules, launches, results."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewise
from tilewise.core.arch import load_arch
from tilewise.core.features import ARCH, KERNEL, PROBLEM, Rows, columns
from tilewise.engines import get_engine
from tilewise.errors import InputError, KernelError, TensorError
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.conv.epilogue import Epilogue
from tilewise.ops.conv.features import FEATURES
from tilewise.ops.conv.kernels.directed import OPS
from tilewise.ops.conv.kernels.gemm import GemmConvKernel, product_kernel, why_unusable
from tilewise.ops.conv.launch import launch, representative, strides_of, why_unfused
from tilewise.ops.conv.problem import ConvProblem, padded
from tilewise.ops.fields import arch_values, kernel_values, problem_values
from tilewise.ops.gemm import arguments
from tilewise.ops.gemm import launch as gemm_launch
from tilewise.ops.gemm.kernels import BY_FAMILY, GPU_KERNEL_TYPES, gpu
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.ops.launch import Launch, Pointer, Scratch, Step, TensorMap

SM_90 = load_arch("sm_90")
HERE = Path(__file__).parent
DIRECTIONS = ("fwd", "bwd_data", "bwd_weight")
LAYER: dict[str, Any] = {"n": 4, "c": 96, "k": 160, "h": 14, "w": 10, "y": 1, "x": 1}


def problem(direction: str, **changed: Any) -> ConvProblem:
    return ConvProblem(direction=direction, **{"dtype": "bf16", **LAYER, **changed})


def kernel(direction: str, product: str = "pointer", **traits: Any) -> GemmConvKernel:
    usual = {"dtype": "bf16", "tile_m": 64, "tile_n": 64, "tile_k": 64, **traits}
    return GemmConvKernel(op_name=f"conv_{direction}", family="gemm", product=product, **usual)


@cache
def pool(op: str, arch: str = "sm_90") -> tuple[GemmConvKernel, ...]:
    every = load_pool(get_op(op), load_arch(arch), ["triton"])
    return tuple(k for k in every if isinstance(k, GemmConvKernel))


def matrix(p: ConvProblem) -> GemmProblem:
    """The product of a layer, said by hand."""
    pixels = p.n * p.d * p.h * p.w
    sizes = {
        "fwd": {"m": pixels, "n": p.k, "k": p.c, "layout": "rcr"},
        "bwd_data": {"m": pixels, "n": p.c, "k": p.k, "layout": "rrr"},
        "bwd_weight": {"m": p.k, "n": p.c, "k": pixels, "layout": "crr"},
    }[p.direction]
    return GemmProblem(dtype=p.dtype, out_dtype=p.out_dtype, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_pool_has_families_for_tall_products_and_long_reductions(direction: str) -> None:
    kernels = pool(f"conv_{direction}")
    assert all(16 <= count <= 24 for count in Counter(k.dtype for k in kernels).values())
    assert {k.dtype for k in kernels} == {"bf16", "fp16"}
    products = {k.product for k in kernels}
    if direction == "bwd_weight":
        assert {"streamk", "splitk", "ws"} <= products
        assert max(k.split_k for k in kernels) >= 32
    else:
        assert {"ws", "duo", "pingpong", "smallk", "tma", "pointer"} <= products
    assert {k.product for k in pool(f"conv_{direction}", "gfx942")} >= {"pointer", "streamk"}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_name_is_the_product_s_and_parses_back(direction: str) -> None:
    op = get_op(f"conv_{direction}")
    for one in pool(op.name):
        own = product_kernel(one)
        assert one.name == f"{op.name}_triton_gemm_{own.name.removeprefix('gemm_triton_')}"
        assert op.kernel_from_name(one.name) == one
        assert op.kernel_from_dict(one.to_dict()) == one
        assert one.tile == own.tile and one.is_deterministic == own.is_deterministic


def test_traits_are_those_of_products() -> None:
    mine = {f.name: f for f in GemmConvKernel.traits() if f.name not in ("family", "product")}
    for kind in GPU_KERNEL_TYPES:
        own = {f.name: f for f in kind.traits() if f.name != "family"}
        assert list(own) == list(mine)
        for name, f in own.items():
            given = mine[name].metadata
            assert (given["tag"], mine[name].default) == (f.metadata["tag"], f.default)
            if name != "dtype":
                assert set(f.metadata["choices"]) <= set(given["choices"])


def test_what_is_no_product_s_kernel_is_none() -> None:
    with pytest.raises(KernelError, match="has no fill"):
        kernel("fwd", fill=True)
    with pytest.raises(KernelError, match="product is 'direct'"):
        kernel("fwd", "direct")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"y": 3, "pad_h": 1}, "filters of 1x1"),
        ({"stride_h": 2}, "neither strided nor padded"),
        ({"pad_w": 1}, "neither strided nor padded"),
        ({"g": 2}, "in one group"),
        ({"layout": "nchw"}, "it needs nhwc"),
        ({"dtype": "fp16"}, "it multiplies bf16, not fp16"),
        ({"c": 97, "k": 161}, "TMA needs multiples of 16"),
        ({"c": 0}, "there is nothing to compute"),
    ],
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_it_does_not_serve(direction: str, changed: dict[str, Any], words: str) -> None:
    chosen = kernel(direction, "ws", stages=4)
    assert why_unusable(chosen, problem(direction), SM_90) is None
    assert words in str(why_unusable(chosen, problem(direction, **changed), SM_90))


def test_rules_are_those_of_products() -> None:
    layers = ({}, {"n": 128, "h": 56, "w": 56}, {"c": 40, "k": 24}, {"c": 33}, {"n": 1, "h": 7})
    for direction in DIRECTIONS:
        for changed in layers:
            p = problem(direction, **changed)
            for one in pool(p.op):
                expected = gpu.why_unusable(product_kernel(one), matrix(p), SM_90)
                assert why_unusable(one, p, SM_90) == expected
    assert "no tensor memory accelerator" in str(
        why_unusable(kernel("fwd", "ws"), None, load_arch("gfx942"))
    )


def test_strides_of_single_pixels_and_dilation_mean_nothing() -> None:
    for changed in ({"h": 1, "w": 1, "stride_h": 2, "stride_w": 2}, {"dilation_h": 3}):
        assert why_unusable(kernel("fwd"), problem("fwd", **changed), SM_90) is None


def placed(made: Launch, order: tuple[int, ...]) -> list[list[Any]]:
    """Arguments, each tensor called by its place in a convolution's call."""
    return [
        [
            replace(one, tensor=(*order, 3)[one.tensor])
            if isinstance(one, Pointer | TensorMap)
            else one
            for one in step.arguments
        ]
        for step in made.steps
        if isinstance(step, Step)
    ]


def check_launch(one: GemmConvKernel, p: ConvProblem, e: Epilogue, **given: Any) -> None:
    own = arguments.Epilogue(bias=e.bias, activation=e.activation)
    made = launch(one, p, SM_90, epilogue=e, **given)
    meant = gemm_launch.launch(product_kernel(one), matrix(p), SM_90, epilogue=own, **given)
    order = (1, 0, 2) if p.direction == "bwd_weight" else (0, 1, 2)
    assert placed(made, (0, 1, 2)) == placed(meant, order)
    assert made.sources == meant.sources
    assert [s.grid for s in made.steps] == [s.grid for s in meant.steps]  # type: ignore[union-attr]
    assert made.workspace_bytes == meant.workspace_bytes
    assert made.zeroed_bytes == meant.zeroed_bytes


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_launch_is_the_product_s_number_for_number(direction: str) -> None:
    seen = set()
    for changed in (
        *({}, {"n": 32, "h": 56, "w": 56}, {"out_dtype": "fp32"}, {"c": 512, "k": 512}),
        *({"c": 33}, {"c": 64, "k": 64, "h": 1, "w": 300}, {"h": 1, "w": 1, "n": 77}),
        *({"d": 3, "z": 1}, {"n": 1, "h": 1, "w": 1}),
    ):
        p = problem(direction, **changed)
        for one in pool(p.op):
            if why_unusable(one, p, SM_90) is None:
                seen.add(one.product)
                check_launch(one, p, Epilogue())
                if direction != "bwd_weight":
                    check_launch(one, p, Epilogue(bias=True, activation="silu"))
                if one.product == "pointer":
                    check_launch(one, p, Epilogue(), is_aligned=False)
    assert seen == {one.product for one in pool(f"conv_{direction}")}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("which", range(3))
def test_images_with_gaps_are_refused(direction: str, which: int) -> None:
    p = problem(direction)
    dense = strides_of(p, _lies(p))
    filters = 2 if direction == "bwd_weight" else 1
    gap = (2 * dense[which][0], *dense[which][1:])
    given: Any = (*dense[:which], gap, *dense[which + 1 :])
    if which == filters:
        made = launch(kernel(direction), p, SM_90, strides=given).steps[0]
        assert isinstance(made, Step) and 2 * p.c in made.arguments
    else:
        with pytest.raises(TensorError, match="takes pixels in equal steps"):
            launch(kernel(direction), p, SM_90, strides=given)


def _lies(p: ConvProblem) -> list[Any]:
    """Strides of the call's tensors, channels innermost."""
    c, k, plane = p.c, p.k, p.h * p.w
    x, y = (plane * c, 1, p.w * c, c), (plane * k, 1, p.w * k, k)
    w = (c, 1, c, c)
    return {"fwd": [x, w, y], "bwd_data": [y, w, x], "bwd_weight": [x, y, w]}[p.direction]


def test_single_pixels_may_lie_apart_and_planes_may_not() -> None:
    p = problem("fwd", h=1, w=1, n=50)
    wide = [(3 * p.c, 1, p.c, p.c), (p.c, 1, p.c, p.c), (p.k, 1, p.k, p.k)]
    (step,) = launch(kernel("fwd"), p, SM_90, strides=strides_of(p, wide)).steps
    assert isinstance(step, Step)
    passed = dict(zip(step.source.signature, step.arguments, strict=True))
    assert (passed["a_row"], passed["b_col"], passed["c_row"]) == (3 * p.c, p.c, p.k)
    p = problem("fwd")
    with pytest.raises(TensorError, match="channels lie 140 apart"):
        planes = [(140 * p.c, 140, 10, 1), *_lies(p)[1:]]
        launch(kernel("fwd"), p, SM_90, strides=strides_of(p, planes))


def test_what_follows_is_fused_where_products_can() -> None:
    fused = Epilogue(bias=True, activation="gelu")
    for direction in ("fwd", "bwd_data"):
        p, one = problem(direction), kernel(direction)
        assert why_unfused(one, p, fused) is None
        (step,) = launch(one, p, SM_90, epilogue=fused).steps
        assert isinstance(step, Step)
        assert Pointer(tensor=3) in step.arguments and step.source.constants["ACT"] == "gelu"
        assert "add no residual" in str(why_unfused(one, p, Epilogue(residual=True)))
        assert "sums over pixels" in str(why_unfused(one, p, Epilogue(sums=True)))
        with pytest.raises(InputError, match="no residual"):
            launch(one, p, SM_90, epilogue=Epilogue(residual=True))
    assert why_unfused(kernel("bwd_weight"), problem("bwd_weight"), fused)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_odd_channels_are_padded_for_copies(direction: str) -> None:
    p, copying = problem(direction, c=33, k=21), kernel(direction, "ws", stages=4)
    assert why_unusable(copying, p, SM_90) is not None
    larger = padded(p, copying.alignment(p))
    assert (larger.c % 8, larger.k % 8) == ((0, 5) if direction == "fwd" else (0, 0))
    assert why_unusable(copying, larger, SM_90) is None
    assert kernel(direction).alignment(p) == ()
    assert copying.alignment(replace(p, layout="nchw")) == ()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_features_see_the_product_s_tiles(direction: str) -> None:
    """Tiles, steps, slices, warps and stages; of transposed products on the other side."""
    p = problem(direction, n=32, c=64, k=64)
    arch = columns(FEATURES.fields_of(ARCH), [arch_values(SM_90)])
    for one in pool(p.op):
        rows = Rows(
            columns(FEATURES.fields_of(PROBLEM), [problem_values(p)]),
            columns(FEATURES.fields_of(KERNEL), [kernel_values(one)]),
            {name: float(value[0]) for name, value in arch.items()},
            *(np.zeros(1, np.int64),) * 2,
        )
        names = ("blocks_m", "blocks_n", "steps", "split", "warps", "stages", "is_pointer")
        wanted = (*names, "kernel_product_is_ws", "kernel_swap", "kernel_family_is_gemm")
        found = {name: float(v[0]) for name, v in FEATURES.evaluate(rows, wanted).items()}
        own, made = product_kernel(one), matrix(p)
        assert (found["blocks_m"], found["blocks_n"]) == own.tiles(made), one.name
        assert (found["warps"], found["stages"]) == (one.warps, one.stages)
        if one.product != "streamk" and not one.fill:
            assert found["split"] == one.split_k
        assert found["steps"] == ceil(ceil(made.k / one.tile_k) / found["split"])
        assert found["is_pointer"] == (not BY_FAMILY[one.product].copies_by_tma)
        assert found["kernel_product_is_ws"] == (one.product == "ws")
        assert found["kernel_swap"] == one.swap and found["kernel_family_is_gemm"] == 1


def test_the_lender_s_sources_count(tmp_path: Path) -> None:
    """Those of Triton's kernels; files of one name in both folders are two files."""
    pytest.importorskip("torch")
    op = get_op("conv_fwd")
    copy = tmp_path / "gemm"
    shutil.copytree(get_op("gemm").folder, copy)
    assert op.lenders == {"gemm": get_op("gemm").folder}
    moved = replace(op, lenders={"gemm": copy})
    families = (("triton", "gemm"), ("triton", "implicit"), ("cuda", "rows"), ("cpu", ""))

    def toolchains() -> dict[str, str]:
        return {family: get_engine(name).toolchain(moved, family) for name, family in families}

    for file, is_source in (
        *(("triton.py", True), ("gluon.py", True), ("launch.py", True), ("arguments.py", True)),
        *(("launch_hopper.py", True), ("features.py", False)),
    ):
        before = toolchains()
        (copy / file).write_text((copy / file).read_text() + "\n")
        after = toolchains()
        changed = {name for name in before if before[name] != after[name]}
        assert changed == ({"gemm"} if is_source else set()), file


def _interpreted() -> list[dict[str, Any]]:
    path = os.pathsep.join((str(Path(tilewise.__file__).parents[1]), str(HERE)))
    ran = subprocess.run(
        [sys.executable, str(HERE / "conv_gemm_interpreted.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.slow
def test_results_agree_with_float64() -> None:
    pytest.importorskip("triton")
    found = _interpreted()
    seen = Counter(tuple(row["kernel"].split("_triton_gemm_")) for row in found)
    assert {op for op, _ in seen} == set(OPS) and len(found) > 150
    assert {name.split("_")[0] for _, name in seen} == {
        *("pointer", "splitk", "streamk", "skinny", "smallk")
    }
    assert not [row for row in found if not row["error"] <= row["allowed"] or not row["is_inside"]]


def one_of_each() -> list[Any]:
    """A kernel of each direction and family of products, and the architectures it is for."""
    found = {(k.op, k.product): k for op in OPS for k in pool(op)}
    every = [(k, "sm_90") for k in found.values()]
    return every + [(k, "gfx942") for k in found.values() if k in pool(k.op, "gfx942")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("built", "arch"), one_of_each(), ids=lambda one: getattr(one, "name", one)
)
def test_compiles_without_spills(built: GemmConvKernel, arch: str) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("torch")
    from tilewise.engines.gpu.build import compile_step

    made = launch(built, representative(built), load_arch(arch))
    for step in made.steps:
        assert isinstance(step, Step) and not any(
            isinstance(one, Scratch) and one.offset >= made.workspace_bytes
            for one in step.arguments
        )
        found = compile_step(step, arch).resources
        assert found.spills == 0 and 0 < found.registers <= 255
