"""A reset by an operator, and writes that come late to it: none of them undoes it [K4, R1]."""

import msgspec
import pytest

from kclrun.errors import InvariantViolation
from kclrun.model.lease import DiedOn, Halt, Handoff, Lease
from kclrun.model.output import Cursor, StoredCursors
from kclrun.model.sequence import LATEST, SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import WallTime
from kclrun.protocol.writes import (
    Applied,
    Checkpoint,
    Claim,
    ConditionFailed,
    CreateChildren,
    CreateLease,
    Decline,
    DeleteEnded,
    DeleteReset,
    End,
    FinishReset,
    HaltForReset,
    HaltLease,
    HeldParent,
    LateCheckpoint,
    LeaseChange,
    NameChildren,
    Offer,
    Release,
    Renew,
    ResetLease,
    Take,
)
from tests.contract.lease_tables import AT_5, AT_9, CHILD_1, HELD, KEY, ME, OTHER, changed

pytest_plugins = ("tests.contract.lease_table_fixtures",)

HALT = Halt("a reset is under way", WallTime(7.0), WallTime(7.0))
USED = changed(
    HELD,
    children=frozenset({CHILD_1}),
    halt=Halt("poison", WallTime(1.0)),
    handoff=Handoff(OTHER, WallTime(1.0)),
    died_on=DiedOn("host", AT_5),
    outputs=StoredCursors(AT_5, (("rows", Cursor(AT_5)),)),
    generation=2,
    state_version="v1",
    latest_pinned_at=WallTime(3.0),
)
AT_TIME = ExtendedSequenceNumber("AT_TIMESTAMP", 1_764_000_000_000)


