"""Up to what time the next batch reads, for all shards together [A8]. Pure.

Behind, the time goes on by a window: doubled while batches take less than half of what they
should, halved where they take more, and shorter where the records' density says that a limit of
the trigger would be passed. Rule: the time never falls.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from kclrun.spark.scout.density import Density

__all__ = ["Admission", "Window"]

# A first window is read before the oldest records of a stream have expired.
_FIRST_S: Final = 60.0
_SHORTEST_S: Final = 0.001
# The longest retention is a year.
_LONGEST_S: Final = 365 * 86_400.0


class Admission(msgspec.Struct, frozen=True):
    """What a trigger may read, in Kinesis records and bytes; None is no limit."""

    records_max: int | None
    bytes_max: float | None

    def span_s(self, densities: Iterable[Density]) -> float:
        """How much time of that density is within the limits."""
        held = list(densities)
        records = sum(each.records_per_second for each in held)
        size = sum(each.bytes_per_second for each in held)
        by_records = _quotient(self.records_max, records)
        return max(_SHORTEST_S, min(by_records, _quotient(self.bytes_max, size)))


class Window:
    """The window's width, by how long batches take."""

    def __init__(self, target_batch_s: float) -> None:
        self._target_s = target_batch_s
        self.width_s = _FIRST_S

    def took(self, batch_s: float) -> None:
        """A batch that was ended by the window took so long, until the next was asked for."""
        if batch_s < self._target_s / 2:
            self.width_s = min(_LONGEST_S, self.width_s * 2)
        elif batch_s > self._target_s:
            self.width_s = max(_SHORTEST_S, self.width_s / 2)

    def until_ms(self, from_ms: int, admitted_s: float) -> int:
        """Where a batch from `from_ms` on ends."""
        return from_ms + max(1, int(min(self.width_s, admitted_s) * 1000))


def _quotient(limit: float | None, rate: float) -> float:
    return _LONGEST_S if limit is None or rate <= 0 else limit / rate
