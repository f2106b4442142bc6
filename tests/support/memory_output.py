"""A destination of rows in memory, with the faults that a service or a process may have."""

from collections.abc import Sequence
from typing import Any

from kclrun.errors import SinkError, Superseded
from kclrun.model.output import Cursor
from kclrun.processor import Row


class Crash(BaseException):
    """The process dies here."""


class Destination:
    """A destination in memory that takes a commit from its last owner, at its last cursor."""

    def __init__(self, *, stores_cursor: bool) -> None:
        self.stores_cursor = stores_cursor
        self.rows: list[int] = []
        self.cursor: Cursor | None = None
        self.token = 0
        self.decided = ""


class MemoryOutput:
    """An owner's side. `fate` says what happens to the next commit."""

    def __init__(self, destination: Destination, token: int, fates: list[str]) -> None:
        self.destination = destination
        self.stores_cursor = destination.stores_cursor
        self.unsent: list[int] = []
        self._token = token
        self._fates = fates
        self._decision = ""

    def encode(self, row: Row) -> tuple[Any, int]:
        return row["n"], 10

    def begin(self, at: Cursor) -> Cursor:
        self.destination.token = max(self.destination.token, self._token)
        if not self.stores_cursor:
            return at
        self.began = self.upto = max(self.destination.cursor or at, at)
        return self.began

    def add(self, rows: Sequence[Any], upto: Cursor) -> None:
        fate = self._fates.pop() if self._fates else ""
        if fate == "refused":
            raise SinkError("no room")
        assert not self.stores_cursor or upto > self.upto, "a cursor is added once"
        self.unsent += rows
        self.upto = upto

    @property
    def decided(self) -> str:
        return self.destination.decided

    def decide(self, version: str, upto: Cursor) -> None:
        self._decision, self.upto = version, upto

    @property
    def unsent_bytes(self) -> int:
        return 10 * len(self.unsent)

    def commit(self) -> Cursor:
        fate = self._fates.pop() if self._fates else ""
        if fate == "refused":
            raise SinkError("away")
        if fate == "dies before":
            raise Crash
        there = self.destination
        if self.stores_cursor and there.token != self._token:
            raise Superseded("another owner")
        if not self.stores_cursor or there.cursor != self.upto:
            there.rows += self.unsent
            there.cursor = self.upto
            there.decided = self._decision
        if fate == "lost reply" and self.stores_cursor:
            raise SinkError("no answer")
        if fate == "dies after":
            raise Crash
        self.unsent = []
        return self.upto

    def check(self) -> str:
        return "memory"

    def close(self) -> None:
        """Nothing is held."""
