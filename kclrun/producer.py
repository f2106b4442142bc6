"""`kclrun.Producer` and `kclrun.AsyncProducer`: records into a stream from any Python program.

The clients of `aws/` under the engine that the outputs use (`producing/`). `import kclrun` does not
load this module; the first use of the name does.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Literal

from kclrun.aws.endpoints import EndpointSettings
from kclrun.aws.kinesis import WireStreamAdmin
from kclrun.aws.put_records import LonePutter, WirePutter
from kclrun.aws.stream_client import open_stream_client
from kclrun.codec.record_sizes import checked_size_bytes
from kclrun.errors import BufferFull, SinkError
from kclrun.model.quotas import RECORD_BYTES_DEFAULT, RECORD_BYTES_LARGEST
from kclrun.model.record import PutEntry
from kclrun.model.stream import region_of
from kclrun.ports import record_limit
from kclrun.producing.background import BackgroundProducer
from kclrun.producing.delivery import Delivery
from kclrun.producing.flow_control import ProducerMetrics, ProducerSettings
from kclrun.producing.kinesis_producer import KinesisProducer


class Producer:
    """Puts records into one Kinesis stream: in full requests, in order per key, each acknowledged.

    >>> with kclrun.Producer("orders") as producer:
    ...     for order in orders:
    ...         producer.put(order.as_json(), order.customer)

    `put` returns at once with a `Delivery`; a thread of the producer sends. Guaranteed: a record
    whose delivery has a result is in the stream, at least once, and the records of a key are in the
    order of their `put`, behind any repetition; with `aggregates`, those of a key with the same
    explicit hash key, or without one. When `flush`, `close` or the `with` block has
    returned, every record that was put is in the stream. A record that the service refuses for the
    moment is sent again, for `give_up_after_s` (seconds) after its `put`; then its delivery fails,
    and so do `flush` and `close`. A shard that throttles slows its own records, not others.

    `stream` is a name or an ARN. Region, credentials and endpoint are found as boto3 finds them,
    unless they are given; `endpoint_url` may be that of `kclrun local`.
    `linger_s`: how long a record may wait for others, in seconds. A request goes earlier when it is
    full (500 records or 5 MiB).
    `aggregates` sends the waiting records of a shard as KPL aggregates, of any keys: many more
    records a second and a request, for readers that open aggregates, as every KCL does.
    `keeps_order=False` fills requests with any records.
    `buffer_records_max` and `buffer_bytes_max` bound the records in memory. At either, `put`
    blocks, or raises BufferFull with `when_full="raise"`.
    `record_bytes_max` bounds one record with its key; without it the stream's own limit holds, up
    to 10 MiB, which is read (kinesis:DescribeStreamSummary) when a record is above 1 MiB.

    All threads may use it. Not across a fork: make one in each process. Close it: records that
    still wait when the program ends are not sent, and a warning counts them.

    Raises: SettingsError without a region, for an unknown profile, or if no shard is open;
    NotFound, AccessDenied, Throttled, Unavailable where the stream cannot be listed
    (kinesis:ListShards).
    """

    def __init__(  # noqa: PLR0913 - public: the settings of a producer, by name
        self,
        stream: str,
        *,
        region: str | None = None,
        endpoint_url: str | None = None,
        profile: str | None = None,
        role_arn: str | None = None,
        keeps_order: bool = True,
        aggregates: bool = False,
        linger_s: float = 0.1,
        give_up_after_s: float = 60.0,
        when_full: Literal["block", "raise"] = "block",
        buffer_records_max: int = 50_000,
        buffer_bytes_max: int = 64 * 2**20,
        record_bytes_max: int | None = None,
    ) -> None:
        settings = EndpointSettings(
            region=region or region_of(stream), profile=profile, endpoint_url=endpoint_url
        )
        self._stream = stream
        self._client = open_stream_client(stream, settings, role_arn=role_arn).client
        admin = WireStreamAdmin(self._client, stream)
        try:
            shards = admin.list_shards()
        except BaseException:
            self._client.close()
            raise
        self._waits = when_full == "block"
        self._limit = record_limit(admin) if record_bytes_max is None else None
        self._limit_lock = threading.Lock()
        self._record_bytes_max = record_bytes_max or RECORD_BYTES_LARGEST
        engine = KinesisProducer(
            LonePutter(WirePutter(self._client, stream)),
            shards,
            ProducerSettings(
                keeps_order=keeps_order,
                aggregates=aggregates,
                linger_s=linger_s,
                buffer_records_max=buffer_records_max,
                buffer_bytes_max=buffer_bytes_max,
                # `put` has refused records above the stream's own limit.
                record_bytes_max=record_bytes_max or RECORD_BYTES_LARGEST,
                fails_alone=True,
            ),
            relist=admin.list_shards,
        )
        self._sender = BackgroundProducer(
            engine,
            name=f"the producer of the stream {stream}",
            give_up_after_s=give_up_after_s,
        )
        _OPEN.add(self)

    def put(
        self, data: bytes | str, partition_key: str, explicit_hash_key: str | None = None
    ) -> Delivery:
        """Accept one record. A text becomes UTF-8. `explicit_hash_key`, a number below 2**128 as
        text, chooses the shard in place of the partition key.

        Blocks while the buffer is full, and asks no service (but for the first record above 1 MiB).

        Raises: LimitExceeded or TypeError for a record that the service never accepts; BufferFull;
        SinkError after `close` or in a forked process. The record was not accepted then.
        """
        if not isinstance(partition_key, str):
            raise TypeError(f"a partition key is a text, not {type(partition_key).__name__}")
        if isinstance(data, str):
            data = data.encode()
        elif not isinstance(data, bytes):
            raise TypeError(f"the data of a record is bytes or a text, not {type(data).__name__}")
        entry = PutEntry(data, partition_key, explicit_hash_key)
        size_bytes = checked_size_bytes(entry, self._record_bytes_max)
        if size_bytes > RECORD_BYTES_DEFAULT and self._limit is not None:
            with self._limit_lock:
                self._limit.checked_size_bytes(entry)
        return self._sender.put(entry, size_bytes, waits=self._waits)

    def flush(self, timeout: float | None = None) -> None:
        """Send what waits, and return when every record that was put before is in the stream.

        Raises: the first error of the records that failed since the last `flush`, with their
        number: those are not in the stream, and each `Delivery` has its error; TimeoutError after
        `timeout` seconds: the records still wait.
        """
        self._sender.flush(timeout)

    @property
    def waiting_records(self) -> int:
        """The records that are not acknowledged yet."""
        return self._sender.waiting_records

    def metrics(self) -> ProducerMetrics:
        """The totals since the start, and how fast each shard takes records now."""
        return self._sender.metrics()

    def close(self) -> None:
        """Flush, and end the threads and connections. May be called twice. Raises: as `flush`."""
        self._end(self._sender.close)

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close. If the block raised, records that wait are not sent, and their deliveries fail."""
        if kind is None:
            self.close()
        else:
            left = SinkError(
                f"the producer of the stream {self._stream} was left by {kind.__name__}"
            )
            self._end(lambda: self._sender.stop(left))

    def __repr__(self) -> str:
        return f"Producer({self._stream!r})"

    def _end(self, ending: Callable[[], None]) -> None:
        _OPEN.discard(self)
        try:
            ending()
        finally:
            self._client.close()


