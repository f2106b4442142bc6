"""Items to leases: what the KCL writes, what others write, and what nobody should."""

import base64
from typing import Any

import msgspec
import pytest

from kclrun.aws.expressions import bind
from kclrun.aws.rows import ATTRIBUTES_MAX, BrokenRow, decode_page, decode_row, encode_row
from kclrun.model.lease import (
    DiedOn,
    Halt,
    Handoff,
    Lease,
    LeaseKey,
    Load,
    OwnerId,
    PendingCheckpoint,
)
from kclrun.model.output import Cursor, StoredCursors
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from kclrun.model.time import WallTime
from kclrun.ports import ScanPage
from kclrun.protocol.writes import NameChildren
from kclrun.state.versions import version_name
from tests.support.tables import over_rows

PENDING = ExtendedSequenceNumber("21")
STATE_MAX = 400 * 1024
MINIMAL: dict[str, Any] = {
    "leaseKey": {"S": "shardId-0"},
    "leaseCounter": {"N": "3"},
    "checkpoint": {"S": "TRIM_HORIZON"},
}

# A row as KCL 2.x and 3.x leave it, attribute for attribute.
JAVA_ROW: dict[str, Any] = {
    "leaseKey": {"S": "shardId-000000000003"},
    "leaseOwner": {"S": "ip-10-0-0-1:0d7a"},
    "leaseCounter": {"N": "118"},
    "ownerSwitchesSinceCheckpoint": {"N": "1"},
    "checkpoint": {"S": "49671000000000000000000000000000000000000000000000000008"},
    "checkpointSubSequenceNumber": {"N": "2"},
    "pendingCheckpoint": {"S": "49671000000000000000000000000000000000000000000000000009"},
    "pendingCheckpointSubSequenceNumber": {"N": "0"},
    "pendingCheckpointState": {"B": "c3RhdGU="},
    "parentShardId": {"SS": ["shardId-000000000001", "shardId-000000000002"]},
    "childShardIds": {"SS": ["shardId-000000000004"]},
    "startingHashKey": {"S": "0"},
    "endingHashKey": {"S": str(HASH_KEY_MAX)},
    "throughputKBps": {"N": "1.0E-4"},
    "checkpointOwner": {"S": "ip-10-0-0-2:77aa"},
    "entityType": {"S": "LEASE"},
}


def test_a_row_of_the_java_kcl_is_understood_whole():
    assert decode_row(JAVA_ROW) == Lease(
        key=LeaseKey("shardId-000000000003"),
        owner=OwnerId("ip-10-0-0-1:0d7a"),
        counter=118,
        owner_switches=1,
        checkpoint=ExtendedSequenceNumber(
            "49671000000000000000000000000000000000000000000000000008", 2
        ),
        pending=PendingCheckpoint(
            ExtendedSequenceNumber("49671000000000000000000000000000000000000000000000000009"),
            b"state",
        ),
        parents=frozenset({"shardId-000000000001", "shardId-000000000002"}),
        children=frozenset({"shardId-000000000004"}),
        hash_range=HashRange(0, HASH_KEY_MAX),
        throughput_kbps=0.0001,
        checkpoint_owner=OwnerId("ip-10-0-0-2:77aa"),
    )


