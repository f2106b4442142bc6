"""A RecordProcessor on a real Spark and the embedded Kinesis: its calls, its rows, its failures."""

import json
import textwrap
import uuid
from collections import defaultdict

import pytest
from pyspark.errors import StreamingQueryException

import kclrun.spark
from kclrun.aws.credentials import LOOPBACK_CREDENTIALS
from kclrun.destinations import open_letters
from kclrun.errors import SettingsError
from kclrun.local.filling import make_stream
from kclrun.model.letter import LetterDestination
from kclrun.model.wire import WireEndpoint
from kclrun.spark.running.progress import read_progress
from tests.patience import HUNG_S
from tests.spark.processor_rig import ProcessorRig

DIARY = """
import json, os, uuid
from pathlib import Path
from kclrun import RecordProcessor

class Diary(RecordProcessor):
    def initialize(self, context):
        self.context, self.name = context, uuid.uuid4().hex
        self.note("initialize", at=str(context.position))

    def note(self, call, **more):
        entry = {"instance": self.name, "shard": self.context.shard_id, "call": call}
        entry["token"] = self.context.fencing_token
        line = json.dumps({**entry, **more}).encode() + b"\\n"
        file = os.open(self.context.options["diary"], os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        os.write(file, line)  # one write: lines of several workers do not mix
        os.close(file)

    def process_records(self, batch, checkpointer):
        self.note("process_records", ids=[record.data.decode() for record in batch])
        for record in batch:
            self.context.emit({"id": int(record.data)})
            self.misbehave(str(int(record.data)))

    def misbehave(self, number):
        how = self.context.options.get("raise_at", {}).get(number)
        if how == "always" or (how and not Path(how).exists()):
            Path(how).touch() if how != "always" else None
            raise ValueError("no such order")

    def shard_ended(self, checkpointer):
        self.note("shard_ended")
        checkpointer.checkpoint()

    def lease_lost(self):
        self.note("lease_lost")
"""


class Rig(ProcessorRig):
    """Queries that run the diary over a stream."""

    code, name = DIARY, "Diary"

    def __init__(self, spark, stream, folder):
        super().__init__(spark, stream, folder)
        self.diary = folder / "diary.jsonl"

    def put(self, count):
        """Records whose data are the numbers from where the last ones ended."""
        self.stream.put(count, keys=97, size=8)

    def frame(self, *, options=None, **application):
        return super().frame(options={"diary": str(self.diary), **(options or {})}, **application)

    def entries(self):
        lines = self.diary.read_text().splitlines() if self.diary.exists() else []
        return [json.loads(line) for line in lines]

    def ids(self):
        return [int(each) for entry in self.entries() for each in entry.get("ids", ())]

    def row_ids(self):
        return sorted(each["id"] for each in self.emitted())


def by(entries, name):
    groups = defaultdict(list)
    for entry in entries:
        groups[entry[name]].append(entry)
    return groups


@pytest.mark.long
def test_every_instance_sees_a_piece_of_its_shard_in_order_and_parents_end_first(rig_of):
    rig = rig_of(2)
    query = rig.start()
    rig.put(40)
    rig.until_committed(query, 40)
    rig.stream.split("shardId-000000000000")
    for count in (80, 120):
        rig.put(40)
        rig.until_committed(query, count)

    entries = rig.entries()
    assert sorted(rig.ids()) == list(range(120))  # nothing failed, so nothing twice
    for instance in by(entries, "instance").values():
        calls = [entry["call"] for entry in instance]
        assert calls[0] == "initialize"
        assert {"initialize", "shard_ended", "lease_lost"}.isdisjoint(calls[1:-1])
        assert len({entry["shard"] for entry in instance}) == 1
    for shard in by(entries, "shard").values():
        # One after the other: whoever goes on later has the greater token.
        tokens = [entry["token"] for entry in shard if entry["call"] == "process_records"]
        assert tokens == sorted(tokens)
    calls = [(entry["shard"][-1], entry["call"]) for entry in entries]
    ended_at = calls.index(("0", "shard_ended"))
    begun_at = [calls.index((child, "initialize")) for child in "23"]
    assert ended_at < min(begun_at)
    assert rig.row_ids() == list(range(120))


def test_rows_of_a_shard_are_in_the_order_of_the_calls_and_positions_only_grow(rig_of):
    rig = rig_of(1)
    rig.put(300)
    query = rig.start()
    rig.until_committed(query, 300)

    rows = rig.rows()
    rows.sort(key=lambda row: (len(row["sequenceNumber"]), row["sequenceNumber"]))  # stable
    assert [json.loads(row["row"])["id"] for row in rows] == rig.ids()
    assert rows[0].asDict().keys() == {"shardId", "sequenceNumber", "subSequenceNumber", "row"}


