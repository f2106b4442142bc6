"""One run: two managers over a database and a table of DynamoDB. The database goes away for a share
of the run, and comes back; records whose rows a destination refuses are among the others; lease
processes and a manager are killed, and shards are split and merged."""

import contextlib
import json
import random
import sqlite3
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path

import sqlalchemy as sa

from kclrun.outputs.dead_letters import LetterFolder
from tests.chaos import two_managers
from tests.patience import HUNG_S, until
from tests.processes.ledger_rig.application import Application
from tests.processes.ledger_rig.aws import Aws

USER_CODE = Path(__file__).parent / "user_code"
DYNAMODB = "tests.chaos.refusals.strict_dynamodb"
FAILOVER_S = 5.0
TABLE, ITEMS, INDEX = "numbered", "numbered", "by-driver"
# One record in so many has its row in DynamoDB: moto takes some 3 ms for an item, and for its
# trial.
_ITEM_EVERY = 40
# What an index on a text refuses: no value, an empty text, a number.
_BAD_DRIVERS = (None, "", 5)
# The rows of records that were put so long ago are there, if the fleet is not behind.
_BEHIND_S = 10.0
_LOOK_S = 2.0
_LOOKED_AT = 200


@dataclass(frozen=True, kw_only=True)
class Plan(two_managers.Plan):
    """The database is away between the shares `away`; from the first of them on `poison_share` of
    the rows are such as it refuses. At the share `index_at` the items get an index; a while after
    it `poison_items_share` of the items are such as the index refuses."""

    away: tuple[float, float]
    index_at: float
    poison_share: float
    poison_items_share: float


@dataclass
class Report(two_managers.Report):
    records: int = 0
    away_s: float = 0.0
    calls_while_away: int = 0
    calls_while_away_most_of_a_process: int = 0
    caught_up_after_s: float | None = None
    rows: int = 0
    items: int = 0
    duplicates: int = 0
    lost: int = 0
    letters: dict = field(default_factory=dict)
    letters_kept: int = 0
    commits_refused: int = 0
    stalls: int = 0
    leases_lost: int = 0
    leases_lost_while_away: int = 0


class NumberedRecords:
    """The records of a plan, as keys and payloads; `poison` has the kind of each bad one by its
    number, and `in_items` the numbers of those whose row is an item."""

    def __init__(self, plan):
        chance = random.Random(f"refusals {plan.seed}")
        self.records, self.poison, self.in_items = [], {}, set()
        for number in range(plan.flights):
            is_item = number % _ITEM_EVERY == 0
            row = {"to": "items" if is_item else "table", "id": number}
            row |= {"driver": f"driver {number}"} if is_item else {"n": number}
            may_be_bad = number >= plan.flights * _poison_from(plan, is_item=is_item)
            share = plan.poison_items_share if is_item else plan.poison_share
            if may_be_bad and chance.random() < share:
                kind, bad = ("n", -1) if not is_item else ("driver", chance.choice(_BAD_DRIVERS))
                row[kind] = bad
                self.poison[number] = kind
            if is_item:
                self.in_items.add(number)
            self.records.append((f"key {chance.randrange(400)}", json.dumps(row).encode()))


def _poison_from(plan, *, is_item):
    return plan.index_at + 0.02 if is_item else plan.away[0]


