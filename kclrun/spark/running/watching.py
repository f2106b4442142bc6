"""One query, watched until it ends, is ended after its running batch, or is cut short.

Rule: a stop never interrupts a batch while its grace lasts, so its rows are committed. Everything
is looked at from the main thread, a few times a second: Spark's own listeners would need a server
for calls back from the JVM, and say no more than its progress does.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kclrun.model.time import Instant
from kclrun.spark.running.failures import failure_of
from kclrun.spark.running.graceful import has_come_to_rest, let_end
from kclrun.stopping import StopPlan

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["Ending", "Watch"]

# A look costs a call or two to the JVM, some milliseconds each.
_LOOK_EVERY_S: Final = 0.2
# Between being told to end and having ended; a look between two steps of Spark is repeated, so
# that the instant in which a batch is about to begin is not taken for rest.
_REST_EVERY_S: Final = 0.05
_LOOKS_AT_REST: Final = 2


class Ending(enum.Enum):
    """How a query came to its end."""

    BY_ITSELF = "by itself"
    AS_ASKED = "as asked, after its running batch"
    CUT_SHORT = "cut short: its batch is done again"


class Watch:
    """Looks at one query after the other. `take_progress` is given each new one, decoded."""

    def __init__(
        self,
        stop: StopPlan,
        *,
        take_progress: Callable[[dict[str, Any]], None],
        looked: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._stop = stop
        self._take_progress = take_progress
        self._looked = looked
        self._clock = clock
        self._wait = wait
        self._seen = -1

    def until_ended(self, query: StreamingQuery, is_enough: Callable[[], bool]) -> Ending:
        """Watch until the query ends, `is_enough`, or a stop is wanted; all its progress is taken.

        Raises: the KclrunError that the query's failure stands for.
        """
        self._seen = -1
        ending = Ending.BY_ITSELF
        while query.isActive:
            self._look(query)
            if self._stop.is_wanted or is_enough():
                ending = self._end(query)
                break
            self._wait(_LOOK_EVERY_S)
        self._look(query)
        failure = query.exception()
        if failure is not None:
            raise failure_of(str(failure)) from failure
        return ending

    def _end(self, query: StreamingQuery) -> Ending:
        let_end(query)
        looks = 0
        while looks < _LOOKS_AT_REST:
            if self._stop.is_over(Instant(self._clock())):
                query.stop()
                return Ending.CUT_SHORT
            looks = looks + 1 if has_come_to_rest(query) else 0
            self._look(query)
            self._wait(_REST_EVERY_S)
        # What is left of it is the wait for its next trigger: this ends that, and its thread.
        query.stop()
        return Ending.AS_ASKED

    def _look(self, query: StreamingQuery) -> None:
        for progress in _progress_since(query, self._seen):
            self._take_progress(progress)
            if "addBatch" in progress.get("durationMs", {}):
                self._seen = progress["batchId"]
        self._looked()


def _progress_since(query: StreamingQuery, seen: int) -> list[dict[str, Any]]:
    """What is new since batch `seen`, oldest first; the newest idle one again, for its lag.

    Spark keeps the last hundred: more than it can make between two looks.
    """
    last = query.lastProgress
    if last is None:
        return []
    newest = _decoded(last)
    if newest["batchId"] <= seen:
        return []
    if newest["batchId"] == seen + 1:
        return [newest]
    return [each for each in map(_decoded, query.recentProgress) if each["batchId"] > seen]


def _decoded(progress: Any) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(progress.json)
    return decoded
