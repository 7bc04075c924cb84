"""A GPU that writes down what its driver is asked for: real objects, real launches, no device."""

from __future__ import annotations

import ctypes
import json
import subprocess
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from tilewise.engines.gpu import bound
from tilewise.engines.gpu.driver import CudaDriver, Driver, HipDriver
from tilewise.engines.gpu.elf import EM_CUDA, cubin_parameters, hsaco_parameters, read_elf

STREAM = 0x5EA


@cache
def compiled(folder: Path, name: str = "") -> Path:
    """Both drivers in one library, which answers to `name`."""
    made = folder / (name or "libcuda.so.1")
    source = Path(__file__).with_name("driver_stub.c")
    command = ["cc", "-O1", "-Wall", "-shared", "-fPIC", str(source), "-o", str(made)]
    subprocess.run([*command, *([f"-Wl,-soname,{name}"] if name else [])], check=True)
    return made


@cache
def library(folder: Path) -> ctypes.CDLL:
    """Both drivers; whoever opens a driver by its name does not find them."""
    return ctypes.CDLL(str(compiled(folder)))


@cache
def named(name: str) -> ctypes.CDLL:
    """Both drivers; who opens `name` in this process from now on finds these, and no others."""
    return ctypes.CDLL(str(compiled(Path(mkdtemp()), name)))


def told(driver: Driver) -> type[Driver]:
    """The driver's class, telling the stub what each function's parameters are."""

    class Told(driver):  # type: ignore[misc,valid-type]
        def load(self, image: bytes, function: str, smem_bytes: int, cluster_size: int) -> int:
            is_cuda = read_elf(image).machine == EM_CUDA
            sizes = cubin_parameters(image, function) if is_cuda else hsaco_parameters(image)
            self.library.tw_parameters(len(sizes), (ctypes.c_int * len(sizes))(*sizes))
            return int(super().load(image, function, smem_bytes, cluster_size))

    return Told


class Stub:
    """What a test sees of the driver."""

    def __init__(self, folder: Path | None = None, *, name: str = "") -> None:
        self._library = named(name) if folder is None else library(folder)
        self._library.tw_forget()
        self.tell(())  # what was told of a function that nobody loaded
        self.drivers = {
            "nvidia": told(CudaDriver)(self._library),
            "amd": told(HipDriver)(self._library),
        }

    def calls(self, kind: str = "") -> list[dict[str, Any]]:
        """What was asked of the driver, in order."""
        text = ctypes.c_char.in_dll(self._library, "tw_log")
        lines = ctypes.string_at(ctypes.addressof(text)).decode().splitlines()
        return [call for call in map(json.loads, lines) if not kind or call["call"] == kind]

    def launches(self) -> list[dict[str, Any]]:
        return self.calls("launch")

    def fail(self, code: int) -> None:
        """The next launch fails."""
        ctypes.c_int.in_dll(self._library, "tw_failure").value = code

    def fail_loading(self, code: int) -> None:
        """What loading answers from now on."""
        ctypes.c_int.in_dll(self._library, "tw_load_failure").value = code

    def tell(self, sizes: Sequence[int]) -> None:
        """How many bytes each parameter of the next loaded function takes."""
        self._library.tw_parameters(len(sizes), (ctypes.c_int * len(sizes))(*sizes))

    def use(self, device: int | None) -> None:
        """Makes an NVIDIA GPU this thread's, or none."""
        self._library.cuCtxSetCurrent(ctypes.c_void_p(None if device is None else 0xC0 + device))

    def forget(self) -> None:
        self._library.tw_forget()
        self.tell(())  # what was told of a function that nobody loaded


def install(stub: Stub, monkeypatch: pytest.MonkeyPatch, device: int = -1) -> None:
    """Makes the stub this process's only GPU: an H200 or MI300X, whichever is asked for."""
    import torch

    monkeypatch.setattr(bound, "driver_for", stub.drivers.__getitem__)
    monkeypatch.setattr(bound, "_LOADED", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: STREAM, raising=False)


def number(text: str) -> int:
    """A parameter's bytes as an unsigned integer."""
    return int.from_bytes(bytes.fromhex(text), "little")
