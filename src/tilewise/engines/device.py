"""The device in this machine, as an architecture with its live figures."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Any

from tilewise.core.arch import Arch, amd_name, device_named, known_archs, load_arch
from tilewise.errors import ArchError, how_to_install
from tilewise.settings import settings

CORE_GB_S = 12.0
"""What one core draws from memory: about a dozen line fills of 64 bytes in flight per 70 ns."""


@cache
def detect(kind: str = "", index: int | None = None) -> Arch:
    """The live device: a GPU if there is one, otherwise the CPU; `kind` insists on either.

    With several GPUs it is the current one, or the one at `index`, which must exist.

    It never fails for want of a GPU unless one is insisted on, nor for want of vector
    instructions: a processor without AVX2 is `cpu_generic`, on which only the vendor's kernels
    are legal.
    """
    if kind not in ("", "cpu", "gpu"):
        raise ArchError(f"kind is {kind!r}; use 'cpu', 'gpu' or nothing for the best there is")
    if index is not None:
        return _gpu_at(index)
    why = why_no_gpu() if kind != "cpu" else None
    if kind == "cpu" or (not kind and why):
        return detect_cpu()
    if why:
        raise ArchError(f"no GPU that tilewise can use: {why}")
    import torch

    return _gpu_at(torch.cuda.current_device())


def _gpu_at(index: int) -> Arch:
    import torch

    return gpu_arch(torch.cuda.get_device_properties(index))


@cache
def why_no_gpu() -> str | None:
    """Why the GPU cannot be used, or None where it can."""
    # Importing torch takes seconds; without a driver's device file there is nothing to find.
    if not any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
        return "this machine has no GPU driver (/dev/nvidiactl, /dev/kfd)"
    if find_spec("torch") is None:
        return f"PyTorch is not installed; {how_to_install('torch')}"
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"PyTorch cannot be imported: {error}"
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no device"
    try:
        _gpu_at(torch.cuda.current_device())
    except (ArchError, RuntimeError) as error:
        return str(error)
    return None


def resolve_arch(arch: str | Arch | None) -> Arch:
    """An architecture by its name (`sm_90`, `sm_90:H200`), as a value, or the live device's."""
    if arch is None:
        return detect()
    if not isinstance(arch, str | Arch):
        raise ArchError(f"{arch!r:.60} is no architecture; pass its name or an Arch")
    return load_arch(arch) if isinstance(arch, str) else arch


def gpu_arch(properties: Any) -> Arch:
    """The architecture of a GPU, from PyTorch's device properties (CUDA or ROCm)."""
    name, product = _gpu_file(properties), str(properties.name)
    base = load_arch(name, device_named(name, product))

    def read(key: str) -> int:
        return int(getattr(properties, key, 0) or 0)

    threads = read("max_threads_per_multi_processor")
    live = {
        "compute_units": read("multi_processor_count"),
        "memory_bytes": read("total_memory"),
        "l2_bytes": read("L2_cache_size"),
        "registers_per_cu": read("regs_per_multiprocessor"),
        "smem_bytes": read("shared_memory_per_multiprocessor"),
        "smem_per_block_bytes": read("shared_memory_per_block_optin"),
        "max_warps_per_cu": threads // base.warp_size,
        "clock_mhz": read("clock_rate") // 1000,
    }
    if base.vendor == "amd":
        # HIP counts the registers and LDS that one block may have, not those of a compute unit.
        for figure in ("registers_per_cu", "smem_bytes", "smem_per_block_bytes"):
            live.pop(figure)
    known = {figure: value for figure, value in live.items() if value > 0}
    if live["compute_units"] % base.num_xcd:
        known["num_xcd"] = 1
    return base.with_figures(device=product, **known)


def _gpu_file(properties: Any) -> str:
    """The data file that describes the device, or the nearest one it can run the kernels of."""
    gcn = amd_name(properties)
    name = gcn or f"sm_{properties.major}{properties.minor}"
    if name in known_archs():
        return name
    family = "" if gcn else f"sm_{properties.major}0"
    if family in known_archs():
        return family
    # Hopper's and Blackwell's matrix instructions are bound to their generation, Ampere's are not.
    if not gcn and properties.major >= 8:
        return "sm_80"
    gpus = ", ".join(a for a in known_archs() if load_arch(a).kind == "gpu")
    raise ArchError(
        f"{properties.name} is {name}, which has no data file; known: {gpus}. The CPU works, "
        "and adding a file under tilewise/archs adds the GPU"
    )


