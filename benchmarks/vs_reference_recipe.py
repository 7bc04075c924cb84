"""The reference's recipe against ours on the same rows and folds, one difference at a time.

    python benchmarks/vs_reference_recipe.py --data FILE.csv [--trees 2000] [--json]
    python benchmarks/vs_reference_recipe.py --data STORE --dtype bf16 [--trees 2000] [--json]
    python benchmarks/vs_reference_recipe.py --data STORE --model FOLDER [--trees 2000] [--json]

The reference's recipe is its 97 convolution or 72 GEMM features with their defects (of convolution:
tile roles permuted, groups ignored; of both: the last tile taken for all, no rounding to waves, few
of a kernel's traits), log TFLOPS, and 2000 trees of 255 leaves. Each following line changes one
thing and keeps the rest. The vendor's rows are left out: the reference does not know the vendor.

With a model, the recipe learns from the store by that model's folds, and both are judged on the
problems that judge the model, each by what never saw them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.core.arch import Arch, load_arch
from tilewise.data.importing import read_measurements
from tilewise.errors import TilewiseError
from tilewise.learn.cross import SEEN, cross_validate
from tilewise.learn.dataset import Dataset, from_measurements, from_stores
from tilewise.learn.evaluate import read_folds
from tilewise.learn.fit import Trainer
from tilewise.learn.params import Params
from tilewise.learn.score import analytic_us, judge, summary
from tilewise.learn.split import folds

LARGE = {"num_leaves": 255, "max_depth": 15, "learning_rate": 0.02, "min_data_in_leaf": 10}
LARGE |= {"feature_fraction": 0.85, "lambda_l1": 0.05, "lambda_l2": 0.5}


def reference_features(data: Dataset) -> np.ndarray:
    """The reference's columns as it computes them, defects included."""
    return gemm_features(data) if data.op == "gemm" else conv_features(data)


