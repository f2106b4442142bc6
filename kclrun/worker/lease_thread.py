"""The lease thread: receives the manager's messages, passes events to the core, performs commands.

All writes of the row go through this one thread [P5]. A slow answer of the table delays the next
event. It never delays a decision: each event carries the time to the core. It asks no service for
anything but the lease's own row: what else the core needs, another thread asks (`look_ups.py`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import heapq
import itertools
import os
import select
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol, TextIO

from kclrun.calling.runners import MakeThread
from kclrun.errors import ServiceError, SinkError
from kclrun.ipc import messages
from kclrun.ipc.board import StatusSlot, boottime
from kclrun.ipc.channel import Channel, Doorbell, NoMessage, PeerGone
from kclrun.ipc.ring import EventRing
from kclrun.lease import commands, events
from kclrun.lease.state_machine import LeaseStateMachine
from kclrun.lease.states import WORKER_STATES
from kclrun.model.lease import LeaseKey
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.model.stream import qualified_shards, stream_of
from kclrun.model.time import Instant, WallTime
from kclrun.model.wire import WireCredentials
from kclrun.ports import LeaseTable, Pump, StreamAdmin
from kclrun.protocol import reports, writes
from kclrun.protocol.status import LeaseStatus
from kclrun.worker.delivery_queue import CheckpointCalls, DeliveryQueue, Inbox, QueueView
from kclrun.worker.fetching import FetchView, FetchWatch
from kclrun.worker.look_ups import Ask, LookUps
from kclrun.worker.sharing import LEASE_THREAD, RestS, daemon_thread

if TYPE_CHECKING:
    from kclrun.observe.traces import LeaseSpans

STDERR_FD: Final = 2


class ManagerChannel:
    """The lease process's end of the control channel, once the start command was read."""

    def __init__(
        self,
        channel: Channel[messages.Left, messages.ToWorker],
        renew: Callable[[WireCredentials], None],
        write_coroutines: Callable[[TextIO], None] | None = None,
    ) -> None:
        """`write_coroutines` writes where coroutines wait, which the stack of no thread shows."""
        self._channel = channel
        self._renew = renew
        self._write_coroutines = write_coroutines
        self._is_gone = False

    def filenos(self) -> tuple[int, ...]:
        """For a selector; none once the manager is gone: its end would be readable for ever."""
        return () if self._is_gone else (self._channel.fileno(),)

    def receive(self) -> list[events.Event]:
        """The events from all messages that have come. Raises: MalformedFrame."""
        received: list[events.Event] = []
        while not self._is_gone:
            match self._channel.receive():
                case NoMessage():
                    break
                case PeerGone():
                    self._is_gone = True
                    received.append(events.ManagerGone())
                case messages.Drain(reason):
                    received.append(events.DrainRequested(reason))
                case messages.FailoverChanged(failover_s):
                    received.append(events.FailoverChanged(failover_s))
                case messages.OthersInSight(others):
                    received.append(events.OthersInSight(others))
                case messages.RenewCredentials(credentials):
                    self._renew(credentials)
                case messages.DumpStacks():
                    self._dump_stacks()
                case messages.Restart():
                    received.append(events.RestartRequested())
                case messages.Begin() | messages.Admit():
                    pass  # Only the first one counts, and it was read before.
        return received

    def _dump_stacks(self) -> None:
        """Standard error may be full, or its reader may be gone: the drain that follows matters
        more than the stacks."""
        faulthandler.dump_traceback(file=STDERR_FD, all_threads=True)
        if self._write_coroutines is not None:
            with (
                contextlib.suppress(OSError),
                open(STDERR_FD, "w", errors="backslashreplace", closefd=False) as file,
            ):
                self._write_coroutines(file)


