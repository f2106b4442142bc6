"""The values of SQL outputs: what a column cannot take is refused at the row and names it; no value
is changed on its way; and what only the database refuses is found in a trial, which keeps nothing.
"""

import contextlib
import datetime as dt
import itertools
import random
import re
from decimal import Decimal
from uuid import UUID

import pytest
import sqlalchemy as sa

from kclrun.errors import RowsRefused
from kclrun.outputs.sql import SqlOutput
from tests.contract.test_sql_output import Database, new_database
from tests.support.sql_owners import BEGIN, at, place_at, rows_of

TABLES = itertools.count()
NAN, INFINITY = float("nan"), float("inf")
EAST = dt.timezone(dt.timedelta(hours=5))


@pytest.fixture(scope="module")
def prepared(postgres):
    database = new_database(postgres)
    database.run(
        "CREATE TYPE mood AS ENUM ('happy', 'so so')",
        "CREATE DOMAIN code AS varchar(3) CHECK (VALUE <> 'no')",
        "CREATE DOMAIN positive AS int CHECK (VALUE > 0)",
        "CREATE DOMAIN price AS numeric(5,2)",
        "CREATE SCHEMA apart",
        "CREATE DOMAIN apart.positive AS int CHECK (VALUE > 0)",
        'CREATE DOMAIN "Positive" AS int CHECK (VALUE > 0)',
        "CREATE DOMAIN moment AS timestamp(0)",
        "CREATE TYPE pair AS (a int, b int)",
        "CREATE EXTENSION citext",
        "CREATE EXTENSION hstore",
    )
    return database


@contextlib.contextmanager
def opened(database, columns, **changed):
    """An output of a new table with these columns, and the name of the table."""
    table = f"t{next(TABLES)}"
    database.run(f"CREATE TABLE {table} ({columns})")
    place = place_at(database.url, schema=None, table=table, **changed)
    with contextlib.closing(SqlOutput(place, rows_of(application=table))) as output:
        output.begin(BEGIN)
        yield output, table


def taken(database, refused):
    """The values, by type, that a row was not refused for, or by a text that does not name the
    column or shows the value."""
    columns = {f"v{number}": kind for number, kind in enumerate(refused)}
    found = []
    with opened(database, ", ".join(map(" ".join, columns.items()))) as (output, _):
        for name, kind in columns.items():
            for value in refused[kind]:
                words = refusal(output, name, value)
                is_shown = re.search(rf"(?<![-\d]){re.escape(str(value))}(?!\d)", words)
                if f"column {name}" not in words or (is_shown and len(str(value)) > 2):
                    found.append((kind, value, words))
    return found


def refusal(output, name, value):
    try:
        output.encode({name: value})
    except TypeError as error:
        return str(error)
    return "taken"


