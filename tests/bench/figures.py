"""Figures: what was measured, its spread, its target, and whether that is met. No clock in here."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec


class Target(msgspec.Struct, frozen=True):
    """A goal: exactly one of the two."""

    at_least: float | None = None
    at_most: float | None = None

    def is_met_by(self, value: float) -> bool:
        if self.at_least is not None:
            return value >= self.at_least
        assert self.at_most is not None, "a target bounds one side"
        return value <= self.at_most

    def __str__(self) -> str:
        return f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}"


class Sample(msgspec.Struct, frozen=True):
    """One run of one variant: units of work done, and what they cost."""

    work: float
    cpu_s: float
    wall_s: float

    @property
    def per_cpu_s(self) -> float:
        return self.work / self.cpu_s

    @property
    def per_wall_s(self) -> float:
        return self.work / self.wall_s


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report. `judged` is the value that the target is about: mostly the median."""

    row: str
    what: str
    unit: str
    least: float
    median: float
    greatest: float
    count: int
    judged: float
    target: Target | None = None

    @property
    def is_met(self) -> bool | None:
        return None if self.target is None else self.target.is_met_by(self.judged)

    def as_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return {**fields, "is_met": self.is_met}


class NotMeasured(msgspec.Struct, frozen=True, omit_defaults=True):
    """A row that could not run, and why; never silently left out. `is_left_out`: what it measures
    against is not on this machine, which is no failure."""

    row: str
    reason: str
    is_left_out: bool = False

    @property
    def words(self) -> str:
        return f"{'left out' if self.is_left_out else 'not measured'}: {self.reason}"


def figure(
    row: str,
    what: str,
    unit: str,
    values: Sequence[float],
    *,
    target: Target | None = None,
    judged_percentile: float = 50.0,
) -> Figure:
    """The line for `values`, judged by one of their percentiles."""
    return Figure(
        row=row,
        what=what,
        unit=unit,
        least=min(values),
        median=statistics.median(values),
        greatest=max(values),
        count=len(values),
        judged=percentile(values, judged_percentile),
        target=target,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The median for 50; else the nearest rank: the least value that `percent` % do not exceed."""
    if percent == 50.0:
        return statistics.median(values)
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def paired_ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ours over theirs, round by round: what disturbed a round disturbed both of its runs."""
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]