class RefusalsRun(two_managers.TwoManagers):
    """`run` returns a Report. `database` has `url`, and, if it is PostgreSQL, `crash` and `start`;
    a file of SQLite is locked while it is away."""

    def __init__(self, folder, plan, database, *, say=lambda _: None):
        super().__init__(folder, plan, Report(), partial(Aws, dynamodb=DYNAMODB), say=say)
        self._database = database
        self._numbered = NumberedRecords(plan)
        self._records = self._numbered.records
        self._engine = sa.create_engine(database.url, poolclass=sa.NullPool)
        self._calls = folder / "calls"
        self._calls.mkdir()
        self._away = []  # when it went away, and when it came back, by the clocks of log and calls
        self._put_at = []  # how many records were put when
        self._look_at = 0.0

    def _prepare(self, stack):
        with self._engine.begin() as connection:
            columns = "id INTEGER NOT NULL, n INTEGER CHECK (n >= 0)"
            connection.execute(sa.text(f"CREATE TABLE {TABLE} ({columns})"))
            connection.execute(sa.text(f"CREATE INDEX numbered_id ON {TABLE} (id)"))
        self._aws.dynamodb.create_table(
            TableName=ITEMS,
            KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "N"}],
            BillingMode="PAY_PER_REQUEST",
        )
        self._locks = stack.enter_context(contextlib.ExitStack())

    def _application(self, machine):
        return Application(
            self._folder,
            self._aws,
            self._stream,
            machine=machine,
            processor="numbered_rows:NumberedRows",
            path=str(USER_CODE),
            options={"calls": str(self._calls)},
            leases={"failover": f"{FAILOVER_S:g}s"},
            # At the tip each put comes by itself: so many small calls wait for the database. Both
            # machines subscribe as one consumer.
            fetch={"mode": "fan-out", "consumer": "refusals"},
            checkpoint={"every": "1s", "uncheckpointed_max": 1_000_000},
            outputs={
                "table": {"sql": self._database.url, "table": TABLE},
                "items": {"dynamodb": ITEMS},
            },
            on_error={
                "retries": 0,
                "then": "dead-letter",
                "dead_letter": {"path": str(self._letters_folder)},
                # The bad rows of a year come within minutes here.
                "limit": len(self._numbered.poison) + 1,
            },
            log={"level": "info"},
        )

    @property
    def _letters_folder(self):
        return self._folder / "letters"

    # Misfortunes.

    def _misfortunes(self):
        away, back = self._plan.away
        return [
            *super()._misfortunes(),
            (self._take_database_away, (away,)),
            (self._bring_database_back, (back,)),
            (self._add_index, (self._plan.index_at,)),
        ]

    def _do_what_is_due(self, entries):
        super()._do_what_is_due(entries)
        self._look_whether_caught_up(entries)

    def _take_database_away(self):
        put = self._source.entries
        newest = sa.text(f"SELECT max(id) FROM {TABLE}")

        def is_at_the_tip():
            with self._engine.connect() as connection:
                return (connection.execute(newest).scalar() or 0) >= put

        until(is_at_the_tip, HUNG_S)
        if hasattr(self._database, "crash"):
            self._database.crash()
        else:
            lock = sqlite3.connect(self._engine.url.database, isolation_level=None)
            self._locks.callback(lock.close)
            # Another one may be writing.
            lock.execute("PRAGMA busy_timeout = 60000")
            lock.execute("BEGIN EXCLUSIVE")
        self._away.append((time.time(), time.monotonic()))
        self._say("the database is away")

    def _bring_database_back(self):
        self._away.append((time.time(), time.monotonic()))
        (_, began), (_, ended) = self._away
        self.report.away_s = ended - began
        self._locks.close()
        if hasattr(self._database, "start"):
            self._database.start()
        self._say(f"the database is back after {self.report.away_s:.0f} s")

    def _add_index(self):
        """The leases do not know it: they describe the table when they begin."""
        key = {"AttributeName": "driver", "KeyType": "HASH"}
        create = {"IndexName": INDEX, "KeySchema": [key], "Projection": {"ProjectionType": "ALL"}}
        self._aws.dynamodb.update_table(
            TableName=ITEMS,
            AttributeDefinitions=[
                {"AttributeName": "id", "AttributeType": "N"},
                {"AttributeName": "driver", "AttributeType": "S"},
            ],
            GlobalSecondaryIndexUpdates=[{"Create": create}],
        )

    def _look_whether_caught_up(self, entries):
        """Whether the last rows that were put some seconds ago are in the table."""
        now = time.monotonic()
        self._put_at.append((now, entries))
        if len(self._away) < 2 or self.report.caught_up_after_s is not None or now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        put = max((count for at, count in self._put_at if at <= now - _BEHIND_S), default=0)
        wanted = set(range(max(0, put - _LOOKED_AT), put)) - self._numbered.in_items
        wanted -= self._numbered.poison.keys()
        found = sa.text(f"SELECT id FROM {TABLE} WHERE id >= :least AND id < :put")
        with self._engine.connect() as connection:
            rows = connection.execute(found, {"least": put - _LOOKED_AT, "put": put})
            missing = wanted - {row.id for row in rows}
        if wanted and not missing:
            self.report.caught_up_after_s = now - self._away[1][1]
            self._say(f"caught up {self.report.caught_up_after_s:.0f} s after it was back")

    # The verdict.

    def _judge(self):
        rows, items, letters = self._table_rows(), self._item_ids(), self._letters()
        report = self.report
        report.records = len(self._records)
        report.rows, report.items = sum(rows.values()), len(items)
        kinds = [self._numbered.poison.get(each, "none") for each in letters.elements()]
        report.letters = dict(Counter(kinds))
        poison, in_items = self._numbered.poison.keys(), self._numbered.in_items
        good = set(range(len(self._records))) - poison
        self._equal("rows", rows, Counter(good - in_items))
        self._equal("items", Counter(items), Counter(good & in_items))
        self._equal("letters", letters, Counter(poison))
        self._look_at_calls()
        self._look_at_logs()

    def _equal(self, what, found, expected):
        missing, extra = expected - found, found - expected
        self.report.lost += sum(missing.values())
        self.report.duplicates += sum(extra.values())
        if missing or extra:
            self._violated(
                f"{what}: {sum(missing.values())} are missing, such as {sorted(missing)[:5]},"
                f" {sum(extra.values())} too many, such as {sorted(extra)[:5]}"
            )

    def _table_rows(self):
        with self._engine.connect() as connection:
            found = connection.execute(sa.text(f"SELECT id, n FROM {TABLE}")).all()
        if wrong := [row.id for row in found if row.id != row.n]:
            self._violated(f"rows with another value: {wrong[:5]}")
        return Counter(row.id for row in found)

    def _item_ids(self):
        pages = self._aws.dynamodb.get_paginator("scan").paginate(TableName=ITEMS)
        items = [item for page in pages for item in page["Items"]]
        ids = [int(item["id"]["N"]) for item in items]
        if wrong := [
            number
            for number, item in zip(ids, items, strict=True)
            if item["driver"] != {"S": f"driver {number}"}
        ]:
            self._violated(f"items with another value: {wrong[:5]}")
        return ids

    def _letters(self):
        with contextlib.closing(LetterFolder(Path(self._letters_folder))) as store:
            letters = [each.letter for each in store.kept() if not each.is_uncommitted]
        found = {int(json.loads(each.data)["id"]): each for each in letters}
        unnamed = [
            letter.error
            for number, letter in found.items()
            if f"column {self._numbered.poison.get(number)}" not in letter.error
        ]
        if unnamed:
            self._violated(f"{len(unnamed)} letters do not name their column: {unnamed[0]}")
        return Counter(int(json.loads(each.data)["id"]) for each in letters)

    def _look_at_calls(self):
        """The calls that were made while the database was away: their rows waited for it."""
        (_, began), (_, ended) = self._away
        for path in self._calls.iterdir():
            times = [float(line.split()[0]) for line in path.read_text().splitlines()]
            calls = sum(began < at < ended for at in times)
            report = self.report
            report.calls_while_away += calls
            most = max(calls, report.calls_while_away_most_of_a_process)
            report.calls_while_away_most_of_a_process = most

    def _look_at_logs(self):
        (began, _), (ended, _) = self._away
        report = self.report
        for app in self._apps:
            lost = [*app.of("process_lost_lease"), *app.of("lease_lost")]
            while_away = [line for line in lost if began < _time_of(line) < ended]
            report.leases_lost += len(lost)
            report.leases_lost_while_away += len(while_away)
            report.letters_kept += len(app.of("record_dead_lettered"))
            report.stalls += len(app.of("process_stalled"))
            report.commits_refused += len(app.of("rows_refused"))
            if while_away:
                self._violated(f"a lease was lost while the database was away: {while_away[0]}")
            if halted := app.of("lease_halted"):
                self._violated(f"a lease was halted: {halted[0]}")


def _time_of(line):
    return datetime.fromisoformat(line["ts"]).timestamp()
