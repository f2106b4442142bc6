"""A lease process from its first line to its exit code.

Called by the launcher in the forked child, with three descriptors. The start command says all
the rest. Exit codes are a protocol with the manager (`ipc/exit_codes.py`); the reasons travel on
the ring.
"""

from __future__ import annotations

import fcntl
import os
import random
import threading
import time
import traceback
from pathlib import Path
from typing import Final

from kclrun.consuming.commands import ExitCause
from kclrun.consuming.events import ReleaseRequested
from kclrun.consuming.life import LeaseLife
from kclrun.consuming.start_point import first_start
from kclrun.errors import SettingsError
from kclrun.ipc import exit_codes
from kclrun.ipc import transitions as told
from kclrun.ipc.channel import Channel
from kclrun.ipc.doorbell import Doorbell
from kclrun.ipc.messages import Begin, NoAnswer, ToWorker, channel_of_worker
from kclrun.ipc.segment import Segment
from kclrun.ipc.spec import StartSpec
from kclrun.loading import load_processor
from kclrun.model.lease import Lease
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.stream_key import stream_of
from kclrun.model.time import WallTime
from kclrun.observe.line_sink import LineSink
from kclrun.observe.logs import EventLog
from kclrun.observe.printing import configure_lease_logging
from kclrun.processor import Context, RecordProcessor, Row
from kclrun.sinks.emitted_rows import EmittedRows
from kclrun.worker import assembly
from kclrun.worker.checkpointing import CheckpointDesk
from kclrun.worker.clock import boottime
from kclrun.worker.delivering import Deliverer, RowScope
from kclrun.worker.desk import Desk
from kclrun.worker.fetch_watch import FetchWatch, silence_max_s
from kclrun.worker.fetching import FetchPlan, FetchThread, FetchView
from kclrun.worker.inbox import Inbox
from kclrun.worker.lease_thread import LeaseThread
from kclrun.worker.manager_line import ManagerLine
from kclrun.worker.reporting import Reporter

__all__ = ["run"]

# The manager sends the start command right after the fork; it waits for nothing in between.
BEGIN_WAIT_S: Final = 10.0
# User code that is still running when the lease is gone gets this long to come back; the core has
# waited before, where waiting was right.
USER_CODE_WAIT_S: Final = 1.0

STDERR_FD: Final = 2

_CODES: Final = {
    ExitCause.DONE: exit_codes.DONE,
    ExitCause.UNCLAIMED: exit_codes.UNCLAIMED,
    ExitCause.LOST: exit_codes.LOST,
    ExitCause.FAILED: exit_codes.FAILED,
}


def run(segment_fd: int, doorbell_fd: int, channel_fd: int) -> int:
    """Serve one lease; the exit code."""
    segment = Segment.attach(segment_fd)
    doorbell = Doorbell.at_door(doorbell_fd)
    channel = channel_of_worker(channel_fd)
    begin = channel.receive(BEGIN_WAIT_S)
    if not isinstance(begin, Begin):
        return exit_codes.UNCLAIMED
    configure_lease_logging(_log_of(begin.spec))
    try:
        return LeaseProcess(begin.spec, segment, doorbell, channel).serve()
    except Exception:  # noqa: BLE001 - the process's edge: whatever it is, it is our bug
        traceback.print_exc()
        return exit_codes.BUG


def _log_of(spec: StartSpec) -> EventLog:
    """The log of this process: its lines carry the shard."""
    return EventLog(
        LineSink(STDERR_FD),
        app=spec.application,
        owner=spec.owner,
        level=spec.log.level,
        as_json=spec.log.json,
        shard=spec.lease_key,
    )


