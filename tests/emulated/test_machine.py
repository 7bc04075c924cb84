"""The emulated GPU itself: right where a kernel is right, and loud where one is wrong."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import emulation
import numpy as np
import pytest
from emulation import HERE, OPS, EmulationError

from tilewise.ops.launch import CudaSource, Pointer, Step, TensorMap

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes are found like kernels."""
    monkeypatch.setattr(emulation, "OPS", HERE)


def probe(
    function: str,
    signature: tuple[str, ...],
    arguments: tuple[Any, ...],
    tensors: list[np.ndarray[Any, Any]],
    mode: int = 0,
    seed: int = 0,
    threads: int = 128,
    cluster: int = 1,
) -> list[np.ndarray[Any, Any]]:
    source = CudaSource(
        file="probes/probes.cuh",
        function=function,
        signature={str(i): kind for i, kind in enumerate(signature)},
        constants={"MODE": mode},
    )
    step = Step(
        source=source,
        grid=(cluster, 1, 1),
        cluster=(cluster, 1, 1),
        threads=threads,
        smem_bytes=32 * 1024,
        arguments=arguments,
    )
    launch = SimpleNamespace(steps=(step,), workspace_bytes=0, zeroed_bytes=0)
    return emulation.run(launch, tensors, seed=seed)


def bf16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Small whole numbers, exact in bf16."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def whole(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.integers(-8, 9, shape).astype(np.float32)


def copy_box(
    mode: int = 0, seed: int = 0, corner: tuple[int, int, int] = (16, 8, 4)
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    tensor, result = bf16(whole(5, 13, 72)), np.full((5, 13, 72), 0xFFFF, np.uint16)
    maps = [
        TensorMap(
            tensor=t,
            dtype="bf16",
            sizes=(72, 13, 5),
            strides=(144, 144 * 13),
            box=(64, 8, 2),
            swizzle=128,
        )
        for t in (0, 1)
    ]
    signature = ("map", "map", "i32", "i32", "i32")
    _, out = probe("copy_box", signature, (*maps, *corner), [tensor, result], mode, seed)
    return tensor, out


@pytest.mark.parametrize("seed", range(4))
def test_boxes_are_clipped_at_the_tensors_edge(seed: int) -> None:
    given, out = copy_box(seed=seed)
    expected = np.full_like(given, 0xFFFF)
    expected[4:, 8:, 16:] = given[4:, 8:, 16:]
    assert (out == expected).all()


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        (1, "deadlock.*lacks 0 of 1 arrivals and 16 bytes"),
        (2, "that nothing has written"),
        (3, "without a fence"),
        (4, "ended while 1 copies were under way"),
        (5, "no multiple of 128"),
        (6, "thread 0: a division by zero"),
    ],
)
def test_wrong_copies_are_found(mode: int, why: str) -> None:
    with pytest.raises(EmulationError, match=re.compile(why, re.DOTALL)):
        copy_box(mode)


@pytest.mark.parametrize(
    ("corner", "why"),
    [
        ((4, 8, 0), "no multiple of 16 bytes"),
        ((16, 8, -1), "a TMA store begins at -1 of 5"),
        ((16, 13, 0), "a TMA store begins at 13 of 13"),
    ],
)
def test_copies_begin_where_hardware_lets_them(corner: tuple[int, int, int], why: str) -> None:
    with pytest.raises(EmulationError, match=why):
        copy_box(corner=corner)


def test_warps_multiply() -> None:
    a, b = whole(16, 16), whole(8, 16)
    pointers = tuple(Pointer(tensor=t) for t in range(3))
    given = [bf16(a), bf16(b), np.zeros((16, 8), np.float32)]
    *_, c = probe("multiply_warp", ("*",) * 3, pointers, given, threads=32)
    assert (c == a @ b.T).all()
    with pytest.raises(EmulationError, match="deadlock"):
        probe("multiply_warp", ("*",) * 3, pointers, given, mode=1, threads=32)


