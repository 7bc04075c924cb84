"""Measurements and the policies they are taken under; both are data with an identity."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from math import inf
from typing import Any, Self

from tilewise.core.faults import fault_of
from tilewise.core.identity import SCHEMA, canonical_json, digest
from tilewise.core.kernel import Kernel
from tilewise.core.problem import Problem
from tilewise.core.strict_json import loads
from tilewise.core.words import pairs_of
from tilewise.errors import InputError, nearest

STATUSES = (
    "ok",
    "compile_error",
    "over_limit",
    "launch_error",
    "timeout",
    "crash",
    "out_of_memory",
    "wrong_result",
)
"""What can become of a kernel on a problem; all but the first are failures."""

BUILD_FAILURES = ("compile_error", "over_limit")
"""Failures that say something about the kernel on every problem."""

STAGES = ("first", "retry", "leader")
"""Why a row was measured: first seen, a failure tried again, or a leader confirmed."""

UNSTEADY = 0.3
"""A spread this large, relatively, is not a GPU kernel's own. On an H200 102 of 160,000 readings
had one, half of them the vendor's, whose launches take the host longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a kernel is timed. Times under different policies are different facts."""

    cache: str = "hot"
    """`hot`: operands stay in cache between calls; `cold`: caches are flushed before each."""
    launch: str = "eager"
    """`eager`: one launch a call; `graph`: the call is captured and replayed (GPU only)."""
    time_ms: float = 50.0
    """How long the timed calls of one kernel should take together."""
    warmup: int = 3
    """Untimed calls before the timed ones, the checked one not counted."""
    min_repeats: int = 5
    max_repeats: int = 100
    threads: int = 0
    """CPU threads of a kernel; 0 stands for all that the process may use."""
    rounds: int = 5
    """How often the leaders of a problem are measured again, in turn; 0 leaves that out."""
    noise: float = 0.03
    """Medians this close to the best, relatively, count as leaders whatever their spread."""
    max_leaders: int = 8
    seed: int = 0
    """Of the random inputs."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value: Any = getattr(self, f.name)
            if isinstance(f.default, str):
                continue
            kind = float if isinstance(f.default, float) else int
            number = (int, float) if kind is float else int
            if not isinstance(value, number) or isinstance(value, bool) or not 0 <= value < 1e9:
                what = "an integer" if kind is int else "a number"
                raise InputError(f"policy {f.name} is {value!r}; it must be {what} from 0 to 1e9")
            object.__setattr__(self, f.name, kind(value))
        for name, allowed in (("cache", ("hot", "cold")), ("launch", ("eager", "graph"))):
            if getattr(self, name) not in allowed:
                raise InputError(
                    f"policy {name} is {getattr(self, name)!r}; use {' or '.join(allowed)}"
                )
        if not 1 <= self.min_repeats <= self.max_repeats:
            raise InputError(
                f"policy repeats are {self.min_repeats} to {self.max_repeats}; "
                "at least one is needed, and the most cannot be below the least"
            )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        unknown = set(values) - {f.name for f in fields(cls)}
        if unknown:
            known = ", ".join(f.name for f in fields(cls))
            raise InputError(f"a policy has no {', '.join(sorted(unknown))}; it has {known}")
        return cls(**values)

    @property
    def key(self) -> str:
        """Identity on disk."""
        return digest({"policy": self.to_dict()})


TIMED = ("cache", "launch", "threads")
"""Fields of a policy that say what is timed; the others say how often, and whose times."""


def json_object(text: str, what: str) -> dict[str, Any]:
    """The object that a row holds as text; `what` names it in the error where it is none."""
    try:
        found = loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InputError(
            f"{what} is not a JSON object: {text[:80]!r}; `data check` lists such rows"
        )
    return found


@lru_cache(maxsize=8192)
def _is_object(text: str) -> bool:
    try:
        json_object(text, "")
    except InputError:
        return False
    return True


LEAST_US = 1e-6
"""Of a time: light comes a third of a millimetre far."""


def check_time(where: str, name: str, value: float | None) -> None:
    """Raises where a right result has no time, or one that cannot be."""
    if value is None or not LEAST_US <= value < inf:
        raise InputError(f"{where} has a {name} of {value}; `data check` lists such rows")


def what_is_timed(policy: str) -> str:
    """What a policy's JSON says beside how often and whose times are read."""
    given = json_object(policy, "a policy")
    return json.dumps({name: given.get(name) for name in TIMED})


