"""Outputs of user code, whole: rows into an HTTP API are there at least once and rows into SQLite
exactly once, while processes are killed; an API that hangs costs no lease."""

import contextlib
import json
import os
import random
import signal
import sqlite3
import threading

import pytest

from tests.seeds import seed_of
from tests.support.http_service import HttpService

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

RECORDS = 400
KEYS = 20


class Api:
    """Takes rows. While it `hangs` no request is answered."""

    def __init__(self):
        self.rows = []
        self.hung = 0
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.service = HttpService(self._answer)

    def _answer(self, method, path, headers, body):
        if not self.goes_on.is_set():
            self.hung += 1
            self.goes_on.wait()
        self.rows += json.loads(body)
        return 200, {}, b""

    def close(self):
        self.goes_on.set()
        self.service.close()


@pytest.fixture
def api():
    made = Api()
    yield made
    made.close()


class Database:
    def __init__(self, path):
        self.options = {
            "database": str(path),
            "table": "rides",
            "columns": ["sequence_number", "key", "n"],
        }
        with self._connected() as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("CREATE TABLE rides (sequence_number, key, n)")

    @contextlib.contextmanager
    def _connected(self):
        with contextlib.closing(sqlite3.connect(self.options["database"])) as connection:
            yield connection

    def rows(self):
        with self._connected() as connection:
            found = connection.execute("SELECT key, n FROM rides ORDER BY rowid")
            return [{"key": key, "n": n} for key, n in found]


def by_key(rows):
    """For each key its numbers, in their order."""
    seen = {}
    for row in rows:
        seen.setdefault(row["key"], []).append(row["n"])
    return seen


def first_seen(rows):
    return {key: list(dict.fromkeys(numbers)) for key, numbers in by_key(rows).items()}


def put_by(source):
    return by_key({"key": key, "n": n} for rows in source.put.values() for _, key, n in rows)


@pytest.mark.slow
def test_every_row_is_there_as_often_as_its_kind_says_while_processes_are_killed(
    embedded_aws, application, producer, api, tmp_path
):
    rng = random.Random(seed_of(106_700))
    database = Database(tmp_path / "rides.db")
    stream = embedded_aws.stream(2)
    app = application(
        stream,
        options={"emits": True, "emits_to": ["api"]},
        output={"use": "processors.sqlite_rows:SqliteRows", "options": database.options},
        outputs={
            "api": {
                "use": "processors.http_rows:HttpRows",
                "options": {"url": f"{api.service.url}/rows"},
            }
        },
    )
    source = producer(stream, RECORDS, seed=6, rate=100, keys=KEYS)
    app.start()
    app.until(lambda: app.of("lease_claimed"))
    source.start()
    killed = []

    def is_read():
        seen = len(app.ledger.delivered)
        if len(killed) < 4 and seen > 60 * (len(killed) + 1) and app.lease_pids():
            killed.append(rng.choice(app.lease_pids()))
            os.kill(killed[-1], signal.SIGKILL)
        return source.is_done and seen == source.total_put

    app.until(is_read, 90)
    put = put_by(source)
    app.until(lambda: first_seen(api.rows) == put)
    app.until(lambda: by_key(database.rows()) == put)
    assert app.stop() == 0
    assert by_key(database.rows()) == put, "exactly once, in the order of each key"
    assert first_seen(api.rows) == put, "at least once, in the order of each key"
    assert len(killed) == 4
    assert not app.of("processor_raised")


@pytest.mark.slow
def test_a_call_that_hangs_delays_no_renewal_and_its_rows_arrive_when_it_goes_on(
    embedded_aws, application, producer, api
):
    stream = embedded_aws.stream(1)
    app = application(
        stream,
        options={"emits": True},
        output={
            "use": "processors.http_rows:HttpRows",
            "options": {"url": f"{api.service.url}/rows", "timeout_s": 600},
        },
        leases={"failover": "2s"},
    )
    api.goes_on.clear()
    source = producer(stream, 50, seed=7, keys=5)
    app.start()
    source.start()
    app.until(lambda: api.hung)

    def counter():
        (row,) = embedded_aws.rows(app.table).values()
        return int(row["leaseCounter"])

    at_first = counter()
    app.until(lambda: counter() >= at_first + 6)  # some four seconds: twice the failover
    api.goes_on.set()
    app.until(lambda: source.is_done and first_seen(api.rows) == put_by(source))

    assert app.stop() == 0
    assert len(app.of("lease_claimed")) == 1, "the lease was renewed, and its process lived on"
