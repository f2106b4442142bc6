"""One contract, every lease table: in memory, and DynamoDB over the wire client.

What holds for a change holds over both, or one of them is wrong. Asks, offers and late checkpoints:
`test_lease_table_handoffs.py`, `test_lease_table_late.py`.
"""

import threading
import time
from collections.abc import Callable

import pytest

from kclrun.aws.rows import encode_row
from kclrun.errors import InvalidRequest
from kclrun.model.lease import Halt, Lease, LeaseKey, Load, OwnerId
from kclrun.model.output import Cursor, StoredCursors
from kclrun.model.sequence import LATEST, SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HashRange
from kclrun.model.time import WallTime
from kclrun.protocol.writes import (
    Amend,
    Applied,
    Checkpoint,
    Claim,
    ConditionFailed,
    CreateChildren,
    CreateLease,
    DeleteEnded,
    DeleteTrimmed,
    End,
    EndedParent,
    ExistingParent,
    HaltLease,
    HeldParent,
    LeaseChange,
    NameChildren,
    Offer,
    Refused,
    Release,
    Renew,
    ResumeLease,
    Take,
)
from tests.contract.lease_tables import (
    AT_5,
    AT_7_2,
    AT_9,
    CHILD_1,
    CHILD_2,
    ENDED,
    HELD,
    JAVA,
    KEY,
    ME,
    OTHER,
    UNOWNED,
    changed,
)
from tests.patience import HUNG_S

pytest_plugins = ("tests.contract.lease_table_fixtures",)


def take(seen_owner: OwnerId | None, seen_counter: int = 4, owner: OwnerId = ME) -> Take:
    return Take(KEY, owner, seen_owner, seen_counter, 10.0, "TRIM_HORIZON")


def checkpoint(last: ExtendedSequenceNumber = AT_5, counter: int = 4) -> Checkpoint:
    return Checkpoint(KEY, ME, counter, AT_7_2, last)


CURSORS = (("rows", Cursor(AT_7_2)), ("sql", Cursor(AT_9, 2)))
# Every change of an owner, as it would be written on HELD.
OWNERS_CHANGES: dict[str, LeaseChange] = {
    "claim": Claim(KEY, ME, 4),
    "renew": Renew(KEY, ME, 4),
    "renew with throughput": Renew(KEY, ME, 4, 12.5),
    "renew with a load": Renew(KEY, ME, 4, 12.5, load=Load(120.5, 0.0125)),
    "checkpoint": checkpoint(),
    "checkpoint with a load": Checkpoint(KEY, ME, 4, AT_7_2, AT_5, Load(120.5, 0.0125)),
    "checkpoint with outputs": Checkpoint(KEY, ME, 4, AT_7_2, AT_5, cursors=CURSORS),
    "checkpoint with state": Checkpoint(KEY, ME, 4, AT_7_2, AT_5, None, CURSORS, "v2"),
    "checkpoint without state again": Checkpoint(KEY, ME, 4, AT_7_2, AT_5, None, CURSORS, ""),
    "end with state": End(KEY, ME, 4, AT_5, (), "v2"),
    "release with state": Release(KEY, ME, 4, AT_9, AT_5, (), "v2"),
    "offer with state": Offer(KEY, ME, 4, AT_5, AT_5, cursors=(), state_version="v2"),
    "end with outputs": End(KEY, ME, 4, AT_5, CURSORS),
    "release with outputs": Release(KEY, ME, 4, AT_9, AT_5, CURSORS),
    "offer with outputs": Offer(KEY, ME, 4, AT_5, AT_5, cursors=CURSORS),
    "name children": NameChildren(KEY, ME, 4, frozenset({CHILD_1, CHILD_2})),
    "end": End(KEY, ME, 4, AT_5),
    "release": Release(KEY, ME, 4, AT_5, AT_5),
    "checkpoint and release": Release(KEY, ME, 4, AT_9, AT_5),
    "offer": Offer(KEY, ME, 4, AT_5, AT_5),
    "offer to the asker": Offer(KEY, ME, 4, AT_5, AT_5, OTHER),
    "checkpoint and offer": Offer(KEY, ME, 4, AT_9, AT_5),
    "checkpoint and offer to the asker": Offer(KEY, ME, 4, AT_9, AT_5, OTHER),
    "claim after the wait": Claim(KEY, ME, 4, has_waited=True),
    "renew and drop the ask": Renew(KEY, ME, 4, drops_ask=True),
    "renew with throughput and drop the ask": Renew(KEY, ME, 4, 12.5, drops_ask=True),
    "amend": Amend(KEY, ME, 4, frozenset({CHILD_1}), HashRange(3, 4)),
    "amend a shard without parents": Amend(KEY, ME, 4, frozenset(), HashRange(3, 4)),
    "halt": HaltLease(
        KEY, ME, 4, Halt("poison", WallTime(1_700_000_000.5), WallTime(1_600_000_000.25))
    ),
}
TAKES: dict[str, LeaseChange] = {"take": take(ME)}
POSITION_CHANGES = (
    "checkpoint with outputs",
    "end with outputs",
    "release with outputs",
    "offer with outputs",
    "checkpoint",
    "checkpoint with a load",
    "end",
    "release",
    "checkpoint and release",
    "offer",
    "offer to the asker",
    "checkpoint and offer",
    "checkpoint and offer to the asker",
)
DELETES: dict[str, LeaseChange] = {
    "delete ended": DeleteEnded(KEY),
    "delete trimmed": DeleteTrimmed(KEY, ME, 4),
}
OTHERS: dict[str, LeaseChange] = {"resume": ResumeLease(KEY)}
EVERY = OWNERS_CHANGES | TAKES | DELETES | OTHERS


