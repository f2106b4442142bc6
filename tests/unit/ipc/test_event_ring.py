"""The event ring: order, wrapping, fullness, writers killed at any byte, destroyed memory."""

import itertools
import sys
import threading

import pytest

from kclrun.errors import LimitExceeded, SegmentRefused
from kclrun.ipc.ring import ENTRY_BYTES_MAX, EventRing
from kclrun.ipc.seqlock import SeqlockCell

SMALL = 256
HEADER = 24


def fresh(data_bytes=SMALL):
    return bytearray(EventRing.size_bytes(data_bytes))


def ring(buffer, data_bytes=SMALL):
    return EventRing(buffer, 0, data_bytes)


def fill(writer, payload=b"x" * 8):
    count = 0
    while writer.put(payload):
        count += 1
    return count


def test_entries_come_out_once_and_in_order():
    buffer = fresh()
    writer, reader = ring(buffer), ring(buffer)
    for payload in (b"one", b"", b"three"):
        assert writer.put(payload)
    assert reader.drain() == [b"one", b"", b"three"]
    assert reader.drain() == []


def test_a_drain_takes_at_most_what_it_was_asked_for():
    buffer = fresh()
    writer, reader = ring(buffer), ring(buffer)
    for payload in (b"1", b"2", b"3"):
        writer.put(payload)
    assert reader.drain(0) == []
    assert reader.drain(2) == [b"1", b"2"]
    assert reader.drain(2) == [b"3"]


def test_one_drain_takes_256_entries_so_that_one_busy_ring_does_not_fill_a_turn():
    size = 64 * 1024
    buffer = fresh(size)
    assert sum(ring(buffer, size).put(b"") for _ in range(300)) == 300
    reader = ring(buffer, size)
    assert [len(reader.drain()) for _ in range(3)] == [256, 44, 0]


def test_a_full_ring_refuses_and_the_reader_learns_how_many_it_missed():
    buffer = fresh()
    writer, reader = ring(buffer), ring(buffer)
    kept = fill(writer)  # its last put was refused
    assert not writer.put(b"refused too")
    assert reader.gap() == 2
    assert reader.gap() == 0
    assert len(reader.drain()) == kept == SMALL // (HEADER + 8)


def test_a_drained_ring_takes_entries_again():
    buffer = fresh()
    writer, reader = ring(buffer), ring(buffer)
    fill(writer)
    reader.drain()
    assert writer.put(b"again")
    assert reader.drain() == [b"again"]


def test_an_entry_above_the_limit_is_our_bug_and_says_so():
    with pytest.raises(LimitExceeded, match="at most"):
        ring(fresh()).put(bytes(ENTRY_BYTES_MAX + 1))


def test_the_largest_entry_fits_a_ring_of_the_real_size():
    size = 64 * 1024
    buffer = fresh(size)
    assert ring(buffer, size).put(b"z" * ENTRY_BYTES_MAX)
    assert ring(buffer, size).drain() == [b"z" * ENTRY_BYTES_MAX]


@pytest.mark.parametrize("earlier", [0, 1, 4, 5, 9])
@pytest.mark.parametrize("drained_before", [False, True])
def test_a_writer_killed_at_any_byte_loses_nothing_earlier_and_shows_nothing_torn(
    stoppable, killed_after, earlier, drained_before
):
    for stop in itertools.count():
        buffer = stoppable(fresh())
        reader = ring(buffer)
        writer = ring(buffer)
        expected = []
        for n in range(earlier):  # up to more than a lap, so that the victim meets old bytes
            payload = bytes([97 + n]) * 30
            assert writer.put(payload)
            expected.append(payload)
            if n < earlier - 2 or drained_before:
                assert reader.drain() == expected
                expected = []

        finished = killed_after(buffer, stop, lambda: writer.put(b"victim" * 5))  # noqa: B023

        seen = ring(bytearray(buffer)).drain()
        assert seen in (expected, [*expected, b"victim" * 5])
        assert not finished or seen[-1] == b"victim" * 5
        later = ring(buffer)
        assert later.put(b"next incarnation")
        assert reader.drain() == [*seen, b"next incarnation"]
        if finished:
            break
    assert stop > HEADER + 30, "every byte of the put was a stopping point"


def test_incarnations_that_die_in_every_put_still_go_on(stoppable, killed_after):
    buffer = stoppable(fresh())
    reader, seen, numbers = ring(buffer), [], itertools.count()
    for stop in range(0, 400, 3):
        writer = ring(buffer)
        killed_after(
            buffer,
            stop,
            lambda: [writer.put(b"%d" % next(numbers)) for _ in range(4)],  # noqa: B023
        )
        seen += reader.drain()
    assert seen == sorted(set(seen), key=int)
    assert len(seen) > 100


def test_a_reader_killed_at_any_byte_of_its_mark_only_delays_the_room(stoppable, killed_after):
    for stop in itertools.count():
        buffer = stoppable(fresh())
        writer, reader = ring(buffer), ring(buffer)
        fill(writer)
        finished = killed_after(buffer, stop, reader.drain)
        has_room = writer.put(b"y")
        assert has_room or not finished
        assert not has_room or stop > HEADER
        if finished:
            break


