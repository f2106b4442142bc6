"""One run: two managers with keyed state, lease processes and a manager killed, shards split and
merged; then rows and state are compared with sessions that are computed from the flights."""

import json
from collections import Counter
from dataclasses import dataclass

import msgspec
from kclrun.samples.aircraft_sessions import Session, expected_sessions, flights_in_order

from kclrun.sinks.state_files import StateFiles
from kclrun.state.chain import read_chain
from tests.chaos import two_managers
from tests.processes.ledger_rig.application import Application
from tests.processes.ledger_rig.aws import Aws


@dataclass(frozen=True, kw_only=True)
class Plan(two_managers.Plan):
    copies: int


@dataclass
class Report(two_managers.Report):
    records: int = 0
    shards: int = 0
    rows: int = 0
    keys: int = 0


class SessionsRun(two_managers.TwoManagers):
    """`run` returns a Report."""

    def __init__(self, folder, plan, *, say=lambda _: None):
        self._records = list(flights_in_order(plan.flights, plan.copies))
        report = Report(records=len(self._records))
        super().__init__(folder, plan, report, Aws, say=say)

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
