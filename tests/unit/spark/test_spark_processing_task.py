"""Processors over ranges, as a task of Spark runs them: the calls, the rows, the failures."""

import contextlib
import json
import sys
import textwrap

import pytest

from kclrun.errors import (
    FailedRecords,
    HaltShard,
    LimitExceeded,
    ProcessorError,
    ProcessorLoadError,
    RetryLater,
    SettingsError,
    SinkError,
)
from kclrun.model.policies import ErrorPolicy
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.outputs.dead_letters import LetterFolder
from kclrun.spark.executor.reading import ReadPage
from kclrun.spark.offsets import ShardRange
from kclrun.spark.positions import SHARD_END, TRIM_HORIZON, after
from kclrun.spark.processors import hosting as emitting
from kclrun.spark.processors.hosting import ProcessorJob
from kclrun.spark.processors.range_progress import ProcessorCache
from kclrun.spark.processors.source import process
from kclrun.spark.processors.tasks import ProcessorTask

A, B = "shardId-000000000000", "shardId-000000000001"
DIARY = """
from kclrun import RecordProcessor

class Diary(RecordProcessor):
    def initialize(self, context):
        self.context, self.plan = context, context.options
        self.tell("initialize", str(context.position))

    def tell(self, *words):
        self.plan["diary"].append((self.context.shard_id[-1], *words))

    def process_records(self, batch, checkpointer):
        numbers = [int(record.sequence_number) for record in batch]
        self.tell("process_records", *numbers)
        self.plan.get("tokens", []).append((self.context.fencing_token, batch.fencing_token))
        for number in numbers:
            self.context.emit({"n": number})
            self.plan.get("do", {}).get(number, lambda *_: None)(self, batch, checkpointer)

    def shard_ended(self, checkpointer):
        self.tell("shard_ended")
        self.context.emit({"n": "end"})
        checkpointer.checkpoint()

    def lease_lost(self):
        self.tell("lease_lost")
        self.plan.get("when_lost", lambda: None)()

    def shutdown_requested(self, checkpointer):
        self.tell("shutdown_requested")
        checkpointer.checkpoint()
"""


class World:
    """A worker process: its cache, the processor's diary, the pauses it was made to wait."""

    def __init__(self, folder, **plan):
        self.kept = ProcessorCache()
        self.pauses = []
        self.diary = []
        self.tokens = []
        self.plan = {"diary": self.diary, "tokens": self.tokens, **plan}
        self.folder = folder

    def job(
        self, *, batch_max=100, retries=0, processor="diary:Diary", then="halt", limit=100, **more
    ):
        return ProcessorJob(
            application="app",
            stream="orders",
            processor=processor,
            paths=(str(self.folder),),
            options=self.plan,
            batch_max=batch_max,
            uncheckpointed_max=1000,
            on_error=ErrorPolicy(retries, 1.0, then, None, limit),
            run="r1",
            **more,
        )

    def letters(self):
        return LetterFolder(self.folder / "letters")

    def batches(self, *pages, token=1, **job):
        """The Arrow batches of a task with these pages, as (range, numbers of the records)."""
        task = ProcessorTask(
            self.job(**job),
            token,
            kept=self.kept,
            letters=self.letters,
            registry=bytes,
            wait=self.pauses.append,
        )
        return task.run(read(pages))

    def run(self, *pages, **settings):
        """Rows, then accounts, of such a task."""
        lines = [line for batch in self.batches(*pages, **settings) for line in batch.to_pylist()]
        return (
            [line for line in lines if line["kind"] == "row"],
            [json.loads(line["row"]) for line in lines if line["kind"] == "ack"],
        )


def read(pages):
    last_of = {shard_range: index for index, (shard_range, _) in enumerate(pages)}
    for index, (shard_range, numbers) in enumerate(pages):
        records = [Record(b"secret", "key", str(number)) for number in numbers]
        yield ReadPage(shard_range, records, last_of[shard_range] == index)