class Reporter:
    """Writes the status slot and the ring of one place, and presses the doorbell."""

    def __init__(
        self,
        slot: StatusSlot,
        ring: EventRing,
        doorbell: Doorbell,
        incarnation: int,
        fetch_view: Callable[[], FetchView],
    ) -> None:
        self._slot = slot
        self._ring = ring
        self._doorbell = doorbell
        self._incarnation = incarnation
        self._fetch_view = fetch_view
        self._pid = os.getpid()
        self._retries = self._dead_letters = self._skipped = 0
        self._reporting = threading.Lock()
        self._is_closed = False

    def report(self, report: reports.Report) -> None:
        """Put a report on the ring. A full ring drops it, and the manager reads the row."""
        with self._reporting:
            match report:
                case reports.ProcessorRaised(where) if where != reports.DEAD_LETTER:
                    self._retries += 1
                case reports.RecordGivenUp():
                    self._skipped += report.is_skipped
                    self._dead_letters += not report.is_skipped
            if not self._is_closed:
                self._ring.put(messages.encode_report(report))
        self._doorbell.press()

    def close(self) -> None:
        """Write nothing from now on: in a shared process another lease soon gets the place, while
        the fetch thread of this one may still wait for an answer."""
        with self._reporting:
            self._is_closed = True

    def warn(self, text: str) -> None:
        """A warning for the log; the lease continues. Any thread may call it."""
        self.report(reports.ProcessWarned(text))

    def records_lost(self, position: ExtendedSequenceNumber, text: str) -> None:
        """Records above `position` may have expired unread; the lease continues. Any thread."""
        self.report(reports.RecordsExpired(position, text))

    def note_send(self, instant: Instant) -> None:
        """A write of the row is about to be sent [P5]."""
        self._slot.note_send(instant)

    def publish(
        self,
        machine: LeaseStateMachine,
        queue: QueueView,
        output_waiting_since: Instant,
        commits_at_tip: Callable[[], bool] = lambda: False,
    ) -> None:
        """Refresh the status slot. `commits_at_tip` is as in `Rows`."""
        fetch = self._fetch_view()
        ledger, behind_ms = machine.ledger, fetch.millis_behind_latest
        is_quiet = queue.is_empty and not queue.busy_since and ledger.processed >= ledger.delivered
        has_caught_up = fetch.fetched is None or ledger.processed >= fetch.fetched
        self._slot.publish(
            LeaseStatus(
                pid=self._pid,
                incarnation=self._incarnation,
                state=WORKER_STATES[machine.state],
                fence_instant=machine.own.fence or Instant(0.0),
                counter=machine.own.counter,
                records_total=queue.records_total,
                bytes_total=queue.bytes_total,
                batches_total=queue.batches_total,
                processing_s_total=queue.processing_s_total,
                millis_behind_latest=-1 if behind_ms is None else behind_ms,
                fetched=_number(fetch.fetched),
                processed=_number(ledger.processed),
                checkpointed=ledger.checkpointed if machine.own.row is not None else None,
                first_delivered=queue.first_delivered,
                last_fetch_instant=fetch.last_fetch_instant,
                last_batch_instant=queue.last_batch_instant,
                processing_since_instant=queue.busy_since,
                at_tip=fetch.at_tip and is_quiet and has_caught_up and not commits_at_tip(),
                fetching_since_instant=fetch.asking_since_instant,
                published_instant=boottime(),
                has_undone=machine.has_undone,
                unprocessed_since=queue.unprocessed_since or WallTime(0.0),
                retries_total=self._retries,
                dead_letters_total=self._dead_letters,
                skipped_total=self._skipped,
                output_waiting_since_instant=output_waiting_since,
                passed_over_total=fetch.passed_over_total,
                destination_since_instant=queue.destinations.since,
                destination_waited_instant=queue.destinations.waited_until,
            )
        )


def _number(position: ExtendedSequenceNumber | None) -> ExtendedSequenceNumber | None:
    """The position of a record; None for a sentinel, where there was no record yet."""
    return None if position is None or position.is_sentinel else position


# An idle lease publishes its status so often; every event (a batch, a write, a message, the tip of
# the shard) publishes it at once. Among a hundred idle processes the caches are cold and a turn
# takes 0.24 ms: five turns a second were 9 % of a core more than one (`bin/bench idle`).
LOOK_S: Final = 2.0
# A waiting thread wakes within milliseconds. If it is a whole second late, another thread held the
# GIL, or the process did not run.
STALL_LOGGED_S: Final = 1.0

Timed = commands.SendWrite | commands.SendLateCheckpoint | commands.ReadOwnRow
Later = tuple[Instant, int, Timed]


class Rows(Protocol):
    """The durability of the emitted rows, as far as the lease thread needs it."""

    def commit(self, asked: commands.CommitOutputs) -> None:
        """Called when the core asks for a commit of the outputs; returns at once."""
        ...

    def confirm(self, state_version: str | None) -> None:
        """Called when a checkpoint of ours put this version of the state on the row."""
        ...

    def waiting_since(self) -> Instant: ...

    def commits_at_tip(self) -> bool:
        """Called at the tip: whether rows are to be committed before the run may end there."""
        ...

    def make_durable(self, position: ExtendedSequenceNumber) -> None:
        """Called before a checkpoint at `position` is sent. Raises: SinkError."""
        ...


