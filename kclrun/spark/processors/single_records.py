"""Single records of a range, in a Python worker of Spark: the host of `process_record`.

`calling/records.py` makes the calls. Unlike a lease of the fleet, a task never stops between
records, and no record joins later; where a lease would halt, the task fails.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kclrun.calling.batches import Raised
from kclrun.calling.delivery import error_words
from kclrun.calling.records import CallTerms, Failing, RecordCalls, RecordHost, Stop
from kclrun.calling.retry_later import Waited
from kclrun.calling.tracebacks import Failure
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.processor import KeptRow
from kclrun.state.keyed import Undoable

_log = logging.getLogger(__name__)


class Failed(NamedTuple):
    """The failure of a task: the calls with a record, its error, the record, and the reason."""

    calls: int
    error: BaseException
    records: Sequence[Record]
    reason: str


class _Given(NamedTuple):
    records: Sequence[Record]
    last: ExtendedSequenceNumber


class SingleRecords(RecordHost):
    """The `RecordHost` of one instance. `let_go` keeps a letter, or raises; `place` takes rows
    and changes of the state."""

    def __init__(
        self,
        terms: CallTerms,
        *,
        let_go: Callable[[Record, Failure, int], None],
        place: Callable[[ExtendedSequenceNumber, Sequence[KeptRow], Sequence[Undoable]], None],
    ) -> None:
        self._let_go = let_go
        self._place = place
        self._failed: Failed | None = None
        self.calls = RecordCalls(terms, host=self, make_thread=_daemon)

    def process(self, records: Sequence[Record], last: ExtendedSequenceNumber) -> Failed | None:
        """Process these records, up to `last`. Returns: the failure of the task, if it fails. Then,
        and if this raises, the instance is unusable. Raises: the errors of `let_go` and `place`."""
        try:
            self.calls.run(_Given(records, last))
        except BaseException:
            self.calls.close()
            raise
        if self._failed is not None:
            self.calls.close()
        return self._failed

    # As `RecordHost`.

    def now(self) -> Instant:
        return Instant(time.monotonic())

    def stop(self) -> Stop | None:
        return None

    def raised(self, number: int, record: Record, raised: Raised) -> None:
        if raised.waits == 1:
            _log.warning("process_record asks to wait: %s", error_words(raised.error))
        elif raised.pause_s is not None and not raised.waits:
            _log.warning(
                "process_record raised %s at %s; again in %g s",
                error_words(raised.error),
                record.position,
                raised.pause_s,
            )

    def waited(self, waited: Waited) -> None:
        _log.warning(
            "process_record waits no more, after %d times in %g s",
            waited.tries,
            round(waited.waited_s, 3),
        )

    def let_go(self, number: int, record: Record, failure: Failure, calls: int) -> bool:
        self._let_go(record, failure, calls)
        return True

    def halt(self, number: int, record: Record, failing: Failing, reason: str) -> None:
        self._failed = Failed(failing.calls, failing.error, (record,), reason)

    def settled(
        self,
        position: ExtendedSequenceNumber,
        rows: Sequence[KeptRow],
        changes: Sequence[Undoable],
    ) -> bool:
        self._place(position, rows, changes)
        return True


def _daemon(target: Callable[[], None], name: str) -> threading.Thread:
    return threading.Thread(target=target, name=name, daemon=True)