def emitted(rows):
    return [json.loads(row["row"])["n"] for row in rows]


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "diary", raising=False)
    (tmp_path / "diary.py").write_text(textwrap.dedent(DIARY))
    yield World(tmp_path)
    sys.modules.pop("diary", None)


FIRST = ShardRange(A, TRIM_HORIZON, after("20"))
NEXT = ShardRange(A, after("20"), after("40"))
LAST = ShardRange(A, after("40"), SHARD_END)


def test_ranges_that_follow_each_other_are_one_tenure_up_to_the_end_of_the_shard(world):
    world.run((FIRST, [10]), (FIRST, [20]))
    world.run((NEXT, [30, 40]))
    world.run((LAST, [50]))

    assert world.diary == [
        ("0", "initialize", "TRIM_HORIZON"),
        ("0", "process_records", 10),
        ("0", "process_records", 20),
        ("0", "process_records", 30, 40),
        ("0", "process_records", 50),
        ("0", "shard_ended"),
    ]
    assert len(world.kept) == 0


def test_an_instance_that_missed_a_range_loses_its_lease_before_another_begins(world):
    world.run((FIRST, [10, 20]))
    world.run((LAST, [50]))  # NEXT went to another worker

    assert world.diary[2:] == [
        ("0", "lease_lost"),
        ("0", "initialize", "40"),
        ("0", "process_records", 50),
        ("0", "shard_ended"),
    ]


def test_a_range_given_twice_begins_anew(world):
    world.run((FIRST, [10, 20]))
    rows, _ = world.run((FIRST, [10, 20]))

    assert [entry[1] for entry in world.diary] == [
        *("initialize", "process_records", "lease_lost", "initialize", "process_records")
    ]
    assert emitted(rows) == [10, 20]


def test_shards_of_one_task_have_an_instance_each(world):
    other = ShardRange(B, TRIM_HORIZON, after("25"))
    rows, accounts = world.run((FIRST, [10]), (other, [15, 25]), (FIRST, [20]))

    assert [entry for entry in world.diary if entry[0] == "1"] == [
        ("1", "initialize", "TRIM_HORIZON"),
        ("1", "process_records", 15, 25),
    ]
    assert {(row["shardId"], json.loads(row["row"])["n"]) for row in rows} == {
        *((A, 10), (A, 20), (B, 15), (B, 25))
    }
    assert [(account["shardId"], account["records"]) for account in accounts] == [(B, 2), (A, 2)]


def test_shards_of_two_streams_have_an_instance_each_and_their_rows_say_the_stream(world):
    one, other = (f"{stream}:{A}" for stream in ("orders", "returns"))
    world.run((ShardRange(one, TRIM_HORIZON, after("2")), [1, 2]))
    rows, accounts = world.run(
        (ShardRange(one, after("2"), after("4")), [3, 4]),
        (ShardRange(other, TRIM_HORIZON, after("3")), [3]),
        token=2,
    )

    begun = [entry for entry in world.diary if entry[1] == "initialize"]
    assert len(begun) == 2, "the first goes on, the other stream's begins"
    assert [(row["stream"], row["shardId"]) for row in rows] == [
        ("orders", A),
        ("orders", A),
        ("returns", A),
    ]
    assert {each["shardId"] for each in accounts} == {one, other}


def test_a_kept_instance_has_the_token_of_its_present_task_and_a_new_account(world):
    world.run((FIRST, [10, 20, 20]), token=7)
    _, (account,) = world.run((NEXT, [30, 40]), token=9)

    assert world.tokens == [(7, 7), (9, 9)]
    assert (account["records"], account["rows"]) == (2, 2)


def fails(*_):
    raise ValueError("no such order")


