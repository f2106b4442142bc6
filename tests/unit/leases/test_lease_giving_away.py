"""What a manager gives away itself, what it waits for, and what it writes again [P16, P17, P18]."""

import pytest

from kclrun.leases import commands as c
from kclrun.leases import events as e
from kclrun.model.lease import WRITTEN_AGAIN_AHEAD, Halt, Handoff
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON
from kclrun.protocol import reports
from kclrun.protocol import writes as ch
from kclrun.protocol.writes import Applied, ConditionFailed, OutcomeUnknown
from tests.unit.leases.manager_life import (
    JAVA,
    ME,
    OTHER,
    THIRD,
    ManagerLife,
    offered,
    replace,
    row,
)

ASK = Handoff(OTHER, 1.0)


def offer(counter, to=None, key="s0"):
    return ch.Offer(key, ME, counter, TRIM_HORIZON, TRIM_HORIZON, offered_to=to)


def halted(**fields):
    """A halted lease of ours beside another owner's: ours, renewed, without a process."""
    life = ManagerLife(row(halt=Halt("poison", 1.0), **fields), row("o", OTHER))
    life.take()
    assert life.state() == "halted"
    return life


@pytest.fixture
def life():
    return halted()


# Draining.


def test_n8_a_take_that_lands_in_a_drain_is_offered_before_the_manager_exits():
    life = ManagerLife(row(), row("o", OTHER))
    take = life.writes(ch.Take)[0]
    life.say(e.DrainRequested("SIGTERM"))

    life.apply(take)
    assert not life.asked(c.Finish)
    life.apply(life.writes(ch.Offer)[0])

    assert life.asked(c.Finish)


def test_an_offer_of_unknown_outcome_that_somebody_took_already_is_no_loss(life):
    life.say(e.DrainRequested("SIGTERM"))
    life.resolve(life.writes()[0], OutcomeUnknown("reset"))

    life.say(e.RowRead("s0", row("s0", OTHER, 3)))

    assert life.notes() == []
    assert life.asked(c.Finish)


# Answering asks without a process.


def test_a_halted_lease_travels_with_its_halt(life):
    life.apply(life.renewal(), handoff=ASK)

    life.apply(life.writes()[0])

    assert life.rows["s0"].halt == Halt("poison", 1.0)


@pytest.mark.parametrize("parents", [(), ("p",)])
def test_resting_and_waiting_leases_are_given_to_who_asks(parents):
    life = ManagerLife(row(parents=frozenset(parents)), row("o", OTHER))
    life.take()

    life.apply(life.renewal(), handoff=ASK)

    assert [change.offered_to for change in life.writes(ch.Offer)] == [OTHER]


def test_h8_an_ask_that_stood_there_for_thirty_seconds_is_removed_and_not_obeyed():
    life = ManagerLife(row(), row("o", OTHER), row("t", THIRD))
    life.take()
    life.say(e.ProcessStarted("s0", 1))
    life.say(e.ProcessReported("s0", reports.LeaseClaimed(2, TRIM_HORIZON)))
    life.rows["s0"] = replace(life.rows["s0"], counter=2, handoff=ASK)
    began = life.now
    while life.now < began + 36:
        life.scan()
    life.say(e.ProcessExited("s0", 1, "killed by signal 9"))

    life.say(e.RowRead("s0", life.rows["s0"]))

    assert life.writes() == [ch.Renew("s0", ME, 2, drops_ask=True)]
    life.apply(life.writes()[0])
    assert life.rows["s0"].handoff is None
    assert life.asked(c.StartProcess)


def test_a_take_leaves_no_ask_behind_for_the_next_owner():
    life = ManagerLife(row(owner=OTHER, handoff=Handoff(THIRD, 1.0)))
    life.scan(after=11.0, renewed=False)

    life.take()

    assert life.rows["s0"].handoff is None
    assert life.asked(c.StartProcess)


# Taken by force.


def forced():
    """A lease just taken by force from a Java worker."""
    life = ManagerLife(row(owner=JAVA), row("j1", JAVA))
    key = life.writes()[0].key
    life.apply(life.writes()[0])
    return life, key


def quarantine(life):
    """Let a failover pass, answering renewals; until the row is read again."""
    began = life.now
    while not life.asked(c.ReadRow) and life.now < began + 60:
        assert life.asked(c.StartProcess) == []
        for change in life.writes(ch.Renew):
            life.apply(change)
        life.now = life.core.next_deadline(life.now + 0.001)
        life.tick(0.0)
    return life.now - began


def test_a_lease_taken_by_force_is_renewed_for_a_failover_then_read_and_only_then_started():
    life, key = forced()
    assert life.rows[key].taken_from == JAVA
    assert life.state(key) == "quarantined"

    assert quarantine(life) == pytest.approx(10.0, abs=0.01)
    assert life.asked(c.ReadRow) == [c.ReadRow(key)]
    assert life.core.next_deadline(life.now) > life.now
    life.say(e.RowRead(key, life.rows[key]))
    for change in life.writes(ch.Renew):
        life.apply(change)

    start = life.asked(c.StartProcess)[0]
    assert (start.has_waited, start.counter) == (True, life.rows[key].counter)


