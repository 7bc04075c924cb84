"""Which headers of ours a C++ or CUDA source includes, directly and through others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tilewise.errors import BuildError

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)


def include_names(text: str) -> list[str]:
    """Names as the text spells them, in its order."""
    return [found[1] or found[2] for found in _INCLUDE.finditer(text)]


def headers_of(
    text: str, near: Path | None, folders: Sequence[Path], *, all_ours: bool = False
) -> dict[str, str]:
    """Name -> text of every header below `folders` that a source in the folder `near` includes.

    Others are a compiler's or the system's, unless `all_ours`: then they are refused, as is a name
    that means two files.
    """
    found: dict[str, tuple[Path, str]] = {}
    _collect(text, near, folders, all_ours, found)
    return {name: body for name, (_, body) in sorted(found.items())}


def _collect(
    text: str,
    near: Path | None,
    folders: Sequence[Path],
    all_ours: bool,
    found: dict[str, tuple[Path, str]],
) -> None:
    for name in include_names(text):
        path = _find(name, near, folders)
        if path is None and all_ours:
            raise BuildError(f"{name} is included, and is not below {folders[0].name}/")
        if path is None:
            continue
        if name not in found:
            found[name] = (path, path.read_text())
            _collect(found[name][1], path.parent, folders, all_ours, found)
        elif all_ours and found[name][0] != path:
            raise BuildError(f"{name} means both {found[name][0]} and {path}; rename one")


def _find(name: str, near: Path | None, folders: Sequence[Path]) -> Path | None:
    """Beside the file that includes it first, then in the folders; never outside them."""
    tried = [(folder / name).resolve() for folder in ([near] if near else []) + [*folders]]
    inside = (p for p in tried if any(p.is_relative_to(folder.resolve()) for folder in folders))
    return next(filter(Path.is_file, inside), None)