class LeaseThread:
    """Runs the core until it returns Exit.

    `cause` is the reason of the Exit; `failure` is the error that ended the thread, if one did.
    `spans` traces the checkpoints; None without traces. `on_over` is called on this thread at the
    very end, with the queue closed.

    It is not a subclass of `threading.Thread`, which may use a new private name in any release
    (`_handle` of 3.13 hid a method of this class, and every lease process failed at its start).
    """

    def __init__(
        self,
        machine: LeaseStateMachine,
        inbox: Inbox,
        queue: DeliveryQueue,
        *,
        table: LeaseTable,
        admin: StreamAdmin,
        checkpoints: CheckpointCalls,
        rows: Rows,
        line: ManagerChannel,
        reporter: Reporter,
        fetch_watch: FetchWatch,
        now: Callable[[], Instant],
        on_over: Callable[[], None],
        rest_s: RestS,
        make_thread: MakeThread = daemon_thread,
        spans: LeaseSpans | None = None,
    ) -> None:
        self._thread = make_thread(self._run, LEASE_THREAD)
        self.cause: commands.ExitCause | None = None
        self.failure: BaseException | None = None
        self._machine = machine
        self._inbox = inbox
        self._queue = queue
        self._table = table
        self._admin = admin
        self._checkpoints = checkpoints
        self._rows = rows
        self._line = line
        self._reporter = reporter
        self._fetch_watch = fetch_watch
        self._look_ups = LookUps(self._happened, self.break_off, now=now, make_thread=make_thread)
        self._look_up_watch: FetchWatch | None = None  # set with the first look-up
        self._now = now
        self._on_over = on_over
        self._rest_s = rest_s
        self._spans = spans
        self._pump: Pump[events.Event, commands.Command] = Pump(
            lambda event: machine.handle(event, now()), self._perform
        )
        self._pump.post(events.Started())
        self._later: list[Later] = []
        self._order = itertools.count()
        self._awake_since = now()
        self._asking_s = 0.0
        self._user_code_before_s = 0.0

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the lease is over, at most `timeout_s`."""
        self._thread.join(timeout_s)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self.cause is None and self.failure is None:
                self._turn()
        except BaseException as error:  # noqa: BLE001 - the thread's edge: `main` reports it
            self.failure = error
        finally:
            self._queue.close()
            self._look_ups.close()
            self._on_over()

    def break_off(self, error: BaseException) -> None:
        """Another thread broke: end the process; its successor begins anew. Any thread."""
        self.failure = error
        self._inbox.post(events.Ticked())

    def _turn(self) -> None:
        """Handle everything that has happened, then wait for more."""
        self._pump.run()
        if self.cause is not None:
            return
        self._publish()
        self._watch_requests()
        self._wait()
        self._perform_later()
        self._pump.post(events.Ticked())

    def _happened(self, event: events.Event) -> None:
        """Any thread."""
        self._inbox.post(event)

    def _publish(self) -> None:
        view, since = self._queue.view(), self._rows.waiting_since()
        self._reporter.publish(self._machine, view, since, self._rows.commits_at_tip)

    def _watch_requests(self) -> None:
        """A lease that is renewed and not read stalls in silence: end the process instead."""
        for watch in (self._fetch_watch, self._look_up_watch):
            hung = None if watch is None else watch.look(self._now())
            if hung is not None:
                self._reporter.warn(f"{hung}; the lease process ends and begins anew")
                self.break_off(hung)

    def _wait(self) -> None:
        before = self._now()
        deadline = min(
            self._machine.next_deadline(before),
            before + self._rest_s(before, LOOK_S),
            self._later[0][0] if self._later else before + LOOK_S,
        )
        self._report_stall(before - self._awake_since - self._asking_s)
        poller = select.poll()  # select() takes no descriptor above 1,023; user code may open more
        for descriptor in (self._inbox.fileno(), *self._line.filenos()):
            poller.register(descriptor, select.POLLIN)
        poller.poll(max(0.0, deadline - before) * 1000)
        self._awake_since, self._asking_s = self._now(), 0.0
        self._report_stall(self._awake_since - max(deadline, before))
        for event in (*self._line.receive(), *self._inbox.take()):
            self._pump.post(event)

    def _report_stall(self, stalled_s: float) -> None:
        """Report a late wake-up, or long work that is not a request to a service."""
        if stalled_s >= STALL_LOGGED_S:
            # User code may have returned by now: the thread that waited longest need not run first.
            in_user_code = self._user_code_s() - self._user_code_before_s >= STALL_LOGGED_S
            self._pump.post(events.ThreadStalled(stalled_s, in_user_code))
        self._user_code_before_s = self._user_code_s()

    def _user_code_s(self) -> float:
        view = self._queue.view()
        running_s = self._now() - view.busy_since if view.busy_since else 0.0
        return view.processing_s_total + running_s

    def _perform_later(self) -> None:
        while self._later and self._later[0][0] <= self._now():
            _, _, command = heapq.heappop(self._later)
            self._perform_now(command)

    def _perform(self, command: commands.Command) -> None:
        match command:
            case commands.SendWrite() | commands.SendLateCheckpoint() | commands.ReadOwnRow():
                self._perform_in_time(command)
            case commands.ReadRows(keys):
                self._look_up(functools.partial(self._rows_of, keys))
            case commands.ListShards():
                self._look_up(self._listed)
            case commands.AllowDelivery():
                self._queue.allow_delivery(command)
            case commands.StopDelivery():
                self._queue.stop_delivery()
            case commands.CommitOutputs() as asked:
                self._rows.commit(asked)
            case commands.AnswerCheckpoint():
                self._checkpoints.answer(command)
            case reports.Report():
                self._report(command)
            case commands.Exit(cause):
                self._publish()
                self.cause = cause
                self._pump.is_held = True
            case call:
                self._queue.call(call)

    def _look_up(self, ask: Ask) -> None:
        if self._look_up_watch is None:
            what = "a look-up at the end of the shard"
            self._look_up_watch = self._fetch_watch.beside(lambda: self._look_ups.view, what)
        self._look_ups.begin(ask)

    # On the thread of the look-ups.

    def _rows_of(self, keys: Sequence[LeaseKey]) -> events.RowsRead:
        return events.RowsRead(tuple((key, self._table.read(key)) for key in keys))

    def _listed(self) -> events.ShardsListed:
        stream = stream_of(self._machine.own.key)
        return events.ShardsListed(qualified_shards(stream, self._admin.list_shards()))

    # On the lease thread again.

    def _report(self, report: reports.Report) -> None:
        if isinstance(report, reports.Checkpointed):
            self._checkpoints.note_durable(report.position)
            self._rows.confirm(self._machine.own.confirmed.state_version)
        self._reporter.report(report)

    def _perform_in_time(self, command: Timed) -> None:
        if command.not_before is not None and command.not_before > self._now():
            heapq.heappush(self._later, (command.not_before, next(self._order), command))
        else:
            self._perform_now(command)

    def _perform_now(self, command: Timed) -> None:
        if isinstance(command, commands.ReadOwnRow):
            self._ask(
                lambda: events.OwnRowRead(self._table.read(self._machine.own.key)),
                events.ReadFailed,
            )
        elif self._machine.own.sends(command.change):
            self._send(command.change)

    def _send(self, change: writes.LeaseChange) -> None:
        began, position = self._now(), _covered(change)
        try:
            if position is not None:
                self._rows.make_durable(position)
        except SinkError as error:
            # Nothing was sent: the checkpoint waits until its rows can be stored.
            self._pump.answer(events.RowsNotKept(change, str(error)))
            return
        sent = self._now()
        # No fence follows from a late checkpoint: it is not a write as owner.
        if not isinstance(change, writes.LateCheckpoint):
            self._reporter.note_send(sent)
        outcome = self._table.write(change)
        self._asking_s += self._now() - sent
        if self._spans is not None and position is not None:
            is_applied = isinstance(outcome, writes.Applied)
            self._spans.committed(position, type(outcome).__name__, began, is_applied=is_applied)
        self._pump.answer(events.WriteResolved(change, outcome, sent))

    def _ask(
        self, ask: Callable[[], events.OwnRowRead], failed: Callable[[str], events.ReadFailed]
    ) -> None:
        asked = self._now()
        try:
            self._pump.answer(ask())
        except ServiceError as error:
            self._pump.answer(failed(str(error)))
        self._asking_s += self._now() - asked


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