# A row with each attribute that we write, as one that is owned, halted, offered and asked for.
OWN_ROW: dict[str, Any] = {
    "leaseKey": {"S": "shardId-000000000003"},
    "leaseOwner": {"S": "kclrun:a:h:1"},
    "leaseCounter": {"N": "7"},
    "ownerSwitchesSinceCheckpoint": {"N": "0"},
    "checkpoint": {"S": "20"},
    "checkpointSubSequenceNumber": {"N": "0"},
    "failoverMs": {"N": "10500"},
    "startPosition": {"S": "LATEST"},
    "streamCreatedAt": {"N": "1700000000000"},
    "latestPinnedAt": {"N": "1700000001500"},
    "haltReason": {"S": "why"},
    "haltedAt": {"N": "1700000002000"},
    "haltWaitingSince": {"N": "1700000003000"},
    "handoffTo": {"S": "kclrun:a:h:2"},
    "handoffAt": {"N": "1700000004000"},
    "offeredTo": {"S": "kclrun:a:h:3"},
    "offeredBy": {"S": "kclrun:a:h:4"},
    "takenFrom": {"S": "java"},
    "diedOn": {"S": "h 20 5"},
    "loadKBps": {"N": "120.5"},
    "loadCpu": {"N": "0.0125"},
    "outputsAt": {"S": "20"},
    "outputCursors": {"M": {"rows": {"S": "20"}, "sql": {"S": "21/3+2"}}},
    "outputGeneration": {"N": "2"},
    "stateVersion": {"S": "0000000007-000002-0badcafe"},
    "lettersTo": {"S": "22/1"},
}
OWN_LEASE = Lease(
    key=LeaseKey("shardId-000000000003"),
    owner=OwnerId("kclrun:a:h:1"),
    counter=7,
    checkpoint=ExtendedSequenceNumber("20"),
    failover_s=10.5,
    start="LATEST",
    stream_created_at=WallTime(1_700_000_000.0),
    latest_pinned_at=WallTime(1_700_000_001.5),
    halt=Halt("why", WallTime(1_700_000_002.0), WallTime(1_700_000_003.0)),
    handoff=Handoff(OwnerId("kclrun:a:h:2"), WallTime(1_700_000_004.0)),
    offered_to=OwnerId("kclrun:a:h:3"),
    offered_by=OwnerId("kclrun:a:h:4"),
    taken_from=OwnerId("java"),
    died_on=DiedOn("h", ExtendedSequenceNumber("20", 5)),
    load=Load(120.5, 0.0125),
    outputs=StoredCursors(
        ExtendedSequenceNumber("20"),
        (
            ("rows", Cursor(ExtendedSequenceNumber("20"))),
            ("sql", Cursor(ExtendedSequenceNumber("21", 3), 2)),
        ),
    ),
    generation=2,
    state_version="0000000007-000002-0badcafe",
    letters_to=ExtendedSequenceNumber("22", 1),
)


def test_a_row_of_ours_has_an_attribute_for_each_field_and_is_understood_whole():
    assert decode_row(OWN_ROW) == OWN_LEASE
    assert encode_row(OWN_LEASE) == OWN_ROW


