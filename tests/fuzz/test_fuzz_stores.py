"""Any shard, journal or foreign log is read or refused."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzzing import fuzz
from hypothesis import strategies as st
from material import ARCH, measurements
from spoiling import Edit, edits, spoils

from tilewise.data.check import check
from tilewise.data.exporting import export_csv
from tilewise.data.forget import forget_faults
from tilewise.data.importing import read_measurements
from tilewise.data.merge import merge
from tilewise.data.publish import publish
from tilewise.data.schema import arrow_schema, to_table
from tilewise.data.show import overview
from tilewise.data.store import Store
from tilewise.errors import TilewiseError
from tilewise.learn.dataset import from_stores
from tilewise.sweep.recording import Recording

Spoil = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stores")


@pytest.fixture(scope="module")
def shard(material: Path) -> bytes:
    (path,) = (material / "store").glob("*.parquet")
    return path.read_bytes()


def fresh(place: Path, name: str, data: bytes) -> Path:
    """A store of one file."""
    store = place / "store"
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir()
    (store / name).write_bytes(data)
    return store


def replayed(store: Path) -> None:
    """All that a recording is asked for before anything runs."""
    found = Recording.load(store)
    assert found.tried == {}
    found.kernels("gemm")


def read_all(store: Path) -> None:
    """Everything that reads a store; each may refuse it."""
    check(store)
    for read in (
        lambda: Store(store).table(),
        lambda: list(Store(store).measurements()),
        lambda: overview(store),
        lambda: from_stores([store], op="gemm", arch=ARCH),
        lambda: export_csv(store, store.parent / "out.csv"),
        lambda: replayed(store),
    ):
        try:
            read()
        except TilewiseError:
            continue


@fuzz(60, spoil=spoils())
def test_shards_spoiled(place: Path, shard: bytes, spoil: Spoil) -> None:
    read_all(fresh(place, "a.parquet", spoil(shard)))


_columns = st.sampled_from([*arrow_schema().names, "extra"])
_arrays = st.sampled_from(
    [
        pa.array([None, None]),
        pa.array([1, -1]),
        pa.array([2**63, 1], pa.uint64()),
        pa.array([float("nan"), float("inf")]),
        pa.array(["x", "{}"]),
        pa.array([b"\xff", b""]),
        pa.array(["[" * 5000, '{"a": 1, "a": 2}']),
        pa.array([[1], []]),
        pa.array([{"a": 1}, None]),
        pa.array([True, False]),
        pa.array([0, 10**15], pa.timestamp("us")),
        pa.array(["ok", "ok"]).dictionary_encode(),
    ]
)


@fuzz(80, swaps=st.lists(st.tuples(_columns, _arrays), min_size=1, max_size=4), drop=_columns)
def test_columns_swapped(place: Path, swaps: list[tuple[str, Any]], drop: str) -> None:
    table = to_table(measurements()[:2])
    for name, array in swaps:
        at = table.column_names.index(name) if name in table.column_names else -1
        table = table.set_column(at, name, array) if at >= 0 else table.append_column(name, array)
    if len(swaps) % 2 and drop in table.column_names:
        table = table.drop_columns([drop])
    table = table.replace_schema_metadata(arrow_schema().metadata)
    out = pa.BufferOutputStream()
    pq.write_table(table, out)
    store = fresh(place, "a.parquet", out.getvalue().to_pybytes())
    read_all(store)
    shutil.rmtree(place / "merged", ignore_errors=True)
    try:
        merge(place / "merged", [store])
    except TilewiseError:
        return


def journal(rows: Any) -> bytes:
    text = json.dumps(rows).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


@fuzz(40, edit=edits(), spoil=spoils())
def test_journals(place: Path, edit: Edit, spoil: Spoil) -> None:
    rows = [row.to_dict() for row in measurements()[:3]]
    spoiled = journal(edit(rows))
    read_all(fresh(place, "r-00000.journal", spoiled))
    read_all(fresh(place, "r-00000.journal", journal(rows) + spoil(journal(rows))))
    Store(place / "store").recover()
    read_all(place / "store")


@fuzz(10, spoil=spoils(), is_whole=st.booleans())
def test_shards_written_anew(place: Path, shard: bytes, spoil: Spoil, is_whole: bool) -> None:
    store = fresh(place, "a.parquet", shard if is_whole else spoil(shard))
    shutil.rmtree(place / "published", ignore_errors=True)
    for write in (lambda: publish(store, place / "published"), lambda: forget_faults(store)):
        try:
            write()
        except TilewiseError:
            continue


@fuzz(80, edit=edits(), spoil=spoils())
def test_foreign_logs(material: Path, place: Path, edit: Edit, spoil: Spoil) -> None:
    rows = (material / "bench.json").read_bytes()
    for data in (json.dumps(edit(json.loads(rows))).encode(), spoil(rows), b"log {" + spoil(rows)):
        (place / "log").write_bytes(data)
        try:
            read_measurements(place / "log", ARCH, op="gemm")
        except TilewiseError:
            continue
