"""SQL outputs over SQLite in a file and over a real PostgreSQL: exactly once, whatever is late.

The traces V1 and V2 are those that model checking found, word by word.
"""

import contextlib
import gc
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
from pathlib import Path
from uuid import UUID

import psutil
import pytest
import sqlalchemy as sa

from kclrun.errors import SettingsError, SinkError, Superseded
from kclrun.outputs import sql
from kclrun.outputs.sql import SqlOutput
from kclrun.outputs.sql_refusals import meaning_of
from kclrun.outputs.sql_tables import Shape
from tests.patience import HUNG_S
from tests.support.sql_owners import BEGIN, add, at, persist, place_at, row, rows_of, run_owner

NAMES = itertools.count()


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


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def database(request, tmp_path):
    if request.param == "sqlite":
        return Database(f"sqlite:///{tmp_path / 'rows.db'}")
    return new_database(
        request.getfixturevalue({"postgresql": "postgres"}.get(request.param, request.param))
    )


def new_database(server):
    name = f"d{next(NAMES)}"
    engine = sa.create_engine(server.url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    return Database(server.database_url(name), server)


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
                assert self.released.wait(HUNG_S)
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
            assert self.arrived.wait(HUNG_S)
            yield outcome
        finally:
            self.released.set()
            thread.join(HUNG_S)


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
    late.add([late.encode(row(1))[0]], at(3))
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
    dialect = p0._database.engine.dialect
    lost = dialect.dbapi.OperationalError
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


@pytest.fixture(params=["postgres", "mariadb"])
def server(request):
    return request.getfixturevalue(request.param)


# PyMySQL leaves the socket of a refused connection to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_a_server_that_dies_in_the_middle_of_a_transaction_leaves_no_row_of_it(server, monkeypatch):
    database = new_database(server)
    p0 = SqlOutput(place_at(database.url), rows_of())
    p0.begin(BEGIN)
    add(p0, 1, 2)
    p0.commit()
    add(p0, 3, 4)
    held = Held(monkeypatch)
    with held.commits(p0) as outcome:
        server.crash()
    assert isinstance(outcome[0], SinkError)
    with pytest.raises(SinkError, match="cannot write to table rides"):
        p0.commit()

    server.start()
    assert database.numbers() == [1, 2]
    assert persist(p0.commit) == at(4)
    assert database.numbers() == [1, 2, 3, 4]
    p0.close()
    del outcome, p0
    gc.collect()


def test_an_owner_that_stops_inside_its_transaction_does_not_hold_up_the_next_one(
    server, monkeypatch
):
    database = new_database(server)
    p0, p1 = (SqlOutput(place_at(database.url), rows_of(token)) for token in (1, 2))
    p0.begin(BEGIN)
    add(p0, 1, 2)
    monkeypatch.setattr(sql.sql_tables, "PATIENCE_S", 1.0)
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


@pytest.mark.long
@pytest.mark.seconds
@pytest.mark.parametrize("seed", [105_000, pytest.param(105_001, marks=pytest.mark.slow)])
def test_owners_in_processes_that_stop_and_wake_up_write_each_row_once(database, seed):
    """Each owner but the last stops anywhere. The next one begins, and the former one wakes up or
    is killed."""
    last, chance = 300, random.Random(seed)
    spawn = multiprocessing.get_context("spawn")
    owners = [
        spawn.Process(target=run_owner, args=(database.url, token, last, seed + token, token < 4))
        for token in range(1, 5)
    ]
    try:
        for token, (former, each) in enumerate(itertools.pairwise([None, *owners]), 1):
            each.start()
            if former is not None:
                # Over SQLite, one that stopped inside its transaction has the file: wake it up.
                wait_for(lambda token=token: token_at(database) >= token, 2)
                os.kill(former.pid, chance.choice([signal.SIGCONT, signal.SIGKILL]))
            if each is not owners[-1]:
                process = psutil.Process(each.pid)
                wait_for(lambda process=process: process.status() == psutil.STATUS_STOPPED, HUNG_S)
        for each in owners:
            each.join(HUNG_S)
            assert each.exitcode in {0, -signal.SIGKILL}
    finally:
        for each in owners:
            if each.pid is not None:
                each.kill()
                each.join()
    assert database.numbers() == list(range(1, last + 1))


def wait_for(condition, limit_s):
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def token_at(database):
    try:
        [(token,)] = database.run("SELECT max(token) FROM kclrun_cursors")
    except sa.exc.SQLAlchemyError:
        return 0
    return token or 0


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"n": 1, "other": 2}, "column 'other' is not in the table rides"),
        ({"text": "x"}, "column n needs a value"),
        ({"n": None}, "column n: is NOT NULL"),
        ({"n": "secret"}, "column n: expected long, got str"),
        ({"n": 1, "text": "secret\0"}, "column text"),
        ({"n": 1, "text": "secret\ud800"}, "column text"),
        ({"n": 1, "text": b"secret"}, "column text: expected string, got bytes"),
    ],
)
@pytest.mark.parametrize("has_schema", [True, False])
def test_a_row_that_does_not_fit_the_table_names_the_column_and_not_the_value(
    database, owner, given, words, has_schema
):
    database.run("CREATE TABLE rides (n BIGINT NOT NULL, text TEXT)")
    output = owner(schema="n long NOT NULL, text string" if has_schema else None)
    output.begin(BEGIN)

    with pytest.raises(TypeError) as refused:
        output.encode(given)
    if not (has_schema and ("other" in given or "n" not in given)):
        assert words in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("columns", "numbers", "named"),
    [
        ("n BIGINT, text VARCHAR(9), CONSTRAINT once UNIQUE (text)", [7, 7], ("once", "text")),
        ("n BIGINT, text TEXT, CONSTRAINT small CHECK (n < 5)", [7], ("small", "n")),
    ],
)
def test_a_row_that_the_database_refuses_names_the_constraint_and_not_the_value(
    database, owner, columns, numbers, named
):
    database.run(f"CREATE TABLE rides ({columns})")
    output = owner(schema=None)
    output.begin(BEGIN)
    output.add([output.encode(row(number))[0] for number in numbers], at(9))

    with pytest.raises(SettingsError) as refused:
        output.commit()
    assert any(each in str(refused.value) for each in named)
    assert "of 7" not in str(refused.value)
    assert database.numbers() == []
    assert owner(2).begin(BEGIN) == BEGIN


