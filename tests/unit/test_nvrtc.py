"""CUDA C++ becomes an object on a machine without a GPU or a toolkit, once for each content."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tilewise.core.arch import load_arch
from tilewise.engines.gpu import nvrtc, object_cache
from tilewise.engines.gpu.build import compile_together
from tilewise.engines.gpu.elf import EM_CUDA, read_elf
from tilewise.engines.gpu.objects import over_limit
from tilewise.errors import BuildError
from tilewise.ops.launch import CudaSource
from tilewise.settings import settings

pytestmark = pytest.mark.skipif(nvrtc.why_no_nvrtc() is not None, reason=str(nvrtc.why_no_nvrtc()))

KERNEL = """
#include "toy/parts.cuh"
extern "C" __global__ void __launch_bounds__(128) scale(const __grid_constant__ Map map,
                                                        float *out, int count, float factor) {
  extern __shared__ char dynamic[];
  __shared__ float kept[SLOTS];
  kept[threadIdx.x % SLOTS] = factor;
  __syncthreads();
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) out[at] = twice(kept[at % SLOTS]) + (float)(TYPE)map.words[at % 16] + dynamic[0];
}
"""
PARTS = '#include "deep.cuh"\nstruct alignas(64) Map { unsigned long long words[16]; };\n'
DEEP = "__device__ float twice(float x) { return 2.0f * x; }\n"
SOURCE = CudaSource(
    file="toy/scale.cuh",
    function="scale",
    signature={"map": "map", "out": "*", "count": "i32", "factor": "f32"},
    constants={"SLOTS": 256, "TYPE": "float"},
)


def as_a_new_process() -> None:
    """Reads sources anew."""
    nvrtc.sources.cache_clear()
    nvrtc._digest.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An `ops` folder with a kernel in two headers' company, and a cache of its own."""
    monkeypatch.setattr(nvrtc, "OPS", tmp_path / "ops")
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    (tmp_path / "ops/toy").mkdir(parents=True)
    for name, text in {"scale": KERNEL, "parts": PARTS, "deep": DEEP}.items():
        (tmp_path / f"ops/toy/{name}.cuh").write_text(text)
    as_a_new_process()
    yield tmp_path
    as_a_new_process()
    settings.cache_clear()


def test_a_source_becomes_a_cubin_with_its_resources(folder: Path) -> None:
    made = nvrtc.compile_cuda(SOURCE, "sm_90")
    elf = read_elf(made.image)
    assert (elf.machine, elf.capability) == (EM_CUDA, 90)
    assert made.parameters == (128, 8, 4, 4) and not made.was_cached
    assert 0 < made.resources.registers < 64 and made.resources.spills == 0
    assert made.static_smem_bytes == made.resources.smem_bytes == 1024
    launched = made.launched_with(threads=128, smem_bytes=230_000).resources
    assert (launched.threads, launched.smem_bytes) == (128, 231_024)
    assert "231024 bytes of shared memory" in over_limit(
        made.launched_with(threads=128, smem_bytes=230_000).resources,
        load_arch("sm_90").with_figures(smem_per_block_bytes=231_000),
    )


def test_an_object_is_made_once(folder: Path) -> None:
    first = nvrtc.compile_cuda(SOURCE, "sm_90")
    again = nvrtc.compile_cuda(SOURCE, "sm_90")
    assert again.was_cached and again.image == first.image
    assert (again.parameters, again.resources) == (first.parameters, first.resources)
    (entry,) = (folder / "cache/gpu").iterdir()
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    assert stat.S_IMODE(entry.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "change",
    [
        lambda ops: (ops / "toy/deep.cuh").write_text(DEEP.replace("2.0f", "3.0f")),
        lambda ops: (ops / "toy/parts.cuh").write_text(PARTS + "// another word\n"),
        lambda ops: (ops / "toy/scale.cuh").write_text(KERNEL + "\n"),
    ],
    ids=["a header's header", "a header", "the file"],
)
def test_whatever_is_included_makes_another_object(
    folder: Path, change: Callable[[Path], Any]
) -> None:
    nvrtc.compile_cuda(SOURCE, "sm_90")
    change(folder / "ops")
    assert nvrtc.compile_cuda(SOURCE, "sm_90").was_cached, "one process compiles one version"
    as_a_new_process()
    assert not nvrtc.compile_cuda(SOURCE, "sm_90").was_cached


