"""The databases of SQL outputs: connections and sessions; tables that are found or created, their
columns, and how rows are inserted.

The differences between databases are here. PostgreSQL takes the rows of a statement as one array
for each column (`unnest`): that needs a tenth of the client time of one parameter for each value.
"""

from __future__ import annotations

import itertools
import operator
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, cast

import msgspec
import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.dialects import mysql, postgresql, sqlite

from kclrun.errors import RowMismatch, SettingsError
from kclrun.model.output import OutputDestination, setting_of
from kclrun.model.row_schema import RowSchema
from kclrun.model.row_types import Column, DataType, DecimalType, SimpleType
from kclrun.outputs.sql_refusals import constraint_of, types_of
from kclrun.outputs.sql_types import How, Misfit, how_of

# How long a transaction waits for another one, and how long a server keeps the transaction of a
# client that sends nothing. Much longer than a pause of a process; short for an operator who waits.
PATIENCE_S: Final = 10.0
_DRIVERS: Final = {"postgresql": "psycopg[binary]", "mysql": "pymysql", "mariadb": "pymysql"}
_NAME_SHOWN_MAX: Final = 64
# Rows of one statement: its arrays or its parameters are some megabytes at most.
ROWS_A_STATEMENT: Final = 10_000
# Different sets of columns that are remembered: a program may make column names from data.
_SHAPES_MAX: Final = 1_000
# The length of a text in a key: MySQL's indexes need a length, and take 3,072 bytes altogether.
_KEY_TEXT: Final = 255

_MYSQLS: Final = ("mysql", "mariadb")
# For tables that we create: other engines of MySQL do not know transactions.
_TRANSACTIONAL: Final[dict[str, Any]] = {f"{dialect}_engine": "InnoDB" for dialect in _MYSQLS}

Encoded = tuple["Shape", tuple[Any, ...], int]


def open_engine(place: OutputDestination) -> sa.Engine:
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


