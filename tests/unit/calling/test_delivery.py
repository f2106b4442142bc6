"""What user code may be given next, and what follows if it raises: no thread, no clock."""

import pytest

from kclrun.calling.delivery import (
    Attempts,
    ConfirmEnd,
    ConfirmStop,
    Delivery,
    GiveUp,
    Repetition,
    RetryAfter,
    StartBatch,
    attempt,
    error_words,
)
from kclrun.errors import FailedRecords, ProcessorLoadError, SettingsError
from kclrun.lease.commands import (
    AllowDelivery,
    CallInitialize,
    CallLeaseLost,
    CallShardEnded,
    CallShutdownRequested,
)
from kclrun.model.lease import Lease
from kclrun.model.policies import ErrorPolicy
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from tests.support.tables import over_rows

NOW = 100.0
ROW = Lease(key="s0", checkpoint=TRIM_HORIZON)
ALLOW = ("allow", AllowDelivery(NOW + 10, 10**6, 10**6))
PAST = ("allow", AllowDelivery(NOW, 10**6, 10**6))
CALLS = (
    CallInitialize(ROW),
    CallShardEnded(),
    CallShutdownRequested(),
    CallLeaseLost(),
)


def delivery(*commands):
    """One with batches of at most 3 records, that was given these commands."""
    made = Delivery(batch_max=3)
    for name, *arguments in commands:
        getattr(made, name)(*arguments)
    return made


def permit(below, most):
    return ("allow", AllowDelivery(NOW + 10, below, most))


@over_rows(
    ("commands", "waiting", "start"),
    [
        # Without a permit, or at its fence, nothing starts.
        ([], 5, None),
        ([("end",)], None, None),
        ([PAST], 5, None),
        ([PAST], 0, None),
        ([PAST, ("end",)], None, None),
        ([ALLOW, PAST], 5, None),
        ([PAST, ALLOW], 5, StartBatch(3)),
        # A batch is bounded by its limit, by what waits and by the cap.
        ([ALLOW], 5, StartBatch(3)),
        ([ALLOW], 2, StartBatch(2)),
        ([ALLOW], None, None),
        ([permit(2, 2)], 5, StartBatch(2)),
        ([permit(1, 100)], 5, StartBatch(3)),
        ([permit(0, 100)], 5, None),
        ([permit(5, 0)], 5, None),
        # A page without records reaches no cap.
        ([permit(0, 0)], 0, StartBatch(0)),
        # The end comes behind everything that waits.
        ([ALLOW, ("end",)], 1, StartBatch(1)),
        ([ALLOW, ("end",)], 0, StartBatch(0)),
        ([ALLOW, ("end",)], None, ConfirmEnd()),
        # Halted, no batch starts and no end is confirmed, whatever is allowed later.
        ([ALLOW, ("halt",)], 5, None),
        ([("halt",), ALLOW], 5, None),
        ([ALLOW, ("halt",)], 0, None),
        ([ALLOW, ("end",), ("halt",)], None, None),
        ([ALLOW, ("halt",), ("stop",)], 5, ConfirmStop()),
        # A stop goes before everything, withdraws a call, and outlives a permit that comes late.
        ([("stop",)], None, ConfirmStop()),
        ([ALLOW, ("stop",)], 5, ConfirmStop()),
        ([ALLOW, ("end",), ("stop",)], None, ConfirmStop()),
        ([("call", CallShardEnded()), ("stop",)], None, ConfirmStop()),
        ([("stop",), ("call", CallLeaseLost())], None, ConfirmStop()),
        ([("stop",), ALLOW], 5, ConfirmStop()),
        # Calls need no permit, and go before batches.
        *[([("call", call)], None, call) for call in CALLS],
        *[([("call", call), ("halt",)], 5, call) for call in CALLS],
        *[([ALLOW, ("call", call)], 5, call) for call in CALLS],
    ],
)
def test_what_starts_next(commands, waiting, start):
    assert delivery(*commands).next_start(waiting, NOW) == start


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


def test_a_repetition_that_is_refused_leaves_the_stop_to_be_confirmed():
    made = delivery(ALLOW, ("stop",))
    made.repetition(NOW, is_batch=True)

    assert made.next_start(5, NOW) == ConfirmStop()


def test_the_cap_counts_the_records_of_all_batches():
    made = delivery(permit(7, 7))

    sizes = [made.next_start(5, NOW) for _ in range(4)]

    assert sizes == [StartBatch(3), StartBatch(3), StartBatch(1), None]
    assert made.delivered_total == 7


def test_a_second_call_before_the_first_has_begun_is_a_bug():
    with pytest.raises(AssertionError, match="one call at a time"):
        delivery(("call", CallShardEnded()), ("call", CallLeaseLost()))


# Attempts


REPEATED = ("initialize", "process_records", "shard_ended")


@pytest.mark.parametrize("where", REPEATED)
def test_a_call_is_made_again_after_growing_pauses_until_its_retries_are_spent(where):
    attempts = Attempts(where, ErrorPolicy(retries=2, backoff_s=1.0))

    decisions = [attempts.raised(ValueError("x")) for _ in range(3)]

    assert decisions == [RetryAfter(1.0), RetryAfter(2.0), GiveUp()]
    assert attempts.failed == 3


@pytest.mark.parametrize("where", ["shutdown_requested", "lease_lost"])
def test_the_last_calls_of_a_lease_are_not_repeated(where):
    assert Attempts(where, ErrorPolicy(9, 1.0)).raised(ValueError("x")) == GiveUp()


@pytest.mark.parametrize("where", REPEATED)
@pytest.mark.parametrize("error", [SettingsError("repair it"), ProcessorLoadError("returned a 3")])
def test_an_error_that_would_come_again_is_given_up_at_once(where, error):
    assert Attempts(where, ErrorPolicy(9, 1.0)).raised(error) == GiveUp()


@pytest.mark.parametrize(
    "error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit(), BaseException("cancelled")]
)
def test_an_error_that_is_not_an_exception_is_one_of_user_code_too(error):
    attempts = Attempts("process_records", ErrorPolicy(1, 1.0))

    assert attempts.raised(error) == RetryAfter(1.0)
    assert attempts.raised(error) == GiveUp()


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


@pytest.mark.parametrize("rows", [None, Rows()])
def test_a_call_without_rows_opens_no_batch_of_them(rows):
    calls = []

    attempt(lambda: calls.append("call"), rows, None, lambda: None)

    assert calls == ["call"]
    assert rows is None or rows.calls == []
