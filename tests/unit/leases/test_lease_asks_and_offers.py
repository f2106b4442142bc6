"""How a manager comes by its share: what it asks for, and what it picks up [P16, P17]."""

import pytest

from kclrun.errors import InvariantViolation
from kclrun.leases import commands as c
from kclrun.leases import events as e
from kclrun.leases.balancing import delay_s, find_every_s
from kclrun.model.lease import OFFERED, Handoff
from kclrun.model.sequence import SHARD_END
from kclrun.protocol import reports
from kclrun.protocol import writes as ch
from kclrun.protocol.writes import ConditionFailed, OutcomeUnknown, Refused, Throttled, Unavailable
from tests.support.tables import over_rows
from tests.unit.leases.manager_life import (
    JAVA,
    ME,
    OTHER,
    THIRD,
    ManagerLife,
    offered,
    replace,
    row,
    rows_of,
)


@pytest.fixture
def life():
    """Another owner has two leases, and this manager asks for one of them."""
    return ManagerLife(*rows_of(OTHER, 2, "o"))


@pytest.fixture
def ask(life):
    return life.writes(ch.Ask)[0]


# Asking.


def test_an_ask_names_the_owner_and_is_dated_by_the_services_clock(life):
    assert life.writes() == [ch.Ask(life.writes()[0].key, ME, OTHER, 5100.0)]


def test_an_ask_that_applied_is_reported_and_is_not_repeated_while_it_is_under_way_or_stands(
    life, ask
):
    life.scan()
    assert life.writes(ch.Ask) == []
    life.apply(ask)
    assert life.notes() == ["lease_asked"]
    life.scan()
    assert life.writes(ch.Ask) == []


def test_no_more_are_asked_for_than_moves_per_cycle_until_some_have_come():
    life = ManagerLife(*rows_of(OTHER, 30, "o"), moves_per_cycle=3)
    asks = life.writes(ch.Ask)
    assert len(asks) == 3
    for ask in asks:
        life.apply(ask)
    life.scan()
    assert life.writes(ch.Ask) == []

    life.finds(offered(asks[0].key, to=ME))
    life.take(asks[0].key)
    life.scan()

    assert len(life.writes(ch.Ask)) == 1


def test_a_scan_that_began_before_the_ask_applied_says_nothing_about_it(life, ask):
    before = tuple(life.rows.values())
    life.tick(5.0)
    assert life.asked(c.ScanTable)

    life.apply(ask)
    life.say(e.LeasesScanned(before))

    assert life.writes(ch.Ask) == []


def test_an_ask_that_its_owner_removed_is_over(life, ask):
    life.apply(ask)

    life.rows[ask.key] = replace(life.rows[ask.key], handoff=None)
    life.scan()

    assert len(life.writes(ch.Ask)) == 1


def test_h9_an_ask_that_a_java_worker_took_along_with_the_row_is_over_and_forces_nothing():
    life = ManagerLife(row("o", OTHER), row("p", OTHER))
    ask = life.writes(ch.Ask)[0]
    life.apply(ask)

    stolen = {"owner": JAVA, "offered_to": ME}  # it knows nothing of our attributes
    life.rows[ask.key] = replace(life.rows[ask.key], **stolen)
    life.scan()

    assert life.writes() == []
    for _ in range(10):
        life.scan()
        assert life.writes() == []


@pytest.mark.parametrize(
    "outcome", [ConditionFailed(None), Throttled("slow"), Unavailable("no route")]
)
def test_an_ask_that_did_not_apply_is_planned_anew_by_the_next_scan(life, outcome):
    assert not [x for x in life.resolve(life.writes(ch.Ask)[0], outcome) if isinstance(x, c.Note)]
    life.scan()

    assert len(life.writes(ch.Ask)) == 1


def test_an_ask_of_unknown_outcome_counts_until_a_scan_shows_that_it_is_not_there(life, ask):
    before = tuple(life.rows.values())
    life.tick(5.0)
    assert life.asked(c.ScanTable)

    life.resolve(ask, OutcomeUnknown("reset"), after=0.1)
    life.say(e.LeasesScanned(before))
    assert life.writes(ch.Ask) == []
    life.scan()

    assert len(life.writes(ch.Ask)) == 1


