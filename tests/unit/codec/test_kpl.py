"""Aggregates: opened whole or delivered raw, with limits; hash ranges; dropping to a checkpoint."""

import hashlib
import random
import subprocess
import sys

import msgspec
import pytest

from kclrun.codec.aggregator import build_aggregate
from kclrun.codec.kpl import (
    MAGIC,
    USER_RECORDS_MAX,
    drop_until,
    effective_hash_key,
    open_aggregate,
    open_aggregates,
    open_in_parts,
)
from kclrun.errors import LimitExceeded, MalformedAggregate
from kclrun.model.record import Record
from kclrun.model.sequence import (
    AT_TIMESTAMP,
    LATEST,
    SHARD_END,
    TRIM_HORIZON,
    ExtendedSequenceNumber,
)
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from tests.support.tables import over_rows

MIB = 1024 * 1024
KEY_TABLE = b"\x0a\x01k"
USER_RECORD = b"\x1a\x05\x08\x00\x1a\x01d"  # key index 0, data "d"


def sealed(message: bytes) -> bytes:
    return MAGIC + message + hashlib.md5(message).digest()


def raw(data: bytes, number: str = "7") -> Record:
    return Record(data, "outer", number, 12.5, "KMS")


def test_user_records_carry_what_their_aggregate_knew():
    aggregate = raw(build_aggregate([("a", b"1", None), ("b", b"", "42"), ("a", b"3", None)]))

    assert open_aggregates([aggregate]) == [
        Record(b"1", "a", "7", 12.5, "KMS", 0, None, True),
        Record(b"", "b", "7", 12.5, "KMS", 1, "42", True),
        Record(b"3", "a", "7", 12.5, "KMS", 2, None, True),
    ]


def test_a_page_without_aggregates_is_returned_as_it_is():
    page = [raw(b""), raw(MAGIC[:3]), raw(b"\xff\xff\xff\xff\xff")]

    assert open_aggregates(page) is page


def test_plain_records_keep_their_places_among_aggregates():
    aggregate = build_aggregate([("a", b"2", None), ("a", b"3", None)])
    page = (raw(b"1", "1"), raw(aggregate, "2"), raw(b"4", "3"))

    assert [record.data for record in open_aggregates(page)] == [b"1", b"2", b"3", b"4"]


def test_what_was_opened_is_not_opened_again():
    inner = build_aggregate([("a", b"1", None)])
    once = open_aggregates([raw(build_aggregate([("a", inner, None)])), raw(MAGIC)])

    assert [(record.data, record.malformed) for record in once] == [(inner, False), (MAGIC, True)]
    assert open_aggregates(once) == once


def test_an_aggregate_without_user_records_yields_none():
    page = [raw(sealed(KEY_TABLE)), raw(b"next", "8")]

    assert [record.data for record in open_aggregates(page)] == [b"next"]


def test_tags_and_unknown_fields_are_passed_over():
    tagged = b"\x1a\x0a\x08\x00\x1a\x01d\x22\x03\x0a\x01t"

    (opened,) = open_aggregates([raw(sealed(KEY_TABLE + tagged + b"\xf8\x07\x01"))])

    assert (opened.partition_key, opened.data) == ("k", b"d")


# The fields of a user record: key index, hash key index, data, a tag; four that are not what they
# look like: a number where bytes belong, and indexes packed as bytes, whole and cut off.
FIELDS = {
    "key 0": b"\x08\x00",
    "key 1": b"\x08\x01",
    "hash 0": b"\x10\x00",
    "no hash": b"\x10" + b"\xff" * 9 + b"\x01",
    "data d": b"\x1a\x01d",
    "data": b"\x1a\x00",
    "tag": b"\x22\x00",
    "number": b"\x18\x07",
    "packed": b"\x0a\x02\x00\x01",
    "cut": b"\x0a\x01\xff",
    "cut hash": b"\x12\x01\xff",
}


