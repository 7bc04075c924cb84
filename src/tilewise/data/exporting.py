"""Export: measurements as CSV with the reference's columns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewise.core.measurement import Measurement, json_object
from tilewise.data.store import Store
from tilewise.errors import FileError, InputError, StoreError
from tilewise.ops.contract import get_op
from tilewise.problems.lines import csv_text, replace_text

_HEAD = ("kernel", "problem_idx")


def export_csv(
    store: str | Path,
    path: str | Path,
    *,
    op: str = "",
    latest: bool = False,
    failures: bool = False,
) -> int:
    """Writes the measurements of one op; returns how many.

    With `latest` only the attempt that holds of each key. Failures, and wrong results
    that no column tells of, are left out unless `failures` asks for them; a column `status`, which
    an import reads, then tells.
    """
    rows = list(Store(store).measurements(latest=latest))
    ops = sorted({row.op for row in rows})
    if op:
        get_op(op)
        rows = [row for row in rows if row.op == op]
    elif len(ops) > 1:
        raise FileError(f"the store {store} holds {', '.join(ops)}; say which op to export")
    _check_json(rows, store)
    if not failures:
        rows = [row for row in rows if row.time_us is not None and _tells_its_status(row)]
    if not rows:
        raise StoreError(f"the store {store} has no {op or 'timed'} rows; it has {ops or 'none'}")
    target = Path(path)
    if target.is_dir():
        raise FileError(f"{target} is a folder; name a .csv file")
    if target.suffix.lower() in (".json", ".jsonl", ".parquet"):
        raise FileError(f"{target} would hold CSV; name a .csv file")
    table = _table(rows)
    problems = get_op(rows[0].op).problems
    columns = [*_HEAD, *problems.columns, *problems.rates]
    columns += ["status"] if failures else []
    columns += [name for name in ("source", "top") if any(name in row for row in table)]
    replace_text(target, csv_text(table, columns))
    return len(table)


def _check_json(rows: Iterable[Measurement], store: str | Path) -> None:
    for text in {text for row in rows for text in (row.problem, row.labels)}:
        try:
            json_object(text, "problem or labels")
        except InputError as error:
            raise StoreError(f"{store}: {error}") from None


def _tells_its_status(row: Measurement) -> bool:
    """Whether the reference's columns say what became of a timed row."""
    tells = "non_zero" in get_op(row.op).problems.rates
    return row.is_ok or (tells and "non_zero" in json.loads(row.labels))


def _table(rows: Sequence[Measurement]) -> list[Mapping[str, Any]]:
    numbers = _numbers(rows)
    return [
        {
            "problem_idx": numbers[row.problem_key],
            **json.loads(row.labels),
            **json.loads(row.problem),
            "kernel": row.kernel,
            "status": row.status,
            "latency_ms": "" if row.time_us is None else float(f"{row.time_us / 1e3:.15g}"),
            "tflops": "" if row.tflops is None else row.tflops,
            "bandwidth_gb_s": "" if row.gb_s is None else row.gb_s,
        }
        for row in rows
    ]


def _numbers(rows: Iterable[Measurement]) -> dict[str, int]:
    """A number for each problem, in the order first seen."""
    return {key: at for at, key in enumerate(dict.fromkeys(row.problem_key for row in rows))}
