"""Parts of the doctor that no broken table of the corpus shows."""

import cProfile

import msgspec
import pytest

from kclrun.cli.doctor import backup_name, repair_all, write_backup
from kclrun.errors import SettingsError
from kclrun.leases.shard_sync import Listing
from kclrun.local.lease_rows import LeaseRows
from kclrun.model.lease import OFFERED, Handoff, Lease
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.model.stream import ONLY_STREAM, qualified_shards
from kclrun.operating.doctor.diagnosis import diagnose, is_healthy
from kclrun.operating.doctor.findings import (
    Circumstances,
    Gravity,
    Kind,
    Look,
    StreamFacts,
    watch_s,
)
from kclrun.operating.doctor.repairs import change_in_words, to_repair
from kclrun.protocol.writes import CreateLease, Renew, Take

replace = msgspec.structs.replace
WHOLE = HashRange(0, HASH_KEY_MAX)
A = Shard("A", WHOLE, "1000")
ORDERS, AUDITS = "1:orders:10", "1:audits:10"
AT_1500 = ExtendedSequenceNumber("1500")


def circumstances(*streams, **more):
    given = {"failover_s": 10.0, "watched_s": 10.0, "now": 100.0} | more
    return Circumstances(
        me="kclrun:a:doctor:n",
        streams={stream: StreamFacts() for stream in streams or (ONLY_STREAM,)},
        **given,
    )


def look(*leases, shards=(A,), stream=ONLY_STREAM, **more):
    return Look(leases, {stream: Listing(shards, 5.0, 0.0)}, **more)


def kinds(findings):
    return [finding.kind for finding in findings]


def test_a_table_without_rows_waits_for_its_first_start():
    findings = diagnose(look(), look(), circumstances())

    assert kinds(findings) == [Kind.NO_LEASES]
    assert is_healthy(findings)


def test_an_empty_listing_is_no_evidence_of_anything():
    row = Lease(key="A", checkpoint=AT_1500)
    seen = look(row, shards=())

    assert kinds(diagnose(seen, seen, circumstances())) == [Kind.NO_LIVE_OWNER]


def test_holes_are_not_judged_while_an_open_shard_has_children():
    child = Shard("B", WHOLE, "2000", None, "A")
    seen = look(Lease(key="A", checkpoint=AT_1500), shards=(A, child))

    findings = diagnose(seen, seen, circumstances())

    assert kinds(findings) == [Kind.RESHARDING, Kind.NO_LIVE_OWNER]


def test_rows_of_a_stream_that_the_configuration_does_not_name_are_only_told():
    ours = Lease(key=f"{ORDERS}:A", checkpoint=AT_1500)
    others = Lease(key=f"{AUDITS}:A", checkpoint=AT_1500)
    seen = look(ours, others, shards=(replace(A, shard_id=ours.key),), stream=ORDERS)

    findings = diagnose(seen, seen, circumstances(ORDERS))

    assert kinds(findings) == [Kind.OTHER_STREAM, Kind.NO_LIVE_OWNER]
    assert findings[0].keys == (others.key,)
    assert "audits" in findings[0].evidence


def test_looks_are_a_failover_apart_and_longer_where_somebody_asks():
    row = Lease(key="A", checkpoint=AT_1500, failover_s=20.0)

    assert watch_s((), 10.0) == 10.0
    assert watch_s((row,), 10.0) == 20.0
    assert watch_s((row, replace(row, key="B", handoff=Handoff("x", 1.0))), 10.0) == 50.0


def test_a_lease_that_was_offered_just_now_is_not_stuck():
    before = Lease(key="A", checkpoint=AT_1500, owner="kclrun:a:x:n", counter=4)
    now = replace(before, owner=OFFERED, offered_by=before.owner, counter=5)

    assert Kind.STUCK_OFFER not in kinds(diagnose(look(before), look(now), circumstances()))


def test_a_row_of_a_worker_that_hands_over_waits_for_the_end_of_that_worker():
    handing = Lease(
        key="A", checkpoint=AT_1500, owner="java-2", checkpoint_owner="java-1", counter=4
    )
    other = Lease(key="B", checkpoint=AT_1500, owner="java-1", counter=4)
    shards = (A, Shard("B", WHOLE, "1000"))
    first = look(handing, other, shards=shards)
    second = look(handing, replace(other, counter=5), shards=shards)

    found = diagnose(first, second, circumstances())

    assert [(f.kind, f.repair) for f in found] == [(Kind.CHECKPOINT_OWNER_LEFT, ())]
    assert "java-1 is alive" in found[0].advice


