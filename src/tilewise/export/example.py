"""The example of a library: a problem that it serves, and what its result must be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from textwrap import wrap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core.dtypes import dtype as element
from tilewise.core.problem import Problem
from tilewise.core.source import identifier, number, word
from tilewise.errors import InputError
from tilewise.export.cases import Case, size_fields
from tilewise.export.front import DTYPE_FIELDS, enum_name
from tilewise.export.rules import OpExport, examples_of

_ONES = {"fp32": 0x3F800000, "tf32": 0x3F800000, "fp16": 0x3C00, "bf16": 0x3F80, "int8": 1}
_ONES |= {"fp8": 0x38, "bf8": 0x3C, "int32": 1}
LEAST_BYTES, MOST_BYTES, MOST_FLOPS = 1 << 14, 1 << 24, 1 << 28
MOST_RUNS = 96
CUDA = {
    "DRIVER": "libcuda.so.1",
    "ALLOCATE": "cuMemAlloc_v2",
    "TO_DEVICE": "cuMemcpyHtoD_v2",
    "TO_HOST": "cuMemcpyDtoH_v2",
    "FREE": "cuMemFree_v2",
}
HIP = {
    "DRIVER": "libamdhip64.so",
    "ALLOCATE": "hipMalloc",
    "TO_DEVICE": "hipMemcpyHtoD",
    "TO_HOST": "hipMemcpyDtoH",
    "FREE": "hipFree",
}


def example_texts(export: OpExport) -> dict[str, str]:
    """What the example's source has filled in."""
    case, problem, expected = example_problem(export)
    *operands, result = export.op.shapes(problem)
    stored = problem.out_dtype
    names = ", ".join(f"tensors[{at}]" for at in range(len(operands)))
    return {
        "PROBLEM_TYPE": identifier(type(problem).__name__),
        "PROBLEM_FIELDS": "".join(f"  {line}\n" for line in _fields(export, case, problem)),
        "DTYPE": problem.dtype,
        "OUT_DTYPE": stored,
        "ITEM": str(element(problem.dtype).bytes),
        "ONE": hex(_ONES[problem.dtype]),
        "OUT_ITEM": str(element(stored).bytes),
        "EXPECTED": _listed(f"{{{n}, {hex(_bits(value, stored))}}}" for n, value in expected),
        "ELEMENTS": ", ".join(f"size_t({prod(shape)})" for shape in operands),
        "OUT_ELEMENTS": f"size_t({prod(result)})",
        "TENSORS": names,
        **(CUDA if export.arch.vendor == "nvidia" else HIP),
    }


Runs = list[tuple[int, float]]
"""So many elements of a value, one after the other; the whole again and again."""


def example_problem(export: OpExport) -> tuple[Case, Problem, Runs]:
    """A small problem of the library whose result is the same everywhere, or repeats itself."""
    for case, problem in _candidates(export):
        is_small = LEAST_BYTES <= problem.bytes <= MOST_BYTES and problem.flops <= MOST_FLOPS
        if problem.is_empty or not is_small:
            continue
        ones = [np.ones(shape) for shape in export.op.shapes(problem)[:-1]]
        result = export.op.reference(problem, *ones)
        runs = _runs(result.transpose(export.op.storage(problem)[-1].axes))
        if len(runs) <= MOST_RUNS and all(_is_held(v, problem.out_dtype) for _, v in runs):
            return case, problem, runs
    raise InputError("none of the problems that were tried makes an example; widen --where")


def _runs(stored: NDArray[Any]) -> Runs:
    """A result as it lies in memory, the shortest part of it that repeats."""
    flat, period = stored.reshape(-1), 1
    for size in (*stored.shape[::-1], 1):
        if (flat.reshape(-1, period) == flat[:period]).all():
            break
        period *= size
    starts = np.flatnonzero(np.diff(flat[:period], prepend=np.nan))
    counts = np.diff(starts, append=period)
    return [(int(n), float(flat[at])) for n, at in zip(counts, starts, strict=True)]


def _candidates(export: OpExport) -> Iterator[tuple[Case, Problem]]:
    """Problems that some kernel can serve, of those that its launches were followed on."""
    for kernel in export.kernels:
        seen = examples_of(export, export.layers_of(kernel))
        for case, some in zip(export.cases, seen, strict=True):
            for at in range(some.count):
                problem = case.at({name: int(v[at]) for name, v in some.fields.items()})
                if export.op.why_unusable(kernel, problem, export.arch) is None:
                    yield case, problem


def _fields(export: OpExport, case: Case, problem: Problem) -> Iterator[str]:
    for name, text in case.words.items():
        kind = (
            "tilewise::Dtype" if name in DTYPE_FIELDS else f"decltype(problem)::{enum_name(name)}"
        )
        yield f"problem.{identifier(name)} = {kind}::{word(text)};"
    sizes: dict[str, Any] = {name: getattr(problem, name) for name in size_fields(export.op)}
    for name, size in sizes.items():
        yield f"problem.{identifier(name)} = {number(size)};"


def _listed(items: Iterable[str]) -> str:
    return "\n      ".join(wrap(", ".join(items), 96, break_on_hyphens=False))


def _is_held(value: float, dtype: str) -> bool:
    """Whether the type holds a sum of ones exactly."""
    if dtype == "fp16":
        return bool(np.float16(value) == value)
    return value < 2**24 and (dtype != "bf16" or not int(np.float32(value).view("u4")) % 2**16)


def _bits(value: float, dtype: str) -> int:
    """The bits of a value that the type holds exactly."""
    if dtype == "int32":
        return int(value)
    if dtype == "fp16":
        return int(np.float16(value).view(np.uint16))
    whole = int(np.float32(value).view(np.uint32))
    return whole >> 16 if dtype == "bf16" else whole
