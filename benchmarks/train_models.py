"""Retrains every shipped model from the published measurements; the same bytes come out.

What serving reads is shipped; LightGBM's texts, folds and out-of-fold predictions, which judge a
model and start another, are written beside it and stay out of the repository.

    python benchmarks/train_models.py [NAME ...] [--amd FILE.csv] [--check] [--json]

`--check` trains beside the shipped folders, compares every byte (of what is not shipped the
checksums in the manifest) and exits with 1 where one differs.
AMD's measurements are not part of this repository; the model of them is left out without `--amd`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import amd_gfx950

from tilewise.core.arch import Arch, load_arch
from tilewise.core.model import load_model
from tilewise.core.sealed import MANIFEST
from tilewise.learn.dataset import Dataset, from_stores
from tilewise.learn.params import Params
from tilewise.learn.train import save, train
from tilewise.selection.models import SHIPPED as FOLDER

ROOT = Path(__file__).resolve().parent.parent
AMD = "ck_tile_gfx950_conv_fwd_bf16"
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a shipped model is trained from, and how."""

    name: str
    stores: tuple[str, ...]
    """Below `datasets/`."""
    arch: Arch
    """With the figures of the device that was measured."""
    op: str = "gemm"
    beside: tuple[str, ...] = ()
    """Ops whose measurements teach, too."""
    params: Params = field(default_factory=Params)


H200 = load_arch("sm_90", "H200")
EMERALD_CORE = load_arch("x86_avx512").with_figures(
    compute_units=1, clock_mhz=3000, l2_bytes=2 << 20, l3_bytes=300 << 20, memory_gb_s=12.0
)
"""One core of the machine that was measured; its clock and bandwidth are assumed."""
UNSPARING = Params(l2=2.0, focus=3.0, max_features=0, max_bin=255, patience=0)
"""All features, finely cut, and every tree."""
CONVOLUTIONS = ("conv_fwd", "conv_bwd_data", "conv_bwd_weight")
RECIPES = (
    # One model of bf16, fp16 and fp8: what one teaches about tiles holds for the others.
    Recipe(
        name="sm_90_gemm",
        stores=("h200/gemm", "h200/gemm_top", "h200/gemm_odd"),
        arch=H200,
        params=replace(
            UNSPARING,
            trees=800,
            leaves=95,
            learning_rate=0.05,
            min_rows=10,
            vendor_trees=1000,
            focus=5.0,
            draws=2,
            threads=2,  # sums of so many rows differ in their last digit with the number of threads
        ),
    ),
    # Of few problems yet: directions teach each other. They start from a quarter of the estimates,
    # which are further off for cuDNN's times than for our kernels': from all of them, choices
    # between the two lost 5 % and more nearly twice as often.
    *(
        Recipe(
            name=f"sm_90_{op}",
            stores=tuple(f"h200/{each}" for each in CONVOLUTIONS),
            arch=H200,
            op=op,
            beside=tuple(each for each in CONVOLUTIONS if each != op),
            params=replace(
                UNSPARING,
                base=0.25,
                calibrated=False,
                trees=300,
                leaves=31,
                learning_rate=0.1,
                min_rows=5,
                column_share=0.25,
                focus=1.0,
                draws=2,
            ),
        )
        for op in CONVOLUTIONS
    ),
    # Four layouts, batches and the vendor's routine take more leaves than a convolution does.
    Recipe(
        name="x86_avx512_gemm_fp32",
        stores=("emerald/gemm", "emerald/gemm_top"),
        arch=EMERALD_CORE,
        params=replace(UNSPARING, trees=500, leaves=63, learning_rate=0.05, min_rows=20, l2=5.0),
    ),
    # Of two kinds of CPU, PyTorch's routine on one of them. These do not start from estimates at
    # all, for the reason above.
    *(
        Recipe(
            name=f"x86_avx512_{op}_fp32",
            stores=(f"emerald/{op}", f"turin/{op}"),
            arch=EMERALD_CORE,
            op=op,
            params=replace(
                UNSPARING,
                base=0,
                calibrated=False,
                trees=400,
                leaves=31,
                learning_rate=0.07,
                min_rows=8,
            ),
        )
        for op in CONVOLUTIONS
    ),
)


