"""Columns that follow from others: published shards leave them out, and reading puts them back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from tilewise.core.identity import digest
from tilewise.core.measurement import row_key
from tilewise.errors import StoreError, TilewiseError
from tilewise.ops.contract import get_op

SOURCES: dict[str, tuple[str, ...]] = {
    "problem_key": ("problem",),
    "kernel_key": ("kernel_fields",),
    "policy_key": ("policy",),
    "key": ("problem", "kernel_fields", "device", "toolchain", "policy"),
    "tflops": ("op", "problem", "time_us"),
    "gb_s": ("op", "problem", "time_us"),
}
"""What each derived column follows from."""

_PARTS = {"problem": "problem", "kernel_fields": "kernel", "policy": "policy"}
"""Texts of a row that have a key -> their name in it."""
_RATES = {"tflops": (0, 1e-6), "gb_s": (1, 1e-3)}


def columns_to_read(columns: Sequence[str], present: Sequence[str]) -> list[str]:
    """What must be read of a shard that holds `present` for `columns` to be had."""
    found: dict[str, None] = {}
    for name in columns:
        sources = (name,) if name in present else SOURCES.get(name, ())
        found.update(dict.fromkeys(source for source in sources if source in present))
    return list(found)


def complete(table: Any, columns: Sequence[str]) -> Any:
    """The table with those of `columns` that follow from others and were left out."""
    for name in columns:
        missing = name in SOURCES and name not in table.column_names
        if missing and all(source in table.column_names for source in SOURCES[name]):
            table = table.append_column(name, derive(table, name))
    return table


def derive(table: Any, name: str) -> Any:
    """One derived column of a table that has what it follows from."""
    if name == "key":
        return _row_keys(table)
    if name in _RATES:
        return _rates(table, *_RATES[name])
    (source,) = SOURCES[name]
    return _by_text(table.column(source), lambda text: part_key(_PARTS[source], text))


def lean(table: Any) -> Any:
    """The table without the columns that follow from the others, where they do, to the bit."""
    metadata = table.schema.metadata
    for name in SOURCES:
        if name not in table.column_names:
            continue
        try:
            same = derive(table, name).equals(table.column(name).combine_chunks())
        except StoreError:  # torn text has no key
            same = False
        if same:
            table = table.drop_columns([name])
    return table.replace_schema_metadata(metadata)


def _by_text(column: Any, key_of: Callable[[str], str]) -> Any:
    """A key for every text of a column; a store repeats few texts."""
    import pyarrow as pa

    texts = column.combine_chunks().dictionary_encode()
    keys = pa.array([key_of(text) for text in texts.dictionary.to_pylist()], pa.string())
    return keys.take(texts.indices)


@lru_cache(maxsize=1 << 17)
def part_key(part: str, text: str) -> str:
    """The key of a problem, kernel or policy by its JSON."""
    try:
        return digest({part: json.loads(text)})
    except (ValueError, RecursionError):
        raise StoreError(f"a {part} is not JSON: {text[:80]!r}") from None


def _row_keys(table: Any) -> Any:
    import pyarrow as pa

    parts = [derive(table, f"{part}_key") for part in ("problem", "kernel", "policy")]
    problem, kernel, policy = (part.to_pylist() for part in parts)
    device, toolchain = (table.column(name).to_pylist() for name in ("device", "toolchain"))
    rows = zip(problem, kernel, device, toolchain, policy, strict=True)
    return pa.array([row_key(*row) for row in rows], pa.string())


def _rates(table: Any, which: int, scale: float) -> Any:
    """Work over time; none where there is no time, or no such problem in this version."""
    import numpy as np
    import pyarrow as pa

    ops = table.column("op").to_pylist()
    texts = table.column("problem").to_pylist()
    work = [_work(op, text)[which] for op, text in zip(ops, texts, strict=True)]
    time_us = table.column("time_us").to_numpy().astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.array(work, np.float64) / time_us * scale
    return pa.array(rate, pa.float64(), mask=~((time_us > 0) & np.isfinite(rate)))


@lru_cache(maxsize=1 << 17)
def _work(op: str, text: str) -> tuple[float, float]:
    """FLOPs and bytes of a problem by its JSON."""
    try:
        problem = get_op(op).problem.from_dict(json.loads(text))
        return float(problem.flops), float(problem.bytes)
    except (TilewiseError, TypeError, ValueError, RecursionError, OverflowError):
        return float("nan"), float("nan")
