"""The compiled scorer: arrays that C reads, laid out once per pool, and one call per problem."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from operator import attrgetter
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.core.arch import Arch
from tilewise.core.compile_expr import Array, encode
from tilewise.core.features import ABSENT, KERNEL, MIXED, Rows
from tilewise.core.forest import Forest
from tilewise.core.kernel import Kernel
from tilewise.core.model import VENDOR, Model
from tilewise.core.problem import Problem
from tilewise.ops.columns import arch_columns, kernel_columns
from tilewise.selection.asking import Ask, asker
from tilewise.selection.choice import Scores
from tilewise.selection.codegen import BLOCK, Layout
from tilewise.selection.steps import nodes_of, steps_of


class _Forest(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_int64) for n in ("trees", "features")),
        *((n, ctypes.c_void_p) for n in ("byte_start", "step_start", "leaf_start")),
        *((n, ctypes.c_void_p) for n in ("steps", "leaves")),
        *((n, ctypes.c_double) for n in ("scale", "offset")),
        *((n, ctypes.c_void_p) for n in ("origin", "source", "thresholds", "counts")),
        ("kernel_bins", ctypes.c_void_p),
    ]


class _Context(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_int64) for n in ("kernels", "blocks")),
        ("share", ctypes.c_double),
        *((n, ctypes.c_void_p) for n in ("arch", "kernel_values", "handicap")),
        ("stride", ctypes.c_int64),
        *((n, ctypes.c_void_p) for n in ("rank", "valid", "vendor", "is_vendor")),
        ("level_trees", ctypes.c_int64),
        *((n, ctypes.c_void_p) for n in ("level_start", "level_value", "level_left")),
        *((n, ctypes.c_void_p) for n in ("level_right", "level_bound", "level_leaf")),
        ("level_leaf_start", ctypes.c_void_p),
        ("level_offset", ctypes.c_double),
        *((n, ctypes.c_int64) for n in ("points", "axes")),
        *((n, ctypes.c_void_p) for n in ("point", "axis_value", "far")),
        *((n, ctypes.c_void_p) for n in ("order", "score", "info", "keys")),
        *((n, ctypes.c_void_p) for n in ("lead", "walk", "shuffled")),
    ]


class _Walk(ctypes.Structure):
    _fields_ = [
        ("trees", ctypes.c_int64),
        *((n, ctypes.c_void_p) for n in ("node_start", "leaf_start", "nodes", "leaves")),
    ]


LEAD = 64
"""Trees that pick the block of kernels among which the whole forest chooses. With 16 already all of
600 random products of even sizes were chosen for as by ranking all (sm_90_gemm)."""


class Tables:
    """All that C reads of a model and a pool, laid out once; `held` keeps the arrays alive."""

    def __init__(self, layout: Layout, kernels: Sequence[Kernel], arch: Arch) -> None:
        self.layout, self.kernels, self.arch = layout, tuple(kernels), arch
        self.model = layout.model
        self.held: list[Any] = []
        """Arrays and structs whose addresses C holds."""
        self.count = len(self.kernels)
        self.blocks = -(-self.count // BLOCK)
        self.order = np.zeros(self.blocks * BLOCK, np.int32)
        self.score = np.zeros(self.blocks * BLOCK)
        self.info = np.zeros(3)
        self.context = self._make_context()

    def _hold(self, array: NDArray[Any]) -> int:
        kept = np.ascontiguousarray(array)
        self.held.append(kept)
        return int(kept.ctypes.data)

    def _make_context(self) -> _Context:
        model, layout = self.model, self.layout
        padded = [*range(self.count), *[0] * (self.blocks * BLOCK - self.count)]
        kernels = {n: v[padded] for n, v in kernel_columns(model, self.kernels).items()}
        arch = arch_columns(model.features, self.arch)
        every = np.arange(len(padded))
        rows = Rows({}, kernels, arch, every, every)
        values = layout.features.evaluate(rows, layout.kernel_values)
        table = np.array([values[n] for n in layout.kernel_values]).reshape(-1, len(padded))
        context = _Context(
            kernels=self.count,
            blocks=self.blocks,
            share=model.share,
            arch=self._hold(np.array([arch[n] for n in layout.arch_fields], np.float64)),
            kernel_values=self._hold(table),
            handicap=self._hold(model.handicaps([self.kernels[i] for i in padded])),
            stride=len(padded),
            rank=self._forest(model.forests["rank"], rows),
            **{
                name: self._forest(model.forests[name], rows)
                for name in ("valid", VENDOR)
                if name in model.forests
            },
            is_vendor=self._hold(
                np.array([self.kernels[i].engine == VENDOR for i in padded], np.uint8)
            ),
            points=len(model.measured.points),
            axes=len(model.measured.axes),
            point=self._hold(model.measured.points.T),
            axis_value=self._hold(self._places(model.measured.axes)),
            far=self._hold(np.zeros(len(model.measured.points))),
            order=self._hold(self.order),
            score=self._hold(self.score),
            info=self._hold(self.info),
            keys=self._hold(np.zeros(4 * len(padded), np.uint64)),
        )
        self._set_level(context, model.forests["level"])
        self._set_lead(context, rows)
        return context

    def _set_lead(self, context: _Context, rows: Rows) -> None:
        """What choosing needs besides; a model whose scores do not start from whole estimates, or
        with a forest of failures, has to rank all."""
        model = self.model
        random = np.random.default_rng(0)
        points = random.permutation(model.measured.points)
        context.shuffled = self._hold(points.T)
        nodes = nodes_of(model.forests[VENDOR]) if VENDOR in model.forests else None
        if model.share < 1 or "valid" in model.forests or (VENDOR in model.forests) != bool(nodes):
            return
        if nodes is not None:
            made = _Walk(
                trees=model.forests[VENDOR].num_trees,
                **{n: self._hold(getattr(nodes, n)) for n in nodes.__slots__},
            )
            self.held.append(made)
            context.walk = ctypes.addressof(made)
        rank = model.forests["rank"]
        context.lead = self._forest(rank.first(min(LEAD, rank.num_trees)), rows)

    def _places(self, names: Sequence[str]) -> NDArray[np.int32]:
        place = {n: i for i, n in enumerate(self.layout.problem_values)}
        return np.array([place[n] for n in names], np.int32)

    def _forest(self, forest: Forest, rows: Rows) -> int:
        features, layout = self.layout.features, self.layout
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
        steps = steps_of(forest)
        made = _Forest(
            trees=forest.num_trees,
            features=len(forest.features),
            byte_start=self._hold(steps.byte_start),
            step_start=self._hold(steps.step_start),
            leaf_start=self._hold(steps.leaf_start),
            steps=self._hold(steps.steps),
            # As many as add_leaves loads for a tree can always be loaded.
            leaves=self._hold(np.concatenate([steps.leaves, np.zeros(128, np.int32)])),
            scale=forest.scale,
            offset=forest.offset,
            origin=self._hold(origin),
            source=self._hold(np.array(source, np.int32)),
            thresholds=self._hold(np.array(bounds, np.uint64)),
            counts=self._hold(np.array([len(t) for t in forest.thresholds], np.int32)),
            kernel_bins=self._hold(bins),
        )
        self.held.append(made)
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


class CompiledScorer:
    """One C call per problem. Not for several threads at once: results live in its buffers."""

    def __init__(
        self, layout: Layout, kernels: Sequence[Kernel], arch: Arch, library: ctypes.CDLL
    ) -> None:
        self._tables = tables = Tables(layout, kernels, arch)
        self.layout, self.kernels, self.arch = layout, tables.kernels, arch
        self.model = model = layout.model
        self._library = library
        self.count, self.blocks = tables.count, tables.blocks
        self.order, self.score, self.info = tables.order, tables.score, tables.info
        self._fields = _packer(self.layout, model, asker(model.features, kernels, arch))
        self._problem = np.zeros(len(self.layout.problem_fields))
        self._context = tables.context
        self._rank = library.tw_rank
        self._level, self._nearest = library.tw_level, library.tw_nearest
        for call in (self._rank, self._level, self._nearest):
            call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_void_p), None
        self._lead, self._near = library.tw_lead, library.tw_near
        self._lead.argtypes, self._lead.restype = (ctypes.c_void_p,) * 3, None
        self._near.argtypes, self._near.restype = (*(ctypes.c_void_p,) * 2, ctypes.c_double), None
        self._at = ctypes.addressof(self._context)
        self._problem_at = self._problem.ctypes.data

    def rank(self, problem: Problem) -> None:
        """Fills `order` and `score`: nothing is allocated."""
        self._fields(problem, self._problem)
        self._rank(self._at, self._problem_at)

    @property
    def can_lead(self) -> bool:
        """Whether picking a block first spares anything, and is known to miss nothing."""
        return self.blocks > 1 and bool(self._context.lead)

    def lead(self, problem: Problem, asked: NDArray[np.uint8]) -> Scores:
        """The best of the kernels that are `asked` about, a block of them, scored like all."""
        self._fields(problem, self._problem)
        self._lead(self._at, self._problem_at, asked.ctypes.data)
        order = self.order[: int(self.info[1])].copy()
        return Scores(order, self.score[order], float(self.info[0]))

    def is_near(self, problem: Problem, reach: float) -> bool:
        """Whether a measured problem lies within so many octaves."""
        self._fields(problem, self._problem)
        self._near(self._at, self._problem_at, reach * reach)
        return bool(self.info[1])

    def level(self, problem: Problem) -> float:
        """What turns scores into times."""
        self._fields(problem, self._problem)
        self._level(self._at, self._problem_at)
        return float(self.info[0])

    def nearest(self, problem: Problem) -> tuple[float, int]:
        """Octaves to the nearest measured problem, and which that is."""
        self._fields(problem, self._problem)
        self._nearest(self._at, self._problem_at)
        return float(self.info[1]) ** 0.5, int(self.info[2])

    def __call__(self, problem: Problem) -> Scores:
        self.rank(problem)
        order, score = self.order[: self.count].copy(), self.score[: self.count].copy()
        self._level(self._at, self._problem_at)  # of the same numbers
        return Scores(order, score, float(self.info[0]))

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


def _packer(layout: Layout, model: Model, ask: Ask) -> Callable[[Problem, Any], None]:
    """Writes a problem's fields, numbers first, into a buffer; text becomes codes."""
    words = model.features.words
    last = {f.name for f in model.features.fields if f.is_asked}
    own = [n for n in layout.problem_fields if n not in last]
    asked = [n.removeprefix("v_") for n in layout.problem_fields[len(own) :]]
    names = [n.removeprefix("p_") for n in own]
    text = [n for n in own if n in words]
    codes = [{w: encode(w, words[n]) for w in words[n]}.get for n in text]
    split = len(names) - len(text)
    write = Struct(f"{len(names) + len(asked)}d").pack_into
    # A getter of a single name gives a bare value, so one name is asked for twice.
    numbers = attrgetter(*names[:split], *names[:1]) if split else None
    texts = attrgetter(*names[split:], *names[-1:]) if text else None

    def pack(problem: Problem, out: Any) -> None:
        values = numbers(problem)[:split] if numbers else ()
        codes_of = [code(w, 0.0) for code, w in zip(codes, texts(problem))] if texts else ()  # noqa: B905
        if not asked:
            write(out, 0, *values, *codes_of)
            return
        tactic = ask(problem)
        write(out, 0, *values, *codes_of, *[tactic.get(name, ABSENT) for name in asked])

    return pack
