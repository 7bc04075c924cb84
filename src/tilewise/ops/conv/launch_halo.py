"""Launches of dense CUDA kernels that keep patches of the image with their rim."""

from __future__ import annotations

from tilewise.core.arch import Arch
from tilewise.core.dtypes import dtype as element
from tilewise.ops.conv.epilogue import FIRST, OUT, SECOND, Epilogue
from tilewise.ops.conv.kernels.dense import DenseConvKernel
from tilewise.ops.conv.kernels.dense_rules import (
    PATCHES,
    PIXEL_TILES,
    ROW_BYTES,
    SIDE,
    halo_smem_bytes,
)
from tilewise.ops.conv.launch_dense import Part, join
from tilewise.ops.conv.launch_pieces import (
    box_map,
    by_group,
    check_aligned,
    cuda_source,
    cut,
    representative,
    sum_kind,
    walk_arguments,
)
from tilewise.ops.conv.launch_wgrad import PANEL, sum_slices
from tilewise.ops.conv.patches import Outer, outer_pitches
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.conv.strides import Strides
from tilewise.ops.conv.walk import Walk, forward, source_sizes, walks
from tilewise.ops.launch import Argument, Launch, Pointer, Scratch, Step, TensorMap

__all__ = ["launch_halo", "representative"]


def launch_halo(
    kernel: DenseConvKernel,
    problem: ConvProblem,
    arch: Arch,
    strides: tuple[Strides, Strides, Strides],
    is_aligned: bool,
    epilogue: Epilogue,
) -> Launch:
    """One step for each parity of the pixels, or the product over pixels of a filter's gradient."""
    outer = outer_pitches(problem, strides)
    check_aligned(kernel, is_aligned, outer)
    if kernel.is_weight:
        return _gradient(kernel, problem, arch, outer)
    return join(HaloPart(kernel, problem, arch, outer, epilogue, walk) for walk in walks(problem))


class HaloPart(Part):
    """One walk over blocks of 8 x 8 pixels."""

    name = "halo"

    def pixel_tiles(self) -> int:
        d, h, w = self.walk
        blocks = self.problem.n * d.size * -(-h.size // SIDE) * -(-w.size // SIDE)
        return -(-blocks // (self.kernel.tile_m // SIDE**2))

    def reduction_steps(self) -> int:
        """A step is a patch: 64 channels at one depth of the filter."""
        return self.walk[0].taps * -(-self.read // self.kernel.tile_k)

    def extent(self) -> dict[str, Argument]:
        return {"images": self.problem.n}

    def smem_bytes(self) -> int:
        return halo_smem_bytes(self.kernel, self.walk)

    def constants(self) -> dict[str, int | str]:
        return {"PATCHES": PATCHES, **_filter_constants(self.walk)}

    def is_box(self) -> bool:
        return True

    def result_map(self) -> TensorMap:
        """The walk's pixels of the result, in blocks of 8 by 8 and 64 channels."""
        at, size = self._places(), element(self.problem.out_dtype).bytes
        dims = "whd" if self.spatial == 3 else "wh"
        extents = dict(zip("dhw", self.walk, strict=True))
        return TensorMap(
            tensor=OUT,
            dtype=self.problem.out_dtype,
            sizes=(
                self.written * self.problem.g,
                *(extents[dim].size for dim in dims),
                self.problem.n,
            ),
            strides=tuple(size * at[f"result_{dim}"] for dim in (*dims, "n")),
            box=(64, SIDE, SIDE, *(1 for _ in dims[1:])),
            swizzle=ROW_BYTES,
            offset=size * at["result_first"],
        )

    def source(self) -> dict[str, Argument]:
        _, h, w = self.walk
        image = box_map(
            *(self.kernel, FIRST, source_sizes(self.problem)),
            images=self.problem.n,
            channels=self.read * self.problem.g,
            stride=self.outer[0],
            box=(self.kernel.tile_k, SIDE + w.rim, SIDE + h.rim),
            is_3d=self.spatial == 3,
        )
        if self.is_ragged and self.spatial == 2:
            image = by_group(image, 0, self.problem.g)
        return {"image_map": image, "filter_map": self.filter_map()}


def _filter_constants(walk: Walk) -> dict[str, int | str]:
    _, h, w = walk
    return {"TAPS_H": h.taps, "TAPS_W": w.taps, "REACH_H": h.reach, "REACH_W": w.reach}


def _gradient(k: DenseConvKernel, p: ConvProblem, arch: Arch, outer: Outer) -> Launch:
    d, h, w = walk = forward(p)
    lines, columns = PIXEL_TILES[k.tile_k]
    c, filters = p.c // p.g, p.k // p.g
    tiles = -(-c // PANEL) * -(-filters // PANEL) * d.taps * p.g
    steps = p.n * d.size * -(-h.size // lines) * -(-w.size // columns)
    splits = cut(tiles, steps, k, arch)
    arguments: dict[str, Argument] = {
        **_gradient_maps(k, p, outer),
        "result": Pointer(tensor=OUT),
        "partial": Scratch(offset=0) if splits > 1 else Pointer(tensor=OUT),
        "images": p.n,
        "in_channels": c,
        "out_channels": filters,
        "groups": p.g,
        "splits": splits,
        "result_pitch": outer[2],
        "slice_elements": p.filter_elements,
        **walk_arguments(p, walk),
    }
    constants: dict[str, int | str] = {
        "ELEMENT": k.dtype,
        "RESULT": p.out_dtype,
        "TILE_H": lines,
        "TILE_W": columns,
        "STAGES": k.stages,
        "LOAD_WARPS": k.load_warps,
        "SPATIAL": 3 if p.ndim == 3 else 2,
        "SUM": sum_kind(k, splits),
        **_filter_constants(walk),
    }
    count = tiles * splits
    product = Step(
        source=cuda_source("halo_wgrad", arguments, constants),
        grid=(min(count, arch.compute_units) if k.persistent else count, 1, 1),
        threads=k.threads,
        smem_bytes=halo_smem_bytes(k, walk),
        arguments=tuple(arguments.values()),
    )
    return sum_slices(k, p, outer[2], splits, product)


def _gradient_maps(k: DenseConvKernel, p: ConvProblem, outer: Outer) -> dict[str, Argument]:
    lines, columns = PIXEL_TILES[k.tile_k]
    _, h, w = forward(p)
    is_3d = p.ndim == 3
    dy = box_map(
        *(k, SECOND, (p.out_d, p.out_h, p.out_w)),
        images=p.n,
        channels=p.k,
        stride=outer[1],
        box=(PANEL, columns, lines),
        is_3d=is_3d,
    )
    x = box_map(
        *(k, FIRST, (p.d, p.h, p.w)),
        images=p.n,
        channels=p.c,
        stride=outer[0],
        box=(PANEL, columns + w.rim, lines + h.rim),
        is_3d=is_3d,
    )
    return {"dy_map": dy, "x_map": x}
