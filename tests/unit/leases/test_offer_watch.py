"""When offered rows are looked at again: at a turn, ours or anybody's, and at no other time."""

import pytest

from kclrun.leases.balancing import OfferWatch
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


def test_once_every_row_is_forgotten_there_is_no_turn_to_wait_for(watch):
    watch.due(10.0, is_below_target=False)

    watch.forget("s0")
    watch.forget("s1")

    assert watch.deadline() is None
    assert not watch.is_turn_due(1e9)
