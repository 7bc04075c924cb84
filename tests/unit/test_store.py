"""The store: what is written is read back whole, whatever happens in between."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

import tilewise
from tilewise.core.arch import load_arch
from tilewise.core.identity import digest
from tilewise.core.measurement import (
    POLICIES,
    STATUSES,
    Measurement,
    Policy,
    Setting,
    parse_policy,
)
from tilewise.data import store as store_module
from tilewise.data.journal import Journal, read_journal
from tilewise.data.schema import to_table
from tilewise.data.store import Store, read_shard, write_rows
from tilewise.errors import InputError, NoStoreError, StoreError
from tilewise.judge.verdicts import _held
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.ops.vendor import VendorKernel
from tilewise.sweep.device_info import DeviceInfo
from tilewise.sweep.known import Known
from tilewise.sweep.plan import leaders, make_plan

SETTING = Setting(arch="x86_avx2", device="a CPU", toolchain="g++ 12", policy=Policy())
KERNEL = VendorKernel(op_name="gemm", library="numpy")


def row(m: int, **values: object) -> Measurement:
    given = {"status": "ok", "time_us": 10.0, "spread_us": 0.5, "repeats": 7, **values}
    return Measurement.of(GemmProblem(m=m, n=8, k=8), KERNEL, SETTING, **given)  # type: ignore[arg-type]


def stored(path: Path) -> set[tuple[str, int]]:
    return {r.identity for r in Store(path).measurements(latest=False)}


def test_rows_come_back_equal(tmp_path: Path) -> None:
    rows = [row(1), row(2, status="crash", message="gone", time_us=None, spread_us=None)]
    with Store(tmp_path, create=True).writer() as writer:
        writer.append(rows)
        assert list(Store(tmp_path).measurements()) == rows  # before the shard is there
    assert list(Store(tmp_path).measurements()) == rows
    assert not Store(tmp_path).journals()


def test_rates_follow_from_the_time() -> None:
    measured = row(1024)
    assert measured.tflops == pytest.approx(2 * 1024 * 8 * 8 / 10e-6 * 1e-12)
    assert measured.gb_s == pytest.approx((1024 * 8 + 64 + 1024 * 8) * 4 / 10e-6 * 1e-9)


def test_the_key_covers_problem_kernel_device_toolchain_and_policy() -> None:
    base = row(1)
    others = [
        row(2),
        Measurement.of(
            GemmProblem(m=1, n=8, k=8),
            VendorKernel(op_name="gemm", library="torch"),
            SETTING,
            status="ok",
        ),
        *(
            Measurement.of(GemmProblem(m=1, n=8, k=8), KERNEL, changed, status="ok")
            for changed in (
                Setting(arch="x86_avx2", device="b", toolchain="g++ 12", policy=Policy()),
                Setting(arch="x86_avx2", device="a CPU", toolchain="g++ 13", policy=Policy()),
                Setting(arch="x86_avx2", device="a CPU", toolchain="g++ 12", policy=Policy(seed=1)),
            )
        ),
    ]
    assert len({base.key, *(other.key for other in others)}) == 6


@pytest.mark.parametrize("name", ["a CPU", 'an "Über" CPU\\ @ 2 GHz', ""])
def test_row_keys_are_digests_of_the_five_by_name(name: str) -> None:
    setting = Setting(arch="x86_avx2", device=name, toolchain=f"{name} 12", policy=Policy(seed=3))
    five = {"problem": "12ab", "kernel": "34cd", "device": name, "toolchain": f"{name} 12"}
    assert setting.key("12ab", "34cd") == digest({**five, "policy": setting.policy_key})


def test_the_last_verdict_holds_else_the_last_row(tmp_path: Path) -> None:
    failed = {"time_us": None, "spread_us": None}
    write_rows(tmp_path, [row(1, attempt=1, time_us=5.0), row(2), row(3, status="crash", **failed)])
    write_rows(tmp_path, [row(1, attempt=0), row(1, attempt=2, status="timeout", **failed)])
    write_rows(tmp_path, [row(2, attempt=1, status="wrong_result")])
    write_rows(tmp_path, [row(3, attempt=1, status="timeout", **failed)])
    held = {r.problem_key: (r.status, r.time_us) for r in Store(tmp_path).measurements()}
    assert held == {
        row(1).problem_key: ("ok", 5.0),
        row(2).problem_key: ("wrong_result", 10.0),
        row(3).problem_key: ("timeout", None),
    }
    assert held == {
        problem: max((r.rank, (r.status, r.time_us)) for r in rows)[1]
        for problem, rows in by_problem(tmp_path).items()
    }
    assert len(stored(tmp_path)) == 7
    known = Known([Store(tmp_path)], [SETTING], give_up_after=0)
    found = known.look_up([row(m).key for m in (1, 2, 3)])
    assert [r.status for r in found if r] == ["ok", "wrong_result", "timeout"]


WRONG = row(1, status="wrong_result", time_us=None)


@pytest.mark.parametrize(
    ("rows", "held"),
    [
        ([row(1), row(1, attempt=1, time_us=None)], "ok"),
        ([WRONG, row(1, attempt=1, time_us=None)], "wrong_result"),
        ([row(1, time_us=None), row(1, attempt=1, status="crash", time_us=None)], "crash"),
        ([row(1), row(1, attempt=1, status="wrong_result", time_us=None)], "wrong_result"),
    ],
)
def test_all_agree_on_the_row_that_holds(
    tmp_path: Path, rows: list[Measurement], held: str
) -> None:
    """The rank, the store, what a sweep knows from it, what it learns and who judges."""
    write_rows(tmp_path, rows)
    (stored_row,) = Store(tmp_path).measurements()
    (known,) = Known([Store(tmp_path)], [SETTING], give_up_after=0).look_up([rows[0].key])
    learning = Known([Store(tmp_path / "new", create=True)], [SETTING], give_up_after=0)
    for each in rows:
        learning.learn(each, keep=True)
    (learned,) = learning.look_up([rows[0].key])
    assert known is not None and learned is not None
    assert known.is_good == learned.is_good == (held == "ok")
    judged = _held(reversed(rows))[KERNEL.name]
    by_rank = max(rows, key=lambda r: r.rank)
    assert {r.status for r in (stored_row, known, learned, judged, by_rank)} == {held}
    assert stored_row == judged == by_rank


def test_a_wrong_result_after_a_right_one_is_known_to_be_bad(tmp_path: Path) -> None:
    wrong = row(1, attempt=1, status="wrong_result", time_us=None, spread_us=None)
    write_rows(tmp_path, [row(1), wrong, row(2), row(2, attempt=1, status="crash", time_us=None)])
    known = Known([Store(tmp_path)], [SETTING], give_up_after=0)
    assert known.has_failed(wrong.problem_key, wrong.kernel_key)
    assert not known.has_failed(row(2).problem_key, KERNEL.key)
    arch = replace(load_arch("x86_avx2"), device=SETTING.device)
    device = DeviceInfo(
        arch=arch, toolchains={"vendor": {"gemm": SETTING.toolchain}}, unavailable={}
    )
    problems = [GemmProblem(m=m, n=8, k=8) for m in (1, 2)]
    plan = make_plan(problems, [KERNEL], device, SETTING.policy, why_unusable=lambda *_: None)
    assert [dict(plan.work(at, known).task.prior) for at in (0, 1)] == [{}, {0: (10.0, 0.5)}]


def by_problem(path: Path) -> dict[str, list[Measurement]]:
    found: dict[str, list[Measurement]] = {}
    for each in Store(path).measurements(latest=False):
        found.setdefault(each.problem_key, []).append(each)
    return found


@pytest.mark.parametrize("cut", [1, 5, 40, 200])
def test_a_torn_tail_is_dropped_and_the_rest_kept(tmp_path: Path, cut: int) -> None:
    journal = Journal(tmp_path / "run-00000.journal")
    for m in (1, 2, 3):
        journal.append([row(m)])
    journal.file.close()
    data = journal.file.path.read_bytes()
    journal.file.path.write_bytes(data[:-cut])
    contents = read_journal(journal.file.path)
    assert [r.problem_key for r in contents.rows] == [row(m).problem_key for m in (1, 2)]
    assert contents.torn_bytes > 0
    Store(tmp_path).recover()
    assert stored(tmp_path) == {row(1).identity, row(2).identity}


@pytest.mark.parametrize("spoilt", ["changed", "binary", "not_a_list"])
def test_a_damaged_line_costs_itself_and_is_set_aside(tmp_path: Path, spoilt: str) -> None:
    journal = Journal(tmp_path / "run-00000.journal")
    for m in (1, 2, 3):
        journal.append([row(m)])
    journal.file.close()
    lines = journal.file.path.read_bytes().splitlines(keepends=True)
    lines[1] = {
        "changed": lines[1].replace(b'"status":"ok"', b'"status":"no"'),
        "binary": b"\0\xff" * 40 + b"\n",
        "not_a_list": b"%08x [3]\n" % zlib.crc32(b"[3]"),
    }[spoilt]
    journal.file.path.write_bytes(b"".join(lines))
    kept = {row(1).identity, row(3).identity}
    assert stored(tmp_path) == kept
    assert read_journal(journal.file.path).damaged == lines[1]
    Store(tmp_path).recover()
    assert stored(tmp_path) == kept
    (aside,) = Store(tmp_path).damaged()
    assert (aside.name, aside.read_bytes()) == ("run-00000.damaged", lines[1])
    Store(tmp_path).recover()
    assert stored(tmp_path) == kept


def test_an_append_of_several_rows_is_all_or_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run-00000.journal")
    journal.append([row(1)])
    journal.append([row(2), row(3)])
    journal.file.close()
    whole = journal.file.path.read_bytes()
    start = whole.index(b"\n") + 1
    for end in range(start, len(whole), 97):
        journal.file.path.write_bytes(whole[:end])
        assert len(read_journal(journal.file.path).rows) == 1
    journal.file.path.write_bytes(whole)
    assert len(read_journal(journal.file.path).rows) == 3


def test_a_shard_supersedes_its_journal(tmp_path: Path) -> None:
    """Death between the rename of a shard and the removal of its journal."""
    journal = Journal(tmp_path / "run-00000.journal")
    journal.append([row(1)])
    store_module.write_shard(tmp_path / "run-00000.parquet", store_module.to_table([row(1)]))
    assert len(list(Store(tmp_path).measurements(latest=False))) == 1
    journal.file.close()
    assert Store(tmp_path).recover() == 1
    assert not Store(tmp_path).journals()
    assert len(list(Store(tmp_path).measurements(latest=False))) == 1


def test_a_living_journal_is_left_alone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.writer("living") as writer:
        writer.append([row(1)])
        with store.writer("other") as other:
            other.append([row(2)])
        assert [p.stem for p in store.journals()] == ["living-00000"]
        writer.append([row(3)])
    assert stored(tmp_path) == {row(m).identity for m in (1, 2, 3)}


def test_shards_are_rolled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "ROWS_PER_SHARD", 10)
    with Store(tmp_path).writer("run") as writer:
        for m in range(35):
            writer.append([row(m)])
        assert len(Store(tmp_path).shards()) == 3
        assert len(stored(tmp_path)) == 35
    assert len(Store(tmp_path).shards()) == 4


def test_a_full_disk_is_told_and_loses_nothing(tmp_path: Path) -> None:
    """A file size limit stands in for the end of the disk: writes fail half way in both cases."""
    code = f"""
