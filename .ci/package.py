#!/usr/bin/env python3
"""Builds the sdist, and from it the wheel; installs each in a clean environment and tries it there.

    .ci/package.py                  with the Python that runs this
    .ci/package.py --python PATH    in an environment of another Python

Nothing of the checkout can be reached from where it is tried. Exits 1 where something fails; done
with a word where packages cannot be fetched.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
NOT_PACKED = (".*", "datasets", "build", "dist", "*.egg-info", "__pycache__", "node_modules")
MOST_BYTES = 10_000_000
"""Of a wheel."""
PROGRAM = """
import numpy as np
import tilewise as tw
a, b = np.ones((33, 65), "f4"), np.ones((65, 17), "f4")
assert (tw.matmul(a, b) == 65).all()
x, w = np.ones((1, 4, 8, 8), "f4"), np.ones((6, 4, 3, 3), "f4")
assert (tw.conv2d(x, w) == 36).all()
choice = tw.select(tw.GemmProblem(m=16, n=2112, k=7168, dtype="bf16"), arch="sm_90:H200")
assert choice.path == "model", choice
print(tw.__version__, tw.__file__)
"""
COMMANDS = (
    "--version",
    "rank --op gemm --arch sm_90:H200 --dtype bf16 M=16 N=2112 K=7168 --top 2",
    "rank --op conv_fwd N=1 C=8 K=8 Hi=8 Wi=8 Y=3 X=3 --top 2",
    "kernels count --op conv_fwd --arch gfx942",
    "problems sample --op gemm --count 3 --out problems.csv",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="the Python to install into")
    python = parser.parse_args().python
    with TemporaryDirectory(prefix="package-") as scratch:
        folder = Path(scratch)
        subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
        pip = [folder / "venv" / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
        if subprocess.run([*pip, "install", "-q", "setuptools>=77", "wheel"]).returncode:
            print("packages cannot be fetched from here: the package is not tried")
            return 0
        sdist = _sdist(folder, pip[0])
        _run([*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, sdist])
        (wheel,) = folder.glob("tilewise-*.whl")
        if wheel.stat().st_size > MOST_BYTES:
            print(f"{wheel.name} has {wheel.stat().st_size:,} bytes; at most {MOST_BYTES:,}")
            return 1
        _check_description(wheel)
        for file in (wheel, sdist):
            again = ["--no-build-isolation", "--force-reinstall", "--no-deps"]
            _run([*pip, "install", "-q", *(again if file is sdist else ()), file])
            _try(folder)
            print(f"{file.name}: {file.stat().st_size:,} bytes, installs and serves", flush=True)
    return 0


def _sdist(folder: Path, python: Path | str) -> Path:
    """The source distribution of a copy: building leaves files behind."""
    copy = folder / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_PACKED))
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    _run([python, "-c", build], cwd=copy)
    shutil.rmtree(copy)
    (sdist,) = folder.glob("tilewise-*.tar.gz")
    return sdist


def _check_description(wheel: Path) -> None:
    """Ends where what an index shows of the package has links that lead nowhere from there."""
    with zipfile.ZipFile(wheel) as held:
        (name,) = (n for n in held.namelist() if n.endswith(".dist-info/METADATA"))
        text = held.read(name).decode()
    lost = re.findall(r"\]\((?!https://|#)[^)]*\)", text)
    if lost or "\n# tilewise\n" not in text:
        raise SystemExit(f"the description of {wheel.name} is not the README, or has {lost}")


def _try(folder: Path) -> None:
    """Runs commands and a program in an empty folder, with no settings and an empty cache."""
    place = folder / "empty"
    place.mkdir()
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    environment = {**kept, "HOME": str(place)}
    tools = folder / "venv" / "bin"
    for line in COMMANDS:
        _run([tools / "tilewise", *line.split()], cwd=place, env=environment)
    printed = _run([tools / "python", "-c", PROGRAM], cwd=place, env=environment)
    if str(folder / "venv") not in printed:
        raise SystemExit(f"what was tried is not what was installed: {printed}")
    shutil.rmtree(place)


def _run(command: list[object], **options: object) -> str:
    """What a command printed; ends this one where it fails."""
    words = list(map(str, command))
    ran = subprocess.run(words, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if ran.returncode:
        raise SystemExit(f"{' '.join(words)}\n{ran.stdout}{ran.stderr}")
    return str(ran.stdout)


if __name__ == "__main__":
    raise SystemExit(main())