def test_n2_who_takes_an_offered_row_whose_wait_was_cut_short_waits_again():
    life = ManagerLife(offered(to=ME, taken_from=JAVA), row("o", OTHER))

    life.take()

    assert life.state() == "quarantined"
    assert quarantine(life) == pytest.approx(10.0, abs=0.01)


def test_n2_a_restarted_manager_that_takes_its_former_selfs_row_waits_again():
    former = "kclrun:a:me:old"
    life = ManagerLife(row(owner=former, taken_from=JAVA))
    life.say(e.FormerOwnersProvenGone(frozenset({former})))
    life.scan(renewed=False)

    life.take()

    assert life.state() == "quarantined"


def test_an_adopted_row_with_the_mark_waits_a_failover_from_its_adoption():
    life = ManagerLife(row(owner=ME, counter=4, taken_from=JAVA))
    life.say(e.RowRead("s0", life.rows["s0"]))
    life.apply(life.writes(ch.Renew)[0])

    assert life.state() == "quarantined"
    assert quarantine(life) == pytest.approx(10.0, abs=0.01)


def test_a_row_that_was_lost_during_the_wait_is_not_started():
    life, key = forced()
    quarantine(life)

    life.say(e.RowRead(key, row(key, JAVA, 99)))

    assert life.asked(c.StartProcess) == []
    assert life.state(key) is None


def test_a_row_that_was_ended_or_halted_during_the_wait_is_not_started():
    life, key = forced()
    quarantine(life)
    life.say(e.RowRead(key, replace(life.rows[key], checkpoint=SHARD_END)))
    assert life.state(key) is None

    life, key = forced()
    quarantine(life)
    life.say(e.RowRead(key, replace(life.rows[key], halt=Halt("poison", 1.0))))

    assert life.state(key) == "halted"


def test_a_second_start_needs_no_second_wait():
    life, key = forced()
    quarantine(life)
    life.say(e.RowRead(key, life.rows[key]))
    for change in life.writes(ch.Renew):
        life.apply(change)

    life.say(e.StartFailed(key, "no memory"))
    for change in life.writes(ch.Renew):
        life.apply(change)

    assert [start.has_waited for start in life.asked(c.StartProcess)] == [True]


# A row that vanished.


def test_a_row_that_vanished_under_a_live_owner_is_written_again_as_it_was(life):
    change = life.renewal()

    life.resolve(change, ConditionFailed(None))

    assert life.notes() == ["row_vanished"]
    again = life.writes()[0]
    assert again == ch.CreateLease(replace(life.rows["s0"], counter=1 + WRITTEN_AGAIN_AHEAD))
    life.resolve(again, Applied())
    assert life.notes() == ["row_restored"]
    assert life.state() == "halted"
    assert life.renewal().seen_counter == 1 + WRITTEN_AGAIN_AHEAD


def test_a_row_that_vanishes_twice_is_lost(life):
    life.resolve(life.renewal(), ConditionFailed(None))
    life.resolve(life.writes()[0], Applied())

    life.resolve(life.renewal(), ConditionFailed(None))

    assert life.notes() == ["row_vanished"]
    assert life.core.held() == ()


def test_a_row_that_vanished_longer_than_a_failover_ago_is_lost_for_others_may_have_begun_anew(
    life,
):
    change = life.renewal()

    life.resolve(change, ConditionFailed(None), after=7.0)

    assert life.writes() == []
    assert life.core.held() == ()


def test_a_row_that_somebody_wrote_again_before_us_is_lost(life):
    life.resolve(life.renewal(), ConditionFailed(None))

    life.resolve(life.writes()[0], ConditionFailed(row()))

    assert life.notes() == ["lease_lost"]


def test_a_restored_row_of_unknown_outcome_is_read_back_and_written_with_the_same_counter(life):
    life.resolve(life.renewal(), ConditionFailed(None))
    again = life.writes()[0]
    life.resolve(again, OutcomeUnknown("reset"))

    life.say(e.RowRead("s0", None))
    assert life.writes() == [again]
    life.resolve(again, ConditionFailed(again.lease))

    assert life.notes() == ["row_restored"]


def test_a_row_that_vanished_in_a_drain_is_written_again_and_given_away(life):
    life.say(e.DrainRequested("SIGTERM"))

    life.resolve(life.writes()[0], ConditionFailed(None))
    again = life.writes()[0]
    assert isinstance(again, ch.CreateLease)
    life.resolve(again, Applied())

    assert life.writes() == [offer(1 + WRITTEN_AGAIN_AHEAD)]
