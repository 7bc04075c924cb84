"""Lists of problems with what is known about each: where it comes from, how often it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewise.core.problem import Problem

Labels = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class ProblemSet:
    """Problems in order, each with its labels (`network`, `layer`, `count`, `family`...)."""

    problems: list[Problem] = field(default_factory=list)
    labels: list[Labels] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.problems)

    def __iter__(self) -> Iterator[tuple[Problem, Labels]]:
        return zip(self.problems, self.labels, strict=True)

    def add(self, problem: Problem, labels: Mapping[str, Any] | None = None) -> None:
        self.problems.append(problem)
        self.labels.append(dict(labels or {}))

    def distinct(self) -> ProblemSet:
        """Every problem once, under its first labels; `count` adds up how often it runs."""
        first: dict[Problem, Labels] = {}
        for problem, labels in self:
            count = _count(labels)
            if problem in first:
                first[problem]["count"] += count
            else:
                first[problem] = {**labels, "count": count}
        return ProblemSet(problems=list(first), labels=list(first.values()))

    def rows(self) -> list[dict[str, Any]]:
        """One JSON-ready object a problem: the file keys, then the labels."""
        return [{**problem.to_dict(), **labels} for problem, labels in self]


def plain(problems: Iterable[Problem], labels: Sequence[Mapping[str, Any]] = ()) -> ProblemSet:
    """A set from bare problems, with `labels` where there are any."""
    listed = list(problems)
    given = [dict(each) for each in labels] or [{} for _ in listed]
    return ProblemSet(problems=listed, labels=given)


def _count(labels: Mapping[str, Any]) -> int:
    """How often the problem runs; anything unreadable counts once."""
    try:
        return max(1, int(labels.get("count", 1)))
    except (TypeError, ValueError, OverflowError):
        return 1
