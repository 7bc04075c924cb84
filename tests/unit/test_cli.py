"""The command line: JSON on stdout, one clear line on stderr, and honest exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tilewise import __version__
from tilewise.cli.session import executor, settled_policy
from tilewise.core.arch import load_arch
from tilewise.core.measurement import Policy
from tilewise.core.model import load_model
from tilewise.errors import InputError
from tilewise.selection.models import SHIPPED
from tilewise.sweep.crew import WorkerConfig


def tilewise(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tilewise", *words], capture_output=True, text=True, timeout=600
    )


def shown(*words: str) -> object:
    ran = tilewise(*words, "--json")
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_the_version_is_told() -> None:
    assert tilewise("--version").stdout == f"tilewise {__version__}\n"


def test_arch_commands() -> None:
    names = {arch["name"] for arch in shown("arch", "list")}
    assert {"gfx90a", "gfx942", "gfx950", "sm_80", "sm_90", "sm_100", "x86_avx2"} <= names
    h200 = shown("arch", "show", "sm_90:H200")
    assert h200["compute_units"] == 132
    assert set(h200["sources"]) >= {"compute_units", "memory_gb_s", "l2_bytes"}
    assert shown("arch", "detect")["compute_units"] >= 1


def test_a_config_without_kernels_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    traits = {"isa": "avx2", "family": "packed", "mr": [999]}
    config.write_text(json.dumps([{"engine": "cpu", "traits": traits}]))
    for command in ("count", "list"):
        words = ("kernels", command, "--op", "gemm", "--arch", "x86_avx2", "--config", str(config))
        ran = tilewise(*words)
        assert ran.returncode == 2
        assert "gives no kernel of gemm on x86_avx2" in ran.stderr
    traits = {"isa": "avx2", "family": "packed", "access": "panels", "split": "grid"}
    traits |= {"mr": 4, "nr": 16, "mc": 96, "kc": 256, "nc": 4096}
    config.write_text(json.dumps([{"engine": "cpu", "traits": traits}]))
    assert tilewise(*words).returncode == 0
    ran = tilewise(*words, "--dtype", "bf16")
    assert ran.returncode == 2
    assert "but none in bf16" in ran.stderr


def test_kernels_list_filter_export_and_check(tmp_path: Path) -> None:
    everything = shown("kernels", "list", "--op", "gemm", "--arch", "x86_avx2", "--dtype", "fp32")
    packed = shown(
        *("kernels", "list", "--op", "gemm", "--arch", "x86_avx2", "--dtype", "fp32"),
        *("--filter", "family == 'packed'"),
    )
    assert 0 < len(packed) < len(everything)
    counted = shown("kernels", "count", "--op", "gemm", "--arch", "x86_avx2", "--dtype", "fp32")
    assert counted["count"] == len(everything)
    file = tmp_path / "kernels.json"
    shown("kernels", "export", str(file), "--op", "gemm", "--arch", "x86_avx2")
    checked = shown("kernels", "check", "--op", "gemm", "--arch", "x86_avx2", "--file", str(file))
    assert checked["refused"] == {}
    refused = tilewise("kernels", "check", "--op", "gemm", "--arch", "sm_90", packed[0]["name"])
    assert refused.returncode == 1


def test_a_pool_is_checked_by_reason() -> None:
    words = ("kernels", "check", "--op", "gemm", "--arch", "sm_90", "--dtype", "bf16")
    problem = ("M=16", "N=2112", "K=7168")
    told = tilewise(*words, *problem)
    assert told.returncode == 0
    head, _, _, *lines = told.stdout.splitlines()
    served, checked = map(int, re.findall(r"\d+", head)[:2])
    counts = [int(line.split()[0]) for line in lines]
    assert sum(counts) == checked - served == len(shown(*words, *problem)["refused"])
    assert counts == sorted(counts, reverse=True)
    assert f"{counts[0]}  it multiplies fp16, not bf16" in lines[0]


def test_rank_says_who_chose() -> None:
    ranked = shown(
        *("rank", "--op", "gemm", "--arch", "x86_avx2", "--dtype", "fp32"),
        *("M=128", "N=1536", "K=7168"),
    )
    assert ranked["path"] in ("model", "analytic")
    assert ranked["ranking"][0]["predicted_tflops"] > 0
    assert len(ranked["ranking"]) == 10


@pytest.mark.parametrize(
    "words",
    [
        ("--op", "gemm", "--arch", "x86_avx512", "--dtype", "fp32", "M=128", "N=512", "K=256"),
        ("--op", "gemm", "--arch", "sm_90", "--dtype", "bf16", "M=128", "N=512", "K=257"),
        ("--op", "conv_fwd", "--arch", "x86_avx512", "N=2", "C=64", "K=64", "Hi=7", "Wi=7"),
    ],
)
def test_rank_and_explain_count_the_same_candidates(words: tuple[str, ...]) -> None:
    more = ("Y=3", "X=3") if "conv_fwd" in words else ()
    ranked = shown("rank", *words, *more, "--top", "1000")
    explained = shown("explain", *words, *more)
    assert explained["candidates"] == ranked["candidates"] == len(ranked["ranking"]) > 1
    taken = explained["taken"]
    assert ranked["kernel"] in (explained["kernel"], taken)


def test_rank_and_explain_predict_the_same_for_a_named_architecture() -> None:
    words = ("--op", "gemm", "--arch", "x86_avx512", "--dtype", "fp32", "M=512", "N=300", "K=700")
    explained = shown("explain", *words)
    ranked = {r["kernel"]: r["predicted_us"] for r in shown("rank", *words)["ranking"]}
    assert ranked[explained["kernel"]] == pytest.approx(explained["predicted_us"])


def test_export_c_takes_the_figures_of_the_measured_device(tmp_path: Path) -> None:
    model = SHIPPED / "x86_avx512_conv_fwd_fp32"
    figures = load_model(model).trained_on
    shown("export-c", str(model), str(tmp_path / "a.h"))
    shown("export-c", str(model), str(tmp_path / "b.h"), "--arch", "x86_avx512")
    text = (tmp_path / "a.h").read_text()
    assert (tmp_path / "b.h").read_text() == text
    where = text.index("_arch[")
    assert repr(float(figures.memory_gb_s)) in text[where : text.index("}", where)]


def test_figures_that_are_given_count() -> None:
    model = load_model(SHIPPED / "x86_avx512_gemm_fp32")
    named = load_arch("x86_avx512")
    assert model.figures_for(named) == model.figures_for(None) == model.trained_on
    given = named.with_figures(compute_units=8)
    assert model.figures_for(given) == given
    assert model.figures_for(load_arch("x86_avx2")) == load_arch("x86_avx2")


def test_a_clusters_address_is_for_ray() -> None:
    with pytest.raises(InputError, match="add --on ray"):
        executor("local", WorkerConfig(engines=(), policy=Policy(), kind="cpu"), 1, "x:1")


def test_search_asks_no_model_of_another_op() -> None:
    words = f"--op conv_fwd --arch sm_90 --dtype bf16 --model {SHIPPED / 'sm_90_gemm'}"
    done = tilewise("search", *words.split(), "N=1", "C=8", "K=8", "Hi=8", "Wi=8", "Y=1", "X=1")
    assert done.returncode == 2
    assert "cannot be asked: the model is for gemm, the problem is conv_fwd" in done.stderr


def test_rank_of_no_work_shows_no_table() -> None:
    ran = tilewise(*("rank", "--op", "gemm", "--arch", "x86_avx2", "M=5", "N=3", "K=0"))
    assert "a size is zero" in ran.stdout
    assert "TFLOPS" not in ran.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rank", "--op", "gemm", "M=1"], "N, K missing; gemm needs at least M, N, K"),
        (["rank", "--op", "gemm", "M=1", "M=2", "N=1", "K=1"], "M is given twice"),
        (["rank", "--op", "gemm", "--engine", "abacus", "M=1", "N=1", "K=1"], "'abacus'"),
        (["kernels", "list", "--op", "gemm", "--dtype", "bogus"], "dtype is 'bogus'"),
        (["kernels", "count", "--op", "gemm", "--engine", "abacus"], "'abacus'"),
        (["kernels", "count", "--op", "gemm", "--config", "/dev/null"], "not a config"),
        (["kernels", "check", "--op", "gemm", "--file", "/bin/true"], "cannot be read"),
        (["kernels", "export", "/", "--op", "gemm", "--arch", "x86_avx2"], "not a file name"),
        (["build", "--op", "gemm", "--arch", "gfx942", "--engine", "ck_tile"], "own library"),
        (["rank", "--op", "gemm", "M=1", "N=1", "K"], "'K' is not KEY=VALUE"),
        (["rank", "--op", "gemm", "M=1", "N=1", "K=1", "Z=1"], "gemm has no Z"),
        (["rank", "--op", "gem", "M=1"], "op 'gem' is unknown; use one of"),
        (["rank", "--op", "gemm", "--arch", "sm_12", "M=1", "N=1", "K=1"], "'sm_12' is unknown"),
        (["rank", "--op", "gemm", "--dtype", "fp3", "M=1", "N=1", "K=1"], "dtype is 'fp3'"),
        (["kernels", "list", "--op", "gemm", "--filter", "__import__('os')"], "not allowed"),
        (["kernels", "list", "--op", "gemm", "--filter", "famly == 'packed'"], "did you mean"),
        (["arch", "show", "z80"], "unknown"),
        (["sweep", "", "--op", "gemm", "--problems", "-"], "path is empty"),
        (["sweep", "s", "--op", "gemm", "--problems", "-", "--timeout", "inf"], "--timeout is inf"),
        (["problems", "sample", "--op", "gemm", "--dtype", "fp99"], "'fp99'"),
        (["no-such-verb"], "No such command"),
    ],
)
def test_bad_input_is_two_and_one_clear_message(words: list[str], says: str) -> None:
    ran = tilewise(*words)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert ran.stdout == ""
    assert says in ran.stderr
    assert "Traceback" not in ran.stderr


def test_wrong_words_are_told_where_the_right_ones_stand() -> None:
    assert tilewise("sweep").stderr.endswith(
        "Missing argument 'store'; see `python -m tilewise sweep -h`\n"
    )
    assert tilewise("rnk").stderr.endswith("Did you mean 'rank'?\n")


@pytest.mark.parametrize("group", [(), ("data",)])
def test_no_words_at_all_show_the_help(group: tuple[str, ...]) -> None:
    ran = tilewise(*group)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == tilewise(*group, "-h").stdout


def test_an_interrupt_while_modules_are_imported_is_no_traceback() -> None:
    code = """
