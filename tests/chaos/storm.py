"""One run: a storm of signals and faults over a running fleet, then a calm, then the verdict; and
as the last act the stream is deleted and made again, and refused by all managers."""

import time
from collections import Counter
from os import EX_CONFIG

from kclrun.cli import exit_codes
from tests.chaos.nemesis import Nemesis
from tests.chaos.samples import Sampler
from tests.chaos.verdict import Report, bugs_in, judged
from tests.chaos.weather import foretell
from tests.chaos.world import CAP, FAILOVER_S, MANAGERS, World
from tests.patience import HUNG_S, until

# Two cores serve this many records a second and thirty processes beside them.
RATE = 900
_TURN_S = 0.05
_LINE_EVERY_S = 10.0
_SAMPLE_EVERY_S = 5.0
_LOOK_EVERY_S = 0.5
# What a manager says of itself where its stop was cut short: a batch could not be checkpointed any
# more, for its process was frozen until the lease was another's; or the time was over.
_CUT_SHORT_EVENTS = ("checkpoint_missed", "process_killed", "stop_incomplete")


class Storm:
    """`run` returns a Report. `folder` then holds the ledger, the logs and the servers' notes."""

    def __init__(self, folder, *, seed, storm_s, rate=RATE, weights=None, fetch="mixed", say=print):
        self._folder = folder
        self._seed = seed
        self._storm_s = storm_s
        self._rate = rate
        self._weights = weights
        self._fetch = fetch
        self._say = say
        self._is_over = False
        self._sampler = Sampler(folder / "samples")
        self._report = Report(seed=seed)

    def end_early(self):
        """The calm and the verdict follow at once."""
        self._is_over = True

    def run(self):
        began = time.monotonic()
        world = World(
            self._folder,
            seed=self._seed,
            rate=self._rate,
            storm_s=self._storm_s,
            fetch=self._fetch,
        )
        try:
            world.start()
            nemesis = Nemesis(
                world.apps, self._seed, FAILOVER_S, trims=world.trims, weights=self._weights
            )
            self._blow(world, nemesis)
            self._calm_down(world, nemesis)
            report = self._judged(world, nemesis)
            self._make_stream_again(world)
            report.seconds_in_all = time.monotonic() - began
            return report
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
                world.look_for_expired()
                self._say(self._line(world, nemesis, now - began))
            # A pace, not a wait for anything.
            time.sleep(_TURN_S)
        self._report.storm_s = time.monotonic() - began

    def _calm_down(self, world, nemesis):
        """All faults end, all managers run; what was put is delivered; all leave in good order."""
        began = time.monotonic()
        world.proxy.calm()
        world.source.stop()
        # One that does not end is a surprise first.
        until(nemesis.is_at_rest, 2 * HUNG_S)
        try:
            until(world.is_all_read, HUNG_S, every_s=_LOOK_EVERY_S)
        except AssertionError:
            self._report.violations.append(
                f"{world.lag()} records were not delivered within {HUNG_S:g} s of calm [L1]"
            )
        self._report.calm_s = time.monotonic() - began
        self._sample(world)
        for name, app in world.apps.items():
            reported = _told_of_cut_stops(app)
            code = app.stop(timeout_s=HUNG_S)
            is_reported = code == exit_codes.CUT_SHORT and _told_of_cut_stops(app) > reported
            if code != 0 and not is_reported:
                self._report.violations.append(
                    f"{name}: the manager ended with {code}, in calm. It wrote:\n"
                    f"{app.last_words_of(app.process.pid)}"
                )
        # What the storm left uncheckpointed is read once more, to the very end.
        last = world.apps[MANAGERS[0]]
        code = last.start("--until", "caught-up").process.wait(HUNG_S)
        if code != 0:
            self._report.violations.append(
                f"the last reading ended with exit code {code}. It wrote:\n"
                f"{last.last_words_of(last.process.pid)}"
            )

    def _make_stream_again(self, world):
        """Each manager ends with 78, and reads nothing of the new stream under the old rows [P13].

        All have stopped before: a row at a sentinel may read for the seconds until its manager
        notices, for an iterator says nothing of the creation time.
        """
        read = len(world.ledger.read().batches)
        world.make_stream_again()
        for app in world.apps.values():
            app.start()
        for name, app in world.apps.items():
            code = app.process.wait(HUNG_S)
            if code != EX_CONFIG:
                self._report.violations.append(
                    f"{name}: the manager ended with {code} over a stream that was made again [P13]"
                )
        batches = world.ledger.read().batches[read:]
        self._report.refused_a_stream_made_again = not batches
        if batches:
            self._report.violations.append(
                f"{len(batches)} batches of a stream that was made again were read [P13]"
            )

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
            lines = app.lines()
            for line in lines:
                if line.get("level") in ("warning", "error"):
                    events[f"{line['level']} {line['event']}"] += 1
            report.violations += bugs_in(lines)
        report.events = dict(events)
        return judged(report, world, nemesis, self._sampler, FAILOVER_S, CAP)


def _told_of_cut_stops(app):
    return sum(len(app.of(event)) for event in _CUT_SHORT_EVENTS)
