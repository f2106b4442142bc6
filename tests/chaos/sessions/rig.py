"""One run: two managers with keyed state, lease processes and a manager killed, shards split and
merged; then rows and state are compared with sessions that are computed from the flights."""

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace

import msgspec
from kclrun.samples.aircraft_sessions import Session, expected_sessions, flights_in_order

from kclrun.sinks.state_files import StateFiles
from kclrun.state.chain import read_chain
from tests.chaos.outcomes.flights import FlightProducer
from tests.patience import HUNG_S, until
from tests.processes.ledger_rig.application import Application
from tests.processes.ledger_rig.aws import Aws


@dataclass(frozen=True)
class Plan:
    """What happens; each misfortune at a share of the records put."""

    flights: int
    copies: int
    seed: int
    rate: int
    shards: int
    reshards: tuple = ()
    lease_kills: tuple = ()
    manager_kills: tuple = ()


@dataclass
class Report:
    violations: list = field(default_factory=list)
    records: int = 0
    lease_kills: int = 0
    manager_kills: int = 0
    processes_started: int = 0
    shards: int = 0
    rows: int = 0
    keys: int = 0
    seconds: float = 0.0

    def as_json(self):
        return json.dumps(asdict(self), indent=2)

    __str__ = as_json


class SessionsRun:
    """`run` returns a Report."""

    def __init__(self, folder, plan, *, say=lambda _: None):
        self._folder = folder
        self._plan = plan
        self._say = say
        self._chance = random.Random(f"misfortunes {plan.seed}")
        self._records = list(flights_in_order(plan.flights, plan.copies))
        self.report = Report(records=len(self._records))

    def run(self):
        plan = self._plan
        with contextlib.ExitStack() as stack:
            self._aws = Aws()
            stack.callback(self._aws.close)
            self._stream = self._aws.stream(plan.shards)
            self._apps = [self._application(name) for name in ("a", "b")]
            for app in self._apps:
                stack.callback(app.close)
            self._source = FlightProducer(
                self._aws.kinesis,
                self._stream,
                SimpleNamespace(records=self._records),
                seed=plan.seed,
                rate=plan.rate,
                reshards=[
                    (int(share * len(self._records)), how, index)
                    for share, how, index in plan.reshards
                ],
            )
            stack.callback(self._source.stop)
            self._read_all()
            self._compare()
        return self.report

    def _application(self, machine):
        return Application(
            self._folder,
            self._aws,
            self._stream,
            machine=machine,
            processor="kclrun.samples.aircraft_sessions:AircraftSessions",
            leases={"failover": "5s"},
            checkpoint={"every": "1s", "uncheckpointed_max": 20_000},
            state={
                "store": str(self._folder / "kept"),
                "local": str(self._folder / machine / "local"),
                "memory": "64MiB",
            },
            output={"path": str(self._folder / "rows"), "roll": {"every": "1s"}},
            log={"level": "info"},
        )

    def _read_all(self):
        began = time.monotonic()
        for app in self._apps:
            app.start()
        until(lambda: self._count("lease_claimed") >= self._plan.shards, HUNG_S)
        self._source.start()
        agenda = sorted(
            [(share, self._kill_lease) for share in self._plan.lease_kills]
            + [(share, self._kill_manager) for share in self._plan.manager_kills],
            key=lambda each: each[0],
        )
        while not self._source.is_done or agenda:
            while agenda and agenda[0][0] <= self._source.entries / len(self._records):
                agenda.pop(0)[1]()
            time.sleep(0.05)  # a pace, not a wait for anything
        for app in self._apps:
            if app.process.poll() is None and (code := app.stop()) not in {0, os.EX_TEMPFAIL}:
                self._violated(f"a manager ended with {code}: {app.last_words()}")
        last = self._apps[0]
        if code := last.start("--until", "caught-up").process.wait(4 * HUNG_S):
            self._violated(f"the last reading ended with {code}: {last.last_words()}")
        self.report.processes_started = self._count("lease_claimed")
        self.report.seconds = time.monotonic() - began
        self._say(f"read in {self.report.seconds:.0f} s")

    def _count(self, event):
        return sum(len(app.of(event)) for app in self._apps)

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

    # The verdict.

    def _compare(self):
        rows, still_open = expected_sessions(self._records)
        found = self._rows()
        self.report.rows = len(found)
        there, wanted = (
            Counter(json.dumps(row, sort_keys=True) for row in each) for each in (found, rows)
        )
        if there != wanted:
            missing, extra = wanted - there, there - wanted
            self._violated(
                f"{len(found)} rows, {len(rows)} expected: {missing.total()} are missing, such as"
                f" {list(missing)[:2]}, {extra.total()} too many, such as {list(extra)[:2]}"
            )
        kept = self._kept()
        self.report.keys = len(kept)
        if kept != still_open:
            differing = [
                key for key in kept.keys() | still_open if kept.get(key) != still_open.get(key)
            ]
            self._violated(
                f"the state of {len(differing)} aircraft differs, such as that of {differing[:3]}"
            )

    def _rows(self):
        return [
            json.loads(line)
            for path in (self._folder / "rows").rglob("*.jsonl")
            if not path.name.startswith(".")
            for line in path.read_text().splitlines()
        ]

    def _kept(self):
        """The sessions in the versions that the rows of open shards name."""
        table = self._apps[0].table
        store, kept = StateFiles(self._folder / "kept", f"{table}/{self._stream}"), {}
        rows = self._aws.rows(table)
        self.report.shards = len(rows)
        for shard, row in rows.items():
            if row["checkpoint"] == "SHARD_END":
                continue
            entries, _, _ = read_chain(
                row["stateVersion"], shard, lambda name, of=shard: store.read(of, name)
            )
            for key, values in entries.items():
                if "session" in values:
                    assert key not in kept, "one shard has a key"
                    kept[key] = msgspec.msgpack.decode(values["session"], type=Session)
        return kept

    def _violated(self, what):
        self._say(what)
        self.report.violations.append(what)
