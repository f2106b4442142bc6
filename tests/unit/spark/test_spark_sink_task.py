"""A task of the sink over a stream of the pure model: when it is done, and what it tells."""

from types import SimpleNamespace

import pyarrow as pa
import pytest

from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.model.record import IteratorType
from kclrun.model.time import WallTime
from kclrun.spark.options import Reached, SinkSettings
from kclrun.spark.sink import writers as task
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
        iterator = stream.iterator(shard.shard_id, IteratorType.TRIM_HORIZON)
        found += [record.data for record in stream.fetch(iterator, 10_000).records]
    return sorted(found)


def batch(*data):
    keys = [each.decode() for each in data]
    return pa.RecordBatch.from_pydict({"data": pa.array(data), "partitionKey": pa.array(keys)})


def test_a_task_ends_once_all_rows_of_all_its_batches_are_in_the_stream(stream):
    settings = SinkSettings(reached=Reached(stream="s"))
    batches = [batch(b"1", b"2"), batch(b"3")]

    told = task.put_partition(settings, stream.list_shards(), iter(batches))

    assert read(stream) == [b"1", b"2", b"3"]
    assert (told.rows, told.records) == (3, 3)
