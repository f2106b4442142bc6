"""What the dead left and we have no place for: offered in their name, once, under P2's conditions;
and how soon a manager looks again after what it decided [P9, L1]."""

from itertools import pairwise

import pytest

from kclrun.errors import InvariantViolation
from kclrun.leases.balancing import ExpiredLeaseOffers
from kclrun.model.lease import OFFERED
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.protocol import writes as ch
from kclrun.protocol.writes import (
    ConditionFailed,
    OutcomeUnknown,
    Refused,
)
from tests.unit.leases.manager_life import ME, OTHER, THIRD, ManagerLife, replace, row, rows_of

DEAD = "kclrun:a:dead:n"
AT = ExtendedSequenceNumber("17", 3)


def beside_the_dead(count=1, **policy):
    """We hold our share, others theirs, and nobody renewed the dead owner's for a failover."""
    mine = [row(f"m{number}", ME) for number in range(4)]
    dead = [row(f"d{number}", DEAD, counter=9, checkpoint=AT) for number in range(count)]
    life = ManagerLife(*mine, *rows_of(OTHER, 2, "o"), *rows_of(THIRD, 2, "t"), *dead, **policy)
    for _ in range(20):
        for key, lease in life.rows.items():
            if lease.owner in (OTHER, THIRD):
                life.rows[key] = replace(lease, counter=lease.counter + 1)
        life.scan(renewed=False)
        if life.writes(ch.Offer):
            return life
    raise AssertionError("nothing was passed on in twenty scans")


def test_the_offer_is_in_the_name_of_the_dead_and_leaves_the_position_as_it_was_seen():
    life = beside_the_dead()

    assert life.writes(ch.Offer) == [ch.Offer("d0", DEAD, 9, AT, AT)]


def test_nothing_is_offered_before_we_ourselves_saw_the_counter_stand_still_for_a_failover():
    life = beside_the_dead()

    assert life.now >= 100.0 + 10.0


def test_an_offer_under_way_is_not_sent_twice_and_its_row_is_not_taken_meanwhile():
    life = beside_the_dead()
    offer = life.writes(ch.Offer)[0]

    life.scan(renewed=False)
    assert life.writes() == []
    life.finds(replace(life.rows["d0"], owner=OFFERED, counter=10, offered_by=DEAD))
    life.tick(5.0)
    assert [take for take in life.writes(ch.Take) if take.key == "d0"] == []
    life.apply(offer)

    assert life.notes() == ["lease_passed_on"]


def test_what_we_offered_in_the_name_of_the_dead_we_take_ourselves_if_nobody_does():
    life = beside_the_dead()
    life.apply(life.writes(ch.Offer)[0])
    life.finds(life.rows["d0"])
    assert life.writes(ch.Take) == []

    life.tick(2.3)

    assert life.writes(ch.Take) == [ch.Take("d0", ME, OFFERED, 10, 10.0, "TRIM_HORIZON")]


def test_refused_offers_are_one_error_line():
    life = beside_the_dead(count=2)
    first, second = life.writes(ch.Offer)

    life.resolve(first, Refused("AccessDeniedException", "not authorized"))
    assert life.notes() == ["write_refused"]
    life.resolve(second, Refused("AccessDeniedException", "not authorized"))
    assert life.notes() == []


def test_an_offer_needs_an_owner_in_whose_name_it_is_made_and_an_outcome_needs_an_offer():
    expired_offers = ExpiredLeaseOffers()

    with pytest.raises(InvariantViolation, match="no owner in whose name"):
        expired_offers.offer(row())
    with pytest.raises(InvariantViolation, match="no offer under way"):
        expired_offers.resolved(ch.Offer("s0", DEAD, 9, AT, AT), OutcomeUnknown("reset"))


# How soon we look again.


def test_takes_that_never_apply_do_not_keep_a_manager_in_haste():
    life = ManagerLife(*rows_of(None, 4, "s"))
    instants = []
    for _ in range(12):
        for take in life.writes(ch.Take):
            life.resolve(take, ConditionFailed(row(take.key, OTHER, 1)))
        life.scan()
        instants.append(life.now)

    pauses = [round(later - at, 1) for at, later in pairwise(instants)]
    assert pauses[:7] == [1.0] * 7
    assert pauses[8:] == [5.0] * 3
