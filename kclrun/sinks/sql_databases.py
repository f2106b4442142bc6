"""What differs between the databases of SQL outputs apart from types of columns: connections, the
sessions of transactions, and the words of errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import exc

from kclrun.errors import SettingsError

# How long a transaction waits for another one, and how long a server keeps the transaction of a
# client that went silent. Much longer than a pause of a process, shorter than an operator's wait.
PATIENCE_S: Final = 10.0
# Errors of MySQL and MariaDB about a row's values that a driver may count among those of
# connections: a CHECK (4025 of MariaDB, 3819 of MySQL), a value that is cut short or out of range.
REFUSED_FOR_GOOD: Final = frozenset({4025, 3819, 1264, 1265, 1292, 1366, 1406})
# Where words of MySQL's errors name a constraint, by the error. The value of 1062 comes before it.
_CONSTRAINT_IN: Final = {
    1062: re.compile(r"for key '([^']+)'$"),
    1451: re.compile(r"CONSTRAINT `([^`]+)`"),
    1452: re.compile(r"CONSTRAINT `([^`]+)`"),
    3819: re.compile(r"constraint '([^']+)'"),
    4025: re.compile(r"CONSTRAINT `([^`]+)`"),
}


def open_engine(text: str) -> sa.Engine:
    """An engine of one connection, opened at its first use. Raises: SettingsError."""
    try:
        url = sa.make_url(text)
    except (exc.ArgumentError, ValueError):
        raise SettingsError(
            "output.sql: expected SQLAlchemy's URL, such as"
            " postgresql+psycopg://user:${secret:NAME}@host/database"
        ) from None
    if url.get_backend_name() == "sqlite" and url.database in {None, "", ":memory:"}:
        raise SettingsError("output.sql: rows in memory are not durable; name a file")
    try:
        return sa.create_engine(
            url,
            poolclass=sa.QueuePool,
            pool_size=1,
            max_overflow=0,
            pool_pre_ping=True,
            hide_parameters=True,
            connect_args=_patience(url),
        )
    except (ImportError, exc.NoSuchModuleError):
        raise SettingsError(
            f"output.sql: the driver of {url.drivername} is not installed\n"
            "To go on, for example:  pip install 'psycopg[binary]'   (postgresql+psycopg://…)"
        ) from None
    except (exc.ArgumentError, TypeError, ValueError):
        raise SettingsError(f"output.sql: {shown_url(url)}: its options are not usable") from None


def shown_url(url: sa.URL) -> str:
    """The database for a message: without password and options."""
    host = f"{url.host or ''}{f':{url.port}' if url.port else ''}"
    return f"{url.drivername}://{host}/{url.database or ''}"


def _patience(url: sa.URL) -> dict[str, Any]:
    """What notices a server that does not answer; the URL's own options come first."""
    wait = int(PATIENCE_S)
    told: dict[str, Any] = {}
    if url.drivername in {"postgresql", "postgresql+psycopg", "postgresql+psycopg2"}:
        told = {"connect_timeout": wait, "keepalives_idle": wait, "keepalives_interval": wait // 2}
        told |= {"keepalives_count": 2, "tcp_user_timeout": 2_000 * wait}
    elif url.get_backend_name() == "sqlite":
        told = {"timeout": wait}
    elif url.drivername in {"mysql+pymysql", "mariadb+pymysql"}:
        told = {"connect_timeout": wait, "read_timeout": 3 * wait, "write_timeout": 3 * wait}
    return {name: value for name, value in told.items() if name not in url.query}


def patience_of(dialect: str, patience_s: float) -> Sequence[sa.Executable]:
    """Statements at the beginning of a transaction.

    A process that stops in the middle of its transaction holds the cursor's row: the server ends
    the transaction, and we do not wait for ever meanwhile. For PostgreSQL both limits are local to
    the transaction, as a pooler (PgBouncer) requires. For MySQL they are the session's: a
    connection that nobody uses for so long is closed, too, and opened again. Times are UTC there,
    and a value that does not fit its column is an error, not cut short.
    """
    if dialect == "postgresql":
        limits = ("lock_timeout", "idle_in_transaction_session_timeout")
        words = f"{patience_s:.0f}s"
        return [sa.select(*(sa.func.set_config(each, words, True) for each in limits))]  # noqa: FBT003
    if dialect in {"mysql", "mariadb"}:
        limits = ("innodb_lock_wait_timeout", "wait_timeout")
        told = [f"{each} = {patience_s:.0f}" for each in limits]
        told += ["time_zone = '+00:00'", "sql_mode = CONCAT(@@sql_mode, ',STRICT_ALL_TABLES')"]
        return [sa.text(f"SET SESSION {', '.join(told)}")]
    return []


def code_of(error: BaseException | None) -> str | int | None:
    """The database's own code of a driver's error: SQLSTATE, or the number of MySQL."""
    if error is not None and error.args and isinstance(error.args[0], int):
        return error.args[0]
    return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)


def constraint_of(error: BaseException | None) -> str | None:
    """The constraint that a driver's error names; its words may quote values besides."""
    named: str | None = getattr(getattr(error, "diag", None), "constraint_name", None)
    if named is None and error is not None and len(error.args) > 1:
        pattern = _CONSTRAINT_IN.get(error.args[0])
        found = pattern.search(str(error.args[1])) if pattern is not None else None
        named = found[1] if found is not None else None
    return named
