"""The flow control of one shard: quick to slow down, slow to recover, off when healthy."""

import msgspec
import pytest

from kclrun.local.limits import AWS_LIMITS
from kclrun.model.quotas import PUT_RECORDS_MAX
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.producing.flow_control import (
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


@pytest.mark.parametrize(
    ("records", "size_bytes", "each_s"), [(1, 2**20 // 20, 0.05), (100, 5_000, 0.1), (1, 10, 0.0)]
)
def test_a_shard_that_has_refused_is_sent_its_quota_until_a_minute_later(
    records, size_bytes, each_s
):
    flow = refused(1)
    for now in range(10):
        flow.accepted(sent_at=now, now=now)
    assert (flow.is_slow, flow.is_off) == (False, False)
    gaps, now = [], 20.0
    while not flow.is_off:
        flow.rest(now)
        flow.sending(records, size_bytes, now)
        flow.accepted(sent_at=now, now=now)
        gaps.append(flow.resume_at - now)
        now = max(flow.resume_at, now + 0.02)

    assert gaps[0] == pytest.approx(each_s / 0.98, abs=0.002)
    assert sum(gaps[:10]) == pytest.approx(10 * each_s / 0.98, abs=0.02)
    assert now == pytest.approx(60.0, abs=0.2)
    assert flow.metrics(now).slow_s == pytest.approx(9.0), "a pace is not a pause"


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
