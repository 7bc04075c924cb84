"""Compiles Triton and Gluon sources for any GPU, here or in worker processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from os import cpu_count
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.engines.contract import Build, Resources
from tilewise.engines.gpu.elf import FRAME_SIZE, REGISTER_COUNT, cubin_facts, hsaco_facts
from tilewise.engines.gpu.objects import over_limit
from tilewise.errors import BuildError
from tilewise.ops.contract import get_op
from tilewise.ops.launch import Source


def launch_module(op: str) -> Any:
    """The module that says how the op's GPU kernels are compiled and called."""
    return get_op(op).module("launch")


def compile_source(source: Source, arch: Arch, target: Any = None) -> Any:
    """Triton's compiled kernel, for `arch` or for another `target` that runs its kernels.

    Triton's own cache makes a second call cheap.
    """
    import triton
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    function = getattr(import_module(source.module), source.function)
    signature = {name: source.signature.get(name, "constexpr") for name in function.arg_names}
    attributes = {
        (function.arg_names.index(name),): [["tt.divisibility", factor]]
        for name, factor in source.divisible.items()
    }
    kind = GluonASTSource if source.is_gluon else ASTSource
    given = {name: value for name, value in source.options.items() if value is not None}
    # Triton warns where this is left open: its default is about to change.
    options = {"enable_fp_fusion": True, **given}
    return triton.compile(
        kind(function, signature, source.constants, attributes),
        target=target or target_of(arch),
        options=options,
    )


def target_of(arch: Arch) -> Any:
    """The architecture as Triton names it."""
    from triton.backends.compiler import GPUTarget

    if arch.vendor == "nvidia":
        return GPUTarget("cuda", int(arch.name.removeprefix("sm_")), arch.warp_size)
    return GPUTarget("hip", arch.name, arch.warp_size)


def resources_of(compiled: Any, arch: Arch) -> Resources:
    """Registers, spilled bytes and shared memory, read from the compiled object."""
    needs = {
        "smem_bytes": compiled.metadata.shared,
        "threads": compiled.metadata.num_warps * arch.warp_size,
    }
    if arch.vendor == "nvidia":
        facts = cubin_facts(compiled.asm["cubin"])
        return Resources(registers=facts[REGISTER_COUNT], spills=facts.get(FRAME_SIZE, 0), **needs)
    kernel = hsaco_facts(compiled.asm["hsaco"])
    spilled = 4 * (kernel[".vgpr_spill_count"] + kernel[".sgpr_spill_count"])
    return Resources(
        registers=kernel[".vgpr_count"],
        sgprs=kernel[".sgpr_count"],
        agprs=kernel[".agpr_count"],
        # Scratch memory holds spilled registers; scalar ones may go to vector registers instead.
        spills=max(spilled, kernel[".private_segment_fixed_size"]),
        **needs,
    )


def build_one(kernel: Kernel, arch: Arch) -> Build:
    """Compiles the kernel for a problem of its usual kind."""
    start = time.perf_counter()
    module = launch_module(kernel.op)
    finish = partial(Build, kernel=kernel)
    try:
        launch = module.launch(kernel, module.representative(kernel), arch)
        with noting_hits() as hits:
            compiled = compile_source(launch.source, arch)
        resources = resources_of(compiled, arch)
    except Exception as error:  # whatever the compiler raises is a fact about this kernel
        cause = f"\n{error.__cause__}" if error.__cause__ else ""
        message = f"{type(error).__name__}: {error}{cause}"
        return finish(status="compile_error", message=message, seconds=time.perf_counter() - start)
    seconds = time.perf_counter() - start
    broken = over_limit(resources, arch)
    return finish(
        status="over_limit" if broken else "ok",
        message=broken,
        seconds=seconds,
        was_cached=all(hits),
        resources=resources,
    )


@contextmanager
def noting_hits() -> Iterator[list[bool]]:
    """Collects, for each compilation inside, whether Triton's cache had it."""
    from triton import knobs

    hits: list[bool] = []
    with knobs.compilation.scope():
        knobs.compilation.listener = lambda **facts: hits.append(facts["cache_hit"])
        yield hits


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


def _build_batch(
    jobs: Sequence[tuple[int, Kernel]], arch: Arch, workers: int, note: Callable[[int, Build], None]
) -> None:
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures: dict[Future[Build], int] = {
            pool.submit(build_one, kernel, arch): index for index, kernel in jobs
        }
        for future in as_completed(futures):
            try:
                note(futures[future], future.result())
            except BrokenProcessPool:
                continue


def compile_or_raise(source: Source, arch: Arch, name: str, target: Any) -> Any:
    """The compiled kernel; the compiler's refusal as a BuildError."""
    try:
        return compile_source(source, arch, target)
    except Exception as error:
        raise BuildError(f"{name} does not compile for {arch.name}", log=str(error)) from error


def compile_ahead(
    sources: Sequence[Source], arch: Arch, max_workers: int | None = None, target: Any = None
) -> list[str]:
    """Fills Triton's cache in worker processes; one line for each source that does not compile.

    Kernels are specialised to strides and sizes when a plan is made; whoever makes many plans
    collects their sources first, since compiling one after the other takes a second each.
    """
    unique = {source_key(source): source for source in sources}
    workers = min(max_workers or cpu_count() or 1, max(1, len(unique)))
    failed = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = {pool.submit(_compiles, source, arch, target): source for source in unique.values()}
        for job in as_completed(jobs):
            error = job.exception() or job.result()
            if error:
                failed.append(f"{jobs[job].function}: {error}")
    return failed


def _compiles(source: Source, arch: Arch, target: Any) -> str:
    try:
        compile_source(source, arch, target)
    except Exception as error:
        return str(error)
    return ""


def source_key(source: Source) -> str:
    """Equal for sources that compile to the same object."""
    return "\n".join(
        str(part)
        for part in (
            *(source.module, source.function, source.signature),
            *(source.constants, source.divisible, source.options),
        )
    )