VALUES = {
    "s": ("TEXT", 'it\'s "quoted" {ä}\\', None),
    "b": ("BOOLEAN", True, None),
    "i": ("BIGINT", -(2**63), None),
    "d": ("DOUBLE PRECISION", 0.1, None),
    "m": ("NUMERIC(10,2)", Decimal("12345678.90"), None),
    "w": ("NUMERIC", 0.1, Decimal("0.1")),
    "y": ("BYTEA", b"\0\xff", None),
    "f": ("DATE", date(2013, 1, 31), None),
    "z": ("TIMESTAMPTZ", datetime(2013, 1, 31, 12, tzinfo=UTC), None),
    "l": ("TIMESTAMP", datetime(2013, 1, 31, 12, tzinfo=UTC), datetime(2013, 1, 31, 12)),
    "j": ("JSONB", {"a": [1, None, "ü"]}, None),
    "u": ("UUID", UUID(int=7), None),
    "e": ("mood", "happy", None),
    "a": ("TEXT[]", ["a", None, 'b"\\,{}'], None),
    "g": ("INT[]", [[1, 2], [3, 4]], None),
    "c": ("VARCHAR(3)", "äöü", None),
}


def test_mysql_takes_long_values_and_times_and_refuses_what_it_would_cut_short(mariadb):
    """Also where the session's own time zone and strictness are others."""
    database = new_database(mariadb)
    database.run("SET GLOBAL time_zone = '+05:00'", "SET GLOBAL sql_mode = ''")
    schema = "s string, y binary, z timestamp, a array<string>"
    instant = datetime(2013, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)
    try:
        with contextlib.closing(SqlOutput(place_at(database.url, schema=schema), rows_of())) as one:
            one.begin(BEGIN)
            row = {"s": "ü" * 100_000, "y": b"\0" * 100_000, "z": instant, "a": ["x"]}
            one.add([one.encode(row)[0]], at(1))
            one.commit()
        found = database.run("SELECT char_length(s), length(y), z, a FROM rides")
        assert found == [(100_000, 100_000, instant.replace(tzinfo=None), '["x"]')]

        database.run("CREATE TABLE short (z TIMESTAMP, m DECIMAL(3,1), t TINYINT)")
        place = place_at(database.url, schema=None, table="short")
        with contextlib.closing(SqlOutput(place, rows_of(application="short"))) as two:
            two.begin(BEGIN)
            second = instant.replace(microsecond=0)
            two.add([two.encode({"z": second, "t": 1})[0]], at(1))
            two.commit()
            for refused in ({"z": instant}, {"t": 1000}, {"m": Decimal("1.23")}):
                with pytest.raises(TypeError, match=f"column {next(iter(refused))}"):
                    two.encode(refused)
        assert database.run("SET time_zone = '+00:00'", "SELECT z, t FROM short") == [
            (datetime(2013, 1, 31, 12), 1)
        ]
    finally:
        database.run("SET GLOBAL time_zone = 'SYSTEM'", "SET GLOBAL sql_mode = DEFAULT")


