"""Every host that calls `on_timer` repeats it until each timer is done, and keeps the rows of each
timer once: a lease process, a task of Spark and the test kit."""

import asyncio
import errno

import pytest

from kclrun.errors import HaltShard, OutputLocked
from tests.contract.timer_hosts import HOSTS, KEYS


@pytest.fixture(params=sorted(HOSTS))
def fire(request):
    def fired(code, retries=0):
        return HOSTS[request.param](code, retries)

    return fired


def raising(make, times=10**6):
    """Code that emits a row a timer, and then raises in the timer of the second key."""
    left = [times]

    def code(key, checkpoint, emit):
        emit({"key": key})
        if key == KEYS[1] and left[0]:
            left[0] -= 1
            raise make()

    return code


def keys_of(outcome):
    return [row["key"] for row in outcome.rows]


def test_timers_that_are_due_fire_in_their_order_once(fire):
    outcome = fire(raising(ValueError, times=0))

    assert outcome.calls == [[key] for key in KEYS]
    assert keys_of(outcome) == [*KEYS]
    assert outcome.halted is None


@pytest.mark.parametrize(
    "make", [ValueError, SystemExit, asyncio.CancelledError, GeneratorExit, BaseException]
)
def test_whatever_a_timer_raises_it_is_called_again_and_its_rows_are_there_once(fire, make):
    outcome = fire(raising(make, times=2), retries=2)

    assert outcome.calls.count([KEYS[1]]) == 3
    assert outcome.calls.count([KEYS[2]]) == 1
    assert keys_of(outcome) == [*KEYS]
    assert outcome.halted is None


@pytest.mark.parametrize(
    "make",
    [
        ValueError,
        lambda: OSError(errno.ENOSPC, "No space left on device"),
        lambda: OutputLocked("another process has the file"),
    ],
)
def test_a_timer_that_fails_for_ever_halts_and_no_timer_is_passed_over(fire, make):
    outcome = fire(raising(make), retries=1)

    # Where timers are called in groups, the call in its group is one more.
    assert 2 <= outcome.calls.count([KEYS[1]]) <= 3
    assert [KEYS[2]] not in outcome.calls
    assert KEYS[1] not in keys_of(outcome)
    assert outcome.halted is not None
    assert str(make()) in outcome.halted


def test_a_timer_halts_its_shard_at_once(fire):
    outcome = fire(raising(lambda: HaltShard("the account is closed")), retries=3)

    assert outcome.calls.count([KEYS[1]]) == 1
    assert "the account is closed" in outcome.halted


def test_a_timer_that_checkpointed_and_then_raised_is_not_called_again(fire):
    left = [1]

    def code(key, checkpoint, emit):
        emit({"key": key})
        if key == KEYS[1] and left:
            left.pop()
            checkpoint()
            raise ValueError("after its checkpoint")

    outcome = fire(code, retries=1)

    assert outcome.calls == [[key] for key in KEYS]
    assert keys_of(outcome) == [*KEYS]
    assert outcome.halted is None
