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


def test_a_subscription_lasts_five_minutes(service):
    subscription = service.subscribe()
    service.now = START + 299.9
    assert not isinstance(service.events(subscription)[-1], SubscriptionEnd)
    assert subscription.due_at() == START + 300.0
    service.now = START + 300.0
    service.put(b"not sent any more")

    assert service.events(subscription) == [SubscriptionEnd()]


# Two subscriptions of one consumer to one shard.


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
