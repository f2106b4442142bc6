"""The flow control of one shard: quick to slow down, slow to recover, off when healthy."""

import random

import msgspec
import pytest

from kclrun.local.limits import AWS_LIMITS, ShardMeter
from kclrun.model.quotas import PUT_RECORDS_MAX
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.producing.flow_control import (
    BATCH_RECORDS_MIN,
    PAUSE_MAX_S,
    PAUSE_MIN_S,
    Flow,
    ProducerSettings,
    ShardFlow,
)
from kclrun.producing.pending_records import PendingRecords

ONE_SHARD = (Shard("shardId-000000000000", HashRange(0, HASH_KEY_MAX), "1"),)


def refused(times: int) -> ShardFlow:
    """A controller after so many refusals in a row, a second apart from time 0."""
    flow = ShardFlow()
    for now in range(times):
        flow.refused(sent_at=now, now=now)
    return flow


def test_a_healthy_shard_is_sent_full_batches_without_a_pause():
    flow = ShardFlow()
    for now in range(100):
        flow.accepted(sent_at=now, now=now)

    assert flow.is_off
    assert (flow.batch_records, flow.pause_s) == (500, 0.0)


def test_each_refusal_halves_the_batch_and_from_the_second_on_doubles_the_pause():
    reported = [(refused(times).batch_records, refused(times).pause_s) for times in range(10)]

    assert [batch for batch, _ in reported] == [500, 250, 125, 62, 31, 16, 10, 10, 10, 10]
    assert [pause for _, pause in reported] == pytest.approx(
        [0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10]
    )


def test_batch_and_pause_stay_within_their_bounds_however_long_a_storm_lasts():
    flow = refused(1000)

    assert flow.batch_records == BATCH_RECORDS_MIN == 10
    assert flow.pause_s == pytest.approx(PAUSE_MAX_S)
    assert PAUSE_MAX_S == 10.0


def test_ten_good_replies_undo_one_refusal():
    flow = refused(3)
    for now in range(10):
        flow.accepted(sent_at=10 + now, now=10 + now)

    assert flow.batch_records == refused(2).batch_records
    assert flow.pause_s == pytest.approx(refused(2).pause_s)


def test_recovery_ends_at_full_speed_and_never_raises_a_pause_on_the_way():
    flow = refused(9)
    pauses, batches = [], []
    for now in range(9, 9 + 77):
        flow.accepted(sent_at=now, now=now)
        pauses.append(flow.pause_s)
        batches.append(flow.batch_records)

    assert pauses == sorted(pauses, reverse=True)
    assert batches == sorted(batches)
    # Slow, but not longer than the steps that were taken: 7.6 of them, ten replies each.
    assert flow.is_off
    assert PAUSE_MIN_S in {round(pause, 6) for pause in pauses}
    assert not refused(9).is_off


@pytest.mark.parametrize(("sent_at", "is_news"), [(1.9, False), (2.0, True)])
def test_what_was_sent_before_the_last_step_is_no_news(sent_at, is_news):
    for answer, counted in (("refused", (125, 2.2)), ("accepted", (268, 2.1))):
        flow = ShardFlow()
        flow.refused(sent_at=1.0, now=2.0)
        getattr(flow, answer)(sent_at=sent_at, now=2.5)

        assert (flow.batch_records, flow.resume_at) == (counted if is_news else (250, 1.1))


def test_pauses_that_pass_unused_count_as_good_replies():
    flow = refused(9)
    early, late = refused(9), refused(9)

    flow.rest(now=27.9)  # sent at 8 for the last time, so it may be sent to at 18, and was not
    assert flow.pause_s == early.pause_s
    flow.rest(now=28.0)
    assert (flow.pause_s < 10.0, flow.resume_at) == (True, 28.0)
    early.rest(now=60.0)
    late.rest(now=300.0)

    assert 6.4 < early.pause_s < 10.0
    assert late.is_off
    # It was over when the last pause would have been, not when somebody looked.
    assert late.metrics(300.0).recovery_max_s < 250.0


def test_a_shard_rests_from_one_request_to_the_next():
    flow = ShardFlow()
    flow.refused(sent_at=10.0, now=10.5)
    after_refusal = flow.resume_at
    flow.accepted(sent_at=20.0, now=20.5)

    assert after_refusal == 10.1
    assert flow.resume_at == pytest.approx(20.1)


