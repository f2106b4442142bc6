"""What a slot says of progress and lag: being busy is no progress, and lag grows unread."""

from __future__ import annotations

import pytest

from kclrun.ipc.board import LeaseStatus, WorkerState
from kclrun.manager.progress import lag_ms, progressed_instant
from kclrun.model.sequence import ExtendedSequenceNumber

EARLY, LATE = ExtendedSequenceNumber("10"), ExtendedSequenceNumber("20")


def status(**fields):
    return LeaseStatus(pid=1, incarnation=1, state=WorkerState.PROCESSING, **fields)


@pytest.mark.parametrize(
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
