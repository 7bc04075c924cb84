"""Runs a plan on random tensors with gaps in them and poison around them, against float64."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.core.tensors import Storage
from tilewise.engines.cpu import CpuEngine
from tilewise.engines.cpu import engine as engine_module
from tilewise.engines.toolchain import Unit, compile_units
from tilewise.ops.contract import get_op

GUARD = 4096
POISON = 0xA5
TORCH = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "bf8": torch.float8_e5m2,
    "int8": torch.int8,
    "int32": torch.int32,
}


def strides_of(shape: Sequence[int], storage: Storage, gap: int) -> tuple[int, ...]:
    """Strides of a tensor stored so, with `gap` elements wherever a distance is free."""
    strides, step = [0] * len(shape), 1
    for place, axis in enumerate(reversed(storage.axes)):
        step += gap if place == storage.dense else 0
        strides[axis] = step
        step *= max(1, shape[axis])
    return tuple(strides)


@dataclass
class Guarded:
    """A tensor with poison in its gaps and around it."""

    buffer: torch.Tensor
    tensor: torch.Tensor

    def is_unharmed(self) -> bool:
        """Whether only the tensor itself was written."""
        touched = torch.zeros(self.buffer.numel(), dtype=torch.bool)
        t = self.tensor
        touched.as_strided(t.shape, t.stride(), t.storage_offset()).fill_(True)
        raw = self.buffer.view(torch.uint8).reshape(self.buffer.numel(), -1)
        return bool((raw[~touched] == POISON).all())


def guarded(shape: Sequence[int], dtype: str, storage: Storage, gap: int = 0) -> Guarded:
    """Poison as a tensor of this shape, stored so."""
    strides = strides_of(shape, storage, gap)
    reach = 1 + sum(max(0, n - 1) * s for n, s in zip(shape, strides, strict=True))
    kind = TORCH[dtype]
    raw = torch.full(((reach + 2 * GUARD) * kind.itemsize,), POISON, dtype=torch.uint8)
    buffer = raw.view(kind)
    return Guarded(buffer, buffer.as_strided(tuple(shape), strides, GUARD))


def operands(problem: Problem, seed: int = 0) -> list[torch.Tensor]:
    """Random operands in the problem's storage; with gaps where `seed` is odd."""
    op = get_op(problem.op)
    made = []
    for at, (shape, storage) in enumerate(
        zip(op.shapes(problem)[:-1], op.storage(problem)[:-1], strict=True)
    ):
        generator = torch.Generator().manual_seed(seed + 7 * at)
        if problem.dtype == "int8":
            values = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
        else:
            values = torch.randn(shape, generator=generator).to(TORCH[problem.dtype])
        held = guarded(shape, problem.dtype, storage, gap=3 * (seed % 2)).tensor
        made.append(held.copy_(values))
    return made


def error_of(run: Any, problem: Problem, seed: int = 0) -> float:
    """‖out - ref‖ / ‖ref‖ of one call, infinite where it wrote outside its output."""
    op = get_op(problem.op)
    given = operands(problem, seed)
    shape, storage = op.shapes(problem)[-1], op.storage(problem)[-1]
    target = guarded(shape, problem.out_dtype, storage, gap=5 * (seed % 2))
    run(given, target.tensor)
    if not target.is_unharmed():
        return float("inf")
    expected = torch.as_tensor(op.reference(problem, *(t.double().numpy() for t in given)))
    error = torch.linalg.vector_norm(target.tensor.double() - expected)
    size = torch.linalg.vector_norm(expected)
    ratio = float(error / size) if size > 0 else float(error)
    return ratio if ratio == ratio else float("inf")


def sabotaged(kernel: Kernel, header: str, honest: str, broken: str, folder: Path) -> CpuEngine:
    """An engine whose `kernel` was compiled in `folder` with one line of a header broken."""
    op = get_op(kernel.op)
    copies = [
        shutil.copytree(where / "include", folder / str(at))
        for at, where in enumerate((engine_module.HERE, op.folder))
    ]
    (file,) = (found for copy in copies for found in copy.rglob(header))
    text = file.read_text()
    assert text.count(honest) == 1
    file.write_text(text.replace(honest, broken))
    unit = Unit(
        source=op.module("cpu").source(kernel),
        flags=engine_module.ISA_FLAGS[kernel.isa],  # type: ignore[attr-defined]
        include_dirs=tuple(copies),
    )
    (made,) = compile_units([unit])
    assert made.library is not None, made.log
    engine = CpuEngine(threads=1)
    engine._load(kernel, made.library)
    return engine