def test_the_metrics_tell_of_the_slow_time_and_of_the_recovery():
    flow = ShardFlow()
    flow.refused(sent_at=10.0, now=10.0)
    flow.refused(sent_at=11.0, now=11.0)
    slow = flow.metrics(12.0)
    for step in range(20):
        flow.accepted(sent_at=12.0 + step, now=12.0 + step)

    healthy = flow.metrics(100.0)

    assert (slow.batch_records, slow.pause_s, slow.slow_s) == (125, 0.2, 2.0)
    assert (healthy.batch_records, healthy.pause_s) == (500, 0.0)
    assert (healthy.pause_max_s, healthy.refusals) == (0.2, 2)
    # On from 10 to 31, the last refusal at 11.
    assert healthy.slow_s == pytest.approx(21.0)
    assert healthy.recovery_max_s == pytest.approx(20.0)
    flow.refused(sent_at=200.0, now=200.0)
    assert flow.metrics(205.0).slow_s == pytest.approx(21.0 + 5.0)


def test_the_longest_recovery_is_reported_and_the_largest_pause():
    flow = ShardFlow()
    for began, replies_s in ((0.0, 2.0), (100.0, 1.0)):
        flow.refused(sent_at=began, now=began)
        for step in range(1, 11):
            assert not flow.is_off
            flow.accepted(sent_at=began + step * replies_s, now=began + step * replies_s)
    reported = flow.metrics(200.0)

    assert (reported.recovery_max_s, reported.slow_s) == (20.0, 30.0)
    assert (reported.refusals, reported.pause_max_s, reported.pause_s) == (2, 0.1, 0.0)


def test_the_defaults_of_a_producer_are_what_they_are_derived_from():
    reported = ProducerSettings()

    assert (reported.keeps_order, reported.aggregates) == (True, False)
    assert reported.concurrency * PUT_RECORDS_MAX / 0.040 == 50_000  # records/s at 40 ms a request
    assert reported.linger_s == 0.1  # the KPL's
    assert reported.give_up_after_s == 6 * PAUSE_MAX_S
    assert reported.buffer_records_max == 50 * AWS_LIMITS.write_records
    assert reported.buffer_bytes_max == 64 * 1024 * 1024
    assert reported.record_bytes_max == 1024 * 1024
    assert reported.request_bytes_max == 5 * 1024 * 1024


def test_the_metrics_of_a_producer_are_those_of_its_worst_shard():
    shard = ShardFlow().metrics(0.0)
    shards = {
        "a": msgspec.structs.replace(shard, pause_max_s=3.0, recovery_max_s=1.0),
        "b": msgspec.structs.replace(shard, pause_max_s=2.0, recovery_max_s=7.0),
    }
    reported = msgspec.structs.replace(
        PendingRecords(ONE_SHARD, ProducerSettings(), Flow()).metrics(0)
    )
    reported = msgspec.structs.replace(reported, shards=shards, requests=4, full_requests=1)

    assert (reported.pause_max_s, reported.recovery_max_s, reported.full_batch_share) == (
        3.0,
        7.0,
        0.25,
    )


def test_shards_are_controlled_each_by_itself_and_closed_ones_are_forgotten():
    flow = Flow()
    flow.of("hot").refused(sent_at=0.0, now=0.0)

    assert flow.of("healthy").is_off
    assert not flow.of("hot").is_off

    flow.keep({"healthy"})

    assert set(flow.metrics(1.0)) == {"healthy"}


@pytest.mark.parametrize(("senders", "refused_max"), [(1, 0.05), (4, 0.12), (16, 0.25)])
def test_senders_that_do_not_know_of_each_other_share_a_shard_without_a_storm(senders, refused_max):
    """Each has more to send than the shard takes, a request takes 20 ms, for two minutes."""
    chance = random.Random(7)
    shard = ShardMeter(AWS_LIMITS, 0.0)
    flows = [ShardFlow() for _ in range(senders)]
    next_at = [chance.random() * 0.1 for _ in range(senders)]
    taken = turned_away = 0
    while (now := min(next_at)) < 120:
        sender = next_at.index(now)
        flow = flows[sender]
        count = flow.batch_records
        admitted = sum(shard.admit_write(200, now) for _ in range(count))
        taken, turned_away = taken + admitted, turned_away + count - admitted
        (flow.accepted if admitted == count else flow.refused)(now, now + 0.02)
        next_at[sender] = now + max(0.02, flow.pause_s)

    # The shard is used in full, and little is sent in vain.
    assert taken >= 0.95 * 120 * 1000
    assert turned_away / (taken + turned_away) < refused_max
