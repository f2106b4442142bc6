"""How a stop goes, what stalls, and when a run has caught up."""

import signal

import pytest

from kclrun.lifecycle.caught_up import CaughtUp, is_at_tip
from kclrun.lifecycle.stall import STALL_PATIENCE_S, StallWatch, silence_max_s, stalled
from kclrun.lifecycle.stopping import (
    UNKILLABLE_AFTER_S,
    Stage,
    StopPlan,
    latest_fence,
    leave_at,
    left_undone,
    next_force,
)
from kclrun.protocol.status import LeaseStatus, WorkerState
from tests.support.build import position
from tests.support.tables import over_rows


def status(**fields):
    base = {"pid": 1, "incarnation": 1, "state": WorkerState.PROCESSING, "at_tip": True}
    return LeaseStatus(**{**base, **fields})


# Stopping.


def test_a_stop_is_not_whole_where_a_process_left_what_it_was_given_without_a_checkpoint():
    lost = status(state=WorkerState.LOST, has_undone=True)

    assert left_undone(lost)
    assert left_undone(status(state=WorkerState.PROCESSING, has_undone=True)), "it died"
    assert not left_undone(status(state=WorkerState.HALTED, has_undone=True)), "by decision"
    assert not left_undone(status(state=WorkerState.LOST))
    assert not left_undone(None)


def test_the_first_signal_begins_the_grace_and_the_second_leaves_two_seconds():
    plan = StopPlan(grace_s=60.0)
    assert not plan.is_wanted
    assert not plan.is_over(1e9)

    assert plan.press(signal.SIGTERM, 100.0) is Stage.DRAINING
    assert plan.is_wanted
    assert plan.force_instant == 160.0
    assert [plan.is_over(now) for now in (159.9, 160.0)] == [False, True]
    assert plan.press(signal.SIGINT, 110.0) is Stage.HURRIED
    assert plan.force_instant == 112.0


def test_a_terminal_that_is_closed_begins_a_stop_and_hurries_none():
    """The kernel and the shell send a SIGHUP each."""
    plan = StopPlan(grace_s=60.0)

    assert plan.press(signal.SIGHUP, 100.0) is Stage.DRAINING
    assert not plan.heeds(signal.SIGHUP)
    assert plan.press(signal.SIGHUP, 100.1) is Stage.DRAINING
    assert plan.force_instant == 160.0
    assert plan.press(signal.SIGTERM, 110.0) is Stage.HURRIED
    assert plan.press(signal.SIGHUP, 111.0) is Stage.HURRIED
    assert plan.force_instant == 112.0


def test_a_second_signal_never_lengthens_a_short_grace():
    plan = StopPlan(grace_s=1.0)
    plan.press(signal.SIGTERM, 100.0)

    plan.press(signal.SIGTERM, 100.5)

    assert plan.force_instant == 101.0


def test_a_stop_that_is_hurried_by_us_has_two_seconds_and_never_undoes_a_quit():
    plan = StopPlan(grace_s=60.0)
    plan.hurry(100.0)
    assert (plan.stage, plan.force_instant) == (Stage.HURRIED, 102.0)

    plan.press(signal.SIGQUIT, 101.0)
    plan.hurry(101.5)

    assert (plan.stage, plan.force_instant) == (Stage.QUITTING, 101.0)


def test_quit_ends_all_patience_from_any_stage():
    for presses in ([], [signal.SIGTERM], [signal.SIGTERM, signal.SIGTERM]):
        plan = StopPlan(grace_s=60.0)
        for number in presses:
            plan.press(number, 100.0)
        assert plan.press(signal.SIGQUIT, 101.0) is Stage.QUITTING
        assert plan.force_instant == 101.0


def test_a_drain_that_begins_during_a_stop_gets_what_is_left_of_the_grace():
    plan = StopPlan(grace_s=60.0)
    assert plan.force_instant_from(50.0) == 110.0
    assert plan.drain(100.0)

    assert plan.force_instant_from(150.0) == 160.0
    assert not plan.drain(150.0)
    assert plan.force_instant == 160.0


def test_a_machine_that_ends_soon_bounds_a_stop_and_never_lengthens_it():
    plan = StopPlan(grace_s=60.0)
    plan.drain(100.0)

    plan.finish_by(110.0)
    assert plan.force_instant == 110.0
    plan.finish_by(130.0)
    assert (plan.stage, plan.force_instant) == (Stage.DRAINING, 110.0)


def test_force_is_abrt_for_the_stacks_and_kill_a_second_later():
    assert next_force(None, []) is None
    assert next_force(10.0, []) == (signal.SIGABRT, 10.0)
    assert next_force(10.0, [signal.SIGABRT]) == (signal.SIGKILL, 11.0)
    assert next_force(10.0, [signal.SIGABRT, signal.SIGKILL]) is None


