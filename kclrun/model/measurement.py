"""What was measured over a while, as a service of metrics takes it: a name and four numbers.

Nouns only. Rule: a metric has few values for its dimensions, and they are known beforehand:
services of metrics bill each combination.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kclrun.model.time import WallTime

__all__ = ["Measurement", "Statistics", "Unit"]

Unit = Literal["Count", "Bytes", "Milliseconds"]


class Statistics(msgspec.Struct, frozen=True):
    """Many values as four: enough for their sum, their average, the smallest and the greatest."""

    count: int
    total: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, value: float) -> Statistics:
        """One value."""
        return cls(1, value, value, value)

    def with_value(self, value: float) -> Statistics:
        """These and one more."""
        return Statistics(
            self.count + 1,
            self.total + value,
            min(self.minimum, value),
            max(self.maximum, value),
        )


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """The values of one metric, under one set of dimensions, in the time before `measured_at`."""

    name: str
    unit: Unit
    dimensions: tuple[tuple[str, str], ...]
    measured_at: WallTime
    statistics: Statistics
