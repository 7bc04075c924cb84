"""What `validate` and `bench` share: the device, who takes part on it, and who chooses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from tilewise.cli.console import bearable
from tilewise.cli.sweep import (
    device_kind,
    executor,
    settled_policy,
    with_vendor,
)
from tilewise.core.arch import Arch
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import Policy
from tilewise.core.model import Model
from tilewise.engines import engines_for
from tilewise.errors import InputError
from tilewise.ops.contract import get_op

if TYPE_CHECKING:
    from tilewise.dispatch import Dispatcher, Registry
    from tilewise.sweep.local import Executor
    from tilewise.sweep.recording import Recording

PolicyOption = Annotated[
    str, typer.Option("--policy", help="cpu, gpu, graph, quick or careful, and FIELD=VALUE words.")
]
TimeoutOption = Annotated[
    float,
    typer.Option("--timeout", min=0.01, callback=bearable, help="Seconds for one kernel."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A device to measure on, or a recording of one, as the options ask for it."""

    arch: str
    kind: str
    policy: Policy
    timeout: float
    replay: Path | None = None
    recording: Recording | None = None

    @classmethod
    def of(
        cls, arch: str | None, policy: str, timeout: float, replay: Path | None = None
    ) -> Session:
        if replay is not None:
            from tilewise.sweep.recording import Recording

            found = Recording.load(replay, arch=arch or "", policy=policy)
            return cls(
                arch=found.where,
                kind="cpu",
                policy=found.policy,
                timeout=timeout,
                replay=replay,
                recording=found,
            )
        kind = device_kind(arch)
        return cls(
            arch=arch.partition(":")[0] if arch else "",
            kind=kind,
            policy=settled_policy(policy, kind),
            timeout=timeout,
        )

    def engines(self, op: str) -> tuple[str, ...]:
        """Those that run kernels of an op on such a device."""
        return engines_for(self.kind, get_op(op))

    def executor(self, op: str) -> Executor:
        """One worker: several would share the device that is being timed."""
        from tilewise.sweep.crew import WorkerConfig
        from tilewise.sweep.supervisor import Limits

        config = WorkerConfig(
            engines=self.engines(op),
            policy=self.policy,
            kind=self.kind,
            arch=self.arch,
            replay=str(self.replay) if self.replay else "",
            limits=Limits(timeout_s=self.timeout),
        )
        return executor("local", config, 1, "")

    def registry(self, op: str, arch: Arch, expression: str | None = None) -> Registry:
        """What `tilewise.select` chooses from, less foreign kernels; or what was recorded.

        The vendor's kernel stays whatever the filter says.
        """
        from tilewise.dispatch import Registry, default_registry
        from tilewise.engines import is_foreign

        if self.recording:
            registry = Registry(op, arch, name="recorded")
            rules = registry.op.why_unusable
            recorded = self.recording.kernels(op)
            registry.declare([k for k in recorded if rules(k, None, arch) is None])
        else:
            registry = default_registry(op, arch).filter(lambda k: not is_foreign(k.engine))
        if not expression:
            return registry
        return registry.filter(expression).merge(registry.filter(lambda k: k.engine == "vendor"))

    def with_vendors(self, op: str, kernels: list[Kernel]) -> list[Kernel]:
        """The kernels, and every routine of the vendor's that the device has."""
        if self.replay:
            return kernels
        own = [kernel for kernel in kernels if kernel.engine != "vendor"]
        return with_vendor(own, op, list(self.engines(op)), None)


def dispatcher_of(registry: Registry, model: Model | None) -> Dispatcher:
    """Whoever `tilewise.select` would ask, or the model given."""
    if model is None:
        return registry.dispatcher
    from tilewise.dispatch import Dispatcher
    from tilewise.selection.ranker import ModelRanker

    op, arch = registry.op.name, registry.arch.name
    if (model.op, model.arch) != (op, arch):
        raise InputError(
            f"{model.name} is for {model.op} on {model.arch}; this is {op} on {arch}. "
            "Name another model, or leave --model out"
        )
    return Dispatcher(registry, rankers=[ModelRanker(model)])


@contextmanager
def store_folder(given: Path | None) -> Iterator[Path]:
    """The folder given, or one that is gone afterwards."""
    if given is not None:
        yield given
        return
    with TemporaryDirectory(prefix="tilewise-") as folder:
        yield Path(folder)