import sys
import tilewise.cli
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "tilewise.cli.app":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
tilewise.cli.main()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "tilewise: stopped\n")


def test_a_sweep_stops_in_order_from_its_first_moment() -> None:
    code = """
import os, signal, sys
import tilewise.cli
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "tilewise.cli.app":
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Finder())
sys.argv = ["tilewise", "sweep", "store"]
tilewise.cli.main()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "tilewise: stopped\n")


def test_a_cpu_has_no_graphs() -> None:
    for words in ("graph", "quick,launch=graph"):
        with pytest.raises(InputError, match="launch=eager"):
            settled_policy(words, "cpu")
        assert settled_policy(words, "gpu").launch == "graph"


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    words = [
        sys.executable,
        "-m",
        "tilewise",
        "kernels",
        "list",
        "--op",
        "gemm",
        "--arch",
        "gfx950",
    ]
    listing = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert listing.stdout is not None
    listing.stdout.readline()
    listing.stdout.close()
    assert listing.wait(timeout=600) == 0
    assert listing.stderr is not None
    assert listing.stderr.read() == b""
    listing.stderr.close()


def test_doctor_and_a_small_build(tmp_path: Path) -> None:
    names = {row["what"] for row in shown("doctor")}
    assert {"C++ compiler", "device", "cache"} <= names
    built = shown(
        *("build", "--op", "gemm", "--dtype", "fp32", "--engine", "cpu"),
        *("--filter", "family == 'gemv' and access == 'dot' and ahead == 0"),
    )
    assert built["ok"] == len(built["kernels"]) > 0


def test_what_a_model_never_saw_has_no_forecast() -> None:
    problem = ["N=2", "C=512", "K=512", "Hi=7", "Wi=7", "Y=3", "X=3", "pad_h=1", "pad_w=1"]
    where = ["--op", "conv_fwd", "--arch", "x86_avx512", "--top", "100"]
    line = ["rank", *where, *problem, "layout=nchw"]
    ranked = json.loads(tilewise(*line, "--json").stdout)["ranking"]
    unseen = [row for row in ranked if row["kernel"] == "conv_fwd_vendor_numpy"]
    assert unseen == ranked[-1:]
    assert unseen[0]["predicted_us"] is unseen[0]["predicted_tflops"] is None
    assert all(row["predicted_tflops"] > 1e-3 for row in ranked[:-1])
    assert "e-3" not in tilewise(*line).stdout


@pytest.mark.parametrize("words", ["rank --op nosuch M=8", "arch show sm_90 --json", "--version"])
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_may_be_closed(tmp_path: Path, words: str, closed: str) -> None:
    """No file takes the number of one, and nothing ends in a traceback."""
    log = tmp_path / "log"
    shown = f"{sys.executable} -m tilewise {words} >{log} 2>&1 {closed}"
    ran = subprocess.run(["sh", "-c", shown], check=False)
    assert ran.returncode == (2 if "nosuch" in words else 0)
    assert "Traceback" not in log.read_text()
