"""Which records are given again, and which are given up, when a batch raises; by scenarios."""

import functools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kclrun.calling.failures import (
    LIMIT_WINDOW_S,
    OUTAGE_AFTER,
    RETRY_LATER_MAX_S,
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
    ProcessorLoadError,
    RetryLater,
    UndecodableRecord,
)
from kclrun.model.policies import ErrorPolicy
from kclrun.model.record import Record
from kclrun.model.time import Instant
from tests.support.tables import over_rows


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


def test_a_batch_that_returns_is_given_once():
    played = Played(5)
    assert (played.calls, played.end) == ([[0, 1, 2, 3, 4]], Finished())


def test_a_batch_is_repeated_with_growing_pauses_and_then_taken_apart():
    played = Played(4, {2}, retries=3)

    assert played.rests == [1.0, 2.0, 4.0]
    assert played.calls == [[0, 1, 2, 3]] * 4 + [[0, 1], [2], [3]]
    assert (played.returned, played.let_go) == ([0, 1, 3], [(2, 5)])
    assert played.end == Finished()


def test_a_repetition_that_returns_is_the_end_of_it():
    played = Played(4, script=[ValueError(), ValueError()], retries=3)
    assert (len(played.calls), played.rests, played.let_go) == (3, [1.0, 2.0], [])


def test_a_record_that_the_traceback_shows_is_found_with_two_calls_more():
    played = Played(10_000, {7_000}, shows=True)

    assert [len(each) for each in played.calls] == [10_000, 7_000, 1, 2_999]
    assert played.let_go == [(7_000, 2)]


def test_a_half_of_which_the_other_half_succeeded_is_not_tried_as_a_whole():
    """The second half is at fault, for the first succeeded: it is halved at once."""
    assert Played(8, {6}).calls == [[*range(8)], [0, 1, 2, 3], [4, 5], [6], [7]]
    assert Played(8, {7}).calls == [[*range(8)], [0, 1, 2, 3], [4, 5], [6], [7]]
    assert Played(8, {0}).calls == [[*range(8)], [0, 1, 2, 3], [0, 1], [0], [*range(1, 8)]]


@given(
    st.integers(1, 400).flatmap(
        lambda count: st.tuples(st.just(count), st.sets(st.integers(0, count - 1), max_size=9))
    ),
    st.booleans(),
)
def test_exactly_the_records_at_fault_are_given_up_and_all_others_return_once_in_order(case, shows):
    count, bad = case
    played = Played(count, bad, shows=shows)

    assert played.end == Finished()
    assert played.returned == [index for index in range(count) if index not in bad]
    assert [index for index, _ in played.let_go] == sorted(bad)
    # For each at fault: the search, the call with it alone, and one for what is left.
    assert len(played.calls) - 1 <= len(bad) * (math.ceil(math.log2(count)) + 2)


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


def test_a_record_that_cannot_be_decoded_costs_two_calls_and_no_retry():
    played = Played(9, garbled={0, 3, 4, 7}, retries=5)

    assert played.calls == [
        *([*range(9)], [*range(1, 9)], [1, 2], [*range(4, 9)], [5, 6, 7, 8], [5, 6], [8]),
    ]
    assert played.rests == []
    assert played.let_go == [(0, 1), (3, 2), (4, 2), (7, 2)]
    assert isinstance(played.end, Finished)


def test_a_record_that_cannot_be_decoded_halts_at_once_where_nothing_is_given_up():
    played = Played(9, garbled={3}, retries=5, then="halt")

    assert (played.end, played.calls, played.run.settled) == (Halt(), [[*range(9)]], 0)


def test_a_record_of_another_batch_says_nothing_of_this_one():
    """User code kept it, and looks at its value only now."""
    old = UndecodableRecord("no header", Record(b"", "k", "77"))
    played = Played(4, script=[old, old], retries=1)

    assert played.calls == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1], [2], [3]]
    assert (played.rests, played.let_go) == ([1.0], [])


@over_rows("place", [0, 1, 4_999, 5_000, 9_998, 9_999])
def test_one_record_at_fault_in_ten_thousand_is_found_in_fifteen_calls(place):
    played = Played(10_000, {place})
    found = played.calls.index([place])
    assert found <= 15
    assert len(played.calls) - 1 <= found + 1
    assert [index for index, _ in played.let_go] == [place]


@functools.cache
def fewest(suspects, behind):
    """Calls of the best search in the worst case: the first record at fault is one of the suspects,
    it is given alone before it is given up, and what is behind it is one call."""
    if suspects == 1:
        return 1 + (behind > 0)
    return 1 + min(
        max(
            fewest(first, suspects - first + behind) if first > 1 else 1,
            fewest(suspects - first, behind),
        )
        for first in range(1, suspects)
    )


@over_rows("count", range(2, 40))
def test_no_search_with_that_proof_of_a_fault_needs_fewer_calls(count):
    worst = max(len(Played(count, {place}).calls) - 1 for place in range(count))
    assert worst == fewest(count, 0) == (count - 2).bit_length() + 2


def test_records_that_fail_only_together_are_not_given_up():
    """As two rows of one key in one statement: each of them alone is in order."""
    played = Played(4, {2, 3}, fails_together=True)
    assert (played.returned, played.let_go) == ([0, 1, 2, 3], [])


