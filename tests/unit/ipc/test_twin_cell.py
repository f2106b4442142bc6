"""The twin cell: a value that is never seen torn, whatever stops its writer."""

import itertools

import pytest

from kclrun.ipc.seqlock import NoValue, SeqlockCell

SIZE = 24
VALUES = [bytes([65 + n]) * SIZE for n in range(6)]


def cell(buffer):
    return SeqlockCell(buffer, 0, SIZE)


def fresh():
    return bytearray(SeqlockCell.size_bytes(SIZE))


def test_untouched_memory_is_empty_and_not_unreadable():
    assert cell(fresh()).load() is NoValue.EMPTY


def test_the_last_value_stored_is_read():
    buffer = fresh()
    writer = cell(buffer)
    for value in VALUES:
        writer.store(value)
        assert cell(buffer).load() == value


class InterruptedReader(SeqlockCell):
    """Between its looks at the two copies, the first time, something befalls the memory."""

    def befall(self, what):
        self._what = what

    def _copy(self, index):
        if index == 1 and self._what is not None:
            what, self._what = self._what, None
            what()
        return super()._copy(index)


class TornReader(SeqlockCell):
    """A writer is inside both copies at each of its looks."""

    looks = 0

    def _copy(self, index):
        self.looks += index == 1
        return b"\xff" + super()._copy(index)[1:]


def test_a_reader_that_meets_the_writer_in_both_copies_gives_up_after_eight_tries():
    buffer = fresh()
    cell(buffer).store(VALUES[0])
    reader = TornReader(buffer, 0, SIZE)

    assert reader.load() is NoValue.UNREADABLE
    assert reader.looks == 8


@pytest.mark.parametrize("stores", [1, 2, 3, 4])
def test_a_reader_that_is_overtaken_by_stores_sees_none_older_than_the_last_before(
    stores, stoppable, killed_after
):
    """Its first look was at a copy that was replaced since, its second finds the other one torn."""
    buffer = stoppable(fresh())
    writer = cell(buffer)
    writer.store(b"a" * SIZE)
    writer.store(b"b" * SIZE)
    reader = InterruptedReader(buffer, 0, SIZE)

    def overtake():
        for value in VALUES[:stores]:
            writer.store(value)
        killed_after(buffer, SIZE // 2, lambda: writer.store(b"z" * SIZE))

    reader.befall(overtake)

    # What was the value when the read began, or any later one.
    assert reader.load() == VALUES[stores - 1]


@pytest.mark.parametrize("stored_before", [0, 1, 2, 3])
def test_a_writer_killed_at_any_byte_leaves_the_former_value_or_the_new_one(
    stoppable, killed_after, stored_before
):
    for stop in itertools.count():
        buffer = stoppable(fresh())
        writer = cell(buffer)
        for value in VALUES[:stored_before]:
            writer.store(value)
        former = cell(buffer).load()

        finished = killed_after(buffer, stop, lambda: writer.store(b"z" * SIZE))  # noqa: B023

        # The last bytes of an ordinal are zeros, which are there before they are written: so a
        # store may be whole a few bytes before its end.
        seen = cell(buffer).load()
        assert seen in (former, b"z" * SIZE)
        assert seen == b"z" * SIZE or not finished
        assert seen == former or stop > 8 + SIZE
        cell(buffer).store(b"next incarnation".ljust(SIZE))
        assert cell(buffer).load() == b"next incarnation".ljust(SIZE)
        if finished:
            break
    assert stop > SIZE, "every byte of the store was a stopping point"


def test_two_damaged_copies_are_unreadable_and_the_next_store_heals_them():
    buffer = fresh()
    writer = cell(buffer)
    writer.store(VALUES[0])
    writer.store(VALUES[1])
    buffer[4] ^= 1
    buffer[8 + SIZE + 12 + 4] ^= 1
    assert cell(buffer).load() is NoValue.UNREADABLE

    cell(buffer).store(VALUES[2])

    assert cell(buffer).load() == VALUES[2]


def test_a_cleared_cell_is_empty_and_begins_again():
    buffer = fresh()
    writer = cell(buffer)
    writer.store(VALUES[0])
    writer.clear()
    assert writer.load() is NoValue.EMPTY
    writer.store(VALUES[1])
    assert cell(buffer).load() == VALUES[1]


def test_a_copy_whose_end_belongs_to_another_store_is_refused_even_if_its_sum_is_right():
    buffer = fresh()
    writer = cell(buffer)
    writer.store(VALUES[0])
    writer.store(VALUES[1])
    end_of_copy_0 = 8 + SIZE + 4
    buffer[end_of_copy_0 : end_of_copy_0 + 8] = (4).to_bytes(8, "little")
    assert cell(buffer).load() == VALUES[0]
