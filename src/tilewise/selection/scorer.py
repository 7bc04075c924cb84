"""Scores a pool of kernels for a problem: compiled where there is a compiler, else in NumPy.

What depends on the kernels alone is computed once, when a pool is prepared; a selection fills in
the problem's side. Both ways give the same scores, bit for bit, and so the same ranking.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core.arch import Arch
from tilewise.core.compile_expr import Array, encode
from tilewise.core.features import KERNEL, MIXED, PROBLEM, Rows, columns
from tilewise.core.forest import Forest
from tilewise.core.kernel import Kernel
from tilewise.core.model import Model
from tilewise.core.problem import Problem
from tilewise.ops.fields import problem_values
from tilewise.ops.rows import arch_columns, kernel_columns
from tilewise.selection.codegen import BLOCK, Layout
from tilewise.selection.scorer_source import scorer_source

log = logging.getLogger("tilewise")

_CPU_FLAGS = {
    "avx512bw": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"),
    "avx2": ("-mavx2", "-mfma"),
}
# Contraction would round differently from NumPy.
_FLAGS = ("-O3", "-ffp-contract=off", "-fno-trapping-math", "-fno-strict-aliasing")


@dataclass(frozen=True, slots=True)
class Scores:
    """What a scorer says about one problem."""

    order: NDArray[np.int32]
    """Places in the pool, fastest first."""
    score: Array
    level: float
    """Times are 2 ** (level - score) microseconds."""
    distance: float
    """Octaves to the nearest measured problem."""
    nearest: int


class NumpyScorer:
    """The same scores without a compiler; slower."""

    def __init__(self, model: Model, kernels: Sequence[Kernel], arch: Arch) -> None:
        self.model, self.kernels, self.arch = model, tuple(kernels), arch
        self._kernels = kernel_columns(model, kernels)
        self._arch = arch_columns(model, arch)
        self._handicap = np.array([model.handicap(k.engine) for k in kernels])

    def rows(self, problem: Problem) -> Rows:
        fields = self.model.features.fields_of(PROBLEM)
        return Rows(
            columns(fields, [problem_values(problem)]),
            self._kernels,
            self._arch,
            np.zeros(len(self.kernels), np.int64),
            np.arange(len(self.kernels)),
        )

    def measure(self, problem: Problem) -> tuple[float, float, int]:
        """Level, distance to the nearest measured problem, and which that is."""
        rows = self.rows(problem)
        one = Rows(
            rows.problems, rows.kernels, rows.arch, rows.problem_index[:1], rows.kernel_index[:1]
        )
        level = float(self.model.predict("level", one)[0])
        axes = self.model.measured.axes
        found = self.model.features.evaluate(one, axes)
        here = np.array([found[a][0] for a in axes])
        step = self.model.measured.points - here
        far = np.zeros(len(step))
        for j in range(len(axes)):
            far = far + step[:, j] * step[:, j]
        which = int(np.argmin(far))
        return level, float(np.sqrt(far[which])), which

    def __call__(self, problem: Problem) -> Scores:
        rows = self.rows(problem)
        score = self.model.scores(rows)
        if "valid" in self.model.forests:
            score = np.where(self.model.predict("valid", rows) < 0, score - 1000.0, score)
        score = score - self._handicap
        order = np.argsort(-score, kind="stable").astype(np.int32)
        return Scores(order, score, *self.measure(problem))


class _Forest(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_int64) for n in ("trees", "features")),
        *((n, ctypes.c_void_p) for n in ("node_start", "leaf_start", "nodes", "leaves")),
        *((n, ctypes.c_double) for n in ("scale", "offset")),
        *((n, ctypes.c_void_p) for n in ("origin", "source", "thresholds", "counts")),
        ("kernel_bins", ctypes.c_void_p),
    ]


class _Context(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_int64) for n in ("kernels", "blocks", "has_base")),
        *((n, ctypes.c_void_p) for n in ("arch", "kernel_values", "handicap")),
        ("stride", ctypes.c_int64),
        *((n, ctypes.c_void_p) for n in ("rank", "valid")),
        ("level_trees", ctypes.c_int64),
        *((n, ctypes.c_void_p) for n in ("level_start", "level_value", "level_left")),
        *((n, ctypes.c_void_p) for n in ("level_right", "level_bound", "level_leaf")),
        ("level_leaf_start", ctypes.c_void_p),
        ("level_offset", ctypes.c_double),
        *((n, ctypes.c_int64) for n in ("points", "axes")),
        *((n, ctypes.c_void_p) for n in ("point", "axis_value", "order", "score", "info", "keys")),
    ]


_NODE = np.dtype(
    [("feature", "u2"), ("bound", "u1"), ("unused", "u1"), ("left", "u2"), ("right", "u2")]
)


class CompiledScorer:
    """One C call per problem. Not for several threads at once: results live in its buffers."""

    def __init__(
        self, model: Model, kernels: Sequence[Kernel], arch: Arch, library: ctypes.PyDLL
    ) -> None:
        self.model, self.kernels, self.arch = model, tuple(kernels), arch
        self.layout = Layout(model)
        self._library = library
        self._held: list[Any] = []
        """Arrays whose addresses C holds."""
        self.count = len(self.kernels)
        self.blocks = -(-self.count // BLOCK)
        self._fields = _packer(self.layout, model)
        self._problem = np.zeros(len(self.layout.problem_fields))
        self.order = np.zeros(self.blocks * BLOCK, np.int32)
        self.score = np.zeros(self.blocks * BLOCK)
        self.info = np.zeros(4)
        self._context = self._make_context()
        self._rank, self._measure = library.tw_rank, library.tw_measure
        address = ctypes.c_void_p
        for call in (self._rank, self._measure):
            call.argtypes, call.restype = (address, address), None
        self._at = ctypes.addressof(self._context)
        self._problem_at = self._problem.ctypes.data

    def rank(self, problem: Problem) -> None:
        """Fills `order`, `score` and `info`: nothing is allocated."""
        self._fields(problem, self._problem)
        self._rank(self._at, self._problem_at)

    def measure(self, problem: Problem) -> tuple[float, float, int]:
        """Level, distance to the nearest measured problem, and which that is."""
        self._fields(problem, self._problem)
        self._measure(self._at, self._problem_at)
        level, squared, which = self.info[:3].tolist()
        return level, float(np.sqrt(squared)), int(which)

    def __call__(self, problem: Problem) -> Scores:
        self.rank(problem)
        level, squared, which = self.info[:3].tolist()
        return Scores(
            self.order[: self.count].copy(),
            self.score[: self.count].copy(),
            level,
            squared**0.5,
            int(which),
        )

    def features(self, problem: Problem) -> dict[str, Array]:
        """Every mixed value and every value of the problem, as C computes them."""
        self._fields(problem, self._problem)
        names = self.layout.problem_values
        values = np.zeros(len(names) + 1)
        mixed = np.zeros((self.blocks, len(self.layout.mixed_outputs), BLOCK))
        call = self._library.tw_features
        call.argtypes, call.restype = (ctypes.c_void_p,) * 4, None
        call(self._at, self._problem_at, values.ctypes.data, mixed.ctypes.data)
        found: dict[str, Array] = {n: values[i : i + 1] for i, n in enumerate(names)}
        for i, name in enumerate(self.layout.mixed_outputs):
            found[name] = mixed[:, i, :].reshape(-1)[: self.count]
        return found

    def _hold(self, array: NDArray[Any]) -> int:
        kept = np.ascontiguousarray(array)
        self._held.append(kept)
        return int(kept.ctypes.data)

    def _make_context(self) -> _Context:
        model, layout = self.model, self.layout
        padded = [*range(self.count), *[0] * (self.blocks * BLOCK - self.count)]
        kernels = {n: v[padded] for n, v in kernel_columns(model, self.kernels).items()}
        arch = arch_columns(model, self.arch)
        every = np.arange(len(padded))
        rows = Rows({}, kernels, arch, every, every)
        values = model.features.evaluate(rows, layout.kernel_values)
        table = np.array([values[n] for n in layout.kernel_values]).reshape(-1, len(padded))
        context = _Context(
            kernels=self.count,
            blocks=self.blocks,
            has_base=int(model.has_base),
            arch=self._hold(np.array([arch[n] for n in layout.arch_fields], np.float64)),
            kernel_values=self._hold(table),
            handicap=self._hold(np.array([model.handicap(self.kernels[i].engine) for i in padded])),
            stride=len(padded),
            rank=self._forest(model.forests["rank"], rows),
            valid=self._forest(model.forests["valid"], rows) if "valid" in model.forests else None,
            points=len(model.measured.points),
            axes=len(model.measured.axes),
            point=self._hold(model.measured.points),
            axis_value=self._hold(self._places(model.measured.axes)),
            order=self._hold(self.order),
            score=self._hold(self.score),
            info=self._hold(self.info),
            keys=self._hold(np.zeros(4 * len(padded), np.uint64)),
        )
        self._set_level(context, model.forests["level"])
        return context

    def _places(self, names: Sequence[str]) -> NDArray[np.int32]:
        place = {n: i for i, n in enumerate(self.layout.problem_values)}
        return np.array([place[n] for n in names], np.int32)

    def _forest(self, forest: Forest, rows: Rows) -> int:
        features, layout = self.model.features, self.layout
        scopes = [features.scopes[n] for n in forest.features]
        origin = np.array([{KERNEL: 1, MIXED: 2}.get(s, 0) for s in scopes], np.int32)
        problem = {n: i for i, n in enumerate(layout.problem_values)}
        mixed = {n: i for i, n in enumerate(layout.mixed_outputs)}
        source = [
            mixed[n] if s == MIXED else 0 if s == KERNEL else problem[n]
            for n, s in zip(forest.features, scopes, strict=True)
        ]
        bounds = [self._hold(t) for t in forest.thresholds]
        size = len(rows)
        bins = np.zeros((self.blocks, len(forest.features), BLOCK), np.uint8)
        own = [n for n, s in zip(forest.features, scopes, strict=True) if s == KERNEL]
        values = features.evaluate(rows, own)
        for i, name in enumerate(forest.features):
            if name in values:
                found = np.searchsorted(forest.thresholds[i], values[name], side="left")
                bins[:, i, :] = found.astype(np.uint8).reshape(size // BLOCK, BLOCK)
        nodes = np.zeros(len(forest.node_feature), _NODE)
        nodes["feature"], nodes["bound"] = forest.node_feature, forest.node_bin
        sizes = np.repeat(np.diff(forest.node_start), np.diff(forest.node_start))
        for side, child in (("left", forest.left), ("right", forest.right)):
            nodes[side] = np.where(child >= 0, child, sizes + ~child)
        made = _Forest(
            trees=forest.num_trees,
            features=len(forest.features),
            node_start=self._hold(forest.node_start),
            leaf_start=self._hold(forest.leaf_start),
            nodes=self._hold(nodes),
            leaves=self._hold(np.concatenate([forest.leaf, np.zeros(32, np.int32)])),
            scale=forest.scale,
            offset=forest.offset,
            origin=self._hold(origin),
            source=self._hold(np.array(source, np.int32)),
            thresholds=self._hold(np.array(bounds, np.uint64)),
            counts=self._hold(np.array([len(t) for t in forest.thresholds], np.int32)),
            kernel_bins=self._hold(bins),
        )
        self._held.append(made)
        return ctypes.addressof(made)

    def _set_level(self, context: _Context, forest: Forest) -> None:
        places = self._places(forest.features)
        bounds = [
            forest.thresholds[f][b]
            for f, b in zip(forest.node_feature, forest.node_bin, strict=True)
        ]
        context.level_trees = forest.num_trees
        context.level_start = self._hold(forest.node_start)
        context.level_value = self._hold(
            places[forest.node_feature] if len(places) else np.zeros(0, np.int32)
        )
        context.level_left = self._hold(forest.left)
        context.level_right = self._hold(forest.right)
        context.level_bound = self._hold(np.array(bounds, np.float64))
        context.level_leaf = self._hold(forest.leaf * forest.scale)
        context.level_leaf_start = self._hold(forest.leaf_start)
        context.level_offset = forest.offset


def _packer(layout: Layout, model: Model) -> Callable[[Problem, Any], None]:
    """Writes a problem's fields, numbers first, into a buffer; text becomes codes."""
    words = model.features.words
    names = [n.removeprefix("p_") for n in layout.problem_fields]
    text = [n for n in layout.problem_fields if n in words]
    codes = [{w: encode(w, words[n]) for w in words[n]}.get for n in text]
    split = len(names) - len(text)
    write = Struct(f"{len(names)}d").pack_into
    # A getter of a single name gives a bare value, so one name is asked for twice.
    numbers = attrgetter(*names[:split], *names[:1]) if split else None
    texts = attrgetter(*names[split:], *names[-1:]) if text else None

    def pack(problem: Problem, out: Any) -> None:
        values = numbers(problem)[:split] if numbers else ()
        if texts:
            write(
                out,
                0,
                *values,
                *[code(w, 0.0) for code, w in zip(codes, texts(problem))],  # noqa: B905
            )
        else:
            write(out, 0, *values)

    return pack