def test_a_table_that_knows_no_transactions_is_refused_in_words(mariadb):
    database = new_database(mariadb)
    database.run("CREATE TABLE rides (n BIGINT NOT NULL, text TEXT) ENGINE = MyISAM")
    with (
        contextlib.closing(SqlOutput(place_at(database.url), rows_of())) as output,
        pytest.raises(SettingsError, match=r"MyISAM, which knows no transactions\n.*InnoDB"),
    ):
        output.begin(BEGIN)


def test_each_type_of_postgresql_takes_its_values_and_absent_ones_have_their_default(postgres):
    database = new_database(postgres)
    columns = ", ".join(f"{name} {kind}" for name, (kind, _, _) in VALUES.items())
    database.run(
        "CREATE TYPE mood AS ENUM ('happy')",
        f"CREATE TABLE rides (id SERIAL PRIMARY KEY, {columns}, x TEXT DEFAULT 'unset')",
    )
    with contextlib.closing(SqlOutput(place_at(database.url, schema=None), rows_of())) as output:
        output.begin(BEGIN)
        whole = {name: value for name, (_, value, _) in VALUES.items()}
        rows = [whole, dict.fromkeys(whole), {"s": "only"}, dict(reversed(whole.items()))]
        output.add([output.encode(each)[0] for each in rows], at(1))
        output.commit()
        with pytest.raises(TypeError, match="column c takes 3 characters, not 4"):
            output.encode({"c": "long"})
    read = [name if each is None else each for name, (_, name, each) in VALUES.items()]
    found = database.run(f"SELECT {', '.join(VALUES)}, x FROM rides ORDER BY id")
    assert sorted(map(list, found), key=repr) == sorted(
        [[*read, "unset"]] * 2
        + [[None] * len(read) + ["unset"], ["only"] + [None] * (len(read) - 1) + ["unset"]],
        key=repr,
    )


SCHEMA_OF_ALL = (
    "s string, b boolean, i byte, h short, j int, l long, f float, d double, y binary, t date,"
    " z timestamp, m decimal(38,10), a array<string>, o struct<x long>"
)
ALL = {
    "s": "ä",
    "b": True,
    "i": -128,
    "h": 2**15 - 1,
    "j": 2**31 - 1,
    "l": 2**63 - 1,
    "f": 0.5,
    "d": 0.1,
    "y": b"\0",
    "t": date(2013, 1, 1),
    "z": datetime(2013, 1, 1, tzinfo=UTC),
    "m": Decimal("1.5"),
    "a": ["x"],
    "o": {"x": 1},
}


def test_a_table_is_made_of_the_schema_and_is_found_again(database, owner):
    for token in (1, 2):
        output = owner(token, schema=SCHEMA_OF_ALL)
        assert ("to be created" in output.check()) == (token == 1)
        output.begin(BEGIN)
        output.add([output.encode(ALL)[0], output.encode({})[0]], at(token))
        output.commit()
        assert output.check().startswith("table rides of ")
    assert database.run("SELECT count(*), sum(j), min(s) FROM rides") == [(4, 2**32 - 2, "ä")]


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("schema", "changed", "words"),
    [
        ("n string", {}, "column n is long, not string"),
        ("n long, more string", {}, "no column more"),
        ("text string", {}, "column n needs a value"),
        ("n long NOT NULL", {"is_upsert": True, "key": ("n",)}, "no unique index on exactly n"),
        ("n long", {}, "column n is NOT NULL"),
        (None, {"table": "trips", "creates_table": False}, "table trips of .* does not exist"),
        (None, {"table": "trips"}, "output.create"),
    ],
)
def test_a_table_that_cannot_take_the_rows_is_refused_in_words(
    database, owner, schema, changed, words
):
    database.run("CREATE TABLE rides (n BIGINT NOT NULL, text TEXT)")
    output = owner(schema=schema, **changed)
    with pytest.raises(SettingsError, match=words):
        output.begin(BEGIN)
    if changed == {"table": "trips"}:
        assert "to be created" in output.check()
    else:
        with pytest.raises(SettingsError, match=words):
            output.check()


