"""Broken lease tables, one a sentence (`doctor.yaml`): each is found, and repaired where it can be.

Every row that no repair names stays as it was, byte for byte, what we do not know of it included.
"""

from pathlib import Path

import yaml

from kclrun.aws.rows import encode_row
from kclrun.cli.doctor import look_of, repair_all
from kclrun.leases.shard_sync import Listing
from kclrun.local.lease_rows import LeaseRows
from kclrun.model.lease import OFFERED, Halt, Handoff, Lease, Pause, PendingCheckpoint
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.model.stream import ONLY_STREAM, qualified_shards
from kclrun.operating.doctor.diagnosis import diagnose
from kclrun.operating.doctor.findings import Circumstances, Kind, StreamFacts
from kclrun.operating.doctor.repairs import to_repair
from kclrun.protocol.writes import Applied, Renew, Take, keys_of
from tests.support.tables import over_rows

CORPUS = yaml.load((Path(__file__).parent / "doctor.yaml").read_text(), Loader=yaml.CSafeLoader)
NOW = 1_000_000.0
DOCTOR = "kclrun:a:doctor:n"


def who(name):
    if name is None or name.startswith("java"):
        return name
    return OFFERED if name == "offered" else f"kclrun:a:{name}:n"


def shards_of(row):
    named = [text.partition("<")[::2] for text in row["shards"].split()]
    closed = {parent for _, parents in named for parent in parents.split("+")}
    width = (HASH_KEY_MAX + 1) // len(named)
    return tuple(
        Shard(
            key,
            HashRange((place - 1) * width, place * width - 1),
            f"{place}000",
            f"{place}999" if key in closed else None,
            *(parents.split("+") if parents else ()),
        )
        for place, (key, parents) in enumerate(named, 1)
    )


def lease_of(key, fields, listing):
    shard = listing.graph.get(key)
    listed = shard.parents if shard is not None else ()
    owner, asked = who(fields.get("owner")), fields.get("asked")
    return Lease(
        key=key,
        checkpoint=ExtendedSequenceNumber(fields["at"]),
        counter=fields.get("counter", 7),
        owner=owner,
        owner_switches=fields.get("owner_switches", 0),
        parents=frozenset(fields.get("parents", listed)),
        children=frozenset(fields.get("children", ())),
        hash_range=HashRange(*fields["range"]) if "range" in fields else shard and shard.hash_range,
        checkpoint_owner=fields.get("checkpoint_owner"),
        pending=(
            PendingCheckpoint(ExtendedSequenceNumber(fields["pending"]))
            if "pending" in fields
            else None
        ),
        failover_s=fields.get("failover"),
        start=fields.get("start"),
        latest_pinned_at=fields.get("pinned"),
        halt=Halt("poison", fields["halted"]) if "halted" in fields else None,
        pause=Pause(fields["paused"], fields.get("until", 0.0)) if "paused" in fields else None,
        handoff=Handoff(who(asked), 5.0) if asked else None,
        offered_to=who(fields.get("to")),
        offered_by=who(fields.get("by")),
        taken_from=fields.get("taken_from"),
        stream_created_at=fields.get("created"),
    )


def table_of(row, listing, rows):
    table = LeaseRows()
    for key, fields in rows.items():
        if fields is not None:
            table.plant(encode_row(lease_of(key, fields, listing)) | {"of_others": {"S": "keep"}})
    for item in row.get("raw", {}).values():
        table.plant(item)
    return table


def items_of(table, keys):
    raw = ((key, table.raw(key)) for key in keys)
    return {key: item for key, item in raw if item is not None}


def streams_of(row):
    return row.get("streams", [ONLY_STREAM])


def circumstances(row):
    start = row.get("start", "TRIM_HORIZON")
    return Circumstances(
        me=DOCTOR,
        failover_s=10.0,
        watched_s=float(row.get("watched", 10)),
        now=NOW,
        streams=dict.fromkeys(
            streams_of(row),
            StreamFacts(ExtendedSequenceNumber(start), start, 86_400.0, row.get("created")),
        ),
    )


def examined(row, first, second, listing):
    listings = {
        stream: Listing(qualified_shards(stream, listing.shards), NOW, 0.0)
        for stream in streams_of(row)
    }
    looks = [look_of(tuple(items.values()), listings) for items in (first, second)]
    return diagnose(*looks, circumstances(row))


def reported(findings):
    return sorted(" ".join([finding.kind.value, *finding.keys]) for finding in findings)


def alive(row):
    return {who(name) for name in row.get("alive", "x").split()}


