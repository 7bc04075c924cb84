"""Pages that are made from the code: the Python and command references, and the results."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import tilewise

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 84
"""Letters of a line of code that are seen beside the navigation."""


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pages; called by MkDocs."""
    pages = {
        "reference/python.md": python_reference(),
        "reference/commands.md": command_reference(),
        "results.md": results(),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def python_reference() -> str:
    """Every public name with its signature and docstring."""
    parts = ["# Python reference\n\n`import tilewise as tw`; every name below is `tw.NAME`.\n"]
    for name in sorted(tilewise.__all__, key=str.lower):
        value = getattr(tilewise, name)
        if not callable(value):
            continue
        parts.append(f"## `{name}`\n\n{_signature(name, value)}\n{_prose(value)}\n")
        if inspect.isclass(value):
            parts += _methods(name, value)
    return "\n".join(parts)


def _signature(name: str, value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    text = f"{name}{signature}"
    if len(text) > WIDTH:  # one parameter a line
        lines = "".join(f"    {line},\n" for line in _parameters(signature))
        result = str(signature.replace(parameters=[]))[2:]
        text = f"{name}(\n{lines}){result}"
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)  # types, not values
    return f"```text\n{_plain(text)}\n```\n"


def _plain(text: str) -> str:
    """Members of enumerations by their names, objects without their addresses."""
    text = re.sub(r"<(\w+\.\w+): [^>]*>", r"\1", text)
    return re.sub(r"<[^>]* at 0x[0-9a-f]+>", "...", text)


def _parameters(signature: inspect.Signature) -> Iterator[str]:
    is_bare = True
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and is_bare:
            yield "*"
        is_bare &= parameter.kind in (
            parameter.POSITIONAL_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
        )
        yield str(parameter)


def _prose(value: Any) -> str:
    text = inspect.getdoc(value) or ""
    if text.startswith(getattr(value, "__name__", "") + "("):
        return ""  # a dataclass that says nothing of itself repeats its signature
    lines = [
        f"    {line.strip()}" if line.startswith((">>>", "...")) else line
        for line in text.splitlines()
    ]
    return "\n".join(lines) + "\n"


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(kind).items():
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
            yield name, value


def _methods(owner: str, kind: type) -> Iterator[str]:
    """What members do; those whose names say it share a line."""
    plain = []
    for name, value in _members(kind):
        called, line = _call(name, value), _first_line(getattr(value, "fget", value))
        if line:
            yield f"**`{owner}.{called}`** {line}\n"
        else:
            plain.append(f"`{called}`")
    if plain:
        yield f"Besides: {', '.join(plain)}.\n"


def _call(name: str, value: Any) -> str:
    if isinstance(value, property):
        return name
    _, *names = inspect.signature(value).parameters.values()
    return _plain(f"{name}({', '.join(str(n.replace(annotation=n.empty)) for n in names)})")


def _first_line(value: Any) -> str:
    return (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")


def command_reference() -> str:
    """Every command with its help, as the command line shows it."""
    import typer

    from tilewise.cli.app import app

    parts = [
        "# Commands\n\nEvery command takes `--json`. Exit codes: 0 done, 1 a check or a kernel "
        "failed, 2 bad input.\n"
    ]
    whole = typer.main.get_command(app)
    context = whole.context_settings
    parts += [_command(path, command, context) for path, command in _walk(whole, "tilewise")]
    return "\n".join(parts)


def _walk(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, child in getattr(command, "commands", {}).items():
        if hasattr(child, "commands"):
            yield from _walk(child, f"{path} {name}")
        else:
            yield f"{path} {name}", child


def _command(path: str, command: Any, settings: dict[str, Any]) -> str:
    context = command.make_context(path, [], resilient_parsing=True, **settings)
    text = command.get_help(context)
    return f"## `{path}`\n\n```text\n{text}\n```\n"


def results() -> str:
    """The benchmarks' results, with links that hold here."""
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    return text.replace("](../docs/", "](")
