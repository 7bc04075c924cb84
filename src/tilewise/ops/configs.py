"""The instance builder: trait configs become kernels, kernels become JSON and come back.

A config is a list of blocks:

    {"engine": "cpu", "traits": {"tile_m": [64, 128], "tile_n": {"min": 32, "max": 256},
     "pipeline": "*"}, "archs": ["x86_avx2"], "ops": ["gemm"], "filter": "tile_m <= tile_n"}

Only `engine` is required. A trait is a value, an allow-list, `{"values": [...]}`, a range
`{"min": a, "max": b, "step": s}` (both ends included; without a step, the kind's choices between
them), or a wildcard, `"*"` or -1, for every choice of the kind. An absent trait takes its default,
or every choice where it has none. Where an engine has several kinds of kernel for the op, `family`
says which are meant.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from math import prod
from pathlib import Path
from typing import Any

from tilewise.core.arch import Arch, known_archs
from tilewise.core.expressions import Expression, parse
from tilewise.core.kernel import Kernel, Value
from tilewise.core.strict_json import loads
from tilewise.errors import ExpressionError, FileError, InputError, KernelError, closest
from tilewise.ops.contract import Op

SCHEMA = 1
MAX_COMBINATIONS = 2_000_000
"""How many combinations one block may visit; a wider one is a mistake, not a pool."""

_DERIVED = frozenset(("name", "engine", "op"))
_BLOCK_KEYS = ("engine", "traits", "archs", "ops", "filter", "comment")


@dataclass(slots=True)
class Expansion:
    """The kernels of a config on an architecture, and what became of the other combinations."""

    kernels: list[Kernel] = field(default_factory=list)
    impossible: int = 0
    """Combinations that are no kernel at all, on any architecture or on this one."""
    duplicates: int = 0
    filtered: int = 0
    """Combinations that a block's filter leaves out."""
    illegal: Counter[str] = field(default_factory=Counter)
    """Reason -> combinations that are kernels but cannot run on this architecture."""

    @property
    def combinations(self) -> int:
        skipped = self.impossible + self.duplicates + self.filtered + self.illegal.total()
        return len(self.kernels) + skipped


def expand(config: Sequence[Mapping[str, Any]], op: Op, arch: Arch) -> list[Kernel]:
    """Every kernel of `config` that is legal on `arch`, once each, in a fixed order."""
    return expand_counted(config, op, arch).kernels


def expand_counted(config: Sequence[Mapping[str, Any]], op: Op, arch: Arch) -> Expansion:
    """The same with counts of what was skipped, and why."""
    if not isinstance(config, Sequence) or isinstance(config, str | bytes):
        raise InputError(f"a config is a list of blocks, not {type(config).__name__}")
    expander = _Expander(op, arch)
    for position, block in enumerate(config):
        at = f"block {position}"
        _check_block(block, at)
        if arch.name not in block.get("archs", [arch.name]):
            continue
        if op.name in block.get("ops", [op.name]):
            expander.add(block, at)
    return expander.result


def load_pool(op: Op, arch: Arch, engines: Iterable[str] | None = None) -> list[Kernel]:
    """The shipped kernels of an op that are legal on `arch`, from its folder's pool files."""
    wanted = None if engines is None else set(engines)
    config = [
        block
        for path in sorted((op.folder / "pool").glob("*.json"))
        for block in read_config(path)
        if wanted is None or block.get("engine") in wanted
    ]
    return expand(config, op, arch)


def read_config(path: Path) -> list[dict[str, Any]]:
    """The blocks of a config file."""
    try:
        config = loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise FileError(f"{path.name} is not a config: {error}") from None
    if not isinstance(config, list) or not all(isinstance(block, dict) for block in config):
        raise FileError(f"{path.name} is not a config: it must be a list of blocks")
    return config


def filter_kernels(
    kernels: Iterable[Kernel], expression: str, kinds: Iterable[type[Kernel]] = ()
) -> list[Kernel]:
    """Those for which the expression holds, such as `tile_n >= 128 and pipeline == 'tma'`.

    Known are the fields of every kind among `kernels` and `kinds`, `name`, `engine` and `op`. A
    kernel without one of the fields that the expression names is left out.
    """
    given = list(kernels)
    every = {*kinds, *(type(kernel) for kernel in given)}
    names = {kind: frozenset(f.name for f in fields(kind)) for kind in every}
    test = parse(expression, _DERIVED.union(*names.values()))
    return [k for k in given if test.fields <= names[type(k)] | _DERIVED and _holds(test, k)]


def _holds(test: Expression, kernel: Kernel) -> bool:
    return bool(test({name: getattr(kernel, name) for name in test.fields}))


def dump_kernels(kernels: Iterable[Kernel]) -> str:
    """JSON text with every field of every kernel; `load_kernels` gives the same values back."""
    lines = ",\n".join(json.dumps(kernel.to_dict()) for kernel in kernels)
    return f'{{"schema": {SCHEMA}, "kernels": [\n{lines}\n]}}\n'


