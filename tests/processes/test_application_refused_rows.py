"""Rows that a database refuses only at the commit, for a CHECK, a trigger or a key that is there:
each record at fault becomes a dead letter that names the column, the other rows are there once, and
the shard goes on."""

import contextlib
import sqlite3

import pytest

from tests.patience import HUNG_S
from tests.processes.test_application_dead_letters import letters_at

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

RECORDS, KEYS = 600, 4
PICKY = """CREATE TRIGGER picky BEFORE INSERT ON numbers
    WHEN NEW.key = 'key-1' AND NEW.n IN (7, 8)
    BEGIN SELECT RAISE(ABORT, 'column n is not for this key'); END"""
THERE = """INSERT INTO numbers (key, n) VALUES ('key-1', 7), ('key-1', 8),
    ('key-0', 40), ('key-1', 40), ('key-2', 40), ('key-3', 40)"""
TABLES = {
    "a check and a trigger": (
        "CREATE TABLE numbers (sequence_number TEXT, key TEXT, n INTEGER CHECK (n <> 40))",
        PICKY,
    ),
    "a key that is there": (
        "CREATE TABLE numbers (sequence_number TEXT, key TEXT, n INTEGER, UNIQUE (key, n))",
        THERE,
    ),
}
POISON = {("key-1", 7), ("key-1", 8), *((f"key-{key}", 40) for key in range(KEYS))}
HOW = {
    "batches": {},
    "single records": {
        "processor": "single_processor:Tasks",
        "concurrency": {"records": 8},
    },
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("table", TABLES)
def test_each_record_whose_row_is_refused_is_a_dead_letter_and_the_others_are_there_once(
    embedded_aws, application, producer, tmp_path, table, how
):
    database = tmp_path / "rows.db"
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        for statement in TABLES[table]:
            connection.execute(statement)
        there = connection.execute("SELECT count(*) FROM numbers").fetchone()[0]
    place = {"path": str(tmp_path / "letters")}
    stream = embedded_aws.stream(shards=1)
    calls = {"calls": str(tmp_path / "calls")} if how != "batches" else {"emits": True}
    app = application(
        stream,
        options=calls,
        output={"sql": f"sqlite:///{database}", "table": "numbers"},
        checkpoint={"every": "500ms"},
        on_error={"retries": 0, "then": "dead-letter", "dead_letter": place},
        **HOW[how],
    )
    source = producer(stream, RECORDS, seed=8, rate=600, keys=KEYS)
    app.start()
    source.start()

    def rows():
        with contextlib.closing(sqlite3.connect(database)) as connection:
            return connection.execute("SELECT key, n FROM numbers").fetchall()

    app.until(lambda: source.is_done and len(rows()) == RECORDS - len(POISON) + there)
    app.until(lambda: len(letters_at(place, embedded_aws)) == len(POISON))

    assert app.stop() == 0
    put = {number: (key, n) for given in source.put.values() for number, key, n in given}
    letters = letters_at(place, embedded_aws)
    assert {put[letter.sequence_number] for letter in letters} == POISON
    assert all("column n" in letter.error for letter in letters), [each.error for each in letters]
    assert sorted(rows()) == sorted([*(set(put.values()) - POISON), *(POISON if there else ())])
    refused = app.of("rows_refused")
    assert refused
    # The lease stays: its process is replaced, and the log gives the true reason.
    assert not [*app.of("process_lost_lease"), *app.of("lease_lost"), *app.of("lease_halted")]
    replaced = [line["reason"] for line in app.of("process_replaced")]
    assert len(replaced) == len(refused)
    assert all("its rows are tried one call at a time" in reason for reason in replaced)


def test_a_run_until_caught_up_ends_with_0_though_its_last_commit_would_be_refused(
    embedded_aws, application, producer, tmp_path
):
    """All is read before a checkpoint is due: the only commit would be that of the end."""
    database = tmp_path / "rows.db"
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(TABLES["a check and a trigger"][0])
    place = {"path": str(tmp_path / "letters")}
    stream = embedded_aws.stream(shards=1)
    producer(stream, 200, seed=8, keys=KEYS).start().join()
    app = application(
        stream,
        options={"emits": True},
        output={"sql": f"sqlite:///{database}", "table": "numbers"},
        checkpoint={"every": "10m"},
        on_error={"retries": 0, "then": "dead-letter", "dead_letter": place},
    )

    assert app.start("--until", "caught-up").process.wait(HUNG_S) == 0

    with contextlib.closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT count(*) FROM numbers").fetchone()[0] == 200 - KEYS
    letters = letters_at(place, embedded_aws)
    assert len(letters) == KEYS
    assert all("column n" in letter.error for letter in letters)
    assert not app.of("checkpoint_missed")


# Rows of calls that have no record: each is refused.
OTHER_CALLS = """
import time
from kclrun import RecordProcessor

class Calls(RecordProcessor):
    def initialize(self, context):
        self.context = context

    def process_records(self, batch, checkpointer):
        if self.context.options["raises"] == "on_timer":
            self.context.set_timer(batch[0], time.time(), clock="wall")

    def on_timer(self, timer, checkpointer):
        self.context.emit({"n": 40})

    def shard_ended(self, checkpointer):
        self.context.emit({"n": 40})
        checkpointer.checkpoint()
"""


@pytest.mark.parametrize("call", ["on_timer", "shard_ended"])
def test_a_refused_row_of_a_call_without_a_record_is_an_error_of_this_call_which_then_halts(
    embedded_aws, application, producer, tmp_path, call
):
    database = tmp_path / "rows.db"
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE numbers (n INTEGER CHECK (n <> 40))")
    (tmp_path / "other_calls.py").write_text(OTHER_CALLS)
    stream = embedded_aws.stream(shards=1)
    app = application(
        stream,
        processor="other_calls:Calls",
        path=str(tmp_path),
        options={"raises": call},
        output={"sql": f"sqlite:///{database}", "table": "numbers"},
        state={"store": str(tmp_path / "versions")},
        checkpoint={"every": "500ms"},
        on_error={"retries": 1, "backoff": "100ms", "then": "skip"},
    )
    source = producer(stream, 10, seed=8)
    app.start()
    source.start()
    app.until(lambda: source.is_done)
    if call == "shard_ended":
        source.reshard("split", 0)
    app.until(lambda: app.of("processor_failed"))

    assert app.stop() in {0, 75}
    [failed] = app.of("processor_failed")
    assert (failed["where"], failed["attempts"]) == (call, 2)
    assert "column n" in failed["error"]
    assert app.of("rows_refused")
