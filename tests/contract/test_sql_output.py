"""SQL outputs over SQLite in a file and over a real PostgreSQL: exactly once, whatever arrives late.

The traces V1 and V2 are those that model checking found, word by word.
"""

import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import sqlite3
import threading
import time
from datetime import UTC, date, datetime
from decimal import Decimal
from uuid import UUID

import psycopg
import pytest
import sqlalchemy as sa

from kclrun.errors import SettingsError, SinkError, Superseded
from kclrun.sinks import sql_tables
from kclrun.sinks.sql import SqlOutput
from kclrun.sinks.sql_tables import Shape
from tests.patience import LONG_S
from tests.support.postgres import running_postgres
from tests.support.sql_owners import BEGIN, add, at, persist, place_at, row, rows_of, run_owner

NAMES = itertools.count()


@pytest.fixture(scope="module")
def postgres():
    with running_postgres() as server:
        yield server


class Database:
    """An empty database, and what a user of it sees."""

    def __init__(self, url, server=None):
        self.url, self.server = url, server
        self._engine = sa.create_engine(url, poolclass=sa.NullPool)

    def run(self, *statements):
        with self._engine.begin() as connection:
            for each in statements:
                result = connection.execute(sa.text(each))
            return result.all() if result.returns_rows else []

    def numbers(self):
        return [n for (n,) in self.run("SELECT n FROM rides ORDER BY n")]


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request, tmp_path):
    if request.param == "sqlite":
        return Database(f"sqlite:///{tmp_path / 'rows.db'}")
    return new_database(request.getfixturevalue("postgres"))


