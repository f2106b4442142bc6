"""Claiming, renewing, the fence, and what unknown outcomes mean [P4, P5, P6, P7]."""

import pytest
from msgspec.structs import replace

from kclrun.errors import InvariantViolation
from kclrun.lease import commands, events
from kclrun.lease.states import State
from kclrun.model.sequence import SHARD_END
from kclrun.protocol import reports
from kclrun.protocol import writes as changes
from kclrun.protocol.fence import fence_instant
from kclrun.protocol.writes import Applied, ConditionFailed
from tests.support.tables import over_rows
from tests.unit.lease.lease_driver import KEY, ME, NOT_APPLIED, OTHER, START, Driver, child, p


def test_a_claim_that_succeeds_begins_at_the_position_of_its_image():
    driver = Driver(position=p(10))

    driver.tell(events.Started())
    assert driver.sent(changes.Claim) == [changes.Claim(KEY, ME, 5)]
    driver.settle()

    assert driver.state is State.PROCESSING
    assert driver.stored.counter == 6
    assert driver.life.own.fence == START + 9.0 * 0.99 - 0.1
    assert driver.reports(reports.LeaseClaimed) == [reports.LeaseClaimed(6, p(10))]
    assert driver.of(commands.CallInitialize)[0].row.checkpoint == p(10)


@over_rows("fault", ["reply lost", "throttled", "unavailable", "refused", "dropped"])
def test_a_claim_is_tried_again_until_a_success_reply(fault):
    driver = Driver()
    driver.faults.append(fault)

    driver.begin()

    claims = driver.sent(changes.Claim)
    assert [claim.seen_counter for claim in claims] == ([5, 6] if fault == "reply lost" else [5, 5])
    assert driver.life.own.counter == driver.stored.counter


def test_a_write_of_the_former_process_is_followed_by_another_claim_whose_send_sets_the_fence():
    driver = Driver()
    driver.tell(events.Started())
    driver.table.write(changes.Renew(KEY, ME, 5))  # was in flight when its process died (H1c)
    driver._perform(driver.queue.popleft())
    driver.now += 1.0

    driver.settle()

    assert driver.state is State.PROCESSING
    assert [claim.seen_counter for claim in driver.sent(changes.Claim)] == [5, 6]
    assert driver.life.own.fence == fence_instant(START + 1.0, 9.0)


@over_rows(
    ("fields", "words"),
    [
        ({"owner": OTHER}, "belongs to kclrun::host:b"),
        ({"owner": None}, "belongs to no owner"),
        ({"owner": "java-worker", "checkpoint_owner": ME}, "belongs to java-worker"),
        ({"counter": 7}, "its counter is 7"),
        ({"counter": 3}, "its counter is 3"),
        ({"position": SHARD_END}, "ended"),
        # Its manager has to wait.
        ({"taken_from": "java-worker"}, "taken by force from java-worker"),
    ],
)
def test_a_row_that_is_not_as_the_manager_said_is_not_claimed(fields, words):
    driver = Driver(**fields)

    driver.happen(events.Started())

    assert driver.state is State.UNCLAIMED
    assert words in driver.reports(reports.StartUnclaimed)[0].reason
    assert not driver.of(commands.CallInitialize)
    assert driver.of(commands.Exit) == [commands.Exit(commands.ExitCause.UNCLAIMED)]
    assert replace(driver.stored, counter=0) == replace(driver.row, counter=0)


def test_a_row_that_is_gone_is_not_claimed():
    driver = Driver()
    driver.vanish()

    driver.happen(events.Started())

    assert driver.state is State.UNCLAIMED


def test_an_expired_start_command_claims_nothing():
    driver = Driver()
    driver.now = driver.policy.expires_instant

    driver.happen(events.Started())

    assert driver.state is State.UNCLAIMED
    assert driver.of(commands.SendWrite) == []
    assert driver.stored.counter == 5


def test_a_claim_that_does_not_come_through_expires():
    driver = Driver()
    driver.faults += ["throttled"] * 1000

    driver.happen(events.Started())

    assert driver.state is State.UNCLAIMED
    assert driver.now >= driver.policy.expires_instant
    assert "expired" in driver.reports(reports.StartUnclaimed)[0].reason


