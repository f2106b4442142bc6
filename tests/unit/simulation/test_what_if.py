"""A what-if: each figure against the fleet that it describes, and runs that are as they were."""

from itertools import pairwise
from types import SimpleNamespace

import msgspec
import pytest

from kclrun.simulation.network import Costs
from kclrun.simulation.observer import Tally
from kclrun.simulation.what_if import (
    OwnerSeries,
    Recorder,
    WhatIf,
    _dealt_out,
    _share,
    group_names,
    run_what_if,
)
from kclrun.simulation.world import FleetSettings
from tests.support.tables import over_rows
from tests.unit.simulation.golden import require_as_before


@over_rows(
    ("share", "expected"),
    [(0.0, 1.0), (0.25, 1.0), (0.26, 2.0), (0.5, 2.0), (0.51, 3.0), (0.99, 4.0), (1.0, 4.0)],
)
def test_a_share_is_the_smallest_value_that_so_many_do_not_pass(share, expected):
    assert _share([1.0, 2.0, 3.0, 4.0], share) == expected
    assert _share([], share) is None
    assert _share([1.00049], share) == 1.0


def test_workers_are_dealt_out_to_their_groups_in_turn():
    assert group_names(3) == ("a", "b", "c")
    assert "".join(_dealt_out((3, 1, 2))) == "abcaca"


class ShownFleet:
    """A fleet by what a recorder reads of it. Hosts are called by a letter, their group first."""

    def __init__(self, rates=(), *, skew=0.0):
        self.scheduler = SimpleNamespace(now=0.0)
        self.unread, self.tally, self.costs = {}, Tally(), Costs()
        self.observer = SimpleNamespace(
            gaps=SimpleNamespace(unread=lambda: self.unread), tally=self.tally
        )
        self.table = SimpleNamespace(costs=self.costs)
        self.rates, self.loads, self.held, self.hosts = list(rates), {}, {}, []
        self.is_even = True
        self.stream = SimpleNamespace(
            traffic=SimpleNamespace(skew=skew),
            open_count=lambda: len(self.rates),
            open_ids=lambda: range(len(self.rates)),
            records=SimpleNamespace(bytes_per_s=lambda number: self.rates[number]),
        )

    def shards_by_owner(self):
        return self.held

    def loads_by_owner(self):
        return self.loads

    def is_balanced(self):
        return self.is_even

    def show(self, at_s, **held):
        self.scheduler.now, self.held = at_s, held
        known = {host.owner for host in self.hosts}
        self.hosts += [SimpleNamespace(owner=o, group=o[0]) for o in held if o not in known]


def test_each_look_has_the_fleet_as_it_is_then():
    fleet = ShownFleet([1.0] * 7)
    recorder = Recorder(fleet)
    recorder.look()
    fleet.show(1.0004, a1=2, b1=0, a2=4)
    fleet.unread, fleet.tally.moves = {"s1": 0.5, "s2": 0.25}, 3
    fleet.costs.write_units, fleet.costs.read_units = 11.0, 5.04
    recorder.look()
    fleet.show(2.0, a1=2, b1=4)
    fleet.unread = {}
    recorder.look()
    fleet.show(3.0, a1=2, b1=4)
    recorder.look()

    said = recorder.series
    assert said.at_s == [0.0, 1.0, 2.0, 3.0]
    assert said.unread == [0, 2, 0, 0]
    assert said.unread_longest_s == [0.0, 0.75, 0.0, 0.0]
    assert said.shards_even == [0.0, 2.333, 3.5, 3.5]
    assert (said.moves, said.write_units) == ([0, 3, 3, 3], [0.0, 11.0, 11.0, 11.0])
    assert said.read_units == [0.0, 5.0, 5.0, 5.0]
    assert said.owners == {
        "a1": OwnerSeries("a", [(1.0, 2)]),
        "b1": OwnerSeries("b", [(1.0, 0), (2.0, 4)]),
        "a2": OwnerSeries("a", [(1.0, 4)], left_s=2.0),
    }
    assert (said.load_greatest, said.load_least, recorder.load_by_counts) == ([], [], None)