REFUSED = {
    "uuid": ["5", "not-a-uuid", 5, ""],
    "mood": ["sad", "Happy", 1],
    "code": ["abcd", 5],
    "code[]": [["abcd"]],
    "price": [Decimal("1.005"), 1000],
    "price[]": [[Decimal("1.005")]],
    "moment": [dt.datetime(2020, 1, 1, microsecond=1)],
    "inet": ["10.0.0.300", "10.0.0", "fe80::1%eth0", 5],
    "cidr": ["10.0.0.1/8", "x"],
    "macaddr": ["08:00:2b:01:02", "08:00:2b:01:02:0g", "08-00:2b:01:02:03", 5],
    "macaddr8": ["08:00:2b:01:02:03:04"],
    "time": ["25:00", 5, dt.time(1, tzinfo=EAST), "01:02:03.1234567"],
    "time(0)": [dt.time(1, 2, 3, 500_000)],
    "interval": ["soon", "1 fortnight", "P", 5, "1.1234567 seconds"],
    "interval(0)": [dt.timedelta(microseconds=1)],
    "interval day": [dt.timedelta(seconds=1)],
    "jsonb": [{"a": "x\0y"}, {"a\0b": 1}, {"a": [NAN]}, {"a": INFINITY}, {1: 2, "1": 3}, "\ud800"],
    "json": [{"a": -INFINITY}],
    "text": ["a\0b", "\ud800", 5],
    "varchar(3)": ["abcd", "abc "],
    "char(3)": ["abcd"],
    "name": ["x" * 64],
    '"char"': ["ab"],
    "varchar(3)[]": [["abcdef"], [["abcdef"]], "abc", [5]],
    "char(3)[]": [["abcd"]],
    "text[]": [["a\0b"], ["\ud800"]],
    "int[]": [["x"], [2**31], [[1, 2], [3]], [[]], [1.0]],
    "numeric(5,2)[]": [[Decimal("1.005")], [1000]],
    "uuid[]": [["x"]],
    "mood[]": [["sad"]],
    "timestamp(0)[]": [[dt.datetime(2020, 1, 1, microsecond=1)]],
    "numeric(5,2)": [Decimal("1.005"), 999.999, 1000, NAN],
    "numeric(50,2)": [Decimal("1.005")],
    "numeric(3,-2)": [150, Decimal("1e9")],
    "numeric": ["1", True, Decimal("1e-20000"), Decimal("1e200000")],
    "real": [1e39, 1e-50, 0.123456789, 16_777_217],
    "double precision": [10**400, 2**53 + 1, "1"],
    "timestamptz": ["2020-01-01T00:00:00.123456789Z", "infinity", 5],
    "timestamptz(3)": [dt.datetime(2020, 1, 1, microsecond=1)],
    "timestamp(0)": [dt.datetime(2020, 1, 1, microsecond=1)],
    "date": [dt.datetime(2020, 1, 1), "2020-02-30"],
    "bit(3)": ["10", "1010", "abc", 5],
    "varbit(3)": ["1010"],
    "money": ["1.005", "x", True],
    "bytea": ["text"],
    "int generated always as identity": [1],
    "int generated always as (1) stored": [1],
    "hstore": [{"a": 1}, 5],
}


def test_a_value_that_a_type_of_postgresql_does_not_take_is_refused_at_the_row_with_its_column(
    prepared,
):
    assert taken(prepared, REFUSED) == []


# What is read, as a text, where it is not the value that was given.
STORED = {
    "uuid": [(UUID(int=5), None), ("{" + str(UUID(int=5)) + "}", str(UUID(int=5)))],
    "mood": [("so so", None)],
    "code": [("abc", None)],
    "positive": [(5, None)],
    "inet": [("10.0.0.1", "10.0.0.1/32"), ("::1", "::1/128"), ("10.0.0.5/8", "10.0.0.5/8")],
    "cidr": [("10.0.0.0/255.0.0.0", "10.0.0.0/8")],
    "macaddr": [("0800.2b01.0203", "08:00:2b:01:02:03")],
    "macaddr8": [("08:00:2b:01:02:03:04:05", None)],
    "time": [(dt.time(1, 2, 3, 456), None), ("01:02", "01:02:00")],
    "timetz": [(dt.time(1, tzinfo=EAST), "01:00:00+05"), (dt.time(1), "01:00:00+00")],
    "interval": [
        (dt.timedelta(days=-1, seconds=5, microseconds=6), "-1 days +00:00:05.000006"),
        ("1 year 2 mons 3 days 04:05:06", None),
        ("P1Y2M3DT4H5M6S", "1 year 2 mons 3 days 04:05:06"),
        ("2 hours ago", "-02:00:00"),
    ],
    "interval day": [(dt.timedelta(days=3), "3 days")],
    "jsonb": [({"a": [1, None, "\\u0000 as text"]}, '{"a": [1, null, "\\\\u0000 as text"]}')],
    "varchar(3)[]": [(["abc", None, "äöü"], "{abc,NULL,äöü}")],
    "int[]": [([], "{}"), ([[1, 2], [3, 4]], "{{1,2},{3,4}}")],
    "bytea[]": [([b"\0\xff"], '{"\\\\x00ff"}')],
    "boolean[]": [([True, False], "{t,f}")],
    "timestamptz[]": [([dt.datetime(2020, 1, 1, tzinfo=EAST)], '{"2019-12-31 19:00:00+00"}')],
    "numeric(5,2)[]": [([1.5, Decimal("0.25")], "{1.50,0.25}")],
    "uuid[]": [([UUID(int=5)], "{" + str(UUID(int=5)) + "}")],
    "mood[]": [(["so so"], '{"so so"}')],
    "numeric(50,2)": [(Decimal("1.5"), "1.50")],
    "numeric(3,-2)": [(100, "100")],
    "numeric": [(Decimal("1.10"), "1.10"), (NAN, "NaN"), (INFINITY, "Infinity")],
    "real": [(0.1, "0.1"), (16_777_216, "1.6777216e+07"), (NAN, "NaN"), (3.4e38, "3.4e+38")],
    "timestamptz(3)": [(dt.datetime(2020, 1, 1, microsecond=1000), "2020-01-01 00:00:00.001+00")],
    "bit(3)": [("101", None)],
    "money": [("1.50", "$1.50")],
    "hstore": [({"a": "b", "c": None}, '"a"=>"b", "c"=>NULL')],
    "pair": [("(1,2)", None)],
    "point": [("(1,2)", None)],
    "int4range": [("[1,5)", None)],
    "xml": [("<a/>", None)],
    "tsvector": [("'a' 'b'", None)],
}


