"""The rows of one lease that wait for their outputs, and the changes of its state.

Threads of user code add them, and a call that raises takes its own back. The thread of the outputs
adds them to their outputs, as far as their records are settled. Must not know: when an output
commits.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Final

from kclrun.errors import LimitExceeded, SinkError
from kclrun.model.output import CHANGED_OUTSIDE, EMITTED_OUTSIDE, Cursor, naming_output
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.outputs.lanes import Lane
from kclrun.outputs.row_ledger import Cut, RowCount, RowLedger
from kclrun.outputs.row_trials import RowTrials
from kclrun.processor import KeptRow, Row
from kclrun.state.keyed import MakeChange, Undoable, held_bytes

# The rows of one call wait in memory, because they are taken back if the call raises. A mistake of
# the processor must not take more memory of its host than this.
CALL_BYTES_MAX: Final = 256 * 2**20


class WaitingRows:
    """Implements `RowScope`. With `undo` there is state: the first of the lanes, whose rows are
    changes, and `undo` takes a change back from the entries that user code sees.

    `changed` is notified when there may be something to send. `sending` is held during a turn of
    the outputs and during a trial, which sees no half of a commit. Rows up to `sent` were given to
    their destinations: their records are not given to user code again. Rows up to `settled` may be
    sent.
    """

    def __init__(
        self, lanes: Sequence[Lane], trials: RowTrials, undo: Callable[[Undoable], None] | None
    ) -> None:
        self.lanes = lanes
        self._by_name = {lane.name: lane for lane in lanes if lane.name}
        self._trials = trials
        self._undo = undo
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)
        self.sending = threading.Lock()
        self._ledger = RowLedger[RowCount]()
        self._turn_limit: ExtendedSequenceNumber | None = None  # of the last turn
        self.sent: ExtendedSequenceNumber | None = None
        self.settled: ExtendedSequenceNumber | None = None

    def __len__(self) -> int:
        """How many cuts wait."""
        return len(self._ledger)

    # For the main thread, and for threads of user code.

    # This is the hot path of every change.
    def change_state(self, change: MakeChange, key: str, name: str, value: bytes | None) -> None:
        """Implements `state.keyed.Journal`. Raises: SinkError outside a batch; LimitExceeded."""
        with self._lock:  # the condition's own, without its calls in Python
            start = self._ledger.call_start
            if start is None:
                raise SinkError(CHANGED_OUTSIDE)
            lane = self.lanes[0]
            size = lane.emitted_bytes
            added = held_bytes(key, name, value, None)
            if size + added - start[0].size > CALL_BYTES_MAX:
                raise LimitExceeded(f"one call changed more than {CALL_BYTES_MAX} bytes of state")
            made = change(key, name, value)
            if made is not None:
                lane.rows.append(made)
                lane.emitted_rows += 1
                lane.emitted_bytes = size + held_bytes(*made)

    def place_changes(self, changes: Sequence[Undoable]) -> None:
        """Add, within a batch, the changes of the state that records kept until they were done.
        User code sees these changes already, and `take_back_batch` does not undo them."""
        size = sum([held_bytes(*change) for change in changes])  # there may be very many
        with self._lock:
            lane = self.lanes[0]
            lane.rows.extend(changes)
            lane.emitted_rows += len(changes)
            lane.emitted_bytes += size

    def emit_to(self, name: str) -> Callable[[Row], None]:
        """Returns: the function that adds one row to the output. It raises SinkError outside a
        batch, and TypeError and LimitExceeded as `Output.encode` does."""
        lane = self._by_name[name]
        lock, ledger, encode = self._lock, self._ledger, lane.output.encode

        # This is the hot path of every row.
        def emit(row: Row) -> None:
            encoded, size = encode(row)
            with lock:
                start = ledger.call_start
                if start is None:
                    raise SinkError(EMITTED_OUTSIDE)
                emitted_bytes = lane.emitted_bytes + size
                if emitted_bytes - start[lane.index].size > CALL_BYTES_MAX:
                    raise LimitExceeded(
                        f"one call emitted more than {CALL_BYTES_MAX} bytes to the output {name}"
                    )
                lane.rows.append(encoded)
                lane.emitted_rows += 1
                lane.emitted_bytes = emitted_bytes

        return emit

    def prepare(self, row: Row, to: str) -> KeptRow:
        """A row for the output `to` that its record keeps until it is done. Raises: as `emit`."""
        kept = KeptRow(to, *self._by_name[to].output.encode(row))
        if self._trials.is_on(None, to):
            with self.sending:
                self._trials.try_single(self.lanes, self._by_name[to], kept.encoded, self.settled)
        return kept

    def try_rows(self, position: ExtendedSequenceNumber) -> None:
        """While trials are on, try the rows of the call under way, for records up to `position`.
        Raises: TypeError, as `emit` does, if a destination refuses them; SinkError."""
        if not self._trials.is_on(position):
            return
        with self.sending:
            with self._lock:
                start = self._ledger.call_start
                assert start is not None, "a call is under way"
                marks = [
                    (self._had(lane), began.rows)
                    for lane, began in zip(self.lanes, start, strict=True)
                ]
            self._trials.try_rows(self.lanes, marks, position)

    def _had(self, lane: Lane) -> int:
        """The number of rows that the destination had when the lease began, of those that wait."""
        known = self._ledger.replayed_upto(lane.known) if lane.known else []
        return known[-1].counts[lane.index].rows if known else 0

    def place(self, row: KeptRow) -> None:
        """Add a row that was prepared, within a batch. The limit was checked when it was
        prepared."""
        with self._lock:
            self._by_name[row.to].append(row.encoded, row.size)

    def begin_batch(self) -> None:
        """As `RowScope`: a call of user code starts."""
        with self._lock:
            self._ledger.begin_call(self._emitted())

    def end_batch(self, position: ExtendedSequenceNumber) -> None:
        """The call returned: its rows belong to the checkpoint at `position`, or to a later one."""
        with self._lock:
            self._cut(position)
            self._ledger.end_call()

    def cover(self, position: ExtendedSequenceNumber) -> None:
        """User code asks for a checkpoint: it covers the rows emitted until now."""
        with self._lock:
            self._cut(position)

    def take_back_batch(self, checkpoint: ExtendedSequenceNumber | None = None) -> None:
        """The call raised: its rows are removed, except those that the acknowledged `checkpoint`
        covers, and those that were sent already."""
        with self._lock:
            limits = [position for position in (checkpoint, self.sent) if position is not None]
            kept = self._ledger.kept(max(limits, default=None), self._added())
            self._ledger.take_back(kept)
            taken = [lane.take_back(count) for lane, count in zip(self.lanes, kept, strict=True)]
        if self._undo is not None:
            for change in reversed(taken[0]):  # there may be very many
                self._undo(change)

    def _emitted(self) -> tuple[RowCount, ...]:
        return tuple(lane.emitted for lane in self.lanes)

    def _added(self) -> tuple[RowCount, ...]:
        return tuple(lane.added for lane in self.lanes)

    def _cut(self, position: ExtendedSequenceNumber) -> None:
        """The rows emitted so far belong to the checkpoint at `position`, or to a later one. Rows
        for a position that was sent already wait for the next position, because a destination takes
        each cursor once."""
        if self.sent is not None and position <= self.sent:
            self._ledger.make_void(position)
            return
        self._ledger.cut(position, self._emitted(), self._added())
        if self.settled is not None:
            # From now on rows leave up to the settled position. The turn under way may end before
            # it, and so may the rows that a destination has already [K12].
            ends = (self._turn_limit, *(lane.known for lane in self.lanes))
            self._ledger.merge(self.settled, ends)

    # For the outputs.

    def begin(self, start: ExtendedSequenceNumber) -> None:
        """The outputs were taken over: reading begins at `start`."""
        self.settled = self.sent = start

    def settle(self, position: ExtendedSequenceNumber) -> None:
        """Every record up to `position` is processed or given up: their rows may be sent."""
        with self._lock:
            self.settled = position if self.settled is None else max(self.settled, position)

    def wait_upto(self, position: ExtendedSequenceNumber | None) -> bool:
        """Whether rows wait that belong to a checkpoint at `position`."""
        with self._lock:
            return self._ledger.has_any_upto(position)

    def limit(self, wanted: ExtendedSequenceNumber | None) -> ExtendedSequenceNumber | None:
        """The highest position whose rows may be sent: all that are settled, or those of a commit
        at `wanted`."""
        known = [position for position in (wanted, self.settled) if position is not None]
        return max(known) if known else None

    def begin_turn(self, wanted: ExtendedSequenceNumber | None) -> ExtendedSequenceNumber:
        """A turn of the outputs begins, which sends rows up to the limit. Returns: the limit."""
        with self._lock:
            limit = self._turn_limit = self.limit(wanted)
        assert limit is not None, "rows leave after begin()"
        return limit

    def add(self, limit: ExtendedSequenceNumber, now: Callable[[], Instant]) -> None:
        """Add the rows up to `limit`, the one of this turn, to their outputs."""
        while True:
            with self._lock:
                cuts = self._ledger.upto(limit)
                if not cuts:
                    return
                sent = self.sent = cuts[-1].position
            for lane in self.lanes:
                self._add_to(lane, cuts, now)
            with self._lock:
                self._ledger.leave(sent)  # no cut at or below `sent` is newer than these

    def _add_to(
        self, lane: Lane, cuts: Sequence[Cut[RowCount]], now: Callable[[], Instant]
    ) -> None:
        """Add the rows up to the last cut; rows that the destination has already are dropped."""
        known, upto = lane.known, cuts[-1].position
        if known is not None:
            there = [*itertools.takewhile(lambda cut: cut.position <= known, cuts)]
            if there:
                self._take(lane, there[-1].counts[lane.index])
            if upto <= known:
                return  # the destination takes no lower cursor: rows above `known` wait
        last = cuts[-1].counts[lane.index]
        with self._lock:
            rows = lane.rows[: max(0, last.rows - lane.added.rows)]
        if rows:
            with naming_output(lane.name):
                lane.output.add(rows, Cursor.of(upto))
            if not lane.is_dirty:
                lane.is_dirty, lane.dirty_since = True, now()
            self._take(lane, last)

    def _take(self, lane: Lane, upto: RowCount) -> None:
        """The rows up to this count do not wait here any more."""
        with self._lock:
            if upto.rows > lane.added.rows:
                del lane.rows[: upto.rows - lane.added.rows]
                lane.added = upto

    def is_full(self, share: float) -> bool:
        """Whether an output has this share of its buffer unsent."""
        return any(lane.waiting_bytes >= lane.pace.buffer_bytes * share for lane in self.lanes)