@over_rows(
    ("attributes", "fields"),
    [
        ({"streamCreatedAt": {"N": "0"}}, {"stream_created_at": None}),
        ({"haltedAt": None, "haltWaitingSince": None}, {"halt": Halt("why", WallTime(0.0))}),
        ({"haltReason": None}, {"halt": None}),
        ({"diedOn": {"S": "h 20"}}, {"died_on": None}),
        ({"diedOn": {"N": "5"}}, {"died_on": None}),
        ({"loadCpu": None}, {"load": None}),
        ({"loadKBps": None}, {"load": None}),
        ({"loadKBps": {"N": "NaN"}}, {"load": None}),
        ({"loadKBps": {"S": "5"}}, {"load": None}),
        ({"loadKBps": {"N": "1E999"}}, {"load": None}),
        ({"loadCpu": {"N": "-0.5"}}, {"load": None}),
        ({"loadCpu": {"N": "0"}}, {"load": Load(120.5, 0.0)}),
        ({"outputsAt": None}, {"outputs": None}),
        ({"outputGeneration": None}, {"generation": 0}),
        ({"stateVersion": None}, {"state_version": None}),
        ({"failoverMs": {"N": "1000"}}, {"failover_s": 1.0}),
        ({"failoverMs": {"N": "900000"}}, {"failover_s": 900.0}),
        ({"startingHashKey": {"S": "5"}}, {"hash_range": None}),
        ({"endingHashKey": {"S": "5"}}, {"hash_range": None}),
        (
            {"startingHashKey": {"S": "5"}, "endingHashKey": {"S": "5"}},
            {"hash_range": HashRange(5, 5)},
        ),
        ({"pendingCheckpoint": {"S": "21"}}, {"pending": PendingCheckpoint(PENDING)}),
        (
            {
                "pendingCheckpoint": {"S": "21"},
                "pendingCheckpointState": {"B": base64.b64encode(bytes(STATE_MAX)).decode()},
            },
            {"pending": PendingCheckpoint(PENDING, bytes(STATE_MAX))},
        ),
        ({"startPosition": {"S": "x" * 2048}}, {"start": "x" * 2048}),
        ({"leaseKey": {"S": "k" * 2048}}, {"key": "k" * 2048}),
        ({"leaseOwner": {"NULL": True}}, {"owner": None}),
        ({"childShardIds": {"NULL": True}}, {"children": frozenset()}),
        (
            {"childShardIds": {"SS": ["c" * 128, *map(str, range(63))]}},
            {"children": frozenset(["c" * 128, *map(str, range(63))])},
        ),
        ({f"x{n}": {"S": "y"} for n in range(ATTRIBUTES_MAX - len(OWN_ROW))}, {}),
    ],
)
def test_an_attribute_that_is_absent_or_at_its_limit_is_understood(attributes, fields):
    row = {name: value for name, value in (OWN_ROW | attributes).items() if value is not None}

    assert decode_row(row) == msgspec.structs.replace(OWN_LEASE, **fields)


def test_with_four_outputs_a_row_is_below_the_kilobyte_that_a_renewal_is_billed_by():
    at = [ExtendedSequenceNumber("4" * 56, 9_999) for _ in range(5)]
    owner = OwnerId("kclrun:us-east-1a:" + "h" * 60 + ":" + "n" * 16)
    row = Lease(
        key=LeaseKey("shardId-000000000003"),
        owner=owner,
        counter=10**7,
        checkpoint=at[0],
        parents=frozenset({"shardId-000000000001"}),
        hash_range=HashRange(HASH_KEY_MAX - 1, HASH_KEY_MAX),
        throughput_kbps=1234.567891,
        failover_s=10.0,
        start="TRIM_HORIZON",
        stream_created_at=WallTime(1_700_000_000.0),
        load=Load(1234.5, 0.1234),
        outputs=StoredCursors(at[0], tuple((f"output{n}", Cursor(at[n])) for n in range(1, 5))),
        generation=3,
        state_version=version_name(10**7, 10**5, "0badcafe"),
    )

    assert _bytes_of({"row": {"M": encode_row(row)}}) < 1024


def _bytes_of(item: dict[str, Any]) -> int:
    """As DynamoDB counts: names and texts, numbers at half a byte a digit, 3 for a map."""
    size = 0
    for name, attribute in item.items():
        ((kind, value),) = attribute.items()
        size += len(name) + (3 + len(value) + _bytes_of(value) if kind == "M" else 0)
        size += sum(map(len, value)) if kind in {"S", "SS"} else 0
        size += len(value) // 2 + 2 if kind == "N" else 0
    return size


def test_a_minimal_row_is_a_lease():
    assert decode_row(MINIMAL) == Lease(
        key=LeaseKey("shardId-0"), checkpoint=TRIM_HORIZON, counter=3
    )


def test_the_time_of_an_at_timestamp_row_in_its_sub_number_is_accepted():
    row = MINIMAL | {
        "checkpoint": {"S": "AT_TIMESTAMP"},
        "checkpointSubSequenceNumber": {"N": "1700000000000"},
    }
    lease = decode_row(row)
    assert lease is not None
    assert lease.checkpoint == ExtendedSequenceNumber("AT_TIMESTAMP", 1_700_000_000_000)