def test_a_call_that_raises_fails_the_task_with_shard_and_position_and_no_payload(world):
    world.plan["do"] = {20: fails}
    with pytest.raises(ProcessorError) as caught:
        world.run((FIRST, [10, 20]))

    text = str(caught.value)
    assert text.startswith("process_records of diary:Diary raised ValueError: no such order (once)")
    assert A in text
    assert "up to 20" in text
    assert "Record: not known: one of 2, from 10 to 20\n" in text
    assert "in process_records" in text  # where in user code
    assert not [ours for ours in ("hosting.py", "delivery.py", "/processor.py") if ours in text]
    assert "secret" not in text
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("kind", ["async def", "generator"])
def test_a_processor_whose_methods_would_run_nothing_is_refused(world, kind):
    body = "yield 1" if kind == "generator" else "pass"
    text = f"{'async ' * (kind == 'async def')}def process_records(self, batch, checkpointer):"
    (world.folder / "idle.py").write_text(
        f"from diary import Diary\nclass Idle(Diary):\n    {text}\n        {body}\n"
    )

    with pytest.raises(ProcessorLoadError, match="idle:Idle: process_records"):
        world.run((FIRST, [10, 20]), processor="idle:Idle")


def test_a_failed_task_leaves_no_instance_and_calls_nothing(world):
    world.run((FIRST, [10, 20]))
    world.plan["do"] = {40: fails}
    with pytest.raises(ProcessorError):
        world.run((NEXT, [30, 40]))
    world.plan["do"] = {}
    world.run((NEXT, [30, 40]))

    assert world.diary[2:] == [
        ("0", "process_records", 30, 40),
        ("0", "initialize", "20"),
        ("0", "process_records", 30, 40),
    ]


def test_a_call_is_repeated_after_the_pauses_of_on_error_and_its_rows_come_once(world, caplog):
    failures = iter([ValueError, KeyError])

    def fail_twice(*_):
        for failure in failures:
            raise failure

    world.plan["do"] = {20: fail_twice}
    rows, _ = world.run((FIRST, [10, 20]), retries=2)

    assert emitted(rows) == [10, 20]
    assert world.pauses == [1.0, 2.0]
    assert caplog.messages[0] == f"{A}: process_records raised ValueError: ; again in 1 s"
    assert len(caplog.messages) == 2
    assert [entry for entry in world.diary if entry[1] == "process_records"] == [
        ("0", "process_records", 10, 20)
    ] * 3


def test_later_is_a_line_when_it_begins_and_one_when_it_ends(world, caplog):
    refusals = iter([RetryLater(2.0, "away")] * 3)

    def wait_thrice(*_):
        for refusal in refusals:
            raise refusal

    world.plan["do"] = {20: wait_thrice}
    rows, _ = world.run((FIRST, [10, 20]), retries=0)

    assert emitted(rows) == [10, 20]
    assert world.pauses == [2.0, 2.0, 2.0]
    began, ended = caplog.messages
    assert began == f"{A}: process_records asks to wait: RetryLater: away"
    assert ended.startswith(f"{A}: process_records waits no more, after 3 times in ")


def test_what_an_attempt_checkpointed_before_it_raised_is_not_given_again(world):
    failures = iter([ValueError])

    def checkpoint_and_fail(processor, batch, checkpointer):
        for failure in failures:
            checkpointer.checkpoint(batch[0])
            processor.context.emit({"n": "lost"})
            raise failure

    world.plan["do"] = {10: checkpoint_and_fail}
    rows, _ = world.run((FIRST, [10, 20]), retries=1)

    assert world.diary[1:] == [("0", "process_records", 10, 20), ("0", "process_records", 20)]
    assert emitted(rows) == [10, 20]


def test_a_stale_checkpoint_is_refused_into_the_processor(world):
    world.plan["do"] = {10: lambda processor, batch, checkpointer: checkpointer.checkpoint("21")}
    with pytest.raises(ProcessorError, match="StaleCheckpoint: cannot checkpoint 21"):
        world.run((FIRST, [10, 20]))


