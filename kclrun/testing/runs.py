"""Run a processor in a test: the calls, checks and crashes that it will meet in production.

`calling/in_memory/` runs it; here are the records, the crashes and the warnings of a test.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from kclrun.calling.in_memory.life import Life, Mode, Run
from kclrun.calling.in_memory.records import inline_runner
from kclrun.calling.in_memory.states import Ledger, MemoryState, Timing
from kclrun.codec.values import Decode, decoder_of_type, decoding, is_value_type
from kclrun.errors import ProcessorLoadError
from kclrun.loading import decoded_options, load_decoding
from kclrun.model.output import MAIN_OUTPUT, setting_of
from kclrun.model.policies import Concurrency, ErrorPolicy, Order, Then
from kclrun.model.record import Decoding, Record
from kclrun.model.row_schema import RowSchema
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.processor import (
    Context,
    RecordProcessor,
)
from kclrun.testing.crashes import Crash, Crashes
from kclrun.testing.record_runs import SeededRunners
from kclrun.testing.records import RecordLike, make_records
from kclrun.testing.traps import known_outputs, warn_of_times, warn_of_unused_time

# The defaults of `fetch.batch_max` and `checkpoint.uncheckpointed_max`.
_BATCH_MAX: Final = 10_000
_UNCHECKPOINTED_MAX: Final = 100_000


def run_processor(  # noqa: PLR0913 - public: the settings of a run, by name
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
    life = Life(
        Ledger(position, MemoryState(state, after), known_outputs(outputs, schema)),
        _decoding(processor, decode),
        concurrency=None if concurrency is None else Concurrency(concurrency, order, timeout_s),
        mode=checkpoint,
        batch_max=batch_max,
        uncheckpointed_max=uncheckpointed_max,
        policy=ErrorPolicy(retries, 0.0, then),
        timing=Timing(lateness_s, every_s, wall_until, idle_s),
        make_runner=inline_runner if seed is None else SeededRunners(seed),
        ends=Crashes(crash_after, crash_at_checkpoint),
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
    life: Life,
    processor: type[RecordProcessor] | RecordProcessor,
    context: Context,
    records: Iterable[Record],
    *,
    end_of_shard: bool,
) -> Run:
    run = life.run
    try:
        life.live(processor, context, records, end_of_shard=end_of_shard)
    except Crash:
        life.ledger.crash()
        life.note_end()
        run.crashed = True
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
