"""A bench on a GPU through PyTorch, CUDA and ROCm alike. Only workers import it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.measurement import Policy
from tilewise.core.problem import Problem
from tilewise.core.tensors import torch_dtype
from tilewise.engines import get_engine
from tilewise.engines.contract import Engine, Plan
from tilewise.ops.contract import get_op
from tilewise.ops.vendor import VendorKernel
from tilewise.sweep.bench import GUARD_BYTES, Bench, Workpiece, input_seed, stored_shape
from tilewise.sweep.timing import Call, Timer

FLUSH_BYTES = 256 << 20
"""Read before each call, so that the cache holds other, clean data: lines that are written
instead would have to leave while the kernel runs, at its expense. At least twice the last cache;
a shorter pause would let the device overtake the host, whose delay would then be measured."""
PAUSE_CYCLES = 200_000
MOST_RESERVED = 16 << 30
"""Memory that is kept for the problems to come: to give it back and ask for it anew takes longer
than most of them."""
HOST_US, MOST_PAUSES = 25.0, 4
"""For each of these that a launch keeps the host, another pause goes before the call."""


class CudaTimer(Timer):
    """Device events around each call; a pause before it lets the host run ahead."""

    joins_calls = False

    def __init__(self, policy: Policy, cache_bytes: int) -> None:
        import torch

        self.torch = torch
        self.policy = policy
        size = max(FLUSH_BYTES, 2 * cache_bytes) if policy.cache == "cold" else 0
        self._flush = torch.zeros(size // 4, dtype=torch.float32, device="cuda")
        self._sum = torch.zeros((), dtype=torch.float32, device="cuda")
        self._events: list[tuple[Any, Any]] = []
        self._pauses = 0
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def settle(self, call: Call) -> float:
        """Also looks how long a launch keeps the host, which has to stay ahead of the device."""
        self.torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        self._pauses = min(MOST_PAUSES, int(1e6 * (time.perf_counter() - start) / HOST_US))
        return super().settle(call)

    def samples(self, call: Call, count: int, inner: int) -> list[float]:
        torch = self.torch
        while len(self._events) < count:
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self._events.append(pair)
        for start, end in self._events[:count]:
            if self._flush.numel():
                torch.sum(self._flush, dim=0, out=self._sum)
            if self._pauses or not self._flush.numel():
                torch.cuda._sleep(PAUSE_CYCLES * max(1, self._pauses))
            start.record()
            for _ in range(inner):
                call()
            end.record()
        torch.cuda.synchronize()
        return [1000 * s.elapsed_time(e) / inner for s, e in self._events[:count]]

    def prepare(self, call: Call) -> Call:
        """The call as a graph, captured by hand.

        PyTorch's own context collects garbage and gives all free memory back before each capture,
        which takes longer than most kernels are timed for.
        """
        if self.policy.launch == "eager":
            return call
        torch = self.torch
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            call()  # whatever the first call sets up must not be captured
            graph.capture_begin()
            try:
                call()
            finally:
                graph.capture_end()
        torch.cuda.synchronize()
        replay: Call = graph.replay
        return replay


class CudaBench(Bench):
    """Measures kernels of the Triton and vendor engines."""

    def __init__(self, arch: Arch, policy: Policy, engines: Mapping[str, Engine]) -> None:
        import torch

        super().__init__(arch, policy, engines)
        self.torch = torch
        # References are to be exact, and fp32 problems are not tf32 ones.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        # The vendor's best is the yardstick, not its guess: it searches before it is timed.
        torch.backends.cudnn.benchmark = True
        self.timer = CudaTimer(policy, max(arch.l2_bytes, arch.l3_bytes))

    def searches(self, plan: Plan) -> bool:
        """cuDNN builds and tries what it has at the first call."""
        return plan.kernel.engine == "vendor"

    def lay_out(self, problem: Problem) -> Workpiece:
        torch = self.torch
        if torch.cuda.memory_reserved() > MOST_RESERVED:
            torch.cuda.empty_cache()  # what the last problems' graphs held
        op = get_op(problem.op)
        shapes, storages = op.shapes(problem), op.storage(problem)
        operands = []
        for index, shape in enumerate(shapes[:-1]):
            random = torch.Generator(device="cuda")
            random.manual_seed(input_seed(self.policy, problem, index))
            place, _ = self._buffer(shape, storages[index].axes, problem.dtype)
            place.copy_(self._random(shape, problem.dtype, random))
            operands.append(place)
        out, buffer = self._buffer(shapes[-1], storages[-1].axes, problem.out_dtype)
        axes = storages[-1].axes
        expected = self._reference(problem, operands, shapes[-1]).permute(axes).reshape(-1)
        return Workpiece(tuple(operands), out, out.permute(axes).reshape(-1), buffer, expected)

    def _random(self, shape: Sequence[int], dtype: str, random: Any) -> Any:
        torch = self.torch
        if dtype == "int8":
            drawn = torch.randint(
                -127, 128, tuple(shape), generator=random, device="cuda", dtype=torch.int8
            )
            return torch.where(drawn == 0, 1, drawn)
        drawn = torch.rand(tuple(shape), generator=random, device="cuda") - 0.5
        return torch.where(drawn.abs() < 1 / 64, 1 / 64, drawn)

    def _reference(self, problem: Problem, operands: Sequence[Any], shape: Sequence[int]) -> Any:
        """The vendor's answer in fp32, tf32 off; int8 products are exact as they are."""
        torch = self.torch
        wide: Any = problem
        if problem.dtype != "int8":
            operands = [t.float() for t in operands]
            wide = replace(problem, dtype="fp32", out_dtype="fp32")
        out = torch.zeros(tuple(shape), dtype=torch_dtype(wide.out_dtype, "cuda"), device="cuda")
        kernel = VendorKernel(op_name=problem.op, library="torch")
        plan = get_engine("vendor").plan(kernel, wide, self.arch)
        torch.backends.cudnn.benchmark = False  # once: a search would take longer than it saves
        try:
            plan.execute(operands, out)
        finally:
            torch.backends.cudnn.benchmark = True
        return out.float() if problem.dtype != "int8" else out.double()

    def _buffer(self, shape: Sequence[int], axes: Sequence[int], dtype: str) -> tuple[Any, Any]:
        torch = self.torch
        stored, back = stored_shape(shape, axes)
        kind = torch_dtype(dtype, "cuda")
        size = prod(stored) * kind.itemsize
        buffer = torch.empty(size + 2 * GUARD_BYTES, dtype=torch.uint8, device="cuda")
        inside = buffer[GUARD_BYTES : GUARD_BYTES + size].view(kind)
        return inside.view(stored).permute(back), buffer

    def errors(self, piece: Workpiece) -> tuple[float, float]:
        if not piece.expected.numel():
            return 0.0, 0.0
        torch = self.torch
        expected = piece.expected
        apart = piece.stored.to(expected.dtype) - expected
        figures = torch.stack(
            [
                torch.linalg.vector_norm(apart),
                torch.linalg.vector_norm(expected),
                apart.abs().max(),
                expected.abs().max(),
            ]
        ).tolist()
        return figures[0] / (figures[1] or 1.0), figures[2] / (figures[3] or 1.0)

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()

    def is_sound(self) -> bool:
        """Whether the context still computes; a sticky error answers every call."""
        torch = self.torch
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            return bool(torch.ones(64, device="cuda").sum().item() == 64)
        except Exception:
            return False
