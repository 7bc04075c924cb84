"""Exported launches of GPU kernels equal Python's, number for number, for every family."""

from __future__ import annotations

import ctypes
import json
import random
import subprocess
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver_stub import STREAM, Stub, install
from exported import Exported, built

from tilewise.core.arch import Arch, load_arch
from tilewise.core.kernel import Kernel
from tilewise.core.model import Model
from tilewise.core.problem import Problem
from tilewise.engines.contract import Resources
from tilewise.engines.gpu.bound import BoundLaunch
from tilewise.engines.gpu.build import compile_step, source_key
from tilewise.engines.gpu.driver import PROMOTIONS, SWIZZLES
from tilewise.engines.gpu.layout import laid_out
from tilewise.engines.gpu.maps import map_box, map_swizzle, type_of
from tilewise.engines.gpu.objects import Box, GpuObject
from tilewise.errors import ProblemError
from tilewise.export import gpu
from tilewise.export.cases import _drawn, size_fields
from tilewise.export.library import Wanted, prepared, write_library
from tilewise.export.rules import OpExport
from tilewise.ops.contract import get_op
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.ops.launch import CudaSource, Pointer, Scratch, Step, TensorMap, Zero
from tilewise.selection.models import load_models

COUNT = 1000
ARCH = load_arch("sm_90:H200")
SHOW = """\
// Prints launches as lines of JSON: one for each line of "kernel size size ..." on the input.
#include <cstdio>

#include "internal.hpp"

using namespace tilewise::detail;

template <class T>
void list(const char *name, const T *values, int count) {
  std::printf(", \\"%s\\": [", name);
  for (int i = 0; i < count; ++i) std::printf("%s%lld", i ? ", " : "", (long long)values[i]);
  std::printf("]");
}

int main() {
  const Op &op = *ops[0];
  int kernel, which;
  while (std::scanf("%d %d", &kernel, &which) == 2) {
    int64_t sizes[32];
    for (int i = 0; i < op.sizes; ++i) {
      long long size;
      if (std::scanf("%lld", &size) != 1) return 1;
      sizes[i] = size;
    }
    char said[512] = "";
    Text why{said, sizeof said};
    Launch made;
    if (!op.is_usable(kernel, which, sizes, &why) ||
        !op.launch(kernel, which, sizes, &made, &why)) {
      std::printf("{\\"why\\": \\"%s\\"}\\n", said);
      continue;
    }
    std::printf("{\\"workspace\\": [%lld, %lld], \\"steps\\": [", (long long)made.workspace_bytes,
                (long long)made.zeroed_bytes);
    for (size_t s = 0; s < made.steps.size(); ++s) {
      const Step &step = made.steps[s];
      std::printf("%s{\\"object\\": %d, \\"clear\\": %lld", s ? ", " : "", step.object,
                  (long long)step.clear_bytes);
      list("grid", step.grid, 3);
      list("cluster", step.cluster, 3);
      std::printf(", \\"parameters\\": [");
      for (size_t i = 0; i < step.parameters.size(); ++i) {
        const Parameter &one = step.parameters[i];
        std::printf("%s[%u, %u, %llu]", i ? ", " : "", one.kind, one.index,
                    (unsigned long long)one.number);
      }
      std::printf("]}");
    }
    std::printf("], \\"maps\\": [");
    for (size_t m = 0; m < made.maps.size(); ++m) {
      const Map &map = made.maps[m];
      std::printf("%s{\\"head\\": [%d, %d, %d, %d, %lld]", m ? ", " : "", map.tensor, map.type,
                  map.swizzle, map.promotion, (long long)map.offset);
      list("sizes", map.sizes, map.rank);
      list("strides", map.strides, map.rank - 1);
      list("steps", map.steps, map.rank);
      if (map.is_im2col) {
        list("lower", map.lower, map.rank - 2);
        list("upper", map.upper, map.rank - 2);
        const uint32_t walk[] = {map.channels, map.pixels};
        list("walk", walk, 2);
      } else {
        list("box", map.box, map.rank);
      }
      std::printf("}");
    }
    std::printf("]}\\n");
  }
}
"""


def unbuilt(step: Step, target: str, name: str) -> GpuObject:
    """An object that nothing was compiled for, with the parameters that such a step has."""
    sizes, boxes = [], []
    is_triton = not isinstance(step.source, CudaSource)
    for kind, argument in zip(step.source.signature.values(), step.arguments, strict=True):
        if isinstance(argument, TensorMap):
            rank = len(argument.sizes)
            sizes += [128, *((*[4] * rank, *[8] * rank) if is_triton else ())]
            pixels = (16, 64) if argument.im2col else (1, *range(2, rank + 1))
            boxes += [Box(sizes=pixels, swizzle=128)] if is_triton else []
        else:
            is_wide = isinstance(argument, Pointer | Scratch) or kind in ("i64", "u64")
            sizes.append(8 if is_wide else 4)
    return GpuObject(
        image=b"\x7fELF" + source_key(step.source).encode(),
        function=step.source.function,
        parameters=(*sizes, *((8, 8) if is_triton else ())),
        resources=Resources(threads=step.threads or 128, smem_bytes=step.smem_bytes),
        boxes=tuple(boxes),
    )


