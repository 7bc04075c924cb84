"""`kernels list|count|export|check`: the kernel space, by architecture."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli.console import (
    ArchOption,
    DtypeOption,
    FilterOption,
    ForceFlag,
    JsonFlag,
    OpOption,
    check_free,
    emit,
    listing,
    out,
    parse_problem,
    table,
)
from tilewise.core.arch import Arch
from tilewise.core.dtypes import OPERAND_DTYPES
from tilewise.core.kernel import Kernel
from tilewise.engines.device import resolve_arch
from tilewise.errors import FileError, InputError, nearest
from tilewise.ops.configs import (
    dump_kernels,
    expand_counted,
    filter_kernels,
    load_kernels,
    load_pool,
    read_config,
)
from tilewise.ops.contract import Op, get_op
from tilewise.problems.lines import replace_text

app = typer.Typer(help="Kernels: list, count, export, check.", no_args_is_help=True)

EngineOption = Annotated[
    list[str] | None, typer.Option("--engine", help="Only these engines (repeatable).")
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", help="A JSON trait config to use instead of the shipped pool."),
]


def pick(
    op: str,
    arch: Arch,
    dtype: str | None = None,
    engines: list[str] | None = None,
    expression: str | None = None,
    config: Path | None = None,
) -> list[Kernel]:
    """The kernels that the common options ask for."""
    given = get_op(op)
    for engine in engines or ():
        given.types_of(engine)
    if dtype and dtype not in OPERAND_DTYPES:
        use = f"{', '.join(OPERAND_DTYPES)}{nearest(dtype, OPERAND_DTYPES)}"
        raise InputError(f"dtype is {dtype!r}; use one of {use}")
    if config is None:
        kernels = load_pool(given, arch, engines or None)
    else:
        kernels = _expanded(config, given, arch)
        kernels = [k for k in kernels if not engines or k.engine in engines]
    if dtype:
        kernels = [k for k in kernels if getattr(k, "dtype", dtype) == dtype]
    if config is not None and not kernels:
        asked = f" in {dtype}" if dtype else ""
        asked += f" for {', '.join(engines)}" if engines else ""
        raise InputError(f"{config} gives kernels of {op} on {arch.label}, but none{asked}")
    return filter_kernels(kernels, expression, given.kernel_types) if expression else kernels


def pick_some(
    op: str,
    arch: Arch,
    dtype: str | None,
    engines: list[str] | None,
    expression: str | None,
    config: Path | None,
) -> list[Kernel]:
    """The same where some must be left: a filter that leaves none is a mistake."""
    found = pick(op, arch, dtype, engines, expression, config)
    if expression and not found:
        raise InputError(
            f"--filter {expression!r} leaves no kernel of {op} on {arch.label}; "
            "`tilewise kernels list` without it shows what there is"
        )
    return found


def _expanded(config: Path, op: Op, arch: Arch) -> list[Kernel]:
    """The kernels of a config; where there are none, what became of its combinations."""
    found = expand_counted(read_config(config), op, arch)
    if not found.kernels:
        reasons = [f"{found.impossible} are no kernel"] if found.impossible else []
        reasons += [f"{found.filtered} are filtered out"] if found.filtered else []
        reasons += [f"{number} cannot run: {why}" for why, number in found.illegal.most_common(3)]
        why = "; ".join(reasons) or "no block is for it"
        raise InputError(
            f"{config} gives no kernel of {op.name} on {arch.label}. Of {found.combinations} "
            f"combinations: {why}. Traits left out have their default, or every value"
        )
    return found.kernels


@app.command("list")
def list_(
    op: OpOption,
    arch: ArchOption = None,
    dtype: DtypeOption = None,
    engine: EngineOption = None,
    expression: FilterOption = None,
    config: ConfigOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Lists kernels by name."""
    kernels = pick_some(op, resolve_arch(arch), dtype, engine, expression, config)
    if as_json:
        return emit([{"name": kernel.name, **kernel.to_dict()} for kernel in kernels])
    for kernel in kernels:
        out.print(kernel.name, soft_wrap=True)
    return None


