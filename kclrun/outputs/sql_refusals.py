"""The errors of databases: which of them refuse a row for its values, and what their codes mean.

The words of a database are not shown: they may quote values.
"""

from __future__ import annotations

import re
from typing import Final

from sqlalchemy import exc

# Classes of PostgreSQL's SQLSTATEs that are about the values of a row: data, integrity, what a
# trigger or a function says of them (`RAISE`), a view's check, and a row that is too large for an
# index (https://www.postgresql.org/docs/current/errcodes-appendix.html).
_STATES: Final = ("09", "21", "22", "23", "27", "38", "39", "44", "54", "P0")
# Errors of MySQL and MariaDB about a row's values that a driver may count among those of
# connections: a CHECK (4025 of MariaDB, 3819 of MySQL), a value that is cut short or out of range,
# a row that is too large, a document that is not JSON, a trigger's SIGNAL.
_NUMBERS: Final = frozenset(
    {4025, 3819, 1264, 1265, 1292, 1366, 1406, 1118, 1153, 1644, 1690, 3140, 3141, 3156}
)
# A table or a column is gone: these drivers report it as a failure of the connection.
CHANGED: Final = frozenset({1054, 1146, "SQLITE_ERROR"})
# Where the message of an error of MySQL names a constraint. In 1062 a value comes before the name.
_CONSTRAINT_IN: Final = {
    1062: re.compile(r"for key '([^']+)'$"),
    1451: re.compile(r"CONSTRAINT `([^`]+)`"),
    1452: re.compile(r"CONSTRAINT `([^`]+)`"),
    3819: re.compile(r"constraint '([^']+)'"),
    4025: re.compile(r"CONSTRAINT `([^`]+)`"),
}
_OF_SQLITE: Final = re.compile(r"^CHECK constraint failed: (\w+)$")
# The meaning of the codes of failures that may pass: the first characters of PostgreSQL's SQLSTATEs
# (https://www.postgresql.org/docs/current/errcodes-appendix.html), SQLite's names, MySQL's numbers.
# The words of a database are not shown: they may quote values.
_MEANS: Final = {
    "53100": "the disk of the server is full",
    "53": "the server has no memory, or no connection, free",
    "57P": "the server is going down, or not up yet",
    "55P03": "another transaction holds the row of the cursor",
    "40": "another transaction was in the way",
    "SQLITE_FULL": "the disk is full",
    "SQLITE_BUSY": "another process has the file locked",
    "SQLITE_READONLY": "the file, or its disk, is read-only",
    "SQLITE_CANTOPEN": "is its folder there, and may this user write to it?",
    "SQLITE_IOERR": "the disk failed",
    "1021": "the disk of the server is full",
    "1114": "the disk of the server is full",
    "1040": "the server has no connection free",
    "1053": "the server is going down",
    "1205": "another transaction holds the row of the cursor",
    "1213": "another transaction was in the way",
}


def is_refusal(error: exc.SQLAlchemyError | UnicodeError | OverflowError) -> bool:
    """Whether the database, or its driver, refuses a row for the values in it, for good."""
    if isinstance(error, UnicodeError | OverflowError):
        return True
    if not isinstance(error, exc.DBAPIError):  # a value that SQLAlchemy cannot send
        return isinstance(error, exc.StatementError) and error.orig is not None
    code = code_of(error.orig)
    is_of_values = isinstance(error, exc.IntegrityError | exc.DataError)
    return is_of_values or (code.startswith(_STATES) if isinstance(code, str) else code in _NUMBERS)


def code_of(error: BaseException | None) -> str | int | None:
    """The database's own code of a driver's error: SQLSTATE, the number of MySQL, or the name of
    SQLite."""
    if error is not None and error.args and isinstance(error.args[0], int):
        return error.args[0]
    names = ("sqlstate", "pgcode", "sqlite_errorname")
    return next((code for name in names if (code := getattr(error, name, None))), None)


def meaning_of(code: str | int | None) -> str:
    """The meaning of this code in words; empty for an unknown code."""
    begins = str.startswith if isinstance(code, str) else str.__eq__
    return next((words for known, words in _MEANS.items() if begins(str(code), known)), "")


def constraint_of(error: BaseException | None) -> str | None:
    """The constraint that a driver's error names; its words may quote values besides."""
    named: str | None = getattr(getattr(error, "diag", None), "constraint_name", None)
    if named is None and error is not None and error.args:
        pattern = _CONSTRAINT_IN.get(error.args[0], _OF_SQLITE)
        found = pattern.search(str(error.args[-1]))
        named = found[1].rpartition(".")[2] if found is not None else None
    return named


_TYPE_IN: Final = re.compile(r"\btype ([a-z][a-z ]*[a-z])")
_PLAIN: Final = re.compile(r"[a-z_][a-z0-9_]*")
_OF_NUMBERS: Final = "numeric field overflow"


def types_of(error: BaseException | None) -> frozenset[str]:
    """The types that an error of PostgreSQL names, as `format_type` names those of columns."""
    diag = getattr(error, "diag", None)
    words = str(getattr(diag, "message_primary", None) or "")
    found = {str(kind) for kind in _TYPE_IN.findall(words)}
    if words == _OF_NUMBERS:
        found.add("numeric")
    if domain := getattr(diag, "datatype_name", None):
        # `format_type` names the schema of a domain that is not on the search path.
        schema = getattr(diag, "schema_name", None) or ""
        kinds = {_quoted(domain), f"{_quoted(schema)}.{_quoted(domain)}"}
        found |= kinds | {f"{kind}[]" for kind in kinds}
    return frozenset(found)


def _quoted(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else '"{}"'.format(name.replace('"', '""'))
