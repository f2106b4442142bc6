"""Enhanced fan-out of the embedded Kinesis in virtual time: consumers, subscriptions, events."""

import gc
import weakref

import pytest

from kclrun.errors import InvalidRequest, NotFound, ServiceError, Throttled, Unavailable
from kclrun.local.consumers import SubscriptionEnd, SubscriptionEvent
from kclrun.local.limits import AWS_LIMITS
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.local.stream import PutEntry
from kclrun.model.record import IteratorType

SECRET = b"a secret of the tests".ljust(32)
START = 1_700_000_000.0
FIRST = "shardId-000000000000"
MIB = 1024 * 1024


class Service:
    """A model of one stream of one shard with one ACTIVE consumer, and a clock."""

    def __init__(self, **settings):
        self.kinesis = Kinesis(KinesisSettings(**settings), SECRET)
        self.now = START
        self.stream = self.kinesis.create_stream("s", 1, self.now)
        self.now += settings.get("settle_s", 0.0)
        self.consumers = self.kinesis.consumers_of(self.stream)
        self.consumer = self.consumers.register("c", self.now)
        self.now += settings.get("settle_s", 0.0)

    def put(self, data=b"x"):
        return self.kinesis.put(self.stream, PutEntry(data, "k"), self.now).sequence_number

    def subscribe(self, kind="TRIM_HORIZON", shard=FIRST, consumer=None, **position):
        consumer = consumer or self.consumer
        kind = IteratorType(kind)
        return self.consumers.subscribe(consumer, shard, kind, self.now, **position)

    def events(self, subscription):
        """All that is due now."""
        found = []
        while (event := subscription.next_event(self.now)) is not None:
            found.append(event)
        return found

    def data(self, subscription):
        return [
            record.data
            for event in self.events(subscription)
            if isinstance(event, SubscriptionEvent)
            for record in event.records
        ]


def code_of(call, *arguments, **more):
    with pytest.raises(ServiceError) as refusal:
        call(*arguments, **more)
    return refusal.value.code


@pytest.fixture
def service():
    return Service()


# Consumers.


def test_a_consumer_is_creating_until_the_service_has_settled():
    service = Service(settle_s=2.0)
    consumer = service.consumers.register("d", service.now)

    assert [consumer.status(service.now + after) for after in (0.0, 1.9, 2.0)] == [
        *("CREATING", "CREATING", "ACTIVE")
    ]
    assert code_of(service.subscribe, consumer=consumer) == "ResourceInUseException"
    service.now += 2.0
    service.subscribe(consumer=consumer)


def test_a_consumers_arn_has_its_stream_its_name_and_its_creation():
    assert Service().consumer.arn == (
        "arn:aws:kinesis:us-east-1:123456789012:stream/s/consumer/c:1700000000"
    )


def test_a_stream_has_at_most_twenty_consumers_and_five_being_created():
    service = Service(settle_s=2.0)
    for number in range(5):
        service.consumers.register(f"n{number}", service.now)
    with pytest.raises(Throttled, match="5 consumers of stream s are being created"):
        service.consumers.register("one-more", service.now)
    for number in range(5, 19):
        service.now += 2.0
        service.consumers.register(f"n{number}", service.now)
    service.now += 2.0

    with pytest.raises(Throttled, match="20 registered consumers") as refusal:
        service.consumers.register("one-more", service.now)

    assert refusal.value.code == "LimitExceededException"
    assert len(service.consumers) == len(service.consumers.listed()) == 20


def test_a_consumers_name_is_taken_once_and_free_again_after_it_was_deregistered(service):
    assert code_of(service.consumers.register, "c", service.now) == "ResourceInUseException"
    service.consumers.deregister(service.consumer)
    service.now += 1.0

    again = service.consumers.register("c", service.now)

    assert again.arn != service.consumer.arn
    with pytest.raises(NotFound, match="consumer/c:1700000000"):
        service.consumers.consumer(None, service.consumer.arn)
    assert service.consumers.consumer("c", None) == again
    with pytest.raises(NotFound):
        service.consumers.consumer("other", again.arn)


@pytest.mark.parametrize(("after", "status"), [(0.0, "CREATING"), (10.0, "DELETING")])
def test_a_stream_that_is_not_active_takes_no_consumer(after, status):
    kinesis = Kinesis(KinesisSettings(settle_s=2.0), SECRET)
    stream = kinesis.create_stream("s", 1, START)
    if status == "DELETING":
        kinesis.delete_stream(stream, START + after)

    with pytest.raises(Unavailable, match=f"is {status}"):
        kinesis.consumers_of(stream).register("c", START + after)


def test_a_stream_with_consumers_is_deleted_only_if_the_request_says_so(service):
    subscription = service.subscribe()
    with pytest.raises(Unavailable, match="has 1 registered consumers"):
        service.kinesis.delete_stream(service.stream, service.now)
    assert service.events(subscription)[-1] != SubscriptionEnd()

    service.kinesis.delete_stream(service.stream, service.now, with_consumers=True)

    assert service.events(subscription)[-1].error.code == "ResourceNotFoundException"
    with pytest.raises(NotFound):
        service.kinesis.consumers_by_arn(service.consumer.arn, service.now)


