"""The traces of the commit rules over real destinations: what broke outputs as they were first
written. The list of all traces: docs/explanation/commits.md.
"""

import pytest

from kclrun.errors import Superseded
from kclrun.lease import events
from kclrun.lease.commands import CommitOutputs
from kclrun.model.time import Instant
from kclrun.outputs import rolled_files
from kclrun.outputs.lanes import Pace
from kclrun.outputs.sending import Outputs
from tests.contract.output_places import CsvFiles, Files, Objects, ParquetObjects
from tests.contract.sql_places import Sqlite
from tests.contract.test_outputs import OF, START, at, begun, emit, numbers, owner
from tests.support.outputs_host import FakeHost

ROLLED = {"s3": Objects, "s3 parquet": ParquetObjects, "files": Files, "files csv": CsvFiles}


@pytest.fixture
def make(aws, tmp_path):
    """Makes places, each empty."""
    made = []

    def make_one(kind):
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(kind(aws, folder))
        return made[-1]

    yield make_one
    for place in reversed(made):
        place.close()


def rolls(place):
    """The names of the rolls that a reader sees."""
    if isinstance(place, Objects):
        return [name for name in place.names() if "/_kclrun/" not in name]
    root = place.folder / "rows"
    return sorted(str(path.relative_to(root)) for path in root.glob("**/[!.]*.*"))


@pytest.mark.parametrize("kind", ROLLED)
def test_r3_rolls_of_equal_bytes_and_other_ends_do_not_replace_each_other(make, kind):
    """The last records of one owner emit nothing: two objects with one ETag."""
    place = make(ROLLED[kind])
    former, after = begun(place, OF), begun(place, owner(11))
    emit(former, 1, 2)
    emit(after, 1, 2, upto=5)

    assert former.commit() == at(2)
    with pytest.raises(Superseded):
        after.commit()

    assert place.open(owner(12)).begin(START) == at(2)
    assert numbers(place) == [1, 2]


@pytest.mark.parametrize("kind", ROLLED)
def test_r4_the_name_of_a_roll_says_where_it_begins_and_nothing_else(make, kind):
    """A name with the token, the end or the rows would give two owners two rolls of one begin."""
    names = []
    for token, last in ((10, 2), (99, 4)):
        place = make(ROLLED[kind])
        output = begun(place, owner(token))
        emit(output, 1, last)
        output.commit()
        names.append(rolls(place))

    assert names[0] == names[1]
    assert len(names[0]) == 1


def test_r6_a_roll_that_the_row_has_passed_may_be_removed_by_its_reader(make):
    place = make(Objects)
    output = begun(place, OF)
    for first in (1, 3):
        emit(output, first, first + 1)
        output.commit()
    for key in place.names():
        place.s3.delete_object(Bucket=place.name, Key=key)

    after = place.open(owner(11))
    assert after.begin(at(4)) == at(4)  # the row's cursor
    emit(after, 5, 6)
    assert after.commit() == at(6)
    assert numbers(place) == [5, 6]


@pytest.mark.parametrize("kind", ["files", "files csv"])
def test_r7a_rows_that_a_lost_host_left_behind_the_checkpoint_are_there_once(make, kind):
    """A wrote rows 1 and 2 and died before the checkpoint; B goes on in the folder they share."""
    place = make(ROLLED[kind])
    lost = begun(place, OF)
    emit(lost, 1, 2)
    lost.commit()

    after = place.open(owner(11))
    assert after.begin(START) == at(2)
    emit(after, 3, 3)
    after.commit()

    assert place.open(owner(12)).begin(at(3)) == at(3)  # A's host again
    assert numbers(place) == [1, 2, 3]


@pytest.mark.parametrize("kind", ["files", "files csv"])
def test_r7b_an_owner_that_still_has_its_descriptor_writes_into_no_file_of_the_next(
    make, kind, monkeypatch
):
    monkeypatch.setattr(rolled_files, "_SYNC_BYTES", 1)
    place = make(ROLLED[kind])
    paused = begun(place, OF)
    emit(paused, 1, 4)  # written, and not visible
    after = begun(place, owner(11))
    emit(after, 1, 3)
    assert after.commit() == at(3)

    emit(paused, 5, 8)
    with pytest.raises(Superseded):
        paused.commit()
    paused.close()

    assert numbers(place) == [1, 2, 3]


class Life:
    """The outputs `s3` and `sql` of one owner of the lease, as its process has them."""

    def __init__(self, s3, sql, token, checkpoint, cursors):
        self._events = []
        pace = Pace(0.0, 0, 2**20)
        self.outputs = Outputs(
            [(name, place.open(owner(token)), pace) for name, place in (("s3", s3), ("sql", sql))],
            FakeHost(self._events.append),
            now=lambda: Instant(0.0),
        )
        self.start, self.cuts = self.outputs.begin(checkpoint, cursors, may_adopt=True)

    def deliver(self, number):
        """One record whose row goes to both."""
        self.outputs.rows.begin_batch()
        for name in ("s3", "sql"):
            self.outputs.rows.emit_to(name)({"shard": OF.shard_id, "n": number})
        self.outputs.rows.end_batch(at(number).position)
        self.outputs.settle(at(number).position)

    def commit(self, number):
        """Whether both outputs answer that they have the rows up to this record."""
        self.outputs.commit(CommitOutputs(at(number).position, must=True))
        self.outputs.turn()
        return isinstance(self._events[-1], events.OutputsCommitted)


@pytest.mark.parametrize("keeps_cursors", [True, False])
def test_v7_an_output_that_is_ahead_is_followed_from_its_own_cursor(make, keeps_cursors):
    s3, sql = make(Objects), make(Sqlite)
    p0 = Life(s3, sql, 10, START.position, {})
    p0.deliver(1)
    p0.deliver(2)
    s3.fail("late")
    assert not p0.commit(2)  # PUT 0..2 has no answer, and p0 is gone
    s3.land()

    p1 = Life(s3, sql, 11, START.position, {})
    assert (p1.start, p1.cuts) == (START.position, (at(2).position,))
    p1.deliver(1)
    assert p1.commit(1)
    cursors = p1.outputs.cursors() if keeps_cursors else {}

    p2 = Life(s3, sql, 12, at(1).position, cursors)
    p2.deliver(2)
    assert p2.commit(2)

    assert numbers(sql) == [1, 2]
    # Without the cursor in the row nothing begins at 1, and the rule is broken.
    assert numbers(s3) == ([1, 2] if keeps_cursors else [1, 2, 2])
