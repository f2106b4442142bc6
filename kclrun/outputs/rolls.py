"""Rows in rolls: files or objects that appear whole, each once, and are never replaced [K8, K9].

The rolls of a shard are a chain. The name of the first roll is the position at which the lease
began; the name of each other roll is the end of the roll before it. So two owners that write the
same rows want the same name, and one of them gets it: the other one begins again behind that roll.
This module does not know where rolls are kept.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Final, Protocol

from kclrun.errors import SettingsError, Superseded
from kclrun.model.output import ROLL_VERSION, Cursor, RollRecord, RowsOf
from kclrun.outputs.row_files import RowFormat

_COMMIT_BYTES: Final = 8


class RollUpload(Protocol):
    """The bytes of one roll that is being written."""

    @property
    def unsent_bytes(self) -> int:
        """The bytes that `finish` has to send or to make durable."""
        ...

    def send(self) -> None:
        """Send the bytes that may leave before the end is known. Raises: SinkError; they stay."""
        ...

    def write(self, data: bytes) -> None:
        """Take the next bytes; sends nothing."""
        ...

    def finish(self, record: RollRecord) -> bool:
        """Create the roll under its name. True once the roll is durable; False if another roll has
        the name. Raises: SinkError (it is called again); Superseded if no repetition can succeed,
        because bytes that were sent are gone."""
        ...

    def drop(self) -> None:
        """The roll is not finished: release what it holds."""
        ...


class Rolls(Protocol):
    """The place of the rolls of one shard."""

    def where(self, begin: Cursor) -> str:
        """The place of the roll in words."""
        ...

    def find(self, begin: Cursor) -> RollRecord | None:
        """The record of the roll that begins there; None if there is none. Raises: SinkError;
        SettingsError if something else has its name."""
        ...

    def new(self, begin: Cursor, commit: str) -> RollUpload:
        """A roll that begins there; sends nothing."""
        ...

    def check(self) -> str: ...

    def close(self) -> None:
        """Release connections. Idempotent."""
        ...


class _Roll:
    """The roll that grows: its rows, and the position of the records that emitted them."""

    def __init__(self, rolls: Rolls, form: RowFormat, begin: Cursor) -> None:
        self.begin = self.end = begin
        self.commit = secrets.token_hex(_COMMIT_BYTES)
        self.upload = rolls.new(begin, self.commit)
        self._file = form.new_file()
        self._is_sealed = False
        self.state = ""

    @property
    def unsent_bytes(self) -> int:
        return self.upload.unsent_bytes + self._file.waiting_bytes

    def add(self, rows: Sequence[Any], upto: Cursor) -> None:
        assert not self._is_sealed, "a commit that failed is repeated before rows are added"
        self.upload.send()  # raises before a row is taken
        self.upload.write(self._file.add(rows))
        self.end = upto

    def seal(self) -> None:
        """Write the end of the file. A request with it may be sent now, so no row is added any more
        [K6]."""
        if not self._is_sealed:
            self.upload.write(self._file.end())
            self._is_sealed = True


class RolledOutput:
    """Implements `ports.Output` over `Rolls`.

    If no row was added, `commit` creates nothing and returns the end of the last roll. The lease's
    row keeps that cursor beside its checkpoint, which moves on: the records between the two emitted
    no rows. So every owner knows the name of the next roll from the row, whatever became of
    checkpoints under way. At most one roll is ever created under that name, and it has all rows
    from the end of the chain to its own end. The next owner, if it finds no roll of that name,
    begins at its checkpoint. If a late roll of a former owner appears before its own, it is
    superseded and begins again behind the late roll. [V3, V7]
    """

    stores_cursor = True

    def __init__(self, of: RowsOf, form: RowFormat, rolls: Rolls) -> None:
        self._token = of.token
        self._form = form
        self.encode = form.encode  # as `Output.encode`, without a call of ours for each row
        self._rolls = rolls
        self._stored: Cursor | None = None  # the end of the chain
        self.decided = ""  # as `DecidingOutput`
        self._roll: _Roll | None = None  # the one that grows, or whose commit is repeated

    def begin(self, at: Cursor) -> Cursor:
        """As `Output.begin`: follow the chain from `at` to its end [K11]."""
        while (found := self._rolls.find(at)) is not None:
            end = Cursor.parse(found.end)
            where = self._rolls.where(at)
            if found.version > ROLL_VERSION or end <= at:
                raise SettingsError(f"{where} was written by a newer version of kclrun, or changed")
            if found.token > self._token:
                raise SettingsError(
                    f"{where} has the token {found.token}, and this lease is at {self._token}: the"
                    " lease table was restored or made again, or another fleet of this name writes"
                    " there. Give the output another place"
                )
            at, self.decided = end, found.state
        self._stored = at
        return at

    def add(self, rows: Sequence[Any], upto: Cursor) -> None:
        assert self._stored is not None, "begin() comes first"
        if self._roll is None:
            self._roll = _Roll(self._rolls, self._form, self._stored)
        self._roll.add(rows, upto)

    def decide(self, version: str, upto: Cursor) -> None:
        """As `DecidingOutput`. A roll without rows is created, too: an empty one."""
        self.add([], upto)
        assert self._roll is not None, "it was made"
        self._roll.state = version

    @property
    def unsent_bytes(self) -> int:
        return 0 if self._roll is None else self._roll.unsent_bytes

    def commit(self) -> Cursor:
        assert self._stored is not None, "begin() comes first"
        roll = self._roll
        if roll is not None:
            roll.seal()
            record = RollRecord(
                end=str(roll.end), commit=roll.commit, token=self._token, state=roll.state
            )
            if not roll.upload.finish(record):
                raise Superseded(
                    f"{self._rolls.where(roll.begin)} is another owner's: this lease begins again"
                    " behind it"
                )
            self._stored, self._roll = roll.end, None
        return self._stored

    def check(self) -> str:
        return self._rolls.check()

    def close(self) -> None:
        if self._roll is not None:
            self._roll.upload.drop()
            self._roll = None
        self._rolls.close()
