"""Advice for a stream that does not exist: a similar name, or how to make it on an emulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kclrun.aws.changes.stream import change_streams
from kclrun.aws.kinesis import stream_names
from kclrun.aws.wire import WireClient
from kclrun.config.schema import stream_name
from kclrun.errors import NotFound, ServiceError
from kclrun.model.names import nearest
from kclrun.model.stream import arn_difference, is_change_stream, is_loopback
from kclrun.model.wire import WireEndpoint

# Operations on the stream. A NotFound of another operation, on the lease table, gets no advice.
_OF_STREAMS: Final = frozenset(
    {"DescribeStreamSummary", "DescribeStream", "ListShards", "PutRecords"}
)


def is_of_stream(error: NotFound) -> bool:
    """Whether the stream is what was not found."""
    return error.operation in _OF_STREAMS


def advised(
    error: NotFound, streams: Sequence[str], kinesis: WireEndpoint, client: Callable[[], WireClient]
) -> NotFound:
    """The error for one or several missing streams, by name or ARN, with a similar stream name, or
    with the command that creates the stream on an emulator. `kinesis` is where it is missing,
    `client` one of Kinesis."""
    lines = [str(error), *_advice(streams, kinesis, client)]
    return NotFound("\n".join(lines), code=error.code)


def _near_changes(arn: str, client: Callable[[], WireClient]) -> Iterator[str]:
    """What the account has that is nearly the stream of a table that was not found."""
    try:
        there = change_streams(client())
    except ServiceError:  # usual, because none of our policies grants it
        return
    for found in there:
        if difference := arn_difference(found, arn, "is there"):
            yield f"It is {difference}: {found}"


def _advice(
    streams: Sequence[str], kinesis: WireEndpoint, client: Callable[[], WireClient]
) -> Iterator[str]:
    if is_change_stream(streams[0]):
        yield from _near_changes(streams[0], client)
        yield "A stream that is disabled and enabled again has another ARN, which the table names:"
        yield "  aws dynamodb describe-table --query Table.LatestStreamArn --table-name TABLE"
        return
    try:
        names = stream_names(client())
    except ServiceError:  # usual, because none of our policies grants it
        names = ()
    missing = [name for name in map(stream_name, streams) if name not in names]
    for name in missing:
        near = nearest(name, names)
        if near is not None:
            yield f"Did you mean {near}?"
    if not is_loopback(kinesis.url):
        yield "Check the name, aws.region, and the account of the credentials"
        return
    region = f"--region {kinesis.signing_region}"
    at = f"{region} --endpoint {kinesis.url.rstrip('/')}"
    for name in missing:
        yield "It is made on this emulator with:"
        yield f"  echo hello | kclrun put --format text --create 2 --stream {name} {at}"
        local = f"kclrun local --stream {name}:2 {region}"
        yield f"or when kclrun's own emulator starts:  {local}"
