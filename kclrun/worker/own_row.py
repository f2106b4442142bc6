"""The requests for the lease's own row, each at its time.

One thread makes them, the lease thread: it is the only one that writes the row [P5]. It does not
know why the row is written.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kclrun.errors import ServiceError, SinkError
from kclrun.lease import commands, events
from kclrun.lease.lease_writer import LeaseWriter
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.ports import LeaseTable
from kclrun.protocol import writes

if TYPE_CHECKING:
    from kclrun.observe.traces import LeaseSpans

Timed = commands.SendWrite | commands.SendLateCheckpoint | commands.ReadOwnRow


class OwnRow:
    """`own` is what the core knows of the row. `make_durable` is called before a checkpoint at a
    position is sent; it raises SinkError. `note_send` is called before each write as owner [P5].
    `spans` traces the checkpoints; None without traces.

    `asking_s` counts the seconds that requests took. Its reader sets it to 0.
    """

    def __init__(
        self,
        table: LeaseTable,
        own: LeaseWriter,
        *,
        make_durable: Callable[[ExtendedSequenceNumber], None],
        note_send: Callable[[Instant], None],
        now: Callable[[], Instant],
        spans: LeaseSpans | None = None,
    ) -> None:
        self.asking_s = 0.0
        self._table = table
        self._own = own
        self._make_durable = make_durable
        self._note_send = note_send
        self._now = now
        self._spans = spans
        self._later: list[tuple[Instant, int, Timed]] = []
        self._order = itertools.count()

    @property
    def next_instant(self) -> Instant | None:
        """When the next request that waits is due."""
        return self._later[0][0] if self._later else None

    def perform(self, command: Timed) -> events.Event | None:
        """Make a request, or keep it until its time. Returns: its answer; None while it waits, or
        if it was given up meanwhile."""
        if command.not_before is not None and command.not_before > self._now():
            heapq.heappush(self._later, (command.not_before, next(self._order), command))
            return None
        return self._perform_now(command)

    def perform_due(self) -> Iterator[events.Event]:
        """Make the requests whose time has come. Yields: their answers."""
        while self._later and self._later[0][0] <= self._now():
            _, _, command = heapq.heappop(self._later)
            answer = self._perform_now(command)
            if answer is not None:
                yield answer

    def _perform_now(self, command: Timed) -> events.Event | None:
        if isinstance(command, commands.ReadOwnRow):
            return self._read()
        return self._send(command.change) if self._own.sends(command.change) else None

    def _send(self, change: writes.LeaseChange) -> events.Event:
        began, position = self._now(), _covered(change)
        try:
            if position is not None:
                self._make_durable(position)
        except SinkError as error:
            # Nothing was sent: the checkpoint waits until its rows can be stored.
            return events.RowsNotKept(change, str(error))
        sent = self._now()
        # No fence follows from a late checkpoint: it is not a write as owner.
        if not isinstance(change, writes.LateCheckpoint):
            self._note_send(sent)
        outcome = self._table.write(change)
        self.asking_s += self._now() - sent
        if self._spans is not None and position is not None:
            is_applied = isinstance(outcome, writes.Applied)
            self._spans.committed(position, type(outcome).__name__, began, is_applied=is_applied)
        return events.WriteResolved(change, outcome, sent)

    def _read(self) -> events.Event:
        asked = self._now()
        try:
            return events.OwnRowRead(self._table.read(self._own.key))
        except ServiceError as error:
            return events.ReadFailed(str(error))
        finally:
            self.asking_s += self._now() - asked


def _covered(change: writes.LeaseChange) -> ExtendedSequenceNumber | None:
    """The position that a write puts on the row; None if it carries none."""
    match change:
        case (
            writes.Checkpoint()
            | writes.Release()
            | writes.Offer()
            | writes.HandOver()
            | writes.LateCheckpoint()
        ):
            return change.position
        case writes.End():
            return SHARD_END
        case _:
            return None
