"""A lease process from its first line to its exit code.

The launcher calls `run` in the forked child, with three descriptors; the start command contains
everything else. The process reports the reason of its end on the ring; its exit code is for people
(`ipc/exit_codes.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import random
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from kclrun.calling.delivery import host_fault
from kclrun.calling.method_checks import require_fit
from kclrun.calling.records import CallTerms
from kclrun.calling.timer_run import TimerRun
from kclrun.calling.tracebacks import Failure
from kclrun.codec.values import Decode
from kclrun.config.observing import TRACE_CONTEXT
from kclrun.destinations import open_letters, open_registry
from kclrun.errors import HostFailed
from kclrun.files.durable import keep_from_children
from kclrun.ipc import exit_codes, messages
from kclrun.ipc.board import Segment, StartSpec, boottime
from kclrun.ipc.channel import Channel, Doorbell, NoMessage, PeerGone
from kclrun.ipc.ring import EventRing
from kclrun.lease.commands import ExitCause
from kclrun.lease.events import ReleaseRequested, Ticked
from kclrun.lease.policy import first_start
from kclrun.lease.state_machine import LeaseStateMachine
from kclrun.lease.states import State
from kclrun.loading import decoded_options, load_decoding, load_function, load_processor
from kclrun.methods import call_method, fires_timers, unused_event_time
from kclrun.model.lease import ClaimedLease, Lease
from kclrun.model.output import setting_of
from kclrun.model.policies import Concurrency, TracePolicy
from kclrun.model.record import Decoding, Record
from kclrun.model.row_schema import RowSchema
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.model.stream import stream_of
from kclrun.model.time import Instant, WallTime
from kclrun.observe.loggers import LoggerLevels
from kclrun.observe.logs import OWN_LOGGER, EventLog, LineSink, configure_lease_logging
from kclrun.ports import LetterStore
from kclrun.processor import Context, NoState, RecordProcessor
from kclrun.protocol.reports import DEAD_LETTER, ProcessBroke, StartUnclaimed
from kclrun.state.event_times import EventTimes
from kclrun.worker import assembly, tampering
from kclrun.worker.delivering import Deliverer
from kclrun.worker.delivery_queue import CheckpointCalls, DeliveryQueue, Inbox
from kclrun.worker.fetching import (
    FetchPlan,
    FetchThread,
    FetchView,
    FetchWatch,
    ShardSource,
    silence_max_s,
)
from kclrun.worker.giving_up import LeaseLetters
from kclrun.worker.lease_driver import LeaseDriver
from kclrun.worker.lease_outputs import LeaseOutputs, RowsBetweenRecords
from kclrun.worker.lease_thread import LeaseThread
from kclrun.worker.look_ups import LookUps
from kclrun.worker.manager_line import STDERR_FD, ManagerChannel, Reporter
from kclrun.worker.opening import DestinationRetries, OutputOpening, StateOpening
from kclrun.worker.own_row import OwnRow
from kclrun.worker.progress import Prepared
from kclrun.worker.sharing import (
    OwnThreads,
    SharedLease,
    SharedProcess,
    shard_here,
)
from kclrun.worker.timer_delivering import TimerClocks

if TYPE_CHECKING:
    from kclrun.observe.traces import LeaseSpans

# The manager sends the start command right after the fork, without waiting.
BEGIN_WAIT_S: Final = 10.0
# User code that still runs when the lease is over gets this long to return. If a longer wait is
# right, the core has waited already.
USER_CODE_WAIT_S: Final = 1.0

STUCK: Final = (
    "its lease is over and its user code has not returned: the process that it shares ends, and the"
    " other leases in it start again"
)
_CODES: Final = {
    ExitCause.DONE: exit_codes.DONE,
    ExitCause.UNCLAIMED: exit_codes.UNCLAIMED,
    ExitCause.LOST: exit_codes.LOST,
    ExitCause.REPLACED: exit_codes.REPLACED,
    ExitCause.FAILED: exit_codes.FAILED,
    ExitCause.HOST: exit_codes.HOST,
}


def run(segment_fd: int, doorbell_fd: int, channel_fd: int) -> int:
    """Serve one lease, or those that the manager admits; returns the exit code."""
    segment = Segment.attach(segment_fd)
    doorbell = Doorbell.for_writer(doorbell_fd)
    channel = messages.channel_of_worker(channel_fd)
    got = channel.receive_with_fds(BEGIN_WAIT_S)
    if isinstance(got, NoMessage | PeerGone):
        return exit_codes.UNCLAIMED
    message, fds = got
    match message:
        case messages.Begin():
            log = _log_of(message.spec, message.spec.lease_key)
            configure_lease_logging(log, _levels_of(message.spec))
            return _serve(message.spec, fds, segment, doorbell, channel)
        case messages.Admit():
            shared = SharedProcess(channel, functools.partial(_serve_shared, segment, doorbell))
            return shared.serve(fds)
        case _:
            return exit_codes.UNCLAIMED


def _serve_shared(
    segment: Segment,
    doorbell: Doorbell,
    channel: Channel[messages.Left, messages.ToWorker],
    lease: SharedLease,
) -> int:
    """One lease of a shared process, from its start command to its exit code."""
    got = channel.receive_with_fds(BEGIN_WAIT_S)
    if isinstance(got, NoMessage | PeerGone):
        return exit_codes.UNCLAIMED
    begin, fds = got
    if not isinstance(begin, messages.Begin):
        return exit_codes.UNCLAIMED
    spec = begin.spec
    lease.shard = spec.lease_key
    lease.process.part(
        "log",
        lambda: configure_lease_logging(_log_of(spec, shard_here), _levels_of(spec), shard_here),
    )
    return _serve(spec, fds, segment, doorbell, channel, shared=lease)


def _serve(
    spec: StartSpec,
    fds: tuple[int, ...],
    segment: Segment,
    doorbell: Doorbell,
    channel: Channel[messages.Left, messages.ToWorker],
    *,
    shared: SharedLease | None = None,
) -> int:
    ring = segment.ring(spec.place)
    process = None
    try:
        # The lock file through its manager's descriptor: the file may have lost its name.
        lock_path = f"/proc/self/fd/{fds[0]}" if fds else spec.lock_path
        process = LeaseProcess(spec, segment, ring, doorbell, channel, shared=shared)
        return process.serve(lock_path, fds)
    except Exception as error:  # noqa: BLE001 - the process's edge: every error is reported
        return _broke(error, ring, doorbell)
    finally:
        if process is not None:
            process.stop_reporting()


def _broke(error: BaseException, ring: EventRing, doorbell: Doorbell) -> int:
    """Report why the process ends, if the processor is not at fault; returns the exit code."""
    fault = host_fault(error)
    what = f"{type(error).__name__}: {error}"
    cause = tampering.cause_of(error)
    words = fault or (f"{what}: {cause}" if cause else f"a bug in kclrun: {what}")
    ring.put(messages.encode_report(ProcessBroke(words)))
    doorbell.press()
    if fault is None:
        with contextlib.suppress(OSError):  # standard error may be full: the report is sent
            traceback.print_exception(error)
    return exit_codes.BUG if fault is None else exit_codes.HOST


def _log_of(spec: StartSpec, shard: str | Callable[[], str]) -> EventLog:
    """The log of this process. `shard` is named in its lines, or returns the shard to name."""
    return EventLog(
        LineSink(STDERR_FD),
        app=spec.application,
        owner=spec.owner,
        level=spec.log.levels.get(OWN_LOGGER, spec.log.level),
        as_json=spec.log.json,
        shard=shard,
        printed_level=spec.log.level,
    )


def _levels_of(spec: StartSpec) -> LoggerLevels:
    return LoggerLevels(spec.log.level, spec.log.levels, spec.log.own)


class LeaseProcess:
    """The wiring of one lease: three threads, one queue. `shared` is set where other leases run in
    the same process."""

    def __init__(
        self,
        spec: StartSpec,
        segment: Segment,
        ring: EventRing,
        doorbell: Doorbell,
        channel: Channel[messages.Left, messages.ToWorker],
        *,
        shared: SharedLease | None = None,
    ) -> None:
        self._spec = spec
        self._shared = shared
        self._threads = OwnThreads() if shared is None else shared
        self._report_broken = functools.partial(_broke, ring=ring, doorbell=doorbell)
        self._services = (
            assembly.services(spec) if shared is None else assembly.shared_services(spec, shared)
        )
        self._inbox = Inbox()
        turn = None if shared is None else shared.process.turn
        self._queue = DeliveryQueue(assembly.queue_limits(spec), boottime, turn)
        self._machine = LeaseStateMachine(
            assembly.lease_policy(spec), random.random, self._threads.cpu_s
        )
        self._user_code_returned = threading.Event()
        self._letters = LeaseLetters(spec, self._services.table, self._open_letters)
        self._fetching: FetchThread | None = None
        slot = segment.slot(spec.place)
        self._reporter = Reporter(slot, ring, doorbell, spec.incarnation, self._fetch_view)
        self._spans = None if spec.traces is None else self._open_spans(spec.traces)
        self._retries = DestinationRetries(self._queue, self._reporter.report)
        self._rows = self._outputs()
        self._checkpoints = CheckpointCalls(
            self._inbox.post, self._cover, self._is_over, self._queue.destinations
        )
        replace = self._services.credentials.replace
        self._line = ManagerChannel(channel, replace, self._write_coroutines)
        fetch_watch = FetchWatch(self._fetch_view, silence_max_s(spec.source or spec.kinesis))
        self._lease_thread = LeaseThread(
            self._lease_driver(fetch_watch),
            self._inbox,
            self._line,
            self._queue,
            fetch_watch=fetch_watch,
            threads=self._threads,
            now=boottime,
            on_over=self._end_if_user_code_stays,
        )
        # As `DeliveryHost` and `FetchHost`, with the methods that are not private.
        self.post = self._inbox.post
        self.report = self._reporter.report
        self.warn = self._reporter.warn
        self.records_lost = self._reporter.records_lost
        self.settled = self._rows.settle
        self.sent = self._rows.sent
        self.make_thread = self._threads.make_thread
        self._deliverer = Deliverer(
            self._queue, self, spec.on_error, self._checkpoints, self._spans
        )

    def _lease_driver(self, fetch_watch: FetchWatch) -> LeaseDriver:
        own_row = OwnRow(
            self._services.table,
            self._machine.own,
            make_durable=self._rows.make_durable,
            note_send=self._reporter.note_send,
            now=boottime,
            spans=self._spans,
        )
        look_ups = LookUps(
            self._services.table,
            self._services.admin,
            self._machine.own.key,
            post=self._inbox.post,
            broke=self.broke,
            fetch_watch=fetch_watch,
            now=boottime,
            make_thread=self._threads.make_thread,
        )
        return LeaseDriver(
            self._machine,
            own_row=own_row,
            look_ups=look_ups,
            queue=self._queue,
            rows=self._rows,
            checkpoints=self._checkpoints,
            reporter=self._reporter,
            now=boottime,
        )

    def _outputs(self) -> LeaseOutputs:
        spec, queue, retries, spans = self._spec, self._queue, self._retries, self._spans
        post, report, broke = self._inbox.post, self._reporter.report, self.broke
        credentials, read_row = self._services.credentials, self._services.table.read
        state = StateOpening(
            spec, retries, report=report, broke=broke, credentials=credentials, read_row=read_row
        )
        opening = OutputOpening(
            spec,
            state,
            retries,
            queue,
            post=post,
            report=report,
            credentials=credentials,
            spans=spans,
        )
        return LeaseOutputs(
            spec,
            queue,
            retries,
            opening,
            post=post,
            broke=broke,
            make_thread=self._threads.make_thread,
        )

    def _open_spans(self, traces: TracePolicy) -> LeaseSpans:
        """The spans of this lease. Their thread starts here, after the fork."""
        from kclrun.observe.traces import LeaseSpans, ProcessSpans

        spec, shared = self._spec, self._shared

        def make() -> ProcessSpans:
            made = ProcessSpans(
                endpoint=traces.endpoint,
                sample=traces.sample,
                application=spec.application,
                owner=spec.owner,
                warn=self._reporter.warn,
            )
            if shared is not None:
                shared.process.own(made.queue.thread)
            return made

        process = make() if shared is None else shared.process.part("spans", make)
        process.queue.warn = self._reporter.warn  # the reporter of an earlier lease may be closed
        return LeaseSpans(
            process,
            stream=spec.stream_name,
            shard=spec.shard_id,
            application=spec.application,
            now=boottime,
        )

    def serve(self, lock_path: str, fds: tuple[int, ...] = ()) -> int:
        """Run until the lease is ended, released, lost or failed. `fds` are closed once the lock
        file at `lock_path` is open: one of them may be the manager's own descriptor of it.

        Raises: HostFailed if the lock file cannot be opened.
        """
        shared = self._shared
        try:
            is_locked = (
                _holds_lock(lock_path)
                if shared is None
                else shared.process.part("lock", lambda: _holds_lock(lock_path))
            )
        finally:
            for fd in fds:
                os.close(fd)
        if not is_locked:
            reason = "another manager of this host holds its lock [P3]"
            self._reporter.report(StartUnclaimed(reason))
            return exit_codes.UNCLAIMED
        if self._spec.nice:  # of this thread, and of those that it starts
            os.nice(self._spec.nice)
        self._lease_thread.start()
        self._deliverer.serve()
        self._user_code_returned.set()
        self._lease_thread.join()
        return self._end()

    def _write_coroutines(self, file: TextIO) -> None:
        self._deliverer.write_coroutines(file)

    def broke(self, error: BaseException) -> None:
        """End the process; its successor begins anew. Any thread."""
        self._lease_thread.break_off(error)

    def _end_if_user_code_stays(self) -> None:
        """The lease is over: end the process if user code does not return."""
        if not self._user_code_returned.wait(USER_CODE_WAIT_S):
            code = exit_codes.BUG
            if self._shared is not None:
                self._reporter.warn(STUCK)
            try:
                code = self._end()
            finally:  # also if closing the output fails: the lease is not renewed any more
                os._exit(code)

    def prepare(self, row: Lease) -> Prepared:
        """Make and initialise a new processor; then reading begins. On the main thread."""
        paths = [Path(path) for path in self._spec.import_paths]
        kind = load_processor(self._spec.processor, paths)
        is_manual = self._spec.checkpoint.mode == "manual"
        called = f"processor: {self._spec.processor}"
        is_single = require_fit(
            kind,
            called,
            self._spec.concurrency,
            is_manual=is_manual,
            has_state=self._spec.state is not None,
        )
        if self._shared is not None:
            self._shared.process.modules_loaded()
        decoding = load_decoding(self._spec.decode, kind, paths, self._registry)
        if self._spans is not None and self._spec.traces is not None:
            self._spans.meet_user_code(_carrier(self._spec.traces.context, paths))
        processor = kind()
        claimed, row = row, self._rows.open(row)
        reached = max((row.checkpoint, *self._rows.cuts))
        self._retries.until_there(DEAD_LETTER, lambda: self._letters.begin(claimed, reached))
        times = EventTimes(processor.event_time, self._reporter.warn)
        if unused := unused_event_time(processor):
            self._reporter.warn(unused)
        timers = self._take_timers(processor, times, row)
        options = decoded_options(kind, self._spec.options)
        context = self._context(row, options, times, timers, is_single=is_single)
        call_method(processor, "initialize", context)
        if is_single:
            self._take_records(processor, context, decoding)
        self._begin_fetching(row, claimed)
        return Prepared(processor, self._rows, decoding)

    def _take_timers(
        self, processor: RecordProcessor, times: EventTimes, row: Lease
    ) -> TimerRun | None:
        place, live = self._spec.state, self._rows.entries
        if place is None or live is None or not fires_timers(processor):
            return None
        live.reserved.is_served = True
        timers = TimerRun(
            live,
            row.checkpoint,
            lateness_s=place.watermarks.lateness_s,
            every_s=place.watermarks.every_s,
            times=times,
            stored=self._rows.cuts,
            idle_s=place.watermarks.idle_s,
            round_every_s=self._rows.round_every_s or 0.0,
        )
        self._deliverer.take_timers(
            timers,
            processor,
            self._rows,
            TimerClocks(
                self._rows.round_every_s,
                quiet=lambda: self._fetch_view().quiet,
                wall=None
                if self._spec.replay is not None and self._spec.replay.stop
                else time.time,
            ),
        )
        return timers

    def _take_records(
        self, processor: RecordProcessor, context: Context, decoding: Decoding | None
    ) -> None:
        concurrency, policy = self._spec.concurrency or Concurrency(), self._spec.on_error
        self._deliverer.take_records(
            CallTerms(processor, context, concurrency, policy, decoding), self._rows
        )

    def fence(self) -> Instant | None:
        """Until when the lease is proven ours; None once it is lost. Any thread."""
        machine = self._machine
        return None if machine.state in {State.LOSING, State.LOST} else machine.own.fence

    def _registry(self) -> Decode:
        spec = self._spec
        return open_registry(spec.kinesis, spec.glue_url, self._services.credentials)

    def _context(
        self,
        row: Lease,
        options: Any,
        times: EventTimes,
        timers: TimerRun | None,
        *,
        is_single: bool,
    ) -> Context:
        spec = self._spec
        return Context(
            lease=ClaimedLease(
                application=spec.application,
                stream=spec.stream_name,
                shard_id=spec.shard_id,
                key=spec.lease_key,
                position=row.checkpoint,
                fencing_token=row.counter,
                pending=row.pending,
            ),
            options=options,
            checkpoint=spec.checkpoint,
            rows=RowsBetweenRecords(self._rows, lambda: self._deliverer.runs_records)
            if is_single
            else self._rows,
            release=self._release,
            state=self._rows.entries or NoState(),
            times=times,
            watermark=lambda: None if timers is None else timers.watermark,
            schemas={
                place.name: RowSchema.parse(place.schema, setting_of(place.name))
                for place in spec.outputs
                if place.schema is not None
            },
        )

    def _release(self) -> None:
        self._queue.halt()  # at once: the lease thread may stop delivery only after the next batch
        self._inbox.post(ReleaseRequested())

    def keep_letter(self, record: Record, failure: Failure, calls: int) -> None:
        """Keep a record that was given up. Raises: SinkError."""
        delivered, durable = self._deliverer.progress.delivered, self._checkpoints.durable
        self._letters.keep(record, failure, calls, delivered=delivered, durable=durable)

    def _open_letters(self) -> LetterStore:
        spec = self._spec
        return open_letters(spec.letters, spec.kinesis, self._services.credentials)

    def _cover(self, position: ExtendedSequenceNumber | None) -> None:
        covered = position or self._deliverer.progress.delivered
        if covered is not None:
            self._rows.cover(covered)

    def _begin_fetching(self, row: Lease, claimed: Lease) -> None:
        """Reading begins where the outputs have no rows yet. If they have the rows of the whole
        shard, reading begins at the checkpoint to find its end, and no record is given to user
        code."""
        spec = self._spec
        read_from = claimed if row.checkpoint == SHARD_END else row
        plan = FetchPlan(
            shard_id=spec.shard_id,
            start=first_start(read_from, spec.start_timestamp, WallTime(time.time())),
            checkpoint=row.checkpoint,
            expiry=assembly.expiry_watch(spec, row),
            pacing=assembly.pacing(spec),
            hash_range=assembly.hash_range(spec),
            kpl_range=spec.fetch.kpl_range,
            stream=stream_of(spec.lease_key),
            replay=spec.replay,
        )
        self._fetching = FetchThread(
            plan,
            ShardSource(self._services.reader, self._services.admin, self._services.subscriber),
            self._queue,
            self,
            threads=self._threads,
            now=boottime,
            meter=assembly.key_meter(spec),
            spans=self._spans,
        )
        self._fetching.start()

    def reached_tip(self) -> None:
        """The lease thread looks at once: a run may end at the tip."""
        self._inbox.post(Ticked())

    def stop_reporting(self) -> None:
        """Report nothing any more: the fetch thread may still wait for an answer."""
        self._reporter.close()

    def _fetch_view(self) -> FetchView:
        return FetchView() if self._fetching is None else self._fetching.view

    def _is_over(self) -> bool:
        return not self._lease_thread.is_alive()

    def _end(self) -> int:
        """The exit code; the output is closed first."""
        self._rows.close()
        if self._spans is not None:
            self._spans.end()
        thread = self._lease_thread
        if thread.failure is not None:
            return self._report_broken(thread.failure)
        assert thread.cause is not None, "the lease thread ended without a cause"
        return _CODES[thread.cause]


def _carrier(context: str | None, paths: Sequence[Path]) -> Callable[[Record], str | None] | None:
    """The function that finds the trace context of a record's producer; None without the setting.
    Raises: ProcessorLoadError."""
    if context is None or ":" not in context:
        from kclrun.observe.traces import json_carrier

        return None if context is None else json_carrier(context)
    return load_function(TRACE_CONTEXT, context, paths)


def _holds_lock(path: str) -> bool:
    """Hold the lock file, as a proof that this process of its owner lives [P3]. Children of this
    process do not hold it: a child does not prove that the lease process lives.

    Raises: HostFailed if the file cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise HostFailed(f"the lock file of its manager, {path}: {error.strerror}") from error
    keep_from_children(fd)
    return True