def before_their_renewals(items, owners):
    """The same rows as they were a renewal of these owners earlier."""
    return {
        key: item | {"leaseCounter": {"N": str(int(item["leaseCounter"]["N"]) - 1)}}
        if item.get("leaseOwner", {}).get("S") in owners
        else item
        for key, item in items.items()
    }


def take_what_is_free(table, keys):
    for key in keys:
        lease = table.read(key)
        if lease is not None and lease.owner is None:
            taken = table.write(Take(key, who("x"), None, lease.counter, 10.0, "TRIM_HORIZON"))
            assert isinstance(taken, Applied)
            assert isinstance(table.write(Renew(key, who("x"), lease.counter + 1)), Applied)


@over_rows("row", CORPUS)
def test_a_broken_table_is_found_and_repaired(row):
    listing = Listing(shards_of(row), NOW, 0.0)
    everybody = {*row["rows"], *row.get("raw", {}), *row.get("after", {})}
    table = table_of(row, listing, row["rows"])
    items = items_of(table, sorted(everybody))
    first = before_their_renewals(items, alive(row))
    changed = table_of(row, listing, row.get("first", {}))
    first |= {key: changed.raw(key) for key in row.get("first", {})}

    findings = examined(row, first, items, listing)

    accepts = set(row.get("accepts", []))
    repairable = to_repair(findings, accepted={each.split()[0] for each in accepts})
    expected_repairs = sorted([*row.get("repairs", []), *accepts])
    assert reported(to_repair(findings, accepted=())) == sorted(row.get("repairs", []))
    assert reported(repairable) == expected_repairs
    assert reported(f for f in findings if not f.repair) == sorted(row.get("tells", []))
    gravities = [finding.gravity for finding in findings]
    assert gravities == sorted(gravities)
    advices = "\n".join(finding.advice for finding in findings)
    assert [words for words in row.get("advises", []) if words not in advices] == []
    silent = [
        f
        for f in findings
        if (not f.repair or f.kind.needs_consent)
        and not f.advice
        and f.kind.value != "no-live-owner"
    ]
    assert silent == []

    repaired = repair_all(table, repairable)

    assert [each.problem for each in repaired] == [""] * len(expected_repairs)
    repaired_keys = {
        key for each in repaired for change in each.finding.repair for key in keys_of(change)
    }
    assert repaired_keys == row.get("after", {}).keys()
    for key in sorted(everybody - repaired_keys):
        assert table.raw(key) == items[key]
    for key, fields in row.get("after", {}).items():
        expected = None if fields is None else lease_of(key, fields, listing)
        assert table.read(key) == expected

    take_what_is_free(table, repaired_keys)
    later = items_of(table, sorted(everybody))
    left = examined(row, before_their_renewals(later, alive(row)), later, listing)
    assert reported(left) == sorted(row.get("left", row.get("tells", [])))


@over_rows("row", CORPUS)
def test_one_look_alone_is_no_finding(row):
    """The rows of the second look were not there at the first: a table being made or restored."""
    listing = Listing(shards_of(row), NOW, 0.0)
    table = table_of(row, listing, row["rows"])
    items = items_of(table, sorted({*row["rows"], *row.get("raw", {})}))

    findings = examined(row, {}, items, listing)

    between = {"hole", "child-missing", "orphan", "begun-early", "overlap", "parents-wrong"}
    stuck = {"stuck-ask", "stuck-offer", "offer-left", "taken-from-left", "checkpoint-owner-left"}
    assert [f.kind.value for f in findings if f.kind.value in between | stuck] == []


def test_the_corpus_has_thirty_tables_and_every_kind_but_two_notes():
    shown = {
        each.split()[0]
        for row in CORPUS
        for key in ("repairs", "accepts", "tells")
        for each in row.get(key, [])
    }

    assert len(CORPUS) >= 30
    missing = {kind.value for kind in Kind} - shown
    assert missing == {"resharding", "no-leases"}


def test_the_corpus_repairs_every_kind_that_is_said_to_be_repairable_and_no_other():
    repaired = {each.split()[0] for row in CORPUS for each in row.get("repairs", [])}
    accepted = {each.split()[0] for row in CORPUS for each in row.get("accepts", [])}

    assert repaired | accepted == {kind.value for kind in Kind if kind.is_repairable}
    assert accepted == {kind.value for kind in Kind if kind.needs_consent}


def test_every_kind_that_a_manager_heals_says_so_and_no_repair_is_made_for_it():
    told = {each.split()[0] for row in CORPUS for each in row.get("tells", [])}
    repaired = {each.split()[0] for row in CORPUS for each in row.get("repairs", [])}
    healed = {kind.value for kind in Kind if kind.healing is not None}

    assert healed <= told
    # A hole beside other children of its parent is repaired: a manager would read the parent again.
    assert repaired & healed == {"hole"}