import resource, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from tilewise.errors import StoreError
from tilewise.data.store import Store, write_rows
import test_store as t
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with Store({str(tmp_path)!r}).writer("run") as writer:
    writer.append([t.row(1)])
    resource.setrlimit(resource.RLIMIT_FSIZE, (2500, resource.RLIM_INFINITY))
    try:
        for m in range(2, 50):
            writer.append([t.row(m)])
    except StoreError as error:
        print(m, "told:", error)
    try:
        write_rows({str(tmp_path)!r}, [t.row(m) for m in range(100, 400)])
    except StoreError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    writer.append([t.row(99)])
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(tilewise.__file__).parent.parent)}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    failed, _, message = ended.stdout.partition(" ")
    assert message.startswith("told: cannot write to")
    assert "everything measured before is safe" in message
    assert "everything stored before is safe" in message
    assert not list(tmp_path.glob(".*"))
    assert stored(tmp_path) == {row(m).identity for m in (*range(1, int(failed)), 99)}


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_an_unwritable_folder_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StoreError, match="cannot write"):
            Store(tmp_path).writer()
    finally:
        tmp_path.chmod(0o700)


def test_a_store_inside_a_file_is_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StoreError, match="cannot make the store"):
        Store(file / "store", create=True)
    with pytest.raises(NoStoreError, match="is a file"):
        Store(file)
    with pytest.raises(NoStoreError, match="does not exist"):
        Store(tmp_path / "nowhere")


