"""Run a processor in a test: the calls, checks and crashes that it will meet in production.

`calling/in_memory/` runs it; here are the records, the crashes and the warnings of a test.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Unpack

import msgspec

from kclrun.calling.in_memory.life import Life, Run
from kclrun.calling.in_memory.records import inline_runner
from kclrun.calling.in_memory.states import Ledger, MemoryState, Timing
from kclrun.codec.values import Decode, decoder_of_type, decoding, is_value_type
from kclrun.errors import ProcessorLoadError
from kclrun.loading import decoded_options, load_decoding
from kclrun.model.lease import ClaimedLease
from kclrun.model.output import MAIN_OUTPUT, setting_of
from kclrun.model.policies import CheckpointPolicy, Concurrency, ErrorPolicy
from kclrun.model.record import Decoding, Record
from kclrun.model.row_schema import RowSchema
from kclrun.processor import (
    Context,
    RecordProcessor,
)
from kclrun.testing.crashes import Crash, Crashes
from kclrun.testing.plans import Claim, Faults, Plan, Replaced, SettingsLike, plan_of
from kclrun.testing.record_runs import SeededRunners
from kclrun.testing.records import RecordLike, make_records
from kclrun.testing.traps import warn_of_times, warn_of_unused_time


def run_processor(
    processor: type[RecordProcessor] | RecordProcessor,
    records: Iterable[RecordLike],
    *,
    settings: SettingsLike | None = None,
    faults: Faults | None = None,
    claim: Claim | None = None,
    end_of_shard: bool = True,
    wall_until: float | None = None,
    **replaced: Unpack[Replaced],
) -> Run:
    """Run a processor over the records of one shard, as the runtime would.

    `settings` are those of the application: a mapping, the text of a YAML file, or `Settings`. They
    are checked as `kclrun --config` checks them; a test writes the part that counts for it, such
    as `settings={"checkpoint": {"every": "batch"}, "fetch": {"batch_max": 2}}`. `faults` are
    crashes, and the order in which calls return that run at the same time. `claim` is what the
    lease has at the start: position, state, timers.

    With `checkpoint.every: batch` a checkpoint is written after each batch; with a duration only
    where the runtime must (at the end, and before `uncheckpointed_max` is exceeded); with `manual`
    only the processor writes them. After the last record the shard ends, or, with
    `end_of_shard=False`, the lease is given away. A call that raises is repeated `on_error.retries`
    times (0 where a test does not say), with its rows taken back and without the records it
    checkpointed; then the error is raised to you, or as `on_error.then` says the records at fault
    are given up. As in production `shutdown_requested` is called once, `initialize` again with a
    new instance, and an error of the settings is not repeated. Emitted rows fit the `schema` of
    their output; a row for an output that the settings do not have is refused, unless they have
    none. `decode` may be a type or a function itself (for `glue` a function). Of several `streams`
    it is the one that names the class, or the first.

    Timers fire as they would in production, as `watermark` says. The test has the clock of the
    machine, and of Kinesis: it is the arrival time of the record that is given next, and goes on
    to `wall_until` (seconds since the epoch) behind the last one. Between two records the shard is
    read to its end. A record without an arrival of its own arrives at the end of tomorrow, and one
    more each second: see `make_records`. An `event_time` of after the arrival counts as the
    arrival, as in production, and is an EventTimeWarning.

    A `process_record` gets the records one by one, or as `concurrency` says: `faults.seed` says in
    which order the calls return. `async def` runs in a time of its own, in which a sleep takes no
    time; with `seed=None` in real time. After a crash no further method is called.

    `replaced` are keywords of before kclrun 1.0, such as `checkpoint="batch"`. Each works until
    2.0, with a DeprecationWarning that says what to write instead.

    Raises: the errors of the processor; SettingsError for settings that are wrong, and for a row
    to an output that they do not have; StaleCheckpoint into the processor, as in production;
    ProcessorLoadError for a method that is `async def` or a generator; ProcessorError if under
    `manual` it never checkpoints.

    >>> from kclrun import RecordProcessor
    >>> class Shout(RecordProcessor):
    ...     def initialize(self, context):
    ...         self.emit = context.emit
    ...     def process_records(self, batch, checkpointer):
    ...         for record in batch:
    ...             self.emit({"text": record.data.decode().upper()})
    >>> run = run_processor(Shout, ["a", "b", "c"], settings={"fetch": {"batch_max": 2}})
    >>> run.rows
    [{'text': 'A'}, {'text': 'B'}, {'text': 'C'}]
    >>> [call.name for call in run.calls]
    ['initialize', 'process_records', 'process_records', 'shard_ended']
    >>> str(run.position)
    'SHARD_END'
    """
    plan = plan_of(
        processor,
        settings=settings,
        faults=faults,
        claim=claim,
        end_of_shard=end_of_shard,
        wall_until=wall_until,
        **replaced,
    )
    return run_planned(processor, records, plan)


def run_planned(
    processor: type[RecordProcessor] | RecordProcessor, records: Iterable[RecordLike], plan: Plan
) -> Run:
    """As `run_processor`, from what its arguments mean."""
    at_once = plan.concurrency
    life = Life(
        Ledger(
            plan.position,
            MemoryState(
                Timing(plan.lateness_s, plan.every_s, plan.wall_until, plan.idle_s),
                plan.state,
                plan.after,
            ),
            plan.outputs,
        ),
        _decoding(processor, plan.decode),
        concurrency=None if at_once is None else Concurrency(at_once, plan.order, plan.timeout_s),
        checkpoint=CheckpointPolicy(
            mode=plan.checkpoint, uncheckpointed_max=plan.uncheckpointed_max
        ),
        batch_max=plan.batch_max,
        policy=ErrorPolicy(plan.retries, 0.0, plan.then),
        make_runner=inline_runner if plan.seed is None else SeededRunners(plan.seed),
        ends=Crashes(plan.crash_after, plan.crash_at_checkpoint),
    )
    made = make_records(records, first_arrival_s=plan.first_arrival_s)
    context = _context(processor, plan, life)
    return _lived(life, processor, context, made, end_of_shard=plan.end_of_shard)


def _context(processor: type[RecordProcessor] | RecordProcessor, plan: Plan, life: Life) -> Context:
    return life.make_context(
        ClaimedLease(
            application=plan.application,
            stream=plan.stream,
            shard_id=plan.shard_id,
            key=plan.shard_id,
            position=plan.position,
            fencing_token=plan.fencing_token,
        ),
        decoded_options(_class_of(processor), plan.options or {}),
        _schemas(plan.schema),
    )


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
    processor: type[RecordProcessor] | RecordProcessor,
    records: Iterable[RecordLike],
    *,
    settings: SettingsLike | None = None,
    faults: Faults | None = None,
    claim: Claim | None = None,
    end_of_shard: bool = True,
    wall_until: float | None = None,
    **replaced: Unpack[Replaced],
) -> Run:
    """Run, crash as `faults` says, and run again from the last checkpoint with a new instance.

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
    >>> small = {"checkpoint": {"every": "batch"}, "fetch": {"batch_max": 1}}
    >>> run = replay(Echo, ["a", "b", "c"], settings=small, faults=Faults(crash_after=2))
    >>> run.rows, run.delivered
    ([{'text': 'a'}, {'text': 'b'}, {'text': 'c'}], 4)

    Raises: ValueError when the crash never came.
    """
    plan = plan_of(
        processor,
        settings=settings,
        faults=faults,
        claim=claim,
        end_of_shard=end_of_shard,
        wall_until=wall_until,
        **replaced,
    )
    return replay_planned(processor, records, plan)


def replay_planned(
    processor: type[RecordProcessor] | RecordProcessor, records: Iterable[RecordLike], plan: Plan
) -> Run:
    """As `replay`, from what its arguments mean."""
    kept = list(make_records(records, first_arrival_s=plan.first_arrival_s))
    first = run_planned(processor, kept, plan)
    if not first.crashed:
        raise ValueError("the crash never came: fewer records or checkpoints than that")
    from_checkpoint = msgspec.structs.replace(
        plan,
        position=first.position,
        state=first.state,
        after=first,
        fencing_token=plan.fencing_token + 1,
        crash_after=None,
        crash_at_checkpoint=None,
    )
    return _joined(first, run_planned(processor, kept, from_checkpoint))


def _joined(first: Run, second: Run) -> Run:
    """Two lives of a processor as one run."""
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
