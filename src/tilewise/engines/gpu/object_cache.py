"""Compiled GPU kernels on disk: by content, private to the user, read without any compiler.

A file is a line of JSON (the key, what was asked for, what the object says) and the object itself.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tilewise.core.identity import digest
from tilewise.core.plain_files import read_plain, replacing
from tilewise.core.strict_json import loads
from tilewise.engines.contract import Resources
from tilewise.engines.gpu.objects import Box, GpuObject
from tilewise.engines.toolchain import private_folder
from tilewise.errors import BuildError
from tilewise.settings import settings

log = logging.getLogger(__name__)


FOLDER = "gpu"
"""Of objects, below that of all caches."""


def is_kept(wanted: Mapping[str, Any]) -> bool:
    """Whether there is a file for what is wanted; whether it is whole shows when it is read."""
    return (settings().cache_dir / FOLDER / digest(wanted)).is_file()


def cached(wanted: Mapping[str, Any], make: Callable[[], GpuObject]) -> GpuObject:
    """The object that was made for `wanted`, from disk or made now.

    A cache that cannot be used costs time, not the kernel.
    """
    try:
        folder = private_folder(private_folder(settings().cache_dir) / FOLDER)
    except BuildError as error:
        log.warning("GPU kernels are compiled anew in every process: %s", error)
        return make()
    key = digest(wanted)
    found = read_object(folder / key, key)
    if found is not None:
        return found
    made = make()
    try:
        write_object(folder / key, key, wanted, made)
    except OSError as error:
        log.warning("%s cannot be written: %s", folder / key, error.strerror or error)
    return made


def _facts(made: GpuObject) -> dict[str, Any]:
    facts = asdict(replace(made, image=b""))
    return {name: value for name, value in facts.items() if name not in ("image", "was_cached")}


def write_object(path: Path, key: str, wanted: Mapping[str, Any], made: GpuObject) -> None:
    """Under another name first: readers see all of it or nothing."""
    head = {"key": key, "wanted": dict(wanted), "facts": _facts(made)}
    body = json.dumps(head).encode() + b"\n" + made.image
    seal = hashlib.sha256(body).hexdigest().encode() + b"\n"
    with replacing(path, mode=0o600, sync=False) as file:
        file.write(seal + body)


def read_object(path: Path, key: str) -> GpuObject | None:
    """The object if the file is whole and says it is what was asked for."""
    try:
        seal, _, body = read_plain(path, is_private=True).partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != seal:
            return None
        line, _, image = body.partition(b"\n")
        head = loads(line)
        facts = head["facts"]
        if head["key"] != key:
            return None
        return GpuObject(
            **facts
            | {
                "image": image,
                "parameters": tuple(facts["parameters"]),
                "resources": Resources(**facts["resources"]),
                "boxes": tuple(Box(sizes=tuple(b.pop("sizes")), **b) for b in facts["boxes"]),
                "was_cached": True,
            }
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
