"""Every exception that tilewise raises on purpose.

TilewiseError
├── InputError (also ValueError)   the caller can fix it: what was given, what is allowed
│   ├── ProblemError               sizes, dtype or layout that cannot exist
│   ├── KernelError                a kernel value or name that cannot exist
│   ├── ArchError                  an unknown architecture or an inconsistent data file
│   ├── ExpressionError            a filter or feature expression outside the safe language
│   ├── TensorError                tensors that do not fit the problem
│   └── FileError                  an unreadable, foreign or damaged file
├── NoKernelError                  nothing in the pool can serve; carries a reason per kernel
├── BuildError                     the compiler refused; carries its output
│   └── MachineError               no kernel's doing: a full disk, a compiler that does not work
├── ExecutionError                 a kernel ran and failed
├── StoreError                     measurements could not be read or written
│   └── NoStoreError (also InputError)   there is no store where one was named
└── ModelError                     a model is missing, damaged, foreign or too new
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


def printable(text: str) -> str:
    """`text` with its lines and tabs; what else a terminal takes for commands is shown by code."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


class TilewiseError(Exception):
    """The base class of everything that tilewise raises on purpose."""

    def __str__(self) -> str:
        """Wherever it is shown: a message may name what stands in a file."""
        return printable(super().__str__())


class InputError(TilewiseError, ValueError):
    """Something the caller gave is wrong; the message says what is allowed."""


class ProblemError(InputError):
    """Sizes, dtype or layout that cannot exist together."""


class KernelError(InputError):
    """A kernel value or a kernel name that cannot exist."""


class ArchError(InputError):
    """An unknown architecture, or a data file that contradicts itself."""


class ExpressionError(InputError):
    """An expression outside the safe language; `column` points at the bad part."""

    def __init__(self, message: str, source: str = "", column: int = 0) -> None:
        pointer = f"\n  {source}\n  {' ' * column}^" if source else ""
        super().__init__(message + pointer)
        self.source = source
        self.column = column


class TensorError(InputError):
    """Tensors whose shape, dtype, strides or memory do not fit the problem."""


class FileError(InputError):
    """A file that cannot be read as what it was given for."""


class NoKernelError(TilewiseError):
    """No kernel of the pool can serve the problem; `reasons` maps kernel names to why."""

    def __init__(self, message: str, *, asked: str = "", reasons: Mapping[str, str] | None = None):
        self.asked = asked
        self.reasons = dict(reasons or {})
        shown = [f"  {name}: {why}" for name, why in list(self.reasons.items())[:5]]
        more = len(self.reasons) - len(shown)
        if more > 0:
            shown.append(f"  ... and {more} more")
        super().__init__("\n".join([message, *shown]))


class BuildError(TilewiseError):
    """The compiler refused a kernel; `log` is what it printed."""

    def __init__(self, message: str, *, log: str = "") -> None:
        super().__init__(f"{message}\n{log}".rstrip())
        self.log = log


class MachineError(BuildError):
    """The machine failed, not a kernel; every other kernel would fare the same."""


class ExecutionError(TilewiseError):
    """A kernel was launched and reported failure."""


class StoreError(TilewiseError):
    """Measurements could not be read or written."""


class NoStoreError(StoreError, InputError):
    """What was named as a store is none."""


class ModelError(TilewiseError):
    """A model is missing, damaged, foreign or newer than this version understands."""


LONGEST_NAME = 80
"""Of what is taken for a name spelt wrong; looking for the like of more takes long."""


def closest(given: object, known: Iterable[str]) -> str | None:
    """The known name that a wrong one was meant to be, whatever its case, or None."""
    if not isinstance(given, str) or len(given) > LONGEST_NAME:
        return None
    by_case = {name.lower(): name for name in known}
    found = get_close_matches(given.lower(), by_case, 1)
    return by_case[found[0]] if found else None


def nearest(given: object, known: Iterable[str]) -> str:
    """A question for messages about unknown names, such as "; did you mean 'gemm'?", or nothing."""
    meant = closest(given, known)
    return f"; did you mean {meant!r}?" if meant else ""


EXTRAS = {
    **dict.fromkeys(("lightgbm", "scipy"), "learn"),
    **dict.fromkeys(("torch", "triton"), "gpu"),
    **{"plotly": "report", "ray": "ray", "optuna": "tune"},
}
"""Packages that are not installed with tilewise -> the extra that brings them."""


def why_missing(error: ModuleNotFoundError) -> str | None:
    """What to install where an import failed for want of an extra, or None."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    return f"{package} is not installed; {how_to_install(package)}"


def how_to_install(package: str) -> str:
    """The command that brings a package which an extra names."""
    return f"`pip install 'tilewise[{EXTRAS[package]}]'`"
