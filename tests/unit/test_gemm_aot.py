"""GPU GEMM kernels compile on a machine without a GPU, for every architecture they claim."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gemm_kernels import gemm_kernel

from tilewise.cli import build as building
from tilewise.core.arch import load_arch
from tilewise.engines.contract import Build, Resources
from tilewise.errors import KernelError, TensorError
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.gemm import launch as launch_module
from tilewise.ops.gemm.kernels import GPU_KERNEL_TYPES
from tilewise.ops.gemm.kernels.gpu import GpuGemmKernel, why_unusable
from tilewise.ops.gemm.launch import Epilogue, launch, representative, strides_of
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.ops.launch import Launch, Source, Step, TensorMap
from tilewise.settings import settings

pytest.importorskip("triton")

from tilewise.engines.gpu.build import build_one, compile_source
from tilewise.engines.gpu.elf import EM_AMDGPU, EM_CUDA, hsaco_facts, read_elf
from tilewise.engines.gpu.engine import TritonEngine
from tilewise.engines.gpu.objects import over_limit
from tilewise.engines.gpu.triton_build import translate

AMD = ("gfx90a", "gfx942", "gfx950")
ELF_ARCH = {"gfx90a": 0x3F, "gfx942": 0x4C, "gfx950": 0x4F}
"""The low byte of an object's flags: LLVM's EF_AMDGPU_MACH."""
FAMILIES = {family for kind in GPU_KERNEL_TYPES for family in kind.families()}
MIN_SMEM = {"gemv": 0, **dict.fromkeys(FAMILIES - {"gemv"}, 4096)}

REPRESENTATIVES = (
    gemm_kernel(family="pointer", dtype="bf16", tile_m=64, tile_n=64, tile_k=64),
    gemm_kernel(family="splitk", dtype="bf16", tile_m=64, tile_n=64, tile_k=64, split_k=4),
    gemm_kernel(
        family="splitk", dtype="fp16", tile_m=32, tile_n=32, tile_k=64, split_k=2, atomic=True
    ),
    gemm_kernel(family="streamk", dtype="bf16", tile_m=64, tile_n=64, tile_k=64),
    gemm_kernel(family="skinny", dtype="bf16", tile_m=64, tile_n=16, tile_k=64, split_k=2),
    gemm_kernel(family="gemv", dtype="bf16", tile_m=4, tile_n=1, tile_k=512, stages=1),
    gemm_kernel(family="tma", dtype="bf16", tile_m=64, tile_n=64, tile_k=64),
    gemm_kernel(family="ws", dtype="bf16", tile_m=128, tile_n=128, tile_k=64, warps=8, stages=4),
    gemm_kernel(family="ws", dtype="bf16", tile_m=64, tile_n=96, tile_k=64, stages=4, fill=True),
    gemm_kernel(
        family="ws", dtype="fp8", tile_m=64, tile_n=16, tile_k=128, stages=4, split_k=2, swap=True
    ),
    gemm_kernel(family="duo", dtype="bf16", tile_m=128, tile_n=64, tile_k=64, stages=4),
    gemm_kernel(family="pingpong", dtype="bf16", tile_m=64, tile_n=64, tile_k=64, stages=4),
    gemm_kernel(family="pointer", dtype="int8", tile_m=64, tile_n=64, tile_k=128),
    gemm_kernel(family="pointer", dtype="fp32", tile_m=32, tile_n=32, tile_k=32),
    gemm_kernel(family="pointer", dtype="fp8", tile_m=64, tile_n=64, tile_k=128, stages=2),
    gemm_kernel(family="gemv", dtype="fp16", tile_m=4, tile_n=1, tile_k=512, stages=1, split_k=4),
    gemm_kernel(family="smallk", dtype="bf16", tile_m=64, tile_n=128, tile_k=64, blocks=3),
    gemm_kernel(family="smallk", dtype="fp8", tile_m=64, tile_n=64, tile_k=64, swap=True),
)


def legal_pairs() -> list[tuple[str, GpuGemmKernel]]:
    return [
        (name, kernel)
        for name in ("sm_90", *AMD)
        for kernel in REPRESENTATIVES
        if why_unusable(kernel, None, load_arch(name)) is None
    ]


def test_every_family_is_represented() -> None:
    assert {kernel.family for kernel in REPRESENTATIVES} == FAMILIES
    for name in AMD:
        served = {kernel.family for arch, kernel in legal_pairs() if arch == name}
        by_tma = {kernel.family for kernel in REPRESENTATIVES if kernel.copies_by_tma}
        assert served == FAMILIES - by_tma


def source_of(kernel: GpuGemmKernel, name: str, **more: Any) -> Source:
    """What the kernel is compiled from for its usual problem."""
    return only(
        launch(kernel, more.pop("problem", representative(kernel)), load_arch(name), **more)
    )


def only(made: Launch) -> Source:
    (source,) = made.sources
    assert isinstance(source, Source)
    return source


def listing(kernel: GpuGemmKernel, name: str, kind: str) -> str:
    """The kernel as an assembler reads it."""
    return str(translate(source_of(kernel, name), name).asm[kind])


def pairs_of(*names: str) -> Any:
    pairs = [(name, kernel) for name, kernel in legal_pairs() if name in names]
    return pytest.mark.parametrize(
        ("name", "kernel"), pairs, ids=lambda v: v if isinstance(v, str) else v.name[12:]
    )


@pairs_of("sm_90")
def test_compiles_to_a_cubin(name: str, kernel: GpuGemmKernel, tmp_path: Path) -> None:
    arch, made = load_arch(name), compile_source(source_of(kernel, name), name)
    elf = read_elf(made.image)
    assert (elf.machine, elf.capability) == (EM_CUDA, 90)
    assert elf.sections[f".text.{made.function}"]
    found = made.resources
    (tmp_path / "kernel.cubin").write_bytes(made.image)
    assert (found.registers, found.spills) == usage_by_vendor(tmp_path / "kernel.cubin")
    assert found.spills == 0 and found.smem_bytes >= MIN_SMEM[kernel.family]
    assert over_limit(found, arch) == ""
    loading = {"ws": 4, "duo": 8, "pingpong": 8}.get(kernel.family, 0)
    assert found.threads == (kernel.warps + loading) * arch.warp_size
    if kernel.family in ("ws", "duo", "pingpong"):
        ptx = listing(kernel, name, "ptx")
        assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx


def usage_by_vendor(cubin: Path) -> tuple[int, int]:
    """Registers and stack bytes as NVIDIA's own tool reads them."""
    from triton import knobs

    told = subprocess.run(
        [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found, told
    return int(found[1]), int(found[2])


@pairs_of(*AMD)
def test_compiles_to_an_amd_object(name: str, kernel: GpuGemmKernel) -> None:
    arch, source = load_arch(name), source_of(kernel, name)
    made = compile_source(source, name)
    elf, facts = read_elf(made.image), hsaco_facts(made.image)
    assert (elf.machine, elf.flags & 0xFF) == (EM_AMDGPU, ELF_ARCH[name])
    assert facts["target"] == name
    assert facts[".name"] == source.function
    assert facts[".wavefront_size"] == arch.warp_size == 64
    assert facts[".max_flat_workgroup_size"] == kernel.warps * 64
    passed = [4 if kind == "i32" else 8 for kind in source.signature.values()]
    assert made.parameters == (*passed, 8, 8)  # two of Triton's own
    found = made.resources
    assembly = listing(kernel, name, "amdgcn")
    told = [figure(assembly, f"{kind}_count") for kind in ("vgpr", "sgpr", "agpr")]
    assert [found.registers, found.sgprs, found.agprs] == told
    assert 0 < found.registers <= 512 and 0 < found.sgprs <= 112
    assert found.agprs <= found.registers
    assert found.spills == 0
    assert over_limit(found, arch) == ""


def figure(assembly: str, name: str) -> int:
    """A figure as the assembly listing spells it."""
    found = re.search(rf"\.{name}:\s+(\d+)", assembly)
    assert found, name
    return int(found[1])


@pytest.mark.parametrize(
    ("name", "instruction"),
    [("gfx942", r"v_mfma_f32_\d+x\d+x16_fp8_fp8"), ("gfx950", r"v_mfma_\S*f32_\d+x\d+x\d+_f8f6f4")],
)
def test_fp8_uses_the_matrix_units_of_the_architecture(name: str, instruction: str) -> None:
    kernel = next(k for k in REPRESENTATIVES if k.dtype == "fp8" and k.family == "pointer")
    encoding = "fp8e4b8" if name == "gfx942" else "fp8e4nv"
    assert source_of(kernel, name).signature["a_ptr"] == f"*{encoding}"
    assert re.search(instruction, listing(kernel, name, "amdgcn"))


def waits_for_stores(assembly: str) -> bool:
    """Whether all waves' stores have landed when the first wave announces them.

    That is before the barrier ahead of the flag's atomic, the only one that gives a value back.
    """
    lines = assembly.splitlines()
    flag = next(
        i for i, line in enumerate(lines) if re.search(r"atomic_add \S+, .*(sc0|glc)", line)
    )
    barrier = max(i for i in range(flag) if "s_barrier" in lines[i])
    before = reversed(lines[:barrier])
    return "s_waitcnt" in next(x for x in before if re.search(r"vmcnt\(0\)|_store_|_atomic_", x))


@pytest.mark.parametrize("name", AMD)
def test_amd_kernels_wait_for_partial_sums_to_land(name: str) -> None:
    arch = load_arch(name)
    cut = [k for k in REPRESENTATIVES if k.split_k > 1 or k.family == "streamk"]
    cut = [k for k in cut if why_unusable(k, None, arch) is None]
    assert {k.family for k in cut} == {"splitk", "streamk", "skinny", "gemv"}
    for kernel in cut:
        assert waits_for_stores(listing(kernel, name, "amdgcn")), kernel.name


def test_a_kernel_that_does_not_wait_is_told_apart() -> None:
    source = source_of(REPRESENTATIVES[1], "gfx942")
    hasty = replace(source, constants=source.constants | {"AMD": False})
    assert not waits_for_stores(translate(hasty, "gfx942").asm["amdgcn"])


def test_build_survives_a_compiler_that_gives_up() -> None:
    # Legality keeps this one away because the compiler refuses it, at times by aborting.
    bad = gemm_kernel(
        family="ws", dtype="int8", tile_m=128, tile_n=256, tile_k=128, warps=8, stages=3
    )
    good = REPRESENTATIVES[0]
    seen: list[Build] = []
    builds = TritonEngine().build(
        [bad, good], load_arch("sm_90"), max_workers=2, on_done=seen.append
    )
    assert [b.kernel for b in builds] == [bad, good]
    assert [b.status for b in builds] == ["compile_error", "ok"]
    assert builds[0].message
    assert builds[1].resources.smem_bytes > 0
    assert sorted(b.status for b in seen) == ["compile_error", "ok"]


def test_limits_are_checked_before_launch() -> None:
    arch = load_arch("gfx90a")
    assert "shared memory" in over_limit(Resources(smem_bytes=10**6, threads=64), arch)
    assert "threads" in over_limit(Resources(threads=4096), arch)
    assert "has 512" in over_limit(Resources(registers=513, threads=64), arch)
    assert "each of 512" in over_limit(Resources(registers=264, threads=512), arch)
    assert over_limit(Resources(registers=256, smem_bytes=1024, threads=512), arch) == ""


def test_a_kernel_over_the_limit_is_recorded_with_what_it_needs() -> None:
    small = load_arch("gfx90a").with_figures(smem_per_block_bytes=1024)
    build = build_one(REPRESENTATIVES[0], small)
    assert build.status == "over_limit" and "shared memory" in build.message
    assert build.resources.smem_bytes > 1024 and build.resources.sgprs > 0


def test_builds_say_what_was_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    builds = [build_one(REPRESENTATIVES[5], load_arch("gfx90a")) for _ in range(2)]
    assert [build.was_cached for build in builds] == [False, True]
    assert builds[0].resources == builds[1].resources
    settings.cache_clear()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_pool_is_wide_and_unique(dtype: str) -> None:
    pool = load_pool(get_op("gemm"), load_arch("sm_90"), ["triton"])
    kernels = [k for k in pool if k.dtype == dtype]
    assert len(kernels) >= 100
    assert len({k.name for k in kernels}) == len(kernels)
    for kernel in kernels:
        assert get_op("gemm").kernel_from_name(kernel.name) == kernel
        assert get_op("gemm").kernel_from_dict(kernel.to_dict()) == kernel


@pytest.mark.parametrize("layout", ["rcr", "rrr", "crr", "ccr"])
@pytest.mark.parametrize("size", [(1, 1, 1), (127, 131, 257), (4096, 4096, 4096), (3, 1000, 1003)])
def test_every_size_and_layout_has_kernels(size: tuple[int, int, int], layout: str) -> None:
    arch = load_arch("sm_90")
    m, n, k = size
    problem = GemmProblem(m=m, n=n, k=k, dtype="bf16", layout=layout)
    pool = load_pool(get_op("gemm"), arch, ["triton"])
    legal = [kernel for kernel in pool if why_unusable(kernel, problem, arch) is None]
    assert legal
    for kernel in legal:
        made = launch(kernel, problem, arch)
        (step,) = made.steps
        assert isinstance(step, Step) and len(step.arguments) == len(step.source.signature)
        assert step.grid[0] > 0
        assert made.zeroed_bytes <= made.workspace_bytes


def legal_for(problem: GemmProblem, name: str = "sm_90") -> list[GpuGemmKernel]:
    arch = load_arch(name)
    pool = load_pool(get_op("gemm"), arch, ["triton"])
    return [k for k in pool if why_unusable(k, problem, arch) is None]


@pytest.mark.parametrize("name", ["sm_90", "gfx942"])
@pytest.mark.parametrize("size", [(16384, 512, 13), (187, 19712, 47), (50176, 256, 64)])
def test_short_reductions_have_kernels_of_their_own(name: str, size: tuple[int, int, int]) -> None:
    m, n, k = size
    whole = [x for x in legal_for(GemmProblem(m=m, n=n, k=k, dtype="bf16"), name) if is_whole(x)]
    assert whole and {x.swap for x in whole} == {m < n}
    assert not any(map(is_whole, legal_for(GemmProblem(m=m, n=n, k=129, dtype="bf16"), name)))


def is_whole(kernel: GpuGemmKernel) -> bool:
    return kernel.family == "smallk"


@pytest.mark.parametrize(
    ("rows", "strips", "room"),
    [(1, 1, 264), (45, 33, 264), (87, 48, 264), (784, 2, 528), (3, 9000, 264)],
)
def test_rows_are_dealt_out_evenly(rows: int, strips: int, room: int) -> None:
    shares = launch_module._shares(rows, strips, room)
    assert 1 <= shares <= rows
    waves = -(-strips * shares // room)
    # Within a tenth of an even deal, but for the rows that a program cannot halve.
    assert waves * -(-rows // shares) <= 1.1 * rows * strips / room + waves + 1


def first_argument(made: Launch) -> Any:
    (step,) = made.steps
    assert isinstance(step, Step)
    return step.arguments[0]


@pytest.mark.parametrize("layout", ["rcr", "rrr", "crr", "ccr"])
def test_tf32_is_copied_in_every_layout(layout: str) -> None:
    problem = GemmProblem(m=2048, n=2048, k=2048, dtype="tf32", layout=layout, batch=2)
    copied = [kernel for kernel in legal_for(problem) if kernel.family == "tma"]
    assert copied
    made = launch(copied[0], problem, load_arch("sm_90"))
    first = first_argument(made)
    assert isinstance(first, TensorMap) and len(first.sizes) == 3 and first.sizes[-1] == 2
    # The operand across K is the one that passes through registers: B where only it lies so.
    assert first.tensor == (1 if layout == "rrr" else 0)


@pytest.mark.parametrize("rows", [5, 8, 16])
def test_exact_fp32_with_few_rows_is_skinny(rows: int) -> None:
    problem = GemmProblem(m=rows, n=4096, k=4096, dtype="fp32")
    assert any(kernel.family == "skinny" for kernel in legal_for(problem))


def test_legality_says_why() -> None:
    arch = load_arch("sm_90")
    ws = REPRESENTATIVES[7]
    assert "nothing" in str(why_unusable(ws, GemmProblem(m=0, n=8, k=8, dtype="bf16"), arch))
    assert "fp16" in str(why_unusable(ws, GemmProblem(m=8, n=8, k=8, dtype="fp16"), arch))
    assert "TMA" in str(why_unusable(ws, GemmProblem(m=8, n=8, k=9, dtype="bf16"), arch))
    assert "not a GPU" in str(why_unusable(ws, None, load_arch("x86_avx2")))
    short = REPRESENTATIVES[-2]
    assert "one step" in str(why_unusable(short, GemmProblem(m=99, n=9, k=65, dtype="bf16"), arch))
    assert "longer" in str(why_unusable(short, GemmProblem(m=9, n=99, k=64, dtype="bf16"), arch))
    with pytest.raises(KernelError, match="power of two"):
        gemm_kernel(family="pointer", dtype="bf16", tile_m=48, tile_n=64, tile_k=64)
    with pytest.raises(KernelError, match="split_k is 2; tma has no split_k"):
        gemm_kernel(family="tma", dtype="bf16", tile_m=64, tile_n=64, tile_k=64, split_k=2)


@pytest.mark.parametrize("name", AMD)
def test_tiles_whose_narrow_loads_would_spill_are_refused(name: str) -> None:
    arch = load_arch(name)
    wide = gemm_kernel(
        family="pointer", dtype="int8", tile_m=256, tile_n=128, tile_k=128, warps=8, stages=2
    )
    even = GemmProblem(m=4096, n=4096, k=4096, dtype="int8")
    assert why_unusable(wide, even, arch) is None
    for odd in (replace(even, k=4099), replace(even, layout="rrr")):
        assert "spill" in str(why_unusable(wide, odd, arch))
        pool = load_pool(get_op("gemm"), arch, ["triton"])
        assert sum(why_unusable(kernel, odd, arch) is None for kernel in pool) >= 10


def test_the_widest_tile_left_for_odd_rows_hardly_spills() -> None:
    arch = load_arch("gfx942")
    wide = gemm_kernel(
        family="pointer", dtype="bf16", tile_m=256, tile_n=128, tile_k=64, warps=8, stages=2
    )
    odd = GemmProblem(m=4096, n=4096, k=4099, dtype="bf16")
    assert why_unusable(wide, odd, arch) is None
    widest = replace(wide, tile_n=256, tile_k=32)
    assert "spill" in str(why_unusable(widest, odd, arch))
    # Triton 3.7 spills 76 registers where 3.6 and 3.9 spill none.
    assert spills(source_of(wide, "gfx942", problem=odd)) < 100
    gelu = Epilogue(bias=True, activation="gelu")
    assert spills(source_of(widest, "gfx942", problem=odd, epilogue=gelu)) > 500


def spills(source: Source) -> int:
    return compile_source(source, "gfx942").resources.spills


def test_strides_that_tma_cannot_take_are_refused() -> None:
    problem = GemmProblem(m=64, n=64, k=64, dtype="bf16")
    odd = ((65, 1), (1, 64), (64, 1))
    with pytest.raises(TensorError, match="16 bytes"):
        launch(
            REPRESENTATIVES[7],
            problem,
            load_arch("sm_90"),
            strides=strides_of(problem, odd),
        )
    made = launch(REPRESENTATIVES[0], problem, load_arch("sm_90"), strides=strides_of(problem, odd))
    assert only(made).divisible["a_ptr"] == 16
    assert "a_row" not in only(made).divisible  # 65 elements apart: nothing divides it


def test_swapped_kernels_describe_the_other_operand_first() -> None:
    kernel = REPRESENTATIVES[9]
    made = launch(
        kernel,
        GemmProblem(m=16, n=4096, k=512, dtype="fp8"),
        load_arch("sm_90"),
        epilogue=Epilogue(scaling="row"),
    )
    first = first_argument(made)
    assert isinstance(first, TensorMap)
    assert (first.tensor, first.sizes) == (1, (512, 4096, 1))


def test_the_build_command_needs_no_gpu() -> None:
    name = "gemm_triton_gemv_bf16_m4_n1_k512_w4_s1_z1_g8_b1"
    words = ("build", "--op", "gemm", "--arch", "gfx90a", "--filter", f"name == '{name}'", "--json")
    ran = subprocess.run(
        [sys.executable, "-m", "tilewise", *words], capture_output=True, text=True, timeout=900
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    (built,) = told["kernels"]
    assert (told["arch"], told["ok"], told["spilling"]) == ("gfx90a", 1, 0)
    assert (built["kernel"], built["status"], built["threads"]) == (name, "ok", 256)
    assert built["registers"] > 0 and built["sgprs"] > 0
    assert {"agprs", "spills", "smem_bytes", "cached"} <= built.keys()


def test_progress_is_told_to_logs_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []
    monkeypatch.setattr(building, "telling", lambda first: nullcontext(told.append))
    with building.progress(2) as advance:
        for kernel in REPRESENTATIVES[:2]:
            advance(Build(kernel=kernel, status="ok"))
    assert [line.split(",")[0] for line in told] == ["built 1 of 2", "built 2 of 2"]