def expected_of(users):
    """What protobuf says of fields written many times: the last one counts; both are required."""
    found = []
    for number, fields in enumerate(users):
        last = {field.split()[0]: field for field in fields}
        if "key" not in last or "data" not in last:
            return None
        key = last["key"].replace("key ", "k")
        # "no hash" begins with another word, so its place among the fields is looked up.
        hashed = [each for each in fields if each in ("hash 0", "no hash")]
        hash_key = "9" if hashed and hashed[-1] == "hash 0" else None
        data = b"d" if last["data"] == "data d" else b""
        found.append(Record(data, key, "7", 12.5, "KMS", number, hash_key, True))
    return found


def test_user_records_are_the_same_however_their_fields_are_spread():
    """Columns are read where row `i` of each is user record `i`, and nowhere else: two of a field
    here and none there must not shift a payload to another user record.
    """
    chance = random.Random(5)
    tables = b"\x0a\x02k0\x0a\x02k1\x12\x019"
    sound = 0
    for _ in range(3_000):
        whole = [["key 1", "data d"] for _ in range(chance.randrange(4))]
        odd = [chance.choices(list(FIELDS), k=chance.randrange(6)) for _ in range(2)]
        users = chance.sample(whole + odd, k=len(whole) + 2)
        bodies = [b"".join(FIELDS[field] for field in fields) for fields in users]
        record = raw(sealed(tables + b"".join(b"\x1a" + bytes([len(b)]) + b for b in bodies)))

        expected = expected_of(users)

        sound += expected is not None
        assert open_aggregates([record]) == (
            [msgspec.structs.replace(record, malformed=True)] if expected is None else expected
        ), users
    assert sound > 50


SOUND = sealed(KEY_TABLE + USER_RECORD)
MALFORMED = {
    "nothing after the magic": MAGIC,
    "too short for a message": MAGIC + hashlib.md5(b"").digest(),
    "no MD5 of it": SOUND[:-1] + bytes([SOUND[-1] ^ 1]),
    "cut off": SOUND[:-3],
    "a message cut off": sealed((KEY_TABLE + USER_RECORD)[:-1]),
    "not a message": sealed(b"\xff" * 20),
    "an end of a group without its start": sealed(KEY_TABLE + USER_RECORD + b"\x0c"),
    "a key index out of range": sealed(KEY_TABLE + USER_RECORD + b"\x1a\x05\x08\x01\x1a\x01d"),
    "the largest key index": sealed(KEY_TABLE + b"\x1a\x0e\x08" + b"\xff" * 9 + b"\x01\x1a\x01d"),
    "a key index beyond a C long": sealed(
        KEY_TABLE + b"\x1a\x0e\x08" + b"\x80" * 9 + b"\x01\x1a\x01d"
    ),
    "no key table": sealed(USER_RECORD),
    "no key index": sealed(KEY_TABLE + b"\x1a\x03\x1a\x01d"),
    "no data": sealed(KEY_TABLE + USER_RECORD + b"\x1a\x02\x08\x00"),
    "an empty user record": sealed(KEY_TABLE + b"\x1a\x00"),
    "a hash key index without a table": sealed(KEY_TABLE + b"\x1a\x07\x08\x00\x10\x00\x1a\x01d"),
    "a hash key index out of range": sealed(
        KEY_TABLE + b"\x12\x011" + b"\x1a\x07\x08\x00\x10\x01\x1a\x01d"
    ),
    "a key that is not UTF-8": sealed(b"\x0a\x01\xff" + USER_RECORD),
    "an unused key that is not UTF-8": sealed(KEY_TABLE + b"\x0a\x01\xff" + USER_RECORD),
    "a hash key that is not UTF-8": sealed(KEY_TABLE + b"\x12\x01\xff" + USER_RECORD),
}


@over_rows("data", MALFORMED.values())
def test_what_is_no_aggregate_is_delivered_raw_and_flagged(data):
    """Nothing is dropped silently [I9]."""
    record = raw(data)

    assert open_aggregates([record]) == [msgspec.structs.replace(record, malformed=True)]
    with pytest.raises(MalformedAggregate) as caught:
        open_aggregate(record)
    assert caught.value.__cause__ is None


def test_the_sound_one_beside_the_malformed_ones_opens():
    assert [record.aggregated for record in open_aggregates([raw(SOUND)])] == [True]


