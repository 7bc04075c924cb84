"""Asks cuBLAS what it would do for a product, without running it.

Its tile, its split of K and its cluster change from one size to the next, and its speed with them.
`cublasLtMatmulAlgoGetHeuristic` tells them in about 0.2 ms, also for products that PyTorch hands to
the older `cublasGemmEx`: on an H200 the tile was that of the kernel that ran for 880 of 883.
"""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tilewise.core.arch import Arch
from tilewise.forks import make_lock
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.ops.gemm.vendor import scaled_mm_fits
from tilewise.ops.vendor import Tactic

log = logging.getLogger("tilewise")

_DTYPES = {"fp32": 0, "fp16": 2, "bf16": 14, "fp8": 28}
"""`cudaDataType_t`."""
_COMPUTE_32F = 68
_WORKSPACE_BYTES = {"sm_90": 32 << 20}
"""What PyTorch gives cuBLAS, by architecture. With another workspace it would choose otherwise, so
where this is not known it is not asked."""
_TRANS_A, _TRANS_B, _SCALE_A, _SCALE_B, _FAST_ACCUM = 3, 4, 17, 18, 25
_BATCH_COUNT, _BATCH_STRIDE = 5, 6
_PREFER_WORKSPACE = 1
_ATTRIBUTES = {
    "algorithm": (0, ctypes.c_int32),
    "tile": (1, ctypes.c_uint32),
    "split": (2, ctypes.c_uint32),
    "reduction": (3, ctypes.c_uint32),
    "variant": (5, ctypes.c_uint32),
    "stages": (6, ctypes.c_uint32),
    "cluster": (8, ctypes.c_uint16),
}
"""`cublasLtMatmulAlgoConfigAttributes_t`, with the type of each."""
_CLUSTERS = (
    *((1, 1), (1, 1), (1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2), (1, 4), (2, 4), (4, 4)),
    *((8, 1), (1, 8), (8, 2), (2, 8), (16, 1), (1, 16)),
)
"""`cublasLtClusterShape_t`; the first stands for the library's choice, odd sizes come later."""


def tactic(problem: GemmProblem, arch: Arch) -> Tactic:
    """What cuBLAS would do on the device of this process, an `arch`; empty where it is not asked.

    What it could say of a product never changes, but for an empty answer: the library may be busy.
    """
    workspace = _WORKSPACE_BYTES.get(arch.name)
    return _asked(problem, workspace) if workspace and _serves(problem) else {}


def _serves(problem: GemmProblem) -> bool:
    """Whether PyTorch hands a product to cuBLAS as it is."""
    if problem.dtype == "fp8":
        return bool(problem.flops) and scaled_mm_fits(problem)
    is_plain = problem.dtype in ("fp16", "bf16") and problem.out_dtype == problem.dtype
    return bool(problem.flops) and is_plain


def _asked(problem: GemmProblem, workspace: int) -> Tactic:
    import torch

    try:
        # Making a handle allocates, which a graph being captured must not see.
        if torch.cuda.is_current_stream_capturing():
            return {}
        library = _library(workspace)
        return library.ask(problem) if library else {}
    except (_CublasError, RuntimeError) as error:
        log.info("cuBLAS does not say what it would do for %s: %s", problem, error)
        return {}


class _CublasError(Exception):
    """A call of the library that did not succeed."""


class _Algorithm(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64 * 8)]


