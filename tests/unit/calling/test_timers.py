"""Which timers fire, and when: `TimerRun` over entries in memory, through losses of the lease."""

import sys
from typing import Any

from kclrun.calling.timer_run import TimerRun
from kclrun.model.record import Record
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.state.chain import Entries
from kclrun.state.event_times import EventTimes
from kclrun.state.keyed import LiveEntries
from kclrun.state.timers import WATERMARK, Timer, entry_of
from tests.support.build import position as at


class Shard:
    """The reserved entries of a shard, kept over its owners."""

    def __init__(self) -> None:
        self.kept: Entries = {}

    def begin(self, at: ExtendedSequenceNumber, **settings: Any) -> TimerRun:
        """The next owner, with what the one before kept."""
        kept = {key: dict(of) for key, of in self.kept.items()}
        live = LiveEntries(kept, self._keep, None, 10**6)
        live.reserved.is_served = True
        self.live = live
        given = {"lateness_s": 0.0, "every_s": 1.0, **settings}
        return TimerRun(live, at, **{"times": EventTimes(), **given})

    def _keep(self, change: Any, *of: Any) -> None:
        if (made := change(*of)) is None:
            return
        key, name, value, _ = made
        values = self.kept.setdefault(key, {})
        values.pop(name, None)
        if value is not None:
            values[name] = value


def record(number: int, arrived_at: float) -> Record:
    return Record(
        data=b"",
        partition_key="k",
        sequence_number=str(number),
        approximate_arrival_timestamp=arrived_at,
    )


def give(run: TimerRun, records: list[Record]) -> list[tuple[int, float]]:
    """Give records, and fire what is due: after which record each timer fired, and its time."""
    fired, start = [], 0
    while start < len(records):
        start = run.part_end(records, start)
        if run.must_note:
            run.note()
        run.arrive()
        while (timer := run.next_event()) is not None:
            run.take(timer)
            run.end_call()
            fired.append((int(records[start - 1].sequence_number), timer.at))
    return fired


def test_a_timer_before_the_watermark_waits_for_the_next_step_under_another_owner_too():
    shard = Shard()
    run = shard.begin(TRIM_HORIZON)
    assert give(run, [record(1, 100.0)]) == []
    shard.live.set_timer("late", 99.0)  # by record 2, which did not move the watermark
    assert give(run, [record(2, 100.5)]) == []
    for begins_at in (at(2), at(3)):
        following = shard.begin(begins_at)
        assert not following.is_event_due(), "its rows would be below a cursor that is ahead"
    assert give(following, [record(4, 101.0)]) == [(4, 99.0)]


def test_the_timers_of_a_step_fire_first_where_the_lease_begins_between_them():
    shard = Shard()
    run = shard.begin(TRIM_HORIZON)
    shard.live.set_timer("a", 99.0)
    shard.live.set_timer("b", 99.5)
    run.part_end([record(1, 100.0)], 0)
    run.note()
    run.arrive()
    timer = run.next_event()
    assert timer is not None
    run.take(timer)
    assert not shard.begin(TRIM_HORIZON).is_event_due(), "its record is not done"
    assert shard.begin(at(1).at_tick(1)).next_event() == Timer(99.5, "b")
    assert WATERMARK[0] in shard.kept
    assert entry_of(timer)[1] not in shard.kept["a"]


def test_a_time_in_a_payload_that_is_no_time_moves_no_watermark_and_ends_no_process():
    times = {"1": -1.7e308, "2": float("nan"), "3": float("-inf"), "4": 99.0, "5": 1e308}
    shard = Shard()
    run = shard.begin(
        TRIM_HORIZON,
        every_s=0.25,
        times=EventTimes(lambda record: times[record.sequence_number]),
    )
    give(run, [record(number, 100.0) for number in (1, 2, 3)])
    give(run, [record(5, 1e308)])
    assert run.watermark is None
    give(run, [record(4, 100.0)])
    assert run.watermark == 99.0


def test_a_timer_that_never_fires_keeps_an_idle_shard_waiting_and_ends_no_process():
    shard = Shard()
    run = shard.begin(TRIM_HORIZON, every_s=0.25, idle_s=60.0)
    shard.live.set_timer("a", sys.float_info.max)

    assert run.may_idle
    assert run.idle_at(0.0) == sys.float_info.max