def multiply_group(ways: str, mode: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Operands by the reduction (k) or across it; rows of 64 elements either way."""
    a, b = whole(64, 64), whole(64, 16) if ways[1] == "k" else whole(64, 64)
    left = a if ways[0] == "k" else a.T
    right = b.T if ways[1] == "k" else b
    given = [bf16(np.ascontiguousarray(m)) for m in (left, right)]
    maps = tuple(
        TensorMap(
            tensor=t,
            dtype="bf16",
            sizes=(64, len(given[t])),
            strides=(128,),
            box=(64, len(given[t])),
            swizzle=128,
        )
        for t in (0, 1)
    )
    tensors = [*given, np.full((64, 16), np.nan, np.float32)]
    arguments = (*maps, Pointer(tensor=2))
    *_, c = probe(f"multiply_{ways}", ("map", "map", "*"), arguments, tensors, mode)
    return c, a @ b[:, :16]


@pytest.mark.parametrize("ways", ["kk", "mk", "kn"])
def test_warpgroups_multiply(ways: str) -> None:
    c, expected = multiply_group(ways)
    assert (c == expected).all()


def test_sums_that_are_read_early_are_wrong() -> None:
    with pytest.raises(EmulationError, match="ended while 4 copies"):
        multiply_group("kk", mode=1)


def gather(mode: int = 0, seed: int = 0) -> None:
    given, result = whole(64, 4), np.full((64, 4), np.nan, np.float32)
    arguments = (Pointer(tensor=0), Pointer(tensor=1), 40)
    _, out = probe("gather", ("*", "*", "i32"), arguments, [given, result], mode, seed, threads=64)
    expected = np.where(np.arange(64)[:, None] < 40, given, 0)[::-1]
    assert (out[:, [0, 3]] == expected[:, [0, 3]]).all()


@pytest.mark.parametrize("seed", range(4))
def test_gathered_copies_arrive(seed: int) -> None:
    gather(seed=seed)


@pytest.mark.parametrize(
    ("mode", "why"), [(1, "deadlock"), (2, "nothing has written"), (3, "outside of every tensor")]
)
def test_wrong_gathers_are_found(mode: int, why: str) -> None:
    with pytest.raises(EmulationError, match=why):
        gather(mode)


def move_registers(mode: int = 0) -> None:
    given = [np.zeros(384, np.int32)]
    (told,) = probe("registers", ("*",), (Pointer(tensor=0),), given, mode, threads=384)
    assert told.all()


def test_registers_move() -> None:
    move_registers()


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        (1, "deadlock.*64 registers a thread that nobody gives up"),
        (2, "raised to 160 registers, a thread has 168"),
        (3, "deadlock.*the rest of warpgroup 2"),
    ],
)
def test_registers_that_nobody_gives_up_are_waited_for_in_vain(mode: int, why: str) -> None:
    with pytest.raises(EmulationError, match=re.compile(why, re.DOTALL)):
        move_registers(mode)


def exchange(mode: int = 0, seed: int = 0) -> None:
    given, result = whole(64, 8), np.full((2, 64, 8), np.nan, np.float32)
    tensor_map = TensorMap(tensor=0, dtype="fp32", sizes=(8, 64), strides=(32,), box=(8, 32))
    arguments = (tensor_map, Pointer(tensor=1))
    _, out = probe("exchange", ("map", "*"), arguments, [given, result], mode, seed, 32, 2)
    assert (out == given).all()


@pytest.mark.parametrize("seed", range(4))
def test_clusters_send_to_each_other(seed: int) -> None:
    exchange(seed=seed)


def test_some_order_of_events_finds_a_race() -> None:
    """Nobody waits until both blocks have their barriers: right when they happen to."""
    with pytest.raises(EmulationError, match="where no barrier was made"):
        for seed in range(96):
            exchange(mode=1, seed=seed)


def double_twice(mode: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Two steps that overlap; the second reads what the first one writes."""
    given = whole(128)
    tensors = [given, np.zeros_like(given), np.zeros_like(given)]

    def step(at: int, mode: int) -> Step:
        source = CudaSource(
            file="probes/probes.cuh",
            function="doubled",
            signature={"from": "*", "to": "*"},
            constants={"MODE": mode},
        )
        pointers = Pointer(tensor=at), Pointer(tensor=at + 1)
        return Step(source=source, grid=(1, 1, 1), threads=128, arguments=pointers, overlaps=at > 0)

    steps = (step(0, 0), step(1, mode))
    launch = SimpleNamespace(steps=steps, workspace_bytes=0, zeroed_bytes=0)
    return given, emulation.run(launch, tensors)[2]


def test_steps_that_overlap_wait_for_what_they_read() -> None:
    given, out = double_twice()
    assert (out == 4 * given).all()
    given, out = double_twice(mode=1)
    assert (out != 4 * given).any(), "what is read too early is not there yet"
    with pytest.raises(EmulationError, match="without waiting for the steps before it"):
        double_twice(mode=2)


def test_every_word_of_the_vocabulary_is_emulated() -> None:
    """A function that ptx.cuh gains, the emulation gains too."""
    ours, theirs = (
        set(re.findall(r"(?<![\w.#])([a-z]\w*)\(", (root / "cuda/ptx.cuh").read_text()))
        for root in (HERE / "include", OPS)
    )
    words = set(re.findall(r"^DEVICE [\w ]+?(\w+)\(", (OPS / "cuda/ptx.cuh").read_text(), re.M))
    assert words and words <= ours, f"missing: {sorted(words - ours)}"
    assert words <= theirs
