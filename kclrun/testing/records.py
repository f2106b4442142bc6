"""Records for tests, made from bytes, text, pairs or mappings.

They look like the service's records: sequence numbers of 56 digits that grow, sub-sequence numbers
only inside aggregates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from kclrun.model.record import Record

RecordLike = Record | bytes | str | tuple[str, bytes | str] | Mapping[str, Any]

# Sequence numbers of Kinesis have 56 digits today and start with 49.
_FIRST_NUMBER: Final = 49 * 10**54
# 2013-01-01T00:00:00Z, and a record each second: any fixed instant makes tests repeatable.
_FIRST_ARRIVAL_S: Final = 1_356_998_400.0


def make_record(
    data: bytes | str = b"",
    key: str = "key",
    *,
    ordinal: int = 0,
    sequence_number: str | None = None,
    sub_sequence_number: int = 0,
    arrived_at_s: float | None = None,
) -> Record:
    """One record. `ordinal` is its place: sequence number and arrival time grow with it.

    `data` as text is encoded as UTF-8; `arrived_at_s` is in seconds since the epoch.

    >>> make_record("hello", ordinal=2).sequence_number[-4:]
    '0002'
    """
    return Record(
        data=data.encode() if isinstance(data, str) else data,
        partition_key=key,
        sequence_number=sequence_number or str(_FIRST_NUMBER + ordinal),
        sub_sequence_number=sub_sequence_number,
        approximate_arrival_timestamp=(
            _FIRST_ARRIVAL_S + ordinal if arrived_at_s is None else arrived_at_s
        ),
    )


def make_records(items: Iterable[RecordLike]) -> Iterator[Record]:
    """Records from records, bytes, text, `(key, data)` pairs or mappings, numbered in order.

    A mapping holds arguments of `make_record`. A `Record` stays as it is.

    >>> [bytes(r.data) for r in make_records(["a", b"b", ("key-7", "c"), {"data": "d"}])]
    [b'a', b'b', b'c', b'd']
    """
    for ordinal, item in enumerate(items):
        match item:
            case Record():
                yield item
            case bytes() | str():
                yield make_record(item, ordinal=ordinal)
            case (str() as key, (bytes() | str()) as data):
                yield make_record(data, key, ordinal=ordinal)
            case Mapping():
                yield make_record(**{"ordinal": ordinal, **item})
            case _:
                raise TypeError(f"no record can be made of a {type(item).__name__}")


def make_aggregate(items: Iterable[RecordLike], *, ordinal: int = 0) -> list[Record]:
    """The user records of one KPL aggregate: one sequence number, sub-sequence numbers from 0.

    >>> [str(r.position)[-2:] for r in make_aggregate(["a", "b", "c"])]
    ['00', '/1', '/2']
    """
    opened = zip(itertools.count(), make_records(items), strict=False)
    return [
        Record(
            data=record.data,
            partition_key=record.partition_key,
            sequence_number=str(_FIRST_NUMBER + ordinal),
            sub_sequence_number=sub,
            approximate_arrival_timestamp=_FIRST_ARRIVAL_S + ordinal,
            aggregated=True,
        )
        for sub, record in opened
    ]
