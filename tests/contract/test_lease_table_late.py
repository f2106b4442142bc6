"""The late checkpoint: what was fully processed when the lease was lost, only forward [P19, I2]."""

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kclrun.aws.rows import decode_row, encode_row
from kclrun.errors import InvariantViolation
from kclrun.model.lease import OFFERED, Handoff
from kclrun.model.sequence import (
    AT_TIMESTAMP,
    LATEST,
    SENTINELS,
    SHARD_END,
    TRIM_HORIZON,
    ExtendedSequenceNumber,
)
from kclrun.model.time import WallTime
from kclrun.protocol.writes import Applied, ConditionFailed, LateCheckpoint
from tests.contract.lease_tables import AT_5, AT_7_2, AT_9, HELD, JAVA, KEY, ME, OTHER, changed
from tests.examples import examples

pytest_plugins = ("tests.contract.lease_table_fixtures",)

LOST = changed(HELD, owner=OTHER)
LATE = LateCheckpoint(KEY, ME, AT_5, AT_9)


@pytest.mark.parametrize("owner", [OTHER, OFFERED, None])
def test_a_late_checkpoint_moves_the_position_and_nothing_of_the_owners(subject, owner):
    row = changed(LOST, owner=owner, handoff=Handoff(ME, WallTime(1.0)), taken_from=JAVA)
    table = subject.with_rows(row)

    outcome = table.write(LATE)

    assert outcome == Applied(changed(row, checkpoint=AT_9, owner_switches=0, pending=None))
    assert table.read(KEY) == outcome.row


@pytest.mark.parametrize("nothing", [{"NULL": True}, {"S": ""}], ids=["null", "empty"])
def test_it_applies_where_the_owner_is_null(subject, nothing):
    subject.plant(encode_row(changed(LOST, owner=None)) | {"leaseOwner": nothing})

    assert isinstance(subject.table.write(LATE), Applied)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(changed(LOST, owner=JAVA), id="a Java owner"),
        pytest.param(changed(LOST, owner=ME), id="mine again"),
        pytest.param(changed(LOST, checkpoint=SHARD_END), id="ended"),
        pytest.param(changed(LOST, checkpoint=ExtendedSequenceNumber("4")), id="before the last"),
        pytest.param(changed(LOST, checkpoint=TRIM_HORIZON), id="begun anew"),
        pytest.param(changed(LOST, checkpoint=AT_9), id="there already"),
        pytest.param(changed(LOST, checkpoint=ExtendedSequenceNumber("10")), id="further on"),
    ],
)
@pytest.mark.parametrize("last", [AT_5, ExtendedSequenceNumber("5", 1)], ids=str)
@pytest.mark.parametrize("position", [AT_9, ExtendedSequenceNumber("9", 1)], ids=str)
def test_it_is_refused_and_the_row_stays(subject, row, last, position):
    row = changed(row, checkpoint=last) if row.checkpoint == AT_5 else row
    row = changed(row, checkpoint=position) if row.checkpoint == AT_9 else row
    change = LateCheckpoint(KEY, ME, last, position)

    assert subject.with_rows(row).write(change) == ConditionFailed(row)
    assert subject.table.read(KEY) == row
    as_seen = changed(LOST, checkpoint=last)
    assert isinstance(subject.with_rows(as_seen).write(change), Applied)


def test_it_resurrects_no_deleted_row(subject):
    """I5."""
    assert subject.with_rows().write(LATE) == ConditionFailed(None)
    assert subject.raw(KEY) is None


@pytest.mark.parametrize("position", SENTINELS, ids=str)
def test_it_is_never_a_sentinel(subject, position):
    table = subject.with_rows(LOST)

    with pytest.raises(InvariantViolation, match="late checkpoint"):
        table.write(LateCheckpoint(KEY, ME, AT_5, position))
    assert table.read(KEY) == LOST


def test_it_applies_only_once(subject):
    table = subject.with_rows(LOST)
    table.write(LATE)

    again = table.write(LATE)

    assert again == ConditionFailed(changed(LOST, checkpoint=AT_9, owner_switches=0, pending=None))


# In the extended order, whatever stands there

digits = st.one_of(
    # Lengths on both sides of a sentinel's, and of each other's.
    st.sampled_from(["0", "1", "9", "10", "99", "999999", "1000000", "9" * 12, "1" + "0" * 12]),
    st.integers(0, 10**57).map(str),
)
numbers = st.builds(ExtendedSequenceNumber, digits, st.integers(0, 2))
sentinels = st.builds(
    ExtendedSequenceNumber,
    st.sampled_from([each.sequence_number for each in SENTINELS]),
    st.integers(0, 2),
)
positions = st.one_of(numbers, sentinels)


@st.composite
def cases(
    draw: st.DrawFn,
) -> tuple[ExtendedSequenceNumber, ExtendedSequenceNumber, ExtendedSequenceNumber]:
    """(last, row, new): often near each other, where the order is decided."""
    new = draw(numbers)
    near = st.builds(ExtendedSequenceNumber, st.just(new.sequence_number), st.integers(0, 2))
    row = draw(st.one_of(positions, near))
    near_row = st.builds(ExtendedSequenceNumber, st.just(row.sequence_number), st.integers(0, 2))
    last = draw(st.one_of(positions, near, near_row))
    return last, row, new


@settings(examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases(), st.booleans())
@example((LATEST, TRIM_HORIZON, AT_5), False)
@example((TRIM_HORIZON, LATEST, AT_5), False)
@example((AT_TIMESTAMP, LATEST, AT_5), False)
@example((TRIM_HORIZON, ExtendedSequenceNumber("9" * 13), ExtendedSequenceNumber("1" * 14)), False)
@example((AT_5, TRIM_HORIZON, ExtendedSequenceNumber("1" * 56)), False)
@example((AT_5, LATEST, ExtendedSequenceNumber("1" * 56)), False)
@example((AT_5, SHARD_END, ExtendedSequenceNumber("1" * 56)), False)
@example((AT_5, SHARD_END, ExtendedSequenceNumber("1" * 56, 1)), False)
@example((ExtendedSequenceNumber("5", 1), SHARD_END, ExtendedSequenceNumber("1" * 56)), False)
@example((ExtendedSequenceNumber("5", 1), SHARD_END, ExtendedSequenceNumber("1" * 56, 1)), False)
@example((AT_5, AT_5, ExtendedSequenceNumber("5", 1)), True)
@example((ExtendedSequenceNumber("5", 1), AT_5, AT_7_2), True)
@example((AT_5, AT_5, AT_5), True)
@example((SHARD_END, AT_5, AT_9), False)
@example((SHARD_END, AT_5, ExtendedSequenceNumber("9" * 129)), False)
def test_it_applies_exactly_from_the_last_position_to_below_the_new_one(subject, case, has_no_sub):
    last, at, new = case
    item = encode_row(changed(LOST, checkpoint=at))
    if has_no_sub:
        del item["checkpointSubSequenceNumber"]
    row = decode_row(item)
    assert row is not None
    subject.plant(item)

    outcome = subject.table.write(LateCheckpoint(KEY, ME, last, new))

    applies = not row.is_ended and last <= row.checkpoint < new
    assert outcome == (
        Applied(changed(row, checkpoint=new, owner_switches=0, pending=None))
        if applies
        else ConditionFailed(row)
    )