def way_of_timing(policy: str) -> str:
    """The same without the number of threads: those differ as devices do, and stand side by side.

    Times with a cold cache and with a warm one are different facts, which no figure tells apart.
    """
    timed = json_object(what_is_timed(policy), "a policy")
    return json.dumps({name: value for name, value in timed.items() if name != "threads"})


POLICIES: dict[str, Policy] = {
    "cpu": Policy(),
    "gpu": Policy(cache="cold", time_ms=2.0, warmup=1, min_repeats=3, max_repeats=20),
    "graph": Policy(
        cache="cold", launch="graph", time_ms=2.0, warmup=1, min_repeats=3, max_repeats=20
    ),
    "quick": Policy(time_ms=5.0, warmup=1, min_repeats=3, max_repeats=20, rounds=0),
    "careful": Policy(time_ms=200.0, warmup=10, min_repeats=20, max_repeats=1000, rounds=10),
}


def parse_policy(text: str, kind: str = "cpu") -> Policy:
    """A policy from words such as `graph` or `quick,cache=cold,repeats=20`.

    The first word may name a policy; without one the default of the `kind` of device is changed.
    `repeats=N` sets the least and the most at once.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    base = POLICIES[kind]
    if words and "=" not in words[0]:
        name = words.pop(0)
        if name not in POLICIES:
            meant = nearest(name, POLICIES)
            known = ", ".join(POLICIES)
            raise InputError(f"policy {name!r} is unknown; use one of {known}{meant}")
        base = POLICIES[name]
    values: dict[str, Any] = {}
    for name, value in pairs_of(words, "quick,cache=cold").items():
        for target in ("min_repeats", "max_repeats") if name == "repeats" else (name,):
            values[target] = _number(value)
    return Policy.from_dict({**base.to_dict(), **values})


def _number(text: str) -> int | float | str:
    if re.fullmatch(r"[0-9]{1,18}", text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all measurements of one engine in one sweep share."""

    arch: str
    device: str
    toolchain: str
    policy: Policy
    figures: str = ""
    """JSON of the device's figures, where they are known; no part of any key."""
    policy_key: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy_key", self.policy.key)

    def key(self, problem_key: str, kernel_key: str) -> str:
        """The row key: the identity of one kernel on one problem in this setting."""
        return row_key(problem_key, kernel_key, self.device, self.toolchain, self.policy_key)


_SOURCES = "; sources "


def with_sources(toolchain: str, digest: str) -> str:
    """A toolchain that also tells which text of the kernels it compiled."""
    return f"{toolchain}{_SOURCES}{digest}"


def sources_of(toolchain: str) -> str:
    """The digest of the kernels' sources; empty in rows of version 0.1.0."""
    return toolchain.rpartition(_SOURCES)[2] if _SOURCES in toolchain else ""


def row_key(problem: str, kernel: str, device: str, toolchain: str, policy: str) -> str:
    """The identity of a measurement; problem, kernel and policy are given by their keys.

    It is the `digest` of the five by name, put together from parts that are the same for all rows
    of a sweep: resuming takes one key for every pair, finished or not.
    """
    start, middle, end = _key_text(device, toolchain, policy)
    return hashlib.sha256(f"{start}{kernel}{middle}{problem}{end}".encode()).hexdigest()


