"""Runs a processor over the records of one shard, in memory.

User code gets exactly the guarantees of the contracts of `kclrun.processor`, and calls that they
forbid are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from kclrun.calling.in_memory.batches import MemoryBatches
from kclrun.calling.in_memory.ends import Ends
from kclrun.calling.in_memory.methods import MemoryMethods, MemoryTimers
from kclrun.calling.in_memory.records import MakeInline, MemoryRecords, inline_runner
from kclrun.calling.in_memory.states import Ledger
from kclrun.calling.method_checks import NO_ORDER, require_fit
from kclrun.calling.records import CallTerms
from kclrun.errors import ProcessorError, StaleCheckpoint
from kclrun.methods import call_method, fires_timers, refuse_deferred
from kclrun.model.lease import ClaimedLease
from kclrun.model.policies import CheckpointPolicy, Concurrency, ErrorPolicy
from kclrun.model.record import Decoding, Record, RecordBatch
from kclrun.model.row_schema import RowSchema
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.processor import Checkpointer, Context, NoState, RecordProcessor
from kclrun.state.event_times import EventTimes
from kclrun.state.timers import Step, Timer

Mode = Literal["auto", "batch", "manual"]


class Call(NamedTuple):
    """One call of the processor: the `name` of the method, and the number of `records` in it."""

    name: str
    records: int = 0


@dataclass
class Run:
    """The result of a run.

    `rows` are the emitted rows that are left, in order, and `outputs` those of each output by its
    name (`rows` are those of `output`); `checkpoints` the positions written; `position` the last of
    them, from which a restart would read; `calls` the calls made; `state` what `context.state`
    holds at the end, as key → name → value, after a crash as of the last checkpoint, `timers` the
    timers that are pending then, and `watermark` the time of the shard; `delivered` the number of
    records delivered, repetitions included; `late` how many records `Windows.add` took into no
    window, and `ahead` how many had an `event_time` of more than a second after their arrival, both
    with repetitions; `crashed` and `released` how it ended; `given_up` the records that `then` made
    dead letters of, or skipped; `last_error` what a call for them raised last; `processors` the
    instances, one for each life; `row_counts` how many rows each output had after each batch.
    """

    rows: list[dict[str, Any]]
    checkpoints: list[ExtendedSequenceNumber]
    position: ExtendedSequenceNumber
    calls: list[Call] = field(default_factory=list)
    delivered: int = 0
    crashed: bool = False
    released: bool = False
    given_up: list[Record] = field(default_factory=list)
    last_error: str = ""
    processors: list[RecordProcessor] = field(default_factory=list)
    outputs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    row_counts: list[dict[str, int]] = field(default_factory=list)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    timers: list[Timer] = field(default_factory=list)
    watermark: Step = field(default_factory=Step)
    late: int = 0
    ahead: int = 0


class Life:
    """One processor instance from `initialize` to its end. `run` has the result."""

    def __init__(
        self,
        ledger: Ledger,
        decoding: Decoding | None,
        *,
        concurrency: Concurrency | None,
        checkpoint: CheckpointPolicy,
        batch_max: int,
        policy: ErrorPolicy,
        make_runner: MakeInline = inline_runner,
        ends: Ends | None = None,
    ) -> None:
        if batch_max < 1 or checkpoint.uncheckpointed_max < 1:
            raise ValueError("batch_max and uncheckpointed_max are at least 1")
        self.run = Run(ledger.rows, ledger.checkpoints, ledger.position, outputs=ledger.outputs)
        self.ledger = ledger
        self._checkpoint = checkpoint
        self._mode = checkpoint.mode
        self._batch_max = batch_max
        self._uncheckpointed_max = checkpoint.uncheckpointed_max
        self._policy = policy
        self._ends = ends = ends or Ends()
        self._batches = MemoryBatches(
            policy,
            ledger,
            call=self._call_batch,
            given_up=self.run.given_up.append,
            note_error=self._note_error,
            ends=ends,
        )
        self._methods = MemoryMethods(policy, ledger, ends).calls
        self._decoding = decoding
        self._concurrency = concurrency
        self._make_runner = make_runner
        self._single: MemoryRecords | None = None
        self._timers: MemoryTimers | None = None
        # Each attempt of `initialize` has an instance of its own.
        self.times = EventTimes(self._event_time)
        self._uncheckpointed: list[ExtendedSequenceNumber] = []

    def live(
        self,
        processor: type[RecordProcessor] | RecordProcessor,
        context: Context,
        records: Iterable[Record],
        *,
        end_of_shard: bool,
    ) -> Run:
        """Run the processor over these records. Raises: its errors, and what ended the run."""
        try:
            self._start(processor, context)
            self._deliver([record for record in records if record.position > context.position])
            self._end(end_of_shard=end_of_shard)
        finally:
            if self._single is not None:
                self._single.calls.close()
            self.note_end()
        return self.run

    def note_end(self) -> None:
        """Note in `run` how the ledger is now."""
        run, ledger = self.run, self.ledger
        run.position, run.state = ledger.position, ledger.state.values()
        run.timers, run.watermark = ledger.state.timers(), ledger.state.watermark
        run.late, run.ahead = self.times.late, self.times.ahead

    def _start(
        self,
        processor: type[RecordProcessor] | RecordProcessor,
        context: Context,
    ) -> None:
        self._fencing_token = context.fencing_token
        user_code = processor if isinstance(processor, type) else type(processor)
        called = user_code.__qualname__
        is_manual = self._mode == "manual"
        self._is_single = require_fit(processor, called, self._concurrency, is_manual=is_manual)
        refuse_deferred(processor, called)
        self._methods.run("initialize", lambda: self._initialize(processor, context))

    def _initialize(
        self, processor: type[RecordProcessor] | RecordProcessor, context: Context
    ) -> None:
        # A half-initialised instance cannot be used: each attempt has one of its own.
        self._processor = processor() if isinstance(processor, type) else processor
        self.run.processors[:] = [self._processor]
        self.run.calls.append(Call("initialize"))
        if fires_timers(self._processor):
            state = self.ledger.state
            self._timers = MemoryTimers(
                state.run_timers(context.position, self.times),
                self.ledger,
                self._methods,
                call=lambda timer: self._call("on_timer", timer),
                is_released=lambda: self.run.released,
                wall_until=state.timing.wall_until,
            )
        call_method(self._processor, "initialize", context)
        if self._is_single:
            self._single = self._make_single(context)

    def _make_single(self, context: Context) -> MemoryRecords:
        concurrency = self._concurrency or Concurrency()
        return MemoryRecords(
            CallTerms(self._processor, context, concurrency, self._policy, self._decoding),
            make_runner=self._make_runner,
            places=self.ledger,
            given_up=self.run.given_up.append,
            note_error=self._note_error,
            called=self._note_call,
            is_released=lambda: self.run.released,
            ends=self._ends,
        )

    def make_context(
        self,
        lease: ClaimedLease,
        options: Any,
        schemas: Mapping[str, RowSchema],
    ) -> Context:
        """The context of a processor in this life."""
        several = self._concurrency
        has_order = several is None or several.keeps_keys_in_order
        return Context(
            lease=lease,
            options=options,
            checkpoint=self._checkpoint,
            rows=self.ledger,
            release=self.release,
            state=self.ledger.state.live if has_order else NoState(NO_ORDER),
            times=self.times,
            watermark=self._watermark,
            schemas=schemas,
        )

    def _event_time(self, record: Record) -> float:
        return self._processor.event_time(record)

    def _watermark(self) -> float | None:
        return None if self._timers is None else self._timers.run.watermark

    def _note_error(self, words: str) -> None:
        self.run.last_error = words

    def _note_call(self) -> None:
        self.run.calls.append(Call("process_record", 1))
        self.run.delivered += 1

    def _deliver(self, records: list[Record]) -> None:
        """Deliver all records, in batches within every limit, until the end or a release."""
        given = 0
        while given < len(records) and not self.run.released:
            batch = records[given : given + self._next_size()]
            if self._timers is not None:
                batch = self._timers.before(batch)
            self._process(batch)
            if self._timers is not None:
                self._timers.after(batch)
            self.run.row_counts.append(self.ledger.lengths())
            given += len(batch)
            if not self._is_single:
                self._ends.given(given)
            if self._mode == "batch":
                self._checkpoint_processed()
        self._ends.all_given()
        if self._timers is not None and not self.run.released:
            self._timers.end()

    def _end(self, *, end_of_shard: bool) -> None:
        """The shard ends, or the lease is given away."""
        if not end_of_shard or self.run.released:
            self._methods.run("shutdown_requested", lambda: self._call("shutdown_requested"))
            if self._mode != "manual":
                self._checkpoint_processed()
            return
        self._methods.run("shard_ended", lambda: self._call("shard_ended"), self.ledger, SHARD_END)
        self.ledger.delivered = SHARD_END
        self.ledger.checkpoint(SHARD_END)

    def _next_size(self) -> int:
        """The number of records that the next batch may have."""
        room = self._uncheckpointed_max - self._count_uncheckpointed()
        if room <= 0:
            if self._mode == "manual":
                raise ProcessorError(
                    f"{self._uncheckpointed_max} records without a checkpoint: the shard would"
                    " stand still; checkpoint before context.uncheckpointed_max"
                )
            self._checkpoint_processed()
            room = self._uncheckpointed_max
        most = None if self._is_single else self._ends.batch_max(self.run.delivered)
        return min(self._batch_max, room, *(() if most is None else (most,)))

    def _process(self, batch: list[Record]) -> None:
        self._uncheckpointed += [record.position for record in batch]
        self.ledger.delivered = batch[-1].position
        if self._single is not None:
            self._single.process(_Batch(batch, batch[-1].position))
            self.ledger.delivered = self.ledger.settled
            return
        self._batches.process(batch)

    def _call_batch(self, records: Sequence[Record]) -> None:
        batch = RecordBatch(records, 0, self._fencing_token, self._decoding)
        self._call("process_records", batch, records=len(records))

    def _call(self, name: str, *arguments: object, records: int = 0) -> None:
        """Call the processor once."""
        writes = _Writes(self)
        self.run.calls.append(Call(name, records))
        self.run.delivered += records
        try:
            call_method(self._processor, name, *arguments, Checkpointer(writes))
        finally:
            writes.open = False

    def write(self, position: ExtendedSequenceNumber | None) -> None:
        """Perform a `checkpoint()` of this life."""
        self._ends.checkpointing()
        part = self._batches.before_checkpoint()
        self.ledger.checkpoint(position or part or self.ledger.delivered)

    def _checkpoint_processed(self) -> None:
        self.ledger.checkpoint(self.ledger.delivered)

    def _count_uncheckpointed(self) -> int:
        at = self.ledger.position
        self._uncheckpointed = [position for position in self._uncheckpointed if position > at]
        return len(self._uncheckpointed)

    def release(self) -> None:
        """The processor gives its lease away."""
        self.run.released = True
        if self._single is not None:
            self._single.calls.wake()


class _Batch(NamedTuple):
    records: list[Record]
    last: ExtendedSequenceNumber


class _Writes:
    """The checkpointer's access to the ledger during one call. It is closed after the call."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self.open = True

    def __call__(self, position: ExtendedSequenceNumber | None) -> None:
        if not self.open:
            raise StaleCheckpoint("the call this checkpointer was handed to has returned")
        self._life.write(position)