@pytest.mark.parametrize("at", [{}, {"handoffAt": {"NULL": True}}], ids=["absent", "null"])
def test_an_ask_without_a_time_is_one_from_time_0(at):
    lease = decode_row(MINIMAL | {"handoffTo": {"S": "kclrun:a:h:1"}} | at)
    assert lease is not None
    assert lease.handoff == Handoff(OwnerId("kclrun:a:h:1"), WallTime(0.0))


def test_the_time_of_an_ask_without_its_asker_is_no_ask():
    lease = decode_row(MINIMAL | {"handoffAt": {"N": "1700000000000"}})
    assert lease is not None
    assert lease.handoff is None


@pytest.mark.parametrize("published", ["999", "900001", "118446744073709543227392"])
def test_a_failover_that_no_settings_allow_counts_for_nothing(published):
    item = encode_row(Lease(key=LeaseKey("s"), checkpoint=TRIM_HORIZON))
    item["failoverMs"] = {"N": published}

    lease = decode_row(item)

    assert lease is not None
    assert lease.failover_s is None


@over_rows("entity", ["STREAM", "LEADER", "CLIENT_VERSION_MIGRATION", "TABLE_MIGRATION", "NEW", ""])
def test_a_row_of_another_entity_is_no_lease(entity):
    assert decode_row({"leaseKey": {"S": "x"}, "entityType": {"S": entity}}) is None


BROKEN: dict[str, dict[str, Any]] = {
    "no counter": {"leaseCounter": None},
    "no checkpoint": {"checkpoint": None},
    "no key": {"leaseKey": None},
    "key is a number": {"leaseKey": {"N": "5"}},
    "counter is text": {"leaseCounter": {"S": "3"}},
    "counter is NULL": {"leaseCounter": {"NULL": True}},
    "counter is negative": {"leaseCounter": {"N": "-1"}},
    "counter has more than 62 bits": {"leaseCounter": {"N": str(2**62)}},
    "owner switches have 38 digits": {"ownerSwitchesSinceCheckpoint": {"N": "9" * 38}},
    "sub-sequence number has more than 63 bits": {"checkpointSubSequenceNumber": {"N": str(2**63)}},
    "counter is a fraction": {"leaseCounter": {"N": "1.5"}},
    "counter is endless": {"leaseCounter": {"N": "9" * 5000}},
    "checkpoint is unknown": {"checkpoint": {"S": "SOMEWHERE"}},
    "checkpoint has 200 digits": {"checkpoint": {"S": "1" * 200}},
    "checkpoint is padded": {"checkpoint": {"S": "007"}},
    "owner is a list": {"leaseOwner": {"L": []}},
    "owner is endless": {"leaseOwner": {"S": "x" * 2049}},
    "key is endless": {"leaseKey": {"S": "k" * 2049}},
    "key is empty": {"leaseKey": {"S": ""}},
    "parents are text": {"parentShardId": {"S": "shardId-1"}},
    "parents hold numbers": {"parentShardId": {"SS": [1]}},
    "parents hold lists": {"parentShardId": {"SS": [["p"]]}},
    "owner is a list of texts": {"leaseOwner": {"S": ["me"]}},
    "counter is a number of JSON": {"leaseCounter": {"N": 3}},
    "state is a number": {
        "pendingCheckpoint": {"S": "1"},
        "pendingCheckpointState": {"B": 5},
    },
    "state is too long": {
        "pendingCheckpoint": {"S": "1"},
        "pendingCheckpointState": {"B": base64.b64encode(bytes(STATE_MAX + 1)).decode()},
    },
    **{
        f"{name} is {text}": {"startingHashKey": {"S": "0"}, "endingHashKey": {"S": "1"}}
        | {name: {"S": text}}
        for name in ("startingHashKey", "endingHashKey")
        for text in ("-1", "+1", " 1", "1_0", "", "0" * 40)
    },
    "too many parents": {"parentShardId": {"SS": [str(n) for n in range(65)]}},
    "a parent is endless": {"parentShardId": {"SS": ["p" * 129]}},
    "no set of parents": {"parentShardId": {"SS": "shardId-1"}},
    "hash key is no number": {"startingHashKey": {"S": "a"}, "endingHashKey": {"S": "1"}},
    "hash range is empty": {"startingHashKey": {"S": "2"}, "endingHashKey": {"S": "1"}},
    "hash range is too large": {"startingHashKey": {"S": "0"}, "endingHashKey": {"S": str(2**128)}},
    "state is not base64": {
        "pendingCheckpoint": {"S": "1"},
        "pendingCheckpointState": {"B": "!!!"},
    },
    "asker is a number": {"handoffTo": {"N": "5"}},
    "asker is empty": {"handoffTo": {"S": ""}},
    "time of an ask is text": {"handoffTo": {"S": "x"}, "handoffAt": {"S": "yesterday"}},
    "giver is a list": {"offeredBy": {"L": []}},
    "throughput is a word": {"throughputKBps": {"N": "NaN"}},
    **{
        f"cursors of the outputs are {name}": {"outputsAt": {"S": "5"}, "outputCursors": cursors}
        for name, cursors in {
            "missing": None,
            "text": {"S": "5"},
            "no texts": {"M": {"a": {"N": "5"}}},
            "no positions": {"M": {"a": {"S": "5+"}}},
            "too many": {"M": {str(n): {"S": "5"} for n in range(65)}},
        }.items()
    },
    "checkpoint of the outputs is no position": {
        "outputsAt": {"S": "x"},
        "outputCursors": {"M": {}},
    },
    "letters are kept up to no position": {"lettersTo": {"S": "5+"}},
    "generation is negative": {"outputGeneration": {"N": "-1"}},
    "an attribute is no map": {"leaseOwner": "me"},
    "too many attributes": {f"x{n}": {"S": "y"} for n in range(ATTRIBUTES_MAX - 2)},
}