@pytest.mark.parametrize(
    ("claim", "row", "is_alive"),
    [
        ("an ended row that stood still says nothing", {"checkpoint": SHARD_END}, False),
        ("a lease that stood still for less than its failover", {"failover_s": 60.0}, True),
        ("a lease that stood still for its failover", {"failover_s": 5.0}, False),
    ],
)
def test_an_owner_is_alive_unless_its_rows_are_over_or_have_expired(claim, row, is_alive):
    lease = Lease(**{"key": "A", "checkpoint": AT_1500, "owner": "java-1", "counter": 4} | row)
    unowned = Lease(key="B", checkpoint=AT_1500)
    seen = look(lease, unowned, shards=(A, Shard("B", WHOLE, "1000")))

    findings = diagnose(seen, seen, circumstances())

    assert (Kind.NO_LIVE_OWNER not in kinds(findings)) is is_alive


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_parent_that_the_row_does_not_name_is_reported_even_if_its_own_row_is_unreadable(
    is_broken,
):
    parent = Lease(key="A", checkpoint=AT_1500, hash_range=WHOLE)
    child = Lease(key="B", checkpoint=TRIM_HORIZON, hash_range=WHOLE)
    shards = (replace(A, ending_sequence_number="1900"), Shard("B", WHOLE, "2000", None, "A"))
    rows = (child,) if is_broken else (parent, child)
    seen = look(*rows, shards=shards, broken={"A": "its checkpoint"} if is_broken else {})

    findings = diagnose(seen, seen, circumstances())

    reported = "the row names as parents: none; the service: A"
    assert [(f.keys, f.evidence) for f in findings if f.kind is Kind.PARENTS_WRONG] == [
        (("B",), reported)
    ]


def test_parents_that_the_service_does_not_name_are_reported():
    others = [Lease(key=key, checkpoint=AT_1500, hash_range=WHOLE) for key in "AC"]
    child = Lease(key="B", checkpoint=AT_1500, hash_range=WHOLE, parents=frozenset("CAZ"))
    shards = (A, replace(A, shard_id="C"), Shard("B", WHOLE, "2000"))
    seen = look(child, *others, shards=shards)

    (found,) = [f for f in diagnose(seen, seen, circumstances()) if f.kind is Kind.PARENTS_WRONG]
    over = look(
        Lease(key="B", checkpoint=AT_1500, hash_range=WHOLE, parents=frozenset("Z")), shards=shards
    )
    assert Kind.PARENTS_WRONG not in kinds(diagnose(over, over, circumstances()))

    assert found.evidence == "the row names as parents: A, C, Z; the service: none"


def test_a_repair_stops_at_the_write_that_does_not_apply_and_the_others_go_on():
    table = LeaseRows()
    shards = (A, Shard("B", WHOLE, "1000"))
    wrong = [
        Lease(key=key, checkpoint=AT_1500, counter=4, hash_range=HashRange(5, 6))
        for key in ("A", "B")
    ]
    for row in wrong:
        table.write(CreateLease(row))
    seen = look(*wrong, shards=shards)
    findings = diagnose(seen, seen, circumstances())
    table.write(Take("A", "kclrun:a:x:n", None, 4, 10.0, "TRIM_HORIZON"))
    table.write(Renew("A", "kclrun:a:x:n", 5))
    taken = table.raw("A")

    repaired = repair_all(table, to_repair(findings, accepted=()))

    assert [(m.finding.keys, m.applied, bool(m.problem)) for m in repaired] == [
        (("A",), 0, True),
        (("B",), 3, False),
    ]
    assert table.raw("A") == taken
    assert (table.read("B").owner, table.read("B").hash_range) == (None, WHOLE)


def test_each_write_of_a_repair_has_its_words():
    lost = Lease(
        key="A",
        checkpoint=AT_1500,
        owner="kclrun:a:x:n",
        counter=4,
        hash_range=HashRange(5, 6),
        taken_from="java",
    )
    found = diagnose(look(lost), look(lost), circumstances())

    words = [change_in_words(change) for finding in found for change in finding.repair]
    assert words == [
        "take A, if its owner and counter (4) are as seen",
        "remove takenFrom of A",
        "parents and range of A as the service lists them",
        "let A go: no owner, no hand-off, the same checkpoint",
    ]


