"""The source by fan-out over the wire: its consumers, several streams, and the end of a query."""

import time
import uuid

import pytest

from kclrun.aws.fan_out import StreamConsumers
from kclrun.errors import InvalidRequest, NotFound, SettingsError
from kclrun.model.quotas import CONSUMERS_DEFAULT
from kclrun.model.record import IteratorType, StartPoint
from kclrun.spark.option_reading import Use, read_source_options
from kclrun.spark.options import StreamAddress
from kclrun.spark.requests import Connected
from kclrun.spark.source import StreamReader
from kclrun.spark.subscribed import NamedConsumer
from tests.patience import HUNG_S
from tests.support.clients import client_of

pytestmark = pytest.mark.slow
FIRST = "shardId-000000000000"
HORIZON = StartPoint(IteratorType.TRIM_HORIZON)


@pytest.fixture(scope="module")
def endpoint(shared_aws):
    return shared_aws.kinesis_endpoint


@pytest.fixture
def credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")


@pytest.fixture
def kinesis(endpoint):
    return client_of("kinesis", endpoint)


@pytest.fixture
def stream(kinesis):
    """Makes a stream of one shard."""

    def make():
        name = f"s{uuid.uuid4().hex[:8]}"
        kinesis.create_stream(StreamName=name, ShardCount=1)
        return name

    return make


@pytest.fixture
def connected(endpoint, credentials):
    return lambda name: Connected(
        StreamAddress(stream=name, region="us-east-1", endpoint_url=endpoint)
    )


def consumers_of(connection):
    return StreamConsumers(connection.client, connection.admin.summary().arn)


def named(connection, name):
    return NamedConsumer(connection.client, connection.admin, name)


def test_the_first_query_registers_the_consumer_and_later_ones_find_it(stream, connected):
    connection = connected(stream())

    for _ in range(2):
        named(connection, "mine").register()

    assert [each.name for each in consumers_of(connection).listed()] == ["mine"]


def test_a_consumer_that_was_removed_is_looked_for_and_not_registered_again(stream, connected):
    connection = connected(stream())
    consumers, subscriber = consumers_of(connection), named(connection, "mine")
    subscriber.register()
    consumers.deregister(consumers.find("mine").arn)

    for _ in range(2):
        with pytest.raises(NotFound):
            subscriber.subscribe(FIRST, HORIZON)
    assert consumers.listed() == ()
    again = consumers.register("mine")
    subscriber.subscribe(FIRST, HORIZON).close()

    assert [each.arn for each in consumers.listed()] == [again.arn]


def test_a_stream_that_can_have_no_more_consumers_and_anothers_arn_are_reported_with_what_to_do(
    stream, connected
):
    connection = connected(stream())
    consumers = consumers_of(connection)
    for number in range(CONSUMERS_DEFAULT):
        consumers.register(f"c{number}")

    with pytest.raises(SettingsError, match="or read by polling:  consumerMode=polling"):
        connection.subscriber("mine")
    with pytest.raises(InvalidRequest, match="no more can be added"):  # while a query runs
        named(connection, "mine").subscribe(FIRST, HORIZON)
    another = "arn:aws:kinesis:us-east-1:123456789012:stream/another/consumer/c:1"
    with pytest.raises(SettingsError, match=r"consumerName: .* is not a consumer of stream"):
        connection.subscriber(another)


def test_each_of_several_streams_has_a_consumer_and_its_records_are_pushed(
    kinesis, stream, endpoint, credentials, connected
):
    names = sorted([stream(), stream()])
    options = {
        "streamName": ",".join(names),
        "endpointUrl": endpoint,
        "region": "us-east-1",
        "startingOffsets": "earliest",
        "consumerMode": "fan-out",
        "consumerName": "both",
        "pollInterval": "1m",
    }
    reader = StreamReader(read_source_options(options, Use.STREAM))
    deadline = time.monotonic() + HUNG_S
    at = reader.initialOffset()
    while reader.reportLatestOffset().get("shardsSubscribed") != 2:
        assert time.monotonic() < deadline
        at = reader.latestOffset(at)

    found = []
    for name in names:
        kinesis.put_record(StreamName=name, PartitionKey="k", Data=name.encode())
    while len(found) < 2:
        assert time.monotonic() < deadline
        end = reader.latestOffset(at)
        for task in reader.partitions(at, end) if end != at else ():
            for each in task.ranges:
                found += [(each.shard_id, row.data) for row in each.hint.rows or ()]
        at = end
    reader.stop()

    assert sorted(found) == [(f"{name}:{FIRST}", name.encode()) for name in names]
    for name in names:
        assert [each.name for each in consumers_of(connected(name)).listed()] == ["both"]
