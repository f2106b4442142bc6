"""The places of lease processes in the shared memory: each has a status slot and a ring."""

from __future__ import annotations

import heapq
from typing import NamedTuple

from kclrun.ipc.board import Segment, StatusSlot
from kclrun.ipc.ring import EventRing


class ProcessPlace(NamedTuple):
    """One place of a segment, cleared."""

    number: int
    slot: StatusSlot
    ring: EventRing


class ProcessSlots:
    """The free places of a segment, the lowest first, so that few pages are ever written.

    A place is reused only once the exit of its process is proven. It is cleared then.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._free = list(range(segment.places))

    def take(self) -> ProcessPlace | None:
        """A cleared place, or None if all are taken."""
        if not self._free:
            return None
        place = heapq.heappop(self._free)
        self._segment.clear(place)
        return ProcessPlace(place, self._segment.slot(place), self._segment.ring(place))

    def give_back(self, place: int) -> None:
        """Free a place. The exit of its process is proven."""
        heapq.heappush(self._free, place)
