"""Advice for a stream that does not exist: a similar name, or how to make it on an emulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from kclrun.aws.kinesis import stream_names
from kclrun.aws.wire import WireClient
from kclrun.config.convert import nearest
from kclrun.config.schema import stream_name
from kclrun.errors import NotFound, ServiceError
from kclrun.model.stream import is_change_stream, is_loopback

# Operations on the stream. A NotFound of another operation, on the lease table, gets no advice.
_OF_STREAMS: Final = frozenset(
    {"DescribeStreamSummary", "DescribeStream", "ListShards", "PutRecords"}
)


class MissingStreams:
    """Streams by name or ARN, the address of Kinesis, and a client, made when it is needed."""

    def __init__(
        self, streams: Sequence[str], kinesis_url: str, client: Callable[[], WireClient]
    ) -> None:
        self._streams = streams
        self._url = kinesis_url
        self._client = client

    @contextmanager
    def advising(self) -> Iterator[None]:
        """Raises: NotFound in place of the service's NotFound, with a similar stream name, or with
        the command that creates the stream on an emulator; any other error unchanged."""
        try:
            yield
        except NotFound as error:
            if error.operation not in _OF_STREAMS:
                raise
            lines = [str(error), *self._advice()]
            raise NotFound("\n".join(lines), code=error.code) from None

    def _advice(self) -> Iterator[str]:
        """Lines of advice for one or several missing streams."""
        if is_change_stream(self._streams[0]):
            yield "A stream that is disabled and enabled again has another ARN; the table names it:"
            yield "  aws dynamodb describe-table --query Table.LatestStreamArn --table-name TABLE"
            return
        try:
            names = stream_names(self._client())
        except ServiceError:  # usual, because none of our policies grants it
            names = ()
        missing = [name for name in map(stream_name, self._streams) if name not in names]
        for name in missing:
            near = nearest(name, names)
            if near is not None:
                yield f"Did you mean {near}?"
        if not is_loopback(self._url):
            yield "Check the name, aws.region, and the account of the credentials"
            return
        url = self._url.rstrip("/")
        for name in missing:
            yield "It is made on this emulator with:"
            yield f"  kclrun put --create 2 --stream {name} --endpoint {url} FILE"
            yield f"or when kclrun's own emulator starts:  kclrun local --stream {name}:2"
