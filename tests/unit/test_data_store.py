"""Merging, checking and showing stores."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from typer.testing import CliRunner

from tilewise.cli import data as data_cli
from tilewise.core.arch import load_arch
from tilewise.core.measurement import Measurement, Policy, Setting
from tilewise.data import check as check_module
from tilewise.data.check import check
from tilewise.data.exporting import export_csv
from tilewise.data.forget import forget_faults
from tilewise.data.journal import Journal
from tilewise.data.merge import merge
from tilewise.data.publish import publish
from tilewise.data.schema import to_table
from tilewise.data.show import overview
from tilewise.data.store import Store, write_rows, write_shard
from tilewise.errors import InputError, NoStoreError, StoreError
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.ops.vendor import VendorKernel
from tilewise.sweep.recording import Recording

SETTING = Setting(arch="x86_avx2", device="a CPU", toolchain="numpy 2", policy=Policy())
NUMPY = VendorKernel(op_name="gemm", library="numpy")


def row(m: int, *, setting: Setting = SETTING, **values: object) -> Measurement:
    given = {"status": "ok", "time_us": 10.0, "spread_us": 0.5, "run_id": "a", **values}
    return Measurement.of(GemmProblem(m=m, n=8, k=8), NUMPY, setting, **given)  # type: ignore[arg-type]


def kinds(path: Path) -> set[str]:
    return {finding.kind for finding in check(path).findings}


def test_a_sound_store_is_sound(tmp_path: Path) -> None:
    write_rows(tmp_path, [row(1), row(2, status="timeout", time_us=None, spread_us=None)])
    report = check(tmp_path)
    assert report.is_sound
    assert report.to_dict()["rows"] == 2
    assert report.to_dict()["by_status"]["timeout"] == report.to_dict()["timeout"] == 1


def test_torn_shards_are_found_and_the_rest_is_still_checked(tmp_path: Path) -> None:
    write_rows(tmp_path, [row(1)])
    (shard,) = Store(tmp_path).shards()
    write_rows(tmp_path, [row(2)])
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    report = check(tmp_path)
    assert kinds(tmp_path) == {"torn_shard"}
    assert report.rows == 1


def test_torn_journals_are_found_unless_they_are_being_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run-00000.journal")
    journal.append([row(1)])
    with journal.file.path.open("ab") as file:
        file.write(b"12345678 [{")
    assert check(tmp_path).is_sound  # the writer may be in the middle of it
    journal.file.close()
    assert kinds(tmp_path) == {"torn_journal"}
    assert check(tmp_path).rows == 1


def test_damaged_journals_are_found_before_and_after_folding(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run-00000.journal")
    for m in (1, 2):
        journal.append([row(m)])
    journal.file.close()
    data = journal.file.path.read_bytes()
    journal.file.path.write_bytes(data.replace(b'"status":"ok"', b'"status":"ko"', 1))
    assert kinds(tmp_path) == {"damaged_journal"}
    Store(tmp_path).recover()
    assert kinds(tmp_path) == {"damaged_journal"}
    assert check(tmp_path).rows == 1


@pytest.mark.parametrize("column", ["attempt", "status", "policy"])
def test_rows_without_a_needed_value_are_found(tmp_path: Path, column: str) -> None:
    write_rows(tmp_path, [replace(row(1), **{column: None})])  # type: ignore[arg-type]
    write_rows(tmp_path, [row(2)])
    report = check(tmp_path)
    assert kinds(tmp_path) == {"torn_shard"}
    assert f"rows without {column}" in report.findings[0].what
    assert report.rows == 1


def test_peaks_are_those_of_the_device_that_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine's own for its own rows, else the architecture's largest product's."""
    listed = load_arch("x86_avx2")
    live = listed.with_figures(device="mine", compute_units=2)
    monkeypatch.setattr(check_module, "detect", lambda kind: live)
    check_module._peak.cache_clear()
    for device, expected in (("mine", {"impossible"}), ("another", set())):
        setting = Setting(arch=live.name, device=device, toolchain="numpy 2", policy=Policy())
        at_peak = 128 / listed.peak_tflops["fp32"] * 1e-6
        fast = row(1, setting=setting, time_us=at_peak, spread_us=0.0)
        write_rows(tmp_path / device, [fast])
        assert kinds(tmp_path / device) == expected
    check_module._peak.cache_clear()


