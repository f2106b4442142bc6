"""The hand-over between the threads that read shards and the one that takes: bounds, ends."""

import threading
import time

import pytest

from kclrun.spark.executor.reading import BYTES_MAX, Closed, ReadAhead
from tests.patience import HUNG_S

MIB = 2**20


class Admitted(threading.Thread):
    """A reader that wants to fetch."""

    def __init__(self, ahead, shard_id):
        super().__init__(daemon=True)
        self.ahead, self.shard_id, self.outcome = ahead, shard_id, None
        self.start()

    def run(self):
        try:
            self.ahead.admit(self.shard_id)
            self.outcome = "admitted"
        except Closed:
            self.outcome = "closed"

    def settled(self):
        self.join(HUNG_S)
        return self.outcome


def is_waiting(thread):
    """Whether it is still not admitted after all it could have run meanwhile."""
    thread.join(0.05)
    return thread.outcome is None


def test_a_shard_fetches_its_next_page_once_the_last_one_was_taken():
    ahead = ReadAhead(1)
    ahead.admit("a")
    ahead.put("a", "page 1", 10)
    following = Admitted(ahead, "a")
    assert is_waiting(following)

    assert next(ahead.pages()) == "page 1"

    assert following.settled() == "admitted"


def test_what_all_shards_hold_together_is_bounded():
    ahead = ReadAhead(8)
    ahead.admit("first")
    ahead.put("first", "large", 10 * MIB)
    for index in range(5):
        ahead.admit(f"shard {index}")
        ahead.put(f"shard {index}", "large", 10 * MIB)
    # Sixty are held, and one more would be counted as large as those were.
    assert 60 * MIB <= BYTES_MAX < 70 * MIB
    refused = Admitted(ahead, "one more")
    assert is_waiting(refused)

    next(ahead.pages())

    assert refused.settled() == "admitted"


def test_a_page_above_the_whole_bound_still_comes_through():
    ahead = ReadAhead(1)
    ahead.admit("a")
    ahead.put("a", "huge", 10 * BYTES_MAX)
    pages = ahead.pages()

    assert next(pages) == "huge"
    ahead.admit("a")
    ahead.put("a", "next", 1)
    ahead.leave()

    assert list(pages) == ["next"]


def test_pages_end_once_every_reader_has_left():
    ahead = ReadAhead(2)
    ahead.leave()
    ahead.admit("a")
    ahead.put("a", "last", 1)
    ahead.leave()

    assert list(ahead.pages()) == ["last"]


def test_the_error_of_a_reader_is_raised_to_the_taker():
    ahead = ReadAhead(2)
    ahead.leave(ValueError("broken"))

    with pytest.raises(ValueError, match="broken"):
        next(ahead.pages())


def test_closing_wakes_everybody():
    ahead = ReadAhead(2)
    ahead.admit("a")
    waiting = Admitted(ahead, "a")
    ended = []

    def pauses():
        with pytest.raises(Closed):
            ahead.pause(60)
        ended.append(time.monotonic())

    pausing = threading.Thread(target=pauses, daemon=True)
    pausing.start()
    assert is_waiting(waiting)

    ahead.close()

    assert waiting.settled() == "closed"
    pausing.join(HUNG_S)
    assert ended
    with pytest.raises(Closed):
        ahead.admit("b")


def test_pages_are_counted_as_the_largest_so_far_before_they_come_and_as_they_are_then():
    ahead = ReadAhead(99)
    for number in range(64):  # a mebibyte each
        assert ahead._has_room(f"s{number}")
        ahead.admit(f"s{number}")
    assert not ahead._has_room("s64")
    assert not ahead._has_room("s0"), "one page of a shard at a time"
    ahead.put("s0", "page", MIB // 2)
    assert not ahead._has_room("s64")
    ahead.put("s1", "page", MIB // 2)
    assert ahead._has_room("s64")

    one = ReadAhead(99)
    one.admit("s0")
    one.put("s0", "page", 54 * MIB)
    assert one._has_room("s1"), "the next is counted as ten mebibytes, the most of an answer"
    one.admit("s1")
    assert not one._has_room("s2")
    next(one.pages())
    assert one._has_room("s0")


def test_the_first_error_of_a_reader_is_the_takers_and_comes_before_any_page():
    ahead = ReadAhead(2)
    ahead.admit("a")
    ahead.put("a", "page", 1)
    ahead.leave(ValueError("first"))
    ahead.leave(KeyError("second"))

    with pytest.raises(ValueError, match="first"):
        next(ahead.pages())
