"""Runs user code over one shard, in a Python worker of Spark.

Must not know: Spark. `range_progress.py` and `calling/` decide.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa

from kclrun.calling.batches import PROCESS_RECORDS
from kclrun.calling.delivery import RowScope, error_words
from kclrun.calling.method_checks import require_fit
from kclrun.calling.records import CallTerms
from kclrun.calling.runners import PROCESS_RECORD
from kclrun.calling.timers import ON_TIMER
from kclrun.calling.tracebacks import FRAMES_MAX, Failure, describe, is_ours
from kclrun.codec.row_lines import ROW_BYTES_MAX, encode_row_line
from kclrun.codec.values import Decode
from kclrun.errors import (
    LimitExceeded,
    ProcessorError,
    SettingsError,
    SinkError,
    StaleCheckpoint,
)
from kclrun.loading import decoded_options, load_decoding, load_processor
from kclrun.methods import call_method, fires_timers, unused_event_time
from kclrun.model.lease import ClaimedLease
from kclrun.model.letter import Letter, LetterDestination, LetterSource
from kclrun.model.output import EMITTED_OUTSIDE, MAIN_OUTPUT, no_output
from kclrun.model.policies import CheckpointPolicy, Concurrency, ErrorPolicy
from kclrun.model.record import Decoding, Record, RecordBatch
from kclrun.model.row_schema import RowSchema
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.processor import Checkpointer, Context, KeptRow, NoState, RecordProcessor
from kclrun.spark.executor.reading import cuts
from kclrun.spark.keyed.names import QueryPlace
from kclrun.spark.keyed.shard_state import ShardState
from kclrun.spark.processors.batches import TaskBatches
from kclrun.spark.processors.event_timers import EventTimers, refuse_single_records
from kclrun.spark.processors.methods import TaskMethods
from kclrun.spark.processors.range_progress import RangeProgress, RangeReport
from kclrun.spark.processors.single_records import SingleRecords
from kclrun.spark.stream_set import parted
from kclrun.state.event_times import EventTimes
from kclrun.state.keyed import Undoable
from kclrun.state.timers import Timer

# Emitted rows on their way into the DataFrame: JSON lines, then Arrow batches.
#
# A row leaves only after the call that emitted it has returned. So a call that raises can be
# repeated without a duplicate row. The rows of a task count only if the task succeeds. The memory
# is bounded by the rows that one call may emit, and by the size of a batch.
#
# The two kinds of rows that leave a task: emitted rows, and an account of each range.
ROW: Final = "row"
ACK: Final = "ack"
SCHEMA: Final = (
    "kind string, stream string, shardId string, sequenceNumber string, subSequenceNumber bigint,"
    " row string"
)
ARROW_SCHEMA: Final = pa.schema(
    [
        ("kind", pa.string()),
        ("stream", pa.string()),
        ("shardId", pa.string()),
        ("sequenceNumber", pa.string()),
        ("subSequenceNumber", pa.int64()),
        ("row", pa.string()),
    ]
)
NO_STATE: Final = (
    "context.state needs `state` in the configuration: `state: {}` keeps it beside the query's"
    " checkpoint"
)
# Spark's own limit of one batch (spark.sql.execution.arrow.maxRecordsPerBatch).
BATCH_ROWS_MAX: Final = 10_000
# A batch exists three times on its way: as lines, as Arrow, and in the JVM.
BATCH_BYTES_MAX: Final = 8 * 2**20
# The rows of one call wait in memory until it returns: sixteen rows of the largest size.
CALL_BYTES_MAX: Final = 16 * ROW_BYTES_MAX


class EmittedBatches:
    """The rows of one shard that have not left yet.

    Around each call of user code call `begin_batch`, then `end_batch` or `take_back_batch`; call
    `cover` when user code asks for a checkpoint. User code may call `emit` from any thread.
    """

    def __init__(self, shard_id: str, stream: str = "") -> None:
        self._stream, self._shard_id = stream, shard_id
        self._lines: list[bytes] = []
        # Runs of consecutive rows: the position of a run, and its number of rows.
        self._runs: list[tuple[ExtendedSequenceNumber, int]] = []
        self._bytes = 0
        self._is_open = False
        # Of the current call; `begin_batch` sets them.
        self._call_start: int
        self._call_bytes: int
        self._rows_total = 0
        self._lock = threading.Lock()

    def emit(self, row: Mapping[str, Any], to: str = MAIN_OUTPUT) -> None:
        """Add one row. Raises: TypeError, LimitExceeded as `encode_row_line`, also when one call
        emits more than 256 MiB; SinkError outside a call; SettingsError for a named output."""
        line = self.prepare(row, to).encoded
        with self._lock:
            if not self._is_open:
                raise SinkError(EMITTED_OUTSIDE)
            if self._call_bytes + len(line) > CALL_BYTES_MAX:
                raise LimitExceeded(
                    f"one call emitted more than {CALL_BYTES_MAX} bytes, which wait in memory"
                    " until it returns: set fetch.batch_max lower"
                )
            self._call_bytes += len(line)
            self._lines.append(line)

    def prepare(self, row: Mapping[str, Any], to: str) -> KeptRow:
        """A row to keep until its record is done. Raises: as `emit`."""
        if to != MAIN_OUTPUT:
            raise SettingsError(
                f"{no_output(to, [MAIN_OUTPUT])}; on Spark rows go to one DataFrame"
            )
        line = encode_row_line(row)[:-1]  # one line of a file, without its newline
        return KeptRow(to, line, len(line))

    def place(self, position: ExtendedSequenceNumber, rows: Sequence[KeptRow]) -> None:
        """The rows of records that are done. Raises: LimitExceeded beyond 256 MiB of one batch."""
        if self._bytes + sum(row.size for row in rows) > CALL_BYTES_MAX:
            raise LimitExceeded(
                f"one batch emitted more than {CALL_BYTES_MAX} bytes: set fetch.batch_max lower"
            )
        self.begin_batch()
        self._lines += [row.encoded for row in rows]
        self.end_batch(position)

    def begin_batch(self) -> None:
        """User code is called: its rows can be taken back together."""
        with self._lock:
            self._is_open = True
            self._call_start = len(self._lines)
            self._call_bytes = 0

    def cover(self, position: ExtendedSequenceNumber) -> None:
        """A checkpoint was admitted: the rows emitted until now stay, also if the call raises.

        `position` is that of the last delivered record, as for `end_batch`.
        """
        with self._lock:
            self._settle(position)

    def take_back_batch(self, _: ExtendedSequenceNumber | None = None, /) -> None:
        """The call raised: drop its rows, except rows that a checkpoint covers."""
        with self._lock:
            del self._lines[self._call_start :]
            self._is_open = False

    def end_batch(self, position: ExtendedSequenceNumber, /) -> None:
        """The call returned: its rows may leave, and belong to `position`."""
        with self._lock:
            self._settle(position)
            self._is_open = False

    def take_count(self) -> int:
        """The number of rows that left since the previous call of this method."""
        total, self._rows_total = self._rows_total, 0
        return total

    def batches(self, *, all_of_them: bool = False) -> Iterator[pa.RecordBatch]:
        """Rows in Arrow, in the order they were emitted. Less than a batch waits for more, unless
        `all_of_them` is set. Call it only while user code does not run."""
        if not all_of_them and len(self._lines) < BATCH_ROWS_MAX and self._bytes < BATCH_BYTES_MAX:
            return
        lines, runs = self._lines, self._runs
        self._lines, self._runs, self._bytes = [], [], 0
        self._rows_total += len(lines)
        numbers = [position.sequence_number for position, n in runs for _ in range(n)]
        subs = [position.sub_sequence_number for position, n in runs for _ in range(n)]
        for first, last in cuts([*map(len, lines)], BATCH_ROWS_MAX, BATCH_BYTES_MAX):
            yield _batch(
                (ROW, self._stream, self._shard_id),
                numbers[first:last],
                subs[first:last],
                lines[first:last],
            )

    def _settle(self, position: ExtendedSequenceNumber) -> None:
        """The rows emitted in this call so far cannot be taken back any more."""
        rows = len(self._lines) - self._call_start
        if rows:
            self._runs.append((position, rows))
            self._bytes += sum(map(len, self._lines[self._call_start :]))
        self._call_start = len(self._lines)


def report_batch(report: RangeReport) -> pa.RecordBatch:
    """The account of a range as a row of the kind ACK, under the range's own name."""
    return _batch((ACK, "", report.shard_id), [report.position], [0], [msgspec.json.encode(report)])


