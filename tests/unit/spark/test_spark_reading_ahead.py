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