@lru_cache(maxsize=256)
def _key_text(device: str, toolchain: str, policy: str) -> tuple[str, str, str]:
    """The canonical JSON of a row's identity, cut where the keys of kernel and problem stand."""
    before = canonical_json({"device": device, "kernel": ""})[:-2]
    between = canonical_json({"policy": policy, "problem": ""})[1:-2]
    after = canonical_json({"schema": SCHEMA, "toolchain": toolchain})[1:]
    return before, f'",{between}', f'",{after}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One kernel on one problem on one device under one policy, success or failure.

    Fields are the columns of the store. Numbers that were not measured are None.
    """

    key: str
    problem_key: str
    kernel_key: str
    policy_key: str
    op: str
    dtype: str
    problem: str
    """Canonical JSON of `Problem.to_dict`."""
    labels: str = "{}"
    """JSON of what is known about the problem, for example the network it comes from."""
    engine: str
    kernel: str
    """The kernel's name."""
    kernel_fields: str
    """Canonical JSON of `Kernel.to_dict`."""
    arch: str
    device: str
    figures: str = ""
    """JSON of the figures of the device when it was measured; empty in rows before 0.2."""
    toolchain: str
    policy: str
    """Canonical JSON of `Policy.to_dict`."""
    stage: str = "first"
    attempt: int = 0
    """Counts the measurements of one key; see `rank` for the one that holds."""
    status: str
    message: str = ""
    time_us: float | None = None
    """The median of the timed calls."""
    spread_us: float | None = None
    """The interquartile range of the timed calls."""
    min_us: float | None = None
    repeats: int = 0
    tflops: float | None = None
    gb_s: float | None = None
    rel_error: float | None = None
    registers: int | None = None
    spills: int | None = None
    smem_bytes: int | None = None
    threads: int | None = None
    workspace_bytes: int | None = None
    tactic: str = ""
    """JSON of how the vendor's library says it served the problem; empty where it does not say."""
    compile_s: float | None = None
    run_id: str = ""
    version: str = ""
    measured_at: float = 0.0
    """Seconds since 1970."""

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"

    def torn(self) -> dict[str, str]:
        """What ought to be JSON objects and is not: column -> text."""
        texts = {"problem": self.problem, "kernel_fields": self.kernel_fields}
        texts |= {"policy": self.policy, "labels": self.labels, "tactic": self.tactic or "{}"}
        texts["figures"] = self.figures or "{}"
        return {name: text for name, text in texts.items() if not _is_object(text)}

    def check(self) -> None:
        """Raises where the row cannot be read: torn JSON, or a time that is none."""
        where = f"{self.kernel} (row {self.key[:16]})"
        for name, text in self.torn().items():
            json_object(text, f"{where}: {name}")  # raises
        if self.is_ok:
            check_time(where, "time_us", self.time_us)

    @property
    def is_fault(self) -> bool:
        """Whether it tells of the machine in place of the kernel; versions before 0.2 kept such."""
        return fault_of(self.status, self.message) is not None

    @property
    def identity(self) -> tuple[str, int]:
        """No two rows of a store share it."""
        return self.key, self.attempt

    @property
    def is_verdict(self) -> bool:
        """Whether the kernel ran to its end: its result is wrong, or right with a time."""
        return self.status == "wrong_result" or (self.is_ok and self.time_us is not None)

    @property
    def rank(self) -> tuple[bool, int]:
        """Of several rows of one key the highest holds: the last verdict, else the last row."""
        return self.is_verdict, self.attempt

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def of(
        cls, problem: Problem, kernel: Kernel, setting: Setting, *, status: str, **values: Any
    ) -> Self:
        """The row of a problem and a kernel; rates follow from the time."""
        problem_key, problem_text = _identity(problem)
        kernel_key, kernel_text = _identity(kernel)
        values = {name: _rounded(name, value) for name, value in values.items()}
        row = cls(
            key=setting.key(problem_key, kernel_key),
            problem_key=problem_key,
            kernel_key=kernel_key,
            policy_key=setting.policy_key,
            op=problem.op,
            dtype=problem.dtype,
            problem=problem_text,
            engine=kernel.engine,
            kernel=kernel.name,
            kernel_fields=kernel_text,
            arch=setting.arch,
            device=setting.device,
            figures=setting.figures,
            toolchain=setting.toolchain,
            policy=_identity(setting.policy)[1],
            status=status,
            **values,
        )
        if row.time_us is None or row.time_us <= 0:
            return row
        return replace(
            row,
            tflops=problem.flops / row.time_us * 1e-6,
            gb_s=problem.bytes / row.time_us * 1e-3,
        )


def _rounded(name: str, value: Any) -> Any:
    """Further digits of what is only shown, never computed with, would be most of a store."""
    if name == "measured_at":
        return round(value, 1)
    if name in ("rel_error", "compile_s") and value is not None:
        return float(f"{value:.3g}")
    return value


@lru_cache(maxsize=4096)
def _identity(value: Problem | Kernel | Policy) -> tuple[str, str]:
    """Key and canonical JSON; the rows of a store repeat few of each."""
    return value.key, canonical_json(value.to_dict())
