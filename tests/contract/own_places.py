"""The outputs of `processors/`, which users write, for the contract of `ports.Output`."""

import contextlib
import json
import sqlite3

from kclrun.errors import Superseded
from kclrun.model.output import OutputDestination
from kclrun.output import OutputContext
from kclrun.outputs.user_output import key_of, open_user_output
from processors.http_rows import HttpOptions, HttpRows
from processors.sqlite_rows import SqliteOptions, SqliteRows
from tests.contract.output_places import Place
from tests.support.http_service import HttpService

COLUMNS = ("shard", "n")


class OwnOutput(Place):
    kind = None

    def options(self):
        raise NotImplementedError

    def open(self, of):
        place = OutputDestination(name="output", use="own:Rows")
        context = OutputContext(
            name=place.name,
            options=self.options(),
            application=of.application,
            stream=of.stream,
            shard_id=of.shard_id,
            key=key_of(of, place.name),
            fencing_token=of.token,
        )
        return open_user_output(self.made(), f"{self.name}:{self.kind.__name__}", context)

    def made(self):
        return self.kind


class OwnTable(OwnOutput):
    """Its late request is a whole transaction that arrives as the client sent it."""

    kind = SqliteRows
    faults = frozenset({"refused", "throttled", "lost request", "lost reply", "late"})

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._faults = []
        self._late = []
        self._path = self.folder / "own.db"
        with self._connected() as connection:
            connection.execute("CREATE TABLE own (shard, n)")

    @contextlib.contextmanager
    def _connected(self):
        with contextlib.closing(sqlite3.connect(self._path)) as connection:
            yield connection

    def options(self):
        return SqliteOptions(str(self._path), "own", COLUMNS)

    def made(self):
        place = self

        class Met(SqliteRows):
            def open(self, context):
                self.context = context
                super().open(context)
                self._db.execute("PRAGMA synchronous = OFF")

            def commit(self, *asked):
                place.meet(self, super().commit, asked)

        return Met

    def meet(self, output, commit, asked):
        fault = self._faults.pop(0) if self._faults else None
        if fault == "late":
            self._late.append((output.context, asked))
        elif fault == "lost reply":
            commit(*asked)
        elif fault is None:
            return commit(*asked)
        raise OSError("the connection is lost")

    def fail(self, fault, times=1):
        self._faults += [fault] * times

    def land(self):
        late, self._late = self._late, []
        for context, asked in late:
            output = SqliteRows()
            output.open(context)
            with contextlib.suppress(Superseded):
                output.commit(*asked)
            output.close()

    def rows(self):
        with self._connected() as connection:
            found = connection.execute("SELECT shard, n FROM own ORDER BY shard, n").fetchall()
        return [dict(zip(COLUMNS, row, strict=True)) for row in found]


class OwnApi(OwnOutput):
    """It knows no faults: rows are sent as they are added, and not in the commit after them."""

    kind = HttpRows

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._rows = []
        self._service = HttpService(self._answer)

    def options(self):
        return HttpOptions(f"{self._service.url}/rows")

    def _answer(self, method, path, headers, body):
        self._rows += json.loads(body)
        return 200, {}, b""

    def rows(self):
        return sorted(self._rows, key=lambda row: (row["shard"], row["n"]))

    def close(self):
        self._service.close()


SENDING = {"own api": OwnApi}
PLACES = {"own table": OwnTable, **SENDING}
