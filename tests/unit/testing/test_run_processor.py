"""run_processor and replay: the contract of the runtime, in a unit test."""

from typing import Any

import msgspec
import pytest

from kclrun import (
    Checkpointer,
    Context,
    ExtendedSequenceNumber,
    Record,
    RecordBatch,
    RecordContext,
    RecordProcessor,
)
from kclrun.config.schema import Settings
from kclrun.errors import (
    FailedRecords,
    ProcessorError,
    ProcessorLoadError,
    SettingsError,
    SinkError,
    StaleCheckpoint,
    UndecodableRecord,
)
from kclrun.testing import (
    Call,
    Faults,
    make_aggregate,
    make_record,
    make_records,
    replay,
    run_processor,
)
from kclrun.testing.plans import plan_of

TRIM_HORIZON = ExtendedSequenceNumber("TRIM_HORIZON")
SHARD_END = ExtendedSequenceNumber("SHARD_END")


class Echo(RecordProcessor):
    def initialize(self, context: Context) -> None:
        self.context = context

    def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
        for record in batch:
            self.context.emit({"text": record.data.decode()})


class Manual(Echo):
    """Checkpoints after every second record."""

    def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
        for record in batch:
            self.context.emit({"text": record.data.decode()})
            if record.data in b"bdf":
                checkpointer.checkpoint(record)


def texts(rows: list[dict[str, Any]]) -> str:
    return "".join(row["text"] for row in rows)


def position_of(ordinal: int) -> ExtendedSequenceNumber:
    return make_record(ordinal=ordinal).position


def test_without_arguments_a_run_is_as_an_application_that_sets_nothing():
    settings = Settings(application="orders", stream="orders")
    run = run_processor(Echo, "ab")
    plan = plan_of(Echo)

    assert plan.batch_max == settings.fetch.batch_max
    assert plan.uncheckpointed_max == settings.checkpoint.uncheckpointed_max
    assert (plan.checkpoint, plan.retries, plan.then) == ("auto", 0, "halt")
    (processor,) = run.processors
    context = processor.context
    assert context.uncheckpointed_max == settings.checkpoint.uncheckpointed_max
    assert (context.fencing_token, context.position, context.options) == (1, TRIM_HORIZON, {})
    assert (context.shard_id, context.lease_key) == ("shardId-000000000000",) * 2
    assert (run.crashed, run.released, run.delivered) == (False, False, 2)


@pytest.mark.parametrize(
    ("section", "wrong"), [("fetch", "batch_max"), ("checkpoint", "uncheckpointed_max")]
)
def test_a_limit_below_one_is_refused(section, wrong):
    with pytest.raises(SettingsError, match=f"{section}.{wrong}: expected a whole number"):
        run_processor(Echo, "ab", settings={section: {wrong: 0}})
    with (
        pytest.warns(DeprecationWarning, match=wrong),
        pytest.raises(ValueError, match="at least 1"),
    ):
        run_processor(Echo, "ab", **{wrong: 0})
    assert texts(run_processor(Echo, "ab", settings={section: {wrong: 1}}).rows) == "ab"


def test_the_life_after_a_crash_has_the_next_fencing_token():
    tokens = []

    class Notes(Echo):
        def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
            tokens.append((self.context.fencing_token, batch.fencing_token))
            assert batch.millis_behind_latest == 0

    run = replay(Notes, "ab", faults=Faults(crash_after=1))

    assert tokens == [(1, 1), (2, 2)]
    assert run.delivered == 3, "one of them twice"


def test_a_row_is_refused_after_a_call_that_raised():
    class Fails(Echo):
        def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
            raise OSError("gone")

    processor = Fails()

    with pytest.raises(OSError, match="gone"):
        run_processor(processor, "a")
    with pytest.raises(SinkError, match="while they run"):
        processor.context.emit({"text": "too late"})


def test_auto_checkpoints_before_the_cap_stops_the_shard():
    run = run_processor(
        Echo,
        "abcdefgh",
        settings={"fetch": {"batch_max": 2}, "checkpoint": {"uncheckpointed_max": 3}},
        end_of_shard=False,
    )

    assert [call.records for call in run.calls[1:-1]] == [2, 1, 2, 1, 2]
    assert run.checkpoints == [position_of(2), position_of(5), position_of(7)]


def test_a_manual_processor_that_never_checkpoints_stands_still_at_the_cap():
    with pytest.raises(ProcessorError, match="3 records without a checkpoint"):
        run_processor(
            Echo, "abcde", settings={"checkpoint": {"uncheckpointed_max": 3, "every": "manual"}}
        )


