"""An ended row stays until no write of before can bring it back [I11]."""

import pytest

from kclrun.leases.policy import ENDED_ROWS_STAY_S
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.protocol import writes as ch
from tests.unit.leases.manager_life import JAVA, OTHER, ManagerLife, row

SCAN_S = 10.0


def life_beside(owner):
    """A parent that `owner` ended, whose child has begun."""
    parent = row("p", owner, checkpoint=SHARD_END, children=frozenset({"child"}))
    child = row("child", OTHER, checkpoint=ExtendedSequenceNumber("5"))
    return ManagerLife(parent, child)


def seconds_until_deleted(life, within_s=3 * ENDED_ROWS_STAY_S):
    began = life.now
    while life.now - began < within_s:
        if ch.DeleteEnded("p") in life.writes():
            return life.now - began
        life.scan()
    raise AssertionError(f"not deleted within {within_s} s")


@pytest.mark.parametrize("owner", [OTHER, JAVA, None])
def test_it_stays_for_a_minute_though_its_child_has_begun(owner):
    assert (
        ENDED_ROWS_STAY_S <= seconds_until_deleted(life_beside(owner)) <= ENDED_ROWS_STAY_S + SCAN_S
    )


def test_the_minute_begins_anew_for_a_row_that_was_not_ended_in_between():
    life = life_beside(JAVA)
    life.scan()
    ended = life.rows["p"]
    life.rows["p"] = row("p", JAVA, counter=9, checkpoint=ExtendedSequenceNumber("7"))
    life.scan()
    life.rows["p"] = ended

    assert seconds_until_deleted(life) >= ENDED_ROWS_STAY_S


def test_the_rows_of_a_large_reshard_go_in_parts_so_that_renewals_are_not_throttled():
    ended, begun = {"checkpoint": SHARD_END}, {"checkpoint": ExtendedSequenceNumber("9")}
    rows = []
    for number in range(250):
        parent, child = f"p{number}", f"c{number}"
        rows.append(row(parent, JAVA, 7, children=frozenset({child}), **ended))
        rows.append(row(child, JAVA, 7, parents=frozenset({parent}), **begun))
    life = ManagerLife(*rows)
    parts = []
    for _ in range(20):
        life.scan(after=5.0)
        deleted = life.writes(ch.DeleteEnded)
        parts += [len(deleted)] if deleted else []
        for change in deleted:
            life.resolve(change, ch.Applied())
            del life.rows[change.key]

    assert parts == [100, 100, 50]
