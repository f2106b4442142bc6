"""Rows of a shard into a table of a database, each exactly once: SQLAlchemy Core, extra `sql`.

The cursor of each shard is in a table of kclrun in the same database. A commit is one transaction
that moves the cursor and writes the rows [K7]. This module does not know leases or AWS. A process
without an SQL output does not import it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import sqlalchemy as sa
from sqlalchemy import exc

from kclrun import errors
from kclrun.model.output import Cursor, OutputDestination, RowsOf, setting_of
from kclrun.model.row_schema import RowSchema
from kclrun.outputs import sql_refusals, sql_tables
from kclrun.ports import Output
from kclrun.processor import Row

# PostgreSQL: an upsert has two rows of one key. Keys that differ here may be one to the table: of
# citext, of numeric.
_KEY_TWICE: Final = "21000"
# Different orders of columns that are remembered: a program may make column names from data.
_ORDERS_MAX: Final = 1_000
# The size of a row without its texts: its tuple and its numbers.
_ROW_BYTES: Final = 64
# A login that is refused: by SQLSTATE, and by MySQL's numbers. When a connection fails, libpq gives
# no SQLSTATE, only the words of the server.
_LOGIN_STATE: Final = "28"
_LOGIN_NUMBERS: Final = frozenset({1044, 1045, 1698})
_LOGIN_WORDS: Final = re.compile(
    r"authentication failed for user|no password supplied|no pg_hba\.conf entry"
    r"|role .* (does not exist|is not permitted to log in)"
)


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
        self._place = place
        self._of = of
        self._engine = sql_tables.open_engine(place)
        self._schema = RowSchema.parse(place.schema) if place.schema else None
        *schema, _ = place.table.rsplit(".", 1)
        self._cursors = sql_tables.cursor_table(cursors, schema[0] if schema else None)
        self._is_ours = sa.and_(*(self._cursors.c[name] == each for name, each in self._key()))
        self._target: sql_tables.Target | None = None
        self._shapes: dict[tuple[str, ...], sql_tables.Shape] = {}
        self._began: str = ""
        self._sent: _Batch | None = None
        self._added: _Batch | None = None
        self._confirmed: Cursor | None = None
        self.decided = ""  # as `DecidingOutput`

    def __repr__(self) -> str:
        return f"SqlOutput({self._name})"

    def encode(self, row: Row) -> tuple[sql_tables.Encoded, int]:
        """As `Output.encode`, for the table that `begin` found."""
        assert self._target is not None, "begin comes first"
        names = tuple(row)
        shape = self._shapes.get(names)
        if shape is None:
            if len(self._shapes) >= _ORDERS_MAX:
                self._shapes.clear()
            shape = self._shapes[names] = self._target.shape(names)
        values, text_bytes = shape.values(row)
        size = _ROW_BYTES + text_bytes
        return (shape, values, size), size

    def begin(self, at: Cursor) -> Cursor:
        """As `Output.begin`: installs the token, then reads the cursor [K11]."""
        with self._translating("begin at"):
            self._make_cursor_table()
            self._target = self._found_target()
            self._make_cursor(at)
            with self._transaction() as connection:
                mine = self._cursors.c.token <= self._of.token
                taken = connection.execute(
                    self._cursors.update().where(self._is_ours, mine).values(token=self._of.token)
                )
                row = connection.execute(self._read()).one()
                if taken.rowcount != 1:
                    raise errors.SettingsError(
                        f"{self._name}: shard {self._of.shard_id} was taken over there with the"
                        f" token {row.token}, which is above ours, {self._of.token}\n"
                        "Either another process owns the lease by now, or the lease table is older"
                        " than this database: it was created again, or restored from a backup.\n"
                        f"In that case set the column token in {self._cursors.fullname} to 0 for"
                        f" {self._of.application}, {self._of.stream}"
                    )
        there = self._parsed(row.position)
        self._began, self.decided = row.position, row.version or ""
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
                with self._translating("write to"):
                    self._write(self._sent)
            self._confirmed, self._sent = self._sent.upto, None
        return self._confirmed

    def is_tried_with(self, other: Output) -> bool:
        """Whether both write to one database: a foreign key, or an index of the same table."""
        here = str(self._engine.url)
        return isinstance(other, SqlOutput) and str(other._engine.url) == here  # noqa: SLF001

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
        with self._translating("write to"):
            try:
                self._try(others, rows)
            except (exc.SQLAlchemyError, UnicodeError, OverflowError) as error:
                if not sql_refusals.is_refusal(error):
                    raise
                self._try(others, ())  # are they refused without these rows?
                raise TypeError(f"{self._name} refuses the row: {self._words(error)}") from None

    def _try(
        self,
        others: Sequence[tuple[SqlOutput, Sequence[sql_tables.Encoded]]],
        rows: Sequence[sql_tables.Encoded],
    ) -> None:
        """Write the rows that wait and these, and roll them back. The row of the cursor is locked
        first: a transaction of ours that is still on its way comes before, or not at all."""

        def write(rows_max: int) -> None:
            with self._engine.connect() as connection:
                self._limit_waits(connection)
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
        cursors = self._cursors
        same = cursors.update().values(token=cursors.c.token)
        held = connection.execute(same.where(self._is_ours, cursors.c.token == self._of.token))
        if held.rowcount != 1:
            raise self._superseded()
        position = connection.execute(self._read()).one().position
        sent = self._sent if self._sent is None or position == self._began else None
        return [batch for batch in (sent, self._added) if batch is not None]

    def check(self) -> str:
        """As `Output.check`: columns, and that rows may be inserted and cursors moved."""
        with self._translating("use"), self._logged_in() as connection:
            target = sql_tables.find_target(connection, self._place, self._schema)
            if target is None:
                if not self._place.creates_table:
                    raise self._missing()
                return f"{self._name}, to be created"
            connection.execute(target.insert_nothing())
            if sa.inspect(connection).has_table(self._cursors.name, schema=self._cursors.schema):
                nothing = self._cursors.update().where(sa.false()).values(position="")
                connection.execute(nothing)
            connection.rollback()
        return self._name

    @contextlib.contextmanager
    def _logged_in(self) -> Iterator[sa.Connection]:
        """A connection, for `check`. Raises: SettingsError if the server refuses the user or the
        password: no repetition helps. An owner of a lease does not use this: it waits with its
        rows."""
        try:
            connection = self._engine.connect()
        except exc.DBAPIError as error:
            code, words = sql_refusals.code_of(error.orig), str(error.orig)
            is_refused = str(code).startswith(_LOGIN_STATE) or code in _LOGIN_NUMBERS
            if not is_refused and not _LOGIN_WORDS.search(words):
                raise
            raise errors.SettingsError(
                f"{setting_of(self._place.name)}.sql: {sql_tables.shown_url(self._engine.url)}"
                f" refuses the user or the password{self._connection_words(error)}\n"
                "Correct them there, or in the variable or the secret that it names"
            ) from None
        with connection:
            yield connection

    def close(self) -> None:
        self._engine.dispose()

    @property
    def _name(self) -> str:
        return f"table {self._place.table} of {sql_tables.shown_url(self._engine.url)}"

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

    def _make_cursor_table(self) -> None:
        with self._engine.connect() as connection:
            inspector = sa.inspect(connection)
            if inspector.has_table(self._cursors.name, schema=self._cursors.schema):
                return
        self._creating(lambda connection: self._cursors.create(connection, checkfirst=True))

    def _found_target(self) -> sql_tables.Target:
        with self._engine.connect() as connection:
            found = sql_tables.find_target(connection, self._place, self._schema)
        if found is None and self._place.creates_table and self._schema is not None:
            schema = self._schema
            self._creating(
                lambda connection: sql_tables.create_target(connection, self._place, schema)
            )
            with self._engine.connect() as connection:
                found = sql_tables.find_target(connection, self._place, schema)
        if found is None:
            raise self._missing()
        return found

    def _creating(self, create: Any) -> None:
        """Create a table. If another process creates it at the same moment, the first try fails,
        and the second one finds the table."""
        for is_last in (False, True):
            try:
                with self._engine.begin() as connection:
                    create(connection)
                return
            except exc.DBAPIError:
                if is_last:
                    raise

    def _missing(self) -> errors.SettingsError:
        return errors.SettingsError(
            f"{self._name} does not exist\n"
            f"Create it, or set {setting_of(self._place.name)}.create: on and its `schema`"
        )

    def _make_cursor(self, at: Cursor) -> None:
        values = dict(self._key(), token=self._of.token, position=str(at))
        with self._engine.connect() as connection:
            if connection.execute(self._read()).first() is not None:
                return
        with contextlib.suppress(exc.IntegrityError), self._transaction() as connection:
            # Another owner may have inserted it meanwhile.
            connection.execute(self._cursors.insert().values(values))

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
        assert self._target is not None, "begin found it"
        for shape, values in self._target.statements(rows, rows_a_statement):
            shape.insert(connection, values)

    def _move(self, batch: _Batch, rows_a_statement: int) -> None:
        """One transaction: the cursor from where we began to `upto`, and the rows [K7]."""
        upto = str(batch.upto)
        if upto == self._began:  # a resend and the first send would look the same
            raise errors.InvariantViolation(f"{self._name}: rows at an unchanged position")
        cursors = self._cursors
        with self._transaction() as connection:
            moved = connection.execute(
                cursors.update()
                .where(
                    self._is_ours,
                    cursors.c.token == self._of.token,
                    cursors.c.position == self._began,
                )
                .values(position=upto, version=batch.version)
            )
            if moved.rowcount == 1:
                self._insert(connection, batch.rows, rows_a_statement)
            else:
                row = connection.execute(self._read()).first()
                # Only our own earlier send can have left our token with this position [K6].
                if row is None or (row.token, row.position) != (self._of.token, upto):
                    raise self._superseded()
        self._began = upto

    def _superseded(self) -> errors.Superseded:
        return errors.Superseded(
            f"{self._name}: another owner moved the cursor of {self._of.shard_id}"
        )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        with self._engine.connect() as connection:
            with connection.begin():
                self._limit_waits(connection)
                yield connection
            # The server would close the connection before the next commit.
            for statement in sql_tables.rest_of(connection.dialect.name):
                connection.execute(statement)

    @staticmethod
    def _limit_waits(connection: sa.Connection) -> None:
        for statement in sql_tables.patience_of(connection.dialect.name, sql_tables.PATIENCE_S):
            connection.execute(statement)

    @contextlib.contextmanager
    def _translating(self, doing: str) -> Iterator[None]:
        """Turn errors of driver and database into ours, without the values that they quote."""
        try:
            yield
        except (errors.SinkError, errors.ConfigError):
            raise
        except exc.DBAPIError as error:
            raise self._failure(doing, error) from None
        except (exc.SQLAlchemyError, UnicodeError, OverflowError) as error:
            # From SQLAlchemy itself, or from a driver that cannot send a value.
            words = f"cannot {doing} {self._name}: {type(error).__name__} in the driver"
            is_of_rows = sql_refusals.is_refusal(error)
            raise (errors.RowsRefused if is_of_rows else errors.SettingsError)(words) from None

    def _words(self, error: BaseException) -> str:
        """Class and code of an error, and the columns that it names; no value."""
        if not isinstance(error, exc.DBAPIError):
            return f"{type(error).__name__} in the driver"
        code = sql_refusals.code_of(error.orig)
        named = self._target.named_in(error.orig) if self._target is not None else ""
        return type(error.orig).__name__ + (f" ({code})" if code else "") + named

    def _failure(
        self, doing: str, error: exc.DBAPIError
    ) -> errors.SinkError | errors.SettingsError:
        code = sql_refusals.code_of(error.orig)
        message = f"cannot {doing} {self._name}: {self._words(error)}"
        if sql_refusals.is_refusal(error):
            return errors.RowsRefused(f"{message}\nThe database refuses a row for good")
        if code == "SQLITE_NOTADB":
            return errors.SettingsError(f"{message}: the file is not a database of SQLite")
        if (
            isinstance(error, exc.ProgrammingError | exc.NotSupportedError)
            or code in sql_refusals.CHANGED
        ):
            return errors.SettingsError(
                f"{message}\nAre table, columns and the user's permissions as they were?"
            )
        words = sql_refusals.meaning_of(code)
        return errors.SinkError(
            message + (f": {words}" if words else "") + self._connection_words(error)
        )

    def _connection_words(self, error: exc.DBAPIError) -> str:
        """The message of the driver about a failed connection. Those about statements quote
        values."""
        if error.statement is not None:
            return ""
        words = " ".join(str(error.orig).split())[:200]
        for secret in self._secrets():
            words = words.replace(secret, "***")
        return f": {words}" if words else ""

    def _secrets(self) -> list[str]:
        query: Mapping[str, Any] = self._engine.url.query
        password = self._engine.url.password
        found = [str(query[name]) for name in query if "pass" in name.lower()]
        return [secret for secret in (str(password) if password else "", *found) if secret]

    def _parsed(self, position: str) -> Cursor:
        try:
            return Cursor.parse(position)
        except errors.LimitExceeded:
            raise errors.SettingsError(
                f"{self._name}: the position in {self._cursors.fullname} is not a cursor of kclrun"
            ) from None
