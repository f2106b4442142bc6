"""Which records are given again, and which are given up, when a batch raises; by scenarios."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kclrun.calling.failures import (
    LIMIT_WINDOW_S,
    OUTAGE_AFTER,
    BatchRun,
    Breaker,
    Finished,
    Give,
    Halt,
    LetGo,
    Rest,
)
from kclrun.errors import (
    FailedRecords,
    HaltShard,
    RetryLater,
    UndecodableRecord,
)
from kclrun.model.policies import ErrorPolicy
from kclrun.model.record import Record
from kclrun.model.time import Instant


def records(count):
    """They arrived at 100 s."""
    return [Record(b"", "k", str(number), 100.0) for number in range(count)]


class Played:
    """A batch of `count` records, played to its end: the records of `bad` make a call raise.

    `shows` the record at fault as a traceback would. `script` raises at the first calls instead.
    Those of `garbled` cannot be decoded; user code looks at the records in their order.
    """

    def __init__(self, count, bad=(), *, shows=False, script=(), retries=0, then="dead-letter",
                 limit=100, breaker=None, at=0.0, garbled=(), **how):  # fmt: skip
        self.garbled = set(garbled)
        self.together = how.pop("fails_together", False)
        policy = ErrorPolicy(retries, 1.0, then, how.pop("max_age_s", None), limit)
        self.records = records(count)
        self.run = BatchRun(self.records, policy, breaker or Breaker(limit))
        self.wall = how.pop("wall", 0.0)
        self.now = Instant(at)
        self.bad, self.shows, self.script, self.how = set(bad), shows, list(script), how
        self.calls, self.returned, self.let_go, self.rests = [], [], [], []
        self.end = self.play()

    def play(self):
        while True:
            match self.run.next_step(self.now):
                case Give(indexes):
                    self.give(list(indexes))
                case Rest(pause_s):
                    self.rests.append(pause_s)
                case LetGo(index, calls):
                    self.let_go.append((index, calls))
                case Halt() | Finished() as end:
                    return end

    def give(self, indexes):
        self.calls.append(indexes)
        found = [index for index in indexes if index in self.bad | self.garbled]
        if self.together and len(found) < len(self.bad):
            found = []
        if self.script:
            error = self.script.pop(0)
            if isinstance(error, tuple):
                error = FailedRecords(self.records[index] for index in error)
            self.run.raised(error, self.now, self.wall, **self.how)
            return
        if found and found[0] in self.garbled:
            error = UndecodableRecord("no header", self.records[found[0]])
            assert self.run.accused(error) == found[:1]
            self.run.raised(error, self.now, self.wall, **self.how)
            return
        if found:
            at = self.records[found[0]].position if self.shows else None
            self.run.raised(ValueError("bad"), self.now, self.wall, at=at, **self.how)
            return
        self.returned += indexes
        self.run.returned(self.now)


def test_a_record_that_the_traceback_shows_is_found_with_two_calls_more():
    played = Played(10_000, {7_000}, shows=True)

    assert [len(each) for each in played.calls] == [10_000, 7_000, 1, 2_999]
    assert played.let_go == [(7_000, 2)]


@given(
    st.integers(1, 60).flatmap(
        lambda n: st.tuples(
            st.just(n), st.sets(st.integers(0, n - 1)), st.sets(st.integers(0, n - 1))
        )
    ),
    st.integers(0, 2),
)
def test_records_that_cannot_be_decoded_are_never_given_again(case, retries):
    count, bad, garbled = case
    played = Played(count, bad - garbled, garbled=garbled, retries=retries, limit=60)

    gone = [index for index, _ in played.let_go]
    if isinstance(played.end, Halt):  # the first ten of them failed, and none before
        assert not played.returned
        assert not gone
        return
    assert gone == sorted(bad | garbled)
    assert played.returned == sorted(set(range(count)) - bad - garbled)
    accused = [next(n for n in call if n in bad | garbled) for call in played.calls
               if (bad | garbled) & set(call)]  # fmt: skip
    assert all(accused.count(index) == 1 for index in garbled)


def test_a_record_that_cannot_be_decoded_halts_at_once_where_nothing_is_given_up():
    played = Played(9, garbled={3}, retries=5, then="halt")

    assert (played.end, played.calls, played.run.settled) == (Halt(), [[*range(9)]], 0)


def test_what_is_held_is_let_go_of_before_user_code_may_checkpoint():
    breaker = Breaker(2)
    run, now = BatchRun(records(3), ErrorPolicy(0, 1.0, "skip"), breaker), Instant(0.0)
    for _ in range(2):  # the whole, and the first record alone
        run.next_step(now)
        run.raised(ValueError(), now, 0.0, at=records(3)[0].position)
    held, settled = run.held, run.settled

    run.release(now)

    assert (held, settled) == ((LetGo(0, 2),), 0)
    assert (run.held, run.settled) == ((), 1)
    assert breaker.admits(now)
    assert not breaker.admits(now), "what was released counts"


# Halts.


def test_user_code_halts_with_its_own_reason_and_gives_nothing_up():
    played = Played(4, script=[HaltShard("the account is closed")], retries=5)
    assert (played.end, played.calls) == (Halt("the account is closed"), [[0, 1, 2, 3]])


def test_an_outage_is_seen_before_anything_is_given_up():
    """Nothing of the batch succeeds: ten records of their own are enough to see it."""
    played = Played(100, range(100))

    assert isinstance(played.end, Halt)
    assert "looks like an outage" in played.end.reason
    assert (played.let_go, played.returned) == ([], [])
    assert sum(len(each) == 1 for each in played.calls) == OUTAGE_AFTER


@pytest.mark.parametrize(
    ("how", "settled"),
    [
        pytest.param({"bad": {5}, "then": "halt"}, 0, id="then: halt"),
        pytest.param({"bad": range(30)}, 0, id="an outage"),
        pytest.param({"bad": {3, 7, 9}, "limit": 2}, 9, id="the limit"),
    ],
)
def test_what_a_halt_leaves_is_not_settled(how, settled):
    played = Played(30, retries=0, **how)
    assert isinstance(played.end, Halt)
    assert played.run.settled == settled


def test_more_than_the_limit_in_ten_minutes_halts_the_shard():
    breaker = Breaker(3)
    first = Played(20, {1, 2}, breaker=breaker)
    second = Played(20, {1, 2, 3}, breaker=breaker, at=LIMIT_WINDOW_S - 1)
    later = Played(20, {1, 2}, breaker=breaker, at=LIMIT_WINDOW_S)

    assert [index for index, _ in first.let_go] == [1, 2]
    assert [index for index, _ in second.let_go] == [1]
    assert second.end.reason.startswith("3 records were given up within 10 minutes")
    assert "on_error.limit" in second.end.reason
    # The two of the beginning count no more.
    assert [index for index, _ in later.let_go] == [1, 2]
    assert later.end == Finished()


# What user code says.


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_a_pause_that_is_none_is_refused(seconds):
    with pytest.raises(ValueError, match="not negative"):
        RetryLater(seconds)


def test_all_records_of_a_large_batch_named_are_an_outage():
    played = Played(40, script=[tuple(range(40))], retries=0)
    assert isinstance(played.end, Halt)
    assert played.let_go == []