def load_kernels(text: str, op: Op) -> list[Kernel]:
    """The kernels of `op` that `dump_kernels` wrote."""
    try:
        data = loads(text)
    except ValueError as error:
        raise FileError(f"not JSON: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("kernels"), list):
        raise FileError('not a kernel file: it must be {"schema": 1, "kernels": [...]}')
    if data.get("schema") != SCHEMA:
        raise FileError(f"schema is {data.get('schema')!r}; this version reads {SCHEMA}")
    return [_load(entry, op, f"kernels[{at}]") for at, entry in enumerate(data["kernels"])]


def _load(entry: Any, op: Op, at: str) -> Kernel:
    if not isinstance(entry, dict) or not {"op", "engine"} <= entry.keys():
        raise KernelError(f"{at}: it must be an object with op, engine and traits")
    if entry["op"] != op.name:
        raise KernelError(f"{at}: op is {entry['op']!r}; these must be kernels of {op.name}")
    try:
        kind = op.kernel_type(str(entry["engine"]), entry.get("family"))
        for trait in kind.traits():
            if trait.name in entry:
                _check_value(trait, entry[trait.name])
        return kind.from_dict(entry)
    except InputError as error:
        raise KernelError(f"{at}: {error}") from None


def _check_block(block: Any, at: str) -> None:
    if not isinstance(block, Mapping) or "engine" not in block:
        raise InputError(f"{at}: it must be an object with an engine and traits")
    unknown = set(block) - set(_BLOCK_KEYS)
    if unknown:
        raise InputError(f"{at}: unknown keys {sorted(unknown)}; use {', '.join(_BLOCK_KEYS)}")
    for key in ("archs", "ops"):
        value = block.get(key, [])
        if not isinstance(value, list | tuple):
            raise InputError(f"{at}: {key} is {value!r}; it must be a list of names")
    strange = [name for name in block.get("archs", []) if name not in known_archs()]
    if strange:
        raise InputError(f"{at}: archs {strange} are unknown; known: {', '.join(known_archs())}")
    if not isinstance(block.get("traits", {}), Mapping):
        raise InputError(f"{at}: traits is {block['traits']!r}; it must be an object")


def _kinds(
    op: Op, block: Mapping[str, Any], at: str
) -> list[tuple[type[Kernel], Mapping[str, Any]]]:
    """The kinds of kernel that a block's families belong to, each with the traits asked of it."""
    kinds, traits = op.types_of(block["engine"]), block.get("traits", {})
    asked = traits.get("family", "*")
    if isinstance(asked, Mapping) and set(asked) == {"values"}:
        asked = asked["values"]
    if len(kinds) == 1 or asked in ("*", -1):
        return [(kind, traits) for kind in kinds]
    words = asked if isinstance(asked, list | tuple) else [asked]
    every = [family for kind in kinds for family in kind.families()]
    strange = [word for word in words if word not in every]
    if strange or not words:
        raise InputError(f"{at}: family is {asked!r}; use one of {_listed(every)}")
    own = {kind: [word for word in words if word in kind.families()] for kind in kinds}
    return [(kind, {**traits, "family": own[kind]}) for kind in kinds if own[kind]]


def _block_filter(kind: type[Kernel], block: Mapping[str, Any], at: str) -> Expression | None:
    if "filter" not in block:
        return None
    if not isinstance(block["filter"], str):
        raise InputError(f"{at}: filter is {block['filter']!r}; it must be an expression in text")
    try:
        return parse(str(block["filter"]), {f.name for f in fields(kind)} | _DERIVED)
    except ExpressionError as error:
        raise InputError(f"{at}: filter: {error}") from None


class _Expander:
    """Expands the blocks of a config for an op on an architecture, one after the other."""

    def __init__(self, op: Op, arch: Arch) -> None:
        self.result = Expansion()
        self._op, self._arch = op, arch
        self._seen: set[Kernel] = set()

    def add(self, block: Mapping[str, Any], at: str) -> None:
        for kind, traits in _kinds(self._op, block, at):
            choices = _choices(kind, traits, at)
            test = _block_filter(kind, block, at)
            for values in self._combinations(kind, choices, test, at):
                self._judge(kind, values, test)

    def _judge(self, kind: type[Kernel], values: dict[str, Any], test: Expression | None) -> None:
        """Keeps a combination, or counts why it is left out."""
        try:
            kernel = kind(**values)
        except KernelError:
            self.result.impossible += 1
            return
        if test and not _holds(test, kernel):
            self.result.filtered += 1
        elif (why := self._op.why_unusable(kernel, None, self._arch)) is not None:
            self.result.illegal[why] += 1
        elif kernel in self._seen:
            self.result.duplicates += 1
        else:
            self._seen.add(kernel)
            self.result.kernels.append(kernel)

    def _combinations(
        self,
        kind: type[Kernel],
        choices: Mapping[str, tuple[Value, ...]],
        test: Expression | None,
        at: str,
    ) -> Iterator[dict[str, Any]]:
        """Every combination of the choices, less the branches that the kind or the filter cuts."""
        names = list(choices)
        sizes = [len(choices[name]) for name in names]
        below = [prod(sizes[depth:]) for depth in range(len(names) + 1)]
        asked = test.fields if test else frozenset()
        # The filter speaks as soon as its last field is set, unless the kind may change values yet.
        decided = max((names.index(n) for n in asked if n in choices), default=len(names))
        decided = decided if asked <= choices.keys() and kind.keeps_values else len(names)
        visited = 0

        def descend(depth: int, values: dict[str, Any]) -> Iterator[dict[str, Any]]:
            nonlocal visited
            if depth == len(names):
                yield dict(values)
                return
            name = names[depth]
            for value in choices[name]:
                visited += 1
                if visited > MAX_COMBINATIONS:
                    raise InputError(
                        f"{at}: more than {MAX_COMBINATIONS:,} combinations; name fewer values"
                    )
                values[name] = value
                if kind.is_dead_end(values, self._arch):
                    self.result.impossible += below[depth + 1]
                elif depth == decided and test and not test(values):
                    self.result.filtered += below[depth + 1]
                else:
                    yield from descend(depth + 1, values)
            del values[name]

        has_op = any(f.name == "op_name" for f in fields(kind))
        yield from descend(0, {"op_name": self._op.name} if has_op else {})


def _choices(
    kind: type[Kernel], traits: Mapping[str, Any], at: str
) -> dict[str, tuple[Value, ...]]:
    """The values of every trait, in the kind's order."""
    known = {f.name: f for f in kind.traits()}
    for name in traits:
        if name not in known:
            meant = closest(name, known)
            hint = f"did you mean {meant!r}?" if meant else f"it has {', '.join(known)}"
            shown = repr(str(name)[:200])
            raise InputError(f"{at}: a {kind.__name__} has no trait {shown}; {hint}")
    choices = {}
    for name, trait in known.items():
        try:
            choices[name] = _values(trait, traits[name]) if name in traits else _absent(trait)
        except KernelError as error:
            raise InputError(f"{at}: {error}") from None
    return choices


def _absent(trait: Field[Any]) -> tuple[Value, ...]:
    every: tuple[Value, ...] = trait.metadata["choices"]
    return every if trait.default is MISSING else (trait.default,)


def _values(trait: Field[Any], spec: Any) -> tuple[Value, ...]:
    every: tuple[Value, ...] = trait.metadata["choices"]
    if spec == "*" or (spec == -1 and type(spec) is int):
        return every
    if isinstance(spec, Mapping):
        return _values(trait, spec["values"]) if set(spec) == {"values"} else _range(trait, spec)
    given = spec if isinstance(spec, list | tuple) else [spec]
    if not given:
        raise KernelError(f"{trait.name} is an empty list; name a value, or leave the trait out")
    for value in given:
        _check_value(trait, value)
    return tuple(dict.fromkeys(given))


def _range(trait: Field[Any], spec: Mapping[str, Any]) -> tuple[Value, ...]:
    every: tuple[Value, ...] = trait.metadata["choices"]
    shape = (
        f'{trait.name} is {dict(spec)!r}; use {{"min": a, "max": b, "step": s}} or {{"values": []}}'
    )
    if not {"min", "max"} <= set(spec) <= {"min", "max", "step"}:
        raise KernelError(shape)
    if type(every[0]) is not int:
        raise KernelError(f"{shape}; a range fits numbers only, choose from {_listed(every)}")
    low, high, step = spec["min"], spec["max"], spec.get("step")
    if not all(type(x) is int for x in (low, high, 1 if step is None else step)):
        raise KernelError(f"{shape}; all three are integers")
    if low < 0 or high < low or (step is not None and step < 1):
        raise KernelError(f"{shape}; 0 <= min <= max, and step is at least 1")
    if step is not None:
        if (high - low) // step >= MAX_COMBINATIONS:
            raise KernelError(f"{shape}; it has more than {MAX_COMBINATIONS:,} values")
        return tuple(range(low, high + 1, step))
    inside = tuple(value for value in every if low <= int(value) <= high)
    if not inside:
        raise KernelError(f"{shape}; no choice lies between, they are {_listed(every)}")
    return inside


def _check_value(trait: Field[Any], value: Any) -> None:
    """Raises unless the value has the trait's type and, for text, is one of its choices."""
    every: tuple[Value, ...] = trait.metadata["choices"]
    wanted = type(every[0])
    if type(value) is not wanted:
        raise KernelError(
            f"{trait.name} is {value!r}; it must be {wanted.__name__}, like {_listed(every)}"
        )
    if wanted is str and value not in every:
        raise KernelError(f"{trait.name} is {value!r}; use one of {_listed(every)}")


def _listed(values: Iterable[Value]) -> str:
    return ", ".join(map(str, values))
