"""Ending a streaming query between two batches, which PySpark itself does not offer.

`StreamingQuery.stop()` interrupts the batch that runs. Spark ends queries of `availableNow` in
good order, by setting their state to TERMINATED once a batch is committed; the same state, set
from here, makes any query end after its running batch. Those are internals of Spark (the same from
4.0 to 4.3): where they are not found, the stop falls in the first gap between two batches that is
seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["has_come_to_rest", "let_end"]

# Spark's words for a query whose thread is through (`StreamExecution`).
_ENDED: Final = ("Stopped", "Terminated with exception")


def let_end(query: StreamingQuery) -> bool:
    """Have the query begin no further batch. Returns: whether Spark took it; at once, either way.

    A query that has ended by itself is left as it is.
    """
    from py4j.protocol import Py4JError

    try:
        execution = query._jsq.streamingQuery()  # noqa: SLF001 - there is no public way
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
