"""A store to replay: what was measured on one device under one policy."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from tilewise.core.arch import Arch, known_archs, load_arch
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import Measurement, Policy
from tilewise.core.problem import Problem
from tilewise.data.store import Store
from tilewise.errors import InputError
from tilewise.ops.contract import get_op
from tilewise.ops.fields import recorded_arch
from tilewise.sweep.device_info import kernels_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Measurements that differ in problem and kernel alone, each the one that holds."""

    rows: Sequence[Measurement]
    arch: Arch
    """Under the recorded device's name."""
    toolchains: Mapping[str, Mapping[str, str]]
    """By engine, then by `kernels_of`."""
    policy: Policy
    pairs: frozenset[tuple[str, str]]
    """Keys of problem and kernel."""

    @classmethod
    def load(cls, path: Path | str, *, arch: str = "", policy: str = "") -> Recording:
        """The recording in a store. Where it mixes several, `arch` and `policy` say which.

        `arch` is a name or `name:device`, `policy` the beginning of a policy's key.
        """
        rows = list(Store(path).measurements())
        if not rows:
            raise InputError(f"{path} has no measurements to replay; name a store that has some")
        for row in rows:
            row.check()
        name, _, device = arch.partition(":")
        rows = _only(
            *(path, rows, "--arch", arch, lambda row: f"{row.arch}:{row.device}"),
            fits=lambda row: name in ("", row.arch) and device in ("", row.device),
        )
        rows = _only(
            *(path, rows, "--policy", policy, _spell_policy),
            fits=lambda row: row.policy_key.startswith(policy),
        )
        toolchains: dict[str, dict[str, str]] = {}
        families = {row.kernel_key: row.kernel_fields for row in rows}
        families = {key: json.loads(text).get("family", "") for key, text in families.items()}
        for row in rows:
            unit = kernels_of(row.op, families[row.kernel_key])
            known = toolchains.setdefault(row.engine, {}).setdefault(unit, row.toolchain)
            if row.toolchain != known:
                raise InputError(
                    f"{path} mixes toolchains of the engine {row.engine}, {row.toolchain} and "
                    f"{known}; replay a store that has one of them"
                )
        if rows[0].arch not in known_archs():
            raise InputError(f"{path} was recorded on {rows[0].arch}, which has no data file here")
        return cls(
            rows=rows,
            arch=_arch_of(rows[0]),
            toolchains=toolchains,
            policy=Policy.from_dict(json.loads(rows[0].policy)),
            pairs=frozenset((row.problem_key, row.kernel_key) for row in rows),
        )

    @property
    def where(self) -> str:
        """The architecture and the device, as `load` takes them."""
        return f"{self.arch.name}:{self.arch.device}"

    @property
    def tried(self) -> dict[str, int]:
        """Problem key -> how many kernels, where only the most promising ones were measured."""
        texts = {row.problem_key: row.labels for row in self.rows}
        labels = {key: json.loads(text or "{}") for key, text in texts.items()}
        return {key: found["top"] for key, found in labels.items() if "top" in found}

    def kernels(self, op: str) -> list[Kernel]:
        """The kernels of an op, in the order recorded."""
        texts = dict.fromkeys(row.kernel_fields for row in self.rows if row.op == op)
        if not texts:
            ops = ", ".join(sorted({row.op for row in self.rows}))
            raise InputError(f"--op is {op}; what is to be replayed was recorded for {ops}")
        return [get_op(op).kernel_from_dict(json.loads(text)) for text in texts]

    def why_unusable(self, kernel: Kernel, problem: Problem | None, arch: Arch) -> str | None:
        """Only what was recorded can be replayed; whether it would be legal today is no matter."""
        if problem is None or (problem.key, kernel.key) in self.pairs:
            return None
        return "it was never recorded on this problem"


def _only(
    path: Path | str,
    rows: list[Measurement],
    option: str,
    given: str,
    value: Callable[[Measurement], str],
    fits: Callable[[Measurement], bool],
) -> list[Measurement]:
    """The rows that fit; raises where there are none, or of several kinds."""
    kept = [row for row in rows if fits(row)]
    found = Counter(map(value, kept or rows))
    shown = "; ".join(f"{kind} ({count:,} rows)" for kind, count in found.most_common())
    if not kept:
        raise InputError(f"{option} is {given!r}; {path} was recorded with {shown}")
    if len(found) > 1:
        raise InputError(f"{path} mixes recordings: {shown}; choose one with {option}")
    return kept


def _arch_of(row: Measurement) -> Arch:
    """The recorded device, with its figures where the row carries them."""
    if row.figures:
        return recorded_arch(row.arch, row.device, row.figures)
    return load_arch(row.arch).with_figures(device=row.device)


def _spell_policy(row: Measurement) -> str:
    """The key's beginning, which names the policy to `--policy`, and what is special about it."""
    policy = Policy.from_dict(json.loads(row.policy))
    usual = Policy()
    words = [
        f"{f.name}={getattr(policy, f.name)}"
        for f in fields(Policy)
        if getattr(policy, f.name) != getattr(usual, f.name)
    ]
    return " ".join([row.policy_key[:12], *words])
