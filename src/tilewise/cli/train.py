"""`train`: from measurements to a model folder, cross-validated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise.cli.console import (
    DtypeOption,
    ForceFlag,
    JsonFlag,
    check_free,
    emit,
    err,
    out,
    table,
)
from tilewise.cli.models import StoresArgument
from tilewise.cli.progress import telling
from tilewise.engines.device import resolve_arch

if TYPE_CHECKING:
    from tilewise.learn.dataset import Dataset
    from tilewise.learn.params import Params
    from tilewise.learn.train import Training


OutOption = Annotated[Path, typer.Option("--out", help="The model folder to write.")]
AnyOpOption = Annotated[str, typer.Option("--op", help="Which op, if the stores hold several.")]
BesideOption = Annotated[
    str, typer.Option(help="Other ops with the same features to learn from, comma-separated.")
]
AnyArchOption = Annotated[
    str | None, typer.Option("--arch", help="Which architecture, if the stores hold several.")
]
FoldsOption = Annotated[int, typer.Option(min=2, help="Cross-validation folds.")]
ObjectiveOption = Annotated[str, typer.Option(help="regression, lambdarank or top_decile.")]
TargetsOption = Annotated[str, typer.Option(help="Also predict these: tflops,latency,bandwidth.")]
VendorTreesOption = Annotated[
    int, typer.Option(min=0, help="Extra trees for the vendor's routine alone.")
]
DrawsOption = Annotated[
    int,
    typer.Option(min=1, max=64, help="Forests to grow on different rows and columns, and average."),
]
HardRoundsOption = Annotated[
    int, typer.Option(min=0, help="Rounds that give badly chosen problems more weight.")
]
WarmStartOption = Annotated[
    Path | None, typer.Option(help="Continue training this model, which has the same features.")
]
TuneOption = Annotated[int, typer.Option(min=0, help="Optuna trials before training.")]
CompareFlag = Annotated[
    bool,
    typer.Option("--compare-objectives", help="Also score every objective on the same folds."),
]
TreesOption = Annotated[int, typer.Option(min=1, help="The most trees to grow.")]
LeavesOption = Annotated[int, typer.Option(min=2, max=255, help="The most leaves of a tree.")]
RateOption = Annotated[
    float, typer.Option(min=0.001, max=1.0, help="How much each tree contributes.")
]
SeedOption = Annotated[int, typer.Option(help="Seed of folds and trees.")]
ThreadsOption = Annotated[int, typer.Option(min=1, max=256, help="Threads to train with.")]


def train(
    stores: StoresArgument,
    folder: OutOption,
    op: AnyOpOption = "",
    beside: BesideOption = "",
    arch: AnyArchOption = None,
    dtype: DtypeOption = None,
    folds: FoldsOption = 5,
    objective: ObjectiveOption = "regression",
    targets: TargetsOption = "",
    trees: TreesOption = 200,
    leaves: LeavesOption = 16,
    learning_rate: RateOption = 0.09,
    vendor_trees: VendorTreesOption = 0,
    draws: DrawsOption = 1,
    hard_rounds: HardRoundsOption = 0,
    warm_start: WarmStartOption = None,
    tune: TuneOption = 0,
    compare_objectives: CompareFlag = False,
    seed: SeedOption = 0,
    threads: ThreadsOption = 1,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Trains a model from stores of measurements.

    The same measurements and the same seed give identical files.
    """
    from tilewise.core.model import check_place
    from tilewise.core.sealed import MANIFEST
    from tilewise.learn.dataset import from_stores
    from tilewise.learn.params import Params

    check_free(folder if (folder / MANIFEST).exists() else None, force)
    check_place(folder)  # before the hours of training, not after
    # A product (`sm_90:H200`) gives its figures; a bare name leaves them to the measured device.
    chosen = resolve_arch(arch) if arch and ":" in arch else arch or ""
    with telling("reading measurements"):
        others = tuple(word for word in beside.split(",") if word)
        data = from_stores(stores, op=op, arch=chosen, dtype=dtype or "", beside=others)
    params = Params(
        objective=objective,
        targets=tuple(t for t in targets.split(",") if t),
        trees=trees,
        leaves=leaves,
        learning_rate=learning_rate,
        vendor_trees=vendor_trees,
        draws=draws,
        hard_rounds=hard_rounds,
        seed=seed,
        threads=threads,
    )
    trained, rows = _trained(data, params, folder, folds, warm_start, tune, compare_objectives)
    if as_json:
        return emit(_report(folder, data, trained, rows))
    return _show(folder, data, trained, rows)


def _trained(
    data: Dataset,
    params: Params,
    folder: Path,
    folds: int,
    warm_start: Path | None,
    trials: int,
    compare: bool,
) -> tuple[Training, list[dict[str, Any]]]:
    """The model, written to its folder, and the objectives where they are compared."""
    from tilewise.learn import objectives
    from tilewise.learn.fit import Trainer
    from tilewise.learn.train import save
    from tilewise.learn.train import train as fit

    rows: list[dict[str, Any]] = []
    with telling("training") as tell:
        if trials:
            params, _ = objectives.tune(Trainer(data), params, trials=trials, tell=tell)
        if compare:
            rows = objectives.compare_objectives(Trainer(data), params, tell=tell)
        trained = fit(
            data,
            params,
            name=folder.name,
            fold_count=folds,
            continue_from=warm_start,
            tell=tell,
        )
        save(trained, data, folder, **({"objectives": rows} if rows else {}))
    return trained, rows


def _report(
    folder: Path, data: Dataset, trained: Training, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "model": str(folder),
        "rows": len(data),
        "problems": len(data.problems),
        "kernels": len(data.kernels),
        "trees": trained.model.forests["rank"].num_trees,
        "objectives": rows,
        **trained.model.metrics,
    }


def _show(folder: Path, data: Dataset, trained: Training, rows: list[dict[str, Any]]) -> None:
    metrics = trained.model.metrics
    show_efficiency(f"{folder.name}: {len(data):,} rows, cross-validated", metrics)
    if metrics["efficiency"]["mean"] < metrics["analytic"]["mean"]:
        err.print(
            "the model chooses worse than the analytic one, which needs no measurements; "
            "sweep more problems before you use it",
            soft_wrap=True,
        )
    if rows:
        columns = ["objective", "mean", "median", "p10", "top1"]
        table("objectives", columns, [[row[c] for c in columns] for row in rows])
    out.print(f"written to {folder}")


def show_efficiency(title: str, metrics: Any) -> None:
    """Efficiency of the model, of what is chosen by it, of the analytic model and the ceiling."""
    columns = ("mean", "median", "p10", "p1", "min", "top1", "top5", "ndcg")
    lines = []
    for name, key in (("model", "efficiency"), ("as chosen", "chosen"), ("analytic", "analytic")):
        lines.append([name, *(metrics[key].get(c, "") for c in columns)])
    ceiling = metrics.get("noise_ceiling") or {}
    if ceiling:
        lines.append(["noise ceiling", *(ceiling.get(c, "") for c in columns)])
    table(title, ["% of the best", *columns], lines)
