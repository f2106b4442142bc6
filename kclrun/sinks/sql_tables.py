"""The databases of SQL outputs: connections and sessions; tables that are found or created, their
columns, and how rows are inserted.

The differences between databases are here. PostgreSQL takes the rows of a statement as one array
for each column (`unnest`): that needs a tenth of the client time of one parameter for each value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, cast

import msgspec
import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.dialects import mysql, postgresql, sqlite

from kclrun.errors import RowMismatch, SettingsError
from kclrun.model.output import OutputPlace, setting_of
from kclrun.model.row_schema import Column, DataType, DecimalType, RowSchema, SimpleType

# How long a transaction waits for another one, and how long a server keeps the transaction of a
# client that sends nothing. Much longer than a pause of a process; short for an operator who waits.
PATIENCE_S: Final = 10.0
# Errors of MySQL and MariaDB about a row's values that a driver may count among those of
# connections: a CHECK (4025 of MariaDB, 3819 of MySQL), a value that is cut short or out of range.
REFUSED_FOR_GOOD: Final = frozenset({4025, 3819, 1264, 1265, 1292, 1366, 1406})
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
_DRIVERS: Final = {"postgresql": "psycopg[binary]", "mysql": "pymysql", "mariadb": "pymysql"}
_NAME_SHOWN_MAX: Final = 64
# Different sets of columns that are remembered: a program may make column names from data.
_SHAPES_MAX: Final = 1_000
# The length of a text in a key: MySQL's indexes need a length, and take 3,072 bytes altogether.
_KEY_TEXT: Final = 255

_MYSQLS: Final = ("mysql", "mariadb")
# For tables that we create: other engines of MySQL do not know transactions.
_TRANSACTIONAL: Final[dict[str, Any]] = {f"{each}_engine": "InnoDB" for each in _MYSQLS}

Convert = Callable[[Any], Any]
Encoded = tuple["Shape", tuple[Any, ...], int]


def open_engine(place: OutputPlace) -> sa.Engine:
    """An engine of one connection, opened at its first use. Raises: SettingsError."""
    setting = f"{setting_of(place.name)}.sql"
    try:
        url = sa.make_url(place.sql or "")
    except (exc.ArgumentError, ValueError):
        raise SettingsError(
            f"{setting}: expected SQLAlchemy's URL, such as"
            " postgresql+psycopg://user:${secret:NAME}@host/database"
        ) from None
    if url.get_backend_name() == "sqlite" and url.database in {None, "", ":memory:"}:
        raise SettingsError(f"{setting}: rows in memory are not durable; name a file")
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
    except exc.NoSuchModuleError:
        raise SettingsError(
            f"{setting}: SQLAlchemy knows no database {url.drivername}\n"
            "Write postgresql+psycopg://…, mysql+pymysql://… or sqlite:///…, or install its dialect"
        ) from None
    except ImportError:
        backend, advice = url.get_backend_name(), "install it"
        if package := _DRIVERS.get(backend):
            driver = package.partition("[")[0]
            advice = f"pip install '{package}', and write {backend}+{driver}://…"
        raise SettingsError(
            f"{setting}: the driver of {url.drivername} is not installed\nTo go on:  {advice}"
        ) from None
    except (exc.ArgumentError, TypeError, ValueError):
        raise SettingsError(f"{setting}: {shown_url(url)}: its options are not usable") from None


def shown_url(url: sa.URL) -> str:
    """The database for a message: without password and options."""
    host = f"{url.host or ''}{f':{url.port}' if url.port else ''}"
    return f"{url.drivername}://{host}/{url.database or ''}"


def _patience(url: sa.URL) -> dict[str, Any]:
    """Options by which a driver notices a server that does not answer, unless the URL has them."""
    wait = int(PATIENCE_S)
    options: dict[str, Any] = {}
    if url.drivername in {"postgresql", "postgresql+psycopg", "postgresql+psycopg2"}:
        options = {"connect_timeout": wait, "keepalives_idle": wait, "keepalives_count": 2}
        options |= {"keepalives_interval": wait // 2, "tcp_user_timeout": 2_000 * wait}
    elif url.get_backend_name() == "sqlite":
        options = {"timeout": wait}
    elif url.drivername in {"mysql+pymysql", "mariadb+pymysql"}:
        options = {"connect_timeout": wait, "read_timeout": 3 * wait, "write_timeout": 3 * wait}
    return {name: value for name, value in options.items() if name not in url.query}


def patience_of(dialect: str, patience_s: float) -> Sequence[sa.Executable]:
    """Statements at the beginning of a transaction.

    A process that stops in the middle of its transaction locks the cursor's row. Then the server
    ends that transaction, and another process does not wait for ever. For PostgreSQL both limits
    are local to the transaction, as a pooler (PgBouncer) requires. For MySQL they belong to the
    session: the server also closes a connection that is idle for so long, and the engine opens a
    new one. A session of MySQL has UTC as its time zone, and refuses a value that does not fit its
    column.
    """
    if dialect == "postgresql":
        limits = ("lock_timeout", "idle_in_transaction_session_timeout")
        words = f"{patience_s:.0f}s"
        return [sa.select(*(sa.func.set_config(each, words, True) for each in limits))]  # noqa: FBT003
    if dialect in {"mysql", "mariadb"}:
        limits = ("innodb_lock_wait_timeout", "wait_timeout")
        variables = [f"{each} = {patience_s:.0f}" for each in limits]
        variables += ["time_zone = '+00:00'", "sql_mode = CONCAT(@@sql_mode, ',STRICT_ALL_TABLES')"]
        return [sa.text(f"SET SESSION {', '.join(variables)}")]
    return []


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
    if named is None and error is not None and len(error.args) > 1:
        pattern = _CONSTRAINT_IN.get(error.args[0])
        found = pattern.search(str(error.args[1])) if pattern is not None else None
        named = found[1] if found is not None else None
    return named


def cursor_table(name: str, schema: str | None) -> sa.Table:
    """The table of cursors. `position` is only compared for equality: its order as text is not
    that of cursors. `version` names the version of the state, with an outbox."""
    text = [("application", 128), ("stream", 255), ("shard", 128), ("output", 128)]
    return sa.Table(
        name,
        sa.MetaData(),
        *(sa.Column(each, sa.String(size), primary_key=True) for each, size in text),
        sa.Column("stream_created_ms", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("generation", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("position", sa.String(255), nullable=False),
        sa.Column("version", sa.String(255)),
        schema=schema,
        # Names that differ only in case are different names.
        **(_TRANSACTIONAL | {f"{each}_collate": "utf8mb4_bin" for each in _MYSQLS}),
    )


class _TableColumn(msgspec.Struct, frozen=True):
    """One column of the table. `type` is None for a type that rows are not checked against;
    `bind` is the type of its parameters, `cast` what PostgreSQL makes of them."""

    name: str
    type: DataType | None
    bind: Any
    cast: Any = None
    convert: Convert | None = None
    length: int | None = None
    nullable: bool = True
    is_needed: bool = False


class Target:
    """The table that rows go to, as it is in the database."""

    def __init__(
        self,
        place: OutputPlace,
        dialect: str,
        columns: Sequence[_TableColumn],
        schema: RowSchema | None,
    ) -> None:
        self.name = place.table
        self._dialect = dialect
        self._columns = {each.name: each for each in columns}
        self._schema = schema
        self._key = place.key if place.is_upsert else ()
        self._shapes: dict[frozenset[str], Shape] = {}

    def shape(self, names: tuple[str, ...]) -> Shape:
        """How rows of these columns are checked and inserted. Raises: TypeError."""
        given = frozenset(each.name for each in self._schema.columns) if self._schema else None
        known = self._shapes.get(given or frozenset(names))
        if known is None:
            if len(self._shapes) >= _SHAPES_MAX:
                self._shapes.clear()
            known = self._shapes[given or frozenset(names)] = self._shape(given or names)
        return known

    def _shape(self, names: Collection[str]) -> Shape:
        for name in names:
            if name not in self._columns:
                shown = repr(name)[:_NAME_SHOWN_MAX]
                raise TypeError(f"column {shown} is not in the table {self.name}")
        for each in self._columns.values():
            if each.name not in names and (each.is_needed or each.name in self._key):
                raise TypeError(f"column {each.name} needs a value, and the row has none for it")
        columns = [each for each in self._columns.values() if each.name in names]
        checks = self._schema or RowSchema(
            Column(each.name, each.type, nullable=each.nullable)
            for each in columns
            if each.type is not None
        )
        order = [each.name for each in checks.columns]
        unchecked = [each for each in columns if each.name not in order]
        in_order = [self._columns[name] for name in order] + unchecked
        return Shape(checks, in_order, len(unchecked), self._statement(in_order), self._key)

    def statements(self, rows: Sequence[Encoded]) -> Iterator[tuple[Shape, list[tuple[Any, ...]]]]:
        """The rows, grouped by statement. Insertions may come in any order. Upserts keep the order;
        PostgreSQL refuses a key twice in a statement, so the last row of a key replaces the
        others."""
        if not self._key:
            groups: dict[Shape, list[tuple[Any, ...]]] = {}
            for shape, values, _ in rows:
                groups.setdefault(shape, []).append(values)
            yield from groups.items()
            return
        last: Shape | None = None
        by_key: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        for shape, values, _ in rows:
            if shape is not last and last is not None:
                yield last, list(by_key.values())
                by_key = {}
            last = shape
            by_key[shape.key_of(values)] = values
        if last is not None:
            yield last, list(by_key.values())

    def insert_nothing(self) -> sa.Executable:
        """A statement without rows, which the database permits if rows may be inserted."""
        target = self._clause(list(self._columns.values()))
        first = next(iter(self._columns))
        nothing = sa.select(sa.null()).where(sa.false())
        return sa.insert(target).from_select([first], nothing)

    def named_in(self, error: BaseException | None) -> str:
        """The columns and the constraint that an error names: only names of the table, or names
        that the driver gives as such. The message of the error may quote values."""
        diag = getattr(error, "diag", None)
        constraint = constraint_of(error)
        column = getattr(diag, "column_name", None)
        names = [f"constraint {constraint}"] if constraint else []
        if column:
            names.append(f"column {column}")
        if diag is None:
            words = set(re.findall(r"\w+", str(error)))
            names += [f"column {name}" for name in self._columns if name in words]
        return f": {', '.join(names)}" if names else ""

    def _clause(self, columns: Sequence[_TableColumn]) -> sa.TableClause:
        *schema, name = self.name.rsplit(".", 1)
        named = (sa.column(each.name, each.bind) for each in columns)
        return sa.table(name, *named, schema=schema[0] if schema else None)

    def _statement(self, columns: Sequence[_TableColumn]) -> sa.Executable:
        table = self._clause(columns)
        names = [each.name for each in columns]
        others = [name for name in names if name not in self._key]
        if self._dialect == "mysql" and self._key:
            made = mysql.insert(table)
            replaced = {name: made.inserted[name] for name in others or names}
            return made.on_duplicate_key_update(replaced)
        insert: Any
        if self._dialect == "postgresql":
            arrays = [
                sa.cast(
                    sa.bindparam(f"c{at}", type_=postgresql.ARRAY(each.bind)),
                    postgresql.ARRAY(each.bind),
                )
                for at, each in enumerate(columns)
            ]
            given = (sa.column(f"c{at}", each.bind) for at, each in enumerate(columns))
            rows = sa.func.unnest(*arrays).table_valued(*given, name="given").render_derived()
            read = [
                rows.c[f"c{at}"] if each.cast is None else sa.cast(rows.c[f"c{at}"], each.cast)
                for at, each in enumerate(columns)
            ]
            insert = postgresql.insert(table).from_select(names, sa.select(*read))
        else:
            insert = sqlite.insert(table) if self._dialect == "sqlite" else sa.insert(table)
        if not self._key:
            return cast("sa.Executable", insert)
        if not others:
            return cast("sa.Executable", insert.on_conflict_do_nothing(index_elements=self._key))
        replaced = {name: insert.excluded[name] for name in others}
        made = insert.on_conflict_do_update(index_elements=self._key, set_=replaced)
        return cast("sa.Executable", made)


class Shape:
    """Rows that have values for the same columns: one statement, and one check for each row."""

    def __init__(
        self,
        checks: RowSchema,
        columns: Sequence[_TableColumn],
        unchecked: int,
        statement: sa.Executable,
        key: tuple[str, ...],
    ) -> None:
        self._check = checks.check
        self._names = [each.name for each in columns]
        self._unchecked = [
            (each.name, each.nullable) for each in columns[len(columns) - unchecked :]
        ]
        self._converted = [
            (at, each.name, each.convert) for at, each in enumerate(columns) if each.convert
        ]
        self._texts = [
            (at, each.name, each.length)
            for at, each in enumerate(columns)
            if not isinstance(each.bind, sa.Numeric | sa.Integer | sa.Boolean | sa.Float)
        ]
        self._statement = statement
        self._key = tuple(self._names.index(name) for name in key)

    def values(self, row: Mapping[str, Any]) -> tuple[tuple[Any, ...], int]:
        """The row's values in the order of the columns, and the bytes of its texts.
        Raises: TypeError, naming the column."""
        try:
            if not self._unchecked:
                values = list(self._check(row).values())
            else:
                rest = dict(row)
                others = [self._other(rest, *each) for each in self._unchecked]
                values = [*self._check(rest).values(), *others]
        except RowMismatch as mismatch:
            raise TypeError(str(mismatch).replace("output.schema", "the table")) from None
        for at, name, convert in self._converted:
            value = values[at]
            if value is not None:
                try:
                    values[at] = convert(value)
                except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
                    kind = f"{type(value).__name__}: {type(error).__name__}"
                    raise TypeError(f"column {name} cannot take a {kind}") from None
        size = 0
        for at, name, length in self._texts:
            value = values[at]
            if type(value) is str:
                size += len(value)
                if length is not None and len(value) > length:
                    raise TypeError(f"column {name} takes {length} characters, not {len(value)}")
                if "\0" in value:
                    raise TypeError(f"column {name} cannot take a text with the character NUL")
            elif type(value) is bytes:
                size += len(value)
        return tuple(values), size

    def key_of(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values of the columns of an upsert's key."""
        return tuple(values[at] for at in self._key)

    def insert(self, connection: sa.Connection, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert these rows. Raises: the errors of SQLAlchemy."""
        given: Any
        if connection.dialect.name == "postgresql":
            columns = zip(*rows, strict=True)
            given = {f"c{at}": list(column) for at, column in enumerate(columns)}
        else:
            given = [dict(zip(self._names, values, strict=True)) for values in rows]
        connection.execute(self._statement, given)

    @staticmethod
    def _other(row: dict[str, Any], name: str, nullable: bool) -> Any:  # noqa: FBT001
        value = row.pop(name)
        if value is None and not nullable:
            raise TypeError(f"column {name} is NOT NULL and has no value")
        return value


def find_target(
    connection: sa.Connection, place: OutputPlace, schema: RowSchema | None
) -> Target | None:
    """The table of the settings; None if it does not exist. Raises: SettingsError if rows of the
    schema do not fit it, or if an upsert's key is not unique."""
    *where, name = place.table.rsplit(".", 1)
    inside = where[0] if where else None
    inspector = sa.inspect(connection)
    if not inspector.has_table(name, schema=inside):
        return None
    dialect = "mysql" if connection.dialect.name in _MYSQLS else connection.dialect.name
    primary = tuple(inspector.get_pk_constraint(name, schema=inside)["constrained_columns"])
    documents: Collection[str] = ()
    if dialect == "mysql":
        _refuse_without_transactions(connection, place, name, inside)
        documents = _documents(connection, name, inside)
    columns = [
        _found(dialect, each, primary, is_document=each["name"] in documents)
        for each in inspector.get_columns(name, schema=inside)
    ]
    _refuse_other_columns(place, columns, schema)
    if place.is_upsert:
        if dialect not in {"postgresql", "sqlite", "mysql"}:
            raise SettingsError(
                f"{setting_of(place.name)}.write: upsert is not known for {dialect}; use insert"
            )
        unique = [primary]
        unique += [
            tuple(each["column_names"])
            for each in inspector.get_unique_constraints(name, schema=inside)
        ]
        unique += [
            tuple(map(str, each["column_names"]))
            for each in inspector.get_indexes(name, schema=inside)
            if each["unique"]
        ]
        if set(place.key) not in map(set, unique):
            raise SettingsError(
                f"{setting_of(place.name)}.key: {place.table} has no unique index on exactly"
                f" {', '.join(place.key)}; an upsert needs one"
            )
    return Target(place, dialect, columns, schema)


def create_target(connection: sa.Connection, place: OutputPlace, schema: RowSchema) -> None:
    """Create the table from the schema; an upsert's key is its primary key."""
    *where, name = place.table.rsplit(".", 1)
    key = place.key if place.is_upsert else ()
    columns = [
        sa.Column(
            each.name,
            _made(each.type, is_key=each.name in key),
            primary_key=each.name in key,
            autoincrement=False,
            nullable=each.nullable and each.name not in key,
        )
        for each in schema.columns
    ]
    inside = where[0] if where else None
    table = sa.Table(name, sa.MetaData(), *columns, schema=inside, **_TRANSACTIONAL)
    table.create(connection, checkfirst=True)


_MADE: Final[dict[str, Any]] = {
    # MySQL's own texts and blobs end at 64 KiB, and its times at seconds.
    "string": sa.Text().with_variant(mysql.LONGTEXT(), *_MYSQLS),
    "boolean": sa.Boolean(),
    "byte": sa.SmallInteger(),
    "short": sa.SmallInteger(),
    "int": sa.Integer(),
    "long": sa.BigInteger(),
    "float": sa.REAL(),
    "double": sa.Double(),
    "binary": sa.LargeBinary().with_variant(mysql.LONGBLOB(), *_MYSQLS),
    "date": sa.Date(),
    "timestamp": sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), *_MYSQLS),
}


