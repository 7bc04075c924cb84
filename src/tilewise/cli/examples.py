"""One example or two of every command, shown at the end of its `--help`."""

from __future__ import annotations

from typing import Any

H200 = "--op gemm --arch sm_90:H200 --dtype bf16"

EXAMPLES: dict[str, tuple[str, ...]] = {
    "arch list": ("",),
    "arch show": ("sm_90:H200",),
    "arch detect": ("",),
    "kernels list": ("--op gemm --arch sm_90 --filter \"family == 'skinny'\"",),
    "kernels count": ("--op conv_fwd --arch gfx942",),
    "kernels export": ("kernels.json --op gemm",),
    "kernels check": ("--op gemm --file kernels.json M=100 N=100 K=100",),
    "doctor": ("",),
    "build": ("--op gemm --dtype fp32 --filter \"family == 'small'\"",),
    "rank": (
        f"{H200} M=16 N=2112 K=7168",
        "--op conv_fwd N=8 C=64 K=64 Hi=56 Wi=56 Y=1 X=1",
    ),
    "problems sample": (
        "--op gemm --count 20 --out problems.csv",
        "--op gemm --wide --avoid problems.csv -o more.csv",
    ),
    "problems edge": ("--op gemm --out edges.csv",),
    "problems coverage": ("problems.csv",),
    "problems augment": ("judged.csv --count 50 --out near_the_worst.csv",),
    "problems network": ("", "resnet50 --batch 4 --out layers.csv"),
    "problems import": ("layers.csv --distinct --out distinct.csv",),
    "problems capture": ("program.py --out captured.csv",),
    "sweep": (
        "store --op gemm --problems problems.csv --top 8",
        "store --op gemm --problems problems.csv --budget 600",
    ),
    "data import": ("bench.json imported --arch gfx950 --op gemm",),
    "data export": ("store rows.csv --latest",),
    "data merge": ("store another_store",),
    "data publish": ("store lean_store",),
    "data show": ("store",),
    "data check": ("store", "store --forget"),
    "train": ("store --op gemm --out new_model",),
    "tune": ("--op gemm --problems problems.csv --out plan.json",),
    "evaluate": ("model store --out judged.csv",),
    "compare": ("model new_model store",),
    "predict": (f"{H200} M=16 N=2112 K=7168",),
    "explain": (f"{H200} M=16 N=2112 K=7168",),
    "search": ("--op gemm --model model M=256 N=256 K=256 --budget 100",),
    "validate": ("--op gemm --problems problems.csv --min-efficiency 95",),
    "bench": ("--op gemm M=512 N=512 K=512 --top 3",),
    "report": ("store --model model --out report.html",),
    "export-c": ("model model.h --name gemm_model",),
    "export-cpp": ("library --op gemm --arch x86_avx512 --dtype fp32",),
    "demo": ("",),
}
"""Command -> what may follow it."""


def show_examples(app: Any, path: str = "") -> None:
    """Gives every command of a tree its examples; a new command needs one (a test looks)."""
    for group in app.registered_groups:
        show_examples(group.typer_instance, f"{group.name} ")
    for command in app.registered_commands:
        name = path + (command.name or command.callback.__name__)
        lines = [f"  tilewise {name} {rest}".rstrip() for rest in EXAMPLES.get(name, ())]
        # Text after a line of \b alone is shown as it stands.
        command.epilog = "\n".join(["\b", "Examples:" if lines[1:] else "Example:", *lines])
