"""Parquet from outside, as Arrow tables of a bearable size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilewise.core.plain_files import open_plain
from tilewise.errors import FileError

MOST_ROWS = 50_000_000
MOST_BYTES = 8 << 30
"""Of a table in memory: a value that repeats is stored once and unpacked for every row."""
_BATCH = 1 << 15


def read_parquet(source: Path | bytes, choose: Callable[[Any], list[str]] | None = None) -> Any:
    """The table; of the columns that `choose` picks from its schema, where that is given.

    Raises FileError, whose text does not name the file, on anything that is no sound table.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        held = pa.BufferReader(source) if isinstance(source, bytes) else _opened(source)
        with held, pq.ParquetFile(held, page_checksum_verification=True) as file:
            schema = file.schema_arrow
            doubled = {name for name in schema.names if schema.names.count(name) > 1}
            if doubled:
                raise FileError(f"it has the column {min(doubled)} more than once")
            if file.metadata.num_rows > MOST_ROWS:
                raise FileError(f"it has {file.metadata.num_rows:,} rows; {MOST_ROWS:,} are read")
            return _rows(file, choose(schema) if choose else schema.names)
    except FileNotFoundError:
        raise FileError("it is not there") from None
    except FileError:
        raise
    except (OSError, ValueError, TypeError, KeyError, MemoryError, RuntimeError) as error:
        raise FileError(_one_line(error)) from None
    except pa.ArrowException as error:
        raise FileError(_one_line(error)) from None


def _opened(path: Path) -> Any:
    return open(open_plain(path), "rb")  # noqa: PTH123  # `read_parquet` closes it


def _rows(file: Any, columns: list[str]) -> Any:
    """The columns, read piece by piece: what a file unpacks to need not be what it says."""
    import pyarrow as pa

    pieces, size = [], 0
    for batch in file.iter_batches(batch_size=_BATCH, columns=columns):
        size += batch.nbytes
        if size > MOST_BYTES:
            raise FileError(f"it unpacks to more than {MOST_BYTES >> 30} GiB")
        batch.validate(full=True)
        pieces.append(batch)
    schema = file.schema_arrow
    kept = pa.schema([schema.field(name) for name in columns], metadata=schema.metadata)
    return pa.Table.from_batches(pieces, schema=kept)


def _one_line(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())[:300]
