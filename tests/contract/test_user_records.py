"""Every host that calls `process_record` repeats the same calls, and gives up the same records: a
lease process, a task of Spark, the test kit and the redrive of letters."""

import asyncio
import errno

import pytest

from kclrun.errors import HaltShard, OutputLocked, RetryLater
from tests.contract.user_code_hosts import HOSTS, single_processor_of

NUMBERS = (11, 12, 13, 14)


@pytest.fixture(params=sorted(HOSTS))
def give(request):
    def given(code, *numbers, retries=0):
        host = HOSTS[request.param]
        return host(code, numbers or NUMBERS, retries, single_processor_of)

    return given


def raising(make, number=12, times=10**6):
    """Code that emits a row a record, and then raises at that record."""
    left = [times]

    def code(n, emit):
        emit({"n": n})
        if n == number and left[0]:
            left[0] -= 1
            raise make()

    return code


def emitted(outcome):
    return [row["n"] for row in outcome.rows]


def test_records_are_given_one_by_one_in_their_order(give):
    outcome = give(raising(ValueError, times=0))

    assert outcome.calls == [[n] for n in NUMBERS]
    assert emitted(outcome) == [*NUMBERS]
    assert (outcome.given_up, outcome.halted) == ([], None)


@pytest.mark.parametrize(
    "make", [ValueError, SystemExit, asyncio.CancelledError, GeneratorExit, BaseException]
)
def test_whatever_user_code_raises_the_record_is_given_again_and_its_row_is_there_once(give, make):
    outcome = give(raising(make, times=2), retries=2)

    assert outcome.calls.count([12]) == 3
    assert [outcome.calls.count([n]) for n in (11, 13, 14)] == [1, 1, 1]
    assert emitted(outcome) == [*NUMBERS]
    assert (outcome.given_up, outcome.halted) == ([], None)


@pytest.mark.parametrize("make", [ValueError, SystemExit, asyncio.CancelledError])
def test_a_record_at_fault_is_given_up_alone(give, make):
    outcome = give(raising(make), retries=1)

    assert outcome.calls.count([12]) == 2
    assert outcome.given_up == [12]
    assert emitted(outcome) == [11, 13, 14]
    assert outcome.halted is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: OSError(errno.ENOSPC, "No space left on device"),
        lambda: OSError(errno.EMFILE, "Too many open files"),
        lambda: OutputLocked("another process has the file"),
    ],
)
def test_what_the_host_lacks_halts_and_gives_no_record_up(give, make):
    outcome = give(raising(make), retries=1)

    assert outcome.calls.count([12]) == 2
    assert outcome.given_up == []
    assert outcome.halted is not None
    assert str(make()) in outcome.halted


def test_a_wait_that_user_code_asks_for_is_not_an_attempt(give):
    outcome = give(raising(lambda: RetryLater(0.0), times=3))

    assert outcome.calls.count([12]) == 4
    assert emitted(outcome) == [*NUMBERS]
    assert (outcome.given_up, outcome.halted) == ([], None)


def test_user_code_halts_its_shard_at_once(give):
    outcome = give(raising(lambda: HaltShard("the account is closed")), retries=3)

    assert outcome.calls.count([12]) == 1
    assert outcome.given_up == []
    assert outcome.halted is not None
    assert "the account is closed" in outcome.halted


def test_ten_failures_without_a_success_halt_the_shard(give):
    """In their order, a record is called once the letter of the one before it is kept."""

    def code(n, emit):
        raise ValueError("the database is away")

    outcome = give(code, *range(11, 31))

    assert outcome.calls == [[n] for n in range(11, 21)]
    assert outcome.given_up == [*range(11, 20)]
    assert outcome.halted is not None
    assert "it looks like an outage" in outcome.halted