def test_a_malformed_aggregate_does_not_disturb_its_neighbours():
    page = [raw(SOUND, "1"), raw(MAGIC, "2"), raw(SOUND, "3")]

    opened = open_aggregates(page)

    assert [(r.sequence_number, r.malformed) for r in opened] == [
        ("1", False),
        ("2", True),
        ("3", False),
    ]


def test_an_aggregate_holds_at_most_its_limit_of_user_records():
    full = KEY_TABLE + USER_RECORD * USER_RECORDS_MAX

    assert len(open_aggregate(raw(sealed(full)))) == USER_RECORDS_MAX
    with pytest.raises(LimitExceeded):
        open_aggregate(raw(sealed(full + USER_RECORD)))
    (opened,) = open_aggregates([raw(sealed(full + USER_RECORD))])
    assert opened.malformed


def test_an_aggregate_above_the_largest_record_is_delivered_raw():
    """Every buffer has its limit [I12], and what is above it is not dropped either."""
    message = KEY_TABLE + b"\x1a\x85\x80\x80\x05" + bytes(10 * MIB)

    with pytest.raises(LimitExceeded, match="bytes"):
        open_aggregate(raw(sealed(message)))


BOMBS = {
    "empty user records": b"\x1a\x00",
    "empty keys": b"\x0a\x00",
    "empty hash keys": b"\x12\x00",
    "unknown fields": b"\x28\x00",
    "endless groups": b"\x0b",
}


# In a process of its own each: what a parser takes in C shows in the peak of the process alone, and
# the peak only rises. They are forks of one process, which imports the parser once.
MEASURE = """
import os, resource, sys
from kclrun.codec.kpl import open_aggregates
from kclrun.model.record import Record
sizes = sys.argv[1:]
while sizes:
    records = [Record(sys.stdin.buffer.read(int(size)), "k", "1") for size in sizes[:2]]
    sizes = sizes[2:]
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    for record in records:
        open_aggregates([Record(record.data[:-1], "k", "1")])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for record in records:
        assert all(opened.malformed for opened in open_aggregates([record]))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    break
"""


