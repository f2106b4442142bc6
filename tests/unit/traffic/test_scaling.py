"""How many workers are needed: by CPU, by the slope of the lag, by the leases; and over a day."""

import math
import random

import pytest

from kclrun.model.time import Instant
from kclrun.traffic.scaling import CATCH_UP_S, MachineLook, WorkersNeeded

EVERY_S = 20.0
AT_TIP = {"a": 0, "b": 0}


def needed(shares, *, lags=None, workers=4, leases=100, leases_max=64):
    """After looks every 20 s with these shares of CPU; `lags(second)` has the lags of each."""
    counted = WorkersNeeded()
    for n, share in enumerate(shares):
        at = n * EVERY_S
        counted.take(
            MachineLook(
                now=Instant(1000.0 + at),
                cpu_share=share,
                lags_ms=AT_TIP if lags is None else lags(at),
                workers=workers,
                leases=leases,
                leases_max=leases_max,
            )
        )
    return counted.count


def behind(growth, first_s=300.0):
    """Of two leases one is five minutes behind; its lag grows by so many seconds each second."""
    return lambda at: {"a": int((first_s + growth * at) * 1000), "b": 0}


@pytest.mark.parametrize(
    ("share", "growth", "count"),
    [
        pytest.param(0.2, -0.5, 4, id="nobody leaves while a lease is behind, though it gains"),
        pytest.param(0.7, 0.5, 4, id="no worker helps a shard whose machine has CPU to spare"),
        pytest.param(0.84, 0.9, 6, id="a machine that has CPU to spare is judged by CPU alone"),
        # At half the speed, it wants 1 + 390 s / 900 s: 2.9 times. With the other lease 1.9 each.
        pytest.param(0.9, 0.9, 8, id="a lease that stands nearly still counts as one at half"),
        pytest.param(1.0, -1.0, 7, id="a lease that gains quickly needs no more than CPU says"),
    ],
)
def test_the_slope_of_the_lag_counts_where_cpu_is_short(share, growth, count):
    assert needed([share] * 6, lags=behind(growth), workers=4) == count


def test_where_all_leases_stand_still_the_fleet_at_most_doubles():
    def lags(at):
        return {key: int((600 + at) * 1000) for key in "abc"}

    assert needed([1.0] * 6, lags=lags, workers=10) == 20


def test_a_lag_is_to_be_gone_within_a_quarter_of_an_hour():
    """All leases are 225 s behind and stay so: a quarter more speed makes up for it in 900 s."""

    def lags(_at):
        return {key: int(CATCH_UP_S / 4 * 1000) for key in "abc"}

    # By CPU alone 0.85 * 40 / 0.6 = 57; by the lag 1.25 * 40 = 50.
    assert needed([0.85] * 6, lags=lags, workers=40) == 57
    # Twice as far behind: 1.5 * 40 = 60.
    assert needed([0.85] * 6, lags=lambda at: {k: 2 * v for k, v in lags(at).items()},
                  workers=40) == 60  # fmt: skip


def test_work_that_a_new_worker_took_over_is_not_counted_for_it_again():
    """Three workers at 80 % need four; once the fourth is there, its coming changes nothing."""
    counted = WorkersNeeded()
    for n, (workers, share) in enumerate([(3, 0.8)] * 5 + [(4, 0.6)] * 5):
        counted.take(MachineLook(now=Instant(n * EVERY_S), cpu_share=share, lags_ms=AT_TIP,
                          workers=workers, leases=12, leases_max=64))  # fmt: skip
        assert counted.count == 4


# A day.

STEP_S = 20.0
CORES = 2.0
WARM_UP_S = 120.0


