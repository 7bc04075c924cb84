"""GPU kernels of an exported library: launches over open sizes, and objects that are linked in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.sizes import Number, TraceError, Truth, concrete
from tilewise.core.source import comment, identifier
from tilewise.core.trace import Examples, Leaf, Tree, leaves, trace
from tilewise.engines import get_engine
from tilewise.engines.gpu.build import compile_ahead, compile_or_raise, launch_module, source_key
from tilewise.engines.gpu.driver import PROMOTIONS, SWIZZLES
from tilewise.engines.gpu.layout import Passed, laid_out
from tilewise.engines.gpu.maps import map_box, map_swizzle, type_of
from tilewise.engines.gpu.objects import GpuObject, over_limit
from tilewise.errors import BuildError, InputError, KernelError, TensorError
from tilewise.export.cases import Case
from tilewise.export.render import Constants, LeafSource, reason, value
from tilewise.export.rules import OpExport, following
from tilewise.ops.launch import Launch, Pointer, Scratch, Step, TensorMap, Zero

MAX_OBJECTS = 1000
"""Each takes seconds to compile, and a few dozen kilobytes."""


@dataclass(frozen=True, slots=True)
class Compiling:
    """How objects are compiled."""

    max_workers: int | None
    max_objects: int
    """Of an op; more are refused before anything is compiled."""
    on_progress: Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An object as it is linked in."""

    made: GpuObject
    cluster: tuple[int, int, int]
    kernel: str


@dataclass(slots=True)
class Objects:
    """Every compiled kernel of a library, once."""

    arch: Arch
    _entries: dict[str, Entry] = field(default_factory=dict)
    _images: dict[bytes, str] = field(default_factory=dict)

    @property
    def suffix(self) -> str:
        return "cubin" if self.arch.vendor == "nvidia" else "hsaco"

    def place(self, step: Step, kernel: str) -> tuple[int, GpuObject]:
        """The number of a step's object; compiled where the cache does not have it."""
        shape = (step.threads, step.smem_bytes, step.cluster)
        key = f"{shape} {source_key(step.source)}"
        if key not in self._entries:
            made = compile_or_raise(step, self.arch.name, kernel)
            broken = over_limit(made.resources, self.arch)
            if broken:
                raise BuildError(f"{kernel} is over a limit of {self.arch.name}: {broken}")
            self._entries[key] = Entry(made=made, cluster=step.cluster, kernel=kernel)
            self._images.setdefault(made.image, f"objects/{len(self._images):04d}.{self.suffix}")
        return list(self._entries).index(key), self._entries[key].made

    @property
    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    @property
    def sources(self) -> list[str]:
        """Files of objects; objects that differ in their launch alone share one."""
        return list(self._images.values())

    @property
    def count(self) -> int:
        return len(self._images)

    @property
    def total_bytes(self) -> int:
        return sum(map(len, self._images))

    def files(self) -> dict[str, bytes]:
        return {path: image for image, path in self._images.items()}

    def image_of(self, entry: Entry) -> int:
        return self.sources.index(self._images[entry.made.image])


@dataclass(slots=True)
class GpuLaunches:
    """Follows the launches of an op's kernels, and compiles what they need."""

    export: OpExport
    objects: Objects
    compiling: Compiling
    _sources: dict[str, Any] = field(default_factory=dict)

    def __call__(
        self, kernel: Kernel, case: Case, seen: Examples
    ) -> tuple[Tree | None, LeafSource]:
        module, arch = launch_module(kernel.op), self.export.arch

        def launched() -> Launch | str:
            try:
                return settled(module.launch(kernel, case.problem(), arch))
            except (KernelError, TensorError) as error:
                return str(error)

        with following(kernel):
            tree = trace(launched, seen)
        for leaf in leaves(tree):
            if isinstance(leaf.value, Launch):
                self._sources |= {source_key(source): source for source in leaf.value.sources}
        return tree, lambda leaf, constants: self._leaf(kernel, leaf, constants)

    def tell(self, line: str) -> None:
        self.compiling.on_progress(line)

    def compile(self) -> None:
        """Compiles all that was met, in parallel."""
        count = len(self._sources)
        if count > self.compiling.max_objects:
            raise InputError(
                f"{self.export.op.name} would take {count} compiled objects, more than "
                f"{self.compiling.max_objects}; narrow it with --layout, --where, --filter or "
                "--top, or raise --max-objects"
            )
        for kernel in self.export.kernels:
            why = get_engine(kernel.engine).why_no_build()
            if why is not None:
                raise BuildError(f"the {kernel.engine} engine cannot build here: {why}")
        self.compiling.on_progress(f"{self.export.op.name}: compiling {count} objects")
        target = self.objects.arch.name
        compile_ahead(list(self._sources.values()), target, self.compiling.max_workers)

    def _leaf(self, kernel: Kernel, leaf: Leaf, constants: Constants) -> list[str]:
        if not isinstance(leaf.value, Launch):
            return reason(leaf, constants)
        lines = ["if (!made) return true;"]
        for step in leaf.value.steps:
            lines += self._step(kernel, step, constants)
        total, zeroed = leaf.value.workspace_bytes, leaf.value.zeroed_bytes
        lines.append(f"made->needs({value(total, constants)}, {value(zeroed, constants)});")
        return [*lines, "return true;"]

    def _step(self, kernel: Kernel, step: Step | Zero, constants: Constants) -> Iterator[str]:
        if isinstance(step, Zero):
            yield f"made->clear({value(step.size, constants)});"
            yield from _parameter(Passed(value=step.target, kind="*"), constants)
            return
        place, made = self.objects.place(step, kernel.name)
        grid = ", ".join(value(one, constants) for one in step.grid)
        yield f"made->kernel({constants.whole(place)}, {grid});"
        if step.cluster != (1, 1, 1):
            yield f"made->cluster({', '.join(constants.whole(n) for n in step.cluster)});"
        if step.overlaps:
            yield "made->overlaps();"
        for passed in laid_out(step, made, kernel.name):
            yield from _parameter(passed, constants)


