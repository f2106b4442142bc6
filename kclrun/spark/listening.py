"""Reports the lag of the queries of a user's Spark program, like the fleet's metrics.

A Spark listener reads the report that the source adds to every progress. It ignores sources without
such a report.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec
from pyspark.sql.streaming.listener import StreamingQueryListener

from kclrun.spark.running.progress import read_report

_log: Final = logging.getLogger(__name__)


class SourceLag(msgspec.Struct, frozen=True, kw_only=True):
    """The last report of one source of one query about one stream.

    `query` is the name of the query, or its id if it has none; `batch_id` the number of the
    micro-batch; `stream` the name of the stream; `shards` how many shards are read.
    `lag_ms_max` is the distance of the furthest shard from its tip, None before a shard was looked
    at; `throttles` counts since the query was started; `records_per_second` and
    `bytes_per_second` are the rates of the stream.
    """

    query: str
    batch_id: int
    stream: str
    shards: int
    lag_ms_max: int | None
    records_per_second: float
    bytes_per_second: float
    throttles: int


class LagListener(StreamingQueryListener):
    """For `spark.streams.addListener`. After every trigger, also an idle one, it calls `publish`
    with the lag of each stream of each source, in Spark's own thread. An error of `publish` is
    logged and has no other effect."""

    def __init__(self, publish: Callable[[SourceLag], None]) -> None:
        self._publish = publish

    def onQueryStarted(self, event: Any) -> None:
        """Does nothing: the lag is not known yet."""

    def onQueryProgress(self, event: Any) -> None:
        """A trigger has ended: publish the lag."""
        progress = event.progress
        for source in progress.sources:
            for lag in _lags(progress.name or str(progress.id), progress.batchId, source):
                self._try_to_publish(lag)

    def onQueryIdle(self, event: Any) -> None:
        """Does nothing: Spark passes no progress with this event."""

    def onQueryTerminated(self, event: Any) -> None:
        """Does nothing: a query that has ended has no lag."""

    def _try_to_publish(self, lag: SourceLag) -> None:
        try:
            self._publish(lag)
        except Exception:  # noqa: BLE001 - the user's code: whatever it raises
            _log.exception("the lag of %s was not published", lag.query)


def _lags(query: str, batch_id: int, source: Any) -> Iterator[SourceLag]:
    report: Mapping[str, Any] | None = read_report(source.latestOffset)
    if report is None or "shardsTotal" not in report:
        return
    by_stream = report.get("streams") or {str(report.get("stream", "")): report}
    for stream, of_stream in by_stream.items():
        yield _lag(query, batch_id, stream, of_stream)


def _lag(query: str, batch_id: int, stream: str, report: Mapping[str, Any]) -> SourceLag:
    return SourceLag(
        query=query,
        batch_id=batch_id,
        stream=stream,
        shards=report["shardsTotal"],
        lag_ms_max=report["lagMsMax"],
        records_per_second=report["recordsPerSecond"],
        bytes_per_second=report["bytesPerSecond"],
        throttles=report["throttles"],
    )