@pytest.mark.parametrize(("asked", "words"), [(0, "below the last"), (9, "above what was")])
def test_a_checkpoint_out_of_bounds_is_stale(asked, words):
    class Asks(Echo):
        def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
            checkpointer.checkpoint(batch[1])
            checkpointer.checkpoint(batch[1])  # an equal one is no error
            checkpointer.checkpoint(make_record(ordinal=asked))

    with pytest.raises(StaleCheckpoint, match=words):
        run_processor(Asks, "abc")


def test_a_checkpointer_is_of_no_use_after_its_call():
    class Keeps(Echo):
        kept: Checkpointer | None = None

        def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
            if self.kept is not None:
                self.kept.checkpoint()
            self.kept = checkpointer

    with pytest.raises(StaleCheckpoint, match="has returned"):
        run_processor(Keeps, "ab", settings={"fetch": {"batch_max": 1}})


@pytest.mark.parametrize("error", [OSError("gone for a moment"), FailedRecords([])])
def test_shard_ended_is_called_again_when_it_raised(error):
    class Stumbles(Echo):
        stumbled = False

        def shard_ended(self, checkpointer: Checkpointer) -> None:
            self.context.emit({"text": "."})
            if not self.stumbled:
                self.stumbled = True
                raise error

    run = run_processor(Stumbles, "ab", settings={"on_error": {"retries": 1}})

    assert texts(run.rows) == "ab."
    assert [call.name for call in run.calls].count("shard_ended") == 2


def test_records_given_again_do_not_put_the_crash_off():
    failures = [OSError("gone for a moment")]

    class Stumbles(Echo):
        def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
            if failures:
                raise failures.pop()

    run = run_processor(
        Stumbles,
        "abcdef",
        settings={"on_error": {"retries": 1}, "fetch": {"batch_max": 2}},
        faults=Faults(crash_after=3),
    )

    assert run.crashed
    assert [call.records for call in run.calls[1:]] == [2, 2, 1]


def test_initialize_is_called_again_on_an_instance_of_its_own():
    failures = [OSError("not yet")]

    class Stumbles(Echo):
        def initialize(self, context: Context) -> None:
            super().initialize(context)
            if failures:
                raise failures.pop()

    run = run_processor(Stumbles, "ab", settings={"on_error": {"retries": 1}})

    assert texts(run.rows) == "ab"
    assert [call.name for call in run.calls].count("initialize") == 2
    assert len(run.processors) == 1


@pytest.mark.parametrize(
    ("method", "error"),
    [("shutdown_requested", OSError("gone")), ("process_records", SettingsError("repair it"))],
)
def test_what_production_does_not_repeat_is_not_repeated(method, error):
    calls = []

    def fails(*_: object) -> None:
        calls.append(method)
        raise error

    processor = type("Fails", (Echo,), {method: fails})

    with pytest.raises(type(error)):
        run_processor(processor, "ab", settings={"on_error": {"retries": 3}}, end_of_shard=False)
    assert calls == [method]


@pytest.mark.parametrize("method", ["initialize", "shutdown_requested"])
def test_a_row_is_refused_outside_the_calls_that_may_emit(method):
    def emits(self: Echo, given: Context | Checkpointer) -> None:
        if isinstance(given, Context):
            Echo.initialize(self, given)
        self.context.emit({"text": "too early, or too late"})

    processor = type("Emits", (Echo,), {method: emits})

    with pytest.raises(SinkError, match="while they run"):
        run_processor(processor, "ab", end_of_shard=False)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_crash_inside_a_checkpoint_leaves_each_row_once(nth):
    run = replay(
        Manual,
        "abcdef",
        settings={"checkpoint": {"every": "manual"}},
        faults=Faults(crash_at_checkpoint=nth),
    )

    assert texts(run.rows) == "abcdef"
    assert len(run.processors) == 2


def test_a_crash_takes_uncovered_rows_with_it():
    run = run_processor(
        Manual, "abc", settings={"checkpoint": {"every": "manual"}}, faults=Faults(crash_after=3)
    )

    assert run.crashed
    assert texts(run.rows) == "ab"
    assert run.position == position_of(1)
    assert run.calls[-1] == Call("process_records", 3)


def test_a_replay_whose_crash_never_came_is_no_proof():
    with pytest.raises(ValueError, match="never came"):
        replay(Echo, "ab", faults=Faults(crash_after=3))