@over_rows(
    ("rates", "loads", "greatest", "least"),
    [
        # Two workers with two shards each: the hottest shard beside the lightest one.
        ((1.0, 2.0, 3.0, 10.0), {"a": 12.0, "b": 4.0}, 1.5, 1.375),
        # Each of three has one or two: at best the hottest one has no other.
        ((1.0, 2.0, 3.0, 10.0), {"a": 12.0, "b": 4.0, "c": 0.0}, 2.25, 1.875),
        # Nothing is below the mean.
        ((4.0, 4.0, 4.0, 4.0), {"a": 8.0, "b": 8.0}, 1.0, 1.0),
        ((4.0, 4.0, 4.0, 4.0, 5.0), {"a": 12.0, "b": 9.0}, 1.143, 1.0),
        # No worker yet.
        ((1.0, 2.0), {}, 0.0, 1.0),
        # More workers than shards.
        ((4.0,), {"a": 4.0, "b": 0.0}, 2.0, 2.0),
    ],
)
def test_with_skewed_traffic_a_look_has_the_largest_load_and_the_least_possible(
    rates, loads, greatest, least
):
    fleet = ShownFleet(rates, skew=1.0)
    fleet.loads = loads
    recorder = Recorder(fleet)

    recorder.look()

    assert (recorder.series.load_greatest, recorder.series.load_least) == ([greatest], [least])


def test_the_load_by_counts_is_the_first_one_with_all_shards_read_and_counts_even():
    fleet = ShownFleet((1.0, 3.0), skew=1.0)
    recorder = Recorder(fleet)

    looks = ((False, {}, 1), (True, {"s": 0.0}, 2), (True, {}, 3), (True, {}, 4))
    for is_even, unread, load in looks:
        fleet.is_even, fleet.unread, fleet.loads = is_even, unread, {"a": float(load), "b": 0.0}
        recorder.look()

    assert recorder.load_by_counts == 1.5


ASKED = {
    "lost, deployed and doubled": WhatIf(
        group_sizes=(3, 2),
        shards=8,
        lose_group="b",
        deploy="rolling",
        reshard="double",
        minutes=4.0,
        records_per_s=40.0,
        settings=FleetSettings(poll_s=5.0),
    ),
    "halved": WhatIf(group_sizes=(2,), shards=7, reshard="halve", minutes=2.0, records_per_s=14.0),
    "skewed": WhatIf(
        group_sizes=(2,), shards=8, minutes=3.0, records_per_s=50.0, record_bytes=40_000, skew=1.0
    ),
    "too short to settle": WhatIf(group_sizes=(3,), shards=9, deploy="rolling", minutes=0.1),
}


@pytest.mark.seconds
@pytest.mark.parametrize("name", ASKED)
def test_the_figures_agree_with_each_other_and_are_as_before(name):
    asked = ASKED[name]
    figures = run_what_if(asked, "")

    phases, series = figures.phases, figures.series
    assert asked.workers == sum(asked.group_sizes)
    assert figures.virtual_s == pytest.approx(asked.minutes * 60)
    length_s = figures.virtual_s / len(phases)
    assert [phase.began_s for phase in phases] == pytest.approx(
        [number * length_s for number in range(len(phases))]
    )
    ends = [series.at_s.index(phase.began_s) for phase in phases] + [len(series.at_s) - 1]
    for phase, (first, last) in zip(phases, pairwise(ends), strict=True):
        assert phase.moves == series.moves[last] - series.moves[first]
        assert phase.write_units == series.write_units[last] - series.write_units[first]
    for total in ("moves", "duplicates", "write_units"):
        assert sum(getattr(phase, total) for phase in phases) == getattr(figures, total)
    left = {owner: each.left_s for owner, each in series.owners.items() if each.left_s is not None}
    assert figures.workers == len(series.owners) - len(left)
    held = [each.shards[-1][1] for owner, each in series.owners.items() if owner not in left]
    assert (figures.shards_per_owner_min, figures.shards_per_owner_max) == (min(held), max(held))
    assert figures.shards_per_owner_even == round(figures.shards / len(held), 2)
    said = msgspec.to_builtins(msgspec.structs.replace(figures, series=None))
    sums = {
        column: round(sum(getattr(series, column)), 3)
        for column in series.__struct_fields__
        if column != "owners"
    }
    owners = {
        owner: [each.left_s, len(each.shards), round(sum(at_s for at_s, _ in each.shards), 3)]
        for owner, each in series.owners.items()
    }
    require_as_before(f"what if: {name}", {**said, "series": {**sums, "owners": owners}})