# What each change does


@pytest.mark.parametrize("name", OWNERS_CHANGES)
def test_an_owners_change_applies_and_adds_one_to_the_counter(subject, name):
    table = subject.with_rows(HELD)

    outcome = table.write(OWNERS_CHANGES[name])

    assert isinstance(outcome, Applied)
    assert outcome.row is not None
    assert outcome.row.counter == 5
    assert outcome.row == table.read(KEY)


def test_a_claim_and_a_renewal_change_nothing_else(subject):
    table = subject.with_rows(HELD)

    assert table.write(Claim(KEY, ME, 4)) == Applied(changed(HELD, counter=5))
    assert table.write(Renew(KEY, ME, 5)) == Applied(changed(HELD, counter=6))
    measured = table.write(Renew(KEY, ME, 6, 0.0001))
    assert measured == Applied(changed(HELD, counter=7, throughput_kbps=0.0001))


def test_a_renewal_and_a_checkpoint_write_the_load_or_leave_it(subject):
    table, load = subject.with_rows(HELD), Load(120.5, 0.0125)

    assert table.write(Renew(KEY, ME, 4, load=load)) == Applied(changed(HELD, counter=5, load=load))
    assert table.write(Renew(KEY, ME, 5)) == Applied(changed(HELD, counter=6, load=load))
    saved = table.write(Checkpoint(KEY, ME, 6, AT_7_2, AT_5, Load(0.0, 0.0)))
    assert saved.row.load == Load(0.0, 0.0)
    assert table.write(take(ME, 7, OTHER)).row.load == Load(0.0, 0.0), "it outlives the owner"


@pytest.mark.parametrize(
    ("name", "at"), [("checkpoint", AT_7_2), ("end", SHARD_END), ("release", AT_9), ("offer", AT_5)]
)
def test_a_position_and_the_cursors_of_the_outputs_are_written_at_once(subject, name, at):
    held = changed(HELD, generation=3)
    before = subject.with_rows(held).write(OWNERS_CHANGES[name])
    assert before.row.outputs is None
    table = subject.with_rows(held)

    outcome = table.write(OWNERS_CHANGES[f"{name} with outputs"])

    assert outcome.row.outputs == StoredCursors(at, CURSORS)
    assert (outcome.row.checkpoint, outcome.row.generation) == (at, 3)
    assert table.read(KEY) == outcome.row
    table.write(ResumeLease(KEY))
    assert table.read(KEY).outputs == outcome.row.outputs
    table.write(ResumeLease(KEY, forgets_outputs=True))
    assert table.read(KEY).outputs is None


@pytest.mark.parametrize(
    ("name", "at"), [("checkpoint", AT_7_2), ("end", SHARD_END), ("release", AT_9), ("offer", AT_5)]
)
def test_a_position_and_the_version_of_the_state_are_written_at_once(subject, name, at):
    held = changed(HELD, state_version="v1")
    assert subject.with_rows(held).write(OWNERS_CHANGES[name]).row.state_version == "v1"
    table = subject.with_rows(held)

    outcome = table.write(OWNERS_CHANGES[f"{name} with state"])

    assert (outcome.row.checkpoint, outcome.row.state_version) == (at, "v2")
    assert outcome.row.outputs.at == at
    assert table.read(KEY) == outcome.row