def test_duplicates_are_found(tmp_path: Path) -> None:
    write_rows(tmp_path, [row(1)])
    write_rows(tmp_path, [row(1, time_us=11.0)])
    assert kinds(tmp_path) == {"duplicate"}


@pytest.mark.parametrize(
    "changes",
    [
        {"time_us": -1.0},
        {"time_us": float("nan")},
        {"time_us": None},
        {"tflops": 1e6},
        {"tflops": -2.0},
        {"spread_us": -0.1},
        {"status": "fine"},
        {"stage": "second"},
        {"attempt": -1},
        {"device": "another"},
        {"rel_error": float("inf")},
        {"repeats": -1},
        {"min_us": 11.0},
        {"min_us": 1e-310},
    ],
)
def test_impossible_numbers_are_found(tmp_path: Path, changes: dict[str, object]) -> None:
    write_rows(tmp_path, [replace(row(1), **changes)])  # type: ignore[arg-type]
    assert kinds(tmp_path) == {"impossible"}


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"problem": "{"}, "invalid_json"),
        ({"policy": "[]"}, "invalid_json"),
        ({"kernel_fields": "no"}, "invalid_json"),
        ({"labels": "{'a': 1}"}, "invalid_json"),
        ({"tactic": "{x"}, "invalid_json"),
        ({"dtype": "bf16"}, "wrong_dtype"),
        ({"problem": row(2).problem}, "wrong_key"),
        ({"kernel_fields": '{"engine": "vendor"}'}, "wrong_key"),
        ({"policy": '{"seed": 1}'}, "wrong_key"),
        ({"tflops": 1e-5}, "wrong_rate"),
        ({"gb_s": 0.0}, "wrong_rate"),
        ({"op": "gem"}, "unknown_op"),
        ({"arch": "z80"}, "unknown_arch"),
    ],
)
def test_rows_that_contradict_themselves_are_found(
    tmp_path: Path, changes: dict[str, object], kind: str
) -> None:
    write_rows(tmp_path, [replace(row(1), **changes)])  # type: ignore[arg-type]
    assert kinds(tmp_path) == {kind}
    assert check(tmp_path).counts[kind] == 1


@pytest.mark.parametrize("mark", [b"99", b"new", b"-1", b"0"])
def test_unknown_schemas_are_told_apart_from_torn_shards(tmp_path: Path, mark: bytes) -> None:
    table = to_table([row(1)]).replace_schema_metadata({b"tilewise_schema": mark})
    write_shard(tmp_path / "a-00000.parquet", table)
    assert kinds(tmp_path) == {"unknown_schema"}
    with pytest.raises(StoreError, match="has schema"):
        overview(tmp_path)


@pytest.mark.parametrize("column", ["problem", "labels"])
def test_rows_without_json_are_not_exported(tmp_path: Path, column: str) -> None:
    broken: dict[str, Any] = {column: "{"}
    write_rows(tmp_path / "store", [replace(row(1), **broken)])
    with pytest.raises(StoreError, match="data check"):
        export_csv(tmp_path / "store", tmp_path / "out.csv")


@pytest.mark.parametrize(
    "broken",
    [
        *({name: "{x"} for name in ("problem", "kernel_fields", "labels", "policy", "tactic")),
        *({"time_us": value} for value in (None, 0.0, -1.0, float("nan"), float("inf"))),
    ],
)
def test_damaged_rows_are_neither_merged_nor_replayed(
    tmp_path: Path, broken: dict[str, Any]
) -> None:
    damaged = replace(row(1), **broken)
    write_rows(tmp_path / "damaged", [damaged])
    write_rows(tmp_path / "sound", [row(2)])
    with pytest.raises(StoreError, match=f"row {damaged.key[:16]}.*Nothing was merged"):
        merge(tmp_path / "both", [tmp_path / "sound", tmp_path / "damaged"])
    assert not (tmp_path / "both").exists()
    with pytest.raises(InputError, match=f"row {damaged.key[:16]}"):
        Recording.load(tmp_path / "damaged")


