"""AWS's CBOR both ways, and bytes that only look like it."""

import itertools

import cbor2
import pytest

from kclrun.codec.cbor import MalformedCbor, decode_cbor, encode_cbor
from tests.support.tables import over_rows


def test_a_time_is_tag_1_over_whole_milliseconds():
    written = encode_cbor({"Timestamp": 1_700_000_000.123})

    assert written == cbor2.dumps({"Timestamp": cbor2.CBORTag(1, 1_700_000_000_123)})
    assert decode_cbor(written) == {"Timestamp": 1_700_000_000.123}


def test_objects_without_a_length_are_read_as_the_java_sdk_writes_them():
    # {_ "Records": [_ {_ "Data": (_ h'01', h'02')}]}
    data = bytes.fromhex("bf6752 65636f726473 9f bf 6444617461 5f41014102ff ff ff ff")

    assert decode_cbor(data) == {"Records": [{"Data": b"\x01\x02"}]}


# For each tag that cbor2 decodes by itself there is one that it takes: numbers, dates, addresses,
# a UUID, fractions, patterns.
TAGGED = (
    *(1, "(a+)+b", [1, 2], b"x" * 20, b"x" * 16, b"\x7f\0\0\1", {b"\x7f\0\0\0": 8}, []),
    *("2013-03-21", "2013-03-21T20:04:00Z", "SGVsbG8=", "Subject: x\n\ny", ["s", ["a"]]),
)


def test_no_tag_but_that_of_a_time_is_taken():
    tags = [0, *range(2, 64), 100, 256, 258, 260, 261, 1004, 43_000, 55_799]
    for tag, value in itertools.product(tags, TAGGED):
        with pytest.raises(MalformedCbor):
            pytest.fail(f"{tag}: {decode_cbor(cbor2.dumps(cbor2.CBORTag(tag, value)))}")


def test_values_nest_eight_deep_in_the_outermost_and_no_deeper():
    nine = b"\x81" * 8 + b"\x80"

    assert decode_cbor(nine) == [[[[[[[[[]]]]]]]]]
    with pytest.raises(MalformedCbor):
        decode_cbor(b"\x81" + nine)


@over_rows(
    "data",
    [
        b"",
        b"\xff",
        b"\x81" * 1000,
        b"\x9f" * 1000,
        b"\xbf" * 1000,
        bytes.fromhex("9b00ffffffffffffff"),
        bytes.fromhex("5b00ffffffffffffff"),
        bytes.fromhex("a2 6161 01 6161 02"),
        bytes.fromhex("61ff"),
        cbor2.dumps(cbor2.CBORTag(1, float("inf"))),
        cbor2.dumps(cbor2.CBORTag(1, True)),
        cbor2.dumps(10**30),
    ],
)
def test_what_is_no_request_is_refused(data):
    with pytest.raises(MalformedCbor):
        decode_cbor(data)
