"""Arrays of NumPy and tensors of PyTorch, seen alike: address, shape, strides, dtype."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from tilewise.core.arch import amd_name, known_archs, load_arch
from tilewise.core.dtypes import OPERAND_DTYPES
from tilewise.errors import TensorError

NAMES = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "bf8",
    "int8": "int8",
    "int32": "int32",
}
"""Types as PyTorch names them, and NumPy with ml_dtypes -> our names."""
_STORED = {ours: native for native, ours in NAMES.items()} | {"tf32": "float32"}
"""How our types lie in memory, by those names."""
# The encodings of CDNA 3's matrix units; there fp8 and bf8 are these, elsewhere never.
_FNUZ = {"float8_e4m3fnuz": "fp8", "float8_e5m2fnuz": "bf8"}
_numpy_names: dict[Any, str] = {}
_torch_names: dict[Any, str] = {}


@dataclass(frozen=True, slots=True)
class TensorView:
    """Where a tensor lives. Strides are in elements."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str
    """`cpu` or a PyTorch device such as `cuda:0`."""

    @property
    def extent(self) -> tuple[int, int]:
        """The lowest and one past the highest element offset that the view touches."""
        if 0 in self.shape:
            return 0, 0
        reach = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        return sum(min(0, r) for r in reach), sum(max(0, r) for r in reach) + 1


def is_torch(tensor: Any) -> bool:
    """Whether `tensor` is PyTorch's, without importing PyTorch."""
    return hasattr(tensor, "data_ptr") and hasattr(tensor, "stride")


LOW = 2**40
"""Freed storage begins at 0: below this an address may be nothing but an offset into it."""


def require_memory(*tensors: Any) -> None:
    """Raises where PyTorch tensors have elements but their storage was freed."""
    for tensor in tensors:
        # Sizes come last: tracing turns them into tensors.
        is_low = tensor.data_ptr() < LOW and tensor.device.type in ("cpu", "cuda")
        if is_low and not tensor.untyped_storage().data_ptr() and tensor.numel():
            raise TensorError(
                f"the storage of a tensor of shape {tuple(tensor.shape)} was freed; gather or "
                "allocate it before the call"
            )


def view(tensor: Any) -> TensorView:
    """`tensor` as address, shape, strides and dtype; nothing is copied."""
    if isinstance(tensor, np.ndarray):
        return _view_array(tensor)
    if is_torch(tensor):
        return _view_tensor(tensor)
    raise TensorError(
        f"{type(tensor).__name__} is not a tensor tilewise knows; pass a NumPy array or a "
        "PyTorch tensor"
    )


