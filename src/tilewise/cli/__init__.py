"""The `tilewise` command: one verb per job, `--json` on every verb.

Exit codes: 0 done, 1 a check failed, 2 bad input.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line; every expected error becomes one clear message on stderr."""
    import click

    from tilewise.cli.app import app
    from tilewise.errors import InputError, TilewiseError

    try:
        code = app(standalone_mode=False)
    except (click.ClickException, TilewiseError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        sys.stderr.write(f"tilewise: {message}\n")
        bad_input = isinstance(error, InputError | click.UsageError | click.BadParameter)
        raise SystemExit(2 if bad_input else 1) from None
    except (click.Abort, KeyboardInterrupt):
        sys.stderr.write("tilewise: stopped\n")
        raise SystemExit(130) from None
    except BrokenPipeError:
        raise SystemExit(0) from None
    raise SystemExit(code if isinstance(code, int) else 0)
