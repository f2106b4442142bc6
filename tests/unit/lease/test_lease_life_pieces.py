"""The small parts of core 2: ledger, requests, pacing, error policy, start point, permit."""

import pytest

from kclrun.calling.delivery import GiveUp, RetryAfter, decision_after
from kclrun.errors import (
    InvariantViolation,
    SettingsError,
    StaleCheckpoint,
)
from kclrun.lease.checkpoints import CheckpointLedger, CheckpointRequests
from kclrun.lease.commands import AnswerCheckpoint, CheckpointAnswer
from kclrun.lease.policy import (
    FLOOR_S,
    THROUGHPUT_ALPHA,
    LoadMeter,
    Pacing,
    batch_records_max,
    first_start,
)
from kclrun.model.lease import Lease, Load
from kclrun.model.policies import ErrorPolicy
from kclrun.model.record import IteratorType, StartPoint
from kclrun.model.sequence import AT_TIMESTAMP, LATEST, TRIM_HORIZON
from kclrun.model.time import Instant
from kclrun.protocol.fence import fence_instant
from kclrun.protocol.in_flight import has_ended_ownership
from kclrun.protocol.writes import HandOver
from kclrun.worker.sharing import rest_together_s
from tests.support.tables import over_rows
from tests.unit.lease.lease_driver import Driver, p

DURABLE, LOST, STALE = CheckpointAnswer.DURABLE, CheckpointAnswer.LOST, CheckpointAnswer.STALE


def row(position, **fields):
    return Lease(key="s0", checkpoint=position, **fields)


@pytest.fixture
def lease():
    return Metered()


@pytest.fixture
def ledger():
    return CheckpointLedger(p(10), 100)


@pytest.mark.parametrize("elapsed_s", [0.5, 1.0, 4.0])
def test_the_throughput_is_what_was_delivered_since_it_was_last_measured(elapsed_s):
    metering = LoadMeter(lambda: 0.0)
    metering.deliver(2048)

    first = metering.throughput_kbps(Instant(elapsed_s))

    assert first == pytest.approx(THROUGHPUT_ALPHA * 2 / elapsed_s, abs=0.01)
    assert metering.throughput_kbps(Instant(elapsed_s)) == first, "at the same instant: as before"
    assert metering.throughput_kbps(Instant(elapsed_s + 1.0)) < first


class Metered:
    """A lease that is measured each second; `rate` gives KiB/s and cores of a second."""

    def __init__(self):
        self.now = self.cpu_s = 0.0
        self.metering = LoadMeter(lambda: self.cpu_s)
        self.metering.begin(Instant(0.0))

    def run(self, seconds, rate, every=1):
        for _ in range(0, seconds, every):
            for _ in range(every):
                kbps, cpu = rate(self.now)
                self.now += 1.0
                self.cpu_s += cpu
                self.metering.deliver(int(kbps * 1024))
            load = self.metering.load(Instant(self.now))
        return load


def test_a_load_is_known_once_it_is_the_mean_of_two_minutes(lease):
    assert lease.run(119, lambda _: (100.0, 0.25)) is None
    assert lease.run(1, lambda _: (100.0, 0.25)) == Load(100.0, 0.25)


def test_what_a_process_reads_at_its_start_counts_as_one_second_of_the_mean(lease):
    load = lease.run(120, lambda now: (1300.0 if now == 0 else 100.0, 0.25))

    assert load == Load(110.0, 0.25)


def test_polls_of_five_seconds_move_the_load_by_a_twentieth(lease):
    lease.run(600, lambda now: (500.0 if now % 5 == 0 else 0.0, 0.2))

    loads = [lease.run(1, lambda now: (500.0 if now % 5 == 0 else 0.0, 0.2)) for _ in range(60)]

    assert all(load.kbps == pytest.approx(100.0, rel=0.05) for load in loads)


