"""What fails because of the host leaves the host, and does not come back at once."""

import pytest

from kclrun.leases import commands as c
from kclrun.leases import events as e
from kclrun.leases.capacity import HostCapacity
from kclrun.local.lease_rows import change_row
from kclrun.model.lease import OFFERED, DiedOn
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.protocol import reports
from kclrun.protocol import writes as ch
from tests.unit.leases.manager_life import OTHER, THIRD, ManagerLife, row, rows_of

WORDS = "fork: Resource temporarily unavailable"


def shared_fleet(**fields):
    """Ours is s0, about to be started; the other owner has one."""
    life = ManagerLife(row(**fields), row("s1", OTHER))
    life.take()
    return life


def wait(life, seconds):
    """Time passes, and the scans that fall into it are answered."""
    before = life.tick(seconds)
    if life.asked(c.ScanTable):
        life.said = before + life.say(e.LeasesScanned(tuple(life.rows.values())))


def await_start(life):
    """Time passes until its process is to be started; renewals apply."""
    for _ in range(600):
        if life.asked(c.StartProcess):
            return
        renewals = life.writes(ch.Renew)
        if renewals:
            life.apply(renewals[0])
        else:
            wait(life, 0.2)
    raise AssertionError("no start")


def fail_starts(life, count):
    """So many starts in a row fail; what was said after the last."""
    for _ in range(count):
        await_start(life)
        life.say(e.StartFailed("s0", WORDS))


def die(life, count, *last_events, claims=True, after_s=0.0):
    """Its process is started, reports this and dies, so many times; nothing moves the checkpoint.
    What was noted until the last death."""
    notes = []
    for number in range(count):
        await_start(life)
        life.say(e.ProcessStarted("s0", number))
        if claims:
            life.say(e.ProcessReported("s0", reports.LeaseClaimed(2, TRIM_HORIZON)))
        life.now += after_s
        for event in (*last_events, e.ProcessExited("s0", number, "killed by SIGKILL")):
            life.say(event)
            notes += life.asked(c.Note)
        life.say(e.RowRead("s0", life.rows["s0"]))
    return notes


def leave_unclaimed(life, count, after_s):
    """So many processes in a row give up unclaimed, each so long after it was started."""
    unclaimed = e.ProcessReported("s0", reports.StartUnclaimed("it did not claim"))
    return die(life, count, unclaimed, claims=False, after_s=after_s)


@pytest.fixture
def life():
    return shared_fleet()


def test_the_death_of_a_shared_process_does_not_count_and_the_next_one_is_not_shared():
    life = ManagerLife(row())
    life.take()
    await_start(life)
    assert not life.asked(c.StartProcess)[0].is_alone
    life.say(e.ProcessStarted("s0", 0))
    life.say(e.ProcessReported("s0", reports.LeaseClaimed(2, TRIM_HORIZON)))
    life.say(e.ProcessExited("s0", 0, "killed by SIGKILL", is_shared=True))
    (note,) = life.asked(c.Note)
    assert note.event == "shared_process_died"
    life.say(e.RowRead("s0", life.rows["s0"]))
    await_start(life)

    assert life.asked(c.StartProcess)[0].is_alone
    notes = die(life, 1)
    assert [each.fields["deaths"] for each in notes if each.event == "process_died"] == [1]
    await_start(life)
    assert life.asked(c.StartProcess)[0].is_alone


@pytest.mark.parametrize("last", [reports.LeaseKept(), reports.ProcessBroke("no memory")])
def test_a_lease_that_was_too_busy_or_whose_process_broke_gets_a_process_of_its_own(last):
    life = ManagerLife(row())
    life.take()
    notes = die(life, 1, e.ProcessReported("s0", last))
    await_start(life)

    assert life.asked(c.StartProcess)[0].is_alone
    assert not [each for each in notes if each.event == "process_died"]


def starve(life, count):
    """Its host has too little for a record, so many times."""
    broke = e.ProcessReported(
        "s0", reports.ProcessorFailed("process_records", "MemoryError", 1, is_host_fault=True)
    )
    return die(life, count, broke)


