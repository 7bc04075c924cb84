"""`doctor`: what works on this machine, and what to do about the rest."""

from __future__ import annotations

import platform
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import typer

from tilewise import __version__
from tilewise.cli.console import JsonFlag, emit, out, table
from tilewise.cli.progress import telling
from tilewise.core.arch import Arch
from tilewise.core.dtypes import tolerance
from tilewise.core.problem import Problem
from tilewise.errors import BuildError, TilewiseError, how_to_install
from tilewise.ops.contract import Op, all_ops

Row = tuple[str, str, str]


def doctor(as_json: JsonFlag = False) -> None:
    """Checks what works on this machine.

    Tries the compiler, engines, cache and models. Exits with 1 if something is broken.
    """
    with telling("trying the compiler, engines, cache and models"):
        rows = [row for check in _CHECKS for row in check()]
    if as_json:
        emit([{"what": what, "status": status, "detail": detail} for what, status, detail in rows])
    else:
        table("tilewise doctor", ["", "what", "detail"], [[s, w, d] for w, s, d in rows])
        out.print(advice(rows), soft_wrap=True)
    raise typer.Exit(1 if any(status == "broken" for _, status, _ in rows) else 0)


def advice(rows: Sequence[Row]) -> str:
    """What the findings come to, in one line."""
    broken = [what for what, status, _ in rows if status == "broken"]
    if broken:
        return f"Broken: {', '.join(broken)}. The rest still works; fix these first."
    if ("C++ compiler", "ok") not in [(what, status) for what, status, _ in rows]:
        return (
            "CPU kernels cannot be compiled, so NumPy or PyTorch is used. Install a C++ compiler."
        )
    return "Everything needed is installed. Try `tilewise demo`."


def _versions() -> Iterator[Row]:
    from tilewise.engines.gpu.triton_build import triton_version, why_no_triton

    yield "tilewise", "ok", __version__
    yield "Python", "ok", f"{platform.python_version()} on {platform.platform()}"
    for package, use in (
        ("numpy", "arrays"),
        ("pyarrow", "stores of measurements"),
        ("torch", "PyTorch tensors, GPUs and the vendor's kernels"),
        ("triton", "GPU kernels"),
        ("lightgbm", "training"),
        ("scipy", "training"),
        ("plotly", "reports"),
        ("ray", "sweeps over many machines"),
    ):
        try:
            found = triton_version() if package == "triton" else version(package)
        except PackageNotFoundError:
            found = ""
        if not found:
            yield package, "absent", f"only needed for {use}: {how_to_install(package)}"
            continue
        why = why_no_triton() if package == "triton" else None
        detail = f"{why}; until then the vendor's routines are used" if why else found
        yield package, "unused" if why else "ok", detail


def _compiler() -> Iterator[Row]:
    from tilewise.engines.toolchain import find_compiler, why_no_build, why_no_compiler

    compiler = find_compiler()
    if compiler is None:
        yield (
            "C++ compiler",
            "absent",
            f"{why_no_compiler()}; until then the vendor's routines are used",
        )
        return
    why = why_no_build()
    detail = f"{compiler.path}: {compiler.version}"
    yield "C++ compiler", "broken" if why else "ok", f"{detail}; {why}" if why else detail


def _device() -> Iterator[Row]:
    from tilewise.engines.device import detect

    try:
        arch = detect()
    except TilewiseError as error:
        yield "device", "broken", str(error)
        return
    peak = f"{arch.peak_tflops['fp32']:.2f} fp32 TFLOPS at its listed clock"
    units = f"{arch.compute_units} units"
    if arch.kind == "cpu":
        units, peak = f"{arch.compute_units} cores", peak + _measured(arch)
    yield "device", "ok", f"{arch.label}: {units}, {peak}"


def _measured(arch: Arch) -> str:
    from tilewise.engines.cpu.peak import measured_tflops

    try:
        return f", {measured_tflops(arch):.2f} measured"
    except BuildError:  # told by the compiler's own line
        return ""


def _engines() -> Iterator[Row]:
    """One kernel of each engine, compiled, run and checked."""
    from tilewise.engines import ENGINES, get_engine
    from tilewise.engines.device import detect

    for name in ENGINES:
        try:
            engine = get_engine(name)
            why = engine.why_unavailable()
            found = ("absent", why) if why else try_engine(name, detect(engine.kinds[0]))
            yield f"{name} engine", *found
        except Exception as error:  # whatever goes wrong in there is the finding
            first = f"{type(error).__name__}: {error}".splitlines()[0]
            yield f"{name} engine", "broken", first