def _made(kind: DataType, *, is_key: bool) -> Any:
    if isinstance(kind, DecimalType):
        return sa.Numeric(kind.precision, kind.scale)
    if not isinstance(kind, SimpleType):  # arrays, maps and structs are documents
        return sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
    if is_key and kind.name == "string":
        return sa.Text().with_variant(sa.String(_KEY_TEXT), *_MYSQLS)
    return _MADE[kind.name]


def _refuse_without_transactions(
    connection: sa.Connection, place: OutputPlace, name: str, inside: str | None
) -> None:
    """Raises: SettingsError if the table's engine, such as MyISAM, keeps rows of a transaction that
    was rolled back."""
    found = connection.execute(
        sa.text(
            "SELECT t.ENGINE FROM information_schema.TABLES t"
            " JOIN information_schema.ENGINES e ON e.ENGINE = t.ENGINE"
            " WHERE t.TABLE_SCHEMA = COALESCE(:inside, DATABASE()) AND t.TABLE_NAME = :name"
            " AND e.TRANSACTIONS <> 'YES'"
        ),
        {"inside": inside, "name": name},
    ).scalar()
    if found is not None:
        raise SettingsError(
            f"{setting_of(place.name)}.table: {place.table} has the engine {found}, which knows no"
            " transactions\n"
            f"To go on:  ALTER TABLE {place.table} ENGINE = InnoDB"
        )


