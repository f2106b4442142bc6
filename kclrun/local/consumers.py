"""Enhanced fan-out of the model: the consumers of a stream and their subscriptions. Pure.

It knows neither HTTP nor encodings nor clocks: a subscription says which event is due at `now`, and
when to ask again. Sources: RegisterStreamConsumer, DeregisterStreamConsumer and SubscribeToShard in
the Kinesis API reference; "Develop enhanced fan-out consumers" in the developer guide.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from kclrun.errors import ServiceError
from kclrun.local.iterators import position_of
from kclrun.local.limits import ShardLimits
from kclrun.local.refusals import (
    limit_exceeded,
    resource_in_use,
    resource_not_found,
)
from kclrun.local.shard_log import ShardLog, StoredRecord
from kclrun.local.stream import Stream, add_tags
from kclrun.model.quotas import (
    CONSUMERS_CREATING_MAX,
    CONSUMERS_DEFAULT,
    GET_RECORDS_MAX,
    MIB,
    RESUBSCRIBE_AFTER_S,
    SUBSCRIPTION_S,
)
from kclrun.model.record import IteratorType
from kclrun.model.shard import ChildShard
from kclrun.model.time import WallTime

# How often a subscription without records sends an event with its position.
HEARTBEAT_S: Final = 5.0
_NO_TAGS: Final[Mapping[str, str]] = types.MappingProxyType({})
# Bytes of data and keys in one event. A larger record comes alone.
EVENT_BYTES_MAX: Final = MIB


class Consumer(msgspec.Struct, frozen=True):
    """A registered consumer. `settled_at` is when it became, or becomes, ACTIVE."""

    name: str
    arn: str
    created_at: WallTime
    settled_at: WallTime
    tags: dict[str, str]

    def status(self, now: WallTime) -> str:
        return "ACTIVE" if now >= self.settled_at else "CREATING"


class SubscriptionEvent(msgspec.Struct, frozen=True):
    """A SubscribeToShardEvent. `continuation` None is the end of a closed shard."""

    records: list[StoredRecord]
    continuation: str | None
    millis_behind_latest: int
    children: tuple[ChildShard, ...] = ()


class SubscriptionEnd(msgspec.Struct, frozen=True):
    """The last event of a subscription. `error` None: its five minutes, or its shard, ended."""

    error: ServiceError | None = None


class Subscription:
    """One consumer's subscription to one shard.

    Call `next_event` until it returns None; then again when `changed` is called, and at `due_at`.
    """

    def __init__(
        self,
        stream: Stream,
        shard: ShardLog,
        position: int,
        began_at: WallTime,
        limits: ShardLimits | None,
    ) -> None:
        self.began_at = began_at
        self.stream_name = stream.name
        self.shard_id = shard.shard_id
        # Set by the listener; called at any change.
        self.changed: Callable[[], None] = _nothing
        self._stream = stream
        self._shard = shard
        self._position = position
        self._bytes_s = None if limits is None else float(limits.read_bytes)
        # The time before which no record may be sent, by the bytes that were sent (with limits).
        self._resumes_at = began_at
        self._sent_at = WallTime(began_at - HEARTBEAT_S)
        self._end: SubscriptionEnd | None = None
        self._is_over = False
        shard.watchers.add(self._on_change)

    @property
    def is_ended(self) -> bool:
        return self._end is not None

    def end(self, error: ServiceError | None = None) -> None:
        """End it: the next event is the last one. Does nothing if it has ended."""
        if self._end is None:
            self._end = SubscriptionEnd(error)
            self._shard.watchers.discard(self._on_change)
            self.changed()

    def due_at(self) -> WallTime:
        """The time of the next event, at the latest."""
        rest = self._sent_at + HEARTBEAT_S
        if self._has_more():
            rest = min(rest, self._resumes_at)
        return WallTime(min(rest, self.began_at + SUBSCRIPTION_S))

    def next_event(self, now: WallTime) -> SubscriptionEvent | SubscriptionEnd | None:
        """The event that is due; None if there is none yet, and after the end."""
        if self._is_over:
            return None
        if now >= self.began_at + SUBSCRIPTION_S:
            self.end()
        if self._end is not None:
            self._is_over = True
            return self._end
        is_sendable = self._has_more() and now >= self._resumes_at
        if not is_sendable and now < self._sent_at + HEARTBEAT_S:
            return None
        # With the heartbeat a record may be sent: the largest, of ten mebibytes, takes as long.
        self._sent_at = now
        return self._next_page(now)

    def _has_more(self) -> bool:
        """Whether records, or the end of the shard, are there to be sent."""
        return self._position < self._shard.end or self._shard.closed_at is not None

    def _next_page(self, now: WallTime) -> SubscriptionEvent:
        shard = self._shard
        first = max(self._position, shard.start)
        records = shard.page(first, GET_RECORDS_MAX, EVENT_BYTES_MAX)
        self._position = following = first + len(records)
        if self._bytes_s is not None:
            self._resumes_at = WallTime(now + shard.size_between(first, following) / self._bytes_s)
        if following < shard.end:
            behind_ms = max(1, int((now - shard.arrival_of(following)) * 1000))
            return SubscriptionEvent(records, self._continuation(records, now), behind_ms)
        if shard.closed_at is None:
            return SubscriptionEvent(records, self._continuation(records, now), 0)
        self.end()
        return SubscriptionEvent(records, None, 0, self._stream.children_of(shard))

    def _continuation(self, records: list[StoredRecord], now: WallTime) -> str:
        """A number after which (AFTER_SEQUENCE_NUMBER) nothing is lost and nothing comes twice."""
        if records:
            return records[-1].sequence_number
        return self._shard.number_at(self._position, now)

    def _on_change(self) -> None:
        self.changed()


def _nothing() -> None:
    """Of a subscription to which nothing listens yet."""


class StreamConsumers:
    """The consumers of one stream, by name, and their subscriptions.

    Raises: refusals of the service as `ServiceError` leaves, which the methods name.
    """

    def __init__(self, stream: Stream, settle_s: float, limits: ShardLimits | None) -> None:
        self._stream = stream
        self._settle_s = settle_s
        self._limits = limits
        self._consumers: dict[str, Consumer] = {}
        self._subscriptions: dict[tuple[str, str], Subscription] = {}

    def __len__(self) -> int:
        return len(self._consumers)

    @property
    def stream_arn(self) -> str:
        return self._stream.arn

    def listed(self) -> list[Consumer]:
        """In the order of their names."""
        return [self._consumers[name] for name in sorted(self._consumers)]

    def register(self, name: str, now: WallTime, tags: Mapping[str, str] = _NO_TAGS) -> Consumer:
        """Raises: Unavailable (exists, or the stream is not ACTIVE), Throttled (too many),
        InvalidRequest (its tags)."""
        stream = self._stream
        if stream.status(now) in ("CREATING", "DELETING"):
            raise resource_in_use(f"Stream {stream.name} is {stream.status(now)}, not ACTIVE.")
        if name in self._consumers:
            raise resource_in_use(f"Consumer {name} of stream {stream.name} already exists.")
        if len(self._consumers) >= CONSUMERS_DEFAULT:
            raise limit_exceeded(
                f"Stream {stream.name} has {CONSUMERS_DEFAULT} registered consumers, the most that"
                " a stream can have."
            )
        creating = [
            consumer for consumer in self._consumers.values() if consumer.status(now) == "CREATING"
        ]
        if len(creating) >= CONSUMERS_CREATING_MAX:
            raise limit_exceeded(
                f"{CONSUMERS_CREATING_MAX} consumers of stream {stream.name} are being created, the"
                " most at one time."
            )
        kept_tags: dict[str, str] = {}
        add_tags(kept_tags, tags)
        arn = f"{stream.arn}/consumer/{name}:{int(now)}"
        consumer = Consumer(name, arn, now, WallTime(now + self._settle_s), kept_tags)
        self._consumers[name] = consumer
        return consumer

    def consumer(self, name: str | None, arn: str | None) -> Consumer:
        """By name or by ARN. Raises: NotFound."""
        for consumer in self._consumers.values():
            if (arn is None or consumer.arn == arn) and (name is None or consumer.name == name):
                return consumer
        raise resource_not_found(f"Consumer {arn or name} of stream {self._stream.name} not found.")

    def deregister(self, consumer: Consumer) -> None:
        """Remove it; its subscriptions end with ResourceNotFoundException."""
        del self._consumers[consumer.name]
        for key in [key for key in self._subscriptions if key[0] == consumer.name]:
            gone = resource_not_found(f"Consumer {consumer.arn} not found.")
            self._subscriptions.pop(key).end(gone)

    def end_all(self) -> None:
        """The stream is deleted: its consumers go with it."""
        for consumer in list(self._consumers.values()):
            self.deregister(consumer)

    def subscribe(
        self,
        consumer: Consumer,
        shard_id: str,
        kind: IteratorType,
        now: WallTime,
        *,
        sequence_number: str | None = None,
        timestamp: WallTime | None = None,
    ) -> Subscription:
        """Raises: Unavailable (ResourceInUse: not ACTIVE yet, or subscribed less than five seconds
        ago), NotFound (no such shard), InvalidRequest (its starting position)."""
        if consumer.status(now) != "ACTIVE":
            raise resource_in_use(f"Consumer {consumer.arn} is CREATING, not ACTIVE.")
        shard = self._stream.shard(shard_id, now)
        self._stream.trim(now)
        position = position_of(
            shard, kind, now, sequence_number=sequence_number, timestamp=timestamp
        )
        former = self._subscriptions.get((consumer.name, shard_id))
        if former is not None:
            if now - former.began_at < RESUBSCRIBE_AFTER_S:
                raise resource_in_use(
                    f"Another active subscription exists for consumer {consumer.arn} on shard"
                    f" {shard_id}. It can be taken over {RESUBSCRIBE_AFTER_S:g} seconds after it"
                    " began."
                )
            former.end(
                resource_in_use(f"Consumer {consumer.arn} subscribed to shard {shard_id} again.")
            )
        self._forget_ended(now)
        subscription = Subscription(self._stream, shard, position, now, self._limits)
        self._subscriptions[consumer.name, shard_id] = subscription
        return subscription

    def _forget_ended(self, now: WallTime) -> None:
        for key, subscription in list(self._subscriptions.items()):
            if subscription.is_ended and now - subscription.began_at >= RESUBSCRIBE_AFTER_S:
                del self._subscriptions[key]