def reset_to(
    position: ExtendedSequenceNumber, row: Lease = USED, pinned_at: WallTime | None = None
) -> ResetLease:
    children = frozenset({CHILD_1}) if position == SHARD_END else frozenset[str]()
    return ResetLease(
        row.key, row.owner, row.counter, row.checkpoint, position, row.generation + 1, HALT,
        pinned_at, children,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("position", "pinned_at"),
    [
        (TRIM_HORIZON, None),
        (LATEST, WallTime(8.5)),
        (AT_TIME, None),
        (AT_9, None),
        (SHARD_END, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("last", [AT_5, SHARD_END], ids=str)
def test_a_reset_row_is_as_the_first_sync_makes_it_and_halted_in_the_next_generation(
    subject, last, position, pinned_at
):
    row = changed(USED, checkpoint=last)
    table = subject.with_rows(row)

    outcome = table.write(reset_to(position, row, pinned_at))

    expected = Lease(
        key=KEY,
        checkpoint=position,
        counter=5,
        parents=row.parents,
        hash_range=row.hash_range,
        halt=HALT,
        latest_pinned_at=pinned_at,
        children=frozenset({CHILD_1} if position == SHARD_END else ()),
        generation=3,
    )
    assert outcome == Applied(expected)
    assert table.read(KEY) == expected


@pytest.mark.parametrize(
    "row",
    [changed(USED, owner=OTHER), changed(USED, counter=5), changed(USED, checkpoint=AT_9)],
    ids=["another owner", "renewed", "moved late"],
)
def test_a_row_that_is_not_as_seen_is_neither_reset_nor_deleted(subject, row):
    table = subject.with_rows(row)

    assert table.write(reset_to(TRIM_HORIZON)) == ConditionFailed(row)
    if row.checkpoint == AT_5:
        assert table.write(DeleteReset(KEY, ME, 4)) == ConditionFailed(row)
    assert table.read(KEY) == row
    assert subject.with_rows(USED).write(DeleteReset(KEY, ME, 4)) == Applied(None)
    assert subject.raw(KEY) is None


@pytest.mark.parametrize("position", [SHARD_END, AT_9.at_tick(1)], ids=str)
def test_a_reset_never_ends_a_shard_without_children_and_never_keeps_a_tick(subject, position):
    table = subject.with_rows(USED)
    reset = msgspec.structs.replace(reset_to(position), children=frozenset())

    with pytest.raises(InvariantViolation, match="a reset is never to"):
        table.write(reset)
    assert table.read(KEY) == USED


# The former owner ME, at counter 4 and AT_5, wakes up after the reset.
LATE: dict[str, LeaseChange] = {
    "claim": Claim(KEY, ME, 4),
    "renew": Renew(KEY, ME, 4),
    "checkpoint": Checkpoint(KEY, ME, 4, AT_9, AT_5),
    "name children": NameChildren(KEY, ME, 4, frozenset({CHILD_1})),
    "end": End(KEY, ME, 4, AT_5),
    "release": Release(KEY, ME, 4, AT_9, AT_5),
    "offer": Offer(KEY, ME, 4, AT_9, AT_5),
    "decline": Decline(KEY, ME, 4),
    "halt": HaltLease(KEY, ME, 4, Halt("x", WallTime(1.0))),
    "late checkpoint": LateCheckpoint(KEY, ME, AT_5, AT_9, generation=2),
    "late checkpoint from the beginning": LateCheckpoint(KEY, ME, TRIM_HORIZON, AT_9, generation=2),
    "take by its manager": Take(KEY, ME, ME, 4, 10.0, "LATEST"),
    "children": CreateChildren((Lease(key=CHILD_1, checkpoint=AT_5),), (HeldParent(KEY, ME, 4),)),
    "clean-up": DeleteEnded(KEY),
    "a first sync": CreateLease(Lease(key=KEY, checkpoint=TRIM_HORIZON)),
}


@pytest.mark.each_value
@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("position", [TRIM_HORIZON, LATEST, AT_TIME, AT_5], ids=str)
@pytest.mark.parametrize("is_taken", [False, True], ids=["unowned", "taken by the next fleet"])
def test_no_write_of_a_former_owner_undoes_a_reset(subject, position, name, *, is_taken):
    table = subject.with_rows(USED)
    table.write(reset_to(position))
    if is_taken:
        table.write(Take(KEY, OTHER, None, 5, 10.0, "LATEST"))
    after = table.read(KEY)

    assert isinstance(table.write(LATE[name]), ConditionFailed)
    assert table.read(KEY) == after
    assert table.read(CHILD_1) is None


@pytest.mark.parametrize("generation", [0, 2])
def test_a_late_checkpoint_of_the_same_generation_applies(subject, generation):
    row = changed(HELD, owner=OTHER, generation=generation)
    table = subject.with_rows(row)

    other = LateCheckpoint(KEY, ME, AT_5, AT_9, generation=generation + 1)
    assert table.write(other) == ConditionFailed(row)
    same = LateCheckpoint(KEY, ME, AT_5, AT_9, generation=generation)
    assert isinstance(table.write(same), Applied)


@pytest.mark.parametrize("owner", [None, OTHER])
def test_a_finished_reset_lifts_its_own_halt_and_touches_nothing_else(subject, owner):
    row = changed(HELD, owner=owner, checkpoint=TRIM_HORIZON, generation=3, halt=HALT)
    table = subject.with_rows(row)

    for other in (FinishReset(KEY, 2, HALT.reason), FinishReset(KEY, 3, "of another reset")):
        assert table.write(other) == ConditionFailed(row)
    finished = table.write(FinishReset(KEY, 3, HALT.reason))
    assert finished == Applied(changed(row, halt=None))
    again = table.write(FinishReset(KEY, 3, HALT.reason))
    assert again == ConditionFailed(changed(row, halt=None))


def test_a_row_that_will_be_deleted_is_halted_where_it_is(subject):
    table = subject.with_rows(USED)

    outcome = table.write(HaltForReset(KEY, ME, 4, HALT))

    halted = changed(USED, owner=None, counter=5, handoff=None, halt=HALT)
    assert outcome == Applied(halted)
    assert table.write(HaltForReset(KEY, ME, 4, HALT)) == ConditionFailed(halted)
    assert table.write(DeleteReset(KEY, None, 5)) == Applied(None)
