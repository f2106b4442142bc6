"""What runs over the flights share: two managers that read a stream, while processes are killed and
shards are split and merged."""

import contextlib
import json
import os
import random
import signal
import time
from dataclasses import asdict, dataclass, field

from tests.chaos.outcomes.flights import FlightProducer
from tests.patience import HUNG_S, until


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What happens; each misfortune at a share of the records put."""

    flights: int
    seed: int
    rate: int
    shards: int
    reshards: tuple = ()
    lease_kills: tuple = ()
    manager_kills: tuple = ()


@dataclass
class Report:
    violations: list = field(default_factory=list)
    lease_kills: int = 0
    manager_kills: int = 0
    processes_started: int = 0
    read_s: float = 0.0

    def __str__(self):
        return json.dumps(asdict(self), indent=2)

    as_json = __str__


class TwoManagers:
    """`run` returns the report. A run says with `_application(name)` what a manager is started
    with, and judges in `_judge`. `aws` makes the AWS that it is started on. At the shares
    `pauses` of the records the producer waits: the managers stop there, once all is read."""

    def __init__(self, folder, plan, report, aws, *, say, pauses=()):
        self._folder = folder
        self._plan = plan
        self.report = report
        self._make_aws = aws
        self._say = say
        self._pauses = pauses
        self._chance = random.Random(f"misfortunes {plan.seed}")

    def run(self):
        with contextlib.ExitStack() as stack:
            self._aws = self._make_aws()
            stack.callback(self._aws.close)
            self._prepare(stack)
            self._stream = self._aws.stream(self._plan.shards)
            self._apps = [self._application(name) for name in ("a", "b")]
            for app in self._apps:
                stack.callback(app.close)
            self._source = FlightProducer(
                self._aws.kinesis,
                self._stream,
                self._records,
                seed=self._plan.seed,
                rate=self._plan.rate,
                reshards=[
                    (self._at(share), how, index) for share, how, index in self._plan.reshards
                ],
                pauses=map(self._at, self._pauses),
            )
            stack.callback(self._source.stop)
            planned = [
                (self._at(share), do) for do, shares in self._misfortunes() for share in shares
            ]
            self._agenda = sorted(planned, key=lambda each: each[0])
            self._began = time.monotonic()
            self._read_all()
            self.report.processes_started = self._claimed()
            self.report.read_s = time.monotonic() - self._began
            self._tell(f"read in {self.report.read_s:.0f} s")
            self._judge()
        return self.report

    def _prepare(self, stack):
        """Before anything reads."""

    def _misfortunes(self):
        """What is done, and at which shares."""
        plan = self._plan
        return [(self._kill_lease, plan.lease_kills), (self._kill_manager, plan.manager_kills)]

    def _at(self, share):
        return int(share * len(self._records))

    def _read_all(self):
        self._read_by_fleet()

    def _read_by_fleet(self):
        """All that is put until the producer pauses, or is done."""
        source, is_first = self._source, not self._source.has_started
        claims = self._claimed() + (self._plan.shards if is_first else 1)
        for app in self._apps:
            app.start()
        until(lambda: self._claimed() >= claims, HUNG_S)
        source.start() if is_first else source.resume()
        line_at = time.monotonic()
        while not source.is_done and not source.is_paused:
            self._do_what_is_due(source.entries)
            if time.monotonic() >= line_at:
                line_at += 5.0
                self._tell(f"{time.monotonic() - self._began:5.0f} s")
            time.sleep(0.05)  # a pace, not a wait for anything
        self._do_what_is_due(len(self._records) if source.is_done else source.entries)
        for app in self._apps:
            if app.process.poll() is None and (code := app.stop()) not in {0, os.EX_TEMPFAIL}:
                self._violated(f"a manager ended with {code}: {app.last_words()}")
        last = self._apps[0]
        if code := last.start("--until", "caught-up").process.wait(4 * HUNG_S):
            self._violated(f"the last reading ended with {code}: {last.last_words()}")

    def _do_what_is_due(self, entries):
        while self._agenda and self._agenda[0][0] <= entries:
            self._agenda.pop(0)[1]()

    def _claimed(self):
        return sum(len(app.of("lease_claimed")) for app in self._apps)

    def _kill_lease(self):
        pids = until(lambda: [pid for app in self._apps for pid in app.lease_pids()], HUNG_S)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._chance.choice(pids), signal.SIGKILL)
            self.report.lease_kills += 1

    def _kill_manager(self):
        """With all its lease processes; it is started again at once, as a service manager does."""
        app = self._apps[1]
        app.lose_power()
        app.start()
        self.report.manager_kills += 1

    def _violated(self, what):
        self.report.violations.append(what)
        self._say(f"VIOLATION: {what}")

    def _tell(self, at):
        done = {name: count for name, count in asdict(self.report).items() if _is_misfortune(name)}
        self._say(f"{at}  {self._source.entries:>9,} put  {done}")


def _is_misfortune(name):
    return name.endswith(("_kills", "_crashes"))