def test_an_arn_of_a_stream_is_not_that_of_a_consumer(service):
    with pytest.raises(InvalidRequest, match="ARN of a consumer"):
        service.kinesis.consumers_by_arn(service.stream.arn, service.now)


# Events.


def test_the_first_event_comes_at_once_and_says_where_the_subscription_is(service):
    (event,) = service.events(subscription := service.subscribe())

    assert (event.records, event.millis_behind_latest, event.children) == ([], 0, ())
    service.put(b"1")
    assert service.data(subscription) == [b"1"]
    service.now += 6.0
    again = service.subscribe("AFTER_SEQUENCE_NUMBER", sequence_number=event.continuation)
    assert service.data(again) == [b"1"]


def test_a_record_is_announced_when_it_arrives(service):
    subscription = service.subscribe()
    service.events(subscription)
    changes = []
    subscription.changed = lambda: changes.append(service.now)

    service.put(b"1")

    assert changes == [START]
    assert service.data(subscription) == [b"1"]
    assert service.events(subscription) == []


def test_a_subscription_without_records_says_where_it_is_every_five_seconds(service):
    subscription = service.subscribe()
    service.events(subscription)
    assert subscription.due_at() == START + 5.0
    service.now = START + 4.999
    assert service.events(subscription) == []
    service.now = START + 5.0

    (event,) = service.events(subscription)

    assert (event.records, event.millis_behind_latest) == ([], 0)
    assert subscription.due_at() == START + 10.0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("TRIM_HORIZON", [b"0", b"1", b"2", b"late"]),
        ("LATEST", [b"late"]),
        ("AT_SEQUENCE_NUMBER", [b"1", b"2", b"late"]),
        ("AFTER_SEQUENCE_NUMBER", [b"2", b"late"]),
        ("AT_TIMESTAMP", [b"2", b"late"]),
    ],
)
def test_a_subscription_begins_at_its_position(service, kind, expected):
    numbers = []
    for number in range(3):
        service.now = START + number
        numbers.append(service.put(b"%d" % number))
    position = {"sequence_number": numbers[1]} if kind.endswith("NUMBER") else {}
    position |= {"timestamp": START + 1.5} if kind == "AT_TIMESTAMP" else {}

    subscription = service.subscribe(kind, **position)
    service.put(b"late")

    assert service.data(subscription) == expected