def test_a_released_lease_gets_no_further_batch():
    class LetsGo(Echo):
        def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
            super().process_records(batch, checkpointer)
            self.context.release()

    run = run_processor(LetsGo, "abc", settings={"fetch": {"batch_max": 1}})

    assert run.released
    assert run.position == position_of(0)
    assert run.calls[-1] == Call("shutdown_requested")


def test_a_row_that_json_cannot_hold_is_refused_as_in_production():
    class Emits(Echo):
        def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
            self.context.emit({"value": object()})

    with pytest.raises(TypeError):
        run_processor(Emits, "a")


class Order(msgspec.Struct):
    n: int


class Orders(RecordProcessor):
    decode_as = Order

    def initialize(self, context: Context) -> None:
        self.context = context

    def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
        for record in batch:
            self.context.emit(record.value)


ORDERS = ['{"n": 1}', '{"n": "SECRET"}', '{"n": 300}', '{"n": 4}']


def test_values_are_decoded_and_rows_checked_as_in_production():
    run = run_processor(
        Orders,
        ORDERS,
        settings={
            "on_error": {"then": "dead-letter"},
            "output": {"schema": "n byte NOT NULL, m string"},
        },
    )

    assert run.rows == [{"n": 1, "m": None}, {"n": 4, "m": None}]
    assert [record.data for record in run.given_up] == [b'{"n": "SECRET"}', b'{"n": 300}']
    column = "column n: a number outside the range of byte"
    assert run.last_error == f"RowMismatch: the row does not fit output.schema: {column}"
    with pytest.raises(UndecodableRecord, match=r"Expected `int`, got `str` - at `\$.n`$"):
        run_processor(Orders, ORDERS[1:], settings={"on_error": {"retries": 9}})


@pytest.mark.parametrize("decode", ["json", dict[str, int], lambda data: {"n": int(data[6:-1])}])
def test_a_test_names_a_decoder_by_a_word_a_type_or_a_function(decode):
    assert run_processor(Orders, [ORDERS[0]], settings={"decode": decode}).rows == [{"n": 1}]


def test_a_test_asks_no_schema_registry():
    with pytest.raises(ProcessorLoadError, match="decode: glue asks AWS"):
        run_processor(Orders, [], settings={"decode": "glue"})


def test_user_records_of_an_aggregate_share_a_number():
    records = make_aggregate(["a", "b"], ordinal=3)
    run = run_processor(
        Echo, [*records, make_record("c", ordinal=4)], settings={"fetch": {"batch_max": 1}}
    )

    assert [r.sub_sequence_number for r in records] == [0, 1]
    single = make_record(ordinal=3)
    assert make_aggregate(["a"])[0].position == make_record().position
    assert records[1].sequence_number == single.sequence_number
    assert records[1].approximate_arrival_timestamp == single.approximate_arrival_timestamp
    assert all(r.aggregated and r.sequence_number == records[0].sequence_number for r in records)
    assert texts(run.rows) == "abc"


def test_nothing_else_can_be_made_a_record():
    with pytest.raises(TypeError, match="int"):
        list(make_records([3]))


class Asynchronous(Echo):
    async def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None: ...


class Returning(Echo):
    def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> Any:
        return self.context.options["result"]


async def work() -> None: ...


def generated() -> Any:
    yield


@pytest.mark.parametrize("processor", [Asynchronous, Asynchronous()], ids=["class", "instance"])
def test_a_method_that_is_async_is_refused_before_the_first_call(processor):
    with pytest.raises(ProcessorLoadError, match="process_records is `async def`"):
        run_processor(processor, "abc")


@pytest.mark.parametrize("make", [work, generated], ids=["coroutine", "generator"])
def test_a_method_that_returns_work_to_be_done_fails_and_checkpoints_nothing(make):
    result = make()
    name = f"process_records returned a {type(result).__name__}, "

    with pytest.raises(ProcessorLoadError, match=name):
        run_processor(Returning, "abc", settings={"options": {"result": result}})


class SinglesReturning(RecordProcessor):
    def process_record(self, record: Record, context: RecordContext) -> Any:
        return frozenset()


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (Returning, r"process_records returned a dict, which kclrun drops"),
        (SinglesReturning, r"process_record returned a frozenset, which kclrun drops"),
    ],
)
def test_a_value_that_a_method_returns_is_dropped_with_one_warning(processor, words):
    with pytest.warns(UserWarning, match=words) as caught:
        run = run_processor(
            processor,
            "abc",
            settings={"fetch": {"batch_max": 1}, "options": {"result": {"row": 1}}},
        )

    assert len(caught) == 1
    assert run.position == SHARD_END
