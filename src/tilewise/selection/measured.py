"""Plan files: what was timed on a device, which then chooses before any model does.

A file has a section for every device and set of versions; only the one that is exactly this
process's counts, so every process and every rank that reads a file makes the same choices.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tilewise import __version__
from tilewise.core.arch import Arch
from tilewise.core.compile_expr import Array
from tilewise.core.kernel import Kernel
from tilewise.core.plain_files import one_at_a_time, read_plain, resolved
from tilewise.core.problem import Problem
from tilewise.core.strict_json import loads
from tilewise.errors import FileError, InputError, printable
from tilewise.ops.contract import get_op
from tilewise.settings import settings

log = logging.getLogger("tilewise")

SCHEMA = 1
MOST_BYTES = 64 << 20
MOST_US = 1e12
"""Of a time: eleven days."""
Times = dict[Problem, dict[str, float]]
"""Problem -> kernel name -> microseconds."""


class MeasuredRanker:
    """Ranks by what was timed; it is asked about problems that were."""

    path = "measured"

    def __init__(self, times: Times) -> None:
        self.times = times

    def why_unfit(self, problem: Problem, arch: Arch) -> str | None:
        return None if problem in self.times else "it was not timed on this device"

    def caveat(self, arch: Arch) -> str | None:
        return None  # a plan is of this very device

    def knows_vendor(self, kernel: Kernel) -> bool:
        return any(kernel.name in times for times in self.times.values())

    def strange(self, kernels: Sequence[Kernel], arch: Arch) -> None:
        """None: a plan holds the few kernels that were expected to be fast."""

    def predict_us(self, problem: Problem, kernels: Sequence[Kernel], arch: Arch) -> Array:
        """Microseconds, in the order given; infinite for those that were not timed."""
        times = self.times.get(problem, {})
        return np.array([times.get(kernel.name, inf) for kernel in kernels])

    def leaders_us(self, problem: Problem, kernels: Sequence[Kernel], arch: Arch) -> None:
        return None  # looking up costs little


def section_of(arch: Arch) -> dict[str, Any]:
    """What a section must say to count for this process on an architecture."""
    return {
        "device": arch.label,
        "threads": settings().threads if arch.kind == "cpu" else 0,
        "versions": {"tilewise": __version__, "torch": _torch_version()},
    }


def _torch_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def measured_rankers(op: str, arch: Arch) -> list[MeasuredRanker]:
    """The ranker of the plan file in force, where it has timed an op on this device."""
    path = settings().plan
    if path is None:
        return []
    try:
        times = {p: of for p, of in read_plan(path, arch).items() if p.op == op}
    except InputError as error:
        # A broken file costs quality, never the call.
        log.warning("the plan file is left out: %s", error)
        return []
    return [MeasuredRanker(times)] if times else []


def read_plan(path: Path, arch: Arch) -> Times:
    """What a plan file holds for this device and these versions."""
    wanted = section_of(arch)
    found = _times_of(path, [s for s in _sections(path) if _is_of(s, wanted)])
    if not found:
        log.warning("%s holds nothing for %s", printable(str(path)), wanted)
    return found


def check_plan(path: Path, arch: Arch) -> None:
    """Raises where times could not be added to a file: better before they are taken than after."""
    with _folder_of(path) as folder, TemporaryDirectory(prefix=".plan.", dir=folder):
        _held(path, section_of(arch))


def write_plan(path: Path, arch: Arch, times: Times) -> None:
    """Adds times to a plan file; what it held of other devices, versions and problems stays."""
    from tilewise.problems.lines import replace_text

    wanted = section_of(arch)
    with _folder_of(path) as folder, one_at_a_time(folder):
        others, held = _held(path, wanted)
        rows = [{"problem": p.to_dict(), "us": of} for p, of in {**held, **times}.items()]
        text = json.dumps({"schema": SCHEMA, "sections": [*others, {**wanted, "problems": rows}]})
        replace_text(path, text)


@contextmanager
def _folder_of(path: Path) -> Iterator[Path]:
    """The folder of a plan file, made if needed."""
    try:
        folder = resolved(path).parent
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except OSError as error:
        why = error.strerror or error
        raise FileError(f"{str(path)[:200]} cannot be written: {why}") from None


def _held(path: Path, wanted: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Times]:
    """The sections of a file that are others', and the times of ours; nothing where it is new."""
    sections = _sections(path) if path.exists() else []
    others = [section for section in sections if not _is_of(section, wanted)]
    return others, _times_of(path, [s for s in sections if _is_of(s, wanted)])


def _is_of(section: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return {name: section.get(name) for name in wanted} == wanted


def _sections(path: Path) -> list[dict[str, Any]]:
    try:
        data: Any = loads(read_plain(path, most=MOST_BYTES))
        sections = data["sections"] if data["schema"] == SCHEMA else None
    except OSError as error:
        raise FileError(f"{path} cannot be read as a plan: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise FileError(f"{path} is not a plan file written by `tune`: {error}") from None
    if not isinstance(sections, list) or not all(isinstance(s, dict) for s in sections):
        raise FileError(f"{path} has schema or sections that `tune` never writes; tune again")
    return sections


def _times_of(path: Path, sections: Sequence[Mapping[str, Any]]) -> Times:
    """The problems of some sections, each checked."""
    found: Times = {}
    try:
        for row in (row for section in sections for row in section["problems"]):
            op = get_op(row["problem"]["op"])
            problem = op.problem.from_dict(row["problem"])
            found[problem] = {op.kernel_from_name(k).name: _time(us) for k, us in row["us"].items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FileError(f"{path} holds what is no timed problem: {str(error)[:300]}") from None
    return found


def _time(value: Any) -> float:
    """Microseconds, of any number that can be some."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{str(value)[:100]!r} is no time")
    if not 0 < value <= MOST_US:
        raise ValueError(f"{str(value)[:100]} us is no time")
    return float(value)
