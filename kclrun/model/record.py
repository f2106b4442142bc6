"""A record as users see it, and the batch that a processor gets.

Field names of `Record` decode straight from a GetRecords body; the fields of an aggregate have
defaults. Frozen and outside the garbage collector: millions of them are made a second.
"""

from __future__ import annotations

import collections
import enum
import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic, Literal, overload

import msgspec

from kclrun.errors import SettingsError
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import WallTime


class OffTheWire:
    """At run time, the type of the fields that a GetRecords body must not set.

    A JSON value never decodes to it. So the decoder itself refuses a body that spells
    `sub_sequence_number` or `aggregated`, at no cost to other bodies. Constructors check nothing.
    """


class Decoding(msgspec.Struct, eq=False):
    """How `Record.value` is made: shared by the records of a lease, and one of its own for each
    record that was decoded. All are equal: records are compared by what the service sent.

    `data` is what `value` was made of; None before that.
    """

    decode: Callable[[Record], Any]
    data: bytes | None = None
    value: Any = None

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, Decoding)

    def __hash__(self) -> int:
        return hash(None)  # as that of a record without one

    def __reduce__(self) -> str | tuple[Any, ...]:
        return (_no_decoding, ())  # a decoder may hold what cannot be pickled


def _no_decoding() -> None:
    """A record from another process has its bytes alone."""


if TYPE_CHECKING:
    # With a default, so that `Record` alone is `Record[Any]`. `typing` has it from Python 3.13 on,
    # and each type checker knows this module; at run time a default changes nothing.
    from typing_extensions import TypeVar

    OwnInt = int
    OwnStr = str
    OwnBool = bool
    OwnDecoding = Decoding
    V_co = TypeVar("V_co", default=Any, covariant=True)
else:
    from typing import TypeVar

    OwnInt = OwnStr = OwnBool = OwnDecoding = OffTheWire
    V_co = TypeVar("V_co", covariant=True)


