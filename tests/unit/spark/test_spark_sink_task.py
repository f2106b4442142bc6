"""A task of the sink over a stream of the pure model: when it is done, and what it tells."""

import logging
import sys
from collections import OrderedDict
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from kclrun.errors import SettingsError
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.model.record import IteratorType, StartPoint
from kclrun.model.time import WallTime
from kclrun.spark.options import SinkSettings, StreamAddress
from kclrun.spark.sink import writers as task
from kclrun.spark.sink.report import TaskReport
from kclrun.spark.sink.writers import TaskDone
from tests.support.stream_ports import ModelStream


@pytest.fixture
def stream(monkeypatch):
    kinesis = Kinesis(KinesisSettings(), b"a task of the sink".ljust(32))
    kinesis.create_stream("s", 2, WallTime(1_700_000_000.0))
    made = ModelStream(kinesis, "s", lambda: WallTime(1_700_000_010.0))
    monkeypatch.setattr(task, "connected", lambda _: SimpleNamespace(client=None))
    monkeypatch.setattr(task, "WirePutter", lambda *_: made)
    return made


def read(stream):
    found = []
    for shard in stream.list_shards():
        iterator = stream.iterator(shard.shard_id, StartPoint(IteratorType.TRIM_HORIZON))
        found += [record.data for record in stream.fetch(iterator, 10_000).records]
    return sorted(found)


def batch(*data):
    keys = [each.decode() for each in data]
    return pa.RecordBatch.from_pydict({"data": pa.array(data), "partitionKey": pa.array(keys)})


def test_a_task_ends_once_all_rows_of_all_its_batches_are_in_the_stream(stream, monkeypatch):
    settings = SinkSettings(address=StreamAddress(stream="s"))
    batches = [batch(b"1", b"2"), batch(b"3")]
    closed, close = [], task.KinesisProducer.close
    monkeypatch.setattr(task.KinesisProducer, "close", lambda made: closed.append(close(made)))

    reported = task.put_partition(settings, stream.list_shards(), iter(batches))

    assert read(stream) == [b"1", b"2", b"3"]
    assert (reported.rows, reported.records) == (3, 3)
    assert closed == [None]


def report(rows=1, refused=0):
    return TaskReport(
        rows=rows,
        records=rows,
        bytes=rows,
        requests=2,
        full_requests=1,
        refused_records=refused,
        failed_requests=0,
        pause_max_s=0.5,
        recovery_max_s=2.0,
    )


def writer(kind, name="s"):
    return kind(SinkSettings(address=StreamAddress(stream=name)), ())


def test_a_slowdown_is_a_warning_and_its_end_a_line_of_its_own(monkeypatch, caplog):
    monkeypatch.setattr(task, "_SLOWED", task._Slowed())
    caplog.set_level(logging.DEBUG, "kclrun.spark.sink.writers")
    for batch_id, refused in enumerate((0, 3, 3, 0, 0)):
        messages = [TaskDone(report(refused=refused)), None]
        writer(task._StreamWriter).commit(messages, batch_id)
        writer(task._StreamWriter, "other").commit([TaskDone(report())], batch_id)

    reported = [(each.levelname, each.message.partition(":")[0]) for each in caplog.records]
    assert [each for each in reported if each[0] != "DEBUG"] == [
        ("WARNING", "stream s, batch 1"),
        ("INFO", "stream s, batch 3"),
    ]
    assert sum(each.levelname == "DEBUG" for each in caplog.records) == 10


def test_at_most_sixteen_slowed_streams_are_remembered_and_the_oldest_goes_first(
    monkeypatch, caplog
):
    monkeypatch.setattr(task, "_SLOWED", task._Slowed())
    for number in range(17):
        writer(task._BatchWriter, f"s{number}").commit([TaskDone(report(refused=1))])
    caplog.clear()
    for number in (1, 16, 0):
        writer(task._BatchWriter, f"s{number}").commit([TaskDone(report(refused=1))])

    assert [each.message.partition(":")[0] for each in caplog.records] == ["stream s0, batch write"]
    assert len(task._SLOWED._streams) == 16


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [(task._BatchWriter, (), "batch write"), (task._StreamWriter, (7,), "batch 7")],
)
def test_a_batch_that_failed_tells_which_rows_are_in_the_stream(caplog, kind, arguments, words):
    writer(kind).abort([TaskDone(report(rows=2)), None, TaskDone(report(rows=3))], *arguments)

    (line,) = caplog.messages
    assert line.startswith(f"stream s, {words}: failed: 2 of 3 tasks had finished, their 5 rows")


def test_the_pace_of_sixteen_streams_is_kept_from_task_to_task(monkeypatch):
    monkeypatch.setattr(task, "_FLOWS", OrderedDict())
    flows = [task._flow(StreamAddress(stream=f"s{number}")) for number in range(16)]
    assert task._flow(StreamAddress(stream="s0")) is flows[0]
    task._flow(StreamAddress(stream="s16"))

    assert task._flow(StreamAddress(stream="s0")) is flows[0], "it was used since"
    assert task._flow(StreamAddress(stream="s2")) is flows[2]
    assert task._flow(StreamAddress(stream="s1")) is not flows[1]


@pytest.mark.parametrize("made", [task.batch_writer, task.stream_writer])
def test_a_stream_is_not_overwritten(made):
    with pytest.raises(SettingsError, match=r"cannot\s+be overwritten"):
        made({}, None, overwrite=True)


def test_a_commit_does_not_list_the_stream(monkeypatch, stream):
    schema = StructType().add("data", "binary").add("partitionKey", "string")
    listed = []
    monkeypatch.setattr(task, "open_shards", lambda reached: listed.append(reached) or ("shard",))
    options = {"streamName": "s"}

    assert task.batch_writer(options, schema, overwrite=False)._shards == ("shard",)
    assert task.stream_writer(options, schema, overwrite=False)._shards == ("shard",)
    monkeypatch.setitem(sys.modules, task._COMMITTING, SimpleNamespace())
    assert task.stream_writer(options, schema, overwrite=False)._shards == ()
    assert len(listed) == 2
    with pytest.raises(SettingsError, match="does not know the column 'x'"):
        task.batch_writer(options, schema.add("x", "string"), overwrite=False)