def measurements(recipe: Recipe) -> Dataset:
    """What a shipped model learns from."""
    stores = [ROOT / "datasets" / store for store in recipe.stores]
    return from_stores(stores, op=recipe.op, arch=recipe.arch, beside=recipe.beside)


def make(recipe: Recipe, folder: Path, tell: Tell) -> None:
    """Trains one model of published measurements."""
    data = measurements(recipe)
    trained = train(data, recipe.params, name=recipe.name, tell=tell)
    save(trained, data, folder)


def differences(old: Path, new: Path) -> list[str]:
    """Files of the old folder, which may lack what is not shipped, that the new one has not so."""
    if not old.is_dir():
        return ["everything"]
    return sorted(p.name for p in old.iterdir() if _held(p) != _held(new / p.name))


def _held(path: Path) -> Any:
    """A file's bytes; of a manifest all but the version of tilewise that wrote it."""
    if not path.is_file():
        return None
    return _but_version(path) if path.name == MANIFEST else path.read_bytes()


def _but_version(manifest: Path) -> dict[str, Any]:
    return {**json.loads(manifest.read_text()), "tilewise": ""}


def jobs(amd: Path | None) -> dict[str, Callable[[Path, Tell], None]]:
    """Name -> what trains it into a folder."""
    found: dict[str, Callable[[Path, Tell], None]] = {
        r.name: lambda folder, tell, r=r: make(r, folder, tell) for r in RECIPES
    }
    if amd is not None:
        found[AMD] = lambda folder, tell: amd_gfx950.make(amd, folder, tell)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="models to train; all by default")
    parser.add_argument("--amd", type=Path, help="AMD's published CSV")
    parser.add_argument("--check", action="store_true", help="compare with what is shipped")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    known = jobs(options.amd)
    unknown = set(options.names) - set(known)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))} unknown; use {', '.join(known)}")
    rows: list[dict[str, Any]] = []
    for name in options.names or known:
        with tempfile.TemporaryDirectory() as place:
            fresh = Path(place) / name
            known[name](fresh, lambda text, name=name: print(f"{name}: {text}", file=sys.stderr))
            differs = differences(FOLDER / name, fresh)
            if not options.check:
                shutil.rmtree(FOLDER / name, ignore_errors=True)
                shutil.copytree(fresh, FOLDER / name)
            rows.append({"model": name, "differs": differs, **_figures(fresh)})
        if not options.json:
            print(_line(rows[-1]))
    if options.json:
        print(json.dumps({"rows": rows}, indent=1))
    sys.exit(1 if options.check and any(r["differs"] for r in rows) else 0)


def _figures(folder: Path) -> dict[str, Any]:
    model = load_model(folder)
    found, ceiling = model.metrics["efficiency"], model.metrics["noise_ceiling"] or {}
    return {
        "problems": found["problems"],
        "trees": model.forests["rank"].num_trees,
        "reach": model.measured.reach,
        **{k: found[k] for k in ("mean", "median", "p10", "min")},
        **{f"ceiling_{k}": ceiling.get(k) for k in ("mean", "p10")},
        "analytic_mean": model.metrics["analytic"]["mean"],
    }


def _line(row: dict[str, Any]) -> str:
    figures = " ".join(f"{k} {row[k]}" for k in ("mean", "median", "p10", "min", "ceiling_mean"))
    same = f"differs in {', '.join(row['differs'])}" if row["differs"] else "the same bytes"
    return f"{row['model']}: {row['problems']} problems, {figures}; {same}"


if __name__ == "__main__":
    main()
