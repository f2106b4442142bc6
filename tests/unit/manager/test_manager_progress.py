"""What a slot says of progress and lag: being busy is no progress, and lag grows unread."""

import pytest

from kclrun.leases.held_lease import HeldLease
from kclrun.leases.transitions import State
from kclrun.manager.ring_reader import waiting_since
from kclrun.manager.sampling import lag_ms, lag_of, progressed_instant
from kclrun.model.lease import Halt, Lease
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.protocol.status import LeaseStatus, WorkerState
from tests.support.tables import over_rows

EARLY, LATE = ExtendedSequenceNumber("10"), ExtendedSequenceNumber("20")


def status(**fields):
    return LeaseStatus(pid=1, incarnation=1, state=WorkerState.PROCESSING, **fields)


@over_rows(
    ("claim", "fields", "expected"),
    [
        ("it has not read yet", {}, 0.0),
        ("the shard is empty", {"last_fetch_instant": 9.0}, 9.0),
        (
            "all that was read is processed",
            {"last_fetch_instant": 9.0, "fetched": LATE, "processed": LATE},
            9.0,
        ),
        (
            "records wait: reading more of them is no progress",
            {"last_fetch_instant": 9.0, "fetched": LATE, "processed": EARLY},
            0.0,
        ),
        (
            "none of the records was ever processed",
            {"last_fetch_instant": 9.0, "fetched": EARLY},
            0.0,
        ),
        (
            "user code runs, and a batch returned before",
            {
                "last_fetch_instant": 9.0,
                "last_batch_instant": 5.0,
                "processing_since_instant": 8.0,
                "fetched": LATE,
                "processed": EARLY,
            },
            5.0,
        ),
        (
            "user code was called without records, and does not return",
            {"last_fetch_instant": 9.0, "processing_since_instant": 8.0},
            0.0,
        ),
    ],
)
def test_progress_is_a_batch_that_returned_or_a_look_that_found_nothing(claim, fields, expected):
    assert progressed_instant(status(**fields)) == expected


@pytest.mark.parametrize(
    ("claim", "millis", "expected"),
    [
        ("it has not read yet", -1, None),
        ("at the tip nothing is known to wait", 0, 0),
        ("what waits grows older while nobody reads", 2000, 2000 + 3500),
    ],
)
def test_lag_is_that_of_now_and_not_of_the_last_read(claim, millis, expected):
    shown = status(millis_behind_latest=millis, last_fetch_instant=6.5)

    assert lag_ms(shown, 10.0) == expected


def held_lease(**fields):
    return HeldLease(key="s0", state=State.HALTED, **fields)


def row(halt):
    return Lease(key="s0", checkpoint=EARLY, halt=halt)


@over_rows(
    ("claim", "held", "read", "expected"),
    [
        ("a process that reads says it itself", held_lease(waiting_since=900.0), 2000, 5500),
        (
            "the oldest record that waits grows older",
            held_lease(waiting_since=900.0),
            None,
            100_000,
        ),
        (
            "the row of a halted lease says it on every host",
            held_lease(row=row(Halt("poison", 950.0, 800.0))),
            None,
            200_000,
        ),
        (
            "a former version only wrote when it halted",
            held_lease(row=row(Halt("poison", 950.0))),
            None,
            50_000,
        ),
        (
            "a process that has not read yet says nothing",
            held_lease(waiting_since=900.0),
            -1,
            100_000,
        ),
        ("nothing is known to wait", held_lease(), None, None),
        ("the lease is not held any more", None, None, None),
        ("the clocks differ", held_lease(waiting_since=1001.0), None, 0),
    ],
)
def test_the_lag_of_a_lease_that_nobody_reads_goes_on_counting(claim, held, read, expected):
    shown = status(millis_behind_latest=read, last_fetch_instant=6.5) if read is not None else None

    assert lag_of(held, shown, 10.0, 1000.0) == expected


@pytest.mark.parametrize(
    ("written", "expected"), [(900.0, 900.0), (0.0, None), (-1.0, None), (1e300, None)]
)
def test_a_time_that_user_code_has_scribbled_on_never_reaches_the_row(written, expected):
    assert waiting_since(status(unprocessed_since=written)) == expected
    assert waiting_since(None) is None