def test_start_commands_that_expire_are_failed_starts_and_the_third_gives_the_lease_away(life):
    leave_unclaimed(life, 2, after_s=10.0)
    assert not life.writes(ch.Offer)
    notes = leave_unclaimed(life, 1, after_s=10.0)

    (offer,) = life.writes(ch.Offer)
    assert (offer.key, offer.offered_to, offer.died_on) == ("s0", None, None)
    (short,) = [note for note in notes if note.event == "capacity_short"]
    assert short.fields["reason"] == "it did not claim"


def test_a_claim_that_is_refused_before_its_start_command_expires_is_no_failed_start(life):
    leave_unclaimed(life, 6, after_s=1.0)

    assert life.writes(ch.Offer) == []


def failed_and_offered(*more):
    """Three starts failed, and the offer applied; when that was."""
    life = ManagerLife(row(), *more)
    life.take()
    fail_starts(life, 3)
    life.apply(life.writes(ch.Offer)[0])
    return life, life.now


def scan_until(life, kind, most=20):
    """Scans of a fleet in which nothing else happens, until such a write; when it came."""
    for _ in range(most):
        life.scan()
        if life.writes(kind):
            return life.now
    return None


def test_a_host_that_failed_leaves_the_lease_to_others_and_asks_for_one_after_a_while():
    life, failed_at = failed_and_offered(*rows_of(OTHER, 2, "o"))
    life.rows["s0"] = row("s0", OTHER, 9)

    asked_at = scan_until(life, ch.Ask)

    assert 30.0 <= asked_at - failed_at < 30.0 + 5.0 + 1.0
    assert len(life.writes(ch.Ask)) == 1


def test_what_nobody_takes_is_tried_even_by_a_host_that_failed():
    life, failed_at = failed_and_offered(row("s1", OTHER))
    life.core._held.host_capacity._raise_instant = float("inf")
    life.rows["s0"] = row("s0", None, 9)

    taken_at = scan_until(life, ch.Take)

    # Three failovers of 10 s after it was seen free, and not before.
    assert 30.0 <= taken_at - failed_at < 30.0 + 2 * 5.0 + 1.0


def test_an_offered_row_is_left_to_others_until_it_is_overdue():
    life, failed_at = failed_and_offered(row("s1", OTHER), row("s2", THIRD))
    life.core._held.host_capacity._raise_instant = float("inf")
    life.rows["s0"] = row("s0", OFFERED, 9, offered_by=OTHER)

    taken_at = scan_until(life, ch.Take)

    assert 30.0 <= taken_at - failed_at < 30.0 + 2 * 5.0 + 5.0


def test_five_deaths_give_the_lease_to_another_host_with_a_note_of_ours(life):
    die(life, 5)

    offer = life.writes(ch.Offer)[0]
    assert offer.died_on == DiedOn("me", TRIM_HORIZON)
    assert not life.writes(ch.HaltLease)


def test_five_deaths_on_a_second_host_halt_the_lease_and_name_both():
    life = shared_fleet(died_on=DiedOn("other", TRIM_HORIZON))

    die(life, 5)

    reason = life.writes(ch.HaltLease)[0].halt.reason
    assert "died 5 times in a row" in reason
    assert "on host other before" in reason


def test_a_note_of_deaths_from_before_the_last_checkpoint_counts_for_nothing():
    at = ExtendedSequenceNumber("5")
    life = shared_fleet(checkpoint=at, died_on=DiedOn("other", TRIM_HORIZON))

    die(life, 5)

    assert life.writes(ch.Offer)[0].died_on == DiedOn("me", at)


def test_a_lease_that_came_back_without_progress_halts_after_two_deaths_more():
    life = shared_fleet(died_on=DiedOn("me", TRIM_HORIZON))

    die(life, 6)
    assert not life.writes(ch.Offer)
    assert not life.writes(ch.HaltLease)
    die(life, 1)

    assert "died 7 times" in life.writes(ch.HaltLease)[0].halt.reason


