"""Rows of other people's benchmarks as measurements, whatever they call their columns."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from math import isfinite, prod
from typing import Any

from tilewise.core.arch import Arch
from tilewise.core.identity import canonical_json
from tilewise.core.kernel import Kernel
from tilewise.core.measurement import STATUSES, Measurement, Policy, Setting
from tilewise.core.problem import Problem
from tilewise.errors import InputError, KernelError, ProblemError
from tilewise.ops.contract import all_ops, get_op
from tilewise.problems.problem_set import Labels
from tilewise.problems.rows import RowReader

FOREIGN_POLICY = Policy(time_ms=0.0, warmup=3, min_repeats=10, max_repeats=10, rounds=0)
"""What the reference's benchmarks do: three untimed calls, then the mean of ten."""

KERNEL_KEYS = ("kernel", "kernel_name", "name")
_TIME_KEYS = {
    "latency_ms": 1e3,
    "latency(ms)": 1e3,
    "time_ms": 1e3,
    "avg_time_ms": 1e3,
    "latency": 1e3,
    "latency_us": 1.0,
    "time_us": 1.0,
}
"""Column -> microseconds in its unit."""
_TFLOPS_KEYS = ("tflops", "tflops(tflops)", "measured_tflops")
_OTHER_RATES = ("bandwidth(gb/s)", "bandwidth_gb_s", "gb_s")
_NESTED = ("problem", "shape", "perf_result", "performance", "result", "metrics", "kernel")
_COMPLETE = 0.9
"""Share of outputs that must not be zero: random data leaves well under a hundredth at zero."""


def records(value: Mapping[str, Any], above: Mapping[str, Any] | None = None) -> Iterator[Labels]:
    """The flat rows inside a JSON object: lists hold rows, which share what stands around them."""
    own: Labels = dict(above or {})
    lists = []
    for key, item in value.items():
        if isinstance(item, Mapping):
            own |= item if key in _NESTED else {key: canonical_json(item)}
        elif isinstance(item, list) and item and all(isinstance(i, Mapping) for i in item):
            lists.append(item)
        else:
            own[key] = item
    for each in lists:
        for item in each:
            yield from records(item, own)
    if not lists:
        yield own


