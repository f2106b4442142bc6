"""Which rows of a table are of a stream among several: by account and name, and by what fits."""

import pytest

from kclrun.errors import TableRefused
from kclrun.leases.stream_rows import key_in_table, near_misses
from kclrun.model.lease import Lease
from kclrun.model.sequence import LATEST, SHARD_END, TRIM_HORIZON
from kclrun.model.shard import ALL_HASH_KEYS, Shard
from tests.support.build import position as at
from tests.support.tables import over_rows

OWN, MADE_UP, OTHER = "1:orders:1700000000", "1:orders:12345", "1:orders:1690000000"
CREATED = 1_700_000_000.25
OPEN = Shard("shardId-0", ALL_HASH_KEYS, "100")
CLOSED = Shard("shardId-1", ALL_HASH_KEYS, "100", "200")


def row(stream, checkpoint=TRIM_HORIZON, shard="shardId-0", **fields):
    return Lease(key=f"{stream}:{shard}", checkpoint=checkpoint, **fields)


def key(*rows, shards=(OPEN, CLOSED)):
    return key_in_table(OWN, CREATED, rows, lambda: shards, table="t")


@over_rows(
    ("claim", "rows", "expected"),
    [
        ("no rows", [], OWN),
        ("its own rows", [row(OWN, at(150))], OWN),
        ("its own beside others", [row(MADE_UP, at(150)), row(OWN, at(150))], OWN),
        ("a made-up creation", [row(MADE_UP, at(150))], MADE_UP),
        ("milliseconds", [row("1:orders:1700000000250", at(150))], "1:orders:1700000000250"),
        ("not begun", [row(MADE_UP, LATEST), row(MADE_UP, shard="shardId-7")], MADE_UP),
        ("ended", [row(MADE_UP, SHARD_END, "shardId-1")], MADE_UP),
        ("kclrun took it before", [row(MADE_UP, at(150), stream_created_at=CREATED)], MADE_UP),
        ("a former stream, by our time", [row(OTHER, at(150), stream_created_at=1.69e9)], OWN),
        ("a former stream, by its positions", [row(OTHER, at(50))], OWN),
        ("after the end of its shard", [row(OTHER, at(250), "shardId-1")], OWN),
        ("ended, and its shard is open", [row(OTHER, SHARD_END)], OWN),
        ("one that fits and a former one", [row(MADE_UP, at(150)), row(OTHER, at(50))], MADE_UP),
        ("another account", [row("2:orders:1700000000", at(150))], OWN),
        ("another name", [row("1:Orders:1700000000", at(150))], OWN),
        ("a table of one stream", [Lease(key="shardId-0", checkpoint=at(150))], OWN),
    ],
)
def test_the_rows_of_a_stream_are_those_of_its_account_and_name_that_fit(claim, rows, expected):
    assert key(*rows) == expected, claim


@pytest.mark.parametrize(
    ("claim", "rows"),
    [
        ("two that fit", [row(MADE_UP, at(150)), row(OTHER, at(150))]),
        ("one whose shards are all gone", [row(MADE_UP, at(150), "shardId-7")]),
    ],
)
def test_rows_that_may_be_of_the_stream_are_refused_in_words(claim, rows):
    with pytest.raises(TableRefused, match="nothing shows which of them are of this stream"):
        key(*rows)


def test_the_stream_is_listed_only_if_its_rows_have_another_name():
    def never():
        raise AssertionError("listed")

    assert key_in_table(OWN, CREATED, [row(OWN)], never, table="t") == OWN
    assert key_in_table(OWN, CREATED, [row("1:audits:5")], never, table="t") == OWN


@over_rows(
    ("other", "words"),
    [
        (MADE_UP, "orders with the creation 12345 instead of 1700000000"),
        ("2:orders:1700000000", "orders of account 2; the one of account 1 is read"),
        ("1:Orders:1700000000", "Orders is written otherwise than orders"),
        ("1:audits:1700000000", None),
        ("1:orders-2:1700000000", None),
        (OWN, None),
        ("", None),
    ],
)
def test_a_near_miss_is_named_with_its_difference(other, words):
    found = near_misses([OWN], [other])

    assert list(found) == ([other] if words else [])
    assert words is None or found[other].startswith(words)