def test_a_value_is_read_from_postgresql_as_it_was_given(prepared):
    columns = {f"v{number}": kind for number, kind in enumerate(STORED)}
    given = [(name, *pair) for name, kind in columns.items() for pair in STORED[kind]]
    with opened(prepared, ", ".join(["n int", *map(" ".join, columns.items())])) as (output, table):
        rows = [{"n": n, name: value} for n, (name, value, _) in enumerate(given)]
        output.add([output.encode(row)[0] for row in rows], at(1))
        output.commit()
        prepared.run("SET timezone = 'UTC'")
        found = [
            prepared.run(f"SELECT {name}::text FROM {table} WHERE n = {n}")
            for n, (name, _, _) in enumerate(given)
        ]
    wanted = [[(str(value) if text is None else text,)] for _, value, text in given]
    assert found == wanted


REFUSED_BY_MARIADB = {
    "DATETIME": [dt.datetime(2020, 1, 1, microsecond=1)],
    "DATETIME(3)": [dt.datetime(2020, 1, 1, microsecond=1)],
    "TIME": [dt.time(1, 2, 3, 4), "25:00"],
    "TINYINT": [128, "1"],
    "SMALLINT UNSIGNED": [-1, 65_536],
    "INT": [2**31],
    "BIGINT UNSIGNED": [2**64, -1],
    "YEAR": [20, 1800],
    "ENUM('a','b')": ["c", "A", 1],
    "SET('a','b')": ["c", {"a", "c"}],
    "FLOAT": [0.123456789, NAN],
    "DOUBLE": [NAN, INFINITY],
    "DECIMAL(5,2)": [Decimal("1.005"), 1000],
    "DECIMAL(60,2)": [Decimal("1.005")],
    "BINARY(3)": [b"ab", b"abcd"],
    "VARCHAR(3)": ["abcd", "a\0b"],
    "JSON": [{"a": NAN}],
}


def test_a_value_that_mysql_would_refuse_or_change_is_refused_at_the_row(mariadb):
    assert taken(of_mariadb(mariadb), REFUSED_BY_MARIADB) == []


def of_mariadb(server, known=[]):  # noqa: B006 - one database for all of this module
    if not known:
        known.append(new_database(server))
    return known[0]


