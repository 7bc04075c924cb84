"""`build`: compiles a pool in parallel, ahead of use."""

from __future__ import annotations

import time
from collections import Counter
from typing import Annotated

import typer

from tilewise.cli.console import (
    ArchOption,
    DtypeOption,
    FilterOption,
    JsonFlag,
    OpOption,
    emit,
    err,
    out,
    resolve_arch,
    table,
)
from tilewise.cli.kernels import ConfigOption, EngineOption, pick
from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.engines import Build, get_engine, is_foreign
from tilewise.errors import BuildError, InputError


def build(
    op: OpOption,
    arch: ArchOption = None,
    dtype: DtypeOption = None,
    engine: EngineOption = None,
    expression: FilterOption = None,
    config: ConfigOption = None,
    max_workers: Annotated[
        int | None, typer.Option("--max-workers", min=1, help="Compilers at once.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compiles every kernel that the options pick; exit 1 if any does not compile."""
    chosen = resolve_arch(arch)
    kernels = [
        k for k in pick(op, chosen, dtype, engine, expression, config) if not is_foreign(k.engine)
    ]
    if not kernels:
        raise InputError(
            f"no kernel of {op} on {chosen.label} is left to build; loosen the options (foreign "
            "kernels such as CK Tile's are built by their own library)"
        )
    started = time.perf_counter()
    builds = compile_all(kernels, chosen, max_workers)
    seconds = time.perf_counter() - started
    statuses = Counter(b.status for b in builds)
    cached = sum(b.was_cached for b in builds)
    if as_json:
        emit(
            {
                "kernels": [_as_dict(b) for b in builds],
                "seconds": seconds,
                "cached": cached,
                **statuses,
            }
        )
    else:
        failed = [[b.kernel.name, b.status, b.message[:200]] for b in builds if b.status != "ok"]
        if failed:
            table("Not built", ["kernel", "status", "message"], failed)
        counts = ", ".join(f"{n} {status}" for status, n in statuses.items())
        out.print(f"{counts} in {seconds:.1f} s; {cached} were in the cache")
    raise typer.Exit(0 if set(statuses) <= {"ok", "over_limit"} else 1)


def compile_all(kernels: list[Kernel], arch: Arch, max_workers: int | None) -> list[Build]:
    """Builds kernels of any mix of engines, showing progress on stderr."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    done: list[Build] = []
    columns = (TextColumn("building"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task("", total=len(kernels))
        for name in dict.fromkeys(kernel.engine for kernel in kernels):
            engine = get_engine(name)
            why = engine.why_unavailable()
            if why is not None:
                raise BuildError(f"the {name} engine cannot build here: {why}")
            done += engine.build(
                [kernel for kernel in kernels if kernel.engine == name],
                arch,
                max_workers=max_workers,
                on_done=lambda _: progress.advance(task),
            )
    return done


def _as_dict(build: Build) -> dict[str, object]:
    resources = build.resources
    return {
        "kernel": build.kernel.name,
        "status": build.status,
        "message": build.message,
        "seconds": build.seconds,
        "cached": build.was_cached,
        "registers": resources.registers,
        "spills": resources.spills,
        "smem_bytes": resources.smem_bytes,
    }