def settled(launch: Launch) -> Launch:
    """The launch, with all known that its kernels are compiled or loaded with."""
    steps: list[Step | Zero] = []
    for step in launch.steps:
        if isinstance(step, Step):
            known = {name: _known(one) for name, one in step.source.constants.items()}
            source = replace(step.source, constants=known)
            x, y, z = (concrete(n) for n in step.cluster)
            step = replace(
                step,
                source=source,
                threads=concrete(step.threads),
                smem_bytes=concrete(step.smem_bytes),
                cluster=(x, y, z),
                overlaps=bool(step.overlaps),
                arguments=tuple(map(_passed, step.arguments)),
            )
            _check_known(source)
        steps.append(step)
    return replace(launch, steps=tuple(steps))


def _passed(one: Any) -> Any:
    """An argument; a tensor map's swizzle is a mode of the driver."""
    return replace(one, swizzle=concrete(one.swizzle)) if isinstance(one, TensorMap) else one


def _known(one: Any) -> Any:
    if isinstance(one, Number):
        return concrete(one)
    if isinstance(one, Truth):
        return bool(one)
    if isinstance(one, tuple):
        parts = [_known(part) for part in one]
        return type(one)(*parts) if hasattr(one, "_fields") else tuple(parts)
    return one


def _check_known(source: Any) -> None:
    if "\x02" in repr(source):
        raise TraceError(f"{source.function} is compiled for a size, in a way that is not followed")


def _parameter(passed: Passed, constants: Constants) -> Iterator[str]:
    one = passed.value
    match one:
        case Pointer():
            yield f"made->tensor({constants.whole(one.tensor)});"
        case Scratch():
            yield f"made->scratch({value(one.offset, constants)});"
        case TensorMap():
            yield from _map(one, passed, constants)
        case _ if passed.kind in ("f32", "fp32"):
            yield f"made->f32({value(one, constants)});"
        case _:
            wide = "i64" if passed.kind in ("i64", "u64") else "i32"
            yield f"made->{wide}({value(one, constants)});"


def _map(wanted: TensorMap, passed: Passed, constants: Constants) -> Iterator[str]:
    def listed(kind: str, values: Sequence[Any]) -> str:
        return ", ".join(f"{kind}({value(one, constants)})" for one in values)

    box, walk = map_box(wanted, passed.box), wanted.im2col
    swizzle = SWIZZLES[map_swizzle(wanted, passed.box)]
    yield "{"
    yield "  Map map;"
    yield f"  map.tensor = {wanted.tensor}, map.type = {type_of(wanted.dtype)};"
    yield f"  map.rank = {len(wanted.sizes)}, map.swizzle = {swizzle};"
    yield f"  map.promotion = {PROMOTIONS[wanted.promotion]};"
    if isinstance(wanted.offset, Number) or wanted.offset != 0:
        yield f"  map.offset = {value(wanted.offset, constants)};"
    fills = [("uint64_t", "sizes", wanted.sizes), ("uint64_t", "strides", wanted.strides)]
    fills += [("uint32_t", "steps", wanted.steps or (1,) * len(wanted.sizes))]
    if walk is None:
        fills.append(("uint32_t", "box", box))
    else:
        channels, pixels = box or (walk.channels, walk.pixels)
        fills += [("int32_t", "lower", walk.lower), ("int32_t", "upper", walk.upper)]
        yield "  map.is_im2col = true;"
        yield f"  map.channels = uint32_t({value(channels, constants)});"
        yield f"  map.pixels = uint32_t({value(pixels, constants)});"
    for kind, name, values in fills:
        for at, one in enumerate(values):
            yield f"  map.{name}[{at}] = {kind}({value(one, constants)});"
    yield "  made->map(map);"
    yield "}"


def files(objects: Objects, facts: str) -> Iterator[tuple[str, str]]:
    """The table of objects."""
    yield "src/gpu_objects.hpp", _table(objects, facts)


def _table(objects: Objects, facts: str) -> str:
    entries, arch = objects.entries, objects.arch
    declared = "".join(
        f"extern const unsigned char tilewise_object_{at}[];\n" for at in range(objects.count)
    )
    rows = ",\n    ".join(
        f'{{tilewise_object_{objects.image_of(entry)}, "{identifier(entry.made.function)}", '
        f"{entry.made.resources.threads}, {entry.made.dynamic_smem_bytes}, "
        f"{prod(entry.cluster)}}}"
        for entry in entries
    )
    major, minor = _capability(arch)
    return f"""\
// {comment(facts)}
// Every kernel of a GPU as it was compiled, and what it is launched with.
#pragma once
#include <cstdint>

extern "C" {{
{declared}}}

struct GpuObject {{
  const unsigned char *image;
  const char *function;
  uint32_t threads, smem_bytes, cluster_size;
}};

constexpr bool kIsCuda = {str(arch.vendor == "nvidia").lower()};
constexpr const char *kArch = "{identifier(arch.name)}";
constexpr int kMajor = {major}, kMinor = {minor};
constexpr int kUnits = {arch.compute_units};
constexpr int kObjects = {len(entries)};
const GpuObject gpu_objects[] = {{
    {rows}}};
"""


def _capability(arch: Arch) -> tuple[int, int]:
    digits = arch.name.removeprefix("sm_")
    return (int(digits[:-1]), int(digits[-1])) if arch.vendor == "nvidia" else (0, 0)
