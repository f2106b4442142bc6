"""One run: two managers, processes killed, the database crashed inside transactions, shards split
and merged; then the dead letters, repaired, by redrives that are killed and overlap."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import sqlalchemy as sa
from pyarrow import parquet

from kclrun.destinations import open_letters
from kclrun.model.letter import LetterDestination
from kclrun.model.wire import WireCredentials, WireEndpoint
from tests.chaos import two_managers
from tests.chaos.outcomes.flights import Flights
from tests.patience import HUNG_S, until
from tests.processes.ledger_rig.application import Application
from tests.processes.ledger_rig.aws import MOTO, REGION, Aws
from tests.support.clients import ONCE, client_of

USER_CODE = Path(__file__).parent / "user_code"
FAILOVER_S = 5.0
SCHEMA = (
    "flight string NOT NULL, carrier string NOT NULL, window_start string NOT NULL,"
    " flights long NOT NULL, delay_count long NOT NULL, delay_sum long NOT NULL"
)
COLUMNS = "flight, carrier, window_start, flights, delay_count, delay_sum"
BUCKET, TABLE = "outcomes", "flights"
# Transactions that have moved their cursor and wait to insert their rows.
_BETWEEN = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE wait_event_type = 'Lock' AND backend_xid IS NOT NULL"
)


@dataclass(frozen=True, kw_only=True)
class Plan(two_managers.Plan):
    poisons: int
    database_crashes: tuple = ()
    letters: str = "path"


@dataclass
class Report(two_managers.Report):
    database_crashes: int = 0
    transactions_at_crashes: int = 0
    reshards: int = 0
    rows: dict = field(default_factory=dict)
    objects: int = 0
    letters: int = 0
    letters_kept: int = 0
    redrives: int = 0
    redrives_killed: int = 0
    redrive_s: float = 0.0


class OutcomesRun(two_managers.TwoManagers):
    """`run` returns a Report. `database` has `url`, and, if it is PostgreSQL, `crash` and
    `start`."""

    def __init__(self, folder, plan, database, *, say=lambda _: None):
        super().__init__(folder, plan, Report(), partial(Aws, dynamodb=MOTO), say=say)
        self._database = database
        self._flights = Flights(plan.flights, plan.poisons, plan.seed)
        self._records = self._flights.records
        self._engine = sa.create_engine(database.url, poolclass=sa.NullPool)
        self._repaired = folder / "repaired"

    def _prepare(self, stack):
        self._s3 = client_of("s3", self._aws.embedded.endpoint, config=ONCE)
        stack.callback(self._s3.close)
        self._s3.create_bucket(Bucket=BUCKET)

    def _judge(self):
        self._compare("read", with_poisoned=False)
        self._compare_letters()
        self._redrive_all()
        self._compare("redriven", with_poisoned=True)
        self._count()

    # The application.

    def _application(self, machine):
        letters = {
            "path": {"path": str(self._folder / "letters")},
            "s3": {"s3": f"s3://{BUCKET}/letters"},
        }[self._plan.letters]
        table = {"sql": self._database.url, "table": TABLE, "schema": SCHEMA, "create": True}
        archive = {
            "s3": f"s3://{BUCKET}/rows",
            "format": "parquet",
            "schema": SCHEMA,
            "roll": {"every": "5s"},
        }
        return Application(
            self._folder,
            self._aws,
            self._stream,
            machine=machine,
            processor="flight_outcomes:FlightOutcomes",
            path=str(USER_CODE),
            options={"repaired": str(self._repaired)},
            aws={"endpoints": {"s3": self._aws.embedded.endpoint}},
            leases={"failover": f"{FAILOVER_S:g}s"},
            checkpoint={"every": "1s", "uncheckpointed_max": 20_000},
            outputs={"table": table, "archive": archive},
            on_error={
                "retries": 0,
                "then": "dead-letter",
                "dead_letter": letters,
                # The poison of a year comes within minutes here.
                "limit": self._plan.poisons + 1,
            },
            log={"level": "info"},
        )

    # Misfortunes.

    def _misfortunes(self):
        return [*super()._misfortunes(), (self._crash_database, self._plan.database_crashes)]

    def _crash_database(self):
        if not hasattr(self._database, "crash"):
            return
        until(lambda: sa.inspect(self._engine).has_table(TABLE), HUNG_S)
        # The view of what goes on stands still during a transaction.
        looks = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        with self._engine.connect() as holding, looks.connect() as looking:
            holding.execute(sa.text(f"LOCK TABLE {TABLE} IN EXCLUSIVE MODE"))
            under_way = until(lambda: looking.execute(sa.text(_BETWEEN)).scalar(), HUNG_S)
            self._database.crash()
            holding.invalidate()
            looking.invalidate()
        self._database.start()
        self.report.database_crashes += 1
        self.report.transactions_at_crashes += under_way

    # Letters.

    def _letters(self):
        endpoint = self._aws.embedded.endpoint
        places = {
            "path": LetterDestination(path=str(self._folder / "letters")),
            "s3": LetterDestination(s3=f"s3://{BUCKET}/letters", s3_url=endpoint),
        }
        place = places[self._plan.letters]
        kinesis = WireEndpoint(self._aws.embedded.kinesis_endpoint, REGION, REGION)
        keys = WireCredentials("AKIAEXAMPLEEXAMPLE", "secret")
        with contextlib.closing(open_letters(place, kinesis, lambda: keys)) as store:
            return [each.letter for each in store.kept() if not each.is_uncommitted]

    def _compare_letters(self):
        letters = self._letters()
        self.report.letters = len(letters)
        if sorted((each.partition_key, each.data) for each in letters) != self._flights.poisoned:
            self._violated("the letters are not the poisoned records")
        if not all(each.stream_created_at and each.traceback for each in letters):
            self._violated("a letter lacks its stream or its traceback")

    def _redrive_all(self):
        """Two at once, one of them killed after its first rows; beside the fleet; then again."""
        began = time.monotonic()
        self._repaired.touch()
        fleet = self._apps[1].start()
        rows = self._count_rows()
        killed, other = self._redrive(), self._redrive()
        until(lambda: self._count_rows() > rows or killed.poll() is not None, HUNG_S)
        for each in _family(killed):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        killed.communicate(timeout=HUNG_S)
        self.report.redrives_killed += killed.returncode == -signal.SIGKILL
        other.communicate(timeout=2 * HUNG_S)

        def is_over():
            redrive = self._redrive()
            _, said = redrive.communicate(timeout=2 * HUNG_S)
            if redrive.returncode not in {0, 65}:
                self._violated(f"a redrive ended with {redrive.returncode}: {said}")
            return redrive.returncode != 65

        until(is_over, HUNG_S)
        if left := self._letters():
            self._violated(f"{len(left)} letters are left")
        until(lambda: fleet.of("lease_claimed"), HUNG_S)
        if code := fleet.stop():
            self._violated(f"the fleet beside ended with {code}: {fleet.last_words()}")
        self.report.redrive_s = time.monotonic() - began
        self._tell(f"redriven in {self.report.redrive_s:.0f} s")

    def _redrive(self):
        app = self._apps[0]
        self.report.redrives += 1
        command = ["dead-letters", "redrive", "--yes", "--config", str(app.config)]
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "kclrun", *command],
            env=app.environment,
            cwd=app.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    # The verdict.

    def _compare(self, when, *, with_poisoned):
        expected = self._flights.rows(with_poisoned=with_poisoned)
        for name, found in (("table", self._table_rows()), ("archive", self._archive_rows())):
            self.report.rows[f"{name}, {when}"] = len(found)
            if found != expected:
                there, wanted = _counted(found), _counted(expected)
                missing, extra = wanted - there, there - wanted
                self._violated(
                    f"{name}, {when}: {len(found)} rows, {len(expected)} expected:"
                    f" {len(missing)} are missing, such as {sorted(missing)[:3]},"
                    f" {len(extra)} too many, such as {sorted(extra)[:3]}"
                )

    def _table_rows(self):
        with self._engine.connect() as connection:
            return sorted(map(tuple, connection.execute(sa.text(f"SELECT {COLUMNS} FROM {TABLE}"))))

    def _count_rows(self):
        with self._engine.connect() as connection:
            return connection.execute(sa.text(f"SELECT count(*) FROM {TABLE}")).scalar()

    def _archive_rows(self):
        rows, columns = [], COLUMNS.split(", ")
        for key in self._objects():
            content = self._s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()
            read = parquet.read_table(io.BytesIO(content)).to_pydict()
            rows += zip(*(read[name] for name in columns), strict=True)
        return sorted(rows)

    def _objects(self):
        pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix="rows/")
        keys = (each["Key"] for page in pages for each in page.get("Contents", ()))
        return [key for key in keys if "/_kclrun/" not in key]

    def _count(self):
        report = self.report
        report.objects = len(self._objects())
        report.reshards = len(self._plan.reshards)
        report.processes_started = self._claimed()
        for app in self._apps:
            report.letters_kept += len(app.of("record_dead_lettered"))
            halted = app.of("lease_halted")
            if halted:
                self._violated(f"a lease was halted: {halted[0]}")


def _counted(rows):
    """Each row with a number for each time it is there."""
    seen, found = {}, set()
    for row in rows:
        seen[row] = seen.get(row, 0) + 1
        found.add((*row, seen[row]))
    return found


def _family(process):
    """A process and its children, the parent first: it must not see a child end."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        return [process.pid, *(each.pid for each in psutil.Process(process.pid).children())]
    return [process.pid]