def test_a_process_that_its_host_or_a_bug_ended_is_a_failed_start_and_never_halts(life):
    notes = die(
        life,
        3,
        e.ProcessReported("s0", reports.ProcessBroke("s0.jsonl is locked by another process")),
    )

    assert [note.event for note in notes].count("start_failed") == 3
    assert life.writes(ch.Offer)[0].died_on is None


def test_what_a_host_lacks_at_records_is_left_to_another_host_after_five_tries(life):
    died = starve(life, 4)[-1]
    assert (died.event, died.fields["deaths"]) == ("process_died", 4)
    assert died.fields["reason"] == "process_records failed once: MemoryError"
    assert not life.writes(ch.Offer)
    starve(life, 1)

    assert life.writes(ch.Offer)[0].died_on == DiedOn("me", TRIM_HORIZON)
    assert not life.writes(ch.HaltLease)


def test_a_start_that_expires_after_a_process_without_memory_is_a_failed_start_and_not_a_death():
    life = shared_fleet()

    starve(life, 1)
    noted = [note.event for note in leave_unclaimed(life, 1, after_s=10.0)]

    assert "start_failed" in noted
    assert "process_died" not in noted


def test_a_halt_whose_answer_was_lost_is_found_on_the_row_which_keeps_milliseconds():
    life = shared_fleet()
    failed = reports.ProcessorFailed("process_records", "ValueError: x", 3)
    die(life, 1, e.ProcessReported("s0", failed), after_s=0.000_123)
    (halt,) = life.writes(ch.HaltLease)

    life.rows["s0"] = change_row(halt, life.rows["s0"])
    assert life.rows["s0"].halt != halt.halt
    life.resolve(halt, ch.OutcomeUnknown("timed out"))
    life.say(e.RowRead("s0", life.rows["s0"]))

    assert life.state() == "halted"
    assert not life.writes(ch.HaltLease)


def test_a_record_that_needs_more_than_two_hosts_have_halts_its_lease_with_the_reason():
    life = shared_fleet(died_on=DiedOn("other", TRIM_HORIZON))

    starve(life, 5)

    reason = life.writes(ch.HaltLease)[0].halt.reason
    assert reason.endswith(
        "on host other before; the last time: process_records failed once: MemoryError"
    )


def test_places_come_back_in_steps_that_double():
    held, counts = HostCapacity(64), []
    notes = held.failed(5, "no memory", 100.0)
    for instant in (129.0, 130.0, 160.0, 190.0, 220.0, 250.0, 280.0):
        notes += held.tick(instant)
        counts.append(held.count)

    assert counts == [5, 6, 8, 12, 20, 36, 64]
    assert [note.event for note in notes] == ["capacity_short", "capacity_enough"]


def test_a_checkpoint_of_a_lease_tried_since_brings_the_next_step_at_once():
    held = HostCapacity(64)
    held.failed(5, "no memory", 100.0)
    held.moved(90.0, 110.0)
    held.tick(130.0)
    held.moved(90.0, 131.0)
    assert held.count == 6

    held.moved(130.5, 140.0)

    assert held.count == 8


@pytest.mark.parametrize("rounds", [1, 3, 9])
def test_each_try_that_fails_doubles_the_pause_up_to_eight_minutes(rounds):
    held = HostCapacity(64)
    now = 0.0
    for number in range(rounds):
        held.failed(0, "no memory", now)
        pause_s = min(480.0, 30.0 * 2**number)
        held.tick(now + pause_s - 1.0)
        assert held.count == 0
        now += pause_s
        held.tick(now)
        assert held.count == 1


def test_many_leases_that_fail_at_one_time_are_one_failure():
    held, notes = HostCapacity(64), []
    for instant in (100.0, 100.1, 100.2):
        notes += held.failed(3, "no memory", instant)

    held.tick(131.0)

    assert held.count == 4
    assert len(notes) == 1
