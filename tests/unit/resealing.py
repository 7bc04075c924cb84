"""Model folders as an attacker writes them: any contents, every checksum in order."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any


def copied(folder: Path, target: Path) -> Path:
    """A copy of a model folder to be spoiled."""
    shutil.copytree(folder, target)
    return target


def resealed(folder: Path, files: dict[str, bytes], **manifest: Any) -> Path:
    """Puts contents into a model's folder and mends its manifest to vouch for them."""
    held = json.loads((folder / "manifest.json").read_text())
    for name, data in files.items():
        (folder / name).write_bytes(data)
        held["files"][name] = hashlib.sha256(data).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({**held, **manifest}))
    return folder


def renamed(folder: Path, old: str, new: str) -> Path:
    """Calls a feature something else, in the definitions and in the forests that split on it."""
    spec = json.loads((folder / "feature_spec.json").read_text())
    for entry in spec["features"]:
        entry[0] = new if entry[0] == old else entry[0]
    body = json.loads(gzip.decompress((folder / "model.json.gz").read_bytes()))
    for forest in body["forests"].values():
        forest["features"] = [new if name == old else name for name in forest["features"]]
    files = {
        "feature_spec.json": json.dumps(spec).encode(),
        "model.json.gz": gzip.compress(json.dumps(body).encode()),
    }
    return resealed(folder, files)
