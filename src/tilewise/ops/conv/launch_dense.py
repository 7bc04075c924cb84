"""Launches of dense CUDA kernels over pixels: forward, and the gradient of the input."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from tilewise.core.arch import Arch
from tilewise.core.dtypes import dtype as element
from tilewise.ops.conv.epilogue import FIRST, OUT, SECOND, Epilogue
from tilewise.ops.conv.kernels.dense import DenseConvKernel
from tilewise.ops.conv.kernels.dense_rules import (
    ROW_BYTES,
    is_ragged,
    smem_bytes,
    store_buffers,
    tap_channels,
)
from tilewise.ops.conv.launch_pieces import (
    ATOMIC,
    DIRECT,
    by_group,
    check_aligned,
    cuda_source,
    cut,
    im2col_map,
    reduce_step,
    representative,
    rows_map,
    stored,
    sum_columns_step,
    sum_kind,
    walk_arguments,
)
from tilewise.ops.conv.launch_wgrad import LOADERS, launch_wgrad
from tilewise.ops.conv.patches import Outer, finishing, finishing_pointers, outer_pitches
from tilewise.ops.conv.problem import ConvProblem, shapes
from tilewise.ops.conv.strides import Strides
from tilewise.ops.conv.walk import Walk, channels, pixels, source_sizes, taps, walks
from tilewise.ops.launch import Argument, Launch, Pointer, Scratch, Step, TensorMap, Zero

__all__ = ["Part", "join", "launch_dense", "representative"]


def launch_dense(
    kernel: DenseConvKernel,
    problem: ConvProblem,
    arch: Arch,
    strides: tuple[Strides, Strides, Strides],
    is_aligned: bool,
    epilogue: Epilogue,
) -> Launch:
    """One step for each parity of the pixels, and one more where the reduction is cut."""
    if kernel.is_weight:
        return launch_wgrad(kernel, problem, arch, strides, is_aligned)
    outer = outer_pitches(problem, strides)
    check_aligned(kernel, is_aligned, outer)
    return join(Part(kernel, problem, arch, outer, epilogue, walk) for walk in walks(problem))


def join(parts: Iterator[Part]) -> Launch:
    """Parts one after the other; each has the workspace for itself.

    Parts that only store their results overlap: they write different pixels, and read what was
    there before. What no tap reaches is cleared in one go where nothing is added to it.
    """
    listed = sorted(parts, key=lambda part: -taps(part.walk))
    steps: list[Step | Zero] = []
    if any(part.is_zero for part in listed) and listed[0].is_packed:
        steps.append(listed[0].clear())
        listed = [part for part in listed if not part.is_zero]
    workspace = max((part.workspace_bytes for part in listed), default=0)
    for part in listed:
        for step in part.steps():
            if isinstance(step, Step) and not workspace and steps and isinstance(steps[-1], Step):
                step = replace(step, overlaps=True)
            steps.append(step)
    return Launch(steps=tuple(steps), workspace_bytes=workspace)


class Part:
    """One walk of a problem: its steps and what they need."""

    name = "implicit"

    def __init__(
        self,
        kernel: DenseConvKernel,
        problem: ConvProblem,
        arch: Arch,
        outer: Outer,
        epilogue: Epilogue,
        walk: Walk,
    ) -> None:
        self.kernel, self.problem, self.arch, self.walk = kernel, problem, arch, walk
        self.epilogue, self.outer = epilogue, outer
        self.read, self.written = channels(problem)
        self.rows = problem.n * pixels(walk)
        self.spatial = 3 if problem.ndim == 3 else 2
        tiles, columns = self.pixel_tiles(), -(-self.written // kernel.tile_n)
        if kernel.share == "filter":
            tiles = -(-tiles // kernel.cluster)
        else:
            columns = -(-columns // kernel.cluster)
        self.clusters = tiles * columns * problem.g
        self.sum_rows = (
            tiles * (kernel.cluster if kernel.share == "filter" else 1) * self.groups_of_tile
        )
        self.splits = cut(self.clusters * kernel.cluster, self.reduction_steps(), kernel, arch)
        if epilogue.sums:
            self.splits = 1  # over pixels, of results that are whole

    def pixel_tiles(self) -> int:
        return -(-self.rows // self.kernel.tile_m)

    @property
    def groups_of_tile(self) -> int:
        """Math groups that share a tile's rows."""
        return 1 if self.kernel.pingpong else self.kernel.math_groups

    def reduction_steps(self) -> int:
        count, k = taps(self.walk), self.kernel
        if k.family == "gather":
            return -(-count * self.read // k.tile_k)
        if k.family == "taps":
            return -(-count * tap_channels(self.problem) // k.tile_k)
        return count * -(-self.read // k.tile_k)

    @property
    def workspace_bytes(self) -> int:
        if self.epilogue.sums:
            return 4 * self.sum_rows * 2 * self.written * self.problem.g
        if self.splits == 1 or not taps(self.walk):
            return 0
        slices = 1 if self.kernel.atomic else self.splits
        return 4 * slices * self.rows * self.written * self.problem.g

    @property
    def is_zero(self) -> bool:
        """Whether no tap reaches these pixels, and nothing is added to them."""
        return not taps(self.walk) and self.epilogue.is_plain

    @property
    def is_packed(self) -> bool:
        """Whether the whole result is one piece of memory."""
        *_, result = shapes(self.problem)
        return self.problem.n == 1 or self.outer[2] == prod(result[1:])

    def clear(self) -> Zero:
        """Of the whole result, all parts of it."""
        *_, result = shapes(self.problem)
        size = element(self.problem.out_dtype).bytes
        return Zero(target=Pointer(tensor=OUT), size=size * prod(result))

    def steps(self) -> Iterator[Step | Zero]:
        kind = sum_kind(self.kernel, self.splits)
        if not taps(self.walk):
            yield self._reduce(slices=0)
            return
        if kind == ATOMIC:
            yield Zero(target=Scratch(offset=0), size=self.workspace_bytes)
        yield self._multiply()
        if kind != DIRECT:
            yield self._reduce(slices=1 if self.kernel.atomic else self.splits)
        if self.epilogue.sums:
            yield sum_columns_step(self.sum_rows, 2 * self.written * self.problem.g)

    def _multiply(self) -> Step:
        k = self.kernel
        arguments: dict[str, Argument] = {
            **self.source(),
            **({"result_map": self.result_map()} if self.is_copied else {}),
            "result": Pointer(tensor=OUT),
            **finishing_pointers(self.epilogue),
            "partial": Scratch(offset=0) if self.workspace_bytes else Pointer(tensor=OUT),
            **self.extent(),
            "in_channels": self.read,
            "out_channels": self.written,
            "groups": self.problem.g,
            "splits": self.splits,
            **self._places(),
            **walk_arguments(self.problem, self.walk),
        }
        count = self.clusters * self.splits
        most = self.arch.compute_units * k.blocks // k.cluster
        return Step(
            source=cuda_source(self.name, arguments, self._all_constants()),
            grid=((min(count, most) if k.persistent else count) * k.cluster, 1, 1),
            threads=k.threads,
            smem_bytes=self.smem_bytes(),
            cluster=(k.cluster, 1, 1),
            arguments=tuple(arguments.values()),
        )

    @property
    def is_ragged(self) -> bool:
        """Whether what is read of a group ends within a matrix instruction."""
        return self.kernel.family != "gather" and is_ragged(self.kernel, self.problem)

    def _last_parts(self) -> int:
        """Quarters of a step that the last channels or taps fill; gathered ones fill all."""
        left, family = self.read, self.kernel.family
        if family == "taps":
            left = taps(self.walk) * tap_channels(self.problem)
        left = 0 if family == "gather" else left % self.kernel.tile_k
        return -(-4 * left // self.kernel.tile_k) or 4

    @property
    def is_copied(self) -> bool:
        """Whether TMA stores the result: whole sums of 16 bits, in boxes inside one group."""
        tile, is_alone = self.kernel.tile_n, self.problem.g == 1
        is_boxed = (tile % 64 == 0 and (is_alone or self.written % 64 == 0)) or (
            is_alone and self.written <= tile  # the last box reaches beyond the tensor's edge
        )
        places = (*self._places().values(), self.written * self.problem.g)
        return (
            sum_kind(self.kernel, self.splits) == DIRECT
            and element(self.problem.out_dtype).bytes == 2
            and is_boxed
            and not any(place % 8 for place in places)
            and self.is_box()
        )

    def is_box(self) -> bool:
        """Whether neighbouring rows of sums are neighbours in the result."""
        at, (d, h, w) = self._places(), self.walk
        return (
            at["result_h"] == w.size * at["result_w"]
            and at["result_d"] == h.size * at["result_h"]
            and (self.problem.n == 1 or at["result_n"] == d.size * at["result_d"])
        )

    def result_map(self) -> TensorMap:
        """The result's pixels as rows of a matrix, in boxes of 64 by 64."""
        at, size = self._places(), element(self.problem.out_dtype).bytes
        return TensorMap(
            tensor=OUT,
            dtype=self.problem.out_dtype,
            sizes=(self.written * self.problem.g, self.rows),
            strides=(size * at["result_w"],),
            box=(64, 64),
            swizzle=ROW_BYTES,
            offset=size * at["result_first"],
        )

    def extent(self) -> dict[str, Argument]:
        return {"pixels": self.rows}

    def smem_bytes(self) -> int:
        return smem_bytes(self.kernel)

    def _all_constants(self) -> dict[str, int | str]:
        k = self.kernel
        return {
            "ELEMENT": k.dtype,
            "RESULT": self.problem.out_dtype,
            "TILE_M": k.tile_m,
            "TILE_N": k.tile_n,
            "STAGES": k.stages,
            "MATH_GROUPS": k.math_groups,
            "LOAD_WARPS": k.load_warps,
            "SPATIAL": self.spatial,
            "BACKWARD": int(k.op == "conv_bwd_data"),
            "CLUSTER": k.cluster,
            "SUM": sum_kind(k, self.splits),
            **finishing(self.epilogue),
            "CHANNEL_SUMS": int(self.epilogue.sums),
            "STORE_BUFFERS": store_buffers(k) if self.is_copied else 0,
            "LAST_PARTS": self._last_parts(),
            "RAGGED": int(self.is_ragged),
            **self.constants(),
        }

    def constants(self) -> dict[str, int | str]:
        k = self.kernel
        return {
            "PINGPONG": int(k.pingpong),
            "LOADER": LOADERS[self._loader()],
            "SHARE_FILTER": int(k.share == "filter"),
            "BLOCKS": k.blocks,
            **({"VECTOR": self._vector()} if k.family == "gather" else {}),
            **({"TAP_CHANNELS": self._row()} if k.family == "taps" else {}),
        }

    def _loader(self) -> str:
        """Rows of a matrix need images without gaps; im2col walks them with gaps as well."""
        d, h, w = source_sizes(self.problem)
        is_dense = self.outer[0] == d * h * w * self.read * self.problem.g or self.problem.n == 1
        family = self.kernel.family
        return "im2col" if family == "rows" and not is_dense else family

    def _vector(self) -> int:
        """Elements that one copy of a gathering loader brings: all lie in one group's channels."""
        sizes = (self.read, self.problem.c // self.problem.g, *self.outer[:2])
        most = 16 // element(self.kernel.dtype).bytes
        return next(v for v in (8, 4, 2, 1) if v <= most and not any(s % v for s in sizes))

    def source(self) -> dict[str, Argument]:
        """What the loader reads."""
        k, loader = self.kernel, self._loader()
        if loader == "gather":
            return self._gathered()
        count = k.tile_m // (k.cluster if k.share == "pixels" else 1)
        total = self.read * self.problem.g
        if loader == "rows":
            box = (k.tile_k, count)
            image = rows_map(k, FIRST, channels=total, rows=self.rows, box=box)
        else:
            image = im2col_map(
                *(k, self.problem, self.walk),
                pixels=count,
                channels=self._row(),
                stride=self.outer[0],
                count=total,
            )
        return {"pixels_map": image, "filter_map": self.filter_map()}

    def _row(self) -> int:
        """Channels in a row of a stage's pixels."""
        is_short = self.kernel.family == "taps"
        return tap_channels(self.problem) if is_short else self.kernel.tile_k

    def _gathered(self) -> dict[str, Argument]:
        d, h, w = source_sizes(self.problem)
        return {
            "image": Pointer(tensor=FIRST),
            "filter": Pointer(tensor=SECOND),
            "image_d": d,
            "image_h": h,
            "image_w": w,
            "image_pitch": self.read * self.problem.g,
            "image_stride": self.outer[0],
            "filter_stride": self.outer[1],
            "filter_taps": self.problem.taps,
        }

    def filter_map(self) -> TensorMap:
        """{channels, taps, filters}; read along the channels forward, across them backward."""
        k, p, size = self.kernel, self.problem, element(self.kernel.dtype).bytes
        share = k.cluster if k.share == "filter" else 1
        c, row = p.c // p.g, self._row()
        is_across = k.op == "conv_bwd_data"
        made = TensorMap(
            tensor=SECOND,
            dtype=stored(k.dtype),
            sizes=(c, p.taps, p.k),
            strides=(size * c, size * self.outer[1]),
            box=(64, 1, row // share) if is_across else (row, 1, k.tile_n // share),
            swizzle=ROW_BYTES if is_across else row * size,
        )
        return by_group(made, 2, p.g) if is_across and self.is_ragged else made

    def _places(self) -> dict[str, int]:
        """Elements from the result's first to that of a pixel of this walk."""
        p = self.problem
        d, h, w = self.walk
        pitch = self.written * p.g
        extents = (p.d, p.h, p.w) if p.direction == "bwd_data" else (p.out_d, p.out_h, p.out_w)
        steps = (extents[1] * extents[2] * pitch, extents[2] * pitch, pitch)
        first = sum(axis.first * step for axis, step in zip((d, h, w), steps, strict=True))
        return {
            "result_first": first,
            "result_n": self.outer[2],
            "result_d": d.every * steps[0],
            "result_h": h.every * steps[1],
            "result_w": w.every * steps[2],
        }

    def _reduce(self, slices: int) -> Step:
        d, h, w = self.walk
        return reduce_step(
            slices=slices,
            rows=self.rows,
            pitch=self.written * self.problem.g,
            sizes=(d.size, h.size, w.size),
            places=self._places(),
            dtype=self.problem.out_dtype,
            epilogue=self.epilogue,
        )
