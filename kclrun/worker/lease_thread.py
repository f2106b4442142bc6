"""The lease thread: hears the manager, asks the core, does what it says.

All writes of the row go through this one thread [P5]. A slow answer of the table delays the next
event, never a decision: time comes to the core with each event.
"""

from __future__ import annotations

import heapq
import itertools
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from kclrun.consuming import commands as do
from kclrun.consuming import events as on
from kclrun.consuming.life import LeaseLife
from kclrun.errors import ServiceError, SinkError
from kclrun.model.changes import (
    Checkpoint,
    End,
    HandOver,
    LateCheckpoint,
    LeaseChange,
    Offer,
    Release,
)
from kclrun.model.outcomes import Unavailable
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.model.stream_key import qualified_shards, stream_of
from kclrun.model.time import Instant
from kclrun.ports import LeaseTable, StreamAdmin
from kclrun.worker.checkpointing import CheckpointDesk
from kclrun.worker.desk import Desk
from kclrun.worker.fetch_watch import FetchWatch
from kclrun.worker.inbox import Inbox
from kclrun.worker.manager_line import ManagerLine
from kclrun.worker.reporting import Reporter

__all__ = ["LeaseThread", "Rows"]

# The manager looks at the status slot once a second; whatever happens (a batch, a write, a message)
# refreshes it at once. Among a hundred idle processes the caches are cold and a turn takes 0.24 ms:
# five turns a second were 9 % of a core more than one (`bin/bench idle`).
LOOK_S: Final = 1.0
# A thread that waits wakes within milliseconds. A whole second late is worth telling: something
# held the GIL, or the process stood still.
STALL_TOLD_S: Final = 1.0

Timed = do.SendWrite | do.SendLateCheckpoint | do.ReadOwnRow
Later = tuple[Instant, int, Timed]


class Rows(Protocol):
    """The emitted rows' durability, as far as the lease thread needs it."""

    def make_durable(self, position: ExtendedSequenceNumber) -> None:
        """Before a checkpoint at `position` is sent. Raises: SinkError."""
        ...


