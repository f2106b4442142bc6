"""Records for tests, made from bytes, text, pairs or mappings.

They look like the service's records: sequence numbers of 56 digits that grow, sub-sequence numbers
only inside aggregates.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from kclrun.model.record import Record

RecordLike = Record | bytes | str | tuple[str, bytes | str] | Mapping[str, Any]

# Sequence numbers of Kinesis have 56 digits today and start with 49.
_FIRST_NUMBER: Final = 49 * 10**54
_DAY_S: Final = 86_400
# Events of today, in every time zone, are from before their arrival, as in production. A midnight,
# because windows of the arrival then begin at the same record on every day.
_FIRST_ARRIVAL_S: Final = float((int(time.time()) // _DAY_S + 2) * _DAY_S)


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

    `data` as text is encoded as UTF-8. `arrived_at_s` is in seconds since the epoch. Left out, the
    first record arrives at the end of tomorrow (midnight in UTC, as of the start of the tests), and
    one more each second: so events of today have happened before they arrive, and windows of the
    arrival begin at the same records every day.

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


def make_records(
    items: Iterable[RecordLike], *, first_arrival_s: float | None = None
) -> Iterator[Record]:
    """Records from records, bytes, text, `(key, data)` pairs or mappings, numbered in order.

    A mapping holds arguments of `make_record`. A `Record` stays as it is. The first arrives at
    `first_arrival_s`, in seconds since the epoch, and one more each second; left out, they arrive
    as those of `make_record`.

    >>> [bytes(r.data) for r in make_records(["a", b"b", ("key-7", "c"), {"data": "d"}])]
    [b'a', b'b', b'c', b'd']
    """
    first_s = _FIRST_ARRIVAL_S if first_arrival_s is None else first_arrival_s
    for ordinal, item in enumerate(items):
        given: dict[str, Any] = {"ordinal": ordinal, "arrived_at_s": first_s + ordinal}
        match item:
            case Record():
                yield item
            case bytes() | str():
                yield make_record(item, **given)
            case (str() as key, (bytes() | str()) as data):
                yield make_record(data, key, **given)
            case Mapping():
                given["arrived_at_s"] += item.get("ordinal", ordinal) - ordinal
                yield make_record(**{**given, **item})
            case _:
                raise TypeError(f"no record can be made of a {type(item).__name__}")


def make_aggregate(
    items: Iterable[RecordLike], *, ordinal: int = 0, arrived_at_s: float | None = None
) -> list[Record]:
    """The user records of one KPL aggregate: one sequence number, sub-sequence numbers from 0. They
    arrive together, as a `make_record` does.

    >>> [str(r.position)[-2:] for r in make_aggregate(["a", "b", "c"])]
    ['00', '/1', '/2']
    """
    arrival = _FIRST_ARRIVAL_S + ordinal if arrived_at_s is None else arrived_at_s
    opened = zip(itertools.count(), make_records(items), strict=False)
    return [
        Record(
            data=record.data,
            partition_key=record.partition_key,
            sequence_number=str(_FIRST_NUMBER + ordinal),
            sub_sequence_number=sub,
            approximate_arrival_timestamp=arrival,
            aggregated=True,
        )
        for sub, record in opened
    ]