Scorer = CompiledScorer | NumpyScorer
_told: set[str] = set()


def make_scorer(
    model: Model, kernels: Sequence[Kernel], arch: Arch, *, compiled: bool | None = None
) -> Scorer:
    """The compiled scorer, or NumPy's where none can be compiled; `compiled` insists on one."""
    if compiled is not False and kernels:
        library, why = _compile(model)
        if library is not None:
            return CompiledScorer(model, kernels, arch, library)
        if compiled:
            from tilewise.errors import BuildError

            raise BuildError("the scorer does not compile", log=why)
        if why not in _told:
            _told.add(why)
            log.warning("selection falls back to NumPy, which is slower: %s", why.splitlines()[0])
    return NumpyScorer(model, kernels, arch)


def _compile(model: Model) -> tuple[ctypes.PyDLL | None, str]:
    from tilewise.engines.toolchain import Unit, compile_units, why_no_compiler
    from tilewise.errors import BuildError

    why = why_no_compiler()
    if why is not None:
        return None, why
    unit = Unit(source=scorer_source(Layout(model)), flags=(*_FLAGS, *_isa_flags()))
    try:
        (made,) = compile_units([unit])
    except BuildError as error:
        return None, str(error)
    if made.library is None:
        return None, made.log
    # Holding the interpreter's lock is cheaper than giving it back for a few microseconds.
    return ctypes.PyDLL(str(made.library)), ""


def _isa_flags() -> tuple[str, ...]:
    from tilewise.engines.device import detect

    arch = detect("cpu")
    if arch.has("avx512bw"):
        return _CPU_FLAGS["avx512bw"]
    return _CPU_FLAGS["avx2"] if arch.has("avx2") else ()