def try_engine(name: str, arch: Arch) -> tuple[str, str]:
    """Runs the first kernel of an engine that can serve a small product."""
    from tilewise.dispatch import default_registry
    from tilewise.engines import get_engine
    from tilewise.ops.contract import get_op
    from tilewise.ops.gemm.problem import GemmProblem

    problem = GemmProblem(m=64, n=64, k=64, dtype="fp32" if arch.kind == "cpu" else "fp16")
    op = get_op("gemm")
    own = [k for k in default_registry("gemm", arch) if k.engine == name]
    kernel = next((k for k in own if op.why_unusable(k, problem, arch) is None), None)
    if kernel is None:
        return "absent", f"it has no kernel for {arch.label}"
    operands, out, expected = _operands(op, problem, arch)
    get_engine(name).plan(kernel, problem, arch).execute(operands, out)
    found = np.asarray(out if arch.kind == "cpu" else out.cpu(), np.float64)
    error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    is_right = error <= tolerance(problem.dtype, problem.out_dtype, problem.gemm.k)
    told = "right" if is_right else f"WRONG (relative error {error:.1e})"
    return "ok" if is_right else "broken", f"compiled and ran a kernel; its result is {told}"


def _operands(op: Op, problem: Problem, arch: Arch) -> tuple[list[Any], Any, Any]:
    """Random operands and a result in the problem's layout, and what it must become."""
    from tilewise.cli.demo import random_operands

    exact = random_operands(problem)
    expected = op.reference(problem, *exact)
    if arch.kind == "cpu":
        return exact, np.empty(expected.shape, np.float32), expected
    import torch

    operands = [torch.from_numpy(array).to("cuda", torch.float16) for array in exact]
    rounded = [operand.cpu().double().numpy() for operand in operands]
    out = torch.empty(expected.shape, dtype=torch.float16, device="cuda")
    return operands, out, op.reference(problem, *rounded)


def _cache() -> Iterator[Row]:
    from tilewise.engines.toolchain import cache_folder
    from tilewise.settings import settings

    folder = settings().cache_dir
    try:
        cache_folder()
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(1 << 20))
    except (TilewiseError, OSError) as error:
        yield "cache", "broken", str(error)
        return
    libraries = len(list(folder.glob("cpu/*/kernel.so")))
    yield "cache", "ok", f"{folder} with {libraries} compiled kernels"


def _models() -> Iterator[Row]:
    """Every model found, and what would serve each op on the live device."""
    from tilewise.core.model import load_model
    from tilewise.engines.device import detect
    from tilewise.engines.toolchain import why_no_build
    from tilewise.selection.models import SHIPPED, model_folders

    fitting: dict[str, list[str]] = {}
    arch = detect()
    for folder in model_folders():
        try:
            model = load_model(folder)
        except TilewiseError as error:
            yield f"model {folder.name}", "broken", f"{error}; it is ignored"
            continue
        dtypes = ", ".join(model.dtypes)
        place = "shipped" if folder.parent == SHIPPED else folder
        yield f"model {folder.name}", "ok", f"{model.op} on {model.arch} in {dtypes} ({place})"
        if model.arch == arch.name:
            fitting.setdefault(model.op, []).append(f"{folder.name} ({dtypes})")
    unable = {"cpu"} if why_no_build() else set()
    for op in all_ops():
        yield f"serving {op}", "ok", _served(op, arch, fitting.get(op, []), unable)


def _served(op: str, arch: Arch, models: Sequence[str], unable: set[str]) -> str:
    from tilewise.dispatch import default_registry
    from tilewise.engines import get_engine, is_foreign

    counts: Counter[str] = Counter(kernel.engine for kernel in default_registry(op, arch))
    for name in [name for name in counts if not is_foreign(name)]:
        if name in unable or get_engine(name).why_unavailable():
            del counts[name]
    able = " and ".join(f"{count} {name}" for name, count in counts.items())
    if set(counts) <= {"vendor"}:
        return "only the vendor's routine" if counts else "nothing"
    chosen = " and ".join(
        [*models, "the analytic model otherwise" if models else "the analytic model"]
    )
    return f"{able} kernels; chosen by {chosen}"


_CHECKS: tuple[Callable[[], Iterator[Row]], ...] = (
    *(_versions, _compiler, _device, _engines),
    *(_cache, _models),
)
