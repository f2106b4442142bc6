"""When offered rows are looked at again: at a turn, ours or anybody's, and at no other time."""

import pytest

from kclrun.leases.balancing import LEFT_LYING_S, OfferWatch
from kclrun.model.lease import OFFERED, Lease
from kclrun.model.sequence import TRIM_HORIZON

ME, OTHER, GIVER = "kclrun:a:h:1", "kclrun:a:h:2", "kclrun:a:h:3"
OURS = Lease(key="s0", checkpoint=TRIM_HORIZON, owner=OFFERED, offered_to=ME, offered_by=GIVER)
ANYBODYS = Lease(key="s1", checkpoint=TRIM_HORIZON, owner=OFFERED, offered_by=GIVER)


@pytest.fixture
def watch():
    watch = OfferWatch(ME)
    watch.see((ANYBODYS, OURS), {ME, OTHER}, set(), 10.0, is_complete=True)
    return watch


def keys(rows):
    return [each.lease.key for each in rows]


def test_what_is_seen_anew_is_looked_at_at_once(watch):
    assert watch.is_turn_due(10.0)
    assert keys(watch.due(10.0, is_below_target=True))[0] == "s0"


def test_below_the_target_a_row_is_due_at_our_turn_and_again_when_it_was_left_lying(watch):
    watch.due(10.0, is_below_target=True)
    [ours, anybodys] = watch.due(10.2, is_below_target=True)

    assert (ours.lease.key, anybodys.lease.key) == ("s0", "s1")
    assert not watch.is_turn_due(10.3)
    assert watch.deadline() == ours.left_instant == 10.0 + LEFT_LYING_S
    watch.due(ours.left_instant, is_below_target=True)
    assert watch.deadline() in {None, anybodys.left_instant}


def test_at_the_target_a_row_that_is_not_meant_for_us_is_looked_at_only_when_left_lying(watch):
    assert keys(watch.due(10.2, is_below_target=False)) == ["s0"]
    assert keys(watch.due(12.3, is_below_target=False)) == ["s0", "s1"]


def test_once_every_row_is_forgotten_there_is_no_turn_to_wait_for(watch):
    watch.due(10.0, is_below_target=False)

    watch.forget("s0")
    watch.forget("s1")

    assert watch.deadline() is None
    assert not watch.is_turn_due(1e9)


def test_a_look_that_shows_no_row_at_all_leaves_no_turn(watch):
    watch.see((), {ME, OTHER}, set(), 11.0, is_complete=True)

    assert watch.deadline() is None
