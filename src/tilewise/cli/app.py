"""The command tree. A group's module is imported only when one of its commands is asked for."""

from __future__ import annotations

import typer

from tilewise.cli import arch, build, demo, doctor, kernels, rank

app = typer.Typer(
    name="tilewise",
    help="Chooses, builds and runs the fastest tile kernel for a GEMM or convolution.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(arch.app, name="arch")
app.add_typer(kernels.app, name="kernels")
app.command("doctor")(doctor.doctor)
app.command("build")(build.build)
app.command("rank")(rank.rank)
app.command("demo")(demo.demo)
