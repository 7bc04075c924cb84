"""Times the few kernels expected most of, and the vendor's, on the problems of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import parse_policy
from tilewise.core.problem import Problem
from tilewise.dispatch import default_dispatcher
from tilewise.dispatch.reshaping import reshaped_for
from tilewise.engines import engines_for, get_engine
from tilewise.engines.device import detect
from tilewise.errors import InputError
from tilewise.ops.contract import get_op
from tilewise.selection.measured import Times
from tilewise.sweep.bench import Bench
from tilewise.sweep.device_info import as_arch

TOP = 4


def tune_problems(
    problems: Sequence[Problem],
    arch: Arch,
    *,
    top: int = TOP,
    on_done: Callable[[Problem, dict[str, float]], None] = lambda problem, times: None,
) -> Times:
    """Times for every problem that some kernel served rightly."""
    if not isinstance(top, int) or top < 1:
        raise InputError(f"top is {top!r}; time at least 1 kernel for each problem")
    as_arch(detect(arch.kind), arch.name)  # raises where the device here is another
    bench = _bench(arch, problems)
    found: Times = {}
    for problem in dict.fromkeys(problems):
        if problem.is_empty:
            continue
        times: dict[str, float] = {}
        for seen, kernels in _as_served(problem, _candidates(problem, arch, top), arch).items():
            times |= _timed(bench, seen, kernels)
        if times:
            found[problem] = times
        on_done(problem, times)
    bench.forget()
    return found


def _bench(arch: Arch, problems: Sequence[Problem]) -> Bench:
    policy = parse_policy("quick,rounds=3", arch.kind)
    ops = [get_op(name) for name in dict.fromkeys(problem.op for problem in problems)]
    engines = {name: get_engine(name) for op in ops for name in engines_for(arch.kind, op)}
    if arch.kind == "cpu":
        from tilewise.sweep.bench_cpu import CpuBench

        return CpuBench(arch, policy, engines)
    from tilewise.sweep.bench_cuda import CudaBench

    return CudaBench(arch, policy, engines)


def _candidates(problem: Problem, arch: Arch, top: int) -> list[Kernel]:
    """The head of the ranking, and PyTorch's routine."""
    dispatcher, op = default_dispatcher(problem.op, arch), get_op(problem.op)
    head: list[Kernel] = []
    for ranked in dispatcher.select(problem).ranking:
        kernel = ranked.kernel
        seen = reshaped_for(op, kernel, problem, arch) or problem
        if kernel.engine != "vendor" and op.why_unusable(kernel, seen, arch) is None:
            head.append(kernel)
        if len(head) == top:
            break
    vendors = [
        kernel
        for kernel in dispatcher.registry.kernels
        if kernel.engine == "vendor" and getattr(kernel, "library", "") == "torch"
    ]
    return [*head, *(k for k in vendors if op.why_unusable(k, problem, arch) is None)]


def _as_served(
    problem: Problem, kernels: Sequence[Kernel], arch: Arch
) -> dict[Problem, list[Kernel]]:
    """Which of the kernels compute a problem as it is, and which in simpler shapes."""
    op = get_op(problem.op)
    found: dict[Problem, list[Kernel]] = {}
    for kernel in kernels:
        found.setdefault(reshaped_for(op, kernel, problem, arch) or problem, []).append(kernel)
    return found


def _timed(bench: Bench, problem: Problem, kernels: Sequence[Kernel]) -> dict[str, float]:
    """Microseconds of those that serve, timed in turn; a kernel that fails alone is left out."""
    outcomes = {kernel: bench.run(kernel, problem, lambda: None) for kernel in kernels}
    sound = [kernel for kernel, outcome in outcomes.items() if outcome.status == "ok"]
    if not sound:
        return {}
    try:
        turns = bench.run_in_turn(sound, problem, lambda index: None)
    except Exception as failure:
        bench.failed(failure, "launch_error")  # raises where the machine is at fault
        turns = [outcomes[kernel] for kernel in sound]
    found = zip(sound, turns, strict=True)
    return {k.name: o.timing.time_us for k, o in found if o.timing is not None}
