"""Enhanced fan-out over the signed wire client: subscriptions to shards, and a stream's consumers.

Implements `ports.ShardSubscriber`. A subscription is one SubscribeToShard request over HTTP/1.1,
whose answer is an event stream of up to five minutes. The live service accepts that, although its
guide speaks of HTTP/2: boto3 does the same. `model/subscribing.py` decides when to subscribe;
`FanOut` does it, for one shard, in a lease process and in Spark's driver.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec

from kclrun import errors
from kclrun.aws import operations
from kclrun.aws.errors import parse_error_reply, service_error
from kclrun.aws.http.pool import StreamedAnswer, TransportFailure
from kclrun.aws.kinesis import Page, all_pages
from kclrun.aws.wire import WireClient, call_json
from kclrun.codec.event_stream import EventMessage, MalformedEventStream, MessageDecoder
from kclrun.codec.get_records import decode_subscription_event
from kclrun.model import statuses
from kclrun.model.quotas import CONSUMERS_ADVANTAGE, CONSUMERS_CREATING_MAX, CONSUMERS_DEFAULT
from kclrun.model.reading import FetchedPage
from kclrun.model.record import StartPoint
from kclrun.model.stream import arn_difference
from kclrun.model.subscribing import SILENCE_MAX_S, SubscriptionPlan, is_lasting
from kclrun.model.time import Instant, WallTime
from kclrun.ports import Outage, ShardSubscriber, StreamSummary, Subscription

_encode: Final = msgspec.json.Encoder().encode


class Consumer(msgspec.Struct, frozen=True):
    """A registered consumer of a stream, with its status (`model/statuses.py`)."""

    name: str = msgspec.field(name="ConsumerName")
    arn: str = msgspec.field(name="ConsumerARN")
    status: str = msgspec.field(name="ConsumerStatus")
    created_at: WallTime = msgspec.field(name="ConsumerCreationTimestamp", default=WallTime(0.0))


def consumer_name(named: str) -> str:
    """The name of a consumer that is given by its name or its ARN."""
    return named.rpartition("/consumer/")[2].partition(":")[0]


def consumer_of(summary: StreamSummary, named: str, setting: str) -> str:
    """The name of the consumer of this stream that `setting` gives by its name or its ARN.

    Raises: SettingsError for the ARN of another stream's consumer.
    """
    if named.startswith("arn:") and not named.startswith(f"{summary.arn}/consumer/"):
        near = arn_difference(summary.arn, named.partition("/consumer/")[0])
        raise errors.SettingsError(
            f"{setting}: {named} is not a consumer of stream {summary.name}"
            f"{f' ({near})' if near else ''}\n"
            "Give its name instead: each stream has a consumer of its own"
        )
    return consumer_name(named)


class _Described(msgspec.Struct):
    consumer: Consumer = msgspec.field(name="ConsumerDescription")


class _Registered(msgspec.Struct):
    consumer: Consumer = msgspec.field(name="Consumer")


class _ConsumerPage(Page):
    consumers: list[Consumer] = msgspec.field(name="Consumers")


_DESCRIBED: Final = msgspec.json.Decoder(_Described)
_REGISTERED: Final = msgspec.json.Decoder(_Registered)
_CONSUMERS: Final = msgspec.json.Decoder(_ConsumerPage)


class StreamConsumers:
    """The consumers of one stream, given by its ARN. Raises: ServiceError leaves."""

    def __init__(self, client: WireClient, stream_arn: str) -> None:
        self._client = client
        self._reference = {"StreamARN": stream_arn}

    def find(self, name: str) -> Consumer | None:
        """The consumer of this name; None if there is none."""
        request = {**self._reference, "ConsumerName": name}
        try:
            return call_json(
                self._client, operations.DESCRIBE_STREAM_CONSUMER, request, _DESCRIBED
            ).consumer
        except errors.NotFound:
            return None

    def register(self, name: str) -> Consumer:
        """Register it; it is CREATING when this returns.

        Raises: Unavailable (it exists), Throttled (the stream has 20, or too many are CREATING).
        """
        request = {**self._reference, "ConsumerName": name}
        made = call_json(self._client, operations.REGISTER_STREAM_CONSUMER, request, _REGISTERED)
        return made.consumer

    def listed(self) -> tuple[Consumer, ...]:
        """All consumers of the stream."""
        pages = all_pages(
            self._client,
            operations.LIST_STREAM_CONSUMERS,
            dict(self._reference),
            _CONSUMERS,
            beside_token=self._reference,
        )
        return tuple(consumer for page in pages for consumer in page.consumers)

    def deregister(self, arn: str) -> None:
        """Remove the consumer; its subscriptions end."""
        self._client.call(operations.DEREGISTER_STREAM_CONSUMER, _encode({"ConsumerARN": arn}))


def registered(
    consumers: StreamConsumers, summary: StreamSummary, name: str, *, to_poll: str
) -> Consumer:
    """The consumer of this name, which is registered if it does not exist.

    A run never deregisters a consumer: other machines may use it, and a new one takes a minute
    until it can be subscribed to. `to_poll` is the setting that reads without a consumer.
    Raises: SettingsError if the stream can have no more consumers; a ServiceError leaf.
    """
    found = consumers.find(name)
    if found is not None:
        return found
    try:
        return consumers.register(name)
    except errors.Throttled as error:
        if error.code == "LimitExceededException":
            listed = consumers.listed()
            made = sum(consumer.status == statuses.CREATING for consumer in listed)
            if made < CONSUMERS_CREATING_MAX and len(listed) >= CONSUMERS_DEFAULT:
                raise _without_room(summary, len(listed), to_poll) from None
        raise  # too many requests, or registrations at one time


def require_room(consumers: StreamConsumers, summary: StreamSummary, *, to_poll: str) -> str:
    """A remark where the service may refuse another consumer, or an empty text.

    Raises: SettingsError if the stream has as many consumers as one can have.
    """
    count = len(consumers.listed())
    if count >= (CONSUMERS_ADVANTAGE if summary.is_on_demand else CONSUMERS_DEFAULT):
        raise _without_room(summary, count, to_poll)
    if count < CONSUMERS_DEFAULT:
        return ""
    return (
        f", if the stream takes more than its {count}: one on demand can have"
        f" {CONSUMERS_DEFAULT}, or {CONSUMERS_ADVANTAGE} with On-demand Advantage"
    )


def _without_room(summary: StreamSummary, count: int, to_poll: str) -> errors.SettingsError:
    return errors.SettingsError(
        f"stream {summary.name} has {count} registered consumers, and no more can be added\n"
        "Show them:  kclrun consumers list\n"
        "Remove one that is not used:  kclrun consumers remove NAME --yes\n"
        f"or read by polling:  {to_poll}"
    )


def require_active(consumer: Consumer, summary: StreamSummary) -> None:
    """Raises: Unavailable while it cannot be subscribed to, with its status."""
    statuses.require(
        statuses.CONSUMER, f"consumer {consumer.name} of stream {summary.name}", consumer.status
    )


class FanOutReader:
    """Implements `ports.ShardSubscriber` for one consumer, given by its ARN."""

    def __init__(self, client: WireClient, consumer_arn: str) -> None:
        self._client = client
        self._consumer_arn = consumer_arn

    def subscribe(self, shard_id: str, start: StartPoint) -> Subscription:
        """One SubscribeToShard. Raises: as `ports.ShardSubscriber.subscribe`."""
        position: dict[str, Any] = {"Type": start.kind.value}
        if start.sequence_number is not None:
            position["SequenceNumber"] = start.sequence_number
        if start.timestamp is not None:
            position["Timestamp"] = round(start.timestamp, 3)  # the service keeps milliseconds
        request = {
            "ConsumerARN": self._consumer_arn,
            "ShardId": shard_id,
            "StartingPosition": position,
        }
        answer = self._client.open_stream(operations.SUBSCRIBE_TO_SHARD, _encode(request))
        return EventStreamSubscription(answer, self._client.service_time)


class EventStreamSubscription:
    """Implements `ports.Subscription` over the event stream of one SubscribeToShard answer.

    `service_time` is for `FetchedPage.served_at`: events have no date.
    """

    def __init__(
        self,
        answer: StreamedAnswer,
        service_time: Callable[[], WallTime],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._answer = answer
        self._service_time = service_time
        self._decoder = MessageDecoder()
        # The messages that one piece of the answer completed; a piece has 64 KiB at most.
        self._messages: deque[EventMessage] = deque()
        self.is_over = False

    def next_page(self, timeout_s: float) -> FetchedPage | None:
        """The next event. Raises: Unavailable for a broken stream; the service's own error."""
        until = self._clock() + timeout_s
        while not self.is_over:
            while self._messages:
                page = self._opened(self._messages.popleft())
                if page is not None:
                    return page
            # An event whose bytes drip in has not come: what came of it is kept.
            left_s = until - self._clock()
            if left_s <= 0:
                return None
            try:
                piece = self._answer.piece(left_s)
                if piece is None:
                    return None
                if not piece:
                    self.is_over = True
                    self._decoder.close()
                self._messages.extend(self._decoder.feed(piece))
            except (TransportFailure, MalformedEventStream) as error:
                raise _broken(str(error)) from None
        return None

    def close(self) -> None:
        self._answer.close()

    def _opened(self, message: EventMessage) -> FetchedPage | None:
        """The page of an event; None for a message of another kind."""
        headers = message.headers
        if headers.get(":message-type") in {"exception", "error"}:
            named = headers.get(":exception-type") or headers.get(":error-code")
            reply = parse_error_reply(message.payload, named)
            # The answer began with 200; an exception within it counts as a status of 400.
            raise service_error(operations.SUBSCRIBE_TO_SHARD, reply, 400)
        if headers.get(":event-type") != "SubscribeToShardEvent":
            return None
        try:
            event = decode_subscription_event(message.payload)
        except errors.MalformedBody as error:
            raise _broken(str(error)) from None
        return FetchedPage(
            records=event.records,
            next_iterator=None,
            millis_behind_latest=event.millis_behind_latest,
            children=event.children,
            body_bytes=len(message.payload),
            served_at=self._service_time(),
            continuation=event.continuation,
        )