@pytest.mark.parametrize("damage", ["cut", "another's", "a bit"])
def test_a_damaged_entry_is_made_again(folder: Path, damage: str) -> None:
    first = nvrtc.compile_cuda(SOURCE, "sm_90")
    (entry,) = (folder / "cache/gpu").iterdir()
    body = entry.read_bytes()
    if damage == "cut":
        entry.write_bytes(body[:-9])
    elif damage == "a bit":
        entry.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    else:
        other = CudaSource(**{**_fields(SOURCE), "constants": {"SLOTS": 128, "TYPE": "float"}})
        nvrtc.compile_cuda(other, "sm_90")
        (its,) = set((folder / "cache/gpu").iterdir()) - {entry}
        entry.write_bytes(its.read_bytes())
    again = nvrtc.compile_cuda(SOURCE, "sm_90")
    assert not again.was_cached and again.image == first.image
    assert nvrtc.compile_cuda(SOURCE, "sm_90").was_cached


def _fields(source: CudaSource) -> dict[str, Any]:
    return {name: getattr(source, name) for name in CudaSource.__dataclass_fields__}


def test_a_cache_that_cannot_be_used_does_not_cost_the_kernel(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(object_cache, "write_object", full)
    assert nvrtc.compile_cuda(SOURCE, "sm_90").image
    (folder / "cache").chmod(0o777)
    assert nvrtc.compile_cuda(SOURCE, "sm_90").image


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"file": "toy/none.cuh"}, "toy/none.cuh cannot be read"),
        ({"function": "other"}, "no kernel called other"),
        ({"signature": {"map": "map", "out": "*"}}, r"takes parameters of \(128, 8, 4, 4\)"),
        ({"constants": {"SLOTS": 256, "TYPE": "float;int"}}, "is no name or number"),
        ({"constants": {"SLOTS": 256, "TYPE": "unheard"}}, "does not compile"),
    ],
)
def test_mistakes_are_named(folder: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(BuildError, match=said) as caught:
        nvrtc.compile_cuda(CudaSource(**_fields(SOURCE) | change), "sm_90")
    if "compile" in said:
        assert 'identifier "unheard" is undefined' in caught.value.log


def test_headers_outside_are_refused(folder: Path) -> None:
    (folder / "ops/toy/deep.cuh").write_text('#include "../../secret.cuh"\n')
    (folder / "secret.cuh").write_text("")
    with pytest.raises(BuildError, match="not below ops/"):
        nvrtc.compile_cuda(SOURCE, "sm_90")


def test_one_name_for_two_headers_is_refused(folder: Path) -> None:
    (folder / "ops/deep.cuh").write_text("")
    (folder / "ops/toy/scale.cuh").write_text(KERNEL)
    (folder / "ops/other").mkdir()
    (folder / "ops/other/more.cuh").write_text('#include "deep.cuh"\n')
    (folder / "ops/toy/parts.cuh").write_text('#include "other/more.cuh"\n' + PARTS)
    with pytest.raises(BuildError, match="rename one"):
        nvrtc.compile_cuda(SOURCE, "sm_90")


def test_what_all_kernels_share_compiles() -> None:
    for file in sorted((nvrtc.OPS / "cuda").glob("*.cuh")):
        text, headers = nvrtc.sources(f"cuda/{file.name}")
        options = ("--gpu-architecture=sm_90a", *nvrtc.FLAGS)
        cubin, _ = nvrtc._nvrtc().compile(text, file.name, headers, options)
        assert read_elf(cubin).machine == EM_CUDA


def test_sources_are_compiled_together(folder: Path) -> None:
    other = replace(SOURCE, constants={"SLOTS": 128, "TYPE": "float"})
    broken = replace(SOURCE, constants={"SLOTS": 128, "TYPE": "nothing"})
    (line,) = compile_together([SOURCE, SOURCE, other, broken], "sm_90", 2)
    assert line.startswith("scale: toy/scale.cuh does not compile")
    assert all(nvrtc.compile_cuda(source, "sm_90").was_cached for source in (SOURCE, other))
    assert compile_together([], "sm_90") == []