def gemm_features(data: Dataset) -> np.ndarray:
    """Of a matrix product: what the reference has no name for (stages, swaps, ...) is not there."""
    arch, rows = data.arch, []
    families = sorted({str(getattr(k, "family", "")) for k in data.kernels})
    for p_at, k_at in zip(data.problem_index, data.kernel_index, strict=True):
        p: Any = data.problems[p_at]
        kernel: Any = data.kernels[k_at]
        tile_m, tile_n, tile_k = kernel.tile
        warps = getattr(kernel, "warps", 4)
        element = 4 if p.dtype == "fp32" else 1 if p.dtype == "fp8" else 2
        moved = element * (p.m * p.k + p.k * p.n + p.m * p.n)
        sizes = ((p.m, tile_m), (p.n, tile_n), (p.k, tile_k))
        tiles = [-(-size // t) for size, t in sizes]
        last = [(size % t) / t if size % t else 1.0 for size, t in sizes]
        lds = (tile_m + tile_n) * tile_k * element
        logs = [np.log2(v) for v in (p.m, p.n, p.k, p.m * p.n * p.k)]
        problem = [p.m, p.n, p.k, getattr(kernel, "split_k", 1), *logs]
        problem += [2 * p.m * p.n * p.k / moved, p.m / p.n, p.m / p.k, p.n / p.k]
        problem += [("rcr", "rrr", "crr", "ccr").index(p.layout)]
        own = [tile_m, tile_n, tile_k, warps, 1, 1, 16, 16, 16]
        own += [families.index(str(getattr(kernel, "family", ""))), 0, 0, 1, 1, 1]
        own += [getattr(kernel, "family", "") in ("ws", "duo", "pingpong", "streamk"), warps]
        own += [tile_m * tile_n * tile_k, tile_m * tile_n, lds, lds / 65536]
        both = [*tiles, tiles[0] * tiles[1], *last, np.prod(last)]
        both += [tiles[0] * tiles[1] / arch.compute_units, *(size / t for size, t in sizes)]
        small = [size < t for size, t in sizes]
        ragged = [size % t != 0 for size, t in sizes]
        both += [*small, any(small), *ragged, *ragged, 0, 0, 0, 0]
        rows.append([float(v) for v in [*problem, *own, *both, *hardware(arch)]])
    return np.array(rows)


def hardware(arch: Arch) -> list[float]:
    """The same in every row."""
    cus = arch.compute_units
    found = [cus, arch.simds_per_cu, cus * arch.simds_per_cu, arch.shader_engines]
    found += [arch.clock_mhz, arch.max_warps_per_cu, arch.warp_size, 65536]
    found += [arch.l1_bytes // 1024, arch.l2_bytes // 1024, arch.l3_bytes // 1024, arch.num_xcd]
    return [float(v) for v in found]


def conv_features(data: Dataset) -> np.ndarray:
    """Of a forward convolution of CK Tile."""
    arch, rows = data.arch, []
    cus = arch.compute_units
    for p_at, k_at in zip(data.problem_index, data.kernel_index, strict=True):
        p: Any = data.problems[p_at]
        kernel: Any = data.kernels[k_at]
        # Read as threads, tile_m and tile_n: every role is shifted by one.
        block, tile_m, tile_n = kernel.tile
        pipeline = ("compv3", "compv4", "compv5").index(kernel.pipeline) + 3
        out = p.out_d * p.out_h * p.out_w
        m, n, k = p.n * out, p.k, p.c // p.g * p.taps
        element = 2
        moved = element * (m * k + k * n + m * n)
        tiles = [-(-size // max(1, t)) for size, t in ((m, tile_m), (n, tile_n), (k, block))]
        last = [
            (size % t) / t if size % t else 1.0
            for size, t in ((m, tile_m), (n, tile_n), (k, block))
        ]
        lds = (tile_m + tile_n) * 64 * element
        group_c, group_k = p.c // p.g, p.k // p.g
        logs = [np.log2(max(1, v)) for v in (p.n, p.c, p.k, p.g, p.h, p.w)]
        logs += [np.log2(max(1, v)) for v in (p.h * p.w, p.y * p.x, out)]
        problem = [p.n, p.c, p.k, p.g, p.h, p.w, p.y, p.x, p.stride_h, p.stride_w, p.pad_h]
        problem += [p.pad_w, p.out_h, p.out_w, *logs, 2 * m * n * k / moved, p.y * p.x]
        problem += [p.taps == 1, p.y == p.x == 3, group_c, p.h / p.w, p.y / p.x]
        problem += [p.d > 1, p.d, p.z, p.out_d, p.stride_d, p.pad_d, p.dilation_h, p.dilation_w]
        problem += [np.log2(max(1, group_c)), np.log2(max(1, group_k)), p.g == p.c, p.g / p.c]
        problem += [group_c < 16 or group_k < 16, group_c * group_k, p.n * p.g, p.n < 4 < p.g]
        own = [block, tile_m, tile_n, pipeline - 3, 4, tile_m * tile_n * 64, tile_m * tile_n, lds]
        own += [lds / (32768 if pipeline == 4 else 65536), block / tile_m, block / tile_n]
        own += [tile_m * tile_n / 256, pipeline == 3, pipeline == 4, pipeline == 5]
        own += [kernel.scheduler == "intrawave", kernel.double_smem_buffer, kernel.split_image]
        own += [False, False, False]
        both = [m, n, k, *tiles, tiles[0] * tiles[1], *last, np.prod(last)]
        both += [tiles[0] * tiles[1] / cus, m / tile_m, n / tile_n, k / block]
        both += [m < tile_m, n < tile_n, k < block]
        rows.append([float(v) for v in [*problem, *own, *both, *hardware(arch)]])
    return np.array(rows)


def grow(
    matrix: np.ndarray,
    target: np.ndarray,
    data: Dataset,
    fold: np.ndarray,
    settings: Any,
    trees: int,
) -> np.ndarray:
    """Out-of-fold predictions of plain LightGBM."""
    import lightgbm

    base = {"objective": "l2", "verbosity": -1, "seed": 42, "deterministic": True}
    base |= {"force_row_wise": True, "num_threads": 1, **settings}
    out = np.zeros(len(data))
    for number in range(fold.max() + 1):
        test = (fold == number)[data.problem_index]
        use = ~test & data.is_ok
        made = lightgbm.Dataset(matrix[use], target[use])
        out[test] = lightgbm.train(base, made, trees).predict(matrix[test])
    return out


def variants(
    data: Dataset, fold: np.ndarray, trees: int, threads: int, tell: Any
) -> list[dict[str, Any]]:
    """One row per step from the reference's recipe to ours."""
    trainer = Trainer(data)
    speed = np.log1p(data.tflops)
    relative = trainer.centred(-trainer.log_time, data.is_ok)
    theirs, ours = reference_features(data), trainer.static
    large = {**LARGE, "num_threads": threads}
    small = Params().lightgbm()
    rows = []

    def add(name: str, score: np.ndarray) -> None:
        rows.append({"recipe": name, **summary(judge(data, score))})
        tell(f"{name}: mean {rows[-1]['mean']:.2f}, P10 {rows[-1]['p10']:.2f}")

    add("reference recipe", grow(theirs, speed, data, fold, large, trees))
    add("+ our features", grow(ours, speed, data, fold, large, trees))
    add("+ relative target", grow(ours, relative, data, fold, large, trees))
    add("+ small trees", grow(ours, relative, data, fold, small, Params().trees))
    add("+ calibration (ours)", cross_validate(trainer, Params(), fold=fold).score)
    add(
        "reference features in our trees", grow(theirs, relative, data, fold, small, Params().trees)
    )
    add("analytic model, untrained", -analytic_us(data))
    return rows


def beside(
    data: Dataset, folder: Path, trees: int, threads: int, tell: Any
) -> list[dict[str, Any]]:
    """The reference's recipe and a model by the model's own folds, by dtype and together."""
    held, known = read_folds(folder)
    fold = np.array([held.get(problem.key, SEEN) for problem in data.problems])
    pairs = zip(data.problem_index, data.kernel_index, strict=True)
    names = [(data.problems[p].key, data.kernels[k].name) for p, k in pairs]
    own = np.array([known[pair][0] if pair in known else np.nan for pair in names])
    judged = (fold != SEEN)[data.problem_index] & np.isfinite(own)
    tell(f"{len(np.unique(data.problem_index[judged]))} problems, {trees} trees, five folds")
    large = {**LARGE, "num_threads": threads}
    theirs = grow(reference_features(data), np.log1p(data.tflops), data, fold, large, trees)
    of_row = np.array([problem.dtype for problem in data.problems])[data.problem_index]
    scores = {"reference recipe": theirs, folder.name: own}
    rows = []
    for dtype in (*data.dtypes, "all"):
        part = judged & ((of_row == dtype) | (dtype == "all"))
        rows += [
            {"recipe": f"{name}, {dtype}", **summary(judge(data, np.nan_to_num(score), part))}
            for name, score in scores.items()
        ]
    return rows


def read(options: argparse.Namespace) -> Dataset:
    """CK Tile's CSV, or a store without the vendor's rows."""
    if options.data.is_dir():
        data = from_stores([options.data], op=options.op, dtype=options.dtype)
        is_vendor = np.array([k.engine == "vendor" for k in data.kernels])
        return data.keep(~is_vendor[data.kernel_index])
    return from_measurements(
        read_measurements(options.data, load_arch(options.arch), op="conv_fwd").rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="CK Tile's CSV, or a store")
    parser.add_argument("--arch", default="gfx950", help="of the CSV")
    parser.add_argument("--op", default="gemm", help="of the store")
    parser.add_argument("--dtype", default="", help="of the store")
    parser.add_argument("--model", type=Path, help="judge it and the recipe by its folds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--trees", type=int, default=2000, help="of the reference's recipe")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tell = (lambda _: None) if options.json else (lambda text: print(text, file=sys.stderr))
    try:
        data = read(options)
        if options.model:
            rows = beside(data, options.model, options.trees, options.threads, tell)
        else:
            rows = variants(data, folds(data.problems, 5), options.trees, options.threads, tell)
    except TilewiseError as error:
        sys.exit(f"vs_reference_recipe: {error}")
    if options.json:
        print(json.dumps({"problems": len(data.problems), "rows": rows}, indent=1))
        return
    for row in rows:
        print(
            f"{row['recipe']:34} mean {row['mean']:6.2f} median {row['median']:6.2f} "
            f"P10 {row['p10']:6.2f} worst {row['min']:5.1f} "
            f"top-1 {row['top1']:5.1f} top-5 {row['top5']:5.1f}"
        )


if __name__ == "__main__":
    main()