class Day:
    """A fluid model: `shards` with alike work, machines of two cores that come and go as target
    tracking decides, one core at most for each shard. Times are seconds of the day.

    Target tracking, as the EC2 Auto Scaling guide has it: the alarm above the target wants three
    minutes in a row; the one below 90 % of it wants fifteen. A machine counts once it is warm.
    """

    def __init__(self, demand, *, shards, machines, seed):
        self.demand, self.shards, self.seed = demand, shards, seed
        self.machines = self.machines_max = machines
        self.warm_at = [-WARM_UP_S] * machines
        self.backlog_s = [0.0] * shards  # of CPU, by shard
        self.counters = [WorkersNeeded() for _ in range(machines)]
        self.changes, self.lag_s_max, self.counts = [], 0.0, []

    def run(self):
        rng = random.Random(self.seed)
        minute, above, below = [], 0, 0
        for step in range(int(86_400 / STEP_S)):
            at = step * STEP_S
            demand = self.demand(at) * rng.uniform(0.9, 1.1)
            minute += self.advance(at, demand)
            if step % 3 != 2:
                continue
            ratio = sum(minute) / len(minute) / self.machines if minute else 1.0
            minute = []
            above, below = (above + 1 if ratio > 1 else 0), (below + 1 if ratio < 0.9 else 0)
            if above >= 3 or below >= 15:
                self.resize(at, math.ceil(self.machines * ratio - 1e-9))
                above = below = 0
        return self

    def resize(self, at, machines):
        if machines != self.machines:
            self.changes.append((at, machines - self.machines))
        self.warm_at = (self.warm_at + [at + WARM_UP_S] * machines)[:machines]
        self.counters = (self.counters + [WorkersNeeded() for _ in range(machines)])[:machines]
        self.machines, self.machines_max = machines, max(machines, self.machines_max)

    def advance(self, at, demand):
        """One step of all machines that are ready; returns what each of them counts as needed."""
        ready = [n for n in range(self.machines) if self.warm_at[n] <= at]
        counts = []
        for place, n in enumerate(ready):
            mine = range(place, self.shards, len(ready))
            wanted = [min(STEP_S, self.backlog_s[s] + demand / self.shards * STEP_S) for s in mine]
            given = min(1.0, CORES * STEP_S / sum(wanted)) if wanted else 1.0
            for s, want in zip(mine, wanted, strict=True):
                self.backlog_s[s] += demand / self.shards * STEP_S - want * given
            lags = {str(s): int(self.backlog_s[s] * self.shards / demand * 1000) for s in mine}
            self.lag_s_max = max([self.lag_s_max, *(lag / 1000 for lag in lags.values())])
            share = sum(wanted) * given / (CORES * STEP_S)
            self.counters[n].take(MachineLook(now=Instant(at), cpu_share=share, lags_ms=lags,
                                       workers=len(ready), leases=self.shards,
                                       leases_max=64))  # fmt: skip
            counts.append(self.counters[n].count)
        self.counts += counts
        return counts


def peak(base, top, at_h=14.0, width_h=2.0):
    return lambda at: base + (top - base) * math.exp(-(((at / 3600 - at_h) / width_h) ** 2))


def test_a_burst_is_met_within_minutes_and_the_lag_is_gone_within_the_quarter_of_an_hour():
    """Four times the work from one minute to the next: the slope says more than full CPUs can."""
    day = Day(lambda at: 12.0 if 36_000 <= at < 50_000 else 3.0, shards=32, machines=3, seed=5)
    lags = []
    advance = day.advance

    def noting(at, demand):
        counts = advance(at, demand)
        lags.append((at, max(day.backlog_s) * day.shards / demand))
        return counts

    day.advance = noting
    day.run()

    late = [at for at, lag_s in lags if lag_s > 60]
    assert late[0] >= 36_000
    assert late[-1] < 36_000 + 600 + CATCH_UP_S
    directions = [change > 0 for _, change in day.changes]
    assert directions == sorted(directions, reverse=True), day.changes


def test_shards_that_fill_a_core_each_do_not_call_for_workers_that_cannot_help():
    """Ten cores of work on six shards: six machines at half their CPU are enough, and are kept."""
    day = Day(lambda _at: 10.0, shards=6, machines=6, seed=7)
    day.run()

    assert day.changes == []
    assert day.lag_s_max > 3600  # only a split helps
    assert max(count for count in day.counts if count is not None) == 6


def test_there_are_never_more_workers_than_shards():
    day = Day(peak(1.0, 30.0), shards=8, machines=1, seed=11).run()
    assert max(day.counts) == day.machines_max == 8
