"""How long a selection takes, from a problem to the ranked pool, against LightGBM and NumPy.

    python benchmarks/selection_latency.py [--model FOLDER] [--json]
    python benchmarks/selection_latency.py --soak 1000000

Every timed call is for another problem, one thread. `p50_us` and `p99_us` are the compiled path
(features, forest, sort, kernels in order), `lightgbm_p50_us` the same model through LightGBM's
predict with NumPy features (of a folder that training wrote; shipped ones are without LightGBM's
text, and without that column), `numpy_p50_us` the path without a compiler. `remembered_us` is
asking again with the same problem, `remembered_equal_us` with an equal one made anew (its making is
not counted). The row `dispatch` is `tilewise.select` over the whole shipped pool of the model's
architecture: legality, padding, priorities and ties included.

`--soak` selects so many times, every time for another problem, and tells the memory this process
holds before and after; what is remembered fills up before the first reading.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.core.arch import load_arch
from tilewise.core.kernel import Kernel
from tilewise.core.model import VENDOR, Model, forest_text, load_model
from tilewise.core.problem import Problem
from tilewise.dispatch import Dispatcher, default_registry
from tilewise.errors import NoKernelError
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.problems.sampling import sample
from tilewise.selection.models import SHIPPED
from tilewise.selection.ranker import ModelRanker
from tilewise.selection.scorer import NumpyScorer
from tilewise.selection.selector import REMEMBERED, Selector

CANDIDATES = (30, 100, 1024, 4608)


def timed(call: Callable[[Problem], Any], problems: Sequence[Problem]) -> np.ndarray:
    """Microseconds of each call."""
    clock = time.perf_counter_ns
    times = np.empty(len(problems))
    for problem in problems[:20]:
        call(problem)
    gc.disable()
    for i, problem in enumerate(problems):
        start = clock()
        call(problem)
        times[i] = clock() - start
    gc.enable()
    return times * 1e-3


def problems_of(model: Model, count: int, seed: int) -> list[Problem]:
    """Different problems that the model is for."""
    arch = load_arch(model.arch, model.device)
    return sample(model.op, arch, count, dtype=model.dtypes[0], seed=seed).problems


def pool_of(model: Model, count: int) -> list[Kernel]:
    """The model's own kernels, then others of the shipped pool, repeated where there are fewer."""
    op = get_op(model.op)
    arch = load_arch(model.arch, model.device)
    known = [op.kernel_from_name(name) for name in model.manifest["kernels"]]
    more = [k for k in load_pool(op, arch) if k.engine in model.calibration.engines]
    pool = list(dict.fromkeys([*known, *more]))
    return (pool * (1 + count // len(pool)))[:count]


def forests_of(model: Model) -> list[str]:
    """Those that a ranking asks."""
    return [name for name in ("rank", VENDOR) if name in model.forests]


def has_texts(folder: Path, model: Model) -> bool:
    """Whether LightGBM's own text of the forests lies beside the model."""
    return all((folder / f"{name}.txt.gz").exists() for name in forests_of(model))


def through_lightgbm(folder: Path, selector: Selector) -> Callable[[Problem], list[Kernel]]:
    """The same model by LightGBM's predict over NumPy features."""
    import lightgbm

    forests = forests_of(selector.model)
    boosters = [lightgbm.Booster(model_str=forest_text(folder, name)) for name in forests]
    is_vendor = np.array([k.engine == VENDOR for k in selector.kernels])
    plain = NumpyScorer(selector.model, selector.kernels, selector.arch)
    features = selector.model.features
    named = [booster.feature_name() for booster in boosters]
    known = [n for n in dict.fromkeys(chain(*named)) if n in features.features]
    zero = np.zeros(len(selector.kernels))

    def rank(problem: Problem) -> list[Kernel]:
        found = features.evaluate(plain.rows(problem), [*known, "calibrated_us"])
        matrix = np.column_stack([found.get(n, zero) for n in named[0]])
        score = boosters[0].predict(matrix, num_threads=1)
        if is_vendor.any() and boosters[1:]:
            matrix = np.column_stack([found.get(n, zero)[is_vendor] for n in named[1]])
            score[is_vendor] = boosters[1].predict(matrix, num_threads=1)
        score = score - np.log2(found["calibrated_us"])
        return [selector.kernels[i] for i in np.argsort(-score, kind="stable")]

    return rank


def measure(folder: Path, count: int, repeats: int) -> dict[str, Any]:
    """One row of the report."""
    model = load_model(folder)
    selector = Selector(model, pool_of(model, count), compiled=True)
    problems = problems_of(model, repeats, seed=1)
    fast = timed(selector.ranking, problems)
    few = problems[: max(30, min(300, 30_000 // count))]
    slow = timed(through_lightgbm(folder, selector), few) if has_texts(folder, model) else None
    plain = Selector(model, selector.kernels, compiled=False)
    numpy_times = timed(plain.ranking, few)
    served = [problem for problem in few if is_served(selector, problem)]
    again = timed(selector.select, served * 10)
    equal = timed(selector.select, [replace(problem) for problem in served * 10])
    p50, p99 = np.percentile(fast, [50, 99])
    beside: dict[str, float] = {}
    if slow is not None:
        beside["lightgbm_p50_us"] = round(float(np.median(slow)), 1)
        beside["times_faster"] = round(float(np.median(slow) / p50), 1)
    return {
        "candidates": count,
        "p50_us": round(float(p50), 2),
        "p99_us": round(float(p99), 2),
        **beside,
        "numpy_p50_us": round(float(np.median(numpy_times)), 1),
        "remembered_us": round(float(np.median(again)), 3),
        "remembered_equal_us": round(float(np.median(equal)), 3),
    }


def is_served(selector: Selector, problem: Problem) -> bool:
    """Whether some kernel can serve the problem; it is remembered from then on."""
    try:
        selector.select(problem)
    except NoKernelError:
        return False
    return True


def measure_dispatch(folder: Path, repeats: int) -> dict[str, Any]:
    """What `tilewise.select` takes over the whole shipped pool."""
    model = load_model(folder)
    registry = default_registry(model.op, load_arch(model.arch, model.device))
    dispatcher = Dispatcher(registry, rankers=[ModelRanker(model)])
    problems = problems_of(model, repeats, seed=2)
    fresh = timed(dispatcher.select, problems)
    again = timed(dispatcher.select, [replace(p) for p in problems[-200:]])
    p50, p99 = np.percentile(fresh[20:], [50, 99])  # the first are known from warming up
    return {
        "dispatch": len(registry),
        "p50_us": round(float(p50), 1),
        "p99_us": round(float(p99), 1),
        "remembered_equal_us": round(float(np.median(again)), 3),
    }


def soak(folder: Path, count: int) -> list[dict[str, Any]]:
    """Memory before and after `count` selections, by the way of asking."""
    model = load_model(folder)
    selector = Selector(model, pool_of(model, 100), compiled=True)
    seeds = problems_of(model, 50, seed=3)
    seeds = [problem for problem in seeds if is_served(selector, problem)]
    size = "m" if model.op == "gemm" else "n"
    rows = []
    for name, call in (("ranking", selector.ranking), ("select", selector.select)):

        def ask(first: int, last: int, call: Callable[[Problem], Any] = call) -> None:
            for i in range(first, last):
                problem = seeds[i % len(seeds)]
                call(replace(problem, **{size: 1 + i // len(seeds)}))

        warm = REMEMBERED if name == "select" else 1000
        ask(0, warm)
        before, start = rss_kb(), time.perf_counter()
        ask(warm, warm + count)
        seconds = time.perf_counter() - start
        rows.append(
            {
                "soak": name,
                "selections": count,
                "rss_before_kb": before,
                "rss_after_kb": rss_kb(),
                "us_each": round(1e6 * seconds / count, 1),
            }
        )
    return rows


def rss_kb() -> int:
    """Memory that this process holds now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 1024


def rows_of(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of the report, one after another."""
    if options.soak:
        yield from soak(options.model, options.soak)
        return
    for count in CANDIDATES:
        yield measure(options.model, count, max(200, options.repeats * 30 // max(30, count)))
    yield measure_dispatch(options.model, 500)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=SHIPPED / "ck_tile_gfx950_conv_fwd_bf16")
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--soak", type=int, default=0, help="select so many times, watch memory")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    start = time.perf_counter()
    load_model(options.model)
    load_ms = 1e3 * (time.perf_counter() - start)
    rows: list[dict[str, Any]] = []
    for row in rows_of(options):
        rows.append(row)
        if not options.json:
            print("  ".join(f"{k} {v}" for k, v in row.items()), flush=True)
    if options.json:
        print(json.dumps({"rows": rows, "model_load_ms": round(load_ms, 1)}, indent=1))
    else:
        print(f"the model loads in {load_ms:.1f} ms", file=sys.stderr)


if __name__ == "__main__":
    main()
