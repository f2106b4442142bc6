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

import msgspec

from kclrun.aws.changes.stream import admin_of, reader_of, signing_service
from kclrun.aws.fan_out import FanOutReader
from kclrun.aws.http.pool import CONNECTIONS_MAX
from kclrun.aws.lease_table import DynamoLeaseTable
from kclrun.aws.wire import HeldCredentials, WireClient
from kclrun.calling.delivery import RowScope, host_fault
from kclrun.calling.method_checks import require_fit
from kclrun.calling.records import CallTerms
from kclrun.calling.timer_run import TimerRun
from kclrun.calling.tracebacks import Failure
from kclrun.codec.values import Decode
from kclrun.config.observing import TRACE_CONTEXT
from kclrun.destinations import open_letters, open_registry
from kclrun.errors import HostFailed, SinkError
from kclrun.files.durable import keep_from_children
from kclrun.ipc import exit_codes, messages
from kclrun.ipc.board import Segment, StartSpec, boottime
from kclrun.ipc.channel import Channel, Doorbell, NoMessage, PeerGone
from kclrun.ipc.ring import EventRing
from kclrun.lease.commands import ExitCause
from kclrun.lease.events import ReleaseRequested, Ticked
from kclrun.lease.policy import LeasePolicy, Pacing, batch_records_max, first_start
from kclrun.lease.state_machine import LeaseStateMachine
from kclrun.lease.states import State
from kclrun.loading import decoded_options, load_decoding, load_function, load_processor
from kclrun.methods import call_method, fires_timers, unused_event_time
from kclrun.model.lease import Lease, LeaseKey, OwnerId
from kclrun.model.output import setting_of
from kclrun.model.policies import Concurrency, TracePolicy
from kclrun.model.record import Decoding, Record
from kclrun.model.row_schema import RowSchema
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.model.shard import HashRange
from kclrun.model.stream import is_change_stream, shard_id_of, stream_of
from kclrun.model.time import Instant, WallTime
from kclrun.model.wire import WireEndpoint
from kclrun.observe.loggers import LoggerLevels
from kclrun.observe.logs import OWN_LOGGER, EventLog, LineSink, configure_lease_logging
from kclrun.ports import LeaseTable, LetterStore, ShardReader, ShardSubscriber, StreamAdmin
from kclrun.processor import Context, RecordProcessor, Row
from kclrun.protocol.reports import DEAD_LETTER, ProcessBroke, StartUnclaimed
from kclrun.protocol.trimming import ExpiryWatch
from kclrun.state.event_times import EventTimes
from kclrun.traffic.hot_keys import KeyMeter
from kclrun.worker import tampering
from kclrun.worker.delivering import Deliverer
from kclrun.worker.delivery_queue import CheckpointCalls, DeliveryQueue, Inbox, QueueLimits
from kclrun.worker.fetching import FetchPlan, FetchThread, FetchView, FetchWatch, silence_max_s
from kclrun.worker.giving_up import LeaseLetters
from kclrun.worker.lease_outputs import LeaseOutputs
from kclrun.worker.lease_thread import STDERR_FD, LeaseThread, ManagerChannel, Reporter
from kclrun.worker.opening import DestinationRetries, OutputOpening, StateOpening
from kclrun.worker.sharing import (
    SharedLease,
    SharedProcess,
    daemon_thread,
    rest_together_s,
    shard_here,
)

if TYPE_CHECKING:
    from kclrun.observe.traces import LeaseSpans

# One write of the row may take at most a quarter of the failover: three writes and a read of the
# row fit before the fence.
WRITE_SHARE: Final = 0.25


class Services(msgspec.Struct, frozen=True):
    """The ports of one lease process."""

    reader: ShardReader
    admin: StreamAdmin
    table: LeaseTable
    credentials: HeldCredentials
    subscriber: ShardSubscriber | None = None


def services(spec: StartSpec, connections_max: int = CONNECTIONS_MAX) -> Services:
    """Clients made in this process, after the fork; no request is made yet."""
    credentials = HeldCredentials(spec.credentials)
    client = functools.partial(WireClient, credentials=credentials, connections_max=connections_max)
    stream = spec.stream_arn or spec.stream_name
    source = client(spec.source or spec.kinesis, service=signing_service(stream))
    dynamodb = client(table_endpoint(spec), service="dynamodb")
    return Services(
        reader=reader_of(source, stream),
        subscriber=FanOutReader(source, spec.consumer_arn) if spec.consumer_arn else None,
        admin=admin_of(source, stream),
        table=DynamoLeaseTable(dynamodb, spec.table_name),
        credentials=credentials,
    )


