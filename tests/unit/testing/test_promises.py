"""`assert_output_contract` finds each broken promise, by an output with that bug, and passes those
that keep all of them."""

import contextlib
import sqlite3
from typing import ClassVar

import pytest

from kclrun import HaltShard, Output
from kclrun.errors import ProcessorLoadError, RowsRefused, SettingsError, Superseded
from kclrun.testing import assert_output_contract
from processors.sqlite_rows import SqliteRows

COLUMNS = ["rider", "miles"]
ROWS = [{"rider": f"r{number}", "miles": number} for number in range(6)]
REFUSED = {"rider": None, "miles": 1}


class Database:
    """A file of SQLite with the table of the rows."""

    def __init__(self, folder):
        self.path = folder / "rides.db"
        self.options = {"database": str(self.path), "table": "rides", "columns": COLUMNS}

    def fresh(self):
        self.path.unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(self.path)) as db, db:
            db.execute("PRAGMA synchronous = OFF")
            db.execute("CREATE TABLE rides (rider NOT NULL, miles INTEGER)")

    def rows(self):
        with contextlib.closing(sqlite3.connect(self.path)) as db:
            found = db.execute("SELECT rider, miles FROM rides ORDER BY rowid").fetchall()
        return [dict(zip(COLUMNS, row, strict=True)) for row in found]


class Kept(SqliteRows):
    """Keeps every promise. No disk is waited for: no machine loses power here."""

    def open(self, context):
        super().open(context)
        self._db.execute("PRAGMA synchronous = OFF")


class LosesTheLastRow(Kept):
    def commit(self, rows, after, upto):
        super().commit(rows[:-1], after, upto)


class ForgetsTheCursor(Kept):
    def begin(self):
        super().begin()


class StoresNoCursor(Kept):
    def commit(self, rows, after, upto):
        with self._db:
            self._insert_all(rows)


class InventsACursor(Kept):
    def begin(self):
        stored = super().begin()
        return stored and stored.partition("/")[0]


class BeginsWithACursor(Kept):
    def begin(self):
        return super().begin() or "TRIM_HORIZON"


class RowsBeforeTheCursor(Kept):
    """Two transactions."""

    def commit(self, rows, after, upto):
        if self._stored()[0] == upto:
            return
        if self._stored() != (after, self._token):
            raise Superseded("moved")
        with self._db:
            self._insert_all(rows)
        with self._db:
            self._db.execute("UPDATE cursors SET cursor = ? WHERE key = ?", (upto, self._key))


class CursorBeforeTheRows(Kept):
    """Two transactions, the other way round."""

    def commit(self, rows, after, upto):
        with self._db:
            moved = self._db.execute(
                "UPDATE cursors SET cursor = ? WHERE key = ? AND token = ? AND cursor IS ?",
                (upto, self._key, self._token, after),
            )
        if moved.rowcount == 1:
            with self._db:
                self._insert_all(rows)
        elif self._stored() != (upto, self._token):
            raise Superseded("moved")


class AcceptsAnOlderOwner(Kept):
    """Neither the token nor the cursor is a condition."""

    def commit(self, rows, after, upto):
        if self._stored()[0] == upto:
            return
        with self._db:
            self._db.execute("UPDATE cursors SET cursor = ? WHERE key = ?", (upto, self._key))
            self._insert_all(rows)


class AppliesTwice(Kept):
    def commit(self, rows, after, upto):
        with self._db:
            self._db.execute("UPDATE cursors SET cursor = ? WHERE key = ?", (upto, self._key))
            self._insert_all(rows)


class KnowsTheTokenAlone(Kept):
    """A request that arrives late has the token of its owner."""

    def commit(self, rows, after, upto):
        if self._stored()[0] == upto:
            return
        with self._db:
            moved = self._db.execute(
                "UPDATE cursors SET cursor = ? WHERE key = ? AND token = ?",
                (upto, self._key, self._token),
            )
            if moved.rowcount != 1:
                raise Superseded("a later owner")
            self._insert_all(rows)


class DropsInSilence(Kept):
    def commit(self, rows, after, upto):
        with contextlib.suppress(Superseded):
            super().commit(rows, after, upto)


class OneCursorForAllShards(Kept):
    def open(self, context):
        super().open(context)
        self._key = context.name
        self._token = 1


class SwallowsARefusal(Kept):
    def _insert_all(self, rows):
        with contextlib.suppress(RowsRefused):
            super()._insert_all(rows)


class RefusesInOtherWords(Kept):
    def commit(self, rows, after, upto):
        try:
            super().commit(rows, after, upto)
        except RowsRefused as error:
            raise ValueError(str(error)) from None


