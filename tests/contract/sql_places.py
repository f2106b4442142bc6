"""Tables of SQLite in a file, of a real PostgreSQL and of a real MariaDB, for the contract of
`ports.Output`."""

import contextlib
import copy

import sqlalchemy as sa
from sqlalchemy import exc

from kclrun.errors import Superseded
from kclrun.model.output import OutputDestination
from kclrun.outputs.sql import SqlOutput
from kclrun.outputs.sql_tables import open_engine
from tests.contract.output_places import SCHEMA, Place


class Table(Place):
    """Its late request is a whole transaction that arrives as the client sent it."""

    faults = frozenset({"throttled", "lost request", "lost reply", "late"})

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._faults = []
        self._late = []
        self._engine = open_engine(OutputDestination(name="output", sql=self.url()))

    def url(self):
        raise NotImplementedError

    def table(self):
        return self.name

    def open(self, of, **changed):
        reported = {"table": self.table(), "schema": SCHEMA, "creates_table": True} | changed
        output = SqlOutput(OutputDestination(name="output", sql=self.url(), **reported), of)
        move = output._move
        output._move = lambda batch, rows: self._meet(output, lambda one: move(one, rows), batch)
        # A connection for all: some tests have hundreds of owners.
        output._database.engine = self._engine
        return output

    def open_missing(self):
        from tests.contract.test_outputs import OF

        return self.open(OF, creates_table=False, table=f"{self.table()}_missing")

    def rows(self):
        quote = self._engine.dialect.identifier_preparer.quote_identifier
        quoted = ".".join(map(quote, self.table().split(".")))
        with self._engine.connect() as connection:
            if not sa.inspect(connection).has_table(*reversed(self.table().split("."))):
                return []
            found = connection.execute(sa.text(f"SELECT shard, n FROM {quoted} ORDER BY shard, n"))
            return [dict(row) for row in found.mappings()]

    def fail(self, fault, times=1):
        self._faults += [fault] * times

    def land(self):
        late, self._late = self._late, []
        for output, batch in late:
            with contextlib.suppress(Superseded):
                type(output)._move(output, batch, len(batch.rows))

    def close(self):
        self._engine.dispose()

    def _meet(self, output, move, batch):
        fault = self._faults.pop(0) if self._faults else None
        if fault == "late":
            sender = copy.copy(output)
            sender._cursor = copy.copy(output._cursor)
            self._late.append((sender, copy.deepcopy(batch, {})))
        elif fault == "lost reply":
            began = output._cursor.position
            move(batch)
            output._cursor.position = began
        elif fault is None:
            return move(batch)
        raise exc.OperationalError("COMMIT", None, OSError("the connection is lost"))


class Sqlite(Table):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        # No test cuts the power: a commit need not wait for the disk.
        fast = lambda connection, _: connection.execute("PRAGMA synchronous = OFF")  # noqa: E731
        sa.event.listen(self._engine, "connect", fast)

    def url(self):
        return f"sqlite:///{self.folder / 'rows.db'}"


class PostgreSql(Table):
    needs_postgres = True

    def __init__(self, server, folder):
        super().__init__(server, folder)
        with self._engine.begin() as connection:
            connection.execute(sa.text(f'CREATE SCHEMA "{self.name}"'))

    def url(self):
        return self.aws.url

    def table(self):
        return f"{self.name}.rides"


class MariaDb(Table):
    needs_mariadb = True

    def __init__(self, server, folder):
        super().__init__(server, folder)
        with self._engine.begin() as connection:
            connection.execute(sa.text(f"CREATE DATABASE `{self.name}`"))

    def url(self):
        return self.aws.url

    def table(self):
        return f"{self.name}.rides"


PLACES = {"sqlite": Sqlite, "postgresql": PostgreSql, "mariadb": MariaDb}
