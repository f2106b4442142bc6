"""Every host that calls user code gives a batch in the same calls, and gives up the same records:
a lease process, a task of Spark, the test kit and the redrive of letters."""

import asyncio
import errno

import pytest

from kclrun import methods
from kclrun.errors import FailedRecords, HaltShard, OutputLocked, RetryLater
from kclrun.model.record import Record
from tests.contract.user_code_hosts import HOSTS

NUMBERS = (11, 12, 13, 14)


@pytest.fixture(params=sorted(HOSTS))
def give(request):
    def given(code, *numbers, retries=0):
        return HOSTS[request.param](code, numbers or NUMBERS, retries)

    return given


def numbers_of(batch):
    return {int(number) for number in (record.sequence_number for record in batch)}


def raising(make, number=12, times=10**6):
    """Code that emits a row a record, and then raises in a call with that record."""
    left = [times]

    def code(batch, checkpoint, emit):
        for n in sorted(numbers_of(batch)):
            emit({"n": n})
        if number in numbers_of(batch) and left[0]:
            left[0] -= 1
            raise make()

    return code


def caused():
    error = ValueError("cannot write")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    return error


def emitted(outcome):
    return [row["n"] for row in outcome.rows]


@pytest.mark.parametrize(
    "make",
    [
        lambda: OSError(errno.ENOSPC, "No space left on device"),
        lambda: OSError(errno.EMFILE, "Too many open files"),
        lambda: OutputLocked("another process has the file"),
        caused,
    ],
)
def test_what_the_host_lacks_halts_and_gives_no_record_up(give, make):
    outcome = give(raising(make), retries=1)

    assert outcome.calls == [[*NUMBERS]] * 2
    assert outcome.given_up == []
    assert outcome.halted is not None
    assert str(make()) in outcome.halted


@pytest.mark.parametrize(
    "make", [ValueError, SystemExit, asyncio.CancelledError, GeneratorExit, BaseException]
)
def test_whatever_user_code_raises_is_given_again_and_its_rows_once(give, make):
    outcome = give(raising(make, times=2), retries=2)

    assert outcome.calls == [[*NUMBERS]] * 3
    assert emitted(outcome) == [*NUMBERS]
    assert (outcome.given_up, outcome.halted) == ([], None)


@pytest.mark.parametrize("make", [ValueError, SystemExit, asyncio.CancelledError])
def test_a_record_at_fault_is_found_by_halves_and_given_up_alone(give, make):
    outcome = give(raising(make, 15), *range(11, 19), retries=1)

    assert outcome.calls == [
        [*range(11, 19)],
        [*range(11, 19)],
        [11, 12, 13, 14],
        [15, 16],
        [15],
        [16, 17, 18],
    ]
    assert outcome.given_up == [15]
    assert emitted(outcome) == [11, 12, 13, 14, 16, 17, 18]
    assert outcome.halted is None


def test_records_that_fail_are_named_and_the_rows_of_the_others_stay(give):
    def code(batch, checkpoint, emit):
        failed = [record for record in batch if record.sequence_number == "12"]
        for record in batch:
            if record not in failed:
                emit({"n": int(record.sequence_number)})
        if failed:
            raise FailedRecords(failed)

    outcome = give(code, retries=1)

    assert outcome.calls == [[*NUMBERS], [12]]
    assert outcome.given_up == [12]
    assert emitted(outcome) == [11, 13, 14]


STRANGER = Record(b"x", "k", "99")


@pytest.mark.parametrize(
    "names",
    [
        lambda batch: [],
        lambda batch: [STRANGER],
        lambda batch: [*batch, STRANGER],
        lambda batch: [record.sequence_number for record in batch],
    ],
    ids=["none", "another", "and another", "not records"],
)
def test_names_of_other_records_say_nothing_so_all_are_given_again_and_their_rows_are_once(
    give, names
):
    is_first = [True]

    def code(batch, checkpoint, emit):
        for number in sorted(numbers_of(batch)):
            emit({"n": number})
        if is_first and is_first.pop():
            raise FailedRecords(names(batch))

    outcome = give(code, retries=1)

    assert outcome.calls == [[*NUMBERS], [*NUMBERS]]
    assert emitted(outcome) == [*NUMBERS]
    assert (outcome.given_up, outcome.halted) == ([], None)


