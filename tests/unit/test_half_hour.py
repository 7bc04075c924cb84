"""A GPU's half hour: parts with limits, tests apart, kernels that were compiled elsewhere."""

from __future__ import annotations

import importlib
import io
import json
import lzma
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tilewise.core.arch import load_arch
from tilewise.engines.contract import Resources
from tilewise.engines.gpu.object_cache import cached, is_kept
from tilewise.engines.gpu.objects import GpuObject
from tilewise.errors import TilewiseError
from tilewise.settings import settings

ROOT = Path(__file__).parents[2]
SLEEPS = (sys.executable, "-c", "import time; time.sleep(600)")


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield


def use_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(folder))
    settings.cache_clear()


@pytest.fixture(autouse=True)
def usual_cache() -> Iterator[None]:
    yield
    settings.cache_clear()


def wanted(number: int) -> dict[str, Any]:
    return {"language": "cuda", "compiler": f"nvrtc 13.{number % 2}", "number": number}


def test_objects_compiled_elsewhere_are_found_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = importlib.import_module("objects")
    use_cache(tmp_path / "there", monkeypatch)
    made = GpuObject(image=b"code", function="f", parameters=(8,), resources=Resources())
    for number in range(4):
        cached(wanted(number), lambda: made)
    assert objects.pack(tmp_path / "all.xz", 24.0, "")[0] == 4
    assert objects.pack(tmp_path / "some.xz", 24.0, "nvrtc 13.0")[0] == 2
    use_cache(tmp_path / "here", monkeypatch)
    assert objects.unpack(tmp_path / "some.xz") == 2 and objects.unpack(tmp_path / "some.xz") == 0
    assert [is_kept(wanted(number)) for number in range(4)] == [True, False, True, False]

    def compiles() -> GpuObject:
        raise AssertionError("it was carried along")

    assert cached(wanted(2), compiles).image == b"code"


def packed(*entries: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=form) as archive:
        for entry, body in entries:
            entry.size = len(body)
            archive.addfile(entry, io.BytesIO(body))
    return made.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", **pax: str) -> Any:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.pax_headers = kind, target, pax
    return made, b"x" if kind == tarfile.REGTYPE else b""


