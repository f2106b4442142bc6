"""Kept positions: what a text must have to be one."""

import json

import pytest

from kclrun.errors import SettingsError
from kclrun.leases.positions import Kept, parse_kept
from kclrun.model.sequence import AT_TIMESTAMP, LATEST, ExtendedSequenceNumber


def parsed(checkpoint, starts_at):
    line = {"shard": "s0", "checkpoint": checkpoint, "starts_at": starts_at}
    return parse_kept(json.dumps([line]).encode(), "kept.json")["s0"]


def test_an_instant_is_kept_with_its_sentinel():
    assert parsed("LATEST", 5.5) == Kept(LATEST, 5.5)
    assert parsed("AT_TIMESTAMP", 5.5) == Kept(
        ExtendedSequenceNumber(AT_TIMESTAMP.sequence_number, 5500)
    )


@pytest.mark.parametrize("checkpoint", ["LATEST", "AT_TIMESTAMP"])
@pytest.mark.parametrize("starts_at", [-1.0, 1e11, 1e300])
def test_a_number_that_is_not_a_time_is_refused_for_its_row_could_not_be_read_again(
    checkpoint, starts_at
):
    with pytest.raises(SettingsError, match=r"kept\.json: s0: `starts_at` is not a time"):
        parsed(checkpoint, starts_at)