def rest_of(dialect: str) -> Sequence[sa.Executable]:
    """Statements after a transaction: the limits that `patience_of` gave the session end."""
    if dialect in _MYSQLS:
        return [sa.text("SET SESSION wait_timeout = @@GLOBAL.wait_timeout")]
    return []


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
    session, until `rest_of`. A session of MySQL has UTC as its time zone, and refuses a value that
    does not fit its column.
    """
    if dialect == "postgresql":
        limits = ("lock_timeout", "idle_in_transaction_session_timeout")
        words = f"{patience_s:.0f}s"
        return [sa.select(*(sa.func.set_config(limit, words, True) for limit in limits))]
    if dialect in {"mysql", "mariadb"}:
        limits = ("innodb_lock_wait_timeout", "wait_timeout")
        variables = [f"{limit} = {patience_s:.0f}" for limit in limits]
        variables += ["time_zone = '+00:00'", "sql_mode = CONCAT(@@sql_mode, ',STRICT_ALL_TABLES')"]
        return [sa.text(f"SET SESSION {', '.join(variables)}")]
    return []


def cursor_table(name: str, schema: str | None) -> sa.Table:
    """The table of cursors. `position` is only compared for equality: its order as text is not
    that of cursors. `version` names the version of the state, with an outbox."""
    text = [("application", 128), ("stream", 255), ("shard", 128), ("output", 128)]
    return sa.Table(
        name,
        sa.MetaData(),
        *(sa.Column(column, sa.String(size), primary_key=True) for column, size in text),
        sa.Column("stream_created_ms", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("generation", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("position", sa.String(255), nullable=False),
        sa.Column("version", sa.String(255)),
        schema=schema,
        # Names that differ only in case are different names.
        **(_TRANSACTIONAL | {f"{dialect}_collate": "utf8mb4_bin" for dialect in _MYSQLS}),
    )


class _TableColumn(How, frozen=True, kw_only=True):
    """One column of the table. `type_name` is that of PostgreSQL."""

    name: str
    type_name: str = ""
    nullable: bool = True
    is_needed: bool = False
    is_generated: bool = False  # always, by the table


class Target:
    """The table that rows go to, as it is in the database."""

    def __init__(
        self,
        place: OutputDestination,
        dialect: str,
        columns: Sequence[_TableColumn],
        schema: RowSchema | None,
        keys: Mapping[str, tuple[str, ...]],
    ) -> None:
        """`keys`: the columns of each constraint and each unique index, by its name."""
        self.name = place.table
        self._constraints = keys
        self._dialect = dialect
        self._columns = {column.name: column for column in columns}
        self._schema = schema
        self._key = place.key if place.is_upsert else ()
        self.has_other_keys = False
        self._shapes: dict[frozenset[str], Shape] = {}

    def shape(self, names: tuple[str, ...]) -> Shape:
        """How rows of these columns are checked and inserted. Raises: TypeError."""
        given = frozenset(column.name for column in self._schema.columns) if self._schema else None
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
            if self._columns[name].is_generated:
                raise TypeError(f"column {name} is generated by the table, and takes no value")
        for column in self._columns.values():
            if column.name not in names and (column.is_needed or column.name in self._key):
                raise TypeError(f"column {column.name} needs a value, and the row has none for it")
        columns = [column for column in self._columns.values() if column.name in names]
        checks = self._schema or RowSchema(
            Column(column.name, column.type, nullable=column.nullable)
            for column in columns
            if column.type is not None
        )
        order = [column.name for column in checks.columns]
        unchecked = [column for column in columns if column.name not in order]
        in_order = [self._columns[name] for name in order] + unchecked
        return Shape(checks, in_order, len(unchecked), self._statement(in_order), self._key)

    def statements(
        self, rows: Sequence[Encoded], rows_max: int
    ) -> Iterator[tuple[Shape, list[tuple[Any, ...]]]]:
        """The rows, grouped by statement, at most `rows_max` in one. Insertions may come in any
        order. Upserts keep it, because the database decides which keys are equal, and the table
        must be the same however the rows were cut into commits. PostgreSQL refuses a key twice in a
        statement: of rows whose keys are the same to the letter the last one is sent."""
        if not self._key:
            groups: dict[Shape, list[tuple[Any, ...]]] = {}
            for shape, values, _ in rows:
                groups.setdefault(shape, []).append(values)
            for shape, found in groups.items():
                for at in range(0, len(found), rows_max):
                    yield shape, found[at : at + rows_max]
            return
        is_merged = self._dialect == "postgresql" and rows_max > 1
        rows_max = 1 if is_merged and self.has_other_keys else rows_max
        for shape, run in itertools.groupby(rows, key=operator.itemgetter(0)):
            ordered = [each for _, each, _ in run]
            for at in range(0, len(ordered), rows_max):
                part = ordered[at : at + rows_max]
                yield shape, shape.last_of_keys(part) if is_merged else part

    def insert_nothing(self) -> sa.Executable:
        """A statement without rows, which the database permits if rows may be inserted."""
        target = self._clause(list(self._columns.values()))
        first = next(iter(self._columns))
        nothing = sa.select(sa.null()).where(sa.false())
        return sa.insert(target).from_select([first], nothing)

    def named_in(self, error: BaseException | None) -> str:
        """The columns and the constraint that an error names: only names of the table, or names
        that the driver gives as such. The message of the error may quote values."""
        constraint = constraint_of(error)
        names = [f"constraint {constraint}"] if constraint else []
        names += [f"column {name}" for name in self._columns_in(error, constraint)]
        return f": {', '.join(names)}" if names else ""

    def _columns_in(self, error: BaseException | None, constraint: str | None) -> Sequence[str]:
        diag = getattr(error, "diag", None)
        if column := getattr(diag, "column_name", None):
            return [column]
        if constraint is not None and constraint in self._constraints:
            return self._constraints[constraint]
        if diag is None:
            words = set(re.findall(r"\w+", str(error)))
            return [name for name in self._columns if name in words]
        kinds, columns = types_of(error), self._columns.values()
        named = [column.name for column in columns if column.type_name in kinds]
        return named or [column.name for column in columns if column.is_read_there]

    def _clause(self, columns: Sequence[_TableColumn]) -> sa.TableClause:
        *schema, name = self.name.rsplit(".", 1)
        named = (sa.column(column.name, column.bind) for column in columns)
        return sa.table(name, *named, schema=schema[0] if schema else None)

    def _statement(self, columns: Sequence[_TableColumn]) -> sa.Executable:
        table = self._clause(columns)
        names = [column.name for column in columns]
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
        self._names = [column.name for column in columns]
        self._unchecked = [
            (column.name, column.nullable) for column in columns[len(columns) - unchecked :]
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
                others = [
                    self._other(rest, name, is_nullable=is_nullable)
                    for name, is_nullable in self._unchecked
                ]
                values = [*self._check(rest).values(), *others]
        except RowMismatch as mismatch:
            raise TypeError(str(mismatch).replace("output.schema", "the table")) from None
        for at, name, convert in self._converted:
            value = values[at]
            if value is not None:
                try:
                    values[at] = convert(value)
                except Misfit as misfit:
                    raise TypeError(f"column {name}: {misfit}") from None
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

    def last_of_keys(self, rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Of rows whose keys of an upsert are the same to the letter, the last one. No key with
        NULL is another row's."""
        last: dict[object, tuple[Any, ...]] = {}
        for values in rows:
            key = tuple(_to_the_letter(values[at]) for at in self._key)
            last[object() if None in key else key] = values
        return list(last.values())

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
    def _other(row: dict[str, Any], name: str, *, is_nullable: bool) -> Any:
        value = row.pop(name)
        if value is None and not is_nullable:
            raise TypeError(f"column {name} is NOT NULL and has no value")
        return value