def test_an_event_holds_a_mebibyte_and_says_how_far_behind_it_is(service):
    for _ in range(3):
        service.put(b"x" * (MIB // 2 - 1))
    service.now += 2.5

    one, other = service.events(service.subscribe())

    assert [len(each.records) for each in (one, other)] == [2, 1]
    assert (one.millis_behind_latest, other.millis_behind_latest) == (2500, 0)


def test_a_record_unread_in_its_own_millisecond_is_still_behind(service):
    for _ in range(3):
        service.put(b"x" * (MIB // 2 - 1))

    assert service.events(service.subscribe())[0].millis_behind_latest == 1


def test_what_has_expired_is_not_sent(service):
    service.put(b"old")
    service.now += 86_401.0
    service.put(b"new")

    assert service.data(service.subscribe()) == [b"new"]


@pytest.mark.parametrize("taken", range(6))
def test_nothing_is_lost_and_nothing_comes_twice_after_any_continuation(service, taken):
    """Records of one instant, an instant later, and an event without records between them."""
    subscription = service.subscribe()
    seen, continuations = [], []

    def take():
        for event in service.events(subscription):
            seen.append([record.data for record in event.records])
            continuations.append(event.continuation)

    take()
    for number, after in enumerate((0.0, 0.0, 5.0, 0.2, 6.0)):
        service.now += after
        take()
        if number != 3:
            service.put(b"%d" % number)
        take()
    service.now += 6.0
    rest = [data for event in seen[taken + 1 :] for data in event]

    again = service.subscribe("AFTER_SEQUENCE_NUMBER", sequence_number=continuations[taken])

    assert service.data(again) == rest


def test_the_end_of_a_closed_shard_is_one_event_with_its_children_and_then_the_end(service):
    subscription = service.subscribe()
    service.put(b"last")
    service.kinesis.split_shard(service.stream, FIRST, 2**127, service.now)

    event, end = service.events(subscription)

    assert [record.data for record in event.records] == [b"last"]
    assert (event.continuation, event.millis_behind_latest) == (None, 0)
    assert [child.shard_id[-1] for child in event.children] == ["1", "2"]
    assert end == SubscriptionEnd()
    assert service.events(subscription) == []


def test_the_close_of_a_shard_is_announced(service):
    subscription = service.subscribe()
    service.events(subscription)
    changes = []
    subscription.changed = lambda: changes.append("changed")

    service.kinesis.split_shard(service.stream, FIRST, 2**127, service.now)

    assert changes == ["changed"]


def test_a_subscription_lasts_five_minutes(service):
    subscription = service.subscribe()
    service.now = START + 299.9
    assert not isinstance(service.events(subscription)[-1], SubscriptionEnd)
    assert subscription.due_at() == START + 300.0
    service.now = START + 300.0
    service.put(b"not sent any more")

    assert service.events(subscription) == [SubscriptionEnd()]


# Two subscriptions of one consumer to one shard.


def test_a_second_subscription_within_five_seconds_is_refused_and_the_first_goes_on(service):
    first = service.subscribe()
    service.now += 4.999

    assert code_of(service.subscribe) == "ResourceInUseException"

    service.put(b"1")
    assert service.data(first) == [b"1"]


def test_a_second_subscription_after_five_seconds_takes_over(service):
    first = service.subscribe()
    service.events(first)
    service.now += 5.0

    second = service.subscribe("LATEST")
    service.put(b"1")

    (end,) = service.events(first)
    assert end.error.code == "ResourceInUseException"
    assert service.data(second) == [b"1"]


def test_five_seconds_hold_although_the_first_client_has_gone(service):
    service.subscribe().end()
    service.now += 1.0
    service.subscribe(consumer=service.consumers.register("d", service.now))
    assert code_of(service.subscribe) == "ResourceInUseException"
    service.now += 4.0

    service.subscribe()


def test_a_live_subscription_is_taken_over_however_old_it_is(service):
    first = service.subscribe()
    service.now += 60.0
    service.subscribe(consumer=service.consumers.register("d", service.now))

    service.subscribe()

    assert service.events(first)[-1].error.code == "ResourceInUseException"


def test_what_ended_five_seconds_ago_is_held_no_longer(service):
    """A subscription holds its shard, and that its records."""
    ended = weakref.ref(subscription := service.subscribe())
    subscription.end()
    del subscription
    service.now += 5.0

    service.subscribe(consumer=service.consumers.register("d", service.now))

    gc.collect()
    assert ended() is None


def test_other_consumers_and_other_shards_are_not_concerned(service):
    other = service.consumers.register("d", service.now)
    service.kinesis.split_shard(service.stream, FIRST, 2**127, service.now)

    subscriptions = [
        service.subscribe(),
        service.subscribe(consumer=other),
        service.subscribe(shard="shardId-000000000001"),
    ]

    assert not any(each.is_ended for each in subscriptions)


def test_what_ended_is_forgotten_and_notified_of_nothing(service):
    for _ in range(3):
        service.subscribe().end()
        service.now += 5.0
    shard = service.stream.shard(FIRST, service.now)
    changes = []
    live = service.subscribe()
    live.changed = lambda: changes.append("changed")
    ended = service.subscribe(consumer=service.consumers.register("d", service.now))
    ended.end()
    ended.changed = lambda: changes.append("of the ended")

    service.put()

    assert changes == ["changed"]
    assert len(shard.watchers) == 1
    live.end()
    assert not shard.watchers


def test_a_deregistered_consumers_subscriptions_end_with_not_found(service):
    other = service.consumers.register("d", service.now)
    mine, others = service.subscribe(), service.subscribe(consumer=other)
    changes = []
    mine.changed = lambda: changes.append("changed")

    service.consumers.deregister(service.consumer)

    assert changes == ["changed"]
    assert service.events(mine)[-1].error.code == "ResourceNotFoundException"
    assert not others.is_ended


def test_a_shard_that_is_not_there_and_a_position_that_is_none_are_refused(service):
    assert code_of(service.subscribe, shard="shardId-9") == "ResourceNotFoundException"
    assert code_of(service.subscribe, "AT_SEQUENCE_NUMBER") == "InvalidArgumentException"

    service.subscribe()  # A refused call does not count as a subscription.


# Limits.


def test_two_mebibytes_a_second_reach_a_consumer_of_a_shard():
    service = Service(limits=AWS_LIMITS)
    for _ in range(8):
        service.now += 1.0  # A shard takes a mebibyte a second.
        service.put(b"x" * (MIB - 1))
    subscription = service.subscribe()
    sent = {}
    for eighth in range(40):
        count = len(service.data(subscription))
        if count:
            sent[eighth / 8] = count
        service.now += 0.125

    assert sent == {0.0: 1, 0.5: 1, 1.0: 1, 1.5: 1, 2.0: 1, 2.5: 1, 3.0: 1, 3.5: 1}


def test_what_waits_for_its_rate_is_due_when_it_may_be_sent():
    service = Service(limits=AWS_LIMITS)
    for _ in range(2):
        service.now += 1.0
        service.put(b"x" * (MIB - 1))
    subscription = service.subscribe()

    assert len(service.data(subscription)) == 1
    assert subscription.due_at() == pytest.approx(service.now + 0.5)
    assert service.events(subscription) == []


def test_another_consumer_has_its_own_rate():
    service = Service(limits=AWS_LIMITS)
    service.put(b"x" * (MIB - 1))
    other = service.consumers.register("d", service.now)

    both = [service.subscribe(), service.subscribe(consumer=other)]

    assert [len(service.data(each)) for each in both] == [1, 1]