def _broken(text: str) -> errors.Unavailable:
    name = operations.SUBSCRIBE_TO_SHARD.name
    return errors.Unavailable(f"{name}: {text}", operation=name, code="BrokenStream")


# After a handoff, a renewal that came too early, or the creation of a consumer, a subscription
# succeeds within two of the service's intervals of 5 s. A longer time of polling is logged.
POLLING_NOTICED_S: Final = 10.0
# How often a subscribed thread looks whether its reader was closed.
EVENT_WAIT_S: Final = 1.0


class FanOut:
    """The subscription of one reader to its shard, if it has one now. Used by one thread.

    `SubscriptionPlan` decides when to subscribe. A failure never ends the reading: the reader polls
    meanwhile, and `warn` gets a sentence about the failure. `trouble` is the last failure; None
    after the next event.
    """

    def __init__(
        self,
        subscriber: ShardSubscriber,
        shard_id: str,
        *,
        now: Callable[[], Instant],
        warn: Callable[[str], None],
    ) -> None:
        self._subscriber = subscriber
        self._shard_id = shard_id
        self._now = now
        self._warn = warn
        self._plan = SubscriptionPlan()
        self._subscription: Subscription | None = None
        self.trouble: Exception | None = None
        self._outage = Outage(
            "subscribing to the shard (records come by polling meanwhile)",
            now,
            warn,
            POLLING_NOTICED_S,
        )

    @property
    def is_subscribed(self) -> bool:
        return self._subscription is not None

    def polled(self) -> None:
        """A page was polled: from now on a subscription can take over."""
        self._plan.polled(self._now())

    def takes_over(self, start: StartPoint | None) -> bool:
        """Whether the next page comes from a subscription; makes one at `start` if that is due."""
        now = self._now()
        if self._subscription is not None and self._plan.is_renewal_due(now):
            self.end()
        if self._subscription is None and start is not None and self._plan.is_due(now):
            try:
                self._subscription = self._subscriber.subscribe(self._shard_id, start)
            except errors.ServiceError as error:
                self._fail(error, now)
            else:
                self._plan.began(self._now(), random.random())
        return self._subscription is not None

    def next_page(self) -> FetchedPage | None:
        """The next event, as a page; None if no event came within `EVENT_WAIT_S`, or the
        subscription ended."""
        subscription, asked = self._subscription, self._now()
        assert subscription is not None, "called only while it is subscribed"
        try:
            page = subscription.next_page(EVENT_WAIT_S)
        except (errors.ServiceError, errors.RecordError) as error:
            self._fail(error, asked)
            return None
        if page is not None:
            self._came(page, asked)
        elif subscription.is_over:
            self.end()
        else:
            self._plan.waited(self._now() - asked)
            if self._plan.is_silent:
                self._fail(
                    errors.Unavailable(f"the subscription was silent for {SILENCE_MAX_S:g} s"),
                    asked,
                )
        return page

    def _came(self, page: FetchedPage, asked: Instant) -> None:
        """An event came. If the subscription is behind and does not catch up, polling may be
        faster: it takes over until the next subscription is due."""
        behind_ms, now = page.millis_behind_latest, self._now()
        self._plan.event_came(behind_ms, now - asked)
        self._outage.end()
        self.trouble = None
        if self._plan.is_slow:
            text = (
                f"the subscription is {(behind_ms or 0) / 1000:.0f} s behind and does not catch up:"
                " its connection is too slow"
            )
            self._warn(f"{text}; records come by polling meanwhile")
            self._fail(errors.Unavailable(text), asked)

    def pause_s(self, polling_s: float) -> float:
        """The pause before the next page, if polling would pause for `polling_s`."""
        if self._subscription is not None:
            return 0.0
        return min(polling_s, self._plan.next_change_in_s(self._now()))

    def close(self) -> None:
        """End the reading and the subscription."""
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None

    def end(self) -> None:
        """Close the subscription in good order: a later one may take its place."""
        self.close()
        self._plan.ended(self._now(), random.random())

    def _fail(self, error: Exception, asked: Instant) -> None:
        self.close()
        self.trouble = error
        note = self._outage.note_lasting if is_lasting(error) else self._outage.note
        note(str(error), asked)
        self._plan.failed(error, self._now(), random.random())