def test_a_released_instance_checkpoints_and_another_goes_on_behind_it(world):
    world.plan["do"] = {10: lambda processor, *_: processor.context.release()}
    rows, accounts = world.run((FIRST, [10, 20]), batch_max=1)

    assert world.diary == [
        ("0", "initialize", "TRIM_HORIZON"),
        ("0", "process_records", 10),
        ("0", "shutdown_requested"),
        ("0", "initialize", "10"),
        ("0", "process_records", 20),
    ]
    assert emitted(rows) == [10, 20]
    assert [(account["position"], account["records"], account["rows"]) for account in accounts] == [
        ("20", 2, 2)
    ]


def test_an_instance_released_by_the_last_batch_is_not_replaced_before_there_is_more(world):
    world.plan["do"] = {20: lambda processor, *_: processor.context.release()}
    world.run((FIRST, [10, 20]))
    world.plan["do"] = {}
    world.run((NEXT, [30]))

    assert world.diary[2:] == [
        ("0", "shutdown_requested"),
        ("0", "initialize", "20"),
        ("0", "process_records", 30),
    ]


def test_a_shard_whose_instance_left_with_the_last_record_is_ended_by_another(world):
    world.plan["do"] = {50: lambda processor, *_: processor.context.release()}
    rows, (account,) = world.run((LAST, [50]))

    assert world.diary[2:] == [
        ("0", "shutdown_requested"),
        ("0", "initialize", "50"),
        ("0", "shard_ended"),
    ]
    assert emitted(rows) == [50, "end"]
    assert (account["position"], account["records"], account["rows"]) == ("SHARD_END", 1, 2)


def test_what_lease_lost_raises_harms_nobody(world, caplog):
    world.run((FIRST, [10, 20]))
    world.plan["when_lost"] = fails
    world.run((LAST, [50]))

    assert world.diary[-1] == ("0", "shard_ended")
    assert "lease_lost raised ValueError" in caplog.text


def test_an_instance_that_makes_room_for_others_loses_its_lease(world):
    world.kept = ProcessorCache(instances_max=1)
    world.run((FIRST, [10, 20]), (ShardRange(B, TRIM_HORIZON, after("15")), [15]))

    assert world.diary[-1] == ("0", "lease_lost")


def test_a_row_that_is_no_json_is_refused_as_on_the_fleet(world):
    world.plan["do"] = {10: lambda processor, *_: processor.context.emit({"n": object()})}
    with pytest.raises(ProcessorError, match="TypeError: JSON cannot hold this row"):
        world.run((FIRST, [10, 20]))


at = ExtendedSequenceNumber


def row_of(size):
    return {"n": "x" * (size - len('{"n":""}'))}


def test_each_call_can_emit_only_so_much_and_rows_need_a_call(monkeypatch):
    monkeypatch.setattr(emitting, "CALL_BYTES_MAX", 100)
    rows = emitting.EmittedBatches(A)
    for ends in (lambda: rows.end_batch(at("1")), rows.take_back_batch) * 2:
        with pytest.raises(
            SinkError, match="process_records, on_timer and shard_ended, while they run"
        ):
            rows.emit(row_of(10))
        rows.begin_batch()
        rows.emit(row_of(60))
        rows.emit(row_of(40))
        with pytest.raises(LimitExceeded, match=r"set fetch\.batch_max lower"):
            rows.emit(row_of(8))
        ends()