def test_a_torn_or_foreign_shard_is_refused_by_name(tmp_path: Path) -> None:
    write_rows(tmp_path, [row(1)])
    (shard,) = Store(tmp_path).shards()
    shard.write_bytes(shard.read_bytes()[:-20])
    with pytest.raises(StoreError, match=shard.name):
        Store(tmp_path).table()
    import pyarrow as pa
    import pyarrow.parquet as pq

    foreign = tmp_path / "foreign.parquet"
    pq.write_table(pa.table({"a": [1]}), foreign)
    with pytest.raises(StoreError, match="no tilewise measurements"):
        read_shard(foreign)


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("attempt", None, "rows without attempt"),
        ("key", None, "rows without key"),
        ("message", b"\xff\xfe", "UTF8"),
    ],
)
def test_a_shard_with_impossible_values_is_refused(
    tmp_path: Path, column: str, value: object, says: str
) -> None:
    import pyarrow as pa

    table = to_table([row(1)])
    schema = table.schema
    kind = schema.field(column).type
    if isinstance(value, bytes):
        spoilt = pa.Array.from_buffers(
            kind, 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(value)]
        )
    else:
        spoilt = pa.array([value], kind)
    table = table.set_column(schema.get_field_index(column), schema.field(column), spoilt)
    store_module.write_shard(tmp_path / "run-00000.parquet", table)
    with pytest.raises(StoreError, match=says):
        list(Store(tmp_path).measurements())


