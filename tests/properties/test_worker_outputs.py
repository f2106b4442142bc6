"""The outputs of a lease process against destinations in memory: any order of batches, failures of
user code, checkpoints, refused and lost commits, crashes and new owners."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kclrun.lease import events
from kclrun.lease.commands import CommitOutputs
from kclrun.model.output import Cursor
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.outputs.lanes import Pace
from kclrun.outputs.sending import Outputs
from tests.examples import examples
from tests.support.build import position as at
from tests.support.memory_output import Crash, Destination, MemoryOutput
from tests.support.outputs_host import FakeHost

RECORDS = 24
NAMES = ("first", "second", "third")
AT_ONCE = Pace(0.0, 0, 1_000)
ROLLED = Pace(60.0, 40, 1_000)
FULL_SOON = Pace(60.0, 1_000, 30)


def number_at(position: ExtendedSequenceNumber) -> int:
    return 0 if position == TRIM_HORIZON else int(position.sequence_number)


def rows_of(record: int, name: str) -> list[int]:
    """What record `record` emits to an output: none, one or two rows, not the same for each."""
    index = NAMES.index(name)
    return [100 * record + 10 * index + row for row in range((record + index) % 3)]


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

    def __init__(
        self, world: World, fates: list[str], *, file_beside: bool, is_manual: bool
    ) -> None:
        world.lives += 1
        self.world = world
        self.fates = fates
        self.committed: list[events.OutputsCommitted] = []
        self.is_over = False
        self.host = FakeHost(self._post)
        self.now = Instant(1.0)
        self.outputs = Outputs(
            [
                (name, MemoryOutput(destination, world.lives, fates), world.kinds[name][1])
                for name, destination in world.destinations.items()
            ],
            self.host,
            now=lambda: self.now,
            is_manual=is_manual,
        )
        start, cuts = self.outputs.begin(world.checkpoint, world.cursors, may_adopt=not file_beside)
        self.cuts = [number_at(cut) for cut in cuts]
        self.done = number_at(start)

    def _post(self, event: events.Event) -> None:
        if isinstance(event, events.OutputsCommitted):
            self.committed.append(event)
        ends = events.OutputsSuperseded | events.OutputsRefused
        self.is_over = self.is_over or isinstance(event, ends)

    def batch(self, size: int, *, asks_at: int | None, raises: bool) -> None:
        """Records up to a cut; user code may ask for a checkpoint at one of them, and raise."""
        while self.host.is_held and not self.is_over:
            may_fail = bool(self.fates)
            self.turn()
            assert may_fail or not self.host.is_held, "a destination that takes all leaves room"
        end = min([RECORDS, self.done + size, *[cut for cut in self.cuts if cut > self.done]])
        first = self.done + 1
        while True:
            self.outputs.rows.begin_batch()
            for record in range(first, end + 1):
                for name in self.world.destinations:
                    for row in rows_of(record, name):
                        self.outputs.rows.emit_to(name)({"n": row})
                if asks_at is not None and record == self.done + asks_at and record < end:
                    self.outputs.rows.cover(at(record))
                    self.outputs.commit(CommitOutputs(at(record), must=True))
                    self.turn()
            if not raises:
                break
            raises = False
            self.outputs.rows.take_back_batch(self.world.checkpoint)
            first = max(first, number_at(self.outputs.rows.sent or TRIM_HORIZON) + 1)
            first = max(first, number_at(self.world.checkpoint) + 1)
        self.outputs.rows.end_batch(at(end))
        self.outputs.settle(at(end))
        self.done = end

    def turn(self) -> None:
        self.is_over = not self.outputs.turn() or self.is_over
        for event in self.committed:
            self.world.write(event.upto, dict(event.cursors))
        self.committed.clear()

    def commit(self, *, must: bool) -> None:
        self.outputs.commit(CommitOutputs(at(self.done), must))
        self.turn()


STEPS = st.tuples(
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(0, 5)),
    st.booleans(),
    st.sampled_from(["", "turn", "ask", "must", "crash", "roll"]),
)
FATES = st.lists(
    st.sampled_from(["", "", "refused", "lost reply", "lost reply", "dies before", "dies after"]),
    min_size=2,
    max_size=12,
)
KINDS = st.lists(
    st.tuples(st.booleans(), st.sampled_from([AT_ONCE, ROLLED, FULL_SOON])), min_size=1, max_size=3
)


@examples(600)
@given(
    kinds=KINDS,
    lives=st.lists(
        st.tuples(st.lists(STEPS, min_size=2, max_size=8), FATES), min_size=1, max_size=4
    ),
    file_beside=st.booleans(),
    is_manual=st.booleans(),
)
def test_every_row_is_at_each_destination_once_where_it_stores_its_cursor(
    kinds, lives, file_beside, is_manual
):
    world = World(kinds)
    for steps, fates in lives:
        _live(Life(world, list(fates), file_beside=file_beside, is_manual=is_manual), steps)
    last = Life(world, [], file_beside=file_beside, is_manual=is_manual)
    while last.done < RECORDS:
        last.batch(1, asks_at=None, raises=False)
        last.commit(must=is_manual)
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