@pytest.mark.slow
def test_the_progress_tells_what_was_processed_by_shard(rig_of):
    rig = rig_of(2)
    rig.put(30)
    query = rig.start()
    rig.until_committed(query, 30)

    accounts = rig.accounts(query)
    assert sum(each["rows"] for each in accounts) == 30
    assert sum(each["bytes"] for each in accounts) == 30 * 8
    # As the report of a run reads it.
    counts = defaultdict(int)
    for progress in query.recentProgress:
        batch = read_progress(json.loads(progress.json))
        for shard_id, part in batch.shards.items() if batch else ():
            counts[shard_id] += part.records
    assert counts == {
        shard_id: sum(len(entry.get("ids", ())) for entry in entries)
        for shard_id, entries in by(rig.entries(), "shard").items()
    }


def test_a_failed_task_gives_the_whole_range_again_and_its_rows_come_once(rig_of, tmp_path):
    rig = rig_of(1)
    rig.put(100)
    query = rig.start(options={"raise_at": {"50": str(tmp_path / "raised")}})
    rig.until_committed(query, 100)

    first, second = (
        [int(each) for entry in instance for each in entry.get("ids", ())]
        for instance in by(rig.entries(), "instance").values()
    )
    assert 50 in first
    assert second == list(range(100))  # from the beginning of the range
    tokens = [entry["token"] for entry in rig.entries() if entry["call"] == "initialize"]
    assert tokens[0] < tokens[1]
    assert "lease_lost" not in {entry["call"] for entry in rig.entries()}  # as after a crash
    assert rig.row_ids() == list(range(100))


@pytest.mark.long
def test_a_processor_that_raises_every_time_ends_the_query_and_says_where(rig_of):
    rig = rig_of(1)
    rig.put(10)
    query = rig.start(options={"raise_at": {"5": "always"}})
    with pytest.raises(StreamingQueryException) as caught:
        query.awaitTermination(HUNG_S)

    text = str(caught.value)
    assert "kclrun.errors.ProcessorError: process_records of" in text
    assert "raised ValueError: no such order" in text
    assert "Shard shardId-000000000000" in text
    assert "in misbehave" in text  # the place in user code
    # Spark's attempts at the task, and no more.
    assert sum(entry["call"] == "initialize" for entry in rig.entries()) == 4


@pytest.mark.slow
def test_a_processor_that_is_not_there_ends_the_query_and_says_what_was_searched(rig_of):
    rig = rig_of(1)
    rig.put(10)
    query = rig.start(processor="not_there:Orders")
    with pytest.raises(StreamingQueryException) as caught:
        query.awaitTermination(HUNG_S)

    assert "kclrun.errors.ProcessorLoadError: processor: there is no module not_there" in str(
        caught.value
    )
    assert str(rig.folder) in str(caught.value)


def test_a_restarted_query_goes_on_with_new_instances_behind_the_commit(rig_of):
    rig = rig_of(1)
    rig.put(20)
    first = rig.start(trigger={"availableNow": True})
    first.awaitTermination(HUNG_S)
    rig.put(20)
    second = rig.start(trigger={"availableNow": True})
    second.awaitTermination(HUNG_S)

    assert rig.ids() == list(range(40))
    instances = list(by(rig.entries(), "instance").values())
    assert len(instances) >= 2
    assert instances[0][0]["token"] < instances[-1][-1]["token"]


@pytest.mark.slow
def test_options_of_the_processor_stand_in_no_plan(rig_of):
    rig = rig_of(1)
    rig.put(5)
    query = rig.start(options={"password": "hunter2"})
    rig.until_committed(query, 5)

    jvm_query = query._jsq.streamingQuery()
    plans = query._jsq.explainInternal(True) + jvm_query.logicalPlan().toString()
    assert "hunter2" not in plans
    assert "kclrun-processor-app" in plans
    checkpoint = b"".join(
        path.read_bytes() for path in (rig.folder / "checkpoint").rglob("*") if path.is_file()
    )
    assert b"hunter2" not in checkpoint


def test_a_batch_read_is_refused(rig_of):
    rig = rig_of(1)
    rig.frame()  # makes the format known
    name = f"kclrun-processor-app-{rig.module}"
    reading = rig.spark.read.format(name).options(**rig.stream.options)
    with pytest.raises(Exception, match="runs on a stream only") as caught:
        reading.load().collect()
    assert SettingsError.__name__ in str(caught.value)