OBJECT = "a" * 64
HOSTILE: dict[str, Callable[[], bytes]] = {
    "above": lambda: packed(entry(f"../{OBJECT}")),
    "at the root": lambda: packed(entry(f"/{OBJECT}")),
    "a line more": lambda: packed(entry(f"{OBJECT}\n")),
    "terminal": lambda: packed(entry("\x1b[2J")),
    "link": lambda: packed(entry(OBJECT, tarfile.SYMTYPE, "/etc/passwd")),
    "hard link": lambda: packed(entry(OBJECT, tarfile.LNKTYPE, "/etc/passwd")),
    "pipe": lambda: packed(entry(OBJECT, tarfile.FIFOTYPE)),
    "device": lambda: packed(entry(OBJECT, tarfile.CHRTYPE)),
    "folder": lambda: packed(entry(OBJECT, tarfile.DIRTYPE)),
    "large": lambda: packed((tarfile.TarInfo(OBJECT), bytes(48 << 20))),
    "header": lambda: packed(entry(OBJECT, comment="x" * (40 << 20))),
    "headers": lambda: b"".join(packed(entry(OBJECT, comment="x"))[:1024] for _ in range(3000)),
    "name": lambda: packed(entry("a" * (40 << 20)), form=tarfile.GNU_FORMAT),
    "cut": lambda: packed((tarfile.TarInfo(OBJECT), bytes(10_000)))[:2000],
    "no tar": lambda: b"x" * 5000,
    "sparse": lambda: packed(entry(OBJECT, **{"GNU.sparse.major": "1", "GNU.sparse.minor": "0"})),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_pack_writes_nothing_but_objects(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    objects = importlib.import_module("objects")
    use_cache(tmp_path / "here", monkeypatch)
    (tmp_path / "bad.xz").write_bytes(lzma.compress(HOSTILE[name](), preset=0))
    monkeypatch.setattr(sys, "argv", ["objects", "unpack", str(tmp_path / "bad.xz")])
    assert objects.main() == 2
    said = capsys.readouterr().err
    assert said.startswith("objects: ") and said.count("\n") == 1 and "\x1b" not in said
    assert not [path for path in objects.folder().iterdir() if path.name == OBJECT]
    assert {path.name for path in tmp_path.iterdir()} == {"bad.xz", "here"}


def test_a_pack_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = importlib.import_module("objects")
    use_cache(tmp_path / "here", monkeypatch)
    many = [(tarfile.TarInfo(f"{at:064x}"), bytes(1 << 20)) for at in range(40)]
    (tmp_path / "many.xz").write_bytes(lzma.compress(packed(*many), preset=0))
    monkeypatch.setattr(objects, "MOST_UNPACKED_BYTES", 10 << 20)
    with pytest.raises(TilewiseError, match="more is packed"):
        objects.unpack(tmp_path / "many.xz")
    monkeypatch.undo()
    use_cache(tmp_path / "here", monkeypatch)
    assert objects.unpack(tmp_path / "many.xz") > 29
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        objects.unpack(tmp_path / "pipe")


def journey(tmp_path: Path, seconds: float = 600.0) -> Any:
    half_hour = importlib.import_module("half_hour")
    work, out = tmp_path / "work", tmp_path / "out"
    return half_hour, half_hour.Journey(work, out, time.monotonic() + seconds, is_dry=False)


def test_a_part_that_hangs_is_ended_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_hour, held = journey(tmp_path)
    monkeypatch.setattr(half_hour, "GRACE_S", 0.5)
    hangs = half_hour.Part(name="hangs", seconds=0.5, command=SLEEPS)
    says = half_hour.Part(name="says", seconds=60, command=(sys.executable, "-c", "print(42)"))
    held.run(hangs)
    held.run(says)
    assert held.codes == {"hangs": None, "says": 0}
    assert held.is_over(hangs) and held.is_over(says)
    with tarfile.open(tmp_path / "out" / "results.tar.gz") as packed:
        assert {"hangs.log", "says.log", "state.json"} <= set(packed.getnames())
    again = half_hour.Journey(held.work, held.out, 0.0, is_dry=False)
    assert again.is_over(hangs) and again.is_over(says)


SEES = """
import sys, tarfile, time
from pathlib import Path
found = []
while not {"one.jsonl", "two.jsonl"} <= set(found):
    time.sleep(0.1)
    if Path(sys.argv[2]).exists():
        found = tarfile.open(sys.argv[2]).getnames()
    Path(sys.argv[1]).write_text("{}")
"""


STARTS = """
import subprocess, sys, time
from pathlib import Path
sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleeps, start_new_session=True)
Path(sys.argv[1]).write_text(str(child.pid))
if sys.argv[2] == "hangs":
    time.sleep(600)
raise SystemExit("a mistake, and the child is left behind")
"""


@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_what_a_part_started_ends_with_it(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_hour, held = journey(tmp_path)
    monkeypatch.setattr(half_hour, "GRACE_S", 5.0)
    child = tmp_path / "child"
    command = (sys.executable, "-c", STARTS, str(child), how)
    held.run(half_hour.Part(name="starts", seconds=2 if how == "hangs" else 60, command=command))
    state = Path(f"/proc/{child.read_text()}/stat")
    end = time.monotonic() + 30
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end, "it lives on"
        time.sleep(0.05)


def test_parts_run_side_by_side_and_are_packed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_hour, held = journey(tmp_path)
    monkeypatch.setattr(half_hour, "PACKED_EVERY_S", 0.2)
    script, packed = tmp_path / "sees.py", str(held.out / "results.tar.gz")
    script.write_text(SEES)

    def sees(name: str) -> Any:
        """Ends when what both write has been packed."""
        command = (sys.executable, str(script), str(held.work / f"{name}.jsonl"), packed)
        return half_hour.Part(name=name, seconds=60, command=command)

    held.run(sees("one"), sees("two"))
    assert held.codes == {"one": 0, "two": 0}


def test_a_part_waits_for_a_call_that_has_time_for_it(tmp_path: Path) -> None:
    half_hour, held = journey(tmp_path, seconds=60.0)
    part = half_hour.Part(name="long", seconds=300, command=SLEEPS)
    held.run(part)
    assert not held.is_over(part) and not held.codes


def test_a_part_that_could_not_begin_is_tried_again(tmp_path: Path) -> None:
    """As the counters are, where the wavelets that they look at had no time yet."""
    half_hour, held = journey(tmp_path)
    refuses = half_hour.Part(
        name="refuses", seconds=60, command=(sys.executable, "-c", "raise SystemExit(2)")
    )
    held.run(refuses)
    assert held.codes == {"refuses": 2} and not held.is_over(refuses)


def test_what_can_be_carried_on_is_until_its_time_is_used(tmp_path: Path) -> None:
    half_hour, held = journey(tmp_path)
    part = half_hour.Part(name="sweep", seconds=660, least=0.1, command=SLEEPS)
    held.used["sweep"], held.codes["sweep"] = 300.0, None
    assert not held.is_over(part) and held.left(part) == 360
    held.used["sweep"] = 640.0
    assert held.is_over(part)


def test_all_parts_name_commands_that_there_are() -> None:
    half_hour = importlib.import_module("half_hour")
    for part in half_hour.parts():
        for command in filter(None, (part.command, part.dry, part.ahead)):
            ours = [word for word in command if word.startswith(str(ROOT)) and ".venv" not in word]
            assert all(Path(word).is_file() for word in ours), part.name
            words = {"work": "w", "minutes": "1", "without": "none", "jobs": "2"}
            assert all("{" not in word.format(**words) for word in command)
    taken: dict[str, float] = {}
    names = [part.name for part in half_hour.parts()]
    left = ["always", "compiled", "more_sweep", "more_models"]
    assert names[-4:] == left, "which take what is left"
    for part in half_hour.parts()[:-4]:
        side = part.side or part.name
        taken[side] = max(taken.get(side, 0.0), part.seconds)
    assert sum(taken.values()) <= 27 * 60


def test_models_are_shown_in_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    tables, sides = (importlib.import_module(name) for name in ("model_tables", "model_sides"))
    plain = sides.Times(ms=4.0, host_ms=1.0, first_s=0.5, memory_gb=2.0)
    served = {"PyTorch": 1, "tilewise, fused": 3}
    ours = sides.Times(ms=2.0, host_ms=1.0, first_s=3.0, memory_gb=1.5, ratio=2.0, served=served)
    row = sides.Row(model="net", task="training", mode="eager", batch=8, torch=plain)
    row.sides = {"fused": ours}
    slower = {**asdict(row), "torch": asdict(replace(plain, ms=8.0))}
    failed = {**asdict(row), "failed": "no memory", "torch": None, "mode": "graph"}
    out = tmp_path / "rows.jsonl"
    out.write_text("".join(json.dumps(line) + "\n" for line in (slower, asdict(row), failed)))
    monkeypatch.setattr("sys.argv", ["model_tables.py", str(out)])
    assert tables.main() == 0
    *_, last = told = capsys.readouterr().out.splitlines()
    assert len(told) == 3
    assert last.startswith("| net training | 8 | eager | 4.00 | 2.00 | 2.000 +-0 % | 0.5 / 3.0 |")
    assert last.endswith("| 3 of 4 |")


def test_models_that_were_timed_are_not_timed_again(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    models = importlib.import_module("whole_models")
    jobs = [models.Job(model="m", task=t, batch=8, modes=("eager", "graph")) for t in models.TASKS]
    row = {"model": "m", "task": "training", "batch": 8, "mode": "eager", "failed": ""}
    lines = [row, {**row, "mode": "graph"}, {**row, "task": "inference"}]
    lines.append({**row, "task": "inference", "mode": "graph", "failed": "no memory"})
    out = tmp_path / "rows.jsonl"
    out.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"model": "m')
    assert models.undone(jobs, models.rows_in(out)) == jobs[1:]
    assert len(models.whole_lines(out)) == len(lines), "the last one is being written"
    assert models.undone(jobs, []) == jobs


def test_tests_run_apart(tmp_path: Path) -> None:
    """Only those that hang are short of time: how long a process takes to start is chance."""
    hang = "import time\ndef test_one(): time.sleep(600)\ndef test_other(): time.sleep(600)\n"
    (tmp_path / "test_hang.py").write_text(hang)
    (tmp_path / "test_good.py").write_text("def test_good(): pass\n")
    (tmp_path / "test_bad.py").write_text("import os\ndef test_bad(): assert not os.getpid()\n")
    words = ("--whole", "test_good.py,test_bad.py", "--seconds", "2", "test_hang.py")
    ended = subprocess.run(
        [sys.executable, ROOT / "tests/gpu/apart.py", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stdout.splitlines()[-1] == "1 failed, 2 hangs, 1 passed", ended.stdout
    assert "assert not" in ended.stdout


STUCK = """Timeout (0:00:20)!
Thread 0x00007f5b6a7fc6c0 (most recent call first):
  File "torch/cuda/__init__.py", line 1085 in synchronize
  File "test_families_gpu.py", line 60 in wrong
"""


def test_a_test_that_hangs_says_where_it_waits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the words of pytest, which is asked for them before the test is ended."""
    monkeypatch.syspath_prepend(str(ROOT / "tests/gpu"))
    apart, asked = importlib.import_module("apart"), list[str]()

    def ended(command: list[str], seconds: float) -> tuple[None, str]:
        asked.extend(command)
        return None, "collecting\n" + STUCK

    monkeypatch.setattr(apart, "ended", ended)
    assert apart.verdict("test_it", 40.0, time.monotonic() + 600) == "hangs"
    assert "faulthandler_timeout=20.0" in asked
    assert capsys.readouterr().out == f"hangs: test_it\n{STUCK}"


def test_families_that_hang_or_break_the_device_are_left_out(tmp_path: Path) -> None:
    half_hour, held = journey(tmp_path)
    test = "tests/gpu/test_families_gpu.py::test_family"
    (held.work / "families.log").write_text(
        f"hangs: {test}[conv_fwd-taps]\nstarting\n{STUCK}"
        f"hangs: {test}[conv_fwd-halo]\nstarting, as it did all the time\n"
        f"failed: {test}[conv_bwd_data-im2col]\nE  dense: errors 2e-1, 3e-1\n"
        f"failed: {test}[conv_bwd_weight-padded]\nE  AcceleratorError: CUDA error: misaligned\n"
        "1 hangs, 2 failed, 12 passed\n"
    )
    assert half_hour.spoilt(held.work) == ["padded", "taps"]
    says = ("import sys", "print(*sys.argv[1:])")
    part = half_hour.Part(
        name="says", seconds=60, command=(sys.executable, "-c", "; ".join(says), "{without}")
    )
    held.run(part)
    assert (held.work / "says.log").read_text().strip().endswith("direct,padded,taps")
    (held.work / "wavelet.log").write_text(
        "wavelet: conv_fwd_cuda_a, or cuDNN after it, hangs; ...\n"
    )
    (held.work / "vendor.log").write_text("ok\nconv_fwd_cuda_b took the device down: illegal\n")
    assert half_hour.spoilt(held.work)[:2] == ["conv_fwd_cuda_a", "conv_fwd_cuda_b"]


def test_what_an_earlier_call_packed_is_carried_on(tmp_path: Path) -> None:
    half_hour, held = journey(tmp_path)
    held.run(half_hour.Part(name="says", seconds=60, command=(sys.executable, "-c", "print(42)")))
    there = tmp_path / "there"
    there.mkdir()
    half_hour.unpack(held.out / "results.tar.gz", there)
    again = half_hour.Journey(there, held.out, 0.0, is_dry=False)
    assert again.codes == {"says": 0} and "42" in (there / "says.log").read_text()
    (there / "says.log").write_text("newer")
    half_hour.unpack(held.out / "results.tar.gz", there)
    assert (there / "says.log").read_text() == "newer"


@pytest.mark.parametrize(
    "bad", [entry("../x.log"), entry("a/x.log"), entry("x.log", tarfile.SYMTYPE, "/etc/passwd")]
)
def test_results_are_files_that_parts_leave(bad: Any, tmp_path: Path) -> None:
    half_hour = importlib.import_module("half_hour")
    (tmp_path / "results.tar").write_bytes(packed(entry("store"), bad))
    work = tmp_path / "work"
    work.mkdir()
    with pytest.raises(SystemExit, match="which no part left"):
        half_hour.unpack(tmp_path / "results.tar", work)
    assert not list(tmp_path.glob("*.log")) and not list(work.rglob("x.log"))


def test_every_family_is_tried_on_layers_that_it_serves() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tests/gpu"))
        family_cases = importlib.import_module("family_cases")
    arch = load_arch("sm_90:H200")
    found = {pair: list(family_cases.cases(*pair, arch)) for pair in family_cases.families()}
    assert len(found) > 30 and all(found.values())
    ragged = [problem for _, problem, _ in found["conv_bwd_data", "ragged"]]
    assert any(p.ndim == 3 for p in ragged) and any((p.c // p.g) % 16 for p in ragged)
    walking = [k for _, _, kernels in found["conv_bwd_weight", "im2col"] for k in kernels]
    assert {kernel.persistent for kernel in walking} == {False, True}
