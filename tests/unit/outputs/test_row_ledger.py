"""The ledger of rows, by table: what user code does with its rows, and what a checkpoint covers."""

import re

import pytest

from kclrun.outputs.row_ledger import RowLedger
from tests.support.build import position as at


class Caller:
    """Calls of user code, written as text. `begin`, `end 10` and `raise 5` are a call; the number
    of `raise` is the acknowledged checkpoint. `emit` adds a row, `cover 5` requests a checkpoint,
    `leave 5` gives the rows of a checkpoint to the destination. One output counts rows."""

    def __init__(self, steps: str) -> None:
        self.ledger = RowLedger[int]()
        self.emitted = self.left = 0
        for step in steps.split(", "):
            name, *number = re.split(" ", step)
            getattr(self, name if name != "raise" else "raised")(*map(int, number))

    def begin(self) -> None:
        self.ledger.begin_call((self.emitted,))

    def emit(self) -> None:
        self.emitted += 1

    def end(self, position: int) -> None:
        self.cover(position)
        self.ledger.end_call()

    def cover(self, position: int) -> None:
        self.ledger.cut(at(position), (self.emitted,), (self.left,))

    def raised(self, *acknowledged: int) -> None:
        kept = self.ledger.kept(at(*acknowledged) if acknowledged else None, (self.left,))
        self.ledger.take_back(kept)
        (self.emitted,) = kept

    def leave(self, position: int) -> None:
        self.left = self.ledger.upto(at(position))[-1].counts[0]
        self.ledger.leave(at(position))

    def covered(self, position: int) -> int:
        return (self.ledger.covered(at(position)) or (self.left,))[0]


TWO_CALLS = "begin, emit, end 10, begin, emit, emit, end 20"
LOWER = "begin, emit, end 10, begin, emit, cover 5"


@pytest.mark.parametrize(
    ("steps", "position", "covered"),
    [
        (TWO_CALLS, 9, 0),
        (TWO_CALLS, 10, 1),
        (TWO_CALLS, 19, 1),
        (TWO_CALLS, 25, 3),
        # A checkpoint covers all rows emitted before it, also those of records above it.
        (LOWER, 4, 0),
        (LOWER, 5, 2),
        (LOWER, 10, 2),
        ("begin, emit, end 10, begin, cover 5", 5, 1),
        (f"{LOWER}, emit, end 20", 5, 2),
        (f"{LOWER}, emit, end 20", 20, 3),
        # A cut of the same call at a higher position is void.
        ("begin, emit, cover 9, emit, cover 4", 4, 2),
        ("begin, emit, cover 9, emit, cover 4", 9, 2),
        ("begin, emit, cover 9, emit, end 9", 9, 2),
        # A cut of an earlier call is not: this call may still raise.
        (f"{LOWER}, raise", 10, 1),
        (f"{LOWER}, raise", 5, 0),
        # A call that raised keeps what an acknowledged checkpoint covers.
        ("begin, emit, cover 9, emit, raise 9", 9, 1),
        ("begin, emit, cover 9, emit, raise 8", 9, 0),
        ("begin, emit, cover 3, emit, cover 9, emit, raise 3", 9, 1),
        (f"{LOWER}, emit, raise 5", 5, 2),
        (f"{LOWER}, emit, raise 5", 20, 2),
        # Rows that left are not counted as waiting, and do not come back.
        (f"{TWO_CALLS}, leave 10", 10, 1),
        (f"{TWO_CALLS}, leave 10", 20, 3),
        (f"{TWO_CALLS}, leave 25", 30, 3),
        (f"{LOWER}, leave 5, raise", 10, 2),
        (f"{LOWER}, leave 5, emit, end 20", 20, 3),
    ],
)
def test_a_checkpoint_covers_the_rows_that_were_emitted_before_it(steps, position, covered):
    assert Caller(steps).covered(position) == covered


@pytest.mark.parametrize(
    ("steps", "waiting"),
    [
        ("begin, end 10", 0),
        ("begin, emit, end 10, begin, end 20", 1),
        (TWO_CALLS, 2),
        (f"{TWO_CALLS}, leave 10", 1),
        (f"{TWO_CALLS}, leave 20", 0),
        (f"{LOWER}, leave 5", 0),
        ("begin, emit, end 10, begin, raise", 1),
        ("begin, emit, cover 4, raise", 0),
    ],
)
def test_only_rows_that_wait_have_cuts(steps, waiting):
    assert len(Caller(steps).ledger) == waiting


@pytest.mark.parametrize(
    ("steps", "position", "cuts", "replayed"),
    [
        (TWO_CALLS, 15, [10], [10]),
        (TWO_CALLS, 20, [10, 20], [10, 20]),
        # The rows of the first cut leave with those of the second; a destination whose cursor was
        # at 5 when the lease began has none of them.
        (LOWER, 5, [10, 5], []),
        (f"{LOWER}, emit, end 20", 7, [10, 5], []),
        (f"{LOWER}, emit, end 20", 10, [10, 5], [10, 5]),
    ],
)
def test_the_cuts_of_a_checkpoint_and_of_a_cursor(steps, position, cuts, replayed):
    ledger = Caller(steps).ledger
    assert [cut.position for cut in ledger.upto(at(position))] == [*map(at, cuts)]
    assert [cut.position for cut in ledger.replayed_upto(at(position))] == [*map(at, replayed)]
    assert ledger.has_any_upto(at(position)) is bool(cuts)


def test_what_is_left_of_a_merge_and_of_a_departure_is_covered_as_before():
    steps = f"{LOWER}, emit, end 20, begin, emit, end 30, begin, emit, end 40"
    merged, left = Caller(steps).ledger, Caller(steps).ledger
    merged._merge_at = 1
    merged.merge(at(30), [at(22)])  # rows leave up to 30 at least, and may be divided at 22
    assert [cut.position for cut in merged.upto(at(40))] == [*map(at, (20, 30, 40))]
    left.leave(at(20))
    assert not left.has_any_upto(at(20))
    assert [cut.counts for cut in left.upto(at(40))] == [(4,), (5,)]


def test_cuts_are_not_merged_across_the_cursor_of_a_destination():
    ledger = Caller(f"{LOWER}, emit, end 20").ledger
    ledger._merge_at = 1
    ledger.merge(at(20), [at(7)])
    assert [cut.position for cut in ledger.upto(at(20))] == [*map(at, (10, 5, 20))]
