"""`problems sample|edge|coverage|augment|network|import|capture`: what to measure."""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewise.cli.console import (
    ArchOption,
    DtypeOption,
    ForceFlag,
    JsonFlag,
    OpOption,
    check_free,
    emit,
    out,
    table,
    warn_of,
)
from tilewise.core.problem import Problem
from tilewise.engines.device import resolve_arch
from tilewise.errors import FileError, InputError, why_missing
from tilewise.ops.contract import get_op
from tilewise.problems.augment import as_efficiency
from tilewise.problems.files import BadLine, ProblemFile, read_problems, write_problems
from tilewise.problems.problem_set import ProblemSet

app = typer.Typer(help="Problems to measure: draw, list, capture, import.", no_args_is_help=True)

OutOption = Annotated[
    Path | None, typer.Option("--out", "-o", help="Write a .csv, .json or .jsonl file.")
]
AnyOpOption = Annotated[
    str, typer.Option("--op", help="Only this op; default: whatever each row names.")
]
FirstOpOption = Annotated[
    str, typer.Option("--op", help="Only this op; default: that of the first layer.")
]
CountOption = Annotated[int, typer.Option("--count", "-n", help="How many problems.")]
SeedOption = Annotated[int, typer.Option("--seed", help="The same seed gives the same problems.")]
AvoidOption = Annotated[
    list[Path] | None, typer.Option("--avoid", help="Leave out problems in this file (repeatable).")
]
ProblemsArgument = Annotated[Path, typer.Argument(help="A problem file; - reads standard input.")]


