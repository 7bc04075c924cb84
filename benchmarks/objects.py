#!/usr/bin/env python3
"""Carries compiled GPU kernels to another machine, so that none of its time goes into compiling.

usage: python benchmarks/objects.py pack FILE [--most-mb 24] [--compiler "nvrtc 13.0"]
       python benchmarks/objects.py unpack FILE

Both work on the cache of `TILEWISE_CACHE_DIR`. `pack` writes one compressed file, newest objects
left out where it grows beyond --most-mb, so fill the cache in the order of need:

    TILEWISE_CACHE_DIR=build/cache python benchmarks/sweep_convs.py none --compile
    TILEWISE_CACHE_DIR=build/cache python benchmarks/objects.py pack build/objects.xz

An object is found there under the same sources and the same version of the compiler (13.0 of NVRTC,
say; `--compiler` packs those of one version alone), and any other is compiled as ever. What was
damaged on the way is refused when it is read, and compiled, too. Objects are programs: unpack none
but your own.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from tilewise.core.plain_files import open_plain
from tilewise.engines.gpu.object_cache import FOLDER
from tilewise.engines.toolchain import private_folder
from tilewise.errors import TilewiseError, printable
from tilewise.settings import settings

NAME = re.compile(r"[0-9a-f]{64}")
"""An object's file: what it was made from, hashed."""
MOST_BYTES = 16 << 20
"""No object is as large."""
MOST_UNPACKED_BYTES = 4 << 30
"""Nor are all together."""
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 << 20}]
"""Objects of one source resemble each other, wherever they lie in the file."""
MB = 1 << 20
FAULTS = (TilewiseError, OSError, EOFError, tarfile.TarError, lzma.LZMAError)
FAULTS += (ValueError, RecursionError, MemoryError, OverflowError)
"""Whatever a file can make go wrong."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("pack", "unpack"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--most-mb", type=float, default=24.0, help="of the packed file")
    parser.add_argument("--compiler", default="", help="objects of this one alone")
    return parser.parse_args()


def folder() -> Path:
    return private_folder(private_folder(settings().cache_dir) / FOLDER)


def objects(where: Path, compiler: str) -> Iterator[tuple[str, bytes]]:
    """Names and contents, the oldest first."""
    files = [path for path in where.iterdir() if NAME.fullmatch(path.name)]
    for path in sorted(files, key=lambda path: (path.stat().st_mtime, path.name)):
        body = path.read_bytes()
        if not compiler or json.loads(body.split(b"\n", 2)[1])["wanted"]["compiler"] == compiler:
            yield path.name, body


def pack(file: Path, most_mb: float, compiler: str) -> tuple[int, float]:
    """How many objects were packed, and into how many megabytes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with (
        file.open("wb") as raw,
        lzma.LZMAFile(raw, "wb", filters=FILTERS) as packed,
        tarfile.open(fileobj=packed, mode="w|") as archive,
    ):
        for name, body in objects(folder(), compiler):
            if raw.tell() > most_mb * MB:
                break
            entry = tarfile.TarInfo(name)
            entry.size = len(body)
            archive.addfile(entry, io.BytesIO(body))
            count += 1
    return count, file.stat().st_size / MB


class Bounded:
    """What a packed file holds, as far as objects go: a few bytes may unpack to any number."""

    def __init__(self, packed: lzma.LZMAFile) -> None:
        self._packed, self._left = packed, MOST_UNPACKED_BYTES
        self.allow_one()

    def allow_one(self) -> None:
        """The next object and its header, whatever size the header claims to have."""
        self._one = 2 * MOST_BYTES

    def read(self, size: int) -> bytes:
        found = self._packed.read(size)
        self._left -= len(found)
        self._one -= len(found)
        if min(self._left, self._one) < 0:
            raise TilewiseError("more is packed than objects are")
        return found


def unpack(file: Path) -> int:
    """How many objects are there now that were not before."""
    where, count = folder(), 0
    with open(open_plain(file), "rb") as raw, lzma.open(raw) as packed:  # noqa: PTH123
        bounded = Bounded(packed)
        with tarfile.open(fileobj=bounded, mode="r|") as archive:  # type: ignore[call-overload]
            for entry in archive:
                if not NAME.fullmatch(entry.name) or entry.type != tarfile.REGTYPE:
                    raise TilewiseError(f"{file} holds {entry.name[:80]!r}, which is no object")
                body = archive.extractfile(entry)
                if body is not None and not (where / entry.name).exists():
                    part = where / f".writing-{entry.name}"
                    part.touch(mode=0o600)
                    part.write_bytes(body.read())
                    part.replace(where / entry.name)
                    count += 1
                bounded.allow_one()
    return count


def main() -> int:
    args = arguments()
    try:
        if args.what == "pack":
            count, size = pack(args.file, args.most_mb, args.compiler)
            print(f"{count} objects in {size:.1f} MB: {args.file}")
        else:
            print(f"{unpack(args.file)} objects are new in {folder()}")
    except FAULTS as error:
        said = str(error) or type(error).__name__
        print(f"objects: {args.file}: {printable(said)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
