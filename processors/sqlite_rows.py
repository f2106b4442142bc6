"""Rows into a table of SQLite, each exactly once: the cursor is stored in the same transaction.

output:
  use: processors.sqlite_rows:SqliteRows
  options: {database: /var/lib/rides.db, table: rides, columns: [rider, miles]}
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kclrun import Output, OutputContext
from kclrun.errors import RowsRefused, Superseded

__all__ = ["SqliteOptions", "SqliteRows"]


class SqliteOptions(msgspec.Struct, frozen=True):
    """The file of the database, and the table with its columns, which exists."""

    database: str
    table: str
    columns: tuple[str, ...]


class SqliteRows(Output):
    """Inserts rows into a table, and stores the cursor of each shard in the table `cursors`."""

    options_as = SqliteOptions

    def open(self, context: OutputContext[SqliteOptions]) -> None:
        self._options = options = context.options
        self._key, self._token = context.key, context.fencing_token
        # Calls come one at a time, but not on one thread. A call waits 5 s for a lock.
        self._db = sqlite3.connect(options.database, timeout=5.0, check_same_thread=False)
        columns = ", ".join(f'"{name}"' for name in options.columns)
        marks = ", ".join("?" for _ in options.columns)
        self._insert = f'INSERT INTO "{options.table}" ({columns}) VALUES ({marks})'  # noqa: S608 - names of the settings

    def begin(self) -> str | None:
        with self._db:  # one transaction
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS cursors (key PRIMARY KEY, cursor, token NOT NULL)"
            )
            self._db.execute(
                "INSERT INTO cursors VALUES (?, NULL, ?) ON CONFLICT (key)"
                " DO UPDATE SET token = excluded.token WHERE token < excluded.token",
                (self._key, self._token),
            )
            cursor, token = self._stored()
        if token != self._token:
            raise Superseded(f"a later owner has the token {token}, and ours is {self._token}")
        return cursor

    def commit(self, rows: Sequence[Mapping[str, Any]], after: str | None, upto: str) -> None:
        with self._db:  # one transaction: an error in it leaves nothing behind
            moved = self._db.execute(
                "UPDATE cursors SET cursor = ? WHERE key = ? AND token = ? AND cursor IS ?",
                (upto, self._key, self._token, after),
            )
            if moved.rowcount == 1:
                self._insert_all(rows)
            elif self._stored() != (upto, self._token):
                raise Superseded("another owner moved the cursor")

    def check_row(self, row: Mapping[str, Any]) -> None:
        if unknown := sorted(row.keys() - set(self._options.columns)):
            raise TypeError(f"{unknown[0]} is not a column of {self._options.table}")

    def try_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        try:
            self._insert_all(rows)
        finally:
            self._db.rollback()

    def check(self) -> str:
        nothing = ", ".join("NULL" for _ in self._options.columns)
        self._db.execute(f"{self._insert.partition(' VALUES')[0]} SELECT {nothing} WHERE 0")
        self._db.rollback()
        return f"table {self._options.table} of {self._options.database}"

    def close(self) -> None:
        self._db.close()

    def _insert_all(self, rows: Sequence[Mapping[str, Any]]) -> None:
        try:
            values = [[row.get(name) for name in self._options.columns] for row in rows]
            self._db.executemany(self._insert, values)
        except sqlite3.IntegrityError as error:
            raise RowsRefused(str(error)) from None  # names the column, and no value

    def _stored(self) -> tuple[str | None, int]:
        found = "SELECT cursor, token FROM cursors WHERE key = ?"
        cursor, token = self._db.execute(found, (self._key,)).fetchone()
        return cursor, token
