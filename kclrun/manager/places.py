"""Which lease process sits in which place of the segment.

Rule: a place is given out again only once the process in it is proven dead; it is cleared then.
"""

from __future__ import annotations

import heapq

from kclrun.ipc.board import StatusSlot
from kclrun.ipc.ring import EventRing
from kclrun.ipc.segment import Segment

__all__ = ["Places"]


class Places:
    """The free places of a segment, the lowest first, so that few pages are ever written."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._free = list(range(segment.places))

    def take(self) -> tuple[int, StatusSlot, EventRing] | None:
        """A cleared place with its slot and ring, or None if all are taken."""
        if not self._free:
            return None
        place = heapq.heappop(self._free)
        self._segment.clear(place)
        return place, self._segment.slot(place), self._segment.ring(place)

    def give_back(self, place: int) -> None:
        """No process is in it any more, proven."""
        heapq.heappush(self._free, place)