REFUSED_BY_SQLITE = {
    "NUMERIC": [Decimal("0.1234567890123456789"), NAN, Decimal("NaN"), 2**64 + 1],
    "REAL": [NAN],
    "TIME": ["25:00", 5],
    "JSON": [{"a": NAN}],
    "TIMESTAMP": ["2020-01-01T00:00:00.1234567Z"],
    "TEXT": ["a\0b"],
}


def test_a_value_that_sqlite_would_change_is_refused_at_the_row(tmp_path):
    database = Database(f"sqlite:///{tmp_path / 'rows.db'}")

    assert taken(database, REFUSED_BY_SQLITE) == []


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def database(request, tmp_path):
    match request.param:
        case "sqlite":
            return Database(f"sqlite:///{tmp_path / 'rows.db'}")
        case "postgresql":
            return request.getfixturevalue("prepared")
    return of_mariadb(request.getfixturevalue("mariadb"))


@pytest.mark.parametrize(
    ("columns", "value", "named"),
    [
        ("n BIGINT, v BIGINT, CONSTRAINT small_v CHECK (v < 100)", 100, "small_v"),
        ("n BIGINT, v BIGINT, UNIQUE (v)", 1, ""),
        ("n BIGINT PRIMARY KEY, v BIGINT, FOREIGN KEY (v) REFERENCES {table}(n)", 77, ""),
    ],
)
def test_a_row_that_a_constraint_refuses_is_found_in_a_trial_which_keeps_nothing(
    database, columns, value, named
):
    if database.url.startswith("sqlite") and "FOREIGN" in columns:
        pytest.skip("SQLite does not look at foreign keys unless a connection asks for it")
    with opened(database, columns.format(table=f"t{next(TABLES) + 1}")) as (output, table):
        rows = [output.encode({"n": n, "v": v})[0] for n, v in ((1, 1), (2, value), (3, None))]
        output.add(rows[:1], at(1))
        output.commit()
        output.add(rows[2:], at(3))

        output.try_rows([output.encode({"n": 9, "v": None})[0]], [(output, ())])
        with pytest.raises(TypeError, match=r"refuses the row.*column v") as refused:
            output.try_rows(rows[1:2], [(output, ())])
        assert named in str(refused.value)
        # A row that waits is part of the trial, and not the fault of the next row.
        with pytest.raises(RowsRefused, match="column v"):
            output.try_rows([output.encode({"n": 8, "v": None})[0]], [(output, rows[1:2])])

        assert output.commit() == at(3)
        output.add(rows[1:2], at(4))
        with pytest.raises(RowsRefused, match=r"(?s)column v.*refuses a row for good"):
            output.commit()
        assert database.run(f"SELECT n FROM {table} ORDER BY n") == [(1,), (3,)]


def test_what_only_postgresql_can_read_is_refused_in_a_trial_with_its_column(prepared):
    with opened(prepared, "n int, v xml, p positive, r int4range") as (output, _):
        for name, value in (("v", "<a>"), ("p", -5), ("r", "[5,1)")):
            row = output.encode({"n": 1, name: value})[0]
            with pytest.raises(TypeError, match=f"column {name}"):
                output.try_rows([row], [(output, ())])


NAMED = {
    "p apart.positive": -5,
    'p "Positive"': -5,
    "p positive[]": [5, -5],
    "p apart.positive[]": [5, -5],
    "p point": "here",
}


@pytest.mark.parametrize("column", NAMED)
def test_a_refusal_of_a_type_names_the_columns_of_this_type_and_no_other(prepared, column):
    with opened(prepared, f"n int, x lseg, {column}, y money") as (output, _):
        row = output.encode({"n": 1, "x": "((0,0),(1,1))", "p": NAMED[column], "y": 5})[0]
        with pytest.raises(TypeError) as refused:
            output.try_rows([row], [(output, ())])
    assert re.findall(r"column \w+", str(refused.value)) == ["column p"]