def _batch(
    alike: tuple[str, str, str], numbers: list[str], subs: list[int], lines: list[bytes]
) -> pa.RecordBatch:
    """`alike`: kind, stream and shard of all rows."""
    rows = pa.array(lines, pa.binary()).cast(pa.string())
    columns = [
        *(pa.repeat(value, len(lines)) for value in alike),
        pa.array(numbers, pa.string()),
        pa.array(subs, pa.int64()),
        rows,
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ARROW_SCHEMA)


_log = logging.getLogger(__name__)


class ProcessorJob(msgspec.Struct, frozen=True, kw_only=True):
    """The processor that the tasks run. `stream` is the bare name, with several streams all their
    names separated by commas; `run` is new at every start.

    `paths` are folders that the processor is imported from; where they do not exist, it comes
    from the environment.
    """

    application: str
    stream: str
    processor: str
    paths: tuple[str, ...]
    options: Mapping[str, Any]
    batch_max: int
    uncheckpointed_max: int
    on_error: ErrorPolicy
    concurrency: Concurrency | None = None
    letters: LetterDestination = LetterDestination()
    decode: str | None = None
    glue_url: str | None = None
    schema: str | None = None
    state: QueryPlace | None = None
    run: str

    def user_code(self) -> type[RecordProcessor]:
        """Imported once in a process. Raises: ProcessorLoadError."""
        return _load(self.processor, self.paths)

    def decoding(self, registry: Callable[[], Decode]) -> Decoding | None:
        """How `record.value` is made. Raises: as `load_decoding`."""
        paths = [Path(path) for path in self.paths]
        return load_decoding(self.decode, self.user_code(), paths, registry)


