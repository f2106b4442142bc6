import contextlib
import sqlite3

import pytest

from kclrun.testing import assert_output_contract
from processors.sqlite_rows import SqliteRows

COLUMNS = ["rider", "miles"]
ROWS = [{"rider": f"r{number}", "miles": number} for number in range(7)]


class Database:
    """A file of SQLite with the table of the rows."""

    def __init__(self, folder):
        self.path = folder / "rides.db"
        self.fresh()

    @property
    def options(self):
        return {"database": str(self.path), "table": "rides", "columns": COLUMNS}

    def fresh(self):
        self.path.unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(self.path)) as db, db:
            db.execute("CREATE TABLE rides (rider UNIQUE NOT NULL, miles INTEGER)")

    def rows(self):
        with contextlib.closing(sqlite3.connect(self.path)) as db:
            found = db.execute("SELECT rider, miles FROM rides ORDER BY rowid").fetchall()
        return [dict(zip(COLUMNS, row, strict=True)) for row in found]


@pytest.fixture
def database(tmp_path):
    return Database(tmp_path)


@pytest.mark.seconds
def test_it_keeps_every_promise_of_an_output_that_has_each_row_exactly_once(database):
    assert_output_contract(
        SqliteRows,
        options=database.options,
        rows=ROWS,
        read=database.rows,
        fresh=database.fresh,
        refused={"rider": None, "miles": 1},
    )
