"""What a manager heals by itself is healed within the time that the doctor says."""

from functools import partial

import msgspec
import pytest

from kclrun.leases.shard_sync import Listing
from kclrun.model.lease import OFFERED, Handoff, Lease
from kclrun.model.sequence import LATEST, SHARD_END, TRIM_HORIZON
from kclrun.model.stream import ONLY_STREAM
from kclrun.operating.doctor.diagnosis import diagnose
from kclrun.operating.doctor.findings import Circumstances, Kind, Look, StreamFacts
from kclrun.protocol.writes import CreateLease
from kclrun.simulation.arrivals import Traffic
from kclrun.simulation.fleet import Fleet
from kclrun.simulation.record import FleetRecord
from kclrun.simulation.world import FleetSettings
from tests.support.tables import over_rows

FAILOVER_S = 10.0
GONE, JAVA = "kclrun:a:gone:n", "java-worker"


def fleet_of_four_shards():
    settings = FleetSettings(failover_s=FAILOVER_S, poll_s=1.0)
    traffic = Traffic(records_per_s=4.0)
    return Fleet(7, shards=4, traffic=traffic, settings=settings, observer_kind=FleetRecord)


def leases(fleet):
    """A healthy row of each listed shard."""
    return {
        shard.shard_id: Lease(
            key=shard.shard_id,
            checkpoint=TRIM_HORIZON,
            counter=7,
            parents=frozenset(shard.parents),
            hash_range=shard.hash_range,
        )
        for shard in fleet.stream.listing(fleet.scheduler.now)
    }


def first_with(fleet, **changes):
    rows = leases(fleet)
    key = min(rows)
    return rows | {key: msgspec.structs.replace(rows[key], **changes)}


def without_first(fleet):
    rows = leases(fleet)
    del rows[min(rows)]
    return rows


def split_first(fleet):
    """The first shard is closed. Returns: its row, as it was before, and those of the others."""
    rows = leases(fleet)
    fleet.split(min(rows))
    return rows[min(rows)], leases(fleet)


def ended_without_children(fleet):
    parent, rows = split_first(fleet)
    ended = msgspec.structs.replace(parent, checkpoint=SHARD_END)
    return {key: row for key, row in rows.items() if not row.parents} | {parent.key: ended}


def trimmed(fleet, **changes):
    parent, _ = split_first(fleet)
    fleet.run_for(60.0)
    assert fleet.expire(30.0) == 1
    return leases(fleet) | {parent.key: msgspec.structs.replace(parent, **changes)}


def found(fleet):
    """The kinds that the table shows now to a doctor that sees nothing move."""
    listing = Listing(fleet.stream.listing(fleet.scheduler.now), 1e9, 0.0)
    look = Look(tuple(fleet.table.leases()), {ONLY_STREAM: listing})
    known = Circumstances(
        me="kclrun:a:doctor:n",
        failover_s=FAILOVER_S,
        watched_s=41.0,
        now=1e9,
        streams={ONLY_STREAM: StreamFacts()},
    )
    return {finding.kind for finding in diagnose(look, look, known)}


CASES = {
    Kind.HOLE: without_first,
    Kind.CHILD_MISSING: ended_without_children,
    Kind.ORPHAN: trimmed,
    Kind.ORPHAN_ENDED: partial(trimmed, checkpoint=SHARD_END),
    Kind.STUCK_ASK: partial(first_with, owner=GONE, handoff=Handoff("kclrun:a:other:n", 1.0)),
    Kind.STUCK_OFFER: partial(
        first_with, owner=OFFERED, offered_by=GONE, offered_to="kclrun:a:other:n"
    ),
    Kind.CHECKPOINT_OWNER_LEFT: partial(first_with, checkpoint_owner=JAVA),
    Kind.LATEST_UNPINNED: partial(first_with, owner=JAVA, checkpoint=LATEST),
    Kind.OFFER_LEFT: partial(first_with, owner=JAVA, offered_by=GONE),
    Kind.TAKEN_FROM_LEFT: partial(first_with, owner=GONE, taken_from=JAVA),
}


@pytest.mark.seconds
@over_rows("kind", [kind for kind in Kind if kind.healing is not None])
def test_a_manager_heals_a_finding_within_the_time_that_the_doctor_says(kind):
    fleet = fleet_of_four_shards()
    for row in CASES[kind](fleet).values():
        fleet.table.write("another program", CreateLease(row), lambda outcome: None)
    fleet.run_for(1.0)
    assert kind in found(fleet)

    fleet.add_host("a", "only")
    fleet.run_for(kind.healing.within_s(FAILOVER_S, managers=1))

    assert kind not in found(fleet)


@pytest.mark.parametrize(
    ("kind", "within"),
    [
        (Kind.HOLE, "1 failover"),
        (Kind.STUCK_ASK, "4 failovers"),
        (Kind.STUCK_OFFER, "5 s"),
        (Kind.ORPHAN_ENDED, "2 failovers (or one a manager)"),
    ],
)
def test_the_longest_time_is_in_words_for_the_reference(kind, within):
    assert kind.healing.bound == within