def _documents(connection: sa.Connection, name: str, inside: str | None) -> Collection[str]:
    """The columns of JSON in a table of MariaDB, where they are texts with a check."""
    if not getattr(connection.dialect, "is_mariadb", False):
        return ()
    clauses = connection.execute(
        sa.text(
            "SELECT CHECK_CLAUSE FROM information_schema.CHECK_CONSTRAINTS"
            " WHERE CONSTRAINT_SCHEMA = COALESCE(:inside, DATABASE()) AND TABLE_NAME = :name"
        ),
        {"inside": inside, "name": name},
    ).scalars()
    found = (re.fullmatch(r"json_valid\(`(.+)`\)", each) for each in clauses)
    return {each[1] for each in found if each is not None}


def _found(
    dialect: str, found: Any, primary: tuple[str, ...], *, is_document: bool
) -> _TableColumn:
    """A column of an existing table."""
    name, kind = found["name"], sa.JSON() if is_document else found["type"]
    is_row_id = dialect == "sqlite" and primary == (name,) and isinstance(kind, sa.Integer)
    has_default = (
        found.get("default") is not None
        or found.get("autoincrement") is True
        or bool(found.get("computed") or found.get("identity"))
        or is_row_id
    )
    nullable = bool(found["nullable"])
    common: dict[str, Any] = {
        "name": name,
        "nullable": nullable,
        "is_needed": not nullable and not has_default,
    }
    return _TableColumn(**common, **_kind(dialect, kind))