def test_a_checkpoint_without_state_takes_the_version_off_the_row(subject):
    table = subject.with_rows(changed(HELD, state_version="v1"))
    table.write(OWNERS_CHANGES["checkpoint without state again"])
    assert table.read(KEY).state_version is None


def test_a_checkpoint_moves_the_position_and_clears_switches_and_pending(subject):
    table = subject.with_rows(HELD)

    outcome = table.write(checkpoint())

    assert outcome == Applied(
        changed(HELD, counter=5, checkpoint=AT_7_2, owner_switches=0, pending=None)
    )


def test_a_checkpoint_inside_an_aggregate_compares_the_sub_sequence_number(subject):
    table = subject.with_rows(changed(HELD, checkpoint=AT_7_2))

    refused = table.write(Checkpoint(KEY, ME, 4, AT_9, ExtendedSequenceNumber("7")))
    applied = table.write(Checkpoint(KEY, ME, 4, AT_9, AT_7_2))

    assert refused == ConditionFailed(changed(HELD, checkpoint=AT_7_2))
    assert isinstance(applied, Applied)


def test_a_row_without_a_sub_sequence_number_counts_as_sub_0(subject):
    item = encode_row(HELD)
    del item["checkpointSubSequenceNumber"]
    subject.plant(item)

    outcome = subject.table.write(checkpoint())

    assert isinstance(outcome, Applied)
    assert outcome.row is not None
    assert outcome.row.checkpoint == AT_7_2


def test_an_end_writes_shard_end_and_a_row_can_end_only_once(subject):
    table = subject.with_rows(HELD)

    ended = table.write(End(KEY, ME, 4, AT_5))
    again = table.write(End(KEY, ME, 5, AT_5))

    row = changed(HELD, counter=5, checkpoint=SHARD_END, owner_switches=0, pending=None)
    assert ended == Applied(row)
    assert again == ConditionFailed(row)


def test_a_release_at_the_same_position_only_removes_the_owner(subject):
    table = subject.with_rows(HELD)

    outcome = table.write(Release(KEY, ME, 4, AT_5, AT_5))

    assert outcome == Applied(changed(HELD, counter=5, owner=None))
    raw = subject.raw(KEY)
    assert raw is not None
    assert "leaseOwner" not in raw


def test_a_release_with_a_moved_position_is_a_checkpoint_too(subject):
    table = subject.with_rows(HELD)

    outcome = table.write(Release(KEY, ME, 4, AT_9, AT_5))

    assert outcome == Applied(
        changed(HELD, counter=5, owner=None, checkpoint=AT_9, owner_switches=0, pending=None)
    )


def test_an_amendment_puts_parents_and_range_right(subject):
    table = subject.with_rows(changed(HELD, parents=frozenset({CHILD_2})))
    right = changed(HELD, parents=frozenset({CHILD_1}), hash_range=HashRange(3, 4))

    amended = table.write(Amend(KEY, ME, 4, right.parents, HashRange(3, 4)))
    rooted = table.write(Amend(KEY, ME, 5, frozenset(), HashRange(3, 4)))

    assert amended == Applied(changed(right, counter=5))
    assert rooted == Applied(changed(right, counter=6, parents=frozenset()))
    raw = subject.raw(KEY)
    assert raw is not None
    assert "parentShardId" not in raw


def test_children_are_named_on_the_parent(subject):
    table = subject.with_rows(HELD)

    table.write(NameChildren(KEY, ME, 4, frozenset({CHILD_1, CHILD_2})))

    row = table.read(KEY)
    assert row is not None
    assert row.children == {CHILD_1, CHILD_2}


def test_a_halt_stays_through_renewals_and_takes_until_it_is_resumed(subject):
    table = subject.with_rows(HELD)
    halt = Halt("record 7 failed six times", WallTime(1_700_000_000.5), WallTime(1_600_000_000.25))

    table.write(HaltLease(KEY, ME, 4, halt))
    table.write(Renew(KEY, ME, 5))
    taken = table.write(take(ME, 6, OTHER))
    resumed = table.write(ResumeLease(KEY))

    assert isinstance(taken, Applied)
    assert taken.row is not None
    assert taken.row.halt == halt
    assert isinstance(resumed, Applied)
    assert resumed.row is not None
    assert resumed.row.halt is None
    assert resumed.row.counter == 7, "an operator's write is not an owner's"


