"""The demo on a GPU that is here: chosen, run and checked there, beside PyTorch's own routine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewise.cli.console import say, table
from tilewise.cli.progress import progress_bar
from tilewise.cli.session import Session, store_folder
from tilewise.core.arch import Arch
from tilewise.core.problem import Problem, spell_problem
from tilewise.engines.device import why_no_gpu
from tilewise.errors import TilewiseError
from tilewise.judge.validation import Contenders, Validation, validate
from tilewise.judge.verdicts import Verdict
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.gemm.problem import GemmProblem

DEPTHWISE = ConvProblem(
    n=32, c=144, k=144, g=144, h=56, w=56, y=3, x=3, pad_h=1, pad_w=1, dtype="bf16"
)
PROBLEMS: tuple[Problem, ...] = (
    GemmProblem(m=1, n=6144, k=4096, dtype="bf16"),
    GemmProblem(m=16, n=2112, k=7168, dtype="bf16"),
    GemmProblem(m=4096, n=8192, k=4096, dtype="bf16"),
    DEPTHWISE,
)
POLICY = "graph"
"""Inside CUDA graphs with cold caches: what the GPU takes, not what Python takes to launch it."""
TIMEOUT_S = 5.0


def why_not() -> str | None:
    """Why there is no GPU to run on, or None."""
    why = why_no_gpu()
    if why is not None and "PyTorch is not installed" in why:
        return "there is one, but PyTorch is needed to use it: `pip install 'tilewise[gpu]'`"
    return why and f"none: {why}"


def nothing(why: str | None) -> dict[str, Any]:
    """What there is to tell before anything ran."""
    return {"why_not": why, "wrong": 0, "unjudged": 0, "rows": []}


def live(
    problems: Sequence[Problem] = PROBLEMS, policy: str = POLICY, arch: str | None = None
) -> dict[str, Any]:
    """What became of each problem. Workers run the kernels: a failing one does not end the demo."""
    found = nothing(None)
    for op in dict.fromkeys(problem.op for problem in problems):
        try:
            session = Session.of(arch, policy, TIMEOUT_S)
            outcome = _timed(session, op, [p for p in problems if p.op == op])
        except (TilewiseError, RuntimeError, OSError) as error:
            found["why_not"] = f"{op} could not be tried: {error}"
            say(found["why_not"])
            continue
        found["rows"] += [_row(verdict) for verdict in outcome.verdicts]
        found["wrong"] += sum(verdict.chosen_us is None for verdict in outcome.verdicts)
        for problem, why in outcome.unjudged.items():
            say(f"{op} {spell_problem(problem)}: {why}")
        found["unjudged"] += len(outcome.unjudged)
        found["wrong"] += len(outcome.unjudged)
    if found["rows"]:
        _show(found["rows"])
    return found


def _timed(session: Session, op: str, problems: Sequence[Problem]) -> Validation:
    """The chosen kernels and PyTorch's routine, checked against a reference and timed in turn."""

    def contenders(device: Arch) -> Contenders:
        registry = session.registry(op, device)
        chosen = [registry.select(problem).kernel for problem in problems]
        kernels = session.with_vendors(op, list(dict.fromkeys(chosen)))
        return Contenders(kernels=kernels, choose=registry.dispatcher.select)

    with store_folder(None) as folder, progress_bar() as on_event:
        return validate(
            *(folder, problems, contenders, session.executor(op), session.policy),
            on_event=on_event,
        )


def _row(verdict: Verdict) -> dict[str, Any]:
    return {
        "op": verdict.problem.op,
        "problem": spell_problem(verdict.problem),
        "kernel": verdict.chosen,
        "us": verdict.chosen_us,
        "torch_us": verdict.vendor_us,
        "ratio": verdict.vs_vendor,
        "comparison": verdict.ratio.spell() if verdict.ratio else "-",
        "failures": dict(verdict.failures),
    }


def _show(rows: Sequence[dict[str, Any]]) -> None:
    say(
        "every result was checked against a reference; times are GPU times, in CUDA graphs with "
        "cold caches, ours and PyTorch's taking turns"
    )
    shown = [
        [f"{row['op']} {row['problem']}", row["us"], row["torch_us"], row["comparison"]]
        for row in rows
    ]
    table("", ["problem", "tilewise us", "PyTorch us", "speed-up"], shown)