def test_a_search_that_finds_nothing_has_processed_everything():
    """A failure that does not come again is nobody's."""
    played = Played(8, script=[ValueError()])
    assert (played.returned, played.let_go, played.end) == ([*range(8)], [], Finished())


def test_a_record_is_let_go_before_anything_after_it_is_given():
    policy, steps = ErrorPolicy(0, 1.0, "skip"), []
    run = BatchRun(records(3), policy, Breaker(100))
    while not isinstance(step := run.next_step(Instant(0.0)), Finished):
        steps.append(step)
        if isinstance(step, Give):
            if 1 in step.indexes:
                run.raised(ValueError(), Instant(0.0), 0.0, at=records(3)[1].position)
            else:
                run.returned(Instant(0.0))

    parts = [Give(range(3)), Give(range(1)), Give(range(1, 2)), LetGo(1, 2), Give(range(2, 3))]
    assert steps == parts


def test_what_is_settled_is_what_a_checkpoint_may_pass():
    """By what was given, returned, given up and let go of, step by step."""
    policy = ErrorPolicy(0, 1.0, "dead-letter")
    run, now = BatchRun(records(6), policy, Breaker(100)), Instant(0.0)
    settled = [run.settled]
    for bad in (True, True, True, False, True):  # 0-5, 0-2, 0 and 1 alone, 1-5, halves of them
        step = run.next_step(now)
        at = records(6)[step.indexes[0]].position
        run.raised(ValueError(), now, 0.0, at=at) if bad else run.returned(now)
        settled.append(run.settled)
        if isinstance(run.next_step(now), LetGo):
            settled.append(run.settled)

    assert settled[0] == 0
    assert settled == sorted(settled)


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


@pytest.mark.parametrize(
    ("how", "calls"),
    [
        pytest.param({"then": "halt", "retries": 2}, 3, id="then: halt"),
        pytest.param({"is_host_fault": True, "retries": 1}, 2, id="the host lacks something"),
        pytest.param({"script": [ProcessorLoadError("x")], "retries": 9}, 1, id="a setting"),
    ],
)
def test_a_batch_is_halted_at_as_a_whole(how, calls):
    played = Played(4, {2}, **how)
    assert (played.end, len(played.calls), played.let_go) == (Halt(), calls, [])


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


def test_a_batch_with_one_record_that_succeeds_shows_that_the_others_are_at_fault():
    played = Played(30, set(range(30)) - {5})
    assert [index for index, _ in played.let_go] == [*range(5), *range(6, 30)]
    assert played.end == Finished()


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


def test_a_small_batch_of_which_all_fail_is_given_up():
    played = Played(OUTAGE_AFTER - 1, range(OUTAGE_AFTER - 1))
    assert len(played.let_go) == OUTAGE_AFTER - 1
    assert played.end == Finished()


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


def test_a_pause_that_user_code_asks_for_counts_as_no_attempt():
    later = RetryLater(30.0)
    played = Played(4, script=[later, later, later, RetryLater(9e9)], retries=0)

    assert played.rests == [30.0, 30.0, 30.0, RETRY_LATER_MAX_S]
    assert (played.returned, played.let_go) == ([0, 1, 2, 3], [])


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_a_pause_that_is_none_is_refused(seconds):
    with pytest.raises(ValueError, match="not negative"):
        RetryLater(seconds)


@pytest.mark.parametrize("error", [RetryLater(30.0), ValueError("bad")])
def test_a_record_that_is_too_old_is_not_repeated(error):
    young = Played(1, script=[error], retries=5, max_age_s=60.0, wall=160.0)
    old = Played(1, script=[error], retries=5, max_age_s=60.0, wall=160.1)

    assert (len(young.rests), young.let_go) == (1, [])
    assert (len(old.rests), old.let_go) == (0, [(0, 1)])


def test_a_record_without_an_arrival_time_is_not_taken_for_an_old_one():
    run = BatchRun(
        [Record(b"", "k", "1")], ErrorPolicy(5, 1.0, "dead-letter", max_age_s=60.0), Breaker(100)
    )
    run.next_step(Instant(0.0))

    assert run.raised(ValueError("bad"), Instant(0.0), 1e9) == 1.0


def test_records_that_user_code_names_are_given_again_alone_and_then_given_up():
    played = Played(5, script=[(3, 1), (3, 1), (3,)], retries=2)

    assert played.calls == [[0, 1, 2, 3, 4], [1, 3], [1, 3]]
    assert played.rests == [1.0, 2.0]
    # The last call named one of the two: the other is processed.
    assert (played.let_go, played.end) == ([(3, 3)], Finished())


def test_named_records_show_that_others_were_processed_so_it_is_no_outage():
    played = Played(40, script=[tuple(range(20))], retries=0)
    assert [index for index, _ in played.let_go] == [*range(20)]


def test_all_records_of_a_large_batch_named_are_an_outage():
    played = Played(40, script=[tuple(range(40))], retries=0)
    assert isinstance(played.end, Halt)
    assert played.let_go == []


def test_named_records_halt_the_shard_where_nothing_is_given_up():
    assert Played(5, script=[(1,)], then="halt").end == Halt()
