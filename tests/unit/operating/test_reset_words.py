import pytest

from kclrun.model.lease import Halt, Lease, LeaseKey, OwnerId
from kclrun.model.output import OutputDestination
from kclrun.model.sequence import LATEST, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.stream import ONLY_STREAM
from kclrun.model.time import WallTime
from kclrun.operating.reset import ResetPlan
from kclrun.operating.reset_words import (
    StreamReset,
    halt_reason,
    moved_in_words,
    output_in_words,
    position_after,
    removed_in_words,
)
from kclrun.protocol.writes import CreateLease, DeleteReset, FinishReset, ResetLease

PARENT, CHILD, OTHER = map(LeaseKey, ("shard-0", "shard-1", "shard-2"))
HALT = Halt("a reset", WallTime(1.0), WallTime(1.0))
AT = ExtendedSequenceNumber("49")
MOVE = ResetLease(PARENT, None, 7, AT, TRIM_HORIZON, 2, HALT)
MAKE = CreateLease(Lease(key=OTHER, checkpoint=LATEST, generation=2, halt=HALT))


def reset(*, notes=None, remove=(), rows=()):
    plan = ResetPlan(2, (MOVE, MAKE), (), (), tuple(remove), (FinishReset(PARENT, 2, "a reset"),))
    known = {row.key: row for row in (Lease(key=PARENT, checkpoint=AT, halt=HALT), *rows)}
    return StreamReset(ONLY_STREAM, "orders", plan, known, notes or {})


def test_each_row_that_is_moved_or_made_has_a_line_with_what_becomes_of_it():
    assert list(moved_in_words(reset(), "2026-03-01T06:00:00Z")) == [
        "shard-0: 49 to 2026-03-01T06:00:00Z; its halt goes",
        "shard-2: new, at 2026-03-01T06:00:00Z",
    ]


def test_at_kept_positions_each_line_has_its_own_position_and_its_note():
    notes = {PARENT: "forward, what is between is skipped", OTHER: ""}

    assert list(moved_in_words(reset(notes=notes), "kept.json")) == [
        "shard-0: 49 to TRIM_HORIZON; forward, what is between is skipped; its halt goes",
        "shard-2: new, at LATEST",
    ]
    assert (position_after(MOVE), position_after(MAKE)) == (TRIM_HORIZON, LATEST)


@pytest.mark.parametrize(
    ("parents", "why"),
    [
        (frozenset({PARENT}), "it comes again when its parents end"),
        (frozenset[str](), "its children go on"),
    ],
)
def test_a_row_that_is_removed_says_whether_it_comes_again(parents, why):
    row = Lease(key=CHILD, checkpoint=AT, parents=parents, owner=OwnerId("kclrun:a:1"))
    removed = reset(remove=[DeleteReset(CHILD, row.owner, 1)], rows=[row])

    assert list(removed_in_words(removed)) == [f"shard-1: 49, removed: {why}"]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ({"path": "/rows"}, "in /rows; those of before stay"),
        ({"path": "/rows", "roll_s": 60.0}, "in folders …/SHARD/2/ of /rows"),
        ({"s3": "s3://rows"}, "in folders …/SHARD/2/ of s3://rows"),
        ({"sql": "sqlite:///x", "table": "t", "is_upsert": True}, "replace those of the same key"),
        ({"sql": "sqlite:///x", "table": "t"}, "inserted again into t"),
        ({"dynamodb": "items"}, "put again into items"),
        ({"sqs": "queue"}, "messages are sent again"),
        ({"use": "own:Rows"}, "rows are given to own:Rows again, with another key"),
    ],
)
def test_what_happens_to_the_rows_of_an_output_is_said_for_each_kind(place, words):
    assert words in output_in_words(OutputDestination(name="output", **place), 2)


def test_the_reason_on_halted_rows_is_of_one_reset_alone():
    first, second = (halt_reason("LATEST", WallTime(at)) for at in (1.001, 1.002))

    assert first != second
    assert "1970-01-01T00:00:01.001Z" in first