@pytest.mark.parametrize("entries_max", [1, 256])
def test_an_announced_entry_that_was_destroyed_is_given_up_and_counted(entries_max):
    buffer = fresh()
    writer, reader = ring(buffer), ring(buffer)
    for payload in (b"one", b"two", b"three"):
        writer.put(payload)
    assert reader.drain(1) == [b"one"]
    offset = EventRing.size_bytes(SMALL) - SMALL
    buffer[offset + 32 + 5] ^= 0xFF  # in the header of "two"

    assert [reader.drain(0) for _ in range(9)] == [[]] * 9, "it did not look"
    drains = [reader.drain(entries_max) for _ in range(8)]

    assert drains == [[]] * 8
    assert reader.gap() == 2
    writer.put(b"four")
    assert reader.drain() == [b"four"]


@pytest.mark.parametrize("is_counted", [True, False])
def test_drains_that_found_nothing_to_take_do_not_shorten_the_patience_with_a_late_store(
    stoppable, killed_after, is_counted
):
    buffer = stoppable(fresh())
    writer, reader = ring(buffer), ring(buffer)
    # Whole, and counted by the mark or not yet: the reader is then past the writer's mark.
    killed_after(buffer, HEADER + 3 + 200 * is_counted, lambda: writer.put(b"one"))
    assert reader.drain() == [b"one"]
    assert [reader.drain() for _ in range(7)] == [[]] * 7
    writer = ring(buffer)
    writer.put(b"two")
    at = EventRing.size_bytes(SMALL) - SMALL + 32 + 5
    buffer[at] ^= 0xFF

    assert [reader.drain() for _ in range(7)] == [[]] * 7
    buffer[at] ^= 0xFF  # its last store becomes visible

    assert reader.drain() == [b"two"]
    assert reader.gap() == 0


def test_a_destroyed_mark_is_refused_by_the_next_writer_and_heals_with_a_clear():
    buffer = fresh()
    ring(buffer).put(b"one")
    ring(buffer).put(b"two")
    for at in range(SeqlockCell.size_bytes(24)):
        buffer[at] ^= 0x55
    assert ring(buffer).gap() == 0
    with pytest.raises(SegmentRefused, match="clear the place"):
        ring(buffer).put(b"three")

    ring(buffer).clear()

    assert ring(buffer).put(b"four")
    assert ring(buffer).drain() == [b"four"]


def test_a_reader_whose_own_mark_was_destroyed_begins_where_the_ring_begins():
    buffer = fresh()
    ring(buffer).put(b"one")
    ring(buffer).drain()
    ring(buffer).put(b"two")
    for at in range(SeqlockCell.size_bytes(24), 2 * SeqlockCell.size_bytes(24)):
        buffer[at] ^= 0x55

    assert ring(buffer).drain() == [b"one", b"two"]


def test_a_mark_beyond_every_stream_does_not_move_the_reader():
    buffer = fresh()
    SeqlockCell(buffer, 0, 24).store(b"\xff" * 24)
    reader = ring(buffer)
    assert [reader.drain() for _ in range(10)] == [[]] * 10
    assert reader.gap() == 0


def test_a_cleared_ring_forgets_every_entry_counted_or_not(stoppable, killed_after):
    buffer = stoppable(fresh())
    writer = ring(buffer)
    # Killed between the entry and its mark: whole, and not counted.
    killed_after(buffer, HEADER + 3, lambda: writer.put(b"old"))
    assert ring(buffer).drain() == [b"old"]

    ring(buffer).clear()

    assert not any(buffer)
    assert ring(buffer).drain() == []


def test_an_end_that_cleared_its_ring_begins_as_a_new_one():
    buffer = fresh()
    both = ring(buffer)
    kept = fill(both)
    buffer[EventRing.size_bytes(SMALL) - SMALL + 5] ^= 0xFF
    for _ in range(8):
        both.drain()
    assert both.gap() == kept + 1
    both.put(b"damaged too")
    buffer[-SMALL + 5] ^= 0xFF
    both.drain(0)

    both.clear()

    assert not any(buffer)
    assert fill(both) == kept
    assert both.gap() == 1
    assert len(both.drain()) == kept


def test_threads_of_one_process_may_put_at_the_same_time():
    size = 64 * 1024
    buffer = fresh(size)
    writer, interval = ring(buffer, size), sys.getswitchinterval()
    puts = [[b"%d/%d" % (thread, n) for n in range(300)] for thread in range(4)]
    threads = [
        threading.Thread(target=lambda mine=mine: [writer.put(payload) for payload in mine])
        for mine in puts
    ]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)

    entries = ring(buffer, size).drain(2000)

    assert sorted(entries) == sorted(itertools.chain(*puts))
    for thread, mine in enumerate(puts):
        assert [e for e in entries if e.startswith(b"%d/" % thread)] == mine