def test_after_abrt_and_kill_five_seconds_are_left_for_a_write_and_a_retry_then_rows_expire():
    _, killed_instant = next_force(10.0, [signal.SIGABRT])

    assert leave_at(None) is None
    assert leave_at(10.0) == killed_instant + 5.0
    # A process that KILL does not end in that time will not end before the manager leaves either.
    assert killed_instant + UNKILLABLE_AFTER_S == leave_at(10.0)


@pytest.mark.parametrize(
    ("last_send_instant", "fence_instant"),
    [
        (95.0, 105.0),
        # It has claimed nothing yet, and may until its start command expires.
        (0.0, 103.0),
        # What cannot be read may be the worst.
        (None, 110.0),
    ],
)
def test_the_latest_fence_is_a_failover_after_the_last_send(last_send_instant, fence_instant):
    latest = latest_fence(last_send_instant, expires_instant=103.0, failover_s=10.0, now=100.0)

    assert latest == fence_instant


# Stalls.


@over_rows(
    ("seen", "what", "since", "is_silent"),
    [
        (None, "reading has not begun", 10.0, False),
        (status(state=WorkerState.STARTING), "reading has not begun", 10.0, False),
        (status(state=WorkerState.CLAIMING), "reading has not begun", 10.0, False),
        (status(processing_since_instant=9.0), "user code has not returned", 9.0, False),
        (status(fetching_since_instant=8.0), "a request for records has not come back", 8.0, False),
        (
            status(processing_since_instant=10.0, published_instant=127.1),
            "user code has not returned",
            10.0,
            False,
        ),
        (status(published_instant=110.0), "the process publishes nothing", 110.0, True),
        # It waited for a destination, and the code goes on since then, without an end.
        (
            status(processing_since_instant=5.0, destination_waited_instant=10.0),
            "user code has not returned",
            10.0,
            False,
        ),
        # Another thread waits for an output. That is not what the code stands still for.
        (
            status(
                processing_since_instant=9.0,
                destination_since_instant=5.0,
                destination_waited_instant=8.0,
            ),
            "user code has not returned",
            9.0,
            False,
        ),
        (
            status(
                state=WorkerState.STARTING,
                destination_since_instant=5.0,
                destination_waited_instant=10.0,
            ),
            "a request to a destination has not come back",
            10.0,
            False,
        ),
    ],
)
def test_what_a_restart_can_repair_is_a_stall(seen, what, since, is_silent):
    at = {"began_instant": 10.0, "stall_s": 120.0, "failover_s": 10.0}

    stall = stalled(seen, **at, now=130.0)

    assert (stall.what, stall.since, stall.is_silent) == (what, since, is_silent)


@over_rows(
    "seen",
    [
        status(),
        status(state=WorkerState.HALTED),
        status(processing_since_instant=50.0, fetching_since_instant=50.0),
        # A shard without records, or a service that is away: nothing was fetched for ever.
        status(last_fetch_instant=2.0, last_batch_instant=2.0, published_instant=129.0),
        status(published_instant=111.0),
        # A destination is away: at the start, in a call, and back a moment ago.
        status(
            state=WorkerState.STARTING,
            destination_since_instant=2.0,
            destination_waited_instant=129.0,
        ),
        status(
            processing_since_instant=2.0,
            destination_since_instant=2.0,
            destination_waited_instant=128.0,
        ),
        status(state=WorkerState.STARTING, destination_waited_instant=129.0),
        status(processing_since_instant=2.0, destination_waited_instant=129.0),
        # Two statuses are missing: the call that the last one tells of may have returned.
        status(processing_since_instant=1.0, published_instant=127.0),
        status(processing_since_instant=10.1, published_instant=130.0),
    ],
)
def test_what_only_waits_is_no_stall(seen):
    assert stalled(seen, began_instant=1.0, stall_s=120.0, failover_s=10.0, now=130.0) is None


def test_of_a_process_that_fell_silent_only_the_silence_is_reported():
    # A request was under way when a call took the GIL: it is not the request that hangs.
    seen = status(fetching_since_instant=9.0, processing_since_instant=9.0, published_instant=10.0)
    at = {"began_instant": 1.0, "stall_s": 5.0, "failover_s": 10.0}

    assert stalled(seen, **at, now=14.5) is None
    assert stalled(seen, **at, now=15.0).what == "the process publishes nothing"


def test_a_silent_process_gets_two_failovers_and_never_more_than_stall():
    assert silence_max_s(failover_s=30.0, stall_s=120.0) == 60.0
    assert silence_max_s(failover_s=30.0, stall_s=40.0) == 40.0
    # Less would be no more than one answer of a service takes at the worst.
    assert silence_max_s(failover_s=3.0, stall_s=120.0) == 20.0


