"""What `sweep`, `validate` and `bench` share: the device, who takes part on it, who chooses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from tilewise.cli.console import bearable, filtered
from tilewise.core.arch import Arch, load_arch
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import Policy, parse_policy
from tilewise.core.model import Model
from tilewise.engines import engines_for
from tilewise.errors import ExpressionError, InputError
from tilewise.ops.configs import filter_kernels
from tilewise.ops.contract import get_op
from tilewise.ops.vendor import LIBRARIES, VendorKernel

if TYPE_CHECKING:
    from tilewise.dispatch import Dispatcher, Registry
    from tilewise.sweep.crew import WorkerConfig
    from tilewise.sweep.local import Executor
    from tilewise.sweep.recording import Recording

PolicyOption = Annotated[
    str, typer.Option("--policy", help="cpu, gpu, graph, quick or careful, and FIELD=VALUE words.")
]
TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout", min=0.01, callback=bearable, help="Time limit for one kernel, in seconds."
    ),
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

    def config(
        self, op: str, engines: Sequence[str] = (), *, batch: int = 20, jobs: int = 0
    ) -> WorkerConfig:
        """The settings of workers of this device; without `engines` they have all of the op's."""
        from tilewise.sweep.crew import WorkerConfig
        from tilewise.sweep.supervisor import Limits

        return WorkerConfig(
            engines=tuple(engines) or self.engines(op),
            policy=self.policy,
            kind=self.kind,
            arch=self.arch,
            replay=str(self.replay) if self.replay else "",
            limits=Limits(timeout_s=self.timeout, batch=batch),
            jobs=jobs,
        )

    def executor(self, op: str) -> Executor:
        """One worker: several would share the device that is being timed."""
        return executor("local", self.config(op), 1, "")

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
        return filtered(registry, expression).merge(registry.filter(lambda k: k.engine == "vendor"))

    def with_vendors(self, op: str, kernels: list[Kernel]) -> list[Kernel]:
        """The kernels, and every routine of the vendor's that this machine has."""
        if self.replay:
            return kernels
        own = [kernel for kernel in kernels if kernel.engine != "vendor"]
        return with_vendor(own, op, list(self.engines(op)), None, libraries_here())


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


def settled_policy(text: str, kind: str) -> Policy:
    """The policy asked for; on a CPU with the number of threads, which is part of its identity."""
    policy = parse_policy(text, kind)
    if kind == "cpu" and policy.launch == "graph":
        raise InputError("policy launch is 'graph'; a CPU has no graphs: use launch=eager")
    if kind != "cpu" or policy.threads:
        return policy
    from tilewise.settings import settings

    return replace(policy, threads=settings().threads)


def device_kind(arch: str | None) -> str:
    """`cpu` or `gpu`, without touching the device: that is left to workers."""
    if arch:
        return load_arch(arch).kind
    from tilewise.sweep.device_info import visible_gpus

    return "gpu" if visible_gpus() else "cpu"


def libraries_here() -> tuple[str, ...]:
    """The vendors' libraries that are installed; one that is not has nothing to be timed."""
    return tuple(library for library in LIBRARIES if find_spec(library) is not None)


def with_vendor(
    kernels: list[Kernel],
    op: str,
    engines: list[str],
    expression: str | None,
    libraries: Sequence[str] = LIBRARIES,
) -> list[Kernel]:
    """The kernels and the vendor's, which is measured like any other.

    A filter on tiles would leave the vendor out, which has none; it stays unless the filter is
    about engines, or `--engines` does not name it. Where such a filter leaves no other kernel it
    is refused: the vendor alone is not what was asked for.
    """
    if "vendor" not in engines or any(k.engine == "vendor" for k in kernels):
        return kernels
    vendors: list[Kernel] = [VendorKernel(op_name=op, library=library) for library in libraries]
    is_about_engines = re.search(r"\bengine\b", expression or "") is not None
    if expression and not kernels and not is_about_engines:
        raise InputError(
            f"--filter {expression!r} leaves no kernel of {op}; `tilewise kernels list --op {op}` "
            "shows what there is, and --filter \"engine == 'vendor'\" is for the vendor alone"
        )
    if is_about_engines:
        try:
            vendors = filter_kernels(vendors, expression or "")
        except ExpressionError:  # it names fields that the vendor does not have
            vendors = []
    return [*kernels, *vendors]


def executor(on: str, config: WorkerConfig, workers: int, address: str) -> Executor:
    """Where the sweep runs."""
    if on == "ray":
        from tilewise.sweep.ray_backend import RayExecutor

        return RayExecutor(config, workers=workers, address=address)
    if on != "local":
        raise InputError(f"--on is {on!r}; use local or ray")
    if address:
        raise InputError(f"--address {address} is a Ray cluster's; add --on ray")
    from tilewise.sweep.device_info import visible_gpus
    from tilewise.sweep.local import LocalExecutor

    gpus = visible_gpus() if config.kind == "gpu" else []
    return LocalExecutor(config, workers=workers or len(gpus) or 1, gpus=gpus)
