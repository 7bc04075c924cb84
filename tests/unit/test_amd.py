"""What holds on AMD GPUs as far as a machine without one can tell: names and encodings."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tilewise.core import tensors
from tilewise.core.arch import amd_name, load_arch
from tilewise.engines.device import gpu_arch
from tilewise.errors import TensorError

torch = pytest.importorskip("torch")

from tilewise.torch_ops.fallback import why_no_kernels  # noqa: E402


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("gfx942:sramecc+:xnack-", "gfx942"),
        ("gfx90a:sramecc+:xnack+", "gfx90a"),
        ("gfx950", "gfx950"),
        ("NVIDIA H200", ""),
        ("", ""),
    ],
)
def test_names_lose_their_modes(given: str, name: str) -> None:
    assert amd_name(SimpleNamespace(gcnArchName=given)) == name
    assert amd_name(SimpleNamespace()) == ""


def test_figures_that_hip_counts_per_block_are_the_files() -> None:
    arch = gpu_arch(
        SimpleNamespace(
            name="AMD Instinct MI300X",
            major=9,
            minor=4,
            gcnArchName="gfx942:sramecc+:xnack-",
            multi_processor_count=38,
            total_memory=24 << 30,
            L2_cache_size=4 << 20,
            regs_per_multiprocessor=65536,
            shared_memory_per_multiprocessor=65536,
            max_threads_per_multi_processor=2048,
            warp_size=64,
        )
    )
    whole = load_arch("gfx942", "MI300X")
    assert (arch.warp_size, arch.max_warps_per_cu) == (64, 32)
    assert arch.registers_per_cu == whole.registers_per_cu == 131072
    # One eighth of the card, as its partition mode CPX shows it: no other chiplet to share with.
    assert (arch.compute_units, arch.num_xcd) == (38, 1)
    assert arch.peak_tflops["bf16"] == pytest.approx(whole.peak_tflops["bf16"] / 8)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The properties of a GPU that PyTorch pretends to have."""
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    tensors._is_fnuz.cache_clear()
    yield properties
    tensors._is_fnuz.cache_clear()


def on_gpu(dtype: Any) -> SimpleNamespace:
    """As much of a PyTorch tensor as is looked at."""
    return SimpleNamespace(
        dtype=dtype,
        layout=torch.strided,
        device=torch.device("cuda:0"),
        shape=(4, 8),
        stride=lambda: (8, 1),
        numel=lambda: 32,
        data_ptr=lambda: 1 << 40,
        is_nested=False,
    )


def test_fp8_is_the_encoding_of_the_matrix_units(device: SimpleNamespace) -> None:
    assert tensors.view(on_gpu(torch.float8_e4m3fnuz)).dtype == "fp8"
    assert tensors.view(on_gpu(torch.float8_e5m2fnuz)).dtype == "bf8"
    assert tensors.torch_dtype("bf16", "cuda:0") == torch.bfloat16
    with pytest.raises(TensorError, match=r"e4m3fn; fp8 is torch\.float8_e4m3fnuz there"):
        tensors.view(on_gpu(torch.float8_e4m3fn))
    with pytest.raises(TensorError, match="float8_e5m2 there"):
        tensors.view(torch.zeros(4, 4).to(torch.float8_e5m2fnuz))


def test_the_other_encoding_is_left_to_pytorch(device: SimpleNamespace) -> None:
    assert why_no_kernels(on_gpu(torch.float8_e4m3fnuz), on_gpu(torch.float8_e4m3fnuz)) is None
    assert (
        why_no_kernels(on_gpu(torch.float8_e4m3fn)) == "operands of torch.float8_e4m3fn on cuda:0"
    )
    assert why_no_kernels(torch.zeros(4, 4).to(torch.float8_e4m3fn)) is None


@pytest.mark.parametrize("name", ["gfx950", "NVIDIA H200"])
def test_fp8_is_the_common_one_elsewhere(device: SimpleNamespace, name: str) -> None:
    device.gcnArchName = name
    assert tensors.view(on_gpu(torch.float8_e4m3fn)).dtype == "fp8"
    with pytest.raises(TensorError, match=r"e4m3fnuz; fp8 is torch\.float8_e4m3fn there"):
        tensors.view(on_gpu(torch.float8_e4m3fnuz))
