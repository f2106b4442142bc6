"""One contract for subscriptions, over the pure model and over the wire to its HTTP face, there by
a consumer's ARN and by its name."""

import time
import uuid

import pytest

from kclrun.aws.fan_out import FanOutReader, StreamConsumers
from kclrun.aws.kinesis import WireStreamAdmin
from kclrun.aws.wire import WireClient
from kclrun.errors import InvalidRequest, NotFound, Unavailable
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.local.stream import PutEntry
from kclrun.model.quotas import RESUBSCRIBE_AFTER_S
from kclrun.model.reading import FetchedPage
from kclrun.model.record import IteratorType, StartPoint
from kclrun.model.time import WallTime
from kclrun.model.wire import WireCredentials, WireEndpoint
from kclrun.ports import ShardSubscriber, Subscription
from kclrun.spark.subscribed import NamedConsumer
from tests.patience import HUNG_S
from tests.support.clients import ONCE, client_of
from tests.support.stream_ports import ModelSubscriber

SHARD = "shardId-000000000000"
BEGINNING = StartPoint(IteratorType.TRIM_HORIZON)
MIDDLE = 2**127


class Model:
    """The model, in a time of its own."""

    def __init__(self) -> None:
        self._at = WallTime(1_700_000_000.0)
        self._kinesis = Kinesis(KinesisSettings(), b"contract suite".ljust(32))
        self._kinesis.create_stream("s", 1, self._at)
        self.subscriber: ShardSubscriber = ModelSubscriber(self._kinesis, "s", self._now)

    def _now(self) -> WallTime:
        self._at = WallTime(self._at + 0.001)
        return self._at

    def wait(self, pause_s: float) -> None:
        self._at = WallTime(self._at + pause_s)

    def put(self, data: bytes) -> str:
        stream = self._kinesis.stream("s", None, self._now())
        return self._kinesis.put(stream, PutEntry(data, "k"), self._now()).sequence_number

    def split(self) -> None:
        stream = self._kinesis.stream("s", None, self._now())
        self._kinesis.split_shard(stream, SHARD, MIDDLE, self._now())

    def remove_consumer(self) -> None:
        stream = self._kinesis.stream("s", None, self._now())
        consumers = self._kinesis.consumers_of(stream)
        consumers.deregister(consumers.consumer("test", None))


class Http:
    """The embedded Kinesis, in real time; written by stock boto3."""

    wait = staticmethod(time.sleep)

    def __init__(self, endpoint: str) -> None:
        self._name = f"contract-{uuid.uuid4().hex[:12]}"
        self._boto = client_of("kinesis", endpoint, "eu-west-1", config=ONCE)
        self._boto.create_stream(StreamName=self._name, ShardCount=1)
        summary = self._boto.describe_stream_summary(StreamName=self._name)
        wire = WireEndpoint(endpoint, "eu-west-1", "eu-west-1")
        client = WireClient(wire, lambda: WireCredentials("a", "b"), service="kinesis")
        arn = summary["StreamDescriptionSummary"]["StreamARN"]
        self._consumers = StreamConsumers(client, arn)
        self._consumer = self._consumers.register("test")
        self.subscriber: ShardSubscriber = FanOutReader(client, self._consumer.arn)
        self.by_name = NamedConsumer(client, WireStreamAdmin(client, self._name), "test")

    def put(self, data: bytes) -> str:
        result = self._boto.put_record(StreamName=self._name, Data=data, PartitionKey="k")
        return str(result["SequenceNumber"])

    def split(self) -> None:
        self._boto.split_shard(
            StreamName=self._name, ShardToSplit=SHARD, NewStartingHashKey=str(MIDDLE)
        )

    def remove_consumer(self) -> None:
        self._consumers.deregister(self._consumer.arn)

    def close(self) -> None:
        self._boto.close()


@pytest.fixture(
    params=[
        "model",
        pytest.param("http", marks=pytest.mark.slow),
        pytest.param("by name", marks=pytest.mark.slow),
    ]
)
def service(request):
    if request.param == "model":
        yield Model()
        return
    subject = Http(request.getfixturevalue("aws").kinesis_endpoint)
    if request.param == "by name":
        subject.subscriber = subject.by_name
    yield subject
    subject.close()


@pytest.fixture
def subscribe(service):
    opened: list[Subscription] = []

    def open_one(start: StartPoint = BEGINNING, shard: str = SHARD) -> Subscription:
        opened.append(service.subscriber.subscribe(shard, start))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


def next_page(subscription: Subscription) -> FetchedPage:
    page = subscription.next_page(HUNG_S)
    assert page is not None
    return page


def payloads(subscription: Subscription, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        found += [record.data for record in next_page(subscription).records]
    return found


def read_to_the_end(subscription: Subscription) -> None:
    while not subscription.is_over:
        subscription.next_page(HUNG_S)


def test_records_from_before_and_after_its_beginning_come_in_order(service, subscribe):
    service.put(b"1")
    subscription = subscribe()

    assert payloads(subscription, 1) == [b"1"]
    service.put(b"2")
    service.put(b"3")
    assert payloads(subscription, 2) == [b"2", b"3"]


@pytest.mark.parametrize("first", [(b"1",), ()], ids=["with a record", "an empty shard"])
def test_the_next_subscription_goes_on_after_the_continuation_of_the_last_event(
    service, subscribe, first
):
    for data in first:
        service.put(data)
    former = subscribe()
    page = next_page(former)
    assert (len(page.records), page.is_end) == (len(first), False)
    assert page.continuation is not None
    former.close()
    service.put(b"2")
    service.wait(RESUBSCRIBE_AFTER_S)

    later = subscribe(StartPoint(IteratorType.AFTER_SEQUENCE_NUMBER, page.continuation))

    assert payloads(later, 1) == [b"2"]


def test_a_closed_shard_ends_with_its_children(service, subscribe):
    service.put(b"1")
    service.split()
    subscription = subscribe()

    pages = [next_page(subscription)]
    while not pages[-1].is_end:
        pages.append(next_page(subscription))

    assert [record.data for page in pages for record in page.records] == [b"1"]
    assert [child.parents for child in pages[-1].children] == [(SHARD,), (SHARD,)]
    assert subscription.next_page(HUNG_S) is None
    assert subscription.is_over


def test_a_second_subscription_is_refused_for_five_seconds_and_takes_over_then(service, subscribe):
    former = subscribe()
    next_page(former)
    with pytest.raises(Unavailable) as refused:
        subscribe()
    assert refused.value.code == "ResourceInUseException"
    service.wait(RESUBSCRIBE_AFTER_S)

    service.put(b"1")
    later = subscribe()

    assert payloads(later, 1) == [b"1"]
    with pytest.raises(Unavailable) as ended:
        read_to_the_end(former)
    assert ended.value.code == "ResourceInUseException"


def test_a_removed_consumer_ends_its_subscriptions_and_can_make_none(service, subscribe):
    subscription = subscribe()
    next_page(subscription)

    service.remove_consumer()

    with pytest.raises(NotFound):
        read_to_the_end(subscription)
    with pytest.raises(NotFound):
        subscribe()


def test_a_shard_that_is_not_there_and_a_number_of_elsewhere_are_refused(subscribe):
    with pytest.raises(NotFound):
        subscribe(shard="shardId-000000000009")
    with pytest.raises(InvalidRequest):
        subscribe(StartPoint(IteratorType.AFTER_SEQUENCE_NUMBER, "77"))