def new_database(server):
    name = f"d{next(NAMES)}"
    engine = sa.create_engine(server.url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    return Database(server.url.replace("/postgres?", f"/{name}?"), server)


@pytest.fixture
def owner(database):
    """Makes owners of the shard; they are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(token=1, *, of=None, **place):
            output = SqlOutput(place_at(database.url, **place), of or rows_of(token))
            stack.callback(output.close)
            return output

        yield make


class Held:
    """The first insertion of any output waits there, inside its transaction."""

    def __init__(self, monkeypatch):
        self.arrived, self.released = threading.Event(), threading.Event()
        insert, first = Shape.insert, itertools.count()

        def waiting(shape, connection, rows):
            if next(first) == 0:
                self.arrived.set()
                assert self.released.wait(LONG_S)
            insert(shape, connection, rows)

        monkeypatch.setattr(Shape, "insert", waiting)

    @contextlib.contextmanager
    def commits(self, output):
        """While it commits in a thread; its outcome is in the list given."""
        outcome = []

        def commit():
            try:
                outcome.append(output.commit())
            except SinkError as error:
                outcome.append(error)

        thread = threading.Thread(target=commit)
        thread.start()
        try:
            assert self.arrived.wait(LONG_S)
            yield outcome
        finally:
            self.released.set()
            thread.join(LONG_S)


def test_v1_a_first_send_that_lands_after_its_resend_writes_nothing(database, owner):
    p0, late = owner(), owner()
    for each in (p0, late):  # one owner; `late` is its first transaction, still on its way
        each.begin(BEGIN)
        add(each, 1, 1)

    assert p0.commit() == at(1)
    late.commit()  # lands

    assert database.numbers() == [1]
    add(p0, 2, 2)
    assert p0.commit() == at(2)
    late.add([late.encode(row(1))[0]], at(1))
    with pytest.raises(Superseded):
        late.commit()
    assert database.numbers() == [1, 2]


def test_v2_a_zombie_that_lands_after_the_next_begin_writes_nothing(database, owner):
    p0, p1 = owner(1), owner(2)
    assert p0.begin(BEGIN) == BEGIN
    add(p0, 1, 1)  # sent, and on its way

    assert p1.begin(BEGIN) == BEGIN
    with pytest.raises(Superseded, match="shardId-000000000000"):
        p0.commit()  # lands
    add(p1, 1, 1)
    assert p1.commit() == at(1)

    assert database.numbers() == [1]
    with pytest.raises(Superseded):
        p0.commit()


def test_v2_a_begin_waits_for_the_transaction_that_was_there_before_it(
    database, owner, monkeypatch
):
    p0, p1 = owner(1), owner(2)
    p0.begin(BEGIN)
    add(p0, 1, 3)
    held = Held(monkeypatch)
    with held.commits(p0):
        beginning = threading.Timer(0.2, held.released.set)
        beginning.start()
        assert persist(lambda: p1.begin(BEGIN)) == at(3)
        beginning.join()

    add(p1, 4, 4)
    assert p1.commit() == at(4)
    assert database.numbers() == [1, 2, 3, 4]


@pytest.mark.parametrize("is_applied", [True, False])
def test_a_commit_without_an_answer_is_resolved_before_later_rows_are_sent(
    database, owner, monkeypatch, is_applied
):
    p0 = owner()
    p0.begin(BEGIN)
    add(p0, 1, 2)
    dialect = p0._engine.dialect
    lost = sqlite3.OperationalError if dialect.name == "sqlite" else psycopg.OperationalError
    commit = type(dialect).do_commit

    def lose_the_answer(connection):
        monkeypatch.setattr(dialect, "do_commit", lambda each: commit(dialect, each))
        if is_applied:
            commit(dialect, connection)
        raise lost("the connection is lost")

    monkeypatch.setattr(dialect, "do_commit", lose_the_answer)
    with pytest.raises(SinkError, match="cannot write to table rides"):
        p0.commit()
    add(p0, 3, 3)
    assert p0.unsent_bytes > 0

    assert p0.commit() == at(3)
    assert p0.unsent_bytes == 0
    assert database.numbers() == [1, 2, 3]
    assert owner(2).begin(BEGIN) == at(3)


def test_a_server_that_dies_in_the_middle_of_a_transaction_leaves_no_row_of_it(
    postgres, monkeypatch
):
    database = new_database(postgres)
    p0 = SqlOutput(place_at(database.url), rows_of())
    p0.begin(BEGIN)
    add(p0, 1, 2)
    p0.commit()
    add(p0, 3, 4)
    held = Held(monkeypatch)
    with held.commits(p0) as outcome:
        postgres.crash()
    assert isinstance(outcome[0], SinkError)
    with pytest.raises(SinkError, match="cannot write to table rides"):
        p0.commit()

    postgres.start()
    assert database.numbers() == [1, 2]
    assert persist(p0.commit) == at(4)
    assert database.numbers() == [1, 2, 3, 4]
    p0.close()


def test_an_owner_that_stops_inside_its_transaction_does_not_hold_up_the_next_one(
    postgres, monkeypatch
):
    database = new_database(postgres)
    p0, p1 = (SqlOutput(place_at(database.url), rows_of(token)) for token in (1, 2))
    p0.begin(BEGIN)
    add(p0, 1, 2)
    from kclrun.sinks import sql

    monkeypatch.setattr(sql, "PATIENCE_S", 1.0)
    held = Held(monkeypatch)
    with held.commits(p0) as outcome:
        assert persist(lambda: p1.begin(BEGIN)) == BEGIN
        add(p1, 1, 3)
        assert p1.commit() == at(3)
    assert isinstance(outcome[0], SinkError)
    with pytest.raises(Superseded):
        p0.commit()

    assert database.numbers() == [1, 2, 3]
    p0.close()
    p1.close()


@pytest.mark.seconds
@pytest.mark.parametrize("seed", range(105_000, 105_003))
def test_owners_at_the_same_time_in_processes_that_stop_and_wake_up_write_each_row_once(
    database, seed
):
    last, chance = 400, random.Random(seed)
    spawn = multiprocessing.get_context("spawn")
    owners = [
        spawn.Process(target=run_owner, args=(database.url, token, last, seed + token))
        for token in range(1, 5)
    ]
    try:
        for each in owners:
            each.start()
            while len(progress(database)) < each.pid % 2:
                time.sleep(0.001)
            time.sleep(chance.uniform(0.3, 0.9))
            os.kill(each.pid, signal.SIGSTOP)
            if each is owners[-2]:
                os.kill(each.pid, signal.SIGKILL)
        for each in owners:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGCONT)
        for each in owners:
            each.join(LONG_S)
            assert each.exitcode in {0, -signal.SIGKILL}
        final = SqlOutput(place_at(database.url), rows_of(99))
        there = persist(lambda: final.begin(BEGIN))
        final.close()
    finally:
        for each in owners:
            if each.pid is not None:
                each.kill()
    assert database.numbers() == list(range(1, last + 1))
    assert there == at(last)