def test_an_older_shard_has_the_defaults_of_what_it_lacks(tmp_path: Path) -> None:
    table = to_table([row(1)]).drop_columns(["labels", "registers", "stage"])
    store_module.write_shard(tmp_path / "run-00000.parquet", table)
    (found,) = Store(tmp_path).measurements()
    assert found == row(1)
    assert (found.labels, found.stage, found.registers) == ("{}", "first", None)
    store_module.write_shard(tmp_path / "run-00001.parquet", table.drop_columns(["device"]))
    with pytest.raises(StoreError, match="rows without device"):
        Store(tmp_path).table(latest=False)


def test_claims_exclude_each_other_and_end_with_the_process(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = store.claim("problem")
    assert first is not None
    assert store.claim("problem") is None
    first.remove()
    again = store.claim("problem")
    assert again is not None
    again.close()
    code = (
        "import os, sys; from tilewise.data.store import Store; "
        f"Store({str(tmp_path)!r}).claim('problem'); os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(tilewise.__file__).parent.parent)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert store.claim("problem") is not None


def test_known_rows_are_found_with_their_last_status(tmp_path: Path) -> None:
    write_rows(
        tmp_path,
        [
            row(1),
            row(2, status="crash", time_us=None, spread_us=None),
            row(3, time_us=7.0),
            row(3, time_us=8.0, attempt=1, stage="leader"),
        ],
    )
    known = Known([Store(tmp_path)], [SETTING], give_up_after=1)
    ok, crash, leader, missing = known.look_up([row(m).key for m in (1, 2, 3, 4)])
    assert ok is not None and ok.status == "ok" and not ok.is_confirmed
    assert crash is not None and crash.status == "crash"
    assert leader is not None and leader.is_confirmed
    assert (leader.time_us, leader.attempts) == (7.0, 2)
    assert missing is None
    assert known.has_failed(row(2).problem_key, row(2).kernel_key)
    assert not known.has_failed(row(1).problem_key, row(1).kernel_key)
    assert not known.is_given_up(KERNEL.key)  # it has succeeded elsewhere
    known.learn(row(4), keep=True)
    (learned,) = known.look_up([row(4).key])
    assert learned is not None and learned.status == "ok"


def test_rows_of_other_runs_count_once(tmp_path: Path) -> None:
    """They are met in their journal first, and in their shard once it is folded."""
    write_rows(tmp_path, [row(1, status="crash", time_us=None, spread_us=None)])
    known = Known([Store(tmp_path)], [SETTING], give_up_after=3)
    seen = [row(m, status="crash", time_us=None, spread_us=None) for m in (1, 2)]
    for _ in range(3):
        for each in seen:
            known.learn(each, keep=True)
    assert not known.is_given_up(KERNEL.key)
    known.learn(row(3, status="crash", time_us=None, spread_us=None), keep=True)
    assert known.is_given_up(KERNEL.key)


def test_rows_of_other_runs_are_met_in_any_order(tmp_path: Path) -> None:
    """A leader's row in a journal may be read before the shard with its first pass."""
    Store(tmp_path / "store", create=True)
    known = Known([Store(tmp_path / "store")], [SETTING], give_up_after=3)
    first = row(1, time_us=3.0, spread_us=0.5)
    leader = row(1, time_us=2.0, stage="leader", attempt=1)
    for each in (leader, first, leader, first):
        known.learn(each, keep=True)
    (record,) = known.look_up([first.key])
    assert record is not None
    assert (record.time_us, record.spread_us, record.attempts) == (3.0, 0.5, 2)
    assert record.is_good and record.is_confirmed


def test_leaders_are_those_within_noise() -> None:
    policy = Policy(noise=0.03, max_leaders=3)
    times = {0: (100.0, 1.0), 1: (102.0, 1.0), 2: (110.0, 1.0), 3: (106.0, 14.0), 4: (200.0, 5.0)}
    assert leaders(times, policy) == [0, 1, 3]
    assert leaders({0: (100.0, 1.0), 1: (150.0, 1.0)}, policy) == []  # nobody to confuse it with
    assert leaders(times, replace(policy, rounds=0)) == []
    assert leaders({}, policy) == []
    # Rivals join however slow they are, unless they failed.
    assert leaders(times, policy, rivals=[4, 0, 9]) == [0, 1, 3, 4]
    assert leaders({0: (100.0, 1.0), 1: (150.0, 1.0)}, policy, rivals=[1]) == [0, 1]
    assert leaders({0: (100.0, 1.0)}, policy, rivals=[0]) == []


def test_policies_are_data_with_an_identity() -> None:
    assert len({p.key for p in POLICIES.values()}) == len(POLICIES)
    for policy in POLICIES.values():
        assert Policy.from_dict(policy.to_dict()) == policy
    made = parse_policy("quick,cache=cold,repeats=20", "cpu")
    assert (made.cache, made.min_repeats, made.max_repeats) == ("cold", 20, 20)
    assert parse_policy("", "gpu") == POLICIES["gpu"]
    assert parse_policy("time_ms=7", "cpu").time_ms == 7.0


@pytest.mark.parametrize(
    "text",
    [
        *("slow", "cache=warm", "repeats=0", "time_ms=-1", "nonsense=1", "quick,cold", "warmup=x"),
        *("seed=", "seed=1,seed=2"),
    ],
)
def test_bad_policies_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_policy(text)


def test_statuses_are_those_of_the_contract() -> None:
    assert (
        *("ok", "compile_error", "over_limit", "launch_error", "timeout", "crash"),
        *("out_of_memory", "wrong_result"),
    ) == STATUSES