def test_a_halt_keeps_milliseconds_and_without_a_waiting_time_the_records_wait_since_it(subject):
    table = subject.with_rows(HELD)

    halted = table.write(HaltLease(KEY, ME, 4, Halt("record 7", WallTime(1_700_000_000.12345))))

    at = WallTime(1_700_000_000.123)
    assert halted == Applied(changed(HELD, counter=5, halt=Halt("record 7", at, at)))


# Takes


def test_taking_an_unowned_lease_counts_no_switch(subject):
    table = subject.with_rows(UNOWNED)

    outcome = table.write(take(None))

    expected = changed(HELD, counter=5, failover_s=10.0, start="TRIM_HORIZON")
    assert outcome == Applied(expected)


def test_taking_from_somebody_else_counts_a_switch(subject):
    table = subject.with_rows(changed(HELD, owner=JAVA))

    outcome = table.write(take(JAVA))

    assert isinstance(outcome, Applied)
    assert outcome.row is not None
    assert (outcome.row.owner, outcome.row.owner_switches) == (ME, 4)


def test_taking_a_lease_that_is_mine_already_counts_no_switch(subject):
    table = subject.with_rows(HELD)

    outcome = table.write(take(ME))

    assert isinstance(outcome, Applied)
    assert outcome.row is not None
    assert (outcome.row.counter, outcome.row.owner_switches) == (5, HELD.owner_switches)


def test_a_take_removes_a_checkpoint_owner_and_every_trace_of_a_hand_off(subject):
    item = encode_row(changed(HELD, owner=JAVA, checkpoint_owner=JAVA))
    handoff = {name: {"S": OTHER} for name in ("handoffTo", "offeredTo", "offeredBy")}
    subject.plant(item | handoff | {"handoffAt": {"N": "1"}})

    outcome = subject.table.write(take(JAVA))

    assert isinstance(outcome, Applied)
    assert outcome.row is not None
    assert outcome.row.checkpoint_owner is None
    raw = subject.raw(KEY)
    assert raw is not None
    assert not raw.keys() & {"checkpointOwner", "handoffAt", *handoff}


@pytest.mark.parametrize("seen", [None, JAVA, ME], ids=["unowned", "expired", "its own"])
def test_a_take_notes_the_instant_of_latest_where_none_stands(subject, seen):
    unpinned = changed(HELD, owner=seen, checkpoint=LATEST)
    pins = changed(take(seen), latest_pinned_at=WallTime(1_700_000_000.1239))

    outcome = subject.with_rows(unpinned).write(pins)

    assert isinstance(outcome, Applied)
    assert outcome.row is not None
    assert outcome.row.latest_pinned_at == 1_700_000_000.124
    assert outcome.row == subject.table.read(KEY)


def test_a_take_leaves_the_instant_of_latest_that_stands_there(subject):
    table = subject.with_rows(changed(HELD, checkpoint=LATEST, latest_pinned_at=WallTime(500.0)))

    first = table.write(changed(take(ME), latest_pinned_at=WallTime(900.0)))
    second = table.write(take(ME, 5))

    for outcome in (first, second):
        assert isinstance(outcome, Applied)
        assert outcome.row is not None
        assert outcome.row.latest_pinned_at == 500.0


@pytest.mark.parametrize("nothing", [{"NULL": True}, {"S": ""}], ids=["null", "empty"])
def test_a_row_whose_owner_is_null_reads_as_unowned_and_can_be_taken(subject, nothing):
    nulls = {"leaseOwner": nothing, "checkpointOwner": nothing}
    subject.plant(encode_row(UNOWNED) | nulls)

    assert subject.table.read(KEY) == UNOWNED
    assert isinstance(subject.table.write(take(None)), Applied)
    assert "checkpointOwner" not in (subject.raw(KEY) or {})


