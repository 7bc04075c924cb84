"""The commands around models, from a store to a header."""

from __future__ import annotations

import errno
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tilewise.cli import evaluate, explain, export_c, problems, search, train
from tilewise.core.measurement import Measurement, Policy, Setting
from tilewise.core.model import load_model, replacing
from tilewise.data.store import write_rows
from tilewise.errors import FileError, InputError
from tilewise.learn.dataset import Dataset
from tilewise.problems.files import read_problems

WORDS = ("--op", "gemm", "--arch", "gfx950", "--dtype", "bf16", "M=512", "N=1024", "K=768")


def stored(data: Dataset, path: Path, *, turned: bool = False) -> Path:
    """Made-up data as a store on disk; `turned` makes the fast kernels the slow ones."""
    setting = Setting(arch="gfx950", device="made up", toolchain="none", policy=Policy())
    rows = []
    for p, k, us in zip(data.problem_index, data.kernel_index, data.time_us, strict=True):
        failed = us != us
        time_us = 1e4 / float(us) if turned else float(us)
        rows.append(
            Measurement.of(
                data.problems[p],
                data.kernels[k],
                setting,
                status="crash" if failed else "ok",
                time_us=None if failed else time_us,
                spread_us=None if failed else 0.01 * time_us,
                repeats=0 if failed else 20,
            )
        )
    write_rows(path, rows)
    return path


