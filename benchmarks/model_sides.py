"""A model as PyTorch made it and as `tilewise.patch` leaves it, timed in turns in one process."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

ROUNDS, TURN_S = 5, 0.03
"""Turns of each side, and how long one lasts at least."""
MODES = ("eager", "graph", "compile", "max-autotune")
SHARING = MODES[:2]
"""Graphs are captured of what ran eagerly."""
SIDES: dict[str, dict[str, bool]] = {
    "patched": {},
    "fused": {"fuse": True},
    "tuned": {"fuse": True},
    "always": {"fuse": True, "always": True},
}
"""What `tilewise.patch` is told."""
LINES = 15
"""Of a profile."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model, task and batch, in modes that share what was made for it."""

    model: str
    task: str
    batch: int
    modes: tuple[str, ...]


@dataclass(kw_only=True)
class Times:
    """Of one side."""

    ms: float
    host_ms: float
    """Until all is launched."""
    first_s: float
    memory_gb: float
    ratio: float = 1.0
    """PyTorch's time over this one's."""
    spread: float = 0.0
    """Of the ratio from round to round, relatively."""
    apart: float = 0.0
    """Largest difference of results over the largest result."""
    gradients_apart: float = 0.0
    """The same of the first parameter's gradient, by norms."""
    served: dict[str, int] = field(default_factory=dict)
    """Layers by who serves them."""


@dataclass(kw_only=True)
class Row:
    model: str
    task: str
    mode: str
    batch: int
    torch: Times | None = None
    sides: dict[str, Times] = field(default_factory=dict)
    failed: str = ""


def stepper(model: Any, task: str, mode: str, device: str) -> Callable[..., Any]:
    """One step of the model as users write it; gives the result, or the loss."""
    import torch

    compiled = {"compile": "default", "max-autotune": "max-autotune-no-cudagraphs"}.get(mode)
    run = torch.compile(model, mode=compiled) if compiled else model
    if task == "inference":

        def infer(x: Any) -> Any:
            with torch.no_grad():
                return run(x)

        return infer
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True)

    def train(x: Any) -> Any:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            loss = run(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train


class Side:
    """PyTorch's model or ours, ready to be timed."""

    def __init__(self, model: Any, job: Job, mode: str, x: Any) -> None:
        import torch

        self.device, self.model = x.device.type, model
        torch.manual_seed(0)  # what a step draws, every side draws
        step = stepper(model, job.task, mode, self.device)
        self.call: Callable[[], Any] = lambda: step(x)
        self.wait()
        before = self._memory("memory_allocated")
        start = time.perf_counter()
        self.result = step(x).float().clone()
        self.wait()
        self.first_s = time.perf_counter() - start
        first = next(model.parameters()).grad
        self.gradient = None if first is None else first.float().clone()
        self._memory("reset_peak_memory_stats")
        for _ in range(2):
            self.call()
        self.wait()
        self.memory_gb = ((self._memory("max_memory_allocated") or 0) - (before or 0)) / 1e9

    def wait(self) -> None:
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def _memory(self, what: str) -> Any:
        import torch

        return getattr(torch.cuda, what)() if self.device == "cuda" else 0

    def capture(self, pool: Any) -> None:
        """Lets calls replay a CUDA graph; sides take turns, so one pool of memory is enough."""
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self.call()
        self.call = graph.replay

    def time_ms(self, steps: int) -> tuple[float, float]:
        """A step, and how long the host has to do with it."""
        self.wait()
        start = time.perf_counter()
        for _ in range(steps):
            self.call()
        free = time.perf_counter()
        self.wait()
        return tuple(1e3 * (at - start) / steps for at in (time.perf_counter(), free))


def models_of(job: Job, case: Any, names: Sequence[str], x: Any) -> list[tuple[Any, float]]:
    """PyTorch's and one for each side, and how long patching took."""
    import torch

    import tilewise

    torch.manual_seed(0)
    with torch.device(x.device):  # weights are drawn where that is quick
        model = case.build()
    if len(case.sample) > 2:
        model = model.to(memory_format=case.layout)
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):  # as trained ones are
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            torch.nn.init.normal_(module.running_mean, 0.0, 0.1)
            torch.nn.init.uniform_(module.running_var, 0.5, 1.5)
    model = model.train() if job.task == "training" else model.eval().to(torch.bfloat16)
    made = [(model, 0.0)]
    for name in names:
        other = deepcopy(model)
        if name == "tuned":
            with torch.autocast(x.device.type, torch.bfloat16, enabled=job.task == "training"):
                tilewise.tune(deepcopy(model), x)
        start = time.perf_counter()
        tilewise.patch(other, **SIDES[name])
        if x.device.type == "cuda" and "eager" in job.modes:
            with (
                torch.set_grad_enabled(job.task == "training"),
                torch.autocast(x.device.type, torch.bfloat16, enabled=job.task == "training"),
            ):
                tilewise.prepare(other, x)
        made.append((other, time.perf_counter() - start))
    return made