@pytest.mark.parametrize(
    ("row", "change"),
    [
        pytest.param(changed(HELD, owner=OTHER), take(JAVA), id="owner differs"),
        pytest.param(changed(HELD, owner=OTHER), take(None), id="owned, not unowned"),
        pytest.param(UNOWNED, take(JAVA), id="unowned, not owned"),
        pytest.param(changed(HELD, counter=5), take(ME), id="counter moved"),
    ],
)
def test_a_take_fails_when_the_row_is_not_as_seen(subject, row, change):
    table = subject.with_rows(row)

    assert table.write(change) == ConditionFailed(row)
    assert table.read(KEY) == row


def test_of_eight_takers_at_once_one_wins(subject):
    table = subject.with_rows(UNOWNED)
    outcomes: list[object] = []
    barrier = threading.Barrier(8)

    def race(number: int) -> None:
        barrier.wait(timeout=HUNG_S)
        outcomes.append(table.write(take(None, owner=OwnerId(f"kclrun:g:h:{number}"))))

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=HUNG_S)

    row = table.read(KEY)
    assert row is not None
    assert row.counter == 5
    assert outcomes.count(Applied(row)) == 1
    assert outcomes.count(ConditionFailed(row)) == 7


# Conditions


@pytest.mark.each_value
@pytest.mark.parametrize("name", OWNERS_CHANGES)
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(changed(HELD, owner=OTHER), id="another owner"),
        pytest.param(UNOWNED, id="no owner"),
        pytest.param(changed(HELD, counter=5), id="a counter ahead"),
        pytest.param(changed(HELD, counter=3), id="a counter behind"),
    ],
)
def test_an_owners_change_fails_with_the_row_when_owner_or_counter_differ(subject, name, row):
    table = subject.with_rows(row)

    assert table.write(OWNERS_CHANGES[name]) == ConditionFailed(row)
    assert table.read(KEY) == row


@pytest.mark.each_value
@pytest.mark.parametrize("name", POSITION_CHANGES)
@pytest.mark.parametrize("at", [AT_9, SHARD_END, ExtendedSequenceNumber("5", 1), TRIM_HORIZON])
def test_a_write_with_a_position_fails_when_the_row_is_elsewhere(subject, name, at):
    row = changed(HELD, checkpoint=at)
    table = subject.with_rows(row)

    assert table.write(OWNERS_CHANGES[name]) == ConditionFailed(row)
    assert table.read(KEY) == row


@pytest.mark.parametrize("name", EVERY)
def test_nothing_resurrects_a_deleted_row(subject, name):
    """A zombie's write fails, whatever it is [I5]."""
    table = subject.with_rows()

    assert table.write(EVERY[name]) == ConditionFailed(None)
    assert table.read(KEY) is None
    assert subject.raw(KEY) is None


@pytest.mark.parametrize("name", OWNERS_CHANGES | TAKES | OTHERS)
def test_unknown_attributes_survive_every_change(subject, name):
    unknown = {"futureText": {"S": JAVA}, "futureMap": {"M": {"x": {"N": "1"}}}}
    subject.plant(encode_row(HELD) | unknown)

    assert isinstance(subject.table.write(EVERY[name]), Applied)

    raw = subject.raw(KEY)
    assert raw is not None
    assert {key: raw[key] for key in unknown} == unknown


def test_a_counter_never_goes_back_over_a_life(subject):
    table = subject.with_rows(UNOWNED)
    counters = [4]
    steps: list[Callable[[int], LeaseChange]] = [
        lambda seen: take(None, seen),
        lambda seen: Claim(KEY, ME, seen),
        lambda seen: Renew(KEY, ME, seen),
        lambda seen: checkpoint(counter=seen),
        lambda seen: Release(KEY, ME, seen, AT_9, AT_7_2),
        lambda seen: take(None, seen, OTHER),
        lambda seen: End(KEY, OTHER, seen, AT_9),
    ]
    for step in steps:
        outcome = table.write(step(counters[-1]))
        assert isinstance(outcome, Applied)
        assert outcome.row is not None
        counters.append(outcome.row.counter)

    assert counters == list(range(4, 12))


# Creation and deletion


def test_a_created_row_reads_back_as_it_was(subject):
    lease = Lease(
        key=KEY,
        checkpoint=LATEST,
        parents=frozenset({"a", "b"}),
        hash_range=HashRange(5, 2**128 - 1),
        latest_pinned_at=WallTime(1_700_000_000.123),
    )

    assert subject.table.write(CreateLease(lease)) == Applied(None)
    assert subject.table.read(KEY) == lease