@pytest.mark.seconds
def test_the_smallest_fields_by_the_million_take_little_memory():
    records = [
        sealed(bomb * (size_bytes // len(bomb)))
        for bomb in BOMBS.values()
        for size_bytes in (MIB, 10 * MIB - 20)
    ]

    run = subprocess.run(
        [sys.executable, "-c", MEASURE, *(str(len(each)) for each in records)],
        input=b"".join(records),
        capture_output=True,
        check=True,
    )

    grew_bytes = [int(line) * 1024 for line in run.stdout.splitlines()]
    assert len(grew_bytes) == len(BOMBS)
    assert max(grew_bytes) < 64 * MIB, dict(zip(BOMBS, grew_bytes, strict=True))


def test_an_aggregate_of_ten_mebibytes_opens():
    data = build_aggregate([("k", bytes(MIB - 100), None)] * 10)

    opened = open_aggregate(raw(data))

    assert [len(record.data) for record in opened] == [MIB - 100] * 10


LOW, HIGH = HashRange(0, 2**127 - 1), HashRange(2**127, HASH_KEY_MAX)


def test_by_default_user_records_of_another_shard_are_kept():
    page = [raw(build_aggregate([("a", b"low", "0"), ("a", b"high", str(2**127))]))]

    assert len(open_aggregates(page, hash_range=LOW)) == 2


@pytest.mark.parametrize(("hash_range", "index"), [(LOW, 0), (HIGH, 1)])
def test_on_drop_only_the_records_of_another_shard_go(hash_range, index):
    page = [raw(build_aggregate([("a", b"low", "0"), ("a", b"high", str(2**127))]))]

    (kept,) = open_aggregates(page, kpl_range="drop", hash_range=hash_range)

    assert (kept.data, kept.sub_sequence_number) == ((b"low", b"high")[index], index)


def test_on_drop_a_key_is_placed_by_its_md5():
    page = [raw(build_aggregate([("a", b"1", None)]))]
    hash_key = int(hashlib.md5(b"a").hexdigest(), 16)
    around = HashRange(hash_key, hash_key)
    below = HashRange(0, hash_key - 1)

    assert len(open_aggregates(page, kpl_range="drop", hash_range=around)) == 1
    assert open_aggregates(page, kpl_range="drop", hash_range=below) == []


def test_on_drop_plain_and_malformed_records_stay():
    page = [raw(b"plain"), raw(MAGIC), raw(SOUND)]

    opened = open_aggregates(page, kpl_range="drop", hash_range=HashRange(0, 0))

    assert [record.data for record in opened] == [b"plain", MAGIC]


def test_on_drop_a_record_that_cannot_be_placed_stays():
    message = KEY_TABLE + b"\x12\x01x" + b"\x1a\x07\x08\x00\x10\x00\x1a\x01d"

    (kept,) = open_aggregates([raw(sealed(message))], kpl_range="drop", hash_range=LOW)

    assert kept.explicit_hash_key == "x"


def test_without_a_hash_range_nothing_is_dropped():
    assert len(open_aggregates([raw(SOUND)], kpl_range="drop")) == 1


def test_an_explicit_hash_key_wins_over_the_partition_key():
    assert effective_hash_key("a", "12") == 12
    assert effective_hash_key("é", None) == int(hashlib.md5("é".encode()).hexdigest(), 16)


@over_rows("wrong", ["", "-1", "x", "1.0", "٣", str(2**128), "1" * 5000])
def test_what_is_no_hash_key_is_refused(wrong):
    with pytest.raises(LimitExceeded):
        effective_hash_key("a", wrong)


def test_a_partition_key_without_utf_8_has_no_hash_key():
    with pytest.raises(LimitExceeded):
        effective_hash_key("\ud800", None)


def test_records_up_to_a_checkpoint_inside_an_aggregate_are_dropped():
    aggregate = build_aggregate([("a", b"0", None), ("a", b"1", None), ("a", b"2", None)])
    page = open_aggregates([raw(b"before", "9"), raw(aggregate, "10"), raw(b"after", "11")])

    left = drop_until(page, ExtendedSequenceNumber("10", 1))

    assert [record.data for record in left] == [b"2", b"after"]


def test_a_page_above_the_checkpoint_is_returned_as_it_is():
    page = [raw(b"", "10")]

    assert drop_until(page, ExtendedSequenceNumber("9", 5)) is page


def test_a_sentinel_drops_nothing_and_shard_end_everything():
    page = [raw(b"", "0"), raw(b"", "10")]

    for sentinel in (AT_TIMESTAMP, TRIM_HORIZON, LATEST):
        assert drop_until(page, sentinel) == page
    assert drop_until(page, SHARD_END) == []


def aggregates_of(*sizes):
    """Raw records, each an aggregate of so many empty user records; 0: no aggregate."""
    return [
        Record(build_aggregate([("k", b"", None)] * size) if size else b"plain", "k", str(number))
        for number, size in enumerate(sizes, start=1)
    ]


@over_rows(
    ("sizes", "parts"),
    [
        ((4, 4, 4, 4), [(8, "2"), (8, "4")]),
        ((9, 1, 0, 1), [(9, "1"), (3, "4")]),
        ((2, 2), [(4, "2")]),
        ((0, 7), [(8, "2")]),
        ((0,) * 20, [(20, "20")]),  # a page without aggregates is bounded by the service
    ],
)
def test_a_page_of_many_user_records_comes_in_parts_that_end_with_a_raw_record(sizes, parts):
    raw = aggregates_of(*sizes)

    found = list(open_in_parts(raw, 8))

    assert [(len(records), last.sequence_number) for records, last in found] == parts
    assert [record for records, _ in found for record in records] == open_aggregates(raw)


def test_the_next_part_is_opened_when_it_is_asked_for():
    parts = open_in_parts(aggregates_of(8, 8), 8)
    next(parts)

    assert parts.gi_frame is not None  # it stands before the second aggregate
    assert parts.gi_frame.f_locals["record"].sequence_number == "1"