@pytest.fixture(scope="module")
def store(small_data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small data as a store on disk."""
    return stored(small_data, tmp_path_factory.mktemp("store") / "store")


def run(*words: Any) -> Any:
    app = typer.Typer()
    app.command("train")(train.train)
    app.command("evaluate")(evaluate.evaluate)
    app.command("compare")(evaluate.compare)
    app.command("explain")(explain.explain)
    app.command("predict")(explain.predict)
    app.command("augment")(problems.augment)
    app.command("search")(search.search)
    app.command("export-c")(export_c.export_c)
    return CliRunner().invoke(app, [str(w) for w in words], catch_exceptions=False)


@pytest.fixture(scope="module")
def trained(store: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trained") / "model"
    done = run(
        *("train", store, "--out", folder, "--trees", 30, "--leaves", 8, "--folds", 3),
        *("--draws", 2, "--json"),
    )
    assert done.exit_code == 0
    return folder, json.loads(done.stdout)


def test_train_reports_what_it_learned(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, report = trained
    assert report["efficiency"]["mean"] > 90
    assert report["noise_ceiling"]["mean"] <= 100
    assert (folder / "numbers.gz").is_file()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert report["trees"] == manifest["trees"] == 2 * manifest["rounds"]
    assert (folder / "folds.json").is_file()


def test_evaluate_and_compare(trained: tuple[Path, dict[str, Any]], store: Path) -> None:
    folder, report = trained
    done = run("evaluate", folder, store, "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["efficiency"]["mean"] == pytest.approx(report["efficiency"]["mean"])
    assert found["problems_unseen"] == 0
    done = run("evaluate", folder, store)
    assert done.exit_code == 0
    headings = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("by ")]
    assert headings == [name for name, groups in found["slices"].items() if len(groups) > 1]


def test_a_worse_model_is_told_from_a_better_one(
    trained: tuple[Path, dict[str, Any]], store: Path, small_data: Dataset, tmp_path: Path
) -> None:
    folder, _ = trained
    wrong, worse = stored(small_data, tmp_path / "wrong", turned=True), tmp_path / "worse"
    words = ("--folds", 3, "--trees", 5, "--json")
    assert run("train", wrong, "--out", worse, *words).exit_code == 0
    better = run("compare", worse, folder, store, "--json")
    fallen = run("compare", folder, worse, store, "--json")
    assert fallen.exit_code == 1, fallen.stdout
    risen, sunk = (json.loads(each.stdout) for each in (better, fallen))
    assert (risen["better"], risen["worse"]) == (sunk["worse"], sunk["better"])
    assert risen["better"] > 40 > risen["worse"]
    passed = [check["passed"] for check in risen["checks"]]
    assert sum(passed) > sum(check["passed"] for check in sunk["checks"])


def test_new_problems_are_proposed_near_those_of_the_worst_choices(
    trained: tuple[Path, dict[str, Any]], store: Path, tmp_path: Path
) -> None:
    """From a model to the next sweep by two commands."""
    scored = tmp_path / "scored.csv"
    report = json.loads(run("evaluate", trained[0], store, "--out", scored, "--json").stdout)
    found = read_problems(scored, "gemm")
    efficiencies = [float(labels["efficiency"]) for labels in found.labels]
    assert min(efficiencies) == pytest.approx(report["efficiency"]["min"] / 100, abs=1e-3)
    assert len(found.problems) == report["problems_out_of_fold"]
    words = ("augment", scored, "--op", "gemm", "--count", 5, "--below", 0.9, "--json")
    proposed = json.loads(run(*words).stdout)["problems"]
    assert len(proposed) == 5
    assert max(p["near_efficiency"] for p in proposed) < 0.9


def test_compare_fails_by_its_exit_code(
    trained: tuple[Path, dict[str, Any]], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = {"problems": 1, "passed": False, "checks": [], "fallen": []}
    monkeypatch.setattr("tilewise.learn.compare.compare", lambda *_: verdict)
    folder, _ = trained
    done = run("compare", folder, folder, store, "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["passed"] is False


def test_one_problem_can_be_asked_about(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = trained
    told = json.loads(run("explain", *WORDS, "--model", folder, "--json").stdout)
    listed = json.loads(run("predict", *WORDS, "--model", folder, "--json").stdout)
    assert told["kernel"] in {row["kernel"] for row in listed}
    assert [r["predicted_us"] for r in listed] == sorted(r["predicted_us"] for r in listed)
    found = json.loads(
        run("search", *WORDS, "--model", folder, "--budget", 20, "--top", 3, "--json").stdout
    )
    assert len(found["answers"]) == 3
    for command in ("explain", "predict", "search"):
        assert run(command, *WORDS, "--model", folder).exit_code == 0


def test_a_header_is_written(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = trained
    done = run("export-c", folder, tmp_path / "m.h", "--name", "mine", "--json")
    assert json.loads(done.stdout)["kernels"] > 0
    assert "mine_rank" in (tmp_path / "m.h").read_text()
    for name in ("1st-model", "2024 run"):
        run("export-c", folder, tmp_path / "m.h", "--name", name, "--force")
        (word,) = re.findall(r"(\w+)_rank\(", (tmp_path / "m.h").read_text())[:1]
        assert word.isidentifier()


def test_training_spares_what_is_no_models(
    trained: tuple[Path, dict[str, Any]], store: Path, tmp_path: Path
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(FileError, match=r"no model's \(thesis.txt\)"):
        run("train", store, "--out", tmp_path, "--trees", 2)
    for place, says in (
        (tmp_path / "thesis.txt", "Not a directory"),
        (Path("/proc/model"), "cannot be a model's folder"),
        (Path.cwd(), "name one below it"),
    ):
        with pytest.raises(FileError, match=says):
            run("train", store, "--out", place, "--trees", 2)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_model_is_replaced_as_a_whole_or_not_at_all(
    trained: tuple[Path, dict[str, Any]],
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(trained[0], folder)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    words = ("train", store, "--out", folder, "--trees", 5, "--folds", 2, "--force")
    with pytest.raises(
        InputError, match="model already exists; choose another name, or add --force"
    ):
        run(*words[:-1])

    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(FileError, match="No space left"):
            run(*words)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    rename = Path.rename

    def stopped(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", stopped)
        # As on a system that cannot exchange the two in one step.
        patch.setattr("tilewise.core.model.exchanged", lambda *_: False)
        with pytest.raises(KeyboardInterrupt), replacing(folder):
            pass
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert run(*words).exit_code == 0
    assert load_model(folder).forests["rank"].num_trees <= 5
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_too_little_to_learn_from_is_said(small_data: Dataset, tmp_path: Path) -> None:
    setting = Setting(arch="gfx950", device="made up", toolchain="none", policy=Policy())
    for name, status, says in (("few", "ok", "3 of 3"), ("failed", "timeout", "0 of 3")):
        rows = [
            Measurement.of(p, k, setting, status=status, time_us=5.0 if status == "ok" else None)
            for p in small_data.problems[:3]
            for k in small_data.kernels[:4]
        ]
        write_rows(tmp_path / name, rows)
        with pytest.raises(InputError, match=f"{says} problems.*sweep at least 4"):
            run("train", tmp_path / name, "--out", tmp_path / "model")