def test_a_creation_never_overwrites(subject):
    table = subject.with_rows(HELD)

    outcome = table.write(CreateLease(Lease(key=KEY, checkpoint=TRIM_HORIZON)))

    assert outcome == ConditionFailed(HELD)
    assert table.read(KEY) == HELD


def test_only_an_ended_lease_is_deleted_as_ended(subject):
    table = subject.with_rows(HELD)
    assert table.write(DeleteEnded(KEY)) == ConditionFailed(HELD)

    table = subject.with_rows(ENDED)
    assert table.write(DeleteEnded(KEY)) == Applied(None)
    assert table.read(KEY) is None


@pytest.mark.parametrize("row", [HELD, UNOWNED])
def test_a_trimmed_lease_is_deleted_only_as_seen(subject, row):
    table = subject.with_rows(row)

    assert table.write(DeleteTrimmed(KEY, row.owner, 3)) == ConditionFailed(row)
    assert table.write(DeleteTrimmed(KEY, OTHER, 4)) == ConditionFailed(row)
    assert table.write(DeleteTrimmed(KEY, row.owner, 4)) == Applied(None)
    assert table.read(KEY) is None


# The children of an ended shard [P12]


def child(key: LeaseKey, *parents: str) -> Lease:
    return Lease(key=key, checkpoint=TRIM_HORIZON, parents=frozenset(parents))


CHILDREN = (child(CHILD_1, KEY), child(CHILD_2, KEY))
HELD_PARENT = HeldParent(KEY, ME, 4)


def test_the_children_of_a_split_are_created_together(subject):
    table = subject.with_rows(HELD)

    assert table.write(CreateChildren(CHILDREN, (HELD_PARENT,))) == Applied(None)

    assert table.read(CHILD_1) == CHILDREN[0]
    assert table.read(CHILD_2) == CHILDREN[1]
    assert table.read(KEY) == HELD, "the parent is only looked at"


def test_a_child_that_exists_is_left_alone_and_does_not_stop_the_other(subject):
    begun = changed(CHILDREN[0], owner=OTHER, counter=17, checkpoint=AT_9)
    table = subject.with_rows(HELD, begun)

    assert table.write(CreateChildren(CHILDREN, (HELD_PARENT,))) == Applied(None)

    assert table.read(CHILD_1) == begun
    assert table.read(CHILD_2) == CHILDREN[1]


def test_creating_children_again_is_harmless(subject):
    table = subject.with_rows(HELD)
    table.write(CreateChildren(CHILDREN, (HELD_PARENT,)))

    assert table.write(CreateChildren(CHILDREN, (HELD_PARENT,))) == Applied(None)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(None, id="gone"),
        pytest.param(changed(HELD, owner=OTHER), id="another's"),
        pytest.param(changed(HELD, counter=5), id="counter moved"),
    ],
)
def test_no_child_is_created_when_the_parent_is_not_held(subject, row):
    table = subject.with_rows(*([] if row is None else [row]))

    assert table.write(CreateChildren(CHILDREN, (HELD_PARENT,))) == ConditionFailed(None)

    assert table.read(CHILD_1) is None
    assert table.read(CHILD_2) is None


def test_existing_children_do_not_hide_that_the_parent_is_lost(subject):
    table = subject.with_rows(changed(HELD, owner=OTHER), *CHILDREN)

    assert table.write(CreateChildren(CHILDREN, (HELD_PARENT,))) == ConditionFailed(None)


def test_the_healer_creates_children_only_of_an_ended_parent(subject):
    change = CreateChildren(CHILDREN, (EndedParent(KEY),))

    table = subject.with_rows(HELD)
    assert table.write(change) == ConditionFailed(None)

    table = subject.with_rows(ENDED)
    assert table.write(change) == Applied(None)


def test_the_child_of_a_merge_needs_a_row_of_either_parent(subject):
    other_parent = LeaseKey("shardId-000000000009")
    merged = (child(CHILD_1, KEY, other_parent),)
    change = CreateChildren(merged, (HELD_PARENT, ExistingParent(other_parent)))

    table = subject.with_rows(HELD)
    assert table.write(change) == ConditionFailed(None)
    assert table.read(CHILD_1) is None

    table = subject.with_rows(changed(HELD, key=other_parent, checkpoint=TRIM_HORIZON))
    assert table.write(change) == Applied(None)
    assert table.read(CHILD_1) == merged[0]


