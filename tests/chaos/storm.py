"""One run: a storm of signals and faults over a running fleet, then a calm, then the verdict."""

import time
from collections import Counter

from tests.chaos.nemesis import Nemesis
from tests.chaos.samples import Sampler
from tests.chaos.verdict import Report, judged
from tests.chaos.weather import foretell
from tests.chaos.world import CAP, FAILOVER_S, MANAGERS, World
from tests.processes.ledger_rig.application import until

__all__ = ["RATE", "Storm"]

# Two cores serve this many records a second and thirty processes beside them.
RATE = 900
_TURN_S = 0.05
_LINE_EVERY_S = 10.0
_SAMPLE_EVERY_S = 5.0
# After the last fault everybody needs to get up, find their leases (a failover and a scan), and
# read what lay meanwhile.
_CALM_S_MAX = 120.0


class Storm:
    """`run` returns a Report. `folder` then holds the ledger, the logs and the servers' notes."""

    def __init__(self, folder, *, seed, storm_s, rate=RATE, say=print):
        self._folder = folder
        self._seed = seed
        self._storm_s = storm_s
        self._rate = rate
        self._say = say
        self._is_over = False
        self._sampler = Sampler(folder / "samples")
        self._report = Report(seed=seed)

    def end_early(self):
        """The calm and the verdict follow at once."""
        self._is_over = True

    def run(self):
        world = World(self._folder, seed=self._seed, rate=self._rate, storm_s=self._storm_s)
        try:
            world.start()
            nemesis = Nemesis(world.apps, self._seed, FAILOVER_S)
            self._blow(world, nemesis)
            self._calm_down(world, nemesis)
            return self._judged(world, nemesis)
        finally:
            world.close()

    def _blow(self, world, nemesis):
        world.proxy.foresee(foretell(self._seed, MANAGERS, self._storm_s, FAILOVER_S))
        # The table is there and somebody reads: from here on anything may happen.
        world.source.start()
        world.apps[MANAGERS[0]].until_delivered(1, 60.0)
        world.proxy.begin()
        began = time.monotonic()
        line_at = sample_at = began
        while not self._is_over and (now := time.monotonic()) < began + self._storm_s:
            nemesis.turn()
            world.ledger.read()
            assert not world.source.is_done
            self._report.lag_max = max(self._report.lag_max, world.lag())
            if now >= sample_at:
                sample_at = now + _SAMPLE_EVERY_S
                self._sample(world)
            if now >= line_at:
                line_at = now + _LINE_EVERY_S
                self._say(self._line(world, nemesis, now - began))
            # A pace, not a wait for anything.
            time.sleep(_TURN_S)
        self._report.storm_s = time.monotonic() - began

    def _calm_down(self, world, nemesis):
        """All faults end, all managers run; what was put is delivered; all leave in good order."""
        began = time.monotonic()
        world.proxy.calm()
        world.source.stop()
        until(nemesis.is_at_rest, _CALM_S_MAX)
        try:
            world.apps[MANAGERS[0]].until_all_delivered(world.source, _CALM_S_MAX)
        except AssertionError:
            self._report.violations.append(
                f"{world.lag()} records were not delivered within {_CALM_S_MAX:g} s of calm [L1]"
            )
        self._report.calm_s = time.monotonic() - began
        self._sample(world)
        for name, app in world.apps.items():
            code = app.stop(timeout_s=60.0)
            if code != 0:
                self._report.violations.append(f"{name}: the manager ended with {code}, in calm")
        # What the storm left uncheckpointed is read once more, to the very end.
        last = world.apps[MANAGERS[0]]
        code = last.start("--until", "caught-up").process.wait(120)
        if code != 0:
            self._report.violations.append(f"the last reading ended with exit code {code}")

    def _sample(self, world):
        for name, app in world.apps.items():
            self._sampler.take(name, app.process.pid)

    def _line(self, world, nemesis, at_s):
        world.proxy.read()
        leases = " ".join(f"{name}:{len(app.lease_pids())}" for name, app in world.apps.items())
        return (
            f"{at_s:6.0f} s  {world.source.total_put:>9,} put  lag {world.lag():>6,}"
            f"  {len(nemesis.signals):>5,} signals  {len(world.proxy.hits):>6,} faults"
            f"  processes {leases}"
        )

    def _judged(self, world, nemesis):
        report = self._report
        world.proxy.read()
        report.signals = dict(nemesis.counts())
        report.strikes = dict(nemesis.strikes)
        report.http_faults = dict(world.proxy.counts)
        report.http_passed = world.proxy.passed()
        report.starts = {name: app.starts for name, app in world.apps.items()}
        report.reshards = world.reshards()
        events = Counter()
        for app in world.apps.values():
            for line in app.lines():
                if line.get("level") in ("warning", "error"):
                    events[f"{line['level']} {line['event']}"] += 1
        report.events = dict(events)
        return judged(report, world, nemesis, self._sampler, FAILOVER_S, CAP)