def _to_the_letter(value: Any) -> Any:
    """What only values of one text share: 1 and 1.0 are equal, 0.0 and -0.0, too."""
    return str(value) if isinstance(value, float | Decimal) else value


def find_target(
    connection: sa.Connection, place: OutputDestination, schema: RowSchema | None
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
    with warnings.catch_warnings():  # about a type that SQLAlchemy does not know
        warnings.simplefilter("ignore", exc.SAWarning)
        found = inspector.get_columns(name, schema=inside)
    names = _type_names(connection, name, inside) if dialect == "postgresql" else {}
    columns = [
        _found(dialect, column, primary, names, is_document=column["name"] in documents)
        for column in found
    ]
    _refuse_other_columns(place, columns, schema)
    keys = _constraints(inspector, name, inside, [column.name for column in columns])
    target = Target(place, dialect, columns, schema, keys)
    if place.is_upsert:
        if dialect not in {"postgresql", "sqlite", "mysql"}:
            raise SettingsError(
                f"{setting_of(place.name)}.write: upsert is not known for {dialect}; use insert"
            )
        unique = [primary, *_unique(inspector, name, inside).values()]
        if set(place.key) not in map(set, unique):
            raise SettingsError(
                f"{setting_of(place.name)}.key: {place.table} has no unique index on exactly"
                f" {', '.join(place.key)}; an upsert needs one"
            )
        target.has_other_keys = any(names and set(names) != set(place.key) for names in unique)
    return target


# The name of MySQL for each primary key.
_PRIMARY: Final = "PRIMARY"


def _unique(inspector: Any, name: str, inside: str | None) -> dict[str, tuple[str, ...]]:
    """The columns of each unique constraint and each unique index, by its name."""
    found = [*inspector.get_unique_constraints(name, schema=inside)]
    found += [index for index in inspector.get_indexes(name, schema=inside) if index["unique"]]
    return {
        str(constraint["name"]): tuple(map(str, constraint["column_names"])) for constraint in found
    }


def _constraints(
    inspector: Any, name: str, inside: str | None, columns: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """The columns of each constraint and each unique index, by its name."""
    found = _unique(inspector, name, inside)
    primary = inspector.get_pk_constraint(name, schema=inside)
    keys = [primary, *inspector.get_foreign_keys(name, schema=inside)]
    found |= {
        str(key["name"] or _PRIMARY): tuple(key["constrained_columns"]) for key in keys if key
    }
    for constraint in inspector.get_check_constraints(name, schema=inside):
        words = set(re.findall(r"\w+", constraint["sqltext"]))
        found[str(constraint["name"])] = tuple(column for column in columns if column in words)
    return found


def create_target(connection: sa.Connection, place: OutputDestination, schema: RowSchema) -> None:
    """Create the table from the schema; an upsert's key is its primary key."""
    *where, name = place.table.rsplit(".", 1)
    key = place.key if place.is_upsert else ()
    columns = [
        sa.Column(
            column.name,
            _made(column.type, is_key=column.name in key),
            primary_key=column.name in key,
            autoincrement=False,
            nullable=column.nullable and column.name not in key,
        )
        for column in schema.columns
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
    connection: sa.Connection, place: OutputDestination, name: str, inside: str | None
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
    found = (re.fullmatch(r"json_valid\(`(.+)`\)", clause) for clause in clauses)
    return {match[1] for match in found if match is not None}


_TypeNames = Mapping[str, tuple[str, str | None]]


def _type_names(connection: sa.Connection, name: str, inside: str | None) -> _TypeNames:
    """The types of the columns of a table in PostgreSQL, without the limits of the columns (`-1` is
    the type modifier of none); and the type below a domain, with its limits."""
    quote = connection.dialect.identifier_preparer.quote
    table = quote(name) if inside is None else f"{quote(inside)}.{quote(name)}"
    found = connection.execute(
        sa.text(
            "SELECT attname, format_type(atttypid, -1), format_type(d.typbasetype, d.typtypmod)"
            " FROM pg_attribute JOIN pg_type t ON t.oid = atttypid"
            " LEFT JOIN pg_type d ON d.typtype = 'd' AND d.oid IN (t.oid, t.typelem)"
            " WHERE attrelid = to_regclass(:named) AND attnum > 0 AND NOT attisdropped"
        ),
        {"named": table},
    )
    return {str(column): (str(kind), base) for column, kind, base in found}


def _found(
    dialect: str,
    found: Any,
    primary: tuple[str, ...],
    names: _TypeNames,
    *,
    is_document: bool,
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
        "is_generated": bool(
            found.get("computed") or (found.get("identity") or {}).get("always", False)
        ),
    }
    type_name, base = names.get(name, (None, None))
    how = msgspec.structs.asdict(how_of(dialect, kind, type_name, base))
    return _TableColumn(**common, type_name=type_name or "", **how)


# Types that hold each other's values, the narrower first.
_FAMILIES: Final = (("byte", "short", "int", "long"), ("float", "double"))


def _refuse_other_columns(
    place: OutputDestination, columns: Sequence[_TableColumn], schema: RowSchema | None
) -> None:
    """Raises: SettingsError if rows of the schema can never be rows of the table."""
    there = {column.name: column for column in columns}
    given = {column.name for column in schema.columns} if schema is not None else set()
    problems = [f"no column {name}" for name in place.key if name not in there]
    if schema is not None:
        problems += [
            f"column {column.name} needs a value, and `schema` does not have it"
            for column in columns
            if column.is_needed and column.name not in given
        ]
        for column in schema.columns:
            found = there.get(column.name)
            if found is None:
                problems.append(f"no column {column.name}")
            elif not _fits(column.type, found.type):
                problems.append(f"column {column.name} is {found.type}, not {column.type}")
            elif column.nullable and not found.nullable:
                problems.append(f"column {column.name} is NOT NULL; say so in `schema`")
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