@pytest.mark.parametrize("every", [1, 3, 10])
def test_a_load_follows_the_traffic_in_minutes_however_often_it_is_measured(lease, every):
    lease.run(300, lambda _: (100.0, 0.1), every)

    after_two_minutes = lease.run(120, lambda _: (1100.0, 0.6), every)
    after_ten = lease.run(480, lambda _: (1100.0, 0.6), every)

    assert 650 < after_two_minutes.kbps < 800
    assert after_ten == Load(pytest.approx(1100, rel=0.02), pytest.approx(0.6, rel=0.02))


def test_a_process_that_stood_still_for_longer_than_the_mean_begins_it_again(lease):
    lease.run(300, lambda _: (1000.0, 0.5))

    assert lease.run(1000, lambda _: (0.0, 0.0), every=1000) == Load(0.0, 0.0)


# What a row says of a write whose reply was lost


@over_rows(
    ("claim", "row_now", "applied"),
    [
        ("the lease went to the next owner", {"checkpoint_owner": None}, True),
        ("the leader's wish stands as it did", {"checkpoint_owner": "me"}, False),
        ("the row is ours again", {"owner": "me", "checkpoint_owner": None}, False),
        ("its position is behind ours", {"checkpoint_owner": None, "checkpoint": p(19)}, False),
        ("its counter has not moved", {"checkpoint_owner": None, "counter": 6}, False),
    ],
)
def test_a_hand_over_has_applied_once_the_row_is_the_next_owners_at_our_position(
    claim, row_now, applied
):
    change = HandOver("s0", "me", "java", 6, position=p(20), last=p(10))
    now = Lease(**{"key": "s0", "checkpoint": p(20), "owner": "java", "counter": 7} | row_now)

    assert has_ended_ownership(change, now, 6) is applied


# Ledger


def test_delivered_processed_checkpointed_follow_each_other(ledger):
    assert ledger.is_idle
    assert not ledger.has_unsaved

    ledger.deliver(p(20), 3)
    assert not ledger.is_idle
    assert (ledger.delivered_total, ledger.uncheckpointed) == (3, 3)
    ledger.process(p(20))
    assert ledger.is_idle
    assert ledger.has_unsaved
    assert ledger.has_uncounted
    ledger.confirm(p(20))

    assert not ledger.has_unsaved
    assert not ledger.has_uncounted
    assert (ledger.checkpointed_total, ledger.delivered_max) == (3, 103)


def test_a_batch_given_again_is_counted_once(ledger):
    ledger.deliver(p(20), 3)
    ledger.deliver(p(20), 3)

    assert ledger.delivered_total == 3


def test_a_page_without_records_moves_the_position_and_no_count(ledger):
    ledger.deliver(p(20), 0)
    ledger.process(p(20))

    assert ledger.has_unsaved
    assert not ledger.has_uncounted
    assert ledger.delivered_total == 0


def test_processed_and_checkpointed_never_move_back(ledger):
    ledger.process(p(20))
    ledger.confirm(p(20))

    with pytest.raises(InvariantViolation, match="processed moved back"):
        ledger.process(p(19))
    with pytest.raises(InvariantViolation, match="checkpoint moved back"):
        ledger.confirm(p(19))


@pytest.mark.parametrize("cap", [2, 3, 40, 101])
def test_checkpoints_in_the_middle_of_every_batch_never_fill_the_cap(cap):
    ledger = CheckpointLedger(TRIM_HORIZON, cap)
    size = batch_records_max(cap)

    for batch in range(1, 20):
        assert ledger.delivered_max - ledger.delivered_total >= size
        last = batch * size
        ledger.deliver(p(last), size)
        ledger.confirm(p(last - 1 if size > 1 else last))
        ledger.process(p(last))
        assert not ledger.is_full


def test_a_batch_is_never_empty():
    assert batch_records_max(1) == 1


def test_records_below_a_row_that_is_ahead_are_covered_as_they_come():
    ledger = CheckpointLedger(p(10), 5)
    ledger.confirm(p(90))

    ledger.deliver(p(20), 5)

    assert ledger.uncheckpointed == 0
    assert ledger.admit(None) == p(90)
    assert ledger.admit(p(90)) == p(90)
    with pytest.raises(StaleCheckpoint):
        ledger.admit(p(91))


