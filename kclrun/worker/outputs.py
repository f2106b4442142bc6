"""The outputs of one lease: rows wait here until the thread of the outputs sends them.

The main thread emits rows. The thread of the outputs sends and commits them, as far as their
records are settled and in the order of the settings [K5]. So a slow destination delays no renewal.
The core decides when a checkpoint is due: it requests a commit (`CommitOutputs`), and
`OutputsCommitted` reports up to which position every output has its rows.

With keyed state the first output is the state: its rows are changes of the state. Then all outputs
commit together and at one position, the state first. So no output has rows of records whose state
is not durable.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from kclrun.calling.delivery import destination_pause_s
from kclrun.errors import LimitExceeded, RowsRefused, SettingsError, SinkError, Superseded
from kclrun.lease import events
from kclrun.lease.commands import CommitOutputs
from kclrun.model.output import CHANGED_OUTSIDE, EMITTED_OUTSIDE, Cursor, naming_output
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.outputs.outbox import BoxedOutput, Decided
from kclrun.outputs.row_ledger import Cut, RowCount, RowLedger
from kclrun.outputs.state_versions import StateVersions
from kclrun.ports import Output
from kclrun.processor import KeptRow, Row
from kclrun.state.keyed import MakeChange, Undoable, held_bytes
from kclrun.worker.destination_waits import OUTPUTS_THREAD, DestinationWaits
from kclrun.worker.lanes import FREE_SHARE, Lane, Pace
from kclrun.worker.row_trials import RowTrials

if TYPE_CHECKING:
    from kclrun.observe.traces import LeaseSpans

# The rows of one call wait in memory, because they are taken back if the call raises. A mistake of
# the processor must not take more memory of its host than this.
CALL_BYTES_MAX: Final = 256 * 2**20
# With so many bytes of changes of the state waiting, a commit is made before it is due.
STATE_BUFFER_BYTES: Final = 64 * 2**20
# How often versions that no row needs are looked for: each time costs one LIST.
_COLLECT_EVERY_S: Final = 3600.0
# An offer leaves a larger roll to the next owner: sending it takes longer than the gap of a move
# should be.
OFFER_BYTES_MAX: Final = 5 * 2**20


class Keyed(msgspec.Struct, frozen=True):
    """The keyed state among the outputs. `undo` takes a change back from the entries that user code
    sees. Versions that no row needs are deleted when they are older than `retain_s`. A commit is
    made before it is due when changes of `buffer_bytes` wait for it. With `is_boxed` the other
    outputs are `BoxedOutput`s, and the versions hold their rows [K12]."""

    versions: StateVersions
    undo: Callable[[Undoable], None]
    retain_s: float
    buffer_bytes: int = STATE_BUFFER_BYTES
    is_boxed: bool = False


class Outputs:
    """The rows of a lease on their way to its outputs. Implements `RowScope`.

    `post` passes an event to the core. `hold` stops delivery while an output is full, and allows it
    again. `is_manual`: rows are sent only with a checkpoint that user code requests. A row may then
    sum up records of many batches, and after a restart from the checkpoint before, it would be
    another row.
    """

    def __init__(
        self,
        outputs: Sequence[tuple[str, Output, Pace]],
        *,
        post: Callable[[events.Event], None],
        hold: Callable[[bool], None],
        now: Callable[[], Instant],
        is_manual: bool = False,
        state: Keyed | None = None,
        spans: LeaseSpans | None = None,
        trials: RowTrials | None = None,
        waits: DestinationWaits | None = None,
    ) -> None:
        self._waits = waits or DestinationWaits(now)
        self._trials = trials or RowTrials(None, post, lambda _: None, now)
        self._sending = threading.Lock()  # a turn, or a trial, which sees no half of a commit
        self._is_manual = is_manual
        self._state = state
        self._spans = spans
        if state is not None:
            pace = Pace(0.0, 0, state.buffer_bytes)
            outputs = [("", state.versions, pace), *outputs]
        self._lanes = [Lane(index, *each) for index, each in enumerate(outputs)]
        self._by_name = {lane.name: lane for lane in self._lanes if lane.name}
        # With state: the position of the last commit of all outputs, and its version; the position
        # of the commit under way; the version that a checkpoint of ours put on the row.
        self._whole: ExtendedSequenceNumber | None = None
        self._version: str | None = None
        self._committing: ExtendedSequenceNumber | None = None
        self._confirmed: str | None = None
        self._collect_instant: Instant | None = None
        self._decided: Decided | None = None  # None once all outputs have its rows
        self._boxed_at: ExtendedSequenceNumber | None = None
        self._post = post
        self._hold = hold
        self._now = now
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._ledger = RowLedger[RowCount]()
        self._sending_upto: ExtendedSequenceNumber | None = None  # of the last turn
        # The highest position whose rows may be sent, and the highest whose rows were added.
        self._settled: ExtendedSequenceNumber | None = None
        self._sent: ExtendedSequenceNumber | None = None
        self._asked: CommitOutputs | None = None
        self._reported: ExtendedSequenceNumber | None = None
        self._held = False
        self._failed = 0
        self._waiting_since = Instant(0.0)
        self._is_closed = False
        self._is_at_tip = False  # rows that may be refused are committed in the next turn

    # The start of a lease, on the main thread; the thread of the outputs runs afterwards.

    def begin(
        self,
        checkpoint: ExtendedSequenceNumber,
        cursors: Mapping[str, Cursor],
        *,
        may_adopt: bool,
        decided: Decided | None = None,
    ) -> tuple[ExtendedSequenceNumber, tuple[ExtendedSequenceNumber, ...]]:
        """Take the destinations over, and read the cursor of each of them [K11, K12].

        `cursors` are those of the lease's row. Returns: the position at which reading begins, and
        the positions at which a batch must end. Reading begins at `checkpoint`, or with `may_adopt`
        at the position beyond it up to which every output has its rows. If the first output has
        `decided` a commit, reading begins there; its rows are sent first, and `OutputsBegan` is
        posted after that. Raises: SinkError (again later), SettingsError.
        """
        reached = []
        at_row = Cursor.of(checkpoint)
        if decided is not None:
            self._decided, checkpoint = decided, decided.at.reached
        for lane in self._lanes:
            at = cursors.get(lane.name, at_row if lane.name else Cursor.of(checkpoint))
            with naming_output(lane.name):
                lane.committed = lane.output.begin(at)
            lane.known = lane.committed.reached if lane.output.stores_cursor else None
            reached.append(max(checkpoint, lane.known or checkpoint))
        start = min(reached) if may_adopt else checkpoint
        for lane in self._lanes:
            lane.clear = start
        if decided is not None:
            self._take_decided(decided)
        self._settled = self._sent = self._reported = self._whole = start
        if self._state is not None:
            self._version = self._state.versions.version
            self._lanes[0].is_dirty = self._state.versions.must_write
        return start, tuple(sorted({each for each in reached if each > start}))

    def _take_decided(self, decided: Decided) -> None:
        """Give the rows of the decided commit to the outputs that lack them. At the end of a shard
        `shard_ended` is called once more, and the rows that it emits are dropped."""
        for lane in self._lanes:
            box, at = decided.boxes.get(lane.name), lane.committed
            lane.known = max(lane.known or decided.at.reached, decided.at.reached)
            if box is None or at is None or at >= Cursor.parse(box.upto):
                continue  # without rows in that commit, or it has them
            if isinstance(lane.output, BoxedOutput):
                lane.output.fill(box.rows, decided.at)
                lane.is_dirty = True

    def cursors(self) -> dict[str, Cursor]:
        """The cursor of each output that stores one, for the lease's row."""
        return {
            lane.name: lane.committed
            for lane in self._lanes
            if lane.output.stores_cursor and lane.committed is not None
        }

    # For the main thread, and for threads of user code.

    # This is the hot path of every change.
    def change_state(self, change: MakeChange, key: str, name: str, value: bytes | None) -> None:
        """Implements `state.keyed.Journal`. Raises: SinkError outside a batch; LimitExceeded."""
        with self._lock:  # the condition's own, without its calls in Python
            start = self._ledger.call_start
            if start is None:
                raise SinkError(CHANGED_OUTSIDE)
            lane = self._lanes[0]
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
            lane = self._lanes[0]
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
            with self._sending:
                self._trials.try_single(self._lanes, self._by_name[to], kept.encoded, self._settled)
        return kept

    def try_rows(self, position: ExtendedSequenceNumber) -> None:
        """While trials are on, try the rows of the call under way, for records up to `position`.
        Raises: TypeError, as `emit` does, if a destination refuses them; SinkError."""
        if not self._trials.is_on(position):
            return
        with self._sending:
            with self._changed:
                start = self._ledger.call_start
                assert start is not None, "a call is under way"
                marks = [
                    (self._had(lane), began.rows)
                    for lane, began in zip(self._lanes, start, strict=True)
                ]
            self._trials.try_rows(self._lanes, marks, position)

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
        with self._changed:
            self._ledger.begin_call(self._emitted())

    def end_batch(self, position: ExtendedSequenceNumber) -> None:
        """The call returned: its rows belong to the checkpoint at `position`, or to a later one."""
        with self._changed:
            self._cut(position)
            self._ledger.end_call()

    def cover(self, position: ExtendedSequenceNumber) -> None:
        """User code asks for a checkpoint: it covers the rows emitted until now."""
        with self._changed:
            self._cut(position)

    def take_back_batch(self, checkpoint: ExtendedSequenceNumber | None = None) -> None:
        """The call raised: its rows are removed, except those that the acknowledged `checkpoint`
        covers, and those that were sent already."""
        with self._changed:
            limits = [position for position in (checkpoint, self._sent) if position is not None]
            kept = self._ledger.kept(max(limits, default=None), self._added())
            self._ledger.take_back(kept)
            taken = [lane.take_back(count) for lane, count in zip(self._lanes, kept, strict=True)]
        if self._state is not None:
            for change in reversed(taken[0]):  # there may be very many
                self._state.undo(change)

    @property
    def sent(self) -> ExtendedSequenceNumber | None:
        """Rows up to this position were given to their destinations: their records are not given to
        user code again."""
        return self._sent

    def settle(self, position: ExtendedSequenceNumber) -> None:
        """Every record up to `position` is processed or given up: their rows may be sent."""
        with self._changed:
            if not self._is_manual:
                self._settled = position if self._settled is None else max(self._settled, position)
            if self._ledger.has_any_upto(self._settled):
                self._waiting_since = self._waiting_since or self._now()
            self._look_at_room()
            if self._is_manual and self._is_full(1.0):
                self._post(
                    events.OutputsRefused(
                        "rows fill output.buffer, and no checkpoint covers them: checkpoint:"
                        " manual asks for checkpointer.checkpoint() before that"
                    )
                )
            self._changed.notify_all()

    def _emitted(self) -> tuple[RowCount, ...]:
        return tuple(lane.emitted for lane in self._lanes)

    def _added(self) -> tuple[RowCount, ...]:
        return tuple(lane.added for lane in self._lanes)

    def _cut(self, position: ExtendedSequenceNumber) -> None:
        """The rows emitted so far belong to the checkpoint at `position`, or to a later one. Rows
        for a position that was sent already wait for the next position, because a destination takes
        each cursor once."""
        if self._sent is not None and position <= self._sent:
            self._ledger.make_void(position)
            return
        self._ledger.cut(position, self._emitted(), self._added())
        if self._settled is not None:
            # From now on rows leave up to the settled position. The turn under way may end before
            # it, and so may the rows that a destination has already [K12].
            ends = (self._sending_upto, *(lane.known for lane in self._lanes))
            self._ledger.merge(self._settled, ends)

    # For the lease thread, which runs the core.

    def commit(self, asked: CommitOutputs) -> None:
        """The core requests a commit; a later request replaces this one."""
        with self._changed:
            self._asked = asked
            self._changed.notify_all()

    def confirm(self, version: str | None) -> None:
        """A checkpoint of ours put this version of the state on the row."""
        if self._state is not None and version != self._confirmed:
            with self._changed:
                self._confirmed = version
                self._changed.notify_all()

    @property
    def waiting_since(self) -> Instant:
        """Rows of settled records have waited for an output since this instant; 0 if none wait."""
        return self._waiting_since

    def commits_at_tip(self) -> bool:
        """Whether rows wait that a destination may refuse: they are committed now. Called at the
        tip of a run that ends there, because a refusal of the last commit could not be followed by
        trials any more. While a destination is away, the run ends without its rows."""
        if self._is_manual or self._failed:
            return False
        with self._changed:
            waits = any(it.may_be_refused and (it.rows or it.is_dirty) for it in self._lanes)
            if waits and not self._is_at_tip:
                self._is_at_tip = True
                self._changed.notify_all()
            return waits

    def close(self) -> None:
        """Send nothing more. The thread of the outputs closes the destinations."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # The thread of the outputs.

    def serve(self) -> None:
        """Send and commit until `close`, or until another owner is found at a destination."""
        try:
            while self._wait() and self.turn():
                pass
        finally:
            for lane in self._lanes:
                lane.output.close()

    def turn(self) -> bool:
        """Add the rows that may be sent, commit what is due, and report to the core how far every
        output is. False if nothing more may be sent."""
        self._waits.tries(OUTPUTS_THREAD)
        try:
            with self._sending:
                self._send()
        except Superseded as error:
            self._post(events.OutputsSuperseded(str(error)))
            return False
        except RowsRefused as error:
            upto = self._limit()
            assert upto is not None, "rows leave after begin()"
            self._trials.refused(error, upto, self._lanes, is_final=self._decided is not None)
            return False
        except SinkError as error:
            self._failed += 1
            self._waits.failed(OUTPUTS_THREAD)
            upto = self._asked.upto if self._asked is not None else self._reported
            assert upto is not None, "rows leave after begin()"
            self._post(events.OutputsNotCommitted(upto, str(error)))
        except SettingsError as error:
            self._post(events.OutputsRefused(str(error)))
            return False
        else:
            self._failed = 0
            self._waits.over(OUTPUTS_THREAD)
        return True

    def _wait(self) -> bool:
        """Wait for something to do, or for the end of a pause; False once closed."""
        pause_s = destination_pause_s(self._failed) if self._failed else 0.0
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, timeout=pause_s)
            self._changed.wait_for(self._has_work, timeout=self._rest_s())
            return not self._is_closed

    def _has_work(self) -> bool:
        may_add = self._ledger.has_any_upto(self._limit())
        is_busy = any(it is not None for it in (self._asked, self._committing, self._decided))
        is_busy = is_busy or self._is_at_tip
        return self._is_closed or is_busy or may_add or self._may_collect()

    def _may_collect(self) -> bool:
        """Whether versions that no row needs may be deleted: once an hour, while the row names the
        newest version by a checkpoint of ours [K15]."""
        state = self._state
        if state is None or self._confirmed is None or self._committing is not None:
            return False
        is_due = self._collect_instant is None or self._now() >= self._collect_instant
        return is_due and self._confirmed == state.versions.version

    def _rest_s(self) -> float | None:
        """The seconds until a roll is due by its age; None without one."""
        ages = [
            lane.dirty_since + lane.pace.roll_s - self._now()
            for lane in self._lanes
            if lane.is_dirty and lane.pace.roll_s
        ]
        return max(0.0, min(ages)) if ages else None

    def _limit(self) -> ExtendedSequenceNumber | None:
        """The highest position whose rows may be sent."""
        asked = self._asked.upto if self._asked is not None and self._asked.must else None
        known = [each for each in (asked, self._settled) if each is not None]
        return max(known) if known else None

    def _send(self) -> None:
        with self._changed:
            asked = self._asked
            limit = self._sending_upto = self._limit()
        assert limit is not None, "rows leave after begin()"
        self._fill()
        covered = (self._send_apart if self._state is None else self._send_together)(asked, limit)
        with self._changed:
            # A request that came meanwhile is answered by the next turn.
            is_answered = asked is not None and asked is self._asked
            if is_answered:
                self._asked = None
            self._is_at_tip = False
            if covered == limit:
                self._waiting_since = Instant(0.0)
            self._look_at_room()
        if is_answered or covered != self._reported:
            self._reported = covered
            self._trials.committed(covered)
            self._post(
                events.OutputsCommitted(
                    covered, self.cursors(), asked if is_answered else None, self._version
                )
            )
        if self._may_collect():
            self._collect()

    def _fill(self) -> None:
        """Commit the rows of the decided commit to the other outputs; then reading begins."""
        if self._decided is not None:
            for lane in self._lanes:
                if lane.name and (lane.is_unresolved or lane.is_dirty):
                    self._commit(lane)
            at, version = self._decided.at.reached, self._decided.version
            self._post(events.OutputsBegan(at, self.cursors(), version))
            self._decided = None

    def _send_apart(
        self, asked: CommitOutputs | None, limit: ExtendedSequenceNumber
    ) -> ExtendedSequenceNumber:
        """Each output commits at its own pace. Returns: the position up to which all outputs have
        their rows."""
        for lane in self._lanes:
            if lane.is_unresolved:
                self._commit(lane)
        self._add(limit)
        for lane in self._lanes:
            if self._commits(lane, asked):
                self._commit(lane)
        with self._changed:
            for lane in self._lanes:
                if not lane.is_dirty and not self._ledger.has_any_upto(limit):
                    lane.clear = limit
            return min(lane.clear or limit for lane in self._lanes)

    def _send_together(
        self, asked: CommitOutputs | None, limit: ExtendedSequenceNumber
    ) -> ExtendedSequenceNumber:
        """One commit of the state and of all outputs at one position, the state first [K5]. One
        that failed half-way is finished, at its own position, before anything is added."""
        assert self._state is not None, "there is state"
        self._finish_commit()
        self._add(limit)
        is_clean = not any(lane.is_dirty for lane in self._lanes)
        with self._changed:
            is_added = not self._ledger.has_any_upto(limit)
        if is_added and (is_clean or self._commits_together(asked)):
            self._committing = limit
            self._box(limit)
            self._finish_commit()
        assert self._whole is not None, "begin() comes first"
        return self._whole

    def _finish_commit(self) -> None:
        if self._committing is None:
            return
        assert self._state is not None, "there is state"
        for lane in self._lanes:
            if lane.is_unresolved or lane.is_dirty:
                if lane.index == 1 and self._boxed_at == self._committing:
                    self._decide(lane)
                self._commit(lane)
        self._whole, self._version = self._committing, self._state.versions.version
        self._committing = None

    def _box(self, upto: ExtendedSequenceNumber) -> None:
        """With an outbox: put the rows of all outputs into the version of this commit. The first
        output decides the commit, also if it has no rows of its own. It cannot decide a commit at
        or below the cursor that it had before the settings had an outbox [K12]. A commit without
        rows and without a change of the state names the version of an earlier commit again."""
        state = self._state
        if state is None or not state.is_boxed or self._whole is None or upto <= self._whole:
            return
        boxes = {
            lane.name: lane.output.box()
            for lane in self._lanes
            if isinstance(lane.output, BoxedOutput) and lane.output.has_rows
        }
        for lane in self._lanes[2:]:  # what these refuse must be known before the first decides
            if isinstance(lane.output, BoxedOutput) and lane.output.has_rows:
                with naming_output(lane.name):
                    lane.output.try_rows((), [(it.output, ()) for it in self._lanes[1:]])
        state.versions.box(boxes)
        first = self._lanes[1]
        self._lanes[0].is_dirty |= bool(boxes)
        if first.known is None or upto > first.known:
            self._boxed_at, first.is_dirty = upto, True

    def _decide(self, first: Lane) -> None:
        state, upto = self._state, self._committing
        assert isinstance(first.output, BoxedOutput), "with an outbox every output is one"
        assert state is not None, "there is state"
        assert upto is not None, "a commit is under way"
        version = state.versions.version
        assert version is not None, "the first commit of a lease writes one"
        first.output.decide(version, Cursor.of(upto))

    def _commits_together(self, asked: CommitOutputs | None) -> bool:
        """Whether all outputs commit now: at the pace of the slowest one that has rows."""
        dirty = [lane for lane in self._lanes if lane.is_dirty]
        if asked is not None and asked.must:
            is_large = any(lane.output.unsent_bytes > OFFER_BYTES_MAX for lane in dirty)
            return not (asked.is_leaving and is_large)
        now, held = self._now(), self._held
        if self._is_at_tip or any(lane.is_due(now, is_asked=False, is_held=held) for lane in dirty):
            return True
        return asked is not None and all(
            lane.is_due(now, is_asked=True, is_held=held) for lane in dirty
        )

    def _collect(self) -> None:
        """Delete versions that no row needs. If the store is away, again in an hour."""
        assert self._state is not None, "there is state"
        self._collect_instant = Instant(self._now() + _COLLECT_EVERY_S)
        with contextlib.suppress(SinkError):
            self._state.versions.collect(self._state.retain_s)

    def _commits(self, lane: Lane, asked: CommitOutputs | None) -> bool:
        if asked is not None and asked.must and lane.is_dirty:
            return not (asked.is_leaving and lane.output.unsent_bytes > OFFER_BYTES_MAX)
        if self._is_at_tip and lane.is_dirty and lane.may_be_refused:
            return True
        return lane.is_due(self._now(), is_asked=asked is not None, is_held=self._held)

    def _add(self, limit: ExtendedSequenceNumber) -> None:
        """Add the rows of settled records up to `limit` to their outputs."""
        while True:
            with self._changed:
                cuts = self._ledger.upto(limit)
                if not cuts:
                    return
                sent = self._sent = cuts[-1].position
            for lane in self._lanes:
                self._add_to(lane, cuts)
            with self._changed:
                self._ledger.leave(sent)  # no cut at or below `sent` is newer than these

    def _add_to(self, lane: Lane, cuts: Sequence[Cut[RowCount]]) -> None:
        """Add the rows up to the last cut; rows that the destination has already are dropped."""
        known, upto = lane.known, cuts[-1].position
        if known is not None:
            there = [*itertools.takewhile(lambda cut: cut.position <= known, cuts)]
            if there:
                self._take(lane, there[-1].counts[lane.index])
            if upto <= known:
                return  # the destination takes no lower cursor: rows above `known` wait
        last = cuts[-1].counts[lane.index]
        with self._changed:
            rows = lane.rows[: max(0, last.rows - lane.added.rows)]
        if rows:
            with naming_output(lane.name):
                lane.output.add(rows, Cursor.of(upto))
            if not lane.is_dirty:
                lane.is_dirty, lane.dirty_since = True, self._now()
            self._take(lane, last)

    def _take(self, lane: Lane, upto: RowCount) -> None:
        """The rows up to this count do not wait here any more."""
        with self._changed:
            if upto.rows > lane.added.rows:
                del lane.rows[: upto.rows - lane.added.rows]
                lane.added = upto

    def _commit(self, lane: Lane) -> None:
        began, before = self._now(), lane.committed_rows
        lane.is_unresolved = True
        with naming_output(lane.name):
            lane.committed = lane.output.commit()
        lane.is_dirty = lane.is_unresolved = False
        size = lane.added.size - lane.committed_bytes
        lane.committed_rows, lane.committed_bytes = lane.added.rows, lane.added.size
        if self._spans is not None:
            upto = lane.committed.position
            self._spans.emitted(lane.name, lane.added.rows - before, size, upto, began)

    def _is_full(self, share: float) -> bool:
        return any(lane.waiting_bytes >= lane.pace.buffer_bytes * share for lane in self._lanes)

    def _look_at_room(self) -> None:
        """Stop delivery while an output is full, and until half of its buffer is free."""
        share = FREE_SHARE if self._held else 1.0
        held = self._is_full(share)
        # With manual checkpoints user code must run on: its checkpoint makes room.
        if held != self._held and not self._is_manual:
            self._held = held
            self._hold(held)