class KeepsWhatItRefused(Kept):
    def commit(self, rows, after, upto):
        try:
            super().commit(rows, after, upto)
        except RowsRefused:
            with self._db:
                self._insert_all(rows[:1])
            raise


class TriesForGood(Kept):
    def try_rows(self, rows):
        with self._db:
            self._insert_all(rows)


class ChangesRows(Kept):
    def commit(self, rows, after, upto):
        super().commit(rows, after, upto)
        for row in rows:
            row["written"] = True


class WritesWhenItCloses(Kept):
    """The last commit waits for the next one."""

    waiting = ()

    def commit(self, rows, after, upto):
        if self.waiting:
            super().commit(*self.waiting)
        self.waiting = (rows, after, upto)

    def close(self):
        if self.waiting:
            super().commit(*self.waiting)
        super().close()


class ClosesWithoutTheRest(Kept):
    def commit(self, rows, after, upto):
        super().commit(rows[:1], after, upto)
        self._insert_all(rows[1:])  # in a transaction that nothing ends


class SwallowsAnError(Kept):
    def commit(self, rows, after, upto):
        with contextlib.suppress(OSError):
            super().commit(rows, after, upto)
            return


class LocksItself(Kept):
    """What a crash leaves behind keeps the next owner out."""

    def begin(self):
        with self._db:
            self._db.execute("CREATE TABLE IF NOT EXISTS busy (key)")
        if self._db.execute("SELECT 1 FROM busy").fetchone():
            raise RuntimeError("it is busy")
        return super().begin()

    def commit(self, rows, after, upto):
        with self._db:
            self._db.execute("INSERT INTO busy VALUES ('me')")
        try:
            super().commit(rows, after, upto)
        except Exception:
            self._free()
            raise
        self._free()

    def _free(self):
        with self._db:
            self._db.execute("DELETE FROM busy")


class ChecksWithARow(Kept):
    def check(self):
        with self._db:
            self._insert_all([{"rider": "check", "miles": 0}])


STORING = [
    (LosesTheLastRow, "commit returned, and the destination does not have its rows"),
    (ForgetsTheCursor, "commit forgets the cursor: begin returns None after it"),
    (StoresNoCursor, "commit forgets the cursor: begin returns None after it"),
    (InventsACursor, "begin returns a cursor that is not of the last commit"),
    (BeginsWithACursor, "begin returns a cursor where none is stored"),
    (RowsBeforeTheCursor, "commit writes rows without their cursor: after a crash at line"),
    (CursorBeforeTheRows, "commit stores a cursor without its rows: after a crash at line"),
    (AcceptsAnOlderOwner, "the write of an older owner is accepted after a newer one has begun"),
    (AppliesTwice, "a commit that is repeated is applied twice"),
    (KnowsTheTokenAlone, "is not `after`: a request that arrives late would write its rows twice"),
    (DropsInSilence, "commit returns where it should raise Superseded: its rows are not there"),
    (OneCursorForAllShards, "a commit of one shard is refused because of another shard's"),
    (SwallowsARefusal, "commit swallows a refusal: it returned"),
    (RefusesInOtherWords, "commit raises another error than RowsRefused for a row that is refused"),
    (KeepsWhatItRefused, "a commit that is refused leaves rows behind"),
    (TriesForGood, "try_rows leaves rows behind"),
    (ChangesRows, "commit changes the rows that it gets"),
    (WritesWhenItCloses, "close writes rows: they were not there when the call returned"),
    (ClosesWithoutTheRest, "commit returned, and the destination does not have its rows"),
    (SwallowsAnError, "commit swallows an error: after one at line"),
    (LocksItself, "it cannot be opened again after a crash at line"),
    (ChecksWithARow, "check leaves rows behind"),
]


def check(output, database, **more):
    assert_output_contract(
        output,
        options=database.options,
        rows=ROWS,
        read=database.rows,
        fresh=database.fresh,
        **({"refused": REFUSED} | more),
    )


@pytest.fixture
def database(tmp_path):
    return Database(tmp_path)


@pytest.mark.seconds
def test_an_output_with_a_cursor_that_keeps_every_promise_passes(database):
    check(Kept, database)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("output", "promise"), STORING, ids=lambda value: getattr(value, "__name__", "")
)
def test_each_broken_promise_of_an_output_with_a_cursor_is_named(output, promise, database):
    with pytest.raises(AssertionError) as found:
        check(output, database)

    first = str(found.value).partition("\n")[0]
    assert first.startswith(f"{output.__name__}: ")
    assert promise in first


class Accepted(Output):
    """Keeps every promise, over an API that takes a row at a time."""

    api: ClassVar = []

    def send(self, rows):
        for row in rows:
            self._put(dict(row))

    def _put(self, row):
        if row["n"] is None:
            raise RowsRefused("n is missing")
        self.api.append(row)


