"""What user code may be given next, and what follows if it raises: no thread, no clock."""

import pytest

from kclrun.calling.delivery import (
    Delivery,
    Repetition,
    StartBatch,
    attempt,
    error_words,
)
from kclrun.errors import FailedRecords
from kclrun.lease.commands import (
    AllowDelivery,
    CallInitialize,
    CallLeaseLost,
    CallShardEnded,
)
from kclrun.model.lease import Lease
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from tests.support.tables import over_rows

NOW = 100.0
ROW = Lease(key="s0", checkpoint=TRIM_HORIZON)
ALLOW = ("allow", AllowDelivery(NOW + 10, 10**6, 10**6))
PAST = ("allow", AllowDelivery(NOW, 10**6, 10**6))


def delivery(*commands):
    """One with batches of at most 3 records, that was given these commands."""
    made = Delivery(batch_max=3)
    for name, *arguments in commands:
        getattr(made, name)(*arguments)
    return made


def permit(below, most):
    return ("allow", AllowDelivery(NOW + 10, below, most))


@over_rows(
    ("commands", "waiting", "then"),
    [
        ([("stop",)], 5, None),
        ([ALLOW, ("stop",)], 5, None),
        ([("call", CallShardEnded()), ("stop",)], None, None),
        ([("stop",), ("call", CallLeaseLost())], None, CallLeaseLost()),
        ([("call", CallInitialize(ROW)), ALLOW], 5, StartBatch(3)),
        ([ALLOW, ("end",)], None, None),
        ([permit(4, 4)], 5, StartBatch(1)),
        ([permit(3, 100)], 5, None),
    ],
)
def test_what_starts_after_the_first_start(commands, waiting, then):
    made = delivery(*commands)
    assert made.next_start(waiting, NOW) is not None

    assert made.next_start(waiting, NOW) == then


@over_rows(
    ("commands", "of_a_batch", "of_another_call"),
    [
        ([], Repetition.AFTER_RENEWAL, Repetition.NOW),
        ([ALLOW], Repetition.NOW, Repetition.NOW),
        ([PAST], Repetition.AFTER_RENEWAL, Repetition.NOW),
        # A batch that has begun is finished, also after user code asked to give the lease away.
        ([ALLOW, ("halt",)], Repetition.NOW, Repetition.NOW),
        ([ALLOW, ("stop",)], Repetition.NEVER, Repetition.NEVER),
        ([("stop",), ALLOW], Repetition.NEVER, Repetition.NEVER),
    ],
)
def test_whether_a_call_that_raised_is_made_again(commands, of_a_batch, of_another_call):
    assert delivery(*commands).repetition(NOW, is_batch=True) is of_a_batch
    assert delivery(*commands).repetition(NOW, is_batch=False) is of_another_call


def test_the_cap_counts_the_records_of_all_batches():
    made = delivery(permit(7, 7))

    sizes = [made.next_start(5, NOW) for _ in range(4)]

    assert sizes == [StartBatch(3), StartBatch(3), StartBatch(1), None]
    assert made.delivered_total == 7


def test_a_second_call_before_the_first_has_begun_is_a_bug():
    with pytest.raises(AssertionError, match="one call at a time"):
        delivery(("call", CallShardEnded()), ("call", CallLeaseLost()))


# Attempts


def test_an_error_that_cannot_be_printed_is_named():
    class Unspeakable(Exception):
        def __str__(self):
            raise RuntimeError

    assert error_words(Unspeakable()) == "Unspeakable"
    assert error_words(ValueError("x")) == "ValueError: x"


# Rows


class Rows:
    def __init__(self):
        self.calls = []

    def begin_batch(self):
        self.calls.append("begin")

    def end_batch(self, position):
        self.calls.append(("end", position))

    def take_back_batch(self, checkpoint):
        self.calls.append(("take back", checkpoint))


P11, P12 = ExtendedSequenceNumber("11"), ExtendedSequenceNumber("12")


def test_the_rows_of_a_call_that_returns_belong_to_its_position():
    rows = Rows()

    attempt(lambda: rows.calls.append("call"), rows, P12, lambda: P11)

    assert rows.calls == ["begin", "call", ("end", P12)]


@pytest.mark.parametrize("error", [ValueError(), SystemExit(), FailedRecords([])])
def test_the_rows_of_a_call_that_raises_are_taken_back_to_its_last_checkpoint(error):
    rows, durable = Rows(), []

    def checkpoints_and_raises():
        durable.append(P11)
        raise error

    with pytest.raises(type(error)):
        attempt(checkpoints_and_raises, rows, P12, lambda: durable[-1])

    assert rows.calls == ["begin", ("take back", P11)]
