"""A lease that waits for a destination is left alone, and says for which one and why."""

import contextlib
import json
import os
import signal
import sqlite3
import urllib.request

import pytest

from tests.patience import HUNG_S

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

STALL_S = 4.0
PROCESSOR = """
import json
from kclrun import RecordProcessor

class Rows(RecordProcessor):
    def initialize(self, context):
        self.context = context

    def process_records(self, batch, checkpointer):
        for record in batch:
            self.context.emit({"n": json.loads(record.data)["n"]})
        if self.context.options["checkpoints"]:
            checkpointer.checkpoint()
"""


class Database:
    """A file of SQLite; while another program has it for itself, it is away."""

    def __init__(self, path):
        self.path = path
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("CREATE TABLE numbers (n INTEGER)")

    def rows(self):
        with contextlib.closing(sqlite3.connect(self.path, timeout=HUNG_S)) as connection:
            return connection.execute("SELECT count(*) FROM numbers").fetchone()[0]

    @contextlib.contextmanager
    def away(self):
        connection = sqlite3.connect(self.path, isolation_level=None, timeout=HUNG_S)
        with contextlib.closing(connection):
            connection.execute("BEGIN EXCLUSIVE")
            yield
            connection.execute("ROLLBACK")


def waiting(app):
    """The reasons and the leases of /health, once a lease has waited for thrice `stall`."""
    endpoint = app.of("endpoint_listening")[-1]["endpoint"]
    with urllib.request.urlopen(f"{endpoint}/health", timeout=HUNG_S) as answer:
        body = json.load(answer)
    away_s = [lease["destination_away_s"] or 0.0 for lease in body["leases"]]
    return body if max(away_s, default=0.0) > 3 * STALL_S else None


@pytest.mark.seconds
@pytest.mark.parametrize("waits_in", ["its start", "checkpoint()"])
def test_a_lease_whose_database_is_away_for_longer_than_stall_is_not_ended_and_says_why(
    embedded_aws, application, producer, tmp_path, waits_in
):
    database = Database(tmp_path / "rows.db")
    (tmp_path / "rows_processor.py").write_text(PROCESSOR)
    stream = embedded_aws.stream(shards=1)
    is_manual = waits_in == "checkpoint()"
    app = application(
        stream,
        processor="rows_processor:Rows",
        path=str(tmp_path),
        options={"checkpoints": is_manual},
        # Each attempt takes a second, and not the ten that a driver waits for a server.
        output={"sql": f"sqlite:///{database.path}?timeout=1", "table": "numbers"},
        checkpoint={"every": "manual" if is_manual else "500ms"},
        stall=f"{STALL_S:g}s",
        leases={"failover": "3s"},
        observe={"listen": 0},
    )
    app.start()
    first = producer(stream, 50, seed=66).start()
    app.until(lambda: first.is_done and database.rows() == 50)
    with database.away():
        if not is_manual:  # the next process of the lease begins while the database is away
            os.kill(app.lease_pids()[0], signal.SIGKILL)
        source = producer(stream, 50, seed=67).start()
        body = app.until(lambda: waiting(app))
        assert not app.of("process_stalled")
    app.until(lambda: source.is_done and database.rows() == 100)

    assert app.stop() == 0
    assert database.rows() == 100, "each row once"
    for event in ("process_stalled", "process_killed", "lease_lost"):
        assert not app.of(event)
    assert len(app.of("process_died")) == (not is_manual), "only the one that was killed"
    assert body["status"] == "degraded"
    (lease,) = body["leases"]
    if not is_manual:
        assert lease["state"] == "waiting"
        assert lease["note"].startswith("waits for a destination for ")
        assert "output: " in lease["note"]
        assert lease["note"] in body["reasons"][0]["text"]