def test_a_folder_without_measurements_is_no_store(tmp_path: Path) -> None:
    shown = CliRunner().invoke(data_cli.app, ["check", str(tmp_path)])
    assert isinstance(shown.exception, NoStoreError)


def test_findings_do_not_wrap(tmp_path: Path) -> None:
    write_rows(tmp_path, [row(1, attempt=-1)])
    shown = CliRunner().invoke(data_cli.app, ["check", str(tmp_path)])
    assert shown.exit_code == 1
    assert len(shown.stdout.splitlines()) == 2


def test_mixed_policies_are_found(tmp_path: Path) -> None:
    """Where something else is timed; how often it is read may differ, and the number of threads."""
    where = {"arch": "x86_avx2", "device": "a CPU", "toolchain": "numpy 2"}
    longer = Setting(**where, policy=Policy(time_ms=9.0, seed=1))
    wider = Setting(**where, policy=Policy(threads=2))
    write_rows(tmp_path, [row(1), row(2, setting=longer), row(4, setting=wider)])
    assert kinds(tmp_path) == set()
    cold = Setting(**where, policy=Policy(cache="cold"))
    write_rows(tmp_path, [row(3, setting=cold)])
    assert kinds(tmp_path) == {"mixed_policies"}


def test_merging_is_a_union_and_repeatable(tmp_path: Path) -> None:
    one, two, both = tmp_path / "one", tmp_path / "two", tmp_path / "both"
    write_rows(one, [row(1), row(2)])
    write_rows(two, [row(2), row(3, run_id="b")])
    merged = merge(both, [one, two])
    assert (merged.rows, merged.added, merged.known, merged.conflicts) == (3, 3, 1, [])
    again = merge(both, [two, one])
    assert (again.rows, again.added, again.known) == (3, 0, 4)
    assert check(both).is_sound


