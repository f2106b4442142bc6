"""Cbor: what is written is read again, and any bytes are a value or one error."""

from hypothesis import given
from hypothesis import strategies as st

from kclrun.codec.cbor import MalformedCbor, decode_cbor, encode_cbor

LEAVES = st.none() | st.booleans() | st.integers(-(2**64), 2**64 - 1) | st.text() | st.binary()


RECORDS = st.lists(st.dictionaries(st.text(), LEAVES, max_size=4), max_size=4)


VALUES = st.dictionaries(st.text(), LEAVES | RECORDS, max_size=4)


@given(value=VALUES)
def test_what_is_written_is_read_again(value):
    assert decode_cbor(encode_cbor(value)) == value


@given(data=st.binary(max_size=80))
def test_any_bytes_give_a_value_or_one_error(data):
    try:
        decode_cbor(data)
    except MalformedCbor:
        pass
