"""The outputs of one lease, and the thread that sends their rows.

The main thread emits rows, which wait (`waiting_rows.py`). The thread of the outputs sends and
commits them (`commits.py`), as far as their records are settled and in the order of the settings
[K5]. So a slow destination delays no renewal. The core decides when a checkpoint is due: it
requests a commit (`CommitOutputs`), and `OutputsCommitted` reports up to which position every
output has its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kclrun.calling.delivery import destination_pause_s
from kclrun.errors import RowsRefused, SettingsError, SinkError, Superseded
from kclrun.lease import events
from kclrun.lease.commands import CommitOutputs
from kclrun.model.output import Cursor, naming_output
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.outputs.commits import Commits, CommitSpans, Keyed, OwnPaces, Turn, WithState
from kclrun.outputs.destination_waits import OUTPUTS_THREAD, DestinationWaits
from kclrun.outputs.lanes import FREE_SHARE, Lane, Pace, PacedOutput
from kclrun.outputs.outbox import Decided
from kclrun.outputs.row_trials import RowTrials
from kclrun.outputs.waiting_rows import WaitingRows


class OutputsHost(Protocol):
    """The lease process whose rows the outputs send. Called on any thread."""

    def post(self, event: events.Event) -> None:
        """Pass an event to the core."""
        ...

    def hold(self) -> None:
        """An output is full: no batch starts until `release`."""
        ...

    def release(self) -> None:
        """The outputs have room again."""
        ...


class Outputs:
    """The outputs of a lease; with keyed state the first of them is the state, whose rows are
    changes. `rows` are those that wait for them.

    `is_manual`: rows are sent only with a checkpoint that user code requests. A row may then sum up
    records of many batches, and after a restart from the checkpoint before, it would be another
    row.
    """

    def __init__(
        self,
        outputs: Sequence[PacedOutput],
        host: OutputsHost,
        *,
        now: Callable[[], Instant],
        is_manual: bool = False,
        state: Keyed | None = None,
        spans: CommitSpans | None = None,
        trials: RowTrials | None = None,
        waits: DestinationWaits | None = None,
    ) -> None:
        self._waits = waits or DestinationWaits(now)
        self._trials = trials or RowTrials(None, host.post, lambda _: None, now)
        self._is_manual = is_manual
        if state is not None:
            pace = Pace(0.0, 0, state.buffer_bytes)
            outputs = [PacedOutput("", state.versions, pace), *outputs]
        self._lanes = [
            Lane(index, name, output, pace) for index, (name, output, pace) in enumerate(outputs)
        ]
        self.rows = WaitingRows(self._lanes, self._trials, None if state is None else state.undo)
        self._with_state = None if state is None else WithState(self.rows, now, spans, state)
        self._commits: Commits = self._with_state or OwnPaces(self.rows, now, spans)
        self._host = host
        self._post = host.post
        self._now = now
        self._changed = self.rows.changed
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
            checkpoint = decided.at.reached
        for lane in self._lanes:
            at = cursors.get(lane.name, at_row if lane.name else Cursor.of(checkpoint))
            with naming_output(lane.name):
                lane.committed = lane.output.begin(at)
            lane.known = lane.committed.reached if lane.output.stores_cursor else None
            reached.append(max(checkpoint, lane.known or checkpoint))
        start = min(reached) if may_adopt else checkpoint
        for lane in self._lanes:
            lane.clear = start
        state = self._with_state
        if decided is not None:
            assert state is not None, "there is an outbox only with state"
            state.take_decided(decided)
        self.rows.begin(start)
        self._reported = start
        if state is not None:
            state.begin(start)
        return start, tuple(sorted({position for position in reached if position > start}))

    def cursors(self) -> dict[str, Cursor]:
        """The cursor of each output that stores one, for the lease's row."""
        return {
            lane.name: lane.committed
            for lane in self._lanes
            if lane.output.stores_cursor and lane.committed is not None
        }

    def settle(self, position: ExtendedSequenceNumber) -> None:
        """Every record up to `position` is processed or given up: their rows may be sent."""
        with self._changed:
            if not self._is_manual:
                self.rows.settle(position)
            if self.rows.wait_upto(self.rows.settled):
                self._waiting_since = self._waiting_since or self._now()
            self._look_at_room()
            if self._is_manual and self.rows.is_full(1.0):
                self._post(
                    events.OutputsRefused(
                        "rows fill output.buffer, and no checkpoint covers them: checkpoint:"
                        " manual asks for checkpointer.checkpoint() before that"
                    )
                )
            self._changed.notify_all()

    # For the lease thread, which runs the core.

    def commit(self, asked: CommitOutputs) -> None:
        """The core requests a commit; a later request replaces this one."""
        with self._changed:
            self._asked = asked
            self._changed.notify_all()

    def confirm(self, version: str | None) -> None:
        """A checkpoint of ours put this version of the state on the row."""
        state = self._with_state
        if state is not None and version != state.confirmed:
            with self._changed:
                state.confirm(version)
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
            with self.rows.sending:
                self._send()
        except Superseded as error:
            self._post(events.OutputsSuperseded(str(error)))
            return False
        except RowsRefused as error:
            upto = self.rows.limit(self._wanted)
            assert upto is not None, "rows leave after begin()"
            state = self._with_state
            is_final = state is not None and state.decided is not None
            self._trials.refused(error, upto, self._lanes, is_final=is_final)
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
        if self._is_closed or self._is_at_tip or self._asked is not None:
            return True
        if self._with_state is not None and self._with_state.has_work:
            return True
        return self.rows.wait_upto(self.rows.limit(self._wanted))

    def _rest_s(self) -> float | None:
        """The seconds until a roll is due by its age; None without one."""
        ages = [
            lane.dirty_since + lane.pace.roll_s - self._now()
            for lane in self._lanes
            if lane.is_dirty and lane.pace.roll_s
        ]
        return max(0.0, min(ages)) if ages else None

    @property
    def _wanted(self) -> ExtendedSequenceNumber | None:
        """The position whose rows the core requests without regard to the pace of an output."""
        return self._asked.upto if self._asked is not None and self._asked.must else None

    def _send(self) -> None:
        with self._changed:
            asked = self._asked
            limit = self.rows.begin_turn(self._wanted)
        self._finish_decided()
        turn = Turn(asked, limit, self._is_at_tip, self._held)
        covered = self._commits.send(turn)
        with self._changed:
            # A request that came meanwhile is answered by the next turn.
            is_answered = asked is not None and asked is self._asked
            if is_answered:
                self._asked = None
            self._is_at_tip = self._is_at_tip and not turn.is_at_tip
            if covered == limit:
                self._waiting_since = Instant(0.0)
            self._look_at_room()
        if is_answered or covered != self._reported:
            self._reported = covered
            self._trials.committed(covered)
            version = self._commits.version
            self._post(
                events.OutputsCommitted(
                    covered, self.cursors(), asked if is_answered else None, version
                )
            )
        if self._with_state is not None and self._with_state.may_collect:
            self._with_state.collect()

    def _finish_decided(self) -> None:
        """Finish the commit that the first output had decided; then reading begins."""
        state = self._with_state
        decided = None if state is None else state.decided
        if state is not None and decided is not None:
            state.finish_decided()
            at, version = decided.at.reached, decided.version
            self._post(events.OutputsBegan(at, self.cursors(), version))

    def _look_at_room(self) -> None:
        """Stop delivery while an output is full, and until half of its buffer is free."""
        share = FREE_SHARE if self._held else 1.0
        held = self.rows.is_full(share)
        # With manual checkpoints user code must run on: its checkpoint makes room.
        if held != self._held and not self._is_manual:
            self._held = held
            if held:
                self._host.hold()
            else:
                self._host.release()
