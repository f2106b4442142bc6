"""One shard of a tail: its iterator, its pace, and where it goes on after a failure.

One thread at a time. May not know: other shards. Rule: a failure is never an end; an iterator that
expired (a pager that waits for its reader for more than five minutes) is replaced by one after the
last record received, so nothing is skipped.
"""

from __future__ import annotations

import random
from typing import Final

from kclrun.consuming.pacing import Pacing
from kclrun.consuming.start_point import resumed_start
from kclrun.errors import ExpiredIterator, RecordError, ServiceError, Throttled
from kclrun.model.reading import IteratorType, StartPoint
from kclrun.ports import FetchedPage, ShardReader

__all__ = ["ShardTail"]

# A shard allows 5 GetRecords a second to all its readers together: a tail takes half of them, so
# that the application it looks over the shoulder of is not throttled.
_FLOOR_S: Final = 0.4
# At the tip, as an application's own `fetch.idle`.
_IDLE_S: Final = 1.0
# What GetRecords returns at most: 10,000 records or 10 MiB.
_RECORDS_A_CALL: Final = 10_000


class ShardTail:
    """Reads one shard, a page at a time. `is_begun` once its first iterator was there."""

    def __init__(self, shard_id: str, start: StartPoint, reader: ShardReader) -> None:
        self.shard_id = shard_id
        self.is_begun = False
        self._start = start
        self._reader = reader
        self._pacing = Pacing(_IDLE_S, _FLOOR_S)
        self._iterator: str | None = None
        self._last_received: str | None = None

    def begin(self) -> None:
        """Ask for the first iterator. Raises: a ServiceError leaf; then ask again."""
        self._require_iterator()
        self.is_begun = True

    def fetch(self) -> FetchedPage:
        """The next page; with `next_iterator` None the shard may be over.

        Raises: a ServiceError leaf, RecordError; `pause_after` says what then.
        """
        page = self._reader.fetch(self._require_iterator(), _RECORDS_A_CALL)
        self._iterator = page.next_iterator
        if page.records:
            self._last_received = page.records[-1].sequence_number
        elif self._start.kind is IteratorType.LATEST and page.served_at is not None:
            # Asked for twice, LATEST would skip what came between; the time of an answer without
            # records (to the second, so a moment early) does not.
            self._start = StartPoint(IteratorType.AT_TIMESTAMP, timestamp=page.served_at)
        return page

    def pause_s(self, page: FetchedPage) -> float:
        """How long after the start of a fetch the next may begin."""
        return self._pacing.after_page(len(page.records), page.millis_behind_latest)

    def pause_after(self, error: ServiceError | RecordError) -> float:
        """How long to wait after a failure; an expired iterator is asked for anew at once."""
        if isinstance(error, ExpiredIterator):
            self._iterator = None
            return 0.0
        if isinstance(error, Throttled):
            return self._pacing.after_throttle(random.random())
        return self._pacing.after_error(random.random())

    def _require_iterator(self) -> str:
        if self._iterator is None:
            start = resumed_start(self._last_received, self._start)
            self._iterator = self._reader.iterator(
                self.shard_id,
                start.kind,
                sequence_number=start.sequence_number,
                timestamp=start.timestamp,
            )
        return self._iterator
