"""Log events that CloudWatch Logs sends to a stream by a subscription filter, each as a row.

A record is gzip of one JSON object or of several, in one gzip member or in several: CloudWatch Logs
sends one object, and what copies or batches such records may put them together.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from kclrun import Checkpointer, Context, RecordBatch, RecordProcessor

__all__ = ["LogEvent", "LogEvents", "Subscription", "some_subscriptions", "subscriptions"]

# A record has up to 10 MiB. Lines of logs inflate tenfold; what inflates to more is an attack.
_INFLATED_BYTES_MAX: Final = 128 * 2**20
_GZIP: Final = 16 + zlib.MAX_WBITS
_JSON: Final = json.JSONDecoder()


class LogEvent(msgspec.Struct, rename="camel"):
    """One line of a log. `timestamp` is in milliseconds."""

    id: str
    timestamp: int
    message: str


class Subscription(msgspec.Struct, rename="camel"):
    """What CloudWatch Logs sends: lines of one log stream, or a check whether it may send."""

    message_type: str
    owner: str = ""
    log_group: str = ""
    log_stream: str = ""
    subscription_filters: tuple[str, ...] = ()
    log_events: tuple[LogEvent, ...] = ()

    @property
    def is_control(self) -> bool:
        """Whether it is such a check: its only event is no line of a log."""
        return self.message_type == "CONTROL_MESSAGE"


def subscriptions(data: bytes) -> list[Subscription]:
    """For `decode: processors.cloudwatch_logs:subscriptions`: the objects of a record, in order.

    Raises: ValueError for bytes that are not gzip of such objects, or that inflate to too much.
    """
    return [msgspec.convert(plain, Subscription) for plain in _objects(_inflated(data).decode())]


def _inflated(data: bytes) -> bytes:
    """The content of all gzip members, one after the other."""
    parts, left = [], _INFLATED_BYTES_MAX
    while data:
        member = zlib.decompressobj(_GZIP)
        try:
            part = member.decompress(data, left + 1)
        except zlib.error as error:
            raise ValueError(f"not gzip: {error}") from None
        left -= len(part)
        if left < 0:
            raise ValueError(f"it inflates to more than {_INFLATED_BYTES_MAX} bytes")
        if not member.eof:
            raise ValueError("its last gzip member is cut short")
        parts.append(part)
        data = member.unused_data
    return b"".join(parts)


def _objects(text: str) -> Iterator[Any]:
    """The JSON values of a text, with or without space between them."""
    at, end = 0, len(text)
    while at < end:
        if text[at].isspace():
            at += 1
            continue
        plain, at = _JSON.raw_decode(text, at)
        yield plain


class LogEvents(RecordProcessor):
    """Emits a row for each line of a log. The settings say how records are decoded:
    `decode: processors.cloudwatch_logs:subscriptions`."""

    def initialize(self, context: Context) -> None:
        """Called once, before the first record of the shard."""
        self.context = context

    def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
        """Called with some records, in order."""
        for record in batch:
            for subscription in record.value:
                # CloudWatch Logs asks now and then whether the stream takes records.
                if not subscription.is_control:
                    self._emit(subscription)

    def _emit(self, subscription: Subscription) -> None:
        for event in subscription.log_events:
            self.context.emit(
                {
                    "id": event.id,
                    "at_ms": event.timestamp,
                    "log_group": subscription.log_group,
                    "log_stream": subscription.log_stream,
                    "message": event.message,
                }
            )


def some_subscriptions() -> Iterator[tuple[str, bytes]]:
    """Records to try it with: (partition key, payload) pairs for the embedded stream."""
    control = {
        "messageType": "CONTROL_MESSAGE",
        "owner": "CloudwatchLogs",
        "logGroup": "",
        "logStream": "",
        "subscriptionFilters": [],
        "logEvents": [{"id": "", "timestamp": 1, "message": "CWL CONTROL MESSAGE: Checking ..."}],
    }
    yield "control", gzip.compress(json.dumps(control).encode(), mtime=0)
    for number in range(20):
        lines = [
            {
                "id": f"{number}-{line}",
                "timestamp": 1_780_000_000_000 + line,
                "message": f"GET /{line}",
            }
            for line in range(5)
        ]
        log_stream = f"host-{number % 3}"
        data = {
            "messageType": "DATA_MESSAGE",
            "owner": "123456789012",
            "logGroup": "/shop/web",
            "logStream": log_stream,
            "subscriptionFilters": ["all"],
            "logEvents": lines,
        }
        yield log_stream, gzip.compress(json.dumps(data).encode(), mtime=0)