class SendsAllButTheLast(Accepted):
    def send(self, rows):
        super().send(rows[:-1] or rows)


class SendsBackwards(Accepted):
    def send(self, rows):
        super().send(rows[::-1])


class KeepsForLater(Accepted):
    """Every second call sends."""

    waiting = ()

    def send(self, rows):
        super().send(self.waiting)
        self.waiting = rows

    def close(self):
        super().send(self.waiting)


class NeverSends(Accepted):
    def send(self, rows):
        self.waiting = rows


class IgnoresFailures(Accepted):
    def send(self, rows):
        for row in rows:
            with contextlib.suppress(OSError):
                self._put(dict(row))


class IgnoresRefusals(Accepted):
    def send(self, rows):
        for row in rows:
            with contextlib.suppress(RowsRefused):
                self._put(dict(row))


class EmptiesRows(Accepted):
    def send(self, rows):
        while rows:
            self._put(dict(rows.pop(0)))


class SendsEachRowOnce(Accepted):
    """It remembers in its process what it had not sent yet."""

    begun: ClassVar = []

    def send(self, rows):
        for row in rows:
            if row not in self.begun:
                self.begun.append(row)
                self._put(dict(row))


class NeedsAnotherClose(Accepted):
    is_open = False

    def open(self, context):
        if type(self).is_open:
            raise RuntimeError("it is open already")
        type(self).is_open = True

    def close(self):
        type(self).is_open = False


SENDING = [
    (SendsAllButTheLast, "send returned, and not all of its rows are there"),
    (SendsBackwards, "send returned, and not all of its rows are there"),
    (KeepsForLater, "close writes rows: they were not there when the call returned"),
    (NeverSends, "send returned, and not all of its rows are there"),
    (IgnoresFailures, "send swallows an error: after one at line"),
    (IgnoresRefusals, "send swallows a refusal: it returned"),
    (EmptiesRows, "send changes the rows that it gets"),
    (SendsEachRowOnce, "rows are lost after a crash at line"),
]
NUMBERS = [{"n": number} for number in range(6)]


def fresh():
    Accepted.api.clear()
    SendsEachRowOnce.begun.clear()


def check_sending(output):
    fresh()
    assert_output_contract(
        output, rows=NUMBERS, read=lambda: Accepted.api, fresh=fresh, refused={"n": None}
    )


def test_an_output_that_sends_and_keeps_every_promise_passes():
    check_sending(Accepted)


@pytest.mark.parametrize(
    ("output", "promise"), SENDING, ids=lambda value: getattr(value, "__name__", "")
)
def test_each_broken_promise_of_an_output_that_sends_is_named(output, promise):
    with pytest.raises(AssertionError) as found:
        check_sending(output)

    first = str(found.value).partition("\n")[0]
    assert first.startswith(f"{output.__name__}: ")
    assert promise in first


def test_what_could_not_run_is_refused_as_by_check(database):
    class Waits(Accepted):
        async def send(self, rows): ...

    class Both(SqliteRows):
        def send(self, rows): ...

    with pytest.raises(ProcessorLoadError, match="Waits: send is `async def`"):
        check_sending(Waits)
    with pytest.raises(ProcessorLoadError, match="defines begin and commit and send"):
        check(Both, database)
    database.options["tables"] = 1
    with pytest.raises(SettingsError, match="SqliteOptions, which has no tables"):
        check(SqliteRows, database)
    with pytest.raises(ValueError, match="6 or more"):
        assert_output_contract(Accepted, rows=NUMBERS[:2], read=list, fresh=fresh)


def test_a_halt_is_not_taken_for_a_refusal():
    class Halts(Accepted):
        def _put(self, row):
            if row["n"] is None:
                raise HaltShard("for a person")
            super()._put(row)

    with pytest.raises(AssertionError, match="swallows a refusal"):
        check_sending(Halts)


class ByKey(Output):
    """A folder for each key, as it were. A commit is one assignment."""

    stored: ClassVar = {}

    def open(self, context):
        self.key = context.key

    def begin(self):
        return ByKey.stored.get(self.key, (None, []))[0]

    def commit(self, rows, after, upto):
        cursor, there = ByKey.stored.get(self.key, (None, []))
        if cursor == upto:
            return
        if cursor != after:
            raise Superseded("another owner moved the cursor")
        ByKey.stored = {**ByKey.stored, self.key: (upto, [*there, *rows])}


def test_rows_of_two_shards_may_be_read_in_any_order():
    def fresh():
        ByKey.stored = {}

    def read():
        return [row for _, rows in reversed(ByKey.stored.values()) for row in rows]

    assert_output_contract(ByKey, rows=ROWS, read=read, fresh=fresh)
