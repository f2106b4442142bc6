"""Run a processor in a test: the calls, checks and crashes that it will meet in production.

User code gets exactly the guarantees of the contracts of `kclrun.processor`, and calls that they
forbid are refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeVar

from kclrun.calling.method_checks import NO_ORDER, require_fit
from kclrun.calling.records import CallTerms
from kclrun.codec.values import Decode, decoder_of_type, decoding, is_value_type
from kclrun.errors import ProcessorError, ProcessorLoadError, StaleCheckpoint
from kclrun.loading import decoded_options, load_decoding
from kclrun.model.output import MAIN_OUTPUT, setting_of
from kclrun.model.policies import Concurrency, ErrorPolicy, Order, Then
from kclrun.model.record import Decoding, Record, RecordBatch
from kclrun.model.row_schema import RowSchema
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.processor import (
    Checkpointer,
    Context,
    RecordProcessor,
    call_method,
    fires_timers,
    refuse_deferred,
)
from kclrun.state.event_times import EventTimes
from kclrun.state.timers import Step, Timer
from kclrun.testing.batch_runs import BatchKit
from kclrun.testing.crashes import Crash
from kclrun.testing.method_runs import MethodKit, TimerKit
from kclrun.testing.record_runs import RecordKit
from kclrun.testing.records import RecordLike, make_records
from kclrun.testing.states import Ledger, TestedState, Timing
from kclrun.testing.traps import known_outputs, warn_of_times, warn_of_unused_time

Mode = Literal["auto", "batch", "manual"]
Returned = TypeVar("Returned")

# The defaults of `fetch.batch_max` and `checkpoint.uncheckpointed_max`.
_BATCH_MAX: Final = 10_000
_UNCHECKPOINTED_MAX: Final = 100_000


class Call(NamedTuple):
    """One call of the processor: its name, and the number of records in it."""

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


def run_processor(
    processor: type[RecordProcessor] | RecordProcessor,
    records: Iterable[RecordLike],
    *,
    options: Mapping[str, Any] | None = None,
    checkpoint: Mode = "auto",
    batch_max: int = _BATCH_MAX,
    uncheckpointed_max: int = _UNCHECKPOINTED_MAX,
    end_of_shard: bool = True,
    retries: int = 0,
    then: Then = "halt",
    position: ExtendedSequenceNumber = TRIM_HORIZON,
    application: str = "test",
    stream: str = "test",
    shard_id: str = "shardId-000000000000",
    fencing_token: int = 1,
    crash_after: int | None = None,
    crash_at_checkpoint: int | None = None,
    decode: str | type | Decode | None = None,
    schema: str | Mapping[str, str] | None = None,
    concurrency: int | None = None,
    order: Order = "key",
    timeout_s: float | None = None,
    seed: int | None = 0,
    state: Mapping[str, Mapping[str, Any]] | None = None,
    after: Run | None = None,
    lateness_s: float = 10.0,
    every_s: float = 1.0,
    wall_until: float | None = None,
    idle_s: float | None = None,
    outputs: Iterable[str] | None = None,
    first_arrival_s: float | None = None,
) -> Run:
    """Run a processor over the records of one shard, as the runtime would.

    Records at or below `position` are dropped. `checkpoint` is the setting of the same name:
    `batch` writes one after each batch; `auto` only where the runtime must (at the end, and before
    `uncheckpointed_max` is exceeded); with `manual` only the processor does. After the last record
    the shard ends, or, with `end_of_shard=False`, the lease is given away. A call that raises is
    repeated `retries` times, with its rows taken back and without the records it checkpointed; then
    the error is raised to you, or with `then` as in `on_error.then` the records at fault are given
    up. As in production `shutdown_requested` is called once, `initialize` again with a new
    instance, and an error of the settings is not repeated. `schema` is `output.schema`, or a schema
    for each output by its name; `outputs` are the names in the setting `outputs`: a row for another
    name is refused, as in production; left out, every name has rows. `decode` is the setting, or a
    type or a function itself (for `glue` a function); without it `decode_as`. `state` is what
    `context.state` holds at first, as key → name → value; so are timers and watermark `after`
    another run.

    Timers fire as they would in production, with `watermark: {lateness, every, idle}` as
    `lateness_s`, `every_s` and `idle_s`. The test has the clock of the machine, and of Kinesis: it
    is the arrival time of the record that is given next, and goes on to `wall_until` (seconds since
    the epoch) behind the last one. Between two records the shard is read to its end. A record
    without an arrival of its own arrives at the end of tomorrow, and one more each second, or from
    `first_arrival_s` on: see `make_records`. An `event_time` of after the arrival counts as the
    arrival, as in production, and is an EventTimeWarning.

    A `process_record` gets the records one by one, or with `concurrency` (and `order`, `timeout_s`)
    as the setting does: the `seed` says in which order the calls return. `async def` runs in a time
    of its own, in which a sleep takes no time; with `seed=None` in real time.

    `crash_after` ends the process after so many records (calls, of a `process_record`), when the
    last call has returned and nothing is checkpointed for it. `crash_at_checkpoint=n` ends it in
    the n-th call of `checkpoint()`, before it is written. No further method is called then.

    Raises: the errors of the processor; SettingsError for a row to an output that `outputs` does
    not name; StaleCheckpoint into the processor, as in production; ProcessorLoadError for a method
    that is `async def` or a generator; ProcessorError if under `manual` it never checkpoints.

    >>> from kclrun import RecordProcessor
    >>> class Shout(RecordProcessor):
    ...     def initialize(self, context):
    ...         self.emit = context.emit
    ...     def process_records(self, batch, checkpointer):
    ...         for record in batch:
    ...             self.emit({"text": record.data.decode().upper()})
    >>> run = run_processor(Shout, ["a", "b", "c"], batch_max=2)
    >>> run.rows
    [{'text': 'A'}, {'text': 'B'}, {'text': 'C'}]
    >>> [call.name for call in run.calls]
    ['initialize', 'process_records', 'process_records', 'shard_ended']
    >>> str(run.position)
    'SHARD_END'
    """
    life = _Life(
        Ledger(position, TestedState(state, after), known_outputs(outputs, schema)),
        _decoding(processor, decode),
        concurrency=None if concurrency is None else Concurrency(concurrency, order, timeout_s),
        seed=seed,
        mode=checkpoint,
        batch_max=batch_max,
        uncheckpointed_max=uncheckpointed_max,
        policy=ErrorPolicy(retries, 0.0, then),
        crashes=_Crashes(crash_after, crash_at_checkpoint),
        timing=Timing(lateness_s, every_s, wall_until, idle_s),
    )
    context = Context(
        application=application,
        stream=stream,
        shard_id=shard_id,
        lease_key=shard_id,
        position=position,
        options=decoded_options(_class_of(processor), options or {}),
        fencing_token=fencing_token,
        uncheckpointed_max=uncheckpointed_max,
        checkpoint_mode=checkpoint,
        **life.given,
        schemas=_schemas(schema),
    )
    records = make_records(records, first_arrival_s=first_arrival_s)
    return _lived(life, processor, context, records, end_of_shard=end_of_shard)


def _lived(
    life: _Life,
    processor: type[RecordProcessor] | RecordProcessor,
    context: Context,
    records: Iterable[Record],
    *,
    end_of_shard: bool,
) -> Run:
    run, ledger = life.run, life.ledger
    try:
        life.start(processor, context)
        life.deliver([record for record in records if record.position > context.position])
        life.end(end_of_shard=end_of_shard)
    except Crash:
        ledger.crash()
        run.crashed = True
    finally:
        life.close()
        run.position, run.state = ledger.position, ledger.state.values()
        run.timers, run.watermark = ledger.state.timers(), ledger.state.watermark
        run.late, run.ahead = life.times.late, life.times.ahead
    warn_of_times(life.times, run.watermark)
    warn_of_unused_time(processor)
    return run


def replay(
    processor: type[RecordProcessor],
    records: Iterable[RecordLike],
    *,
    crash_after: int | None = None,
    crash_at_checkpoint: int | None = None,
    position: ExtendedSequenceNumber = TRIM_HORIZON,
    first_arrival_s: float | None = None,
    **settings: Any,
) -> Run:
    """Run, crash, and run again from the last checkpoint with a new instance.

    The rows of the result are those left at the end: the rows of the first life that a checkpoint
    covers, and those of the second life. Compare them, and any other output of the processor, with
    an undisturbed `run_processor`. The other arguments are those of `run_processor`.

    >>> from kclrun import RecordProcessor
    >>> class Echo(RecordProcessor):
    ...     def initialize(self, context):
    ...         self.emit = context.emit
    ...     def process_records(self, batch, checkpointer):
    ...         for record in batch:
    ...             self.emit({"text": record.data.decode()})
    >>> run = replay(Echo, ["a", "b", "c"], crash_after=2, batch_max=1, checkpoint="batch")
    >>> run.rows, run.delivered
    ([{'text': 'a'}, {'text': 'b'}, {'text': 'c'}], 4)

    Raises: ValueError when the crash never came.
    """
    kept = list(make_records(records, first_arrival_s=first_arrival_s))
    first = run_processor(
        processor,
        kept,
        position=position,
        crash_after=crash_after,
        crash_at_checkpoint=crash_at_checkpoint,
        **settings,
    )
    if not first.crashed:
        raise ValueError("the crash never came: fewer records or checkpoints than that")
    second = run_processor(
        processor,
        kept,
        position=first.position,
        **{"fencing_token": 2, **settings, "state": first.state, "after": first},
    )
    names = first.outputs | second.outputs
    outputs = {name: first.outputs.get(name, []) + second.outputs.get(name, []) for name in names}
    return Run(
        rows=outputs[MAIN_OUTPUT],
        outputs=outputs,
        state=second.state,
        timers=second.timers,
        watermark=second.watermark,
        late=first.late + second.late,
        ahead=first.ahead + second.ahead,
        checkpoints=first.checkpoints + second.checkpoints,
        position=second.position,
        calls=first.calls + second.calls,
        delivered=first.delivered + second.delivered,
        released=second.released,
        given_up=first.given_up + second.given_up,
        last_error=second.last_error or first.last_error,
        processors=first.processors + second.processors,
    )


def _decoding(
    processor: type[RecordProcessor] | RecordProcessor, decode: str | type | Decode | None
) -> Decoding | None:
    """Modules are looked for where the test itself finds them."""
    if decode is not None and not isinstance(decode, str):
        return decoding(decoder_of_type(decode) if is_value_type(decode) else decode)
    return load_decoding(decode, _class_of(processor), [], _no_registry)


def _class_of(processor: type[RecordProcessor] | RecordProcessor) -> type[RecordProcessor]:
    return processor if isinstance(processor, type) else type(processor)


def _no_registry() -> Decode:
    raise ProcessorLoadError(
        "decode: glue asks AWS, which a test of a processor does not: give `decode` a function"
    )


def _schemas(schema: str | Mapping[str, str] | None) -> Mapping[str, RowSchema]:
    named = {MAIN_OUTPUT: schema} if isinstance(schema, str) else schema or {}
    return {name: RowSchema.parse(text, setting_of(name)) for name, text in named.items()}


class _Crashes(NamedTuple):
    """Where the process ends: after so many records, and in which call of `checkpoint()`."""

    after: int | None
    at_checkpoint: int | None


class _Life:
    """One processor instance from `initialize` to its end."""

    def __init__(
        self,
        ledger: Ledger,
        decoding: Decoding | None,
        *,
        concurrency: Concurrency | None,
        seed: int | None,
        mode: Mode,
        batch_max: int,
        uncheckpointed_max: int,
        policy: ErrorPolicy,
        crashes: _Crashes,
        timing: Timing,
    ) -> None:
        if batch_max < 1 or uncheckpointed_max < 1:
            raise ValueError("batch_max and uncheckpointed_max are at least 1")
        self.run = Run(ledger.rows, ledger.checkpoints, ledger.position, outputs=ledger.outputs)
        self.ledger = ledger
        self._mode = mode
        self._batch_max = batch_max
        self._uncheckpointed_max = uncheckpointed_max
        self._policy = policy
        self._batches = BatchKit(
            policy,
            ledger,
            call=self._call_batch,
            given_up=self.run.given_up.append,
            note_error=self._note_error,
        )
        self._methods = MethodKit(policy, ledger).calls
        self._decoding = decoding
        self._concurrency = concurrency
        self._seed = seed
        self._kit: RecordKit | None = None
        self._timing = timing
        self._timers: TimerKit | None = None
        # Each attempt of `initialize` has an instance of its own.
        self.times = EventTimes(self._event_time)
        self._returned = 0
        self._crash_after, self._crash_at_checkpoint = crashes
        self._checkpoint_calls = itertools.count(1)
        self._uncheckpointed: list[ExtendedSequenceNumber] = []

    def start(
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
            timing = self._timing
            self._timers = TimerKit(
                self.ledger.state.run_timers(context.position, timing, self.times),
                self.ledger,
                self._methods,
                call=lambda timer: self._call("on_timer", timer),
                is_released=lambda: self.run.released,
                wall_until=timing.wall_until,
            )
        call_method(self._processor, "initialize", context)
        if self._is_single:
            self._kit = self._make_kit(context)

    def _make_kit(self, context: Context) -> RecordKit:
        concurrency = self._concurrency or Concurrency()
        return RecordKit(
            CallTerms(self._processor, context, concurrency, self._policy, self._decoding),
            seed=self._seed,
            places=self.ledger,
            given_up=self.run.given_up.append,
            note_error=self._note_error,
            called=self._note_call,
            returned=self._note_returned,
            is_released=lambda: self.run.released,
        )

    @property
    def given(self) -> dict[str, Any]:
        """Its part of a context."""
        several = self._concurrency
        ours: dict[str, Any] = {
            "release": self.release,
            "watermark": self._watermark,
            "times": self.times,
        }
        if several is not None and not several.keeps_keys_in_order:
            ours |= {"entries": None, "no_state": NO_ORDER}
        return self.ledger.given | ours

    def _event_time(self, record: Record) -> float:
        return self._processor.event_time(record)

    def _watermark(self) -> float | None:
        return None if self._timers is None else self._timers.run.watermark

    def _note_error(self, words: str) -> None:
        self.run.last_error = words

    def _note_call(self) -> None:
        self.run.calls.append(Call("process_record", 1))
        self.run.delivered += 1

    def _note_returned(self) -> None:
        self._returned += 1
        if self._returned == self._crash_after:
            raise Crash

    def close(self) -> None:
        """The run is over."""
        if self._kit is not None:
            self._kit.calls.close()

    def deliver(self, records: list[Record]) -> None:
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
            is_given = self._crash_after is not None and given >= self._crash_after
            if is_given and not self._is_single:
                raise Crash
            if self._mode == "batch":
                self._checkpoint_processed()
        if self._crash_after == 0:
            raise Crash
        if self._timers is not None and not self.run.released:
            self._timers.end()

    def end(self, *, end_of_shard: bool) -> None:
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
        size = min(self._batch_max, room)
        if self._crash_after is not None and not self._is_single:
            size = min(size, max(1, self._crash_after - self.run.delivered))
        return size

    def _process(self, batch: list[Record]) -> None:
        self._uncheckpointed += [record.position for record in batch]
        self.ledger.delivered = batch[-1].position
        if self._kit is not None:
            self._kit.process(_Batch(batch, batch[-1].position))
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
        if next(self._checkpoint_calls) == self._crash_at_checkpoint:
            raise Crash
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
        if self._kit is not None:
            self._kit.calls.wake()


class _Batch(NamedTuple):
    records: list[Record]
    last: ExtendedSequenceNumber


class _Writes:
    """The checkpointer's access to the ledger during one call. It is closed after the call."""

    def __init__(self, life: _Life) -> None:
        self._life = life
        self.open = True

    def __call__(self, position: ExtendedSequenceNumber | None) -> None:
        if not self.open:
            raise StaleCheckpoint("the call this checkpointer was handed to has returned")
        self._life.write(position)