def test_refused_asks_are_one_error_line():
    life = ManagerLife(*rows_of(OTHER, 6, "o"))
    first, second, *_ = life.writes(ch.Ask)

    life.resolve(first, Refused("AccessDeniedException", "not authorized"))
    assert life.notes() == ["write_refused"]
    life.resolve(second, Refused("AccessDeniedException", "not authorized"))
    assert life.notes() == []


def test_n7_a_stale_ask_of_somebody_else_is_replaced_by_naming_it():
    stale = Handoff(THIRD, 1.0)
    life = ManagerLife(row("a", OTHER, handoff=stale), row("b", OTHER, handoff=stale))
    assert life.writes(ch.Ask) == []
    for _ in range(5):
        life.scan()
    assert life.writes(ch.Ask) == []

    life.scan(after=10.0)

    assert [ask.seen for ask in life.writes(ch.Ask)] == [stale]


def test_a_row_that_was_not_given_away_in_thirty_seconds_is_left_alone_for_five_minutes(life):
    stuck = life.writes(ch.Ask)[0]
    life.apply(stuck)
    began = life.now
    asked = {}  # key: when it was asked for again, first

    while len(asked) < 2 and life.now < began + 400:
        life.scan()
        for change in life.writes(ch.Ask):
            asked.setdefault(change.key, life.now - began)
            life.resolve(change, ConditionFailed(None))

    other = "o1" if stuck.key == "o0" else "o0"
    assert 30 <= asked[other] <= 40
    assert 330 <= asked[stuck.key] <= 340


def test_an_outcome_of_no_ask_is_our_bug():
    life = ManagerLife()

    with pytest.raises(InvariantViolation, match="no ask under way"):
        life.resolve(ch.Ask("o0", ME, OTHER, 1.0), ConditionFailed(None))


def test_a_drain_waits_for_the_asks_under_way_and_asks_no_more(life, ask):
    life.say(e.DrainRequested("SIGTERM"))
    assert not life.asked(c.Finish)
    life.apply(ask)
    assert not life.asked(c.Finish)
    life.apply(*life.writes())

    assert life.asked(c.Finish)
    assert life.writes(ch.Ask) == []


def draining_with_an_ask():
    """We asked for a row of another owner, and drain; and what we write next."""
    life = ManagerLife(*rows_of(OTHER, 2, "o"))
    ask = life.writes(ch.Ask)[0]
    life.apply(ask)
    life.say(e.DrainRequested("SIGTERM"))
    return life, ask


def test_a_drain_withdraws_the_asks_that_stand_and_ends_when_that_is_settled():
    life, ask = draining_with_an_ask()

    assert life.writes() == [ch.Withdraw(ask.key, ME)]
    assert not life.asked(c.Finish)
    life.apply(life.writes()[0])

    assert life.asked(c.Finish)
    assert life.rows[ask.key].handoff is None


@pytest.mark.parametrize(
    ("outcome", "is_withdrawn"),
    [(OutcomeUnknown("timed out"), True), (ConditionFailed(None), False)],
)
def test_an_ask_under_way_at_a_drain_is_withdrawn_if_it_may_have_applied(
    life, ask, outcome, is_withdrawn
):
    life.say(e.DrainRequested("SIGTERM"))
    assert life.writes() == []

    life.resolve(ask, outcome)

    assert life.writes() == ([ch.Withdraw(ask.key, ME)] if is_withdrawn else [])
    assert bool(life.asked(c.Finish)) is not is_withdrawn


def test_what_was_offered_to_us_already_a_drain_offers_to_whoever_comes():
    life, ask = draining_with_an_ask()
    withdrawal = life.writes()[0]
    life.rows[ask.key] = offered(ask.key, to=ME, counter=12)

    life.resolve(withdrawal, ConditionFailed(life.rows[ask.key]))

    assert life.writes() == [ch.Decline(ask.key, ME, 12)]
    assert not life.asked(c.Finish)
    life.apply(life.writes()[0])
    assert life.asked(c.Finish)