class LeaseProcess:
    """The wiring of one lease: three threads, one desk."""

    def __init__(
        self,
        spec: StartSpec,
        segment: Segment,
        doorbell: Doorbell,
        channel: Channel[NoAnswer, ToWorker],
    ) -> None:
        self._spec = spec
        self._services = assembly.services(spec)
        self._inbox = Inbox()
        self._desk = Desk(assembly.desk_limits(spec), boottime)
        self._life = LeaseLife(assembly.life_policy(spec), random.random)
        self._user_code_returned = threading.Event()
        self._rows: EmittedRows | None = None
        self._fetching: FetchThread | None = None
        self._reporter = Reporter(
            segment.slot(spec.place),
            segment.ring(spec.place),
            doorbell,
            spec.incarnation,
            self._fetch_view,
        )
        self._checkpoints = CheckpointDesk(self._inbox.post, self._cover, self._is_over)
        self._line = ManagerLine(channel, self._services.credentials.replace)
        self._lease_thread = LeaseThread(
            self._life,
            self._inbox,
            self._desk,
            table=self._services.table,
            admin=self._services.admin,
            checkpoints=self._checkpoints,
            rows=lambda: self._rows,
            line=self._line,
            reporter=self._reporter,
            fetch_watch=FetchWatch(self._fetch_view, silence_max_s(spec.kinesis)),
            now=boottime,
            on_over=self._leave_user_code_behind,
        )
        self._deliverer = Deliverer(
            self._desk,
            self._inbox.post,
            assembly.error_policy(spec),
            prepare=self._prepare,
            checkpoints=self._checkpoints,
            warn=self._reporter.warn,
        )

    def serve(self) -> int:
        """Run until the lease is ended, released, lost or failed."""
        self._reporter.tell(told.Started(os.getpid()))
        if not self._holds_lock():
            self._reporter.tell(told.Unclaimed("another manager of this host holds its lock [P3]"))
            return exit_codes.UNCLAIMED
        if self._spec.nice:
            os.nice(self._spec.nice)
        self._lease_thread.start()
        self._deliverer.serve()
        self._user_code_returned.set()
        self._lease_thread.join()
        return self._end()

    def _leave_user_code_behind(self) -> None:
        """The lease is over: end the process with user code inside, if that does not return."""
        if not self._user_code_returned.wait(USER_CODE_WAIT_S):
            code = exit_codes.BUG
            try:
                code = self._end()
            finally:  # whatever the output says to being closed: nothing renews this lease
                os._exit(code)

    def _holds_lock(self) -> bool:
        """Prove, for as long as this process lives, that its owner is not gone [P3]."""
        fd = os.open(self._spec.lock_path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _prepare(self, row: Lease) -> tuple[RecordProcessor, RowScope | None]:
        """A fresh processor, initialised; then reading begins. On the main thread."""
        paths = [Path(path) for path in self._spec.import_paths]
        processor = load_processor(self._spec.processor, paths)()
        if self._rows is None and self._spec.output_path is not None:
            folder = Path(self._spec.output_path)
            self._rows = EmittedRows.open(folder, self._spec.shard_id, row.checkpoint)
        processor.initialize(self._context(row))
        self._begin_fetching(row)
        return processor, self._rows

    def _context(self, row: Lease) -> Context:
        spec = self._spec
        return Context(
            application=spec.application,
            stream=spec.stream_name,
            shard_id=spec.shard_id,
            lease_key=spec.lease_key,
            position=row.checkpoint,
            options=spec.options,
            fencing_token=row.counter,
            uncheckpointed_max=spec.checkpoint.uncheckpointed_max,
            checkpoint_mode=spec.checkpoint.mode,
            emit=self._emit,
            release=self._release,
            pending_checkpoint=row.pending,
        )

    def _release(self) -> None:
        self._desk.halt()  # at once: the lease thread may shut the gate only after the next batch
        self._inbox.post(ReleaseRequested())

    def _emit(self, row: Row) -> None:
        if self._rows is None:
            raise SettingsError(
                "context.emit() needs a place for the rows: set output.path in the configuration"
            )
        self._rows.emit(row)

    def _cover(self, position: ExtendedSequenceNumber | None) -> None:
        covered = position or self._deliverer.delivered
        if self._rows is not None and covered is not None:
            self._rows.cover(covered)

    def _begin_fetching(self, row: Lease) -> None:
        spec = self._spec
        plan = FetchPlan(
            shard_id=spec.shard_id,
            start=first_start(row, spec.start_timestamp, WallTime(time.time())),
            checkpoint=row.checkpoint,
            hash_range=assembly.hash_range(spec),
            kpl_range=spec.fetch.kpl_range,
            stream=stream_of(spec.lease_key),
        )
        self._fetching = FetchThread(
            plan,
            self._services.reader,
            self._services.admin,
            self._desk,
            assembly.pacing(spec),
            now=boottime,
            warn=self._reporter.warn,
            broke=self._lease_thread.break_off,
        )
        self._fetching.start()

    def _fetch_view(self) -> FetchView:
        return FetchView() if self._fetching is None else self._fetching.view

    def _is_over(self) -> bool:
        return not self._lease_thread.is_alive()

    def _end(self) -> int:
        """The exit code; what is left of the output is closed first."""
        if self._rows is not None:
            self._rows.close()
        thread = self._lease_thread
        if thread.failure is not None:
            traceback.print_exception(thread.failure)
            return exit_codes.BUG
        assert thread.cause is not None, "the lease thread ended without a cause"
        return _CODES[thread.cause]
