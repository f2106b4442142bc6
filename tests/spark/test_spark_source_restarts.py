"""A2: a batch is a function of its offsets: replays, restarts, second looks give the same rows."""

import json
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException

from tests.patience import HUNG_S
from tests.spark.source_rig import ACCESS_KEY, SECRET_KEY, as_put, in_order_of_each_key, until

pytestmark = pytest.mark.slow


def keys_of(rows):
    return [(row.shardId, row.sequenceNumber, row.subSequenceNumber) for row in rows]


def failing_once(run, batch):
    """The query fails after that batch was read, before it is committed."""

    def fail(number):
        if number == batch and len([each for each, _ in run.batches if each == batch]) == 1:
            raise RuntimeError("a sink that is down")

    run.before_commit = fail
    query = run.start()
    with pytest.raises(StreamingQueryException, match="a sink that is down"):
        query.awaitTermination(HUNG_S)


@pytest.mark.parametrize("starts", ["earliest", "latest"])
def test_the_first_batch_is_read_again_as_it_was_although_more_has_arrived(
    collected, stream, starts
):
    stream.put(40)
    run = collected(stream, startingOffsets=starts)

    failing_once(run, 0)
    stream.put(40)
    run.run_until(80 if starts == "earliest" else 40)

    first, again = (keys_of(rows) for number, rows in run.batches if number == 0)
    assert first == again
    expected = stream.put_records if starts == "earliest" else stream.put_records[40:]
    assert as_put(run.rows) == in_order_of_each_key(expected)


def test_a_restarted_query_goes_on_where_the_last_commit_was(collected, stream_of):
    stream = stream_of(2)
    stream.put(30)
    run = collected(stream)

    run.run_until(30)
    stream.put(30)
    stream.split(stream.open_shards()[0])  # while nobody reads
    stream.put(30)
    run.run_until(90)
    failing_batch = max(number for number, _ in run.batches) + 1
    stream.put(30)
    failing_once(run, failing_batch)
    run.before_commit = lambda number: None
    stream.put(30)
    run.run_until(150)

    assert as_put(run.rows) == in_order_of_each_key(stream.put_records)
    replayed = [keys_of(rows) for number, rows in run.batches if number == failing_batch]
    assert len(replayed) == 2
    # Shards come in any order, the rows of each in its own; sorting is stable.
    by_shard = [sorted(rows, key=lambda row: row[0]) for rows in replayed]
    assert by_shard[0] == by_shard[1]


def test_two_actions_on_one_batch_read_the_same_rows(collected, stream, tmp_path):
    stream.put(50)
    looks = []

    def twice(frame, number):
        looks.append(keys_of(frame.collect()))
        stream.put(10)  # arrives between the two
        looks.append(keys_of(frame.collect()))

    run = collected(stream)
    query = (
        run.frame()
        .writeStream.option("checkpointLocation", str(tmp_path / "twice"))
        .foreachBatch(twice)
        .start()
    )
    until(lambda: len(looks) >= 4, "two batches", query)
    query.stop()

    assert looks[0] == looks[1]
    assert looks[2] == looks[3]
    assert not set(looks[0]) & set(looks[2])


def test_available_now_reads_what_is_there_and_ends(collected, stream):
    stream.put(100)
    stream.split(stream.open_shards()[0])
    stream.put(100)
    run = collected(stream, maxRecordsPerTrigger="50")

    query = run.start(availableNow=True)
    assert query.awaitTermination(HUNG_S)
    stream.put(100)
    later = run.start(availableNow=True)
    assert later.awaitTermination(HUNG_S)

    assert as_put(run.rows) == in_order_of_each_key(stream.put_records)


def test_once_reads_all_that_is_there_in_one_batch(collected, stream):
    stream.put(300)
    run = collected(stream, maxRecordsPerTrigger="50")

    query = run.start(once=True)
    assert query.awaitTermination(HUNG_S)

    assert [len(rows) for _, rows in run.batches if rows] == [300]


def test_a_failed_task_is_tried_again_and_its_rows_come_once(spark, stream_of, tmp_path):
    stream = stream_of(2)
    stream.put(60)
    marks = tmp_path / "marks"
    marks.mkdir()

    def fail_once(batches):
        for batch in batches:
            mark = marks / batch.column("shardId")[0].as_py()
            if not mark.exists():
                mark.touch()
                raise RuntimeError("an executor that lost its disk")
            yield batch

    rows = spark.read.format("kclrun").options(**stream.options, shardsPerTask="1").load()
    got = rows.select("shardId", "sequenceNumber").mapInArrow(
        fail_once, "shardId string, sequenceNumber string"
    )

    assert got.distinct().count() == 60
    assert len(list(marks.iterdir())) == 2


def test_nothing_secret_stands_in_the_plan_or_the_checkpoint(collected, stream, capsys):
    stream.put(10)
    run = collected(stream)
    query = run.start()
    until(lambda: len(run.rows) == 10, "the rows", query)

    query.explain(extended=True)
    run.frame().explain(mode="extended")
    reported = capsys.readouterr().out
    query.stop()

    files = [each for each in Path(run.checkpoint).rglob("*") if each.is_file()]
    assert len(files) >= 3
    texts = [each.read_bytes() for each in files] + [reported.encode()]
    assert "kclrun" in reported
    for secret in (ACCESS_KEY, SECRET_KEY, "00000009"):
        assert all(secret.encode() not in text for text in texts), secret


def test_a_checkpoint_names_its_stream_and_real_records(collected, stream):
    stream.put(10)
    run = collected(stream)
    run.run_until(10)

    text = (Path(run.checkpoint) / "offsets" / "0").read_text().splitlines()[-1]
    offset = json.loads(text)
    assert offset["stream"].endswith(f":stream/{stream.name}")
    assert offset["shards"]["shardId-000000000000"].lstrip("@") in {
        row.sequenceNumber for row in run.rows
    }