@over_rows("name", BROKEN)
def test_a_broken_row_is_named_as_one(name):
    row = {key: value for key, value in (MINIMAL | BROKEN[name]).items() if value is not None}

    with pytest.raises(BrokenRow, match=r"^row '.*': \S"):
        decode_row(row)


@pytest.mark.parametrize(
    "name", ["leaseOwner", "checkpointOwner", "pendingCheckpoint"], ids=lambda name: name
)
def test_an_empty_text_of_the_kcl_is_no_value_as_its_workers_read_it(name):
    lease = decode_row(MINIMAL | {name: {"S": ""}})

    assert lease == decode_row(MINIMAL)
    assert (lease.owner, lease.checkpoint_owner, lease.pending) == (None, None, None)


def test_the_item_of_a_kcl_3_fleet_says_its_mode_whatever_else_it_holds():
    item = {"leaseKey": {"S": "Migration3.0"}, "cv": {"S": "CLIENT_VERSION_3X"}, "h": {"L": []}}

    typed = decode_page([item | {"entityType": {"S": "CLIENT_VERSION_MIGRATION"}}, MINIMAL])
    odd = decode_page([item | {"cv": {"N": "3"}}])
    endless = decode_page([item | {"cv": {"S": "x" * 100}}])

    assert endless.kcl3_mode == "x" * 64
    assert (typed.foreign, typed.kcl3_mode, len(typed.leases)) == (1, "CLIENT_VERSION_3X", 1)
    assert (odd.foreign, odd.broken, odd.kcl3_mode) == (1, (), None)


def test_a_row_that_our_own_write_counted_past_the_limit_is_still_ours_to_read():
    just_below = MINIMAL | {"leaseCounter": {"N": str(2**62 - 1)}}
    counted_on = MINIMAL | {"leaseCounter": {"N": str(2**62)}}

    before, after = decode_row(just_below), decode_row(counted_on, is_ours=True)

    assert before is not None
    assert after is not None
    assert after.counter == before.counter + 1


