"""Whole batches of a range, in a Python worker of Spark: the host of `process_records`.

`calling/batches.py` makes the calls. Unlike a lease of the fleet, a task never stops between two
calls; where a lease would halt, the task fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kclrun.calling.batches import BatchCalls, BatchHost, Raised
from kclrun.calling.delivery import RowScope
from kclrun.calling.retry_later import Waited
from kclrun.calling.tracebacks import Failure
from kclrun.model.policies import ErrorPolicy
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.spark.processors.single_records import Failed


class TaskBatches(BatchHost):
    """The `BatchHost` of one instance. `call` calls user code with some records, whose rows belong
    to a position; `let_go` keeps a letter, or raises; `warn` logs."""

    def __init__(
        self,
        policy: ErrorPolicy,
        *,
        call: Callable[[Sequence[Record], ExtendedSequenceNumber], None],
        durable: Callable[[], ExtendedSequenceNumber],
        let_go: Callable[[Record, Failure, int], None],
        wait: Callable[[float], None],
        clock: Callable[[], float],
        warn: Callable[[str], None],
    ) -> None:
        self._call = call
        self._durable = durable
        self._let_go = let_go
        self._wait = wait
        self._clock = clock
        self._warn = warn
        self._error: BaseException | None = None
        self._failed: Failed | None = None
        # The last record of a call with some of a batch: a checkpoint in it covers no more.
        self._part: ExtendedSequenceNumber | None = None
        self._records: Sequence[Record] = ()
        self._calls = BatchCalls(self, policy)

    def process(
        self, records: Sequence[Record], last: ExtendedSequenceNumber, rows: RowScope
    ) -> Failed | None:
        """Process these records, up to `last`. Returns: the failure of the task, if it fails. Then,
        and if this raises, the instance is unusable. Raises: the errors of `let_go`."""
        self._records, self._error = records, None
        self._calls.run(records, last, rows)
        if self._failed is None:
            self._part = None
        return self._failed

    def before_checkpoint(self) -> ExtendedSequenceNumber | None:
        """User code asks for a checkpoint. Returns: the last record that it may cover, in a call
        that has a part of a batch. Raises: SinkError."""
        if self._part is not None:
            self._calls.keep_held()
        return self._part

    # As `BatchHost`.

    def now(self) -> Instant:
        return Instant(self._clock())

    def call(self, records: Sequence[Record]) -> None:
        self._call(records, self._calls.covers)

    def durable(self) -> ExtendedSequenceNumber:
        return self._durable()

    def limit(self, last: ExtendedSequenceNumber | None) -> None:
        # Between two calls a thread of user code may ask for a checkpoint.
        self._part = last or self._part

    def raised(self, raised: Raised) -> None:
        self._error = raised.error
        words = raised.failure.error
        if raised.waits == 1:
            self._warn(f"process_records asks to wait: {words}")
        elif raised.pause_s is not None and not raised.waits:
            self._warn(f"process_records raised {words}; again in {raised.pause_s:g} s")

    def waited(self, waited: Waited) -> None:
        self._warn(
            f"process_records waits no more, after {waited.tries} times"
            f" in {round(waited.waited_s, 3):g} s"
        )

    def rest(self, pause_s: float) -> bool:
        self._wait(pause_s)
        return True

    def keep(self, record: Record, failure: Failure, calls: int) -> None:
        self._let_go(record, failure, calls)

    def halt(self, reason: str, calls: int) -> None:
        assert self._error is not None, "only a call that raised is halted for"
        self._failed = Failed(max(calls, 1), self._error, self._records, reason)