class LeaseThread(threading.Thread):
    """Runs the core until it says Exit; `cause` says why then, `failure` if the thread broke.

    `on_over` is called on this thread at the very end, with the desk closed.
    """

    def __init__(
        self,
        life: LeaseLife,
        inbox: Inbox,
        desk: Desk,
        *,
        table: LeaseTable,
        admin: StreamAdmin,
        checkpoints: CheckpointDesk,
        rows: Callable[[], Rows | None],
        line: ManagerLine,
        reporter: Reporter,
        fetch_watch: FetchWatch,
        now: Callable[[], Instant],
        on_over: Callable[[], None],
    ) -> None:
        super().__init__(name="lease", daemon=True)
        self.cause: do.ExitCause | None = None
        self.failure: BaseException | None = None
        self._life = life
        self._inbox = inbox
        self._desk = desk
        self._table = table
        self._admin = admin
        self._checkpoints = checkpoints
        self._rows = rows
        self._line = line
        self._reporter = reporter
        self._fetch_watch = fetch_watch
        self._now = now
        self._on_over = on_over
        self._events: deque[on.Event] = deque([on.Started()])
        self._later: list[Later] = []
        self._order = itertools.count()
        self._awake_since = now()
        self._asking_s = 0.0
        self._user_code_before_s = 0.0

    def run(self) -> None:
        try:
            while self.cause is None and self.failure is None:
                self._turn()
        except BaseException as error:  # noqa: BLE001 - the thread's edge: `main` reports it
            self.failure = error
        finally:
            self._desk.close()
            self._on_over()

    def break_off(self, error: BaseException) -> None:
        """Another thread broke: end the process, whose successor begins anew. Any thread."""
        self.failure = error
        self._inbox.post(on.Ticked())

    def _turn(self) -> None:
        """Everything that has happened, then wait for more."""
        while self._events and self.cause is None:
            self._handle(self._events.popleft())
        if self.cause is not None:
            return
        self._reporter.publish(self._life, self._desk.view())
        self._watch_fetching()
        self._wait()
        self._do_what_waited()
        self._events.append(on.Ticked())

    def _watch_fetching(self) -> None:
        """A lease that is renewed and not read stalls in silence: begin anew instead."""
        hung = self._fetch_watch.look(self._now())
        if hung is not None:
            self._reporter.warn(f"{hung}; the lease process ends and begins anew")
            self.break_off(hung)

    def _handle(self, event: on.Event) -> None:
        for command in self._life.handle(event, self._now()):
            self._perform(command)

    def _wait(self) -> None:
        before = self._now()
        deadline = min(
            self._life.next_deadline(before),
            before + LOOK_S,
            self._later[0][0] if self._later else before + LOOK_S,
        )
        self._tell_stall(before - self._awake_since - self._asking_s)
        readable = [self._inbox.fileno(), *self._line.filenos()]
        select.select(readable, [], [], max(0.0, deadline - before))
        self._awake_since, self._asking_s = self._now(), 0.0
        self._tell_stall(self._awake_since - max(deadline, before))
        self._events.extend(self._line.hear())
        self._events.extend(self._inbox.take())

    def _tell_stall(self, stalled_s: float) -> None:
        """Late from waiting, or long at work that is no question to a service: say so."""
        if stalled_s >= STALL_TOLD_S:
            # It may have returned by now: whoever waits longest is not the first to run again.
            in_user_code = self._user_code_s() - self._user_code_before_s >= STALL_TOLD_S
            self._events.append(on.ThreadStalled(stalled_s, in_user_code))
        self._user_code_before_s = self._user_code_s()

    def _user_code_s(self) -> float:
        view = self._desk.view()
        running_s = self._now() - view.busy_since if view.busy_since else 0.0
        return view.processing_s_total + running_s

    def _do_what_waited(self) -> None:
        while self._later and self._later[0][0] <= self._now():
            _, _, command = heapq.heappop(self._later)
            self._perform_now(command)

    def _perform(self, command: do.Command) -> None:
        match command:
            case do.SendWrite() | do.SendLateCheckpoint() | do.ReadOwnRow():
                self._perform_in_time(command)
            case do.ReadRows(keys):
                self._ask(
                    lambda: on.RowsRead(tuple((k, self._table.read(k)) for k in keys)),
                    on.LookUpFailed,
                )
            case do.ListShards():
                self._ask(self._listed, on.LookUpFailed)
            case do.OpenGate():
                self._desk.open_gate(command)
            case do.ShutGate():
                self._desk.shut_gate()
            case do.AnswerCheckpoint():
                self._checkpoints.answer(command)
            case do.Report():
                self._report(command)
            case do.Exit(cause):
                self._reporter.publish(self._life, self._desk.view())
                self.cause = cause
            case call:
                self._desk.call(call)

    def _listed(self) -> on.ShardsListed:
        stream = stream_of(self._life.own.key)
        return on.ShardsListed(qualified_shards(stream, self._admin.list_shards()))

    def _report(self, report: do.Report) -> None:
        if report.kind is do.ReportKind.CHECKPOINTED and report.position is not None:
            self._checkpoints.note_durable(report.position)
        self._reporter.report(report)

    def _perform_in_time(self, command: Timed) -> None:
        if command.not_before is not None and command.not_before > self._now():
            heapq.heappush(self._later, (command.not_before, next(self._order), command))
        else:
            self._perform_now(command)

    def _perform_now(self, command: Timed) -> None:
        if isinstance(command, do.ReadOwnRow):
            self._ask(lambda: on.OwnRowRead(self._table.read(self._life.own.key)), on.ReadFailed)
            return
        is_late = isinstance(command, do.SendLateCheckpoint)
        if is_late or self._life.own.pending == command.change:
            self._send(command.change)

    def _send(self, change: LeaseChange) -> None:
        try:
            self._make_rows_durable(change)
        except SinkError as error:
            # Nothing was sent: the checkpoint waits until its rows can be kept.
            unsent = on.WriteResolved(change, Unavailable(str(error)), self._now())
            self._events.append(unsent)
            return
        sent = self._now()
        if not isinstance(change, LateCheckpoint):  # it is no owner's: no fence follows from it
            self._reporter.note_send(sent)
        outcome = self._table.write(change)
        self._asking_s += self._now() - sent
        self._events.append(on.WriteResolved(change, outcome, sent))

    def _make_rows_durable(self, change: LeaseChange) -> None:
        rows = self._rows()
        if rows is None:
            return
        match change:
            case Checkpoint() | Release() | Offer() | HandOver() | LateCheckpoint():
                rows.make_durable(change.position)
            case End():
                rows.make_durable(SHARD_END)
            case _:
                pass

    def _ask(
        self, ask: Callable[[], on.Event], failed: Callable[[str], on.ReadFailed | on.LookUpFailed]
    ) -> None:
        asked = self._now()
        try:
            self._events.append(ask())
        except ServiceError as error:
            self._events.append(failed(str(error)))
        self._asking_s += self._now() - asked
