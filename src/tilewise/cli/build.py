"""`build`: compiles a pool in parallel, ahead of use."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from itertools import count
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
    table,
)
from tilewise.cli.kernels import ConfigOption, EngineOption, pick
from tilewise.cli.progress import telling
from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.engines import Build, Resources, get_engine, is_foreign
from tilewise.engines.device import resolve_arch
from tilewise.errors import BuildError, InputError


def build(
    op: OpOption,
    arch: ArchOption = None,
    dtype: DtypeOption = None,
    engine: EngineOption = None,
    expression: FilterOption = None,
    config: ConfigOption = None,
    max_workers: Annotated[
        int | None, typer.Option("--max-workers", min=1, help="How many compilers to run at once.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compiles kernels ahead of time: all that match the options.

    Exits with 1 if any of them fails to compile.
    """
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
    spilling = sum(b.resources.spills > 0 for b in builds)
    if as_json:
        emit(
            {
                "arch": chosen.name,
                "kernels": [_as_dict(b) for b in builds],
                "seconds": seconds,
                "cached": cached,
                "spilling": spilling,
                **statuses,
            }
        )
    else:
        for failed in (b for b in builds if b.status != "ok"):
            line = f"{failed.kernel.name}\n    {failed.status}: {failed.message[:200]}"
            out.print(line, soft_wrap=True)
        if any(b.resources.registers for b in builds):
            table(f"Most that a kernel needs on {chosen.label}", ["what", "most"], _most(builds))
        counts = ", ".join(f"{n} {status}" for status, n in statuses.items())
        out.print(
            f"{counts} in {seconds:.1f} s; {cached} were in the cache; {spilling} spill registers"
        )
    raise typer.Exit(0 if set(statuses) <= {"ok", "over_limit"} else 1)


def compile_all(kernels: list[Kernel], arch: Arch, max_workers: int | None) -> list[Build]:
    """Builds kernels of any mix of engines, showing progress on stderr."""
    done: list[Build] = []
    with progress(len(kernels)) as advance:
        for name in dict.fromkeys(kernel.engine for kernel in kernels):
            engine = get_engine(name)
            why = engine.why_no_build()
            if why is not None:
                raise BuildError(f"the {name} engine cannot build here: {why}")
            done += engine.build(
                [kernel for kernel in kernels if kernel.engine == name],
                arch,
                max_workers=max_workers,
                on_done=advance,
            )
    return done


@contextmanager
def progress(total: int) -> Iterator[Callable[[Build], None]]:
    """A listener that keeps a bar on a terminal, and writes a line now and then elsewhere."""
    if not err.is_terminal:
        built = count(1)
        with telling(f"building {total} kernels") as tell:
            yield lambda build: tell(f"built {next(built)} of {total}, last {build.kernel.name}")
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("building"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda _: bar.advance(task)


def _most(builds: Sequence[Build]) -> list[tuple[str, int]]:
    """The largest figure of each kind; those that no kernel has are left out."""
    figures = {f.name: max(getattr(b.resources, f.name) for b in builds) for f in fields(Resources)}
    return [(name, most) for name, most in figures.items() if most]


def _as_dict(build: Build) -> dict[str, object]:
    return {
        "kernel": build.kernel.name,
        "status": build.status,
        "message": build.message,
        "seconds": build.seconds,
        "cached": build.was_cached,
        **asdict(build.resources),
    }
