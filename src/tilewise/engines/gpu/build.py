"""Compiles GPU kernels of every language, here or in worker processes, without a GPU."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import fields
from functools import partial
from multiprocessing import get_context
from multiprocessing.util import Finalize
from os import cpu_count
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.identity import canonical_json
from tilewise.core.kernel import Kernel
from tilewise.engines.contract import Build, Resources
from tilewise.engines.gpu import nvrtc, triton_build
from tilewise.engines.gpu.nvrtc import compile_cuda
from tilewise.engines.gpu.object_cache import is_kept
from tilewise.engines.gpu.objects import GpuObject, over_limit
from tilewise.engines.gpu.triton_build import compile_triton, plain
from tilewise.errors import BuildError
from tilewise.ops.contract import get_op
from tilewise.ops.launch import CudaSource, Source, Step

AnySource = Source | CudaSource


def launch_module(op: str) -> Any:
    """The module that says how the op's GPU kernels are compiled and called."""
    return get_op(op).module("launch")


def compile_source(source: AnySource, target: str) -> GpuObject:
    """The source as an object for `target`, such as `sm_90` or `gfx942`."""
    if isinstance(source, CudaSource):
        return compile_cuda(source, target)
    return compile_triton(source, target)


def is_compiled(source: AnySource, target: str) -> bool:
    """Whether an object for `target` is kept; False where that is not known."""
    made_by = nvrtc if isinstance(source, CudaSource) else triton_build
    try:
        return is_kept(made_by.recipe(source, target))
    except (BuildError, OSError):
        return False


def compile_step(step: Step, target: str) -> GpuObject:
    """The kernel of a step, with the resources that its launch takes."""
    made = compile_source(step.source, target)
    if isinstance(step.source, CudaSource):
        return made.launched_with(threads=step.threads, smem_bytes=step.smem_bytes)
    return made


def build_one(kernel: Kernel, arch: Arch) -> Build:
    """Compiles the kernel for a problem of its usual kind."""
    start = time.perf_counter()
    module = launch_module(kernel.op)
    finish = partial(Build, kernel=kernel)
    try:
        launch = module.launch(kernel, module.representative(kernel), arch)
        steps = [step for step in launch.steps if isinstance(step, Step)]
        made = [compile_step(step, arch.name) for step in steps]
    except Exception as error:  # whatever the compiler raises is a fact about this kernel
        return finish(
            status="compile_error", message=complaint(error), seconds=time.perf_counter() - start
        )
    seconds = time.perf_counter() - start
    broken = next(filter(None, (over_limit(one.resources, arch) for one in made)), "")
    return finish(
        status="over_limit" if broken else "ok",
        message=broken,
        seconds=seconds,
        was_cached=all(one.was_cached for one in made),
        resources=_most([one.resources for one in made]),
    )


def _most(needs: Sequence[Resources]) -> Resources:
    """What the hungriest step takes of each resource."""
    names = [field.name for field in fields(Resources)]
    return Resources(**{name: max(getattr(one, name) for one in needs) for name in names})


def complaint(error: Exception) -> str:
    """What a compiler said, its log included."""
    log = getattr(error, "log", "") or error.__cause__
    return f"{type(error).__name__}: {error}" + (f"\n{log}" if log else "")


def build_all(
    kernels: Sequence[Kernel],
    arch: Arch,
    max_workers: int | None,
    on_done: Callable[[Build], None] | None,
) -> list[Build]:
    """Compiles in worker processes; a crash of the compiler costs one kernel."""
    done: dict[int, Build] = {}

    def note(index: int, build: Build) -> None:
        done[index] = build
        if on_done:
            on_done(build)

    waiting = list(range(len(kernels)))
    workers = min(max_workers or cpu_count() or 1, max(1, len(waiting)))
    if workers == 1 and len(waiting) == 1:
        note(0, build_one(kernels[0], arch))
        return [done[0]]
    while waiting:
        _build_batch([(i, kernels[i]) for i in waiting], arch, workers, note)
        left = [i for i in waiting if i not in done]
        if left == waiting and workers == 1:
            note(left[0], Build(kernel=kernels[left[0]], status="compile_error", message="crashed"))
            left = left[1:]
        # One at a time after a crash, so that the next one names its culprit.
        waiting, workers = left, 1
    return [done[i] for i in range(len(kernels))]


def _workers(count: int) -> ProcessPoolExecutor:
    """Processes that compile; fresh ones, as this one may hold a GPU."""
    return ProcessPoolExecutor(count, get_context("spawn"), initializer=_leave_quietly)


def _leave_quietly() -> None:
    """Ends this worker without taking Python apart, when its work is done.

    Triton 3.9 loses count of what Gluon kernels refer to, and tells the user so at length.
    """
    Finalize(None, _leave, exitpriority=-100)


def _leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _build_batch(
    jobs: Sequence[tuple[int, Kernel]], arch: Arch, workers: int, note: Callable[[int, Build], None]
) -> None:
    with _workers(workers) as crew:
        futures: dict[Future[Build], int] = {
            crew.submit(build_one, kernel, arch): index for index, kernel in jobs
        }
        for future in as_completed(futures):
            try:
                note(futures[future], future.result())
            except BrokenProcessPool:
                continue


def compile_or_raise(step: Step, target: str, name: str) -> GpuObject:
    """The kernel of a step; whatever a compiler raises as a BuildError."""
    try:
        return compile_step(step, target)
    except Exception as error:
        raise BuildError(f"{name} does not compile for {target}", log=complaint(error)) from error


def compile_ahead(
    sources: Sequence[AnySource], target: str, max_workers: int | None = None
) -> list[str]:
    """Fills the cache in worker processes; one line for each source that does not compile.

    Kernels are specialised to strides and sizes when a plan is made; a caller that makes many plans
    collects their sources first, since compiling one after the other takes a second each.
    """
    unique = {source_key(source): source for source in sources}
    needed = [source for source in unique.values() if not is_compiled(source, target)]
    if not needed:  # processes take longer to start than most kernels to compile
        return []
    failed = []
    with _workers(min(max_workers or cpu_count() or 1, len(needed))) as crew:
        jobs = {crew.submit(_compiles, source, target): source for source in needed}
        for job in as_completed(jobs):
            error = job.exception() or job.result()
            if error:
                failed.append(f"{jobs[job].function}: {error}")
    return failed


def compile_together(
    sources: Sequence[AnySource], target: str, max_workers: int | None = None
) -> list[str]:
    """`compile_ahead` in threads of this process, for callers that cannot start others."""
    unique = {source_key(source): source for source in sources}.values()
    # One after the other in a thread of their own: Triton is Python.
    triton = [source for source in unique if not isinstance(source, CudaSource)]
    groups = [triton, *([source] for source in unique if isinstance(source, CudaSource))]

    def failures(group: Sequence[AnySource]) -> list[str]:
        outcomes = ((source, _compiles(source, target)) for source in group)
        return [f"{source.function}: {error}" for source, error in outcomes if error]

    with ThreadPoolExecutor(min(max_workers or cpu_count() or 1, len(groups))) as crew:
        return [line for lines in crew.map(failures, groups) for line in lines]


def _compiles(source: AnySource, target: str) -> str:
    try:
        compile_source(source, target)
    except Exception as error:
        return str(error)
    return ""


def source_key(source: AnySource) -> str:
    """Equal for sources that compile to the same object."""
    return canonical_json([type(source).__name__, plain(source)])
