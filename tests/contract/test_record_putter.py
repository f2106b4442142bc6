"""One contract for writing, over the pure model and over the wire to its HTTP face; and the
producer with its threads on the latter, under the service's limits.
"""

import itertools
import time
from collections.abc import Sequence

import msgspec
import pytest

from kclrun.aws.kinesis import PollingReader, WireStreamAdmin
from kclrun.aws.operations import Operation
from kclrun.aws.put_records import WirePutter
from kclrun.aws.wire import WireClient
from kclrun.codec.kpl import open_aggregates
from kclrun.errors import InvalidRequest, NotFound, Throttled, Unavailable
from kclrun.local.limits import AWS_LIMITS
from kclrun.local.server import start_embedded
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.model.record import IteratorType, PutEntry, PutResult, Record, StartPoint
from kclrun.model.time import WallTime
from kclrun.model.wire import WireCredentials, WireEndpoint
from kclrun.ports import RecordPutter, ShardReader, StreamAdmin
from kclrun.producing.flow_control import ProducerSettings
from kclrun.producing.kinesis_producer import KinesisProducer
from tests.support.stream_ports import ModelStream

HIGH = str(2**128 - 1)


class Subject:
    """A stream of two shards, to write, to read and to list."""

    def __init__(self, putter: RecordPutter, reader: ShardReader, admin: StreamAdmin) -> None:
        self.put = putter.put
        self.putter = putter
        self.reader = reader
        self.shards = admin.list_shards

    def read(self, shard_id: str) -> list[Record]:
        iterator: str | None = self.reader.iterator(shard_id, StartPoint(IteratorType.TRIM_HORIZON))
        records: list[Record] = []
        while iterator is not None:
            try:
                page = self.reader.fetch(iterator, 10_000)
            except Throttled:
                time.sleep(0.2)  # five reads a second
                continue
            records += page.records
            iterator = None if page.millis_behind_latest == 0 else page.next_iterator
        return list(open_aggregates(records))


def model_subject(name: str) -> Subject:
    kinesis = Kinesis(KinesisSettings(limits=AWS_LIMITS), b"contract suite".ljust(32))
    kinesis.create_stream("made", 2, WallTime(time.time()))
    stream = ModelStream(kinesis, name, lambda: WallTime(time.time()))
    return Subject(stream, stream, stream)


@pytest.fixture(scope="module")
def client():
    with start_embedded(limits=True) as embedded:
        endpoint = WireEndpoint(embedded.kinesis_endpoint, "eu-west-1", "eu-west-1")
        made = WireClient(endpoint, lambda: WireCredentials("a", "b"), service="kinesis")
        yield made
        made.close()


def create(client: WireClient, name: str, shards: int) -> None:
    operation = Operation("kinesis", "CreateStream", is_write=True)
    client.call(operation, msgspec.json.encode({"StreamName": name, "ShardCount": shards}))


def wire_subject(client: WireClient, name: str) -> Subject:
    return Subject(
        WirePutter(client, name), PollingReader(client, name), WireStreamAdmin(client, name)
    )


@pytest.fixture(params=["model", "wire"])
def make(request):
    """Makes a subject for a name; `made` is a stream, new for each test."""
    if request.param == "model":
        return model_subject
    client = request.getfixturevalue("client")
    stream = f"contract-{request.node.name}".replace("[", "-").replace("]", "")
    create(client, stream, 2)
    return lambda name: wire_subject(client, stream if name == "made" else name)


def test_a_result_for_each_record_in_order_and_an_explicit_hash_key_wins(make):
    subject = make("made")
    first, second = (shard.shard_id for shard in subject.shards())

    results = subject.put([PutEntry(b"0", "k", "0"), PutEntry(b"1", "k", HIGH)])

    assert [(result.shard_id, result.error_code) for result in results] == [
        (first, None),
        (second, None),
    ]
    read = subject.read(second)
    assert [(record.data, record.partition_key) for record in read] == [(b"1", "k")]
    assert read[0].sequence_number == results[1].sequence_number


def test_a_refused_record_is_a_result_and_the_others_are_taken(make):
    subject = make("made")
    first, second = (shard.shard_id for shard in subject.shards())
    large = [PutEntry(b"x" * 600_000, "k", "0") for _ in range(3)]

    results = subject.put([*large, PutEntry(b"small", "k", HIGH)])

    refused = "ProvisionedThroughputExceededException"
    assert [result.error_code for result in results] == [None, refused, refused, None]
    assert [result.shard_id for result in results] == [first, None, None, second]
    assert len(subject.read(first)) == 1


def test_what_is_wrong_for_good_is_an_error_for_the_whole_request(make):
    with pytest.raises(InvalidRequest):
        make("made").put([PutEntry(b"fine", "k"), PutEntry(b"x" * 2**20, "k")])
    with pytest.raises(NotFound):
        make("no-such-stream").put([PutEntry(b"", "k")])


def test_nobody_there_is_unavailable():
    endpoint = WireEndpoint("http://127.0.0.1:9", "eu-west-1", "eu-west-1")
    nobody = WireClient(endpoint, lambda: WireCredentials("a", "b"), service="kinesis")

    with pytest.raises(Unavailable):
        WirePutter(nobody, "s").put([PutEntry(b"", "k")])


class Refusing:
    """A putter whose service refuses the first record of each fifth of the first 25 requests, on
    any machine. More would slow shards down to ten records each ten seconds, as they should."""

    def __init__(self, putter: RecordPutter) -> None:
        self._putter = putter
        self._requests = itertools.count()

    def put(self, entries: Sequence[PutEntry]) -> tuple[PutResult, ...]:
        number = next(self._requests)
        if number % 5 or number >= 25:
            return self._putter.put(entries)
        refused = PutResult(error_code="ProvisionedThroughputExceededException")
        return (refused, *(self._putter.put(entries[1:]) if entries[1:] else ()))


@pytest.mark.parametrize("mode", ["ordered", "aggregates", "unordered"])
def test_a_producer_with_several_requests_under_way_loses_nothing_and_keeps_the_order(client, mode):
    """Some records are refused: more of them where the machine outruns the shards."""
    create(client, f"threads-{mode}", 4)
    subject = wire_subject(client, f"threads-{mode}")
    settings = ProducerSettings(keeps_order=mode != "unordered", aggregates=mode == "aggregates")
    count = 12_000 if mode == "aggregates" else 7_000
    producer = KinesisProducer(
        Refusing(subject.putter), subject.shards(), settings, relist=subject.shards
    )
    for number in range(count):
        producer.add(PutEntry(b"%d" % number, f"key{number % 400}"))
    producer.flush()
    producer.close()

    metrics = producer.metrics()
    records = [record for shard in subject.shards() for record in subject.read(shard.shard_id)]
    assert metrics.user_records == count
    assert sorted(int(record.data) for record in records) == list(range(count))
    assert metrics.refused_records > 0
    if mode == "unordered":
        return
    last: dict[str, int] = {}
    for record in records:
        assert int(record.data) > last.get(record.partition_key, -1)
        last[record.partition_key] = int(record.data)