@over_rows(
    "row_found",
    [
        None,
        row("o0", OTHER, 9),
        row("o0", THIRD, 9),
        offered("o0", to=THIRD),
        offered("o0"),
    ],
)
def test_what_was_not_offered_to_us_a_drain_leaves_as_it_is(row_found):
    life, ask = draining_with_an_ask()
    found = row_found and replace(row_found, key=ask.key)

    life.resolve(life.writes()[0], ConditionFailed(found))

    assert life.writes() == []
    assert life.asked(c.Finish)


@pytest.mark.parametrize(
    "outcome",
    [OutcomeUnknown("timed out"), Throttled("slow"), Unavailable("down"), Refused("No", "no")],
    ids=lambda outcome: type(outcome).__name__,
)
def test_no_drain_waits_for_a_table_that_does_not_take_an_ask_back(outcome):
    life, _ = draining_with_an_ask()

    life.resolve(life.writes()[0], outcome)

    assert life.writes() == []
    assert life.asked(c.Finish)


def test_the_end_of_an_ask_that_was_not_under_way_is_our_bug():
    life = ManagerLife()

    with pytest.raises(InvariantViolation, match="no ask that ends"):
        life.resolve(ch.Withdraw("o0", ME), ConditionFailed(None))


# Looking for offers.


def test_offers_are_looked_for_every_half_second_and_one_query_at_a_time():
    life = ManagerLife(row("o", OTHER))
    assert life.asked(c.FindOffers) == [c.FindOffers(64)]
    assert not [x for x in life.tick(3.0) if isinstance(x, c.FindOffers)]

    life.finds()
    assert life.core.next_deadline(life.now) <= life.now + 0.5
    assert not [x for x in life.tick(0.49) if isinstance(x, c.FindOffers)]

    assert c.FindOffers(64) in life.tick(0.01)


def test_without_an_index_nobody_looks_before_the_next_scan_interval():
    life = ManagerLife(row("o", OTHER))

    life.say(e.OffersFound(None))

    assert not [x for x in life.tick(4.9) if isinstance(x, c.FindOffers)]
    assert c.FindOffers(64) in life.tick(0.1)


def test_above_64_owners_each_looks_seldomer_so_that_the_fleet_makes_128_queries_a_second():
    assert [find_every_s(owners) for owners in (1, 64, 128, 1000)] == [0.5, 0.5, 1.0, 1000 / 128]


def test_a_manager_without_room_does_not_look_and_begins_when_there_is_room():
    life = ManagerLife(row(), leases_max=1)
    life.take()
    life.say(e.ProcessStarted("s0", 1))
    life.say(e.ProcessReported("s0", reports.LeaseClaimed(2, life.rows["s0"].checkpoint)))
    assert not life.asked(c.FindOffers)

    life.say(e.ProcessReported("s0", reports.ShardEnded(())))

    assert life.asked(c.FindOffers) == [c.FindOffers(1)]


def test_a_draining_manager_neither_looks_nor_takes():
    life = ManagerLife(row("o", OTHER), offered(to=ME))
    assert life.writes(ch.Take)
    life = ManagerLife(row("a"), row("o", OTHER))
    life.take("a")

    life.say(e.DrainRequested("SIGTERM"))
    life.finds(offered(to=ME))

    assert life.writes(ch.Take) == []
    assert not [x for x in life.tick(10.0) if isinstance(x, c.FindOffers)]


# Taking what is offered.


def test_a_row_offered_to_us_is_taken_at_once_with_the_counter_that_was_read():
    life = ManagerLife(row("a", OTHER))

    life.finds(offered(to=ME, counter=41))

    assert life.writes() == [ch.Take("s0", ME, OFFERED, 41, 10.0, "TRIM_HORIZON")]


def test_a_row_offered_to_us_is_taken_even_above_the_target():
    life = ManagerLife(row(), *rows_of(OTHER, 2, "o"))
    life.take()

    life.finds(offered("o0", to=ME))

    assert [take.key for take in life.writes(ch.Take)] == ["o0"]


def test_an_offered_row_in_a_scan_is_treated_like_one_found_by_the_index():
    life = ManagerLife(offered(to=ME), row("o", OTHER))

    assert life.writes() == [ch.Take("s0", ME, OFFERED, 7, 10.0, "TRIM_HORIZON")]


