"""A record as users see it, and the batch they are given.

Field names of `Record` decode straight from a GetRecords body; what an aggregate adds has
defaults. Frozen and outside the garbage collector: millions of them are made a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, overload

import msgspec

from kclrun.model.sequence import ExtendedSequenceNumber

__all__ = ["Record", "RecordBatch"]


class OffTheWire:
    """At run time, the type of the fields that no GetRecords body may set.

    No JSON value decodes to it, so a body that spells `sub_sequence_number` or `aggregated` is
    refused by the decoder itself, at no cost to one that does not. Constructors check nothing.
    """


if TYPE_CHECKING:
    OwnInt = int
    OwnStr = str
    OwnBool = bool
else:
    OwnInt = OwnStr = OwnBool = OffTheWire


class Record(msgspec.Struct, frozen=True, gc=False):
    """One user record.

    `data` is the payload. `approximate_arrival_timestamp` is in seconds since the epoch, as the
    service sent it. `sub_sequence_number` is the index inside a KPL aggregate, else 0.
    `aggregated` says the record came out of an aggregate; `malformed` says the bytes looked like
    an aggregate and were none, so they are delivered as they are.
    """

    data: bytes = msgspec.field(name="Data")
    partition_key: str = msgspec.field(name="PartitionKey")
    sequence_number: str = msgspec.field(name="SequenceNumber")
    approximate_arrival_timestamp: float = msgspec.field(
        name="ApproximateArrivalTimestamp", default=0.0
    )
    encryption_type: str | None = msgspec.field(name="EncryptionType", default=None)
    sub_sequence_number: OwnInt = 0
    explicit_hash_key: OwnStr | None = None
    aggregated: OwnBool = False
    malformed: OwnBool = False

    @property
    def position(self) -> ExtendedSequenceNumber:
        return ExtendedSequenceNumber(self.sequence_number, self.sub_sequence_number)

    @property
    def arrived_at(self) -> datetime:
        """`approximate_arrival_timestamp` as an aware datetime in UTC."""
        return datetime.fromtimestamp(self.approximate_arrival_timestamp, UTC)

    def __repr__(self) -> str:
        """Names the record without its payload or key: representations end up in logs."""
        return f"Record({self.position}, {len(self.data)} bytes)"


class RecordBatch(Sequence[Record]):
    """Records of one shard in their order, as given to `process_records`.

    `millis_behind_latest` is what GetRecords said when the batch was fetched, or None.
    `fencing_token` is the lease counter at the claim: it only grows over a lease's life, so a sink
    that refuses smaller tokens is safe from a former owner.
    """

    __slots__ = ("fencing_token", "millis_behind_latest", "records")

    def __init__(
        self,
        records: Sequence[Record],
        millis_behind_latest: int | None = None,
        fencing_token: int = 0,
    ) -> None:
        self.records = records
        self.millis_behind_latest = millis_behind_latest
        self.fencing_token = fencing_token

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | Sequence[Record]:
        return self.records[index]

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __repr__(self) -> str:
        return f"RecordBatch({len(self.records)} records)"
