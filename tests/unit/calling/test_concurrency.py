"""Which records run at the same time, how far the prefix is done, and what a stop leaves."""

import pytest

from kclrun.calling.concurrency import KEPT_BYTES_MAX, RecordWindow, Settled
from kclrun.calling.failures import OUTAGE_AFTER, Breaker, Halt, LetGo
from kclrun.errors import HaltShard, RetryLater
from kclrun.model.policies import Concurrency, ErrorPolicy
from kclrun.model.record import Record
from kclrun.model.time import Instant, WallTime
from tests.support.tables import over_rows

T = Instant(100.0)


def window(keys, records=64, order="key", retries=0, then="halt", limit=100):
    """A window with one record for each letter of `keys`, its partition key."""
    made = RecordWindow(
        Concurrency(records, order), ErrorPolicy(retries, 1.0, then), Breaker(limit)
    )
    made.admit([Record(b"x", key, str(number)) for number, key in enumerate(keys)])
    return made


def steps(made, now=T):
    found = []
    while (step := made.next_step(now)) is not None:
        found.append(step)
    return found


def fails(made, number, error=None, now=T):
    return made.raised(number, error or ValueError("no"), now, WallTime(0.0))


@over_rows(
    ("keys", "records", "order", "first", "then"),
    [
        ("abc", 64, "key", [0, 1, 2], []),
        ("abc", 2, "key", [0, 1], [2]),
        ("aab", 64, "key", [0, 2], [1]),
        ("aab", 64, "none", [0, 1, 2], []),
        ("abc", 1, "key", [0], [1]),  # the order of the shard
        ("abc", 1, "none", [0], [1]),
    ],
)
def test_what_starts_at_once_and_what_waits_for_the_first(keys, records, order, first, then):
    made = window(keys, records, order)
    assert made.starts(T) == first
    made.returned(0)
    assert made.starts(T) == then


def test_the_prefix_grows_only_once_all_before_are_done():
    made = window("abcd")
    made.starts(T)
    for number in (1, 3):
        made.returned(number)
        assert steps(made) == []
    made.returned(0)
    assert steps(made) == [Settled(2)]
    assert not made.is_over
    made.returned(2)
    assert steps(made) == [Settled(4)]
    assert made.is_over


def test_a_record_that_rests_holds_its_key_and_no_other():
    made = window("aba", retries=1)
    assert made.starts(T) == [0, 1]
    assert fails(made, 0) == 1.0
    made.returned(1)
    assert made.starts(T) == []
    assert made.wake_instant == T + 1.0
    assert made.starts(Instant(T + 1.0)) == [0]
    assert made.returned(0) == 1
    assert made.starts(T) == [2]


def test_a_record_that_is_given_up_among_others_waits_for_those_before_it_and_holds_its_key():
    made = window("abba", then="dead-letter")
    assert made.starts(T) == [0, 1]
    fails(made, 1)
    assert steps(made) == []  # its letter belongs to the commit that covers it [K20]
    assert made.starts(T) == []
    made.returned(0)
    assert steps(made) == [Settled(1), LetGo(1, 1)]
    made.let_go(1)
    assert steps(made) == [Settled(2)]
    assert made.starts(T) == [2, 3]


def test_no_record_is_given_up_while_none_has_succeeded_and_others_run():
    made = window("ab", then="skip")
    made.starts(T)
    fails(made, 0)
    assert steps(made) == []
    made.returned(1)
    assert steps(made) == [LetGo(0, 1)]


@pytest.mark.parametrize("keys", ["abcdefghijkl", "aaaaaaaaaaaa"])
def test_where_the_first_ten_fail_and_none_succeeds_the_shard_halts(keys):
    made = window(keys, then="dead-letter")
    let_go = 0
    while True:
        for number in made.starts(T):
            fails(made, number)
        found = steps(made)
        if not found:
            break
        match found[-1]:
            case LetGo(number):
                let_go += 1
                made.let_go(number)
            case Halt(reason):
                assert "looks like an outage" in reason
                break
    assert isinstance(found[-1], Halt)
    assert let_go < OUTAGE_AFTER
    assert made.is_over


def test_the_limit_of_letters_halts_the_shard_at_the_record_it_does_not_admit():
    made = window("abcd", then="dead-letter", limit=1)
    made.starts(T)
    made.returned(0)
    for number in (1, 2):
        fails(made, number)
    made.returned(3)
    assert steps(made) == [Settled(1), LetGo(1, 1)]
    made.let_go(1)
    found = steps(made)
    assert found[0] == Settled(2)
    assert isinstance(found[1], Halt)
    assert made.first == 2


def test_a_halt_lets_those_before_it_finish_and_starts_none_behind_it():
    made = window("abcd", records=3)
    made.starts(T)
    fails(made, 1, HaltShard("stop here"))
    assert made.starts(T) == []
    made.returned(2)
    assert steps(made) == []
    made.returned(0)
    assert steps(made) == [Settled(1), Halt("stop here")]
    assert made.is_over
    assert made.first == 1


def test_a_stop_fills_the_gaps_below_what_has_started_and_starts_nothing_above():
    made = window("aabcd", records=3)
    assert made.starts(T) == [0, 2, 3]
    made.stop()
    made.returned(2)
    made.returned(3)
    assert made.starts(T) == []
    made.returned(0)
    assert made.starts(T) == [1]
    made.returned(1)
    assert steps(made) == [Settled(4)]
    assert made.is_over
    assert made.unsettled == 1


@pytest.mark.parametrize("rests", [True, False])
def test_a_stop_leaves_a_record_that_is_to_be_repeated_and_starts_none_behind_it(rests):
    made = window("abca", records=3, retries=5)
    made.starts(T)
    if rests:
        fails(made, 1)
    made.stop()
    if not rests:
        fails(made, 1, RetryLater(1.0))
    made.returned(0)
    made.returned(2)
    assert made.starts(Instant(T + 60.0)) == []
    assert steps(made) == [Settled(1)]
    assert made.is_over


def test_a_lost_lease_starts_nothing_and_a_cancelled_record_is_left():
    made = window("aab", records=3)
    made.starts(T)
    made.stop_at_once()
    made.returned(2)
    made.abandoned(0)
    assert made.starts(T) == []
    assert steps(made) == []
    assert made.is_over


def test_a_stop_before_the_first_start_starts_nothing():
    made = window("abc")
    made.stop()
    assert made.starts(T) == []
    assert made.is_over


def test_with_too_many_rows_kept_only_the_first_record_that_is_not_done_starts():
    made = window("abcd", records=2)
    assert made.starts(T) == [0, 1]
    made.returned(1)
    assert made.starts(T, KEPT_BYTES_MAX) == []
    made.returned(0)
    assert steps(made) == [Settled(2)]
    assert made.starts(T, KEPT_BYTES_MAX) == [2]
    assert made.starts(T, KEPT_BYTES_MAX) == []
    assert made.starts(T) == [3]


def test_a_batch_that_joins_goes_on_behind_its_keys():
    made = window("ab")
    made.starts(T)
    made.admit([Record(b"x", "a", "2"), Record(b"x", "c", "3")])
    assert made.starts(T) == [3]
    made.returned(0)
    assert made.starts(T) == [2]
    assert made.end == 4
