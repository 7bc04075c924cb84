"""NVIDIA's and AMD's drivers through ctypes: modules, functions, tensor maps, and what failed."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tilewise.errors import ExecutionError

MAP_BYTES = 128
BIG_SMEM_BYTES = 48 << 10
"""More shared memory than this a kernel must be allowed by name."""
PORTABLE_CLUSTER = 8
MAX_DYNAMIC_SMEM, NON_PORTABLE_CLUSTER = 8, 14
"""CUDA's numbers of a function's attributes."""
HIP_NAMES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")


class Driver:
    """What both have in common; failures are ExecutionErrors."""

    is_cuda: bool
    launch: Any
    """The driver's function that starts a kernel."""
    clear: Any
    """Its function that sets memory to a byte."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def context(self, device: int) -> int:
        """What launches on `device` happen in."""
        raise NotImplementedError

    def enter(self, device: int) -> None:
        """Makes the device this thread's, where the driver has none for it yet."""

    def load(self, image: bytes, function: str, smem_bytes: int, cluster_size: int) -> int:
        """The function of an object, put on the current device for good."""
        raise NotImplementedError

    def why(self, code: int) -> str:
        """The driver's word for a failure."""
        raise NotImplementedError

    def check(self, code: int, doing: str) -> None:
        if code:
            raise ExecutionError(f"{doing} failed: {self.why(code)}")

    def addresses(self) -> tuple[int, ...]:
        """What the compiled launcher calls: launch, clear, current context, use a context."""
        raise NotImplementedError


class CudaDriver(Driver):
    """`libcuda`."""

    is_cuda = True

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self.launch = library.cuLaunchKernelEx
        self.clear = library.cuMemsetD8Async

    def why(self, code: int) -> str:
        text = ctypes.c_char_p()
        self.library.cuGetErrorString(code, ctypes.byref(text))
        return (text.value or f"error {code}".encode()).decode()

    @cache  # noqa: B019  # one driver serves the process
    def context(self, device: int) -> int:
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        self.check(self.library.cuInit(0), "starting the driver")
        self.check(self.library.cuDeviceGet(ctypes.byref(handle), device), f"finding GPU {device}")
        kept = self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
        self.check(kept, f"using GPU {device}")
        return int(context.value or 0)

    def enter(self, device: int) -> None:
        current = ctypes.c_void_p()
        self.check(self.library.cuCtxGetCurrent(ctypes.byref(current)), "asking for the context")
        if not current.value:
            context = ctypes.c_void_p(self.context(device))
            self.check(self.library.cuCtxSetCurrent(context), f"using GPU {device}")

    def load(self, image: bytes, function: str, smem_bytes: int, cluster_size: int) -> int:
        module, found = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.library.cuModuleLoadData(ctypes.byref(module), image), "loading")
        named = self.library.cuModuleGetFunction(ctypes.byref(found), module, function.encode())
        self.check(named, f"finding {function}")
        if smem_bytes > BIG_SMEM_BYTES:
            allowed = self.library.cuFuncSetAttribute(found, MAX_DYNAMIC_SMEM, smem_bytes)
            self.check(allowed, f"taking {smem_bytes} bytes of shared memory")
        if cluster_size > PORTABLE_CLUSTER:
            allowed = self.library.cuFuncSetAttribute(found, NON_PORTABLE_CLUSTER, 1)
            self.check(allowed, f"taking clusters of {cluster_size}")
        return int(found.value or 0)

    def addresses(self) -> tuple[int, ...]:
        names = (
            self.launch,
            self.clear,
            self.library.cuCtxGetCurrent,
            self.library.cuCtxSetCurrent,
        )
        return tuple(_address(name) for name in names)

    def encode_tiled(self, dtype: int, address: int, shape: MapShape, box: Sequence[int]) -> bytes:
        """A tensor map whose copies bring boxes."""
        made = _aligned_map()
        code = self.library.cuTensorMapEncodeTiled(
            *(made, dtype, len(shape.sizes), ctypes.c_void_p(address), *shape.extents()),
            *(_array(ctypes.c_uint32, box), _array(ctypes.c_uint32, shape.steps)),
            *(0, shape.swizzle, shape.promotion, 0),
        )
        self.check(code, f"describing {shape.sizes} by {shape.strides} bytes in boxes of {box}")
        return ctypes.string_at(made, MAP_BYTES)

    def encode_im2col(
        self,
        dtype: int,
        address: int,
        shape: MapShape,
        corners: tuple[Sequence[int], Sequence[int]],
        channels: int,
        pixels: int,
    ) -> bytes:
        """A tensor map whose copies bring pixels of a convolution."""
        made = _aligned_map()
        code = self.library.cuTensorMapEncodeIm2col(
            *(made, dtype, len(shape.sizes), ctypes.c_void_p(address), *shape.extents()),
            *(_array(ctypes.c_int, corner) for corner in corners),
            *(channels, pixels, _array(ctypes.c_uint32, shape.steps)),
            *(0, shape.swizzle, shape.promotion, 0),
        )
        self.check(code, f"describing {shape.sizes} by {shape.strides} bytes, pixels {corners}")
        return ctypes.string_at(made, MAP_BYTES)


SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
"""Bytes -> CUDA's numbers."""


class MapShape:
    """What both kinds of tensor map say alike; dimensions innermost first."""

    def __init__(
        self,
        sizes: Sequence[int],
        strides: Sequence[int],
        steps: Sequence[int],
        swizzle: int,
        promotion: int,
    ) -> None:
        self.sizes, self.strides, self.steps = sizes, strides, steps
        self.swizzle, self.promotion = SWIZZLES[swizzle], PROMOTIONS[promotion]

    def extents(self) -> tuple[Any, Any]:
        return _array(ctypes.c_uint64, self.sizes), _array(ctypes.c_uint64, self.strides)


class HipDriver(Driver):
    """`libamdhip64`."""

    is_cuda = False

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        library.hipGetErrorString.restype = ctypes.c_char_p
        self.launch = library.hipModuleLaunchKernel
        self.clear = library.hipMemsetAsync

    def why(self, code: int) -> str:
        return str(self.library.hipGetErrorString(code).decode())

    def context(self, device: int) -> int:
        return 0

    def load(self, image: bytes, function: str, smem_bytes: int, cluster_size: int) -> int:
        module, found = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.library.hipModuleLoadData(ctypes.byref(module), image), "loading")
        named = self.library.hipModuleGetFunction(ctypes.byref(found), module, function.encode())
        self.check(named, f"finding {function}")
        return int(found.value or 0)

    def addresses(self) -> tuple[int, ...]:
        return _address(self.launch), _address(self.clear), 0, 0


def _address(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def _array(kind: Any, values: Sequence[int]) -> Any:
    return (kind * max(1, len(values)))(*values)


def _aligned_map() -> Any:
    """Room for a tensor map, which the driver wants at a multiple of 64 bytes."""
    room = ctypes.create_string_buffer(MAP_BYTES + 64)
    at = -ctypes.addressof(room) % 64
    return (ctypes.c_char * MAP_BYTES).from_buffer(room, at)


@cache
def driver_for(vendor: str) -> Driver:
    """The driver of `nvidia` or `amd`."""
    names = ("libcuda.so.1",) if vendor == "nvidia" else (*_mapped("libamdhip64"), *HIP_NAMES)
    for name in names:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        return CudaDriver(library) if vendor == "nvidia" else HipDriver(library)
    raise ExecutionError(f"there is no {names[-1]} here, the driver of {vendor}'s GPUs")


def _mapped(name: str) -> list[str]:
    """Libraries of this name that the process has open already: PyTorch brings AMD's along."""
    text = Path("/proc/self/maps").read_text() if Path("/proc/self/maps").exists() else ""
    return sorted(set(re.findall(rf"\s(/\S*/{name}\.so\S*)", text)))
