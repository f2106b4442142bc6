"""One run: two managers with keyed state, lease processes and a manager killed, shards split and
merged; in between Spark goes on with their state, and is killed, too. Then rows and state are
compared with sessions that are computed from the flights."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace

import msgspec
import yaml
from kclrun.samples.aircraft_sessions import Session, expected_sessions, flights_in_order

from kclrun.sinks.state_files import StateFiles
from kclrun.state.chain import read_chain
from tests.chaos.outcomes.flights import FlightProducer
from tests.patience import HUNG_S, until
from tests.processes.ledger_rig.application import Application
from tests.processes.ledger_rig.aws import Aws

SCHEMA = (
    "tailnum string, since_s long, until_s long, flights long, late_min long, carried_min long,"
    " last_min long"
)
_BATCHES = 5


@dataclass(frozen=True)
class Plan:
    """What happens; each misfortune at a share of the records put. `spark`: between these two
    shares Spark reads, while the fleet is stopped."""

    flights: int
    copies: int
    seed: int
    rate: int
    shards: int
    reshards: tuple = ()
    lease_kills: tuple = ()
    manager_kills: tuple = ()
    spark: tuple = ()


@dataclass
class Report:
    violations: list = field(default_factory=list)
    records: int = 0
    lease_kills: int = 0
    manager_kills: int = 0
    processes_started: int = 0
    spark_records: int = 0
    spark_kills: int = 0
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
                reshards=[(self._at(share), how, index) for share, how, index in plan.reshards],
                pauses=map(self._at, plan.spark),
            )
            self._agenda = sorted(
                [(self._at(share), self._kill_lease) for share in plan.lease_kills]
                + [(self._at(share), self._kill_manager) for share in plan.manager_kills],
                key=lambda each: each[0],
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

    def _at(self, share):
        return int(share * len(self._records))

    def _read_all(self):
        began = time.monotonic()
        self._read_by_fleet()
        if self._plan.spark:
            until(lambda: self._source.is_paused, HUNG_S)
            self._read_by_spark()
            self._read_by_fleet()
        self.report.processes_started = self._count("lease_claimed")
        self.report.seconds = time.monotonic() - began
        self._say(f"read in {self.report.seconds:.0f} s")

    def _read_by_fleet(self):
        """What is put until the producer pauses, or is done."""
        source, is_first = self._source, not self._source.has_started
        claims = self._count("lease_claimed") + (self._plan.shards if is_first else 1)
        for app in self._apps:
            app.start()
        until(lambda: self._count("lease_claimed") >= claims, HUNG_S)
        source.start() if is_first else source.resume()
        while not source.is_done and not source.is_paused:
            self._do_what_is_due(source.entries)
            time.sleep(0.05)  # a pace, not a wait for anything
        self._do_what_is_due(len(self._records) if source.is_done else source.entries)
        for app in self._apps:
            if app.process.poll() is None and (code := app.stop()) not in {0, os.EX_TEMPFAIL}:
                self._violated(f"a manager ended with {code}: {app.last_words()}")
        last = self._apps[0]
        if code := last.start("--until", "caught-up").process.wait(4 * HUNG_S):
            self._violated(f"the last reading ended with {code}: {last.last_words()}")
        self._say(f"the fleet has read {source.entries} records")

    def _do_what_is_due(self, entries):
        while self._agenda and self._agenda[0][0] <= entries:
            self._agenda.pop(0)[1]()

    # Spark.

    def _read_by_spark(self):
        """The next records, which are put first: with the fleet's state, killed after a batch, and
        back to the fleet."""
        began = self._source.entries
        self._source.resume()
        until(lambda: self._source.entries == self._at(self._plan.spark[1]), 10 * HUNG_S)
        until(lambda: self._source.is_paused, HUNG_S)
        self.report.spark_records = self._source.entries - began
        self._write_spark_settings(self.report.spark_records)
        running = self._spark()
        try:
            commits = self._folder / "checkpoint" / "commits"
            until(lambda: running.poll() is not None or any(commits.glob("[0-9]*")), 4 * HUNG_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
                self.report.spark_kills += 1
            running.wait()
        if code := self._spark().wait(10 * HUNG_S):
            self._violated(f"Spark ended with {code}: see spark.log")
        moved = self._apps[0].cli(
            *("migrate", "spark", str(self._folder / "checkpoint"), "--yes", "--config"),
            str(self._apps[0].config),
        )
        if moved.returncode:
            self._violated(f"the query's positions were not taken: {moved.stdout}{moved.stderr}")
        self._say(f"Spark has read {self.report.spark_records} records")

    def _write_spark_settings(self, records):
        of_fleet = yaml.safe_load(self._apps[0].config.read_text())
        settings = {
            **{
                name: of_fleet[name]
                for name in ("application", "stream", "processor", "aws", "log")
            },
            "engine": "spark",
            "start": {"leases": self._apps[0].table},
            "until": "caught-up",
            "state": {"store": str(self._folder / "kept")},
            "output": {"path": str(self._folder / "of-spark"), "format": "json", "schema": SCHEMA},
            "spark": {
                "master": "local[2]",
                "checkpoint": str(self._folder / "checkpoint"),
                "source": {"maxRecordsPerTrigger": max(1, records // _BATCHES)},
            },
        }
        (self._folder / "spark.yaml").write_text(yaml.safe_dump(settings))

    def _spark(self):
        with (self._folder / "spark.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "kclrun", "--config", self._folder / "spark.yaml"],
                env=self._apps[0].environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )

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
        of_fleet = (self._folder / "rows").rglob("*.jsonl")
        paths = [path for path in of_fleet if not path.name.startswith(".")]
        return [
            json.loads(line)
            for path in (*paths, *self._files_of_spark())
            for line in path.read_text().splitlines()
        ]

    def _files_of_spark(self):
        """Those that the sink's log names: a batch that was killed may have left others."""
        folder = self._folder / "of-spark"
        logs = [path for path in folder.glob("_spark_metadata/[0-9]*") if path.name[0] != "."]
        named = (re.findall(r'"path":"[^"]*/([^/"]+)"', path.read_text()) for path in logs)
        return [folder / name for name in sorted({name for names in named for name in names})]

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
