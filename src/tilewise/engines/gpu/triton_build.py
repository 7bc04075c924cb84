"""Triton and Gluon to cubin or HSACO, for any GPU, under every version of Triton that is known."""

from __future__ import annotations

import ast
import hashlib
import os
import re
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tilewise
from tilewise.engines.gpu.object_cache import cached
from tilewise.engines.gpu.objects import Box, GpuObject, cubin_object, hsaco_object
from tilewise.errors import BuildError
from tilewise.ops.launch import Source, Word

ROOT = Path(tilewise.__path__[0])
OLDEST, NEWEST = (3, 6), (3, 9)
"""The versions of Triton whose language and objects are known."""
SWIZZLES = (0, 32, 64, 128)
"""Bytes, by the number that Triton's metadata gives."""
WARP_SIZES = {"cuda": 32, "hip": 64}


@cache
def triton_version() -> str:
    """The installed one, or nothing; AMD's wheels of it go by other names."""
    try:
        return version("triton")
    except PackageNotFoundError:
        names = packages_distributions().get("triton", ())
        return version(names[0]) if names else ""


@cache
def why_no_triton() -> str | None:
    """Why Triton kernels cannot be compiled here, or None; nothing is imported for it."""
    found = triton_version()
    if not found:
        return "triton is not installed"
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST:
        return None
    known = " to ".join(f"{one}.{two}" for one, two in (OLDEST, NEWEST))
    return f"Triton {found} is not supported; install {known}"


def compile_triton(source: Source, target: str) -> GpuObject:
    """The source as an object for `target` (`sm_90`, `gfx942`), from the cache or compiled now."""
    return cached(recipe(source, target), lambda: _object(translate(source, target), target))


def recipe(source: Source, target: str) -> dict[str, Any]:
    """All that an object is made from: what the cache knows it by."""
    return {
        "language": "triton",
        "compiler": triton_version(),
        "target": target,
        "source": plain(source),
        "text": kernel_digest(source.module),
        "environment": _environment(),
    }


def _environment() -> dict[str, str]:
    """Triton's own switches, several of which change what it compiles to."""
    paths = ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR")
    names = (name for name in os.environ if name.startswith("TRITON_") and name not in paths)
    return {name: os.environ[name] for name in sorted(names)}


def plain(value: Any) -> Any:
    """A source, or a part of one, as JSON can hold it; equal for what compiles alike."""
    if is_dataclass(value) and not isinstance(value, type):
        # By hand: `asdict` copies all of it first, which takes longer than finding a loaded kernel.
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value if isinstance(value, int | float | str | None) else repr(value)


@cache
def kernel_digest(module: str) -> str:
    """Identity of the text of a kernel's module and of all of ours that it imports."""
    texts = hashlib.sha256()
    for path in sorted(_files(module, {})):
        texts.update(path.read_bytes() + b"\0")
    return texts.hexdigest()


def _files(module: str, seen: dict[Path, None]) -> dict[Path, None]:
    path = _file(module)
    if path is None:
        raise BuildError(f"there is no module {module} to compile a kernel from")
    if path in seen:
        return seen
    seen[path] = None
    for name in _imports(ast.parse(path.read_text())):
        if name.startswith("tilewise.") and _file(name):
            _files(name, seen)
    return seen


def _file(module: str) -> Path | None:
    """Where a module's text is; those of ours are not imported for it, nor their parents."""
    if not module.startswith("tilewise."):
        spec = find_spec(module)
        return Path(spec.origin) if spec and spec.origin else None
    stem = ROOT.joinpath(*module.split(".")[1:])
    return next(filter(Path.is_file, (stem.with_suffix(".py"), stem / "__init__.py")), None)


def _imports(tree: ast.Module) -> list[str]:
    """Names that may be modules; `from a import b` may mean either `a` or `a.b`."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def translate(source: Source, target: str) -> Any:
    """Triton's own result: objects, listings and metadata."""
    import triton
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    function = getattr(import_module(source.module), source.function)
    kinds = {name: _kind(kind, source.is_gluon) for name, kind in source.signature.items()}
    signature = {name: kinds.get(name, "constexpr") for name in function.arg_names}
    attributes = {
        (function.arg_names.index(name),): [["tt.divisibility", factor]]
        for name, factor in source.divisible.items()
    }
    constants = {name: said(value, source) for name, value in source.constants.items()}
    given = {name: value for name, value in source.options.items() if value is not None}
    return triton.compile(
        (GluonASTSource if source.is_gluon else ASTSource)(
            function, signature, constants, attributes
        ),
        target=_gpu_target(target),
        # Triton warns where fusion is left open: its default is about to change.
        options={"enable_fp_fusion": True, **given},
    )


def _kind(kind: str, is_gluon: bool) -> str:
    """The type of an argument; a descriptor of Gluon's gets the layout that suits its box."""
    if not is_gluon or not kind.startswith("tensordesc<") or "(" in kind:
        return kind
    from triton.experimental.gluon import language as gl

    name, _, rest = kind.removeprefix("tensordesc<").partition("[")
    box = [int(size) for size in rest.partition("]")[0].split(",")]
    elements = {"fp32": gl.float32, "i32": gl.int32, "fp16": gl.float16, "bf16": gl.bfloat16}
    layout = gl.NVMMASharedLayout.get_default_for(box, elements.get(name, gl.int8))
    return f"tensordesc<{name}{box},{layout!r}>"


def said(value: Any, source: Source) -> Any:
    """A constant as the language has it."""
    if isinstance(value, tuple):
        parts = [said(part, source) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if not isinstance(value, Word):
        return value
    where = "triton.experimental.gluon.language" if source.is_gluon else "triton.language"
    named = getattr(import_module(where), value.name)
    if value.arguments is None:
        return named
    lists = ((name, list(v) if isinstance(v, tuple) else v) for name, v in value.arguments)
    return named(**dict(lists))


def _gpu_target(target: str) -> Any:
    from triton.backends.compiler import GPUTarget

    if target.startswith("sm_"):
        return GPUTarget("cuda", int(target.removeprefix("sm_")), WARP_SIZES["cuda"])
    return GPUTarget("hip", target, WARP_SIZES["hip"])


def _object(compiled: Any, target: str) -> GpuObject:
    """What we keep of Triton's result."""
    facts = compiled.metadata
    for scratch in ("global_scratch_size", "profile_scratch_size"):
        if getattr(facts, scratch, 0):
            raise BuildError(f"{facts.name} wants {scratch} of Triton, which no launch here gives")
    boxes = tuple(
        Box(sizes=tuple(one["block_size"]), swizzle=SWIZZLES[one["swizzle"]])
        for one in getattr(facts, "tensordesc_meta", None) or ()
    )
    is_cuda = target.startswith("sm_")
    make, image = (cubin_object, "cubin") if is_cuda else (hsaco_object, "hsaco")
    made = make(compiled.asm[image], facts.name, boxes=boxes)
    warp_size = WARP_SIZES["cuda" if is_cuda else "hip"]
    return made.launched_with(threads=facts.num_warps * warp_size, smem_bytes=facts.shared)
