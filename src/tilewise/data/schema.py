"""The columns of a store, and measurements as Arrow tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from functools import cache
from typing import Any

from tilewise.core.faults import DOUBTFUL, SIGNS
from tilewise.core.measurement import Measurement
from tilewise.data.derived import complete
from tilewise.errors import StoreError

SCHEMA_VERSION = 2
"""1 had every column; since 2 those that follow from others may be left out."""
_VERSION_KEY = b"tilewise_schema"
RANKING = ("key", "attempt", "status", "time_us", "message")
"""The columns that decide which row of a key holds."""


@cache
def arrow_schema() -> Any:
    """One nullable column per field of a measurement, under the version of the schema."""
    import pyarrow as pa

    types = {"str": pa.string(), "int": pa.int64(), "float": pa.float64()}
    columns = [(f.name, types[str(f.type).removesuffix(" | None")]) for f in fields(Measurement)]
    return pa.schema(columns, metadata={_VERSION_KEY: str(SCHEMA_VERSION).encode()})


def to_table(rows: Sequence[Measurement]) -> Any:
    """Measurements as a table."""
    import pyarrow as pa

    schema = arrow_schema()
    columns = [[getattr(row, name) for row in rows] for name in schema.names]
    arrays = [pa.array(c, type=t) for c, t in zip(columns, schema.types, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def from_table(table: Any) -> Iterator[Measurement]:
    """The measurements of a table with every column."""
    for batch in table.to_batches(max_chunksize=4096):
        for values in batch.to_pylist():
            yield Measurement(**values)


class SchemaError(StoreError):
    """A whole file, but not one of measurements that this version reads."""


def check_schema(schema: Any, where: str) -> None:
    """Raises unless a shard's schema is one that this version reads."""
    found = (schema.metadata or {}).get(_VERSION_KEY)
    if found is None:
        raise SchemaError(f"{where} holds no tilewise measurements; import it with `data import`")
    if not found.isdigit() or not int(found):
        raise SchemaError(f"{where} has schema {found!r}; it must be a number from 1")
    if int(found) > SCHEMA_VERSION:
        raise SchemaError(
            f"{where} has schema {int(found)}; this version reads up to {SCHEMA_VERSION}. "
            "Update tilewise"
        )


def verdicts(table: Any) -> Any:
    """`Measurement.is_verdict` of every row, as a NumPy mask."""
    import pyarrow.compute as pc

    status = table.column("status")
    is_right = pc.and_(pc.equal(status, "ok"), pc.is_valid(table.column("time_us")))
    return pc.or_(is_right, pc.equal(status, "wrong_result")).to_numpy()


def faults(table: Any) -> Any:
    """`Measurement.is_fault` of every row, as a NumPy mask."""
    import pyarrow as pa
    import pyarrow.compute as pc

    is_doubtful = pc.is_in(table.column("status"), pa.array(DOUBTFUL))
    has_sign = pc.match_substring_regex(table.column("message"), SIGNS)
    return pc.and_(is_doubtful, has_sign).to_numpy()


def holding(table: Any) -> Any:
    """The one row of each key that holds, by `Measurement.rank`; needs the columns RANKING.

    Rows that tell of the machine in place of the kernel hold nothing.
    """
    import numpy as np
    import pyarrow.compute as pc

    table = table.filter(~faults(table)) if len(table) else table
    if not len(table):
        return table
    codes = pc.dictionary_encode(table.column("key").combine_chunks()).indices.to_numpy()
    # Stable, so that of equal attempts (a merge of hand-made shards) the last one read holds.
    order = np.lexsort((table.column("attempt").to_numpy(), verdicts(table), codes))
    last = np.append(codes[order][1:] != codes[order][:-1], True)
    return table.take(np.sort(order[last]))


_DEFAULTS = {f.name: f.default for f in fields(Measurement) if f.default is not MISSING}
_NEVER_NULL = {f.name for f in fields(Measurement) if "None" not in str(f.type)}


def conform(table: Any, where: str, columns: Sequence[str]) -> Any:
    """The columns with this version's types; raises on values that no measurement has.

    A column that the table lacks follows from others, or is younger than the table and has its
    default in every row.
    """
    import pyarrow as pa

    table = complete(_sound(table, where), columns)
    known = arrow_schema()
    found = []
    for name in columns:
        if name in table.column_names:
            found.append(table.column(name))
        elif len(table) and name in _NEVER_NULL and name not in _DEFAULTS:
            raise StoreError(f"{where} has {len(table)} rows without {name}")
        else:
            value = pa.scalar(_DEFAULTS.get(name), known.field(name).type)
            found.append(pa.repeat(value, len(table)))
    schema = pa.schema([known.field(name) for name in columns], metadata=known.metadata)
    return pa.Table.from_arrays(found, schema=schema)


def _sound(table: Any, where: str) -> Any:
    """The columns that a measurement has, by their types and without gaps where none may be."""
    import pyarrow as pa

    known = arrow_schema()
    fields_there = [known.field(name) for name in table.column_names if name in known.names]
    found = []
    for field in fields_there:
        column = table.column(field.name).cast(field.type)
        column.validate(full=True)  # text that is not UTF-8, above all
        if column.null_count and field.name in _NEVER_NULL:
            raise StoreError(f"{where} has {column.null_count} rows without {field.name}")
        found.append(column)
    return pa.Table.from_arrays(found, schema=pa.schema(fields_there))