def test_a_page_sorts_leases_from_the_rest():
    foreign = {"leaseKey": {"S": "Leader"}, "entityType": {"S": "LEADER"}}
    broken = MINIMAL | {"leaseKey": {"S": "bad"}, "leaseCounter": {"S": "?"}}
    keyless: dict[str, Any] = {"leaseCounter": {"N": "1"}}

    page = decode_page([foreign, MINIMAL, broken, keyless])

    lease = decode_row(MINIMAL)
    assert lease is not None
    assert page == ScanPage((lease,), ("bad", "?"), 1, None, page.reasons)
    assert page.reasons["bad"].startswith("leaseCounter is not")
    assert page.reasons["?"] == "leaseKey, leaseCounter or checkpoint is missing"
    endless = decode_page([MINIMAL | {"leaseKey": {"S": "k" * 3000}}])
    assert endless.broken == ("k" * 256,)


# A lease of one of several streams, as KCL 2.x leaves it: keys are whole, family is bare.
ORDERS = "123456789012:orders:1700000000"
JAVA_ROW_OF_SEVERAL: dict[str, Any] = {
    "leaseKey": {"S": f"{ORDERS}:shardId-000000000003"},
    "streamName": {"S": ORDERS},
    "shardId": {"S": "shardId-000000000003"},
    "leaseOwner": {"S": "ip-10-0-0-1:0d7a"},
    "leaseCounter": {"N": "118"},
    "ownerSwitchesSinceCheckpoint": {"N": "1"},
    "checkpoint": {"S": "SHARD_END"},
    "checkpointSubSequenceNumber": {"N": "0"},
    "parentShardId": {"SS": ["shardId-000000000001", "shardId-000000000002"]},
    "childShardIds": {"SS": ["shardId-000000000004"]},
    "startingHashKey": {"S": "0"},
    "endingHashKey": {"S": str(HASH_KEY_MAX)},
}


def test_a_row_of_one_of_several_streams_has_its_family_qualified_by_its_own_key():
    lease = decode_row(JAVA_ROW_OF_SEVERAL)

    assert lease is not None
    assert lease.key == f"{ORDERS}:shardId-000000000003"
    assert lease.parents == {f"{ORDERS}:shardId-00000000000{number}" for number in (1, 2)}
    assert lease.children == {f"{ORDERS}:shardId-000000000004"}


def test_a_row_of_one_of_several_streams_is_written_as_the_kcl_writes_it():
    lease = decode_row(JAVA_ROW_OF_SEVERAL)

    assert lease is not None
    assert encode_row(lease) == JAVA_ROW_OF_SEVERAL
    assert decode_row(encode_row(lease)) == lease


def test_naming_children_writes_their_bare_ids():
    children = frozenset({f"{ORDERS}:shardId-000000000005", f"{ORDERS}:shardId-000000000004"})
    key = LeaseKey(f"{ORDERS}:shardId-000000000003")

    bound = bind(NameChildren(key, OwnerId("kclrun:a:b:c"), 7, children))

    assert bound.key == key
    assert bound.values[":children"] == {"SS": ["shardId-000000000004", "shardId-000000000005"]}


def test_a_tick_is_read_from_outputs_at_unless_another_program_moved_the_checkpoint():
    """Java workers compare and write the other two attributes alone."""
    row = decode_row(OWN_ROW | {"outputsAt": {"S": "20+3"}})
    assert row is not None
    assert row.checkpoint == ExtendedSequenceNumber("20", 0, 3)
    assert not row.is_moved_past_outputs
    assert encode_row(row)["outputsAt"] == {"S": "20+3"}
    assert encode_row(row)["checkpoint"] == {"S": "20"}
    moved = decode_row(OWN_ROW | {"outputsAt": {"S": "19+3"}})
    assert moved is not None
    assert (moved.checkpoint.tick, moved.is_moved_past_outputs) == (0, True)