def test_a_trial_of_a_commit_that_was_applied_and_not_answered_has_its_rows_once(database):
    with opened(database, "n BIGINT PRIMARY KEY") as (output, _):
        output.add([output.encode({"n": 1})[0]], at(1))
        output._sent, output._added = output._added, None
        began = output._cursor.position
        output._write(output._sent)
        output._cursor.position = began
        output.try_rows([output.encode({"n": 2})[0]], [(output, ())])
        with pytest.raises(TypeError, match="column n"):
            output.try_rows([output.encode({"n": 1})[0]], [(output, ())])


def test_rows_of_an_output_before_are_there_for_a_foreign_key_in_a_trial(prepared):
    prepared.run("CREATE TABLE parents (n int PRIMARY KEY)")
    with opened(prepared, "n int REFERENCES parents") as (child, _):
        place = place_at(prepared.url, schema=None, table="parents")
        with contextlib.closing(SqlOutput(place, rows_of(application="parents"))) as parent:
            parent.begin(BEGIN)
            before = [(parent, [parent.encode({"n": 1})[0]]), (child, ())]
            assert (child.is_tried_with(parent), parent.is_tried_with(child)) == (True, True)
            child.try_rows([child.encode({"n": 1})[0]], before)
            with pytest.raises(TypeError, match="column n"):
                child.try_rows([child.encode({"n": 2})[0]], before)


KEYS = {
    "citext": ["Zoo", "zoo", "ZOO", "b"],
    "numeric": [Decimal(1), Decimal("1.0"), Decimal("1.00"), Decimal(2)],
    "double precision": [0.0, -0.0, 1.0, NAN],
    "char(4)": ["a", "a ", "a  ", "b"],
    "timestamptz": [
        dt.datetime(2020, 1, 1, tzinfo=dt.UTC),
        dt.datetime(2020, 1, 1, 5, tzinfo=EAST),
        dt.datetime(2020, 1, 2, tzinfo=dt.UTC),
    ],
    "text": ["a", "A", "a ", None],
}


SEEDS = pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))]
)


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("has_other_key", [False, True])
@SEEDS
def test_the_table_of_an_upsert_is_the_same_however_the_rows_are_cut_into_commits(
    prepared, kind, has_other_key, seed
):
    other = ", UNIQUE (n)" if has_other_key else ""
    cut_alike(prepared, f"k {kind} UNIQUE, n BIGINT{other}", KEYS[kind], seed)


@SEEDS
def test_so_it_is_in_mysql_whose_texts_ignore_case_and_in_sqlite(database, seed):
    is_sqlite = database.url.startswith("sqlite")
    kind = "TEXT COLLATE NOCASE" if is_sqlite else "VARCHAR(9)"
    cut_alike(database, f"k {kind} UNIQUE, n BIGINT", ["Zoo", "zoo", "ZOO", "b"], seed)


def cut_alike(database, columns, keys, seed):
    chance = random.Random(seed)
    given = [(chance.choice(keys), n) for n in range(30)]
    tables = []
    for most in (1, 7, 30):
        with opened(database, columns, is_upsert=True, key=("k",)) as (output, table):
            done = 0
            while done < len(given):
                upto = min(len(given), done + (most if most != 7 else chance.randint(1, 7)))
                rows = [output.encode({"k": k, "n": n})[0] for k, n in given[done:upto]]
                output.add(rows, at(upto))
                assert output.commit() == at(upto)
                done = upto
            tables.append(sorted(map(repr, database.run(f"SELECT k, n FROM {table}"))))
    assert tables[1:] == tables[:1] * 2


def test_a_connection_to_mysql_lives_through_the_pause_between_two_commits(mariadb):
    """The limit for a client that is silent within a transaction ends with the transaction."""
    with opened(of_mariadb(mariadb), "n BIGINT") as (output, _):
        output.add([output.encode({"n": 1})[0]], at(1))
        output.commit()
        with output._database.engine.connect() as connection:
            ask = sa.text("SELECT @@SESSION.wait_timeout, @@GLOBAL.wait_timeout")
            now, usual = connection.execute(ask).one()
    assert now == usual
