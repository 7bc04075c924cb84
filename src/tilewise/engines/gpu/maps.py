"""Tensor maps: encoded by the driver once for an address, and remembered."""

from __future__ import annotations

from tilewise.core.dtypes import dtype as element
from tilewise.engines.gpu.driver import CudaDriver, MapShape
from tilewise.engines.gpu.objects import Box
from tilewise.errors import ExecutionError
from tilewise.ops.launch import TensorMap

MAX_REMEMBERED = 1024
TYPES = {"fp16": 6, "fp32": 7, "tf32": 7, "bf16": 9, "int32": 3}
"""CUDA's numbers of element types; those of 8 bits are bytes."""


class TensorMaps(dict[int, bytes]):
    """Maps of one kind, by the tensor's address; recent ones are kept."""

    def __init__(self, wanted: TensorMap, driver: CudaDriver, box: Box | None = None) -> None:
        super().__init__()
        self._map = wanted
        self._driver = driver
        self._dtype = type_of(wanted.dtype)
        steps = wanted.steps or (1,) * len(wanted.sizes)
        swizzle = map_swizzle(wanted, box)
        self._shape = MapShape(wanted.sizes, wanted.strides, steps, swizzle, wanted.promotion)
        self._box = map_box(wanted, box)

    def __missing__(self, address: int) -> bytes:
        if len(self) >= MAX_REMEMBERED:
            self.clear()
        made = self[address] = self._encode(address + self._map.offset)
        return made

    def _encode(self, at: int) -> bytes:
        walk = self._map.im2col
        if walk is None:
            return self._driver.encode_tiled(self._dtype, at, self._shape, self._box)
        # What a compiler settled about an im2col map is channels, then pixels.
        channels, pixels = self._box or (walk.channels, walk.pixels)
        corners = (walk.lower, walk.upper)
        return self._driver.encode_im2col(self._dtype, at, self._shape, corners, channels, pixels)


def map_box(wanted: TensorMap, box: Box | None) -> tuple[int, ...]:
    """Elements that a copy brings, innermost first; a compiler's word comes before the launch's."""
    return wanted.box if box is None else box.sizes[::-1]


def map_swizzle(wanted: TensorMap, box: Box | None) -> int:
    """In bytes; likewise."""
    return wanted.swizzle if box is None else box.swizzle


def type_of(dtype: str) -> int:
    """CUDA's number of an element type."""
    if element(dtype).bytes == 1:
        return 0
    try:
        return TYPES[dtype]
    except KeyError:
        raise ExecutionError(f"TMA has no elements of {dtype}; it has {', '.join(TYPES)}") from None