@pytest.mark.parametrize(
    ("faults", "sends"), [(["reply lost"], 1), (["dropped"], 2), (["in flight", "dropped"], 3)]
)
def test_an_unknown_renewal_is_read_back_and_its_fence_counts_from_its_earliest_send(
    driver, faults, sends
):
    driver.faults += faults
    driver.now += 3.0
    first = driver.now

    driver.tick()

    assert [renew.seen_counter for renew in driver.sent(changes.Renew)] == [6] * sends
    assert len(driver.of(commands.ReadOwnRow)) == len(faults)
    assert (driver.now > first) is (sends > 1)
    assert driver.life.own.counter == driver.stored.counter == 7
    assert driver.life.own.fence == fence_instant(first, 9.0)


def test_the_fence_does_not_count_from_a_send_that_was_throttled(driver):
    driver.faults.append("throttled")

    driver.tick(3.0)

    assert driver.now > START + 3.0
    assert driver.life.own.fence == fence_instant(driver.now, 9.0)


def test_a_read_back_that_fails_is_asked_again(driver):
    driver.faults += ["reply lost", "unreadable", "unreadable"]

    driver.tick(3.0)

    assert len(driver.of(commands.ReadOwnRow)) == 3
    assert driver.life.own.pending is None


@pytest.mark.parametrize(
    ("moved", "words"),
    [
        (lambda driver: driver.steal(), OTHER),
        # By a second process of this owner (N3).
        (lambda driver: driver.table.write(changes.Renew(KEY, ME, 6)), ""),
    ],
)
def test_a_row_that_moved_by_no_unresolved_write_of_mine_is_lost_with_the_next_write(
    driver, moved, words
):
    moved(driver)

    driver.tick(3.0)

    assert driver.state is State.LOST
    assert len(driver.of(commands.CallLeaseLost)) == 1
    assert words in driver.reports(reports.LeaseLost)[0].reason
    assert driver.of(commands.Exit) == [commands.Exit(commands.ExitCause.LOST)]


def test_past_the_fence_the_lease_is_lost_and_nothing_is_written(driver):
    driver.faults += ["throttled"] * 100
    driver.tick(3.0)
    assert driver.now >= driver.life.own.fence
    sends = len(driver.of(commands.SendWrite))
    driver.faults.clear()

    driver.tick(1.0)

    assert driver.state is State.LOST
    assert len(driver.of(commands.SendWrite)) == sends
    assert "fence" in driver.reports(reports.LeaseLost)[0].reason


def test_a_renewal_that_succeeds_behind_the_fence_moves_it_on(driver):
    driver.now += 8.0
    driver.tell(events.Ticked())
    renew = driver.queue.popleft().change
    sent = driver.now
    driver.now += 2.0
    assert driver.now > driver.life.own.fence

    driver.happen(events.WriteResolved(renew, driver.table.write(renew), sent))

    assert driver.state is State.PROCESSING
    assert driver.life.own.fence == fence_instant(sent, 9.0)


def test_a_refused_write_is_reported_once_and_tried_until_the_fence(driver):
    driver.faults += ["refused"] * 1000

    driver.tick(3.0)
    driver.tick()

    assert driver.state is State.LOST
    assert [each.detail for each in driver.reports(reports.ProcessWarned)] == [
        "AccessDenied: no permission"
    ]


def test_more_unresolved_sends_than_a_failover_can_hold_end_the_lease():
    driver = Driver(failover_s=1e9).begin()
    driver.faults += ["dropped"] * 1001

    driver.tick(5e8)

    assert driver.state is State.LOST
    assert "too long" in driver.reports(reports.LeaseLost)[0].reason


def shortened(*, after_s, to_s=3.0, is_answered=True):
    """A lease claimed under 9 s, whose last renewal is `after_s` old when 3 s are heard of; the
    renewal that follows is answered at once, or waits in the queue."""
    driver = Driver().begin()
    driver.now += after_s
    driver.tell(events.FailoverChanged(to_s))
    if is_answered:
        driver.settle()
    return driver


