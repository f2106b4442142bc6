"""Kept positions: what a text must have to be one."""

import json

import pytest

from kclrun.errors import SettingsError
from kclrun.leases.shard_sync import Listing
from kclrun.model.lease import Halt, Lease
from kclrun.model.sequence import (
    AT_TIMESTAMP,
    LATEST,
    SHARD_END,
    TRIM_HORIZON,
    ExtendedSequenceNumber,
)
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.operating.positions import KeptPosition, parse_kept, plan_positions
from kclrun.operating.reset import ResetStart


def parsed(checkpoint, starts_at):
    line = {"shard": "s0", "checkpoint": checkpoint, "starts_at": starts_at}
    return parse_kept(json.dumps([line]).encode(), "kept.json")["s0"]


def test_an_instant_is_kept_with_its_sentinel():
    assert parsed("LATEST", 5.5) == KeptPosition(LATEST, 5.5)
    assert parsed("AT_TIMESTAMP", 5.5) == KeptPosition(
        ExtendedSequenceNumber(AT_TIMESTAMP.sequence_number, 5500)
    )


@pytest.mark.parametrize("checkpoint", ["LATEST", "AT_TIMESTAMP"])
@pytest.mark.parametrize("starts_at", [-1.0, 1e11, 1e300])
def test_a_number_that_is_not_a_time_is_refused_for_its_row_could_not_be_read_again(
    checkpoint, starts_at
):
    with pytest.raises(SettingsError, match=r"kept\.json: s0: `starts_at` is not a time"):
        parsed(checkpoint, starts_at)


CHILD = Shard("s1", HashRange(0, HASH_KEY_MAX), "50", None, "s0")


@pytest.mark.parametrize(("checkpoint", "is_removed"), [("7", True), ("SHARD_END", False)])
def test_the_row_of_a_trimmed_shard_that_had_ended_is_removed_unless_it_says_so(
    checkpoint, is_removed
):
    """Left at its position it would hold the children for ever: nothing reads it to its end."""
    rows = [
        Lease(key="s0", checkpoint=ExtendedSequenceNumber(checkpoint), counter=3),
        Lease(key="s1", checkpoint=ExtendedSequenceNumber("60"), counter=3),
    ]
    kept = {"s0": KeptPosition(SHARD_END), "s1": KeptPosition(ExtendedSequenceNumber("55"))}
    start = ResetStart(TRIM_HORIZON, 100.0, Halt("a reset", 100.0))

    plan = plan_positions(rows, Listing([CHILD], 100.0, 0.0), kept, start)

    assert [write.key for write in plan.remove] == (["s0"] if is_removed else [])
    assert [write.position for write in plan.begin] == [ExtendedSequenceNumber("55")]