def chosen(op: str, export: OpExport) -> OpExport:
    """One kernel of each family, and of each way to cut a reduction."""
    kinds: dict[Any, Kernel] = {}
    for kernel in export.kernels:
        traits = ("engine", "family", "swap", "fill", "atomic", "split_k")
        kind = tuple(str(getattr(kernel, name, "")) for name in traits)
        kinds.setdefault((*kind[:-1], kind[-1] == "1"), kernel)
    return replace(export, kernels=tuple(kinds.values()))


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[OpExport, Path, gpu.Objects]:
    """The launches of GEMM kernels as a program that prints them."""
    where = "k < 1048576 and n < 1048576 and m < 1048576"
    wanted = Wanted(op="gemm", arch=ARCH, dtypes=("bf16",), layouts=("rcr", "rrr"), where=where)
    export = chosen("gemm", prepared(wanted))
    folder = tmp_path_factory.mktemp("launches") / "library"
    made: list[gpu.Objects] = []
    with pytest.MonkeyPatch.context() as patch:
        real = gpu.Objects

        def noted(arch: Any) -> gpu.Objects:
            made.append(real(arch))
            return made[-1]

        patch.setattr(gpu, "Objects", noted)
        patch.setattr(gpu, "compile_or_raise", unbuilt)
        patch.setattr(gpu, "compile_ahead", lambda *_: [])
        patch.setattr(gpu, "get_engine", lambda _: _Builds())
        write_library(folder, [export], max_objects=100_000)
    build = built(folder)
    source = folder / "show.cpp"
    source.write_text(SHOW)
    program = build / "show"
    command = ["c++", "-std=c++17", "-O1", "-Wall", str(source), "-o", str(program)]
    command += [f"-I{folder / 'src'}", f"-I{folder / 'include'}", f"-L{build}", "-ltilewise"]
    done = subprocess.run([*command, f"-Wl,-rpath,{build}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return export, program, made[0]


class _Builds:
    def why_no_build(self) -> None:
        return None


def problems(export: OpExport, count: int) -> list[tuple[int, Problem]]:
    """Problems of the exported cases, with the number of each one's case."""
    op, rng = get_op(export.op.name), random.Random(7)
    found: list[tuple[int, Problem]] = []
    for values in _drawn(op, 100 * count):
        which = rng.randrange(len(export.cases))
        given = {**values, **export.cases[which].words}
        for name in op.problems.sizes:
            if rng.random() < 0.3:
                step = 1 << rng.randrange(7)
                given[name] = max(1, given.get(name, 1) // step) * step
        try:
            problem = op.problem(**given)
        except ProblemError:
            continue
        sizes = {name: getattr(problem, name) for name in size_fields(op)}
        if not problem.is_empty and (export.where is None or export.where(sizes)):
            found.append((which, problem))
        if len(found) == count:
            break
    assert len(found) == count
    return found


def expected(export: OpExport, objects: gpu.Objects, kernel: Kernel, problem: Problem) -> Any:
    """What the program must print for a launch."""
    module = export.op.module("launch")
    launch = module.launch(kernel, problem, export.arch)
    maps: list[Any] = []
    steps = []
    for step in launch.steps:
        if isinstance(step, Zero):
            step_facts = {"object": -1, "clear": step.size, "grid": [1, 1, 1]}
            own = [_address(step.target)]
            cluster = (1, 1, 1)
        else:
            place, made = objects.place(step, kernel.name)
            step_facts = {"object": place, "clear": 0, "grid": list(step.grid)}
            own = [_parameter(one, maps) for one in laid_out(step, made, kernel.name)]
            cluster = step.cluster
        steps.append({**step_facts, "cluster": list(cluster), "parameters": own})
    workspace = [launch.workspace_bytes, launch.zeroed_bytes]
    return {"workspace": workspace, "steps": steps, "maps": maps}


def _address(target: Any) -> list[int]:
    if isinstance(target, Pointer):
        return [1, target.tensor, 0]
    return [1, 0xFFFF, target.offset]


def _parameter(one: Any, maps: list[Any]) -> list[int]:
    if isinstance(one.value, Pointer | Scratch):
        return _address(one.value)
    if not isinstance(one.value, TensorMap):
        if one.kind in ("f32", "fp32"):
            return [0, 0, int(np.float32(one.value).view(np.uint32))]
        bits = 64 if one.kind in ("i64", "u64") else 32
        return [0, 0, int(one.value) % (1 << bits)]
    wanted, walk = one.value, one.value.im2col
    box = map_box(wanted, one.box)
    swizzle = SWIZZLES[map_swizzle(wanted, one.box)]
    head = [wanted.tensor, type_of(wanted.dtype), swizzle, PROMOTIONS[wanted.promotion]]
    facts = {
        "head": [*head, wanted.offset],
        "sizes": list(wanted.sizes),
        "strides": list(wanted.strides),
        "steps": list(wanted.steps or (1,) * len(wanted.sizes)),
    }
    if walk is None:
        facts["box"] = list(box)
    else:
        facts |= {"lower": list(walk.lower), "upper": list(walk.upper)}
        facts["walk"] = list(box or (walk.channels, walk.pixels))
    maps.append(facts)
    return [2, len(maps) - 1, 0]


def ask(program: Path, lines: list[str]) -> list[Any]:
    ran = subprocess.run([program], input="\n".join(lines), capture_output=True, text=True)
    assert ran.returncode == 0
    return [json.loads(line) for line in ran.stdout.splitlines()]


def check_launches(export: OpExport, program: Path, objects: gpu.Objects, count: int) -> None:
    """Every kernel on every problem: the same launch, or the same reason for none."""
    asked = [
        (at, kernel, which, problem)
        for which, problem in problems(export, count)
        for at, kernel in enumerate(export.kernels)
    ]
    lines = []
    for at, _, which, problem in asked:
        sizes = [getattr(problem, name) for name in size_fields(export.op)]
        lines.append(" ".join(map(str, (at, which, *sizes))))
    unseen = served = 0
    for (_, kernel, _, problem), found in zip(asked, ask(program, lines), strict=True):
        why = export.op.why_unusable(kernel, problem, export.arch)
        if why is not None:
            assert found == {"why": why}, (kernel.name, problem)
        elif "why" in found:
            assert "not exported for sizes like these" in found["why"]
            unseen += 1
        else:
            served += 1
            assert found == expected(export, objects, kernel, problem), (kernel.name, problem)
    assert served > count
    # Ways that no example took are refused, not guessed; they must stay rare.
    assert unseen <= 0.01 * served, (unseen, served)


def test_launches_are_python_s(shown: tuple[OpExport, Path, gpu.Objects]) -> None:
    check_launches(*shown, COUNT)


def test_every_family_is_tried(shown: tuple[OpExport, Path, gpu.Objects]) -> None:
    families = {kernel.family for kernel in shown[0].kernels}  # type: ignore[attr-defined]
    assert families >= {
        *("pointer", "splitk", "streamk", "skinny", "gemv", "smallk"),
        *("tma", "ws", "duo", "pingpong"),
    }


SMALL = "batch == 1 and n % 8 == 0 and k % 8 == 0 and n >= 16 and k >= 16 and m < 65536"
ADDRESSES = (0x10000, 0x20000, 0x30000)
"""Of A, B and C."""
WORKSPACE = 0x900000


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where stand-ins for drivers are: a process finds the first of a name for good."""
    if find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            pytest.skip("a real driver would be found before the stand-in")
    return tmp_path_factory.mktemp("drivers")


def model_for(arch: Arch) -> Model | None:
    """The shipped model; for AMD's GPUs, which have none, the same as if it were theirs."""
    if arch.vendor == "nvidia":
        return None
    (model,) = load_models("gemm", ARCH)
    manifest = {k: v for k, v in model.manifest.items() if k != "figures"}
    return replace(model, arch=arch.name, device="", manifest=manifest)


@pytest.mark.parametrize(
    ("label", "driver", "expression"),
    [
        (
            "sm_90:H200",
            "libcuda.so.1",
            'family == "duo" and tile_n == 128 and group_m == 4 or family == "ws" and fill == 1 '
            'and tile_m == 128 and tile_n == 128 or family == "splitk" and split_k == 4',
        ),
        (
            "gfx942",
            "libamdhip64.so",
            'family == "splitk" and split_k == 4 and tile_m == 32 or family == "pointer" '
            "and tile_m == 128 and tile_n == 128",
        ),
    ],
)
def test_drivers_are_asked_as_python_asks_them(
    label: str,
    driver: str,
    expression: str,
    drivers: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Real objects: what both launch is the same, from grids to the bytes of parameters."""
    pytest.importorskip("triton")
    pytest.importorskip("torch")
    arch = load_arch(label)
    wanted = Wanted(
        op="gemm",
        arch=arch,
        dtypes=("bf16",),
        layouts=("rcr",),
        expression=expression,
        where=SMALL,
        model=model_for(arch),
    )
    export = prepared(wanted)
    write_library(tmp_path / "library", [export])
    stub = Stub(drivers, driver)
    install(stub, monkeypatch)
    exported = Exported(built(tmp_path / "library"), [export])
    tried = 0
    for at, kernel in enumerate(export.kernels):
        for m, n, k in ((64, 512, 4096), (4096, 4096, 1024), (2048, 1536, 512)):
            problem = GemmProblem(m=m, n=n, k=k, dtype="bf16")
            if export.op.why_unusable(kernel, problem, export.arch) is None:
                theirs = python_calls(stub, export, kernel, problem)
                ours = library_calls(stub, exported, export, at, problem)
                assert ours == theirs
                tried += 1
    assert tried >= 2


def python_calls(stub: Stub, export: OpExport, kernel: Kernel, problem: Problem) -> Any:
    launch = export.op.module("launch").launch(kernel, problem, export.arch)
    bound = BoundLaunch(launch, export.arch, kernel.name, (2, 0, 1))
    stub.forget()
    bound._workspace = (launch.zeroed_bytes, launch.workspace_bytes - launch.zeroed_bytes)
    a, b, c = ADDRESSES
    given = [c, a, b]
    if bound.needs_scratch:
        given += [WORKSPACE, WORKSPACE + launch.zeroed_bytes]
    for place, maps in bound._maps:
        given.append(maps[(c, a, b)[place]])
    assert bound._start(STREAM, *given) == 0
    return compared(stub.calls())


def library_calls(
    stub: Stub, exported: Exported, export: OpExport, at: int, problem: Problem
) -> Any:
    opened = exported.open()
    launch = export.op.module("launch").launch(export.kernels[at], problem, export.arch)
    for step in launch.steps:
        if isinstance(step, Step):
            stub.tell(compile_step(step, export.arch.name).parameters)
    plan = exported.plan(opened, problem, at)
    facts = exported.c.tilewise_facts(plan)
    assert facts.workspace_bytes == launch.workspace_bytes
    assert facts.zeroed_bytes == launch.zeroed_bytes
    stub.forget()
    tensors = (ctypes.c_void_p * 3)(*ADDRESSES)
    code = exported.call(
        *("tilewise_execute", plan, tensors, 3, WORKSPACE, facts.workspace_bytes, STREAM, 1)
    )
    assert code == 0, exported.said
    exported.c.tilewise_release(plan)
    exported.c.tilewise_close(opened)
    return compared(stub.calls())


def compared(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls without what differs from one time to the next: handles and serial numbers."""
    kept = []
    for call in calls:
        call.pop("function", None)
        call.pop("serial", None)
        call.pop("context", None)
        if "parameters" in call:
            call["parameters"] = [p if len(p) < 256 else "map" for p in call["parameters"]]
        kept.append(call)
    return sorted(kept, key=lambda call: (call["call"], str(call)))


def test_failures_of_the_driver_are_values(drivers: Path, tmp_path: Path) -> None:
    """A launch that fails, addresses that do not fit, a workspace that is too small."""
    pytest.importorskip("triton")
    expression = 'family == "splitk" and split_k == 4 and tile_m == 32'
    wanted = Wanted(
        op="gemm",
        arch=ARCH,
        dtypes=("bf16",),
        layouts=("rcr",),
        expression=expression,
        where=SMALL,
    )
    export = prepared(wanted)
    write_library(tmp_path / "library", [export])
    stub = Stub(drivers, "libcuda.so.1")
    exported = Exported(built(tmp_path / "library"), [export])
    opened = exported.open()
    plan = exported.plan(opened, GemmProblem(m=64, n=512, k=4096, dtype="bf16"), 0)
    size = exported.c.tilewise_facts(plan).workspace_bytes
    assert size > 0

    def execute(tensors: tuple[int, ...], room: int) -> int:
        given = (ctypes.c_void_p * len(tensors))(*tensors)
        return exported.call(
            *("tilewise_execute", plan, given, len(tensors), WORKSPACE, room, STREAM, 0)
        )

    stub.forget()
    assert execute(ADDRESSES, size) == 0
    assert [call["call"] for call in stub.calls()] == ["clear", "launch"]
    assert execute(ADDRESSES, size - 1) == 4
    assert "workspace" in exported.said
    assert execute((0x10000, 0x20008, 0x30000), size) == 4
    assert "multiple of 16" in exported.said
    stub.fail(719)
    assert execute(ADDRESSES, size) == 5
    assert "unspecified launch failure" in exported.said
