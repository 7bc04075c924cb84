"""Kills work at every step that it takes on files; run by the test of the same subject.

One process imports everything once and forks the victims. A victim dies by SIGKILL before the nth
call that opens, makes, renames, removes or syncs a file of its folder, for every n until it gets
through. Whatever is left must be sound, and the same work done again must end as if nothing had
happened.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))

import pyarrow.parquet  # noqa: F401  # imported before the forks
import recording
from material import measurements

from tilewise.core.arch import load_arch
from tilewise.core.measurement import Measurement
from tilewise.core.model import load_model
from tilewise.data import store as store_module
from tilewise.data.check import check
from tilewise.data.forget import forget_faults
from tilewise.data.merge import merge
from tilewise.data.publish import publish
from tilewise.data.store import Store, write_rows
from tilewise.engines.toolchain import CANARY, compile_units, load
from tilewise.export import cases
from tilewise.export.library import Wanted, prepared, write_library
from tilewise.learn.dataset import from_stores
from tilewise.learn.params import Params
from tilewise.learn.train import save, train
from tilewise.problems.files import read_problems, write_problems
from tilewise.selection.measured import read_plan, write_plan
from tilewise.settings import settings

STEPS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.truncate"}
ARCH = load_arch("x86_avx512")
store_module.ROWS_PER_SHARD = 10  # a run of rows is then several journals and shards
cases.EXAMPLES = 300  # of problems that an export looks at; here only its files count


@dataclass(frozen=True, kw_only=True)
class Work:
    """Something that writes into a folder."""

    prepare: Callable[[Path], object]
    do: Callable[[Path], object]
    look: Callable[[Path], Any]
    """What is there, for all to read; raises where it is unsound."""
    between: Callable[[Any, Any, Any], bool]
    """Whether what is left is allowed, given what was there before and what should be after."""


def rows_of(store: Path) -> set[tuple[str, int, str]]:
    """Every row by what it is; a store that is not there has none."""
    if not store.exists():
        return set()
    report = check(store)
    torn = {"torn_journal", "mixed_policies"}  # a line cut short is told, and its rows come again
    assert set(report.counts) <= torn | {"machine_fault", "duplicate"}, report.findings
    return {(r.key, r.attempt, r.status) for r in Store(store).measurements(latest=False)}


def keys_of(rows: Any) -> set[str]:
    return {key for key, *_ in rows}


def either(left: Any, before: Any, after: Any) -> bool:
    return bool(left in (before, after))


def some_of(left: Any, before: Any, after: Any) -> bool:
    """Nothing that was there is missing, and nothing is there that should not be."""
    return keys_of(before) <= keys_of(left) <= keys_of(after)


def write_all(folder: Path, rows: list[Measurement]) -> None:
    """As a sweep writes: in parts, each once, whatever a run before has left."""
    store = Store(folder / "store", create=True)
    with store.writer() as writer:
        known = {row.key for row in store.measurements()}
        for at in range(0, len(rows), 7):
            writer.append([row for row in rows[at : at + 7] if row.key not in known])


def older(rows: list[Measurement]) -> list[Measurement]:
    """Earlier measurements of the same keys: those in the target must make room for them."""
    return [replace(row, measured_at=1.0, run_id="earlier") for row in rows]


def prepare_merge(folder: Path) -> None:
    rows = list(measurements())
    write_rows(folder / "target", rows[:30])
    write_rows(folder / "one", older(rows[:20]))
    write_rows(folder / "other", rows[25:60])


def prepare_forget(folder: Path) -> None:
    rows = list(measurements())
    bad = [
        replace(row, status="compile_error", time_us=None, message="No space left on device")
        for row in rows[:6]
    ]
    for part in (rows[6:20] + bad[:3], rows[20:30] + bad[3:], rows[30:40]):
        write_rows(folder / "store", part)


def prepare_model(folder: Path) -> None:
    write_rows(folder / "store", list(measurements()))
    data = from_stores([folder / "store"], op="gemm", arch=ARCH)
    save(train(data, Params(trees=3, leaves=4), fold_count=2), data, folder / "model")
    _trained[:] = [train(data, Params(trees=5, leaves=4), fold_count=2), data]


_trained: list[Any] = []
"""A model and what it was trained on, to be saved by forks."""


def trees_of(folder: Path) -> int:
    return load_model(folder / "model").forests["rank"].num_trees


def published(folder: Path) -> set[tuple[str, int, str]]:
    return rows_of(folder / "lean")


def prepare_plan(folder: Path) -> None:
    write_plan(folder / "plan.json", ARCH, {PROBLEMS[0]: TIMES})


def plan_of(folder: Path) -> int:
    return len(read_plan(folder / "plan.json", ARCH))


def compile_one(folder: Path) -> None:
    os.environ["TILEWISE_CACHE_DIR"] = str(folder / "cache")
    settings.cache_clear()
    (made,) = compile_units([CANARY])
    assert made.library is not None, made.log
    assert load(made.library).tw_canary() == 42


ONE_KERNEL = 'family == "gemv" and nr == 2 and ahead == 0'


def export(library: Path) -> None:
    """One small kernel; the folder is not there, or complete."""
    usual: dict[str, Any] = {"op": "gemm", "arch": ARCH, "dtypes": ("fp32",), "layouts": ("rcr",)}
    if not library.exists():
        write_library(library, [prepared(Wanted(**usual, expression=ONE_KERNEL))])


def library(folder: Path) -> dict[str, bytes] | None:
    """Every file; None where there is no library."""
    root = folder / "library"
    files = [path for path in root.rglob("*") if path.is_file()]
    return {str(p.relative_to(root)): p.read_bytes() for p in files} if root.exists() else None


ROWS = list(measurements())[:48]
PROBLEMS = recording.problems(4)
TIMES = {recording.kernels(1)[0].name: 1.0}
WORK = {
    "rows of a sweep": Work(
        prepare=lambda folder: None,
        do=lambda folder: write_all(folder, ROWS),
        look=lambda folder: rows_of(folder / "store"),
        between=some_of,
    ),
    "a merge": Work(
        prepare=prepare_merge,
        do=lambda folder: merge(folder / "target", [folder / "one", folder / "other"]),
        look=lambda folder: rows_of(folder / "target"),
        between=some_of,
    ),
    "forgetting faults": Work(
        prepare=prepare_forget,
        do=lambda folder: forget_faults(folder / "store"),
        look=lambda folder: rows_of(folder / "store"),
        between=lambda left, before, after: after <= left <= before,
    ),
    "publishing": Work(
        prepare=prepare_forget,
        do=lambda folder: published(folder) or publish(folder / "store", folder / "lean"),
        look=published,
        between=either,
    ),
    "a model in the place of another": Work(
        prepare=prepare_model,
        do=lambda folder: save(*_trained, folder / "model"),
        look=trees_of,
        between=either,
    ),
    "a plan": Work(
        prepare=prepare_plan,
        do=lambda folder: write_plan(folder / "plan.json", ARCH, {PROBLEMS[2]: TIMES}),
        look=plan_of,
        between=either,
    ),
    "a file of problems": Work(
        prepare=lambda folder: write_problems(folder / "p.csv", PROBLEMS[:1]),
        do=lambda folder: write_problems(folder / "p.csv", PROBLEMS),
        look=lambda folder: len(read_problems(folder / "p.csv").problems),
        between=either,
    ),
    "an exported library": Work(
        prepare=lambda folder: export(folder / "other"),
        do=lambda folder: export(folder / "library"),
        look=library,
        between=either,
    ),
    "compiling": Work(
        prepare=lambda folder: None, do=compile_one, look=lambda folder: None, between=either
    ),
}


def dies_within(folder: Path, step: int, do: Callable[[Path], object]) -> bool:
    """Whether a fork that is killed before its nth step on files of `folder` comes so far."""
    process = os.fork()
    if process:
        status = os.waitpid(process, 0)[1]
        assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
        return os.WIFSIGNALED(status)
    left, sync = step, os.fsync

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in STEPS and any(str(folder) in str(argument) for argument in arguments):
            count()

    def synced(descriptor: int) -> None:
        count()
        sync(descriptor)

    code = 1
    try:
        sys.addaudithook(hook)
        os.fsync = synced
        do(folder)
        code = 0
    finally:
        os._exit(code)


def killed_at_every_step(work: Work, folder: Path) -> int:
    """Does it once in peace, then with a kill at each step; returns how many there are."""
    calm = folder / "calm"
    calm.mkdir()
    work.prepare(calm)
    before = work.look(calm)
    fresh = folder / "fresh"
    shutil.copytree(calm, fresh, symlinks=True)
    assert not dies_within(calm, 0, work.do)
    after = work.look(calm)
    step = 0
    while True:
        step += 1
        victim = folder / f"step {step}"
        shutil.copytree(fresh, victim, symlinks=True)
        was_killed = dies_within(victim, step, work.do)
        left = work.look(victim)
        if not was_killed:
            assert left == after
            return step - 1
        assert work.between(left, before, after), (step, left, before, after)
        assert not dies_within(victim, 0, work.do)
        assert work.look(victim) == after, step
        shutil.rmtree(victim)


def main(folder: Path, name: str) -> None:
    print(killed_at_every_step(WORK[name], folder.resolve()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
