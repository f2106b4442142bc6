"""How long the ended row of a Java worker stays: until whoever it stole from must know [P2]."""

import pytest

from kclrun.model import changes as ch
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from tests.unit.leases.manager_life import JAVA, OTHER, ManagerLife, row

FAILOVER_S = 10.0


def life_beside(owner):
    """A parent that `owner` ended, whose child has begun."""
    parent = row("p", owner, checkpoint=SHARD_END, children=frozenset({"child"}))
    child = row("child", OTHER, checkpoint=ExtendedSequenceNumber("5"))
    return ManagerLife(parent, child)


def seconds_until_deleted(life, within_s=60):
    began = life.now
    while life.now - began < within_s:
        if ch.DeleteEnded("p") in life.writes():
            return life.now - began
        life.scan()
    raise AssertionError(f"not deleted within {within_s} s")


def test_it_stays_for_a_failover_though_its_child_has_begun_and_its_owner_renews_it():
    waited_s = seconds_until_deleted(life_beside(JAVA))

    assert FAILOVER_S <= waited_s <= FAILOVER_S + 10


@pytest.mark.parametrize("owner", [OTHER, None])
def test_the_row_that_a_kclrun_owner_ended_goes_at_once(owner):
    assert seconds_until_deleted(life_beside(owner)) == 0


def test_the_failover_begins_anew_for_a_row_that_was_not_ended_in_between():
    life = life_beside(JAVA)
    life.scan()
    ended = life.rows["p"]
    life.rows["p"] = row("p", JAVA, counter=9, checkpoint=ExtendedSequenceNumber("7"))
    life.scan()
    life.rows["p"] = ended

    assert seconds_until_deleted(life) >= FAILOVER_S
