"""What `kclrun simulate` counts is what the oracles of the storms count, who check each promise."""

import pytest

from kclrun.errors import InvariantViolation
from kclrun.simulation import what_if
from kclrun.simulation.arrivals import Traffic
from kclrun.simulation.fleet import Fleet
from kclrun.simulation.observer import WatchPolicy
from kclrun.simulation.record import FleetRecord
from kclrun.simulation.shards import ShardStream
from kclrun.simulation.stories import RuleBroken, Stories
from kclrun.simulation.user_code import UserCode
from kclrun.simulation.what_if import WhatIf, run_what_if
from kclrun.simulation.world import FleetSettings
from tests.support.oracles.watch import Oracles
from tests.unit.simulation.watched_world import Reader

RAISING = UserCode(raising=0.1)
MANUAL = UserCode(checkpoints_by_hand=True, raising=0.05)
SKIPPING = UserCode(poison_every=40, then="skip")
LETTERS = UserCode(poison_every=40, then="dead-letter")


@pytest.mark.seconds
@pytest.mark.parametrize(("seed", "fan_out"), [(1, False), (2, True)])
def test_the_figures_of_a_what_if_are_those_of_a_fleet_whose_promises_are_checked(
    seed, fan_out, monkeypatch
):
    asked = WhatIf(
        group_sizes=(2, 2),
        shards=6,
        lose_group="b",
        deploy="rolling",
        reshard="double",
        minutes=4,
        seed=seed,
        records_per_s=12.0,
        settings=FleetSettings(fan_out=fan_out),
    )
    figures = run_what_if(asked, "")

    monkeypatch.setattr(what_if, "FleetRecord", Oracles)

    assert run_what_if(asked, "") == figures
    assert figures.duplicates > 0, "a lost group repeats what it did not checkpoint"


def played(observer_kind, user_code):
    """Hosts freeze, die and drain, shards are split, merged and trimmed."""
    traffic = Traffic(records_per_s=20.0)
    fleet = Fleet(7, shards=4, traffic=traffic, observer_kind=observer_kind, user_code=user_code)
    for number in range(3):
        fleet.add_host("ab"[number % 2], f"h{number}")
    fleet.run_for(60)
    fleet.reshard(8)
    fleet.hosts[0].freeze()
    fleet.run_for(30)
    fleet.hosts[0].thaw()
    fleet.hosts[1].kill()
    fleet.run_for(60)
    fleet.hosts[2].drain()
    fleet.add_host("b", "h3")
    fleet.run_for(60)
    fleet.expire(60.0)
    fleet.reshard(5)
    fleet.run_for(120)
    return fleet


def verdict_of(fleet):
    try:
        fleet.require_all_read(20)
    except InvariantViolation as error:
        return str(error)
    return "all is read"


@pytest.mark.seconds
@pytest.mark.parametrize("user_code", [UserCode(), RAISING, MANUAL, SKIPPING, LETTERS])
def test_counts_gaps_and_stories_are_those_of_the_oracles(user_code):
    fleet, watched = played(FleetRecord, user_code), played(Oracles, user_code)

    record, oracles = fleet.observer, watched.observer
    assert record.tally == oracles.tally
    assert record.gaps.ended == oracles.gaps.ended
    assert record.gaps.unread() == oracles.gaps.unread()
    assert fleet.stories.whole_text() == watched.stories.whole_text()
    shards = [log.shard_id for log in fleet.stream.shards()]
    for key in shards:
        assert record.shards.is_over(key) == oracles.shards.is_over(key)
    assert record.tally.batches > 0
    assert verdict_of(fleet) == verdict_of(watched)


class Recorded:
    """A record of one shard with ten records a second, a minute after its begin."""

    def __init__(self):
        self.stream = ShardStream(1, Traffic(records_per_s=10.0))
        (log,) = self.stream.shards()
        self.key = log.shard_id
        self.record = FleetRecord(
            self.stream,
            Stories(),
            now=lambda: 60.0,
            row_of=lambda key: None,
            policy=WatchPolicy(),
        )

    def deliver(self, reader, first, last):
        self.record.batch_begun(reader, first, last)
        self.record.batch_processed(reader, first, last)


def test_records_that_come_again_are_counted_and_those_of_a_call_that_raised_are_not():
    at = Recorded()
    former, later = Reader(at.key, "a:h:1", 1), Reader(at.key, "b:h:2", 1)
    at.deliver(former, 1, 100)
    at.record.batch_begun(former, 101, 150)
    at.record.batch_raised(former, 101)
    at.deliver(former, 101, 150)
    assert at.record.tally.duplicates == 0

    at.deliver(later, 91, 200)
    at.record.batch_raised(former, 1)  # it was overtaken: nothing of it is given back

    assert at.record.tally.duplicates == 60
    assert (at.record.tally.records, at.record.tally.batches) == (100 + 50 + 50 + 110, 4)
    at.deliver(later, 200, 210)
    assert at.record.tally.duplicates == 61


def test_a_shard_that_is_not_read_to_the_end_breaks_the_one_promise_that_is_checked():
    at = Recorded()
    reader = Reader(at.key, "a:h:1", 1)
    at.deliver(reader, 1, 500)
    at.record.require_all_read(10.0)

    with pytest.raises(RuleBroken, match=r"^L1: 50 records unread for 5 s"):
        at.record.require_all_read(5.0)

    at.record.left_out_before(reader, 551)
    at.record.require_all_read(5.0)
    at.record.gave_up(reader, 560)
    at.record.vouched_for(reader, 580)
    at.record.require_all_read(2.0)
    with pytest.raises(RuleBroken, match="20 records unread"):
        at.record.require_all_read(0.0)