def _shared_services(spec: StartSpec, lease: SharedLease) -> Services:
    """One set of clients for the leases of a process: connections and TLS take most memory."""
    names = (spec.stream_arn or spec.stream_name, spec.consumer_arn, spec.table_name)
    patience_s = table_endpoint(spec).read_timeout_s  # follows the failover of the fleet
    return lease.process.part((*names, patience_s), lambda: services(spec, _SHARED_CONNECTIONS_MAX))


def table_endpoint(spec: StartSpec) -> WireEndpoint:
    """The lease table's endpoint with time-outs that leave room for three writes per failover."""
    patience_s = min(spec.dynamodb.read_timeout_s, spec.failover_s * WRITE_SHARE)
    return msgspec.structs.replace(
        spec.dynamodb,
        read_timeout_s=patience_s,
        connect_timeout_s=min(spec.dynamodb.connect_timeout_s, patience_s),
    )


def lease_policy(spec: StartSpec) -> LeasePolicy:
    return LeasePolicy(
        key=LeaseKey(spec.lease_key),
        me=OwnerId(spec.owner),
        seen_counter=spec.seen_counter,
        expires_instant=spec.expires_instant,
        failover_s=spec.failover_s,
        checkpoint=spec.checkpoint,
        has_waited=spec.has_waited,
        past_pause=spec.past_pause,
        others_in_sight=spec.others_in_sight,
        has_keyed_state=spec.state is not None,
        has_outputs=spec.state is not None or any(not place.grows for place in spec.outputs),
        has_storing_outputs=spec.state is not None
        or any(place.stores_cursor for place in spec.outputs),
        is_bounded=spec.replay is not None,
    )


def pacing(spec: StartSpec) -> Pacing:
    return Pacing(spec.fetch.idle_s, spec.fetch.floor_s, spec.fetch.every_s)


def queue_limits(spec: StartSpec) -> QueueLimits:
    half_the_cap = batch_records_max(spec.checkpoint.uncheckpointed_max)
    return QueueLimits(spec.fetch.buffer_bytes, min(spec.fetch.batch_max, half_the_cap))


def expiry_watch(spec: StartSpec, row: Lease) -> ExpiryWatch:
    """By bare ids, as the service lists them."""
    parents = [shard_id_of(parent) for parent in row.parents]
    return ExpiryWatch(
        spec.shard_id,
        row.hash_range,
        parents,
        apart_s=spec.failover_s,
        may_be_listed=is_change_stream(spec.stream_arn or spec.stream_name),
    )


def hash_range(spec: StartSpec) -> HashRange | None:
    if spec.hash_range_start is None or spec.hash_range_end is None:
        return None
    return HashRange(int(spec.hash_range_start), int(spec.hash_range_end))


def key_meter(spec: StartSpec) -> KeyMeter | None:
    window_s = spec.fetch.hot_window_s
    return KeyMeter(hash_range(spec), window_s, boottime()) if window_s else None


# The manager sends the start command right after the fork, without waiting.
BEGIN_WAIT_S: Final = 10.0
# User code that still runs when the lease is over gets this long to return. If a longer wait is
# right, the core has waited already.
USER_CODE_WAIT_S: Final = 1.0

