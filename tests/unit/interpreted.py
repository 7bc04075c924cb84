"""Runs the steps of a Triton launch on CPU tensors by Triton's own interpreter.

Import it with TRITON_INTERPRET=1 in the environment, before anything imports Triton.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from tilewise.engines.gpu.triton_build import said
from tilewise.ops.launch import Launch, Pointer, Scratch, Source, Step, Zero

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FLAGS = {"i32": torch.int32, "i64": torch.int64}
GUARD = 4096
"""Bytes behind the workspace that nobody may write."""


def run(launch: Launch, tensors: dict[int, Any]) -> None:
    """Runs all steps; `tensors` by their position in the call. The workspace is full of NaNs."""
    work = torch.full((launch.workspace_bytes + GUARD,), 0xFF, dtype=torch.uint8)
    work[: launch.zeroed_bytes] = 0
    for step in launch.steps:
        if isinstance(step, Zero):
            assert isinstance(step.target, Scratch)
            assert step.target.offset + step.size <= launch.workspace_bytes
            work[step.target.offset : step.target.offset + step.size] = 0
        else:
            start(step, tensors, work)
    assert bool((work[launch.workspace_bytes :] == 0xFF).all()), "it wrote behind its workspace"
    assert not work[: launch.zeroed_bytes].any(), "it left flags behind"


def start(step: Step, tensors: dict[int, Any], work: Any) -> None:
    """One kernel; arguments are given in the order of its signature, as a driver would."""
    source = step.source
    assert isinstance(source, Source)
    function = getattr(import_module(source.module), source.function)
    passed = list(source.signature)
    assert passed == [name for name in function.arg_names if name in passed]
    assert not {*passed} & {*source.constants}
    assert {*passed, *source.constants} == {*function.arg_names}
    values = {name: said(value, source) for name, value in source.constants.items()}
    for name, argument in zip(passed, step.arguments, strict=True):
        values[name] = given(
            argument, source.signature[name], source.divisible, name, tensors, work
        )
    function[step.grid](**values)


def given(
    argument: Any, kind: str, divisible: dict[str, int], name: str, tensors: Any, work: Any
) -> Any:
    """What the interpreter takes for an argument, checked against what is promised about it."""
    if isinstance(argument, Pointer):
        tensor = tensors[argument.tensor]
        assert tensor.dtype == (TYPES | FLAGS)[kind.removeprefix("*")]
        assert tensor.data_ptr() % divisible.get(name, 1) == 0
        return tensor
    if isinstance(argument, Scratch):
        assert argument.offset % divisible.get(name, 1) == 0
        return work[argument.offset :].view((TYPES | FLAGS)[kind.removeprefix("*")])
    if kind == "fp32":
        return argument
    assert argument % divisible.get(name, 1) == 0
    assert -(2**31) <= argument < 2**31 or kind == "i64"
    return argument


def poisoned(shape: Sequence[int], axes: Sequence[int], kind: str) -> tuple[Any, Any]:
    """A tensor full of NaNs whose axes lie in memory as told, and the guarded memory it is in."""
    stored = [shape[axis] for axis in axes]
    size = 1
    for extent in stored:
        size *= extent
    memory = torch.full((size + 2 * 64,), float("nan"), dtype=TYPES[kind])
    inside = memory[64 : 64 + size].view(stored)
    return inside.permute([list(axes).index(axis) for axis in range(len(shape))]), memory


def replace_text(module: str, old: str, new: str) -> None:
    """Reads the kernels of a module with a piece of their text replaced."""
    text = Path(str(import_module(module).__file__)).read_text()
    assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
    folder = Path(tempfile.mkdtemp())
    (folder / "other.py").write_text(text.replace(old, new))
    spec = spec_from_file_location(module, folder / "other.py")
    assert spec and spec.loader
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    sys.modules[module] = made
