"""What dense CUDA kernels can be, and which problems they can serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilewise.core.arch import Arch
from tilewise.core.dtypes import dtype as element
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.conv.walk import Axis, Walk, axes_of, channels, source_sizes, walks

if TYPE_CHECKING:
    from tilewise.ops.conv.kernels.dense import DenseConvKernel

ROW_BYTES = 128
"""Of a stage's rows: what the swizzle of copies and matrix instructions spans."""
INSTRUCTION_BYTES = 32
"""Of a row that a matrix instruction multiplies."""
STAGING_BYTES = 8192
"""Of a piece of 64 rows by 64 columns, through which a math group stores its results."""
MOST_SUMS = 128
"""Registers of a thread for sums; more would leave too few for addresses."""
LARGEST = 2**31 - 2**10
"""Pixels are counted in 31 bits, a tile's overhang included."""
LEAST_GROUP = 16
"""Channels of a group below which most of a tile is waste."""
IM2COL_STRIDE = 8
IM2COL_CORNER = {2: 128, 3: 16}
"""How far the first and last window may lie beyond the image, by spatial dimensions of the map."""
IM2COL_REACH = {2: 255, 3: 31}
"""How far a tap may lie from the window's corner."""
PIXEL_TILES = {64: (8, 8), 128: (16, 8), 256: (16, 16)}
"""Lines and columns of the pixels in a step of a halo gradient."""
PATCHES = 2
"""Stages of patches of a halo kernel."""
LARGEST_RIM = 240
"""Of a patch: a box has 256 pixels at most along each side."""
SIDE = 8
"""Of the blocks of pixels that halo kernels take."""
MOST_TAP_CHANNELS = 32
"""That are read, so that several taps share a step."""
CHUNK_BYTES = 16
"""Of copies: what rows of TMA and of 16-byte loads are multiples of."""


def rules(k: DenseConvKernel) -> dict[str, Any]:
    """Rules between the traits of a kernel -> whether it breaks them."""
    groups = 1 if k.pingpong else k.math_groups
    is_halo, is_gather = k.family == "halo", k.family == "gather"
    found = {
        "tiles are multiples of 64 rows and 32 columns": k.tile_m % 64 or k.tile_n % 32,
        "there are at least 2 stages": k.stages < 2,
        "there are 1 to 3 math groups and at least 1 block": not 1 <= k.math_groups <= 3
        or k.blocks < 1,
        "clusters are of 1 or 2 blocks": k.cluster not in (1, 2),
        f"sums take {k.sums} of {MOST_SUMS} registers": k.sums > MOST_SUMS,
        "each math group takes whole blocks of 64 rows": not k.is_weight
        and k.tile_m % (64 * groups),
        "each math group takes whole blocks of 64 rows, or of 64 columns": k.is_weight
        and not is_halo
        and k.tile_m % (64 * groups)
        and k.tile_n % (64 * groups),
        "filters' gradients share nothing and take no turns": k.is_weight
        and (k.cluster > 1 or k.pingpong),
        "two math groups take turns": k.pingpong and k.math_groups != 2,
        "gathering takes 4 or 8 load warps, TMA 1 or 2": k.load_warps
        not in ((4, 8) if is_gather else (1, 2)),
        "math groups that take turns walk over tiles": k.pingpong and not k.persistent,
        "a cluster of one shares nothing": k.cluster == 1 and k.share != "filter",
        "gathering blocks share nothing": is_gather and k.cluster > 1,
        "atomic is for kernels whose reduction is cut": k.atomic and not k.fill,
        "blocks that walk over gradients of filters share their steps in one wave": k.is_weight
        and not is_halo
        and k.persistent
        and k.fill != 1,
        "a block that holds an SM alone is one": k.blocks > 1 and k.math_groups > 1,
        "several blocks need sums of 64 registers at most": k.blocks > 1 and k.sums > 64,
        "tf32 is read along the reduction, so forward only": k.dtype == "tf32"
        and k.op != "conv_fwd",
        "what is read across the reduction comes in panels of 64": k.is_weight and k.tile_n % 64,
    }
    step = ROW_BYTES // element(k.dtype).bytes
    if is_halo and k.is_weight:
        found |= {
            "steps are of 64, 128 or 256 pixels": k.tile_k not in PIXEL_TILES,
            "tiles are 64 filters by 64 channels": (k.tile_m, k.tile_n) != (64, 64),
        }
    else:
        found[f"steps are of {step}"] = k.tile_k != step
    if k.family == "taps":
        found["taps are shared by no cluster, are of 16 bits, and of pixels"] = (
            k.cluster > 1 or k.dtype == "tf32" or k.is_weight
        )
    if is_halo:
        found["patches are shared by no cluster, and groups take no turns"] = (
            k.share != "filter" or k.pingpong or k.blocks > 1
        )
    return found