def _kind(dialect: str, kind: Any) -> dict[str, Any]:
    """How values of a column's type are checked, converted and sent."""
    how: dict[str, Any]
    is_postgres = dialect == "postgresql"
    match kind:
        case sa.JSON():
            how = {"type": None, "bind": sa.Text(), "cast": kind, "convert": _as_json}
        case sa.Boolean():
            how = {"type": SimpleType("boolean"), "bind": sa.Boolean()}
        case sa.Integer():
            how = {"type": _integer(dialect, kind), "bind": sa.BigInteger()}
        case sa.Float():
            is_short = is_postgres and isinstance(kind, sa.REAL)
            how = {"type": SimpleType("float" if is_short else "double"), "bind": sa.Double()}
        case sa.Numeric():
            how = _numeric(dialect, kind)
        case sa.String() if not isinstance(kind, sa.Enum):
            length = None if dialect == "sqlite" else kind.length
            how = {"type": SimpleType("string"), "bind": sa.Text(), "length": length}
        case sa.DateTime():
            is_aware = is_postgres and kind.timezone
            how = {"type": SimpleType("timestamp"), "bind": sa.DateTime(timezone=is_aware)}
            how |= {} if is_aware else {"convert": lambda value: value.replace(tzinfo=None)}
        case sa.Date():
            how = {"type": SimpleType("date"), "bind": sa.Date()}
        case sa.LargeBinary():
            how = {"type": SimpleType("binary"), "bind": sa.LargeBinary()}
        case _ if is_postgres:
            how = {"type": None, "bind": sa.Text(), "cast": kind, "convert": _as_literal}
        case _:
            how = {"type": None, "bind": kind}
    return how