class AsyncProducer:
    """`Producer` for asyncio: while the buffer is full, `await put(…)` waits and the loop goes on.

    >>> async with kclrun.AsyncProducer("orders") as producer:
    ...     delivery = await producer.put(order.as_json(), order.customer)
    ...     where = await delivery

    It takes the arguments of `Producer`, but for `when_full`. It is opened by `async with`, since
    the stream is listed first. For the tasks of one loop.
    """

    def __init__(self, stream: str, **options: Any) -> None:
        self._stream = stream
        self._options = {**options, "when_full": "raise"}
        self._producer: Producer | None = None

    async def put(
        self, data: bytes | str, partition_key: str, explicit_hash_key: str | None = None
    ) -> Delivery:
        """Accept one record, once the buffer has room. The result can be awaited: see `Delivery`.
        Raises: as `Producer.put`, but for BufferFull."""
        while True:
            try:
                return self._opened.put(data, partition_key, explicit_hash_key)
            except BufferFull:
                await asyncio.to_thread(self._opened._sender.await_room)  # noqa: SLF001 - its other half

    async def flush(self, timeout: float | None = None) -> None:
        """Send what waits, while the loop goes on. Raises: as `Producer.flush`."""
        await asyncio.to_thread(self._opened.flush, timeout)

    @property
    def waiting_records(self) -> int:
        """The records that are not acknowledged yet."""
        return self._opened.waiting_records

    def metrics(self) -> ProducerMetrics:
        """The totals since the start, and how fast each shard takes records now."""
        return self._opened.metrics()

    async def close(self) -> None:
        """Flush and end, while the loop goes on. Raises: as `Producer.flush`."""
        await asyncio.to_thread(self._opened.close)

    async def __aenter__(self) -> AsyncProducer:
        self._producer = await asyncio.to_thread(Producer, self._stream, **self._options)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close; if the block raised, records that wait are not sent."""
        await asyncio.to_thread(self._opened.__exit__, kind, error, traceback)

    @property
    def _opened(self) -> Producer:
        if self._producer is None:
            raise SinkError(f"the producer of the stream {self._stream} is opened by `async with`")
        return self._producer


# Producers that are not closed, for the warning at the end of the program.
_OPEN: Final[weakref.WeakSet[Producer]] = weakref.WeakSet()


def _warn_of_waiting_records() -> None:
    import logging

    for producer in list(_OPEN):
        if producer._sender.is_of_this_process and producer.waiting_records:  # noqa: SLF001 - of this module
            logging.getLogger("kclrun.producer").warning(
                "the program ends while %d records of %r wait: they are not sent. Close the"
                " producer, or use it in a `with` block",
                producer.waiting_records,
                producer,
            )


atexit.register(_warn_of_waiting_records)
