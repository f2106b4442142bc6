"""The outputs of a lease process against destinations in memory: any order of batches, failures of
user code, checkpoints, refused and lost commits, crashes and new owners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kclrun.consuming import events
from kclrun.errors import SinkError, Superseded
from kclrun.model.output import Cursor
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.processor import Row
from kclrun.worker.outputs import Asked, Outputs, Pace
from tests.examples import examples

RECORDS = 24
NAMES = ("first", "second", "third")
AT_ONCE = Pace(0.0, 0, 1_000)
ROLLED = Pace(60.0, 40, 1_000)
FULL_SOON = Pace(60.0, 1_000, 30)


def at(number: int) -> ExtendedSequenceNumber:
    return ExtendedSequenceNumber(str(number)) if number else TRIM_HORIZON


def number_at(position: ExtendedSequenceNumber) -> int:
    return 0 if position == TRIM_HORIZON else int(position.sequence_number)


def rows_of(record: int, name: str) -> list[int]:
    """What record `record` emits to an output: none, one or two rows, not the same for each."""
    index = NAMES.index(name)
    return [100 * record + 10 * index + row for row in range((record + index) % 3)]


class Crash(BaseException):
    """The process dies here."""


class Destination:
    """A destination in memory that takes a commit from its last owner, at its last cursor."""

    def __init__(self, *, stores_cursor: bool) -> None:
        self.stores_cursor = stores_cursor
        self.rows: list[int] = []
        self.cursor: Cursor | None = None
        self.token = 0


class MemoryOutput:
    """An owner's side. `fate` says what happens to the next commit."""

    def __init__(self, destination: Destination, token: int, fates: list[str]) -> None:
        self.destination = destination
        self.stores_cursor = destination.stores_cursor
        self.unsent: list[int] = []
        self._token = token
        self._fates = fates

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


class World:
    """The lease's row and the destinations; they outlive every process."""

    def __init__(self, kinds: Sequence[tuple[bool, Pace]]) -> None:
        self.checkpoint, self.cursors = TRIM_HORIZON, dict[str, Cursor]()
        self.lives = 0
        self.kinds = dict(zip(NAMES, kinds, strict=False))
        self.destinations = {
            name: Destination(stores_cursor=stores) for name, (stores, _) in self.kinds.items()
        }

    def expected(self, name: str, upto: int) -> list[int]:
        return [row for record in range(1, upto + 1) for row in rows_of(record, name)]

    def write(self, upto: ExtendedSequenceNumber, cursors: dict[str, Cursor]) -> None:
        """The row's checkpoint, as the core writes it: nothing below it may lack its rows."""
        if upto <= self.checkpoint:
            return
        self.checkpoint, self.cursors = upto, cursors
        for name, destination in self.destinations.items():
            expected = self.expected(name, number_at(upto))
            if destination.stores_cursor:
                assert destination.rows[: len(expected)] == expected
            else:
                assert set(destination.rows) >= set(expected)


class Life:
    """One lease process, from its claim to its end."""

    def __init__(self, world: World, fates: list[str], *, file_beside: bool) -> None:
        world.lives += 1
        self.world = world
        self.fates = fates
        self.committed: list[events.OutputsCommitted] = []
        self.is_held = self.is_over = False
        self.now = Instant(1.0)
        self.outputs = Outputs(
            [
                (name, MemoryOutput(destination, world.lives, fates), world.kinds[name][1])
                for name, destination in world.destinations.items()
            ],
            post=self._post,
            hold=self._hold,
            refuse=lambda reason: None,
            now=lambda: self.now,
        )
        start, cuts = self.outputs.begin(
            world.checkpoint, world.cursors, may_adopt=not file_beside
        )
        self.cuts = [number_at(cut) for cut in cuts]
        self.done = number_at(start)

    def _post(self, event: events.Event) -> None:
        if isinstance(event, events.OutputsCommitted):
            self.committed.append(event)
        self.is_over = self.is_over or isinstance(event, events.OutputsSuperseded)

    def _hold(self, is_held: bool) -> None:  # noqa: FBT001 - as the queue's
        self.is_held = is_held

    def batch(self, size: int, *, asks_at: int | None, raises: bool) -> None:
        """Records up to a cut; user code may ask for a checkpoint at one of them, and raise."""
        if self.is_held:
            self.turn()
            assert not self.is_held or self.fates, "a destination that takes all leaves room"
        end = min([RECORDS, self.done + size, *[cut for cut in self.cuts if cut > self.done]])
        first = self.done + 1
        while True:
            self.outputs.begin_batch()
            for record in range(first, end + 1):
                for name in self.world.destinations:
                    for row in rows_of(record, name):
                        self.outputs.emit({"n": row}, name)
                if record == asks_at and record < end:
                    self.outputs.cover(at(record))
                    self.outputs.commit(Asked(at(record), must=True))
                    self.turn()
            if not raises:
                break
            raises = False
            self.outputs.take_back_batch(self.world.checkpoint)
            first = max(first, number_at(self.outputs.handed or TRIM_HORIZON) + 1)
            first = max(first, number_at(self.world.checkpoint) + 1)
        self.outputs.end_batch(at(end))
        self.outputs.settle(at(end))
        self.done = end

    def turn(self) -> None:
        self.is_over = not self.outputs.turn() or self.is_over
        for event in self.committed:
            self.world.write(event.upto, dict(event.cursors))
        self.committed.clear()

    def commit(self, *, must: bool) -> None:
        self.outputs.commit(Asked(at(self.done), must))
        self.turn()


STEPS = st.tuples(
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(1, RECORDS)),
    st.booleans(),
    st.sampled_from(["", "turn", "ask", "must", "crash", "roll"]),
)
FATES = st.lists(st.sampled_from(["", "refused", "lost reply", "dies before", "dies after"]))
KINDS = st.lists(
    st.tuples(st.booleans(), st.sampled_from([AT_ONCE, ROLLED, FULL_SOON])), min_size=1, max_size=3
)


@examples(300)
@given(
    kinds=KINDS,
    lives=st.lists(st.tuples(st.lists(STEPS, max_size=8), FATES), max_size=4),
    file_beside=st.booleans(),
)
def test_every_row_is_at_each_destination_once_where_it_stores_its_cursor(
    kinds: list[tuple[bool, Pace]],
    lives: list[tuple[list[tuple[int, int | None, bool, str]], list[str]]],
    file_beside: bool,  # noqa: FBT001 - drawn
) -> None:
    world = World(kinds)
    for steps, fates in lives:
        _live(Life(world, list(fates), file_beside=file_beside), steps)
    last = Life(world, [], file_beside=file_beside)
    while last.done < RECORDS:
        last.batch(5, asks_at=None, raises=False)
        last.turn()
    last.commit(must=True)
    assert world.checkpoint == at(RECORDS)
    for name, destination in world.destinations.items():
        expected = world.expected(name, RECORDS)
        if destination.stores_cursor:
            assert destination.rows == expected
        else:
            assert sorted(set(destination.rows)) == expected


def _live(life: Life, steps: list[tuple[int, int | None, bool, str]]) -> None:
    try:
        for size, asks_at, raises, then in steps:
            if life.done >= RECORDS or life.is_over:
                return
            life.batch(size, asks_at=asks_at, raises=raises)
            match then:
                case "turn":
                    life.turn()
                case "ask" | "must":
                    life.commit(must=then == "must")
                case "roll":
                    life.now = Instant(life.now + 61.0)
                    life.turn()
                case "crash":
                    return
                case _:
                    pass
    except Crash:
        return
