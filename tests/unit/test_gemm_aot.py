"""GPU GEMM kernels compile on a machine without a GPU, for every architecture they claim."""

from __future__ import annotations

import pytest

from tilewise.core.arch import load_arch
from tilewise.engines.contract import Build, Resources
from tilewise.errors import KernelError, TensorError
from tilewise.ops.builder import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.gemm.kernels.gpu import FAMILIES, HOPPER_FAMILIES, TritonGemmKernel, why_unusable
from tilewise.ops.gemm.launch import Epilogue, launch, representative, strides_of
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.ops.launch import Descriptor

pytest.importorskip("triton")

from tilewise.engines.triton import TritonEngine
from tilewise.engines.triton_build import compile_source, over_limit, resources_of

AMD = ("gfx90a", "gfx942", "gfx950")
ELF_MACHINE = {"nvidia": 190, "amd": 224}

REPRESENTATIVES = (
    TritonGemmKernel(family="pointer", dtype="bf16", tile_m=64, tile_n=64, tile_k=64),
    TritonGemmKernel(family="splitk", dtype="bf16", tile_m=64, tile_n=64, tile_k=64, split_k=4),
    TritonGemmKernel(
        family="splitk", dtype="fp16", tile_m=32, tile_n=32, tile_k=64, split_k=2, atomic=True
    ),
    TritonGemmKernel(family="streamk", dtype="bf16", tile_m=64, tile_n=64, tile_k=64),
    TritonGemmKernel(family="skinny", dtype="bf16", tile_m=64, tile_n=16, tile_k=64, split_k=2),
    TritonGemmKernel(family="gemv", dtype="bf16", tile_m=4, tile_n=1, tile_k=512, stages=1),
    TritonGemmKernel(family="tma", dtype="bf16", tile_m=64, tile_n=64, tile_k=64),
    TritonGemmKernel(
        family="ws", dtype="bf16", tile_m=128, tile_n=128, tile_k=64, warps=8, stages=4
    ),
    TritonGemmKernel(
        family="ws", dtype="bf16", tile_m=64, tile_n=96, tile_k=64, stages=4, fill=True
    ),
    TritonGemmKernel(
        family="ws", dtype="fp8", tile_m=64, tile_n=16, tile_k=128, stages=4, split_k=2, swap=True
    ),
    TritonGemmKernel(family="duo", dtype="bf16", tile_m=128, tile_n=64, tile_k=64, stages=4),
    TritonGemmKernel(family="pingpong", dtype="bf16", tile_m=64, tile_n=64, tile_k=64, stages=4),
    TritonGemmKernel(family="pointer", dtype="int8", tile_m=64, tile_n=64, tile_k=128),
    TritonGemmKernel(family="pointer", dtype="fp32", tile_m=32, tile_n=32, tile_k=32),
)


def legal_pairs() -> list[tuple[str, TritonGemmKernel]]:
    return [
        (name, kernel)
        for name in ("sm_90", *AMD)
        for kernel in REPRESENTATIVES
        if why_unusable(kernel, None, load_arch(name)) is None
    ]


def test_every_family_is_represented() -> None:
    assert {kernel.family for kernel in REPRESENTATIVES} == set(FAMILIES)
    for name in AMD:
        served = {kernel.family for arch, kernel in legal_pairs() if arch == name}
        assert served == set(FAMILIES) - set(HOPPER_FAMILIES)


@pytest.mark.parametrize(
    ("name", "kernel"), legal_pairs(), ids=lambda v: v if isinstance(v, str) else v.name[12:]
)
def test_compiles_to_an_object_of_the_architecture(name: str, kernel: TritonGemmKernel) -> None:
    arch = load_arch(name)
    compiled = compile_source(launch(kernel, representative(kernel), arch).source, arch)
    binary = compiled.asm["cubin" if arch.vendor == "nvidia" else "hsaco"]
    assert binary[:4] == b"\x7fELF"
    assert int.from_bytes(binary[18:20], "little") == ELF_MACHINE[arch.vendor]
    found = resources_of(compiled, arch)
    assert 0 < found.registers <= 512
    assert found.threads >= kernel.warps * arch.warp_size
    assert over_limit(found, arch) == ""
    if kernel.family in ("ws", "duo", "pingpong"):
        assert "wgmma.mma_async" in compiled.asm["ptx"]
        assert "cp.async.bulk.tensor" in compiled.asm["ptx"]


def test_build_survives_a_compiler_that_gives_up() -> None:
    # Legality keeps this one away because the compiler refuses it, at times by aborting.
    bad = TritonGemmKernel(
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
    assert over_limit(Resources(smem_bytes=1024, threads=256), arch) == ""


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_pool_is_wide_and_unique(dtype: str) -> None:
    pool = load_pool(get_op("gemm"), load_arch("sm_90"), ["triton"])
    kernels = [k for k in pool if k.dtype == dtype]
    assert len(kernels) >= 100
    assert len({k.name for k in kernels}) == len(kernels)
    for kernel in kernels:
        assert TritonGemmKernel.from_name(kernel.name) == kernel
        assert TritonGemmKernel.from_dict(kernel.to_dict()) == kernel


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
        assert len(made.arguments) == len(made.source.signature)
        assert made.grid[0] > 0
        assert made.zeroed_bytes <= made.workspace_bytes


def test_legality_says_why() -> None:
    arch = load_arch("sm_90")
    ws = REPRESENTATIVES[7]
    assert "nothing" in str(why_unusable(ws, GemmProblem(m=0, n=8, k=8, dtype="bf16"), arch))
    assert "fp16" in str(why_unusable(ws, GemmProblem(m=8, n=8, k=8, dtype="fp16"), arch))
    assert "TMA" in str(why_unusable(ws, GemmProblem(m=8, n=8, k=9, dtype="bf16"), arch))
    assert "not a GPU" in str(why_unusable(ws, None, load_arch("x86_avx2")))
    with pytest.raises(KernelError, match="power of two"):
        TritonGemmKernel(family="pointer", dtype="bf16", tile_m=48, tile_n=64, tile_k=64)
    with pytest.raises(KernelError, match="do not split"):
        TritonGemmKernel(family="tma", dtype="bf16", tile_m=64, tile_n=64, tile_k=64, split_k=2)


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
    assert made.source.divisible["a_ptr"] == 16
    assert "a_row" not in made.source.divisible  # 65 elements apart: nothing divides it


def test_swapped_kernels_describe_the_other_operand_first() -> None:
    kernel = REPRESENTATIVES[9]
    made = launch(
        kernel,
        GemmProblem(m=16, n=4096, k=512, dtype="fp8"),
        load_arch("sm_90"),
        epilogue=Epilogue(scaling="row"),
    )
    first = made.arguments[0]
    assert isinstance(first, Descriptor)
    assert (first.tensor, first.shape) == (1, (1, 4096, 512))
