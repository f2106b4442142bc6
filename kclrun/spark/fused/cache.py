"""Processor instances that stay in a Python worker between two micro-batches, fenced by position.

Spark gives a shard's next range to any worker, so an instance found here may have missed ranges
that another worker processed: it may go on only if it stands exactly where the range begins.
Pure: a mapping with a limit. Look next: `hosting.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec

from kclrun.spark.positions import Position

__all__ = ["INSTANCES_MAX", "Absent", "Found", "Key", "ProcessorCache", "Stale"]

# As many as one machine of the fleet holds by default (`leases.max`): what a worker has at hand of
# connections and memory is bounded the same way.
INSTANCES_MAX: Final = 64

Instance = TypeVar("Instance")


class Key(NamedTuple):
    """Whose instance it is. `run` tells a restarted application, or another query, from this."""

    run: str
    application: str
    stream: str
    shard_id: str


class Found(msgspec.Struct, Generic[Instance], frozen=True):
    """It stands where the range begins, and goes on."""

    instance: Instance


class Stale(msgspec.Struct, Generic[Instance], frozen=True):
    """It stands elsewhere: others have had the shard since, or the range is given again."""

    instance: Instance


class Absent(msgspec.Struct, frozen=True):
    """There is none."""


class ProcessorCache(Generic[Instance]):
    """The least recently kept one leaves first."""

    def __init__(self, instances_max: int = INSTANCES_MAX) -> None:
        self._instances_max = instances_max
        self._kept: OrderedDict[Key, tuple[Position, Instance]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, key: Key, begin: Position) -> Found[Instance] | Stale[Instance] | Absent:
        """The instance leaves the cache, so that a task that fails cannot leave it half done."""
        if key not in self._kept:
            return Absent()
        stands_at, instance = self._kept.pop(key)
        return Found(instance) if stands_at == begin else Stale(instance)

    def keep(self, key: Key, stands_at: Position, instance: Instance) -> tuple[Instance, ...]:
        """Until the next range. Returns: those that have to go for it, or that it replaces."""
        dropped = [self._kept.pop(key)] if key in self._kept else []
        self._kept[key] = (stands_at, instance)
        while len(self._kept) > self._instances_max:
            dropped.append(self._kept.popitem(last=False)[1])
        return tuple(instance for _, instance in dropped)