@pytest.mark.parametrize("change", ["DROP TABLE rides", "ALTER TABLE rides DROP COLUMN text"])
def test_a_table_that_changes_under_its_writer_halts_it_in_words_and_keeps_its_rows(
    database, owner, change
):
    output = owner()
    output.begin(BEGIN)
    add(output, 1, 2)
    database.run(change)
    with pytest.raises(SettingsError, match=r"(?s)table rides .*Are table, columns and the user's"):
        output.commit()
    restored = {"DROP TABLE rides": "CREATE TABLE rides (n BIGINT NOT NULL, text TEXT)"}
    database.run(restored.get(change, "ALTER TABLE rides ADD COLUMN text TEXT"))
    assert output.commit() == at(2)
    assert database.numbers() == [1, 2]


def test_an_upsert_keeps_the_last_row_of_each_key_and_what_the_others_do_not_mention(
    database, owner
):
    database.run("CREATE TABLE rides (n BIGINT PRIMARY KEY, text TEXT, more TEXT)")
    output = owner(schema=None, is_upsert=True, key=("n",))
    output.begin(BEGIN)
    given = [
        {"n": 1, "text": "a", "more": "kept"},
        {"n": 1, "text": "b"},
        {"n": 2, "text": "c"},
        {"n": 1, "text": "d"},
        {"n": 3},
    ]
    output.add([output.encode(each)[0] for each in given], at(1))
    output.commit()
    output.add([output.encode({"text": "e", "n": 3})[0], output.encode({"n": 2})[0]], at(2))
    output.commit()

    assert sorted(database.run("SELECT n, text, more FROM rides")) == [
        (1, "d", "kept"),
        (2, "c", None),
        (3, "e", None),
    ]
    with pytest.raises(TypeError, match="column n needs a value"):
        output.encode({"text": "x"})


@pytest.mark.parametrize(("kind", "keys"), [("citext", ("Zoo", "zoo")), ("char(4)", ("a", "a "))])
def test_keys_that_only_the_table_takes_as_equal_keep_their_last_row(postgres, kind, keys):
    database = new_database(postgres)
    extension = ["CREATE EXTENSION citext"] if kind == "citext" else []
    database.run(*extension, f"CREATE TABLE rides (k {kind} PRIMARY KEY, n BIGINT)")
    place = place_at(database.url, schema=None, is_upsert=True, key=("k",))
    with contextlib.closing(SqlOutput(place, rows_of())) as output:
        output.begin(BEGIN)
        output.add([output.encode({"k": key, "n": n})[0] for n, key in enumerate(keys)], at(2))
        assert output.commit() == at(2)
    assert database.numbers() == [1]


def test_a_greater_token_is_reported_with_the_table_that_has_it(database, owner):
    owner(9).begin(BEGIN)
    with pytest.raises(
        SettingsError, match=r"token 9, which is above ours, 8(.|\n)*kclrun_cursors"
    ):
        owner(8).begin(BEGIN)
    assert owner(9).begin(BEGIN) == BEGIN


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://user:hunter2@127.0.0.1:1/x",
        "postgresql+psycopg://user@127.0.0.1:1/x?password=hunter2",
        "postgresql+psycopg://user:hunter2@127.0.0.1:1/x?nonsense=1",
        "nonsense://user:hunter2@h/x",
        "oracle+oracledb://user:hunter2@h/x",
        "user:hunter2@h/x",
        "sqlite://",
    ],
)
def test_no_message_and_no_repr_has_the_password(url):
    def use():
        output = SqlOutput(place_at(url), rows_of())
        assert "hunter2" not in repr(output)
        output.check()

    with pytest.raises((SettingsError, SinkError)) as refused:
        use()
    text = "".join(map(str, (refused.value, refused.value.__cause__)))
    assert "hunter2" not in text
    assert refused.value.__suppress_context__ or refused.value.__context__ is None


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgres://me@h/x", "no database postgres\nWrite postgresql\\+psycopg://"),
        ("mysql+nothing://me@h/x", "no database mysql.nothing\nWrite "),
        ("oracle+oracledb://me@h/x", "driver of oracle.oracledb is not installed\nTo go on:  inst"),
        ("postgresql+pg8000://me@h/x", "pip install 'psycopg.binary.', and write postgresql.psy"),
        ("sqlite://", "rows in memory are not durable"),
        ("me@h/x", "expected SQLAlchemy's URL"),
    ],
)
def test_a_url_that_names_no_database_says_what_to_write(url, words):
    with pytest.raises(SettingsError, match=words) as refused:
        SqlOutput(place_at(url, name="late"), rows_of())
    assert str(refused.value).startswith("outputs.late.sql: ")


