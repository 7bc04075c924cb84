"""A model's folder: which files its manifest seals, and the one way in which any of them is read.

A checksum shows damage, not origin: who can write a file can write the manifest. So whatever is
read here is checked again, as data, by its reader.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewise.core.packed import inflated
from tilewise.core.plain_files import read_plain
from tilewise.core.strict_json import loads
from tilewise.errors import ModelError

MANIFEST = "manifest.json"
MODEL_SCHEMA = 5
"""1 had plain lists in place of packed numbers, 2 no forest of the vendor's, 3 its numbers in
base64 among the rest, 4 no share of an estimate; all are read, and 4 is written where it says all.
"""
MOST_BYTES = 256 * 2**20
"""Of a file, as it lies there."""
_GZIP = zlib.MAX_WBITS | 16


class SealedFolder:
    """A model's folder; every file but the manifest comes with its checksum held."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.manifest = _manifest(self.path)

    def __contains__(self, name: str) -> bool:
        return name in self.manifest["files"]

    def holds(self, name: str) -> bool:
        """Whether a file that the manifest lists is there: serving needs few of them."""
        return name in self and (self.path / name).is_file()

    def read(self, name: str) -> bytes:
        """The bytes of a file whose checksum is the manifest's."""
        wanted = self.manifest["files"].get(name)
        if wanted is None:
            raise ModelError(f"{self.path} is damaged: its manifest does not list {name}")
        try:
            data = read_plain(self.path / name, most=MOST_BYTES)
        except FileNotFoundError:
            raise ModelError(
                f"{self.path} is without {name}, which only training leaves there and only "
                "`evaluate`, `compare` and `train --warm-start` need; `train` it again"
                if name not in SERVED
                else f"{self.path} is damaged: {name} is missing"
            ) from None
        except OSError as error:
            raise ModelError(f"{self.path} is damaged: {name}: {error.strerror}") from None
        found = hashlib.sha256(data).hexdigest()
        if found != wanted:
            raise ModelError(
                f"{self.path} is damaged: {name} has sha256 {found[:16]}..., "
                f"the manifest says {str(wanted)[:16]}..."
            )
        return data

    def unpacked(self, name: str) -> bytes:
        """What a compressed file holds, of a bearable size."""
        try:
            return inflated(self.read(name), _GZIP)
        except (ValueError, zlib.error) as error:
            raise ModelError(f"{self.path} is damaged: {name}: {error}") from None

    def json(self, name: str) -> Any:
        """What a JSON file holds."""
        try:
            return loads(self.read(name))
        except ValueError as error:
            raise ModelError(f"{self.path} is damaged: {name} is not JSON: {error}") from None


SERVED = ("model.json.gz", "numbers.gz", "feature_spec.json", "metrics.json")
"""The files that serving reads, besides the manifest."""


def seal(
    folder: Path,
    files: Mapping[str, bytes],
    manifest: Mapping[str, Any],
    schema: int = MODEL_SCHEMA,
) -> None:
    """Writes files, then the manifest with the checksum of these and of every table there."""
    for name, data in files.items():
        (folder / name).write_bytes(data)
    seals = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    tables = sorted(folder.glob("*.parquet"))
    seals |= {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in tables}
    sealed = {**manifest, "schema": schema, "files": dict(sorted(seals.items()))}
    (folder / MANIFEST).write_bytes(as_json(sealed))


def as_json(value: Any) -> bytes:
    """Readable JSON, equal for equal values."""
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = loads(read_plain(path / MANIFEST, most=MOST_BYTES))
    except OSError as error:
        raise ModelError(
            f"{path} is not a model: {MANIFEST} cannot be read ({error.strerror}); "
            "a model is a folder that `train` makes"
        ) from None
    except ValueError as error:
        raise ModelError(f"{path} is damaged: {MANIFEST} is not JSON: {error}") from None
    if (
        not isinstance(manifest, dict)
        or type(manifest.get("schema")) is not int
        or not isinstance(manifest.get("files"), dict)
    ):
        raise ModelError(
            f"{path} is foreign: {MANIFEST} has no schema or no files; `train` makes models"
        )
    schema = manifest["schema"]
    if schema > MODEL_SCHEMA:
        raise ModelError(
            f"{path} has schema {schema}; this version reads up to {MODEL_SCHEMA}. Update tilewise"
        )
    _check_kinds(path, manifest)
    return manifest


_TEXTS = ("name", "op", "arch", "device", "data_device", "tilewise", "lightgbm", "data_sha256")
_LISTS = ("kernels", "dtypes", "engines")


def _check_kinds(path: Path, manifest: Mapping[str, Any]) -> None:
    """Raises where an entry that something reads is of another kind than it should be."""
    for name in _TEXTS:
        text = manifest.get(name, "")
        if not isinstance(text, str) or len(text) > 200 or not text.isprintable():
            raise ModelError(f"{path} is damaged: {MANIFEST}: {name} is no short text")
    for name in _LISTS:
        listed = manifest.get(name, [])
        if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
            raise ModelError(f"{path} is damaged: {MANIFEST} names no list of {name}")
    for name in ("figures", "params"):
        if not isinstance(manifest.get(name, {}), dict):
            raise ModelError(f"{path} is damaged: {MANIFEST}: {name} is no object")
    stands = manifest.get("stands", [])
    if not isinstance(stands, list) or not all(isinstance(each, dict) for each in stands):
        raise ModelError(f"{path} is damaged: {MANIFEST}: stands is no list of objects")
