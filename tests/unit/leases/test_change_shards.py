"""Shards of a DynamoDB stream: children that are listed one after the other, and no order of ids.

Each test is an attack of `docs/explanation/dynamodb-streams.md`.
"""

import pytest

from kclrun.leases import events as e
from kclrun.leases.policy import ENDED_ROWS_STAY_S
from kclrun.model.sequence import LATEST, SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import ALL_HASH_KEYS, Shard
from kclrun.protocol import writes as ch
from tests.unit.leases.manager_life import OTHER, ManagerLife, row


def named(made_at, number=1):
    return f"shardId-{made_at:020}-{number:08x}"


def shard(key, parent=None, ending=None):
    return Shard(key, ALL_HASH_KEYS, "1", ending, parent)


OLD, PARENT, FIRST, SECOND = named(1), named(2), named(3, 1), named(3, 2)
BEGUN = ExtendedSequenceNumber("5")


def family():
    """The parent has ended, and its first child has begun."""
    return (
        row(PARENT, OTHER, checkpoint=SHARD_END, children=frozenset({FIRST})),
        row(FIRST, OTHER, checkpoint=BEGUN, parents=frozenset({PARENT})),
    )


def written(life, shards, *, seconds):
    """What is written under such a listing, made again and again; deletions are performed."""
    found = []
    for _ in range(int(seconds / 5)):
        life.scan(after=5.0)
        found += life.writes()
        life.say(e.ShardsListed(shards, 1.0))
        found += life.writes()
        for change in found:
            if isinstance(change, ch.DeleteEnded | ch.DeleteTrimmed):
                life.rows.pop(change.key, None)
    return found


def test_a_second_child_that_is_listed_an_hour_later_begins_at_its_first_record():
    life = ManagerLife(*family(), start=LATEST)
    shards = (shard(PARENT, ending="4"), shard(FIRST, PARENT))

    early = written(life, shards, seconds=3600)
    assert not [change for change in early if isinstance(change, ch.DeleteEnded)]

    late = written(life, (*shards, shard(SECOND, PARENT)), seconds=10)
    (created, *_) = [change for change in late if isinstance(change, ch.CreateChildren)]
    (lease,) = created.children
    assert (lease.key, lease.checkpoint, lease.latest_pinned_at) == (SECOND, TRIM_HORIZON, None)
    assert [each.key for each in created.parents] == [PARENT]


def test_an_ended_row_goes_once_its_shard_is_not_listed_any_more():
    life = ManagerLife(*family())
    listed = (shard(PARENT, ending="4"), shard(FIRST, PARENT))

    assert not written(life, listed, seconds=3 * ENDED_ROWS_STAY_S)
    gone = written(life, listed[1:], seconds=2 * ENDED_ROWS_STAY_S)
    assert {change.key for change in gone} == {PARENT}


def test_at_latest_a_closed_shard_without_listed_children_has_a_lease_that_waits_for_them():
    life = ManagerLife(start=LATEST)
    closed = shard(PARENT, ending="4")

    life.say(e.ShardsListed((closed,), 77.0, (closed,)))

    (created,) = life.writes(ch.CreateLease)
    assert (created.lease.key, created.lease.latest_pinned_at) == (PARENT, 77.0)


MADE_MS = 1_700_000_000_000
GRAND, LATE, CHILD = (named(MADE_MS + n * 60_000) for n in range(3))


@pytest.mark.parametrize("start", [TRIM_HORIZON, LATEST])
@pytest.mark.parametrize("is_first", [True, False], ids=["no rows yet", "its grandparent is read"])
def test_a_child_that_is_listed_before_its_parent_is_not_read_before_it(start, is_first):
    life = ManagerLife(*(() if is_first else (row(GRAND, OTHER, checkpoint=BEGUN),)), start=start)
    listed_at = MADE_MS / 1000 + 125
    early = (shard(GRAND, ending="9"), shard(CHILD, LATE))
    at_start = {TRIM_HORIZON: (early[0], early[1]), LATEST: early}[start]

    def listing(shards, at_start, at):
        life.scan(after=5.0)
        life.say(e.ShardsListed(shards, at, at_start if is_first else None))
        return {
            lease.key
            for change in life.writes()
            for lease in getattr(change, "children", None) or [change.lease]
            if isinstance(change, ch.CreateLease | ch.CreateChildren)
        }

    assert listing(early, at_start, listed_at) == set()
    assert listing(early, at_start, listed_at + 60) == set()

    whole = (early[0], shard(LATE, GRAND, ending="20"), early[1])
    first = {TRIM_HORIZON: (whole[0],), LATEST: (whole[2],)}[start]
    begun = {first[0].shard_id} if is_first else set()
    assert listing(whole, first, listed_at + 65) == begun


def test_a_parent_that_stays_away_for_ten_minutes_is_not_waited_for():
    life = ManagerLife(row(OLD, OTHER, checkpoint=BEGUN))
    shards = (shard(OLD), shard(CHILD, LATE))
    for waited_s, created in ((599, set()), (601, {CHILD})):
        life.scan(after=5.0)
        life.say(e.ShardsListed(shards, MADE_MS / 1000 + 120 + waited_s))
        assert {change.lease.key for change in life.writes(ch.CreateLease)} == created
