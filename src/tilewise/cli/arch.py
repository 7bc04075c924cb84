"""`arch list|show|detect`: the figures tilewise knows."""

from __future__ import annotations

from typing import Annotated

import typer

from tilewise.cli.console import JsonFlag, emit, out, table
from tilewise.core.arch import devices, known_archs, load_arch, sources
from tilewise.engines.device import resolve_arch

app = typer.Typer(help="Architectures, and the device in this machine.", no_args_is_help=True)


@app.command("list")
def list_(as_json: JsonFlag = False) -> None:
    """Lists every architecture with a data file."""
    archs = [load_arch(name) for name in known_archs()]
    if as_json:
        return emit([arch.to_dict() for arch in archs])
    columns = ["name", "product", "kind", "units", "clock MHz", "memory GB/s", "fp32", "bf16"]
    rows = [
        [
            *(a.name, ", ".join(devices(a.name)), a.kind),
            *(a.compute_units, a.clock_mhz, a.memory_gb_s),
            *(a.peak_tflops.get(d, "") for d in ("fp32", "bf16")),
        ]
        for a in archs
    ]
    table("Architectures (peak in TFLOPS)", columns, rows)
    return out.print("Figures are the first product's; name another as sm_90:H200.")


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A name from `arch list`, or sm_90:H200.")],
    as_json: JsonFlag = False,
) -> None:
    """Shows every figure for one architecture, with its source."""
    arch = resolve_arch(name)
    if as_json:
        return emit({**arch.to_dict(), "sources": sources(arch.name, arch.device)})
    where = sources(arch.name, arch.device)
    rows = [[k, v, where.get(k, "")] for k, v in arch.to_dict().items()]
    return table(arch.label, ["figure", "value", "source"], rows)


@app.command()
def detect(as_json: JsonFlag = False) -> None:
    """Shows the device in this machine, with the figures it reports."""
    arch = resolve_arch(None)
    if as_json:
        return emit(arch.to_dict())
    return table(f"This machine: {arch.label}", ["figure", "value"], arch.to_dict().items())
