"""Rows of a shard into a table of a database, each exactly once: SQLAlchemy Core, extra `sql`.

The cursor of each shard is in a table of kclrun in the same database. A commit is one transaction
that moves the cursor and writes the rows [K7]. This module does not know leases or AWS. A process
without an SQL output does not import it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import sqlalchemy as sa
from sqlalchemy import exc

from kclrun import errors
from kclrun.model.output import Cursor, OutputDestination, RowsOf
from kclrun.outputs import sql_refusals, sql_tables
from kclrun.outputs.sql_cursor import SqlCursor
from kclrun.outputs.sql_database import SqlDatabase
from kclrun.ports import Output
from kclrun.processor import Row

# PostgreSQL: an upsert has two rows of one key. Keys that differ here may be one to the table: of
# citext, of numeric.
_KEY_TWICE: Final = "21000"
# Different orders of columns that are remembered: a program may make column names from data.
_ORDERS_MAX: Final = 1_000
# The size of a row without its texts: its tuple and its numbers.
_ROW_BYTES: Final = 64


class _Batch(msgspec.Struct):
    """Rows of one transaction. Once it was sent, it stays as it is until its outcome is known
    [K6]."""

    rows: list[sql_tables.Encoded]
    upto: Cursor
    unsent_bytes: int = 0
    version: str | None = None  # of the state, if this output decides the commits of an outbox


class SqlOutput:
    """Implements `ports.Output`: one table, for one shard and one owner of its lease.

    `begin` installs the token of this owner; from then on no transaction of a former owner finds
    its token in the cursor's row [V2]. A commit requires the token and the position at which the
    former commit ended, so that the same transaction cannot apply twice [V1]. A commit whose
    outcome is unknown is sent again with the same rows and the same condition, whatever was added
    since; if it had been applied, the cursor says so.

    Errors name the table, a column or a constraint; never a value, and never the password.
    """

    stores_cursor: bool = True

    def __init__(
        self, place: OutputDestination, of: RowsOf, *, cursors: str = "kclrun_cursors"
    ) -> None:
        self._database = SqlDatabase(place)
        self._cursor = SqlCursor(self._database, place, of, cursors)
        self._shapes: dict[tuple[str, ...], sql_tables.Shape] = {}
        self._sent: _Batch | None = None
        self._added: _Batch | None = None
        self._confirmed: Cursor | None = None
        self.decided = ""  # as `DecidingOutput`

    def __repr__(self) -> str:
        return f"SqlOutput({self._database.name})"

    def encode(self, row: Row) -> tuple[sql_tables.Encoded, int]:
        """As `Output.encode`, for the table that `begin` found."""
        names = tuple(row)
        shape = self._shapes.get(names)
        if shape is None:
            if len(self._shapes) >= _ORDERS_MAX:
                self._shapes.clear()
            shape = self._shapes[names] = self._database.table.shape(names)
        values, text_bytes = shape.values(row)
        size = _ROW_BYTES + text_bytes
        return (shape, values, size), size

    def begin(self, at: Cursor) -> Cursor:
        """As `Output.begin`: installs the token, then reads the cursor [K11]."""
        with self._database.translating("begin at"):
            self._cursor.make_table()
            self._database.open_table()
            there = self._cursor.install(at)
        self.decided = self._cursor.version
        self._confirmed = max(at, there)
        return self._confirmed

    def add(self, rows: Sequence[sql_tables.Encoded], upto: Cursor) -> None:
        """As `Output.add`; nothing is sent here."""
        if self._added is None:
            self._added = _Batch([], upto)
        self._added.rows.extend(rows)
        self._added.upto = upto
        self._added.unsent_bytes += sum(size for _, _, size in rows)

    def decide(self, version: str, upto: Cursor) -> None:
        self.add([], upto)
        assert self._added is not None, "it was made"
        self._added.version = version

    @property
    def unsent_bytes(self) -> int:
        return sum(part.unsent_bytes for part in (self._sent, self._added) if part is not None)

    def commit(self) -> Cursor:
        """As `Output.commit`. A constraint of the table that a row violates is a SettingsError."""
        assert self._confirmed is not None, "begin comes first"
        while self._sent is not None or self._added is not None:
            if self._sent is None:
                self._sent, self._added = self._added, None
                continue
            # Without rows there is nothing to write exactly once: the cursor may stay.
            if self._sent.rows or self._sent.version:
                with self._database.translating("write to"):
                    self._write(self._sent)
            self._confirmed, self._sent = self._sent.upto, None
        return self._confirmed

    def is_tried_with(self, other: Output) -> bool:
        """Whether both write to one database: a foreign key, or an index of the same table."""
        return isinstance(other, SqlOutput) and self._database.is_same(other._database)  # noqa: SLF001 - of our class

    def try_rows(
        self,
        rows: Sequence[sql_tables.Encoded],
        before: Sequence[tuple[Output, Sequence[sql_tables.Encoded]]],
    ) -> None:
        """Try the rows. Those that other outputs get in the same database are tried, too: a
        foreign key may need them."""
        others = [
            (output, given)
            for output, given in before
            if isinstance(output, SqlOutput) and self.is_tried_with(output)
        ]
        with self._database.translating("write to"):
            try:
                self._try(others, rows)
            except (exc.SQLAlchemyError, UnicodeError, OverflowError) as error:
                if not sql_refusals.is_refusal(error):
                    raise
                self._try(others, ())  # are they refused without these rows?
                words = self._database.words(error)
                raise TypeError(f"{self._database.name} refuses the row: {words}") from None

    def _try(
        self,
        others: Sequence[tuple[SqlOutput, Sequence[sql_tables.Encoded]]],
        rows: Sequence[sql_tables.Encoded],
    ) -> None:
        """Write the rows that wait and these, and roll them back. The row of the cursor is locked
        first: a transaction of ours that is still on its way comes before, or not at all."""

        def write(rows_max: int) -> None:
            with self._database.engine.connect() as connection:
                self._database.limit_waits(connection)
                for output, given in others:
                    for batch in output._unwritten(connection):  # noqa: SLF001 - of our class
                        output._insert(connection, batch.rows, rows_max)  # noqa: SLF001
                    output._insert(connection, given, rows_max)  # noqa: SLF001
                self._insert(connection, rows, rows_max)
                if connection.dialect.name == "postgresql":
                    connection.execute(sa.text("SET CONSTRAINTS ALL IMMEDIATE"))
                connection.rollback()

        self._row_by_row_if_needed(write)

    def _unwritten(self, connection: sa.Connection) -> list[_Batch]:
        """The batches that the table does not have yet. Raises: Superseded."""
        position = self._cursor.hold(connection)
        sent = self._sent if self._sent is None or position == self._cursor.position else None
        return [batch for batch in (sent, self._added) if batch is not None]

    def check(self) -> str:
        """As `Output.check`: columns, and that rows may be inserted and cursors moved."""
        database = self._database
        with database.translating("use"), database.logged_in() as connection:
            table = database.find_table(connection)
            if table is None:
                return f"{database.name}, to be created"
            connection.execute(table.insert_nothing())
            self._cursor.check(connection)
            connection.rollback()
        return database.name

    def close(self) -> None:
        self._database.close()

    def _write(self, batch: _Batch) -> None:
        self._row_by_row_if_needed(lambda rows_max: self._move(batch, rows_max))

    @staticmethod
    def _row_by_row_if_needed(write: Callable[[int], None]) -> None:
        """Write with many rows in a statement; or, if PostgreSQL finds a key twice in one, with
        one row in each, so that the last row of such a key replaces the others."""
        try:
            write(sql_tables.ROWS_A_STATEMENT)
        except exc.ProgrammingError as error:
            if sql_refusals.code_of(error.orig) != _KEY_TWICE:
                raise
            write(1)  # nothing was applied

    def _insert(
        self, connection: sa.Connection, rows: Sequence[sql_tables.Encoded], rows_a_statement: int
    ) -> None:
        for shape, values in self._database.table.statements(rows, rows_a_statement):
            shape.insert(connection, values)

    def _move(self, batch: _Batch, rows_a_statement: int) -> None:
        """One transaction: the cursor from where we began to `upto`, and the rows [K7]."""
        upto = str(batch.upto)
        if upto == self._cursor.position:  # a resend and the first send would look the same
            raise errors.InvariantViolation(f"{self._database.name}: rows at an unchanged position")
        with self._database.transaction() as connection:
            if self._cursor.move(connection, upto, batch.version):
                self._insert(connection, batch.rows, rows_a_statement)
        self._cursor.position = upto
