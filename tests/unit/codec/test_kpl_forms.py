"""Aggregates as other producers write them: each is read as it says, and what is put back from
dead letters is read as the same records again."""

import base64
import gzip
import hashlib

import pytest

from kclrun.cli.dead_letters.redrive import entry_of
from kclrun.codec.aggregator import build_aggregate
from kclrun.codec.kpl import MAGIC, is_sound, open_aggregates
from kclrun.model.record import Record
from tests.support.letters import letter

# Fields of the message, by hand: 1 key table, 2 table of hash keys, 3 a user record, which has
# 1 an index of a key, 2 an index of a hash key, 3 data, 4 tags.
KEY = b"\x0a\x01k"
PLAIN = b"\x1a\x05\x08\x00\x1a\x01d"


def sealed(message):
    return MAGIC + message + hashlib.md5(message).digest()


def user(content):
    return b"\x1a" + bytes([len(content)]) + content


def hash_keys(text):
    return b"\x12" + bytes([len(text)]) + text


GOOD = sealed(KEY + PLAIN)
# The user records of a form: key, hash key, data. None: it is delivered as it came.
FORMS = {
    "a good one": (GOOD, [("k", None, b"d")]),
    "records before the tables": (sealed(PLAIN + KEY), [("k", None, b"d")]),
    "an unknown field": (sealed(KEY + PLAIN + b"\x4a\x02zz"), [("k", None, b"d")]),
    "tags": (sealed(KEY + user(b"\x08\x00\x1a\x01d\x22\x03\x0a\x01t")), [("k", None, b"d")]),
    "no data in it": (
        sealed(KEY + user(b"\x08\x00\x1a\x00") + PLAIN),
        [("k", None, b""), ("k", None, b"d")],
    ),
    "no user records": (sealed(KEY), []),
    "an empty key": (sealed(b"\x0a\x00" + PLAIN), [("", None, b"d")]),
    "an empty hash key": (
        sealed(KEY + hash_keys(b"") + user(b"\x08\x00\x10\x00\x1a\x01d")),
        [("k", "", b"d")],
    ),
    "a hash key that is too high": (
        sealed(KEY + hash_keys(str(2**128).encode()) + user(b"\x08\x00\x10\x00\x1a\x01d")),
        [("k", str(2**128), b"d")],
    ),
    "minus one for no hash key": (
        sealed(KEY + user(b"\x08\x00\x10" + b"\xff" * 9 + b"\x01\x1a\x01d")),
        [("k", None, b"d")],
    ),
    "an aggregate in an aggregate": (build_aggregate([("k", GOOD, None)]), [("k", None, GOOD)]),
    "one in one in one": (
        build_aggregate([("k", build_aggregate([("in", GOOD, "7")]), "5")]),
        [("k", "5", build_aggregate([("in", GOOD, "7")]))],
    ),
    "a wrong MD5": (GOOD[:-1] + b"\x00", None),
    "no MD5": (GOOD[:-16], None),
    "no table of keys": (sealed(PLAIN), None),
    "an index above the table": (sealed(KEY + user(b"\x08\x07\x1a\x01d")), None),
    "no index": (sealed(KEY + user(b"\x1a\x01d")), None),
    "no data": (sealed(KEY + user(b"\x08\x00")), None),
    "an index above the hash keys": (sealed(KEY + user(b"\x08\x00\x10\x00\x1a\x01d")), None),
    "a key that is not UTF-8": (sealed(b"\x0a\x01\xe9" + PLAIN), None),
    "the magic alone": (MAGIC, None),
    "the magic and the MD5 of nothing": (sealed(b""), None),
    "two of them": (GOOD + GOOD, None),
    "a line break behind it": (GOOD + b"\n", None),
    "in base64": (base64.b64encode(GOOD), None),
    "in gzip": (gzip.compress(GOOD), None),
}


def read(data, key="outer", hash_key=None):
    opened = open_aggregates([Record(data, key, "9", explicit_hash_key=hash_key)])
    return [(record.partition_key, record.explicit_hash_key, record.data) for record in opened]


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_read_as_its_records_or_as_it_came(form):
    data, records = FORMS[form]

    assert read(data) == ([("outer", None, data)] if records is None else records)
    assert is_sound(data) == (records is not None)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_put_back_is_read_as_the_same_records_again(form):
    for key, hash_key, data in read(FORMS[form][0]):
        put = entry_of(letter(9, partition_key=key, explicit_hash_key=hash_key, data=data))

        assert (put.partition_key, put.explicit_hash_key) == (key, hash_key)
        assert read(put.data, key, hash_key) == [(key, hash_key, data)]
