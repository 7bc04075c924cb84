"""Architectures: sound files load, unsound ones are refused, the live device is read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tilewise as tw
from tilewise.core.arch import Arch, devices, known_archs, load_arch, parse_arch, sources
from tilewise.engines.device import CORE_GB_S, detect, detect_cpu, gpu_arch, why_no_gpu
from tilewise.errors import ArchError
from tilewise.settings import settings

ARCHS = (
    "gfx90a",
    "gfx942",
    "gfx950",
    "sm_80",
    "sm_90",
    "sm_100",
    "x86_avx2",
    "x86_avx512",
    "cpu_generic",
)
FLAGS_AVX2 = "fpu sse2 avx fma f16c avx2"
FLAGS_AVX512 = f"{FLAGS_AVX2} avx512f avx512bw avx512dq avx512vl"


def text_of(name: str) -> str:
    import tilewise

    return (Path(tilewise.__file__).parent / "archs" / f"{name}.toml").read_text()


def test_every_architecture_has_a_file() -> None:
    assert set(known_archs()) == set(ARCHS)


@pytest.mark.parametrize("name", ARCHS)
def test_files_load_with_a_source_for_every_figure(name: str) -> None:
    for device in devices(name) or ("",):
        arch = load_arch(name, device)
        cited = sources(name, device)
        assert arch.name == name and arch.device == device
        assert {"compute_units", "peak_tflops", "smem_bytes", "memory_gb_s"} <= set(cited)
        assert all(": " in source for source in cited.values())
        assert json.loads(json.dumps(arch.to_dict()))["features"] == sorted(arch.features)


def test_hopper_has_two_devices_with_their_own_memory() -> None:
    h100, h200 = load_arch("sm_90", "H100"), load_arch("sm_90", "H200")
    assert load_arch("sm_90") == h100
    assert (h200.compute_units, h200.clock_mhz) == (132, 1980)
    assert (h200.l2_bytes, h200.memory_bytes) == (60 * 2**20, 143771 * 2**20)
    assert h200.memory_gb_s > h100.memory_gb_s and h200.peak_tflops == h100.peak_tflops


def test_lds_of_the_amd_architectures() -> None:
    sizes = [load_arch(name).smem_per_block_bytes for name in ("gfx90a", "gfx942", "gfx950")]
    assert sizes == [64 * 1024, 64 * 1024, 160 * 1024]


def test_avx512_keeps_avx2() -> None:
    assert load_arch("x86_avx2").features < load_arch("x86_avx512").features


def test_unknown_names_list_what_is_known() -> None:
    with pytest.raises(ArchError, match=r"gfx90a.*sm_90"):
        load_arch("sm_75")
    with pytest.raises(ArchError, match="H100, H200"):
        load_arch("sm_90", "H300")


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("sm_90", "value = 232448", "value = 932448", "more shared memory"),
        (
            "sm_90",
            "max_threads_per_block = { value = 1024",
            "max_threads_per_block = { value = 4096",
            "more threads",
        ),
        ("sm_90", "warp_size = { value = 32", "warp_size = { value = 33", "power of two"),
        ("sm_90", "clock_mhz = { value = 1980", "clock_mhz = { value = 0", "clock_mhz is 0"),
        ("sm_90", "clock_mhz = { value = 1980", 'clock_mhz = { value = "1980"', "an integer"),
        ("sm_90", 'source = "cuda: warp size"', 'source = ""', "KEY: where"),
        ("sm_90", 'source = "cuda: warp size"', 'source = "folklore: it is"', "KEY: where"),
        ("sm_90", ', source = "cuda: warp size"', "", "a value and a source"),
        ("sm_90", "warp_size =", "warp_sise =", "warp_sise.*warp_size"),
        (
            "sm_90",
            "l2_bytes = { value = 62914560",
            "l2_bytes = { value = 1024",
            "caches must grow.*",
        ),
        ("sm_90", "[4, 2, 1]]", "[4, 2]]", r"\[m, n, k\]"),
        ("sm_90", "[4, 2, 1]]", "[64, 2, 1]]", "more threads than a block"),
        ("sm_90", "fp32 = 67.0, ", "", "lacks fp32"),
        ("sm_90", "tf32 = 494.7", "tf33 = 494.7", "unknown dtypes.*tf33"),
        ("gfx942", "num_xcd = { value = 8", "num_xcd = { value = 7", "7 chiplets"),
        (
            "gfx942",
            "int8 = [[32, 32, 16], [16, 16, 32]]",
            "int8 = [[32, 32, 16], [32, 32, 16]]",
            "twice",
        ),
        ("x86_avx2", "fp32 = 5.018", "fp32 = 7.5", "core figures give"),
        ("x86_avx512", '"avx2", ', "", "implies avx2"),
        ("x86_avx2", "[figures]", "[figure]", "unknown tables"),
        ("x86_avx2", "[figures]", "[figures", "not TOML"),
    ],
)
def test_inconsistent_files_are_refused(name: str, old: str, new: str, message: str) -> None:
    text = text_of(name)
    assert old in text
    parse_arch(text, name)
    with pytest.raises(ArchError, match=message):
        parse_arch(text.replace(old, new), name)


def test_a_broken_second_device_is_refused_too() -> None:
    text = text_of("sm_90").replace(
        "memory_gb_s = { value = 4800.0", "memory_gb_s = { value = -1.0"
    )
    with pytest.raises(ArchError, match="H200"):
        parse_arch(text, "sm_90", "H100")


def test_peaks_follow_live_cores_and_clock() -> None:
    arch = load_arch("x86_avx2")
    live = arch.with_figures(compute_units=2, clock_mhz=4900)
    assert live.peak_tflops["fp32"] == pytest.approx(arch.peak_tflops["fp32"] * 2 / 64 * 2)
    assert load_arch("x86_avx2").compute_units == 64


def machine(root: Path, flags: str, *, siblings: bool = False, extra: str = "") -> Path:
    """A fake `/proc` and `/sys` for the CPUs of this process."""
    files = {
        "proc/cpuinfo": f"model name : Fake @ 3.00GHz\nflags : {flags}\n{extra}\n\nprocessor : 1\n",
        "proc/meminfo": "MemTotal:       16777216 kB\n",
        "proc/self/cgroup": "0::/pod/box\n",
    }
    for index, (level, kind, size) in enumerate(
        (("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2M"))
    ):
        folder = f"sys/devices/system/cpu/cpu0/cache/index{index}"
        files |= {f"{folder}/level": level, f"{folder}/type": kind, f"{folder}/size": size}
    for cpu in os.sched_getaffinity(0):
        folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
        files |= {
            f"{folder}/physical_package_id": "0",
            f"{folder}/core_id": str(0 if siblings else cpu),
        }
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (FLAGS_AVX512, "x86_avx512"),
        (FLAGS_AVX512.replace(" avx512vl", ""), "x86_avx2"),
        (FLAGS_AVX2, "x86_avx2"),
        (FLAGS_AVX2.replace(" fma", ""), "cpu_generic"),
        ("", "cpu_generic"),
    ],
)
def test_cpu_needs_every_flag_of_its_architecture(tmp_path: Path, flags: str, name: str) -> None:
    assert detect_cpu(machine(tmp_path, flags)).name == name


def test_cpu_figures_are_the_live_ones(tmp_path: Path) -> None:
    arch = detect_cpu(machine(tmp_path, FLAGS_AVX2))
    cores = len(os.sched_getaffinity(0))
    assert (arch.compute_units, arch.clock_mhz) == (cores, 3000)
    assert (arch.l1_bytes, arch.smem_bytes, arch.l2_bytes) == (48 * 1024, 48 * 1024, 2 * 2**20)
    assert arch.l3_bytes == 0 and arch.memory_bytes == 16 * 2**30
    assert arch.peak_tflops["fp32"] == pytest.approx(cores * 3e9 * 32 / 1e12, rel=1e-3)


def test_hardware_threads_of_a_core_count_once(tmp_path: Path) -> None:
    assert detect_cpu(machine(tmp_path, FLAGS_AVX2, siblings=True)).compute_units == 1


def test_no_more_cores_count_than_threads_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWISE_THREADS", "1")
    settings.cache_clear()
    try:
        arch = detect_cpu(machine(tmp_path, FLAGS_AVX2))
    finally:
        settings.cache_clear()
    assert (arch.compute_units, arch.memory_gb_s) == (1, CORE_GB_S)


def test_control_groups_limit_cores_and_memory(tmp_path: Path) -> None:
    group = machine(tmp_path, FLAGS_AVX2) / "sys/fs/cgroup/pod"
    (group / "box").mkdir(parents=True)
    (group / "box/cpu.max").write_text("max 100000\n")
    (group / "cpu.max").write_text("50000 100000\n")
    (group / "memory.max").write_text(str(2**30))
    arch = detect_cpu(tmp_path)
    assert (arch.compute_units, arch.memory_bytes) == (1, 2**30)


def test_zen4_has_one_wide_port(tmp_path: Path) -> None:
    zen4 = "vendor_id : AuthenticAMD\ncpu family : 25"
    assert detect_cpu(machine(tmp_path, FLAGS_AVX512, extra=zen4)).simds_per_cu == 1


def test_caches_that_shrink_are_not_believed(tmp_path: Path) -> None:
    """What a sweep's worker says of its device is checked like any other figures."""
    machine(tmp_path, FLAGS_AVX2)
    third = tmp_path / "sys/devices/system/cpu/cpu0/cache/index9"
    third.mkdir()
    for name, text in (("level", "3"), ("type", "Unified"), ("size", "64K")):
        (third / name).write_text(text)
    arch = detect_cpu(tmp_path)
    assert arch.l2_bytes == load_arch(arch.name).l2_bytes
    assert Arch.from_dict(arch.to_dict()) == arch


