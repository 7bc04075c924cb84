"""Small sound files of every kind, made once, for the fuzz tests to spoil."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tilewise.core.arch import load_arch
from tilewise.core.identity import canonical_json
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import Measurement, Policy, Setting
from tilewise.data.store import write_rows
from tilewise.ops.configs import dump_kernels, load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.fields import figures
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.problems.files import write_problems

ARCH = load_arch("x86_avx512")
COMMANDS = """\
./bin/MIOpenDriver conv -n 2 -c 8 -H 14 -W 14 -k 8 -y 3 -x 3 -p 1 -q 1 -l 1 -j 1 -m conv -g 1 -F 1
MIOpenDriver convbfp16 -n 2 -c 8 -H 14 -W 14 -k 8 -y 3 -x 3 -F 0 -_ 2
MIOpenDriver gemm -m 8 -n 8 -k 8
"""


@cache
def kernels() -> tuple[Kernel, ...]:
    """A few that serve fp32."""
    pool = load_pool(get_op("gemm"), ARCH, ["cpu"])
    return tuple(k for k in pool if k.to_dict()["dtype"] == "fp32")[:6]


@cache
def measurements() -> tuple[Measurement, ...]:
    """A few kernels on a few problems, some of them failing."""
    setting = Setting(arch=ARCH.name, device=ARCH.name, toolchain="t", policy=Policy())
    rows = []
    for i in range(24):
        problem = GemmProblem(m=64 << (i % 4), n=128, k=64 * (i + 1), dtype="fp32")
        for place, kernel in enumerate(kernels()):
            is_ok = (i + place) % 7 > 0
            time_us = 1000.0 + i + place
            rows.append(
                Measurement.of(
                    problem,
                    kernel,
                    setting,
                    status="ok" if is_ok else "timeout",
                    time_us=time_us if is_ok else None,
                    spread_us=0.1 if is_ok else None,
                    repeats=5,
                )
            )
    return tuple(rows)


def write_wide_model(folder: Path) -> None:
    """A model of two numbers of threads whose scores start from a share of an estimate."""
    from tilewise.learn.dataset import from_measurements
    from tilewise.learn.params import Params
    from tilewise.learn.train import save, train

    rows = []
    for threads in (1, 2):
        stand = ARCH.with_figures(device="a CPU", compute_units=threads)
        setting = Setting(
            arch=ARCH.name,
            device=stand.device,
            toolchain="t",
            policy=Policy(threads=threads),
            figures=canonical_json(figures(stand)),
        )
        for i in range(12):
            problem = GemmProblem(m=64 << (i % 4), n=128, k=64 * (i + 1), dtype="fp32")
            rows += [
                Measurement.of(problem, kernel, setting, status="ok", time_us=1000.0 + i + place)
                for place, kernel in enumerate(kernels())
            ]
    data = from_measurements(rows, op="gemm")
    params = Params(trees=8, leaves=4, vendor_trees=0, objective="regression", base=0.5)
    save(train(data, params, fold_count=3, name="wide"), data, folder)


def write_material(folder: Path) -> None:
    """Everything that a command or a reader may be given."""
    from tilewise.learn.dataset import from_stores
    from tilewise.learn.params import Params
    from tilewise.learn.train import save, train

    write_rows(folder / "store", measurements())
    data = from_stores([folder / "store"], op="gemm", arch=ARCH)
    params = Params(trees=8, leaves=4, vendor_trees=0)
    save(train(data, params, fold_count=3, name="small"), data, folder / "model")
    problems = [GemmProblem(m=8, n=16, k=32, dtype="bf16"), GemmProblem(m=1, n=7, k=5)]
    for suffix in ("csv", "json", "jsonl"):
        write_problems(folder / f"p.{suffix}", problems, [{"layer": "a"}, {"layer": "b"}])
    (folder / "commands.txt").write_text(COMMANDS)
    (folder / "kernels.json").write_text(dump_kernels(kernels()))
    config = [{"engine": "cpu", "archs": [ARCH.name], "traits": {"family": ["packed"], "mr": 8}}]
    (folder / "config.json").write_text(json.dumps(config))
    rows = [{"kernel": k.name, "M": 8, "N": 8, "K": 8, "latency_ms": 0.1} for k in kernels()]
    (folder / "bench.json").write_text(json.dumps(rows))