def test_every_kind_says_what_it_means_to_the_records():
    assert all(kind.means for kind in Kind)
    assert {kind.gravity for kind in Kind} == set(Gravity)
    assert [kind.gravity for kind in Kind] == sorted(kind.gravity for kind in Kind)


def test_a_backup_is_for_its_owner_alone_and_never_overwrites(tmp_path):
    place = tmp_path / "rows.jsonl"
    items = ({"leaseKey": {"S": "A"}}, {"leaseKey": {"S": "B"}})

    write_backup(place, items)

    assert place.stat().st_mode & 0o777 == 0o600
    assert [msgspec.json.decode(line) for line in place.read_text().splitlines()] == list(items)
    with pytest.raises(SettingsError, match="File exists; nothing was changed"):
        write_backup(place, ())
    assert len(place.read_text().splitlines()) == 2
    for table in ("orders", "arn:aws:dynamodb:eu-west-1:123456789012:table/orders"):
        assert backup_name(table, 1772344800.0) == "orders-20260301T060000Z.jsonl"


def test_a_child_that_its_reader_created_before_a_listing_shows_it_is_no_orphan():
    child = Lease(key="B", checkpoint=TRIM_HORIZON, parents=frozenset({"A"}), hash_range=WHOLE)
    parent = Lease(key="A", checkpoint=AT_1500, hash_range=WHOLE)
    seen = look(parent, child)

    assert kinds(diagnose(seen, seen, circumstances())) == [Kind.NO_LIVE_OWNER]


def test_a_hole_in_one_of_several_streams_is_repaired_under_its_own_name():
    """C shows how far the parent of both was read."""
    shards = (Shard("B", WHOLE, "2000", None, "A"), Shard("C", WHOLE, "2000", None, "A"))
    listings = {
        stream: Listing(qualified_shards(stream, shards), 5.0, 0.0) for stream in (ORDERS, AUDITS)
    }
    leased = [f"{ORDERS}:B", f"{ORDERS}:C", f"{AUDITS}:C"]
    rows = tuple(Lease(key=key, checkpoint=TRIM_HORIZON) for key in leased)
    seen = Look(rows, listings)

    [hole] = [
        each
        for each in diagnose(seen, seen, circumstances(ORDERS, AUDITS))
        if each.gravity == Gravity.ERROR
    ]

    assert (hole.kind, hole.keys) == (Kind.HOLE, (f"{AUDITS}:B",))
    assert [change.lease.key for change in hole.repair] == [f"{AUDITS}:B"]


@pytest.mark.seconds
def test_the_work_grows_with_the_rows_and_no_faster():
    """Twice the rows cost about twice the calls: nothing is quadratic."""
    assert 1.5 < calls_for(2000) / calls_for(1000) < 2.6


def calls_for(count):
    """Function calls of one diagnosis of a table whose shards were all split once."""
    shards, rows = [], []
    for number in range(count):
        shards.append(Shard(f"p{number}", WHOLE, "1000", "1999"))
        shards.append(Shard(f"c{number}", WHOLE, "2000", None, f"p{number}"))
        rows.append(Lease(key=f"p{number}", checkpoint=AT_1500, owner="kclrun:a:dead:n"))
    seen = look(*rows, shards=shards)
    profile = cProfile.Profile()
    profile.enable()
    diagnose(seen, seen, circumstances())
    profile.disable()
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.parametrize(
    "key",
    ["1:orders:12345:A", "2:orders:10:A", "1:Orders:10:A"],
    ids=["creation", "account", "case"],
)
def test_rows_that_resemble_a_stream_of_ours_are_named_and_not_offered_for_deletion(key):
    ours = Lease(key=f"{ORDERS}:A", checkpoint=AT_1500)
    near = Lease(key=key, checkpoint=AT_1500)
    seen = look(ours, near, shards=(replace(A, shard_id=ours.key),), stream=ORDERS)

    found, *_ = diagnose(seen, seen, circumstances(ORDERS))

    assert (found.kind, found.keys, found.repair) == (Kind.OTHER_STREAM, (key,), ())
    assert "rders" in found.evidence


def test_the_only_position_of_a_shard_is_not_offered_for_deletion_under_a_key_of_the_other_kind():
    bare = Lease(key="A", checkpoint=AT_1500)
    seen = look(bare, shards=(replace(A, shard_id=f"{ORDERS}:A"),), stream=ORDERS)

    found = next(
        each for each in diagnose(seen, seen, circumstances(ORDERS)) if each.kind is Kind.MIXED_KEYS
    )

    assert (found.keys, found.repair) == (("A",), ())