class Record(msgspec.Struct, Generic[V_co], frozen=True, gc=False):
    """One user record; `Record[Order]` is one whose `value` is an Order. It cannot be changed.

    `data` is the payload, as bytes. `partition_key` is the key that the producer put it with, of up
    to 256 characters. `sequence_number` is the place in the shard: a decimal number of up to 129
    digits, as text. `approximate_arrival_timestamp` is when the stream got it, in seconds since the
    epoch, as the service sent it. `encryption_type` is `KMS`, `NONE` or None, as the service sent
    it. `sub_sequence_number` is the index inside a KPL aggregate, else 0. `explicit_hash_key` is
    that of a record in an aggregate, if its producer gave one, else None. `aggregated`: the record
    came out of an aggregate. `malformed`: the bytes looked like an aggregate and are not one, so
    they are delivered as they are.
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
    _decoding: OwnDecoding | None = None

    @property
    def value(self) -> V_co:
        """The payload as `decode` in the settings, else `decode_as` of the processor, else the type
        in `RecordProcessor[Order]` makes it.

        Decoded at the first use, and kept until the record is given to user code again.
        Raises: UndecodableRecord, which makes the record itself the failed one under `on_error`;
        SettingsError where no decoder is named, or the record was pickled.
        """
        decoding = self._decoding
        if decoding is None:
            raise SettingsError(
                "decode: is missing; record.value needs json, text, msgpack, glue, module:Type or"
                " module:function there, or a processor class with `decode_as` or a type:"
                " RecordProcessor[Order]"
            )
        if decoding.data is not self.data:
            decoding = Decoding(decoding.decode, self.data, decoding.decode(self))
            msgspec.structs.force_setattr(self, "_decoding", decoding)
        value: V_co = decoding.value
        return value

    @property
    def position(self) -> ExtendedSequenceNumber:
        """The sequence number and the sub-sequence number, as one value with an order."""
        return ExtendedSequenceNumber(self.sequence_number, self.sub_sequence_number)

    @property
    def arrived_at(self) -> datetime:
        """`approximate_arrival_timestamp` as an aware datetime in UTC."""
        return datetime.fromtimestamp(self.approximate_arrival_timestamp, UTC)

    def __repr__(self) -> str:
        """Identifies the record without payload or key, because representations reach logs."""
        return f"Record({self.position}, {len(self.data)} bytes)"


class RecordBatch(Sequence[Record[V_co]]):
    """Records of one shard in their order, as given to `process_records`: a sequence.

    `records` are the records as one sequence. `millis_behind_latest` is by how many milliseconds
    the shard was behind its tip when the batch was fetched, as GetRecords says it; None if it is
    not known, and on Spark. `fencing_token` is that of the context: it only grows over a lease's
    life, so a store that refuses smaller ones is safe from a former owner.
    """

    __slots__ = ("fencing_token", "millis_behind_latest", "records")

    def __init__(
        self,
        records: Sequence[Record[V_co]],
        millis_behind_latest: int | None = None,
        fencing_token: int = 0,
        _decoding: Decoding | None = None,
    ) -> None:
        # With a decoding each record decodes its `value` anew, whatever an earlier call did to it.
        if _decoding is not None:
            # 40 ns a record: a third of a loop of statements.
            setters = map(
                msgspec.structs.force_setattr,
                records,
                itertools.repeat("_decoding"),
                itertools.repeat(_decoding),
            )
            collections.deque(setters, maxlen=0)
        self.records = records
        self.millis_behind_latest = millis_behind_latest
        self.fencing_token = fencing_token

    @overload
    def __getitem__(self, index: int) -> Record[V_co]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Record[V_co]]: ...
    def __getitem__(self, index: int | slice) -> Record[V_co] | Sequence[Record[V_co]]:
        return self.records[index]

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record[V_co]]:
        return iter(self.records)

    def __repr__(self) -> str:
        return f"RecordBatch({len(self.records)} records)"


# Writing to a stream: one record to put, and the service's answer for it.
#
# Rule: neither payload nor key is in a representation.
class PutEntry(msgspec.Struct, frozen=True, gc=False):
    """One record to put. `user_records` is how many it holds: more than one in an aggregate."""

    data: bytes
    partition_key: str
    explicit_hash_key: str | None = None
    user_records: int = 1

    @property
    def size_bytes(self) -> int:
        """The size as the service counts it."""
        key = self.partition_key
        return len(self.data) + (len(key) if key.isascii() else len(key.encode()))

    def __repr__(self) -> str:
        return f"PutEntry({len(self.data)} bytes)"


class PutResult(msgspec.Struct, frozen=True, rename="pascal"):
    """The result for one record: its place in the stream, or the error code."""

    sequence_number: str | None = None
    shard_id: str | None = None
    error_code: str | None = None


class IteratorType(enum.Enum):
    """The five start types of GetShardIterator."""

    TRIM_HORIZON = "TRIM_HORIZON"
    LATEST = "LATEST"
    AT_TIMESTAMP = "AT_TIMESTAMP"
    AT_SEQUENCE_NUMBER = "AT_SEQUENCE_NUMBER"
    AFTER_SEQUENCE_NUMBER = "AFTER_SEQUENCE_NUMBER"


class StartPoint(msgspec.Struct, frozen=True):
    """A start type, and the sequence number or time that it needs."""

    kind: IteratorType
    sequence_number: str | None = None
    timestamp: WallTime | None = None


# Measurements over a time, in the form that metrics services take: a name and four numbers.
#
# Rule: a metric has few values for its dimensions, and they are known beforehand, because metrics
# services bill each combination.
Unit = Literal["Count", "Bytes", "Milliseconds"]


class Statistics(msgspec.Struct, frozen=True):
    """Many values as four: enough for their sum, their average, the smallest and the greatest."""

    count: int
    total: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, value: float) -> Statistics:
        """One value."""
        return cls(1, value, value, value)

    def with_value(self, value: float) -> Statistics:
        """These and one more."""
        return Statistics(
            self.count + 1,
            self.total + value,
            min(self.minimum, value),
            max(self.maximum, value),
        )


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """The values of one metric, under one set of dimensions, in the time before `measured_at`."""

    name: str
    unit: Unit
    dimensions: tuple[tuple[str, str], ...]
    measured_at: WallTime
    statistics: Statistics
