"""Whether a shard was read to its end, where the table may have no row of it any more."""

import pytest

from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.operating.finished import Finished, ended_in_stories
from kclrun.operating.story import Entry

BEGUN = ExtendedSequenceNumber("49671234567890123456789012345678901234567890123456789012")


def key(number):
    return LeaseKey(f"shardId-{number:012d}")


def row(number, **fields):
    given = {"checkpoint": BEGUN, "counter": 7, "owner": None, "start": "TRIM_HORIZON"}
    return Lease(key=key(number), **(given | fields))


def shard(number, *parents):
    named = [key(parent) for parent in parents] + [None, None]
    return Shard(key(number), HashRange(0, HASH_KEY_MAX), "1", None, named[0], named[1])


# Shard 0 was split into 1 and 2.
LISTED = (shard(0), shard(1, 0), shard(2, 0))
CHILDREN = (row(1), row(2))


@pytest.mark.parametrize(
    ("rows", "listed", "ended", "is_finished"),
    [
        pytest.param((row(0, checkpoint=SHARD_END),), LISTED, (), True, id="its row says so"),
        pytest.param((row(0), *CHILDREN), LISTED, (), False, id="its row says that it is read"),
        pytest.param((), (), (key(0),), True, id="the story says so"),
        pytest.param(CHILDREN, LISTED, (), True, id="its children have begun, and it is listed"),
        pytest.param(
            (row(1, checkpoint=TRIM_HORIZON), row(2)), LISTED, (), None, id="a child has not begun"
        ),
        pytest.param(
            (row(1, start="LATEST"), row(2, start="LATEST")),
            LISTED,
            (),
            None,
            id="it may be from before the start",
        ),
        pytest.param(
            (row(1, start=None), row(2, start=None)), LISTED, (), None, id="of a Java worker"
        ),
        pytest.param(
            (row(1, generation=1), row(2)), LISTED, (), None, id="a reset may have skipped it"
        ),
        pytest.param(
            (row(1, parents=frozenset({key(0)})),), LISTED[1:], (), None, id="it may be trimmed"
        ),
        pytest.param((), LISTED, (), False, id="no shard after it has a row"),
        pytest.param((), (), (), None, id="nothing knows it"),
    ],
)
def test_only_what_the_row_the_story_or_the_listing_proves_is_finished(
    rows, listed, ended, is_finished
):
    judge = Finished(
        {each.key: each for each in rows}, {each.shard_id: each for each in listed}, ended
    )

    assert judge.is_finished(key(0)) is is_finished


def test_rows_that_name_each_other_as_parents_end_the_search():
    rows = {key(0): row(0, parents=frozenset({key(1)})), key(2): row(2)}
    judge = Finished(rows, {key(1): shard(1, 0), key(3): shard(3, 3)})

    assert judge.is_finished(key(3)) is False
    assert judge.is_named(key(1))
    assert not judge.is_named(key(9))


def test_a_story_of_a_shard_without_children_may_be_of_a_time_range():
    entries = [
        Entry(1.0, "kclrun:a:b:c", "shard_ended", "s-0", {"children": "s-1, s-2"}),
        Entry(2.0, "kclrun:a:b:c", "shard_ended", "s-9"),
        Entry(3.0, "kclrun:a:b:c", "lease_claimed", "s-1"),
    ]

    assert ended_in_stories(entries) == {"s-0"}
