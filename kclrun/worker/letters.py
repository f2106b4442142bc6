"""The dead letters of one lease, in the order that tells later which of them count [K20].

The lease row says how far letters may have been kept, before one is. An owner that finds the row's
checkpoint below that says so where the letters are, before it reads: those of former owners above
the checkpoint are of uncommitted work, and it judges their records again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from kclrun.errors import SinkError
from kclrun.ipc.board import StartSpec
from kclrun.model.lease import Lease, LeaseKey, OwnerId
from kclrun.model.letter import Letter, LetterOwner, Takeover
from kclrun.model.output import Cursor
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.observe.failures import Failure
from kclrun.ports import LeaseTable, LetterStore
from kclrun.protocol import writes
from kclrun.sinks.dead_letters import letter_store

# A try may find a note of a former process of this owner, which arrived late: there is one at most.
_NOTES_MAX: Final = 3


class LeaseLetters:
    """Used from `begin` on, by any thread of user code. `elsewhere` opens a place that is not a
    folder; nothing is opened before a letter is kept or taken over."""

    def __init__(
        self, spec: StartSpec, table: LeaseTable, elsewhere: Callable[[], LetterStore]
    ) -> None:
        self._spec = spec
        self._key, self._me = LeaseKey(spec.lease_key), OwnerId(spec.owner)
        self._table = table
        self._elsewhere = elsewhere
        self._store: LetterStore | None = None
        self._owner = LetterOwner()
        self._noted: ExtendedSequenceNumber | None = None
        self._keeping = threading.Lock()

    def begin(self, row: Lease) -> None:
        """The lease is claimed, and nothing is read yet. Raises: SinkError while the place of the
        letters is away."""
        self._noted = row.letters_to
        self._owner = LetterOwner(
            stream_created_at=row.stream_created_at or 0.0,
            generation=row.generation,
            token=row.counter,
            since=time.time(),
        )
        if row.has_open_letters and self._spec.on_error.then == "dead-letter":
            spec, at = self._spec, str(Cursor(row.checkpoint.of_record))
            self._opened().take_over(
                Takeover(
                    taken_over_at=at,
                    stream=spec.stream_name,
                    shard_id=spec.shard_id,
                    by=self._owner,
                )
            )

    def keep(
        self, record: Record, failure: Failure, calls: int, delivered: ExtendedSequenceNumber | None
    ) -> None:
        """Keep a record that was given up, durably. `delivered`: more letters may follow up to
        there. Raises: SinkError, also while the row cannot be written."""
        spec = self._spec
        with self._keeping:
            self._note(max(record.position, (delivered or record.position).of_record))
            letter = Letter.of(
                record,
                application=spec.application,
                processor=spec.processor,
                stream=spec.stream_name,
                shard_id=spec.shard_id,
                error=failure.error,
                raised_at=failure.raised_at,
                traceback=failure.traceback_text,
                calls=calls,
                given_up_at=time.time(),
                owner=self._owner,
            )
            self._opened().keep(letter)

    def _note(self, upto: ExtendedSequenceNumber) -> None:
        """The row says that letters up to there may be kept, when this returns."""
        for _ in range(_NOTES_MAX):
            if self._noted is not None and self._noted >= upto:
                return
            outcome = self._table.write(writes.NoteLetters(self._key, self._me, upto, self._noted))
            match outcome:
                case writes.Applied():
                    self._noted = upto
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
            self._store = letter_store(self._spec.on_error.letters, self._elsewhere)
        return self._store