class _Heuristic(ctypes.Structure):
    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class _Library:
    """The cublasLt that PyTorch has loaded, with a handle."""

    def __init__(self, path: str, scale: Any, workspace: int) -> None:
        self.calls = ctypes.CDLL(path)
        self._lock = make_lock()
        self._handle = self._made("cublasLtCreate")
        self._preference = self._made("cublasLtMatmulPreferenceCreate")
        self._set(
            "MatmulPreference",
            self._preference,
            _PREFER_WORKSPACE,
            ctypes.c_size_t(workspace),
        )
        self._scale = scale

    def ask(self, problem: GemmProblem) -> Tactic:
        """The first choice of the library's heuristic."""
        with self._lock, _Things(self) as things:
            # Results are stored by columns there, so it computes the transpose: B times A.
            first, second, out = self._layouts(problem, things)
            product = things.product(problem, self._scale.data_ptr())
            found, count = _Heuristic(), ctypes.c_int(0)
            self._call(
                "cublasLtMatmulAlgoGetHeuristic",
                *(self._handle, product, first, second, out, out, self._preference),
                *(1, ctypes.byref(found), ctypes.byref(count)),
            )
        if not count.value or found.state:
            raise _CublasError("it has no algorithm")
        return self._read(found)

    def _layouts(self, problem: GemmProblem, things: _Things) -> tuple[Any, Any, Any]:
        m, n, k = problem.m, problem.n, problem.k
        a = (k, m) if problem.layout[0] == "r" else (m, k)
        b = (n, k) if problem.layout[1] == "r" else (k, n)
        return (
            things.layout(problem.dtype, b, problem.batch),
            things.layout(problem.dtype, a, problem.batch),
            things.layout(problem.out_dtype, (n, m), problem.batch),
        )

    def _read(self, found: _Heuristic) -> Tactic:
        values = {}
        for name, (attribute, kind) in _ATTRIBUTES.items():
            value, written = kind(), ctypes.c_size_t()
            self._call(
                "cublasLtMatmulAlgoConfigGetAttribute",
                *(ctypes.byref(found.algorithm), attribute, ctypes.byref(value)),
                *(ctypes.c_size_t(ctypes.sizeof(kind)), ctypes.byref(written)),
            )
            values[name] = float(value.value)
        tile = tiles().get(int(values.pop("tile")), (0, 0))
        place = int(values.pop("cluster"))
        cluster = _CLUSTERS[place] if place < len(_CLUSTERS) else (1, 1)
        return {
            **values,
            # Its rows are our columns.
            **dict(zip(("tile_n", "tile_m"), map(float, tile), strict=True)),
            **dict(zip(("cluster_n", "cluster_m"), map(float, cluster), strict=True)),
            "waves": float(found.waves),
            "workspace": float(found.workspace),
        }

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.calls, name)(*arguments)
        if status:
            raise _CublasError(f"{name} returned {status}")

    def _made(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        thing = ctypes.c_void_p()
        self._call(name, ctypes.byref(thing), *arguments)
        return thing

    def _set(self, kind: str, thing: Any, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._call(f"cublasLt{kind}SetAttribute", thing, attribute, ctypes.byref(value), size)


class _Things:
    """Descriptors of one question, destroyed at its end."""

    def __init__(self, library: _Library) -> None:
        self._library = library
        self._made: list[tuple[str, ctypes.c_void_p]] = []

    def __enter__(self) -> _Things:
        return self

    def __exit__(self, *_: object) -> None:
        for kind, thing in self._made:
            getattr(self._library.calls, f"cublasLt{kind}Destroy")(thing)

    def layout(self, dtype: str, shape: tuple[int, int], batch: int) -> ctypes.c_void_p:
        """Rows, columns; stored by columns without gaps."""
        rows, columns = shape
        thing = self._new(
            "MatrixLayout",
            *(_DTYPES[dtype], ctypes.c_uint64(rows), ctypes.c_uint64(columns)),
            ctypes.c_int64(rows),
        )
        if batch > 1:
            stride = ctypes.c_int64(rows * columns)
            self._library._set("MatrixLayout", thing, _BATCH_COUNT, ctypes.c_int32(batch))
            self._library._set("MatrixLayout", thing, _BATCH_STRIDE, stride)
        return thing

    def product(self, problem: GemmProblem, scale: int) -> ctypes.c_void_p:
        thing = self._new("MatmulDesc", _COMPUTE_32F, _DTYPES["fp32"])
        values: list[tuple[int, Any]] = [
            (_TRANS_A, ctypes.c_int32(problem.layout[1] == "c")),
            (_TRANS_B, ctypes.c_int32(problem.layout[0] == "c")),
        ]
        if problem.dtype == "fp8":
            values += [(name, ctypes.c_void_p(scale)) for name in (_SCALE_A, _SCALE_B)]
            values.append((_FAST_ACCUM, ctypes.c_int8(1)))
        for attribute, value in values:
            self._library._set("MatmulDesc", thing, attribute, value)
        return thing

    def _new(self, kind: str, *arguments: Any) -> ctypes.c_void_p:
        thing = self._library._made(f"cublasLt{kind}Create", *arguments)
        self._made.append((kind, thing))
        return thing


@cache
def _library(workspace: int) -> _Library | None:
    """The library, or None where PyTorch has loaded none or it does not answer."""
    import torch

    scale = torch.ones((), device="cuda")  # makes a context, which the next call wants
    torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]  # loads the library
    maps = Path("/proc/self/maps")
    found = re.search(r"\S*libcublasLt\.so\S*", maps.read_text()) if maps.exists() else None
    try:
        return _Library(found[0], scale, workspace) if found else None
    except (OSError, AttributeError, _CublasError) as error:
        log.info("cuBLAS cannot be asked what it would do: %s", error)
        return None


@cache
def tiles() -> dict[int, tuple[int, int]]:
    """`cublasLtMatmulTile_t`: number -> rows and columns.

    The first are listed; then come all sizes with columns in steps of 64, all with rows in steps
    of 64, and a few last ones, each without those that stand before.
    """
    return dict(enumerate(dict.fromkeys(_tiles()), 1))


def _tiles() -> Iterator[tuple[int, int]]:
    for area in (64, 128, 256, 512):
        yield from ((rows, area // rows) for rows in (8, 16, 32, 64) if 8 * rows <= area)
    yield from ((32, 32), (32, 64), (64, 32), (32, 128), (64, 64), (128, 32), (64, 128))
    yield from ((128, 64), (64, 256), (128, 128), (256, 64), (64, 512), (128, 256), (256, 128))
    yield from ((512, 64), (64, 96), (96, 64), (96, 128), (128, 160), (160, 128), (192, 128))
    yield from ((128, 192), (128, 96), (32, 256), (256, 32))
    for rows in range(8, 769, 8):
        yield from ((rows, n) for n in range(64, 769, 64) if rows * n <= 64 * 768)
    for rows in range(64, 769, 64):
        yield from ((rows, n) for n in range(8, 769, 8) if rows * n <= 256 * 256)
    yield from ((256, 512), (256, 1024), (512, 512), (512, 1024))
    yield from ((rows, 1) for rows in (4, 8, 16, 24, 32, 40, 48, 64, 128, 192, 256))