@pytest.mark.parametrize(
    ("after_s", "to_s"),
    [
        pytest.param(2.9, 3.0, id="just before its fence by the shorter one"),
        pytest.param(0.5, 3.0, id="before its next renewal is due"),
        pytest.param(2.9, 1.0, id="the last renewal is older than the shorter one"),
    ],
)
def test_a_shorter_failover_is_renewed_under_at_once_and_shortens_the_fence(after_s, to_s):
    driver = shortened(after_s=after_s, to_s=to_s)

    assert driver.stored.counter == 7
    assert driver.life.own.fence == fence_instant(START + after_s, to_s)
    assert driver.of(commands.AllowDelivery)[-1].fence == driver.life.own.fence

    driver.tick(to_s * 0.99 - 0.17)  # shortly before that fence
    assert driver.state is State.PROCESSING


def test_where_the_renewal_fails_the_fence_is_a_shorter_failover_after_it_was_heard_of():
    driver = shortened(after_s=2.9, to_s=1.0, is_answered=False)

    assert driver.life.own.fence == fence_instant(START + 2.9, 1.0)
    driver.now += 0.88
    driver.tell(events.Ticked())
    assert driver.state is State.PROCESSING
    driver.now += 0.02
    driver.tell(events.Ticked())
    assert driver.state is State.LOSING


@pytest.mark.parametrize(
    ("after_s", "heard", "fence"),
    [
        pytest.param(8.0, [(0.0, 3.0)], fence_instant(START, 9.0), id="a nearer fence stays"),
        pytest.param(1.0, [(0.0, 3.0), (0.0, 9.0)], fence_instant(START, 9.0), id="and longer"),
        pytest.param(
            1.0, [(0.0, 2.0), (1.5, 1.5)], fence_instant(START + 1.0, 2.0), id="each bounds it"
        ),
        pytest.param(
            1.0, [(0.0, 30.0), (0.5, 12.0)], fence_instant(START + 1.5, 12.0), id="longer before"
        ),
    ],
)
def test_the_fence_before_a_renewal_under_the_failovers_that_were_heard_of(
    driver, after_s, heard, fence
):
    driver.now += after_s
    for pause_s, failover_s in heard:
        driver.now += pause_s
        driver.tell(events.FailoverChanged(failover_s))

    assert driver.life.own.fence == fence


def test_a_write_sent_before_the_shorter_failover_was_heard_of_is_followed_by_a_renewal(driver):
    driver.now += 3.0
    driver.tell(events.Ticked())
    early = driver.queue.popleft().change
    sent = driver.now
    driver.now += 1.0
    driver.happen(events.FailoverChanged(1.5))
    heard = driver.now
    driver.now += 1.0  # its reply comes when the shorter failover since its send has passed

    driver.tell(events.WriteResolved(early, driver.table.write(early), sent))

    assert driver.life.own.fence == fence_instant(heard, 1.5)
    (renewal,) = driver.queue
    assert isinstance(renewal.change, changes.Renew)
    driver.settle()
    assert driver.life.own.fence == fence_instant(driver.now, 1.5)


def test_a_start_that_hears_of_a_shorter_failover_before_its_claim_applied_is_bounded_by_it():
    driver = Driver()
    driver.tell(events.Started())
    claim, sent = driver.queue.popleft().change, driver.now
    driver.now += 0.5
    driver.happen(events.FailoverChanged(3.0))
    heard = driver.now
    driver.now += 2.4

    driver.tell(events.WriteResolved(claim, driver.table.write(claim), sent))

    assert driver.life.own.fence == fence_instant(heard, 3.0)


def test_the_fleets_smallest_failover_is_the_pace_of_renewals_and_the_length_of_the_fence():
    driver = shortened(after_s=1.0)

    driver.tick(3.0)

    assert driver.state is State.LOST


def test_an_outcome_without_a_write_a_row_before_the_claim_and_a_write_without_a_row_are_bugs():
    driver = Driver()
    own = driver.life.own

    with pytest.raises(InvariantViolation, match="without a write"):
        own.resolve(ConditionFailed(None), START)
    with pytest.raises(InvariantViolation, match="before it was claimed"):
        _ = own.confirmed
    (claim,) = driver.tell(events.Started())
    with pytest.raises(InvariantViolation, match="without a row"):
        driver.tell(events.WriteResolved(claim.change, Applied(None), START))