def test_a_file_that_is_no_database_or_has_no_place_or_is_locked_says_so(tmp_path):
    (tmp_path / "text").write_text("not a database, as it is " * 99)
    locked = sqlite3.connect(tmp_path / "locked", isolation_level="EXCLUSIVE")
    locked.execute("CREATE TABLE rides (n INTEGER NOT NULL, text TEXT)")
    locked.commit()
    locked.execute("BEGIN EXCLUSIVE")
    for name, kind, words in (
        ("text", SettingsError, "is not a database of SQLite"),
        ("no/folder", SinkError, r"\(SQLITE_CANTOPEN\): is its folder there"),
        ("locked?timeout=0", SinkError, r"\(SQLITE_BUSY\): another process has the file locked"),
    ):
        with contextlib.closing(
            SqlOutput(place_at(f"sqlite:///{tmp_path}/{name}"), rows_of())
        ) as output:
            with pytest.raises(kind, match=words):
                output.check()
            with pytest.raises(kind, match=words):
                output.begin(BEGIN)
    locked.close()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("53100", "the disk of the server is full"),
        ("53300", "no connection, free"),
        ("57P01", "going down"),
        ("40P01", "another transaction"),
        ("SQLITE_FULL", "the disk is full"),
        ("SQLITE_IOERR_WRITE", "the disk failed"),
        (1114, "the disk of the server is full"),
        (4025, ""),  # a CHECK of MariaDB, and not class 40 of PostgreSQL
        (None, ""),
    ],
)
def test_a_code_of_a_database_has_a_meaning_in_words(code, words):
    assert words in meaning_of(code)
    assert bool(words) == bool(meaning_of(code))


def test_a_full_disk_is_reported_and_costs_no_row_and_doubles_none(tmp_path):
    """SQLite's own limit of pages is its full disk."""
    url = f"sqlite:///{tmp_path / 'rows.db'}"
    with contextlib.closing(SqlOutput(place_at(url), rows_of())) as output:
        output.begin(BEGIN)
        # The only one: its limit holds for the commit.
        connection = output._database.engine.connect()
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
        connection.close()
        add(output, 1, 900)
        for _ in range(2):
            with pytest.raises(SinkError, match=r"rows.db: Op.*\(SQLITE_FULL\): the disk is full"):
                output.commit()
        connection = output._database.engine.connect()
        connection.exec_driver_sql("PRAGMA max_page_count = 10000")
        connection.close()
        assert output.commit() == at(900)
    assert Database(url).numbers() == list(range(1, 901))


@pytest.mark.parametrize(
    ("kind", "login", "words"),
    [
        ("postgres", "locked:hunter2", "password authentication failed"),
        ("postgres", "locked", "no password supplied"),
        ("postgres", "absent", r'role "absent" does not exist'),
        ("mariadb", "locked:hunter2", "Access denied for user"),
    ],
)
def test_a_refused_login_ends_a_check_at_once_and_only_makes_an_owner_wait(
    request, kind, login, words
):
    server = request.getfixturevalue(kind)
    url = sa.make_url(server.url)
    as_admin = Database(server.url)
    if kind == "postgres":
        rules = Path(url.query["host"]) / "data" / "pg_hba.conf"
        rules.write_text(f"local all locked scram-sha-256\n{rules.read_text()}")
        as_admin.run("DROP ROLE IF EXISTS locked", "CREATE ROLE locked LOGIN PASSWORD 'right'")
        as_admin.run("SELECT pg_reload_conf()")
    else:
        as_admin.run("CREATE USER IF NOT EXISTS locked IDENTIFIED BY 'right'")
    name, _, password = login.partition(":")
    reported = url.set(username=name, password=password or None)
    place = place_at(reported.render_as_string(hide_password=False), name="late")
    with contextlib.closing(SqlOutput(place, rows_of())) as output:
        with pytest.raises(SettingsError, match=f"(?s)^outputs.late.sql: .*{words}") as refused:
            output.check()
        assert "hunter2" not in str(refused.value)
        with pytest.raises(SinkError):
            output.begin(BEGIN)
