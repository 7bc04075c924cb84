"""The command tree."""

from __future__ import annotations

from typing import Annotated

import typer

import tilewise
from tilewise.cli import (
    arch,
    bench,
    build,
    data,
    demo,
    doctor,
    evaluate,
    explain,
    export_c,
    export_cpp,
    kernels,
    problems,
    rank,
    report,
    search,
    sweep,
    train,
    tune,
    validate,
)
from tilewise.cli.examples import show_examples

app = typer.Typer(
    name="tilewise",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"tilewise {tilewise.__version__}")
        raise typer.Exit


@app.callback()
def _any(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Chooses, builds and runs the fastest kernel for a GEMM or convolution."""


app.command("doctor")(doctor.doctor)
app.command("demo")(demo.demo)
app.command("rank")(rank.rank)
app.command("explain")(explain.explain)
app.command("predict")(explain.predict)
app.command("bench")(bench.bench)
app.command("sweep")(sweep.sweep)
app.command("train")(train.train)
app.command("evaluate")(evaluate.evaluate)
app.command("compare")(evaluate.compare)
app.command("report")(report.report)
app.command("validate")(validate.validate)
app.command("tune")(tune.tune)
app.command("search")(search.search)
app.command("build")(build.build)
app.command("export-c")(export_c.export_c)
app.command("export-cpp")(export_cpp.export_cpp)
app.add_typer(problems.app, name="problems")
app.add_typer(data.app, name="data")
app.add_typer(kernels.app, name="kernels")
app.add_typer(arch.app, name="arch")
show_examples(app)