def _view_array(array: np.ndarray[Any, Any]) -> TensorView:
    if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
        raise TensorError("a masked array has no kernels; fill it first: array.filled(0)")
    # Asking NumPy for a dtype's name takes longer than all the rest, hence the dictionary.
    name = _numpy_names.get(array.dtype)
    if name is None:
        name = _numpy_names[array.dtype] = _known(array.dtype.name)
    size = array.itemsize
    if not array.dtype.isnative or not array.flags.aligned or any(s % size for s in array.strides):
        raise TensorError("the array's bytes are swapped or unaligned; pass a plain copy of it")
    strides = tuple(s // size for s in array.strides)
    return TensorView(array.ctypes.data, array.shape, strides, name, "cpu")


def _view_tensor(tensor: Any) -> TensorView:
    name = _torch_names.get(tensor.dtype)
    if name is None:
        spelled = str(tensor.dtype).removeprefix("torch.")
        name = _torch_names[tensor.dtype] = _FNUZ.get(spelled) or _known(spelled)
    if not is_strided(tensor):
        raise TensorError(f"a {tensor.layout} tensor is not dense; convert it first")
    device = tensor.device
    if device.type not in ("cpu", "cuda"):
        raise TensorError(f"a tensor is on {device}; tilewise works on cpu and cuda devices")
    if not is_native(name, tensor):
        raise TensorError(
            f"a tensor on {device} is {tensor.dtype}; {name} is {torch_dtype(name, device)} there: "
            "convert it"
        )
    address = tensor.data_ptr()
    if address < LOW:
        require_memory(tensor)
    return TensorView(address, tuple(tensor.shape), tensor.stride(), name, str(device))


def _known(name: str) -> str:
    if name not in NAMES:
        raise _unsupported(name)
    return NAMES[name]


def require_operand(name: str) -> None:
    """Raises where what is stored so may only be a result; float64 is what NumPy takes unasked."""
    if name not in OPERAND_DTYPES:
        raise _unsupported(next(native for native, ours in NAMES.items() if ours == name))


def _unsupported(name: str) -> TensorError:
    operands = [native for native, ours in NAMES.items() if ours in OPERAND_DTYPES]
    return TensorError(
        f"dtype {name} is not supported; use one of {', '.join(operands)}, as by "
        "x.astype('float32')"
    )


def is_native(name: str, tensor: Any) -> bool:
    """Whether the tensor's dtype is what its device means by `name`: 8-bit encodings differ."""
    return name not in ("fp8", "bf8") or tensor.dtype == torch_dtype(name, tensor.device)


def torch_dtype(name: str, device: Any) -> Any:
    """PyTorch's dtype for `name` on a device, whose 8-bit encodings may be its own."""
    import torch

    place = torch.device(device)
    if name in _FNUZ.values() and place.type == "cuda" and _is_fnuz(place.index):
        return next(getattr(torch, native) for native, ours in _FNUZ.items() if ours == name)
    return getattr(torch, _STORED[name])


@cache
def _is_fnuz(index: int | None) -> bool:
    """Whether the GPU's 8-bit floating point is the FNUZ kind."""
    import torch

    name = amd_name(torch.cuda.get_device_properties(index))
    return name in known_archs() and load_arch(name).has("fp8_fnuz")


def is_strided(tensor: Any) -> bool:
    """Whether a PyTorch tensor's elements lie at strides, unlike a sparse one's."""
    return tensor.layout is _strided()


@cache
def _strided() -> Any:
    import torch

    return torch.strided


@dataclass(frozen=True, slots=True)
class Storage:
    """How an op wants a tensor in memory."""

    axes: tuple[int, ...]
    """Logical axes from outermost to innermost."""
    dense: int
    """How many innermost axes must be packed without gaps; further out any stride will do."""

    def holds(self, tensor: TensorView) -> bool:
        """Whether `tensor` is stored this way."""
        expected, outer = 1, len(self.axes) - self.dense
        for position in range(len(self.axes) - 1, -1, -1):
            size, stride = tensor.shape[self.axes[position]], tensor.strides[self.axes[position]]
            if position >= outer:
                if size > 1 and stride != expected:
                    return False
                expected *= size
            elif size > 1 and stride < expected and not (position == 0 and stride == 0):
                return False  # overlapping or backwards
            else:
                expected = max(expected, stride * size)
        return True


def empty(sample: Any, shape: tuple[int, ...], dtype: str, storage: Storage) -> Any:
    """A new tensor of `sample`'s library and device, stored as asked."""
    stored = tuple(shape[axis] for axis in storage.axes)
    back = tuple(storage.axes.index(axis) for axis in range(len(shape)))
    try:
        if is_torch(sample):
            import torch

            kind = torch_dtype(dtype, sample.device)
            made = torch.empty(stored, dtype=kind, device=sample.device)
            return made.permute(back)
        return np.empty(stored, dtype=numpy_dtype(dtype)).transpose(back)
    except (MemoryError, RuntimeError, ValueError) as error:
        raise TensorError(f"no memory for a {dtype} tensor of shape {shape}: {error}") from None


def stored_copy(tensor: Any, storage: Storage) -> Any:
    """The same values, stored as asked."""
    seen = view(tensor)
    made = empty(tensor, seen.shape, seen.dtype, storage)
    made[...] = tensor
    return made


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype for `name`; bf16 and fp8 need the ml_dtypes package."""
    known = _STORED[name]
    if name in ("bf16", "fp8", "bf8"):
        try:
            import ml_dtypes
        except ImportError:
            raise TensorError(
                f"NumPy has no {name}; install ml_dtypes or pass PyTorch tensors"
            ) from None
        known = getattr(ml_dtypes, known)
    found: np.dtype[Any] = np.dtype(known)
    return found