def test_a_machine_without_proc_still_has_a_cpu(tmp_path: Path) -> None:
    arch = detect_cpu(tmp_path)
    assert arch.name == "cpu_generic" and arch.compute_units >= 1


def gpu(name: str, major: int, minor: int, **more: object) -> SimpleNamespace:
    return SimpleNamespace(name=name, major=major, minor=minor, **more)


def test_gpu_figures_are_the_live_ones() -> None:
    arch = gpu_arch(
        gpu(
            "NVIDIA H200",
            9,
            0,
            gcnArchName="NVIDIA H200",
            multi_processor_count=132,
            total_memory=150_000_000_000,
            L2_cache_size=62914560,
            shared_memory_per_multiprocessor=233472,
            shared_memory_per_block_optin=232448,
            max_threads_per_multi_processor=2048,
            regs_per_multiprocessor=65536,
            clock_rate=1980000,
        )
    )
    assert arch.label == "sm_90 (NVIDIA H200)"
    assert arch.memory_bytes == 150_000_000_000 and arch.memory_gb_s == 4800
    assert arch.peak_tflops["bf16"] == pytest.approx(989.4)


def test_a_cut_down_gpu_has_lower_peaks() -> None:
    arch = gpu_arch(gpu("NVIDIA H100 NVL", 9, 0, multi_processor_count=66))
    assert arch.compute_units == 66 and arch.peak_tflops["bf16"] == pytest.approx(989.4 / 2)