def test_a_take_of_an_offer_that_came_second_is_no_news():
    life = ManagerLife(offered(to=ME), row("o", OTHER))

    life.resolve(life.writes()[0], ConditionFailed(row("s0", THIRD, 8)))

    assert life.notes() == []
    assert life.core.held() == ()


def test_an_offer_to_nobody_in_particular_is_taken_when_our_turn_has_come():
    gift = offered("b")
    assert delay_s(gift, ME, {ME, THIRD}, ()) == 0.1
    life = ManagerLife(row("t", THIRD), row("o", OTHER))

    life.finds(gift)
    assert life.writes(ch.Take) == []
    assert life.core.next_deadline(life.now) == pytest.approx(life.now + 0.1)
    life.tick(0.1)

    assert [take.key for take in life.writes(ch.Take)] == ["b"]


def test_h11_an_offer_to_a_dead_asker_is_picked_up_a_second_later():
    life = ManagerLife(row("o", OTHER))

    life.finds(offered(to=THIRD))
    assert life.writes(ch.Take) == []
    life.tick(0.99)
    assert life.writes(ch.Take) == []
    life.tick(0.12)

    assert [take.key for take in life.writes(ch.Take)] == ["s0"]


def test_h12_what_two_draining_managers_offered_a_third_takes_without_waiting_for_expiry():
    life = ManagerLife(row("a", OTHER), row("b", THIRD))

    life.finds(offered("a", by=OTHER), offered("b", by=THIRD))
    taken = life.writes(ch.Take)
    life.tick(0.2)

    assert {take.key for take in (*taken, *life.writes(ch.Take))} == {"a", "b"}


def test_each_offered_row_has_one_owner_that_is_first_and_nobody_waits_longer_than_a_fifth():
    owners = {f"kclrun:g:h{number}:n" for number in range(10)}

    for number in range(50):
        delays = sorted(delay_s(offered(f"s{number}"), o, owners, ()) for o in owners)
        assert delays == pytest.approx([0.02 * place for place in range(10)])


def test_among_many_owners_the_delay_is_spread_without_putting_them_all_in_order():
    owners = {f"kclrun:g:h{number}:n" for number in range(1000)}

    delays = [delay_s(offered(), owner, owners, ()) for owner in owners]

    assert 0.09 < sum(delays) / 1000 < 0.11
    assert max(delays) < 0.2


def test_what_we_offered_ourselves_we_take_back_after_two_seconds():
    life = ManagerLife(row("o", OTHER), row("p", OTHER), row("q", OTHER))

    life.finds(offered(by=ME))
    life.tick(1.99)
    assert life.writes(ch.Take) == []
    life.tick(0.02)

    assert [take.key for take in life.writes(ch.Take)] == ["s0"]


def balanced():
    """We hold one, the other two have one each: all are at their target."""
    life = ManagerLife(row(), row("o", OTHER), row("t", THIRD))
    life.take()
    return life


def test_at_the_target_an_offer_that_others_may_take_is_left_to_them_for_two_seconds():
    life = balanced()

    life.finds(offered("t", by=THIRD, to=OTHER))
    life.tick(1.2)
    assert life.writes(ch.Take) == []
    life.tick(2.0)

    assert [take.key for take in life.writes(ch.Take)] == ["t"]


def test_a_giver_that_is_leaving_makes_room_in_the_targets_of_the_others():
    life = balanced()

    life.finds(offered("t", by=THIRD))

    assert [take.key for take in life.writes(ch.Take)] == ["t"]


def test_an_offer_that_somebody_took_meanwhile_is_forgotten_with_the_next_complete_look():
    life = balanced()
    life.finds(offered("t", by=THIRD, to=OTHER))
    life.tick(0.6)

    life.finds()
    life.tick(5.0)

    assert life.writes(ch.Take) == []


def test_a_row_is_not_taken_while_our_ask_for_it_has_no_outcome_yet(life, ask):
    given = offered(ask.key, to=ME)

    life.finds(given)
    assert life.writes(ch.Take) == []
    life.resolve(ask, OutcomeUnknown("timed out"))
    life.tick(0.5)
    life.finds(given)

    assert [take.key for take in life.writes(ch.Take)] == [ask.key]


