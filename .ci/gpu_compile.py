#!/usr/bin/env python3
"""Compiles a Triton kernel of each family for every GPU we claim, on a machine without one.

    .ci/gpu_compile.py                   under the Triton that is installed
    .ci/gpu_compile.py --triton 3.6.0    under this one, fetched beside the environment if need be

A family's kernels that come from different functions count as different; those of BatchNorm, which
are of no op, come along. Exits 1 where one does not compile or is over a limit; done with a word
where the other Triton cannot be fetched.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ARCHS = ("sm_90", "gfx90a", "gfx942", "gfx950")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--triton", default="", help="a version; by default the installed one")
    wanted = parser.parse_args().triton
    return _under(wanted) if wanted not in ("", _installed()) else _compile_all()


def _installed() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def _under(version: str) -> int:
    """Runs this script again with another Triton before the installed one."""
    folder = Path(sys.prefix) / f"triton-{version}"
    if not (folder / "triton").exists():
        fetch = ["-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
        got = subprocess.run(
            [sys.executable, *fetch, f"triton=={version}"], capture_output=True, text=True
        )
        if got.returncode:
            print(f"Triton {version} cannot be fetched: kernels are not compiled under it")
            return 0
    path = os.pathsep.join((str(ROOT / "src"), str(folder)))
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, __file__], env=environment).returncode


def representatives(name: str) -> list[Any]:
    """For each op, one kernel of each family and function on this architecture."""
    from tilewise.core.arch import load_arch
    from tilewise.engines.gpu.build import launch_module
    from tilewise.ops.configs import load_pool
    from tilewise.ops.contract import all_ops

    arch, found = load_arch(name), {}
    for op in all_ops().values():
        if not any(kind.engine == "triton" for kind in op.kernel_types):
            continue
        for kernel in load_pool(op, arch, ["triton"]):
            module = launch_module(kernel.op)
            launch = module.launch(kernel, module.representative(kernel), arch)
            functions = tuple(source.function for source in launch.sources)
            found.setdefault((op.name, kernel.to_dict().get("family"), functions), kernel)
    return list(found.values())


def norm_sources(arch: Any) -> list[Any]:
    """The kernels of BatchNorm, with all that can follow it."""
    from tilewise.torch_ops import norm_launch

    norm = norm_launch.Norm(
        pixels=4096, channels=96, dtype="bf16", parameters="fp32", running="fp32", is_tracked=True,
        has_residual=True, activation="relu",
    )  # fmt: skip
    launches = (norm_launch.forward(norm, arch), norm_launch.backward(norm, arch, True))
    return [source for launch in launches for source in launch.sources]


def _compile_all() -> int:
    from tilewise.core.arch import load_arch
    from tilewise.engines import get_engine
    from tilewise.engines.gpu.build import compile_ahead

    failed = 0
    for name in ARCHS:
        start = time.monotonic()
        arch = load_arch(name)
        builds = get_engine("triton").build(representatives(name), arch)
        bad = [build for build in builds if build.status != "ok"]
        norms = compile_ahead(norm_sources(arch), name)
        failed += len(bad) + len(norms)
        took = time.monotonic() - start
        summary = f"{len(builds) - len(bad)} of {len(builds)} kernels compile in {took:.0f} s"
        print(f"Triton {version('triton')}, {name}: {summary}", flush=True)
        for build in bad:
            print(f"  {build.kernel.name}: {build.status}: {build.message.strip()}")
        for line in norms:
            print(f"  BatchNorm: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
