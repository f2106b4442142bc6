"""What the shells need from the world, as small Protocols; and the pure retry classification.

May know: the model and the errors. May not know: how any of it is done. Implementations:
`aws/` (the service), `local/` (in memory, the embedded model). One contract suite a port runs
over all of them (`tests/contract/`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import msgspec

from kclrun.model.backoff import backoff_s
from kclrun.model.changes import LeaseChange
from kclrun.model.instance import InstanceIdentity, InstanceLook, LifecycleAction
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.measurement import Measurement
from kclrun.model.outcomes import Outcome
from kclrun.model.outgoing import PutEntry, PutResult
from kclrun.model.reading import IteratorType
from kclrun.model.record import Record
from kclrun.model.shard import ChildShard, Shard
from kclrun.model.time import WallTime

__all__ = [
    "FetchedPage",
    "InstanceMetadata",
    "IteratorType",
    "LeaseTable",
    "LifecycleActions",
    "MetricOutlet",
    "RecordPutter",
    "Retry",
    "ScanPage",
    "ShardFilter",
    "ShardReader",
    "StreamAdmin",
    "StreamSummary",
    "backoff_s",
    "classify",
]


class FetchedPage(msgspec.Struct, frozen=True):
    """One GetRecords answer, aggregates not yet opened.

    `next_iterator` None means the end of a closed shard; `children` then names its children
    (possibly none with services that leave them out). `body_bytes` is the size on the wire;
    `served_at` the service's own time, to the second, None where it did not say.
    """

    records: Sequence[Record]
    next_iterator: str | None
    millis_behind_latest: int | None
    children: tuple[ChildShard, ...] = ()
    body_bytes: int = 0
    served_at: WallTime | None = None


class ShardReader(Protocol):
    """Reading one shard by polling. Calls raise ServiceError leaves; none is retried inside."""

    def iterator(
        self,
        shard_id: str,
        kind: IteratorType,
        *,
        sequence_number: str | None = None,
        timestamp: WallTime | None = None,
    ) -> str:
        """A shard iterator, good for five minutes. Raises: NotFound, Throttled, Unavailable, …"""
        ...

    def fetch(self, iterator: str, limit: int) -> FetchedPage:
        """One GetRecords. Raises: ExpiredIterator, Throttled, Unavailable, NotFound, …"""
        ...


class StreamSummary(msgspec.Struct, frozen=True):
    """DescribeStreamSummary, as far as we use it. `created_at` tells a re-created stream."""

    name: str
    arn: str
    status: str
    retention_hours: int
    open_shards: int
    created_at: WallTime


class ShardFilter(msgspec.Struct, frozen=True):
    """A ListShards filter: AT_TRIM_HORIZON, AT_LATEST, AT_TIMESTAMP (with its time), …"""

    kind: str
    timestamp: WallTime | None = None


class StreamAdmin(Protocol):
    """The control plane of one stream."""

    def summary(self) -> StreamSummary: ...

    def list_shards(self, shard_filter: ShardFilter | None = None) -> tuple[Shard, ...]:
        """A complete listing (all pages), or a ServiceError; never a part."""
        ...


class RecordPutter(Protocol):
    """Writing to one stream. Threads may share it."""

    def put(self, entries: Sequence[PutEntry]) -> tuple[PutResult, ...]:
        """One PutRecords, sent once: a result for each entry, in order.

        At most 500 entries within the request's bytes. A refused entry is a result with its
        `error_code`, not an error. Raises, where the request as a whole failed: Throttled,
        Unavailable, OutcomeUnknown (some of it may be in the stream), AccessDenied, NotFound,
        InvalidRequest.
        """
        ...


class ScanPage(msgspec.Struct, frozen=True):
    """Rows of one page of a scan: those that are leases, and the keys of those that are broken.

    `foreign` counts rows of another `entityType` [P8].
    """

    leases: tuple[Lease, ...]
    broken: tuple[str, ...] = ()
    foreign: int = 0


class LeaseTable(Protocol):
    """The rows all owners share. Every write is conditional; none is retried inside."""

    def scan(self) -> Iterator[ScanPage]:
        """All pages, consistently read. Raises a ServiceError leaf; a broken row never fails it."""
        ...

    def read(self, key: LeaseKey) -> Lease | None:
        """One row by consistent read; None if there is none. Raises a ServiceError leaf."""
        ...

    def offered(self, rows_max: int) -> tuple[Lease, ...]:
        """Rows that wait for a taker: found by the owner index, read consistently [P17].

        At most `rows_max`, at random among more. Raises a ServiceError leaf; `NotFound` where the
        table has no such index.
        """
        ...

    def write(self, change: LeaseChange) -> Outcome:
        """Send one change once. Never raises a ServiceError: each outcome is a value."""
        ...


class MetricOutlet(Protocol):
    """A service that keeps metrics. Used by one thread."""

    def batches(self, measurements: Sequence[Measurement]) -> Iterator[Sequence[Measurement]]:
        """These, in parts that each fit into one request."""
        ...

    def put(self, batch: Sequence[Measurement]) -> None:
        """Send one batch once. Raises: Throttled, Unavailable (nothing happened), OutcomeUnknown
        (it may count already), AccessDenied, InvalidRequest; what else is wrong with settings."""
        ...


class InstanceMetadata(Protocol):
    """What EC2 tells an instance about itself. Used by one thread at a time; a service that is
    not there costs its caller a second, one that hangs a few."""

    def identify(self) -> InstanceIdentity:
        """Which instance this is. Raises: Unavailable where nobody answers, or no EC2 does."""
        ...

    def look(self) -> InstanceLook:
        """What awaits it. Raises: Unavailable."""
        ...


class LifecycleActions(Protocol):
    """What an autoscaling group waits for. Threads may share it; each request is sent once.

    Both raise: NotFound (no such hook or group, or nothing waits there), Throttled, Unavailable,
    OutcomeUnknown, AccessDenied, InvalidRequest.
    """

    def heartbeat(self, action: LifecycleAction) -> None:
        """Have the hook's time begin anew."""
        ...

    def complete(self, action: LifecycleAction) -> None:
        """Tell the group to go on."""
        ...