def tap_channels(p: ConvProblem) -> int:
    """Channels of a tap in a step of several."""
    return 16 if channels(p)[0] <= 16 else MOST_TAP_CHANNELS


def filter_rows(k: DenseConvKernel) -> int:
    """Rows of the filter in a stage; read across, whole panels of 64 columns."""
    return -(-k.tile_n // 64) * 64 if k.op == "conv_bwd_data" else k.tile_n


def store_buffers(k: DenseConvKernel) -> int:
    """Pieces that a math group's results leave through, in turn where there are several of them.

    A block that shares its multiprocessor makes do with one.
    """
    groups = 1 if k.pingpong else k.math_groups
    pieces = k.tile_m // 64 // groups * -(-k.tile_n // 64)
    return 2 if k.blocks == 1 and pieces > 1 else 1


def smem_bytes(k: DenseConvKernel) -> int:
    """Shared memory of a block whose stages hold both operands."""
    rows = 16 * k.tile_m if k.family == "gather" else 0
    staging = 0 if k.is_weight else k.math_groups * store_buffers(k) * STAGING_BYTES
    return 1024 + k.stages * k.stage_bytes + staging + 16 * k.stages + rows


def halo_smem_bytes(k: DenseConvKernel, walk: Walk) -> int:
    """Shared memory of a block that keeps patches, which depend on the filter."""
    _, h, w = walk
    lines, columns = PIXEL_TILES[k.tile_k] if k.is_weight else (SIDE, SIDE)
    patch = -(-(lines + h.rim) * (columns + w.rim) * ROW_BYTES // 1024) * 1024
    if k.is_weight:
        return 1024 + k.stages * (patch + k.tile_k * ROW_BYTES) + 16 * k.stages
    patches = PATCHES * (k.tile_m // 64) * patch
    staging = k.math_groups * store_buffers(k) * STAGING_BYTES
    filters = k.stages * filter_rows(k) * ROW_BYTES
    return 1024 + patches + filters + staging + 16 * (PATCHES + k.stages)


def chunk(k: DenseConvKernel) -> int:
    """Channels in a copy: what TMA reads comes in multiples of it."""
    return CHUNK_BYTES // element(k.dtype).bytes


def alignment(k: DenseConvKernel) -> tuple[int, ...]:
    """Multiples that C and K must be of; results are stored whatever their count."""
    if k.family == "gather":
        return ()
    return (chunk(k), 1 if k.op == "conv_fwd" else chunk(k))


def why_not_on(kernel: DenseConvKernel, arch: Arch) -> str | None:
    """Why no problem can be served on an architecture, or None."""
    if arch.kind != "gpu" or not (arch.has("wgmma") and arch.has("tma")):
        return f"{arch.name} has no wgmma"
    if kernel.family != "halo":
        needed = smem_bytes(kernel) * kernel.blocks + 1024 * (kernel.blocks - 1)
        if needed > arch.smem_per_block_bytes:
            return f"{needed} bytes of shared memory; {arch.name} has {arch.smem_per_block_bytes}"
    return None


def is_ragged(k: DenseConvKernel, p: ConvProblem) -> bool:
    """Whether what is read of a group ends within a matrix instruction, whose rest is another's."""
    return p.g > 1 and channels(p)[0] % (INSTRUCTION_BYTES // element(k.dtype).bytes) != 0


def why_not_for(k: DenseConvKernel, p: ConvProblem, arch: Arch) -> str | None:
    """Why a problem cannot be served, or None."""
    reason = why_not_for_any_group(k, p, arch)
    if reason or p.g == 1 or k.is_weight or k.family == "gather" or not channels(p)[0] % k.tile_k:
        return reason
    return f"groups are read in multiples of {k.tile_k} channels"


def why_not_for_any_group(k: DenseConvKernel, p: ConvProblem, arch: Arch) -> str | None:
    """The same but for groups that end within a step."""
    return _why_not_typed(k, p) or _why_not_sized(k, p, arch) or _why_not_loaded(k, p, arch)


def _why_not_typed(k: DenseConvKernel, p: ConvProblem) -> str | None:
    if p.layout != "nhwc":
        return "its layout is nhwc"
    if k.dtype != p.dtype:
        return f"its dtype is {k.dtype}, the problem's {p.dtype}"
    allowed = ("fp32",) if k.dtype == "tf32" else (k.dtype, "fp32")
    if p.out_dtype not in allowed:
        return f"it gives {' or '.join(allowed)}, not {p.out_dtype}"
    if not (p.input_elements and p.filter_elements and p.output_elements):
        return "there is nothing to multiply"
    return None


def _why_not_sized(k: DenseConvKernel, p: ConvProblem, arch: Arch) -> str | None:
    if any(size > LARGEST for size in (p.in_pixels, p.out_pixels, p.filter_elements)):
        return f"it counts up to {LARGEST} pixels and elements of the filter"
    if p.g > 1 and any(count < LEAST_GROUP for count in channels(p)):
        return f"its groups have at least {LEAST_GROUP} channels; others are for smaller ones"
    if k.is_weight:
        tiles = -(-(p.k // p.g) // 64) * -(-(p.c // p.g) // 64) * p.taps * p.g
        if k.persistent and tiles * -(-p.out_pixels // 64) > LARGEST:
            return f"its blocks share out {LARGEST} steps at most"
        return None
    if k.cluster > 1 and k.share == "pixels" and channels(p)[1] <= k.tile_n:
        return "there are no two tiles of channels to share pixels"
    return None


def _why_not_loaded(k: DenseConvKernel, p: ConvProblem, arch: Arch) -> str | None:
    if k.family == "gather":
        return None
    read, _ = channels(p)
    images = (p.c // p.g, p.k // p.g) if k.is_weight else (read,)
    if any(count % chunk(k) for count in images):
        return f"TMA copies rows of multiples of {chunk(k)} channels"
    if not k.is_weight and (p.c // p.g) % chunk(k):
        return f"TMA copies filters of multiples of {chunk(k)} channels"
    if k.family == "rows":
        return None if p.is_pointwise else "the filter is not 1x1 over all pixels"
    if k.family == "taps" and (p.g > 1 or read > MOST_TAP_CHANNELS or p.taps == 1):
        return f"it is for taps of up to {MOST_TAP_CHANNELS} channels that are read, in one group"
    return _why_not_halo(k, p, arch) if k.family == "halo" else _why_not_im2col(p)


def _why_not_halo(k: DenseConvKernel, p: ConvProblem, arch: Arch) -> str | None:
    for walk in walks(p):
        _, h, w = walk
        if h.stride > 1 or w.stride > 1:
            return "patches are for stride 1"
        if k.is_weight and (h.taps != k.math_groups or w.taps > 3):
            return f"it is for filters of {k.math_groups} lines and up to 3 columns"
        if max(h.rim, w.rim) > LARGEST_RIM:
            return f"the filter reaches further than {LARGEST_RIM} pixels"
        needed = halo_smem_bytes(k, walk)
        if needed > arch.smem_per_block_bytes:
            return f"{needed} bytes of shared memory; {arch.name} has {arch.smem_per_block_bytes}"
    return None


def _why_not_im2col(p: ConvProblem) -> str | None:
    spatial = 3 if p.ndim == 3 else 2
    for (dim, axes), extent in zip(axes_of(p), source_sizes(p), strict=True):
        for axis in axes:
            reason = axis.taps and _why_not_axis(dim, axis, extent, spatial)
            if reason:
                return reason
    return None


def _why_not_axis(dim: str, axis: Axis, extent: int, spatial: int) -> str | None:
    if axis.stride > IM2COL_STRIDE:
        return f"TMA steps by {IM2COL_STRIDE} pixels at most, stride_{dim} is {axis.stride}"
    limit = IM2COL_CORNER[spatial]
    if not (-limit <= axis.corner < limit and -limit <= axis.upper(extent) < limit):
        return f"windows reach further than {limit} beyond the image along {dim}"
    if axis.rim > IM2COL_REACH[spatial]:
        return f"taps lie further than {IM2COL_REACH[spatial]} from the first along {dim}"
    return None