def test_the_core_checks_the_positions_and_counts_of_its_ledger():
    life = Driver().begin().life
    life.ledger.checkpointed = p(11)
    with pytest.raises(AssertionError, match="ahead of its row"):
        life.check()
    life.ledger.processed = p(11)
    with pytest.raises(AssertionError, match="beyond delivered"):
        life.check()
    life.ledger.checkpointed_total = 1
    with pytest.raises(AssertionError, match="out of step"):
        life.check()


# Requests


def test_requests_that_need_no_write_are_answered_at_once():
    ledger, requests = CheckpointLedger(p(10), 100), CheckpointRequests(is_manual=False)

    assert requests.admit(1, p(10), ledger) == (AnswerCheckpoint(1, DURABLE),)
    (refused,) = requests.admit(2, p(9), ledger)

    assert refused.answer is STALE
    assert "cannot checkpoint 9" in refused.detail


# Permit


# Fence


def test_the_fence_leaves_a_hundredth_and_a_tenth_of_a_second():
    assert fence_instant(100.0, 10.0) == pytest.approx(109.8)


# Pacing


@pytest.mark.parametrize("phase_s", [0.0, 0.13, 0.5, 0.87])
@pytest.mark.parametrize(("idle_s", "every_s"), [(1.0, 0.4), (1.0, 1.0), (5.0, 0.4), (2.0, 1.9)])
def test_idle_threads_that_wake_together_read_no_shard_too_soon(phase_s, idle_s, every_s):
    pacing = Pacing(idle_s, every_s=every_s)
    asked = Instant(1000.3)
    gaps = []
    for turn in range(20):
        rest_s = pacing.polite_s(rest_together_s(phase_s, asked, idle_s), idle_s)
        late_s = 0.003 * (turn % 4)
        gaps.append(rest_s + late_s)
        asked = Instant(asked + rest_s + late_s)

    assert min(gaps) >= every_s - 0.05
    assert sum(gaps[1:]) <= 20 * idle_s  # and none too late: they keep the beat


def test_idle_is_never_below_the_floor():
    assert Pacing(0.01).after_page(0, 0) == FLOOR_S
    assert Pacing(0.01, floor_s=0.001).after_page(0, 0) == 0.01


# Error policy


def test_the_pause_is_bounded_and_no_retries_are_none():
    assert decision_after(9_999, ErrorPolicy(10_000, 1.0)) == RetryAfter(30.0)
    assert decision_after(1, ErrorPolicy(0, 1.0)) == GiveUp()


# Start point


@over_rows(
    ("lease", "start"),
    [
        (row(TRIM_HORIZON), StartPoint(IteratorType.TRIM_HORIZON)),
        (row(LATEST), StartPoint(IteratorType.AT_TIMESTAMP, timestamp=77.0)),
        (row(LATEST, latest_pinned_at=55.0), StartPoint(IteratorType.AT_TIMESTAMP, timestamp=55.0)),
        (row(AT_TIMESTAMP), StartPoint(IteratorType.AT_TIMESTAMP, timestamp=33.0)),
        (
            row(p("AT_TIMESTAMP", 44_000)),
            StartPoint(IteratorType.AT_TIMESTAMP, timestamp=44.0),
        ),
        (row(p(12, 3)), StartPoint(IteratorType.AT_SEQUENCE_NUMBER, sequence_number="12")),
    ],
)
def test_reading_begins_where_the_row_says(lease, start):
    assert first_start(lease, start_at=33.0, now_at=77.0) == start


def test_an_instant_that_nobody_knows_is_a_setting_to_repair():
    with pytest.raises(SettingsError, match="lease s0 is to be read from an instant"):
        first_start(row(AT_TIMESTAMP), start_at=None, now_at=77.0)


# What the host lacks
