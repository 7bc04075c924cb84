"""The `tilewise` command: one verb per job, `--json` on every verb.

Exit codes: 0 done, 1 a check or a kernel failed, 2 bad input: stores and models too.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


def main() -> None:
    """Runs the command line; every expected error becomes one clear message on stderr."""
    _open_streams()
    if sys.argv[1:2] == ["sweep"]:
        # Before anything else is imported: a sweep ends the same way from its first moment on.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _run()
    except KeyboardInterrupt:  # while modules are still being imported, too
        _fail("stopped", 130)


def _open_streams() -> None:
    """Opens in nothing what the caller closed: the next file would take a stream's number.

    Whatever is written to the stream, a compiler's words say, would then stand in that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115  # open to the end


def _run() -> None:
    import typer

    from tilewise.cli.app import app
    from tilewise.errors import InputError, ModelError, StoreError, TilewiseError, why_missing

    # typer carries a click of its own or uses the installed one, depending on its version.
    usage_error: Any = typer.BadParameter.__bases__[0]
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()  # what cannot be written is reported below, not while Python ends
    except usage_error as error:
        _fail_usage(error)
    except TilewiseError as error:
        is_given = isinstance(error, InputError | ModelError | StoreError)
        _fail(str(error), 2 if is_given else 1)
    except ModuleNotFoundError as error:
        why = why_missing(error)
        if why is None:
            raise
        _fail(why, 2)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            _end_quietly()
        where = str(error.filename)[:200] if error.filename else ""
        if not where and not _can_print():
            where = "standard output"
        _fail(f"{where}{': ' if where else ''}{error.strerror or error}", 2)
    except (MemoryError, RecursionError) as error:
        _fail(
            f"out of memory or too deeply nested ({type(error).__name__}); give it less at once", 1
        )
    except typer.Abort:
        _fail("stopped", 130)
    raise SystemExit(code if isinstance(code, int) else 0)


def _end_quietly() -> None:
    """The reader has seen enough."""
    _drop_output()
    raise SystemExit(0)


def _drop_output() -> None:
    """Leads what is not printed yet nowhere: Python flushes at exit, and would complain again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _can_print() -> bool:
    """Whether standard output takes a line, as it does not where its disk is full."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        _drop_output()
        return False
    return True


def _fail_usage(error: Any) -> None:
    """Ends with what is wrong with the words given, and where to read which are right."""
    said = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":  # of typer's click or of the installed one
        sys.stderr.write(f"{said}\n")
        raise SystemExit(2)
    if error.ctx is not None and not said.endswith("?"):
        said = f"{said.rstrip('.')}; see `{error.ctx.command_path} -h`"
    _fail(said, 2)


def _fail(message: str, code: int) -> None:
    from tilewise.errors import printable

    sys.stderr.write(f"tilewise: {printable(message)}\n")
    raise SystemExit(code)