def test_a_stall_is_judged_by_when_the_process_was_first_seen():
    watch = StallWatch(5.0)
    judged = {}
    for now, live in ((100.0, {1}), (102.0, {1, 2}), (104.0, {1, 2}), (105.0, {1, 2})):
        watch.look(live, now)
        judged[now] = [watch.judge(one, None, failover_s=10.0, now=now) for one in sorted(live)]

    assert judged[104.0] == [None, None]
    assert [stall and stall.since for stall in judged[105.0]] == [100.0, None]


def test_a_process_that_went_and_came_back_begins_anew():
    watch = StallWatch(5.0)
    for now, live in ((0.0, {1}), (2.0, set()), (4.0, {1}), (6.0, {1}), (8.0, {1})):
        watch.look(live, now)
        assert not live or watch.judge(1, None, failover_s=10.0, now=now) is None
    watch.look({1}, 9.0)

    assert watch.judge(1, None, failover_s=10.0, now=9.0).since == 4.0


@over_rows(
    ("silent_s", "is_stalled"),
    [(0.5, True), (2.9, True), (3.0, False), (19.9, False), (20.0, True)],
)
def test_what_a_process_said_last_counts_for_three_seconds_and_its_silence_from_twenty(
    silent_s, is_stalled
):
    seen = status(processing_since_instant=10.0, published_instant=100.0 - silent_s)

    stall = stalled(seen, began_instant=1.0, stall_s=60.0, failover_s=10.0, now=100.0)

    assert (stall is not None) == is_stalled
    assert stall is None or stall.is_silent == (silent_s >= 20.0)


@pytest.mark.parametrize(("gap_s", "is_in_doubt"), [(2.0, False), (2.1, True)])
def test_after_a_gap_between_two_looks_nothing_is_judged_for_four_seconds(gap_s, is_in_doubt):
    watch = StallWatch(5.0)
    old = status(processing_since_instant=1.0)

    def judged(now):
        watch.look([1], now)
        return watch.judge(1, old, failover_s=10.0, now=now)

    assert judged(100.0) is not None, "the first look"
    after = 100.0 + gap_s
    assert (judged(after) is None) == is_in_doubt
    assert (judged(after + 2.0) is None) == is_in_doubt
    assert (judged(after + 3.9) is None) == is_in_doubt
    assert judged(after + 4.0) is not None


def test_a_stalled_process_gets_two_seconds_to_write_its_stacks_and_end():
    assert STALL_PATIENCE_S == 2.0


# Caught up.


def test_at_the_tip_means_everything_fetched_was_processed_and_no_user_code_runs():
    assert is_at_tip(status())
    assert is_at_tip(status(fetched=position(5), processed=position(5)))
    assert is_at_tip(status(fetched=None, processed=position(5)))
    assert not is_at_tip(None)
    assert not is_at_tip(status(at_tip=False))
    assert not is_at_tip(status(fetched=position(6), processed=position(5)))
    assert not is_at_tip(status(fetched=position(6)))
    assert not is_at_tip(status(state=WorkerState.STARTING))
    assert not is_at_tip(status(processing_since_instant=1.0))


def look(caught_up, now, **more):
    found = {"is_source_done": True, "blockers": (), "statuses": (status(),), **more}
    return caught_up.look(now, **found)


def test_caught_up_needs_two_looks_far_enough_apart():
    caught_up = CaughtUp()

    # A poll comes each second, a status each second; a put becomes readable within 0.2 s.
    assert [look(caught_up, now) for now in (0.0, 2.4, 2.5, 2.6)] == [False, False, True, True]


@pytest.mark.parametrize(
    "doubt",
    [
        {"is_source_done": False},
        {"blockers": ("shard-2 is starting",)},
        {"statuses": (status(), status(at_tip=False))},
        {"statuses": (status(records_total=1),)},
    ],
)
def test_any_doubt_between_two_looks_starts_the_wait_over(doubt):
    caught_up = CaughtUp()
    look(caught_up, 0.0)

    assert not look(caught_up, 2.4, **doubt)
    # The total goes back to what it was, which counts as movement too.
    assert not look(caught_up, 2.5)
    assert not look(caught_up, 4.9)
    assert look(caught_up, 5.0)


def test_an_answer_from_before_the_two_looks_is_not_the_tip_of_now():
    """A process whose reads fail shows its last answer for as long as the outage lasts."""
    old, new = (status(last_fetch_instant=at) for at in (9.9, 52.0))
    caught_up = CaughtUp()

    assert not look(caught_up, 50.0, statuses=(old, new))
    assert not look(caught_up, 60.0, statuses=(old, new))
    assert look(caught_up, 60.5, statuses=(new, new))

    # A shard that is read once a minute: a read since the first look is enough.
    seldom = CaughtUp()
    assert not look(seldom, 50.0, statuses=(old,))
    assert look(seldom, 111.0, statuses=(new,))
