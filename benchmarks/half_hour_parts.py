"""The parts of a GPU's half hour (`half_hour.py`): what runs, in which order, for how long."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SLOW_FAMILIES = "implicit,packed,merged,direct"
"""Triton's pointer kernels: two seconds to compile each, and seldom the fastest on this device."""
FEW = ("--top", "10", "--whole", "0.06")
"""Kernels of a problem that are swept, so that 950 problems of each direction fit into the time."""
NEW_FAMILIES = "image or taps or ragged or padded or halo"
"""What a checker has the most time for."""
CHECKS_S = 110.0
FUSION, NEW_PASSES = "tests/gpu/test_fusion_gpu.py", "passes or gated"
PYTEST = (sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A command with its time; `{work}`, `{minutes}` and `{without}` (families) stand in it."""

    name: str
    seconds: float
    command: Sequence[str]
    dry: Sequence[str] = ()
    """What takes its place without a GPU; left out there where it is empty."""
    side: str = ""
    """Neighbours of one side run at once: nothing is timed in them."""
    ahead: Sequence[str] = ()
    """What compiles for it, on any machine; `{jobs}` at once."""
    is_repeated: bool = False
    """Whether each call runs it: for what does nothing the second time."""
    least: float = 0.7
    """The share of its time that it needs at least, to be worth starting."""


def script(name: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, str(ROOT / name), *words)


def compared(op: str) -> Part:
    vendor = ("benchmarks/gpu_vs_vendor.py", "--op", op, "--most", "24")
    return Part(
        name=f"vendor_{op}",
        seconds=120,
        least=0.3,
        command=script(
            *(*vendor, "--without", "{without}", "--minutes", "{minutes}"),
            *("--out", "{work}/vendor.jsonl"),
        ),
        ahead=script(*vendor, "--without", SLOW_FAMILIES, "--compile"),
        dry=script("benchmarks/gpu_vs_vendor.py", "--op", op, "--layers", "3", "--dry-run"),
    )


def checked(tool: str, families: str, name: str = "") -> Part:
    """Families of kernels under a checker; one process, since starting it there takes long.

    Every tensor is an allocation of its own, so that no overrun hides in the next one.
    """
    return Part(
        name=name or tool,
        seconds=CHECKS_S,
        side="checks",
        least=0.4,
        command=(
            *("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "FAMILY_KERNELS=3"),
            *("compute-sanitizer", "--tool", tool, "--error-exitcode", "1"),
            *PYTEST,
            *("tests/gpu/test_families_gpu.py", "-k", families),
        ),
    )


SWEEP = (
    *("benchmarks/sweep_convs.py", "{work}/store", "--minutes", "{minutes}"),
    *("--without", "{without}", "--workers", "5", *FEW),
)
MODELS = (
    *("benchmarks/whole_models.py", "--sides", "fused"),
    *("--out", "{work}/whole_models.jsonl", "--resume"),
)
APART = "tests/gpu/apart.py"
"""Runs each test in a process of its own."""


def parts() -> list[Part]:
    """The most telling first."""
    return [*first_parts(), *contests(), *whole_programs(), *checks()]


def first_parts() -> list[Part]:
    """What all others build on: compiled kernels, which families hang, measurements."""
    families = "tests/gpu/test_families_gpu.py"
    return [
        Part(
            name="objects",
            seconds=25,
            least=0.2,
            is_repeated=True,
            command=script("benchmarks/objects.py", "unpack", "build/objects.xz"),
            dry=script("benchmarks/objects.py", "--help"),
        ),
        Part(
            name="families",
            seconds=100,
            side="first",
            command=script(APART, "--minutes", "{minutes}", "--seconds", "40", families),
            ahead=script("tests/gpu/family_cases.py", "--jobs", "{jobs}"),
            dry=script(APART, "--minutes", "{minutes}", "tests/unit/test_turns.py"),
        ),
        Part(
            name="fusion",
            seconds=100,
            side="first",
            command=(*PYTEST, FUSION, "-k", NEW_PASSES),
        ),
        Part(
            name="sweep",
            seconds=420,
            least=0.1,
            command=script(*SWEEP),
            ahead=script(
                *(SWEEP[0], "none", "--compile", "--without", SLOW_FAMILIES, "--jobs", "{jobs}"),
                *FEW,
            ),
            dry=script(*SWEEP[:2], "--minutes", "0.3", "--dry-run", "--jobs", "2"),
        ),
    ]


def contests() -> list[Part]:
    """Kernels beside the vendor's, and what the devices' counters say of them."""
    wavelet = "benchmarks/wavelet.py"
    return [
        *map(compared, ("conv_fwd", "conv_bwd_data", "conv_bwd_weight")),
        Part(
            name="wavelet",
            seconds=150,
            least=0.3,
            command=script(
                *(wavelet, "--minutes", "{minutes}", "--without", "{without}"),
                *("--out", "{work}/wavelet.jsonl"),
            ),
            ahead=script(wavelet, "--without", SLOW_FAMILIES, "--compile"),
            dry=script(
                *(wavelet, "--minutes", "0.3", "--out", "{work}/wavelet.jsonl", "--dry-run"),
            ),
        ),
        Part(
            name="counters",
            seconds=50,
            command=script(
                *("benchmarks/wavelet_counters.py", "{work}/wavelet.jsonl"),
                *("--minutes", "{minutes}", "--layers", "6"),
            ),
            dry=script("benchmarks/wavelet_counters.py", "--help"),
        ),
    ]


def whole_programs() -> list[Part]:
    """Models, and exported libraries."""
    library = ("benchmarks/cpp_dispatch.py", "--library", "build/cpp_library")
    return [
        Part(
            name="models",
            seconds=200,
            least=0.4,
            command=script(*MODELS, "--minutes", "{minutes}", "--batch", "256"),
            dry=script(
                *(*MODELS, "--minutes", "1", "--device", "cpu", "--tiny", "--modes", "eager"),
                *("--batch", "2", "--models", "resnet"),
            ),
        ),
        Part(
            name="training",
            seconds=60,
            command=script("examples/resnext.py", "50"),
            dry=script("examples/resnext.py", "2"),
        ),
        Part(
            name="cpp",
            seconds=60,
            command=script(*library),
            ahead=script(*library, "--compile"),
        ),
    ]


def checks() -> list[Part]:
    """The demo, sanitizers, tests that are left, and in what time is more of what has no end."""
    names = ("conv", "launch", "dispatch", "export")
    conv, *rest = (f"tests/gpu/test_{name}_gpu.py" for name in names)
    whole = ("--at-once", "6", "--whole", ",".join(rest))
    return [
        Part(
            name="demo",
            seconds=60,
            command=(sys.executable, "-m", "tilewise", "demo"),
            dry=(sys.executable, "-m", "tilewise", "demo", "--help"),
        ),
        checked("memcheck", NEW_FAMILIES),
        checked("memcheck", f"not ({NEW_FAMILIES})", name="memcheck_others"),
        checked("racecheck", "padded or image"),
        checked("synccheck", NEW_FAMILIES),
        Part(
            name="tests",
            seconds=CHECKS_S,
            side="checks",
            least=0.4,
            command=script(APART, "--minutes", "{minutes}", *whole, conv),
            dry=script(APART, "--minutes", "{minutes}", "tests/unit/test_turns.py"),
        ),
        Part(
            name="fusion_others",
            seconds=CHECKS_S,
            side="checks",
            least=0.4,
            command=(*PYTEST, FUSION, "-k", f"not ({NEW_PASSES})"),
        ),
        Part(
            name="always",
            seconds=50,
            command=script(
                *("benchmarks/whole_models.py", "--sides", "always", "--minutes", "{minutes}"),
                *("--models", "llama,video,unet", "--out", "{work}/always.jsonl", "--resume"),
            ),
        ),
        Part(
            name="compiled",
            seconds=160,
            least=0.4,
            command=script(
                *(*MODELS, "--minutes", "{minutes}", "--batch", "256", "--modes", "compile"),
                *("--models", "resnext,convnext,efficientnet"),
            ),
        ),
        Part(name="more_sweep", seconds=230, least=0.2, command=script(*SWEEP)),
        Part(
            name="more_models",
            seconds=400,
            least=0.2,
            command=script(*MODELS, "--minutes", "{minutes}", "--batch", "256,64"),
        ),
    ]
