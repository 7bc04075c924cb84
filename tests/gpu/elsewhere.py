"""Objects compiled on one machine, for `test_launch_gpu.py` to launch on another.

    python tests/gpu/elsewhere.py FOLDER      writes them, on a machine that needs no GPU

So kernels of one Triton run on a machine that has another, or none. TILEWISE_TEST_OBJECTS names
the folder to the test.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tilewise.core.arch import Arch, load_arch
from tilewise.engines.gpu.build import compile_step, launch_module, source_key
from tilewise.engines.gpu.object_cache import read_object, write_object
from tilewise.engines.gpu.objects import GpuObject
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import all_ops
from tilewise.ops.launch import Step

FOLDER = "TILEWISE_TEST_OBJECTS"


def kernels(arch: Arch) -> Iterator[Any]:
    """The first kernel of each op, engine and family in bf16."""
    seen = set()
    for op in all_ops().values():
        for kernel in load_pool(op, arch, ["triton", "cuda"]):
            family = (op.name, kernel.engine, kernel.family)  # type: ignore[attr-defined]
            if kernel.dtype == "bf16" and family not in seen:  # type: ignore[attr-defined]
                seen.add(family)
                yield kernel


def steps(kernel: Any, arch: Arch) -> list[Step]:
    """The kernels of its launch for a problem of its usual kind."""
    module = launch_module(kernel.op)
    made = module.launch(kernel, module.representative(kernel), arch)
    return [step for step in made.steps if isinstance(step, Step)]


def write(folder: Path) -> None:
    arch = load_arch("sm_90", "H200")
    folder.mkdir(parents=True, exist_ok=True)
    for kernel in kernels(arch):
        for nth, step in enumerate(steps(kernel, arch)):
            wanted = {"compiler": f"triton {version('triton')}", "source": source_key(step.source)}
            name = f"{kernel.name}.{nth}"
            write_object(folder / name, name, wanted, compile_step(step, arch.name))
            print(name)


def read(folder: Path, kernel: Any, nth: int) -> GpuObject:
    name = f"{kernel.name}.{nth}"
    found = read_object(folder / name, name)
    assert found is not None, f"{folder / name} is not whole"
    return found


if __name__ == "__main__":
    write(Path(sys.argv[1]))
