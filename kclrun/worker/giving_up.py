"""Records that are given up: their letters are kept, and their failures reported."""

from __future__ import annotations

from collections.abc import Callable

from kclrun.consuming import events
from kclrun.consuming.delivery import Then, destination_pause_s
from kclrun.errors import LetterTooLarge, SinkError
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.observe.failures import Failure
from kclrun.protocol import reports
from kclrun.worker.delivery_queue import DeliveryQueue


class GivingUp:
    """Keeps the letters of one lease, or counts records as skipped; `bury` as in `Deliverer`."""

    def __init__(
        self,
        queue: DeliveryQueue,
        post: Callable[[events.Event], None],
        report: Callable[[reports.Report], None],
        bury: Callable[[Record, Failure, int], None] | None,
        then: Then,
    ) -> None:
        self._queue = queue
        self._post = post
        self._report = report
        self._bury = bury
        self._then = then

    def let_go(self, record: Record, failure: Failure, calls: int, trouble: Trouble) -> bool:
        """Keep the letter, however long that takes; False if delivery was stopped meanwhile, or
        the lease is halted because the letter can never be kept."""
        failed = 0
        while True:
            try:
                self.keep(record, failure, calls)
                break
            except LetterTooLarge as error:
                self._queue.halt()
                self._post(trouble.given_up(str(error)))
                return False
            except SinkError as error:
                failed += 1
                if not self.rests(reports.DEAD_LETTER, error, failed):
                    return False
        if failed:
            self._report(reports.ProcessorRecovered(reports.DEAD_LETTER, failed + 1))
        return True

    def rests(self, where: str, error: SinkError, failed: int) -> bool:
        """Report that a place took nothing, and wait; False if delivery was stopped meanwhile."""
        pause_s = destination_pause_s(failed)
        self._report(reports.ProcessorRaised(where, str(error), "", "", "", failed, pause_s))
        return self._queue.may_try_again(pause_s, is_batch=True)

    def keep(self, record: Record, failure: Failure, calls: int) -> None:
        """Keep the letter of a record that is given up, or skip it. Raises: SinkError."""
        is_skipped = self._then == "skip"
        if not is_skipped:
            assert self._bury is not None, "the settings name a place for dead letters"
            self._bury(record, failure, calls)
        self._report(
            reports.RecordGivenUp(
                record.position,
                failure.error,
                failure.raised_at,
                failure.traceback_text,
                calls,
                is_skipped=is_skipped,
            )
        )


class Trouble:
    """The failures of one call of user code, and of its repetitions, for reports.

    `of` has the last failure of single records of a batch, by index. `covered` is the highest
    position that rows of the batch are kept for: the rows of a later call belong to it as well.
    """

    def __init__(self, where: str = "process_records") -> None:
        self.calls = 0
        self.of: dict[int, Failure] = {}
        self.covered: ExtendedSequenceNumber | None = None
        self._where = where
        self._last: Failure | None = None
        self._is_repetition = False
        self._is_host_fault = False

    def note(self, failure: Failure, *, is_host_fault: bool) -> None:
        """Another call raised."""
        self._is_repetition = self._last is not None and failure.is_as(self._last)
        self._last, self._is_host_fault = failure, is_host_fault
        self.calls += 1

    def raised(self, pause_s: float) -> reports.ProcessorRaised:
        """A repetition is reported in brief: its traceback was logged the first time."""
        assert self._last is not None, "only what raised is reported"
        last = self._last
        traceback_text = "" if self._is_repetition else last.traceback_text
        return reports.ProcessorRaised(
            *(self._where, last.error, last.raised_at, last.record, traceback_text),
            *(self.calls, pause_s),
        )

    def given_up(self, reason: str = "") -> reports.ProcessorFailed:
        """`reason` is said before the last error; what user code gave as one has it already."""
        assert self._last is not None, "only what raised is given up"
        last = self._last
        traceback_text = "" if self._is_repetition else last.traceback_text
        both = f"{reason}; the last error: {last.error}"
        return reports.ProcessorFailed(
            self._where,
            last.error if not reason else reason if reason in last.error else both,
            self.calls,
            last.position,
            traceback_text,
            last.raised_at,
            last.record,
            self._is_host_fault,
        )
