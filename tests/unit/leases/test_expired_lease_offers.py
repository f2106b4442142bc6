"""What the dead left and we have no place for: offered in their name, once, under P2's conditions;
and how soon a manager looks again after what it decided [P9, L1]."""

from itertools import pairwise

import pytest

from kclrun.errors import InvariantViolation
from kclrun.leases import commands as c
from kclrun.leases import events as e
from kclrun.leases.balancing import ExpiredLeaseOffers
from kclrun.leases.policy import ManagerPolicy, Pace, scan_delay_s
from kclrun.model.lease import OFFERED
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.protocol import writes as ch
from kclrun.protocol.writes import (
    ConditionFailed,
    Fate,
    InFlight,
    OutcomeUnknown,
    Refused,
    Throttled,
    Unavailable,
    has_ended_ownership,
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


@pytest.mark.parametrize(
    "outcome",
    [ConditionFailed(None), Throttled("slow"), Unavailable("no route"), OutcomeUnknown("reset")],
)
def test_whatever_became_of_the_offer_the_next_scan_decides_anew(outcome):
    life = beside_the_dead()

    life.resolve(life.writes(ch.Offer)[0], outcome)
    assert life.notes() == []
    life.scan(renewed=False)

    assert [offer.key for offer in life.writes(ch.Offer)] == ["d0"]


def test_refused_offers_are_one_error_line():
    life = beside_the_dead(count=2)
    first, second = life.writes(ch.Offer)

    life.resolve(first, Refused("AccessDeniedException", "not authorized"))
    assert life.notes() == ["write_refused"]
    life.resolve(second, Refused("AccessDeniedException", "not authorized"))
    assert life.notes() == []


def test_a_drain_waits_for_the_offers_under_way():
    life = beside_the_dead()
    offer = life.writes(ch.Offer)[0]
    life.say(e.DrainRequested("SIGTERM"))

    assert not life.asked(c.Finish)
    assert life.core._balancer.has_writes_under_way
    life.apply(offer)

    assert not life.core._balancer.has_writes_under_way


def test_an_offer_needs_an_owner_in_whose_name_it_is_made_and_an_outcome_needs_an_offer():
    expired_offers = ExpiredLeaseOffers()

    with pytest.raises(InvariantViolation, match="no owner in whose name"):
        expired_offers.offer(row())
    with pytest.raises(InvariantViolation, match="no offer under way"):
        expired_offers.resolved(ch.Offer("s0", DEAD, 9, AT, AT), OutcomeUnknown("reset"))


def test_an_owner_that_lives_after_all_does_not_take_such_an_offer_for_its_own_checkpoint():
    """Its own last write carried a later position than the offer left on the row [P6]."""
    left = row("d0", OFFERED, 10, checkpoint=AT, offered_by=DEAD)
    later = ExtendedSequenceNumber("18")

    assert not has_ended_ownership(ch.Offer("d0", DEAD, 9, later, AT), left, 9)
    renewal = InFlight()
    renewal.begin(ch.Renew("d0", DEAD, 9))
    assert renewal.judge(left, DEAD, 9) is Fate.LOST


# How soon we look again.


def test_a_manager_at_rest_looks_seldom_in_a_crowd_and_one_that_waits_for_something_often():
    policy = ManagerPolicy(me="kclrun:g:h0:n")
    crowd = {f"kclrun:g:h{number}:n" for number in range(1000)}
    delays = {pace: scan_delay_s(policy, crowd, pace) for pace in Pace}

    assert delays == {Pace.FAST: 1.0, Pace.MOVE: 5.0, Pace.REST: 20.0 * 1000 / 256}
    assert scan_delay_s(policy, crowd) == delays[Pace.REST]
    assert scan_delay_s(policy, {policy.me}) == 5.0


def scans_of(life, seconds):
    """The instants of the scans, in steps of ten milliseconds; each is answered at once."""
    instants, reported = [], life.core.handle(e.Ticked(), life.now)
    for _ in range(round(seconds * 100)):
        if any(isinstance(command, c.ScanTable) for command in reported):
            instants.append(round(life.now, 2))
            life.say(e.LeasesScanned(tuple(life.rows.values())))
            for take in life.writes(ch.Take):
                life.apply(take)
        life.now += 0.01
        reported = life.core.handle(e.Ticked(), life.now)
    return instants


def test_a_manager_alone_has_64_leases_after_three_more_looks_a_second_apart():
    life = ManagerLife(*rows_of(None, 64, "s"))
    for take in life.writes(ch.Take):
        life.apply(take)
    assert len(life.core.held()) == 8

    instants = scans_of(life, 3.5)

    assert len(life.core.held()) == 64
    assert [at - 100.0 for at in instants] == pytest.approx([1.0, 2.0, 3.0], abs=0.05)


def test_after_the_haste_a_chance_gives_the_next_scan_its_phase():
    life = ManagerLife(*rows_of(None, 8, "s"))
    for take in life.writes(ch.Take):
        life.apply(take)

    instants = scans_of(life, 10.0)

    assert [at - 100.0 for at in instants] == pytest.approx([1.0, 3.5, 8.5], abs=0.05)


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