class Retry(enum.Enum):
    """What to do about a failed request."""

    AGAIN_SLOWER = "throttled: nothing happened, wait longer"
    AGAIN = "not sent or harmless to repeat: ask again"
    READ_BACK = "a write with an unknown outcome: read before deciding"
    NEW_ITERATOR = "the iterator expired"
    GIVE_UP = "repeating will not help"


_THROTTLES: Final = frozenset(
    {
        "ProvisionedThroughputExceededException",
        "LimitExceededException",
        "Throttling",  # CloudWatch and STS, by their older protocol
        "ThrottlingException",
        "ThrottledException",
        "RequestLimitExceeded",
        "TooManyRequestsException",
        "KMSThrottlingException",
        "SlowDown",
    }
)
# A KMS trouble is the operator's to mend while the shard waits; the Java KCL retries them for ever.
_TRANSIENT: Final = frozenset(
    {
        "InternalFailure",
        "InternalFailureException",
        "InternalServerError",
        "ServiceUnavailable",
        "ServiceUnavailableException",
        "TransactionInProgressException",
        "TransactionConflictException",
        "KMSAccessDeniedException",
        "KMSDisabledException",
        "KMSInvalidStateException",
        "KMSNotFoundException",
        "KMSOptInRequired",
        "ResourceInUseException",
    }
)


def classify(code: str, status: int | None, *, is_write: bool, was_sent: bool) -> Retry:
    """Say what to do about a failed request, from what is known about it and nothing else.

    `code` is the service's error name, or "" for a transport failure; `status` the HTTP status,
    None where no answer came; `was_sent` whether any byte of the request may have reached the
    service. A write without a clear answer is READ_BACK [P6].
    """
    if code in _THROTTLES or status == 429:
        return Retry.AGAIN_SLOWER
    if code == "ExpiredIteratorException":
        return Retry.NEW_ITERATOR
    unclear = status is None or status >= 500
    if unclear and is_write and was_sent:
        return Retry.READ_BACK
    if unclear or code in _TRANSIENT:
        return Retry.AGAIN
    return Retry.GIVE_UP
