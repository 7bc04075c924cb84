"""Exported launches that are printed, and held against Python's; nothing is compiled."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exported import built

from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.engines.contract import Resources
from tilewise.engines.gpu.build import source_key
from tilewise.engines.gpu.driver import PROMOTIONS, SWIZZLES
from tilewise.engines.gpu.layout import laid_out
from tilewise.engines.gpu.maps import map_box, map_swizzle, type_of
from tilewise.engines.gpu.objects import Box, GpuObject
from tilewise.export import gpu
from tilewise.export.cases import size_fields
from tilewise.export.library import write_library
from tilewise.export.rules import OpExport
from tilewise.ops.launch import CudaSource, Pointer, Scratch, Step, TensorMap, Zero

UNSEEN = "not exported for sizes like these"
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
      std::printf(", \\"overlaps\\": %s", step.overlaps ? "true" : "false");
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


def write_unbuilt(export: OpExport, folder: Path) -> gpu.Objects:
    """Writes a library with nothing compiled; gives what stands for its objects."""
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
    return made[0]


def show(export: OpExport, folder: Path) -> tuple[Path, gpu.Objects]:
    """A library with nothing compiled, and a program that prints its launches."""
    objects = write_unbuilt(export, folder)
    build = built(folder)
    source = folder / "show.cpp"
    source.write_text(SHOW)
    program = build / "show"
    command = ["c++", "-std=c++17", "-O1", "-Wall", str(source), "-o", str(program)]
    command += [f"-I{folder / 'src'}", f"-I{folder / 'include'}", f"-L{build}", "-ltilewise"]
    done = subprocess.run([*command, f"-Wl,-rpath,{build}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program, objects


class _Builds:
    def why_no_build(self) -> None:
        return None


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
            cluster, overlaps = (1, 1, 1), False
        else:
            place, made = objects.place(step, kernel.name)
            step_facts = {"object": place, "clear": 0, "grid": list(step.grid)}
            own = [_parameter(one, maps) for one in laid_out(step, made, kernel.name)]
            cluster, overlaps = step.cluster, step.overlaps
        steps.append(
            {**step_facts, "cluster": list(cluster), "overlaps": overlaps, "parameters": own}
        )
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


def check_launches(
    export: OpExport, program: Path, objects: gpu.Objects, given: list[tuple[int, Problem]]
) -> set[tuple[str, Problem]]:
    """Every kernel on every problem: the same launch, or the same reason for none.

    Gives the pairs that sizes nobody had seen were the reason for.
    """
    asked = [
        (at, kernel, which, problem)
        for which, problem in given
        for at, kernel in enumerate(export.kernels)
    ]
    lines = []
    for at, _, which, problem in asked:
        sizes = [getattr(problem, name) for name in size_fields(export.op)]
        lines.append(" ".join(map(str, (at, which, *sizes))))
    unseen, served = set(), 0
    for (_, kernel, _, problem), found in zip(asked, ask(program, lines), strict=True):
        why = export.op.why_unusable(kernel, problem, export.arch)
        if why is not None:
            # Of layers that a kernel serves nowhere its rules are not exported.
            is_left_out = export.layers is not None and UNSEEN in found.get("why", "")
            assert is_left_out or found == {"why": why}, (kernel.name, problem)
        elif "why" in found:
            assert UNSEEN in found["why"]
            unseen.add((kernel.name, problem))
        else:
            served += 1
            assert found == expected(export, objects, kernel, problem), (kernel.name, problem)
    assert served > len(given)
    # Ways that no example took are refused, not guessed; they must stay rare.
    most = 0.01 if export.layers is None else 0.03
    assert len(unseen) <= most * served, (len(unseen), served)
    return unseen