# Scans


def test_an_empty_table_scans_to_no_leases(subject):
    assert [page.leases for page in subject.table.scan()] == [()]


def test_a_scan_returns_every_row_once_whatever_the_page_size(subject):
    rows = [changed(HELD, key=LeaseKey(f"shardId-{number:012}")) for number in range(7)]
    subject.with_rows(*rows)

    pages = list(subject.open_table(2).scan())

    assert len(pages) >= 4
    assert all(len(page.leases) <= 2 for page in pages)
    assert sorted(lease.key for page in pages for lease in page.leases) == [r.key for r in rows]


def test_broken_and_foreign_rows_never_fail_a_scan(subject):
    subject.with_rows(HELD)
    subject.plant({"leaseKey": {"S": "Leader"}, "entityType": {"S": "LEADER"}})
    subject.plant({"leaseKey": {"S": "no-checkpoint"}, "leaseCounter": {"N": "1"}})
    bad = encode_row(HELD) | {"leaseKey": {"S": "long"}, "checkpoint": {"S": "9" * 200}}
    subject.plant(bad)

    pages = list(subject.open_table(1).scan())

    assert [lease for page in pages for lease in page.leases] == [HELD]
    assert sorted(key for page in pages for key in page.broken) == ["long", "no-checkpoint"]
    assert sum(page.foreign for page in pages) == 1


def test_a_scan_says_in_which_mode_a_kcl_3_fleet_is(subject):
    subject.plant(encode_row(HELD))
    state = {"entityType": {"S": "CLIENT_VERSION_MIGRATION"}, "cv": {"S": "CLIENT_VERSION_2X"}}
    subject.plant({"leaseKey": {"S": "Migration3.0"}} | state)

    pages = list(subject.open_table(1).scan())

    assert {page.kcl3_mode for page in pages} - {None} == {"CLIENT_VERSION_2X"}
    assert sum(page.foreign for page in pages) == 1


def test_a_broken_row_is_an_error_to_read_and_refused_to_take(subject):
    subject.plant({"leaseKey": {"S": KEY}, "leaseCounter": {"S": "four"}})

    with pytest.raises(InvalidRequest) as raised:
        subject.table.read(KEY)
    outcome = subject.table.write(take(None))

    assert raised.value.code == "BrokenRow"
    assert isinstance(outcome, Refused)
    assert outcome.code == "BrokenRow"


def test_a_counter_near_its_last_bit_makes_a_broken_row_and_the_one_before_a_lease_to_take(subject):
    subject.plant(encode_row(UNOWNED) | {"leaseCounter": {"N": str(2**62 - 1)}})

    outcome = subject.table.write(take(None, 2**62 - 1))
    assert isinstance(outcome, Applied)
    assert outcome.row is not None
    assert outcome.row.counter == 2**62
    assert isinstance(subject.table.write(Claim(KEY, ME, 2**62)), Applied)

    subject.plant(encode_row(UNOWNED) | {"leaseCounter": {"N": str(2**62)}})
    (page,) = subject.table.scan()
    assert (page.leases, page.broken) == ((), (KEY,))


def test_a_lease_row_of_kcl_3_5_with_its_entity_type_is_a_lease(subject):
    subject.plant(encode_row(HELD) | {"entityType": {"S": "LEASE"}})

    assert subject.table.read(KEY) == HELD


@pytest.mark.slow
def test_many_writers_leave_one_history(subject):
    """Four owners take, renew and lose one lease for a while: every success is its own counter."""
    table = subject.with_rows(UNOWNED)
    won: list[int] = []
    deadline = time.monotonic() + 3.0

    def live(owner: OwnerId) -> None:
        while time.monotonic() < deadline:
            row = table.read(KEY)
            assert row is not None
            change = (
                Renew(KEY, owner, row.counter)
                if row.owner == owner
                else take(row.owner, row.counter, owner)
            )
            outcome = table.write(change)
            if isinstance(outcome, Applied) and outcome.row is not None:
                won.append(outcome.row.counter)

    threads = [
        threading.Thread(target=live, args=(OwnerId(f"kclrun:g:h:{number}"),))
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=HUNG_S)

    assert sorted(won) == list(range(5, 5 + len(won)))
