"""The demo on an NVIDIA GPU: chosen, run and checked there, beside PyTorch's own routine."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from statistics import median
from typing import Any

from tilewise.cli.console import out, table

SHAPES = ((1, 6144, 4096), (16, 2112, 7168), (1024, 4096, 4096))
_CALLS, _ROUNDS = 20, 7


def on_gpu() -> list[dict[str, Any]] | None:
    """A row for each product; None where there is no NVIDIA GPU, or no PyTorch to reach it."""
    if find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    rows = [_row(*shape) for shape in SHAPES]
    columns = ["problem", "right", "tilewise us", "PyTorch us", "ratio"]
    shown = [
        [row["problem"], row["is_right"], row["us"], row["torch_us"], row["ratio"]] for row in rows
    ]
    table(f"Live on {torch.cuda.get_device_name()}, bf16", columns, shown)
    return rows


def _row(m: int, n: int, k: int) -> dict[str, Any]:
    import torch

    import tilewise as tw

    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).T
    want = a.double() @ b.double()
    error = float((tw.matmul(a, b).double() - want).norm() / want.norm())
    out.print(f"  {m}x{n}x{k}: {error:.1e} from float64", soft_wrap=True)
    ours, theirs = _in_turn(lambda: tw.matmul(a, b), lambda: torch.mm(a, b))
    return {
        "problem": f"{m}x{n}x{k}",
        "is_right": error < 1e-2,
        "us": round(ours, 1),
        "torch_us": round(theirs, 1),
        "ratio": round(theirs / ours, 2),
    }


def _in_turn(*calls: Callable[[], Any]) -> list[float]:
    """Microseconds of each, the median of rounds that they take in turn."""
    import torch

    event: Any = torch.cuda.Event
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(_ROUNDS):
        for call, own in zip(calls, times, strict=True):
            start, end = (event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(_CALLS):
                call()
            end.record()
            end.synchronize()
            own.append(1e3 * start.elapsed_time(end) / _CALLS)
    return [median(own) for own in times]