@pytest.mark.parametrize(
    ("properties", "name"),
    [
        (gpu("NVIDIA A100-SXM4-40GB", 8, 0), "sm_80"),
        (gpu("NVIDIA GeForce RTX 4090", 8, 9), "sm_80"),
        (gpu("NVIDIA B300", 10, 3), "sm_100"),
        (gpu("NVIDIA GeForce RTX 5090", 12, 0), "sm_80"),
        (gpu("AMD Instinct MI300X", 9, 4, gcnArchName="gfx942:sramecc+:xnack-"), "gfx942"),
    ],
)
def test_gpus_without_a_file_take_the_nearest_they_can_run(properties: object, name: str) -> None:
    assert gpu_arch(properties).name == name


def test_each_gpu_of_several_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    there = [gpu("Tesla V100", 7, 0), gpu("NVIDIA H200", 9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", there.__getitem__)
    detect.cache_clear()
    assert detect("gpu", 1).device == "NVIDIA H200"
    with pytest.raises(ArchError, match="no data file"):
        detect("gpu", 0)
    detect.cache_clear()


def test_a40_memory_is_told_from_a80() -> None:
    assert gpu_arch(gpu("NVIDIA A100-SXM4-40GB", 8, 0)).memory_gb_s == 1555


@pytest.mark.parametrize(
    "properties", [gpu("Tesla V100", 7, 0), gpu("RX 7900", 11, 0, gcnArchName="gfx1100")]
)
def test_unsupported_gpus_say_what_works(properties: object) -> None:
    with pytest.raises(ArchError, match=r"no data file.*The CPU works"):
        gpu_arch(properties)


def test_detect_finds_this_machine() -> None:
    cpu = detect("cpu")
    assert cpu.kind == "cpu" and 1 <= cpu.compute_units <= (os.cpu_count() or 1)
    assert detect().kind == ("cpu" if why_no_gpu() else "gpu")
    with pytest.raises(ArchError, match="tpu"):
        detect("tpu")


@pytest.mark.parametrize("arch", [3, b"sm_90", ["sm_90"]])
def test_what_names_no_architecture_is_refused(arch: Any) -> None:
    with pytest.raises(ArchError, match="pass its name or an Arch"):
        tw.select(tw.GemmProblem(m=8, n=8, k=8), arch=arch)