def _integer(dialect: str, kind: sa.Integer) -> SimpleType | None:
    if dialect == "mysql" and isinstance(kind, mysql.TINYINT):
        return None  # its booleans
    if dialect != "postgresql":
        return SimpleType("long")
    if isinstance(kind, sa.SmallInteger):
        return SimpleType("short")
    return SimpleType("long" if isinstance(kind, sa.BigInteger) else "int")


def _numeric(dialect: str, kind: sa.Numeric[Any]) -> dict[str, Any]:
    digits = kind.precision
    if dialect == "sqlite":  # the column's affinity makes a number of it again
        return {"type": None, "bind": sa.Text(), "convert": lambda value: str(_as_decimal(value))}
    how: dict[str, Any] = {"type": None, "bind": sa.Numeric(), "convert": _as_decimal}
    if digits is not None and digits <= 38 and 0 <= (kind.scale or 0) <= digits:
        how["type"] = DecimalType(digits, kind.scale or 0)
    return how


def _as_decimal(value: Any) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise TypeError("not a number")
    return Decimal(repr(value)) if isinstance(value, float) else Decimal(value)


def _as_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _as_literal(value: Any) -> str:
    """The text that PostgreSQL reads as a value of any other type: UUIDs, addresses, times,
    arrays."""
    if isinstance(value, list | tuple):
        return "{" + ",".join(map(_as_element, value)) + "}"
    if isinstance(value, bool | int | float | str | Decimal):
        return str(value)
    return str(msgspec.to_builtins(value))