def test_a_processor_runs_in_a_program_of_ones_own(spark, stream, tmp_path):
    module = f"own_{uuid.uuid4().hex[:8]}"
    (tmp_path / f"{module}.py").write_text(textwrap.dedent(DIARY))
    stream.put(50, size=8)
    rows = kclrun.spark.process(
        spark,
        f"{module}:Diary",
        {**stream.options, "startingOffsets": "earliest"},
        options={"diary": str(tmp_path / "diary.jsonl")},
        paths=[tmp_path],
        settings={"fetch": {"batch_max": 20}, "on_error": {"retries": 0}},
    )
    seen = []
    writer = rows.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer = writer.trigger(availableNow=True)
    query = writer.foreachBatch(lambda batch, _: seen.extend(batch.collect())).start()

    assert query.awaitTermination(HUNG_S)
    assert query.exception() is None
    assert sorted(json.loads(row.row)["id"] for row in seen) == list(range(50))
    calls = [json.loads(line) for line in (tmp_path / "diary.jsonl").read_text().splitlines()]
    given = [len(each["ids"]) for each in calls if each["call"] == "process_records"]
    assert max(given) <= 20


SINGLE = """
import asyncio
from kclrun import RecordProcessor

class Single(RecordProcessor):
    async def process_record(self, record, context):
        number = int(record.data)
        await asyncio.sleep(0.001 * (number % 7))
        context.emit({"n": number})
"""


@pytest.mark.long
def test_records_at_the_same_time_leave_their_rows_in_order(spark, stream, tmp_path):
    module = f"single_{uuid.uuid4().hex[:8]}"
    (tmp_path / f"{module}.py").write_text(SINGLE)
    stream.put(50, size=8)
    source = {**stream.options, "startingOffsets": "earliest"}
    rows = kclrun.spark.process(
        spark,
        f"{module}:Single",
        source,
        paths=[tmp_path],
        settings={"concurrency": {"records": 16}},
    )
    seen = []
    writer = rows.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer = writer.trigger(availableNow=True)
    query = writer.foreachBatch(lambda batch, _: seen.extend(batch.collect())).start()

    assert query.awaitTermination(HUNG_S)
    assert query.exception() is None
    assert sorted(json.loads(row.row)["n"] for row in seen) == list(range(50))
    by_shard = defaultdict(list)
    for row in seen:
        by_shard[row.shardId].append(json.loads(row.row)["n"])
    assert all(numbers == sorted(numbers) for numbers in by_shard.values())


POISONED = """
from kclrun import RecordProcessor

class Poisoned(RecordProcessor):
    def initialize(self, context):
        self.emit, self.poisons = context.emit, context.options["poisons"]

    def process_records(self, batch, checkpointer):
        for record in batch:
            number = int(record.data)
            if number in self.poisons:
                raise ValueError(f"bad {number}")
            self.emit({"n": number})
"""


def test_records_that_fail_are_letters_in_a_stream_and_their_batch_goes_on(spark, stream, tmp_path):
    """Executors keep the letters themselves, before the rows of their task count."""
    module = f"poisoned_{uuid.uuid4().hex[:8]}"
    (tmp_path / f"{module}.py").write_text(POISONED)
    letters = f"letters-{uuid.uuid4().hex[:8]}"
    endpoint = WireEndpoint(stream.options["endpointUrl"], "us-east-1", "us-east-1")
    make_stream(endpoint, letters, 1)
    stream.put(60, size=8)
    rows = kclrun.spark.process(
        spark,
        f"{module}:Poisoned",
        {**stream.options, "startingOffsets": "earliest"},
        options={"poisons": [7, 41]},
        paths=[tmp_path],
        settings={
            "on_error": {"retries": 0, "then": "dead-letter", "dead_letter": {"stream": letters}}
        },
    )
    seen = []
    writer = rows.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer = writer.trigger(availableNow=True)
    query = writer.foreachBatch(lambda batch, _: seen.extend(batch.collect())).start()

    assert query.awaitTermination(HUNG_S)
    assert query.exception() is None
    numbers = sorted(json.loads(row.row)["n"] for row in seen)
    assert numbers == [number for number in range(60) if number not in {7, 41}]
    kept = open_letters(
        LetterDestination(stream=letters), endpoint, lambda: LOOPBACK_CREDENTIALS
    ).kept()
    assert sorted(int(each.letter.data) for each in kept) == [7, 41]
    observed = [each["observedMetrics"]["kclrun"] for each in query.recentProgress]
    assert sum(each["deadLetters"] or 0 for each in observed) == 2
