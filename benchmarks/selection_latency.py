"""How long a selection takes, from a problem to the ranked pool, against LightGBM and NumPy.

    python benchmarks/selection_latency.py [--model FOLDER] [--json]

Every timed call is for another problem, one thread. `p50_us` and `p99_us` are the compiled path
(features, forest, sort, kernels in order), `lightgbm_p50_us` the same model through LightGBM's
predict with NumPy features, `remembered_us` the median of asking again, `numpy_p50_us` the path
without a compiler.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.core.arch import load_arch
from tilewise.core.kernel import Kernel
from tilewise.core.model import Model, load_model
from tilewise.core.problem import Problem
from tilewise.learn.synthetic import synthetic_problems
from tilewise.ops.builder import load_pool
from tilewise.ops.contract import get_op
from tilewise.selection.models import SHIPPED
from tilewise.selection.scorer import NumpyScorer
from tilewise.selection.selector import Selector

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


def pool_of(model: Model, count: int) -> list[Kernel]:
    """The model's own kernels, then others of the shipped pool, repeated where there are fewer."""
    op = get_op(model.op)
    arch = load_arch(model.arch, model.device)
    known = [op.kernel_from_name(name) for name in model.manifest["kernels"]]
    more = [k for k in load_pool(op, arch) if k.engine in model.calibration.engines]
    pool = list(dict.fromkeys([*known, *more]))
    return (pool * (1 + count // len(pool)))[:count]


def through_lightgbm(folder: Path, selector: Selector) -> Callable[[Problem], list[Kernel]]:
    """The same model by LightGBM's predict over NumPy features."""
    import lightgbm

    booster = lightgbm.Booster(model_file=str(folder / "rank.txt"))
    names = booster.feature_name()
    plain = NumpyScorer(selector.model, selector.kernels, selector.arch)
    features = selector.model.features
    known = [n for n in names if n in features.features]

    def rank(problem: Problem) -> list[Kernel]:
        found = features.evaluate(plain.rows(problem), [*known, "calibrated_us"])
        zero = np.zeros(len(selector.kernels))
        matrix = np.column_stack([found.get(n, zero) for n in names])
        score = booster.predict(matrix, num_threads=1) - np.log2(found["calibrated_us"])
        return [selector.kernels[i] for i in np.argsort(-score, kind="stable")]

    return rank


def measure(folder: Path, count: int, repeats: int) -> dict[str, Any]:
    """One row of the report."""
    model = load_model(folder)
    selector = Selector(model, pool_of(model, count), compiled=True)
    problems = synthetic_problems(model.op, model.dtypes[0], repeats, seed=1)
    fast = timed(selector.ranking, problems)
    few = problems[: max(30, min(300, 30_000 // count))]
    slow = timed(through_lightgbm(folder, selector), few)
    plain = Selector(model, selector.kernels, compiled=False)
    numpy_times = timed(plain.ranking, few)
    for problem in few:
        selector._chosen[selector._key(problem)] = selector.kernels[0]
    again = np.repeat(timed(selector.select, few * 10), 1)
    p50, p99 = np.percentile(fast, [50, 99])
    return {
        "candidates": count,
        "p50_us": round(float(p50), 2),
        "p99_us": round(float(p99), 2),
        "lightgbm_p50_us": round(float(np.median(slow)), 1),
        "times_faster": round(float(np.median(slow) / p50), 1),
        "numpy_p50_us": round(float(np.median(numpy_times)), 1),
        "remembered_us": round(float(np.median(again)), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=SHIPPED / "ck_tile_gfx950_conv_fwd_bf16")
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    start = time.perf_counter()
    load_model(options.model)
    load_ms = 1e3 * (time.perf_counter() - start)
    rows = []
    for count in CANDIDATES:
        rows.append(measure(options.model, count, max(200, options.repeats * 30 // max(30, count))))
        if not options.json:
            print("  ".join(f"{k} {v}" for k, v in rows[-1].items()), flush=True)
    if options.json:
        print(json.dumps({"rows": rows, "model_load_ms": round(load_ms, 1)}, indent=1))
    else:
        print(f"the model loads in {load_ms:.1f} ms", file=sys.stderr)


if __name__ == "__main__":
    main()
