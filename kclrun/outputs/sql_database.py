"""The database of an output in SQL, with the table of its rows: connections, and their errors.

Errors name the table, a column or a constraint; never a value, and never the password. This module
does not know cursors or owners.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import exc

from kclrun import errors
from kclrun.model.output import OutputDestination, setting_of
from kclrun.model.row_schema import RowSchema
from kclrun.outputs import sql_refusals, sql_tables

# A login that is refused: by SQLSTATE, and by MySQL's numbers. When a connection fails, libpq gives
# no SQLSTATE, only the words of the server.
_LOGIN_STATE: Final = "28"
_LOGIN_NUMBERS: Final = frozenset({1044, 1045, 1698})
_LOGIN_WORDS: Final = re.compile(
    r"authentication failed for user|no password supplied|no pg_hba\.conf entry"
    r"|role .* (does not exist|is not permitted to log in)"
)


class SqlDatabase:
    """The database of one output, and the table that its rows go to."""

    def __init__(self, place: OutputDestination) -> None:
        self._place = place
        self.engine = sql_tables.open_engine(place)
        self._schema = RowSchema.parse(place.schema) if place.schema else None
        self._table: sql_tables.Target | None = None

    @property
    def name(self) -> str:
        return f"table {self._place.table} of {sql_tables.shown_url(self.engine.url)}"

    @property
    def table(self) -> sql_tables.Target:
        assert self._table is not None, "begin comes first"
        return self._table

    def is_same(self, other: SqlDatabase) -> bool:
        return str(self.engine.url) == str(other.engine.url)

    def find_table(self, connection: sa.Connection) -> sql_tables.Target | None:
        """The table as it is; None if it is to be created. Raises: SettingsError for a table that
        is missing or does not fit."""
        found = sql_tables.find_target(connection, self._place, self._schema)
        if found is None and not self._place.creates_table:
            raise self._missing()
        return found

    def open_table(self) -> None:
        """Find the table of the rows, or create it. Raises: SettingsError."""
        with self.engine.connect() as connection:
            found = self.find_table(connection)
        if found is None and self._schema is not None:
            schema = self._schema
            self.create(
                lambda connection: sql_tables.create_target(connection, self._place, schema)
            )
            with self.engine.connect() as connection:
                found = self.find_table(connection)
        if found is None:
            raise self._missing()
        self._table = found

    def create(self, create: Callable[[sa.Connection], object]) -> None:
        """Create a table. If another process creates it at the same moment, the first try fails,
        and the second one finds the table."""
        for is_last in (False, True):
            try:
                with self.engine.begin() as connection:
                    create(connection)
                return
            except exc.DBAPIError:
                if is_last:
                    raise

    def _missing(self) -> errors.SettingsError:
        return errors.SettingsError(
            f"{self.name} does not exist\n"
            f"Create it, or set {setting_of(self._place.name)}.create: on and its `schema`"
        )

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        with self.engine.connect() as connection:
            with connection.begin():
                self.limit_waits(connection)
                yield connection
            # The server would close the connection before the next commit.
            for statement in sql_tables.rest_of(connection.dialect.name):
                connection.execute(statement)

    @staticmethod
    def limit_waits(connection: sa.Connection) -> None:
        for statement in sql_tables.patience_of(connection.dialect.name, sql_tables.PATIENCE_S):
            connection.execute(statement)

    @contextlib.contextmanager
    def logged_in(self) -> Iterator[sa.Connection]:
        """A connection, for `check`. Raises: SettingsError if the server refuses the user or the
        password: no repetition helps. An owner of a lease does not use this: it waits with its
        rows."""
        try:
            connection = self.engine.connect()
        except exc.DBAPIError as error:
            code, words = sql_refusals.code_of(error.orig), str(error.orig)
            is_refused = str(code).startswith(_LOGIN_STATE) or code in _LOGIN_NUMBERS
            if not is_refused and not _LOGIN_WORDS.search(words):
                raise
            raise errors.SettingsError(
                f"{setting_of(self._place.name)}.sql: {sql_tables.shown_url(self.engine.url)}"
                f" refuses the user or the password{self._connection_words(error)}\n"
                "Correct them there, or in the variable or the secret that it names"
            ) from None
        with connection:
            yield connection

    @contextlib.contextmanager
    def translating(self, doing: str) -> Iterator[None]:
        """Turn errors of driver and database into ours, without the values that they quote."""
        try:
            yield
        except (errors.SinkError, errors.ConfigError):
            raise
        except exc.DBAPIError as error:
            raise self._failure(doing, error) from None
        except (exc.SQLAlchemyError, UnicodeError, OverflowError) as error:
            # From SQLAlchemy itself, or from a driver that cannot send a value.
            words = f"cannot {doing} {self.name}: {type(error).__name__} in the driver"
            is_of_rows = sql_refusals.is_refusal(error)
            raise (errors.RowsRefused if is_of_rows else errors.SettingsError)(words) from None

    def words(self, error: BaseException) -> str:
        """Class and code of an error, and the columns that it names; no value."""
        if not isinstance(error, exc.DBAPIError):
            return f"{type(error).__name__} in the driver"
        code = sql_refusals.code_of(error.orig)
        named = self._table.named_in(error.orig) if self._table is not None else ""
        return type(error.orig).__name__ + (f" ({code})" if code else "") + named

    def _failure(
        self, doing: str, error: exc.DBAPIError
    ) -> errors.SinkError | errors.SettingsError:
        code = sql_refusals.code_of(error.orig)
        message = f"cannot {doing} {self.name}: {self.words(error)}"
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
        query: Mapping[str, Any] = self.engine.url.query
        password = self.engine.url.password
        found = [str(query[name]) for name in query if "pass" in name.lower()]
        return [secret for secret in (str(password) if password else "", *found) if secret]

    def close(self) -> None:
        self.engine.dispose()
