"""Whole batches in memory: the host of `process_records`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kclrun.calling.batches import BatchCalls, BatchHost, Raised
from kclrun.calling.in_memory.ends import RESTS_MAX, Ends
from kclrun.calling.in_memory.states import Ledger
from kclrun.calling.tracebacks import Failure
from kclrun.errors import ProcessorError, RetryLater
from kclrun.model.policies import ErrorPolicy
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant


class MemoryBatches(BatchHost):
    """The `BatchHost` of a run in memory. `call` calls user code with some records; `given_up` and
    `note_error` are called with a record that is given up, and with the words of an error."""

    def __init__(
        self,
        policy: ErrorPolicy,
        ledger: Ledger,
        *,
        call: Callable[[Sequence[Record]], object],
        given_up: Callable[[Record], None],
        note_error: Callable[[str], None],
        ends: Ends,
    ) -> None:
        self._ends = ends
        self._ledger = ledger
        self._call = call
        self._given_up = given_up
        self._note_error = note_error
        self._rests = 0
        self._error: BaseException | None = None
        self._part: ExtendedSequenceNumber | None = None
        self._calls = BatchCalls(self, policy)

    def process(self, records: Sequence[Record]) -> None:
        """Raises: the error for which the lease would halt."""
        self._calls.run(records, records[-1].position, self._ledger)

    def before_checkpoint(self) -> ExtendedSequenceNumber | None:
        """User code asks for a checkpoint. Returns: what one without a position covers, if that is
        less than all that was delivered."""
        if self._part is not None:
            self._calls.keep_held()
        return self._part

    # As `BatchHost`.

    def now(self) -> Instant:
        return Instant(0.0)

    def call(self, records: Sequence[Record]) -> None:
        self._call(records)

    def ends_run(self, error: BaseException) -> bool:
        return self._ends.are_reached_by(error)

    def durable(self) -> ExtendedSequenceNumber | None:
        return self._ledger.position

    def limit(self, last: ExtendedSequenceNumber | None) -> None:
        self._part = last

    def raised(self, raised: Raised) -> None:
        self._error = raised.error
        self._note_error(raised.failure.error)

    def rest(self, pause_s: float) -> bool:
        self._rests += 1
        if isinstance(self._error, RetryLater) and self._rests > RESTS_MAX:
            raise self._error
        return True

    def keep(self, record: Record, failure: Failure, calls: int) -> None:
        self._given_up(record)

    def halt(self, reason: str, calls: int) -> None:
        assert self._error is not None, "only what raised is halted"
        raise self._error if not reason else ProcessorError(reason) from self._error