def test_repeated_measurements_are_kept_and_conflicts_reported(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    write_rows(one, [row(1), row(2), row(3)])
    write_rows(
        two,
        [
            row(1, run_id="b", time_us=10.2),
            row(2, run_id="b", time_us=30.0),
            row(3, run_id="b", status="crash", time_us=None, spread_us=None),
        ],
    )
    merged = merge(one, [two])
    assert (merged.rows, merged.repeated) == (6, 3)
    assert ["30 us" in c.what or "crash" in c.what for c in merged.conflicts] == [True, True]
    assert check(one).is_sound
    assert {r.attempt for r in Store(one).measurements(latest=False)} == {0, 1}


def test_a_good_reading_outlives_a_later_failure(tmp_path: Path) -> None:
    one, two, both = tmp_path / "one", tmp_path / "two", tmp_path / "both"
    write_rows(one, [row(1)])
    write_rows(two, [row(1, run_id="b", status="crash", time_us=None, spread_us=None)])
    for order in ([one, two], [two, one]):
        merge(both, order)
        assert [r.status for r in Store(both).measurements()] == ["ok"]
        assert overview(both).by_status["ok"] == 1
        assert len(list(Store(both).measurements(latest=False))) == 2


def test_the_order_of_merged_stores_does_not_matter(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    write_rows(old, [row(1, measured_at=1.0), row(1, measured_at=5.0, attempt=1, time_us=11.0)])
    write_rows(new, [row(1, run_id="0", measured_at=9.0, time_us=12.0)])
    found = []
    for name, order in (("a", [old, new]), ("b", [new, old])):
        merge(tmp_path / name, order)
        rows = sorted(Store(tmp_path / name).measurements(latest=False), key=lambda r: r.attempt)
        assert [r.time_us for r in rows] == [10.0, 11.0, 12.0]
        assert [r.time_us for r in Store(tmp_path / name).measurements()] == [12.0]
        found.append(rows)
    assert found[0] == found[1]
    assert check(tmp_path / "b").is_sound


RUNS = st.lists(
    st.lists(
        st.tuples(
            st.integers(1, 2),  # the problem
            st.integers(0, 4),  # when
            st.sampled_from([("ok", 10.0), ("ok", 30.0), ("crash", None), ("wrong_result", 5.0)]),
        ),
        max_size=4,
    ),
    min_size=3,
    max_size=3,
)


@settings(max_examples=40, deadline=None)
@given(RUNS, st.permutations(range(3)))
def test_the_union_does_not_depend_on_order_or_grouping(
    runs: list[list[tuple[int, int, tuple[str, float | None]]]], order: list[int]
) -> None:
    """(a + b) + c, a + (b + c), all at once, and in any order."""
    with TemporaryDirectory() as folder:
        stores = [Path(folder) / f"run{at}" for at in range(3)]
        for at, (store, found) in enumerate(zip(stores, runs, strict=True)):
            attempts: Counter[int] = Counter()
            rows = []
            for m, when, (status, us) in sorted(found, key=lambda r: r[1]):
                values = {"status": status, "time_us": us, "attempt": attempts[m]}
                rows.append(row(m, run_id=f"{at}", measured_at=float(when), **values))
                attempts[m] += 1
            write_rows(store, rows)
        a, b, c = (stores[at] for at in order)
        together, left, right, pair = (Path(folder) / name for name in "tlrp")
        merge(together, stores)
        merge(left, [a, b])
        merge(left, [c])
        merge(pair, [b, c])
        merge(right, [pair, a, b])
        assert kept(together) == kept(left) == kept(right)
        assert all(merge(left, [s]).added == 0 for s in (a, b, c, right))
        assert kept(left) == kept(together)
        assert "duplicate" not in {finding.kind for finding in check(left).findings}


def kept(store: Path) -> tuple[set[Measurement], set[Measurement]]:
    """All rows of a store, and those that hold."""
    found = Store(store)
    return set(found.measurements(latest=False)), set(found.measurements())


def test_an_older_row_does_not_replace_the_verdict_of_a_newer_one(tmp_path: Path) -> None:
    for name, when in (("a", 1.0), ("b", 3.0), ("c", 2.0)):
        write_rows(tmp_path / name, [row(1, run_id=name, measured_at=when, time_us=when)])
    merge(tmp_path / "all", [tmp_path / "a", tmp_path / "b"])
    merged = merge(tmp_path / "all", [tmp_path / "c"])
    assert (merged.rows, merged.added, merged.repeated) == (3, 1, 1)
    assert [r.time_us for r in Store(tmp_path / "all").measurements()] == [3.0]


def test_a_row_that_a_sweep_is_writing_is_not_renumbered(tmp_path: Path) -> None:
    store, old = tmp_path / "store", tmp_path / "old"
    store.mkdir()
    journal = Journal(store / "run-00000.journal")
    journal.append([row(1, measured_at=2.0)])
    write_rows(tmp_path / "other", [row(2)])
    write_rows(old, [row(1, run_id="old", measured_at=1.0)])
    assert merge(store, [tmp_path / "other"]).rows == 2
    with pytest.raises(InputError, match="merge when it has ended"):
        merge(store, [old])
    assert len(list(Store(store).measurements(latest=False))) == 2
    journal.file.remove()


def test_a_journal_that_is_folded_meanwhile_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, old, journals = tmp_path / "store", tmp_path / "old", Store.journals
    write_rows(old, [row(1, run_id="old", measured_at=1.0)])
    writer = Store(store, create=True).writer()
    writer.append([row(1, measured_at=2.0)])

    asked = []

    def folded(home: Store) -> list[Path]:
        """The sweep ends right after its journal was seen by the merge itself."""
        found = journals(home)
        if home.path == store:
            asked.append(found)
        if len(asked) == 2:
            writer.close()
        return found

    monkeypatch.setattr(Store, "journals", folded)
    assert merge(store, [old]).rows == 2
    attempts = sorted(r.attempt for r in Store(store).measurements(latest=False))
    assert attempts == [0, 1]


def test_shards_are_written_anew_by_one_process_at_a_time(tmp_path: Path) -> None:
    """Two merges of one store would add its rows twice."""
    write_rows(tmp_path / "one", [row(1)])
    refused = []

    def meanwhile(what: str) -> None:
        if "in order" in what:
            for other in (
                lambda: merge(tmp_path / "both", [tmp_path / "one"]),
                lambda: forget_faults(tmp_path / "both"),
            ):
                with pytest.raises(StoreError, match="run again when it has ended"):
                    other()
                refused.append(other)

    merge(tmp_path / "both", [tmp_path / "one"], meanwhile)
    assert len(refused) == 2
    assert len(list(Store(tmp_path / "both").measurements(latest=False))) == 1
    assert merge(tmp_path / "both", [tmp_path / "one"]).added == 0


def test_a_refused_merge_leaves_no_store_behind(tmp_path: Path) -> None:
    write_rows(tmp_path / "torn", [row(1)])
    (shard,) = Store(tmp_path / "torn").shards()
    shard.write_bytes(b"PAR1")
    with pytest.raises(StoreError, match="cannot be read"):
        merge(tmp_path / "target", [tmp_path / "torn"])
    assert not (tmp_path / "target").exists()


def test_a_store_is_not_merged_into_itself(tmp_path: Path) -> None:
    write_rows(tmp_path, [row(1)])
    with pytest.raises(InputError, match="itself"):
        merge(tmp_path, [tmp_path])


def test_the_overview_counts_keys_once(tmp_path: Path) -> None:
    torch = VendorKernel(op_name="gemm", library="torch")
    faster = Measurement.of(
        *(GemmProblem(m=1, n=8, k=8), torch, SETTING), status="ok", time_us=5.0, spread_us=0.1
    )
    leader = replace(row(2), attempt=1, stage="leader", time_us=12.0)
    write_rows(tmp_path, [row(1), row(2), leader, faster, row(3, status="crash", time_us=None)])
    found = overview(tmp_path)
    assert (found.rows, found.attempts) == (4, 5)
    assert found.by_status["crash"] == 1
    (one,) = found.slices
    assert (one.problems, one.kernels, one.winners, one.vendor_wins) == (3, 2, 2, 1.0)
    assert one.leaders_moved == pytest.approx(0.2)


def test_a_published_store_reads_like_its_source(tmp_path: Path) -> None:
    rows = [row(1), row(2, status="timeout", time_us=None), row(3, stage="leader")]
    source = write_rows(tmp_path / "source", rows)
    done = publish(source.path, tmp_path / "lean")
    assert (done.rows, done.shards) == (3, 1)
    published = Store(tmp_path / "lean")
    assert list(published.measurements()) == rows
    (shard,) = published.shards()
    left = parquet.read_schema(shard).names
    assert not {*left} & {"key", "problem_key", "kernel_key", "policy_key", "tflops", "gb_s"}
    assert check(published.path).is_sound
    assert merge(source.path, [published.path]).added == 0


def test_what_does_not_follow_is_published_as_it_is(tmp_path: Path) -> None:
    """A rate that nobody can derive, or a key of something else, is not lost."""
    odd = [replace(row(1), tflops=7.0), replace(row(2), kernel_fields="no JSON")]
    source = write_rows(tmp_path / "source", odd)
    publish(source.path, tmp_path / "lean")
    assert list(Store(tmp_path / "lean").measurements()) == odd


def test_a_store_is_published_into_a_new_folder(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "source", [row(1)])
    with pytest.raises(InputError, match="already exists"):
        publish(source.path, source.path)


def test_a_lean_shard_of_torn_text_is_refused_by_name(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "source", [row(1)])
    publish(source.path, tmp_path / "lean")
    (shard,) = Store(tmp_path / "lean").shards()
    table = parquet.read_table(shard)
    at = table.column_names.index("problem")
    torn = table.set_column(at, table.schema.field("problem"), [["{"]])
    parquet.write_table(torn, shard)
    with pytest.raises(StoreError, match="not JSON"):
        Store(tmp_path / "lean").table()
    assert dict(check(tmp_path / "lean").counts) == {"torn_shard": 1}