@app.command()
def sample(
    op: OpOption,
    arch: ArchOption = None,
    dtype: DtypeOption = None,
    count: CountOption = 100,
    seed: SeedOption = 0,
    align: Annotated[int, typer.Option(help="Make channels, N and K multiples of this.")] = 8,
    wide: Annotated[bool, typer.Option("--wide", help="Draw from every family in turn.")] = False,
    family: Annotated[
        list[str] | None, typer.Option("--family", help="Draw from this family (repeatable).")
    ] = None,
    memory_share: Annotated[
        float, typer.Option(help="Most memory one problem may take, as a share of the device's.")
    ] = 0.25,
    max_ms: Annotated[
        float, typer.Option(help="Longest time one problem may take at peak speed.")
    ] = 20.0,
    avoid: AvoidOption = None,
    file: OutOption = None,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Draws problems at random.

    Sizes are log-uniform, or follow families of real shapes.
    """
    from tilewise.problems.sampling import sample as draw
    from tilewise.problems.sampling import wide_coverage

    check_free(file, force)
    limits: dict[str, Any] = {"memory_share": memory_share, "max_ms": max_ms}
    common = {"dtype": dtype or "", "seed": seed, "avoid": _known(avoid, op), **limits}
    chosen = resolve_arch(arch)
    if wide or family:
        found = wide_coverage(op, chosen, count, only=family or (), **common)
    else:
        found = draw(op, chosen, count, align=align, **common)
    _give(found, file, as_json, op=op, arch=chosen.name, seed=seed)


@app.command()
def edge(
    op: OpOption,
    arch: ArchOption = None,
    dtype: DtypeOption = None,
    file: OutOption = None,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Lists edge-case problems.

    Sizes of one, primes, tiny sizes, and sizes next to those of tiles.
    """
    from tilewise.problems.edges import edge_problems

    check_free(file, force)
    chosen = resolve_arch(arch)
    found = edge_problems(op, chosen, dtype=dtype or "")
    _give(found, file, as_json, op=op, arch=chosen.name)


@app.command()
def coverage(
    file: ProblemsArgument,
    op: AnyOpOption = "",
    dtype: DtypeOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Shows which ranges of sizes a file covers."""
    from tilewise.problems.coverage import coverage as report_on

    read = read_problems(file, op, dtype=dtype)
    report = report_on(read.problems)
    if as_json:
        told = [line.to_dict() for line in read.bad_lines]
        return emit({**report.to_dict(), "bad_lines": told})
    warn_of(read.bad_lines)
    rows = [[axis, b, n] for axis, counts in report.axes.items() for b, n in counts.items()]
    table(f"{report.distinct} distinct problems", ["axis", "bucket", "problems"], rows)
    out.print(f"empty buckets: {', '.join(report.holes) or 'none'}")
    share = f"{report.pair_share:.1%} of {report.pairs} pairs of buckets hold a problem"
    both = "of the empty ones have problems in each bucket, but none in both"
    out.print(f"{share}; {len(report.pair_holes)} {both}")
    for hole in report.pair_holes[:20]:
        out.print(f"  {hole}")
    return None


@app.command()
def augment(
    file: ProblemsArgument,
    op: AnyOpOption = "",
    arch: ArchOption = None,
    dtype: DtypeOption = None,
    count: CountOption = 100,
    seed: SeedOption = 0,
    below: Annotated[
        float, typer.Option(help="Start from problems with an efficiency below this.")
    ] = 1.0,
    target: OutOption = None,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Proposes problems near those with the worst choices.

    The input is a file written by `evaluate --out`, with its column `efficiency`.
    """
    from tilewise.problems.augment import augment as propose

    check_free(target, force)
    read = read_problems(file, op, dtype=dtype)
    worst = [(p, e) for p, e in _efficiencies(file, read) if e < below]
    if not worst:
        warn_of(read.bad_lines)
        raise InputError(f"no problem of {file} has an efficiency below {below}")
    limits = resolve_arch(arch) if arch else None
    found = propose(worst, count, arch=limits, seed=seed, avoid=read.problems)
    _give(found, target, as_json, bad=read.bad_lines, seed=seed)


def _usual(text: str, *names: str) -> Any:
    """An option of a network; 0 stands for what its paper has."""
    return typer.Option(*names, min=0, help=text, show_default="the network's own")


@app.command()
def network(
    name: Annotated[
        str | None, typer.Argument(help="A network; leave it out to list them all.")
    ] = None,
    op: FirstOpOption = "",
    dtype: DtypeOption = None,
    batch: Annotated[int, _usual("Batch size.")] = 0,
    size: Annotated[int, _usual("Image height and width in pixels.")] = 0,
    tokens: Annotated[int, _usual("Sequence length.", "--tokens", "--seq")] = 0,
    decode: Annotated[
        bool, typer.Option("--decode", help="Decoding: one new token per sequence.")
    ] = False,
    backward: Annotated[
        bool, typer.Option("--backward", help="Also the GEMMs of the backward pass.")
    ] = False,
    frozen: Annotated[
        bool, typer.Option("--frozen", help="Also layers that are not trained.")
    ] = False,
    file: OutOption = None,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Lists the layers of a real network."""
    from tilewise.problems import networks

    if name is None:
        return _list_networks(as_json)
    check_free(file, force)
    found = networks.network(
        name,
        op,
        dtype=dtype or "",
        batch=batch,
        size=size,
        tokens=tokens,
        decode=decode,
        backward=backward,
        frozen=frozen,
    )
    return _give(found, file, as_json, network=name, op=found.problems[0].op)


@app.command("import")
def import_(
    file: ProblemsArgument,
    op: AnyOpOption = "",
    dtype: DtypeOption = None,
    distinct: Annotated[bool, typer.Option("--distinct", help="Drop duplicates.")] = False,
    target: OutOption = None,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Reads a problem file and reports what is wrong with it.

    CSV, JSON, JSON lines or MIOpenDriver commands; bad lines are shown by number.
    """
    check_free(target, force)
    read = read_problems(file, op, dtype=dtype)
    _give(read.distinct() if distinct else read, target, as_json, bad=read.bad_lines)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def capture(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A Python program; its own arguments follow.")],
    op: AnyOpOption = "",
    file: OutOption = None,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Records the GEMMs and convolutions that a PyTorch program runs."""
    import runpy

    from tilewise.problems.capture import capture as recording

    check_free(file, force)
    if not script.is_file():
        raise FileError(f"{script} is not a file; give a Python program")
    try:
        with _as_program(script, context.args), recording() as seen:
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise InputError(f"{script} ended with exit code {stop.code}") from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # programs raise what they like
        if isinstance(error, ModuleNotFoundError) and why_missing(error):
            raise  # without PyTorch there is nothing to record
        *_, last = traceback.extract_tb(error.__traceback__)
        said = traceback.format_exception_only(error)[-1].strip()
        raise InputError(f"{script} failed in {last.filename}:{last.lineno}: {said}") from error
    found = ProblemSet()
    for problem, labels in seen:
        if op in ("", problem.op):
            found.add(problem, labels)
    if not found.problems:
        raise InputError(f"{script} computed no {op or 'convolution or matrix product'}")
    _give(found, file, as_json, skipped=dict(seen.skipped))


@contextmanager
def _as_program(script: Path, words: Sequence[str]) -> Iterator[None]:
    """What a program finds when Python runs it; what it changes of that is put back."""
    before = sys.argv, sys.path
    sys.argv, sys.path = [str(script), *words], [str(script.resolve().parent), *sys.path]
    try:
        # What the program prints must not mix with our own output.
        with redirect_stdout(sys.stderr), chdir("."):
            yield
    finally:
        sys.argv, sys.path = before


def _list_networks(as_json: bool) -> None:
    from tilewise.problems.networks import NETWORKS, trace

    found = []
    for each in NETWORKS.values():
        counts = Counter(get_op(layer.ops[0]).folder.name for layer in trace(each.name))
        usual = {"batch": each.batch, "size": each.size, "tokens": each.tokens}
        found.append((each.name, counts, usual))
    kinds = sorted({kind for _, counts, _ in found for kind in counts})
    rows = [
        {"network": name, **{kind: counts[kind] for kind in kinds}, **usual}
        for name, counts, usual in found
    ]
    if as_json:
        return emit({"networks": rows})
    return table(f"{len(rows)} networks", [*rows[0]], [list(row.values()) for row in rows])


def _known(files: Sequence[Path] | None, op: str) -> set[Problem]:
    return {problem for file in files or () for problem in read_problems(file, op).problems}


def _efficiencies(file: Path, read: ProblemFile) -> list[tuple[Problem, float]]:
    """The problems whose efficiency can be used; the lines of the others become bad ones."""
    if not any("efficiency" in labels for labels in read.labels):
        raise FileError(f"{file} has no column efficiency, which says what is worst")
    pairs = []
    for at, (problem, labels) in enumerate(read):
        given = labels.get("efficiency", "")
        try:
            pairs.append((problem, as_efficiency(given)))
        except InputError as error:
            read.spoil(at, str(error))
    return pairs


def _give(
    found: ProblemSet,
    target: Path | None,
    as_json: bool,
    *,
    bad: Sequence[BadLine] = (),
    **facts: Any,
) -> None:
    """Writes the set, or shows it; bad lines go to stderr, or into the JSON."""
    if target is not None:
        write_problems(target, found.problems, found.labels)
        facts["file"] = str(target)
    if as_json:
        told: dict[str, Any] = {**facts, "count": len(found)}
        if target is None:
            told["problems"] = found.rows()
        return emit({**told, "bad_lines": [line.to_dict() for line in bad]})
    warn_of(bad)
    if target is not None:
        return out.print(f"{len(found)} problems written to {target}")
    return _show(found)


def _show(found: ProblemSet) -> None:
    """A table narrow enough to read: what all problems share stands in its title."""
    told = [{**get_op(problem.op).problems.brief(problem), **labels} for problem, labels in found]
    alike = {k: v for k, v in told[0].items() if all(row.get(k) == v for row in told)}
    every = dict.fromkeys(key for row in told for key in row)
    columns = [key for key in every if key not in alike]
    if not columns:  # one problem, or one several times
        columns = [key for key in every if key not in _SHARED]
    same = ", ".join(f"{k}={v}" for k, v in alike.items() if k not in (*_SHARED, *columns))
    title = " ".join([str(len(found)), *(str(alike[k]) for k in alike if k in _SHARED), "problems"])
    title += f", all with {same}" if same else ""
    title += f"; the first {_SHOWN}" if len(found) > _SHOWN else ""
    rows = [[row.get(column, "") for column in columns] for row in told[:_SHOWN]]
    out.print(title, soft_wrap=True)
    table("", columns, rows)


_SHOWN = 40
_SHARED = ("network", "op", "dtype", "layout")
