"""Watches one query until it ends by itself, after its running batch, or is cut short.

A stop never interrupts a batch within the grace period, so its rows are committed. The main thread
looks at the query a few times a second: Spark's own listeners would need a server for calls back
from the JVM, and their events have the same content as the progress.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kclrun.lifecycle.stopping import StopPlan
from kclrun.model.time import Instant
from kclrun.spark.running.failures import failure_of

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

# Ends a streaming query between two batches; PySpark itself does not offer that.
#
# `StreamingQuery.stop()` interrupts the batch that runs. Spark ends queries of `availableNow` in
# good order: it sets their state to TERMINATED once a batch is committed. The same state, set from
# here, makes any query end after its running batch. Those are internals of Spark (the same from 4.0
# to 4.3). Where they are not found, the stop happens in the first gap between two batches that is
# seen.
# Spark's words for a query whose thread has ended (`StreamExecution`).
_ENDED: Final = ("Stopped", "Terminated with exception")


def let_end(query: StreamingQuery) -> bool:
    """Make the query begin no further batch. Returns at once, either way: whether Spark took it.

    A query that has ended by itself is not changed.
    """
    from py4j.protocol import Py4JError

    try:
        execution = query._jsq.streamingQuery()  # noqa: SLF001 - PySpark has no public way
        state = execution.state()
        kind = state.get().getClass()
        package = kind.getName().rpartition(".")[0]
        terminated = kind.getClassLoader().loadClass(f"{package}.TERMINATED$")
        state.set(terminated.getField("MODULE$").get(None))
    except Py4JError:
        return False
    return True


def has_come_to_rest(query: StreamingQuery) -> bool:
    """Whether no batch of the query is under way at this moment."""
    status = query.status
    return status["message"] in _ENDED or not status["isTriggerActive"]


# A look costs a call or two to the JVM, some milliseconds each.
_LOOK_EVERY_S: Final = 0.2
# The interval between the stop request and the end. A look between two steps of Spark is repeated,
# so that the instant before a batch begins is not taken for rest.
_REST_EVERY_S: Final = 0.05
_LOOKS_AT_REST: Final = 2


class Ending(enum.Enum):
    """The way in which a query ended."""

    BY_ITSELF = "by itself"
    AS_ASKED = "as asked, after its running batch"
    CUT_SHORT = "cut short: its batch is done again"


class Watch:
    """Watches one query after the other. `take_progress` gets each new progress, decoded."""

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
        """Watch until the query ends, `is_enough`, or a stop is wanted; passes on all its progress.

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
        # Only the wait for the next trigger is left: this ends that wait, and the query's thread.
        query.stop()
        return Ending.AS_ASKED

    def _look(self, query: StreamingQuery) -> None:
        for progress in _progress_since(query, self._seen):
            self._take_progress(progress)
            if "addBatch" in progress.get("durationMs", {}):
                self._seen = progress["batchId"]
        self._looked()


def _progress_since(query: StreamingQuery, seen: int) -> list[dict[str, Any]]:
    """The progress since batch `seen`, oldest first; the newest idle one again, for its lag.

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