@functools.lru_cache(maxsize=16)  # one entry an application; a session has few applications
def _load(reference: str, paths: tuple[str, ...]) -> type[RecordProcessor]:
    return load_processor(reference, [Path(path) for path in paths])


class _RowsAndState:
    """Implements `RowScope`: the rows and the changes of the state that a call made stay, or go,
    together."""

    def __init__(self, rows: EmittedBatches, state: ShardState) -> None:
        self._rows = rows
        self._state = state

    def begin_batch(self) -> None:
        self._rows.begin_batch()
        self._state.begin_batch()

    def end_batch(self, position: ExtendedSequenceNumber, /) -> None:
        self._rows.end_batch(position)
        self._state.end_batch()

    def take_back_batch(self, checkpoint: ExtendedSequenceNumber | None, /) -> None:
        self._rows.take_back_batch(checkpoint)
        self._state.take_back_batch()


class ProcessorHost:
    """One instance, from `initialize` to `shard_ended` or `lease_lost`.

    It follows the contracts of `kclrun.processor`, as the fleet does. A call that raises is
    repeated after the pauses of `on_error`, and its rows are taken back. After the last repetition
    the task fails, and Spark may run the whole range again elsewhere. With `on_error.then` as
    `dead-letter` or `skip`, only the records at fault are given up, as `calling/failures.py`
    decides; no other record is skipped [I9]. `keep_letter` keeps a letter durably, before the task
    can return [I13]; if it raises SinkError, the task fails.

    `begin` is the position where the instance starts, `token` the fencing token of the task, and
    `state` the keyed state of the shard at `begin`; the next instance of the task goes on with that
    state. Every method that calls user code raises ProcessorError when user code raises; the
    instance is then unusable.
    """

    def __init__(
        self,
        job: ProcessorJob,
        shard_id: str,
        begin: ExtendedSequenceNumber,
        token: int,
        *,
        keep_letter: Callable[[Letter], None],
        state: ShardState | None = None,
        decoding: Decoding | None = None,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.is_released = False
        self._keep_letter = keep_letter
        self._decoding = decoding
        self._job = job
        # With several streams, the shard id also contains the stream (`stream_set.py`).
        self._lease_key = shard_id
        stream, self._shard_id = parted(shard_id)
        self._stream = stream or job.stream
        self._token = token
        self._clock = time.monotonic
        self.rows = EmittedBatches(self._shard_id, self._stream)
        self.state = state
        self._effects: RowScope = self.rows if state is None else _RowsAndState(self.rows, state)
        self._progress = RangeProgress(begin, job.uncheckpointed_max)
        self._progress_lock = threading.Lock()  # user code may checkpoint from any of its threads
        self._checkpointer = Checkpointer(self._checkpoint)
        self._covers = begin  # the position of the rows of the current call
        self._batches = TaskBatches(
            job.on_error,
            call=self._give,
            durable=self.checkpointed,
            let_go=self._let_go,
            wait=wait,
            clock=self._clock,
            warn=self._warn,
        )
        self._methods = TaskMethods(
            job.on_error,
            durable=self.checkpointed,
            failure=lambda raised: self._failure(raised.where, raised.calls, raised.error, ()),
            wait=wait,
            warn=self._warn,
        ).calls
        self._single: SingleRecords | None = None
        self._timers: EventTimers | None = None
        self._stop_calls: Callable[[], None] = lambda: None
        user_code = job.user_code()
        self._methods.run("initialize", lambda: self._initialize(user_code, begin))

    @property
    def position(self) -> ExtendedSequenceNumber:
        """The position of the last delivered record."""
        return self._progress.delivered

    @property
    def done(self) -> ExtendedSequenceNumber:
        """The position of the last processed record; SHARD_END once the shard ended."""
        return self._progress.processed

    def go_on(self, token: int) -> None:
        """The next range begins at this instance's position, in another task."""
        self._token = self._lease.fencing_token = token
        self._progress.continue_with_next_range()

    def process(self, records: Sequence[Record]) -> None:
        """Deliver some records, at least one: in one call of `process_records`, in several with
        timers between them, or one by one."""
        if self._timers is None:
            self.process_part(records)
        else:
            self._timers.process(records)

    def checkpointed(self) -> ExtendedSequenceNumber:
        """The last position that a checkpoint covers."""
        return self._progress.checkpointed

    def call_timer(self, timer: Timer) -> None:
        self._covers = self.position
        call_method(self._processor, ON_TIMER, timer, self._checkpointer)

    def fired(self, seconds: float) -> None:
        self._progress.process(self.position, seconds)

    def process_part(self, records: Sequence[Record]) -> None:
        last = self._progress.deliver(records)
        started = self._clock()
        if self._single is not None:
            failed = self._single.process(records, last)
            if failed is not None:
                raise ProcessorError(self._failure(PROCESS_RECORD, *failed)) from None
            self._progress.process(last, self._clock() - started)
            return
        failed = self._batches.process(records, last, self._effects)
        if failed is not None:
            raise ProcessorError(self._failure(PROCESS_RECORDS, *failed)) from None
        self._progress.process(last, self._clock() - started)

    def end_shard(self) -> None:
        """The shard's last record was processed."""
        started = self._clock()
        self._covers = SHARD_END
        self._call_last("shard_ended", SHARD_END)
        self._stop_calls()
        self._progress.end(self._clock() - started)

    def give_up(self) -> None:
        """The processor asked to be released: it gets one last chance to checkpoint."""
        self._call_last("shutdown_requested")
        self._stop_calls()

    def _call_last(self, where: str, covers: ExtendedSequenceNumber | None = None) -> None:
        call = functools.partial(call_method, self._processor, where, self._checkpointer)
        self._methods.run(where, call, self._effects, covers)

    def lose(self) -> None:
        """The lease is lost. Errors of `lease_lost` are only logged: this task does not own it."""
        try:
            call_method(self._processor, "lease_lost")
        except BaseException as error:  # noqa: BLE001 - user code: whatever it raises
            _log.warning("%s: lease_lost raised %s", self._shard_id, error_words(error))
        self._stop_calls()

    def report(self) -> RangeReport:
        """The account of the range, once its rows have left."""
        return self._progress.report(self._lease_key, self.rows.take_count())

    def _make_context(
        self, user_code: type[RecordProcessor], begin: ExtendedSequenceNumber, times: EventTimes
    ) -> Context:
        self._lease = ClaimedLease(
            application=self._job.application,
            stream=self._stream,
            shard_id=self._shard_id,
            key=self._lease_key,
            position=begin,
            fencing_token=self._token,
        )
        return Context(
            lease=self._lease,
            options=decoded_options(user_code, self._job.options),
            checkpoint=CheckpointPolicy(
                mode="batch", uncheckpointed_max=self._job.uncheckpointed_max
            ),
            rows=self.rows,
            release=self._release,
            state=NoState(NO_STATE) if self.state is None else self.state.live,
            times=times,
            watermark=lambda: None if self._timers is None else self._timers.watermark,
            schemas=None
            if self._job.schema is None
            else {MAIN_OUTPUT: RowSchema.parse(self._job.schema)},
        )

    def _initialize(self, user_code: type[RecordProcessor], begin: ExtendedSequenceNumber) -> None:
        # Each attempt gets a fresh instance: a half-initialised one is not usable.
        self._processor = user_code()
        times = EventTimes(self._processor.event_time, self._warn)
        if unused := unused_event_time(self._processor):
            self._warn(unused)
        self._context = self._make_context(user_code, begin, times)
        if self.state is not None and fires_timers(self._processor):
            assert self._job.state is not None, "a job with state has its place"
            self._timers = EventTimers(
                self,
                self.state,
                begin,
                methods=self._methods,
                effects=self._effects,
                watermarks=self._job.state.place.watermarks,
                times=times,
                clock=self._clock,
            )
        call_method(self._processor, "initialize", self._context)
        concurrency = self._job.concurrency
        has_state = self.state is not None
        if require_fit(
            user_code, self._job.processor, concurrency, is_manual=False, has_state=has_state
        ):
            if self._timers is not None:
                refuse_single_records(self._job.processor)
            self._single = SingleRecords(
                CallTerms(
                    self._processor,
                    self._context,
                    concurrency or Concurrency(),
                    self._job.on_error,
                    self._decoding,
                ),
                let_go=self._let_go,
                place=self._place,
            )
            self._stop_calls = self._single.calls.close

    def _warn(self, words: str) -> None:
        _log.warning("%s: %s", self._shard_id, words)

    def _place(
        self,
        position: ExtendedSequenceNumber,
        rows: Sequence[KeptRow],
        changes: Sequence[Undoable],
    ) -> None:
        self.rows.place(position, rows)
        if changes:
            assert self.state is not None, "without state no call changes it"
            self.state.place(changes)

    def _let_go(self, record: Record, failure: Failure, calls: int) -> None:
        """Keep the letter of a record that is given up, or skip it. Raises: SinkError."""
        is_skipped = self._job.on_error.then == "skip"
        if not is_skipped:
            self._keep_letter(
                Letter.of(
                    record,
                    LetterSource(
                        self._job.application, self._job.processor, self._stream, self._shard_id
                    ),
                    error=failure.error,
                    raised_at=failure.raised_at,
                    traceback=failure.traceback_text,
                    calls=calls,
                    given_up_at=time.time(),
                )
            )
        self._progress.give_up(is_skipped=is_skipped)
        _log.warning(
            "%s: the record at %s %s: %s",
            self._shard_id,
            record.position,
            "was skipped" if is_skipped else "is a dead letter",
            failure.error,
        )

    def _give(self, records: Sequence[Record], covers: ExtendedSequenceNumber) -> None:
        self._covers = covers
        batch = RecordBatch(records, None, self._token, self._decoding)
        call_method(self._processor, PROCESS_RECORDS, batch, self._checkpointer)

    def _checkpoint(self, at: ExtendedSequenceNumber | None) -> None:
        part = self._batches.before_checkpoint()
        at = at if at is not None else part
        if part is not None and at is not None and part < at <= self.position:
            raise StaleCheckpoint(f"{at} is above {part}, the last record of this call")
        with self._progress_lock:
            self._progress.checkpoint(at)
            self.rows.cover(self._covers)
            if self.state is not None:
                self.state.cover()

    def _release(self) -> None:
        self.is_released = True

    def _failure(
        self,
        where: str,
        failed: int,
        error: BaseException,
        records: Sequence[Record],
        reason: str = "",
    ) -> str:
        failure = describe(error, records)
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if not is_ours(frame.filename)
        ]
        times = "once" if failed == 1 else f"{failed} times"
        record = f"Record: {failure.record}\n" if failure.record else ""
        return (
            (f"{reason}\n" if reason else "")
            + f"{where} of {self._job.processor} raised {failure.error} ({times})\n"
            f"Shard {self._shard_id} of {self._stream}, records up to {self.position}\n"
            f"{record}"
            "The range is given again from its beginning if Spark runs the task again\n"
            + "".join(traceback.format_list(frames[-FRAMES_MAX:]))
        ).rstrip()
