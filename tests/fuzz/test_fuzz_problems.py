"""Any file of problems, kernels, configs or figures is read or refused, and so are settings."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzzing import fuzz
from hypothesis import example
from hypothesis import strategies as st
from material import ARCH, kernels
from spoiling import HOSTILE, Edit, edits, spoils

from tilewise.core.arch import parse_arch
from tilewise.core.measurement import parse_policy
from tilewise.dispatch.registry import Registry
from tilewise.errors import TilewiseError
from tilewise.ops.configs import expand_counted, load_kernels
from tilewise.ops.contract import all_ops, get_op
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.problems.files import read_problems, write_problems
from tilewise.problems.rows import problem_from_words
from tilewise.selection.measured import measured_rankers, read_plan, write_plan
from tilewise.settings import Settings, settings

Spoil = Callable[[bytes], bytes]
KINDS = ("p.csv", "p.json", "p.jsonl", "commands.txt")
ops = st.sampled_from(["", *all_ops()])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("problems")


def reads_or_refuses(place: Path, data: bytes, op: str, suffix: str = "txt") -> None:
    path = place / f"file.{suffix}"
    path.write_bytes(data)
    try:
        found = read_problems(path, op, dtype="fp32")
    except TilewiseError:
        return
    write_problems(place / "back.csv", found.problems, found.labels)
    write_problems(place / "back.jsonl", found.problems, found.labels)


@fuzz(120, name=st.sampled_from(KINDS), spoil=spoils(), op=ops)
def test_files_spoiled(material: Path, place: Path, name: str, spoil: Spoil, op: str) -> None:
    reads_or_refuses(place, spoil((material / name).read_bytes()), op)


@fuzz(100, edit=edits(), op=ops)
def test_rows_swapped(material: Path, place: Path, edit: Edit, op: str) -> None:
    rows = edit(json.loads((material / "p.json").read_bytes()))
    reads_or_refuses(place, json.dumps(rows).encode(), op)
    listed = rows if isinstance(rows, list) else [rows]
    lines = "\n".join(json.dumps(row) for row in listed)
    reads_or_refuses(place, lines.encode(), op)


@fuzz(60, text=st.text(max_size=80), op=ops)
def test_any_text(place: Path, text: str, op: str) -> None:
    reads_or_refuses(place, text.encode("utf-8", "surrogatepass"), op)


_cells = st.sampled_from([v for v in HOSTILE if isinstance(v, str | int | float)])


@fuzz(
    60,
    header=st.lists(st.sampled_from(["M", "N", "K", "dtype", "op", "x"])),
    cells=st.lists(_cells),
)
def test_tables(place: Path, header: list[str], cells: list[Any]) -> None:
    wide = max(1, len(header))
    rows = [cells[i : i + wide] for i in range(0, len(cells), wide)]
    text = "\n".join(",".join(map(str, row)) for row in [header, *rows])
    reads_or_refuses(place, text.encode("utf-8", "replace"), "gemm")


_arrow = st.sampled_from(
    [
        pa.array([1, 2]),
        pa.array(["8", None]),
        pa.array([b"8", b"\xff"]),
        pa.array([1.0, float("nan")]),
        pa.array([{"a": 1}, None]),
        pa.array([[1], [2]]),
        pa.array([2**50, -(2**50)], pa.timestamp("ms")),
        pa.array([-(2**40), 2**40], pa.timestamp("ms", "UTC")),
        pa.array([2**31 - 1, -1], pa.date32()),
        pa.array(['{"M": 8, "N": 8, "K": 8}', "[" * 3000]),
        pa.array([True, None]),
    ]
)
_names = st.sampled_from(["M", "N", "K", "op", "dtype", "problem", "x", "direction", ""])


@fuzz(
    80, columns=st.dictionaries(_names, _arrow, min_size=1), spoil=spoils(), is_whole=st.booleans()
)
def test_parquet(place: Path, columns: dict[str, Any], spoil: Spoil, is_whole: bool) -> None:
    out = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), out)
    data = out.getvalue().to_pybytes()
    reads_or_refuses(place, data if is_whole else spoil(data), "gemm", "parquet")


@fuzz(
    80,
    words=st.lists(st.tuples(_names | st.text(max_size=4), _cells).map(lambda p: f"{p[0]}={p[1]}")),
    op=ops,
)
def test_words(words: list[str], op: str) -> None:
    try:
        problem_from_words(words, op or "gemm")
    except TilewiseError:
        return


@fuzz(60, edit=edits())
def test_configs(material: Path, edit: Edit) -> None:
    config = edit(json.loads((material / "config.json").read_bytes()))
    with mock.patch("tilewise.ops.configs.MAX_COMBINATIONS", 20_000):
        try:
            expand_counted(config, get_op("gemm"), ARCH)
        except TilewiseError:
            return


@fuzz(80, edit=edits())
def test_kernel_files(material: Path, edit: Edit) -> None:
    data = edit(json.loads((material / "kernels.json").read_bytes()))
    try:
        found = load_kernels(json.dumps(data), get_op("gemm"))
    except TilewiseError:
        return
    for kernel in found:
        assert get_op("gemm").kernel_from_name(kernel.name) == kernel


@fuzz(60, edit=edits())
def test_registries(edit: Edit) -> None:
    whole = json.loads(Registry("gemm", ARCH).to_json())
    try:
        Registry.from_json(json.dumps(edit(whole)))
    except TilewiseError:
        return


@pytest.fixture(scope="module")
def plan(place: Path) -> bytes:
    """A sound plan file."""
    problems = [GemmProblem(m=8 * i, n=16, k=32) for i in (1, 2)]
    write_plan(place / "plan.json", ARCH, {p: {k.name: 2.0 for k in kernels()} for p in problems})
    return (place / "plan.json").read_bytes()


@fuzz(100, edit=edits(), spoil=spoils(), is_json=st.booleans())
def test_plans(place: Path, plan: bytes, edit: Edit, spoil: Spoil, is_json: bool) -> None:
    """What is read can be added to and chosen by; what is not is left out."""
    path = place / "spoiled.json"
    path.write_bytes(json.dumps(edit(json.loads(plan))).encode() if is_json else spoil(plan))
    with mock.patch.dict(os.environ, TILEWISE_PLAN=str(path)):
        settings.cache_clear()
        for ranker in measured_rankers("gemm", ARCH):
            for problem in ranker.times:
                ranker.predict_us(problem, kernels(), ARCH)
        settings.cache_clear()
    try:
        write_plan(path, ARCH, {})
    except TilewiseError:
        return
    read_plan(path, ARCH)


ARCHS = resources.files("tilewise") / "archs"
_toml = st.sampled_from(
    [
        "nan",
        "inf",
        "-1",
        "0",
        "'x'",
        "[]",
        "{}",
        "[[1, 2, 3]]",
        "1e400",
        "9" * 5000,
        "true",
        "{a = 1}",
    ]
)


@fuzz(
    60,
    name=st.sampled_from(["sm_90", "x86_avx512"]),
    at=st.integers(0, 99),
    value=_toml,
    spoil=spoils(),
)
def test_arch_files(name: str, at: int, value: str, spoil: Spoil) -> None:
    text = (ARCHS / f"{name}.toml").read_text()
    lines = text.split("\n")
    places = [i for i, line in enumerate(lines) if "value = " in line]
    chosen = places[at % len(places)]
    head, _, tail = lines[chosen].partition("value = ")
    lines[chosen] = f"{head}value = {value}, source{tail.rpartition('source')[2]}"
    for spoiled in ("\n".join(lines), spoil(text.encode()).decode("utf-8", "replace")):
        try:
            parse_arch(spoiled, name)
        except TilewiseError:
            continue


VARIABLES = ("TILEWISE_CACHE_DIR", "TILEWISE_MODEL_DIR", "TILEWISE_PLAN", "TILEWISE_CXX")
VARIABLES += ("TILEWISE_OPS", "TILEWISE_STRICT", "TILEWISE_THREADS")
_texts = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=12)


@fuzz(
    80,
    given=st.dictionaries(
        st.sampled_from([*VARIABLES, "XDG_CACHE_HOME"]),
        _texts | st.sampled_from(["~x/y", "٣", "9" * 5000, "0", "-1", "1e3"]),
    ),
)
@example(given={"TILEWISE_CACHE_DIR": "~nosuchuser"})
def test_settings(given: dict[str, str]) -> None:
    with mock.patch.dict(os.environ, given):
        settings.cache_clear()
        try:
            found = settings()
            assert isinstance(found, Settings) and len(fields(found)) > 3
        except TilewiseError:
            return
        finally:
            settings.cache_clear()


@fuzz(
    80,
    text=st.lists(
        st.sampled_from(
            [
                "quick",
                "seed",
                "=",
                ",",
                "9" * 5000,
                "nan",
                "-1",
                "cache",
                "hot",
                "time_ms",
                "1e999",
                "٣",
            ]
        ),
        max_size=8,
    ).map("".join),
)
def test_policies(text: str) -> None:
    try:
        parse_policy(text)
    except TilewiseError:
        return