def test_a_part_that_names_a_record_behind_it_is_searched_and_keeps_no_row(give):
    seen = []

    def code(batch, checkpoint, emit):
        seen.append(list(batch))
        for number in sorted(numbers_of(batch)):
            emit({"n": number})
        if len(batch) == len(NUMBERS):
            raise ValueError("bad")
        if numbers_of(batch) >= {11, 12}:
            raise FailedRecords(seen[0][2:])

    outcome = give(code)

    assert outcome.calls == [[*NUMBERS], [11, 12], [11], [12], [13, 14]]
    assert emitted(outcome) == [*NUMBERS]
    assert (outcome.given_up, outcome.halted) == ([], None)


def test_a_wait_that_user_code_asks_for_is_not_an_attempt(give):
    outcome = give(raising(lambda: RetryLater(0.0), times=3))

    assert outcome.calls == [[*NUMBERS]] * 4
    assert (outcome.given_up, outcome.halted) == ([], None)


def test_user_code_halts_its_shard_at_once(give):
    outcome = give(raising(lambda: HaltShard("the account is closed")), retries=3)

    assert outcome.calls == [[*NUMBERS]]
    assert outcome.given_up == []
    assert outcome.halted is not None
    assert "the account is closed" in outcome.halted


def test_what_a_checkpoint_covers_is_not_given_again(give):
    def code(batch, checkpoint, emit):
        if len(batch) == len(NUMBERS):
            checkpoint(batch[1])
            raise ValueError("after its checkpoint")

    outcome = give(code, retries=1)

    assert outcome.calls == [[*NUMBERS], [13, 14]]
    assert (outcome.given_up, outcome.halted) == ([], None)


def test_a_checkpoint_during_the_search_covers_its_call_and_comes_after_the_letters(give):
    def code(batch, checkpoint, emit):
        if 11 in numbers_of(batch):
            raise ValueError("bad")
        checkpoint()

    outcome = give(code)

    assert outcome.story == [
        ("call", *NUMBERS),
        ("call", 11, 12),
        ("call", 11),
        ("call", 12, 13, 14),
        ("given up", 11),
        ("checkpoint", None),
    ]


def test_a_checkpoint_of_a_part_that_then_raises_does_not_cover_the_rest(give):
    """The first half is checkpointed, and the record at fault is in the second."""

    def code(batch, checkpoint, emit):
        if 13 in numbers_of(batch):
            raise ValueError("bad")
        checkpoint()

    outcome = give(code)

    assert outcome.calls == [[*NUMBERS], [11, 12], [13], [14]]
    assert outcome.given_up == [13]


def test_ten_failures_without_a_success_are_an_outage(give):
    outcome = give(raising(ValueError, 0), *range(11, 31))
    assert outcome.halted is None

    def code(batch, checkpoint, emit):
        raise ValueError("the database is away")

    outcome = give(code, *range(11, 31))

    assert outcome.given_up == []
    assert outcome.halted is not None


def test_a_value_that_process_records_returns_is_dropped_with_one_warning(give, monkeypatch):
    monkeypatch.setattr(methods, "_dropped", set())

    def code(batch, checkpoint, emit):
        emit({"n": 1})
        return {"batchItemFailures": []}

    with pytest.warns(UserWarning, match="process_records returned a dict"):
        outcome = give(code)
    give(code)  # a second warning would be an error

    assert (emitted(outcome), outcome.given_up, outcome.halted) == ([1], [], None)


async def coroutine():
    """Its work never begins."""


@pytest.mark.parametrize(
    "make", [coroutine, lambda: (_ for _ in ())], ids=["coroutine", "generator"]
)
def test_work_that_has_not_begun_is_refused(give, make):
    outcome = give(lambda batch, checkpoint, emit: make())

    assert "nothing of it has run" in str(outcome.halted)
    assert outcome.given_up == []
