"""`kclrun.Producer`: puts records into a stream from any Python program.

The composition of the producer that the outputs use (`producing/kinesis_producer.py`) with the
clients of `aws/`. `import kclrun` does not load this module; the first use of the name does.
"""

from __future__ import annotations

from types import TracebackType

from kclrun.aws.endpoints import EndpointSettings
from kclrun.aws.kinesis import WireStreamAdmin
from kclrun.aws.put_records import WirePutter
from kclrun.aws.stream_client import open_stream_client
from kclrun.errors import SinkError
from kclrun.model.quotas import RECORD_BYTES_DEFAULT
from kclrun.model.record import PutEntry
from kclrun.model.stream import region_of
from kclrun.ports import record_limit
from kclrun.producing.flow_control import ProducerSettings
from kclrun.producing.kinesis_producer import KinesisProducer


class Producer:
    """Puts records into one Kinesis stream: in full requests, in order per key, none dropped.

    >>> with kclrun.Producer("orders") as producer:
    ...     for order in orders:
    ...         producer.put(order.customer, order.as_json())

    `stream` is a name or an ARN. Region, credentials and endpoint are found as boto3 finds them,
    unless they are given; `endpoint_url` may be that of `kclrun local`. Guaranteed: when `flush`
    or the `with` block has returned, every record is in the stream, at least once, and the records
    of a key are in the order of their `put`, behind any repetition. A record that the service
    refuses for the moment is sent again, for `give_up_after_s`; a shard that throttles slows its
    own records.

    `aggregates` sends the waiting records of a key as one KPL aggregate: many more records a second
    of one key, for readers that open aggregates, as every KCL does. `keeps_order=False` fills
    requests with any records. `linger_s` is how long a record may wait for others.
    `buffer_records_max` and `buffer_bytes_max` bound the records in memory: `put` blocks at either.
    `record_bytes_max` bounds one record with its key; without it the stream's own limit holds,
    which is read (kinesis:DescribeStreamSummary) when a record is above 1 MiB.

    It works while it is called, and its threads only wait for answers: call `flush` before a long
    pause. For one thread, and not across a fork.

    Raises: SettingsError without a region, for an unknown profile, or if no shard is open;
    NotFound, AccessDenied, Throttled, Unavailable where the stream cannot be listed.
    """

    def __init__(
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
        self._is_closed = False
        self._producer = KinesisProducer(
            WirePutter(self._client, stream),
            admin.list_shards(),
            ProducerSettings(
                keeps_order=keeps_order,
                aggregates=aggregates,
                linger_s=linger_s,
                give_up_after_s=give_up_after_s,
                buffer_records_max=buffer_records_max,
                buffer_bytes_max=buffer_bytes_max,
                record_bytes_max=record_bytes_max or RECORD_BYTES_DEFAULT,
            ),
            relist=admin.list_shards,
            limit=record_limit(admin) if record_bytes_max is None else None,
        )

    def put(self, key: str, data: bytes | str, *, explicit_hash_key: str | None = None) -> None:
        """Accept one record; blocks while the buffer is full. A text becomes UTF-8.

        Raises: LimitExceeded or TypeError for a record that the service never accepts: it is left
        out, and no other record is concerned; Throttled or Unavailable once nothing was accepted
        for `give_up_after_s`; AccessDenied, NotFound, InvalidRequest as the service says. After
        such an error each call raises it again, until `flush` is called.
        """
        self._require_open()
        if not isinstance(key, str):
            raise TypeError(f"the key of a record is a text, not {type(key).__name__}")
        if isinstance(data, str):
            data = data.encode()
        elif not isinstance(data, bytes):
            raise TypeError(f"the data of a record is bytes or a text, not {type(data).__name__}")
        self._producer.add(PutEntry(data, key, explicit_hash_key))

    def flush(self) -> None:
        """Return when every record that was put is in the stream.

        Raises: as `put`. Call it again to send the records that are not acknowledged: none was
        dropped.
        """
        self._require_open()
        self._producer.resume()
        self._producer.flush()

    @property
    def waiting_records(self) -> int:
        """The records that are not acknowledged yet."""
        return self._producer.waiting_records

    def close(self) -> None:
        """End the threads and connections. Records that were not flushed are dropped. May be called
        twice."""
        self._is_closed = True
        self._producer.close()
        self._client.close()

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Flush, unless the block raised; close in any case."""
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()

    def __repr__(self) -> str:
        return f"Producer({self._stream!r})"

    def _require_open(self) -> None:
        if self._is_closed:
            raise SinkError(f"the producer of the stream {self._stream} is closed")
