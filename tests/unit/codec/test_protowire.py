"""Fields of a message counted without parsing it."""

from __future__ import annotations

import pytest

from kclrun.codec.protowire import count_fields
from kclrun.errors import LimitExceeded, MalformedAggregate


def test_every_kind_of_field_counts_once() -> None:
    varint, fixed64, text, fixed32 = b"\x08\x80\x01", b"\x09" + bytes(8), b"\x12\x02hi", b"\x1d1234"

    assert count_fields(varint + fixed64 + text + fixed32, 4) == 4
    assert count_fields(b"", 0) == 0


def test_counting_stops_at_the_limit() -> None:
    with pytest.raises(LimitExceeded):
        count_fields(b"\x12\x00" * 3 + b"\xff", 2)


@pytest.mark.parametrize(
    "wrong",
    [b"\x08", b"\x12\x05hi", b"\x09\x00", b"\x0b\x0c", b"\x0f", b"\x08" + b"\x80" * 11, b"\x80"],
)
def test_what_is_no_sequence_of_fields_is_malformed(wrong: bytes) -> None:
    with pytest.raises(MalformedAggregate):
        count_fields(wrong, 10)