def detect_cpu(root: Path = Path("/")) -> Arch:
    """The processor, from `/proc` and `/sys` under `root`, as far as this process may use it.

    No more cores count than kernels may use threads.
    """
    info = _cpuinfo(root)
    flags = frozenset(info.get("flags", "").split())
    base = load_arch(_cpu_file(flags))
    cores = min(_usable_cores(root), settings().threads)
    live: dict[str, Any] = {
        "device": info.get("model name", ""),
        "compute_units": cores,
        "max_threads_per_block": cores,
        "clock_mhz": _clock_mhz(root, info) or base.clock_mhz,
        "memory_bytes": _memory_bytes(root) or base.memory_bytes,
        "memory_gb_s": min(base.memory_gb_s, cores * CORE_GB_S),
        **_caches(root),
    }
    if "l1_bytes" in live:
        live["smem_bytes"] = live["smem_per_block_bytes"] = live["l1_bytes"]
    # Zen 4 (family 25) runs 512-bit instructions in two halves, one multiply-add a cycle.
    zen4 = info.get("vendor_id") == "AuthenticAMD" and info.get("cpu family") == "25"
    if zen4 and base.has("avx512f"):
        live["simds_per_cu"] = 1
    return base.with_figures(**live)


def _cpu_file(flags: frozenset[str]) -> str:
    for name in ("x86_avx512", "x86_avx2"):
        # `avx512` is what kernels ask for; processors name only its subsets.
        if load_arch(name).features - {"avx512"} <= flags:
            return name
    return "cpu_generic"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _cpuinfo(root: Path) -> dict[str, str]:
    first = _read(root / "proc/cpuinfo").partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _usable_cores(root: Path) -> int:
    """Physical cores in the affinity mask, within the CPU quota of the control groups."""
    # Two hardware threads of a core share its multiply-add ports: they count once.
    cpus = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    where = {cpu: root / f"sys/devices/system/cpu/cpu{cpu}/topology" for cpu in cpus}
    cores = {
        (_read(at / "physical_package_id"), _read(at / "core_id") or str(cpu))
        for cpu, at in where.items()
    }
    return max(1, min([len(cores), *_cpu_quotas(root)]))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's control groups, from its own up to the root, versions 2 and 1."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if names else "")
        parts = [part for part in path.split("/") if part]
        yield from (top.joinpath(*parts[:n]) for n in range(len(parts), -1, -1))


def _cpu_quotas(root: Path) -> Iterator[int]:
    for group in _groups(root, "cpu"):
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if not quota:
            quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            yield ceil(int(quota) / int(period))


def _memory_bytes(root: Path) -> int:
    """Memory of the machine, within the limit of the control groups; 0 if unknown."""
    total = re.search(r"^MemTotal:\s*(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    limits = [
        int(text)
        for group in _groups(root, "memory")
        for file in ("memory.max", "memory.limit_in_bytes")
        if (text := _read(group / file)).isdigit()
    ]
    return min([int(total[1]) * 1024, *limits]) if total else min(limits, default=0)


def _clock_mhz(root: Path, info: dict[str, str]) -> int:
    """The base clock where the system tells it, else the current one; 0 if unknown."""
    folder = root / "sys/devices/system/cpu/cpu0/cpufreq"
    for file in ("base_frequency", "cpuinfo_max_freq"):
        if (text := _read(folder / file)).isdigit():
            return int(text) // 1000
    named = re.search(r"@ ([\d.]+)GHz", info.get("model name", ""))
    if named:
        return round(float(named[1]) * 1000)
    return round(float(info.get("cpu MHz", "0") or 0))


def _caches(root: Path) -> dict[str, int]:
    """Data cache sizes of the first core; nothing where the system tells them only in part."""
    sizes: dict[str, int] = {}
    for index in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        found = re.fullmatch(r"(\d+)([KMG]?)", _read(index / "size"))
        level = _read(index / "level")
        if found and level in ("1", "2", "3") and _read(index / "type") in ("Data", "Unified"):
            size = int(found[1]) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[found[2]]
            sizes[f"l{level}_bytes"] = size
    first, second, third = (sizes.get(f"l{level}_bytes", 0) for level in (1, 2, 3))
    if not first or not first <= second <= (third or second):
        return {}  # some hypervisors make them up
    return {"l3_bytes": 0, **sizes}