def _as_element(value: Any) -> str:
    if value is None:
        return "NULL"
    text = _as_literal(value)
    if isinstance(value, list | tuple):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


# Types that hold each other's values, the narrower first.
_FAMILIES: Final = (("byte", "short", "int", "long"), ("float", "double"))


def _refuse_other_columns(
    place: OutputPlace, columns: Sequence[_TableColumn], schema: RowSchema | None
) -> None:
    """Raises: SettingsError if rows of the schema can never be rows of the table."""
    there = {each.name: each for each in columns}
    given = {each.name for each in schema.columns} if schema is not None else set()
    problems = [f"no column {name}" for name in place.key if name not in there]
    if schema is not None:
        problems += [
            f"column {each.name} needs a value, and `schema` does not have it"
            for each in columns
            if each.is_needed and each.name not in given
        ]
        for each in schema.columns:
            found = there.get(each.name)
            if found is None:
                problems.append(f"no column {each.name}")
            elif not _fits(each.type, found.type):
                problems.append(f"column {each.name} is {found.type}, not {each.type}")
            elif each.nullable and not found.nullable:
                problems.append(f"column {each.name} is NOT NULL; say so in `schema`")
    if problems:
        raise SettingsError(
            f"{setting_of(place.name)}.table: {place.table} has {'; '.join(problems)}\n"
            "Change the table, or the setting: kclrun changes no table that is there"
        )


def _fits(given: DataType, there: DataType | None) -> bool:
    if there is None or given == there:
        return True
    if isinstance(given, DecimalType) and isinstance(there, DecimalType):
        whole = there.precision - there.scale >= given.precision - given.scale
        return whole and there.scale >= given.scale
    for family in _FAMILIES:
        if str(given) in family and str(there) in family:
            return family.index(str(given)) <= family.index(str(there))
    return False
