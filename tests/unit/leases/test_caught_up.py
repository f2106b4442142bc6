"""What the lease table says about the end of `--until caught-up`: unknown is not read."""

import pytest

from kclrun.leases import events as e
from kclrun.model.lease import Halt, Pause, Scope
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.shard import HashRange, Shard
from kclrun.model.time import WallTime
from tests.unit.leases.manager_life import JAVA, OTHER, ManagerLife, row

AT_9 = ExtendedSequenceNumber("9")


def listed(*shards):
    whole = HashRange(0, 2**128 - 1)
    return tuple(Shard(each, whole, "1") for each in shards)


def synced(*rows, **policy):
    life = ManagerLife(*rows, **policy)
    life.say(e.ShardsListed(listed(*(lease.key for lease in rows)), 5_100.0))
    return life


def of_another(owner=OTHER, **fields):
    return row("s0", owner, 7, checkpoint=AT_9, **fields)


@pytest.mark.parametrize("owner", [OTHER, JAVA])
def test_a_lease_of_an_owner_that_is_only_listed_is_not_known_to_be_read(owner):
    life = synced(of_another(owner))
    assert life.core.caught_up.blockers() == (f"s0 is of {owner}, not seen to renew it yet",)

    life.scan(renewed=False)
    assert life.core.caught_up.blockers() == (f"s0 is of {owner}, not seen to renew it yet",)
    assert life.core.caught_up.read_elsewhere() == ()

    life.scan(after=4.0, renewed=True)
    assert life.core.caught_up.blockers() == ()
    assert [lease.key for lease in life.core.caught_up.read_elsewhere()] == ["s0"]


def test_a_lease_of_a_lost_machine_stays_in_the_way_until_it_is_taken():
    life = synced(of_another(), failover_s=10.0, leases_max=0)

    for _ in range(6):
        life.scan(after=5.0, renewed=False)
        assert life.core.caught_up.blockers(), "nobody reads it"

    assert life.core.caught_up.blockers() == ("s0 is not being read",)


@pytest.mark.parametrize(
    ("claim", "fields", "reason", "halted"),
    [
        ("halted there", {"halt": Halt("poison", WallTime(1.0))}, None, ("s0",)),
        (
            "paused there",
            {"pause": Pause(WallTime(1.0))},
            f"s0 is paused, at {OTHER}",
            (),
        ),
        (
            "a pause that is over",
            {"pause": Pause(WallTime(1.0), WallTime(2.0), Scope.ALL)},
            None,
            (),
        ),
    ],
)
def test_a_lease_that_stands_still_on_another_machine_counts_as_one_here(
    claim, fields, reason, halted
):
    life = synced(of_another(**fields))
    life.scan(after=4.0)

    assert life.core.caught_up.blockers() == ((reason,) if reason else ()), claim
    assert life.core.caught_up.halted() == halted
    is_read = not halted and reason is None
    assert bool(life.core.caught_up.read_elsewhere()) == is_read


def test_a_shard_without_a_lease_stands_in_the_way():
    halves = HashRange(0, 2**127 - 1), HashRange(2**127, 2**128 - 1)
    life = ManagerLife(row("s0", OTHER, 3, hash_range=halves[0]))
    shards = (Shard("s0", halves[0], "1"), Shard("s1", halves[1], "1"))
    life.say(e.ShardsListed(shards, 5_100.0))
    life.scan(after=4.0)

    assert life.core.caught_up.blockers()


def test_a_listing_that_creates_nothing_is_no_end():
    """The shards at the start do not cover all hash keys: no lease exists, and none is read."""
    life = ManagerLife()
    half = (Shard("s0", HashRange(0, 9), "1"),)
    life.tick(0.3)
    life.say(e.LeasesScanned(()))
    life.say(e.ShardsListed(half, 5_100.0, at_start=half))

    (reason,) = life.core.caught_up.blockers()
    assert "do not cover all hash keys" in reason


def test_of_several_streams_each_is_known():
    streams = ("1:orders:5", "1:gone:5")
    life = ManagerLife(row("1:orders:5:shardId-0", OTHER, 7), streams=streams)
    life.say(e.ShardsListed(listed("1:orders:5:shardId-0"), 5_100.0, stream=streams[0]))
    life.scan(after=4.0)
    assert life.core.caught_up.blockers() == ("the first scan and the first listing are not over",)

    life.say(e.ShardsListed(listed("1:gone:5:shardId-0"), 5_100.0, stream=streams[1]))

    (reason,) = life.core.caught_up.blockers()
    assert "stream gone" in reason


def test_a_table_that_was_not_scanned_for_long_says_nothing():
    life = synced(of_another(), failover_s=10.0)
    life.scan(after=4.0)
    assert life.core.caught_up.blockers() == ()

    old = ("the lease table was not scanned for too long",)
    assert life.core.caught_up.blockers(life.now + 30.0) == ()
    assert life.core.caught_up.blockers(life.now + 45.0) == old