def run(job: Job, case: Any, mode: str, names: Sequence[str], x: Any, kept: dict[str, Any]) -> Row:
    """One row; eager sides are kept for graphs, which need no second first step."""
    import torch

    import tilewise

    names = names if mode in SHARING else names[-1:]
    sides: list[Side] = kept.get("eager", []) if mode in SHARING else []
    if not sides:
        if not kept.get("models"):
            kept["models"] = models_of(job, case, names, x)
        torch._dynamo.reset()
        for at, (one, patch_s) in enumerate(kept["models"]):
            if mode == "compile":  # a side compiles when it is made
                tilewise.choose_in_compile(at > 0)
            sides.append(Side(one, job, mode, x))
            sides[-1].first_s += patch_s
        if mode == "compile":
            tilewise.choose_in_compile(False)
        if mode in SHARING:
            kept["eager"] = sides
        else:
            kept.clear()  # their parameters have moved
    if mode == "graph":
        pool = torch.cuda.graph_pool_handle()
        for side in sides:
            side.capture(pool)
        kept.clear()
    return timed(job, mode, names, sides)


def timed(job: Job, mode: str, names: Sequence[str], sides: Sequence[Side]) -> Row:
    once = max(side.time_ms(1)[0] for side in sides)
    steps = max(1, round(TURN_S * 1e3 / once))
    times: list[list[tuple[float, float]]] = [[] for _ in sides]
    for turn in range(ROUNDS):
        order = range(len(sides))
        for index in order if turn % 2 == 0 else reversed(order):
            times[index].append(sides[index].time_ms(steps))
    taken = zip(sides, times, strict=True)
    first, *rest = (compared(side, of_side, sides[0], times[0]) for side, of_side in taken)
    row = Row(model=job.model, task=job.task, mode=mode, batch=job.batch, torch=first)
    row.sides = dict(zip(names, rest, strict=True))
    return row


def compared(side: Side, taken: Any, plain: Side, plainly: Any) -> Times:
    """One side's figures beside PyTorch's."""
    import tilewise

    ratios = sorted(a[0] / b[0] for a, b in zip(plainly, taken, strict=True))
    middle = statistics.median(ratios)
    largest = plain.result.abs().max().clamp(min=1e-30)
    gradients = 0.0
    if side.gradient is not None and plain.gradient is not None:
        norm = plain.gradient.norm().clamp(min=1e-30)
        gradients = float((side.gradient - plain.gradient).norm() / norm)
    served: Counter[str] = Counter()
    for row in tilewise.layers(side.model):
        by, fused = ("tilewise" if row.served.is_ours else "PyTorch"), "; with " in row.served.why
        served[by + ", fused" * fused] += 1
    return Times(
        ms=statistics.median(ms for ms, _ in taken),
        host_ms=statistics.median(ms for _, ms in taken),
        first_s=side.first_s,
        memory_gb=side.memory_gb,
        ratio=middle,
        spread=(ratios[-1] - ratios[0]) / middle,
        apart=float((side.result - plain.result).abs().max() / largest),
        gradients_apart=gradients,
        served=dict(served),
    )


def shown(row: Row) -> str:
    name = f"{row.model:16} {row.task:9} {row.mode:12} {row.batch:4}"
    if row.failed or row.torch is None:
        return f"{name}  failed: {row.failed}"

    def figures(t: Times) -> str:
        return (
            f"{t.ms:8.2f} ms  host {t.host_ms:7.2f}  first {t.first_s:5.1f} s  "
            f"memory {t.memory_gb:5.2f} GB"
        )

    lines = [f"{name}  PyTorch {figures(row.torch)}"]
    for side, t in row.sides.items():
        by = ", ".join(f"{count} by {who}" for who, count in sorted(t.served.items()))
        lines.append(
            f"{'':44}  {side:7} {figures(t)}  x{t.ratio:5.3f} +-{t.spread:5.1%}  "
            f"apart {t.apart:.1e} / {t.gradients_apart:.1e}  {by}"
        )
    return "\n".join(lines)


def profile(side: Side, steps: int = 3) -> str:
    """Where the device's time goes, by kernel."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    is_gpu = side.device == "cuda"
    kind = DeviceType.CUDA if is_gpu else DeviceType.CPU
    wanted = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
    from torch.profiler import profile as record

    with record(activities=wanted) as taken:
        for _ in range(steps):
            side.call()
        side.wait()
    found = []
    for event in taken.key_averages():
        if event.device_type == kind:
            us = event.self_device_time_total if is_gpu else event.self_cpu_time_total
            found.append((us / steps / 1e3, event.count / steps, event.key))
    total = sum(ms for ms, _, _ in found) or 1.0
    lines = [f"  {total:.2f} ms of {'kernels' if is_gpu else 'operators'} in a step"]
    for ms, count, name in sorted(found, reverse=True)[:LINES]:
        lines.append(f"  {ms:8.3f} ms {ms / total:6.1%} {count:7.1f} x  {name[:100]}")
    return "\n".join(lines)