def test_a_condition_that_failed_for_no_visible_reason_is_claimed_again():
    driver = Driver()
    driver.tell(events.Started())
    claim = driver.queue.popleft().change

    driver.happen(events.WriteResolved(claim, ConditionFailed(driver.stored), START))

    assert driver.state is State.PROCESSING


def test_while_a_lease_is_being_lost_or_a_write_is_under_way_nothing_spins(driver):
    driver.user_returns = False
    driver.batch(20)
    driver.now += 10.0
    driver.tell(events.Ticked())

    assert driver.state is State.LOSING
    assert driver.life.next_deadline(driver.now) == driver.now + 30.0


def test_a_first_send_that_lands_after_a_second_one_sets_the_fence(driver):
    driver.faults += ["in flight", "dropped"]
    driver.now += 3.0
    first = driver.now
    driver.tell(events.Ticked())
    while len(driver.sent(changes.Renew)) < 2 or driver.faults:
        driver._perform(driver.queue.popleft())
        driver.now += 0.5
    driver.land()

    driver.settle()

    assert len(driver.sent(changes.Renew)) == 2
    assert driver.life.own.counter == driver.stored.counter == 7
    assert driver.life.own.fence == fence_instant(first, 9.0)


@pytest.mark.parametrize("kind", [changes.Release, changes.End])
def test_a_last_write_is_issued_again_when_another_of_mine_had_moved_the_counter(driver, kind):
    driver.user_returns = kind is changes.End
    is_end = kind is changes.End
    driver.tell(events.ShardExhausted((child("s1"),)) if is_end else events.DrainRequested("x"))
    if not is_end:
        driver.happen(events.DeliveryStopped())
        driver.tell(events.CallReturned())
    while not isinstance(getattr(driver.queue[0], "change", None), kind):
        driver._perform(driver.queue.popleft())
    change = driver.queue.popleft().change
    driver.tell(events.WriteResolved(change, NOT_APPLIED["dropped"], driver.now))
    driver.table.write(changes.Renew(KEY, ME, driver.stored.counter))

    driver.settle()

    assert driver.state is (State.ENDED if is_end else State.RELEASED)
    assert len(driver.sent(kind)) == 2


def test_before_the_claim_there_is_no_fence_and_the_deadline_is_the_expiry():
    driver = Driver()

    assert driver.life.own.fence is None
    assert driver.life.next_deadline(driver.now) == driver.policy.expires_instant


def test_while_a_write_is_under_way_only_the_fence_is_a_deadline(driver):
    driver.now += 3.0
    driver.tell(events.Ticked())

    assert driver.life.own.pending is not None
    assert driver.life.next_deadline(driver.now) > driver.now


def test_a_claim_answered_late_renews_at_once():
    driver = Driver()
    driver.tell(events.Started())
    claim = driver.queue.popleft().change
    driver.now += 4.0

    driver.happen(events.WriteResolved(claim, driver.table.write(claim), START))

    assert driver.sent(changes.Renew) == [changes.Renew(KEY, ME, 6, 0.0)]
    assert driver.state is State.PROCESSING


def test_a_process_that_stood_still_says_for_how_long_its_fence_was_over(driver):
    driver.user_returns = False

    driver.tick(27.0)  # a SIGSTOP for three failovers

    assert driver.state is State.LOSING
    driver.happen(events.DeliveryStopped(), events.CallReturned())
    (lost,) = driver.reports(reports.LeaseLost)
    assert "its fence passed 18.2 s ago" in lost.reason


def test_reads_of_the_own_row_that_fail_wait_longer_each_time_and_anew_after_one_that_came():
    driver = Driver()
    (claim,) = driver.tell(events.Started())
    pauses = []

    def fail():
        (again,) = driver.tell(events.ReadFailed("no route"))
        pauses.append(again.not_before - driver.now)

    driver.tell(events.WriteResolved(claim.change, NOT_APPLIED["dropped"], driver.now))
    fail()
    fail()
    driver.tell(events.OwnRowRead(driver.stored))
    driver.tell(events.WriteResolved(claim.change, NOT_APPLIED["dropped"], driver.now))
    fail()

    assert pauses[1] > pauses[0]
    assert pauses[2] == pauses[0]