class ForeignReader:
    """Turns flat rows into measurements of one op, or of the op that each kernel computes."""

    def __init__(
        self, arch: Arch, *, op: str = "", dtype: str = "", device: str = "", toolchain: str = ""
    ) -> None:
        if op:
            get_op(op)
        self.op, self.dtype = op, dtype
        self.arch, self.device, self.toolchain = arch, device, toolchain
        self.notes: Counter[str] = Counter()
        """What was odd about rows that were kept."""
        self._kernels: dict[str, Kernel | KernelError] = {}
        self._readers: dict[tuple[str, str, str], RowReader] = {}
        self._settings: dict[str, Setting] = {}

    def measurement(self, row: Mapping[str, Any]) -> Measurement:
        """The measurement of one row; raises InputError with the reason where it is none."""
        folded = {key.strip().lower(): key for key in row}
        named = (row[folded[key]] for key in KERNEL_KEYS if key in folded)
        name = next((str(each) for each in named if each), "")
        if not name:
            raise InputError(f"no kernel is named; {' or '.join(KERNEL_KEYS)} should")
        kernel = self.kernel(name.strip())
        said = str(row.get(folded.get("status", ""), "")).strip()
        taken = {folded[k] for k in (*KERNEL_KEYS, *_TIME_KEYS, *_TFLOPS_KEYS, *_OTHER_RATES)
                 if k in folded}  # fmt: skip
        taken |= {folded["status"]} if said in STATUSES else set()
        rest = {key: value for key, value in row.items() if key not in taken}
        problem, labels = self._reader(kernel, rest).read(rest)
        time_us = self._time(row, folded, problem)
        if said in STATUSES and said != "ok":
            status, message = said, f"the source says {said}"
        else:
            status, message = self._status(time_us, labels, problem)
        return Measurement.of(
            problem,
            kernel,
            self._setting(kernel),
            status=status,
            message=message,
            labels=json.dumps(labels, sort_keys=True, default=str),
            time_us=time_us,
            repeats=FOREIGN_POLICY.max_repeats if time_us else 0,
        )

    def kernel(self, name: str) -> Kernel:
        """The kernel called `name`; what is no kernel's name is remembered too."""
        found = self._kernels.get(name)
        if found is None:
            try:
                found = _kernel(name, self.op)
            except KernelError as error:
                found = error
            self._kernels[name] = found
        if isinstance(found, KernelError):
            raise found
        return found

    def _reader(self, kernel: Kernel, row: Mapping[str, Any]) -> RowReader:
        if self.op and kernel.op != self.op:
            raise InputError(f"its kernel computes {kernel.op}; {self.op} was asked for")
        dtype = str(getattr(kernel, "dtype", "") or self.dtype)
        if self.dtype and dtype != self.dtype:
            raise InputError(f"its kernel computes {dtype}; {self.dtype} was asked for")
        key = (kernel.op, dtype, kernel.problem_layout)
        if key not in self._readers:
            self._readers[key] = RowReader(kernel.op, dtype=dtype, layout=kernel.problem_layout)
        return self._readers[key]

    def _setting(self, kernel: Kernel) -> Setting:
        if kernel.engine not in self._settings:
            self._settings[kernel.engine] = Setting(
                arch=self.arch.name,
                device=self.device or self.arch.device or self.arch.name,
                toolchain=self.toolchain or kernel.engine,
                policy=FOREIGN_POLICY,
            )
        return self._settings[kernel.engine]

    def _time(
        self, row: Mapping[str, Any], folded: Mapping[str, str], problem: Problem
    ) -> float | None:
        """Microseconds, or None where the row says that nothing was timed."""
        if not folded.keys() & {*_TIME_KEYS, *_TFLOPS_KEYS}:
            raise InputError(f"no time is given; {', '.join(_TIME_KEYS)} or tflops should")
        times = [(k, row[folded[k]]) for k in _TIME_KEYS if k in folded and _says(row[folded[k]])]
        rates = [(k, row[folded[k]]) for k in _TFLOPS_KEYS if k in folded and _says(row[folded[k]])]
        tflops = _number(*rates[0]) if rates else 0.0
        implied = problem.flops / tflops * 1e-6 if tflops > 0 else 0.0
        if not times:
            return implied or None
        time_us = _number(*times[0]) * _TIME_KEYS[times[0][0]]
        if implied and abs(time_us - implied) > 0.01 * implied:
            # Times printed as milliseconds to two digits lose more than their rates do.
            if abs(time_us - implied) <= 5.001:
                return implied
            self.notes["time and TFLOPS disagree by more than 1 %; the time was kept"] += 1
        return time_us if time_us > 0 else None

    def _status(
        self, time_us: float | None, labels: Mapping[str, Any], problem: Problem
    ) -> tuple[str, str]:
        if time_us is None:
            return "launch_error", "the source gives no positive time"
        if str(labels.get("is_valid", True)).lower() in ("false", "0"):
            return "wrong_result", "the source marks it as invalid"
        op = get_op(problem.op)
        if "non_zero" in labels and "non_zero" in op.problems.rates:
            count, outputs = _number("non_zero", labels["non_zero"]), prod(op.shapes(problem)[-1])
            if count < _COMPLETE * outputs:
                return "wrong_result", f"only {count:.0f} of {outputs} outputs are not zero"
        return "ok", ""


def _kernel(name: str, op: str) -> Kernel:
    """The kernel called `name`, of `op` or, where that is empty, of any."""
    if op:
        return get_op(op).kernel_from_name(name)
    for each in all_ops().values():
        try:
            return each.kernel_from_name(name)
        except KernelError:
            # Who knows the beginning of the name can say what is wrong with the rest.
            if any(name.startswith(kind.prefix(each.name)) for kind in each.kernel_types):
                raise
    ops = ", ".join(all_ops())
    raise KernelError(f"{name!r} names no kernel of {ops}; `kernels list --op OP` shows names")


def _says(value: Any) -> bool:
    """Whether a cell holds anything; tables leave out or write NaN for what was not measured."""
    return str(value).strip().lower() not in ("", "none", "nan")


def _number(name: str, value: Any) -> float:
    try:
        number = float(value) if value not in (None, "") else 0.0
    except (TypeError, ValueError):
        raise ProblemError(f"{name} is {value!r}; it must be a number") from None
    return number if isfinite(number) else 0.0
