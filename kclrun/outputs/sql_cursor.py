"""The cursor of a shard in a database: how far its rows are there, and whose they are.

A cursor is a row in a table of kclrun, `kclrun_cursors`, beside the tables of the outputs. This
module does not know rows of outputs.
"""

from __future__ import annotations

import contextlib
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from kclrun import errors
from kclrun.model.output import Cursor, OutputDestination, RowsOf
from kclrun.outputs import sql_tables
from kclrun.outputs.sql_database import SqlDatabase


class SqlCursor:
    """The cursor of one shard, for one output and one owner of the lease.

    `position` is its text, as the last transaction of this owner left it: where a former commit
    ended. `version` is that of the state, if this output decides the commits of an outbox.
    """

    def __init__(
        self, database: SqlDatabase, place: OutputDestination, of: RowsOf, table: str
    ) -> None:
        self._database = database
        self._place = place
        self._of = of
        *schema, _ = place.table.rsplit(".", 1)
        self._cursors = sql_tables.cursor_table(table, schema[0] if schema else None)
        self._is_ours = sa.and_(*(self._cursors.c[name] == value for name, value in self._key()))
        self.position = ""
        self.version = ""

    def make_table(self) -> None:
        with self._database.engine.connect() as connection:
            inspector = sa.inspect(connection)
            if inspector.has_table(self._cursors.name, schema=self._cursors.schema):
                return
        self._database.create(lambda connection: self._cursors.create(connection, checkfirst=True))

    def install(self, at: Cursor) -> Cursor:
        """Install the token of this owner, then read the position [K11]; a shard without a cursor
        begins at `at`. Raises: SettingsError for a token above ours."""
        self._make_row(at)
        with self._database.transaction() as connection:
            mine = self._cursors.c.token <= self._of.token
            taken = connection.execute(
                self._cursors.update().where(self._is_ours, mine).values(token=self._of.token)
            )
            row = connection.execute(self._read()).one()
            if taken.rowcount != 1:
                raise errors.SettingsError(
                    f"{self._database.name}: shard {self._of.shard_id} was taken over there with"
                    f" the token {row.token}, which is above ours, {self._of.token}\n"
                    "Either another process owns the lease by now, or the lease table is older"
                    " than this database: it was created again, or restored from a backup.\n"
                    f"In that case set the column token in {self._cursors.fullname} to 0 for"
                    f" {self._of.application}, {self._of.stream}"
                )
        there = self._parsed(row.position)
        self.position, self.version = row.position, row.version or ""
        return there

    def move(self, connection: sa.Connection, upto: str, version: str | None) -> bool:
        """Move it from `position` to `upto`, in a transaction that then writes the rows [K7].

        False: an earlier send of the same transaction was applied, with its rows [K6]. Raises:
        Superseded.
        """
        moved = connection.execute(
            self._cursors.update()
            .where(
                self._is_ours,
                self._cursors.c.token == self._of.token,
                self._cursors.c.position == self.position,
            )
            .values(position=upto, version=version)
        )
        if moved.rowcount == 1:
            return True
        row = connection.execute(self._read()).first()
        # Only our own earlier send can have left our token with this position [K6].
        if row is None or (row.token, row.position) != (self._of.token, upto):
            raise self._superseded()
        return False

    def hold(self, connection: sa.Connection) -> str:
        """Lock its row until the end of the transaction. Returns: the position there. Raises:
        Superseded."""
        same = self._cursors.update().values(token=self._cursors.c.token)
        held = connection.execute(
            same.where(self._is_ours, self._cursors.c.token == self._of.token)
        )
        if held.rowcount != 1:
            raise self._superseded()
        position: str = connection.execute(self._read()).one().position
        return position

    def check(self, connection: sa.Connection) -> None:
        """Whether cursors may be moved, if there is their table."""
        if sa.inspect(connection).has_table(self._cursors.name, schema=self._cursors.schema):
            nothing = self._cursors.update().where(sa.false()).values(position="")
            connection.execute(nothing)

    def _key(self) -> list[tuple[str, Any]]:
        """A stream that was created again under its name has cursors of its own [K4, R5]."""
        shard, letter = self._of.shard_id, self._of.letter
        return [
            ("application", self._of.application),
            ("stream", self._of.stream),
            ("stream_created_ms", round(self._of.stream_created_at * 1000)),
            # The redrive of a letter has a cursor of its own, which stays [K20].
            ("shard", shard if letter is None else f"{shard}/{Cursor(letter)}"),
            ("generation", self._of.generation),
            ("output", self._place.name),
        ]

    def _read(self) -> sa.Select[Any]:
        columns = (self._cursors.c[name] for name in ("token", "position", "version"))
        return sa.select(*columns).where(self._is_ours)

    def _make_row(self, at: Cursor) -> None:
        values = dict(self._key(), token=self._of.token, position=str(at))
        with self._database.engine.connect() as connection:
            if connection.execute(self._read()).first() is not None:
                return
        with contextlib.suppress(exc.IntegrityError), self._database.transaction() as connection:
            # Another owner may have inserted it meanwhile.
            connection.execute(self._cursors.insert().values(values))

    def _superseded(self) -> errors.Superseded:
        return errors.Superseded(
            f"{self._database.name}: another owner moved the cursor of {self._of.shard_id}"
        )

    def _parsed(self, position: str) -> Cursor:
        try:
            return Cursor.parse(position)
        except errors.LimitExceeded:
            raise errors.SettingsError(
                f"{self._database.name}: the position in {self._cursors.fullname} is not a cursor"
                " of kclrun"
            ) from None
