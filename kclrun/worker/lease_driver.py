"""Drives the core of one lease: passes it events, and performs its commands.

Used on the lease thread. It does not know when something is due, nor how the thread waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kclrun.lease import commands, events
from kclrun.lease.state_machine import LeaseStateMachine
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.ports import Pump
from kclrun.protocol import reports
from kclrun.worker.delivery_queue import CheckpointCalls, DeliveryQueue
from kclrun.worker.look_ups import LookUps
from kclrun.worker.manager_line import Reporter
from kclrun.worker.own_row import OwnRow


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


class LeaseDriver:
    """`cause` is the reason of the Exit that the core returned; None before that. `post` takes an
    event, and `run` handles all that were posted."""

    def __init__(
        self,
        machine: LeaseStateMachine,
        *,
        own_row: OwnRow,
        look_ups: LookUps,
        queue: DeliveryQueue,
        rows: Rows,
        checkpoints: CheckpointCalls,
        reporter: Reporter,
        now: Callable[[], Instant],
    ) -> None:
        self.cause: commands.ExitCause | None = None
        self.own_row = own_row
        self.look_ups = look_ups
        self._machine = machine
        self._queue = queue
        self._rows = rows
        self._checkpoints = checkpoints
        self._reporter = reporter
        self._pump: Pump[events.Event, commands.Command] = Pump(
            lambda event: machine.handle(event, now()), self._perform
        )
        self.post = self._pump.post
        self.run = self._pump.run

    def publish(self) -> None:
        """Show the status to the manager."""
        view, since = self._queue.view(), self._rows.waiting_since()
        self._reporter.publish(self._machine, view, since, self._rows.commits_at_tip)

    def warn(self, text: str) -> None:
        """A warning for the log."""
        self._reporter.warn(text)

    def next_deadline(self, now: Instant) -> Instant:
        """When the core, or a request that waits, is due at the latest."""
        deadline, waits_until = self._machine.next_deadline(now), self.own_row.next_instant
        return deadline if waits_until is None else min(deadline, waits_until)

    def perform_due(self) -> None:
        """Make the requests for the row whose time has come."""
        for answer in self.own_row.perform_due():
            self._pump.answer(answer)

    def _perform(self, command: commands.Command) -> None:
        match command:
            case commands.SendWrite() | commands.SendLateCheckpoint() | commands.ReadOwnRow():
                answer = self.own_row.perform(command)
                if answer is not None:
                    self._pump.answer(answer)
            case commands.ReadRows(keys):
                self.look_ups.read_rows(keys)
            case commands.ListShards():
                self.look_ups.list_shards()
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
                self.publish()
                self.cause = cause
                self._pump.is_held = True
            case call:
                self._queue.call(call)

    def _report(self, report: reports.Report) -> None:
        if isinstance(report, reports.Checkpointed):
            self._checkpoints.note_durable(report.position)
            self._rows.confirm(self._machine.own.confirmed.state_version)
        self._reporter.report(report)