STUCK: Final = (
    "its lease is over and its user code has not returned: the process that it shares ends, and the"
    " other leases in it start again"
)
# At most three threads of each of 64 leases send requests at once.
_SHARED_CONNECTIONS_MAX: Final = 192

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
        self._make_thread = daemon_thread if shared is None else shared.make_thread
        self._rest_s = (
            functools.partial(rest_together_s, random.random())
            if shared is None
            else shared.process.rest_s
        )
        self._report_broken = functools.partial(_broke, ring=ring, doorbell=doorbell)
        self._services = services(spec) if shared is None else _shared_services(spec, shared)
        self._inbox = Inbox()
        turn = None if shared is None else shared.process.turn
        self._queue = DeliveryQueue(queue_limits(spec), boottime, turn)
        cpu_s = time.process_time if shared is None else shared.cpu_s
        self._machine = LeaseStateMachine(lease_policy(spec), random.random, cpu_s)
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
        self._lease_thread = LeaseThread(
            self._machine,
            self._inbox,
            self._queue,
            table=self._services.table,
            admin=self._services.admin,
            checkpoints=self._checkpoints,
            rows=self._rows,
            line=self._line,
            reporter=self._reporter,
            fetch_watch=FetchWatch(self._fetch_view, silence_max_s(spec.source or spec.kinesis)),
            now=boottime,
            on_over=self._end_if_user_code_stays,
            make_thread=self._make_thread,
            rest_s=self._rest_s,
            spans=self._spans,
        )
        self._deliverer = self._make_deliverer()

    def _make_deliverer(self) -> Deliverer:
        return Deliverer(
            self._queue,
            self._inbox.post,
            self._spec.on_error,
            prepare=self._prepare,
            checkpoints=self._checkpoints,
            report=self._reporter.report,
            broke=self._lease_thread.break_off,
            keep_letter=self._keep_letter,
            settled=self._rows.settle,
            sent=self._rows.sent,
            spans=self._spans,
        )

    def _outputs(self) -> LeaseOutputs:
        spec, queue, retries, spans = self._spec, self._queue, self._retries, self._spans
        post, report, broke = self._inbox.post, self._reporter.report, self._break_off
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
            spec, queue, retries, opening, post=post, broke=broke, make_thread=self._make_thread
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

    def _break_off(self, error: BaseException) -> None:
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

    def _prepare(self, row: Lease) -> tuple[RecordProcessor, RowScope | None, Decoding | None]:
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
        return processor, self._rows, decoding

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
            self._rows.round_every_s,
            quiet=lambda: self._fetch_view().quiet,
            wall=None if self._spec.replay is not None and self._spec.replay.stop else time.time,
        )
        return timers

    def _take_records(
        self, processor: RecordProcessor, context: Context, decoding: Decoding | None
    ) -> None:
        concurrency, policy = self._spec.concurrency or Concurrency(), self._spec.on_error
        self._deliverer.take_records(
            CallTerms(processor, context, concurrency, policy, decoding),
            self._rows,
            fence=self._fence,
            make_thread=self._make_thread,
        )

    def _fence(self) -> Instant | None:
        """Until when the lease is proven ours; None once it is lost. Any thread."""
        machine = self._machine
        return None if machine.state in {State.LOSING, State.LOST} else machine.own.fence

    def _emit_of_shard(self, row: Row, to: str) -> None:
        if self._deliverer.runs_records:
            raise SinkError(
                "rows of a record leave by its own context: process_record(self, record, context)"
                " calls context.emit(row)"
            )
        self._rows.emit(row, to)

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
            application=spec.application,
            stream=spec.stream_name,
            shard_id=spec.shard_id,
            lease_key=spec.lease_key,
            position=row.checkpoint,
            options=options,
            fencing_token=row.counter,
            uncheckpointed_max=spec.checkpoint.uncheckpointed_max,
            checkpoint_mode=spec.checkpoint.mode,
            emit=self._emit_of_shard if is_single else self._rows.emit,
            prepare=self._rows.prepare,
            entries=self._rows.entries,
            watermark=lambda: None if timers is None else timers.watermark,
            times=times,
            release=self._release,
            pending_checkpoint=row.pending,
            schemas={
                place.name: RowSchema.parse(place.schema, setting_of(place.name))
                for place in spec.outputs
                if place.schema is not None
            },
        )

    def _release(self) -> None:
        self._queue.halt()  # at once: the lease thread may stop delivery only after the next batch
        self._inbox.post(ReleaseRequested())

    def _keep_letter(self, record: Record, failure: Failure, calls: int) -> None:
        """Keep a record that was given up. Raises: SinkError."""
        delivered, durable = self._deliverer.delivered, self._checkpoints.durable
        self._letters.keep(record, failure, calls, delivered=delivered, durable=durable)

    def _open_letters(self) -> LetterStore:
        spec = self._spec
        return open_letters(spec.letters, spec.kinesis, self._services.credentials)

    def _cover(self, position: ExtendedSequenceNumber | None) -> None:
        covered = position or self._deliverer.delivered
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
            expiry=expiry_watch(spec, row),
            hash_range=hash_range(spec),
            kpl_range=spec.fetch.kpl_range,
            stream=stream_of(spec.lease_key),
            replay=spec.replay,
        )
        self._fetching = FetchThread(
            plan,
            self._services.reader,
            self._services.admin,
            self._queue,
            pacing(spec),
            now=boottime,
            warn=self._reporter.warn,
            lost=self._reporter.records_lost,
            broke=self._lease_thread.break_off,
            reached_tip=lambda: self._inbox.post(Ticked()),
            subscriber=self._services.subscriber,
            meter=key_meter(spec),
            heat=self._reporter.report,
            fetched=None if self._spans is None else self._spans.fetched,
            make_thread=self._make_thread,
            rest_s=self._rest_s,
        )
        self._fetching.start()

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
