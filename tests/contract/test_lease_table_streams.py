"""One contract, every lease table: leases of several streams, beside those of the Java KCL."""

from typing import Any

import pytest

from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.protocol.writes import (
    Applied,
    Checkpoint,
    Claim,
    ConditionFailed,
    CreateChildren,
    CreateLease,
    EndedParent,
    HeldParent,
    NameChildren,
    Renew,
    Take,
)
from tests.contract.lease_tables import AT_5, AT_7_2, ENDED, HELD, JAVA, ME, changed

pytest_plugins = ("tests.contract.lease_table_fixtures",)

ORDERS, AUDITS = "123456789012:orders:1700000000", "123456789012:audits:1700000001"


def key_of(stream: str, number: int) -> LeaseKey:
    return LeaseKey(f"{stream}:shardId-{number:012d}")


PARENT, CHILD, SECOND_CHILD = (key_of(ORDERS, number) for number in range(3))
MINE = changed(HELD, key=PARENT, parents=frozenset())
CHILDREN = frozenset({CHILD, SECOND_CHILD})

# As KCL 2.x writes it at a shard's end.
JAVA_ROW: dict[str, Any] = {
    "leaseKey": {"S": PARENT},
    "streamName": {"S": ORDERS},
    "shardId": {"S": "shardId-000000000000"},
    "leaseOwner": {"S": JAVA},
    "leaseCounter": {"N": "4"},
    "ownerSwitchesSinceCheckpoint": {"N": "0"},
    "checkpoint": {"S": "SHARD_END"},
    "checkpointSubSequenceNumber": {"N": "0"},
    "childShardIds": {"SS": ["shardId-000000000001", "shardId-000000000002"]},
}


def child(key: LeaseKey, *parents: LeaseKey) -> Lease:
    return Lease(key=key, checkpoint=TRIM_HORIZON, parents=frozenset(parents))


def test_a_created_row_reads_back_as_it_was_and_stands_there_as_the_kcl_writes_it(subject):
    lease = child(CHILD, PARENT)

    assert subject.table.write(CreateLease(lease)) == Applied(None)

    assert subject.table.read(CHILD) == lease
    raw = subject.raw(CHILD)
    assert raw is not None
    assert raw["streamName"] == {"S": ORDERS}
    assert raw["shardId"] == {"S": "shardId-000000000001"}
    assert raw["parentShardId"] == {"SS": ["shardId-000000000000"]}


def test_a_row_of_a_java_worker_is_read_with_its_family_qualified(subject):
    subject.plant(JAVA_ROW)

    (page,) = subject.table.scan()

    assert [(lease.key, lease.children) for lease in page.leases] == [(PARENT, CHILDREN)]
    assert subject.table.read(PARENT) == page.leases[0]


def test_children_are_named_by_their_bare_ids_and_read_back_qualified(subject):
    table = subject.with_rows(MINE)

    outcome = table.write(NameChildren(PARENT, ME, 4, CHILDREN))

    assert isinstance(outcome, Applied)
    assert outcome.row is not None
    assert outcome.row.children == CHILDREN
    raw = subject.raw(PARENT)
    assert raw is not None
    assert sorted(raw["childShardIds"]["SS"]) == ["shardId-000000000001", "shardId-000000000002"]


@pytest.mark.parametrize(
    "parent",
    [HeldParent(PARENT, ME, 4), EndedParent(PARENT)],
    ids=["the owner's own", "the healer's"],
)
def test_children_are_created_on_the_word_of_their_own_streams_parent(subject, parent):
    row = MINE if isinstance(parent, HeldParent) else changed(ENDED, key=PARENT)
    namesake = changed(ENDED if row is MINE else HELD, key=key_of(AUDITS, 0), counter=9)
    table = subject.with_rows(row, namesake)
    wanted = tuple(child(key, PARENT) for key in (CHILD, SECOND_CHILD))

    assert table.write(CreateChildren(wanted, (parent,))) == Applied(None)

    assert [table.read(each.key) for each in wanted] == list(wanted)
    assert table.read(key_of(AUDITS, 1)) is None


def test_a_parent_of_the_same_name_in_another_stream_holds_nothing_up_and_proves_nothing(subject):
    table = subject.with_rows(changed(ENDED, key=key_of(AUDITS, 0)))

    outcome = table.write(CreateChildren((child(CHILD, PARENT),), (EndedParent(PARENT),)))

    assert outcome == ConditionFailed()
    assert table.read(CHILD) is None


@pytest.mark.parametrize(
    "change",
    [
        Claim(PARENT, ME, 4),
        Renew(PARENT, ME, 4),
        Checkpoint(PARENT, ME, 4, AT_7_2, AT_5),
        Take(PARENT, ME, ME, 4, 10.0, "TRIM_HORIZON"),
    ],
    ids=["claim", "renew", "checkpoint", "take"],
)
def test_every_write_leaves_the_streams_name_and_the_shard_on_the_row(subject, change):
    table = subject.with_rows(MINE)

    assert isinstance(table.write(change), Applied)

    raw = subject.raw(PARENT)
    assert raw is not None
    assert raw["streamName"] == {"S": ORDERS}
    assert raw["shardId"] == {"S": "shardId-000000000000"}
