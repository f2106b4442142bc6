"""Records that are given up: their letters are kept, and their failures reported.

Which letters count must be known later [K20]. So before a letter is kept, the lease row gets the
position up to which letters may exist (`letters_to`). An owner that finds the row's checkpoint
below that position writes a `Takeover` beside the letters before it reads. The letters of former
owners above the checkpoint are then of uncommitted work, and their records are processed again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from kclrun.calling.delivery import destination_pause_s
from kclrun.calling.tracebacks import Failure
from kclrun.errors import LetterTooLarge, SinkError
from kclrun.ipc.board import StartSpec
from kclrun.model.lease import Lease, LeaseKey, OwnerId
from kclrun.model.letter import Letter, LetterOwner, LetterSource, Takeover
from kclrun.model.output import Cursor
from kclrun.model.policies import Then
from kclrun.model.record import Record
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.ports import LeaseTable, LetterStore
from kclrun.protocol import reports, writes
from kclrun.worker.delivery_queue import DeliveryQueue
from kclrun.worker.progress import DeliveryHost


class GivingUp:
    """Has the letters of one lease kept, or counts skipped records."""

    def __init__(self, queue: DeliveryQueue, host: DeliveryHost, then: Then) -> None:
        self._queue = queue
        self._host = host
        self._then = then

    def let_go(self, record: Record, failure: Failure, calls: int, trouble: Trouble) -> bool:
        """Keep the letter; while its place is away, try again. False if delivery was stopped
        meanwhile, or if the lease is halted because the letter can never be kept."""
        failed = 0
        while True:
            try:
                self.keep(record, failure, calls)
                break
            except LetterTooLarge as error:
                self._queue.destinations.over()
                self._queue.halt()
                self._host.post(trouble.given_up(str(error)))
                return False
            except SinkError as error:
                failed += 1
                if not self.rests(reports.DEAD_LETTER, error, failed):
                    return False
        self.answers(reports.DEAD_LETTER, failed)
        return True

    def rests(self, where: str, error: SinkError, failed: int) -> bool:
        """Report that a destination failed, and wait. False if delivery was stopped meanwhile."""
        pause_s = destination_pause_s(failed)
        self._host.report(reports.ProcessorRaised(where, str(error), "", "", "", failed, pause_s))
        with self._queue.destinations.rest():
            may_go_on = self._queue.may_try_again(pause_s, is_batch=True)
        if not may_go_on:
            self._queue.destinations.over()
        return may_go_on

    def answers(self, where: str, failed: int) -> None:
        """The destination answers, after it failed `failed` times."""
        if failed:
            self._queue.destinations.over()
            self._host.report(reports.ProcessorRecovered(where, failed + 1))

    def keep(self, record: Record, failure: Failure, calls: int) -> None:
        """Keep the letter of a record that is given up, or skip it. Raises: SinkError."""
        is_skipped = self._then == "skip"
        if not is_skipped:
            self._host.keep_letter(record, failure, calls)
        self._host.report(
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
    """The failures of one call of user code, and of its repetitions, for reports."""

    def __init__(self, where: str = "process_records") -> None:
        self.calls = 0
        self._where = where
        self._last: Failure | None = None
        self._is_repetition = False
        self._is_host_fault = False

    def note(self, failure: Failure, *, is_host_fault: bool) -> None:
        """Another call raised."""
        self._is_repetition = self._last is not None and failure.is_as(self._last)
        self._last, self._is_host_fault = failure, is_host_fault
        self.calls += 1

    def asked_to_wait(self, pause_s: float, waits: int) -> reports.ProcessorRaised:
        """The last call raised RetryLater, for the `waits`th time in a row: not an attempt."""
        assert self._last is not None, "only what raised is reported"
        self.calls -= 1
        last = self._last
        return reports.ProcessorRaised(
            self._where, last.error, last.raised_at, "", "", self.calls, pause_s, waits
        )

    def raised(self, pause_s: float) -> reports.ProcessorRaised:
        """A repetition is reported in brief: its traceback was logged the first time."""
        assert self._last is not None, "only what raised is reported"
        last = self._last
        traceback_text = "" if self._is_repetition else last.traceback_text
        return reports.ProcessorRaised(
            self._where,
            last.error,
            last.raised_at,
            last.record,
            traceback_text,
            self.calls,
            pause_s,
        )

    def given_up(self, reason: str = "") -> reports.ProcessorFailed:
        """The report that the lease is halted. `reason` comes before the last error, unless the
        error of user code contains it."""
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


# A write may find a note of a former process of this owner that arrived late: one at most.
_NOTES_MAX: Final = 3


class LeaseLetters:
    """The letters of one lease. After `begin` any thread of user code may keep one. `open_store`
    opens their place, when a letter is kept or taken over, not before."""

    def __init__(
        self, spec: StartSpec, table: LeaseTable, open_store: Callable[[], LetterStore]
    ) -> None:
        self._spec = spec
        self._source = LetterSource(
            spec.application, spec.processor, spec.stream_name, spec.shard_id
        )
        self._key, self._me = LeaseKey(spec.lease_key), OwnerId(spec.owner)
        self._table = table
        self._open = open_store
        self._store: LetterStore | None = None
        self._owner = LetterOwner()
        self._noted: ExtendedSequenceNumber | None = None
        self._began = self._passed = TRIM_HORIZON
        self._keeping = threading.Lock()

    def begin(self, row: Lease, reached: ExtendedSequenceNumber) -> None:
        """The lease is claimed, and no record is read yet. `reached` is the highest position of an
        output. Letters of former owners up to there stay valid: their records, processed again, add
        no rows.

        Raises: SinkError while the place of the letters is away.
        """
        self._noted, self._began, self._passed = row.letters_to, row.checkpoint, TRIM_HORIZON
        self._owner = LetterOwner(
            stream_created_at=row.stream_created_at or 0.0,
            generation=row.generation,
            token=row.counter,
            since=time.time(),
        )
        at, spec = max(row.checkpoint, reached).of_record, self._spec
        is_open = row.letters_to is not None and row.letters_to > at
        if is_open and spec.on_error.then == "dead-letter":
            self._opened().take_over(
                Takeover(
                    taken_over_at=str(Cursor(at)),
                    stream=spec.stream_name,
                    shard_id=spec.shard_id,
                    by=self._owner,
                )
            )

    def keep(
        self,
        record: Record,
        failure: Failure,
        calls: int,
        *,
        delivered: ExtendedSequenceNumber | None = None,
        durable: ExtendedSequenceNumber | None = None,
    ) -> None:
        """Keep the letter of a record that was given up, durably. `delivered`: more letters may
        follow up to there. `durable`: the last checkpoint of this process. If a late checkpoint of
        the former owner [P19] has passed the record meanwhile, that owner has processed it, and no
        letter is kept. Raises: SinkError, also while the row cannot be written.
        """
        with self._keeping:
            row = self._note(max(record.position, (delivered or record.position).of_record))
            if row is not None and row.checkpoint > (durable or self._began):
                self._passed = row.checkpoint
            if record.position <= self._passed:
                return
            letter = Letter.of(
                record,
                self._source,
                error=failure.error,
                raised_at=failure.raised_at,
                traceback=failure.traceback_text,
                calls=calls,
                given_up_at=time.time(),
                owner=self._owner,
            )
            self._opened().keep(letter)

    def _note(self, upto: ExtendedSequenceNumber) -> Lease | None:
        """Write to the row that letters up to `upto` may exist. Returns: the row; None if that is
        on the row already, and then no late checkpoint of a former owner can apply any more."""
        for _ in range(_NOTES_MAX):
            if self._noted is not None and self._noted >= upto:
                return None
            outcome = self._table.write(writes.NoteLetters(self._key, self._me, upto, self._noted))
            match outcome:
                case writes.Applied(row):
                    self._noted = upto
                    return row
                case writes.ConditionFailed(row) if row is not None and row.owner == self._me:
                    self._noted = row.letters_to
                case writes.ConditionFailed():
                    raise SinkError("no dead letter is kept: the lease has another owner")
                case writes.Refused(code, message):
                    raise SinkError(f"cannot note dead letters on the lease row: {code}: {message}")
                case _:
                    raise SinkError(f"cannot note dead letters on the lease row: {outcome.message}")
        raise SinkError("cannot note dead letters on the lease row: it is written by others")

    def _opened(self) -> LetterStore:
        if self._store is None:
            self._store = self._open()
        return self._store