# Of at most three rows and 40 bytes. By the sizes of the rows: whether they leave before the end.
@pytest.mark.parametrize(
    ("sizes", "leaves", "cut"),
    [
        ([], False, []),
        ([10, 10], False, [2]),
        ([10] * 3, True, [3]),
        ([10] * 7, True, [3, 3, 1]),
        ([20, 20], True, [2]),
        ([20, 19], False, [2]),
        ([20, 21], True, [1, 1]),
        ([50, 10], True, [1, 1]),
        ([30, 20, 20], True, [1, 2]),
    ],
)
def test_rows_leave_in_batches_of_bounded_rows_and_bytes(monkeypatch, sizes, leaves, cut):
    monkeypatch.setattr(emitting, "BATCH_ROWS_MAX", 3)
    monkeypatch.setattr(emitting, "BATCH_BYTES_MAX", 40)
    rows = emitting.EmittedBatches(A, "orders")
    for _ in range(2):
        rows.begin_batch()
        for each in sizes:
            rows.emit(row_of(each))
            rows.cover(at(str(each)))
        rows.end_batch(at("99"))
        left = list(rows.batches())
        assert bool(left) == leaves
        left = left or list(rows.batches(all_of_them=True))

        assert [each.num_rows for each in left] == cut
        numbers = [row["sequenceNumber"] for each in left for row in each.to_pylist()]
        assert numbers == list(map(str, sizes))
        assert rows.take_count() == len(sizes)
        assert rows.take_count() == 0


def test_rows_leave_while_the_task_still_reads(world):
    read_so_far = []

    def pages():
        for number in range(6):
            read_so_far.append(number)
            numbers = range(number * 10_000, number * 10_000 + 6_000)
            records = [Record(b"", "key", str(each)) for each in numbers]
            yield ReadPage(FIRST, records, number == 5)

    task = ProcessorTask(
        world.job(batch_max=10_000), 1, kept=world.kept, letters=world.letters, registry=bytes
    )
    batches = task.run(pages())
    first = next(batches)

    assert read_so_far == [0, 1]
    assert first.num_rows == emitting.BATCH_ROWS_MAX
    assert sum(batch.num_rows for batch in batches) == 36_000 - first.num_rows + 1


def test_a_processor_that_cannot_be_loaded_says_so(world):
    with pytest.raises(ProcessorLoadError, match="there is no module absent"):
        world.run((FIRST, [10]), processor="absent:Gone")


def raises(processor, batch, checkpointer):
    raise ValueError("bad record")


def letters_of(world):
    return [(each.letter.position, each.letter.error) for each in world.letters().kept()]


def given(world):
    return [call[2:] for call in world.diary if call[1] == "process_records"]


def test_a_record_at_fault_is_a_letter_and_the_rows_of_all_others_appear_once(world):
    world.plan["do"] = {12: raises}

    rows, (account,) = world.run(
        (FIRST, [10, 11, 12, 13]), (FIRST, [20]), then="dead-letter", retries=1
    )

    assert given(world) == [*[(10, 11, 12, 13)] * 2, (10, 11), (12,), (13,), (20,)]
    assert emitted(rows) == [10, 11, 13, 20]
    assert [row["sequenceNumber"] for row in rows] == ["11", "11", "13", "20"]
    assert letters_of(world) == [("12", "ValueError: bad record")]
    (kept,) = world.letters().kept()
    assert (kept.letter.stream, kept.letter.shard_id, kept.letter.data) == ("orders", A, b"secret")
    assert (kept.letter.calls, kept.letter.application) == (3, "app")
    assert (account["records"], account["deadLetters"], account["skipped"]) == (5, 1, 0)
    assert (account["position"], world.pauses) == ("20", [1.0])


def test_what_cannot_be_decoded_and_rows_that_do_not_fit_are_failures_of_their_records(world):
    def value_of_11(_, batch, __):
        return next(record for record in batch if record.sequence_number == "11").value

    def emits(processor, _, __):
        processor.context.emit({"n": "secret"})

    world.plan["do"] = {11: value_of_11, 13: emits}

    rows, (account,) = world.run(
        (FIRST, [10, 11, 12, 13, 14]), then="dead-letter", decode="json", schema="n long NOT NULL"
    )

    assert emitted(rows) == [10, 12, 14]
    malformed = "the record at 11 cannot be decoded: JSON is malformed: invalid character (byte 0)"
    misfit = "the row does not fit output.schema: column n: expected long, got str"
    assert letters_of(world) == [
        ("11", f"UndecodableRecord: {malformed}"),
        ("13", f"RowMismatch: {misfit}"),
    ]
    assert (account["deadLetters"], world.pauses) == (2, [])


