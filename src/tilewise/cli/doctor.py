"""`doctor`: what works on this machine, and what to do about the rest."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

import typer

from tilewise import __version__
from tilewise.cli.console import JsonFlag, emit, out, table
from tilewise.errors import TilewiseError

Row = tuple[str, str, str]


def doctor(as_json: JsonFlag = False) -> None:
    """Checks compiler, device, cache and optional packages; exit 1 if nothing can run."""
    rows = [row for check in _CHECKS for row in check()]
    if as_json:
        emit([{"what": what, "status": status, "detail": detail} for what, status, detail in rows])
    else:
        table("tilewise doctor", ["", "what", "detail"], [[s, w, d] for w, s, d in rows])
        if all(status != "broken" for _, status, _ in rows):
            out.print("Everything needed is here. Try `tilewise demo`.")
    raise typer.Exit(1 if any(status == "broken" for _, status, _ in rows) else 0)


def _versions() -> Iterator[Row]:
    from tilewise.engines.gpu.triton_build import why_no_triton

    yield "tilewise", "ok", __version__
    yield "Python", "ok", f"{platform.python_version()} on {platform.platform()}"
    for package, use in (
        ("numpy", "arrays"),
        ("pyarrow", "stores of measurements"),
        ("torch", "PyTorch tensors, GPUs and the vendor's kernels"),
        ("triton", "GPU kernels"),
        ("lightgbm", "training"),
        ("ray", "sweeps over many machines"),
    ):
        try:
            found = version(package)
        except PackageNotFoundError:
            yield package, "absent", f"only needed for {use}: pip install {package}"
            continue
        why = why_no_triton() if package == "triton" else None
        detail = f"{why}; until then the vendor serves" if why else found
        yield package, "unused" if why else "ok", detail


def _compiler() -> Iterator[Row]:
    from tilewise.engines.toolchain import find_compiler, why_no_compiler

    compiler = find_compiler()
    if compiler is not None:
        yield "C++ compiler", "ok", f"{compiler.path}: {compiler.version}"
    else:
        yield "C++ compiler", "absent", f"{why_no_compiler()}; until then the vendor serves"


def _device() -> Iterator[Row]:
    from tilewise.engines.device import detect

    try:
        arch = detect()
    except TilewiseError as error:
        yield "device", "broken", str(error)
        return
    peak = arch.peak_tflops["fp32"]
    yield "device", "ok", f"{arch.label}: {arch.compute_units} units, {peak:.2f} fp32 TFLOPS peak"


def _cache() -> Iterator[Row]:
    from tilewise.engines.toolchain import private_folder
    from tilewise.settings import settings

    folder = settings().cache_dir
    try:
        private_folder(folder)
    except TilewiseError as error:
        yield "cache", "broken", str(error)
        return
    libraries = len(list(folder.glob("cpu/*/kernel.so")))
    writable = os.access(folder, os.W_OK)
    detail = f"{folder} with {libraries} compiled kernels"
    yield "cache", "ok" if writable else "broken", detail if writable else f"{folder}: read-only"


_CHECKS: tuple[Callable[[], Iterator[Row]], ...] = (_versions, _compiler, _device, _cache)