@app.command()
def count(
    op: OpOption,
    arch: ArchOption = None,
    dtype: DtypeOption = None,
    engine: EngineOption = None,
    expression: FilterOption = None,
    config: ConfigOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Counts kernels by engine, family and dtype."""
    chosen = resolve_arch(arch)
    counts: dict[tuple[str, str, str], int] = {}
    for kernel in pick_some(op, chosen, dtype, engine, expression, config):
        family = getattr(kernel, "family", getattr(kernel, "pipeline", ""))
        key = (kernel.engine, family, getattr(kernel, "dtype", ""))
        counts[key] = counts.get(key, 0) + 1
    if as_json:
        rows = [
            {"engine": e, "family": f, "dtype": d, "count": n} for (e, f, d), n in counts.items()
        ]
        return emit({"op": op, "arch": chosen.name, "count": sum(counts.values()), "by": rows})
    dtypes = sorted({d for _, _, d in counts})
    table(
        f"{sum(counts.values()):,} kernels of {op} on {chosen.label}",
        ["engine", "family", *dtypes],
        [
            [e, f, *(counts.get((e, f, d), "") for d in dtypes)]
            for e, f in sorted({(e, f) for e, f, _ in counts})
        ],
    )
    return None


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="Where to write JSON.")],
    op: OpOption,
    arch: ArchOption = None,
    dtype: DtypeOption = None,
    engine: EngineOption = None,
    expression: FilterOption = None,
    config: ConfigOption = None,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Writes kernels as JSON, which `kernels check --file` reads."""
    check_free(None if file.is_dir() else file, force)
    kernels = pick_some(op, resolve_arch(arch), dtype, engine, expression, config)
    if not file.name or file.is_dir():
        raise FileError(f"{str(file)!r} is not a file name; name the file to write")
    replace_text(file, dump_kernels(kernels))
    if as_json:
        return emit({"file": str(file), "kernels": len(kernels)})
    return out.print(f"{len(kernels)} kernels written to {file}")


@app.command()
def check(
    op: OpOption,
    words: Annotated[
        list[str] | None, typer.Argument(help="Kernel names, then KEY=VALUE of a problem.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", help="A JSON file of kernels.")] = None,
    arch: ArchOption = None,
    dtype: DtypeOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Tells which kernels cannot handle a problem, and why.

    Without a problem: which cannot run on the architecture. Without names or a file: all that
    are shipped, counted by reason. Exits with 1 if any that you named cannot.
    """
    given = get_op(op)
    chosen = resolve_arch(arch)
    names = [word for word in words or () if "=" not in word]
    values = [word for word in words or () if "=" in word]
    problem = parse_problem(op, values, dtype) if values else None
    kernels = [given.kernel_from_name(name) for name in names]
    if file is not None:
        try:
            text = file.read_text()
        except (OSError, ValueError) as error:
            raise FileError(f"{file} cannot be read: {error}") from None
        kernels += load_kernels(text, given)
    if not kernels:
        kernels = load_pool(given, chosen)
    reasons = {kernel.name: given.why_unusable(kernel, problem, chosen) for kernel in kernels}
    refused = {name: why for name, why in reasons.items() if why}
    if as_json:
        emit({"arch": chosen.name, "checked": len(reasons), "refused": refused})
    else:
        what = "serve the problem" if problem else "run"
        out.print(f"{len(reasons) - len(refused)} of {len(reasons)} can {what} on {chosen.label}")
        if names or file:
            for name, why in refused.items():
                out.print(f"{name}\n    {why}", soft_wrap=True)
        elif refused:
            counted = Counter(refused.values()).most_common()
            rows = [(count, why) for why, count in counted]
            listing("the others, by reason:", ["kernels", "why not"], rows)
    raise typer.Exit(1 if refused and (names or file) else 0)
