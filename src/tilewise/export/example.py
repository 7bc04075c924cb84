"""The example of a library: a problem that it serves, and what its result must be."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from tilewise.core.dtypes import dtype as element
from tilewise.core.problem import Problem
from tilewise.core.source import identifier, number, word
from tilewise.errors import InputError
from tilewise.export.cases import Case, examples, size_fields
from tilewise.export.front import DTYPE_FIELDS, enum_name
from tilewise.export.rules import OpExport

_ONES = {"fp32": 0x3F800000, "tf32": 0x3F800000, "fp16": 0x3C00, "bf16": 0x3F80, "int8": 1}
_ONES |= {"fp8": 0x38, "bf8": 0x3C, "int32": 1}
LEAST_BYTES, MOST_BYTES = 1 << 14, 1 << 24
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
    case, problem, expected = _problem(export)
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
        "EXPECTED": hex(_bits(expected, stored)),
        "ELEMENTS": ", ".join(f"size_t({prod(shape)})" for shape in operands),
        "OUT_ELEMENTS": f"size_t({prod(result)})",
        "TENSORS": names,
        **(CUDA if export.arch.vendor == "nvidia" else HIP),
    }


def _problem(export: OpExport) -> tuple[Case, Problem, float]:
    """A small problem of the library whose result is the same everywhere."""
    for case, problem in _candidates(export):
        if not LEAST_BYTES <= problem.bytes <= MOST_BYTES or problem.is_empty:
            continue
        if all(export.op.why_unusable(k, problem, export.arch) for k in export.kernels):
            continue
        ones = [np.ones(shape) for shape in export.op.shapes(problem)[:-1]]
        result = export.op.reference(problem, *ones)
        value = float(result.flat[0])
        if result.min() == result.max() and _is_held(value, problem.out_dtype):
            return case, problem, value
    raise InputError("none of the problems that were tried makes an example; widen --where")


def _candidates(export: OpExport) -> Iterator[tuple[Case, Problem]]:
    for case in export.cases:
        seen = examples(case, export.where)
        for at in range(seen.count):
            yield case, case.at({name: int(v[at]) for name, v in seen.fields.items()})


def _fields(export: OpExport, case: Case, problem: Problem) -> Iterator[str]:
    for name, text in case.words.items():
        kind = (
            "tilewise::Dtype" if name in DTYPE_FIELDS else f"decltype(problem)::{enum_name(name)}"
        )
        yield f"problem.{identifier(name)} = {kind}::{word(text)};"
    sizes: dict[str, Any] = {name: getattr(problem, name) for name in size_fields(export.op)}
    for name, size in sizes.items():
        yield f"problem.{identifier(name)} = {number(size)};"


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