def test_an_offered_child_whose_parents_are_still_read_elsewhere_is_left_there():
    life = ManagerLife(row("p", OTHER), offered("c", to=ME, parents=frozenset({"p"})))

    life.finds(life.rows["c"])

    assert life.writes(ch.Take) == []


def looks(life):
    return bool(life.asked(c.ScanTable))


def test_an_offer_above_our_target_that_nobody_takes_makes_us_look_at_the_table_once():
    """Two are gone since the last scan, and all that shows is one of their rows."""
    life = balanced()
    for _ in range(2):  # the hasty scans of a start are over then
        life.scan(after=5.0)
    left = offered("t", by=THIRD, to=OTHER)

    life.finds(left)
    assert not looks(life)
    life.tick(1.2)
    assert not looks(life)
    life.finds(left)
    assert looks(life)
    life.rows = {"s0": life.rows["s0"], "t": offered("t", by=THIRD, to=OTHER)}
    life.say(e.LeasesScanned(tuple(life.rows.values())))

    life.tick(0.5)
    life.finds(left)
    assert not looks(life)


def test_an_offered_row_that_was_no_work_at_the_last_scan_makes_us_look_at_the_table_once():
    """Its parents ended since: whoever ended them drained, and gave the child away."""
    child = offered("c", parents=frozenset({"p"}))
    life = ManagerLife(row("p", OTHER), replace(child, owner=None, counter=6, offered_by=None))
    life.tick(0.5)

    life.finds(child)
    assert looks(life)
    life.rows = {"p": row("p", OTHER, checkpoint=SHARD_END), "c": child}
    life.say(e.LeasesScanned(tuple(life.rows.values())))

    assert [take.key for take in life.writes(ch.Take)] == ["c"]


# Java workers.


def test_from_a_java_worker_one_lease_a_scan_is_taken_by_force():
    life = ManagerLife(*rows_of(JAVA, 4, "j"))

    take = life.writes()[0]
    assert (take.forced, take.seen_owner, take.seen_counter) == (True, JAVA, 0)
    assert len(life.writes()) == 1
    life.resolve(take, ConditionFailed(row(take.key, JAVA, 1)))
    life.scan()

    assert len(life.writes(ch.Take)) == 1


def test_a_lease_that_a_kcl_3_leader_gave_us_is_left_to_its_former_owner_while_that_one_renews():
    life = ManagerLife(row(owner=ME, checkpoint_owner=JAVA))
    assert life.asked(c.ReadRow) == []
    life.rows["s0"] = replace(life.rows["s0"], counter=1)
    life.scan()
    assert life.asked(c.ReadRow) == []

    life.scan(after=6.0)
    life.scan(after=6.0)

    assert life.asked(c.ReadRow) == [c.ReadRow("s0")]


# Others in sight, and room.


def test_processes_are_told_when_another_owner_comes_and_when_it_is_gone():
    life = ManagerLife(row("j", JAVA), row("s1"))
    assert not life.asked(c.PublishOthersInSight)

    life.rows["s1"] = row("s1", OTHER)
    life.scan()
    assert life.asked(c.PublishOthersInSight) == [c.PublishOthersInSight(others=True)]
    life.scan()
    assert not life.asked(c.PublishOthersInSight)
    del life.rows["s1"]
    life.scan()

    assert life.asked(c.PublishOthersInSight) == [c.PublishOthersInSight(others=False)]


def test_a_newcomer_that_only_asked_so_far_is_in_sight():
    life = ManagerLife(row())
    life.take()

    life.rows["s0"] = replace(life.rows["s0"], handoff=Handoff(OTHER, 1.0))
    life.scan()

    assert life.asked(c.PublishOthersInSight) == [c.PublishOthersInSight(others=True)]


def test_a_full_manager_that_sees_unclaimed_leases_three_times_says_so_once_and_when_it_is_over():
    life = ManagerLife(row(), row("free"), leases_max=1)
    life.take(life.writes(ch.Take)[0].key)
    noted = []
    for _ in range(6):
        life.scan()
        noted.append("capacity_short" in life.notes())
    assert noted == [False, True, False, False, False, False]

    free = next(key for key, lease in life.rows.items() if lease.owner is None)
    life.rows[free] = replace(life.rows[free], owner=OTHER)
    life.scan()

    assert "capacity_enough" in life.notes()
