"""Fields of a message counted without parsing it."""

import pytest

from kclrun.codec.kpl import count_fields
from kclrun.errors import LimitExceeded, MalformedAggregate
from tests.support.tables import over_rows


def test_every_kind_of_field_counts_once():
    varint, fixed64, text, fixed32 = b"\x08\x80\x01", b"\x09" + bytes(8), b"\x12\x02hi", b"\x1d1234"

    assert count_fields(varint + fixed64 + text + fixed32, 4) == 4
    assert count_fields(b"", 0) == 0


def test_counting_stops_at_the_limit():
    with pytest.raises(LimitExceeded):
        count_fields(b"\x12\x00" * 3 + b"\xff", 2)


@over_rows(
    "wrong",
    [b"\x08", b"\x12\x05hi", b"\x09\x00", b"\x0b\x0c", b"\x0f", b"\x08" + b"\x80" * 11, b"\x80"],
)
def test_what_is_no_sequence_of_fields_is_malformed(wrong):
    with pytest.raises(MalformedAggregate):
        count_fields(wrong, 10)


@pytest.mark.parametrize("length", [0, 1, 126, 127, 128, 129, 16_383, 16_384])
@pytest.mark.parametrize("tag", [b"\x12", b"\x7a", b"\x82\x01"], ids=["2", "15", "16"])
def test_a_text_of_any_length_is_one_field_whole_and_malformed_cut_anywhere(tag, length):
    # A tag in the text would count as a field of its own.
    text = tag + encoded_length(length) + b"\x08" * length
    behind = b"\x08\x01"

    assert count_fields(text, 1) == 1
    assert count_fields(behind + text + behind, 3) == 3
    for cut in {1, len(tag), len(text) - length - 1, len(text) - length, len(text) - 1} - {0}:
        if cut < len(text):
            with pytest.raises(MalformedAggregate):
                count_fields(text[:cut], 1)


def encoded_length(length: int) -> bytes:
    """A varint: seven bits a byte, the lowest first."""
    encoded = b""
    while length >= 0x80:
        encoded += bytes([length & 0x7F | 0x80])
        length >>= 7
    return encoded + bytes([length])
