"""One run: two managers with keyed state, lease processes and a manager killed, shards split and
merged; in between Spark goes on with their state, and is killed, too. Then rows and state are
compared with sessions that are computed from the flights."""

import contextlib
import json
import os
import re
import signal
import sys
from collections import Counter
from dataclasses import dataclass

import msgspec
import yaml
from kclrun.samples.aircraft_sessions import Session, expected_sessions, flights_in_order

from tests.chaos import two_managers
from tests.patience import HUNG_S, until
from tests.processes.ledger_rig.application import Application
from tests.processes.ledger_rig.aws import Aws
from tests.processes.ledger_rig.states import kept_values
from tests.support.programs import started

SCHEMA = (
    "tailnum string, since_s long, until_s long, flights long, late_min long, carried_min long,"
    " last_min long"
)
_BATCHES = 5


@dataclass(frozen=True, kw_only=True)
class Plan(two_managers.Plan):
    """`spark`: between these two shares of the records Spark reads, while the fleet is stopped."""

    copies: int
    spark: tuple = ()


@dataclass
class Report(two_managers.Report):
    records: int = 0
    spark_records: int = 0
    spark_kills: int = 0
    shards: int = 0
    rows: int = 0
    keys: int = 0


class SessionsRun(two_managers.TwoManagers):
    """`run` returns a Report."""

    def __init__(self, folder, plan, *, say=lambda _: None):
        self._records = list(flights_in_order(plan.flights, plan.copies))
        report = Report(records=len(self._records))
        super().__init__(folder, plan, report, Aws, say=say, pauses=plan.spark)

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
        self._read_by_fleet()
        if self._plan.spark:
            until(lambda: self._source.is_paused, HUNG_S)
            self._read_by_spark()
            self._read_by_fleet()

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
        return started(
            [sys.executable, "-P", "-m", "kclrun", "--config", self._folder / "spark.yaml"],
            self._folder / "spark.log",
            env=self._apps[0].environment,
            cwd=self._folder,
            process_group=0,
        )

    # The verdict.

    def _judge(self):
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
        table = self._apps[0].table
        rows = self._aws.rows(table)
        self.report.shards = len(rows)
        kept = kept_values(self._folder / "kept", table, self._stream, rows)
        return {
            key: msgspec.msgpack.decode(values["session"], type=Session)
            for key, values in kept.items()
            if "session" in values
        }