def test_a_record_that_is_skipped_is_counted_and_leaves_no_letter(world):
    world.plan["do"] = {11: raises, 12: raises}

    rows, (account,) = world.run((FIRST, [10, 11, 12, 13]), then="skip")

    assert emitted(rows) == [10, 13]
    assert (account["skipped"], account["deadLetters"], letters_of(world)) == (2, 0, [])


def test_a_checkpoint_in_a_part_of_a_batch_passes_no_record_that_was_not_given(world):
    def checkpoints(processor, batch, checkpointer):
        checkpointer.checkpoint()

    def ahead(processor, batch, checkpointer):
        if len(batch) < 4:
            checkpointer.checkpoint(ExtendedSequenceNumber("13"))

    for step, number, left in ((checkpoints, 10, []), (ahead, 10, [10])):
        world.diary.clear()
        world.plan["do"] = {number: step, 12: raises}
        with contextlib.suppress(ProcessorError):
            world.run((FIRST, [10, 11, 12, 13]), then="dead-letter", token=len(left) + 1)
        reached = {number for call in given(world) for number in call}
        assert reached == {10, 11, 12, 13}
    assert {position for position, _ in letters_of(world)} >= {"12"}


def test_named_records_are_given_up_and_all_others_count_as_processed(world):
    def names_two(processor, batch, checkpointer):
        raise FailedRecords([record for record in batch if record.sequence_number in ("11", "13")])

    world.plan["do"] = {13: names_two}

    rows, (account,) = world.run((FIRST, [10, 11, 12, 13]), then="dead-letter")

    assert given(world) == [(10, 11, 12, 13)]
    assert emitted(rows) == [10, 11, 12, 13]
    assert [position for position, _ in letters_of(world)] == ["11", "13"]
    assert account["deadLetters"] == 2


def test_a_task_whose_letter_cannot_be_kept_fails(world):
    world.plan["do"] = {11: raises}
    (world.folder / "letters").write_text("not a folder")

    with pytest.raises(SinkError, match="cannot keep the dead letter"):
        world.run((FIRST, [10, 11, 12]), then="dead-letter")
    assert len(world.kept) == 0


@pytest.mark.parametrize(
    ("error", "more", "words"),
    [
        (ValueError("away"), {}, "looks like an outage"),
        (MemoryError(), {}, "MemoryError"),
        (HaltShard("the account is closed"), {}, "the account is closed"),
    ],
)
def test_what_is_not_a_records_fault_fails_the_task_and_gives_nothing_up(world, error, more, words):
    def fails(processor, batch, checkpointer):
        raise error

    world.plan["do"] = dict.fromkeys(range(1, 20), fails)

    with pytest.raises(ProcessorError, match=words):
        world.run((FIRST, list(range(1, 20))), then="dead-letter", **more)
    assert letters_of(world) == []


def test_an_output_that_the_source_names_is_refused_before_a_stream_of_rows_is_made(
    tmp_path, monkeypatch
):
    code = DIARY.replace('self.context.emit({"n": number})', 'self.context.emit({}, to="late")')
    (tmp_path / "diary_of_names.py").write_text(code)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "diary_of_names", raising=False)

    with pytest.raises(SettingsError, match=r"diary_of_names\.py:\d+: .*there is no outputs\.late"):
        process(None, "diary_of_names:Diary", {"streamName": "s"}, paths=[tmp_path])


def test_a_row_for_another_output_is_refused_in_the_task_in_the_words_of_the_fleet():
    rows = emitting.EmittedBatches(A)
    rows.begin_batch()

    with pytest.raises(SettingsError, match=r"there is no outputs\.late in the settings") as said:
        rows.emit({"n": 1}, to="late")
    assert "on Spark rows go to one DataFrame" in str(said.value)
