"""Replays: what was recorded is told again, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tilewise
from tilewise.core.identity import canonical_json
from tilewise.core.measurement import Measurement, Setting
from tilewise.data.store import Store, write_rows
from tilewise.engines.device import detect
from tilewise.engines.replay import ReplayEngine
from tilewise.errors import ExecutionError, InputError
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.sweep.recording import Recording

sys.path.insert(0, str(Path(__file__).parent))

import recording


@pytest.fixture(scope="session")
def tape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "tape"
    recording.record(path, problem_count=3, kernel_count=2, seed=3)
    return path


def ended_command(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(tilewise.__file__).parent.parent)}
    command = [sys.executable, "-m", "tilewise", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_what_was_never_recorded_is_left_out(tmp_path: Path) -> None:
    """Neither a problem nor a pair that the recording lacks becomes a failure."""
    recording.record(tmp_path / "whole", problem_count=3, kernel_count=2)
    rows = list(Store(tmp_path / "whole").measurements())
    tape, file, store = tmp_path / "tape", tmp_path / "problems.json", tmp_path / "store"
    with Store(tape, create=True).writer() as writer:
        writer.append(rows[:-1])
        file.write_text(json.dumps([p.to_dict() for p in recording.problems(5)]))
        words = ["sweep", str(store), "--op", "gemm", "--replay", str(tape), "--problems"]
        ended = ended_command(*words, str(file), "--json")  # from a journal: it is being written
        assert ended.returncode == 0, ended.stderr
        assert json.loads(ended.stdout.splitlines()[-1])["remaining"] == 0
    found = {r.key: (r.status, r.time_us, r.policy) for r in Store(store).measurements()}
    assert found == {r.key: (r.status, r.time_us, r.policy) for r in rows[:-1]}
    file.write_text(json.dumps([p.to_dict() for p in recording.problems(9)[5:]]))
    words[1] = str(tmp_path / "other")
    ended = ended_command(*words, str(file), "--json")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "it was never recorded on this problem (2 kernels)" in ended.stderr
    assert not (tmp_path / "other").exists()  # refused: nothing is left behind
    (shard,) = Store(tape).shards()
    shard.write_bytes(shard.read_bytes()[:-9])
    ended = ended_command(*words, str(file))
    assert ended.returncode == 2
    assert f"the shard {shard} cannot be read" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_what_was_measured_in_part_stays_so(tmp_path: Path) -> None:
    """A replay carries the mark of `--top` along, and a validation is not judged by it."""
    recording.record(tmp_path / "whole", problem_count=2, kernel_count=2)
    rows = [replace(r, labels='{"top": 2}') for r in Store(tmp_path / "whole").measurements()]
    tape, store, file = tmp_path / "tape", tmp_path / "store", tmp_path / "problems.json"
    write_rows(tape, rows)
    file.write_text(json.dumps([p.to_dict() for p in recording.problems(2)]))
    given = ("--op", "gemm", "--problems", str(file), "--replay", str(tape))
    ended = ended_command("sweep", str(store), *given)
    assert ended.returncode == 0, ended.stderr
    assert {r.labels for r in Store(store).measurements()} == {'{"top": 2}'}
    ended = ended_command("validate", *given)
    assert ended.returncode == 2
    assert "only the most promising kernels" in ended.stderr
    file.write_text(json.dumps([{**recording.problems(1)[0].to_dict(), "top": "layer1"}]))
    ended = ended_command("sweep", str(tmp_path / "own"), "--op", "gemm", "--problems", str(file))
    assert ended.returncode == 2
    assert "rename or drop it" in ended.stderr


def test_a_mixed_recording_is_replayed_by_choice_only(tape: Path, tmp_path: Path) -> None:
    rows = list(Store(tape).measurements())
    other = dataclasses.replace(recording.POLICY, seed=4)
    faster = [retold(row, policy=other) for row in rows]
    write_rows(tmp_path, [*rows, *faster])
    with pytest.raises(InputError, match="mixes recordings") as refused:
        Recording.load(tmp_path)
    for policy in (recording.POLICY, other):
        assert f"{policy.key[:12]} threads=1" in str(refused.value)
        assert Recording.load(tmp_path, policy=policy.key[:12]).policy == policy
    assert "seed=4" in str(refused.value)
    assert "choose one with --policy" in str(refused.value)
    with pytest.raises(InputError, match=r"--policy is 'quick'; .* was recorded with"):
        Recording.load(tmp_path, policy="quick")
    write_rows(tmp_path / "devices", [*rows, *(retold(r, device="another") for r in rows)])
    with pytest.raises(InputError, match=r"x86_avx512:another .* choose one with --arch"):
        Recording.load(tmp_path / "devices")
    chosen = Recording.load(tmp_path / "devices", arch="x86_avx512:another")
    assert {row.device for row in chosen.rows} == {"another"}
    write_rows(tmp_path / "compilers", [rows[0], retold(rows[1], toolchain="g++ 14")])
    with pytest.raises(InputError, match=r"toolchains of the engine cpu, g\+\+ 14 and g\+\+ 12"):
        Recording.load(tmp_path / "compilers")
    with pytest.raises(InputError, match="no measurements to replay"):
        Recording.load(write_rows(tmp_path / "empty", []).path)
    with pytest.raises(InputError, match="was recorded for gemm"):
        chosen.kernels("conv_fwd")


def retold(row: Measurement, **changes: Any) -> Measurement:
    """The row as another setting would have given it."""
    setting = Setting(
        **{
            "arch": row.arch,
            "device": row.device,
            "toolchain": row.toolchain,
            "policy": recording.POLICY,
            **changes,
        }
    )
    return dataclasses.replace(
        row,
        key=setting.key(row.problem_key, row.kernel_key),
        policy_key=setting.policy_key,
        policy=canonical_json(setting.policy.to_dict()),
        device=setting.device,
        toolchain=setting.toolchain,
    )


def test_a_foreign_arch_is_refused(tape: Path, tmp_path: Path) -> None:
    file = tmp_path / "problems.json"
    file.write_text(json.dumps([p.to_dict() for p in recording.problems(1)]))
    words = ["sweep", str(tmp_path / "store"), "--op", "gemm", "--problems", str(file)]
    ended = ended_command(*words, "--replay", str(tape), "--arch", "x86_avx2")
    assert ended.returncode == 2
    assert "--arch is 'x86_avx2'" in ended.stderr
    assert "was recorded with x86_avx512:a recorded CPU" in ended.stderr
    assert not (tmp_path / "store").exists()


def test_a_recording_has_times_but_no_results(tape: Path) -> None:
    engine = ReplayEngine(Store(tape).measurements())
    problem, kernel = recording.problems(1)[0], recording.kernels(1)[0]
    plan = engine.plan(kernel, problem, detect("cpu"))
    with pytest.raises(ExecutionError, match="recording"):
        plan.execute([], None)
    with pytest.raises(ExecutionError, match="never recorded"):
        engine.plan(kernel, GemmProblem(m=999, n=1, k=1), detect("cpu"))
